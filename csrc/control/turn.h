// Whose turn it is: a group runs one collective at a time, in whatever thread called it.
//
// Waiting for the turn is a wait like any other: it looks at signals, the deadline and the group's end. A signal
// handler that has interrupted a collective can't have the turn until that collective returns, and the ranks could not
// agree on an order. So it gets GroupUnusable at once.
#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>

#include "memory/wait.h"

namespace phalanx {

/// Unlike a mutex it knows its owner, which tells a signal handler that interrupted a collective from another thread,
/// and waiting for it ends after a while, so that the waiter can look at signals, at the group and at the clock.
class Turn {
 public:
  bool mine() const { return owner_.load(std::memory_order_relaxed) == pthread_self(); }
  bool try_take() {
    pthread_t nobody{};
    // ACQUIRE: what the owner before did to the group is seen; pairs with give().
    return owner_.compare_exchange_strong(nobody, pthread_self(), std::memory_order_acquire, std::memory_order_relaxed);
  }
  /// Wait for it, at most `slice` and only while not `futile`; true if it was taken.
  template <class Futile>
  bool take_within(std::chrono::nanoseconds slice, Futile&& futile) {
    bool taken = false;
    sleep_on(bell_, slice, [&] { return futile() || (taken = try_take()); });
    return taken;
  }
  void give() {
    num_given_.store(num_given() + 1, std::memory_order_relaxed);  // only the owner writes it
    owner_.store(pthread_t{}, std::memory_order_release);
    if (has_sleepers(bell_)) ring(bell_);
  }
  unsigned num_given() const { return num_given_.load(std::memory_order_relaxed); }

 private:
  std::atomic<pthread_t> owner_{};
  std::atomic<unsigned> num_given_{0};
  Bell bell_{};
};

/// Gives back at the end of its scope a turn that was taken.
class TurnHolder {
 public:
  explicit TurnHolder(Turn& turn) : turn_(turn) {}
  TurnHolder(const TurnHolder&) = delete;
  TurnHolder& operator=(const TurnHolder&) = delete;
  ~TurnHolder() { turn_.give(); }

 private:
  Turn& turn_;
};

}  // namespace phalanx
