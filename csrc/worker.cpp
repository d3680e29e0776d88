#include "worker.h"

#include <pthread.h>

#include <algorithm>

namespace phalanx {
namespace {

using namespace std::chrono_literals;
constexpr auto kLook = 50ms;  // how often a waiting thread looks at signals, at the group and at the clock

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

std::string at_site(const std::string& site) { return site.empty() ? "" : " at " + site; }

}  // namespace

Job::Job(Board& board, Worker& worker, Op op, std::function<void(Hooks&)> work, std::string site)
    : Pending(board, op), worker_(worker), work_(std::move(work)), site_(std::move(site)) {}

void Job::require_reachable() const {
  Pending::require_reachable();
  if (!done() && worker_.interrupted())
    throw worker_.inside_another(FailureKind::kNestedWait, op_, site_);
}

bool Worker::interrupted() const {
  if (turn_.mine()) return true;
  std::lock_guard lock(mutex_);
  return std::any_of(waiting_.begin(), waiting_.end(), [](const auto& one) { return one.first == pthread_self(); });
}

Failure Worker::inside_another(FailureKind kind, Op op, std::string site) const {
  Failure failure = board_.failure(kind, op, std::move(site));
  failure.detail = board_.collective();
  if (turn_.mine()) return failure;
  std::lock_guard lock(mutex_);
  for (const auto& [thread, job] : waiting_)
    if (thread == pthread_self())
      failure.detail = std::string("the wait for ") + op_name(job->op_) + " of group '" + board_.config().name + "'" +
                       at_site(job->site_);
  return failure;
}

/// Run a call that could not begin at once.
void Worker::run_in_turn(Op op, double timeout_s, Hooks& hooks, const std::function<void(Hooks&)>& work) {
  if (interrupted()) throw inside_another(FailureKind::kNested, op, hooks.site());
  if (idle()) {
    take_turn(op, timeout_s, hooks);
    TurnHolder holder(turn_);
    run_queued(work, hooks);
    return;
  }
  const auto job = submit(op, work, hooks.site());
  try {
    wait(job, hooks, 0);
  } catch (...) {
    board_.abort("a signal interrupted it");
    Hooks no_hooks;  // the job refers to this frame: nothing may leave it before the job is done
    await(*job, no_hooks, 0);
    throw;
  }
  if (job->error()) std::rethrow_exception(job->error());
}

/// Wait until no other thread is in a collective. A rank that gives up here has missed a collective, so the group ends.
void Worker::take_turn(Op op, double timeout_s, Hooks& hooks) {
  const double limit_s = timeout_s > 0 ? timeout_s : board_.timeout_s();
  unsigned num_given = turn_.num_given();
  auto deadline = Clock::now() + from_seconds(limit_s);
  while (!turn_.take_within(kLook, [] { return false; })) {
    try {
      hooks.tick();
    } catch (...) {
      board_.end(board_.failure(FailureKind::kInterrupted, op, hooks.site()));
      throw;
    }
    if (const auto cause = board_.ended_by()) throw Failure(*cause);
    board_.require_usable(op);
    if (turn_.num_given() != num_given) {  // the others get on
      num_given = turn_.num_given();
      deadline = Clock::now() + from_seconds(limit_s);
    }
    if (Clock::now() < deadline) continue;
    Failure failure = board_.failure(FailureKind::kNoTurn, op, hooks.site());
    failure.timeout_s = limit_s;
    throw board_.end(std::move(failure));
  }
}

/// What waited while the group ended fails with what ended it: the caller made no mistake.
void Worker::run_queued(const std::function<void(Hooks&)>& work, Hooks& hooks) {
  try {
    work(hooks);
  } catch (const Failure& failure) {
    if (failure.kind != FailureKind::kUnusable) throw;
    if (const auto cause = board_.ended_by()) throw Failure(*cause);
    throw;
  }
}

std::shared_ptr<Job> Worker::submit(Op op, std::function<void(Hooks&)> work, std::string site) {
  board_.require_usable(op);
  auto job = std::make_shared<Job>(board_, *this, op, std::move(work), std::move(site));
  {
    std::lock_guard lock(mutex_);
    if (stopping_) board_.require_usable(op);
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    num_pending_.fetch_add(1, std::memory_order_relaxed);
    queue_.push_back(job);
    num_queued_.store(static_cast<int>(queue_.size()), std::memory_order_relaxed);
  }
  queued_.notify_one();
  return job;
}

bool Worker::wait(const std::shared_ptr<Job>& job, Hooks& hooks, double timeout_s) {
  if (job->done()) return true;
  job->require_reachable();
  // The native thread is hardly awake yet, and waking it costs more than most operations. A bounded wait leaves the job
  // to that thread, since an operation that has begun has to be finished.
  if (timeout_s <= 0 && run_if_next(job, hooks)) return true;
  if (board_.spins() &&
      spin(Clock::now() + from_seconds(board_.config().spin_us * 1e-6), [&] { return job->done(); }, [] { return false; }))
    return true;
  return await(*job, hooks, timeout_s);
}

bool Worker::await(const Job& job, Hooks& hooks, double timeout_s) {
  const auto end = Clock::now() + from_seconds(timeout_s);
  std::unique_lock lock(mutex_);
  waiting_.emplace_back(pthread_self(), &job);
  struct Leave {
    Worker& worker;
    std::unique_lock<std::mutex>& lock;
    ~Leave() {
      if (!lock.owns_lock()) lock.lock();
      std::erase_if(worker.waiting_, [](const auto& one) { return one.first == pthread_self(); });
    }
  } leave{*this, lock};
  while (!finished_.wait_for(lock, kLook, [&] { return job.done(); })) {
    if (timeout_s > 0 && Clock::now() >= end) return false;
    lock.unlock();
    hooks.tick();
    lock.lock();
  }
  return true;
}

bool Worker::run_if_next(const std::shared_ptr<Job>& job, Hooks& hooks) {
  if (!turn_.try_take()) return false;
  TurnHolder holder(turn_);
  if (take_next(job.get()) == nullptr) return false;
  JobHooks job_hooks(job->site_, &hooks);
  execute(*job, job_hooks);
  return true;
}

/// Run a job that was taken from the queue in its turn.
void Worker::execute(Job& job, Hooks& hooks) {
  std::exception_ptr error;
  try {
    run_queued(job.work_, hooks);
  } catch (...) {
    error = std::current_exception();
  }
  finish(job, error);
}

void Worker::finish(Job& job, std::exception_ptr error) {
  job.work_ = nullptr;
  job.finish(error);
  {
    std::lock_guard lock(mutex_);
    num_pending_.fetch_sub(1, std::memory_order_release);
  }
  finished_.notify_all();
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

/// Take the job that is next from the queue; none if there is none, or another than `wanted`.
std::shared_ptr<Job> Worker::take_next(const Job* wanted) {
  std::lock_guard lock(mutex_);
  if (queue_.empty() || (wanted != nullptr && queue_.front().get() != wanted)) return nullptr;
  std::shared_ptr<Job> job = std::move(queue_.front());
  queue_.pop_front();
  num_queued_.store(static_cast<int>(queue_.size()), std::memory_order_relaxed);
  return job;
}

void Worker::run() {
  pthread_setname_np(pthread_self(), "phalanx-async");
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      queued_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
    }
    // A group that has ended may never give this thread its turn: destroyed by a signal handler, for one.
    const auto futile = [&] { return num_queued_.load(std::memory_order_relaxed) == 0; };
    bool has_turn = false;
    while (!has_turn && !futile() && !board_.ended()) has_turn = turn_.take_within(kLook, futile);
    const std::shared_ptr<Job> job = take_next();
    if (has_turn) {
      TurnHolder holder(turn_);
      if (job == nullptr) continue;  // a waiter was faster
      JobHooks hooks(job->site_);
      execute(*job, hooks);
    } else if (job != nullptr) {
      const auto cause = board_.ended_by();
      finish(*job, std::make_exception_ptr(
                       cause ? *cause : board_.failure(FailureKind::kDestroyed, job->op_, job->site_)));
    }
  }
}

}  // namespace phalanx
