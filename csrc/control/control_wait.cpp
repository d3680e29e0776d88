// Waits for peers: sleeps, and regularly checks signals, peers and the clock. model/memory.pml models await() and its
// sleep: change both together.
#include "control/control_block.h"

#include <algorithm>
#include <chrono>
#include <string>

namespace phalanx {
namespace {

using namespace std::chrono_literals;
// How often a sleeping rank checks peers, signals and the clock. In training, ranks wait for milliseconds, so they
// check often at first. The longer they have waited, the less often they check, and the later they may notice a death.
// A check costs about 50 us, plus 16 us for each peer. Ranks of a larger group check less often, because they may share
// the CPUs with ranks that compute.
constexpr auto kLook = 50ms, kFirstLook = 10ms, kLeastLook = 2ms;
constexpr auto kSlice = 25ms;  // the longest sleep before the thread checks whether this process was suspended

Clock::duration until_next_look(Clock::duration waited, int num_ranks) {
  return std::clamp<Clock::duration>(waited * num_ranks / 64, kLeastLook, kLook);
}

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

Clock::duration from_seconds(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

}  // namespace

Wait ControlBlock::begin(const Call& call, std::uint32_t seq, Hooks& hooks, double timeout_s, Bell& bell) {
  require_usable(call.op);
  Wait wait;
  wait.call = call;
  wait.seq = seq;
  wait.hooks = &hooks;
  wait.bell = &bell;
  wait.timeout_s = timeout_s > 0 ? timeout_s : timeout_s_.load(std::memory_order_relaxed);
  // Ranks that yield take turns on the CPU, so every other rank may need a turn before this rank's condition holds.
  const double patience_us = spins_ ? config_.spin_us : config_.spin_us * config_.size;
  wait.patience = std::chrono::nanoseconds(static_cast<std::int64_t>(patience_us * 1e3));
  require_in_order(wait);
  return wait;
}

Recorded ControlBlock::recorded(EventKind kind, const Call& call, std::uint64_t seq) {
  Recorder* const recorder = g_recorder.load(std::memory_order_acquire);
  if (recorder == nullptr) return {};
  // RELAXED: every thread would store the same number.
  std::uint32_t name = recorded_name_.load(std::memory_order_relaxed);
  if (name == 0) recorded_name_.store(name = recorder->name(config_.name), std::memory_order_relaxed);
  const auto code = static_cast<std::uint16_t>(static_cast<unsigned>(call.op) | static_cast<unsigned>(call.dtype) << 8);
  return Recorded(kind, code, name, seq, call.count);
}

/// Called when a peer has ended the group: throws, even if all data of this call has arrived.
void ControlBlock::come_late(Wait& wait) {
  // After a mismatch, the call continues to its own comparison, which adds this rank's row to the table.
  const FailureKind kind = GroupFailure::unpack(header_->group_failure.load(std::memory_order_acquire)).kind;
  if ((kind == FailureKind::kCallsDiffer || kind == FailureKind::kSizesDiffer) && wait.seq != 0) return;
  throw end(*find_group_failure(wait, [](int) { return false; }));
}

void ControlBlock::sleep(Wait& wait, const DoneFn& done, const MissingFn& missing) {
  if (wait.start == Clock::time_point{}) {
    wait.start = Clock::now();
    wait.next_look = wait.start + kFirstLook;
    wait.next_report = wait.start + from_seconds(config_.stall_s);
  }
  StopWatch watch;
  const auto slice = [&] {
    return std::clamp<std::chrono::nanoseconds>(wait.next_look - Clock::now(), kLeastLook, kSlice);
  };
  while (!sleep_on(*wait.bell, slice(), done)) {
    const Clock::duration stopped = watch.stopped();
    wait.left_out += stopped;
    wait.next_report += stopped;
    if (Clock::now() < wait.next_look) continue;
    std::optional<Failure> failure = look_up(wait, missing);
    if (done()) break;  // a peer may finish its part and leave during look_up()
    if (failure) throw end(std::move(*failure));
    wait.next_look = Clock::now() + until_next_look(Clock::now() - wait.start, config_.size);
    watch.begin();  // do not mistake the time spent in look_up() for a suspension
  }
  if (!wait.announced) return;
  wait.announced = false;
  if (wait.awaited) members_[rank()].awaits.store(Awaited{}.pack(), std::memory_order_release);
  say_everywhere("");
}

/// Runs `body`, in which Python may handle signals. If a handler raises, the group ends, because this rank will not
/// return to the collective.
template <class Body>
void ControlBlock::handle_signals(const Wait& wait, Body&& body) {
  try {
    body();
  } catch (...) {
    end(failure(FailureKind::kInterrupted, wait));
    throw;
  }
}

std::optional<Failure> ControlBlock::look_up(Wait& wait, const MissingFn& missing) {
  if (!wait.announced) announce(wait);  // before signals are handled, so that a handler's error can name this operation
  const auto before = Clock::now();
  handle_signals(wait, [&] { wait.hooks->tick(); });
  wait.left_out += Clock::now() - before;  // a handler may open a debugger, in which a person spends a long time
  if (wait.awaited) {
    // RELEASE publishes `site`, which circle() reads after its ACQUIRE load.
    members_[rank()].awaits.store(wait.awaited().pack(), std::memory_order_release);
    if (!told()) wait.circle = circle();  // after a failure, peers withdraw their records: keep the last circle
  }
  if (wait.arriving)
    for (int r = 0; r < config_.size; ++r)
      if (call_differs(r, wait.seq)) mismatch(wait);
  // The first failure that any rank saw explains the deaths that follow from it. A rank publishes a failure before it
  // dies of that failure. So if a rank is found dead, look for a published failure once more.
  if (auto told = find_group_failure(wait, missing)) return told;
  if (auto dead = find_dead(wait, missing)) {
    if (auto told = find_group_failure(wait, missing)) return told;
    return dead;
  }
  if (ended()) return failure(FailureKind::kDestroyed, wait);
  stop_clock(wait);
  if (seconds_since(wait.start + wait.left_out) >= wait.timeout_s) return timed_out(wait, missing);
  if (!wait.quiet && Clock::now() >= wait.next_report) report_stall(wait, missing);
  return std::nullopt;
}

/// Excludes from the deadline the time in which a debugger holds any rank. That rank need not be in this group: a peer
/// may wait for it in another group while this rank waits for the peer.
void ControlBlock::stop_clock(Wait& wait) {
  if (!segment_->is_held()) {
    wait.held_until = {};
    wait.told_of_debugger = false;
    return;
  }
  const auto now = Clock::now();
  if (wait.held_until != Clock::time_point{}) {
    wait.left_out += now - wait.held_until;
    if (wait.told_of_debugger) wait.next_report += now - wait.held_until;
  }
  wait.told_of_debugger |= now >= wait.next_report;
  wait.held_until = now;
}

/// Reports the missing ranks; later reports come at longer intervals, because earlier ones stay on the screen.
void ControlBlock::report_stall(Wait& wait, const MissingFn& missing) {
  wait.next_report = Clock::now() + from_seconds(config_.stall_s * (wait.has_reported ? 6 : 3));  // as report_due_s() in wording.py
  wait.has_reported = true;
  const Failure late = timed_out(wait, missing);
  if (config_.on_stall && !late.ranks.empty())
    handle_signals(wait, [&] { config_.on_stall(late, seconds_since(wait.start)); });
}

void ControlBlock::announce(Wait& wait) {
  wait.announced = true;
  std::string text = op_name(wait.call.op);
  if (wait.seq != 0) text += " #" + std::to_string(number(wait.seq));
  text += " of group '" + config_.name + "'";
  if (wait.seq != 0) collective_ = text;  // set before site() runs Python, because a signal handler may read it there
  const std::string site = wait.hooks->site();
  if (!site.empty()) text += " at " + site;
  if (wait.seq != 0) collective_ = text;
  say_everywhere(text);
}

}  // namespace phalanx
