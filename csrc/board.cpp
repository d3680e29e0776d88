#include "board.h"

#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>

namespace phalanx {
namespace {

using namespace std::chrono_literals;
constexpr auto kLook = 50ms;               // how often a sleeping rank looks at peers, signals and the clock
constexpr auto kMismatchGrace = 300ms;     // how long a mismatch waits for the other ranks' rows of its table

struct Offsets {
  std::size_t members, lines, progress, bells, channels, stages, total;
};

Offsets offsets_of(std::size_t n) {
  Offsets o{};
  o.members = align_up(sizeof(GroupHeader), kCacheLine);
  o.lines = o.members + n * sizeof(Member);
  o.progress = o.lines + 2 * n * sizeof(Line);
  o.bells = o.progress + n * sizeof(Progress);
  o.channels = o.bells + n * sizeof(Bell);
  o.stages = align_up(o.channels + n * n * sizeof(std::uint64_t), kPage);
  o.total = o.stages + 2 * n * kStageBytes;
  return o;
}

void write_text(SharedText& text, const std::string& value) {
  // RELEASE on the odd version orders it before the words for readers that ACQUIRE it; the words are atomic, so a torn
  // read is merely repeated.
  const std::uint64_t version = text.version.load(std::memory_order_relaxed);
  text.version.store(version + 1, std::memory_order_release);
  std::uint64_t words[SharedText::kWords] = {};
  std::memcpy(words, value.data(), std::min(value.size(), sizeof words - 1));
  for (std::size_t i = 0; i < SharedText::kWords; ++i) text.words[i].store(words[i], std::memory_order_release);
  text.version.store(version + 2, std::memory_order_release);
}

std::string read_text(const SharedText& text) {
  std::uint64_t words[SharedText::kWords];
  for (int attempt = 0; attempt < 100; ++attempt) {
    const std::uint64_t before = text.version.load(std::memory_order_acquire);
    for (std::size_t i = 0; i < SharedText::kWords; ++i) words[i] = text.words[i].load(std::memory_order_acquire);
    if (before % 2 == 0 && text.version.load(std::memory_order_acquire) == before) break;
  }
  const char* chars = reinterpret_cast<const char*>(words);
  return std::string(chars, strnlen(chars, sizeof words));
}

// Groups of this process: a rank that stands in one group says so on the boards of all, so a peer that waits for it
// elsewhere can tell its user.
struct Boards {
  std::mutex mutex;
  std::set<Board*> all;
};
Boards g_boards;

// Grows in each forked child: a group belongs to the process that made it. Cheaper to read than getpid().
std::atomic<int> g_forks{0};
const int g_fork_handler = pthread_atfork(nullptr, nullptr, [] {
  g_forks.fetch_add(1, std::memory_order_relaxed);
  new (&g_boards) Boards;  // the parent's boards are none of the child's, and another thread may have held the lock
});

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// What peers are told of a failure: its kind, who is at fault and who says so, by their ranks in the group.
struct Verdict {
  FailureKind kind;
  int subject, reporter;

