#include "board.h"

#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>
#include <sstream>
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

std::string list(const std::vector<int>& ranks) {
  std::string text;
  for (std::size_t i = 0; i < ranks.size(); ++i) text += (i ? ", " : "") + std::to_string(ranks[i]);
  return (ranks.size() == 1 ? "rank " : "ranks ") + text;
}

// Grows in each forked child: a group belongs to the process that made it. Cheaper to read than getpid().
std::atomic<int> g_forks{0};
const int g_fork_handler = pthread_atfork(nullptr, nullptr, [] {
  g_forks.fetch_add(1, std::memory_order_relaxed);
  new (&g_boards) Boards;  // the parent's boards are none of the child's, and another thread may have held the lock
});

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

FailureKind verdict_kind(std::uint64_t verdict) { return static_cast<FailureKind>(verdict >> 32); }
int verdict_rank(std::uint64_t verdict) { return static_cast<int>(verdict & 0xffffffff) - 1; }

/// How people count: the join of the group comes before the first collective.
std::string number(std::uint32_t seq) { return std::to_string(seq - 1); }

/// What calls disagree about, and what to do about it.
struct Difference {
  std::string what, advice;
};

Difference difference_between(const std::vector<Call>& calls) {
  auto differ = [&](auto field) {
    return std::any_of(calls.begin(), calls.end(), [&](const Call& call) { return call.*field != calls[0].*field; });
  };
  const std::string order = "ake every rank of the group call the same collectives in the same order.";
  if (differ(&Call::op)) return {"called different collectives", "M" + order};
  std::string fields;
  auto add = [&](bool differs, const char* name) {
    if (differs) fields += (fields.empty() ? "" : " and ") + std::string(name);
  };
  add(differ(&Call::dtype), "dtypes");
  add(differ(&Call::count) || differ(&Call::flags), "sizes");
  add(differ(&Call::reduce_op), "reduce operations");
  add(differ(&Call::root), "roots");
  return {"called " + std::string(op_name(calls[0].op)) + " with different " + fields,
          "Make the " + fields + " the same on every rank; if these calls do not belong together, m" + order};
}

std::string decimal(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", value);
  return text;
}

}  // namespace

std::vector<std::string> Names::dtypes;
std::vector<std::string> Names::reduce_ops;

const char* op_name(Op op) {
  static constexpr const char* kNames[] = {"none", "join", "barrier", "broadcast", "all_reduce", "reduce",
                                           "reduce_scatter", "all_gather", "gather", "scatter", "all_to_all",
                                           "send", "recv"};
  return kNames[static_cast<std::size_t>(op)];
}

Call Call::unpack(std::uint32_t what, std::uint64_t detail) {
  Call call;
  call.op = static_cast<Op>(what & 0xff);
  call.dtype = static_cast<std::uint8_t>(what >> 8);
  call.reduce_op = static_cast<std::uint8_t>(what >> 16);
  call.flags = static_cast<std::uint8_t>(what >> 24);
  call.count = detail & ((std::uint64_t{1} << kCountBits) - 1);
  call.root = static_cast<std::int32_t>(detail >> kCountBits) - 1;
  return call;
}

std::string Call::text() const {
  std::string text = op_name(op);
  if (op == Op::kJoin || op == Op::kBarrier || op == Op::kNone) return text + "()";
  text += "(" + (dtype < Names::dtypes.size() ? Names::dtypes[dtype] : "dtype " + std::to_string(dtype));
  text += flags & 1 ? ", split sizes" : ", count=" + std::to_string(count);
  if (reduce_op != 0)
    text += ", op=" + (reduce_op <= Names::reduce_ops.size() ? Names::reduce_ops[reduce_op - 1] : "?");
  return text;  // the caller adds the root in global ranks and closes the parenthesis
}

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
  if (!forked()) return;
  throw Failure(FailureKind::kUnusable,
                std::string(op_name(op)) + " on group '" + config_.name + "': this process was forked from " + who() +
                    " after the group was made and is no rank of it; call init_process_group in the child", {});
}

