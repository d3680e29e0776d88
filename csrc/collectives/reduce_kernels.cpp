// Compiled once per instruction set (see CMakeLists.txt), into the namespace that PHALANX_SIMD names. Only reductions
// and digests have variants (x86-64, v3, v4); at run time, the variant that fits the processor is chosen. All other
// code is compiled for the baseline only.
//
// Everything lives in an unnamed namespace and uses only builtin types. If this file used an inline function of a
// standard header, the linker would merge the copies of that function in all objects, and might keep the copy with the
// newest instructions, which older processors can't execute.
#include "collectives/reduce.h"

#if defined(__F16C__) && defined(__AVX2__)
#include <immintrin.h>
#endif

// If the output is one of the inputs, the two overlap exactly, element for element, so no iteration depends on another.
#if defined(__clang__)
#define PHALANX_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define PHALANX_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace phalanx::PHALANX_SIMD {
namespace {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = std::uint64_t;

template <class To, class From>
inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

// Storage types of the 16-bit floats; arithmetic happens in float.
struct bf16 { u16 raw; };
struct f16 { u16 raw; };

inline float widen(bf16 x) { return bits<float>(static_cast<u32>(x.raw) << 16); }
inline void narrow(float x, bf16& out) {
  const u32 b = bits<u32>(x);
  const u32 rounded = (b + 0x7fff + ((b >> 16) & 1)) >> 16;  // to nearest, ties to even
  out.raw = static_cast<u16>((b & 0x7fffffff) > 0x7f800000 ? (b >> 16) | 0x40 : rounded);
}

// Branch-free conversions of f16 for processors without F16C; exact for subnormals, infinities and NaN.
inline float widen(f16 x) {
  const u32 sign = static_cast<u32>(x.raw & 0x8000) << 16;
  const u32 magnitude = static_cast<u32>(x.raw & 0x7fff) << 13;
  const u32 exponent = magnitude & 0x0f800000;
  const u32 normal = magnitude + 0x38000000;                      // rebias 15 -> 127
  const u32 infinite = magnitude + 0x70000000;                    // keep an exponent of all ones
  const u32 small = bits<u32>(bits<float>(magnitude + 0x38800000) - bits<float>(0x38800000u));
  const u32 value = exponent == 0x0f800000 ? infinite : exponent == 0 ? small : normal;
  return bits<float>(value | sign);
}
inline void narrow(float x, f16& out) {
  const u32 b = bits<u32>(x);
  const u32 sign = (b >> 16) & 0x8000;
  const u32 a = b & 0x7fffffff;
  const u32 normal = (a - 0x38000000 + 0xfff + ((a >> 13) & 1)) >> 13;
  const u32 small = bits<u32>(bits<float>(a) + 0.5f) - 0x3f000000;  // adding 0.5 rounds to the last bit of a half
  const u32 finite = a < 0x38800000 ? small : normal;
  const u32 special = a > 0x7f800000 ? 0x7e00u | ((a >> 13) & 0x3ff) : 0x7c00u;  // NaN: quiet, as the hardware does
  out.raw = static_cast<u16>(sign | (a >= 0x47800000 ? special : finite));
}

template <class T> struct Complex { T re, im; };

/// Accumulator of a storage type: float for the 16-bit floats, otherwise the type itself.
template <class T> struct Wide { using type = T; };
template <> struct Wide<bf16> { using type = float; };
template <> struct Wide<f16> { using type = float; };
template <class T> using wide_t = typename Wide<T>::type;

template <class T> inline T load(T x) { return x; }
inline float load(bf16 x) { return widen(x); }
inline float load(f16 x) { return widen(x); }
template <class T> inline void store(T x, T& out) { out = x; }
inline void store(float x, bf16& out) { narrow(x, out); }
inline void store(float x, f16& out) { narrow(x, out); }

/// Forces the rounding of a product before it is added: GCC 12 vectorizes complex products with fused multiply-adds,
/// even under -ffp-contract=off.
template <class T> inline T rounded(T x) {
#if defined(__x86_64__)
  asm("" : "+x"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
  return x;
}

template <class T> inline constexpr bool is_integer = false;
template <> inline constexpr bool is_integer<signed char> = true;
template <> inline constexpr bool is_integer<short> = true;
template <> inline constexpr bool is_integer<int> = true;
template <> inline constexpr bool is_integer<std::int64_t> = true;
template <> inline constexpr bool is_integer<u8> = true;
template <> inline constexpr bool is_integer<u16> = true;
template <> inline constexpr bool is_integer<u32> = true;
template <> inline constexpr bool is_integer<u64> = true;
template <class T> struct Unsigned { using type = T; };
template <> struct Unsigned<signed char> { using type = u8; };
template <> struct Unsigned<short> { using type = u16; };
template <> struct Unsigned<int> { using type = u32; };
template <> struct Unsigned<std::int64_t> { using type = u64; };

// Signed overflow is undefined in C++ but wraps in torch: compute in unsigned.
struct Sum {
  template <class T> static T apply(T a, T b) {
    if constexpr (is_integer<T>) {
      using U = typename Unsigned<T>::type;
      return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
    } else {
      return a + b;
    }
  }
  template <class T> static Complex<T> apply(Complex<T> a, Complex<T> b) { return {a.re + b.re, a.im + b.im}; }
};
struct Product {
  template <class T> static T apply(T a, T b) {
    if constexpr (is_integer<T>) {
      // u64: two u16 would be promoted to int, and their product might overflow an int.
      return static_cast<T>(static_cast<u64>(a) * static_cast<u64>(b));
    } else {
      return a * b;
    }
  }
  template <class T> static Complex<T> apply(Complex<T> a, Complex<T> b) {
    return {rounded(a.re * b.re) - rounded(a.im * b.im), rounded(a.re * b.im) + rounded(a.im * b.re)};
  }
};
// If either operand is NaN, so is the result, as in torch.minimum and torch.maximum.
struct Min {
  template <class T> static T apply(T a, T b) { return (a < b || a != a) ? a : b; }
};
struct Max {
  template <class T> static T apply(T a, T b) { return (a > b || a != a) ? a : b; }
};
struct And { template <class T> static T apply(T a, T b) { return static_cast<T>(a & b); } };
struct Or { template <class T> static T apply(T a, T b) { return static_cast<T>(a | b); } };
struct Xor { template <class T> static T apply(T a, T b) { return static_cast<T>(a ^ b); } };

// Steps that turn the accumulated value into the result, after the last input.
struct Keep {
  explicit Keep(int) {}
  template <class T> T operator()(T x) const { return x; }
};
template <class T> struct Divide {
  T by;
  explicit Divide(int n) : by(static_cast<T>(n)) {}
  T operator()(T x) const { return x / by; }
};
// Dividing by a power of two and multiplying by its inverse give the same bits; the product is faster.
template <class T> struct Scale {
  T by;
  explicit Scale(int n) : by(T(1) / static_cast<T>(n)) {}
  T operator()(T x) const { return x * by; }
};
template <class T, template <class> class Step> struct OnParts {
  Step<T> step;
  explicit OnParts(int n) : step(n) {}
  Complex<T> operator()(Complex<T> x) const { return {step(x.re), step(x.im)}; }
};

constexpr std::size_t kBlock = 1024;  // elements accumulated at a time: few enough to stay in the first-level cache

template <class T, class Wide>
inline void load_block(Wide* acc, const T* src, std::size_t m) {
  for (std::size_t i = 0; i < m; ++i) acc[i] = load(src[i]);
}
template <class OpT, class T, class Wide>
inline void add_block(Wide* acc, const T* src, std::size_t m) {
  for (std::size_t i = 0; i < m; ++i) acc[i] = OpT::apply(acc[i], static_cast<Wide>(load(src[i])));
}
template <class T, class Wide, class Finish>
inline void store_block(T* dst, const Wide* acc, std::size_t m, const Finish& finish) {
  for (std::size_t i = 0; i < m; ++i) store(finish(acc[i]), dst[i]);
}

#if defined(__F16C__) && defined(__AVX2__)
// The hardware's conversion is faster than the code that GCC makes of the bit tricks above.
inline void load_block(float* acc, const f16* src, std::size_t m) {
  std::size_t i = 0;
  for (; i + 8 <= m; i += 8)
    _mm256_storeu_ps(acc + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i))));
  for (; i < m; ++i) acc[i] = widen(src[i]);
}
template <class Finish>
inline void store_block(f16* dst, const float* acc, std::size_t m, const Finish& finish) {
  std::size_t i = 0;
  for (; i + 8 <= m; i += 8) {
    float out[8];
    for (int k = 0; k < 8; ++k) out[k] = finish(acc[i + k]);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(out), _MM_FROUND_TO_NEAREST_INT));
  }
  for (; i < m; ++i) narrow(finish(acc[i]), dst[i]);
}
template <class OpT>
inline void add_block(float* acc, const f16* src, std::size_t m) {
  float tmp[kBlock];
  load_block(tmp, src, m);
  for (std::size_t i = 0; i < m; ++i) acc[i] = OpT::apply(acc[i], tmp[i]);
}
#endif

