// The shared memory of a job's ranks on one host: a memfd, how it is created, handed over and mapped.
//
// Groups that are made later live in the segment that their members already share. The memfd has no name in a file
// system, so nothing is left after a SIGKILL of all ranks, and the size of /dev/shm does not matter. Pages are
// allocated before they are used, so a shortage raises OutOfSharedMemory instead of SIGBUS. A group of n ranks uses
//
//     control    always                                           about 1 KiB x n + 8 x n^2
//     stages     always                                           128 KiB x n
//     mailboxes  after the first message above 64 KiB             384 KiB x n
//     channel    after the first message from one rank to another 264 KiB per pair and direction
//
// and releases all of it when its last rank leaves. For two ranks without channels, that is 1.0 MiB. Memory is
// allocated (fallocate) and freed (fallocate with PUNCH_HOLE) in whole regions; offsets are never reused. fallocate
// takes pages from the caller's NUMA node, so a rank on another node replaces the pages of its own stages and mailbox
// before it uses them. A channel is allocated by its sender, so its pages lie on the sender's node.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "memory/layout.h"

namespace phalanx {

/// A file descriptor that closes itself.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept;
  ~Fd();
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release();

 private:
  int fd_ = -1;
};

/// A mapped range of the segment; unmapped on destruction.
class Mapping {
 public:
  Mapping() = default;
  /// Throws std::runtime_error if the range does not lie in the file.
  Mapping(int fd, std::uint64_t offset, std::size_t bytes);
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();
  std::byte* data() const { return data_; }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// Return the NUMA node that this thread runs on and gets memory from; 0 if the system does not report it.
std::uint32_t current_node() noexcept;

/// The shared segment. The memfd is sealed against shrinking. Its memory is allocated before use, so a shortage throws
/// std::bad_alloc and never raises SIGBUS. The memfd has no name, so the kernel frees it once its last descriptor is
/// closed, however the ranks end.
class Segment {
 public:
  /// Create an empty segment with a fresh nonce.
  static std::shared_ptr<Segment> create();
  /// Receive the segment with `nonce` from the process that serves it on the abstract socket `name`.
  static std::shared_ptr<Segment> attach(const std::string& name, const std::string& nonce, double timeout_s,
                                         const std::function<void()>& on_tick);

  const std::string& nonce() const { return nonce_; }
  int fd() const { return fd_.get(); }

  /// Reserve `bytes` of zeroed memory and return their offset. Callable from every process that maps the segment.
  std::uint64_t allocate(std::size_t bytes);
  /// Move a range that nobody has used yet to this thread's NUMA node, by replacing its pages. `node` is the node on
  /// which the pages lie; if that is this thread's node, nothing happens. Throws std::bad_alloc if no memory is left.
  void bring_near(std::uint64_t offset, std::size_t bytes, std::uint32_t node);
  /// Return the memory behind a range to the system. The range's offsets are not used again.
  void free(std::uint64_t offset, std::size_t bytes) noexcept;
  Mapping map(std::uint64_t offset, std::size_t bytes) const { return Mapping(fd_.get(), offset, bytes); }

  /// Tell the other processes that a debugger holds this rank, until let_go() or the end of the process.
  void hold(int rank);
  void let_go();
  /// True while a debugger holds another process's rank.
  bool is_held() const noexcept;

 private:
  Segment(Fd fd, Mapping header, std::string nonce);
  SegmentHeader& header() const { return *reinterpret_cast<SegmentHeader*>(header_.data()); }

  Fd fd_;
  Fd hold_;  // locked while a debugger holds this process
  Mapping header_;
  std::string nonce_;
};

/// Hands the segment's descriptor to peers of the same user over an abstract socket with a random name.
class SegmentServer {
 public:
  explicit SegmentServer(std::shared_ptr<Segment> segment);
  const std::string& name() const { return name_; }
  /// Serve until `num_peers` processes have received the descriptor. Returns how many had received it by the deadline.
  int serve(int num_peers, double timeout_s, const std::function<void()>& on_tick);

 private:
  std::shared_ptr<Segment> segment_;
  Fd listener_;
  std::string name_;
};

}  // namespace phalanx
