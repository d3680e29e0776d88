#include "memory/record.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <system_error>

#include "memory/peers.h"

namespace phalanx {
namespace {

std::uint64_t clock_ns(clockid_t clock) noexcept {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(time.tv_nsec);
}

struct Thread {
  TickClock::Instant asked;
  std::uint32_t number;  // the kernel's thread id; 0: not asked for yet
};
constinit thread_local Thread t_thread{};  // one struct, as each access to a thread_local of a shared library is a call

/// Makes forked children stop recording, because the parent continues to write into this box.
void forget_in_children() {
  static const int installed = pthread_atfork(nullptr, nullptr, [] {
    g_recorder.store(nullptr, std::memory_order_release);
    t_thread.number = 0;
  });
  static_cast<void>(installed);
}

}  // namespace

std::atomic<Recorder*> g_recorder{nullptr};

Recorder::Recorder(int fd, std::uint64_t offset, int rank, int world_size) {
  void* const memory = mmap(nullptr, kBoxBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, static_cast<off_t>(offset));
  if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "the black box can't be mapped");
  base_ = static_cast<std::byte*>(memory);
  std::memset(base_, 0, kBoxBytes);
  header_ = reinterpret_cast<BoxHeader*>(base_);
  events_ = reinterpret_cast<Event*>(base_ + kPage);
  texts_ = base_ + kPage + kEvents * sizeof(Event);
  header_->num_slots = kEvents;
  header_->text_bytes = kTextBytes;
  header_->pid = getpid();
  header_->rank = rank;
  header_->world_size = world_size;
  header_->start_time = Identity::own().start_time;
  header_->realtime_less_monotonic_ns = static_cast<std::int64_t>(clock_ns(CLOCK_REALTIME) - clock_ns(CLOCK_MONOTONIC));
  if (const char* const name = std::getenv("PHALANX_HOST"); name != nullptr && *name != '\0') {
    std::strncpy(header_->host, name, sizeof(header_->host) - 1);
  } else {
    gethostname(header_->host, sizeof(header_->host) - 1);
  }
  header_->version = kBoxVersion;
  std::atomic_thread_fence(std::memory_order_release);
  header_->magic = kBoxMagic;
  forget_in_children();
}

Recorder::~Recorder() { munmap(base_, kBoxBytes); }

std::uint32_t Recorder::text(std::string_view words, std::size_t spare) {
  if (words.empty()) return 0;
  std::lock_guard lock(mutex_);
  if (const auto known = numbers_.find(words); known != numbers_.end()) return known->second;
  const std::uint64_t used = header_->num_text_bytes.load(std::memory_order_relaxed);
  const auto size = static_cast<std::uint32_t>(words.size());
  if (used + sizeof(size) + size + spare > kTextBytes) return 0;
  std::memcpy(texts_ + used, &size, sizeof(size));
  std::memcpy(texts_ + used + sizeof(size), words.data(), size);
  header_->num_text_bytes.store(used + sizeof(size) + size, std::memory_order_release);
  const auto number = static_cast<std::uint32_t>(numbers_.size() + 1);
  numbers_.emplace(words, number);
  return number;
}

std::uint64_t Recorder::begin(EventKind kind, std::uint16_t code, std::uint32_t text, std::uint32_t site,
                              std::uint64_t seq, std::uint64_t value) noexcept {
  const std::uint64_t number = header_->num_events.fetch_add(1, std::memory_order_relaxed) + 1;
  Event& event = events_[(number - 1) % kEvents];
  // ACQUIRE pairs with the RELEASE store below, by the slot's last writer. Two threads meet in a slot only if one was
  // suspended while the others wrote kEvents events. A thread that finds a newer event in its slot, or finds that the
  // slot is being written, drops its own event.
  std::uint64_t before = event.number.load(std::memory_order_relaxed);
  if (before > number || !event.number.compare_exchange_strong(before, kBeingWritten, std::memory_order_acquire)) return 0;
  std::atomic_thread_fence(std::memory_order_release);  // a reader that sees a store below also sees kBeingWritten
  Thread& self = t_thread;
  if (self.number == 0) self.number = static_cast<std::uint32_t>(syscall(SYS_gettid));
  event.begun_ns.store(clock_.now_ns(self.asked), std::memory_order_relaxed);
  event.ended_ns.store(0, std::memory_order_relaxed);
  event.what.store(static_cast<std::uint64_t>(kind) | std::uint64_t{code} << 16 | std::uint64_t{text} << 32,
                   std::memory_order_relaxed);
  event.where.store(site | std::uint64_t{self.number} << 32, std::memory_order_relaxed);
  event.seq.store(seq, std::memory_order_relaxed);
  event.value.store(value, std::memory_order_relaxed);
  event.number.store(number, std::memory_order_release);
  return number;
}

void Recorder::end(std::uint64_t number) noexcept {
  if (number == 0) return;
  Event& event = events_[(number - 1) % kEvents];
  const std::uint64_t now = clock_.now_ns(t_thread.asked);
  // ACQUIRE, so that `event.number` is loaded after `begun_ns`. Between that load and the store of `ended_ns`, another
  // event may take the slot. Readers then ignore its `ended_ns`, which is not later than the event's beginning.
  const std::uint64_t begun = event.begun_ns.load(std::memory_order_acquire);
  const std::uint64_t ended = now > begun ? now : begun + 1;
  if (event.number.load(std::memory_order_relaxed) == number) event.ended_ns.store(ended, std::memory_order_release);
}

}  // namespace phalanx
