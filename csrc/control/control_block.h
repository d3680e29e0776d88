// A group's control block in shared memory: membership, arrival and liveness of its ranks, and the wait that checks all
// of these. model/memory.pml models await(): a change to it needs the same change there.
//
// Every wait ends: when its condition holds, when a peer dies (checked every 2 to 50 ms), on a mismatch, when a peer
// has published a failure here, on Ctrl-C, or at the deadline. The first rank that knows of a failure publishes it: its
// kind, the rank at fault (the culprit) and the rank that reports it. So all survivors name the same culprit, although
// other ranks may die as a consequence. Each survivor adds what it has observed itself. After a group has ended, every
// later call fails with an error that says so.
//
// After 10 s (PHALANX_STALL_S), a waiting rank prints which ranks are missing and what each of them does. In the
// default group, only the lowest waiting rank prints this again, 30 s later and then every 60 s, because reports of
// many ranks would scroll the first one off the screen. Native threads print through Python, too. They stop printing
// before the interpreter ends, because after that they would never get the GIL.
#pragma once

#include <sched.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "control/call.h"
#include "control/failure.h"
#include "memory/layout.h"
#include "memory/peers.h"
#include "memory/record.h"
#include "collectives/reduce.h"
#include "memory/segment.h"
#include "memory/wait.h"

namespace phalanx {

struct GroupConfig {
  int rank = 0;
  int size = 1;
  std::string name;               // as the user knows it
  std::vector<int> global_ranks;  // each rank's number in the world, which messages show
  double timeout_s = 1800;
  double stall_s = 10;
  double spin_us = 50;
  /// Called in the waiting thread to report a long wait: which ranks are missing, and how long the thread has waited.
  /// If this function throws, the wait ends.
  std::function<void(const Failure& missing, double waited_s)> on_stall;
};

/// The state of one operation's wait: what the operation waits for, since when, and until when.
struct Wait {
  Call call;
  std::uint32_t seq = 0;  // 0: point-to-point
  Hooks* hooks = nullptr;
  Bell* bell = nullptr;
  bool arriving = false;  // not all ranks have arrived, so none can have finished: any death is fatal
  bool quiet = false;     // if true, there are no stall reports
  const std::atomic<bool>* spares_departed = nullptr;  // if true, a rank that left normally does not end this wait
  bool has_reported = false;
  double timeout_s = 0;
  std::chrono::nanoseconds patience{0};  // time to spin (or yield, if a peer may need this CPU) before sleeping
  Clock::time_point start{}, next_look{}, next_report{};
  Clock::duration left_out{};      // time that the deadline excludes: in signal handlers, in debuggers, while suspended
  Clock::time_point held_until{};  // when a check last found a rank in a debugger
  bool told_of_debugger = false;   // the stall report has named the debugger: once is enough
  bool announced = false;
  std::vector<Waiter> circle;        // the cycle of waiting ranks that this rank was part of before the group ended
  Recorded recorded;                 // the operation's event in this rank's black box
  // Returns the message that this rank waits for; no message, if the rank has further messages in flight. Empty for
  // collectives, for quiet waits and for receives from any source.
  std::function<Awaited()> awaited;
};

class ControlBlock {
 public:
  /// Allocate and initialize the control block of a group of `size` ranks; returns its offset in the segment.
  static std::uint64_t create(Segment& segment, int size);

  ControlBlock(std::shared_ptr<Segment> segment, std::uint64_t offset, GroupConfig config);
  ControlBlock(const ControlBlock&) = delete;
  ControlBlock& operator=(const ControlBlock&) = delete;
  ~ControlBlock();

  const GroupConfig& config() const { return config_; }
  int rank() const { return config_.rank; }
  int size() const { return config_.size; }
  Segment& segment() { return *segment_; }
  GroupHeader& header() { return *header_; }
  Member& member(int r) { return members_[r]; }
  Line& line(int r, std::uint32_t seq) { return lines_[2 * r + (seq & 1)]; }
  Progress& progress(int r) { return progress_[r]; }
  Bell& p2p_bell(int r) { return bells_[r]; }
  std::atomic<std::uint64_t>& channel(int src, int dst) { return channels_[src * config_.size + dst]; }
  std::byte* stage(int r, std::uint32_t seq) { return stages_ + (2 * r + (seq & 1)) * kStageBytes; }

