// A rank's call: the operation, and everything that the ranks of a collective must agree on.
#pragma once

#include <cstddef>
#include <cstdint>

namespace phalanx {

enum class Op : std::uint8_t {
  kNone = 0, kJoin, kBarrier, kBroadcast, kAllReduce, kReduce, kReduceScatter, kAllGather, kGather, kScatter,
  kAllToAll, kSend, kRecv, kPut, kMap, kSignal, kWaitSignal,
};

/// The name by which Python knows the operation; empty for kNone.
inline const char* op_name(Op op) {
  static constexpr const char* kNames[] = {"", "join", "barrier", "broadcast", "all_reduce", "reduce",
                                           "reduce_scatter", "all_gather", "gather", "scatter", "all_to_all",
                                           "send", "recv", "put", "map_remote_tensor", "signal", "wait_signal"};
  return kNames[static_cast<std::size_t>(op)];
}

/// The facts on which all ranks of a collective must agree. A rank publishes these facts in its Line, which its peers
/// wait for.
struct Call {
  Op op = Op::kNone;
  std::uint8_t dtype = 0;      // index into Python's list of dtypes' names
  std::uint8_t reduce_op = 0;  // 0: none, else ReduceOp + 1
  std::uint8_t flags = 0;      // bit 0: each block has a count of its own; `count` is 0
  std::uint64_t count = 0;     // elements in each rank's block
  std::int32_t root = -1;      // rank in the group, -1: none

  static constexpr int kCountBits = 48;  // detail() holds the count in its low 48 bits and root + 1 above them
  std::uint32_t what() const {
    return static_cast<std::uint32_t>(op) | static_cast<std::uint32_t>(dtype) << 8 |
           static_cast<std::uint32_t>(reduce_op) << 16 | static_cast<std::uint32_t>(flags) << 24;
  }
  std::uint64_t detail() const {
    return (count & ((std::uint64_t{1} << kCountBits) - 1)) | static_cast<std::uint64_t>(root + 1) << kCountBits;
  }
  static Call unpack(std::uint32_t what, std::uint64_t detail) {
    Call call;
    call.op = static_cast<Op>(what & 0xff);
    call.dtype = static_cast<std::uint8_t>(what >> 8);
    call.reduce_op = static_cast<std::uint8_t>(what >> 16);
    call.flags = static_cast<std::uint8_t>(what >> 24);
    call.count = detail & ((std::uint64_t{1} << kCountBits) - 1);
    call.root = static_cast<std::int32_t>(detail >> kCountBits) - 1;
    return call;
  }
};

}  // namespace phalanx
