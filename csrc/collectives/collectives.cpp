// All collectives except all_reduce: what a rank stages for its peers, and what it does with its peers' data.
#include "collectives/collectives.h"

#include <algorithm>

#include "collectives/exchange.h"

namespace phalanx {
namespace {

/// Returns the call without its count, marked as a call with a count for each block. Those counts are compared one by
/// one, so that the error can name the count that differs.
Call with_counts(Call call) {
  call.count = 0;
  call.flags = 1;
  return call;
}

std::size_t largest(Counts counts) { return *std::max_element(counts.begin(), counts.end()); }

}  // namespace

void Collectives::barrier(const Context& context, Op op) {
  Call call;
  call.op = op;
  Wait wait = begin(context, call);
  arrive(wait);
  if (op != Op::kJoin) return;
  control_.watch_peers();
  reads_peers_ = control_.shares_pids();
}

void Collectives::broadcast(const Context& context, void* data, Items items, int root) {
  clear_moves();
  if (control_.rank() != root) take(root, data, items.bytes());
  for (int r = 0; control_.rank() == root && r < control_.size(); ++r)
    if (r != root) give(r, data, items.bytes());
  move(context, make_call(Op::kBroadcast, items, root), Flow::kFromRoot, {1, items.bytes(), items.item_bytes});
}

void Collectives::reduce(const Context& context, const void* in, void* out, Items items, Reduction reduction,
                         int root) {
  const bool on_root = control_.rank() == root;
  sources_.resize(static_cast<std::size_t>(control_.size()));
  exchange(
      context, make_call(Op::kReduce, items, root, reduction.code), Flow::kToRoot,
      {1, items.bytes(), items.item_bytes},
      [&](std::byte* area, std::size_t lo, std::size_t len) {
        if (!on_root) copy_bytes(area, at(in, lo), len);
      },
      [&](auto area_of, std::size_t lo, std::size_t len) {
        if (!on_root) return;
        for (int r = 0; r < control_.size(); ++r) sources_[r] = r == root ? at(in, lo) : area_of(r);
        reduce_anywhere(reduction.apply, dtype_of(items), at(out, lo), sources_.data(), control_.size(),
                        len / items.item_bytes);
      });
}

void Collectives::reduce_scatter(const Context& context, std::span<const void* const> ins, void* out, Items items,
                                 Reduction reduction, Counts counts) {
  const int n = control_.size(), me = control_.rank();
  const std::size_t item = items.item_bytes, num_peers = static_cast<std::size_t>(n) - 1;
  sources_.resize(static_cast<std::size_t>(n));
  auto bytes_of = [=](int r) { return counts.empty() ? items.bytes() : counts[r] * item; };
  auto stage = [&](std::byte* area, std::size_t lo, std::size_t len) {
    for (int j = 0; j < n; ++j)
      if (j != me) copy_bytes(area + index_of(me, j) * len, at(ins[j], lo), clip(bytes_of(j), lo, len));
  };
  auto consume = [&](auto area_of, std::size_t lo, std::size_t len) {
    const std::size_t own = clip(bytes_of(me), lo, len);
    if (own == 0) return;
    for (int r = 0; r < n; ++r) sources_[r] = r == me ? at(ins[me], lo) : area_of(r) + index_of(r, me) * len;
    reduce_anywhere(reduction.apply, dtype_of(items), at(out, lo), sources_.data(), n, own / item);
  };
  const Call call = make_call(Op::kReduceScatter, items, -1, reduction.code);
  if (counts.empty())
    return exchange(context, call, Flow::kEverybody, {num_peers, items.bytes(), item}, stage, consume);
  Wait wait = begin(context, with_counts(call));
  std::copy(counts.begin(), counts.end(), table(me));
  arrive(wait);
  compare_counts(wait, counts.size());
  exchange_chunks(wait, Flow::kEverybody, {num_peers, largest(counts) * item, item}, stage, consume);
}

void Collectives::all_gather(const Context& context, const void* in, std::span<void* const> outs, Items items,
                             Counts counts) {
  const int n = control_.size(), me = control_.rank();
  const std::size_t item = items.item_bytes;
  auto bytes_of = [=](int r) { return counts.empty() ? items.bytes() : counts[r] * item; };
  clear_moves();
  for (int r = 0; r < n; ++r) {
    give(r, in, bytes_of(me));
    take(r, outs[r], bytes_of(r));
  }
  const Call call = make_call(Op::kAllGather, items);
  if (counts.empty()) return move(context, call, Flow::kEverybody, {1, items.bytes(), item});
  Wait wait = begin(context, with_counts(call));
  std::copy(counts.begin(), counts.end(), table(me));
  offer();
  arrive(wait);
  compare_counts(wait, counts.size());
  move_large(wait, Flow::kEverybody, {1, largest(counts) * item, item});
}

void Collectives::gather(const Context& context, const void* in, std::span<void* const> outs, Items items, int root) {
  clear_moves();
  give(root, in, items.bytes());
  for (int r = 0; control_.rank() == root && r < control_.size(); ++r) take(r, outs[r], items.bytes());
  move(context, make_call(Op::kGather, items, root), Flow::kToRoot, {1, items.bytes(), items.item_bytes});
}

void Collectives::scatter(const Context& context, std::span<const void* const> ins, void* out, Items items, int root) {
  clear_moves();
  take(root, out, items.bytes());
  for (int r = 0; control_.rank() == root && r < control_.size(); ++r) give(r, ins[r], items.bytes());
  const std::size_t num_peers = static_cast<std::size_t>(control_.size()) - 1;
  move(context, make_call(Op::kScatter, items, root), Flow::kFromRoot, {num_peers, items.bytes(), items.item_bytes});
}

void Collectives::all_to_all(const Context& context, std::span<const void* const> ins, std::span<void* const> outs,
                             Items items) {
  clear_moves();
  for (int r = 0; r < control_.size(); ++r) {
    give(r, ins[r], items.bytes());
    take(r, outs[r], items.bytes());
  }
  const std::size_t num_peers = static_cast<std::size_t>(control_.size()) - 1;
  move(context, make_call(Op::kAllToAll, items), Flow::kEverybody, {num_peers, items.bytes(), items.item_bytes});
}

void Collectives::all_to_all_split(const Context& context, std::span<const void* const> ins, Counts in_counts,
                                   std::span<void* const> outs, Counts out_counts, Items items) {
  const int n = control_.size(), me = control_.rank();
  const std::size_t item = items.item_bytes, num_peers = static_cast<std::size_t>(n) - 1;
  clear_moves();
  for (int r = 0; r < n; ++r) {
    give(r, ins[r], in_counts[r] * item);
    take(r, outs[r], out_counts[r] * item);
  }
  Wait wait = begin(context, with_counts(make_call(Op::kAllToAll, items)));
  // Each rank publishes how much it sends to each peer and how much it expects from each, so that every rank can check
  // all pairs of ranks.
  std::copy(in_counts.begin(), in_counts.end(), table(me));
  std::copy(out_counts.begin(), out_counts.end(), table(me) + n);
  offer();
  arrive(wait);
  const std::size_t most = compare_splits(wait);
  move_large(wait, Flow::kEverybody, {num_peers, most * item, item});
}

}  // namespace phalanx
