#include "worker.h"

#include <pthread.h>

#include <utility>

namespace phalanx {
namespace {

using namespace std::chrono_literals;

/// A job knows its call site since it was queued. Signals interrupt it only in the thread of a caller who waits for it.
class JobHooks : public Hooks {
 public:
  explicit JobHooks(const std::string& site, Hooks* caller = nullptr) : site_(site), caller_(caller) {}
  void tick() override {
    if (caller_ != nullptr) caller_->tick();
  }
  std::string site() override { return site_; }

 private:
  const std::string& site_;
  Hooks* caller_;
};

std::chrono::nanoseconds from_seconds(double seconds) {
  return std::chrono::nanoseconds(static_cast<std::int64_t>(seconds * 1e9));
}

}  // namespace

std::shared_ptr<Job> Worker::submit(std::function<void(Hooks&)> work, std::string site) {
  auto job = std::make_shared<Job>();
  job->work_ = std::move(work);
  job->site_ = std::move(site);
  {
    std::lock_guard lock(mutex_);
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    num_pending_.fetch_add(1, std::memory_order_relaxed);
    queue_.push_back(job);
  }
  queued_.notify_one();
  return job;
}

bool Worker::wait(const std::shared_ptr<Job>& job, Hooks& hooks, std::chrono::nanoseconds spin_time,
                  double timeout_s) {
  std::unique_lock lock(mutex_);
  if (timeout_s <= 0 && !running_ && !queue_.empty() && queue_.front() == job) {
    // The native thread is not awake yet: waking it would cost more than most operations. A bounded wait leaves it to
    // that thread, since an operation that has begun has to be finished.
    queue_.pop_front();
    running_ = true;
    lock.unlock();
    JobHooks job_hooks(job->site_, &hooks);
    execute(*job, job_hooks);
    return true;
  }
  lock.unlock();
  if (spin(Clock::now() + spin_time, [&] { return job->done(); }, [] { return false; })) return true;
  const auto end = Clock::now() + from_seconds(timeout_s);
  lock.lock();
  while (!finished_.wait_for(lock, 50ms, [&] { return job->done(); })) {
    if (timeout_s > 0 && Clock::now() >= end) return false;
    lock.unlock();
    hooks.tick();
    lock.lock();
  }
  return true;
}

/// Run a job that was taken from the queue with `running_` set.
void Worker::execute(Job& job, Hooks& hooks) {
  std::exception_ptr error;
  try {
    job.work_(hooks);
  } catch (...) {
    error = std::current_exception();
  }
  job.work_ = nullptr;
  job.finish(error);
  {
    std::lock_guard lock(mutex_);
    running_ = false;
    num_pending_.fetch_sub(1, std::memory_order_release);
  }
  finished_.notify_all();
  queued_.notify_one();
}

bool Worker::drain(double timeout_s) {
  std::unique_lock lock(mutex_);
  return finished_.wait_for(lock, from_seconds(timeout_s), [&] { return idle(); });
}

void Worker::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  queued_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Worker::run() {
  pthread_setname_np(pthread_self(), "phalanx-async");
  std::unique_lock lock(mutex_);
  for (;;) {
    queued_.wait(lock, [&] { return !running_ && (stopping_ || !queue_.empty()); });
    if (queue_.empty()) return;
    const std::shared_ptr<Job> job = queue_.front();
    queue_.pop_front();
    running_ = true;
    lock.unlock();
    JobHooks hooks(job->site_);
    execute(*job, hooks);
    lock.lock();
  }
}

}  // namespace phalanx
