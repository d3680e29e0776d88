#include "p2p.h"

#include <pthread.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>

namespace phalanx {
namespace {

using namespace std::chrono_literals;
/// Bytes of one fragment: small enough that sender and receiver overlap, large enough to amortise the flags.
constexpr std::size_t kFragmentBytes = kChannelBytes / 4;
/// How long the background thread leaves a new request to a caller who is about to wait for it.
constexpr auto kLeaveToCaller = 500us;
/// How often it looks up while callers wait, who make the progress themselves.
constexpr auto kCallerWaits = 50ms;
/// Looks without a request before it sleeps until it is called.
constexpr int kVainLooks = 100;

void to_ring(Channel& channel, std::uint64_t position, const std::byte* from, std::size_t bytes) {
  const std::size_t at = position % kChannelBytes;
  const std::size_t first = std::min(bytes, kChannelBytes - at);
  if (first != 0) std::memcpy(channel.ring + at, from, first);
  if (bytes > first) std::memcpy(channel.ring, from + first, bytes - first);
}

void from_ring(const Channel& channel, std::uint64_t position, std::byte* to, std::size_t bytes) {
  const std::size_t at = position % kChannelBytes;
  const std::size_t first = std::min(bytes, kChannelBytes - at);
  if (first != 0) std::memcpy(to, channel.ring + at, first);
  if (bytes > first) std::memcpy(to + first, channel.ring, bytes - first);
}

}  // namespace

PointToPoint::PointToPoint(Board& board)
    : board_(board),
      outgoing_(static_cast<std::size_t>(board.size())),
      incoming_(static_cast<std::size_t>(board.size())) {}

PointToPoint::~PointToPoint() { stop(); }

void PointToPoint::stop() {
  stopping_ = true;
  { std::lock_guard lock(mutex_); }  // a thread that is about to wait has seen it or is waiting already
  changed_.notify_all();
  ring(board_.p2p_bell(board_.rank()));
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<Request> PointToPoint::post(Op op, void* data, Items items, int peer, std::int64_t tag,
                                            std::string site) {
  board_.require_usable(op);
  auto request = std::make_shared<Request>(board_, op);
  request->peer_ = peer;
  request->tag_ = tag;
  request->items_ = items;
  request->data_ = static_cast<std::byte*>(data);
  request->site_ = std::move(site);
  std::lock_guard lock(mutex_);
  if (stopping_) board_.require_usable(op);  // left meanwhile
  try {
    if (op == Op::kSend) {
      outgoing_[peer].queue.push_back(request);
    } else {
      post_recv(request);
    }
    progress();
  } catch (...) {
    fail_all(std::current_exception());
    throw;
  }
  if (!request->done()) {
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    if (idle_) changed_.notify_one();
  }
  return request;
}

/// Take a message that has arrived already, or queue the receive.
void PointToPoint::post_recv(const std::shared_ptr<Request>& request) {
  if (const int peer = request->peer_; peer >= 0) {
    if (take_unexpected(peer, request)) return;
  } else {
    for (int src = 0; src < board_.size(); ++src)
      if (take_unexpected(src, request)) return;
  }
  request->number_ = ++num_posted_;
  posted_.emplace(request->number_, request);
  by_source_tag_.emplace(request->peer_, request->tag_, request->number_);
}

bool PointToPoint::take_unexpected(int src, const std::shared_ptr<Request>& request) {
  Incoming& in = incoming_[src];
  const auto found = in.unexpected.find(request->tag_);
  if (found == in.unexpected.end()) return false;
  const std::shared_ptr<Unexpected> message = found->second.front();
  found->second.pop_front();
  if (found->second.empty()) in.unexpected.erase(found);
  request->peer_ = src;
  check_fits(*request, src, message->head);
  std::copy_n(message->data.begin(), message->arrived, request->data_);
  request->moved_ = message->arrived;
  if (in.held == message) {  // its rest is still on the way
    in.held = nullptr;
    in.into = request;
  }
  if (request->moved_ == request->items_.bytes()) complete(request);
  return true;
}

/// Number of the first receive that was posted for `src` (-1: for any source) and `tag`; the largest if there is none.
std::uint64_t PointToPoint::first_posted(int src, std::int64_t tag) const {
  const auto found = by_source_tag_.lower_bound({src, tag, 0});
  if (found == by_source_tag_.end() || std::get<0>(*found) != src || std::get<1>(*found) != tag) return UINT64_MAX;
  return std::get<2>(*found);
}

/// Take a receive out of those that wait for a message.
void PointToPoint::withdraw(const Request& request) {
  by_source_tag_.erase({request.peer_, request.tag_, request.number_});
  posted_.erase(request.number_);
}

void PointToPoint::complete(const std::shared_ptr<Request>& request, std::exception_ptr error) {
  request->finish(error);
  Bell& own = board_.p2p_bell(board_.rank());  // the caller may sleep while the background thread finishes its request
  if (has_sleepers(own)) ring(own);
}

bool PointToPoint::cancel(const std::shared_ptr<Request>& request) {
  request->require_reachable();
  std::lock_guard lock(mutex_);
  if (!posted_.contains(request->number_)) return false;
  withdraw(*request);
  complete(request, std::make_exception_ptr(board_.failure(FailureKind::kDestroyed, Op::kRecv, request->site_)));
  return true;
}

bool PointToPoint::pending() const {
  return !posted_.empty() || std::any_of(outgoing_.begin(), outgoing_.end(), [](auto& out) { return !out.queue.empty(); }) ||
         std::any_of(incoming_.begin(), incoming_.end(), [](auto& in) { return in.into != nullptr; });
}

Channel* PointToPoint::open(int src, int dst, bool create) {
  std::atomic<std::uint64_t>& cell = board_.channel(src, dst);
  std::uint64_t offset = cell.load(std::memory_order_acquire);
  if (offset == 0) {
    if (!create) return nullptr;
    try {
      offset = board_.segment().allocate(sizeof(Channel));
    } catch (const std::bad_alloc&) {
      Failure failure = board_.failure(FailureKind::kNoMemory, Op::kSend, "");
      failure.size_bytes = sizeof(Channel);
      throw board_.end(std::move(failure));  // the receiver waits: it must be told
    }
    cell.store(offset, std::memory_order_release);  // only the sender writes its cells; pairs with the load above
  }
  Mapping& mapping = mapped_[offset];
  if (!mapping) mapping = board_.segment().map(offset, align_up(sizeof(Channel), kPage));
  return reinterpret_cast<Channel*>(mapping.data());
}

bool PointToPoint::progress() {
  bool moved = false;
  for (int dst = 0; dst < board_.size(); ++dst)
    if (!outgoing_[dst].queue.empty()) moved |= push(dst);
  // Start at another source each time, so that receives from any source are fair.
  next_source_ = (next_source_ + 1) % board_.size();
  for (int i = 0; i < board_.size(); ++i) {
    const int src = (next_source_ + i) % board_.size();
    if (wanted(src)) moved |= pull(src);
  }
  return moved;
}

bool PointToPoint::wanted(int src) const {
  if (incoming_[src].into) return true;
  for (const int peer : {src, -1}) {
    const auto found = by_source_tag_.lower_bound({peer, INT64_MIN, 0});
    if (found != by_source_tag_.end() && std::get<0>(*found) == peer) return true;
  }
  return false;
}

/// Move what fits into the ring to `dst`.
bool PointToPoint::push(int dst) {
  Outgoing& out = outgoing_[dst];
  if (out.channel == nullptr) out.channel = open(board_.rank(), dst, true);
  Channel& channel = *out.channel;
  bool moved = false;
  while (!out.queue.empty()) {
    const std::shared_ptr<Request> request = out.queue.front();
    const std::size_t total = request->items_.bytes();
    const std::uint64_t head = channel.head.load(std::memory_order_relaxed);  // only this side writes it
    // ACQUIRE: the receiver has copied out what lies below tail; pairs with its RELEASE in pull().
    const std::size_t space = kChannelBytes - (head - channel.tail.load(std::memory_order_acquire));
    const std::size_t want = std::min(total - request->moved_, kFragmentBytes);
    if (space < sizeof(Fragment) + align_up(want, kCacheLine)) break;
    const Fragment fragment{total, want, request->tag_, request->items_.dtype, request->moved_ == 0 ? 1u : 0u};
    to_ring(channel, head, reinterpret_cast<const std::byte*>(&fragment), sizeof fragment);
    to_ring(channel, head + sizeof fragment, request->data_ + request->moved_, want);
    // RELEASE publishes the record; pairs with the receiver's ACQUIRE in pull().
    channel.head.store(head + sizeof fragment + align_up(want, kCacheLine), std::memory_order_release);
    if (has_sleepers(board_.p2p_bell(dst))) ring(board_.p2p_bell(dst));
    request->moved_ += want;
    moved = true;
    if (request->moved_ == total) {
      out.queue.pop_front();
      complete(request);
    }
  }
  return moved;
}

/// Take records from the ring of `src` while somebody wants them.
bool PointToPoint::pull(int src) {
  Incoming& in = incoming_[src];
  if (in.channel == nullptr) in.channel = open(src, board_.rank(), false);
  if (in.channel == nullptr) return false;
  Channel& channel = *in.channel;
  bool moved = false;
  while (wanted(src)) {
    const std::uint64_t tail = channel.tail.load(std::memory_order_relaxed);  // only this side writes it
    if (channel.head.load(std::memory_order_acquire) == tail) break;
    Fragment fragment;
    from_ring(channel, tail, reinterpret_cast<std::byte*>(&fragment), sizeof fragment);
    deliver(in, src, fragment, tail + sizeof fragment);
    channel.tail.store(tail + sizeof fragment + align_up(fragment.fragment_bytes, kCacheLine),
                       std::memory_order_release);
    if (has_sleepers(board_.p2p_bell(src))) ring(board_.p2p_bell(src));
    moved = true;
  }
  return moved;
}

std::shared_ptr<Request> PointToPoint::match(int src, const Fragment& head) {
  const auto found = posted_.find(std::min(first_posted(src, head.tag), first_posted(-1, head.tag)));
  if (found == posted_.end()) return nullptr;
  const std::shared_ptr<Request> request = found->second;
  withdraw(*request);
  request->peer_ = src;
  return request;
}

void PointToPoint::check_fits(Request& request, int src, const Fragment& head) {
  if (head.message_bytes == request.items_.bytes() && head.dtype == request.items_.dtype) return;
  MadeCall expected;
  expected.rank = board_.global(board_.rank());
  expected.call.op = Op::kRecv;
  expected.call.dtype = request.items_.dtype;
  expected.call.count = request.items_.count;
  expected.root = board_.global(src);
  expected.tag = head.tag;
  MadeCall sent;
  sent.rank = board_.global(src);
  sent.call.op = Op::kSend;
  sent.call.dtype = static_cast<std::uint8_t>(head.dtype);
  sent.size_bytes = head.message_bytes;
  Failure failure = board_.failure(FailureKind::kMessageDiffers, Op::kRecv, request.site_);
  failure.ranks = {sent.rank};
  failure.calls = {std::move(expected), std::move(sent)};
  throw board_.end(std::move(failure));
}

/// Decide where the message that begins with `head` goes.
void PointToPoint::begin_message(Incoming& in, int src, const Fragment& head) {
  if ((in.into = match(src, head))) {
    check_fits(*in.into, src, head);
    return;
  }
  // Somebody wants a later message of this source: keep this one for its receive.
  in.held = std::make_shared<Unexpected>();
  in.held->head = head;
  in.held->data.resize(head.message_bytes);
  in.unexpected[head.tag].push_back(in.held);
}

void PointToPoint::deliver(Incoming& in, int src, const Fragment& fragment, std::uint64_t position) {
  if (fragment.first != 0) begin_message(in, src, fragment);
  if (in.into) {
    Request& request = *in.into;
    from_ring(*in.channel, position, request.data_ + request.moved_, fragment.fragment_bytes);
    request.moved_ += fragment.fragment_bytes;
    if (request.moved_ == fragment.message_bytes) complete(std::exchange(in.into, nullptr));
  } else {
    from_ring(*in.channel, position, in.held->data.data() + in.held->arrived, fragment.fragment_bytes);
    in.held->arrived += fragment.fragment_bytes;
    if (in.held->arrived == fragment.message_bytes) in.held = nullptr;
  }
}

void PointToPoint::fail_all(std::exception_ptr error) {
  for (Outgoing& out : outgoing_) {
    for (const auto& request : out.queue) complete(request, error);
    out.queue.clear();
  }
  for (Incoming& in : incoming_)
    if (in.into) complete(std::exchange(in.into, nullptr), error);
  for (const auto& [number, request] : posted_) complete(request, error);
  posted_.clear();
  by_source_tag_.clear();
}

void PointToPoint::wait(const std::shared_ptr<Request>& request, Hooks& hooks, double timeout_s) {
  request->require_reachable();
  ++num_waiters_;
  struct Leave {
    PointToPoint& p2p;
    ~Leave() {
      std::lock_guard lock(p2p.mutex_);
      --p2p.num_waiters_;
      if (p2p.pending()) p2p.changed_.notify_one();
    }
  } leave{*this};
  if (!request->done()) {
    Call call;
    call.op = request->op_;
    call.dtype = request->items_.dtype;
    call.count = request->items_.count;
    Wait wait = board_.begin(call, 0, hooks, timeout_s, board_.p2p_bell(board_.rank()));
    try {
      await_request(wait, *request, [&] { return request->done(); });
    } catch (...) {
      std::lock_guard lock(mutex_);
      fail_all(std::current_exception());  // nothing may touch the callers' tensors any more
      throw;
    }
  }
  if (request->error()) std::rethrow_exception(request->error());
}

bool PointToPoint::wait_briefly(const std::shared_ptr<Request>& request, Hooks& hooks, double timeout_s) {
  request->require_reachable();
  constexpr auto kTick = 50ms;
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s));
  auto done = [&] { return request->done(); };
  // The background thread makes the progress and rings, as if nobody waited.
  for (auto now = Clock::now(); !done() && now < end; now = Clock::now()) {
    if (!sleep_on(board_.p2p_bell(board_.rank()), std::min<std::chrono::nanoseconds>(end - now, kTick), done)) hooks.tick();
  }
  if (done() && request->error()) std::rethrow_exception(request->error());
  return done();
}

