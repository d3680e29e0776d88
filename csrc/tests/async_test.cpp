// Tests of operations on the native thread of a group, and of their order.
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <vector>

#include "ranks.h"

namespace phalanx::tests {
namespace {

/// A flag that a thread can wait for.
class Gate {
 public:
  void open() {
    std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  bool wait(double timeout_s = 60) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] { return open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

/// An asynchronous all_reduce that sums the `count` values `first`, `first` + 1, ... over the ranks.
struct SumWork {
  std::vector<std::int64_t> data;
  std::shared_ptr<CollectiveWork> work;

  SumWork(Rank& self, std::size_t count, std::int64_t first) : data(count) {
    std::iota(data.begin(), data.end(), first);
    work = self.group->worker().submit(Op::kAllReduce, [&self, this](Hooks& hooks) { run(self.collectives(), hooks); }, "async.py:7");
  }
  SumWork(const SumWork&) = delete;
  SumWork& operator=(const SumWork&) = delete;
  void run(Collectives& collectives, Hooks& hooks) {
    collectives.all_reduce(Context{&hooks}, data.data(), data.data(),
                           Items{static_cast<std::uint8_t>(Dtype::kInt64), 8, data.size()},
                           Reduction{1, find_reduce(Dtype::kInt64, ReduceOp::kSum)});
  }
  void check(int size, std::int64_t first) const {
    for (std::size_t i = 0; i < data.size(); ++i)
      CHECK_EQ(data[i], size * (first + static_cast<std::int64_t>(i)));
  }
};

CASE(jobs_run_in_the_order_of_their_calls_and_blocking_calls_behind_them) {
  for (const int n : {1, 2, 3})
    run_ranks(n, [](Rank& self) {
      std::vector<std::unique_ptr<SumWork>> works;
      std::vector<int> finished;
      std::mutex mutex;
      for (int i = 0; i < 20; ++i) {
        works.push_back(std::make_unique<SumWork>(self, i % 4 == 3 ? 12'000 : 3, i));
        works.back()->work->notify([&, i] {
          std::lock_guard lock(mutex);
          finished.push_back(i);
        });
      }
      self.group->worker().run(Op::kBarrier, 0, self.hooks, [&](Hooks& hooks) { self.collectives().barrier(Context{&hooks}); });
      // All ranks made the same calls in the same order, and the barrier came last: everything before it is done.
      CHECK(self.group->worker().drain(60));
      std::lock_guard lock(mutex);
      CHECK_EQ(finished.size(), works.size());
      for (int i = 0; i < 20; ++i) {
        CHECK_EQ(finished[static_cast<std::size_t>(i)], i);
        CHECK(works[static_cast<std::size_t>(i)]->work->done() && !works[static_cast<std::size_t>(i)]->work->error());
        works[static_cast<std::size_t>(i)]->check(self.size, i);
      }
    });
}

CASE(waiting_for_a_job_runs_it_or_waits_until_it_has_run) {
  run_ranks(2, [](Rank& self) {
    for (int i = 0; i < 200; ++i) {
      SumWork sum(self, 4, i);
      CHECK(self.group->worker().wait(sum.work, self.hooks, 0));
      sum.check(2, i);
    }
  });
}

CASE(waiting_for_a_job_gives_up_at_its_limit) {
  Gate late;
  run_ranks(2, [&](Rank& self) {
    if (self.rank == 0) {
      SumWork sum(self, 4, 0);
      SumWork next(self, 4, 0);  // waits in the queue behind `sum`: only the native thread may run it
      CHECK(!self.group->worker().wait(next.work, self.hooks, 0.05));
      late.open();
      CHECK(self.group->worker().wait(next.work, self.hooks, 0));
      sum.check(2, 0);
    } else {
      CHECK(late.wait());
      for (int i = 0; i < 2; ++i) {
        SumWork sum(self, 4, 0);
        CHECK(self.group->worker().wait(sum.work, self.hooks, 0));
      }
    }
  });
}

CASE(a_failed_job_keeps_its_failure_and_those_behind_it_fail_of_the_same) {
  run_ranks(2, [](Rank& self) {
    SumWork wrong(self, self.rank == 0 ? 3 : 4, 0);
    SumWork behind(self, 3, 0);
    for (const auto& work : {wrong.work, behind.work}) {
      CHECK(self.group->worker().wait(work, self.hooks, 0));
      CHECK(work->error() != nullptr);
    }
    const Failure first = failure_of([&] { std::rethrow_exception(wrong.work->error()); });
    CHECK_EQ(static_cast<int>(first.kind), static_cast<int>(FailureKind::kCallsDiffer));
    CHECK_EQ(first.site, "async.py:7");
    const Failure second = failure_of([&] { std::rethrow_exception(behind.work->error()); });
    CHECK_EQ(static_cast<int>(second.kind), static_cast<int>(FailureKind::kCallsDiffer));
  });
}

/// Calls `handler` once during a wait, as Python calls a signal handler.
class Signalled : public Hooks {
 public:
  explicit Signalled(std::function<void()> handler) : handler_(std::move(handler)) {}
  void tick() override {
    if (auto handler = std::exchange(handler_, nullptr)) handler();
  }

 private:
  std::function<void()> handler_;
};

CASE(a_call_inside_a_call_is_refused_and_the_outer_one_goes_on) {
  Gate late;
  run_ranks(2, [&](Rank& self) {
    Worker& worker = self.group->worker();
    const auto barrier = [&](Hooks& hooks) { self.collectives().barrier(Context{&hooks}); };
    if (self.rank == 1) {
      CHECK(late.wait());
      for (int i = 0; i < 2; ++i) worker.run(Op::kBarrier, 0, self.hooks, barrier);
      return;
    }
    std::shared_ptr<CollectiveWork> work;
    Signalled hooks([&] {
      work = worker.submit(Op::kBarrier, barrier, "handler.py:9");
      for (const auto& call : {std::function<void()>([&] { worker.run(Op::kBarrier, 0, self.hooks, barrier); }),
                               std::function<void()>([&] { worker.wait(work, self.hooks, 0); }),
                               std::function<void()>([&] { work->require_reachable(); })}) {
        const Failure failure = failure_of(call);
        CHECK(failure.kind == FailureKind::kNested || failure.kind == FailureKind::kNestedWait);
        CHECK_CONTAINS(failure.detail, "barrier #1 of group 'world'");
      }
      late.open();
    });
    worker.run(Op::kBarrier, 0, hooks, barrier);
    CHECK(worker.wait(work, self.hooks, 0) && !work->error());
  });
}

CASE(waiting_for_the_turn_of_another_thread_looks_at_signals_and_at_the_clock) {
  struct Interruption {};
  for (const bool has_signal : {true, false})
    run_ranks(2, [&](Rank& self) {
      if (self.rank == 1) return;
      Worker& worker = self.group->worker();
      Gate inside, over;
      std::thread other([&] {
        Hooks hooks;
        worker.run(Op::kBarrier, 0, hooks, [&](Hooks&) {
          inside.open();
          CHECK(over.wait());
        });
      });
      CHECK(inside.wait());
      if (has_signal) {
        Signalled hooks([] { throw Interruption(); });
        bool interrupted = false;
        try {
          worker.run(Op::kBarrier, 0, hooks, [](Hooks&) { CHECK(false); });
        } catch (const Interruption&) {
          interrupted = true;
        }
        CHECK(interrupted);
      } else {
        const Failure failure =
            failure_of([&] { worker.run(Op::kBarrier, 0.1, self.hooks, [](Hooks&) { CHECK(false); }); });
        CHECK_EQ(static_cast<int>(failure.kind), static_cast<int>(FailureKind::kNoTurn));
      }
      CHECK(self.group->control().ended());
      over.open();
      other.join();
    });
}

CASE(everybody_who_asks_is_told_of_the_end) {
  run_ranks(2, [](Rank& self) {
    SumWork sum(self, 4, 0);
    std::atomic<int> num_told{0};
    for (int i = 0; i < 3; ++i) sum.work->notify([&] { ++num_told; });
    CHECK(self.group->worker().wait(sum.work, self.hooks, 0));
    CHECK_EQ(num_told.load(), 3);
    sum.work->notify([&] { ++num_told; });
    CHECK_EQ(num_told.load(), 4);
  });
}

CASE(leaving_with_a_job_that_cannot_finish_ends_it) {
  run_ranks(2, [](Rank& self) {
    if (self.rank == 1) return;  // rank 1 leaves
    SumWork sum(self, 4, 0);
    self.group->leave();
    CHECK(sum.work->done() && sum.work->error() != nullptr);
  });
}

}  // namespace
}  // namespace phalanx::tests