  /// Start to watch the peers, and decide whether to spin. Call this after the first collective, when every rank's
  /// identity is known.
  void watch_peers();
  bool spins() const { return spins_; }
  /// True if all ranks live in one pid namespace, so that a pid names the same process for all of them.
  bool shares_pids() const;

  /// Begin an event in the black box; it ends when the returned object is destroyed.
  Recorded recorded(EventKind kind, const Call& call, std::uint64_t seq);

  /// Begin an operation: throws if the group has ended.
  Wait begin(const Call& call, std::uint32_t seq, Hooks& hooks, double timeout_s, Bell& bell);

  /// Wait until `missing(r)` is false for every rank. Once `missing(r)` is false, it must stay false.
  template <class Missing>
  void await(Wait& wait, Missing&& missing) {
    int next = 0;
    auto done = [&] {
      while (next < config_.size && !missing(next)) ++next;
      return next == config_.size;
    };
    if (done()) return;
    for (int i = 0; spins_ && i < kEagerLooks; ++i)
      if (done()) return;
    if (wait.patience.count() > 0) {
      const auto end = Clock::now() + wait.patience;
      if (spins_ && spin(end, done, [&] { return shares_cpu(); })) return;
      if (yield(end, done)) return;
    }
    sleep(wait, done, missing);
  }

  /// Set the timeout of later operations that have no timeout of their own.
  void set_timeout(double timeout_s) { timeout_s_.store(timeout_s, std::memory_order_relaxed); }
  double timeout_s() const { return timeout_s_.load(std::memory_order_relaxed); }

  /// Tell the peers which CPU this thread runs on, if it has moved.
  void publish_cpu() noexcept {
    // RELAXED: a hint that orders nothing.
    std::atomic<std::uint32_t>& cpu = progress_[rank()].cpu;
    const auto now = static_cast<std::uint32_t>(sched_getcpu() + 1);
    if (cpu.load(std::memory_order_relaxed) != now) cpu.store(now, std::memory_order_relaxed);
  }
  /// True if a peer was last seen on this thread's CPU, where it cannot run while this thread spins.
  bool shares_cpu() const noexcept {
    const auto now = static_cast<std::uint32_t>(sched_getcpu() + 1);
    for (int r = 0; r < config_.size; ++r)
      if (r != rank() && progress_[r].cpu.load(std::memory_order_relaxed) == now) return true;
    return false;
  }

  /// Tell the peers in all groups of this process where this rank waits, while it waits outside of any group. An empty
  /// `text` withdraws the statement.
  static void say_on_all(const std::string& text);

  /// Tell the peers in all groups of this process that a debugger holds this process, and where. Until a call with an
  /// empty `text` withdraws the statement, the deadlines of waiting peers do not run.
  static void hold_on_all(const std::string& text);

  /// End the group because of `failure`, for this process and for the peers. Returns the failure to throw.
  Failure end(Failure failure);
  /// End the group from another thread: every wait in the group ends, here and on the peers.
  void abort(const std::string& why);
  /// Leave the group and tell the peers. `why`: the error that makes this rank leave, which the peers can then read;
  /// empty if there is none. Later operations of this rank fail.
  void depart(const std::string& why);
  /// True in a child that was forked after the group was made. Such a child must touch nothing of the group.
  bool forked() const;
  bool ended() const { return ended_.load(std::memory_order_acquire); }
  /// Like ended(), but also true if a peer has ended the group and no operation of this rank has noticed yet.
  bool told() const { return ended() || header_->group_failure.load(std::memory_order_acquire) != 0; }
  void require_usable(Op op);
  /// Throw if a peer has ended the group since this operation began. After a mismatch, a collective throws later
  /// instead, when it compares the calls itself.
  void require_in_order(Wait& wait) {
    if (header_->group_failure.load(std::memory_order_acquire) != 0) come_late(wait);
  }
  /// Throw if the group has ended. If rank `r` has ended or left the group, end the group and throw.
  void require_peer(const Call& call, int r, Hooks& hooks);
  /// Throw in a forked child. Call this before taking any lock: in the child, a thread that exists only in the parent
  /// may hold a lock forever.
  void require_own_process(Op op) const;
  /// The failure that ended the group, with which queued operations fail; null if no failure ended the group.
  std::shared_ptr<const Failure> ended_by();

