// Collective operations of one group. Calls are serialised by the caller (see Worker).
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "board.h"

namespace phalanx {

/// What one call brings along: who waits, how long at most.
struct Context {
  Hooks* hooks;
  double timeout_s = 0;  // 0: the group's
};

/// Elements in memory: `count` of `item_bytes` each.
struct Items {
  std::uint8_t dtype;
  std::size_t item_bytes;
  std::size_t count;
  std::size_t bytes() const { return item_bytes * count; }
};

/// A part of a message that lies in several places: the message is its pieces, one after the other.
struct Piece {
  const void* in;
  void* out;  // may be `in`
  std::size_t count;
  bool squared = true;  // counts in the sum of squares
};

struct Reduction {
  std::uint8_t code;  // ReduceOp + 1, or a code of its own (PREMUL_SUM) that peers must agree on
  ReduceFn apply;
};

/// Message sizes from which the algorithms change; measured, see docs/design.md.
struct Tuning {
  std::size_t one_shot_bytes = kStageBytes;  // all_reduce: everyone reads everyone up to here, at most kStageBytes
  std::size_t chunk_bytes = kSlotBytes;    // pipelined chunks, at most kSlotBytes
};

class Collectives {
 public:
  explicit Collectives(Board& board) : board_(board) {}

  Tuning tuning;
  bool compares_calls = true;  // false only to measure what the comparison costs; the same on every rank
  std::uint32_t seq() const { return seq_; }

  void join(const Context& context) { barrier(context, Op::kJoin); }
  void barrier(const Context& context, Op op = Op::kBarrier);
  void broadcast(const Context& context, void* data, Items items, int root);
  void all_reduce(const Context& context, const void* in, void* out, Items items, Reduction reduction) {
    const Piece piece{in, out, items.count};
    all_reduce(context, {&piece, 1}, items, reduction);
  }
  /// `items` counts all pieces together. Returns the sum of squares of the result if asked for, the same bits on all
  /// ranks that cut the message into the same pieces.
  double all_reduce(const Context& context, std::span<const Piece> pieces, Items items, Reduction reduction,
                    SquaresFn squares = nullptr);
  void reduce(const Context& context, const void* in, void* out, Items items, Reduction reduction, int root);
  /// `ins[j]`: the block of `items` that rank j receives reduced.
  void reduce_scatter(const Context& context, std::span<const void* const> ins, void* out, Items items,
                      Reduction reduction);
  /// `outs[j]`: where the block of rank j goes. In gather only the root has any.
  void all_gather(const Context& context, const void* in, std::span<void* const> outs, Items items);
  void gather(const Context& context, const void* in, std::span<void* const> outs, Items items, int root);
  void scatter(const Context& context, std::span<const void* const> ins, void* out, Items items, int root);
  void all_to_all(const Context& context, std::span<const void* const> ins, std::span<void* const> outs, Items items);
  /// The same with blocks of different sizes, rank j's of `counts[j]` elements, on which all ranks must agree.
  void reduce_scatter_split(const Context& context, std::span<const void* const> ins,
                            std::span<const std::uint64_t> counts, void* out, Items items, Reduction reduction);
  void all_gather_split(const Context& context, const void* in, std::span<void* const> outs,
                        std::span<const std::uint64_t> counts, Items items);
  /// Blocks of different sizes: `in_counts[j]` elements go to rank j, `out_counts[j]` come from it.
  void all_to_all_split(const Context& context, std::span<const void* const> ins,
                        std::span<const std::uint64_t> in_counts, std::span<void* const> outs,
                        std::span<const std::uint64_t> out_counts, Items items);

 private:
  /// Whose data a rank needs: everyone's, the root's, or everyone's on the root only.
  enum class Flow { kEverybody, kFromRoot, kToRoot };

  Wait begin(const Context& context, const Call& call);
  std::byte* own_area(std::size_t bytes);
  std::byte* area(int r, std::size_t bytes);
  void muster(Wait& wait);
  /// Begin a call whose blocks differ in size, and make sure that all ranks give them the same sizes.
  Wait begin_split(const Context& context, Call call, std::span<const std::uint64_t> counts);
  void ensure_mailboxes(Wait& wait);
  std::byte* slot(int r, std::uint64_t index) { return mailboxes_.data() + (r * 2 * kSlots + index) * kSlotBytes; }
  void publish(std::atomic<std::uint64_t> Progress::* counter, std::uint64_t value, bool all_wait_for_all);
  void await_all(Wait& wait, std::atomic<std::uint64_t> Progress::* counter, std::uint64_t value);
  double all_reduce_chunks(Wait& wait, Items items, ReduceFn reduce, SquaresFn squares);

  /// Call `visit(piece, offset, done, count)` for each piece that overlaps the elements [first, first + count) of the
  /// message: `count` elements from byte `offset` of the piece on, which come after `done` elements of the range.
  template <class Visit>
  void visit_pieces(Items items, std::size_t first, std::size_t count, Visit&& visit) const;

  template <class Stage, class Consume>
  void exchange(const Context& context, const Call& call, Flow flow, std::size_t num_blocks, std::size_t block_bytes,
                std::size_t item_bytes, Stage&& stage, Consume&& consume);
  template <class Stage, class Consume>
  void exchange_chunks(Wait& wait, Flow flow, std::size_t num_blocks, std::size_t block_bytes, std::size_t item_bytes,
                       Stage&& stage, Consume&& consume);

  Board& board_;
  std::uint32_t seq_ = 0;
  std::uint64_t chunks_ = 0;  // chunks of all pipelined collectives so far: the base of the progress counters
  Mapping mailboxes_;
  std::vector<const void*> sources_;
  std::span<const Piece> pieces_;  // of the all_reduce that runs
  std::vector<std::size_t> ends_;  // of each piece, in elements of the message
};

}  // namespace phalanx
