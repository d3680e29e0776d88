// How data moves. Every collective begins by mustering: each rank publishes its call and waits for everyone's, which
// checks the calls against each other and tells that the previous collective is over everywhere. By size:
//   inline    up to 48 bytes: the data travels in the line that peers wait for;
//   one-shot  up to kStageBytes: data is staged before the muster and read right after it, one synchronisation in all;
//   chunked   above: chunks flow through small mailboxes that stay in the caches, several in flight.
// Stages and lines alternate by parity of the sequence number: a rank can be at most one collective ahead, so what it
// writes before the muster does not touch what slower peers still read. Mailboxes are written only after the muster.
#include "collectives.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <system_error>

namespace phalanx {
namespace {

Call make_call(Op op, const Items& items, int root = -1, std::uint8_t reduce_op = 0) {
  Call call;
  call.op = op;
  call.dtype = items.dtype;
  call.count = items.count;
  call.root = root;
  call.reduce_op = reduce_op;
  return call;
}

const std::byte* at(const void* base, std::size_t offset) { return static_cast<const std::byte*>(base) + offset; }
std::byte* at(void* base, std::size_t offset) { return static_cast<std::byte*>(base) + offset; }

Dtype dtype_of(const Items& items) { return static_cast<Dtype>(items.dtype); }

/// Where the block for `to` lies in the area of `from`, which holds none for itself.
std::size_t place(std::size_t from, std::size_t to) { return to < from ? to : to - 1; }

void copy_bytes(void* to, const void* from, std::size_t bytes) {
  if (bytes != 0 && to != from) std::memcpy(to, from, bytes);
}

/// How many of the bytes [lo, lo + len) a block of `bytes` has.
std::size_t clip(std::size_t bytes, std::size_t lo, std::size_t len) { return lo >= bytes ? 0 : std::min(len, bytes - lo); }

}  // namespace

Wait Collectives::begin(const Context& context, const Call& call) {
  return board_.begin(call, ++seq_, *context.hooks, context.timeout_s, board_.header().bell);
}

std::byte* Collectives::area(int r, std::size_t bytes) {
  return bytes <= kInlineBytes ? board_.line(r, seq_).payload : board_.stage(r, seq_);
}

std::byte* Collectives::own_area(std::size_t bytes) { return area(board_.rank(), bytes); }

void Collectives::muster(Wait& wait) {
  board_.publish_cpu();
  Line& mine = board_.line(board_.rank(), seq_);
  const std::uint32_t what = wait.call.what();
  const std::uint64_t detail = wait.call.detail();
  if (compares_calls) {
    mine.what = what;
    mine.detail = detail;
  }
  mine.seq.store(seq_, std::memory_order_release);  // publishes call, payload and stage; pairs with `missing` below
  auto missing = [&](int r) { return board_.line(r, seq_).seq.load(std::memory_order_acquire) != seq_; };
  if (has_sleepers(board_.header().bell)) {
    // Only the last to arrive wakes the sleepers, once. The fence in has_sleepers() lets at least one rank see all.
    int r = 0;
    while (r < board_.size() && !missing(r)) ++r;
    if (r == board_.size()) ring(board_.header().bell);
  }
  wait.arriving = true;
  board_.await(wait, missing);
  wait.arriving = false;
  for (int r = 0; compares_calls && r < board_.size(); ++r) {
    const Line& theirs = board_.line(r, seq_);  // in the cache already: its `seq` was just read
    if (theirs.what != what || theirs.detail != detail) board_.mismatch(wait);
  }
}

void Collectives::ensure_mailboxes(Wait& wait) {
  if (mailboxes_) return;
  const std::size_t bytes = static_cast<std::size_t>(board_.size()) * 2 * kSlots * kSlotBytes;
  auto& offset = board_.header().mailbox;
  auto no_memory = [&](const std::string& why) {
    Failure failure = board_.failure(FailureKind::kNoMemory, wait);
    failure.size_bytes = bytes;
    failure.detail = why;
    return board_.end(std::move(failure));
  };
  std::string why;
  if (board_.rank() == 0) {
    std::uint64_t made = kNoMemory;
    try {
      made = board_.segment().allocate(bytes);
    } catch (const std::bad_alloc&) {
    } catch (const std::system_error& error) {
      why = error.what();
    }
    offset.store(made, std::memory_order_release);  // pairs with the load below
    ring(board_.header().bell);
  }
  board_.await(wait, [&](int r) { return r == 0 && offset.load(std::memory_order_acquire) == 0; });
  const std::uint64_t made = offset.load(std::memory_order_acquire);
  if (made == kNoMemory) throw no_memory(why);
  try {
    mailboxes_ = board_.segment().map(made, bytes);
  } catch (const std::system_error& error) {
    throw no_memory(error.what());
  }
}

/// Where everybody waits for everybody, only the last to publish wakes the sleepers; else each publisher does.
void Collectives::publish(std::atomic<std::uint64_t> Progress::* counter, std::uint64_t value, bool all_wait_for_all) {
  (board_.progress(board_.rank()).*counter).store(value, std::memory_order_release);  // pairs with await_all()
  if (!has_sleepers(board_.header().bell)) return;
  for (int r = 0; all_wait_for_all && r < board_.size(); ++r)
    if ((board_.progress(r).*counter).load(std::memory_order_acquire) < value) return;
  ring(board_.header().bell);
}

void Collectives::await_all(Wait& wait, std::atomic<std::uint64_t> Progress::* counter, std::uint64_t value) {
  board_.await(wait, [&](int r) { return (board_.progress(r).*counter).load(std::memory_order_acquire) < value; });
}

/// The common course of all but all_reduce. A rank stages `num_blocks` blocks of `block_bytes` for its peers.
/// `stage(area, lo, len)` writes bytes [lo, lo + len) of every block, block j at area + j * len;
/// `consume(area_of, lo, len)` reads them where area_of(r) is the area of rank r.
template <class Stage, class Consume>
void Collectives::exchange(const Context& context, const Call& call, Flow flow, std::size_t num_blocks,
                           std::size_t block_bytes, std::size_t item_bytes, Stage&& stage, Consume&& consume) {
  Wait wait = begin(context, call);
  const std::size_t total = num_blocks * block_bytes;
  if (total > kStageBytes) {
    muster(wait);
    exchange_chunks(wait, flow, num_blocks, block_bytes, item_bytes, stage, consume);
    return;
  }
  stage(own_area(total), 0, block_bytes);
  muster(wait);
  consume([&](int r) { return area(r, total); }, 0, block_bytes);
}

template <class Stage, class Consume>
void Collectives::exchange_chunks(Wait& wait, Flow flow, std::size_t num_blocks, std::size_t block_bytes,
                                  std::size_t item_bytes, Stage&& stage, Consume&& consume) {
  ensure_mailboxes(wait);
  // chunk: a range of bytes of each block; slot: where a rank's part of a chunk lies. All slots form one ring.
  constexpr std::uint64_t kRing = 2 * kSlots;
  const std::size_t aligned = std::max<std::size_t>(item_bytes, kCacheLine);
  const std::size_t most = std::max(tuning.chunk_bytes / num_blocks / aligned, std::size_t{1}) * aligned;
  const std::uint64_t num_chunks = (block_bytes + most - 1) / most;
  const std::uint64_t base = chunks_;
  chunks_ += num_chunks;
  const bool on_root = board_.rank() == wait.call.root;
  auto length = [&](std::uint64_t c) { return std::min(most, block_bytes - c * most); };
  auto stage_one = [&](std::uint64_t c) {
    if (c >= kRing) await_all(wait, &Progress::consumed, base + c - kRing + 1);  // the slot's last readers are done
    stage(slot(board_.rank(), (base + c) % kRing), c * most, length(c));
    publish(&Progress::staged, base + c + 1, flow == Flow::kEverybody);
  };
  stage_one(0);
  for (std::uint64_t c = 0; c < num_chunks; ++c) {
    if (c + 1 < num_chunks) stage_one(c + 1);  // one ahead, so that peers find it when they are done with this one
    board_.await(wait, [&](int r) {
      const bool needed = flow == Flow::kEverybody || (flow == Flow::kFromRoot ? r == wait.call.root : on_root);
      return needed && board_.progress(r).staged.load(std::memory_order_acquire) < base + c + 1;
    });
    consume([&](int r) { return slot(r, (base + c) % kRing); }, c * most, length(c));
    publish(&Progress::consumed, base + c + 1, true);
  }
}

void Collectives::barrier(const Context& context, Op op) {
  Call call;
  call.op = op;
  Wait wait = begin(context, call);
  muster(wait);
  if (op == Op::kJoin) board_.watch_peers();
}

void Collectives::broadcast(const Context& context, void* data, Items items, int root) {
  exchange(
      context, make_call(Op::kBroadcast, items, root), Flow::kFromRoot, 1, items.bytes(), items.item_bytes,
      [&](std::byte* area, std::size_t lo, std::size_t len) {
        if (board_.rank() == root) copy_bytes(area, at(data, lo), len);
      },
      [&](auto area_of, std::size_t lo, std::size_t len) {
        if (board_.rank() != root) copy_bytes(at(data, lo), area_of(root), len);
      });
}

template <class Visit>
void Collectives::visit_pieces(Items items, std::size_t first, std::size_t count, Visit&& visit) const {
  auto p = static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), first) - ends_.begin());
  for (std::size_t done = 0; done < count; ++p) {
    const Piece& piece = pieces_[p];
    const std::size_t begin = first + done - (ends_[p] - piece.count);
    const std::size_t here = std::min(piece.count - begin, count - done);
    if (here == 0) continue;
    visit(piece, begin * items.item_bytes, done, here);
    done += here;
  }
}

