// Failures that end a collective: disagreement, deadline, abort, a peer that leaves. Also the segment's guarantees.
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ranks.h"

namespace phalanx::tests {
namespace {

constexpr double kPromptS = 1.0;  // a wait must end within a second of its cause

/// Lets threads wait for each other without using the core, which is under test.
class Rendezvous {
 public:
  explicit Rendezvous(int num) : missing_(num) {}
  void arrive_and_wait() {
    std::unique_lock lock(mutex_);
    if (--missing_ == 0) changed_.notify_all();
    CHECK(changed_.wait_for(lock, std::chrono::seconds(60), [&] { return missing_ <= 0; }));
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int missing_;
};

void check_kind(const Failure& failure, FailureKind kind) {
  CHECK_EQ(std::string(kind_name(failure.kind)), kind_name(kind));
}
void check_made(const MadeCall& made, int rank, const Call& call) {
  CHECK_EQ(made.rank, rank);
  CHECK_EQ(made.call.what(), call.what());
  CHECK_EQ(made.call.detail(), call.detail());
  CHECK_EQ(made.root, call.root);
}
template <class T>
std::string joined(const std::vector<T>& items) {
  std::string all;
  for (const T& item : items) all += std::to_string(item) + " ";
  return all;
}

/// Wait until rank `r` has arrived at collective `seq`.
void await_arrival(Rank& self, int r, std::uint32_t seq) {
  const Line& line = self.group->control().line(r, seq);
  while (line.seq.load(std::memory_order_acquire) != seq) std::this_thread::yield();
}

constexpr auto kFloat = static_cast<std::uint8_t>(Dtype::kFloat32);
constexpr auto kInt = static_cast<std::uint8_t>(Dtype::kInt32);
Reduction sum_floats() { return Reduction{1, find_reduce(Dtype::kFloat32, ReduceOp::kSum)}; }
Reduction max_floats() { return Reduction{5, find_reduce(Dtype::kFloat32, ReduceOp::kMax)}; }

/// Ranks 0 and 1 of three call `usual`, and rank 2 calls `other`. Every rank must see the table of calls.
template <class Usual, class Other>
void expect_mismatch(Usual usual, Other other, const Call& usual_call, const Call& other_call) {
  run_ranks(3, [&](Rank& self) {
    float data[5] = {};
    const double seconds = seconds_of([&] {
      const Failure failure = failure_of([&] {
        if (self.rank == 2) return other(self, data);
        usual(self, data);
      });
      check_kind(failure, FailureKind::kCallsDiffer);
      CHECK_EQ(failure.calls.size(), 3u);
      check_made(failure.calls[0], 0, usual_call);
      check_made(failure.calls[1], 1, usual_call);
      check_made(failure.calls[2], 2, other_call);
      CHECK_EQ(joined(failure.ranks), self.rank == 2 ? "0 1 " : "2 ");
      CHECK_EQ(failure.seq, 1u);  // the join is not counted
    });
    CHECK(seconds < kPromptS);
    const Failure after = failure_of([&] { self.collectives().barrier(self.context()); });
    check_kind(after, FailureKind::kUnusable);
    CHECK(after.cause != nullptr);
    check_kind(*after.cause, FailureKind::kCallsDiffer);
  });
}

auto all_reduce(std::uint8_t dtype, std::size_t count, Reduction reduction) {
  return [=](Rank& self, float* data) {
    self.collectives().all_reduce(self.context(), data, data, Items{dtype, 4, count}, reduction);
  };
}
auto broadcast_from(int root) {
  return [=](Rank& self, float* data) { self.collectives().broadcast(self.context(), data, Items{kFloat, 4, 5}, root); };
}

constexpr std::uint8_t kSum = 1, kMax = 5;
Call reduced(std::uint8_t dtype, std::size_t count, std::uint8_t reduce_op) {
  return Call{Op::kAllReduce, dtype, reduce_op, 0, count, -1};
}
Call sent_from(int root) { return Call{Op::kBroadcast, kFloat, 0, 0, 5, root}; }

CASE(different_counts_are_a_mismatch_on_every_rank) {
  expect_mismatch(all_reduce(kFloat, 4, sum_floats()), all_reduce(kFloat, 5, sum_floats()), reduced(kFloat, 4, kSum),
                  reduced(kFloat, 5, kSum));
}
CASE(different_dtypes_are_a_mismatch_on_every_rank) {
  expect_mismatch(all_reduce(kFloat, 4, sum_floats()), all_reduce(kInt, 4, sum_floats()), reduced(kFloat, 4, kSum),
                  reduced(kInt, 4, kSum));
}
CASE(different_reduce_operations_are_a_mismatch_on_every_rank) {
  expect_mismatch(all_reduce(kFloat, 4, sum_floats()), all_reduce(kFloat, 4, max_floats()), reduced(kFloat, 4, kSum),
                  reduced(kFloat, 4, kMax));
}
CASE(different_roots_are_a_mismatch_on_every_rank) {
  expect_mismatch(broadcast_from(0), broadcast_from(1), sent_from(0), sent_from(1));
}
CASE(different_operations_are_a_mismatch_on_every_rank) {
  expect_mismatch(broadcast_from(2), [](Rank& self, float*) { self.collectives().barrier(self.context()); },
                  sent_from(2), Call{.op = Op::kBarrier});
}

CASE(a_mismatch_is_found_before_the_last_rank_arrives) {
  Rendezvous both_failed(3);
  run_ranks(3, [&](Rank& self) {
    float data[5] = {};
    if (self.rank == 2) return both_failed.arrive_and_wait();
    check_kind(failure_of([&] { all_reduce(kFloat, static_cast<std::size_t>(4 + self.rank), sum_floats())(self, data); }),
               FailureKind::kCallsDiffer);
    both_failed.arrive_and_wait();
  });
}

CASE(split_sizes_that_do_not_fit_are_a_mismatch_on_every_rank) {
  run_ranks(3, [](Rank& self) {
    std::vector<float> data(64);
    const std::vector<const void*> ins(3, data.data());
    const std::vector<void*> outs(3, data.data() + 32);
    std::vector<std::uint64_t> in_counts(3, 2), out_counts(3, 2);
    if (self.rank == 1) out_counts[2] = 3;
    const Failure failure = failure_of([&] {
      self.collectives().all_to_all_split(self.context(), ins, in_counts, outs, out_counts, Items{kFloat, 4, 0});
    });
    check_kind(failure, FailureKind::kSizesDiffer);
    CHECK_EQ(failure.sizes->rank, 2);
    CHECK_EQ(failure.sizes->count, 2u);
    CHECK_EQ(failure.sizes->other, 1);
    CHECK_EQ(failure.sizes->other_count, 3u);
  });
}

CASE(a_timeout_names_the_missing_ranks_by_their_number_in_the_world) {
  Options options;
  options.timeout_s = 0.2;
  options.global_ranks = {10, 11, 12};
  Rendezvous done(3);
  // Only the operation has the short deadline: under a sanitizer, joining may take longer.
  Options patient = options;
  patient.timeout_s = 60;
  run_ranks(
      3,
      [&](Rank& self) {
        if (self.rank == 1) return done.arrive_and_wait();
        const Failure failure =
            failure_of([&] { self.collectives().barrier(Context{&self.hooks, options.timeout_s}); });
        check_kind(failure, FailureKind::kRankMissing);
        CHECK_EQ(joined(failure.ranks), "11 ");
        CHECK_EQ(failure.op, "barrier");
        CHECK_EQ(failure.standings.size(), 1u);
        CHECK_EQ(failure.standings[0].rank, 11);
        CHECK_EQ(failure.standings[0].last, 0u);
        done.arrive_and_wait();
      },
      patient);
}

CASE(a_receive_that_nobody_serves_times_out) {
  Rendezvous done(2);
  run_ranks(2, [&](Rank& self) {
    std::uint8_t byte = 0;
    if (self.rank == 0) {
      const Failure failure = failure_of([&] {
        self.group->p2p().wait(self.post(Op::kRecv, &byte, 1, 1, 0), self.hooks, 0.2);
      });
      check_kind(failure, FailureKind::kRankMissing);
      CHECK_EQ(joined(failure.ranks), "1 ");
    }
    done.arrive_and_wait();
  });
}

CASE(where_a_rank_waits_is_in_all_its_control_blocks_meanwhile) {
  const auto segment = Segment::create();
  const std::uint64_t offsets[] = {ControlBlock::create(*segment, 2), ControlBlock::create(*segment, 2)};
  Rendezvous joined_both(2), looked(2);
  in_threads(2, [&](int r) {
    const auto waits = make_group(segment, offsets[0], r, 2, {}, "waits");
    const auto idle = make_group(segment, offsets[1], r, 2, {}, "idle");
    joined_both.arrive_and_wait();
    const auto stands_in_idle = [&] {
      return idle->control().member(0).site.words[0].load(std::memory_order_acquire) != 0;
    };
    Hooks hooks;
    const auto limit = Clock::now() + std::chrono::seconds(60);
    while (r == 1 && !stands_in_idle() && Clock::now() < limit) std::this_thread::yield();
    if (r == 1) CHECK(stands_in_idle());
    waits->collectives().barrier(Context{&hooks});
    looked.arrive_and_wait();
    CHECK(!stands_in_idle());
  });
}

CASE(abort_ends_the_waits_of_every_rank_promptly) {
  Rendezvous posted(2), done(3);
  run_ranks(3, [&](Rank& self) {
    const std::uint32_t seq = self.collectives().seq() + 1;
    if (self.rank == 2) {
      for (int r = 0; r < 2; ++r) await_arrival(self, r, seq);
      self.group->abort("the test says so");
      done.arrive_and_wait();
      return;
    }
    std::jthread other;
    if (self.rank == 0)
      other = std::jthread([&] {  // a second thread of the rank waits for a message
        std::uint8_t byte = 0;
        Hooks hooks;
        const auto request = self.post(Op::kRecv, &byte, 1, 2, 0);
        posted.arrive_and_wait();
        const Failure failure = failure_of([&] { self.group->p2p().wait(request, hooks, 0); });
        check_kind(failure, FailureKind::kAborted);
        CHECK_EQ(failure.by, 2);
      });
    if (self.rank == 0) posted.arrive_and_wait();
    const double seconds = seconds_of([&] {
      const Failure failure = failure_of([&] { self.collectives().barrier(self.context()); });
      check_kind(failure, FailureKind::kAborted);
      CHECK_EQ(failure.by, 2);
    });
    if (other.joinable()) other.join();
    CHECK(seconds < kPromptS);
    done.arrive_and_wait();
  });
}

CASE(abort_ends_a_wait_in_another_thread_of_the_same_rank) {
  Rendezvous done(2);
  run_ranks(2, [&](Rank& self) {
    if (self.rank == 0) {
      const std::uint32_t seq = self.collectives().seq() + 1;
      std::jthread other([&] {
        await_arrival(self, 0, seq);
        self.group->abort("shutting down");
      });
      check_kind(failure_of([&] { self.collectives().barrier(self.context()); }), FailureKind::kAborted);
    }
    done.arrive_and_wait();
  });
}

/// A signal handler that raises an exception, such as the handler of Ctrl-C.
class Interrupt : public Hooks {
 public:
  void tick() override { throw std::runtime_error("KeyboardInterrupt"); }
};

CASE(an_interrupted_rank_ends_the_group) {
  Rendezvous done(2);
  run_ranks(2, [&](Rank& self) {
    if (self.rank == 0) {
      Interrupt interrupt;
      std::string what;
      try {
        self.collectives().barrier(Context{&interrupt});
      } catch (const std::runtime_error& error) {
        what = error.what();
      }
      CHECK_EQ(what, "KeyboardInterrupt");
      done.arrive_and_wait();
      return;
    }
    done.arrive_and_wait();
    const Failure failure = failure_of([&] { self.collectives().barrier(self.context()); });
    check_kind(failure, FailureKind::kInterrupted);
    CHECK_EQ(failure.by, 0);
  });
}

CASE(a_rank_that_leaves_fails_the_collective_of_its_peers) {
  Rendezvous met(3);
  run_ranks(3, [&](Rank& self) {
    met.arrive_and_wait();
    if (self.rank == 1) return self.group->leave();
    const double seconds = seconds_of([&] {
      const Failure failure = failure_of([&] { self.collectives().barrier(self.context()); });
      check_kind(failure, FailureKind::kRankLeft);
      CHECK_EQ(joined(failure.ranks), "1 ");
    });
    CHECK(seconds < kPromptS);
  });
}

CASE(a_rank_that_leaves_fails_the_receive_of_its_peer_but_not_what_it_sent) {
  run_ranks(2, [](Rank& self) {
    std::uint8_t byte = 7;
    if (self.rank == 1) return self.send(&byte, 1, 0, 0);
    byte = 0;
    self.recv(&byte, 1, 1, 0);
    CHECK_EQ(byte, 7);
    const Failure failure = failure_of([&] { self.recv(&byte, 1, 1, 1); });
    check_kind(failure, FailureKind::kRankLeft);
    CHECK_EQ(joined(failure.ranks), "1 ");
  });
}

CASE(a_group_that_was_left_says_so) {
  run_ranks(2, [](Rank& self) {
    self.collectives().barrier(self.context());
    self.group->leave();
    self.group->leave();  // a second time changes nothing
    const Failure failure = failure_of([&] { self.collectives().barrier(self.context()); });
    check_kind(failure, FailureKind::kUnusable);
    CHECK(failure.cause == nullptr);
    check_kind(failure_of([&] { self.group->worker().submit(Op::kBarrier, [](Hooks&) {}, ""); }), FailureKind::kUnusable);
    std::uint8_t byte = 0;
    check_kind(failure_of([&] { self.recv(&byte, 1, 1 - self.rank, 0); }), FailureKind::kUnusable);
  });
}

CASE(groups_that_follow_each_other_reuse_the_memory) {
  const auto segment = Segment::create();
  const long empty = blocks_of(*segment);
  long most = 0;
  for (int round = 0; round < 5; ++round) {
    const std::uint64_t offset = ControlBlock::create(*segment, 2);
    in_threads(2, [&](int r) {
      Rank self{r, 2, segment, make_group(segment, offset, r, 2, {})};
      std::vector<float> data(100'000);
      all_reduce(kFloat, data.size(), sum_floats())(self, data.data());  // makes the mailboxes
      if (r == 0) self.send(data.data(), 400'000, 1, 0);                 // makes a channel
      if (r == 1) self.recv(data.data(), 400'000, 0, 0);
      self.collectives().barrier(self.context());
      if (r == 0) most = blocks_of(*segment);
      self.collectives().barrier(self.context());
    });
    CHECK_EQ(blocks_of(*segment), empty);
    CHECK(most > empty);
  }
}

CASE(ranks_share_one_mapping_so_that_sanitizers_see_their_races) {
  const auto segment = Segment::create();
  const std::uint64_t offset = segment->allocate(kPage);
  const Mapping one = segment->map(offset, kPage), other = segment->map(offset, kPage);
  CHECK_EQ(one.data(), other.data());
}

CASE(memory_of_another_node_is_replaced_before_its_rank_uses_it) {
  const auto segment = Segment::create();
  const std::uint64_t offset = segment->allocate(2 * kPage);
  const long blocks = blocks_of(*segment);
  const Mapping mapping = segment->map(offset, 2 * kPage);
  const auto fill = [&](int byte) { std::memset(mapping.data(), byte, 2 * kPage); };
  fill(1);
  segment->bring_near(offset, kPage, current_node());
  CHECK_EQ(static_cast<int>(mapping.data()[0]), 1);
  segment->bring_near(offset, kPage, current_node() + 1);
  CHECK_EQ(static_cast<int>(mapping.data()[0]), 0);      // a new page, at the same address
  CHECK_EQ(static_cast<int>(mapping.data()[kPage]), 1);  // the next page was not replaced
  fill(2);
  CHECK_EQ(static_cast<int>(segment->map(offset, 2 * kPage).data()[0]), 2);
  CHECK_EQ(blocks_of(*segment), blocks);
}

CASE(ranks_whose_memory_was_allocated_on_another_node_compute_as_ever) {
  const auto segment = Segment::create();
  const long blocks = blocks_of(*segment);
  const std::uint64_t offset = ControlBlock::create(*segment, 2);
  reinterpret_cast<GroupHeader*>(segment->map(offset, kPage).data())->node = current_node() + 1;
  in_threads(2, [&](int r) {
    Rank self{r, 2, segment, make_group(segment, offset, r, 2, {})};
    for (const std::size_t count : {1, 5000, 100'000}) {  // sizes that travel in the line, in a stage and in the mailboxes
      std::vector<float> data(count, static_cast<float>(r + 1));
      all_reduce(kFloat, data.size(), sum_floats())(self, data.data());
      CHECK_EQ(data.front(), 3.0f);
      CHECK_EQ(data.back(), 3.0f);
    }
  });
  CHECK_EQ(blocks_of(*segment), blocks);
}

CASE(a_segment_is_handed_over_and_proved_by_its_nonce) {
  const auto segment = Segment::create();
  SegmentServer server(segment);
  std::string refused;
  std::jthread peers([&] {
    const auto attached = Segment::attach(server.name(), segment->nonce(), 60, nullptr);
    CHECK_EQ(attached->nonce(), segment->nonce());
    try {
      Segment::attach(server.name(), std::string(32, '0'), 60, nullptr);
    } catch (const std::runtime_error& error) {
      refused = error.what();
    }
  });
  CHECK_EQ(server.serve(2, 60, nullptr), 2);
  peers.join();
  CHECK_CONTAINS(refused, "not the one that was announced");
  CHECK_EQ(server.serve(1, 0.01, nullptr), 0);
}

}  // namespace
}  // namespace phalanx::tests
