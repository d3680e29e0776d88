#include "memory/tick_clock.h"

#include <time.h>

#include <algorithm>
#include <cstring>
#include <string>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

#include "memory/text_file.h"

namespace phalanx {
namespace {

constexpr std::uint64_t kLearn_ns = 10'000'000;  // time to measure the rate: an error of 0.1 us is 10 ppm of this time
constexpr std::uint64_t kTrust_ns = 1'000'000;
constexpr std::uint64_t kMostTicks = std::uint64_t{1} << 20;  // times a rate_ below 4 us per tick: fits into 64 bits
constexpr std::uint64_t kApart_ns = 2'000;  // if two reads of the counter are further apart, the thread was interrupted

#if defined(__x86_64__)
constexpr const char* kClockSource = "tsc";
std::uint64_t ticks() noexcept { return __rdtsc(); }
#elif defined(__aarch64__)
constexpr const char* kClockSource = "arch_sys_counter";
std::uint64_t ticks() noexcept {
  std::uint64_t value;
  asm volatile("mrs %0, cntvct_el0" : "=r"(value));
  return value;
}
#else
constexpr const char* kClockSource = "";
std::uint64_t ticks() noexcept { return 0; }
#endif

std::uint64_t kernels_ns() noexcept {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(time.tv_nsec);
}

bool kernel_counts_ticks() noexcept {
  try {
    const std::string source = read_text("/sys/devices/system/clocksource/clocksource0/current_clocksource");
    return *kClockSource != '\0' && source == std::string(kClockSource) + "\n";
  } catch (...) {
    return false;
  }
}

std::uint64_t ns_of(std::uint64_t ticks, std::uint64_t rate) noexcept { return ticks * rate >> 32; }

}  // namespace

/// Returns the readings of both clocks at one moment: the best of a few tries, because a thread may be interrupted
/// between the two reads.
TickClock::Instant TickClock::instant() noexcept {
  Instant best{};
  std::uint64_t least = ~std::uint64_t{0};
  for (int i = 0; i < 5; ++i) {
    const std::uint64_t before = ticks();
    const std::uint64_t ns = kernels_ns();
    const std::uint64_t apart = ticks() - before;
    if (apart < least) least = apart, best = {before + apart / 2, ns};
  }
  return best;
}

TickClock::TickClock() noexcept : counts_(kernel_counts_ticks()), began_(instant()) {}

std::uint64_t TickClock::now_ns(Instant& asked) noexcept {
  if (!counts_) return kernels_ns();
  // RELAXED: the rate publishes nothing else.
  const std::uint64_t rate = rate_.load(std::memory_order_relaxed);
  if (rate == 0) return ask_kernel();
  const std::uint64_t before = ticks();
  const std::uint64_t since = before - asked.ticks;
  if (since < kMostTicks && ns_of(since, rate) < kTrust_ns) return asked.ns + ns_of(since, rate);
  const std::uint64_t ns = kernels_ns();
  const std::uint64_t apart = ticks() - before;
  if (apart < kMostTicks && ns_of(apart, rate) < kApart_ns) asked = {before + apart / 2, ns};
  return ns;
}

/// Returns the kernel's time. Learns the counter's rate once kLearn_ns have passed since the first reading.
std::uint64_t TickClock::ask_kernel() noexcept {
  const std::uint64_t ns = kernels_ns();
  if (ns - began_.ns < kLearn_ns) return ns;
  const Instant now = instant();
  // Up to 4 s, the nanoseconds still fit into 64 bits after the shift by 32. If more time has passed, start to measure
  // anew.
  if (now.ns - began_.ns < std::uint64_t{1} << 32 && now.ticks > began_.ticks)
    rate_.store(((now.ns - began_.ns) << 32) / (now.ticks - began_.ticks), std::memory_order_relaxed);
  else
    began_ = now;
  return now.ns;
}

}  // namespace phalanx
