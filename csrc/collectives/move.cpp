// Collectives that only move data (broadcast, all_gather, gather, scatter, all_to_all). Each collective is described by
// what a rank gives to each rank and what it takes from each rank. Small blocks go through the stages.
//
// Blocks of 32 KiB and more are read straight from the memory of the rank that gives them, so they are copied once
// instead of twice. Before the ranks meet, each rank publishes the addresses of its blocks; its peers copy the blocks
// from those addresses with process_vm_readv. No rank returns before all ranks have read. If one rank could not read
// (another pid namespace, a seccomp filter, Yama's ptrace_scope, memory of a device, a call in place), all ranks learn
// of it at that point, and the blocks go in chunks instead. An interrupted rank leaves the collective early, and may
// change a block while a peer still reads it. But the interrupted rank publishes the group's failure first, so each
// rank checks for a failure after it has read.
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>

#include "collectives/collectives.h"
#include "collectives/exchange.h"

namespace phalanx {
namespace {

/// Whether a rank could read its peers' memory. Each rank publishes this in the payload of its line. kFaulted: these
/// blocks could not be read; kDenied: the system refuses all reads, so the group does not try again.
enum class Reading : std::uint8_t { kDone, kFaulted, kDenied };

/// Fills `to` from the memory of another process. Returns 0 or an errno. Source: process_vm_readv(2), Linux 3.2.
int read_memory(pid_t pid, std::uint64_t from, std::span<std::byte> to) {
  constexpr std::size_t kMost = std::size_t{1} << 30;
  while (!to.empty()) {
    const iovec local{to.data(), std::min(to.size(), kMost)};
    const iovec remote{reinterpret_cast<void*>(from), local.iov_len};
    const ssize_t got = process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return got < 0 ? errno : EFAULT;
    from += static_cast<std::uint64_t>(got);
    to = to.subspan(static_cast<std::size_t>(got));
  }
  return 0;
}

}  // namespace

void Collectives::clear_moves() {
  gives_.assign(static_cast<std::size_t>(control_.size()), {});
  takes_.assign(static_cast<std::size_t>(control_.size()), {});
}

void Collectives::move(const Context& context, const Call& call, Flow flow, Blocks blocks) {
  Wait wait = begin(context, call);
  const std::size_t total = blocks.total();
  if (total > kStageBytes || is_direct(blocks)) {
    offer();
    arrive(wait);
    return move_large(wait, flow, blocks);
  }
  stage_gives(area(control_.rank(), total), blocks.num, 0, blocks.bytes);
  arrive(wait);
  collect_takes([&](int r) { return area(r, total); }, blocks.num, 0, blocks.bytes);
  take_own();
}

/// Moves the blocks whose addresses every rank has published in offer() before its arrival.
void Collectives::move_large(Wait& wait, Flow flow, Blocks blocks) {
  if (is_direct(blocks) && read_peers(wait)) return;
  exchange_chunks(
      wait, flow, blocks,
      [&](std::byte* area, std::size_t lo, std::size_t len) { stage_gives(area, blocks.num, lo, len); },
      [&](auto area_of, std::size_t lo, std::size_t len) { collect_takes(area_of, blocks.num, lo, len); });
  take_own();
}

bool Collectives::is_direct(Blocks blocks) const {
  return reads_peers_ && control_.size() > 1 && blocks.bytes >= tuning.direct_bytes;
}

/// Writes the address of the block for each peer into this rank's stage, after the counts (up to two for each rank). A
/// rank that works in place makes no offer: it could overwrite a block before the peer has read it.
void Collectives::offer() {
  static_assert(3 * kMaxRanks * sizeof(std::uint64_t) <= kStageBytes);
  const int n = control_.size(), me = control_.rank();
  has_offered_ = true;
  for (int j = 0; j < n; ++j) {
    table(me)[2 * n + j] = reinterpret_cast<std::uintptr_t>(gives_[j].data());
    if (j != me && !gives_[j].empty() && gives_[j].data() == takes_[j].data()) has_offered_ = false;
  }
}

/// Copies each block straight from the memory of the rank that gives it. If one rank could not do so, returns false on
/// all ranks; the blocks that the ranks give are then still unchanged.
bool Collectives::read_peers(Wait& wait) {
  const int n = control_.size(), me = control_.rank();
  Reading own = has_offered_ ? Reading::kDone : Reading::kFaulted;
  for (int i = 1; i < n && own == Reading::kDone; ++i) {
    const int error = read_peer(wait, (me + i) % n);  // each rank starts with a different peer
    if (error != 0) own = error == EFAULT ? Reading::kFaulted : Reading::kDenied;
  }
  control_.line(me, seq_).payload[0] = static_cast<std::byte>(own);
  publish(&Progress::consumed, ++chunks_, true);  // publishes the payload
  take_own();
  await_all(wait, &Progress::consumed, chunks_);
  control_.require_in_order(wait);  // a peer that left meanwhile may have changed its block before this rank read it
  bool are_done = true;
  for (int r = 0; r < n; ++r) {
    const auto theirs = static_cast<Reading>(control_.line(r, seq_).payload[0]);
    are_done = are_done && theirs == Reading::kDone;
    reads_peers_ = reads_peers_ && theirs != Reading::kDenied;
  }
  return are_done;
}

/// Copies the block that rank `r` gives. Returns 0 or an errno.
int Collectives::read_peer(Wait& wait, int r) {
  const std::span<std::byte> to = takes_[r];
  if (to.empty()) return 0;
  const int error = read_memory(control_.member(r).pid, table(r)[2 * control_.size() + control_.rank()], to);
  if (error == ESRCH) control_.await(wait, [&](int peer) { return peer == r; });  // the peer is dead: this wait throws
  return error;
}

void Collectives::stage_gives(std::byte* area, std::size_t num_blocks, std::size_t lo, std::size_t len) const {
  const int me = control_.rank();
  for (int j = 0; j < control_.size(); ++j) {
    const std::span<const std::byte> block = gives_[j];
    const std::size_t bytes = j == me ? 0 : clip(block.size(), lo, len);
    if (bytes == 0) continue;
    if (num_blocks == 1) return copy_bytes(area, block.data() + lo, bytes);  // all peers read this one block
    copy_bytes(area + index_of(me, j) * len, block.data() + lo, bytes);
  }
}

template <class AreaOf>
void Collectives::collect_takes(AreaOf&& area_of, std::size_t num_blocks, std::size_t lo, std::size_t len) const {
  const int me = control_.rank();
  for (int r = 0; r < control_.size(); ++r) {
    const std::span<std::byte> block = takes_[r];
    const std::size_t bytes = r == me ? 0 : clip(block.size(), lo, len);
    if (bytes != 0) copy_bytes(block.data() + lo, area_of(r) + (num_blocks == 1 ? 0 : index_of(r, me) * len), bytes);
  }
}

/// Copies the block that this rank gives to itself.
void Collectives::take_own() const {
  const int me = control_.rank();
  copy_bytes(takes_[me].data(), gives_[me].data(), takes_[me].size());
}

}  // namespace phalanx