/// Reduces two inputs of a type that is its own accumulator: the usual case, which needs no block of accumulators.
template <class T, class OpT, class Finish>
void reduce_pair(T* dst, const T* a, const T* b, std::size_t count, const Finish& finish) {
  PHALANX_INDEPENDENT
  for (std::size_t i = 0; i < count; ++i) dst[i] = finish(OpT::apply(a[i], b[i]));
}

template <class T, class OpT, class Finish>
void reduce_block(T* dst, const T* const* srcs, int n, std::size_t at, std::size_t m, const Finish& finish) {
  wide_t<T> acc[kBlock];
  load_block(acc, srcs[0] + at, m);
  for (int k = 1; k < n; ++k) {
    if constexpr (__is_same(T, f16)) {
      add_block<OpT>(acc, srcs[k] + at, m);
    } else {
      add_block<OpT, T>(acc, srcs[k] + at, m);
    }
  }
  store_block(dst + at, acc, m, finish);
}

template <class T, class OpT, class Finish>
void reduce_all(void* dst_raw, const void* const* srcs_raw, int n, std::size_t count, const Finish& finish) {
  T* dst = static_cast<T*>(dst_raw);
  const T* const* srcs = reinterpret_cast<const T* const*>(srcs_raw);
  if constexpr (__is_same(T, wide_t<T>)) {
    if (n == 2) return reduce_pair<T, OpT>(dst, srcs[0], srcs[1], count, finish);
  }
  for (std::size_t at = 0; at < count; at += kBlock)
    reduce_block<T, OpT>(dst, srcs, n, at, count - at < kBlock ? count - at : kBlock, finish);
}

