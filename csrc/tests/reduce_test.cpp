// Compares the reduce kernels with a plain reference, and every instruction set with the baseline.
#include <algorithm>
#include <cmath>
#include <complex>
#include <cstring>
#include <string>
#include <vector>

#include "numbers.h"
#include "ranks.h"
#include "collectives/reduce.h"

namespace phalanx {
namespace baseline { ReduceFn find(Dtype, ReduceOp); }
namespace v3 { ReduceFn find(Dtype, ReduceOp); }
namespace v4 { ReduceFn find(Dtype, ReduceOp); }

namespace tests {
namespace {

struct Variant {
  const char* name;
  ReduceFn (*find)(Dtype, ReduceOp);
};

/// The kernels that this processor can run.
std::vector<Variant> variants() {
  std::vector<Variant> all{{"baseline", baseline::find}};
#if defined(PHALANX_X86_VARIANTS)
  const std::string best = simd_level();
  if (best != "baseline") all.push_back({"x86-64-v3", v3::find});
  if (best == "x86-64-v4") all.push_back({"x86-64-v4", v4::find});
#endif
  return all;
}

// Lengths around the width of a register, around the kernels' block (1024), and of several blocks.
constexpr std::size_t kCounts[] = {0, 1, 7, 8, 31, 1023, 1025, 4099};

template <class T>
void compare_with_reference(Dtype dtype) {
  for (int code = 0; code < static_cast<int>(ReduceOp::kCount); ++code) {
    const auto op = static_cast<ReduceOp>(code);
    CHECK_EQ(baseline::find(dtype, op) != nullptr, has_meaning<T>(op));
    if (!has_meaning<T>(op)) continue;
    for (const int num_srcs : {1, 2, 3, 4, 5}) {
      for (const std::size_t count : kCounts) {
        std::vector<std::vector<T>> srcs;
        std::vector<const void*> pointers;
        for (int r = 0; r < num_srcs; ++r) srcs.push_back(values<T>(r, num_srcs, code, count));
        for (const auto& src : srcs) pointers.push_back(src.data());
        std::vector<T> first(count);
        for (const Variant& variant : variants()) {
          const std::string where = std::string(variant.name) + ", dtype " + std::to_string(static_cast<int>(dtype)) +
                                    ", op " + std::to_string(code) + ", " + std::to_string(num_srcs) + " inputs, " +
                                    std::to_string(count) + " elements";
          std::vector<T> out(count);
          variant.find(dtype, op)(out.data(), pointers.data(), num_srcs, count);
          for (std::size_t i = 0; i < count; ++i)
            if (!same_value(out[i], reference<T>(op, srcs, i)))
              fail_check(__FILE__, __LINE__, where + ": wrong at element " + std::to_string(i));
          if (variant.find == baseline::find) first = out;
          CHECK_EQ(count == 0 || std::memcmp(out.data(), first.data(), count * sizeof(T)) == 0, true, where);
          // The output may be any of the inputs.
          std::vector<T> in_place = srcs.back();
          pointers.back() = in_place.data();
          variant.find(dtype, op)(in_place.data(), pointers.data(), num_srcs, count);
          pointers.back() = srcs.back().data();
          CHECK_EQ(count == 0 || std::memcmp(in_place.data(), first.data(), count * sizeof(T)) == 0, true, where);
        }
      }
    }
  }
}

CASE(reductions_of_every_dtype_are_exact_with_every_instruction_set) {
  compare_with_reference<float>(Dtype::kFloat32);
  compare_with_reference<double>(Dtype::kFloat64);
  compare_with_reference<Half>(Dtype::kFloat16);
  compare_with_reference<Bfloat>(Dtype::kBfloat16);
  compare_with_reference<std::int8_t>(Dtype::kInt8);
  compare_with_reference<std::int16_t>(Dtype::kInt16);
  compare_with_reference<std::int32_t>(Dtype::kInt32);
  compare_with_reference<std::int64_t>(Dtype::kInt64);
  compare_with_reference<std::uint8_t>(Dtype::kUint8);
  compare_with_reference<std::uint16_t>(Dtype::kUint16);
  compare_with_reference<std::uint32_t>(Dtype::kUint32);
  compare_with_reference<std::uint64_t>(Dtype::kUint64);
  compare_with_reference<Bool>(Dtype::kBool);
  compare_with_reference<std::complex<float>>(Dtype::kComplex64);
  compare_with_reference<std::complex<double>>(Dtype::kComplex128);
  CHECK(find_reduce(Dtype::kCopyOnly, ReduceOp::kSum) == nullptr);
}

template <class T>
void compare_conversions(Dtype dtype) {
  std::vector<T> all(65536), zeros(65536);
  for (std::size_t i = 0; i < all.size(); ++i) all[i].raw = static_cast<std::uint16_t>(i);
  const void* srcs[] = {all.data(), zeros.data()};
  for (const Variant& variant : variants()) {
    std::vector<T> out(all.size());
    variant.find(dtype, ReduceOp::kMax)(out.data(), srcs, 1, all.size());
    for (std::size_t i = 0; i < all.size(); ++i) {
      const bool is_nan = widen(all[i]) != widen(all[i]);
      // A NaN becomes quiet and keeps the rest of its bits.
      CHECK_EQ(out[i].raw, is_nan ? i | T::kQuiet : i, variant.name);
    }
    variant.find(dtype, ReduceOp::kSum)(out.data(), srcs, 2, all.size());
    for (std::size_t i = 0; i < all.size(); ++i) CHECK(same_value(out[i], round_to<T>(widen(all[i]) + 0.0f)));
  }
}

CASE(every_half_survives_the_detour_through_float32) {
  compare_conversions<Half>(Dtype::kFloat16);
  compare_conversions<Bfloat>(Dtype::kBfloat16);
}

CASE(halves_accumulate_in_float32) {
  // A half can't hold 2048 + 1, but it can hold 2048 + 1 + 1. That is the result only if the first sum is not rounded.
  const std::vector<std::vector<Half>> srcs{{round_to<Half>(2048)}, {round_to<Half>(1)}, {round_to<Half>(1)}};
  const void* pointers[] = {srcs[0].data(), srcs[1].data(), srcs[2].data()};
  for (const Variant& variant : variants()) {
    Half out{};
    variant.find(Dtype::kFloat16, ReduceOp::kSum)(&out, pointers, 3, 1);
    CHECK_EQ(widen(out), 2050.0f, variant.name);
  }
}

CASE(nan_wins_minimum_and_maximum_wherever_it_stands) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (int at = 0; at < 3; ++at) {
    float in[3] = {1, -2, 3};
    in[at] = nan;
    const void* srcs[] = {&in[0], &in[1], &in[2]};
    for (const Variant& variant : variants())
      for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
        float out = 0;
        variant.find(Dtype::kFloat32, op)(&out, srcs, 3, 1);
        CHECK_EQ(std::isnan(out), true, variant.name);
      }
  }
}

CASE(sums_and_products_of_integers_wrap_around_and_averages_do_not) {
  const std::int64_t large[] = {INT64_MAX, 1, INT64_MAX};
  const std::uint16_t wide[] = {65535, 65535, 65535};
  const void* large_srcs[] = {&large[0], &large[1], &large[2]};
  const void* wide_srcs[] = {&wide[0], &wide[1], &wide[2]};
  for (const Variant& variant : variants()) {
    std::int64_t sum = 0, average = 0;
    std::uint16_t product = 0;
    variant.find(Dtype::kInt64, ReduceOp::kSum)(&sum, large_srcs, 2, 1);
    variant.find(Dtype::kInt64, ReduceOp::kAvg)(&average, large_srcs, 2, 1);
    variant.find(Dtype::kUint16, ReduceOp::kProduct)(&product, wide_srcs, 3, 1);
    CHECK_EQ(sum, INT64_MIN, variant.name);
    CHECK_EQ(average, std::int64_t{1} << 62, variant.name);
    CHECK_EQ(product, 65535, variant.name);
  }
}

}  // namespace
}  // namespace tests
}  // namespace phalanx
