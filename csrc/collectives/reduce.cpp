// Chooses the kernels for this processor. The instruction sets that detect() asks for are those with which
// CMakeLists.txt (add_kernels) compiles reduce_kernels.cpp, once per namespace.
#include "collectives/reduce.h"

#if defined(PHALANX_X86_VARIANTS)
#include <cpuid.h>
#endif

#include <algorithm>
#include <cstring>
#include <vector>

namespace phalanx {

namespace baseline {
ReduceFn find(Dtype, ReduceOp);
SquaresFn find_squares(Dtype);
}
#if defined(PHALANX_X86_VARIANTS)
namespace v3 {
ReduceFn find(Dtype, ReduceOp);
SquaresFn find_squares(Dtype);
}
namespace v4 {
ReduceFn find(Dtype, ReduceOp);
SquaresFn find_squares(Dtype);
}
#endif

namespace {

enum class Level { kBaseline, kV3, kV4 };

#if defined(PHALANX_X86_VARIANTS)
/// Returns the highest x86-64 level that the processor offers and whose registers the system saves when it switches
/// tasks. __builtin_cpu_supports() is of no use here: it reads a table that the runtime library of zig, which builds
/// the wheels, leaves empty. Source: Intel's manual, CPUID and XGETBV; the x86-64 psABI, section 3.1.1.
Level detect() {
  constexpr unsigned kV3Leaf1 = bit_FMA | bit_MOVBE | bit_OSXSAVE | bit_AVX | bit_F16C;
  constexpr unsigned kV3Leaf7 = bit_BMI | bit_AVX2 | bit_BMI2;
  constexpr unsigned kV4Leaf7 = bit_AVX512F | bit_AVX512DQ | bit_AVX512CD | bit_AVX512BW | bit_AVX512VL;
  constexpr unsigned kSavesAvx = 0x6, kSavesAvx512 = 0xe6;  // bits of XCR0; AVX-512 adds masks and upper registers
  unsigned eax, ebx, ecx, edx, leaf7;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & kV3Leaf1) != kV3Leaf1) return Level::kBaseline;
  if (!__get_cpuid_count(7, 0, &eax, &leaf7, &ecx, &edx) || (leaf7 & kV3Leaf7) != kV3Leaf7) return Level::kBaseline;
  if (!__get_cpuid(0x80000001, &eax, &ebx, &ecx, &edx) || !(ecx & bit_LZCNT)) return Level::kBaseline;
  unsigned saved, upper;
  asm volatile("xgetbv" : "=a"(saved), "=d"(upper) : "c"(0));
  if ((saved & kSavesAvx) != kSavesAvx) return Level::kBaseline;
  return (leaf7 & kV4Leaf7) == kV4Leaf7 && (saved & kSavesAvx512) == kSavesAvx512 ? Level::kV4 : Level::kV3;
}
#else
Level detect() { return Level::kBaseline; }
#endif

Level level() {
  static const Level chosen = detect();
  return chosen;
}

}  // namespace

namespace {

struct Element {
  std::size_t bytes, alignment;
};

Element element_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kInt8: case Dtype::kUint8: case Dtype::kBool: return {1, 1};
    case Dtype::kFloat16: case Dtype::kBfloat16: case Dtype::kInt16: case Dtype::kUint16: return {2, 2};
    case Dtype::kFloat32: case Dtype::kInt32: case Dtype::kUint32: return {4, 4};
    case Dtype::kComplex64: return {8, 4};
    case Dtype::kComplex128: return {16, 8};
    default: return {8, 8};
  }
}

std::vector<std::max_align_t> aligned_room(std::size_t bytes) {
  return std::vector<std::max_align_t>((bytes + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t));
}

}  // namespace

void reduce_anywhere(ReduceFn reduce, Dtype dtype, void* dst, const void* const* srcs, int num_srcs, std::size_t count) {
  const Element element = element_of(dtype);
  auto addresses = reinterpret_cast<std::uintptr_t>(dst);
  for (int k = 0; k < num_srcs; ++k) addresses |= reinterpret_cast<std::uintptr_t>(srcs[k]);
  if (addresses % element.alignment == 0) return reduce(dst, srcs, num_srcs, count);
  constexpr std::size_t kBlock = 1024;  // elements
  auto room = aligned_room(static_cast<std::size_t>(num_srcs) * kBlock * element.bytes);
  auto* base = reinterpret_cast<std::byte*>(room.data());
  std::vector<const void*> copies(static_cast<std::size_t>(num_srcs));
  for (std::size_t at = 0; at < count; at += kBlock) {
    const std::size_t m = std::min(kBlock, count - at);
    for (std::size_t k = 0; k < copies.size(); ++k) {
      copies[k] = base + k * kBlock * element.bytes;
      std::memcpy(base + k * kBlock * element.bytes, static_cast<const std::byte*>(srcs[k]) + at * element.bytes,
                  m * element.bytes);
    }
    reduce(base, copies.data(), num_srcs, m);  // into the first copy: a kernel's output may be one of its inputs
    std::memcpy(static_cast<std::byte*>(dst) + at * element.bytes, base, m * element.bytes);
  }
}

double squares_anywhere(SquaresFn squares, Dtype dtype, const void* data, std::size_t count) {
  const Element element = element_of(dtype);
  if (count == 0 || reinterpret_cast<std::uintptr_t>(data) % element.alignment == 0) return squares(data, count);
  auto room = aligned_room(count * element.bytes);
  std::memcpy(room.data(), data, count * element.bytes);
  return squares(room.data(), count);
}

ReduceFn find_reduce(Dtype dtype, ReduceOp op) {
  switch (level()) {
#if defined(PHALANX_X86_VARIANTS)
    case Level::kV4: return v4::find(dtype, op);
    case Level::kV3: return v3::find(dtype, op);
#endif
    default: return baseline::find(dtype, op);
  }
}

SquaresFn find_squares(Dtype dtype) {
  switch (level()) {
#if defined(PHALANX_X86_VARIANTS)
    case Level::kV4: return v4::find_squares(dtype);
    case Level::kV3: return v3::find_squares(dtype);
#endif
    default: return baseline::find_squares(dtype);
  }
}

const char* simd_level() {
  switch (level()) {
    case Level::kV4: return "x86-64-v4";
    case Level::kV3: return "x86-64-v3";
    default: return "baseline";
  }
}

}  // namespace phalanx
