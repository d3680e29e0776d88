// Runs the collectives of a group in the order in which they were called: see worker.h for what callers may rely on.
#include "collectives/worker.h"

#include <pthread.h>

#include <algorithm>

namespace phalanx {
namespace {

using namespace std::chrono_literals;
constexpr auto kLook = 50ms;  // how often a waiting thread checks signals, the group and the clock

/// Hooks of a queued operation. The call site was found when the operation was queued. Signals are handled only if a
/// caller's thread runs the operation: the native thread handles none.
class WorkHooks : public Hooks {
 public:
  explicit WorkHooks(const std::string& site, Hooks* caller = nullptr) : site_(site), caller_(caller) {}
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

CollectiveWork::CollectiveWork(ControlBlock& control, Worker& worker, Op op, std::function<void(Hooks&)> body, std::string site)
    : Work(control, op), worker_(worker), body_(std::move(body)), site_(std::move(site)) {}

void CollectiveWork::require_reachable() const {
  Work::require_reachable();
  if (!done() && worker_.interrupted())
    throw worker_.inside_another(FailureKind::kNestedWait, op_, site_);
}

bool Worker::interrupted() const {
  if (turn_.mine()) return true;
  std::lock_guard lock(mutex_);
  return std::any_of(waiting_.begin(), waiting_.end(), [](const auto& one) { return one.first == pthread_self(); });
}

Failure Worker::inside_another(FailureKind kind, Op op, std::string site) const {
  Failure failure = control_.failure(kind, op, std::move(site));
  failure.detail = control_.collective();
  if (turn_.mine()) return failure;
  std::lock_guard lock(mutex_);
  for (const auto& [thread, work] : waiting_)
    if (thread == pthread_self())
      failure.detail = std::string("the wait for ") + op_name(work->op_) + " of group '" + control_.config().name + "'" +
                       at_site(work->site_);
  return failure;
}

/// Run a call that could not begin at once.
void Worker::run_in_turn(Op op, double timeout_s, Hooks& hooks, const std::function<void(Hooks&)>& body) {
  if (interrupted()) throw inside_another(FailureKind::kNested, op, hooks.site());
  if (idle()) {
    take_turn(op, timeout_s, hooks);
    TurnHolder holder(turn_);
    run_queued(body, hooks);
    return;
  }
  const auto work = submit(op, body, hooks.site());
  try {
    wait(work, hooks, 0);
  } catch (...) {
    control_.abort("a signal interrupted a collective");
    Hooks no_hooks;  // the operation refers to objects of this frame, so wait until the operation is done
    await(*work, no_hooks, 0);
    throw;
  }
  if (work->error()) std::rethrow_exception(work->error());
}

/// Wait until no other thread is in a collective. If this wait fails, the rank has missed a collective, so the group
/// ends.
void Worker::take_turn(Op op, double timeout_s, Hooks& hooks) {
  const double limit_s = timeout_s > 0 ? timeout_s : control_.timeout_s();
  unsigned num_given = turn_.num_given();
  auto deadline = Clock::now() + from_seconds(limit_s);
  StopWatch watch;
  while (!turn_.take_within(kLook, [] { return false; })) {
    deadline += watch.stopped();
    try {
      hooks.tick();
    } catch (...) {
      control_.end(control_.failure(FailureKind::kInterrupted, op, hooks.site()));
      throw;
    }
    if (const auto cause = control_.ended_by()) throw Failure(*cause);
    control_.require_usable(op);
    if (turn_.num_given() != num_given) {  // other threads are making progress
      num_given = turn_.num_given();
      deadline = Clock::now() + from_seconds(limit_s);
    }
    if (Clock::now() < deadline) continue;
    Failure failure = control_.failure(FailureKind::kNoTurn, op, hooks.site());
    failure.timeout_s = limit_s;
    throw control_.end(std::move(failure));
  }
}

/// Runs an operation that had to wait before it could begin. If the group ended meanwhile, the operation fails with the
/// failure that ended the group, not with kUnusable: its caller made no mistake.
void Worker::run_queued(const std::function<void(Hooks&)>& body, Hooks& hooks) {
  try {
    body(hooks);
  } catch (const Failure& failure) {
    if (failure.kind != FailureKind::kUnusable) throw;
    if (const auto cause = control_.ended_by()) throw Failure(*cause);
    throw;
  }
}

std::shared_ptr<CollectiveWork> Worker::submit(Op op, std::function<void(Hooks&)> body, std::string site) {
  control_.require_usable(op);
  auto work = std::make_shared<CollectiveWork>(control_, *this, op, std::move(body), std::move(site));
  {
    std::lock_guard lock(mutex_);
    if (stopping_) control_.require_usable(op);
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    num_pending_.fetch_add(1, std::memory_order_relaxed);
    queue_.push_back(work);
    num_queued_.store(static_cast<int>(queue_.size()), std::memory_order_relaxed);
  }
  queued_.notify_one();
  return work;
}

bool Worker::wait(const std::shared_ptr<CollectiveWork>& work, Hooks& hooks, double timeout_s) {
  if (work->done()) return true;
  work->require_reachable();
  // Without a timeout, this thread runs the operation: the native thread is probably still waking up, which takes
  // longer than most operations. With a timeout, this thread leaves the operation to the native thread, because a
  // thread has to finish an operation that it has begun, and could not return at the timeout.
  if (timeout_s <= 0 && run_if_next(work, hooks)) return true;
  if (control_.spins() &&
      spin(Clock::now() + from_seconds(control_.config().spin_us * 1e-6), [&] { return work->done(); }, [] { return false; }))
    return true;
  return await(*work, hooks, timeout_s);
}

bool Worker::await(const CollectiveWork& work, Hooks& hooks, double timeout_s) {
  auto end = Clock::now() + from_seconds(timeout_s);
  StopWatch watch;
  std::unique_lock lock(mutex_);
  waiting_.emplace_back(pthread_self(), &work);
  struct Leave {
    Worker& worker;
    std::unique_lock<std::mutex>& lock;
    ~Leave() {
      if (!lock.owns_lock()) lock.lock();
      std::erase_if(worker.waiting_, [](const auto& one) { return one.first == pthread_self(); });
    }
  } leave{*this, lock};
  while (!finished_.wait_for(lock, kLook, [&] { return work.done(); })) {
    end += watch.stopped();
    if (timeout_s > 0 && Clock::now() >= end) return false;
    lock.unlock();
    hooks.tick();
    lock.lock();
  }
  return true;
}

bool Worker::run_if_next(const std::shared_ptr<CollectiveWork>& work, Hooks& hooks) {
  if (!turn_.try_take()) return false;
  TurnHolder holder(turn_);
  if (take_next(work.get()) == nullptr) return false;
  WorkHooks work_hooks(work->site_, &hooks);
  execute(*work, work_hooks);
  return true;
}

/// Runs an operation that has been taken from the queue.
void Worker::execute(CollectiveWork& work, Hooks& hooks) {
  const AtSite at(work.site_);
  std::exception_ptr error;
  try {
    run_queued(work.body_, hooks);
  } catch (...) {
    error = std::current_exception();
  }
  finish(work, error);
}

void Worker::finish(CollectiveWork& work, std::exception_ptr error) {
  work.body_ = nullptr;
  work.finish(error);
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

/// Takes the next operation from the queue. Returns null if the queue is empty, or if the next operation is not
/// `wanted` (a null `wanted` accepts any).
std::shared_ptr<CollectiveWork> Worker::take_next(const CollectiveWork* wanted) {
  std::lock_guard lock(mutex_);
  if (queue_.empty() || (wanted != nullptr && queue_.front().get() != wanted)) return nullptr;
  std::shared_ptr<CollectiveWork> work = std::move(queue_.front());
  queue_.pop_front();
  num_queued_.store(static_cast<int>(queue_.size()), std::memory_order_relaxed);
  return work;
}

void Worker::run() {
  pthread_setname_np(pthread_self(), "phalanx-async");
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      queued_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
    }
    // Stop waiting for the turn once the group has ended: if a signal handler destroyed the group, the collective that
    // the signal interrupted keeps the turn until this thread has ended.
    const auto futile = [&] { return num_queued_.load(std::memory_order_relaxed) == 0; };
    bool has_turn = false;
    while (!has_turn && !futile() && !control_.ended()) has_turn = turn_.take_within(kLook, futile);
    const std::shared_ptr<CollectiveWork> work = take_next();
    if (has_turn) {
      TurnHolder holder(turn_);
      if (work == nullptr) continue;  // a waiting caller has taken it
      WorkHooks hooks(work->site_);
      execute(*work, hooks);
    } else if (work != nullptr) {
      const auto cause = control_.ended_by();
      finish(*work, std::make_exception_ptr(
                       cause ? *cause : control_.failure(FailureKind::kDestroyed, work->op_, work->site_)));
    }
  }
}

}  // namespace phalanx