void Board::require_usable(Op op) {
  require_own_process(op);
  if (!ended()) return;
  std::lock_guard lock(ended_mutex_);
  throw Failure(FailureKind::kUnusable,
                "rank " + std::to_string(global(rank())) + ": " + (op == Op::kNone ? "operation" : op_name(op)) + " on group '" + config_.name +
                    "', which can no longer be used: " + why_ended_ +
                    "\nDestroy the group and make a new one: destroy_process_group(), then init_process_group().",
                {});
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
  if (verdict_kind(header_->verdict.load(std::memory_order_acquire)) == FailureKind::kMismatch && wait.seq != 0) return;
  throw end(*find_verdict(wait, [](int) { return false; }));
}

void Board::sleep(Wait& wait, const DoneFn& done, const MissingFn& missing) {
  if (wait.start == Clock::time_point{}) {
    wait.start = Clock::now();
    wait.next_look = wait.start + kLook / 2;
    wait.next_report = wait.start + std::chrono::duration_cast<Clock::duration>(
                                        std::chrono::duration<double>(config_.stall_s));
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
  } catch (...) {
    end(failure(FailureKind::kAborted, wait, where(wait) + " was interrupted by a signal", {global(rank())}));
    throw;
  }
  if (wait.arriving)
    for (int r = 0; r < config_.size; ++r)
      if (call_differs(r, wait.seq)) mismatch(wait, "");
  // The first failure that anybody saw explains the rest: ranks that died of it are victims. A victim has published its
  // verdict before it dies, so a verdict that was missing at first is there once the victim is seen dead.
  if (auto verdict = find_verdict(wait, missing)) return verdict;
  if (auto dead = find_dead(wait, missing)) {
    if (auto verdict = find_verdict(wait, missing)) return verdict;
    return dead;
  }
  if (ended())
    return failure(FailureKind::kAborted, wait, where(wait) + ": this rank left the group meanwhile", {global(rank())});
  if (seconds_since(wait.start) >= wait.timeout_s) return timed_out(wait, missing);
  if (!wait.quiet && Clock::now() >= wait.next_report) {
    wait.next_report = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                          std::chrono::duration<double>(config_.stall_s));
    const std::vector<int> ranks = missing_ranks(missing);
    std::fprintf(stderr, "phalanx: %s has waited %s s for %s (timeout %s s)\n%s", where(wait).c_str(),
                 decimal(seconds_since(wait.start)).c_str(), list(ranks).c_str(), decimal(wait.timeout_s).c_str(),
                 standings(wait, ranks).c_str());
  }
  return std::nullopt;
}

