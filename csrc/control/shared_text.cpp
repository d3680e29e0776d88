#include <algorithm>
#include <cstring>

#include "memory/layout.h"

namespace phalanx {

void SharedText::write(const std::string& value) {
  // An odd version means that the text is changing. The text lies in atomic machine words, so a reader that notices a
  // new version only has to read again.
  const std::uint64_t before = version.load(std::memory_order_relaxed);
  version.store(before + 1, std::memory_order_release);
  std::uint64_t fresh[kWords] = {};
  std::memcpy(fresh, value.data(), std::min(value.size(), sizeof fresh - 1));
  for (std::size_t i = 0; i < kWords; ++i) words[i].store(fresh[i], std::memory_order_release);
  version.store(before + 2, std::memory_order_release);
}

std::string SharedText::read() const {
  std::uint64_t copy[kWords];
  for (int attempt = 0; attempt < 100; ++attempt) {
    const std::uint64_t before = version.load(std::memory_order_acquire);
    for (std::size_t i = 0; i < kWords; ++i) copy[i] = words[i].load(std::memory_order_acquire);
    if (before % 2 == 0 && version.load(std::memory_order_acquire) == before) break;
  }
  const char* chars = reinterpret_cast<const char*>(copy);
  return std::string(chars, strnlen(chars, sizeof copy));
}

}  // namespace phalanx
