// An operation in flight: whether it is done, whether it failed, and which listeners to notify.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <utility>

#include "control/control_block.h"

namespace phalanx {

/// Uses no lock: if another thread held the lock during a fork, the child could never take it.
class Work {
 public:
  Work(ControlBlock& control, Op op) : control_(control), op_(op) {}
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
  virtual ~Work() {
    for (Listener* one = listeners_.load(std::memory_order_acquire); one != nullptr && one != &over_;)
      delete std::exchange(one, one->next);
  }
  // ACQUIRE makes results and error() readable on true; pairs with finish().
  bool done() const { return listeners_.load(std::memory_order_acquire) == &over_; }
  std::exception_ptr error() const { return error_; }  // valid once done
  Op op() const { return op_; }

  /// Throw if the operation is not done and a wait for it in this thread would never end, as in a forked child. Call
  /// this before taking any lock.
  virtual void require_reachable() const {
    if (!done()) control_.require_own_process(op_);
  }

  /// Call `then` in the thread that finishes the operation; if the operation is already done, call it now in this
  /// thread.
  void notify(std::function<void()> then) {
    auto* own = new Listener{std::move(then), listeners_.load(std::memory_order_acquire)};
    // RELEASE publishes the listener; ACQUIRE shows the result if the operation finishes meanwhile.
    while (own->next != &over_)
      if (listeners_.compare_exchange_weak(own->next, own, std::memory_order_acq_rel)) return;
    own->then();
    delete own;
  }

 protected:
  void finish(std::exception_ptr error) {
    error_ = std::move(error);
    // RELEASE publishes the result; pairs with done(). ACQUIRE shows the listeners that notify() published.
    for (Listener* one = listeners_.exchange(&over_, std::memory_order_acq_rel); one != nullptr;) {
      one->then();
      delete std::exchange(one, one->next);
    }
  }

  ControlBlock& control_;  // outlives every operation that is not done
  const Op op_;

 private:
  struct Listener {
    std::function<void()> then;
    Listener* next;
  };
  static inline Listener over_{};  // if `listeners_` points here, the operation is done

  std::exception_ptr error_;
  std::atomic<Listener*> listeners_{nullptr};
};

}  // namespace phalanx
