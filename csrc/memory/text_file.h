// Reads small kernel files (/proc, /sys, cgroups) in full, and finds numbers in them.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>

namespace phalanx {

/// Return the content of a file; empty if it can't be read.
///
/// Uses no C++ stream. In a process with two copies of libstdc++, the core's own and torch's, a stream of one copy may
/// get a facet of the other copy from the locale, and crash in that facet.
inline std::string read_text(const std::string& path) {
  std::string text;
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return text;
  char piece[4096];
  for (ssize_t num; (num = read(fd, piece, sizeof piece)) > 0;) text.append(piece, static_cast<std::size_t>(num));
  close(fd);
  return text;
}

/// Return the number after `name` in the first line that begins with `name`; with an empty name, the number at the
/// beginning of the text. Returns no value if no line begins with `name`.
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
