// Runs every collective at sizes around every threshold, and compares the results with what each rank must receive.
#include <algorithm>
#include <complex>
#include <cstring>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "numbers.h"
#include "ranks.h"

namespace phalanx::tests {
namespace {

using Bytes = std::vector<std::uint8_t>;
constexpr int kTeams[] = {1, 2, 3, 5};

Items bytes_items(std::size_t bytes) { return Items{Rank::kBytes, 1, bytes}; }
Reduction sum_bytes() { return Reduction{1, find_reduce(Dtype::kUint8, ReduceOp::kSum)}; }

/// Blocks for or from every rank, and the addresses that the core takes.
struct Blocks {
  std::vector<Bytes> data;
  std::vector<void*> outs;
  std::vector<const void*> ins;
  explicit Blocks(std::vector<Bytes> blocks) : data(std::move(blocks)) {
    for (Bytes& block : data) {
      outs.push_back(block.data());
      ins.push_back(block.data());
    }
  }
  Blocks(int num, std::size_t bytes)
      : Blocks(std::vector<Bytes>(static_cast<std::size_t>(num), Bytes(bytes, 0xee))) {}
};

/// The `step` that a rank passes to patterned() to make its block for rank `to`. It differs for each `to`.
int pair_step(int step, int to) { return step + 1000 * (to + 1); }
Blocks blocks_to_all(int from, int step, int size, std::size_t bytes) {
  std::vector<Bytes> blocks;
  for (int to = 0; to < size; ++to) blocks.push_back(patterned(from, pair_step(step, to), bytes));
  return Blocks(std::move(blocks));
}

// The sum is private to its thread: here, the thread sanitizer would find nothing and only cost time.
__attribute__((no_sanitize("thread"))) void add(std::uint8_t* sum, const std::uint8_t* to_add, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) sum[i] = static_cast<std::uint8_t>(sum[i] + to_add[i]);
}
Bytes sum_of(int size, int step, std::size_t bytes) {
  Bytes sum(bytes, 0);
  for (int r = 0; r < size; ++r) add(sum.data(), patterned(r, step, bytes).data(), bytes);
  return sum;
}

std::string at(const char* op, std::size_t bytes, const Rank& rank) {
  return std::string(op) + " of " + std::to_string(bytes) + " bytes, rank " + std::to_string(rank.rank) + " of " +
         std::to_string(rank.size);
}

/// Pieces of several lengths, empty ones among them, that make up `in` and `out`.
std::vector<Piece> cut_in_pieces(Bytes& in, Bytes& out) {
  std::vector<Piece> pieces;
  std::size_t first = 0;
  for (const std::size_t want : {std::size_t{0}, std::size_t{1}, in.size() / 3, std::size_t{0}, in.size()}) {
    const std::size_t count = std::min(want, in.size() - first);
    pieces.push_back(Piece{in.data() + first, out.data() + first, count});
    first += count;
  }
  return pieces;
}

/// Runs every collective once with blocks of `bytes`, out of place and in place.
void run_all(Rank& self, std::size_t bytes, int step) {
  Collectives& c = self.collectives();
  const int n = self.size, me = self.rank, root = step % n;
  const Items items = bytes_items(bytes);
  const Bytes own = patterned(me, step, bytes);
  const auto mine = static_cast<std::size_t>(me);

  Bytes data = me == root ? own : Bytes(bytes, 0xee);
  c.broadcast(self.context(), data.data(), items, root);
  CHECK_EQ(data == patterned(root, step, bytes), true, at("broadcast", bytes, self));

  const Bytes sum = sum_of(n, step, bytes);
  Bytes out(bytes, 0xee);
  c.all_reduce(self.context(), own.data(), out.data(), items, sum_bytes());
  CHECK_EQ(out == sum, true, at("all_reduce", bytes, self));
  data = own;
  c.all_reduce(self.context(), data.data(), data.data(), items, sum_bytes());
  CHECK_EQ(data == sum, true, at("all_reduce in place", bytes, self));
  Bytes scattered_in = own, scattered_out(bytes, 0xee);
  const std::vector<Piece> pieces = cut_in_pieces(scattered_in, scattered_out);
  c.all_reduce(self.context(), pieces, items, sum_bytes());
  CHECK_EQ(scattered_out == sum, true, at("all_reduce in pieces", bytes, self));

  data = own;
  c.reduce(self.context(), data.data(), data.data(), items, sum_bytes(), root);
  CHECK_EQ(data == (me == root ? sum : own), true, at("reduce in place", bytes, self));
  out.assign(bytes, 0xee);
  c.reduce(self.context(), own.data(), me == root ? out.data() : nullptr, items, sum_bytes(), root);
  CHECK_EQ(out == (me == root ? sum : Bytes(bytes, 0xee)), true, at("reduce", bytes, self));

  Blocks to_all = blocks_to_all(me, step, n, bytes);
  c.reduce_scatter(self.context(), to_all.ins, out.data(), items, sum_bytes());
  CHECK_EQ(out == sum_of(n, pair_step(step, me), bytes), true, at("reduce_scatter", bytes, self));
  c.reduce_scatter(self.context(), to_all.ins, to_all.data[mine].data(), items, sum_bytes());
  CHECK_EQ(to_all.data[mine] == out, true, at("reduce_scatter in place", bytes, self));

  std::vector<Bytes> everyone;
  for (int r = 0; r < n; ++r) everyone.push_back(patterned(r, step, bytes));
  Blocks gathered(n, bytes);
  c.all_gather(self.context(), own.data(), gathered.outs, items);
  CHECK_EQ(gathered.data == everyone, true, at("all_gather", bytes, self));
  Blocks in_place(n, bytes);
  std::copy(own.begin(), own.end(), in_place.data[mine].begin());
  c.all_gather(self.context(), in_place.ins[mine], in_place.outs, items);
  CHECK_EQ(in_place.data == everyone, true, at("all_gather in place", bytes, self));

  Blocks at_root(n, bytes);
  c.gather(self.context(), own.data(), me == root ? at_root.outs : std::vector<void*>{}, items, root);
  if (me == root) CHECK_EQ(at_root.data == everyone, true, at("gather", bytes, self));

  const Blocks scattered = blocks_to_all(root, step, n, bytes);
  c.scatter(self.context(), me == root ? scattered.ins : std::vector<const void*>{}, out.data(), items, root);
  CHECK_EQ(out == scattered.data[mine], true, at("scatter", bytes, self));

  Blocks sent = blocks_to_all(me, step, n, bytes);
  Blocks received(n, bytes);
  c.all_to_all(self.context(), sent.ins, received.outs, items);
  for (int r = 0; r < n; ++r)
    CHECK_EQ(received.data[static_cast<std::size_t>(r)] == patterned(r, pair_step(step, me), bytes), true,
             at("all_to_all", bytes, self));
  c.all_to_all(self.context(), sent.ins, sent.outs, items);
  CHECK_EQ(sent.data == received.data, true, at("all_to_all in place", bytes, self));

  c.barrier(self.context());
}

void run_sizes(const std::vector<std::size_t>& sizes, const Options& options) {
  for (const int n : kTeams)
    run_ranks(
        n,
        [&](Rank& self) {
          for (std::size_t i = 0; i < sizes.size(); ++i) run_all(self, sizes[i], static_cast<int>(i));
        },
        options);
}

// Some thresholds apply to one block, others to the blocks for all ranks together. In groups of 1, 2, 3 and 5 ranks,
// the sizes below are at, just under and just above each threshold.
CASE(collectives_are_right_around_the_sizes_of_a_line_and_a_stage) {
  const std::size_t one_shot = Tuning{}.one_shot_bytes;
  std::set<std::size_t> sizes{0, 1, 9, 10, 16, 17, 24, 25, 48, 49, 1001, one_shot, one_shot + 1};
  for (const std::size_t num_blocks : {1, 2, 3, 5}) sizes.insert({kStageBytes / num_blocks, kStageBytes / num_blocks + 1});
  run_sizes({sizes.begin(), sizes.end()}, {});
}

CASE(collectives_are_right_around_the_size_of_a_chunk) {
  const std::size_t chunk = Tuning{}.chunk_bytes;
  run_sizes({chunk, 2 * chunk + 63, 5}, {});
}

CASE(collectives_are_right_where_peers_may_not_read_each_others_memory) {
  Options options;
  options.tuning.direct_bytes = SIZE_MAX;
  run_sizes({kStageBytes + 1, 2 * kStageBytes + 63, 5}, options);
}

CASE(collectives_are_right_where_even_small_blocks_are_read_where_they_lie) {
  Options options;
  options.tuning.direct_bytes = 1;
  run_sizes({1, 48, 1001, 0, kStageBytes, kStageBytes + 1}, options);
}

CASE(collectives_of_many_chunks_go_around_the_rings) {
  Options options;
  options.tuning.direct_bytes = SIZE_MAX;
  options.tuning.chunk_bytes = 4096;  // 33 chunks and more
  run_sizes({132'013, 0, 70'001}, options);
}

CASE(collectives_are_right_without_spinning) {
  Options options;
  options.tuning.direct_bytes = SIZE_MAX;
  options.spin_us = 0;
  options.tuning.chunk_bytes = 16'384;
  run_sizes({1, 49, 70'001}, options);
}

CASE(a_second_of_small_collectives_follows_hard_on_each_other) {
  // Ranks run ahead of each other as far as the protocol allows, and use lines and stages of both parities many times.
  for (const int n : {2, 3})
    run_ranks(n, [&](Rank& self) {
      constexpr std::size_t kCounts[] = {5, 700, 6000, 1, 6000, 700};  // in a line, a stage, a stage, and again
      std::vector<std::uint64_t> data(6000);
      const Reduction sum{1, find_reduce(Dtype::kUint64, ReduceOp::kSum)};
      for (std::uint64_t step = 0; step < 600; ++step) {
        const std::size_t count = kCounts[step % std::size(kCounts)];
        for (std::size_t i = 0; i < count; ++i) data[i] = step * 1000 + i + static_cast<std::uint64_t>(self.rank);
        self.collectives().all_reduce(self.context(), data.data(), data.data(),
                                      Items{static_cast<std::uint8_t>(Dtype::kUint64), 8, count}, sum);
        const auto ranks = static_cast<std::uint64_t>(n);
        for (std::size_t i = 0; i < count; ++i)
          CHECK(data[i] == ranks * (step * 1000 + i) + ranks * (ranks - 1) / 2);
      }
    });
}

template <class T>
void reduce_everywhere(Rank& self, Dtype dtype) {
  constexpr std::size_t kMost = 80'003 / sizeof(T);  // chunked; smaller counts are inline and one-shot
  for (int code = 0; code < static_cast<int>(ReduceOp::kCount); ++code) {
    const auto op = static_cast<ReduceOp>(code);
    if (!has_meaning<T>(op)) continue;
    const Reduction reduction{static_cast<std::uint8_t>(code + 1), find_reduce(dtype, op)};
    for (const std::size_t count : {std::size_t{1}, std::size_t{3}, std::size_t{257}, code < 2 ? kMost : 0}) {
      std::vector<std::vector<T>> srcs;
      for (int r = 0; r < self.size; ++r) srcs.push_back(values<T>(r, self.size, code, count));
      std::vector<T> out(count);
      const Items items{static_cast<std::uint8_t>(dtype), sizeof(T), count};
      self.collectives().all_reduce(self.context(), srcs[static_cast<std::size_t>(self.rank)].data(), out.data(),
                                    items, reduction);
      for (std::size_t i = 0; i < count; ++i)
        if (!same_value(out[i], reference<T>(op, srcs, i)))
          fail_check(__FILE__, __LINE__, at("all_reduce", count * sizeof(T), self) + ", op " + std::to_string(code) +
                                             ": wrong at element " + std::to_string(i));
      // The bits must be the same on every rank, even those of a NaN.
      Blocks all(self.size, count * sizeof(T));
      self.collectives().all_gather(self.context(), out.data(), all.outs, bytes_items(count * sizeof(T)));
      for (const Bytes& theirs : all.data)
        CHECK_EQ(std::memcmp(theirs.data(), out.data(), theirs.size()), 0, at("all_reduce", theirs.size(), self));
    }
  }
}

CASE(all_reduce_of_every_dtype_and_operation_is_exact_and_the_same_on_every_rank) {
  for (const int n : {2, 3})
    run_ranks(n, [](Rank& self) {
      reduce_everywhere<float>(self, Dtype::kFloat32);
      reduce_everywhere<double>(self, Dtype::kFloat64);
      reduce_everywhere<Half>(self, Dtype::kFloat16);
      reduce_everywhere<Bfloat>(self, Dtype::kBfloat16);
      reduce_everywhere<std::int8_t>(self, Dtype::kInt8);
      reduce_everywhere<std::int16_t>(self, Dtype::kInt16);
      reduce_everywhere<std::int32_t>(self, Dtype::kInt32);
      reduce_everywhere<std::int64_t>(self, Dtype::kInt64);
      reduce_everywhere<Bool>(self, Dtype::kBool);
      reduce_everywhere<std::complex<float>>(self, Dtype::kComplex64);
      reduce_everywhere<std::complex<double>>(self, Dtype::kComplex128);
    });
}

/// Number of elements that `from` sends to `to` in round `round`: none, a few, or more than a stage holds.
std::size_t split_count(int round, int from, int to) {
  const std::size_t some[] = {0, 1, 37, 0, 20'011, 4096};
  return round == 0 ? 0 : some[static_cast<std::size_t>(round * 5 + from * 3 + to) % std::size(some)];
}

CASE(all_to_all_takes_blocks_of_different_sizes) {
  for (const int n : kTeams)
    run_ranks(n, [](Rank& self) {
      for (int round = 0; round < 6; ++round) {
        std::vector<Bytes> ins, outs;
        std::vector<std::uint64_t> in_counts, out_counts;
        for (int r = 0; r < self.size; ++r) {
          in_counts.push_back(split_count(round, self.rank, r));
          out_counts.push_back(split_count(round, r, self.rank));
          ins.push_back(patterned(self.rank, pair_step(round, r), 8 * in_counts.back()));
          outs.emplace_back(8 * out_counts.back(), std::uint8_t{0xee});
        }
        const Blocks sent(ins);
        Blocks received(outs);
        self.collectives().all_to_all_split(self.context(), sent.ins, in_counts, received.outs, out_counts,
                                            Items{static_cast<std::uint8_t>(Dtype::kInt64), 8, 0});
        for (int r = 0; r < self.size; ++r) {
          const Bytes& block = received.data[static_cast<std::size_t>(r)];
          CHECK_EQ(block == patterned(r, pair_step(round, self.rank), block.size()), true,
                   at("all_to_all_split", block.size(), self));
        }
      }
    });
}

CASE(two_groups_work_at_once_from_two_threads_of_each_rank) {
  constexpr int kRanks = 3;
  const auto segment = Segment::create();
  const long blocks = blocks_of(*segment);
  const std::uint64_t forward = ControlBlock::create(*segment, kRanks), backward = ControlBlock::create(*segment, kRanks);
  in_threads(kRanks, [&](int r) {
    Rank ahead{r, kRanks, segment, make_group(segment, forward, r, kRanks, {}, "ahead")};
    Options reversed;
    reversed.global_ranks = {2, 1, 0};
    const int back = kRanks - 1 - r;
    Rank behind{back, kRanks, segment, make_group(segment, backward, back, kRanks, reversed, "behind")};
    std::vector<Rank*> both{&ahead, &behind};
    in_threads(2, [&](int t) {
      for (int step = 0; step < 8; ++step) run_all(*both[static_cast<std::size_t>(t)], step % 3 == 2 ? 70'000 : 31, step);
    });
  });
  CHECK_EQ(blocks_of(*segment), blocks);
}

CASE(threads_that_share_a_group_take_turns) {
  run_ranks(2, [](Rank& self) {
    // The threads of a rank run in any order, so all of them make the same call.
    in_threads(3, [&](int) {
      Hooks hooks;
      for (int i = 0; i < 50; ++i) {
        std::int32_t one = 1;
        self.group->worker().run(Op::kAllReduce, 0, hooks, [&](Hooks& h) {
          self.collectives().all_reduce(Context{&h}, &one, &one, Items{static_cast<std::uint8_t>(Dtype::kInt32), 4, 1},
                                        Reduction{1, find_reduce(Dtype::kInt32, ReduceOp::kSum)});
        });
        CHECK_EQ(one, 2);
      }
    });
  });
}

}  // namespace
}  // namespace phalanx::tests
