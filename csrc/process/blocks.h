// Large blocks of memory that are kept when they are freed: the next step finds their pages there, and needs no new ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>
#include <utility>

namespace phalanx {

/// Granularity of the pool, and alignment of its blocks. A block loses half of it on average, and blocks share huge pages.
constexpr std::size_t kUnit = 64 << 10;

/// A pool of blocks in one range of addresses.
///
/// BOUND. What is resident never exceeds 9/8 of the most that was in use at once, in this window of time or the one
/// before, however the pool is fragmented: where a block needs new pages, free ones elsewhere are given back to the
/// kernel first. Not thread-safe: its owner locks.
class Blocks {
 public:
  /// Reserve `reach` bytes of addresses, none of which is resident yet.
  Blocks(std::size_t reach, bool huge_pages);
  ~Blocks();
  Blocks(const Blocks&) = delete;
  Blocks& operator=(const Blocks&) = delete;

  bool has(const void* block) const noexcept {
    return static_cast<std::size_t>(static_cast<const std::byte*>(block) - base_) < reach_;
  }
  /// How many bytes a block of this size would add to what is resident.
  std::size_t growth(std::size_t bytes) const;
  /// A block aligned to `kUnit`, its content undefined; null if the range is full.
  void* take(std::size_t bytes);
  void put(void* block);
  /// Begin another window of time, and give back what neither the last nor the one before has needed.
  void next_window();
  /// Give back every free page.
  void trim() { give_back(kept()); }

  std::size_t resident() const { return resident_ * kUnit; }
  /// Resident bytes that nobody uses.
  std::size_t kept() const { return (resident_ - live_) * kUnit; }

 private:
  // All in units, from here on.
  using Spans = std::map<std::size_t, std::size_t>;  // length by start
  void add_free(std::size_t start, std::size_t length);
  void remove_free(Spans::iterator span);
  std::size_t num_untouched(std::size_t start, std::size_t length) const;
  std::size_t num_excess() const;
  void give_back(std::size_t bytes);

  const std::size_t reach_;
  std::byte* base_;
  std::size_t live_ = 0, resident_ = 0;
  std::size_t top_ = 0;  // nothing from here on was ever touched
  std::size_t peak_ = 0, last_peak_ = 0;              // of live_, in this window and the one before
  std::unique_ptr<std::uint8_t[], void (*)(void*)> touched_;  // for each unit, whether it is resident
  Spans free_;
  std::set<std::pair<std::size_t, std::size_t>> by_length_;   // the same: length and start
  std::unordered_map<std::size_t, std::size_t> taken_;        // length by start
};

}  // namespace phalanx