double Collectives::all_reduce(const Context& context, std::span<const Piece> pieces, Items items,
                               Reduction reduction, SquaresFn squares) {
  Wait wait = begin(context, make_call(Op::kAllReduce, items, -1, reduction.code));
  sources_.resize(static_cast<std::size_t>(board_.size()));
  pieces_ = pieces;
  ends_.clear();
  for (const Piece& piece : pieces) ends_.push_back(piece.count + (ends_.empty() ? 0 : ends_.back()));
  const std::size_t bytes = items.bytes(), item = items.item_bytes;
  double sum = 0;
  auto stage = [&](std::byte* area, std::size_t lo, std::size_t len) {
    visit_pieces(items, lo / item, len / item, [&](const Piece& piece, std::size_t offset, std::size_t done, std::size_t m) {
      copy_bytes(area + done * item, at(piece.in, offset), m * item);
    });
  };
  auto consume = [&](auto area_of, std::size_t lo, std::size_t len) {
    visit_pieces(items, lo / item, len / item, [&](const Piece& piece, std::size_t offset, std::size_t done, std::size_t m) {
      for (int r = 0; r < board_.size(); ++r)
        sources_[r] = r == board_.rank() ? at(piece.in, offset) : area_of(r) + done * item;
      reduce_anywhere(reduction.apply, dtype_of(items), at(piece.out, offset), sources_.data(), board_.size(), m);
      if (squares != nullptr && piece.squared)
        sum += squares_anywhere(squares, dtype_of(items), at(piece.out, offset), m);
    });
  };
  if (bytes > kInlineBytes && bytes > std::min(tuning.one_shot_bytes, kStageBytes)) {
    muster(wait);
    if (board_.size() != 2) return all_reduce_chunks(wait, items, reduction.apply, squares);
    // Two ranks: each shows the other all of its message, and both reduce all of it. As many bytes cross between the
    // processors as when each reduces one half and fetches the other, and one wait a chunk is enough.
    exchange_chunks(wait, Flow::kEverybody, 1, bytes, item, stage, consume);
    return sum;
  }
  stage(own_area(bytes), 0, bytes);
  muster(wait);
  consume([&](int r) { return area(r, bytes); }, 0, bytes);
  return sum;
}

