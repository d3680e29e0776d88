// all_reduce: small messages are reduced in one shot, large ones in chunks. From three ranks on, each rank reduces one
// part of each chunk. model/all_reduce.pml models Pipeline: a change to the order of its steps needs the same change
// there.
//
// With two ranks, both reduce everything. As many bytes cross between the cores as if each rank reduced one half and
// fetched the other half, but a chunk needs one wait instead of two. This is 10 to 20 % faster from 1 MiB to 64 MiB.
// The table compares this algorithm with others that were tried. Times are in milliseconds on two cores, for messages
// of 3.3 MB (left) and 68 MB (right) that each rank has just written:
//
//     this one                                                                                   0.44    11.5
//     a local average of two such messages, which exchanges nothing                              0.24     9.7
//     halves read from the peer (process_vm_readv), reduced, and the other halves fetched        0.32    13.4
//     the next chunk prefetched meanwhile                                                        0.48    10.7
//     staged lines demoted to the shared cache (cldemote)                                        0.74    19.4
//     the next chunk staged within the loop that reduces                                         0.83    12.4
//     chunks of 16, 32, 128, 256 KiB                     0.47, 0.45, 0.44, 0.45    12.2, 12.0, 11.6, 12.1
//     each rank gets the means of one half alone (reduce-scatter)                                0.25  7 to 8
//
// So large messages move at memory speed, and only exchanging less data would be faster. Reading the peer's memory
// would save 0.1 ms for messages that stay in the caches. But gradients are averaged in place: once a peer has
// overwritten its input with its result, a rank whose read is refused could no longer fall back to chunks.
//
// Each rank reduces in a single thread: with two ranks on the two cores of these measurements, no core is free for a
// second thread.
#include <algorithm>

#include "collectives/collectives.h"
#include "collectives/exchange.h"

namespace phalanx {

/// Reduce-scatter and all-gather of a large message, pipelined (Rabenseifner 2004). chunk: a range of the message;
/// part: the share of a chunk that one rank reduces; slot: the place in a mailbox for a rank's copy of a chunk (staging
/// slot) or for the part that the rank has reduced (result slot).
///
/// A rank works on three chunks at a time: it stages c + 1, reduces c, and collects c - 1. With three slots of each
/// kind, a rank needs no further waits before it overwrites a slot:
/// - Chunk c + 1 goes into the staging slot of c - 2, whose last readers are the ranks that reduce c - 2. This rank
///   stages c + 1 only after it has collected c - 2, and it collects c - 2 only after every rank has reduced c - 2.
/// - The result of chunk c goes into the result slot of c - 3, whose last readers are the ranks that collect c - 3.
///   This rank reduces c only after every rank has staged c, and each rank stages c only after it has collected c - 3.
class Collectives::Pipeline {
 public:
  Pipeline(Collectives& group, Items items, ReduceFn reduce, SquaresFn squares)
      : group_(group),
        items_(items),
        reduce_(reduce),
        squares_(squares),
        size_(static_cast<std::size_t>(group.control_.size())),
        me_(static_cast<std::size_t>(group.control_.rank())) {
    // A chunk is about a quarter of the message, so that chunks overlap in the pipeline, but has at least a page for
    // each rank's part. In any case, it is at most `tuning.chunk_bytes` and kSlotBytes.
    const std::size_t chunk_bytes =
        std::min(group.tuning.chunk_bytes, std::max(align_up(items.bytes() / 4, kPage), kPage * size_));
    chunk_items_ = std::min(chunk_bytes, kSlotBytes) / items.item_bytes;
    num_chunks_ = (items.count + chunk_items_ - 1) / chunk_items_;
    base_ = group.chunks_;
    group.chunks_ += num_chunks_;
  }

  /// Returns the sum of squares of the result; 0 without a `SquaresFn`.
  double run(Wait& wait) {
    stage(0);
    for (std::uint64_t c = 0; c < num_chunks_; ++c) {
      if (c + 1 < num_chunks_) stage(c + 1);
      group_.await_all(wait, &Progress::staged, base_ + c + 1);
      reduce(c);
      if (c == 0) continue;
      group_.await_all(wait, &Progress::consumed, base_ + c);
      collect(c - 1);
    }
    group_.await_all(wait, &Progress::consumed, base_ + num_chunks_);
    collect(num_chunks_ - 1);
    return sum_;
  }

 private:
  /// Elements [first, first + count) of a chunk.
  struct Part {
    std::size_t first, count;
  };

  std::size_t items_of(std::uint64_t c) const { return std::min(chunk_items_, items_.count - c * chunk_items_); }
  Part part_of(std::size_t r, std::uint64_t c) const {
    const std::size_t per_line = std::max<std::size_t>(kCacheLine / items_.item_bytes, 1);
    const std::size_t m = items_of(c);
    const std::size_t share = align_up((m + size_ - 1) / size_, per_line);
    const std::size_t first = std::min(m, r * share);
    return {first, std::min(share, m - first)};
  }
  std::byte* staging(std::size_t r, std::uint64_t c) const {
    return group_.slot(static_cast<int>(r), (base_ + c) % kSlots);
  }
  std::byte* result(std::size_t r, std::uint64_t c) const {
    return group_.slot(static_cast<int>(r), kSlots + (base_ + c) % kSlots);
  }
  template <class Visit>
  void visit(std::uint64_t c, Part part, Visit&& visit) const {
    group_.pieces_.visit(c * chunk_items_ + part.first, part.count, visit);
  }

