// Liveness of the processes of a job, and the CPUs that they may use.
//
// A process uses one pidfd for each process that it watches, whatever the number of groups that the two share, because
// descriptors are scarce. If a sandbox or an old kernel refuses pidfds, the watching process reads the state and the
// start time from /proc instead, and says so once. If the state of a process can't be learned, because /proc is
// unreadable or no descriptors are left, the process counts as alive. A rank that calls exec keeps its pid and its
// pidfd. Its peers notice the exec because /proc shows a new address for its stack.
//
// A pidfd reports a death only after the kernel has freed the memory of the process, which takes 10 to 60 ms for a
// training process. The threads of the process stop earlier, and their flags in /proc show it. Peers act on those
// flags, so a new group can form while the kernel still frees the memory.
//
// The exit status of a process is read from /proc until its parent has collected it, and from the pidfd after that
// (Linux 6.15 and newer). On older kernels, the status is lost once the parent has collected it, and the rank is
// reported as dead without a status.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "memory/layout.h"
#include "memory/segment.h"

namespace phalanx {

/// How a process ended, as far as processes other than its parent can learn.
struct Ending {
  int exit_code = -1;  // -1: unknown
  int signal = 0;
  bool is_replaced = false;  // the process is alive, but runs another program (exec)
};

/// Fill in the identity and the CPUs of the calling process.
void describe_self(Member& member);

/// Identity of a process. A field is zero if /proc does not show it.
struct Identity {
  int pid = 0;
  std::uint64_t start_time = 0;     // clock ticks since boot; reveals that a pid was reused
  std::uint64_t pid_namespace = 0;  // inode; a process in another namespace can't be watched
  static Identity own();
};

/// Watches one peer, on behalf of all groups of this process. Uses a pidfd, which a reused pid can't confuse, or /proc
/// where the kernel or a sandbox refuses pidfds. A peer whose state can't be learned counts as alive. A peer that calls
/// exec() counts as dead: it is recognized by the address of its new stack, which is random.
class PeerWatch {
 public:
  /// Start to watch the process, or return the existing watch. Returns null if `peer` is this process. Throws
  /// std::system_error if no descriptor can be opened.
  static std::shared_ptr<const PeerWatch> of(const Identity& peer);

  PeerWatch(const Identity& peer, Fd pidfd, int error);
  ~PeerWatch();
  /// True if the peer is dead. With many peers, only some calls read /proc. `told`: another rank reports that the peer
  /// is dead, so /proc is read in any case.
  bool dead(bool told = false) const;
  int pid() const { return peer_.pid; }
  /// How the peer ended; only meaningful once dead() is true.
  Ending ending() const;
  /// Why the peer's death may be noticed late or not at all; empty if the kernel reports it at once.
  std::string weakness() const;

 private:
  enum class Life { kAlive, kEnded, kReplaced, kUnknown };
  Life look_into_proc() const;

  Identity peer_;
  std::uint64_t stack_ = 0;  // address of the peer's stack; 0: this process may not see it
  // Both RELAXED: threads share a watch, and it does not matter which of them increments the count or sets the flag.
  mutable std::atomic<unsigned> num_looks_{0};
  mutable std::atomic<bool> is_replaced_{false};
  Fd pidfd_;
  int error_;  // errno of pidfd_open, such as ESRCH if the peer had ended before the watch began. 0: pidfd_ is open, or
               // the peer can't be watched, because it lives in another pid namespace.
};

/// True if every rank can have a CPU of its own, so that a spinning rank takes no CPU from a peer. This has two
/// conditions. The cgroup quota and all affinity masks together must allow `num_ranks` CPUs. And each mask must have a
/// CPU for every rank whose own mask lies within it.
bool cpus_suffice(const Member* members, std::size_t num_ranks);

}  // namespace phalanx
