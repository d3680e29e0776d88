// Messages between two ranks: matching, order, sizes beyond the ring, progress without a waiter.
#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "ranks.h"

namespace phalanx::tests {
namespace {

using Bytes = std::vector<std::uint8_t>;
constexpr std::size_t kLarge = 4 * kChannelBytes + 12'345;

CASE(messages_of_every_size_arrive_in_order) {
  const std::size_t sizes[] = {0, 1, 63, 64, 65, kChannelBytes / 4 - 1, kChannelBytes / 4, kChannelBytes / 4 + 1,
                               kChannelBytes, kChannelBytes + 1, 0, kLarge, 7};
  run_ranks(2, [&](Rank& self) {
    int step = 0;
    for (const std::size_t bytes : sizes) {
      ++step;
      if (self.rank == 0) {
        self.send(patterned(0, step, bytes).data(), bytes, 1, 3);
      } else {
        Bytes data(bytes, 0xee);
        CHECK_EQ(self.recv(data.data(), bytes, 0, 3), 0);
        CHECK_EQ(data == patterned(0, step, bytes), true, std::to_string(bytes) + " bytes");
      }
    }
  });
}

CASE(tags_match_out_of_order) {
  run_ranks(2, [](Rank& self) {
    const std::size_t sizes[] = {100, kLarge, 0, 70'000, 5};
    std::vector<Bytes> data;
    for (int tag = 0; tag < 5; ++tag) data.push_back(patterned(0, tag, sizes[tag]));
    std::vector<std::shared_ptr<Request>> sent;
    if (self.rank == 0) {
      for (int tag = 0; tag < 5; ++tag)
        sent.push_back(self.post(Op::kSend, data[static_cast<std::size_t>(tag)].data(), sizes[tag], 1, tag));
      for (const auto& request : sent) self.wait(request);
    } else {
      for (int tag = 4; tag >= 0; --tag) {  // receives the last message first, so the others must be kept
        Bytes got(sizes[tag], 0xee);
        self.recv(got.data(), got.size(), 0, tag);
        CHECK_EQ(got == data[static_cast<std::size_t>(tag)], true, "tag " + std::to_string(tag));
      }
    }
  });
}

CASE(equal_tags_keep_their_order) {
  run_ranks(2, [](Rank& self) {
    for (int step = 0; step < 100; ++step) {
      std::int32_t value = step;
      if (self.rank == 0) {
        self.send(&value, sizeof value, 1, 0);
      } else {
        value = -1;
        self.recv(&value, sizeof value, 0, 0);
        CHECK_EQ(value, step);
      }
    }
  });
}

CASE(a_receive_from_any_source_names_who_sent) {
  run_ranks(5, [](Rank& self) {
    if (self.rank != 0) {
      for (int i = 0; i < 3; ++i) self.send(&self.rank, sizeof self.rank, 0, 9);
      return;
    }
    std::multiset<int> seen, want;
    for (int i = 0; i < 12; ++i) {
      int who = -1;
      CHECK_EQ(self.recv(&who, sizeof who, -1, 9), who);
      seen.insert(who);
      want.insert(1 + i % 4);
    }
    CHECK(seen == want);
  });
}

CASE(a_receive_from_any_source_waits_for_those_who_have_not_left) {
  std::mutex mutex;
  std::condition_variable changed;
  bool left = false;
  run_ranks(3, [&](Rank& self) {
    if (self.rank == 2) {
      self.group->leave();
      std::lock_guard lock(mutex);
      left = true;
      changed.notify_all();
      return;
    }
    if (self.rank == 1) {
      std::unique_lock lock(mutex);
      CHECK(changed.wait_for(lock, std::chrono::seconds(60), [&] { return left; }));
      lock.unlock();
      self.send(&self.rank, sizeof self.rank, 0, 0);
      return;
    }
    int who = -1;
    CHECK_EQ(self.recv(&who, sizeof who, -1, 0), 1);
    // Both peers have left, so nobody can send.
    const Failure failure = failure_of([&] { self.recv(&who, sizeof who, -1, 0); });
    CHECK_EQ(static_cast<int>(failure.kind), static_cast<int>(FailureKind::kRankLeft));
  });
}

CASE(a_brief_wait_leaves_the_message_on_its_way) {
  run_ranks(2, [](Rank& self) {
    Bytes data = patterned(0, 0, kLarge), got(kLarge);
    if (self.rank == 1) {
      const auto request = self.post(Op::kRecv, got.data(), kLarge, 0, 0);
      CHECK(!self.group->p2p().wait_briefly(request, self.hooks, 0.02));
      self.collectives().barrier(self.context());
      CHECK(self.group->p2p().wait_briefly(request, self.hooks, 60));
      CHECK(got == data);
    } else {
      self.collectives().barrier(self.context());
      self.send(data.data(), kLarge, 1, 0);
    }
  });
}

CASE(large_messages_pass_each_other) {
  for (const int n : {2, 3})
    run_ranks(n, [](Rank& self) {
      const int next = (self.rank + 1) % self.size, before = (self.rank + self.size - 1) % self.size;
      for (int step = 0; step < 3; ++step) {
        Bytes out = patterned(self.rank, step, kLarge), in(kLarge);
        const auto send = self.post(Op::kSend, out.data(), kLarge, next, step);
        const auto recv = self.post(Op::kRecv, in.data(), kLarge, before, step);
        self.wait(send);
        self.wait(recv);
        CHECK(in == patterned(before, step, kLarge));
      }
    });
}

CASE(a_rank_can_send_to_itself) {
  for (const int n : {1, 2})
    run_ranks(n, [](Rank& self) {
      Bytes out = patterned(self.rank, 0, 300'000), in(300'000);
      const auto recv = self.post(Op::kRecv, in.data(), in.size(), self.rank, 1);
      const auto send = self.post(Op::kSend, out.data(), out.size(), self.rank, 1);
      self.wait(recv);
      self.wait(send);
      CHECK(in == out);
    });
}

CASE(messages_move_while_nobody_waits_for_them) {
  run_ranks(2, [](Rank& self) {
    Bytes data = patterned(0, 0, kLarge), got(kLarge);
    std::mutex mutex;
    std::condition_variable changed;
    bool arrived = false;
    const auto request = self.post(self.rank == 0 ? Op::kSend : Op::kRecv, self.rank == 0 ? data.data() : got.data(),
                                   kLarge, 1 - self.rank, 0);
    request->notify([&] {
      std::lock_guard lock(mutex);
      arrived = true;
      changed.notify_one();
    });
    std::unique_lock lock(mutex);
    CHECK(changed.wait_for(lock, std::chrono::seconds(60), [&] { return arrived; }));
    CHECK(!request->error());
    if (self.rank == 1) CHECK(got == data);
  });
}

CASE(threads_of_a_rank_wait_for_different_messages) {
  run_ranks(2, [](Rank& self) {
    in_threads(3, [&](int tag) {
      Hooks hooks;
      for (int step = 0; step < 30; ++step) {
        Bytes data = patterned(0, step * 3 + tag, 1000), got(1000);
        const bool sends = self.rank == tag % 2;
        const auto request = self.post(sends ? Op::kSend : Op::kRecv, sends ? data.data() : got.data(), 1000,
                                       1 - self.rank, tag);
        self.group->p2p().wait(request, hooks, 0);
        if (!sends) CHECK(got == data);
      }
    });
  });
}

CASE(messages_and_collectives_do_not_disturb_each_other) {
  run_ranks(3, [](Rank& self) {
    in_threads(2, [&](int thread) {
      for (int step = 0; step < 30; ++step) {
        if (thread == 0) {
          Hooks hooks;
          self.collectives().barrier(Context{&hooks});
          continue;
        }
        const int next = (self.rank + 1) % 3, before = (self.rank + 2) % 3;
        int value = -1;
        const auto send = self.post(Op::kSend, &self.rank, sizeof self.rank, next, step);
        self.recv(&value, sizeof value, before, step);
        self.wait(send);
        CHECK_EQ(value, before);
      }
    });
  });
}

CASE(a_message_of_another_size_is_a_mismatch) {
  for (const bool held : {false, true})  // whether the message comes before its receive is posted
    run_ranks(2, [held](Rank& self) {
      Bytes data(8);
      if (self.rank == 0) {
        self.send(data.data(), 8, 1, 1);
        if (held) self.send(data.data(), 8, 1, 2);
        return;
      }
      if (held) self.recv(data.data(), 8, 0, 2);
      const Failure failure = failure_of([&] { self.recv(data.data(), 5, 0, 1); });
      CHECK_EQ(static_cast<int>(failure.kind), static_cast<int>(FailureKind::kMessageDiffers));
      CHECK_EQ(failure.calls[0].call.count, 5u);
      CHECK_EQ(*failure.calls[1].size_bytes, 8u);
      CHECK_EQ(static_cast<int>(failure_of([&] { self.recv(data.data(), 5, 0, 1); }).kind),
               static_cast<int>(FailureKind::kUnusable));
    });
}

}  // namespace
}  // namespace phalanx::tests
