#include "memory/digest.h"

#include <atomic>
#include <string_view>
#include <system_error>
#include <thread>

#include "collectives/reduce.h"

namespace phalanx {

namespace baseline {
void digest(const void* bytes, std::size_t size, std::uint64_t out[2]);
}
#if defined(PHALANX_X86_VARIANTS)
namespace v3 {
void digest(const void* bytes, std::size_t size, std::uint64_t out[2]);
}
namespace v4 {
void digest(const void* bytes, std::size_t size, std::uint64_t out[2]);
}
#endif

namespace {

auto* find_digest() {
#if defined(PHALANX_X86_VARIANTS)
  const std::string_view level = simd_level();
  if (level == "x86-64-v4") return v4::digest;
  if (level == "x86-64-v3") return v3::digest;
#endif
  return baseline::digest;
}

}  // namespace

std::vector<Digest> digests(std::span<const Bytes> pieces, int num_threads) {
  auto* const digest = find_digest();
  std::vector<Digest> found(pieces.size());
  // RELAXED: the counter only deals out the pieces; joining the threads publishes what they have written.
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < pieces.size();)
      digest(pieces[i].data(), pieces[i].size(), found[i].data());
  };
  std::vector<std::thread> helpers;
  try {
    for (int i = 1; i < num_threads && static_cast<std::size_t>(i) < pieces.size(); ++i) helpers.emplace_back(work);
  } catch (const std::system_error&) {  // no more threads can be started: the running ones do all the work
  }
  work();
  for (std::thread& helper : helpers) helper.join();
  return found;
}

}  // namespace phalanx