/// Reduce-scatter and all-gather, pipelined (Rabenseifner 2004). chunk: a range of the message; part: the share of a
/// chunk that one rank reduces; slot: where a rank's copy of a chunk (staging) or its reduced part (result) lies.
///
/// A rank works on three chunks at a time: it stages c + 1, reduces c, collects c - 1. Three slots of each kind are
/// enough without further waiting: before staging c + 1 it has collected c - 2, for which every rank had reduced
/// c - 2, the last reader of that staging slot; and before it reduces c it has seen every rank stage c, which a rank
/// does after it collected c - 3, the last reader of that result slot.
double Collectives::all_reduce_chunks(Wait& wait, Items items, ReduceFn reduce, SquaresFn squares) {
  ensure_mailboxes(wait);
  const auto n = static_cast<std::size_t>(board_.size());
  const auto me = static_cast<std::size_t>(board_.rank());
  const std::size_t item = items.item_bytes;
  // Four chunks at least, so that there is a pipeline; no part smaller than a page if that can be.
  const std::size_t chunk_bytes =
      std::min(tuning.chunk_bytes, std::max(align_up(items.bytes() / 4, kPage), kPage * n));
  const std::size_t per_line = std::max<std::size_t>(kCacheLine / item, 1);
  const std::size_t chunk_items = std::min(chunk_bytes, kSlotBytes) / item;
  const std::uint64_t num_chunks = (items.count + chunk_items - 1) / chunk_items;
  const std::uint64_t base = chunks_;
  chunks_ += num_chunks;

  struct Part { std::size_t first, count; };
  auto items_of = [&](std::uint64_t c) { return std::min(chunk_items, items.count - c * chunk_items); };
  auto part = [&](std::uint64_t c, std::size_t r) {
    const std::size_t m = items_of(c);
    const std::size_t share = align_up((m + n - 1) / n, per_line);
    const std::size_t first = std::min(m, r * share);
    return Part{first, std::min(share, m - first)};
  };
  auto staging = [&](std::size_t r, std::uint64_t c) { return slot(static_cast<int>(r), (base + c) % kSlots); };
  auto result = [&](std::size_t r, std::uint64_t c) { return slot(static_cast<int>(r), kSlots + (base + c) % kSlots); };
  auto copy_out = [&](std::byte* to, std::uint64_t c, std::size_t first, std::size_t count) {
    visit_pieces(items, c * chunk_items + first, count, [&](const Piece& piece, std::size_t offset, std::size_t done, std::size_t m) {
      copy_bytes(to + (first + done) * item, at(piece.in, offset), m * item);
    });
  };
  auto stage_one = [&](std::uint64_t c) {
    const Part own = part(c, me);
    copy_out(staging(me, c), c, 0, own.first);
    copy_out(staging(me, c), c, own.first + own.count, items_of(c) - own.first - own.count);
    publish(&Progress::staged, base + c + 1, true);
  };
  auto reduce_one = [&](std::uint64_t c) {
    const Part own = part(c, me);
    visit_pieces(items, c * chunk_items + own.first, own.count,
                 [&](const Piece& piece, std::size_t offset, std::size_t done, std::size_t m) {
                   const std::size_t in_slot = (own.first + done) * item;
                   for (std::size_t r = 0; r < n; ++r)
                     sources_[r] = r == me ? at(piece.in, offset) : staging(r, c) + in_slot;
                   reduce_anywhere(reduce, dtype_of(items), result(me, c) + in_slot, sources_.data(), board_.size(), m);
                 });
    publish(&Progress::consumed, base + c + 1, true);
  };
  double sum = 0;
  auto collect_one = [&](std::uint64_t c) {
    for (std::size_t i = 0; i < n; ++i) {
      const std::size_t r = (me + i) % n;  // start at different peers
      const Part theirs = part(c, r);
      visit_pieces(items, c * chunk_items + theirs.first, theirs.count,
                   [&](const Piece& piece, std::size_t offset, std::size_t done, std::size_t m) {
                     copy_bytes(at(piece.out, offset), result(r, c) + (theirs.first + done) * item, m * item);
                   });
    }
    if (squares == nullptr) return;
    visit_pieces(items, c * chunk_items, items_of(c),
                 [&](const Piece& piece, std::size_t offset, std::size_t, std::size_t m) {
                   if (piece.squared) sum += squares_anywhere(squares, dtype_of(items), at(piece.out, offset), m);
                 });
  };

  stage_one(0);
  for (std::uint64_t c = 0; c < num_chunks; ++c) {
    if (c + 1 < num_chunks) stage_one(c + 1);
    await_all(wait, &Progress::staged, base + c + 1);
    reduce_one(c);
    if (c == 0) continue;
    await_all(wait, &Progress::consumed, base + c);
    collect_one(c - 1);
  }
  await_all(wait, &Progress::consumed, base + num_chunks);
  collect_one(num_chunks - 1);
  return sum;
}

