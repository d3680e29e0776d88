// Keeps large blocks of memory when they are freed, so that the next step reuses their pages.
//
// A training step frees its activations and gradients, and the next step allocates them again. glibc maps and unmaps
// every block of more than 32 MiB and shrinks its heap in between, so the kernel clears the same pages in every step;
// on a virtual machine a page fault is expensive. So ranks keep the blocks of 1 MiB and more that torch frees. `make
// bench-step` measures the gain.
//
// The pool is one range of addresses, in huge pages where the kernel has them. A block is taken from the free span that
// fits best, in units of 64 KiB; adjacent free spans are merged. However fragmented the pool is, resident memory never
// exceeds 9/8 of the most that tensors needed at once in this window of 10 s or the previous one: if a block needs new
// pages beyond that, free pages elsewhere are first given back to the kernel. So two windows after a large evaluation,
// the pool has given back the memory that only the evaluation needed. With a tighter bound, the pool would give pages
// back and fault them in again in every step of a model whose blocks differ greatly in size, like the large CNN of the
// bench.
//
// Why not glibc's settings: with GLIBC_TUNABLES that forbid mmap and trimming, steps are as fast, but the heap grows
// without a bound. The probable reason is that posix_memalign leaves a small remainder beside each block, and small
// objects move into that remainder. Once the block is freed, its hole is too small for the next aligned block of the
// same size. With THP_MEM_ALLOC_ENABLE alone, each step still faults in every huge page again.
//
// Why not another allocator: the table shows milliseconds per step on two shared cores. The other libraries were
// preloaded under plain python, and their runs alternated with those of `phalanx run`:
//     python -m bench.step --ranks 1 --only "MLP of 17 M,large CNN,small GPT" --allocators PATH,...
//
//                    jemalloc 5.3   mimalloc 2.0   tcmalloc 2.10   glibc   phalanx run
//     MLP of 17 M             212            207             169     207           132
//     large CNN               848            825             469     680           476
//     small GPT               322            222             185     225           176
//
// The peak memory with these libraries is 0.95 to 1.05 of ours. No library is clearly faster, so none is recommended.
// If a user preloads a library, Phalanx leaves it in place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>
#include <utility>

namespace phalanx {

/// Granularity and alignment of blocks. A block wastes half a unit on average, and small blocks share a huge page.
constexpr std::size_t kUnit = 64 << 10;

/// Allocates blocks in one range of addresses.
///
/// BOUND. Resident memory never exceeds 9/8 of the most that was in use at once in this window of time or the previous
/// one, even if the pool is fragmented. Not thread-safe: its owner locks.
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
  /// Number of bytes by which a block of this size would increase the resident memory.
  std::size_t growth(std::size_t bytes) const;
  /// Return a block that is aligned to `kUnit`, with undefined content; null if the range is full.
  void* take(std::size_t bytes);
  void put(void* block);
  /// Begin a new window of time, and give back the memory that exceeds the new bound.
  void next_window();
  /// Give back every free page.
  void trim() { give_back(kept()); }

  std::size_t resident() const { return resident_ * kUnit; }
  /// The number of resident bytes in free spans.
  std::size_t kept() const { return (resident_ - live_) * kUnit; }

 private:
  // From here on, all numbers count units.
  using Spans = std::map<std::size_t, std::size_t>;  // length by start
  void add_free(std::size_t start, std::size_t length);
  void remove_free(Spans::iterator span);
  std::size_t num_untouched(std::size_t start, std::size_t length) const;
  std::size_t num_excess() const;
  void give_back(std::size_t bytes);

  const std::size_t reach_;
  std::byte* base_;
  std::size_t live_ = 0, resident_ = 0;
  std::size_t top_ = 0;  // the units from this one on have never been touched
  std::size_t peak_ = 0, last_peak_ = 0;              // the maxima of live_ in this window and the previous one
  std::unique_ptr<std::uint8_t[], void (*)(void*)> touched_;  // whether each unit is resident
  Spans free_;
  std::set<std::pair<std::size_t, std::size_t>> by_length_;   // the same spans, ordered by (length, start)
  std::unordered_map<std::size_t, std::size_t> taken_;        // length by start
};

}  // namespace phalanx
