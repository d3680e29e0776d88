// The reduction kernels, one for each dtype and operation. Each kernel makes one pass over any number of inputs, in
// rank order, so the bits of the result do not depend on timing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace phalanx {

/// Codes shared with src/phalanx/backend/types.py. `kCopyOnly` and all higher codes stand for types whose elements are only moved,
/// without arithmetic.
enum class Dtype : std::uint8_t {
  kFloat32 = 0, kFloat64, kFloat16, kBfloat16, kInt8, kInt16, kInt32, kInt64,
  kUint8, kUint16, kUint32, kUint64, kBool, kComplex64, kComplex128, kCopyOnly,
};
enum class ReduceOp : std::uint8_t { kSum = 0, kAvg, kProduct, kMin, kMax, kBand, kBor, kBxor, kCount };

/// dst[i] = srcs[0][i] op srcs[1][i] op ...; AVG divides by `num_srcs`. `dst` may be exactly one of the inputs. 16-bit
/// floats are accumulated in float32, integers wrap on overflow, and averages of integers are truncated towards zero.
using ReduceFn = void (*)(void* dst, const void* const* srcs, int num_srcs, std::size_t count);

/// The kernel for this processor, or nullptr when the operation has no meaning for the dtype.
ReduceFn find_reduce(Dtype dtype, ReduceOp op);

/// Sum of the squares of `count` elements (of both parts of each, if complex). Floats of 16 and 32 bits are summed in
/// float32 within a block; the sums of blocks are added in float64. The order of additions depends on `count` alone.
using SquaresFn = double (*)(const void* data, std::size_t count);

/// The kernel for this processor, or nullptr for integers.
SquaresFn find_squares(Dtype dtype);

/// These two functions call a kernel for elements at any address. Kernels need aligned elements, but a tensor of torch
/// may have unaligned elements (torch.frombuffer with an offset).
void reduce_anywhere(ReduceFn reduce, Dtype dtype, void* dst, const void* const* srcs, int num_srcs, std::size_t count);
double squares_anywhere(SquaresFn squares, Dtype dtype, const void* data, std::size_t count);

/// The instruction set of the kernels in use: "baseline", "x86-64-v3" or "x86-64-v4".
const char* simd_level();

}  // namespace phalanx
