#include "process/blocks.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <system_error>

namespace phalanx {
namespace {

constexpr std::size_t kHugePage = 2 << 20;

std::size_t units(std::size_t bytes) { return (bytes + kUnit - 1) / kUnit; }

}  // namespace

Blocks::Blocks(std::size_t reach, bool huge_pages)
    : reach_(reach / kHugePage * kHugePage), touched_(nullptr, std::free) {
  void* range = mmap(nullptr, reach_ + kHugePage, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
  const auto address = reinterpret_cast<std::uintptr_t>(range);
  const std::uintptr_t aligned = (address + kHugePage - 1) / kHugePage * kHugePage;
  munmap(range, aligned - address);
  munmap(reinterpret_cast<void*>(aligned + reach_), address + kHugePage - aligned);
  base_ = reinterpret_cast<std::byte*>(aligned);
  if (huge_pages) madvise(base_, reach_, MADV_HUGEPAGE);
  touched_.reset(static_cast<std::uint8_t*>(std::calloc(reach_ / kUnit, 1)));
  if (!touched_) throw std::bad_alloc();
  add_free(0, reach_ / kUnit);
}

Blocks::~Blocks() { munmap(base_, reach_); }

std::size_t Blocks::growth(std::size_t bytes) const {
  const auto found = by_length_.lower_bound({units(bytes), 0});
  return found == by_length_.end() ? 0 : num_untouched(found->second, units(bytes)) * kUnit;
}

void* Blocks::take(std::size_t bytes) {
  const std::size_t wanted = units(bytes);
  const auto found = by_length_.lower_bound({wanted, 0});  // the best fit; of several, the first
  if (found == by_length_.end()) return nullptr;
  const auto [length, start] = *found;
  remove_free(free_.find(start));
  if (length > wanted) add_free(start + wanted, length - wanted);
  taken_.emplace(start, wanted);
  resident_ += num_untouched(start, wanted);
  std::memset(&touched_[start], 1, wanted);
  top_ = std::max(top_, start + wanted);
  live_ += wanted;
  peak_ = std::max(peak_, live_);
  give_back(num_excess() * kUnit);
  return base_ + start * kUnit;
}

void Blocks::put(void* block) {
  const auto found = taken_.find(static_cast<std::size_t>(static_cast<std::byte*>(block) - base_) / kUnit);
  if (found == taken_.end()) std::abort();  // freed twice; glibc's malloc aborts, too
  std::size_t start = found->first, length = found->second;
  taken_.erase(found);
  live_ -= length;
  auto next = free_.lower_bound(start);
  if (next != free_.end() && next->first == start + length) {
    length += next->second;
    remove_free(next);
  }
  next = free_.lower_bound(start);
  if (next != free_.begin()) {
    const auto last = std::prev(next);
    if (last->first + last->second == start) {
      start = last->first;
      length += last->second;
      remove_free(last);
    }
  }
  add_free(start, length);
}

void Blocks::next_window() {
  last_peak_ = std::exchange(peak_, live_);
  give_back(num_excess() * kUnit);
}

void Blocks::add_free(std::size_t start, std::size_t length) {
  free_.emplace(start, length);
  by_length_.emplace(length, start);
}

void Blocks::remove_free(Spans::iterator span) {
  by_length_.erase({span->second, span->first});
  free_.erase(span);
}

std::size_t Blocks::num_untouched(std::size_t start, std::size_t length) const {
  return static_cast<std::size_t>(std::count(&touched_[start], &touched_[start] + length, 0));
}

/// Number of units by which the resident memory exceeds its bound.
std::size_t Blocks::num_excess() const {
  const std::size_t peak = std::max(peak_, last_peak_), most = peak + peak / 8;
  return resident_ > most ? resident_ - most : 0;
}

/// Gives back at least `bytes` of free pages, or all of them if there are fewer. Begins with the longest spans.
void Blocks::give_back(std::size_t bytes) {
  std::size_t missing = (bytes + kUnit - 1) / kUnit;
  for (auto span = by_length_.rbegin(); missing && span != by_length_.rend(); ++span) {
    const auto [length, start] = *span;
    // One huge page at a time, from the end of the span, because blocks are taken from its front.
    for (std::size_t end = std::min(start + length, top_); missing && end > start;) {
      const std::size_t num = std::min(end - start, (end - 1) % (kHugePage / kUnit) + 1);
      end -= num;
      const std::size_t found = num - num_untouched(end, num);
      if (!found) continue;
      madvise(base_ + end * kUnit, num * kUnit, MADV_DONTNEED);
      std::memset(&touched_[end], 0, num);
      resident_ -= found;
      missing -= std::min(missing, found);
    }
  }
}

}  // namespace phalanx
