// An operation on its way: done or not, failed or not, and whom to tell.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <utility>

namespace phalanx {

class Pending {
 public:
  virtual ~Pending() = default;
  // ACQUIRE makes results and error() readable on true; pairs with finish().
  bool done() const { return done_.load(std::memory_order_acquire); }
  std::exception_ptr error() const { return error_; }  // valid once done

  /// Call `then` when done, from whichever thread that happens in; at once if it is done.
  void notify(std::function<void()> then) {
    {
      std::lock_guard lock(mutex_);
      if (!done()) {
        then_ = std::move(then);
        return;
      }
    }
    then();
  }

 protected:
  void finish(std::exception_ptr error) {
    std::function<void()> then;
    {
      std::lock_guard lock(mutex_);
      error_ = std::move(error);
      done_.store(true, std::memory_order_release);
      then = std::move(then_);
    }
    if (then) then();
  }

 private:
  std::mutex mutex_;
  std::function<void()> then_;
  std::exception_ptr error_;
  std::atomic<bool> done_{false};
};

}  // namespace phalanx
