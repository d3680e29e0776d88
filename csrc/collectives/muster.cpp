// How the ranks of a collective meet: each publishes its call and waits for everyone's, which checks the calls against
// each other and tells that the previous collective is over everywhere. And the mailboxes and counters of chunks.
#include <algorithm>
#include <chrono>
#include <new>
#include <string>
#include <system_error>

#include "collectives/collectives.h"

namespace phalanx {

Wait Collectives::begin(const Context& context, const Call& call) {
  Wait wait = board_.begin(call, ++seq_, *context.hooks, context.timeout_s, board_.header().bell);
  if (records) wait.recorded = board_.recorded(EventKind::kCollective, call, Board::number(seq_));
  return wait;
}

/// Where rank `r` leaves `bytes` for its peers before the muster.
std::byte* Collectives::area(int r, std::size_t bytes) {
  return bytes <= kInlineBytes ? board_.line(r, seq_).payload : board_.stage(r, seq_);
}

void Collectives::muster(Wait& wait) {
  board_.publish_cpu();
  Line& mine = board_.line(board_.rank(), seq_);
  if (compares_calls) {
    mine.what = wait.call.what();
    mine.detail = wait.call.detail();
  }
  mine.seq.store(seq_, std::memory_order_release);  // publishes call, payload and stage; pairs with `missing` below
  auto missing = [&](int r) { return board_.line(r, seq_).seq.load(std::memory_order_acquire) != seq_; };
  int num_here = 0;
  auto all_here = [&] {
    while (num_here < board_.size() && !missing(num_here)) ++num_here;
    return num_here == board_.size();
  };
  // The first look comes before the fence in has_sleepers(), which waits until the peers can see this rank's store:
  // whoever arrives last fetches their lines meanwhile. Only a rank that finds all here wakes the sleepers; the fence
  // lets at least one rank find that.
  const bool is_last = all_here();
  if (has_sleepers(board_.header().bell) && all_here()) ring(board_.header().bell);
  arrival_wait_s_ = 0;
  if (!is_last) {
    const auto begin = std::chrono::steady_clock::now();
    wait.arriving = true;
    board_.await(wait, missing);
    wait.arriving = false;
    arrival_wait_s_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  if (compares_calls) compare_calls(wait);
}

/// The lines are in the cache already: their `seq` was just read.
void Collectives::compare_calls(Wait& wait) {
  for (int r = 0; r < board_.size(); ++r)
    if (board_.call_differs(r, seq_)) board_.mismatch(wait);
}

/// Make sure that all ranks have staged the same counts, one for each rank's block.
void Collectives::compare_counts(Wait& wait, std::size_t num_counts) {
  for (int r = 1; r < board_.size(); ++r) {
    const auto [first, other] = std::mismatch(table(0), table(0) + num_counts, table(r));
    if (first == table(0) + num_counts) continue;
    const int of = board_.global(static_cast<int>(first - table(0)));
    board_.mismatch(wait, SizeDispute{board_.global(0), *first, board_.global(r), *other, of});
  }
}

/// Make sure that each rank sends what its peer expects; all have staged both tables, what they send and what they
/// expect. Returns the elements of the largest block that goes from one rank to another.
std::size_t Collectives::compare_splits(Wait& wait) {
  std::uint64_t most = 0;
  for (int from = 0; from < board_.size(); ++from) {
    for (int to = 0; to < board_.size(); ++to) {
      const std::uint64_t sent = table(from)[to], expected = table(to)[board_.size() + from];
      if (sent != expected)
        board_.mismatch(wait, SizeDispute{board_.global(from), sent, board_.global(to), expected});
      if (from != to) most = std::max(most, sent);
    }
  }
  return most;
}

void Collectives::ensure_mailboxes(Wait& wait) {
  if (mailboxes_) return;
  const std::size_t bytes = static_cast<std::size_t>(board_.size()) * 2 * kSlots * kSlotBytes;
  auto& offset = board_.header().mailbox;
  auto no_memory = [&](const std::string& why) {
    Failure failure = board_.failure(FailureKind::kNoMemory, wait);
    failure.size_bytes = bytes;
    failure.detail = why;
    return board_.end(std::move(failure));
  };
  std::string why;
  if (board_.rank() == 0) {
    std::uint64_t made = kNoMemory;
    try {
      made = board_.segment().allocate(bytes);
    } catch (const std::bad_alloc&) {
    } catch (const std::system_error& error) {
      why = error.what();
    }
    offset.store(made, std::memory_order_release);  // pairs with the load below
    ring(board_.header().bell);
  }
  board_.await(wait, [&](int r) { return r == 0 && offset.load(std::memory_order_acquire) == 0; });
  const std::uint64_t made = offset.load(std::memory_order_acquire);
  if (made == kNoMemory) throw no_memory(why);
  try {
    const std::size_t own = 2 * kSlots * kSlotBytes;  // rank 0 has allocated them, of its own node
    board_.segment().bring_near(made + static_cast<std::size_t>(board_.rank()) * own, own, board_.header().node);
    mailboxes_ = board_.segment().map(made, bytes);
  } catch (const std::bad_alloc&) {
    throw no_memory(why);
  } catch (const std::system_error& error) {
    throw no_memory(error.what());
  }
}

/// Where everybody waits for everybody, only the last to publish wakes the sleepers; else each publisher does.
void Collectives::publish(std::atomic<std::uint64_t> Progress::* counter, std::uint64_t value, bool all_wait_for_all) {
  (board_.progress(board_.rank()).*counter).store(value, std::memory_order_release);  // pairs with await_all()
  if (!has_sleepers(board_.header().bell)) return;
  for (int r = 0; all_wait_for_all && r < board_.size(); ++r)
    if ((board_.progress(r).*counter).load(std::memory_order_acquire) < value) return;
  ring(board_.header().bell);
}

void Collectives::await_all(Wait& wait, std::atomic<std::uint64_t> Progress::* counter, std::uint64_t value) {
  board_.await(wait, [&](int r) { return (board_.progress(r).*counter).load(std::memory_order_acquire) < value; });
}

}  // namespace phalanx
