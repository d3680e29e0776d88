// CLOCK_MONOTONIC, computed from the processor's counter. The black box stores two such times for every event.
//
// Reading the clock is a large part of the cost of an event: clock_gettime takes 23 ns at best, reading the counter 10
// ns. The rate of the counter is learned in the first 10 ms. Times are converted to nanoseconds here, so readers of the
// black box need not convert them.
#pragma once

#include <atomic>
#include <cstdint>

namespace phalanx {

/// A clock for many threads. Each thread asks the kernel for the time once a millisecond, and counts the processor's
/// ticks in between. So no time is wrong by more than about a microsecond, even if the learned rate is inexact, the
/// clock is being adjusted or the machine was suspended. If the kernel does not use the counter itself, every time
/// comes from the kernel.
class TickClock {
 public:
  TickClock() noexcept;
  struct Instant {
    std::uint64_t ticks, ns;
  };
  /// Return the time now, in nanoseconds. `asked`: the moment at which the calling thread last asked the kernel. Each
  /// thread keeps an Instant of its own for this, which is {} at first.
  std::uint64_t now_ns(Instant& asked) noexcept;

 private:
  static Instant instant() noexcept;
  std::uint64_t ask_kernel() noexcept;

  bool counts_;
  Instant began_;
  std::atomic<std::uint64_t> rate_{0};  // nanoseconds per tick, times 2^32; 0: not known yet
};

}  // namespace phalanx
