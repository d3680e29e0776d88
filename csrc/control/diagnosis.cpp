// Diagnoses a wait that does not end: who is dead, who is late, who called something else, and what a peer reports.
//
// Deadlock: a rank that waits for its only message in flight publishes the peer of that message. A waiting rank follows
// these records from rank to rank. If the records lead back to the waiting rank, the ranks wait for each other in a
// circle. A circle counts only if none of its messages is on its way: a suspended rank remains on record as waiting,
// although its message has come. A rank that waits in a collective is never part of a circle. A rank that waits to join
// a new group says so in the control blocks of its existing groups.
#include "control/control_block.h"

#include <chrono>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace phalanx {
namespace {

using namespace std::chrono_literals;
constexpr auto kMismatchGrace = 300ms;  // how long mismatch() waits for the other ranks' rows of the table

}  // namespace

Failure ControlBlock::failure(FailureKind kind, Op op, std::string site) const {
  Failure failure;
  failure.kind = kind;
  failure.rank = global(rank());
  failure.ranks = {failure.rank};
  failure.group = config_.name;
  failure.op = op_name(op);
  failure.site = std::move(site);
  return failure;
}

Failure ControlBlock::failure(FailureKind kind, const Wait& wait) const {
  Failure failure = this->failure(kind, wait.call.op, wait.hooks->site());
  failure.seq = number(wait.seq);
  return failure;
}

Standing ControlBlock::stand_of(int r) {
  Standing stand;
  stand.rank = global(r);
  stand.has_joined = members_[r].state.load(std::memory_order_acquire) != MemberState::kAbsent;
  if (!stand.has_joined) return stand;
  stand.pid = members_[r].pid;
  stand.waits_in = members_[r].site.read();
  stand.last = number(std::max(line(r, 0).seq.load(std::memory_order_acquire),
                               line(r, 1).seq.load(std::memory_order_acquire)));
  return stand;
}

std::optional<Failure> ControlBlock::find_dead(const Wait& wait, const MissingFn& missing) {
  const bool spares_departed = wait.spares_departed != nullptr && *wait.spares_departed;
  for (int r = 0; r < config_.size; ++r)
    if (r != rank() && (wait.arriving || missing(r)))
      if (auto dead = is_dead(r, wait); dead && !(spares_departed && dead->kind == FailureKind::kRankLeft)) return dead;
  return std::nullopt;
}

std::optional<Failure> ControlBlock::is_dead(int r, const Wait& wait, bool told) {
  const MemberState state = members_[r].state.load(std::memory_order_acquire);  // pairs with depart()
  const bool departed = state == MemberState::kDeparted || state == MemberState::kFell;
  const PeerWatch* watch = nullptr;
  try {
    watch = departed ? nullptr : watch_of(r);
  } catch (const std::system_error&) {  // no descriptor left: whether the peer lives is unknown
  }
  if (!departed && (watch == nullptr || !watch->dead(told))) return std::nullopt;
  const Ending ending = departed ? Ending{} : watch->ending();
  Failure found = failure(state == MemberState::kFell ? FailureKind::kRankFell
                          : departed                  ? FailureKind::kRankLeft
                          : ending.is_replaced        ? FailureKind::kRankReplaced
                                                      : FailureKind::kRankEnded,
                          wait);
  if (state == MemberState::kFell) found.detail = members_[r].why.read();
  found.ranks = {global(r)};
  found.pid = members_[r].pid;
  found.exit_code = ending.exit_code;
  found.signal = ending.signal;
  return found;
}

void ControlBlock::require_peer(const Call& call, int r, Hooks& hooks) {
  const Wait wait = begin(call, 0, hooks, 0, p2p_bell(rank()));
  if (r == rank()) return;
  auto dead = is_dead(r, wait);
  if (!dead) return;
  // If a rank has published a failure, that failure explains this death, as in look_up().
  auto told = find_group_failure(wait, [](int) { return false; });
  throw end(std::move(told ? *told : *dead));
}

/// Returns the failure that a peer has published, as a failure of this rank's operation; no value if there is none.
std::optional<Failure> ControlBlock::find_group_failure(const Wait& wait, const MissingFn& missing) {
  const std::uint64_t packed = header_->group_failure.load(std::memory_order_acquire);
  if (packed == 0) return std::nullopt;
  const GroupFailure told = GroupFailure::unpack(packed);
  Failure found;
  switch (told.kind) {
    case FailureKind::kRankMissing:
    case FailureKind::kNoTurn:
      found = timed_out(wait, missing);
      if (!found.ranks.empty()) break;
      found = failure(FailureKind::kCameLate, wait);
      break;
    case FailureKind::kRankEnded:
    case FailureKind::kRankReplaced:
    case FailureKind::kRankLeft:
    case FailureKind::kRankFell:
    case FailureKind::kRankFailed:
      if (auto dead = is_dead(told.subject, wait, /*told=*/true)) return dead;
      found = failure(FailureKind::kRankFailed, wait);
      found.ranks = {global(told.subject)};
      break;
    default:
      found = failure(told.kind, wait);
      found.ranks = {global(told.subject)};
  }
  found.by = global(told.reporter);
  return found;
}

