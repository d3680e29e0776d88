// Point-to-point messages. They travel in rings between each pair of ranks and are matched by source and tag. A thread
// that waits for a message moves messages meanwhile; if no thread waits, a background thread moves them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <tuple>
#include <vector>

#include "control/control_block.h"
#include "collectives/collectives.h"
#include "collectives/work.h"

namespace phalanx {

/// Stands for the peer of a receive whose message may come from any rank of this group or from outside the group. If
/// the message comes from outside, the receive is canceled.
constexpr int kAnyOrBeyond = -2;

/// A send or receive in flight. Shared between the caller, who waits, and the thread that moves its data.
class Request : public Work {
 public:
  using Work::Work;
  /// The sender's rank in the group; valid once a receive is done.
  int source() const { return peer_; }
  /// For a receive from `kAnyOrBeyond`: from now on, its message may only come from a rank of this group.
  void expect_nobody_beyond() { may_come_from_beyond_ = false; }

 private:
  friend class PointToPoint;
  std::atomic<int> peer_{-1};  // -1: a receive from any source, not matched yet; any thread may set it
  std::atomic<bool> may_come_from_beyond_{false};
  std::int64_t tag_ = 0;
  std::uint64_t number_ = 0;  // for a receive, its place in the order in which receives were posted
  Items items_{};
  std::byte* data_ = nullptr;
  std::size_t moved_ = 0;  // bytes moved so far
  std::string site_;
};

class PointToPoint {
 public:
  explicit PointToPoint(ControlBlock& control);
  ~PointToPoint();

  /// Start a message: `op` is kSend or kRecv. A receive from `peer` -1 accepts a message from any source. `data` must
  /// live until the request is done. `site`: the line of the call; only a receive needs it, because the errors of a
  /// receive show the line.
  std::shared_ptr<Request> post(Op op, void* data, Items items, int peer, std::int64_t tag, std::string site);
  /// Send or receive a message, and return when it is done. Returns the peer's rank.
  int run(Op op, void* data, Items items, int peer, std::int64_t tag, Hooks& hooks);
  /// Wait for the request, making progress meanwhile; throws the request's failure.
  void wait(const std::shared_ptr<Request>& request, Hooks& hooks, double timeout_s);
  /// Wait for `timeout_s` at most. Returns whether the request is done; if not, the request continues. Throws the
  /// request's failure.
  bool wait_briefly(const std::shared_ptr<Request>& request, Hooks& hooks, double timeout_s);
  /// Cancel a receive, which is then done and has failed. Returns false, and does nothing, if the receive already has a
  /// message.
  bool cancel(const std::shared_ptr<Request>& request);
  /// Stop the background thread. Unfinished requests fail.
  void stop();

 private:
  /// A message that arrived before its receive was posted. It was taken out of the ring so that a wanted message behind
  /// it could be reached.
  struct Unexpected {
    Fragment head;
    std::vector<std::byte> data;
    std::size_t arrived = 0;
  };
  /// The state of the channel from one rank, and the message that its next fragments belong to.
  struct Incoming {
    Channel* channel = nullptr;
    std::uint64_t num_taken = 0, position = 0;  // records taken; where the next fragment begins in the byte ring
    std::shared_ptr<Request> into;              // the message goes into this receive,
    std::shared_ptr<Unexpected> held;           // or is kept here, because no receive wants it yet
    std::map<std::int64_t, std::deque<std::shared_ptr<Unexpected>>> unexpected;  // messages by tag; no queue is empty
  };
  struct Outgoing {
    Channel* channel = nullptr;
    std::uint64_t num_sent = 0, position = 0;           // records sent; where the next fragment goes in the byte ring
    std::uint64_t num_taken = 0, bytes_taken = 0;  // the receiver's positions when this rank last read them
    std::deque<std::shared_ptr<Request>> queue;
  };

  std::shared_ptr<Request> make_request(Op op, void* data, Items items, int peer, std::int64_t tag);
  void enqueue(const std::shared_ptr<Request>& request);
  void post_recv(const std::shared_ptr<Request>& request);
  bool progress();
  bool has_room(Outgoing& out, std::size_t bytes);
  bool push(int dst);
  bool pull(int src);
  void deliver(Incoming& incoming, int src, const Record& record);
  bool take_unexpected(int src, const std::shared_ptr<Request>& request);
  std::uint64_t first_posted(int src, std::int64_t tag) const;
  void withdraw(const Request& request);
  std::shared_ptr<Request> match(int src, const Fragment& head);
  void begin_message(Incoming& incoming, int src, const Fragment& head);
  bool wanted(int src) const;
  void complete(const std::shared_ptr<Request>& request, std::exception_ptr error = nullptr);
  void check_fits(Request& request, int src, const Fragment& head);
  Channel* open(int src, int dst, bool create);
  void fail_all(std::exception_ptr error);
  template <class Done>
  void await_request(Wait& wait, const Request& request, Done&& done);
  void run_background();
  bool pending() const;
  std::size_t num_pending() const;

  ControlBlock& control_;
  std::mutex mutex_;
  std::vector<Outgoing> outgoing_;  // by destination
  std::vector<Incoming> incoming_;  // by source
  std::map<std::uint64_t, std::shared_ptr<Request>> posted_;            // receives without a message, by number
  std::set<std::tuple<int, std::int64_t, std::uint64_t>> by_source_tag_;  // index of `posted_`: source, tag, number
  std::uint64_t num_posted_ = 0;
  std::map<std::uint64_t, Mapping> mapped_;     // channels by offset
  int next_source_ = 0;

  // The background thread moves messages for which nobody waits, such as an isend whose rank continues to compute.
  std::thread thread_;
  std::condition_variable changed_;
  std::atomic<int> num_waiters_{0};
  std::atomic<bool> stopping_{false};
  bool idle_ = false;  // the background thread sleeps until it is notified
};

}  // namespace phalanx
