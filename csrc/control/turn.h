// The lock that lets a group run one collective at a time, whichever thread calls it.
//
// A thread waits for the lock (the "turn") as it does for anything else: it checks for signals, the deadline and the
// end of the group. A signal handler that has interrupted a collective could never get the turn, because that
// collective continues only when the handler returns. Nor can the handler run a collective without the turn: the
// signal may interrupt a different collective on each rank, so the ranks would call collectives in different orders. So
// a collective that the handler calls fails with GroupUnusable at once.
#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>

#include "memory/wait.h"

namespace phalanx {

/// A lock that differs from a mutex in two ways. It knows its owner, so a signal handler can tell that its own thread
/// has the turn. And a wait for it ends after a while, so that the waiter can check for signals, the end of the group
/// and the deadline.
class Turn {
 public:
  bool mine() const { return owner_.load(std::memory_order_relaxed) == pthread_self(); }
  bool try_take() {
    pthread_t nobody{};
    // ACQUIRE shows what the previous owner did to the group; pairs with give().
    return owner_.compare_exchange_strong(nobody, pthread_self(), std::memory_order_acquire, std::memory_order_relaxed);
  }
  /// Wait for the turn until `slice` has passed or `futile()` is true; returns whether this thread has it.
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

/// Gives a turn back at the end of its scope. The caller must have taken the turn before.
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