/// Make progress until `done`. What is missing is the request's peer, or anybody.
template <class Done>
void PointToPoint::await_request(Wait& wait, const Request& request, Done&& done) {
  const int peer = request.peer_;
  // From any source: peers that have left in order are not waited for, unless nobody else is there.
  auto gone = [&](int r) {
    return r == board_.rank() || board_.member(r).state.load(std::memory_order_acquire) == MemberState::kDeparted;
  };
  auto all_gone = [&] {
    for (int r = 0; r < board_.size(); ++r)
      if (!gone(r)) return false;
    return true;
  };
  board_.await(wait, [&](int r) {
    if (peer >= 0 && r != peer) return false;
    if (peer < 0 && board_.size() > 1 && (r == board_.rank() || (gone(r) && !all_gone()))) return false;
    if (done()) return false;
    std::lock_guard lock(mutex_);
    progress();
    return !done();
  });
}

void PointToPoint::run() {
  pthread_setname_np(pthread_self(), "phalanx-p2p");
  Hooks no_hooks;
  int num_vain_looks = 0;
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    // Look now and then while there is traffic: being woken for each message would take a CPU from its ranks.
    if (num_waiters_ > 0) {
      changed_.wait_for(lock, kCallerWaits, [&] { return stopping_ || num_waiters_ == 0; });
    } else if (num_vain_looks < kVainLooks) {
      changed_.wait_for(lock, kLeaveToCaller, [&] { return stopping_.load(); });
    } else {
      idle_ = true;
      changed_.wait(lock, [&] { return stopping_ || pending(); });
      idle_ = false;
      num_vain_looks = 0;
      continue;
    }
    num_vain_looks = pending() ? 0 : num_vain_looks + 1;
    if (stopping_ || num_waiters_ > 0 || num_vain_looks > 0) continue;
    try {
      // The oldest request speaks for all: its peer's death or its deadline is what ends the wait.
      std::shared_ptr<Request> oldest = posted_.empty() ? nullptr : posted_.begin()->second;
      for (const Outgoing& out : outgoing_)
        if (!out.queue.empty()) oldest = out.queue.front();
      for (const Incoming& in : incoming_)
        if (in.into) oldest = in.into;
      if (oldest == nullptr) continue;
      Call call;
      call.op = oldest->op_;
      Wait wait = board_.begin(call, 0, no_hooks, 0, board_.p2p_bell(board_.rank()));
      wait.patience = std::chrono::nanoseconds(0);  // the core belongs to the computing thread
      wait.quiet = true;                            // nobody waits for it yet
      lock.unlock();
      await_request(wait, *oldest, [&] { return stopping_ || num_waiters_.load() > 0 || oldest->done(); });
      lock.lock();
    } catch (...) {
      if (!lock.owns_lock()) lock.lock();
      fail_all(std::current_exception());
    }
  }
  fail_all(std::make_exception_ptr(board_.failure(FailureKind::kDestroyed, Op::kNone, "")));
}

}  // namespace phalanx
