// Keeps the large blocks that torch frees, as long as there is room for them.
//
// Every process looks at the host and at each cgroup with a limit above it, version 1 or 2: before its pool grows by
// more than an eighth of what was left at the last look, and in a thread that wakes every 0.05 to 0.5 s, more often
// the less is left, because an idle rank may keep what another one needs. When less is left than an eighth of a limit,
// or than the process keeps (512 MiB at most), it gives everything back and leaves all further blocks to glibc. A
// limit or usage file that exists and can't be read counts as a limit that is near. memory.high counts like
// memory.max. The thread starts with the first large block.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace phalanx {

/// A limit of memory, and the files in which the kernel says what is used of it.
struct Limit {
  std::uint64_t bytes = 0;
  std::string used;   // a number
  std::string stat;   // lines of a name and a number
  std::string cache;  // the line with what can be dropped
};

/// What a process keeps, in bytes.
struct Kept {
  bool keeps = false;  // false: not begun, or ended
  std::string why;     // it has ended
  std::uint64_t resident = 0, unused = 0;
};

/// From now on large blocks of torch's tensors come from a pool, and go back to it, until a limit comes near.
///
/// Returns false where torch's library is not as it is known to be. Only the first call of a process counts.
bool keep_blocks(std::uint64_t reach, bool huge_pages, std::vector<Limit> limits);

Kept kept();

/// Give back every page that is kept now.
void trim_kept();

}  // namespace phalanx
