// The black box: events that threads write at the same time are never torn, and the clock agrees with the kernel's.
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <thread>
#include <vector>

#include "harness.h"
#include "memory/record.h"

namespace phalanx::tests {
namespace {

/// Memory for one box. The test reads it as another process would.
class Memory {
 public:
  Memory() : fd_(memfd_create("box", MFD_CLOEXEC)) { CHECK_EQ(ftruncate(fd_, static_cast<off_t>(kBoxBytes)), 0); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { close(fd_); }
  int fd() const { return fd_; }

  struct Seen {
    std::uint64_t number, begun_ns, ended_ns;
    std::uint16_t kind, code;
    std::uint32_t text, site, thread;
    std::uint64_t seq, value, unused;
  };
  static_assert(sizeof(Seen) == sizeof(Event));

  /// The events on which two reads in a row agree.
  std::map<std::uint64_t, Seen> events() const {
    const std::vector<Seen> first = look(), second = look();
    std::map<std::uint64_t, Seen> found;
    for (std::size_t i = 0; i < first.size(); ++i) {
      Seen before = first[i];
      before.ended_ns = second[i].ended_ns;
      const bool is_published = before.number != 0 && before.number != kBeingWritten;
      if (is_published && std::memcmp(&before, &second[i], sizeof(Seen)) == 0) found.emplace(before.number, before);
    }
    return found;
  }

 private:
  std::vector<Seen> look() const {
    std::vector<Seen> events(kEvents);
    CHECK_EQ(pread(fd_, events.data(), kEvents * sizeof(Event), kPage), static_cast<ssize_t>(kEvents * sizeof(Event)));
    return events;
  }
  int fd_;
};

std::uint64_t kernels_ns() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(time.tv_nsec);
}

/// Checks that the event is not a mixture of two: all its fields must follow from its `seq`.
void check_whole(const Memory::Seen& event, std::uint64_t began_ns) {
  CHECK_EQ(event.value, event.seq * 0x9e37'79b9'7f4a'7c15);
  CHECK_EQ(event.code, static_cast<std::uint16_t>(event.seq));
  CHECK_EQ(event.text, static_cast<std::uint32_t>(event.seq * 3));
  CHECK_EQ(event.site, static_cast<std::uint32_t>(event.seq * 7));
  CHECK_EQ(event.kind, static_cast<std::uint16_t>(EventKind::kNote));
  CHECK(event.thread != 0);
  CHECK(event.begun_ns + 1'000'000 > began_ns && event.begun_ns < kernels_ns() + 1'000'000);
}

void write(Recorder& recorder, std::uint64_t seq) {
  recorder.end(recorder.begin(EventKind::kNote, static_cast<std::uint16_t>(seq), static_cast<std::uint32_t>(seq * 3),
                              static_cast<std::uint32_t>(seq * 7), seq, seq * 0x9e37'79b9'7f4a'7c15));
}

}  // namespace

CASE(threads_write_events_that_are_never_torn) {
  constexpr int kThreads = 4;
  constexpr std::uint64_t kEach = 100'000;
  const std::uint64_t began_ns = kernels_ns();
  Memory memory;
  Recorder recorder(memory.fd(), 0, 0, 1);
  std::atomic<int> num_left{kThreads};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      for (std::uint64_t i = 0; i < kEach; ++i) write(recorder, static_cast<std::uint64_t>(t) * kEach + i);
      num_left.fetch_sub(1);
    });
  std::string torn;
  std::size_t num_seen = 0;
  do {
    try {
      for (const auto& [number, event] : memory.events()) check_whole(event, began_ns), ++num_seen;
    } catch (const CheckFailed& failure) {
      torn = failure.what();
    }
  } while (num_left.load() > 0 || num_seen <= kEvents);  // on a busy machine the writers may end before the first read
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(torn, std::string());

  const auto left = memory.events();  // the writers have ended: only events that a late thread dropped may be missing
  CHECK(left.size() + 100 > kEvents);
  for (const auto& [number, event] : left) {
    check_whole(event, began_ns);
    CHECK(number <= kThreads * kEach);
    CHECK(event.ended_ns > event.begun_ns);
  }
}

CASE(an_end_that_comes_a_round_late_ends_nothing) {
  Memory memory;
  Recorder recorder(memory.fd(), 0, 0, 1);
  const std::uint64_t early = recorder.begin(EventKind::kNote, 0, 0, 0, 1, 0);
  std::uint64_t last = 0;
  for (std::size_t i = 0; i < kEvents; ++i) last = recorder.begin(EventKind::kNote, 0, 0, 0, 2 + i, 0);
  recorder.end(early);
  const auto events = memory.events();
  CHECK_EQ(events.size(), kEvents);
  CHECK_EQ(events.at(last).ended_ns, 0u);
  CHECK_EQ(events.at(last).seq, 1 + kEvents);
}

CASE(a_slot_that_another_thread_writes_is_left_to_it) {
  Memory memory;
  Recorder recorder(memory.fd(), 0, 0, 1);
  const std::uint64_t marked = kBeingWritten, newer = 1 + kEvents;
  CHECK_EQ(pwrite(memory.fd(), &marked, sizeof(marked), kPage), static_cast<ssize_t>(sizeof(marked)));
  CHECK_EQ(pwrite(memory.fd(), &newer, sizeof(newer), kPage + sizeof(Event)), static_cast<ssize_t>(sizeof(newer)));
  for (int i = 0; i < 2; ++i) CHECK_EQ(recorder.begin(EventKind::kNote, 0, 0, 0, 1, 0), 0u);
  CHECK_EQ(recorder.begin(EventKind::kNote, 0, 0, 0, 3, 0), 3u);
}

CASE(the_clock_is_the_kernels_to_some_microseconds) {
  TickClock clock;
  TickClock::Instant asked{};
  const std::uint64_t began_ns = kernels_ns();
  int num_apart = 0, num_looks = 0;
  while (kernels_ns() < began_ns + 200'000'000) {
    const std::uint64_t before = kernels_ns(), now = clock.now_ns(asked), after = kernels_ns();
    ++num_looks;
    if (now + 20'000 < before || now > after + 20'000) ++num_apart;
  }
  CHECK(num_looks > 100);
  // If a thread is interrupted between the two readings in TickClock, its time is wrong until it next asks the kernel, a
  // millisecond later.
  CHECK(num_apart * 50 <= num_looks);
}

}  // namespace phalanx::tests
