// One rank's part of a process group: the control block, collectives and messages, and the order in which they run.
#pragma once

#include <atomic>
#include <cstdint>
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
  /// Make this rank's part of the group at `offset`. A child that is forked later never destroys its copy of the group:
  /// the child has neither the group's threads nor its membership, and destroying a condition variable that a vanished
  /// thread waits on would hang.
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

  /// Count a collective when it is called, not when it begins: an asynchronous collective may begin later, and at a
  /// different point of the script on each rank. The caller holds the GIL.
  void note_issued() { ++issued_; }
  std::uint64_t issued() const { return issued_; }

  /// End every wait of this group on all ranks, with an error.
  void abort(const std::string& why) {
    if (!control_.forked()) control_.abort(why);
  }

  /// Leave the group: wait at most a second for the queued operations, tell the peers, and stop the threads. A second
  /// call changes nothing. `why`: the error that makes this rank leave; empty if there is none. After an error, the
  /// queued operations are not waited for, and the peers learn of the error.
  void leave(const std::string& why = "") {
    if (control_.forked()) return;  // the parent, not this child, is the rank and has the threads
    if (left_.exchange(true, std::memory_order_acq_rel)) return;  // this thread or another has left already
    constexpr double kDrainSeconds = 1;
    // In a signal handler, waiting is in vain: the operation that the signal interrupted cannot finish.
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
  std::uint64_t issued_ = 0;
  std::atomic<bool> left_{false};
};

}  // namespace phalanx
