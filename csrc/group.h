// A process group: one board, its collectives, its messages, its native thread.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "board.h"
#include "collectives.h"
#include "p2p.h"
#include "worker.h"

namespace phalanx {

class Group {
 public:
  /// Make this process rank `config.rank` of the group at `offset`. A child forked later owns neither the threads nor
  /// the membership, and destroying condition variables that vanished threads wait for would hang: it leaks its copy.
  static std::shared_ptr<Group> make(std::shared_ptr<Segment> segment, std::uint64_t offset, GroupConfig config) {
    return std::shared_ptr<Group>(new Group(std::move(segment), offset, std::move(config)), [](Group* group) {
      if (!group->board().forked()) delete group;
    });
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  ~Group() { leave(); }

  Board& board() { return board_; }
  PointToPoint& p2p() { return p2p_; }
  Collectives& collectives() { return collectives_; }
  Worker& worker() { return worker_; }
  std::chrono::nanoseconds spin() const {
    return std::chrono::nanoseconds(board_.spins() ? static_cast<std::int64_t>(board_.config().spin_us * 1e3) : 0);
  }

  /// Run a collective in the calling thread, or behind the asynchronous ones that were called before it.
  template <class Work>
  void run(Hooks& hooks, Work&& work) {
    if (worker_.idle()) {
      std::lock_guard lock(order_);
      work(hooks);
      return;
    }
    board_.require_usable(Op::kNone);
    const auto job = worker_.submit([&](Hooks&) { run_queued(work, hooks); }, hooks.site());
    try {
      worker_.wait(job, hooks, spin(), 0);
    } catch (...) {
      abort("a signal interrupted it");
      Hooks no_hooks;  // the job refers to this frame: nothing may leave it before the job is done
      worker_.wait(job, no_hooks, spin(), 0);
      throw;
    }
    if (job->error()) std::rethrow_exception(job->error());
  }

  /// Run a collective on the native thread.
  std::shared_ptr<Job> submit(std::function<void(Hooks&)> work, std::string site) {
    board_.require_usable(Op::kNone);
    return worker_.submit(
        [this, work = std::move(work)](Hooks& hooks) { run_queued(work, hooks); },
        std::move(site));
  }

  /// End every wait of this group on all ranks, with an error.
  void abort(const std::string& why) {
    if (!board_.forked()) board_.abort(why);
  }

  /// Leave the group: finish what is queued (briefly), say goodbye, stop the threads. Idempotent.
  void leave() {
    if (board_.forked()) return;  // the parent is the rank, and has the threads
    constexpr double kDrainSeconds = 1;
    if (!board_.ended() && !worker_.drain(kDrainSeconds)) abort("the group was destroyed with operations unfinished");
    board_.depart();
    worker_.stop();
    p2p_.stop();
  }

 private:
  Group(std::shared_ptr<Segment> segment, std::uint64_t offset, GroupConfig config)
      : board_(std::move(segment), offset, std::move(config)), collectives_(board_), p2p_(board_) {}

  /// What was queued before the group ended fails with what ended it: the caller made no mistake.
  template <class Work>
  void run_queued(Work& work, Hooks& hooks) {
    std::lock_guard lock(order_);
    try {
      work(hooks);
    } catch (const Failure& failure) {
      if (failure.kind != FailureKind::kUnusable) throw;
      if (const std::optional<Failure> cause = board_.ended_by()) throw Failure(*cause);
      throw;
    }
  }

  Board board_;
  Collectives collectives_;
  PointToPoint p2p_;
  Worker worker_;
  std::mutex order_;  // one collective at a time; threads that share a group take turns
};

}  // namespace phalanx
