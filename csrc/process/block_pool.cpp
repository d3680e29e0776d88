#include "process/block_pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <mutex>
#include <optional>
#include <utility>

#include "memory/text_file.h"
#include "process/blocks.h"
#include "process/interpose.h"

namespace phalanx {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::size_t kLeastBytes = 1 << 20;  // smaller blocks are left to glibc, which keeps freed blocks anyway
constexpr milliseconds kWindow{10'000};       // longer than most training steps
constexpr milliseconds kShortest{50}, kLongest{500};  // bounds of the pause between two checks
constexpr std::uint64_t kFastest = 20ull << 30;       // bytes per second: more than all ranks of a host can fill
constexpr std::uint64_t kInOneLook = 512 << 20;       // bytes that all ranks may fill between two checks
const char* const kThread = "rank-memory";

/// How much memory is left below a limit, in bytes.
struct Headroom {
  std::uint64_t limit = 0, left = 0;
  /// True if less than an eighth of the limit is left, or less than the pool keeps. At most kInOneLook of the `kept`
  /// bytes count.
  bool is_short(std::uint64_t kept) const { return left < std::max(limit / 8, std::min(kept, kInOneLook)); }
};

const char* const kHost = "/proc/meminfo";

// These two functions return no value if the kernel does not report the numbers.
std::optional<Headroom> headroom_of(const Limit& limit) {
  const auto used = number_in(read_text(limit.used));
  if (!used) return {};
  Headroom room{limit.bytes, limit.bytes - std::min(*used, limit.bytes)};
  if (room.left < limit.bytes / 4)  // near the limit: find out how much of the usage is cache
    room.left += std::min(number_in(read_text(limit.stat), limit.cache + " ").value_or(0), *used);
  return room;
}

std::optional<Headroom> headroom_of_host() {
  const std::string memory = read_text(kHost);
  const auto total = number_in(memory, "MemTotal:"), left = number_in(memory, "MemAvailable:");
  if (!total || !left) return {};
  return Headroom{*total << 10, *left << 10};
}

/// The block pool. A process has at most one, and never destroys it, because tensors live until the process ends.
class BlockPool {
 public:
  BlockPool(std::size_t reach, bool huge_pages, std::vector<Limit> limits)
      : blocks_(reach, huge_pages), limits_(std::move(limits)) {}

  bool has(const void* block) const noexcept { return blocks_.has(block); }

  void* take(std::size_t bytes) {
    std::lock_guard lock(mutex_);
    if (!keeps_) return nullptr;
    if (!has_thread_) start_thread();
    if (const std::size_t growth = blocks_.growth(bytes)) {
      if (growth >= budget_) look();  // check the limits before the pool could exceed one
      if (!keeps_) return nullptr;
      budget_ -= std::min(growth, budget_);
    }
    return blocks_.take(bytes);
  }

  void put(void* block) {
    std::lock_guard lock(mutex_);
    blocks_.put(block);
    if (!keeps_) blocks_.trim();
  }

  BlockPoolState state() {
    std::lock_guard lock(mutex_);
    return {keeps_, why_, blocks_.resident(), blocks_.kept()};
  }

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }
  /// Called in a forked child, which has none of its parent's threads.
  void begin_anew() {
    has_thread_ = false;
    unlock();
  }

 private:
  /// Checks the limits. If one is near, gives all kept memory back for good; otherwise sets how much the pool may grow
  /// before the next check.
  void look() {
    std::uint64_t least = kFastest;
    const auto check = [&](const std::optional<Headroom>& room, const std::string& file) {
      if (!keeps_) return;
      if (!room) return stop(file + " can't be read");
      least = std::min(least, room->left);
      if (room->is_short(blocks_.kept()))
        stop(std::to_string(room->left >> 20) + " MiB of " + std::to_string(room->limit >> 20) + " MiB were left");
    };
    check(headroom_of_host(), kHost);
    for (const Limit& limit : limits_) check(headroom_of(limit), limit.used);
    budget_ = least / 8;
    pause_ = std::clamp(milliseconds(least * 1000 / kFastest), kShortest, kLongest);
  }

  void stop(std::string why) {
    keeps_ = false;
    why_ = std::move(why);
    blocks_.trim();
  }

  void start_thread() {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    const auto run = [](void* self) -> void* {
      static_cast<BlockPool*>(self)->watch();
      return nullptr;
    };
    if (pthread_create(&thread, nullptr, run, this) == 0) {
      pthread_setname_np(thread, kThread);  // here, so that the thread has its name when this call returns
      pthread_detach(thread);
      has_thread_ = true;
    } else {
      keeps_ = false;  // without the thread nobody would give memory back
      why_ = "no thread can be started";
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    window_began_ = Clock::now();
  }

  /// Body of the thread: watches the limits even while this process is idle, because other ranks may need the memory.
  void watch() {
    std::unique_lock lock(mutex_);
    while (keeps_) {
      lock.unlock();
      const timespec pause{pause_.count() / 1000, pause_.count() % 1000 * 1'000'000};
      nanosleep(&pause, nullptr);
      lock.lock();
      look();
      if (Clock::now() - window_began_ < kWindow) continue;
      window_began_ = Clock::now();
      blocks_.next_window();
    }
    has_thread_ = false;
  }

  std::mutex mutex_;
  Blocks blocks_;
  std::vector<Limit> limits_;
  bool keeps_ = true;
  std::string why_;
  bool has_thread_ = false;
  std::size_t budget_ = 0;
  milliseconds pause_ = kShortest;
  Clock::time_point window_began_;
};

// Set once, before torch calls the functions below.
BlockPool* g_pool = nullptr;

int allocate(void** block, std::size_t alignment, std::size_t bytes) noexcept {
  if (bytes >= kLeastBytes && alignment <= kUnit) {
    if (void* taken = g_pool->take(bytes)) {
      *block = taken;
      return 0;
    }
  }
  return posix_memalign(block, alignment, bytes);
}

void release(void* block) noexcept {
  if (g_pool->has(block))
    g_pool->put(block);
  else
    std::free(block);
}

}  // namespace

bool start_block_pool(std::uint64_t reach, bool huge_pages, std::vector<Limit> limits) {
  if (g_pool) return true;
  g_pool = new BlockPool(reach, huge_pages, std::move(limits));
  // The library that allocates torch's CPU tensors also frees them.
  const std::array<Replacement, 2> replacements{
      {{"free", reinterpret_cast<void*>(&release)}, {"posix_memalign", reinterpret_cast<void*>(&allocate)}}};
  if (!interpose("libc10.so", replacements)) {
    delete std::exchange(g_pool, nullptr);
    return false;
  }
  pthread_atfork([] { g_pool->lock(); }, [] { g_pool->unlock(); }, [] { g_pool->begin_anew(); });
  return true;
}

BlockPoolState block_pool() { return g_pool ? g_pool->state() : BlockPoolState{}; }

}  // namespace phalanx
