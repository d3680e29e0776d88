// dtype x operation kernels: one pass over any number of inputs, in rank order, so the bits do not depend on timing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace phalanx {

/// Codes shared with the Python side; `kCopyOnly` and above have no arithmetic here, only their size matters.
enum class Dtype : std::uint8_t {
  kFloat32 = 0, kFloat64, kFloat16, kBfloat16, kInt8, kInt16, kInt32, kInt64,
  kUint8, kUint16, kUint32, kUint64, kBool, kComplex64, kComplex128, kCopyOnly,
};
enum class ReduceOp : std::uint8_t { kSum = 0, kAvg, kProduct, kMin, kMax, kBand, kBor, kBxor, kCount };

/// dst[i] = srcs[0][i] op srcs[1][i] op ...; AVG divides by `num_srcs`. `dst` may be one of the inputs, whole.
/// Halves are accumulated in float32, small integers wrap, integer averages truncate towards zero.
using ReduceFn = void (*)(void* dst, const void* const* srcs, int num_srcs, std::size_t count);

/// The kernel for this processor, or nullptr when the operation has no meaning for the dtype.
ReduceFn find_reduce(Dtype dtype, ReduceOp op);

/// Sum of the squares of `count` elements (of both parts of a complex one), halves and floats summed in float32 by
/// blocks, those in float64. The order of additions depends on `count` alone.
using SquaresFn = double (*)(const void* data, std::size_t count);

/// The kernel for this processor, or nullptr for integers.
SquaresFn find_squares(Dtype dtype);

/// Call a kernel wherever the elements lie: torch can make tensors that are not aligned to theirs (torch.frombuffer with an
/// offset), which the kernels must not be given.
void reduce_anywhere(ReduceFn reduce, Dtype dtype, void* dst, const void* const* srcs, int num_srcs, std::size_t count);
double squares_anywhere(SquaresFn squares, Dtype dtype, const void* data, std::size_t count);

/// Instruction set that these chose: "baseline", "x86-64-v3" or "x86-64-v4".
const char* simd_level();

}  // namespace phalanx
