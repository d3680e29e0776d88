// The collective operations of one group. Not thread-safe: Worker runs one operation at a time.
//
// The default sizes in Tuning come from measurements with two and four ranks: messages of up to 64 KiB go in one shot,
// larger ones in chunks of 64 KiB. With four ranks, larger chunks are 5 to 10 % faster; with two ranks, they are slower
// by as much. The environment variables PHALANX_ONE_SHOT_BYTES and PHALANX_CHUNK_BYTES override these sizes. Measure
// with `python -m bench`.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "control/control_block.h"
#include "collectives/pieces.h"

namespace phalanx {

/// The context of one call: the hooks of the thread that waits, and how long it waits at most.
struct Context {
  Hooks* hooks;
  double timeout_s = 0;  // 0: the group's timeout
};

struct Reduction {
  std::uint8_t code;  // ReduceOp + 1, or a separate code (PREMUL_SUM); all ranks must agree on it
  ReduceFn apply;
};

/// Message sizes at which the algorithms change.
struct Tuning {
  std::size_t one_shot_bytes = kStageBytes;  // all_reduce: one shot up to this size; at most kStageBytes
  std::size_t chunk_bytes = kSlotBytes;      // size of the chunks of larger messages; at most kSlotBytes
  std::size_t direct_bytes = 32 * 1024;      // from this size on, blocks are read from peers' memory, if permitted
};

/// The number of elements in each rank's block; empty if all blocks have the same size.
using Counts = std::span<const std::uint64_t>;

class Collectives {
 public:
  explicit Collectives(ControlBlock& control) : control_(control) {}

  Tuning tuning;
  bool records = true;         // false if each call is a step of a larger operation that records an event itself
  bool compares_calls = true;  // false only to measure the cost of the comparison; must be the same on every rank
  std::uint32_t seq() const { return seq_; }
  /// How long the last collective waited for the arrival of all ranks.
  double arrival_wait_s() const { return arrival_wait_s_; }

  void join(const Context& context) { barrier(context, Op::kJoin); }
  void barrier(const Context& context, Op op = Op::kBarrier);
  void broadcast(const Context& context, void* data, Items items, int root);
  void all_reduce(const Context& context, const void* in, void* out, Items items, Reduction reduction) {
    const Piece piece{in, out, items.count};
    all_reduce(context, {&piece, 1}, items, reduction);
  }
  /// `items` counts the elements of all pieces together. With `squares`, returns the sum of squares of the result. The
  /// sum has the same bits on all ranks that cut the message into the same pieces.
  double all_reduce(const Context& context, std::span<const Piece> pieces, Items items, Reduction reduction,
                    SquaresFn squares = nullptr);
  void reduce(const Context& context, const void* in, void* out, Items items, Reduction reduction, int root);
  /// `ins[j]` is this rank's input for the block that rank j receives. The block has `items.count` elements or, if
  /// `counts` is not empty, `counts[j]`. All ranks must pass the same counts.
  void reduce_scatter(const Context& context, std::span<const void* const> ins, void* out, Items items,
                      Reduction reduction, Counts counts = {});
  /// The block of rank j goes to `outs[j]`. The block has `items.count` elements or, if `counts` is not empty,
  /// `counts[j]`. All ranks must pass the same counts.
  void all_gather(const Context& context, const void* in, std::span<void* const> outs, Items items,
                  Counts counts = {});
  /// Like all_gather, but only the root receives.
  void gather(const Context& context, const void* in, std::span<void* const> outs, Items items, int root);
  void scatter(const Context& context, std::span<const void* const> ins, void* out, Items items, int root);
  void all_to_all(const Context& context, std::span<const void* const> ins, std::span<void* const> outs, Items items);
  /// all_to_all with blocks of different sizes: `in_counts[j]` elements go to rank j, `out_counts[j]` come from it.
  void all_to_all_split(const Context& context, std::span<const void* const> ins, Counts in_counts,
                        std::span<void* const> outs, Counts out_counts, Items items);

 private:
  class Pipeline;

  /// Who needs whose data: all ranks need everyone's, all ranks need the root's, or only the root needs everyone's.
  enum class Flow { kEverybody, kFromRoot, kToRoot };

  /// The blocks that every rank stages for its peers: `num` blocks of `bytes` bytes each, whose elements have
  /// `item_bytes` bytes.
  struct Blocks {
    std::size_t num, bytes, item_bytes;
    std::size_t total() const { return num * bytes; }
  };

  // For collectives that only move data: what this rank gives to each rank and takes from each, itself included.
  void clear_moves();
  void give(int r, const void* data, std::size_t bytes) { gives_[r] = {static_cast<const std::byte*>(data), bytes}; }
  void take(int r, void* data, std::size_t bytes) { takes_[r] = {static_cast<std::byte*>(data), bytes}; }
  void move(const Context& context, const Call& call, Flow flow, Blocks blocks);
  void move_large(Wait& wait, Flow flow, Blocks blocks);
  bool is_direct(Blocks blocks) const;
  void offer();
  bool read_peers(Wait& wait);
  int read_peer(Wait& wait, int r);
  void stage_gives(std::byte* area, std::size_t num_blocks, std::size_t lo, std::size_t len) const;
  template <class AreaOf>
  void collect_takes(AreaOf&& area_of, std::size_t num_blocks, std::size_t lo, std::size_t len) const;
  void take_own() const;

  Wait begin(const Context& context, const Call& call);
  std::byte* area(int r, std::size_t bytes);
  void arrive(Wait& wait);
  void compare_calls(Wait& wait);
  void compare_counts(Wait& wait, std::size_t num_counts);
  std::size_t compare_splits(Wait& wait);
  std::uint64_t* table(int r) { return reinterpret_cast<std::uint64_t*>(control_.stage(r, seq_)); }
  void ensure_mailboxes(Wait& wait);
  std::byte* slot(int r, std::uint64_t index) { return mailboxes_.data() + (r * 2 * kSlots + index) * kSlotBytes; }
  void publish(std::atomic<std::uint64_t> Progress::* counter, std::uint64_t value, bool all_wait_for_all);
  void await_all(Wait& wait, std::atomic<std::uint64_t> Progress::* counter, std::uint64_t value);

  template <class Stage, class Consume>
  void exchange(const Context& context, const Call& call, Flow flow, Blocks blocks, Stage&& stage, Consume&& consume);
  template <class Stage, class Consume>
  void exchange_chunks(Wait& wait, Flow flow, Blocks blocks, Stage&& stage, Consume&& consume);

  ControlBlock& control_;
  std::uint32_t seq_ = 0;
  double arrival_wait_s_ = 0;
  std::uint64_t chunks_ = 0;  // number of chunks so far; the counters in Progress continue from here
  Mapping mailboxes_;
  std::vector<const void*> sources_;
  Pieces pieces_;  // the pieces of the all_reduce in progress
  std::vector<std::span<const std::byte>> gives_;
  std::vector<std::span<std::byte>> takes_;
  bool has_offered_ = false;
  bool reads_peers_ = false;  // whether large blocks are read from peers' memory; the same on every rank
};

}  // namespace phalanx
