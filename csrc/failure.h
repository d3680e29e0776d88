// What can end a collective, with the facts that the message is made of.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

namespace phalanx {

/// Why a group ended. The number is stored in GroupHeader::verdict, so peers learn it too.
enum class FailureKind : std::uint32_t {
  kNone = 0,
  kMismatch = 1,    // ranks called different collectives
  kRankFailed = 2,  // a peer died or left
  kTimeout = 3,     // the deadline passed
  kAborted = 4,     // abort() was called, or a signal interrupted a rank in mid-operation
  kUnusable = 5,    // the group had ended before this call
  kNoMemory = 6,    // the segment cannot grow
  kSystem = 7,      // a rank was denied what it needs: a thread, a mapping
};

/// Thrown by the core; the bindings turn it into the Python exception of the same kind.
class Failure : public std::exception {
 public:
  Failure(FailureKind kind, std::string message, std::vector<int> ranks)
      : kind(kind), message(std::move(message)), ranks(std::move(ranks)) {}
  const char* what() const noexcept override { return message.c_str(); }

  FailureKind kind;
  std::string message;     // complete, for people
  std::vector<int> ranks;  // global ranks at fault: missing, dead or in disagreement
  std::string op;          // "all_reduce"
  std::uint64_t seq = 0;   // number of the collective in its group, from 1; 0 for point-to-point
  int pid = 0;             // of the dead rank
  int exit_code = -1;      // of the dead rank, -1 when unknown
  int signal = 0;          // that killed it, 0 when none or unknown
};

}  // namespace phalanx
