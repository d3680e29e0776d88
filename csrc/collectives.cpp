// The collectives but all_reduce: what each stages for its peers, and what it makes of theirs.
#include "collectives.h"

#include <algorithm>

#include "exchange.h"

namespace phalanx {
namespace {

/// Index of the block for rank `to` in the area of rank `from`, which stages none for itself.
std::size_t index_of(std::size_t from, std::size_t to) { return to < from ? to : to - 1; }

/// How many of the bytes [lo, lo + len) a block of `bytes` has.
std::size_t clip(std::size_t bytes, std::size_t lo, std::size_t len) { return lo >= bytes ? 0 : std::min(len, bytes - lo); }

/// Stage the block for each peer; the block for rank j has `bytes_of(j)`.
template <class BytesOf>
auto stage_for_each(std::span<const void* const> ins, std::size_t me, BytesOf bytes_of) {
  return [=](std::byte* area, std::size_t lo, std::size_t len) {
    for (std::size_t j = 0; j < ins.size(); ++j)
      if (j != me) copy_bytes(area + index_of(me, j) * len, at(ins[j], lo), clip(bytes_of(j), lo, len));
  };
}

/// Collect this rank's block from each peer; that from rank r has `bytes_of(r)`.
template <class BytesOf>
auto collect_from_each(std::span<void* const> outs, std::size_t me, BytesOf bytes_of) {
  return [=](auto area_of, std::size_t lo, std::size_t len) {
    for (std::size_t r = 0; r < outs.size(); ++r)
      if (r != me)
        copy_bytes(at(outs[r], lo), area_of(static_cast<int>(r)) + index_of(r, me) * len, clip(bytes_of(r), lo, len));
  };
}

/// A call whose counts are compared one by one, so that the error can say which differs.
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
  muster(wait);
  if (op == Op::kJoin) board_.watch_peers();
}

void Collectives::broadcast(const Context& context, void* data, Items items, int root) {
  const bool on_root = board_.rank() == root;
  exchange(
      context, make_call(Op::kBroadcast, items, root), Flow::kFromRoot, {1, items.bytes(), items.item_bytes},
      [&](std::byte* area, std::size_t lo, std::size_t len) {
        if (on_root) copy_bytes(area, at(data, lo), len);
      },
      [&](auto area_of, std::size_t lo, std::size_t len) {
        if (!on_root) copy_bytes(at(data, lo), area_of(root), len);
      });
}

void Collectives::reduce(const Context& context, const void* in, void* out, Items items, Reduction reduction,
                         int root) {
  const bool on_root = board_.rank() == root;
  sources_.resize(static_cast<std::size_t>(board_.size()));
  exchange(
      context, make_call(Op::kReduce, items, root, reduction.code), Flow::kToRoot,
      {1, items.bytes(), items.item_bytes},
      [&](std::byte* area, std::size_t lo, std::size_t len) {
        if (!on_root) copy_bytes(area, at(in, lo), len);
      },
      [&](auto area_of, std::size_t lo, std::size_t len) {
        if (!on_root) return;
        for (int r = 0; r < board_.size(); ++r) sources_[r] = r == root ? at(in, lo) : area_of(r);
        reduce_anywhere(reduction.apply, dtype_of(items), at(out, lo), sources_.data(), board_.size(),
                        len / items.item_bytes);
      });
}

void Collectives::reduce_scatter(const Context& context, std::span<const void* const> ins, void* out, Items items,
                                 Reduction reduction, Counts counts) {
  const auto n = static_cast<std::size_t>(board_.size());
  const auto me = static_cast<std::size_t>(board_.rank());
  const std::size_t item = items.item_bytes;
  sources_.resize(n);
  auto bytes_of = [=](std::size_t r) { return counts.empty() ? items.bytes() : counts[r] * item; };
  auto stage = stage_for_each(ins, me, bytes_of);
  auto consume = [&](auto area_of, std::size_t lo, std::size_t len) {
    const std::size_t own = clip(bytes_of(me), lo, len);
    if (own == 0) return;
    for (std::size_t r = 0; r < n; ++r)
      sources_[r] = r == me ? at(ins[me], lo) : area_of(static_cast<int>(r)) + index_of(r, me) * len;
    reduce_anywhere(reduction.apply, dtype_of(items), at(out, lo), sources_.data(), board_.size(), own / item);
  };
  const Call call = make_call(Op::kReduceScatter, items, -1, reduction.code);
  if (counts.empty())
    return exchange(context, call, Flow::kEverybody, {n - 1, items.bytes(), item}, stage, consume);
  Wait wait = begin(context, with_counts(call));
  std::copy(counts.begin(), counts.end(), table(board_.rank()));
  muster(wait);
  compare_counts(wait, n);
  exchange_chunks(wait, Flow::kEverybody, {n - 1, largest(counts) * item, item}, stage, consume);
}

void Collectives::all_gather(const Context& context, const void* in, std::span<void* const> outs, Items items,
                             Counts counts) {
  const auto me = static_cast<std::size_t>(board_.rank());
  const std::size_t item = items.item_bytes;
  auto bytes_of = [=](std::size_t r) { return counts.empty() ? items.bytes() : counts[r] * item; };
  auto stage = [&](std::byte* area, std::size_t lo, std::size_t len) {
    copy_bytes(area, at(in, lo), clip(bytes_of(me), lo, len));
  };
  auto consume = [&](auto area_of, std::size_t lo, std::size_t len) {
    for (std::size_t r = 0; r < outs.size(); ++r)
      copy_bytes(at(outs[r], lo), r == me ? at(in, lo) : area_of(static_cast<int>(r)), clip(bytes_of(r), lo, len));
  };
  const Call call = make_call(Op::kAllGather, items);
  if (counts.empty()) return exchange(context, call, Flow::kEverybody, {1, items.bytes(), item}, stage, consume);
  Wait wait = begin(context, with_counts(call));
  std::copy(counts.begin(), counts.end(), table(board_.rank()));
  muster(wait);
  compare_counts(wait, outs.size());
  exchange_chunks(wait, Flow::kEverybody, {1, largest(counts) * item, item}, stage, consume);
}

void Collectives::gather(const Context& context, const void* in, std::span<void* const> outs, Items items, int root) {
  const bool on_root = board_.rank() == root;
  exchange(
      context, make_call(Op::kGather, items, root), Flow::kToRoot, {1, items.bytes(), items.item_bytes},
      [&](std::byte* area, std::size_t lo, std::size_t len) {
        if (!on_root) copy_bytes(area, at(in, lo), len);
      },
      [&](auto area_of, std::size_t lo, std::size_t len) {
        for (int r = 0; on_root && r < board_.size(); ++r)
          copy_bytes(at(outs[r], lo), r == root ? at(in, lo) : area_of(r), len);
      });
}

void Collectives::scatter(const Context& context, std::span<const void* const> ins, void* out, Items items, int root) {
  const auto n = static_cast<std::size_t>(board_.size());
  const auto me = static_cast<std::size_t>(board_.rank()), from = static_cast<std::size_t>(root);
  exchange(
      context, make_call(Op::kScatter, items, root), Flow::kFromRoot, {n - 1, items.bytes(), items.item_bytes},
      [&](std::byte* area, std::size_t lo, std::size_t len) {
        for (std::size_t j = 0; me == from && j < n; ++j)
          if (j != from) copy_bytes(area + index_of(from, j) * len, at(ins[j], lo), len);
      },
      [&](auto area_of, std::size_t lo, std::size_t len) {
        copy_bytes(at(out, lo), me == from ? at(ins[from], lo) : area_of(root) + index_of(from, me) * len, len);
      });
}

void Collectives::all_to_all(const Context& context, std::span<const void* const> ins, std::span<void* const> outs,
                             Items items) {
  const auto n = static_cast<std::size_t>(board_.size());
  const auto me = static_cast<std::size_t>(board_.rank());
  auto bytes_of = [=](std::size_t) { return items.bytes(); };
  exchange(context, make_call(Op::kAllToAll, items), Flow::kEverybody, {n - 1, items.bytes(), items.item_bytes},
           stage_for_each(ins, me, bytes_of), collect_from_each(outs, me, bytes_of));
  copy_bytes(outs[me], ins[me], items.bytes());
}

void Collectives::all_to_all_split(const Context& context, std::span<const void* const> ins, Counts in_counts,
                                   std::span<void* const> outs, Counts out_counts, Items items) {
  const auto n = static_cast<std::size_t>(board_.size());
  const auto me = static_cast<std::size_t>(board_.rank());
  const std::size_t item = items.item_bytes;
  Wait wait = begin(context, with_counts(make_call(Op::kAllToAll, items)));
  // Each rank shows what it sends to and expects from every peer, so that all ranks can check all pairs.
  static_assert(2 * kMaxRanks * sizeof(std::uint64_t) <= kStageBytes);
  std::copy(in_counts.begin(), in_counts.end(), table(board_.rank()));
  std::copy(out_counts.begin(), out_counts.end(), table(board_.rank()) + n);
  muster(wait);
  const std::size_t most = compare_splits(wait);
  exchange_chunks(wait, Flow::kEverybody, {n - 1, most * item, item},
                  stage_for_each(ins, me, [=](std::size_t j) { return in_counts[j] * item; }),
                  collect_from_each(outs, me, [=](std::size_t r) { return out_counts[r] * item; }));
  copy_bytes(outs[me], ins[me], in_counts[me] * item);
}

}  // namespace phalanx
