// CLOCK_MONOTONIC, from the processor's counter: half the time of clock_gettime(), for a stamp on every event.
//
// Two readings of the clock are a large part of an event: clock_gettime takes 23 ns at best, the counter 10. The box
// holds nanoseconds, so readers convert nothing. The rate is learnt in the first 10 ms.
#pragma once

#include <atomic>
#include <cstdint>

namespace phalanx {

/// Each thread asks the kernel once a millisecond, and counts the processor's ticks in between. So an error of the rate, a
/// clock that is being adjusted or a machine that was suspended shifts no stamp by more than a microsecond or so.
/// Where the kernel itself does not trust the counter, every stamp is the kernel's.
class TickClock {
 public:
  TickClock() noexcept;
  struct Instant {
    std::uint64_t ticks, ns;
  };
  /// The time now. `asked`: when the thread asked the kernel last; a thread's own, at first {}.
  std::uint64_t now_ns(Instant& asked) noexcept;

 private:
  static Instant instant() noexcept;
  std::uint64_t ask_kernel() noexcept;

  bool counts_;
  Instant began_;
  std::atomic<std::uint64_t> rate_{0};  // nanoseconds per tick, times 2^32; 0: not known yet
};

}  // namespace phalanx