  /// End the group because the ranks' calls differ or, with `sizes`, because two sizes in their lists contradict each
  /// other. Throws the failure that shows what each rank called. First waits a moment for ranks that have not called
  /// yet.
  [[noreturn]] void mismatch(Wait& wait, std::optional<SizeDispute> sizes = {});
  /// True if rank `r` has made call number `seq` and that call differs from this rank's call.
  bool call_differs(int r, std::uint32_t seq) {
    const Line &theirs = line(r, seq), &mine = line(rank(), seq);
    return theirs.seq.load(std::memory_order_acquire) == seq &&
           (theirs.what != mine.what || theirs.detail != mine.detail);
  }
  int global(int r) const { return config_.global_ranks[r]; }
  /// The collective in progress, as "all_reduce #42 of group 'world' at train.py:31". Only the thread that runs the
  /// collective may call this function.
  const std::string& collective() const { return collective_; }
  /// Return a failure that this rank has met. Its `ranks`, the ranks at fault, hold only this rank until the caller
  /// sets others.
  Failure failure(FailureKind kind, Op op, std::string site) const;
  Failure failure(FailureKind kind, const Wait& wait) const;

  /// The number of a collective as messages show it. The join, the first collective of a group, does not count.
  static std::uint32_t number(std::uint32_t seq) { return seq == 0 ? 0 : seq - 1; }

 private:
  // Number of checks before await() first pauses and reads the clock, which costs as much as a small message.
  static constexpr int kEagerLooks = 50;

  using DoneFn = std::function<bool()>;
  using MissingFn = std::function<bool(int)>;

  void sleep(Wait& wait, const DoneFn& done, const MissingFn& missing);
  std::optional<Failure> look_up(Wait& wait, const MissingFn& missing);
  std::optional<Failure> find_dead(const Wait& wait, const MissingFn& missing);
  std::optional<Failure> is_dead(int r, const Wait& wait, bool told = false);
  const PeerWatch* watch_of(int r);
  void come_late(Wait& wait);
  std::optional<Failure> find_group_failure(const Wait& wait, const MissingFn& missing);
  Failure timed_out(const Wait& wait, const MissingFn& missing);
  std::vector<Waiter> circle();
  bool is_on_its_way(int src, int dst);
  template <class Body>
  void handle_signals(const Wait& wait, Body&& body);
  void report_stall(Wait& wait, const MissingFn& missing);
  void stop_clock(Wait& wait);
  void announce(Wait& wait);
  void say_here(const std::string& text);
  void say_everywhere(const std::string& text);
  Standing stand_of(int r);
  std::vector<MadeCall> calls_made(std::uint32_t seq);
  void ring_all();

  std::shared_ptr<Segment> segment_;
  std::atomic<std::uint32_t> recorded_name_{0};  // number of the group's name among the recorder's texts
  std::uint64_t offset_;
  GroupConfig config_;
  int made_after_forks_;
  Mapping region_;
  GroupHeader* header_ = nullptr;
  Member* members_ = nullptr;
  Line* lines_ = nullptr;
  Progress* progress_ = nullptr;
  Bell* bells_ = nullptr;
  std::atomic<std::uint64_t>* channels_ = nullptr;
  std::byte* stages_ = nullptr;
  std::vector<std::shared_ptr<const PeerWatch>> watches_;  // complete after watch_peers(), so threads can share it
  bool spins_ = false;
  std::atomic<double> timeout_s_;
  std::atomic<bool> ended_{false};
  std::mutex ended_mutex_;
  std::string collective_;
  std::string said_before_hold_;
  std::shared_ptr<const Failure> ended_by_;
};

}  // namespace phalanx