template <class T, class OpT>
void plain(void* dst, const void* const* srcs, int n, std::size_t count) {
  reduce_all<T, OpT>(dst, srcs, n, count, Keep(n));
}
template <class T>
void average(void* dst, const void* const* srcs, int n, std::size_t count) {
  if ((n & (n - 1)) == 0)
    reduce_all<T, Sum>(dst, srcs, n, count, Scale<wide_t<T>>(n));
  else
    reduce_all<T, Sum>(dst, srcs, n, count, Divide<wide_t<T>>(n));
}
template <class T>
void average_complex(void* dst, const void* const* srcs, int n, std::size_t count) {
  reduce_all<Complex<T>, Sum>(dst, srcs, n, count, OnParts<T, Divide>(n));
}
template <bool Signed> struct Widest { using type = std::int64_t; using twice = __int128; };
template <> struct Widest<false> { using type = u64; using twice = unsigned __int128; };
/// The exact average, truncated towards zero. Integers are summed in 64 bits, and again in 128 bits if the sum
/// overflows.
template <class T>
void average_integer(void* dst_raw, const void* const* srcs, int n, std::size_t count) {
  T* dst = static_cast<T*>(dst_raw);
  using Acc = typename Widest<(T(-1) < T(0))>::type;
  using Twice = typename Widest<(T(-1) < T(0))>::twice;
  PHALANX_INDEPENDENT
  for (std::size_t i = 0; i < count; ++i) {
    Acc sum = 0;
    bool overflows = false;
    for (int k = 0; k < n; ++k)
      overflows |= __builtin_add_overflow(sum, static_cast<Acc>(static_cast<const T*>(srcs[k])[i]), &sum);
    if (!overflows) {
      dst[i] = static_cast<T>(sum / static_cast<Acc>(n));
      continue;
    }
    Twice exact = 0;
    for (int k = 0; k < n; ++k) exact += static_cast<const T*>(srcs[k])[i];
    dst[i] = static_cast<T>(exact / n);
  }
}
/// Any non-zero byte is true; results are 0 or 1.
template <class OpT>
void logical(void* dst_raw, const void* const* srcs, int n, std::size_t count) {
  u8* dst = static_cast<u8*>(dst_raw);
  PHALANX_INDEPENDENT
  for (std::size_t i = 0; i < count; ++i) {
    u8 acc = static_cast<const u8*>(srcs[0])[i] != 0;
    for (int k = 1; k < n; ++k) acc = OpT::apply(acc, static_cast<u8>(static_cast<const u8*>(srcs[k])[i] != 0));
    dst[i] = acc;
  }
}

