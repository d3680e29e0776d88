// Lays out a group's control block. Also joins a group, leaves it and aborts it.
#include "control/control_block.h"

#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <set>
#include <stdexcept>

namespace phalanx {
namespace {

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

// The control blocks of all groups of this process. A rank that waits in one group says so in the control blocks of all
// its groups: a peer that waits for this rank in another group can then show the reason. The object is leaked, because
// native threads may still use it while the process destroys its statics.
struct ControlBlocks {
  std::mutex mutex;
  std::set<ControlBlock*> all;
};
ControlBlocks& g_control_blocks = *new ControlBlocks;

// Number of forks that led to this process. A group compares this number with the number at its creation to learn
// whether the process is a child that was forked since. This is cheaper than getpid().
std::atomic<int> g_forks{0};
const int g_fork_handler = pthread_atfork(
    [] { g_control_blocks.mutex.lock(); },  // otherwise the child might find the list half changed by another thread
    [] { g_control_blocks.mutex.unlock(); },
    [] {
      g_forks.fetch_add(1, std::memory_order_relaxed);
      g_control_blocks.mutex.unlock();
    });

}  // namespace

std::uint64_t ControlBlock::create(Segment& segment, int size) {
  const Offsets o = offsets_of(static_cast<std::size_t>(size));
  const std::uint64_t offset = segment.allocate(o.total);
  const Mapping map = segment.map(offset, kPage);
  auto* header = reinterpret_cast<GroupHeader*>(map.data());  // fresh memory is zero: the initial state of every field
  header->magic = kMagic;
  header->num_ranks = static_cast<std::uint32_t>(size);
  header->node = current_node();  // the NUMA node of the pages that segment.allocate() has just taken
  header->region_bytes = o.total;
  return offset;
}

ControlBlock::ControlBlock(std::shared_ptr<Segment> segment, std::uint64_t offset, GroupConfig config)
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
  // The pages can still be replaced: no peer reads this rank's stages before this rank has arrived.
  const std::size_t stages = 2 * kStageBytes;
  segment_->bring_near(offset_ + o.stages + static_cast<std::size_t>(config_.rank) * stages, stages, header_->node);
  Member& self = members_[config_.rank];
  describe_self(self);
  header_->attached.fetch_add(1, std::memory_order_relaxed);  // a mere count: it publishes nothing
  self.state.store(MemberState::kJoined, std::memory_order_release);  // pairs with watch_of()
  std::lock_guard lock(g_control_blocks.mutex);
  g_control_blocks.all.insert(this);
}

ControlBlock::~ControlBlock() {
  {
    std::lock_guard lock(g_control_blocks.mutex);
    g_control_blocks.all.erase(this);
  }
  if (forked()) return;  // a forked child is not the rank: it only unmaps its memory
  depart("");
  const std::size_t bytes = header_->region_bytes;
  // ACQ_REL: the last rank to leave frees the memory after every other rank's last access.
  if (header_->attached.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  if (const std::uint64_t mailbox = header_->mailbox.load(std::memory_order_acquire); mailbox != 0)
    segment_->free(mailbox, static_cast<std::size_t>(config_.size) * 2 * kSlots * kSlotBytes);
  for (int i = 0; i < config_.size * config_.size; ++i)
    if (const std::uint64_t at = channels_[i].load(std::memory_order_acquire); at != 0)
      segment_->free(at, sizeof(Channel));
  segment_->free(offset_, bytes);
}

bool ControlBlock::forked() const { return g_forks.load(std::memory_order_relaxed) != made_after_forks_; }

/// Returns the watch of rank `r`; null if the rank has not joined yet, and for this rank itself.
const PeerWatch* ControlBlock::watch_of(int r) {
  // ACQUIRE makes the identity readable; pairs with the constructor's store.
  const Member& member = members_[r];
  if (!watches_[r] && member.state.load(std::memory_order_acquire) != MemberState::kAbsent)
    watches_[r] = PeerWatch::of(Identity{member.pid, member.start_time, member.pid_namespace});
  return watches_[r].get();
}

void ControlBlock::watch_peers() {
  static std::atomic<bool> has_warned{false};
  for (int r = 0; r < config_.size; ++r) {
    const PeerWatch* watch = watch_of(r);
    const std::string weakness = watch == nullptr ? "" : watch->weakness();
    if (!weakness.empty() && !has_warned.exchange(true))
      std::fprintf(stderr, "phalanx: rank %d: %s.\n", global(rank()), weakness.c_str());
  }
  spins_ = cpus_suffice(members_, static_cast<std::size_t>(config_.size));
}

bool ControlBlock::shares_pids() const {
  const std::uint64_t own = members_[rank()].pid_namespace;
  return own != 0 &&
         std::all_of(members_, members_ + config_.size, [&](const Member& member) { return member.pid_namespace == own; });
}

void ControlBlock::require_own_process(Op op) const {
  if (forked()) throw failure(FailureKind::kForked, op, "");
}

void ControlBlock::require_usable(Op op) {
  require_own_process(op);
  if (!ended()) return;
  Failure unusable = failure(FailureKind::kUnusable, op, "");
  unusable.ranks.clear();
  unusable.cause = ended_by();
  throw unusable;
}

void ControlBlock::say_here(const std::string& text) {
  std::lock_guard lock(g_control_blocks.mutex);
  members_[rank()].site.write(text);
}

/// Writes `text`, which says where this rank waits, into the control blocks of all groups in this segment.
void ControlBlock::say_everywhere(const std::string& text) {
  std::lock_guard lock(g_control_blocks.mutex);
  for (ControlBlock* control : g_control_blocks.all)
    if (!control->forked() && control->segment_ == segment_)
      control->members_[control->rank()].site.write(text);
}

void ControlBlock::say_on_all(const std::string& text) {
  std::lock_guard lock(g_control_blocks.mutex);
  for (ControlBlock* control : g_control_blocks.all)
    if (!control->forked() && !control->ended()) control->members_[control->rank()].site.write(text);
}

void ControlBlock::hold_on_all(const std::string& text) {
  std::lock_guard lock(g_control_blocks.mutex);
  for (ControlBlock* control : g_control_blocks.all) {
    if (text.empty())
      control->segment_->let_go();
    else
      control->segment_->hold(control->global(control->rank()));
    if (control->forked()) continue;  // a forked worker of a data loader must not write into its rank's control blocks
    SharedText& site = control->members_[control->rank()].site;
    if (!text.empty()) control->said_before_hold_ = site.read();
    site.write(text.empty() ? control->said_before_hold_ : text);
  }
}

std::shared_ptr<const Failure> ControlBlock::ended_by() {
  std::lock_guard lock(ended_mutex_);
  return ended_by_;
}

void ControlBlock::abort(const std::string& why) {
  Failure aborted = failure(FailureKind::kAborted, Op::kNone, "");
  aborted.detail = why;
  end(std::move(aborted));
}

void ControlBlock::depart(const std::string& why) {
  {
    std::lock_guard lock(ended_mutex_);  // end() checks and sets `ended_` under this lock, too
    ended_.store(true, std::memory_order_release);
  }
  if (members_[rank()].state.load(std::memory_order_relaxed) == MemberState::kFell) return;  // the peers know already
  if (!why.empty()) members_[rank()].why.write(why);
  // RELEASE publishes the text; pairs with is_dead().
  members_[rank()].state.store(why.empty() ? MemberState::kDeparted : MemberState::kFell, std::memory_order_release);
  ring_all();
}

void ControlBlock::ring_all() {
  ring(header_->bell);
  for (int r = 0; r < config_.size; ++r) ring(bells_[r]);
}

}  // namespace phalanx
