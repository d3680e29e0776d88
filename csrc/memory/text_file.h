// Small files of the kernel, read at once.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <string>

namespace phalanx {

/// What a file holds; empty where it can't be read.
///
/// Not by a stream: where the core is linked with a libstdc++ of its own, beside torch's, a stream may ask a locale of the
/// other for a facet, and get another kind of facet, whose functions then crash.
inline std::string read_text(const std::string& path) {
  std::string text;
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return text;
  char piece[4096];
  for (ssize_t num; (num = read(fd, piece, sizeof piece)) > 0;) text.append(piece, static_cast<std::size_t>(num));
  close(fd);
  return text;
}

}  // namespace phalanx
