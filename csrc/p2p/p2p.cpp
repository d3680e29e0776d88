// The life of a message: how it is posted, how threads wait for it, how it fails; and the background thread.
#include "p2p/p2p.h"

#include <pthread.h>

#include <algorithm>
#include <cstdint>
#include <utility>

namespace phalanx {
namespace {

using namespace std::chrono_literals;
/// How long the background thread leaves a new request alone, because its caller may be about to wait for it.
constexpr auto kLeaveToCaller = 500us;
/// How often the background thread checks for work while callers wait and move the messages themselves.
constexpr auto kCallerWaits = 50ms;
/// After this many checks without a request, the background thread sleeps until it is woken.
constexpr int kVainLooks = 100;

}  // namespace

PointToPoint::PointToPoint(ControlBlock& control)
    : control_(control),
      outgoing_(static_cast<std::size_t>(control.size())),
      incoming_(static_cast<std::size_t>(control.size())) {}

PointToPoint::~PointToPoint() { stop(); }

void PointToPoint::stop() {
  stopping_ = true;
  { std::lock_guard lock(mutex_); }  // the thread has seen `stopping_`, or is already waiting and will be notified
  changed_.notify_all();
  ring(control_.p2p_bell(control_.rank()));
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<Request> PointToPoint::make_request(Op op, void* data, Items items, int peer, std::int64_t tag) {
  control_.require_usable(op);
  auto request = std::make_shared<Request>(control_, op);
  request->peer_ = std::max(peer, -1);
  request->may_come_from_beyond_ = peer == kAnyOrBeyond;
  request->tag_ = tag;
  request->items_ = items;
  request->data_ = static_cast<std::byte*>(data);
  return request;
}

std::shared_ptr<Request> PointToPoint::post(Op op, void* data, Items items, int peer, std::int64_t tag,
                                            std::string site) {
  auto request = make_request(op, data, items, peer, tag);
  request->site_ = std::move(site);
  std::lock_guard lock(mutex_);
  enqueue(request);
  if (request->done()) return request;
  if (!thread_.joinable()) thread_ = std::thread([this] { run_background(); });
  if (idle_) changed_.notify_one();
  return request;
}

int PointToPoint::run(Op op, void* data, Items items, int peer, std::int64_t tag, Hooks& hooks) {
  const auto request = make_request(op, data, items, peer, tag);
  try {
    {
      std::lock_guard lock(mutex_);
      enqueue(request);
    }
    wait(request, hooks, 0);
  } catch (const Failure& failure) {
    // Another thread may have found that the message has the wrong size or dtype. That thread did not know the line of
    // this call, so the line is added here.
    if (failure.kind != FailureKind::kMessageDiffers || !failure.site.empty()) throw;
    Failure located = failure;
    located.site = hooks.site();
    throw located;
  }
  return request->source();
}

/// Queues a message and moves what can be moved without waiting. The caller holds the lock.
void PointToPoint::enqueue(const std::shared_ptr<Request>& request) {
  if (stopping_) control_.require_usable(request->op_);  // throws: this rank has left the group
  try {
    if (request->op_ == Op::kSend) {
      outgoing_[request->peer_].queue.push_back(request);
    } else {
      post_recv(request);
    }
    progress();
  } catch (...) {
    fail_all(std::current_exception());
    throw;
  }
}

/// Gives the receive a message that has already arrived, or queues it.
void PointToPoint::post_recv(const std::shared_ptr<Request>& request) {
  if (const int peer = request->peer_; peer >= 0) {
    if (take_unexpected(peer, request)) return;
  } else {
    for (int src = 0; src < control_.size(); ++src)
      if (take_unexpected(src, request)) return;
  }
  request->number_ = ++num_posted_;
  posted_.emplace(request->number_, request);
  by_source_tag_.emplace(request->peer_, request->tag_, request->number_);
}

void PointToPoint::complete(const std::shared_ptr<Request>& request, std::exception_ptr error) {
  request->finish(error);
  Bell& own = control_.p2p_bell(control_.rank());  // wakes the caller if the background thread runs this function
  if (has_sleepers(own)) ring(own);
}

bool PointToPoint::cancel(const std::shared_ptr<Request>& request) {
  request->require_reachable();
  std::lock_guard lock(mutex_);
  if (!posted_.contains(request->number_)) return false;
  withdraw(*request);
  complete(request, std::make_exception_ptr(control_.failure(FailureKind::kDestroyed, Op::kRecv, request->site_)));
  return true;
}

bool PointToPoint::pending() const { return num_pending() > 0; }

/// The number of messages that are not done. The caller holds the lock.
std::size_t PointToPoint::num_pending() const {
  std::size_t num = posted_.size();
  for (const Outgoing& out : outgoing_) num += out.queue.size();
  for (const Incoming& in : incoming_) num += in.into != nullptr;
  return num;
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
  if (request->done()) {
    if (request->error()) std::rethrow_exception(request->error());
    return;
  }
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
    Wait wait = control_.begin(call, 0, hooks, timeout_s, control_.p2p_bell(control_.rank()));
    wait.recorded = control_.recorded(EventKind::kMessage, call, static_cast<std::uint64_t>(request->peer_ + 1));
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
  // This thread does not count itself in `num_waiters_`, so the background thread moves the message. It also rings the
  // bell at which this thread sleeps.
  for (auto now = Clock::now(); !done() && now < end; now = Clock::now()) {
    if (!sleep_on(control_.p2p_bell(control_.rank()), std::min<std::chrono::nanoseconds>(end - now, kTick), done)) hooks.tick();
  }
  if (done() && request->error()) std::rethrow_exception(request->error());
  return done();
}

/// Makes progress until `done()` is true. Meanwhile the request's peer counts as missing; if the message may come from
/// any peer, all peers count as missing.
template <class Done>
void PointToPoint::await_request(Wait& wait, const Request& request, Done&& done) {
  const int peer = request.peer_;
  // For a receive from any source, peers that left normally do not count as missing, unless all peers have left: then
  // the receive fails. While the message may also come from outside the group, a peer that left normally never makes
  // the receive fail.
  wait.spares_departed = &request.may_come_from_beyond_;
  auto gone = [&](int r) {
    return r == control_.rank() || control_.member(r).state.load(std::memory_order_acquire) == MemberState::kDeparted;
  };
  auto all_gone = [&] {
    for (int r = 0; r < control_.size(); ++r)
      if (!gone(r)) return false;
    return true;
  };
  if (!wait.quiet && peer >= 0)
    wait.awaited = [this, &request] {  // captures two words, so std::function does not allocate
      std::lock_guard lock(mutex_);
      const bool is_all = num_pending() == 1 && !request.done();
      return is_all ? Awaited{request.peer_, request.op_ == Op::kSend} : Awaited{};
    };
  control_.await(wait, [&](int r) {
    if (peer >= 0 && r != peer) return false;
    if (peer < 0 && control_.size() > 1) {
      if (r == control_.rank()) return false;
      if (gone(r) && !request.may_come_from_beyond_ && !all_gone()) return false;
    }
    if (done()) return false;
    std::lock_guard lock(mutex_);
    progress();
    return !done();
  });
}

void PointToPoint::run_background() {
  pthread_setname_np(pthread_self(), "phalanx-p2p");
  Hooks no_hooks;
  int num_vain_looks = 0;
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    // While there is traffic, check at intervals: waking this thread for each message would take CPU time from the
    // ranks.
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
      // Wait for one request on behalf of all requests: the death of its peer, or its deadline, ends the wait.
      std::shared_ptr<Request> oldest = posted_.empty() ? nullptr : posted_.begin()->second;
      for (const Outgoing& out : outgoing_)
        if (!out.queue.empty()) oldest = out.queue.front();
      for (const Incoming& in : incoming_)
        if (in.into) oldest = in.into;
      if (oldest == nullptr) continue;
      Call call;
      call.op = oldest->op_;
      Wait wait = control_.begin(call, 0, no_hooks, 0, control_.p2p_bell(control_.rank()));
      wait.patience = std::chrono::nanoseconds(0);  // sleep at once: the CPU belongs to the thread that computes
      wait.quiet = true;                            // no stall reports: nobody waits for the message yet
      lock.unlock();
      await_request(wait, *oldest, [&] { return stopping_ || num_waiters_.load() > 0 || oldest->done(); });
      lock.lock();
    } catch (...) {
      if (!lock.owns_lock()) lock.lock();
      fail_all(std::current_exception());
    }
  }
  fail_all(std::make_exception_ptr(control_.failure(FailureKind::kDestroyed, Op::kNone, "")));
}

}  // namespace phalanx
