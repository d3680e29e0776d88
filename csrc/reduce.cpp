#include "reduce.h"

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

Level detect() {
#if defined(PHALANX_X86_VARIANTS)
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                  __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
  const bool v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  if (v3 && v4) return Level::kV4;
  if (v3) return Level::kV3;
#endif
  return Level::kBaseline;
}

Level level() {
  static const Level chosen = detect();
  return chosen;
}

}  // namespace

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