void Collectives::reduce(const Context& context, const void* in, void* out, Items items, Reduction reduction,
                         int root) {
  sources_.resize(static_cast<std::size_t>(board_.size()));
  exchange(
      context, make_call(Op::kReduce, items, root, reduction.code), Flow::kToRoot, 1, items.bytes(), items.item_bytes,
      [&](std::byte* area, std::size_t lo, std::size_t len) {
        if (board_.rank() != root) copy_bytes(area, at(in, lo), len);
      },
      [&](auto area_of, std::size_t lo, std::size_t len) {
        if (board_.rank() != root) return;
        for (int r = 0; r < board_.size(); ++r) sources_[r] = r == root ? at(in, lo) : area_of(r);
        reduce_anywhere(reduction.apply, dtype_of(items), at(out, lo), sources_.data(), board_.size(),
                        len / items.item_bytes);
      });
}

void Collectives::reduce_scatter(const Context& context, std::span<const void* const> ins, void* out, Items items,
                                 Reduction reduction) {
  const auto n = static_cast<std::size_t>(board_.size());
  const auto me = static_cast<std::size_t>(board_.rank());
  sources_.resize(n);
  exchange(
      context, make_call(Op::kReduceScatter, items, -1, reduction.code), Flow::kEverybody, n - 1, items.bytes(),
      items.item_bytes,
      [&](std::byte* area, std::size_t lo, std::size_t len) {
        for (std::size_t j = 0; j < n; ++j)
          if (j != me) copy_bytes(area + place(me, j) * len, at(ins[j], lo), len);
      },
      [&](auto area_of, std::size_t lo, std::size_t len) {
        for (std::size_t r = 0; r < n; ++r)
          sources_[r] = r == me ? at(ins[me], lo) : area_of(static_cast<int>(r)) + place(r, me) * len;
        reduce_anywhere(reduction.apply, dtype_of(items), at(out, lo), sources_.data(), board_.size(),
                        len / items.item_bytes);
      });
}