void Board::announce(Wait& wait) {
  wait.announced = true;
  std::string text = op_name(wait.call.op);
  if (wait.seq != 0) text += " #" + number(wait.seq);
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

std::string Board::where(const Wait& wait) const {
  std::string text = "rank " + std::to_string(global(rank())) + ": " + op_name(wait.call.op);
  if (wait.seq != 0) text += " #" + number(wait.seq);
  text += " of group '" + config_.name + "'";
  const std::string site = wait.hooks->site();
  return site.empty() ? text : text + " at " + site;
}

std::string Board::stand_of(int r, const Wait& wait) {
  const std::string head = "  rank " + std::to_string(global(r)) + " ";
  if (members_[r].state.load(std::memory_order_acquire) == MemberState::kAbsent) return head + "has not joined\n";
  const std::string pid = "(pid " + std::to_string(members_[r].pid) + ") ";
  const std::string site = read_text(members_[r].site);
  if (!site.empty()) return head + pid + "waits in " + site + "\n";
  if (wait.seq == 0) return head + pid + "has not made the matching call\n";
  const std::uint32_t last = std::max(line(r, 0).seq.load(std::memory_order_acquire),
                                      line(r, 1).seq.load(std::memory_order_acquire));
  if (last >= wait.seq) return head + pid + "is in #" + number(last) + " but makes no progress\n";
  return head + pid + "has not called #" + number(wait.seq) + "; " +
         (last <= 1 ? "it has made no collective here yet" : "its last collective here was #" + number(last)) + "\n";
}

std::string Board::standings(const Wait& wait, const std::vector<int>& ranks) {
  std::string text;
  for (int r = 0; r < config_.size; ++r)
    if (std::find(ranks.begin(), ranks.end(), global(r)) != ranks.end()) text += stand_of(r, wait);
  return text;
}

std::vector<int> Board::missing_ranks(const MissingFn& missing) const {
  std::vector<int> ranks;
  for (int r = 0; r < config_.size; ++r)
    if (missing(r)) ranks.push_back(global(r));
  return ranks;
}

Failure Board::failure(FailureKind kind, const Wait& wait, std::string message, std::vector<int> ranks) const {
  Failure failure(kind, std::move(message), std::move(ranks));
  failure.op = op_name(wait.call.op);
  failure.seq = wait.seq == 0 ? 0 : wait.seq - 1;
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
  const std::string who = "rank " + std::to_string(global(r));
  const bool fell = state == MemberState::kFell;
  const std::string how = fell       ? "has left the group because of " + read_text(members_[r].site)
                          : departed ? "has left the group (destroy_process_group)"
                                     : ending.text();
  // Whoever ends in order while others go on has made fewer calls, or has caught what went wrong.
  const std::string advice =
      !fell && (departed || (ending.signal == 0 && ending.exit_code == 0))
          ? kFewerCalls
          : "Look at what " + who + " printed last; this rank is only its victim.";
  Failure found = failure(FailureKind::kRankFailed, wait,
                          where(wait) + ": " + who + " (pid " + std::to_string(members_[r].pid) + ") " + how + "\n" +
                              advice,
                          {global(r)});
  found.pid = members_[r].pid;
  found.exit_code = ending.exit_code;
  found.signal = ending.signal;
  return found;
}

std::optional<Failure> Board::find_verdict(const Wait& wait, const MissingFn& missing) {
  const std::uint64_t verdict = header_->verdict.load(std::memory_order_acquire);
  if (verdict == 0) return std::nullopt;
  const int r = verdict_rank(verdict);
  const FailureKind kind = verdict_kind(verdict);
  const std::string who = "rank " + std::to_string(global(r));
  switch (kind) {
    case FailureKind::kMismatch:
      return failure(kind, wait, where(wait) + ": the ranks of this group made calls that do not fit together, as " +
                                     who + " reports; see its message", {global(r)});
    case FailureKind::kTimeout: {
      if (missing_ranks(missing).empty())
        return failure(kind, wait, where(wait) + " comes too late: " + who + " has reached its deadline and ended the " +
                                       "group; see its message", {global(rank())});
      Failure late = timed_out(wait, missing);
      late.message = who + " has reached its deadline and ended the group.\n" + late.message;
      return late;
    }
    case FailureKind::kNoMemory:
      return failure(kind, wait, where(wait) + ": " + who + " found no memory for the group's buffers", {global(r)});
    case FailureKind::kSystem:
      return failure(kind, wait, where(wait) + ": " + who + " met an error of its system and ended the group\nLook at what " +
                                     who + " printed last.", {global(r)});
    case FailureKind::kRankFailed:
      if (auto dead = is_dead(r, wait)) return dead;
      return failure(kind, wait, where(wait) + ": " + who + " has failed, as a peer reports", {global(r)});
    default:
      return failure(FailureKind::kAborted, wait, where(wait) + ": " + who + " aborted the group (abort(), or a signal" +
                                                      " interrupted it)\nLook at what " + who + " printed last.",
                     {global(r)});
  }
}

Failure Board::timed_out(const Wait& wait, const MissingFn& missing) {
  const std::vector<int> ranks = missing_ranks(missing);
  return failure(FailureKind::kTimeout, wait,
                 where(wait) + " timed out after " + decimal(wait.timeout_s) + " s waiting for " + list(ranks) + "\n" +
                     standings(wait, ranks) + "Pass a larger timeout to init_process_group if that is slow but right.",
                 ranks);
}

bool Board::call_differs(int r, std::uint32_t seq) {
  const Line& theirs = line(r, seq);
  const Line& mine = line(rank(), seq);
  return theirs.seq.load(std::memory_order_acquire) == seq &&
         (theirs.what != mine.what || theirs.detail != mine.detail);
}

void Board::mismatch(Wait& wait, const std::string& headline) {
  const std::string own_site = wait.hooks->site();
  {
    std::lock_guard lock(g_boards.mutex);  // other threads of this rank may write there too
    write_text(members_[rank()].site, own_site);
  }
  members_[rank()].site_seq.store(wait.seq, std::memory_order_release);
  const auto grace_end = Clock::now() + kMismatchGrace;
  auto all_said = [&] {
    for (int r = 0; r < config_.size; ++r)
      if (members_[r].site_seq.load(std::memory_order_acquire) != wait.seq) return false;
    return true;
  };
  while (!all_said() && Clock::now() < grace_end) std::this_thread::sleep_for(1ms);

  std::ostringstream table;
  std::vector<Call> calls;
  std::vector<int> ranks;
  for (int r = 0; r < config_.size; ++r) {
    table << "  rank " << global(r) << ": ";
    if (line(r, wait.seq).seq.load(std::memory_order_acquire) != wait.seq) {
      table << "has not called yet\n";
      continue;
    }
    const Call& call = calls.emplace_back(Call::unpack(line(r, wait.seq).what, line(r, wait.seq).detail));
    std::string text = call.text();
    if (text.back() != ')') {
      const char* role = call.op == Op::kBroadcast || call.op == Op::kScatter ? ", src=" : ", dst=";
      text += (call.root >= 0 ? role + std::to_string(global(call.root)) : "") + ")";
    }
    const bool said = members_[r].site_seq.load(std::memory_order_acquire) == wait.seq;
    const std::string site = said ? read_text(members_[r].site) : "";
    table << text << (site.empty() ? "" : " at " + site) << "\n";
    if (call_differs(r, wait.seq)) ranks.push_back(global(r));
  }
  Difference found{headline, "Make input_split_sizes[j] of rank i equal output_split_sizes[i] of rank j."};
  if (headline.empty()) {
    found = difference_between(calls);
    found.what = "the ranks of this group " + found.what;
  }
  throw end(failure(FailureKind::kMismatch, wait,
                    where(wait) + ": " + found.what + "\n" + table.str() + found.advice, ranks));
}

Failure Board::end(Failure failure) {
  {
    std::lock_guard lock(ended_mutex_);
    if (!ended()) {
      why_ended_ = failure.message;
      ended_by_ = failure;
    }
    ended_.store(true, std::memory_order_release);
  }
  // Peers that follow name the same culprit; without one, they name this rank.
  int subject = rank();
  for (int r = 0; failure.kind == FailureKind::kRankFailed && r < config_.size; ++r)
    if (!failure.ranks.empty() && global(r) == failure.ranks.front()) subject = r;
  std::uint64_t none = 0;
  const std::uint64_t verdict =
      static_cast<std::uint64_t>(failure.kind) << 32 | static_cast<std::uint32_t>(subject + 1);
  header_->verdict.compare_exchange_strong(none, verdict, std::memory_order_acq_rel);
  ring_all();
  return failure;
}

std::optional<Failure> Board::ended_by() {
  std::lock_guard lock(ended_mutex_);
  return ended_by_;
}

void Board::abort(const std::string& why) {
  end(Failure(FailureKind::kAborted, "rank " + std::to_string(global(rank())) + ": " + why, {global(rank())}));
}

void Board::depart(const std::string& why) {
  {
    std::lock_guard lock(ended_mutex_);
    if (!ended()) why_ended_ = "it was destroyed on this rank";
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
