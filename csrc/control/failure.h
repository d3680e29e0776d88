// A failure that ends a collective, as facts; backend/failures/wording.py turns them into sentences.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "control/call.h"

namespace phalanx {

/// Why a group ended. The number is stored in GroupHeader::group_failure, so peers learn the kind. A new kind also
/// needs a name in kind_name(), and entries under that name in src/phalanx/_errors and backend/failures/wording.py.
enum class FailureKind : std::uint32_t {
  kNone = 0,
  kCallsDiffer,     // ranks called different collectives
  kSizesDiffer,     // the sizes in the ranks' lists contradict each other
  kMessageDiffers,  // a receive does not fit the message that was sent
  kRankEnded,       // the culprit's process has ended
  kRankReplaced,    // the culprit's process runs another program now (exec)
  kRankLeft,        // the culprit left the group normally
  kRankFell,        // the culprit left the group because of an error, which `detail` names
  kRankFailed,      // a peer reports that the culprit failed, and no more is known
  kRankMissing,     // the deadline passed while this rank waited for the culprits
  kCameLate,        // a peer's deadline passed before this rank called
  kNoTurn,          // the deadline passed while another thread of this rank was inside a collective
  kAborted,         // abort(), for the reason in `detail`
  kInterrupted,     // a signal ended an operation
  kDestroyed,       // this rank left the group before the operation was done
  kUnusable,        // the group had ended before this call, because of `cause`; without a cause, this rank had left it
  kForked,          // the call was made in a forked child of the process that joined the group
  kNested,          // a signal handler called an operation; the handler had interrupted the operation named in `detail`
  kNestedWait,      // a signal handler waited for an operation; the handler had interrupted the one named in `detail`
  kNoMemory,        // the segment cannot grow by `size_bytes`
  kSystem,          // the system denied a rank what it needs, such as a thread or a mapping
};

/// A failure as peers read it in the control block: its kind, the culprit and the reporter, as ranks in the group.
struct GroupFailure {
  FailureKind kind;
  int subject, reporter;

  static constexpr int kRankBits = 24;
  static constexpr std::uint64_t kRankMask = (std::uint64_t{1} << kRankBits) - 1;
  std::uint64_t pack() const {
    return static_cast<std::uint64_t>(kind) << 2 * kRankBits | static_cast<std::uint64_t>(reporter) << kRankBits |
           static_cast<std::uint64_t>(subject);
  }
  static GroupFailure unpack(std::uint64_t packed) {
    return {static_cast<FailureKind>(packed >> 2 * kRankBits), static_cast<int>(packed & kRankMask),
            static_cast<int>(packed >> kRankBits & kRankMask)};
  }
};

/// The name of a kind in Python.
inline const char* kind_name(FailureKind kind) {
  static constexpr const char* kNames[] = {
      "none",       "calls_differ", "sizes_differ", "message_differs", "rank_ended",  "rank_replaced", "rank_left",
      "rank_fell",  "rank_failed",  "rank_missing", "came_late",       "no_turn",     "aborted",       "interrupted",
      "destroyed",  "unusable",     "forked",       "nested",          "nested_wait", "no_memory",     "system"};
  static_assert(std::size(kNames) == static_cast<std::size_t>(FailureKind::kSystem) + 1);
  return kNames[static_cast<std::size_t>(kind)];
}

/// The state of a rank that others wait for. A failure names ranks by their numbers in the world.
struct Standing {
  int rank = -1;
  int pid = 0;
  bool has_joined = false;
  std::string waits_in;  // "recv of group 'default' at train.py:31", in this group or another
  std::uint32_t last = 0;  // number of its last collective in this group
};

/// One of the ranks that wait for each other's messages in a circle.
struct Waiter {
  int rank = -1;
  int awaits = -1;    // the next rank of the circle
  std::string where;  // "recv of group 'default' at train.py:31"
};

/// The call of one rank: a row of the table that a mismatch shows.
struct MadeCall {
  int rank = -1;
  Call call{};  // kNone: the rank has not called yet
  std::string site;
  int root = -1;  // the root's rank in the world
  std::optional<std::int64_t> tag;
  std::optional<std::uint64_t> size_bytes;  // size of a message, if its count is not known
};

/// Two sizes that contradict each other. If `of` is -1, `rank` sends `count` elements but `other` expects
/// `other_count`. Otherwise, the lists of `rank` and `other` give different sizes for the block of rank `of`.
struct SizeDispute {
  int rank = -1;
  std::uint64_t count = 0;
  int other = -1;
  std::uint64_t other_count = 0;
  int of = -1;
};

/// Thrown by the core; the bindings turn it into the Python exception of its kind.
class Failure : public std::exception {
 public:
  const char* what() const noexcept override { return kind_name(kind); }

  FailureKind kind = FailureKind::kNone;
  int rank = -1;  // the rank that met the failure
  std::string group;
  std::string op;         // "all_reduce"
  std::uint64_t seq = 0;  // number of the collective in its group, from 1; 0 for point-to-point
  std::string site;       // "train.py:31"
  std::vector<int> ranks;  // ranks at fault: missing, dead or in disagreement
  int by = -1;             // the other rank that ended the group; -1: no other rank did
  int pid = 0;             // pid of the dead rank
  int exit_code = -1;      // exit code of the dead rank, -1 when unknown
  int signal = 0;          // signal that killed the dead rank, 0 when none or unknown
  std::vector<Standing> standings;
  std::vector<Waiter> circle;  // this rank first; empty: the ranks do not wait for each other in a circle
  std::vector<MadeCall> calls;
  std::optional<SizeDispute> sizes;
  double timeout_s = 0;
  std::uint64_t size_bytes = 0;  // size of the memory that could not be allocated
  int error = 0;                 // errno
  std::string detail;            // free text: the system's message, the reason given to abort()
  std::shared_ptr<const Failure> cause;
};

}  // namespace phalanx
