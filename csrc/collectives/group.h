// A process group: its control block, its collectives, its messages, the order in which they run.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "control/control_block.h"
#include "collectives/collectives.h"
#include "p2p/p2p.h"
#include "collectives/worker.h"

namespace phalanx {

class Group {
 public:
  /// Make this process rank `config.rank` of the group at `offset`. A child forked later owns neither the threads nor
  /// the membership, and destroying condition variables that vanished threads wait for would hang: it leaks its copy.
  static std::shared_ptr<Group> make(std::shared_ptr<Segment> segment, std::uint64_t offset, GroupConfig config) {
    return std::shared_ptr<Group>(new Group(std::move(segment), offset, std::move(config)), [](Group* group) {
      if (!group->control().forked()) delete group;
    });
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  ~Group() { leave(); }

  ControlBlock& control() { return control_; }
  PointToPoint& p2p() { return p2p_; }
  Collectives& collectives() { return collectives_; }
  Worker& worker() { return worker_; }

  /// End every wait of this group on all ranks, with an error.
  void abort(const std::string& why) {
    if (!control_.forked()) control_.abort(why);
  }

  /// Leave the group: finish what is queued (briefly), say goodbye, stop the threads. Idempotent.
  /// `why`, the error that is the reason, leaves no time for what is queued, and is told to the peers.
  void leave(const std::string& why = "") {
    if (control_.forked()) return;  // the parent is the rank, and has the threads
    if (left_.exchange(true, std::memory_order_acq_rel)) return;  // perhaps in another thread
    constexpr double kDrainSeconds = 1;
    // In a signal handler, what it interrupted cannot finish.
    if (why.empty() && !control_.ended() && (worker_.interrupted() || !worker_.drain(kDrainSeconds)))
      abort("the group was destroyed with operations unfinished");
    control_.depart(why);
    worker_.stop();
    p2p_.stop();
  }

 private:
  Group(std::shared_ptr<Segment> segment, std::uint64_t offset, GroupConfig config)
      : control_(std::move(segment), offset, std::move(config)), collectives_(control_), p2p_(control_), worker_(control_) {}

  ControlBlock control_;
  Collectives collectives_;
  PointToPoint p2p_;
  Worker worker_;
  std::atomic<bool> left_{false};
};

}  // namespace phalanx
