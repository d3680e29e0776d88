// The block pool of a process: it keeps the large blocks that torch frees, as long as memory is plentiful.
//
// Each process compares memory usage with the limits of the host and of every cgroup that contains the process (version
// 1 or 2). It does so before its pool grows by more than an eighth of the memory that was left at the last check. A
// thread does so regularly, too, because an idle rank may keep memory that another rank needs. The thread starts with
// the first large block and wakes every 0.05 to 0.5 s; the less memory is left, the more often. If less than an eighth
// of a limit is left, or less than the pool keeps (of which at most 512 MiB count), the pool gives back all its free
// memory and leaves all further blocks to glibc. Blocks that are still in use are given back when they are freed. A
// limit or usage file that exists but can't be read counts as a limit that is near. memory.high counts like memory.max.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace phalanx {

/// A memory limit, and the files in which the kernel reports how much of it is used.
struct Limit {
  std::uint64_t bytes = 0;
  std::string used;   // file with one number, the usage in bytes
  std::string stat;   // file whose lines hold a name and a number each
  std::string cache;  // name of the line in `stat` that counts cache, which the kernel can drop
};

struct BlockPoolState {
  bool keeps = false;  // false: the pool was not started, or has stopped
  std::string why;     // why it has stopped
  std::uint64_t resident = 0, unused = 0;  // bytes: all that are resident, and those that no tensor uses
};

/// Serve the large blocks of torch's CPU tensors from a pool, until a memory limit is near.
///
/// `reach`: bytes of address space to reserve. Returns false if this torch allocates in an unknown way. After the first
/// call that succeeds, further calls change nothing.
bool start_block_pool(std::uint64_t reach, bool huge_pages, std::vector<Limit> limits);

BlockPoolState block_pool();

}  // namespace phalanx