void Collectives::all_gather(const Context& context, const void* in, std::span<void* const> outs, Items items) {
  exchange(
      context, make_call(Op::kAllGather, items), Flow::kEverybody, 1, items.bytes(), items.item_bytes,
      [&](std::byte* area, std::size_t lo, std::size_t len) { copy_bytes(area, at(in, lo), len); },
      [&](auto area_of, std::size_t lo, std::size_t len) {
        for (int r = 0; r < board_.size(); ++r)
          copy_bytes(at(outs[r], lo), r == board_.rank() ? at(in, lo) : area_of(r), len);
      });
}

Wait Collectives::begin_split(const Context& context, Call call, std::span<const std::uint64_t> counts) {
  call.count = 0;  // compared one by one below, so that the error can say which differs
  call.flags = 1;
  Wait wait = begin(context, call);
  auto table = [&](int r) { return reinterpret_cast<std::uint64_t*>(board_.stage(r, seq_)); };
  static_assert(kMaxRanks * sizeof(std::uint64_t) <= kStageBytes);
  std::copy(counts.begin(), counts.end(), table(board_.rank()));
  muster(wait);
  for (int r = 1; r < board_.size(); ++r) {
    const auto [first, other] = std::mismatch(table(0), table(0) + counts.size(), table(r));
    if (first == table(0) + counts.size()) continue;
    const int of = board_.global(static_cast<int>(first - table(0)));
    board_.mismatch(wait, SizeDispute{board_.global(0), *first, board_.global(r), *other, of});
  }
  return wait;
}