Failure ControlBlock::timed_out(const Wait& wait, const MissingFn& missing) {
  Failure late = failure(FailureKind::kRankMissing, wait);
  late.timeout_s = wait.timeout_s;
  late.ranks.clear();
  for (int r = 0; r < config_.size; ++r) {
    if (!missing(r)) continue;
    late.ranks.push_back(global(r));
    late.standings.push_back(stand_of(r));
  }
  if (!late.ranks.empty()) late.circle = wait.circle;
  return late;
}

/// Returns the cycle of waiting ranks that this rank is part of; empty if there is none. Each rank of the cycle waits
/// for its only message in flight, which it exchanges with the next rank. There is no cycle if one of the messages is
/// on its way: its receiver may be suspended, and takes the message when it runs again.
std::vector<Waiter> ControlBlock::circle() {
  std::vector<Waiter> found;
  for (int r = rank(); static_cast<int>(found.size()) < config_.size;) {
    // ACQUIRE makes `site` readable; pairs with look_up().
    const Awaited own = Awaited::unpack(members_[r].awaits.load(std::memory_order_acquire));
    if (own.peer < 0 || own.peer >= config_.size || own.peer == r) return {};
    const Awaited next = Awaited::unpack(members_[own.peer].awaits.load(std::memory_order_acquire));
    if (next.peer == r && next.is_send != own.is_send) return {};  // a send meets its receive: no deadlock
    if (!own.is_send && is_on_its_way(own.peer, r)) return {};
    found.push_back({global(r), global(own.peer), members_[r].site.read()});
    r = own.peer;
    if (r == rank()) return found;
  }
  return {};
}

/// True if `src` has sent a fragment that `dst` has not taken, or if that can't be known.
bool ControlBlock::is_on_its_way(int src, int dst) {
  const std::uint64_t at = channel(src, dst).load(std::memory_order_acquire);
  if (at == 0) return false;
  try {
    const Mapping mapping = segment_->map(at, align_up(sizeof(Channel), kPage));
    const auto* channel = reinterpret_cast<const Channel*>(mapping.data());
    const std::uint64_t num_taken = channel->num_taken.load(std::memory_order_acquire);
    // ACQUIRE, like the receiver's load, though only the number is read here.
    return channel->records[num_taken % Channel::kRecords].number.load(std::memory_order_acquire) == num_taken + 1;
  } catch (const std::exception&) {  // no address space left: the channel can't be looked at
    return true;
  }
}

void ControlBlock::mismatch(Wait& wait, std::optional<SizeDispute> sizes) {
  Failure found = failure(sizes ? FailureKind::kSizesDiffer : FailureKind::kCallsDiffer, wait);
  say_here(found.site);
  members_[rank()].site_seq.store(wait.seq, std::memory_order_release);
  const auto grace_end = Clock::now() + kMismatchGrace;
  auto all_said = [&] {
    for (int r = 0; r < config_.size; ++r)
      if (members_[r].site_seq.load(std::memory_order_acquire) != wait.seq) return false;
    return true;
  };
  while (!all_said() && Clock::now() < grace_end) std::this_thread::sleep_for(1ms);
  found.sizes = sizes;
  found.calls = calls_made(wait.seq);
  found.ranks.clear();
  if (sizes) found.ranks = {sizes->rank, sizes->other};
  for (int r = 0; r < config_.size; ++r)
    if (call_differs(r, wait.seq)) found.ranks.push_back(global(r));
  throw end(std::move(found));
}

/// Returns call number `seq` of each rank, and where it was made; kNone for a rank that has not called yet.
std::vector<MadeCall> ControlBlock::calls_made(std::uint32_t seq) {
  std::vector<MadeCall> calls;
  for (int r = 0; r < config_.size; ++r) {
    MadeCall& made = calls.emplace_back();
    made.rank = global(r);
    const Line& own = line(r, seq);
    if (own.seq.load(std::memory_order_acquire) != seq) continue;
    made.call = Call::unpack(own.what, own.detail);
    if (made.call.root >= 0) made.root = global(made.call.root);
    if (members_[r].site_seq.load(std::memory_order_acquire) == seq) made.site = members_[r].site.read();
  }
  return calls;
}

Failure ControlBlock::end(Failure failure) {
  {
    std::lock_guard lock(ended_mutex_);
    if (!ended()) ended_by_ = std::make_shared<const Failure>(failure);
    ended_.store(true, std::memory_order_release);
  }
  // Peers that learn of this failure name the same culprit. If the failure has no culprit, they name this rank.
  int subject = rank();
  switch (failure.kind) {
    case FailureKind::kRankEnded:
    case FailureKind::kRankReplaced:
    case FailureKind::kRankLeft:
    case FailureKind::kRankFell:
    case FailureKind::kRankFailed:
      for (int r = 0; r < config_.size; ++r)
        if (!failure.ranks.empty() && global(r) == failure.ranks.front()) subject = r;
      break;
    default:
      break;
  }
  std::uint64_t none = 0;
  const std::uint64_t packed = GroupFailure{failure.kind, subject, rank()}.pack();
  header_->group_failure.compare_exchange_strong(none, packed, std::memory_order_acq_rel);
  ring_all();
  return failure;
}

}  // namespace phalanx
