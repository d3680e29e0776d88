// A slow and simple reference for every dtype and reduce operation. It shares no code with the kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <type_traits>
#include <vector>

#include "collectives/reduce.h"

namespace phalanx::tests {

/// A 16-bit float whose fraction has `kMantissaBits` bits.
template <int kMantissaBits>
struct Short {
  static constexpr int kMantissa = kMantissaBits;
  static constexpr int kBias = (1 << (14 - kMantissa)) - 1;
  static constexpr unsigned kQuiet = 1u << (kMantissa - 1);
  std::uint16_t raw;
};
using Half = Short<10>;
using Bfloat = Short<7>;
struct Bool { std::uint8_t raw; };

template <class T> inline constexpr bool is_short = false;
template <int M> inline constexpr bool is_short<Short<M>> = true;
template <class T> inline constexpr bool is_complex = false;
template <class T> inline constexpr bool is_complex<std::complex<T>> = true;

template <int M>
float widen(Short<M> x) {
  const int sign = x.raw >> 15, exponent = (x.raw & 0x7fff) >> M, mantissa = x.raw & ((1 << M) - 1);
  double value;
  if (exponent == 2 * Short<M>::kBias + 1)
    value = mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  else
    value = std::ldexp(mantissa + (exponent == 0 ? 0 : 1 << M), std::max(exponent, 1) - Short<M>::kBias - M);
  return static_cast<float>(sign ? -value : value);
}

/// Rounds to nearest, ties to even.
template <class T>
T round_to(float x) {
  constexpr int M = T::kMantissa, kBias = T::kBias;
  constexpr int kInfinite = 2 * kBias + 1;
  const unsigned sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return {static_cast<std::uint16_t>(sign | kInfinite << M | T::kQuiet)};
  if (x == 0) return {static_cast<std::uint16_t>(sign)};
  if (std::isinf(x)) return {static_cast<std::uint16_t>(sign | kInfinite << M)};
  const double magnitude = std::fabs(static_cast<double>(x));
  const int exponent = std::max(std::ilogb(magnitude), 1 - kBias);
  const auto steps = static_cast<unsigned>(std::nearbyint(std::ldexp(magnitude, M - exponent)));
  // `steps` is the mantissa in units of the last place. Adding it to the exponent's bits carries an overflow into them.
  const unsigned encoded = static_cast<unsigned>(exponent + kBias - 1) * (1u << M) + steps;
  return {static_cast<std::uint16_t>(sign | std::min(encoded, static_cast<unsigned>(kInfinite) << M))};
}

template <class T>
bool has_meaning(ReduceOp op) {
  const bool bitwise = op == ReduceOp::kBand || op == ReduceOp::kBor || op == ReduceOp::kBxor;
  if constexpr (std::is_same_v<T, Bool>) return op != ReduceOp::kAvg;
  if constexpr (std::is_integral_v<T>) return true;
  if constexpr (is_complex<T>) return op == ReduceOp::kSum || op == ReduceOp::kAvg || op == ReduceOp::kProduct;
  return !bitwise;
}

/// One step in real arithmetic of type `F`.
template <class F>
F combine_real(ReduceOp op, F a, F b) {
  switch (op) {
    case ReduceOp::kProduct: return a * b;
    case ReduceOp::kMin: return std::isnan(a) || std::isnan(b) ? std::numeric_limits<F>::quiet_NaN() : std::min(a, b);
    case ReduceOp::kMax: return std::isnan(a) || std::isnan(b) ? std::numeric_limits<F>::quiet_NaN() : std::max(a, b);
    default: return a + b;
  }
}

template <class T>
T combine_integer(ReduceOp op, T a, T b) {
  // Arithmetic modulo 2^64 has the same low bits as the narrow type, which wraps.
  const auto x = static_cast<std::uint64_t>(a), y = static_cast<std::uint64_t>(b);
  switch (op) {
    case ReduceOp::kProduct: return static_cast<T>(x * y);
    case ReduceOp::kMin: return std::min(a, b);
    case ReduceOp::kMax: return std::max(a, b);
    case ReduceOp::kBand: return static_cast<T>(x & y);
    case ReduceOp::kBor: return static_cast<T>(x | y);
    case ReduceOp::kBxor: return static_cast<T>(x ^ y);
    default: return static_cast<T>(x + y);
  }
}

/// Element `i` of the reduction of all `srcs`, in their order.
template <class T>
T reference(ReduceOp op, const std::vector<std::vector<T>>& srcs, std::size_t i) {
  const auto n = static_cast<int>(srcs.size());
  if constexpr (is_short<T>) {
    float acc = widen(srcs[0][i]);
    for (int k = 1; k < n; ++k) acc = combine_real(op, acc, widen(srcs[k][i]));
    return round_to<T>(op == ReduceOp::kAvg ? acc / static_cast<float>(n) : acc);
  } else if constexpr (std::is_floating_point_v<T>) {
    T acc = srcs[0][i];
    for (int k = 1; k < n; ++k) acc = combine_real(op, acc, srcs[k][i]);
    return op == ReduceOp::kAvg ? acc / static_cast<T>(n) : acc;
  } else if constexpr (is_complex<T>) {
    auto re = srcs[0][i].real(), im = srcs[0][i].imag();
    for (int k = 1; k < n; ++k) {
      const auto c = srcs[k][i].real(), d = srcs[k][i].imag();
      const auto a = re, b = im;
      re = op == ReduceOp::kProduct ? a * c - b * d : a + c;
      im = op == ReduceOp::kProduct ? a * d + b * c : b + d;
    }
    const auto by = static_cast<decltype(re)>(op == ReduceOp::kAvg ? n : 1);
    return {re / by, im / by};
  } else if constexpr (std::is_same_v<T, Bool>) {
    int num_true = 0;
    for (int k = 0; k < n; ++k) num_true += srcs[k][i].raw != 0;
    const bool all = op == ReduceOp::kProduct || op == ReduceOp::kMin || op == ReduceOp::kBand;
    return {static_cast<std::uint8_t>(op == ReduceOp::kBxor ? num_true % 2 : all ? num_true == n : num_true > 0)};
  } else {
    if (op == ReduceOp::kAvg) {
      using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
      Wide sum = 0;
      for (int k = 0; k < n; ++k) sum += srcs[k][i];
      return static_cast<T>(sum / static_cast<Wide>(n));
    }
    T acc = srcs[0][i];
    for (int k = 1; k < n; ++k) acc = combine_integer(op, acc, srcs[k][i]);
    return acc;
  }
}

/// Whether two values are equal; all NaNs count as equal.
template <class T>
bool same_value(T a, T b) {
  if constexpr (is_short<T>) {
    return a.raw == b.raw || (std::isnan(widen(a)) && std::isnan(widen(b)));
  } else if constexpr (std::is_same_v<T, Bool>) {
    return a.raw == b.raw;
  } else if constexpr (is_complex<T>) {
    return same_value(a.real(), b.real()) && same_value(a.imag(), b.imag());
  } else if constexpr (std::is_floating_point_v<T>) {
    return (a == b && std::signbit(a) == std::signbit(b)) || (std::isnan(a) && std::isnan(b));
  } else {
    return a == b;
  }
}

/// Mixes the bits of a number well (Steele et al. 2014, splitmix64).
inline std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

/// A real number of any sign and many magnitudes; now and then a special value. Only one rank gets a special value at
/// any position, because if two different NaNs are added, either may survive.
inline double real_value(std::uint64_t shared, std::uint64_t own, int rank, int num_ranks) {
  constexpr double kOdd[] = {0.0,  -0.0,  1e-40, 6e-8, 3e38, 65504, std::numeric_limits<double>::infinity(),
                             std::numeric_limits<double>::quiet_NaN()};
  const bool odd = shared % 8 == 0 && static_cast<int>(shared / 8 % static_cast<unsigned>(num_ranks)) == rank;
  if (odd) return kOdd[shared / 1024 % std::size(kOdd)];
  const double value = std::ldexp(1.0 + static_cast<double>(own >> 12) * 0x1p-52, static_cast<int>(own % 13) - 6);
  return own & 1024 ? -value : value;
}

/// Input of one rank: any bits for integers; see real_value() for the other types.
template <class T>
std::vector<T> values(int rank, int num_ranks, int seed, std::size_t count) {
  std::vector<T> data(count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t shared = mix(i * 64 + static_cast<std::uint64_t>(seed));
    const std::uint64_t own = mix(shared + static_cast<std::uint64_t>(rank + 1));
    if constexpr (std::is_integral_v<T>) {
      data[i] = static_cast<T>(own);
    } else if constexpr (std::is_same_v<T, Bool>) {
      data[i].raw = static_cast<std::uint8_t>(own % 3);  // any byte but 0 is true
    } else if constexpr (is_complex<T>) {
      using F = typename T::value_type;
      data[i] = {static_cast<F>(real_value(shared, own, rank, num_ranks)),
                 static_cast<F>(real_value(shared, mix(own), rank, num_ranks))};
    } else if constexpr (is_short<T>) {
      data[i] = round_to<T>(static_cast<float>(real_value(shared, own, rank, num_ranks)));
    } else {
      data[i] = static_cast<T>(real_value(shared, own, rank, num_ranks));
    }
  }
  return data;
}

}  // namespace phalanx::tests
