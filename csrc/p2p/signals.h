// Signals of a window: counters in memory that all ranks of a host map, one for each pair of sender and receiver.
//
// A sender adds one to the counter; a receiver waits until the counter has reached the number of the signal that it
// expects. So no signal is lost, and a sender never waits. After the wait, the receiver sees what the sender wrote
// before the signal (a put). The receiver waits as it does for a message, asleep on the same bell, so it notices
// deaths, aborts, Ctrl-C and its deadline. Empty messages were the alternative, but a ring has 128 records, so the
// 129th signal would have to wait for the receiver.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "control/control_block.h"

namespace phalanx {

using SignalCounter = std::atomic<std::uint64_t>;

/// True if this thread has checked within the last millisecond that the peer is alive; if not, the caller must check
/// now. Asking the kernel takes ten times as long as the signal. If the peer has ended since then, the next call or the
/// wait for the peer's answer notices it.
inline bool was_just_alive(const ControlBlock& control, int peer) {
  thread_local struct {
    const ControlBlock* control = nullptr;
    int peer = -1;
    Clock::time_point at{};
  } last;
  const auto now = Clock::now();
  if (last.control == &control && last.peer == peer && now - last.at < std::chrono::milliseconds(1)) return true;
  last = {&control, peer, now};
  return false;
}

/// Send one more signal to rank `peer`, and wake the rank. Throws if the rank has ended or left the group, or if the
/// group has ended.
inline void send_signal(ControlBlock& control, SignalCounter& counter, int peer, Hooks& hooks) {
  Call call;
  call.op = Op::kSignal;
  if (was_just_alive(control, peer))
    control.begin(call, 0, hooks, 0, control.p2p_bell(control.rank()));  // throws if the group has ended
  else
    control.require_peer(call, peer, hooks);
  // RELEASE publishes what this rank has written before; pairs with await_signal().
  counter.fetch_add(1, std::memory_order_release);
  if (Bell& bell = control.p2p_bell(peer); has_sleepers(bell)) ring(bell);
}

/// Wait until rank `peer` has sent signal `number`, counted from 1.
inline void await_signal(ControlBlock& control, const SignalCounter& counter, std::uint64_t number, int peer, Hooks& hooks,
                         double timeout_s) {
  Call call;
  call.op = Op::kWaitSignal;
  Wait wait = control.begin(call, 0, hooks, timeout_s, control.p2p_bell(control.rank()));
  wait.recorded = control.recorded(EventKind::kMessage, call, static_cast<std::uint64_t>(peer + 1));
  // ACQUIRE shows what the peer wrote before the signal; pairs with send_signal().
  control.await(wait, [&](int r) { return r == peer && counter.load(std::memory_order_acquire) < number; });
}

}  // namespace phalanx
