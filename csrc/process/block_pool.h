// The block pool of a process: it keeps the large blocks that torch frees, as long as memory is plentiful.
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

/// A limit of memory, and the files in which the kernel tells how much of it is used.
struct Limit {
  std::uint64_t bytes = 0;
  std::string used;   // file of one number
  std::string stat;   // file of lines, each a name and a number
  std::string cache;  // name of the line with what can be dropped
};

struct BlockPoolState {
  bool keeps = false;  // false: not started, or stopped
  std::string why;     // it was stopped
  std::uint64_t resident = 0, unused = 0;  // bytes
};

/// Have large blocks of torch's tensors come from a pool and go back to it, until a limit comes near.
///
/// Returns false if this torch allocates in a way that is not known. Only the first call of a process counts.
bool start_block_pool(std::uint64_t reach, bool huge_pages, std::vector<Limit> limits);

BlockPoolState block_pool();

}  // namespace phalanx
