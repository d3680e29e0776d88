// Liveness of the processes of a job, and the CPUs that they may use.
//
// Each process watches another by one pidfd for all groups that they share, because descriptors are few. Where a
// sandbox or an old kernel gives no pidfd, /proc tells (state and start time), and the rank says so once. What can't
// be learned, because /proc is unreadable or descriptors have run out, is not taken for a death. On one host, a rank
// that calls exec keeps its pid and its pidfd; its peers notice by the place of its stack in /proc, which is new.
//
// How a process ended is told by /proc while it is a zombie, and by its pidfd afterwards (Linux 6.15 and newer). On
// older kernels, a rank whose exit status its parent has already collected is reported as dead without one.
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
  std::uint64_t start_time = 0;     // in clock ticks since boot: tells a reused pid apart
  std::uint64_t pid_namespace = 0;  // peers in another namespace can't be watched
  static Identity own();
};

/// Watches one process, for all groups of this one: by pidfd, which cannot be confused by a reused pid; through /proc
/// where the kernel or a sandbox gives none. What can't be learned is not taken for a death. exec() keeps the process
/// and gives it a new stack, whose place is random: the rank that it was has ended.
class PeerWatch {
 public:
  /// Begins to watch the process, or shares the watch that there is. None for this process.
  /// Throws std::system_error if this process has no descriptor left for it.
  static std::shared_ptr<const PeerWatch> of(const Identity& peer);

  PeerWatch(const Identity& peer, Fd pidfd, int error);
  bool dead() const;
  int pid() const { return peer_.pid; }
  /// How it ended; only meaningful once dead() is true.
  Ending ending() const;
  /// Why its death may be noticed late or not at all; empty if the kernel tells it at once.
  std::string weakness() const;

 private:
  enum class Life { kAlive, kEnded, kUnknown };
  Life look_into_proc() const;
  bool is_replaced() const;

  Identity peer_;
  std::uint64_t stack_ = 0;  // 0: this process may not know
  // RELAXED, both: threads share a watch, and any may be the one that looks.
  mutable std::atomic<unsigned> num_looks_{0};
  mutable std::atomic<bool> is_replaced_{false};
  Fd pidfd_;
  int error_;  // why there is no pidfd; 0: the peer's numbers mean nothing here
};

/// True if every rank can have a CPU of its own, so that spinning does not steal one from a peer: by affinity (ranks
/// whose CPUs lie within another's compete with it) and by cgroup quota.
bool cpus_suffice(const Member* members, std::size_t num_ranks);

}  // namespace phalanx
