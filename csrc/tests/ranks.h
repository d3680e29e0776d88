// Ranks as threads of one process. Each rank has its own Group; all of them use one Segment.
#pragma once

#include <sys/stat.h>

#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "collectives/group.h"
#include "harness.h"
#include "numbers.h"

namespace phalanx::tests {

struct Options {
  double timeout_s = 60;  // ends a rank that hangs; long, because sanitizers make ranks slow
  double spin_us = 50;
  std::vector<int> global_ranks;  // if empty: 0, 1, ...
  Tuning tuning{};
};

inline std::shared_ptr<Group> make_group(const std::shared_ptr<Segment>& segment, std::uint64_t offset, int rank,
                                         int size, const Options& options, const char* name = "world") {
  GroupConfig config;
  config.rank = rank;
  config.size = size;
  config.name = name;
  config.global_ranks = options.global_ranks;
  if (config.global_ranks.empty()) {
    config.global_ranks.resize(static_cast<std::size_t>(size));
    std::iota(config.global_ranks.begin(), config.global_ranks.end(), 0);
  }
  config.timeout_s = options.timeout_s;
  config.stall_s = 1e6;  // no stall reports between the results
  config.spin_us = options.spin_us;
  auto group = Group::make(segment, offset, config);
  group->collectives().tuning = options.tuning;
  Hooks hooks;
  group->collectives().join(Context{&hooks});
  return group;
}

/// One rank of a test, while its body runs.
struct Rank {
  int rank, size;
  std::shared_ptr<Segment> segment;
  std::shared_ptr<Group> group;
  Hooks hooks{};

  Collectives& collectives() { return group->collectives(); }
  Context context() { return Context{&hooks}; }
  std::shared_ptr<Request> post(Op op, void* data, std::size_t bytes, int peer, int tag) {
    return group->p2p().post(op, data, Items{kBytes, 1, bytes}, peer, tag, "");
  }
  void wait(const std::shared_ptr<Request>& request) { group->p2p().wait(request, hooks, 0); }
  void send(const void* data, std::size_t bytes, int peer, int tag) {
    wait(post(Op::kSend, const_cast<void*>(data), bytes, peer, tag));
  }
  int recv(void* data, std::size_t bytes, int peer, int tag) {
    const auto request = post(Op::kRecv, data, bytes, peer, tag);
    wait(request);
    return request->source();
  }
  static constexpr auto kBytes = static_cast<std::uint8_t>(Dtype::kUint8);
};

/// Memory that the segment holds, in blocks of 512 bytes.
inline long blocks_of(const Segment& segment) {
  struct stat info{};
  CHECK_EQ(fstat(segment.fd(), &info), 0);
  return static_cast<long>(info.st_blocks);
}

/// Runs `body(r)` in one thread per r. If threads fail, throws the first failed check or, if no check failed, the first
/// error.
template <class Body>
void in_threads(int num_threads, Body&& body) {
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(num_threads));
  std::vector<std::thread> threads;
  for (int r = 0; r < num_threads; ++r)
    threads.emplace_back([&, r] {
      try {
        body(r);
      } catch (...) {
        errors[static_cast<std::size_t>(r)] = std::current_exception();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const auto& error : errors) {  // failed checks first: the failures of the other ranks are consequences
    try {
      if (error) std::rethrow_exception(error);
    } catch (const CheckFailed&) {
      throw;
    } catch (...) {
    }
  }
  for (const auto& error : errors)
    if (error) std::rethrow_exception(error);
}

/// Runs `body(rank)` on `size` ranks, and checks that they leave no memory behind.
template <class Body>
void run_ranks(int size, Body&& body, const Options& options = {}) {
  const auto segment = Segment::create();
  const long blocks = blocks_of(*segment);
  const std::uint64_t offset = ControlBlock::create(*segment, size);
  in_threads(size, [&](int r) {
    Rank rank{r, size, segment, make_group(segment, offset, r, size, options)};
    try {
      body(rank);
    } catch (...) {
      rank.group->abort("its test failed");
      throw;
    }
  });
  CHECK_EQ(blocks_of(*segment), blocks);
}

/// Returns the failure that `call` must throw.
template <class Call>
Failure failure_of(Call&& call) {
  try {
    call();
  } catch (const Failure& failure) {
    return failure;
  }
  throw CheckFailed("the call was expected to fail");
}

inline double seconds_of(const std::function<void()>& call) {
  const auto start = Clock::now();
  call();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Bytes that differ by rank, step and position: a range of one pool of random bytes.
inline std::vector<std::uint8_t> patterned(int rank, int step, std::size_t bytes) {
  constexpr std::size_t kPool = std::size_t{2} << 20, kStarts = 65'521;
  static const std::vector<std::uint8_t> pool = [] {
    std::vector<std::uint8_t> random(kPool);
    for (std::size_t i = 0; i < kPool; ++i) random[i] = static_cast<std::uint8_t>(mix(i));
    return random;
  }();
  const std::size_t start = mix(static_cast<std::size_t>(step) * 64 + static_cast<std::size_t>(rank)) % kStarts;
  CHECK(start + bytes <= kPool);
  return {pool.data() + start, pool.data() + start + bytes};
}

}  // namespace phalanx::tests
