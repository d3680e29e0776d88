// The native thread of a group: runs asynchronous operations in the order of their calls, without the GIL.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "pending.h"
#include "wait.h"

namespace phalanx {

/// An operation that runs, or will, on the native thread.
class Job : public Pending {
 private:
  friend class Worker;
  std::function<void(Hooks&)> work_;
  std::string site_;
};

class Worker {
 public:
  ~Worker() { stop(); }

  std::shared_ptr<Job> submit(std::function<void(Hooks&)> work, std::string site);
  /// Wait for a job, at most `timeout_s` (0: for ever; the operation has its own deadline). False if it is not done.
  /// Without a timeout, runs it in the calling thread if it is next and has not begun. Does not throw what it failed with.
  bool wait(const std::shared_ptr<Job>& job, Hooks& hooks, std::chrono::nanoseconds spin_time, double timeout_s);
  /// True if no job is queued or runs.
  bool idle() const { return num_pending_.load(std::memory_order_acquire) == 0; }
  /// Wait until idle, at most `timeout_s`.
  bool drain(double timeout_s);
  /// End the thread after the queued jobs.
  void stop();

 private:
  void run();
  void execute(Job& job, Hooks& hooks);

  std::mutex mutex_;
  std::condition_variable queued_, finished_;
  std::deque<std::shared_ptr<Job>> queue_;
  std::atomic<int> num_pending_{0};
  bool stopping_ = false;
  bool running_ = false;  // a job, in whatever thread
  std::thread thread_;
};

}  // namespace phalanx
