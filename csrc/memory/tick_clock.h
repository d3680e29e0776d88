// CLOCK_MONOTONIC computed from the processor's counter, for the two times of every event in the black box.
//
// Reading the clock is a large part of the cost of an event: clock_gettime takes 23 ns at best, the counter 10. The
// counter's rate is learnt in the first 10 ms. Times are converted to nanoseconds here, so readers convert nothing.
#pragma once

#include <atomic>
#include <cstdint>

namespace phalanx {

/// Each thread asks the kernel once a millisecond and counts the processor's ticks in between. So no time is wrong by more
/// than about a microsecond if the learnt rate is inexact, the clock is being adjusted or the machine was suspended.
/// If the kernel itself does not use the counter, every time is the kernel's.
class TickClock {
 public:
  TickClock() noexcept;
  struct Instant {
    std::uint64_t ticks, ns;
  };
  /// The time now, in nanoseconds. `asked`: when the calling thread last asked the kernel; each thread has its own, at
  /// first {}.
  std::uint64_t now_ns(Instant& asked) noexcept;

 private:
  static Instant instant() noexcept;
  std::uint64_t ask_kernel() noexcept;

  bool counts_;
  Instant began_;
  std::atomic<std::uint64_t> rate_{0};  // nanoseconds per tick, times 2^32; 0: not known yet
};

}  // namespace phalanx