void Collectives::reduce_scatter_split(const Context& context, std::span<const void* const> ins,
                                       std::span<const std::uint64_t> counts, void* out, Items items,
                                       Reduction reduction) {
  const auto n = static_cast<std::size_t>(board_.size());
  const auto me = static_cast<std::size_t>(board_.rank());
  const std::size_t item = items.item_bytes;
  Wait wait = begin_split(context, make_call(Op::kReduceScatter, items, -1, reduction.code), counts);
  sources_.resize(n);
  exchange_chunks(
      wait, Flow::kEverybody, n - 1, *std::max_element(counts.begin(), counts.end()) * item, item,
      [&](std::byte* area, std::size_t lo, std::size_t len) {
        for (std::size_t j = 0; j < n; ++j)
          if (j != me) copy_bytes(area + place(me, j) * len, at(ins[j], lo), clip(counts[j] * item, lo, len));
      },
      [&](auto area_of, std::size_t lo, std::size_t len) {
        const std::size_t own = clip(counts[me] * item, lo, len);
        if (own == 0) return;
        for (std::size_t r = 0; r < n; ++r)
          sources_[r] = r == me ? at(ins[me], lo) : area_of(static_cast<int>(r)) + place(r, me) * len;
        reduce_anywhere(reduction.apply, dtype_of(items), at(out, lo), sources_.data(), board_.size(), own / item);
      });
}

void Collectives::all_gather_split(const Context& context, const void* in, std::span<void* const> outs,
                                   std::span<const std::uint64_t> counts, Items items) {
  const auto me = static_cast<std::size_t>(board_.rank());
  const std::size_t item = items.item_bytes;
  Wait wait = begin_split(context, make_call(Op::kAllGather, items), counts);
  copy_bytes(outs[me], in, counts[me] * item);
  exchange_chunks(
      wait, Flow::kEverybody, 1, *std::max_element(counts.begin(), counts.end()) * item, item,
      [&](std::byte* area, std::size_t lo, std::size_t len) {
        copy_bytes(area, at(in, lo), clip(counts[me] * item, lo, len));
      },
      [&](auto area_of, std::size_t lo, std::size_t len) {
        for (std::size_t r = 0; r < counts.size(); ++r)
          if (r != me)
            copy_bytes(at(outs[r], lo), area_of(static_cast<int>(r)), clip(counts[r] * item, lo, len));
      });
}

void Collectives::gather(const Context& context, const void* in, std::span<void* const> outs, Items items, int root) {
  exchange(
      context, make_call(Op::kGather, items, root), Flow::kToRoot, 1, items.bytes(), items.item_bytes,
      [&](std::byte* area, std::size_t lo, std::size_t len) {
        if (board_.rank() != root) copy_bytes(area, at(in, lo), len);
      },
      [&](auto area_of, std::size_t lo, std::size_t len) {
        for (int r = 0; board_.rank() == root && r < board_.size(); ++r)
          copy_bytes(at(outs[r], lo), r == root ? at(in, lo) : area_of(r), len);
      });
}

