// Runs a group's collectives one at a time: blocking ones in the caller's thread, asynchronous ones on the group's native
// thread, in the order of their calls and without the GIL. If the native thread is still asleep, the first waiter runs
// the operation itself.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "control/control_block.h"
#include "collectives/work.h"
#include "control/turn.h"
#include "memory/wait.h"

namespace phalanx {

class Worker;

/// An operation that was queued for the native thread.
class CollectiveWork : public Work {
 public:
  CollectiveWork(ControlBlock& control, Worker& worker, Op op, std::function<void(Hooks&)> body, std::string site);
  /// Also throws in a signal handler that interrupted a collective of the same group: this operation would have to wait
  /// for that collective, which can't continue until the handler returns.
  void require_reachable() const override;

 private:
  friend class Worker;
  Worker& worker_;
  std::function<void(Hooks&)> body_;
  std::string site_;
};

class Worker {
 public:
  explicit Worker(ControlBlock& control) : control_(control) {}
  ~Worker() { stop(); }

  /// Run `body`, and return when it is done. If no earlier operation is pending, `body` runs in the calling thread;
  /// otherwise `body` waits in the queue for its turn. `timeout_s`: how long to wait for another thread's collective to
  /// end (0: the group's timeout).
  template <class Body>
  void run(Op op, double timeout_s, Hooks& hooks, Body&& body) {
    control_.require_usable(op);
    if (idle() && turn_.try_take()) {
      TurnHolder holder(turn_);
      body(hooks);
      return;
    }
    run_in_turn(op, timeout_s, hooks, body);
  }
  std::shared_ptr<CollectiveWork> submit(Op op, std::function<void(Hooks&)> body, std::string site);
  /// Wait for an operation, at most `timeout_s` (0: until the operation's own deadline ends it). Returns whether the
  /// operation is done. Without a timeout, runs the operation in the calling thread if it is next in the queue. Does
  /// not throw the operation's failure.
  bool wait(const std::shared_ptr<CollectiveWork>& work, Hooks& hooks, double timeout_s);
  /// True if no operation is queued or running.
  bool idle() const { return num_pending_.load(std::memory_order_acquire) == 0; }
  /// True if this thread is inside a collective or waits for one. A signal handler calls this to learn whether it has
  /// interrupted a collective or such a wait.
  bool interrupted() const;
  /// Return the failure to throw if a signal handler calls or awaits `op` in a thread that is inside a collective or
  /// waits for one.
  Failure inside_another(FailureKind kind, Op op, std::string site) const;
  /// Wait until idle, at most `timeout_s`.
  bool drain(double timeout_s);
  /// End the native thread. The group must have ended before this call, so operations that are still queued fail.
  void stop();

 private:
  void run_in_turn(Op op, double timeout_s, Hooks& hooks, const std::function<void(Hooks&)>& body);
  void take_turn(Op op, double timeout_s, Hooks& hooks);
  void run_queued(const std::function<void(Hooks&)>& body, Hooks& hooks);
  bool run_if_next(const std::shared_ptr<CollectiveWork>& work, Hooks& hooks);
  bool await(const CollectiveWork& work, Hooks& hooks, double timeout_s);
  std::shared_ptr<CollectiveWork> take_next(const CollectiveWork* wanted = nullptr);
  void run();
  void execute(CollectiveWork& work, Hooks& hooks);
  void finish(CollectiveWork& work, std::exception_ptr error);

  ControlBlock& control_;
  Turn turn_;
  mutable std::mutex mutex_;
  std::condition_variable queued_, finished_;
  std::deque<std::shared_ptr<CollectiveWork>> queue_;
  std::atomic<int> num_queued_{0};  // the queue's size; RELAXED: a hint that orders nothing
  std::atomic<int> num_pending_{0};
  std::vector<std::pair<pthread_t, const CollectiveWork*>> waiting_;  // threads in await()
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace phalanx