  static constexpr int kRankBits = 24;
  static constexpr std::uint64_t kRankMask = (std::uint64_t{1} << kRankBits) - 1;
  std::uint64_t pack() const {
    return static_cast<std::uint64_t>(kind) << 2 * kRankBits | static_cast<std::uint64_t>(reporter) << kRankBits |
           static_cast<std::uint64_t>(subject);
  }
  static Verdict unpack(std::uint64_t packed) {
    return {static_cast<FailureKind>(packed >> 2 * kRankBits), static_cast<int>(packed & kRankMask),
            static_cast<int>(packed >> kRankBits & kRankMask)};
  }
};

/// How people count: the join of the group comes before the first collective.
std::uint32_t number(std::uint32_t seq) { return seq == 0 ? 0 : seq - 1; }

Clock::duration from_seconds(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

}  // namespace

std::uint64_t Board::create(Segment& segment, int size) {
  const Offsets o = offsets_of(static_cast<std::size_t>(size));
  const std::uint64_t offset = segment.allocate(o.total);
  const Mapping map = segment.map(offset, kPage);
  auto* header = reinterpret_cast<GroupHeader*>(map.data());  // fresh memory is zero, the initial state of all else
  header->magic = kMagic;
  header->num_ranks = static_cast<std::uint32_t>(size);
  header->region_bytes = o.total;
  return offset;
}

Board::Board(std::shared_ptr<Segment> segment, std::uint64_t offset, GroupConfig config)
    : segment_(std::move(segment)),
      offset_(offset),
      config_(std::move(config)),
      made_after_forks_(g_forks.load(std::memory_order_relaxed)),
      region_(segment_->map(offset, align_up(offsets_of(static_cast<std::size_t>(config_.size)).total, kPage))),
      watches_(static_cast<std::size_t>(config_.size)) {
  timeout_s_.store(config_.timeout_s, std::memory_order_relaxed);
  const Offsets o = offsets_of(static_cast<std::size_t>(config_.size));
  std::byte* base = region_.data();
  header_ = reinterpret_cast<GroupHeader*>(base);
  members_ = reinterpret_cast<Member*>(base + o.members);
  lines_ = reinterpret_cast<Line*>(base + o.lines);
  progress_ = reinterpret_cast<Progress*>(base + o.progress);
  bells_ = reinterpret_cast<Bell*>(base + o.bells);
  channels_ = reinterpret_cast<std::atomic<std::uint64_t>*>(base + o.channels);
  stages_ = base + o.stages;
  if (header_->magic != kMagic || header_->num_ranks != static_cast<std::uint32_t>(config_.size))
    throw std::runtime_error("the ranks disagree about the size of group '" + config_.name + "'");
  Member& self = members_[config_.rank];
  describe_self(self);
  header_->attached.fetch_add(1, std::memory_order_relaxed);  // a count, nothing is published by it
  self.state.store(MemberState::kJoined, std::memory_order_release);  // pairs with watch_of()
  std::lock_guard lock(g_boards.mutex);
  g_boards.all.insert(this);
}

Board::~Board() {
  {
    std::lock_guard lock(g_boards.mutex);
    g_boards.all.erase(this);
  }
  if (forked()) return;  // a forked child is no rank: it only unmaps
  depart("");
  const std::size_t bytes = header_->region_bytes;
  // ACQ_REL: the last to leave comes after everybody else's last access.
  if (header_->attached.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  const std::uint64_t mailbox = header_->mailbox.load(std::memory_order_acquire);
  if (mailbox != 0 && mailbox != kNoMemory)
    segment_->free(mailbox, static_cast<std::size_t>(config_.size) * 2 * kSlots * kSlotBytes);
  for (int i = 0; i < config_.size * config_.size; ++i)
    if (const std::uint64_t at = channels_[i].load(std::memory_order_acquire); at != 0 && at != kNoMemory)
      segment_->free(at, sizeof(Channel));
  segment_->free(offset_, bytes);
}

bool Board::forked() const { return g_forks.load(std::memory_order_relaxed) != made_after_forks_; }

/// The watch of rank `r`; none while it has not joined, and none of this rank.
const PeerWatch* Board::watch_of(int r) {
  // ACQUIRE makes the identity readable; pairs with the constructor's store.
  const Member& member = members_[r];
  if (!watches_[r] && member.state.load(std::memory_order_acquire) != MemberState::kAbsent)
    watches_[r] = PeerWatch::of(Identity{member.pid, member.start_time, member.pid_namespace});
  return watches_[r].get();
}

void Board::watch_peers() {
  static std::atomic<bool> has_warned{false};
  for (int r = 0; r < config_.size; ++r) {
    const PeerWatch* watch = watch_of(r);
    const std::string weakness = watch == nullptr ? "" : watch->weakness();
    if (!weakness.empty() && !has_warned.exchange(true))
      std::fprintf(stderr, "phalanx: rank %d: %s.\n", global(rank()), weakness.c_str());
  }
  spins_ = cpus_suffice(members_, static_cast<std::size_t>(config_.size));
}

void Board::require_own_process(Op op) const {
  if (forked()) throw failure(FailureKind::kForked, op, "");
}

void Board::require_usable(Op op) {
  require_own_process(op);
  if (!ended()) return;
  Failure unusable = failure(FailureKind::kUnusable, op, "");
  unusable.ranks.clear();
  unusable.cause = ended_by();
  throw unusable;
}

Wait Board::begin(const Call& call, std::uint32_t seq, Hooks& hooks, double timeout_s, Bell& bell) {
  require_usable(call.op);
  Wait wait;
  wait.call = call;
  wait.seq = seq;
  wait.hooks = &hooks;
  wait.bell = &bell;
  wait.timeout_s = timeout_s > 0 ? timeout_s : timeout_s_.load(std::memory_order_relaxed);
  wait.patience = std::chrono::nanoseconds(static_cast<std::int64_t>(config_.spin_us * 1e3));
  if (header_->verdict.load(std::memory_order_acquire) != 0) come_late(wait);
  return wait;
}

/// A peer has ended the group: a call that comes later must fail too, though all data may lie there.
void Board::come_late(Wait& wait) {
  // After a mismatch the call goes on as far as its own comparison, which adds this rank's row to the table.
  const FailureKind kind = Verdict::unpack(header_->verdict.load(std::memory_order_acquire)).kind;
  if ((kind == FailureKind::kCallsDiffer || kind == FailureKind::kSizesDiffer) && wait.seq != 0) return;
  throw end(*find_verdict(wait, [](int) { return false; }));
}

void Board::sleep(Wait& wait, const DoneFn& done, const MissingFn& missing) {
  if (wait.start == Clock::time_point{}) {
    wait.start = Clock::now();
    wait.next_look = wait.start + kLook / 2;
    wait.next_report = wait.start + from_seconds(config_.stall_s);
  }
  while (!sleep_on(*wait.bell, std::chrono::duration_cast<std::chrono::nanoseconds>(kLook / 2), done)) {
    if (Clock::now() < wait.next_look) continue;
    std::optional<Failure> failure = look_up(wait, missing);
    if (done()) break;  // a peer may finish its part and leave while we look
    if (failure) throw end(std::move(*failure));
    wait.next_look = Clock::now() + kLook;
  }
  if (!wait.announced) return;
  wait.announced = false;
  say_everywhere("");
}

std::optional<Failure> Board::look_up(Wait& wait, const MissingFn& missing) {
  if (!wait.announced) announce(wait);  // before the signals: a handler may need to be told what it interrupted
  try {
    wait.hooks->tick();
    report_stall(wait, missing);
  } catch (...) {
    end(failure(FailureKind::kInterrupted, wait));
    throw;
  }
  if (wait.arriving)
    for (int r = 0; r < config_.size; ++r)
      if (call_differs(r, wait.seq)) mismatch(wait);
  // The first failure that anybody saw explains the rest: ranks that died of it are victims. A victim has published its
  // verdict before it dies, so a verdict that was missing at first is there once the victim is seen dead.
  if (auto verdict = find_verdict(wait, missing)) return verdict;
  if (auto dead = find_dead(wait, missing)) {
    if (auto verdict = find_verdict(wait, missing)) return verdict;
    return dead;
  }
  if (ended()) return failure(FailureKind::kDestroyed, wait);
  if (seconds_since(wait.start) >= wait.timeout_s) return timed_out(wait, missing);
  return std::nullopt;
}

/// Tell who does not come, now and then.
void Board::report_stall(Wait& wait, const MissingFn& missing) {
  if (wait.quiet || !config_.on_stall || Clock::now() < wait.next_report) return;
  wait.next_report = Clock::now() + from_seconds(config_.stall_s);
  config_.on_stall(timed_out(wait, missing), seconds_since(wait.start));
}

void Board::announce(Wait& wait) {
  wait.announced = true;
  std::string text = op_name(wait.call.op);
  if (wait.seq != 0) text += " #" + std::to_string(number(wait.seq));
  text += " of group '" + config_.name + "'";
  if (wait.seq != 0) collective_ = text;  // the site is found by Python, where signals are handled, too
  const std::string site = wait.hooks->site();
  if (!site.empty()) text += " at " + site;
  if (wait.seq != 0) collective_ = text;
  say_everywhere(text);
}

/// Write on the boards of all groups of this process where this rank stands.
void Board::say_everywhere(const std::string& text) {
  std::lock_guard lock(g_boards.mutex);
  for (Board* board : g_boards.all)
    if (!board->forked() && board->segment_ == segment_)
      write_text(board->members_[board->rank()].site, text);
}

Standing Board::stand_of(int r) {
  Standing stand;
  stand.rank = global(r);
  stand.has_joined = members_[r].state.load(std::memory_order_acquire) != MemberState::kAbsent;
  if (!stand.has_joined) return stand;
  stand.pid = members_[r].pid;
  stand.waits_in = read_text(members_[r].site);
  stand.last = number(std::max(line(r, 0).seq.load(std::memory_order_acquire),
                               line(r, 1).seq.load(std::memory_order_acquire)));
  return stand;
}

Failure Board::failure(FailureKind kind, Op op, std::string site) const {
  Failure failure;
  failure.kind = kind;
  failure.rank = global(rank());
  failure.ranks = {failure.rank};
  failure.group = config_.name;
  failure.op = op_name(op);
  failure.site = std::move(site);
  return failure;
}

Failure Board::failure(FailureKind kind, const Wait& wait) const {
  Failure failure = this->failure(kind, wait.call.op, wait.hooks->site());
  failure.seq = number(wait.seq);
  return failure;
}

std::optional<Failure> Board::find_dead(const Wait& wait, const MissingFn& missing) {
  for (int r = 0; r < config_.size; ++r)
    if (r != rank() && (wait.arriving || missing(r)))
      if (auto dead = is_dead(r, wait)) return dead;
  return std::nullopt;
}

std::optional<Failure> Board::is_dead(int r, const Wait& wait) {
  const MemberState state = members_[r].state.load(std::memory_order_acquire);  // pairs with depart()
  const bool departed = state == MemberState::kDeparted || state == MemberState::kFell;
  const PeerWatch* watch = nullptr;
  try {
    watch = departed ? nullptr : watch_of(r);
  } catch (const std::system_error&) {  // no descriptor left: nothing is known
  }
  if (!departed && (watch == nullptr || !watch->dead())) return std::nullopt;
  const Ending ending = departed ? Ending{} : watch->ending();
  Failure found = failure(state == MemberState::kFell ? FailureKind::kRankFell
                          : departed                  ? FailureKind::kRankLeft
                          : ending.is_replaced        ? FailureKind::kRankReplaced
                                                      : FailureKind::kRankEnded,
                          wait);
  if (state == MemberState::kFell) found.detail = read_text(members_[r].site);
  found.ranks = {global(r)};
  found.pid = members_[r].pid;
  found.exit_code = ending.exit_code;
  found.signal = ending.signal;
  return found;
}

/// What a peer has met, as this rank's own failure.
std::optional<Failure> Board::find_verdict(const Wait& wait, const MissingFn& missing) {
  const std::uint64_t packed = header_->verdict.load(std::memory_order_acquire);
  if (packed == 0) return std::nullopt;
  const Verdict verdict = Verdict::unpack(packed);
  Failure found;
  switch (verdict.kind) {
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
      if (auto dead = is_dead(verdict.subject, wait)) return dead;
      found = failure(FailureKind::kRankFailed, wait);
      found.ranks = {global(verdict.subject)};
      break;
    default:
      found = failure(verdict.kind, wait);
      found.ranks = {global(verdict.subject)};
  }
  found.by = global(verdict.reporter);
  return found;
}

Failure Board::timed_out(const Wait& wait, const MissingFn& missing) {
  Failure late = failure(FailureKind::kRankMissing, wait);
  late.timeout_s = wait.timeout_s;
  late.ranks.clear();
  for (int r = 0; r < config_.size; ++r) {
    if (!missing(r)) continue;
    late.ranks.push_back(global(r));
    late.standings.push_back(stand_of(r));
  }
  return late;
}

bool Board::call_differs(int r, std::uint32_t seq) {
  const Line& theirs = line(r, seq);
  const Line& mine = line(rank(), seq);
  return theirs.seq.load(std::memory_order_acquire) == seq &&
         (theirs.what != mine.what || theirs.detail != mine.detail);
}

void Board::mismatch(Wait& wait, std::optional<SizeDispute> sizes) {
  Failure found = failure(sizes ? FailureKind::kSizesDiffer : FailureKind::kCallsDiffer, wait);
  {
    std::lock_guard lock(g_boards.mutex);  // other threads of this rank may write there too
    write_text(members_[rank()].site, found.site);
  }
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

/// What each rank has called as number `seq`, and where, as far as it has said so.
std::vector<MadeCall> Board::calls_made(std::uint32_t seq) {
  std::vector<MadeCall> calls;
  for (int r = 0; r < config_.size; ++r) {
    MadeCall& made = calls.emplace_back();
    made.rank = global(r);
    const Line& own = line(r, seq);
    if (own.seq.load(std::memory_order_acquire) != seq) continue;
    made.call = Call::unpack(own.what, own.detail);
    if (made.call.root >= 0) made.root = global(made.call.root);
    if (members_[r].site_seq.load(std::memory_order_acquire) == seq) made.site = read_text(members_[r].site);
  }
  return calls;
}

Failure Board::end(Failure failure) {
  {
    std::lock_guard lock(ended_mutex_);
    if (!ended()) ended_by_ = std::make_shared<const Failure>(failure);
    ended_.store(true, std::memory_order_release);
  }
  // Peers that follow name the same culprit; without one, they name this rank.
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
  const std::uint64_t verdict = Verdict{failure.kind, subject, rank()}.pack();
  header_->verdict.compare_exchange_strong(none, verdict, std::memory_order_acq_rel);
  ring_all();
  return failure;
}

std::shared_ptr<const Failure> Board::ended_by() {
  std::lock_guard lock(ended_mutex_);
  return ended_by_;
}

void Board::abort(const std::string& why) {
  Failure aborted = failure(FailureKind::kAborted, Op::kNone, "");
  aborted.detail = why;
  end(std::move(aborted));
}

void Board::depart(const std::string& why) {
  {
    std::lock_guard lock(ended_mutex_);  // after what ended the group, if anything did
    ended_.store(true, std::memory_order_release);
  }
  if (members_[rank()].state.load(std::memory_order_relaxed) == MemberState::kFell) return;  // that has been said
  if (!why.empty()) write_text(members_[rank()].site, why);
  // RELEASE publishes the text; pairs with is_dead().
  members_[rank()].state.store(why.empty() ? MemberState::kDeparted : MemberState::kFell, std::memory_order_release);
  ring_all();
}

void Board::ring_all() {
  ring(header_->bell);
  for (int r = 0; r < config_.size; ++r) ring(bells_[r]);
}

}  // namespace phalanx