void Collectives::scatter(const Context& context, std::span<const void* const> ins, void* out, Items items, int root) {
  const auto n = static_cast<std::size_t>(board_.size());
  exchange(
      context, make_call(Op::kScatter, items, root), Flow::kFromRoot, n - 1, items.bytes(), items.item_bytes,
      [&](std::byte* area, std::size_t lo, std::size_t len) {
        for (std::size_t j = 0; board_.rank() == root && j < n; ++j)
          if (static_cast<int>(j) != root)
            copy_bytes(area + place(static_cast<std::size_t>(root), j) * len, at(ins[j], lo), len);
      },
      [&](auto area_of, std::size_t lo, std::size_t len) {
        const auto me = static_cast<std::size_t>(board_.rank());
        const bool own = board_.rank() == root;
        copy_bytes(at(out, lo),
                   own ? at(ins[root], lo) : area_of(root) + place(static_cast<std::size_t>(root), me) * len, len);
      });
}

void Collectives::all_to_all(const Context& context, std::span<const void* const> ins, std::span<void* const> outs,
                             Items items) {
  const auto n = static_cast<std::size_t>(board_.size());
  const auto me = static_cast<std::size_t>(board_.rank());
  exchange(
      context, make_call(Op::kAllToAll, items), Flow::kEverybody, n - 1, items.bytes(), items.item_bytes,
      [&](std::byte* area, std::size_t lo, std::size_t len) {
        for (std::size_t j = 0; j < n; ++j)
          if (j != me) copy_bytes(area + place(me, j) * len, at(ins[j], lo), len);
      },
      [&](auto area_of, std::size_t lo, std::size_t len) {
        for (std::size_t r = 0; r < n; ++r)
          copy_bytes(at(outs[r], lo), r == me ? at(ins[me], lo) : area_of(static_cast<int>(r)) + place(r, me) * len, len);
      });
}

void Collectives::all_to_all_split(const Context& context, std::span<const void* const> ins,
                                   std::span<const std::uint64_t> in_counts, std::span<void* const> outs,
                                   std::span<const std::uint64_t> out_counts, Items items) {
  const auto n = static_cast<std::size_t>(board_.size());
  const auto me = static_cast<std::size_t>(board_.rank());
  Call call = make_call(Op::kAllToAll, items);
  call.count = 0;  // differs by rank; the tables below are compared instead
  call.flags = 1;
  Wait wait = begin(context, call);
  // Each rank stages what it sends to and expects from every peer, so that all ranks can check all pairs.
  auto* table = reinterpret_cast<std::uint64_t*>(board_.stage(static_cast<int>(me), seq_));
  static_assert(2 * kMaxRanks * sizeof(std::uint64_t) <= kStageBytes);
  std::copy(in_counts.begin(), in_counts.end(), table);
  std::copy(out_counts.begin(), out_counts.end(), table + n);
  muster(wait);
  std::uint64_t most = 0;
  for (std::size_t from = 0; from < n; ++from) {
    const auto* sent = reinterpret_cast<const std::uint64_t*>(board_.stage(static_cast<int>(from), seq_));
    for (std::size_t to = 0; to < n; ++to) {
      const auto* theirs = reinterpret_cast<const std::uint64_t*>(board_.stage(static_cast<int>(to), seq_));
      if (sent[to] != theirs[n + from])
        board_.mismatch(wait, SizeDispute{board_.global(static_cast<int>(from)), sent[to],
                                          board_.global(static_cast<int>(to)), theirs[n + from]});
      if (from != to) most = std::max(most, sent[to]);
    }
  }
  copy_bytes(outs[me], ins[me], in_counts[me] * items.item_bytes);
  if (most == 0) return;
  const std::size_t item = items.item_bytes;
  exchange_chunks(
      wait, Flow::kEverybody, n - 1, most * item, item,
      [&](std::byte* area, std::size_t lo, std::size_t len) {
        for (std::size_t j = 0; j < n; ++j)
          if (j != me) copy_bytes(area + place(me, j) * len, at(ins[j], lo), clip(in_counts[j] * item, lo, len));
      },
      [&](auto area_of, std::size_t lo, std::size_t len) {
        for (std::size_t r = 0; r < n; ++r)
          if (r != me)
            copy_bytes(at(outs[r], lo), area_of(static_cast<int>(r)) + place(r, me) * len,
                       clip(out_counts[r] * item, lo, len));
      });
}

}  // namespace phalanx
