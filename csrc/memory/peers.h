// Liveness of the processes of a job, and the CPUs that they may use.
//
// Each process watches another by one pidfd for all groups that they share, because descriptors are few. Where a
// sandbox or an old kernel gives no pidfd, /proc tells (state and start time), and the rank says so once. What can't
// be learned, because /proc is unreadable or descriptors have run out, is not taken for a death. On one host, a rank
// that calls exec keeps its pid and its pidfd; its peers notice by the place of its stack in /proc, which is new.
//
// A pidfd tells of a death once the kernel has freed the memory of the process, for which it takes 10 to 60 ms in a
// training. But its threads have run their last instruction before, as their flags in /proc show, and that is what peers
// wait for: a group is formed anew while the kernel still tidies up.
//
// How a process ended is read from /proc until its parent has collected the status, and from its pidfd afterwards (Linux
// 6.15 and newer). On older kernels, a rank is then reported as dead without a status.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "memory/layout.h"
#include "memory/segment.h"

namespace phalanx {

/// How a process ended, as far as the kernel tells those who are not its parent.
struct Ending {
  int exit_code = -1;  // -1: unknown
  int signal = 0;
  bool is_replaced = false;  // the process lives, and runs another program
};

/// Fill in the identity and the CPUs of the calling process.
void describe_self(Member& member);

/// Who a process is. A zero stands for what /proc did not tell.
struct Identity {
  int pid = 0;
  std::uint64_t start_time = 0;     // clock ticks since boot, by which a reused pid is noticed
  std::uint64_t pid_namespace = 0;  // inode; a process in another namespace can't be watched
  static Identity own();
};

/// Watches one peer, for all groups of this process: by a pidfd, which a reused pid can't confuse, or through /proc where
/// the kernel or a sandbox gives no pidfd. A peer of which nothing can be learned counts as alive. A peer that calls
/// exec() counts as dead: it has a new stack, at a random address.
class PeerWatch {
 public:
  /// Begins to watch the process, or shares an existing watch. Null if `peer` is this process.
  /// Throws std::system_error if no descriptor can be opened.
  static std::shared_ptr<const PeerWatch> of(const Identity& peer);

  PeerWatch(const Identity& peer, Fd pidfd, int error);
  ~PeerWatch();
  /// `told`: whether another rank has seen it dead, so that /proc is worth a look however many peers there are.
  bool dead(bool told = false) const;
  int pid() const { return peer_.pid; }
  /// How it ended; only meaningful once dead() is true.
  Ending ending() const;
  /// Why its death may be noticed late or not at all; empty if the kernel tells it at once.
  std::string weakness() const;

 private:
  enum class Life { kAlive, kEnded, kReplaced, kUnknown };
  Life look_into_proc() const;

  Identity peer_;
  std::uint64_t stack_ = 0;  // address of the peer's stack; 0: this process may not see it
  // Both RELAXED: threads share a watch, and it does not matter which of them counts or sets the flag.
  mutable std::atomic<unsigned> num_looks_{0};
  mutable std::atomic<bool> is_replaced_{false};
  Fd pidfd_;
  int error_;  // errno of pidfd_open, ESRCH: ended before the watch began; 0: there is a pidfd, or, without one, the peer
               // lives in another pid namespace and can't be watched
};

/// True if every rank can have a CPU of its own, so that spinning does not steal one from a peer: by affinity (ranks
/// whose CPUs lie within another's compete with it) and by cgroup quota.
bool cpus_suffice(const Member* members, std::size_t num_ranks);

}  // namespace phalanx
