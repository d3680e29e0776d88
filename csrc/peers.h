// Liveness of the processes of a job, and the CPUs that they may use.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "layout.h"
#include "segment.h"

namespace phalanx {

/// How a process ended, as far as the kernel tells those who are not its parent.
struct Ending {
  int exit_code = -1;  // -1: unknown
  int signal = 0;
  std::string text() const;  // "was killed by signal 9 (SIGKILL)"
};

/// Fill in the identity and the CPUs of the calling process.
void describe_self(Member& member);

/// Watches one process by pidfd, which cannot be confused by a reused pid.
class PeerWatch {
 public:
  /// `member` must have joined. Watches nothing when the peer is this process or lives in another pid namespace.
  explicit PeerWatch(const Member& member);
  bool dead() const;
  int pid() const { return pid_; }
  /// How it ended; only meaningful once dead() is true.
  Ending ending() const;

 private:
  int pid_ = 0;
  bool gone_at_start_ = false;
  Fd pidfd_;
};

/// True if every rank can have a CPU of its own, so that spinning does not steal one from a peer: by affinity (ranks
/// whose CPUs lie within another's compete with it) and by cgroup quota.
bool cpus_suffice(const Member* members, std::size_t num_ranks);

}  // namespace phalanx
