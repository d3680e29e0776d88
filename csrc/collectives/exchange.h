// The algorithm that the collectives share: every rank stages its blocks for its peers, waits until all ranks have
// arrived (until they "meet"), and consumes the peers' blocks. model/exchange.pml models exchange_chunks(), and
// model/arrival.pml models exchange() for data that fits a stage; a change here needs the same change there.
//
// 1. Each rank writes its call (operation, dtype, count, root, reduce operation) into its line of the control block,
//    waits for everybody's line, and compares the lines to detect a mismatch. The comparison costs nothing, because the
//    call is in the cache line that the rank waits for anyway. After that, the rank knows that every rank has left the
//    previous collective. See arrival.cpp.
// 2. By size:
//     inline    up to 48 bytes: the data travels in the line that peers wait for;
//     one-shot  up to kStageBytes: the data is staged before the ranks meet and read as soon as they have met, with one
//               synchronization in all;
//     chunked   above kStageBytes: chunks flow through small mailboxes that stay in the caches, and several chunks are
//               in flight at once.
//
// Each rank has two stages and two lines: one of each for odd sequence numbers, the other for even ones. A rank can be
// at most one collective ahead of its peers, so before the ranks meet, no rank overwrites a stage or a line that a
// slower peer still reads. Mailboxes are written only after the ranks have met.
//
// all_reduce of three or more ranks is a reduce-scatter and an all-gather per chunk (all_reduce.cpp). All other
// collectives, and all_reduce of two ranks, share one loop of "stage, wait, consume". Large blocks that are only moved,
// not reduced, are not staged at all (move.cpp).
//
// Results have the same bits on every rank and in every run: each element is reduced in rank order, in one pass over
// all inputs, whatever the algorithm. 16-bit floats are accumulated in float32. The kernels are built without fused
// multiply-add, so the bits do not depend on the processor either.
//
// Blocks may differ in size between ranks (all_gather and reduce_scatter with lists; NCCL's _v forms). Then every rank
// first puts all sizes into its stage. If ranks disagree, the error can therefore name the size that differs. The
// blocks then flow in as many chunks as the largest block needs. A message may also lie in memory in several pieces
// (average_coalesced). Its chunks are then filled from the pieces, and the results are written back to the pieces.
#pragma once

#include <algorithm>
#include <cstring>

#include "collectives/collectives.h"

namespace phalanx {

inline Call make_call(Op op, const Items& items, int root = -1, std::uint8_t reduce_op = 0) {
  Call call;
  call.op = op;
  call.dtype = items.dtype;
  call.count = items.count;
  call.root = root;
  call.reduce_op = reduce_op;
  return call;
}

inline const std::byte* at(const void* base, std::size_t offset) { return static_cast<const std::byte*>(base) + offset; }
inline std::byte* at(void* base, std::size_t offset) { return static_cast<std::byte*>(base) + offset; }

inline Dtype dtype_of(const Items& items) { return static_cast<Dtype>(items.dtype); }

/// Index of the block for rank `to` in the area of rank `from`. A rank stages no block for itself.
inline std::size_t index_of(int from, int to) { return static_cast<std::size_t>(to < from ? to : to - 1); }

/// How many of the bytes [lo, lo + len) lie within a block of `bytes` bytes.
inline std::size_t clip(std::size_t bytes, std::size_t lo, std::size_t len) {
  return lo >= bytes ? 0 : std::min(len, bytes - lo);
}

inline void copy_bytes(void* to, const void* from, std::size_t bytes) {
  if (bytes != 0 && to != from) std::memcpy(to, from, bytes);
}

/// Runs a collective. `stage(area, lo, len)` writes bytes [lo, lo + len) of every block into this rank's area, block j
/// at area + j * len. Later, `consume(area_of, lo, len)` reads those bytes of the blocks of rank r at area_of(r).
template <class Stage, class Consume>
void Collectives::exchange(const Context& context, const Call& call, Flow flow, Blocks blocks, Stage&& stage,
                           Consume&& consume) {
  Wait wait = begin(context, call);
  const std::size_t total = blocks.total();
  if (total > kStageBytes) {
    arrive(wait);
    exchange_chunks(wait, flow, blocks, stage, consume);
    return;
  }
  stage(area(control_.rank(), total), 0, blocks.bytes);
  arrive(wait);
  consume([&](int r) { return area(r, total); }, 0, blocks.bytes);
}

template <class Stage, class Consume>
void Collectives::exchange_chunks(Wait& wait, Flow flow, Blocks blocks, Stage&& stage, Consume&& consume) {
  if (blocks.total() == 0) return;
  ensure_mailboxes(wait);
  // chunk: the same range of bytes of every block; slot: the place in a rank's mailbox for one staged chunk. The slots
  // of a rank form one ring.
  constexpr std::uint64_t kRing = 2 * kSlots;
  const std::size_t aligned = std::max<std::size_t>(blocks.item_bytes, kCacheLine);
  const std::size_t most = std::max(tuning.chunk_bytes / blocks.num / aligned, std::size_t{1}) * aligned;
  const std::uint64_t num_chunks = (blocks.bytes + most - 1) / most;
  const std::uint64_t base = chunks_;
  chunks_ += num_chunks;
  const bool on_root = control_.rank() == wait.call.root;
  auto length = [&](std::uint64_t c) { return std::min(most, blocks.bytes - c * most); };
  auto stage_one = [&](std::uint64_t c) {
    if (c >= kRing) await_all(wait, &Progress::consumed, base + c - kRing + 1);  // wait for the slot's last readers
    stage(slot(control_.rank(), (base + c) % kRing), c * most, length(c));
    publish(&Progress::staged, base + c + 1, flow == Flow::kEverybody);
  };
  stage_one(0);
  for (std::uint64_t c = 0; c < num_chunks; ++c) {
    if (c + 1 < num_chunks) stage_one(c + 1);  // one chunk ahead, so peers that are done with chunk c need not wait
    control_.await(wait, [&](int r) {
      const bool needed = flow == Flow::kEverybody || (flow == Flow::kFromRoot ? r == wait.call.root : on_root);
      return needed && control_.progress(r).staged.load(std::memory_order_acquire) < base + c + 1;
    });
    consume([&](int r) { return slot(r, (base + c) % kRing); }, c * most, length(c));
    publish(&Progress::consumed, base + c + 1, true);
  }
}

}  // namespace phalanx
