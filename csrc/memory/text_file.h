// Small files of the kernel, read whole, and numbers in them.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>

namespace phalanx {

/// The content of a file; empty if it can't be read.
///
/// No stream reads it: where the core is linked with its own libstdc++ beside torch's, a stream may ask the other's locale
/// for a facet and get one of another kind, whose functions then crash.
inline std::string read_text(const std::string& path) {
  std::string text;
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return text;
  char piece[4096];
  for (ssize_t num; (num = read(fd, piece, sizeof piece)) > 0;) text.append(piece, static_cast<std::size_t>(num));
  close(fd);
  return text;
}

/// The number behind `name` at the beginning of a line, or the first number for an empty name; nothing if it is missing.
inline std::optional<std::uint64_t> number_in(const std::string& text, std::string_view name = {}) {
  if (text.empty()) return {};
  std::size_t at = 0;
  while (text.compare(at, name.size(), name) != 0) {
    at = text.find('\n', at);
    if (at == std::string::npos) return {};
    ++at;
  }
  return std::strtoull(text.c_str() + at + name.size(), nullptr, 10);
}

}  // namespace phalanx