template <class T>
ReduceFn ordered(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return plain<T, Sum>;
    case ReduceOp::kProduct: return plain<T, Product>;
    case ReduceOp::kMin: return plain<T, Min>;
    case ReduceOp::kMax: return plain<T, Max>;
    default: return nullptr;
  }
}
// bf16 and f16 have no operators of their own: the operation runs on their accumulators.
template <class T>
ReduceFn floating(ReduceOp op) {
  return op == ReduceOp::kAvg ? average<T> : ordered<T>(op);
}
template <class T>
ReduceFn integer(ReduceOp op) {
  switch (op) {
    case ReduceOp::kAvg: return average_integer<T>;
    case ReduceOp::kBand: return plain<T, And>;
    case ReduceOp::kBor: return plain<T, Or>;
    case ReduceOp::kBxor: return plain<T, Xor>;
    default: return ordered<T>(op);
  }
}
template <class T>
ReduceFn complex(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return plain<Complex<T>, Sum>;
    case ReduceOp::kAvg: return average_complex<T>;
    case ReduceOp::kProduct: return plain<Complex<T>, Product>;
    default: return nullptr;
  }
}
ReduceFn boolean(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: case ReduceOp::kMax: case ReduceOp::kBor: return logical<Or>;
    case ReduceOp::kProduct: case ReduceOp::kMin: case ReduceOp::kBand: return logical<And>;
    case ReduceOp::kBxor: return logical<Xor>;
    default: return nullptr;
  }
}

/// Keeps sixteen running sums, which the compiler can map to vector registers. The order of additions is fixed, so all
/// ranks get the same bits.
template <class T>
double squares(const void* raw, std::size_t count) {
  constexpr std::size_t kLanes = 16;
  const T* data = static_cast<const T*>(raw);
  double total = 0;
  wide_t<T> acc[kBlock];
  for (std::size_t at = 0; at < count; at += kBlock) {
    const std::size_t m = count - at < kBlock ? count - at : kBlock;
    load_block(acc, data + at, m);
    wide_t<T> lanes[kLanes] = {};
    std::size_t i = 0;
    for (; i + kLanes <= m; i += kLanes)
      for (std::size_t k = 0; k < kLanes; ++k) lanes[k] += acc[i + k] * acc[i + k];
    for (; i < m; ++i) lanes[i % kLanes] += acc[i] * acc[i];
    for (std::size_t k = 0; k < kLanes; ++k) total += static_cast<double>(lanes[k]);
  }
  return total;
}
template <class T>
double squares_complex(const void* data, std::size_t count) { return squares<T>(data, 2 * count); }

}  // namespace

SquaresFn find_squares(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32: return squares<float>;
    case Dtype::kFloat64: return squares<double>;
    case Dtype::kFloat16: return squares<f16>;
    case Dtype::kBfloat16: return squares<bf16>;
    case Dtype::kComplex64: return squares_complex<float>;
    case Dtype::kComplex128: return squares_complex<double>;
    default: return nullptr;
  }
}

ReduceFn find(Dtype dtype, ReduceOp op) {
  switch (dtype) {
    case Dtype::kFloat32: return floating<float>(op);
    case Dtype::kFloat64: return floating<double>(op);
    case Dtype::kFloat16: return floating<f16>(op);
    case Dtype::kBfloat16: return floating<bf16>(op);
    case Dtype::kInt8: return integer<signed char>(op);
    case Dtype::kInt16: return integer<short>(op);
    case Dtype::kInt32: return integer<int>(op);
    case Dtype::kInt64: return integer<std::int64_t>(op);
    case Dtype::kUint8: return integer<u8>(op);
    case Dtype::kUint16: return integer<u16>(op);
    case Dtype::kUint32: return integer<u32>(op);
    case Dtype::kUint64: return integer<u64>(op);
    case Dtype::kBool: return boolean(op);
    case Dtype::kComplex64: return complex<float>(op);
    case Dtype::kComplex128: return complex<double>(op);
    default: return nullptr;
  }
}

}  // namespace phalanx::PHALANX_SIMD