  void copy_out(std::uint64_t c, Part part) const {
    const std::size_t item = items_.item_bytes;
    visit(c, part, [&](const Piece& piece, std::size_t offset, std::size_t done, std::size_t m) {
      copy_bytes(staging(me_, c) + (part.first + done) * item, at(piece.in, offset), m * item);
    });
  }

  /// Copies chunk `c` into this rank's staging slot, except for the part that this rank reduces itself.
  void stage(std::uint64_t c) {
    const Part own = part_of(me_, c);
    const std::size_t end = own.first + own.count;
    copy_out(c, {0, own.first});
    copy_out(c, {end, items_of(c) - end});
    group_.publish(&Progress::staged, base_ + c + 1, true);
  }

  void reduce(std::uint64_t c) {
    const Part own = part_of(me_, c);
    std::vector<const void*>& sources = group_.sources_;
    visit(c, own, [&](const Piece& piece, std::size_t offset, std::size_t done, std::size_t m) {
      const std::size_t in_slot = (own.first + done) * items_.item_bytes;
      for (std::size_t r = 0; r < size_; ++r) sources[r] = r == me_ ? at(piece.in, offset) : staging(r, c) + in_slot;
      reduce_anywhere(reduce_, dtype_of(items_), result(me_, c) + in_slot, sources.data(), static_cast<int>(size_), m);
    });
    group_.publish(&Progress::consumed, base_ + c + 1, true);
  }

  void collect(std::uint64_t c) {
    const std::size_t item = items_.item_bytes;
    for (std::size_t i = 0; i < size_; ++i) {
      const std::size_t r = (me_ + i) % size_;  // each rank starts with a different part
      const Part theirs = part_of(r, c);
      visit(c, theirs, [&](const Piece& piece, std::size_t offset, std::size_t done, std::size_t m) {
        copy_bytes(at(piece.out, offset), result(r, c) + (theirs.first + done) * item, m * item);
      });
    }
    if (squares_ == nullptr) return;
    visit(c, {0, items_of(c)}, [&](const Piece& piece, std::size_t offset, std::size_t, std::size_t m) {
      if (piece.squared) sum_ += squares_anywhere(squares_, dtype_of(items_), at(piece.out, offset), m);
    });
  }

  Collectives& group_;
  const Items items_;
  const ReduceFn reduce_;
  const SquaresFn squares_;
  const std::size_t size_, me_;
  std::size_t chunk_items_;
  std::uint64_t num_chunks_, base_;
  double sum_ = 0;
};

double Collectives::all_reduce(const Context& context, std::span<const Piece> pieces, Items items,
                               Reduction reduction, SquaresFn squares) {
  Wait wait = begin(context, make_call(Op::kAllReduce, items, -1, reduction.code));
  sources_.resize(static_cast<std::size_t>(control_.size()));
  pieces_.assign(pieces, items.item_bytes);
  const std::size_t bytes = items.bytes(), item = items.item_bytes;
  double sum = 0;
  auto stage = [&](std::byte* area, std::size_t lo, std::size_t len) {
    pieces_.visit(lo / item, len / item, [&](const Piece& piece, std::size_t offset, std::size_t done, std::size_t m) {
      copy_bytes(area + done * item, at(piece.in, offset), m * item);
    });
  };
  auto consume = [&](auto area_of, std::size_t lo, std::size_t len) {
    pieces_.visit(lo / item, len / item, [&](const Piece& piece, std::size_t offset, std::size_t done, std::size_t m) {
      for (int r = 0; r < control_.size(); ++r)
        sources_[r] = r == control_.rank() ? at(piece.in, offset) : area_of(r) + done * item;
      reduce_anywhere(reduction.apply, dtype_of(items), at(piece.out, offset), sources_.data(), control_.size(), m);
      if (squares != nullptr && piece.squared)
        sum += squares_anywhere(squares, dtype_of(items), at(piece.out, offset), m);
    });
  };
  if (bytes <= kInlineBytes || bytes <= std::min(tuning.one_shot_bytes, kStageBytes)) {
    stage(area(control_.rank(), bytes), 0, bytes);
    arrive(wait);
    consume([&](int r) { return area(r, bytes); }, 0, bytes);
    return sum;
  }
  arrive(wait);
  if (control_.size() != 2) {
    ensure_mailboxes(wait);
    return Pipeline(*this, items, reduction.apply, squares).run(wait);
  }
  // With two ranks, each stages its whole message for the other, and both reduce the whole message; see the head of
  // this file.
  exchange_chunks(wait, Flow::kEverybody, {1, bytes, item}, stage, consume);
  return sum;
}

}  // namespace phalanx
