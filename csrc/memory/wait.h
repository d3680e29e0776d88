// How a thread waits: it spins or yields for about as long as a futex wake-up costs, then sleeps in short slices.
//
// Ranks that share CPUs yield for at most 50 us (PHALANX_SPIN_US) per rank of the group, so that every rank gets its
// turn, and then sleep. An earlier version slept at once, which was slower: with four ranks on two cores, a futex sleep
// costs 39 us per collective, but sched_yield costs 4 us. Ranks also yield if two of them were last seen on the same
// CPU although there is a CPU for each rank. The scheduler leaves the two there for seconds, and spinning then cost 57
// us per collective.
//
// Only the last rank to arrive wakes the sleepers. In an earlier version, in which every arrival woke all of them,
// eight ranks on two cores spent their time in wake-ups.
//
// model/memory.pml models has_sleepers(), ring() and sleep_on(): a change here needs the same change there.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

#include "memory/layout.h"

namespace phalanx {

using Clock = std::chrono::steady_clock;

/// Wake all threads that sleep on `bell`. Call this after the RELEASE store that the threads wait for.
void ring(Bell& bell) noexcept;

/// True if a thread may be asleep on `bell`.
/// The fence orders the caller's store before the load of `sleepers`. It pairs with the fence in sleep_on(): either the
/// sleeper sees the store before it sleeps, or the ringer sees the sleeper.
inline bool has_sleepers(const Bell& bell) noexcept {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return bell.sleepers.load(std::memory_order_relaxed) != 0;
}

/// Callbacks with which a waiting thread handles signals and finds its call site.
class Hooks {
 public:
  virtual ~Hooks() = default;
  /// Called at intervals during a long wait. To end the wait, throw.
  virtual void tick() {}
  /// Return the source line of the call, such as "train.py:31"; empty if it is not known.
  virtual std::string site() { return {}; }
};

/// Measures how long this process was suspended, for example by Ctrl-Z. Use it in threads that sleep for milliseconds
/// at a time: for these, a gap of a second or more between two calls means that the process was suspended. The
/// processes that such a thread waits for were suspended, too, so this time must not count towards a deadline.
class StopWatch {
 public:
  void begin() { since_ = Clock::now(); }
  /// Return how long this process was suspended since the last call of stopped() or begin().
  Clock::duration stopped() {
    const Clock::duration passed = Clock::now() - since_;
    begin();
    return passed < std::chrono::seconds(1) ? Clock::duration{} : passed;
  }

 private:
  Clock::time_point since_ = Clock::now();
};

inline void cpu_relax() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

/// Spin until `done()` or `futile()` is true or the time `end` is reached; returns `done()`.
template <class Done, class Futile>
bool spin(Clock::time_point end, Done&& done, Futile&& futile) {
  constexpr int kTriesPerLook = 64;
  do {
    for (int i = 0; i < kTriesPerLook; ++i) {
      if (done()) return true;
      cpu_relax();
    }
  } while (!futile() && Clock::now() < end);
  return false;
}

/// Yield the CPU until `done()` is true or the time `end` is reached; returns `done()`. Between ranks on one CPU, a
/// yield takes about 1.5 us, a tenth of the time to go to sleep and be woken. If another program runs on that CPU, the
/// first yield may use up the whole time.
template <class Done>
bool yield(Clock::time_point end, Done&& done) {
  while (Clock::now() < end) {
    sched_yield();
    if (done()) return true;
  }
  return false;
}

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, std::chrono::nanoseconds slice) noexcept;

/// Sleep until the bell rings, `slice` passes or a signal arrives, unless `done()` is already true.
/// Returns `done()`.
template <class Done>
bool sleep_on(Bell& bell, std::chrono::nanoseconds slice, Done&& done) {
  // SEQ_CST: the sleeper is announced before `done` is evaluated again; pairs with has_sleepers().
  bell.sleepers.fetch_add(1, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  // If the bell rings after this load, the word has changed, and the futex refuses to sleep.
  const std::uint32_t rings = bell.rings.load(std::memory_order_acquire);
  bool ok = done();
  if (!ok) {
    futex_wait(bell.rings, rings, slice);
    ok = done();
  }
  bell.sleepers.fetch_sub(1, std::memory_order_relaxed);
  return ok;
}

}  // namespace phalanx
