// How the ranks of a collective meet: each rank publishes its call, waits until all ranks have published theirs, and
// compares the calls. From then on, the rank knows that every rank has left the previous collective. This file also
// makes the mailboxes and publishes the counters of chunks.
//
// model/memory.pml models arrive() and publish(), and model/arrival.pml a series of arrivals: a change here needs the
// same change there.
#include <algorithm>
#include <chrono>
#include <new>
#include <string>
#include <system_error>

#include "collectives/collectives.h"

namespace phalanx {

Wait Collectives::begin(const Context& context, const Call& call) {
  Wait wait = control_.begin(call, ++seq_, *context.hooks, context.timeout_s, control_.header().bell);
  if (records) wait.recorded = control_.recorded(EventKind::kCollective, call, ControlBlock::number(seq_));
  return wait;
}

/// Returns where rank `r` puts a message of `bytes` bytes for its peers before it arrives.
std::byte* Collectives::area(int r, std::size_t bytes) {
  return bytes <= kInlineBytes ? control_.line(r, seq_).payload : control_.stage(r, seq_);
}

void Collectives::arrive(Wait& wait) {
  control_.publish_cpu();
  Line& mine = control_.line(control_.rank(), seq_);
  if (compares_calls) {
    mine.what = wait.call.what();
    mine.detail = wait.call.detail();
  }
  mine.seq.store(seq_, std::memory_order_release);  // publishes call, payload and stage; pairs with `missing` below
  auto missing = [&](int r) { return control_.line(r, seq_).seq.load(std::memory_order_acquire) != seq_; };
  int num_here = 0;
  auto all_here = [&] {
    while (num_here < control_.size() && !missing(num_here)) ++num_here;
    return num_here == control_.size();
  };
  // Only a rank that finds that all ranks have arrived wakes the sleepers, and the fence in has_sleepers() guarantees
  // that at least one rank finds this. The first all_here() runs before that fence to save time: the last rank to
  // arrive fetches its peers' lines while its own store is still on its way to them. The fence waits for that store.
  const bool is_last = all_here();
  if (has_sleepers(control_.header().bell) && all_here()) ring(control_.header().bell);
  arrival_wait_s_ = 0;
  if (!is_last) {
    const auto begin = std::chrono::steady_clock::now();
    wait.arriving = true;
    control_.await(wait, missing);
    wait.arriving = false;
    arrival_wait_s_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
  if (compares_calls) compare_calls(wait);
}

/// Compares the calls of all ranks. This costs little: the lines are in the cache, because their `seq` was just read.
void Collectives::compare_calls(Wait& wait) {
  for (int r = 0; r < control_.size(); ++r)
    if (control_.call_differs(r, seq_)) control_.mismatch(wait);
}

/// Checks that all ranks have staged the same counts, one for each rank's block.
void Collectives::compare_counts(Wait& wait, std::size_t num_counts) {
  for (int r = 1; r < control_.size(); ++r) {
    const auto [first, other] = std::mismatch(table(0), table(0) + num_counts, table(r));
    if (first == table(0) + num_counts) continue;
    const int of = control_.global(static_cast<int>(first - table(0)));
    control_.mismatch(wait, SizeDispute{control_.global(0), *first, control_.global(r), *other, of});
  }
}

/// Checks that each rank sends what its peer expects. Every rank has staged two tables: the counts that it sends, and
/// the counts that it expects. Returns the number of elements of the largest block that one rank sends to another.
std::size_t Collectives::compare_splits(Wait& wait) {
  std::uint64_t most = 0;
  for (int from = 0; from < control_.size(); ++from) {
    for (int to = 0; to < control_.size(); ++to) {
      const std::uint64_t sent = table(from)[to], expected = table(to)[control_.size() + from];
      if (sent != expected)
        control_.mismatch(wait, SizeDispute{control_.global(from), sent, control_.global(to), expected});
      if (from != to) most = std::max(most, sent);
    }
  }
  return most;
}

void Collectives::ensure_mailboxes(Wait& wait) {
  if (mailboxes_) return;
  const std::size_t bytes = static_cast<std::size_t>(control_.size()) * 2 * kSlots * kSlotBytes;
  auto& offset = control_.header().mailbox;
  // If the system refuses the memory to this rank, the group ends, so that the peers name this rank.
  const auto or_end = [&](auto&& body) {
    std::string why;
    try {
      return body();
    } catch (const std::bad_alloc&) {
    } catch (const std::system_error& error) {
      why = error.what();
    }
    Failure failure = control_.failure(FailureKind::kNoMemory, wait);
    failure.size_bytes = bytes;
    failure.detail = why;
    throw control_.end(std::move(failure));
  };
  if (control_.rank() == 0) {
    const std::uint64_t made = or_end([&] { return control_.segment().allocate(bytes); });
    offset.store(made, std::memory_order_release);  // pairs with the load below
    ring(control_.header().bell);
  }
  control_.await(wait, [&](int r) { return r == 0 && offset.load(std::memory_order_acquire) == 0; });
  mailboxes_ = or_end([&] {
    const std::uint64_t made = offset.load(std::memory_order_acquire);
    const std::size_t own = 2 * kSlots * kSlotBytes;  // rank 0 allocated all pages on its own NUMA node
    control_.segment().bring_near(made + static_cast<std::size_t>(control_.rank()) * own, own, control_.header().node);
    return control_.segment().map(made, bytes);
  });
}

/// Sets this rank's `counter`, and wakes the sleepers. If every rank waits for all ranks, only the last rank to publish
/// wakes them.
void Collectives::publish(std::atomic<std::uint64_t> Progress::* counter, std::uint64_t value, bool all_wait_for_all) {
  (control_.progress(control_.rank()).*counter).store(value, std::memory_order_release);  // pairs with await_all()
  if (!has_sleepers(control_.header().bell)) return;
  for (int r = 0; all_wait_for_all && r < control_.size(); ++r)
    if ((control_.progress(r).*counter).load(std::memory_order_acquire) < value) return;
  ring(control_.header().bell);
}

void Collectives::await_all(Wait& wait, std::atomic<std::uint64_t> Progress::* counter, std::uint64_t value) {
  control_.await(wait, [&](int r) { return (control_.progress(r).*counter).load(std::memory_order_acquire) < value; });
}

}  // namespace phalanx
