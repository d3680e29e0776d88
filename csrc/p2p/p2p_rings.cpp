// The transport of messages: cuts messages into fragments, passes the fragments through the rings of each pair of
// ranks, and matches messages to receives.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>

#include "p2p/p2p.h"

namespace phalanx {
namespace {

/// Bytes of one fragment: small enough that sender and receiver overlap, large enough to amortize the flags.
constexpr std::size_t kFragmentBytes = kChannelBytes / 4;

void to_ring(Channel& channel, std::uint64_t position, const std::byte* from, std::size_t bytes) {
  const std::size_t at = position % kChannelBytes;
  const std::size_t first = std::min(bytes, kChannelBytes - at);
  std::memcpy(channel.ring + at, from, first);
  if (bytes > first) std::memcpy(channel.ring, from + first, bytes - first);
}

void from_ring(const Channel& channel, std::uint64_t position, std::byte* to, std::size_t bytes) {
  const std::size_t at = position % kChannelBytes;
  const std::size_t first = std::min(bytes, kChannelBytes - at);
  std::memcpy(to, channel.ring + at, first);
  if (bytes > first) std::memcpy(to + first, channel.ring, bytes - first);
}

/// Number of bytes that a fragment takes in the byte ring; 0 if it fits into its record.
std::uint64_t stride_of(std::size_t bytes) { return bytes <= Record::kInline ? 0 : align_up(bytes, kCacheLine); }

}  // namespace

Channel* PointToPoint::open(int src, int dst, bool create) {
  std::atomic<std::uint64_t>& cell = control_.channel(src, dst);
  std::uint64_t offset = cell.load(std::memory_order_acquire);
  if (offset == 0) {
    if (!create) return nullptr;
    try {
      offset = control_.segment().allocate(sizeof(Channel));
    } catch (const std::bad_alloc&) {
      Failure failure = control_.failure(FailureKind::kNoMemory, Op::kSend, "");
      failure.size_bytes = sizeof(Channel);
      throw control_.end(std::move(failure));  // ends the group, because the receiver may be waiting already
    }
    cell.store(offset, std::memory_order_release);  // pairs with the load above; only the sender writes this cell
  }
  Mapping& mapping = mapped_[offset];
  if (!mapping) mapping = control_.segment().map(offset, align_up(sizeof(Channel), kPage));
  return reinterpret_cast<Channel*>(mapping.data());
}

bool PointToPoint::progress() {
  bool moved = false;
  for (int dst = 0; dst < control_.size(); ++dst)
    if (!outgoing_[dst].queue.empty()) moved |= push(dst);
  // Start at another source each time, so that receives from any source are fair.
  next_source_ = (next_source_ + 1) % control_.size();
  for (int i = 0; i < control_.size(); ++i) {
    const int src = (next_source_ + i) % control_.size();
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

/// True if the rings to a rank have room for a fragment of `bytes`.
bool PointToPoint::has_room(Outgoing& out, std::size_t bytes) {
  const std::uint64_t end = out.position + stride_of(bytes);
  const auto fits = [&] {
    return out.num_sent - out.num_taken < Channel::kRecords && end - out.bytes_taken <= kChannelBytes;
  };
  if (fits()) return true;
  // ACQUIRE: the receiver has copied out everything before these positions; pairs with its RELEASE in pull().
  out.num_taken = out.channel->num_taken.load(std::memory_order_acquire);
  out.bytes_taken = out.channel->bytes_taken.load(std::memory_order_acquire);
  return fits();
}

/// Moves as many fragments to `dst` as its rings have room for.
bool PointToPoint::push(int dst) {
  Outgoing& out = outgoing_[dst];
  if (out.channel == nullptr) out.channel = open(control_.rank(), dst, true);
  Channel& channel = *out.channel;
  bool moved = false;
  while (!out.queue.empty()) {
    const std::shared_ptr<Request> request = out.queue.front();
    const std::size_t total = request->items_.bytes();
    const std::size_t bytes = std::min(total - request->moved_, kFragmentBytes);
    if (!has_room(out, bytes)) break;
    Record& record = channel.records[out.num_sent % Channel::kRecords];
    record.fragment = {total, request->tag_, static_cast<std::uint32_t>(bytes), request->items_.dtype,
                       request->moved_ == 0};
    const std::byte* from = request->data_ + request->moved_;
    if (stride_of(bytes) != 0) {
      to_ring(channel, out.position, from, bytes);
    } else if (bytes != 0) {
      std::memcpy(record.data, from, bytes);
    }
    out.position += stride_of(bytes);
    record.number.store(++out.num_sent, std::memory_order_release);  // publishes the record; pairs with pull()
    if (has_sleepers(control_.p2p_bell(dst))) ring(control_.p2p_bell(dst));
    request->moved_ += bytes;
    moved = true;
    if (request->moved_ == total) {
      out.queue.pop_front();
      complete(request);
    }
  }
  return moved;
}

/// Takes fragments from `src` as long as a receive wants a message from it.
bool PointToPoint::pull(int src) {
  Incoming& in = incoming_[src];
  if (in.channel == nullptr) in.channel = open(src, control_.rank(), false);
  if (in.channel == nullptr) return false;
  Channel& channel = *in.channel;
  bool moved = false;
  while (wanted(src)) {
    const Record& record = channel.records[in.num_taken % Channel::kRecords];
    if (record.number.load(std::memory_order_acquire) != in.num_taken + 1) break;
    deliver(in, src, record);
    in.position += stride_of(record.fragment.fragment_bytes);
    // RELEASE: lets the sender overwrite what was copied out; pairs with its ACQUIRE in has_room().
    channel.bytes_taken.store(in.position, std::memory_order_release);
    channel.num_taken.store(++in.num_taken, std::memory_order_release);
    if (has_sleepers(control_.p2p_bell(src))) ring(control_.p2p_bell(src));
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
  expected.rank = control_.global(control_.rank());
  expected.call.op = Op::kRecv;
  expected.call.dtype = request.items_.dtype;
  expected.call.count = request.items_.count;
  expected.root = control_.global(src);
  expected.tag = head.tag;
  MadeCall sent;
  sent.rank = control_.global(src);
  sent.call.op = Op::kSend;
  sent.call.dtype = static_cast<std::uint8_t>(head.dtype);
  sent.size_bytes = head.message_bytes;
  Failure failure = control_.failure(FailureKind::kMessageDiffers, Op::kRecv, request.site_);
  failure.ranks = {sent.rank};
  failure.calls = {std::move(expected), std::move(sent)};
  throw control_.end(std::move(failure));
}

/// Decides where to put the message that begins with fragment `head`.
void PointToPoint::begin_message(Incoming& in, int src, const Fragment& head) {
  if ((in.into = match(src, head))) {
    check_fits(*in.into, src, head);
    return;
  }
  // A receive wants a later message of this source: keep this message until a receive for it is posted.
  in.held = std::make_shared<Unexpected>();
  in.held->head = head;
  in.held->data.resize(head.message_bytes);
  in.unexpected[head.tag].push_back(in.held);
}

void PointToPoint::deliver(Incoming& in, int src, const Record& record) {
  const Fragment& fragment = record.fragment;
  const std::size_t bytes = fragment.fragment_bytes;
  if (fragment.is_first) begin_message(in, src, fragment);
  std::byte* const to = in.into ? in.into->data_ + in.into->moved_ : in.held->data.data() + in.held->arrived;
  if (stride_of(bytes) != 0) {
    from_ring(*in.channel, in.position, to, bytes);
  } else if (bytes != 0) {
    std::memcpy(to, record.data, bytes);
  }
  if (in.into) {
    in.into->moved_ += bytes;
    if (in.into->moved_ == fragment.message_bytes) complete(std::exchange(in.into, nullptr));
  } else {
    in.held->arrived += bytes;
    if (in.held->arrived == fragment.message_bytes) in.held = nullptr;
  }
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
  if (in.held == message) {  // the rest of the message has not arrived yet
    in.held = nullptr;
    in.into = request;
  }
  if (request->moved_ == request->items_.bytes()) complete(request);
  return true;
}

/// Number of the first receive posted for `src` (-1: for any source) and `tag`; the largest number if there is none.
std::uint64_t PointToPoint::first_posted(int src, std::int64_t tag) const {
  const auto found = by_source_tag_.lower_bound({src, tag, 0});
  if (found == by_source_tag_.end() || std::get<0>(*found) != src || std::get<1>(*found) != tag) return UINT64_MAX;
  return std::get<2>(*found);
}

/// Removes a receive from those that wait for a message.
void PointToPoint::withdraw(const Request& request) {
  by_source_tag_.erase({request.peer_, request.tag_, request.number_});
  posted_.erase(request.number_);
}

}  // namespace phalanx
