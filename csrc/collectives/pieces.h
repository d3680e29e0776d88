// A message whose elements lie in several places in memory, such as the gradients that average_coalesced averages.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace phalanx {

/// `count` elements in memory, of `item_bytes` bytes each.
struct Items {
  std::uint8_t dtype;
  std::size_t item_bytes;
  std::size_t count;
  std::size_t bytes() const { return item_bytes * count; }
};

struct Piece {
  const void* in;
  void* out;  // may equal `in`
  std::size_t count;
  bool squared = true;  // whether the piece counts in the sum of squares
};

/// The pieces of a message, in the order of its elements.
class Pieces {
 public:
  void assign(std::span<const Piece> pieces, std::size_t item_bytes) {
    pieces_ = pieces;
    item_bytes_ = item_bytes;
    ends_.clear();
    for (const Piece& piece : pieces) ends_.push_back(piece.count + (ends_.empty() ? 0 : ends_.back()));
  }

  /// Calls `visit(piece, offset, done, m)` for each piece that overlaps the elements [first, first + count) of the
  /// message. The overlap has `m` elements; it begins at byte `offset` of the piece and at element `done` of the range.
  template <class Visit>
  void visit(std::size_t first, std::size_t count, Visit&& visit) const {
    auto p = static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), first) - ends_.begin());
    for (std::size_t done = 0; done < count; ++p) {
      const Piece& piece = pieces_[p];
      const std::size_t begin = first + done - (ends_[p] - piece.count);
      const std::size_t here = std::min(piece.count - begin, count - done);
      if (here == 0) continue;
      visit(piece, begin * item_bytes_, done, here);
      done += here;
    }
  }

 private:
  std::span<const Piece> pieces_;
  std::size_t item_bytes_ = 1;
  std::vector<std::size_t> ends_;  // end of each piece, in elements of the message
};

}  // namespace phalanx
