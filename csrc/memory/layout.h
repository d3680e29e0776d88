// The shared segment: what lies where, who writes it, and in which order writes become visible.
//
// LAYOUT (all offsets from the start of the segment)
//   0                   SegmentHeader, one page
//   per group           GroupHeader | Member[n] | Line[n][2] | Progress[n] | Bell[n] | channel offsets[n][n] | stage[n][2]
//   per group, lazily   mailbox[n]: kSlots staging and kSlots result slots per rank, once a message exceeds a stage
//   per pair, lazily    Channel: rings from one rank to another, once the first message is sent
//
// MEMORY ORDERING
//   A rank writes only its own Member, Lines, Progress, stage and mailbox; peers only read them. Data is published by a
//   RELEASE store of a sequence number (Line::seq, Progress::staged/consumed, Record::number, Channel::num_taken). A
//   reader reads the data only after its ACQUIRE load has returned that number. Sequentially consistent fences order
//   sleepers and ringers (see wait.h). Nothing else orders accesses. In particular, processes share no lock, because a
//   rank could be killed while it holds the lock. The models in model/ check this protocol: see model/README.md for
//   what each one mirrors.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace phalanx {

inline constexpr std::uint64_t kMagic = 0x3158'4e41'4c41'4850;  // "PHALANX1"
inline constexpr std::uint32_t kLayoutVersion = 3;
inline constexpr std::size_t kPage = 4096;
inline constexpr std::size_t kCacheLine = 64;
inline constexpr std::size_t kInlineBytes = 48;
inline constexpr std::size_t kMaxRanks = 1024;

/// Bytes of one stage. A message that fits into a stage needs only one synchronization.
inline constexpr std::size_t kStageBytes = 64 * 1024;
/// Slots of a mailbox: see all_reduce.cpp for why three are enough.
inline constexpr std::size_t kSlots = 3;
inline constexpr std::size_t kSlotBytes = 64 * 1024;
/// Bytes of the ring between one sender and one receiver.
inline constexpr std::size_t kChannelBytes = 256 * 1024;

static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "shared between processes");
static_assert(std::atomic<std::uint32_t>::is_always_lock_free, "shared between processes");

constexpr std::size_t align_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

/// A short text that peers may read while its owner rewrites it: a reader notices a change and reads again.
struct SharedText {
  static constexpr std::size_t kWords = 30;
  void write(const std::string& value);  // one thread at a time; a text that is too long is cut off
  std::string read() const;

  std::atomic<std::uint64_t> version;  // odd while being written
  std::atomic<std::uint64_t> words[kWords];
};

/// The message that a rank waits for: the peer's rank in the group, and the direction. The packed value 0 stands for no
/// message.
struct Awaited {
  int peer = -1;
  bool is_send = false;

  std::uint32_t pack() const { return static_cast<std::uint32_t>(peer + 1) << 1 | static_cast<std::uint32_t>(is_send); }
  static Awaited unpack(std::uint32_t packed) { return {static_cast<int>(packed >> 1) - 1, (packed & 1) != 0}; }
};

/// kDeparted: left normally; kFell: left because of an error, which `Member::why` holds.
enum class MemberState : std::uint32_t { kAbsent = 0, kJoined, kDeparted, kFell };

/// A rank's identity and state. The identity is written once, before the RELEASE store of `state`.
struct alignas(kCacheLine) Member {
  std::atomic<MemberState> state;
  std::int32_t pid;
  std::uint64_t start_time;     // start of the process in clock ticks since boot; reveals that a pid was reused
  std::uint64_t pid_namespace;  // inode; peers in another namespace cannot watch this pid
  std::uint32_t usable_cpus;    // CPUs that the cgroup's quota allows, at least 1
  std::uint64_t cpu_mask[kMaxRanks / 64];
  std::atomic<std::uint32_t> site_seq;  // sequence number of the collective for which `site` was last written
  std::atomic<std::uint32_t> awaits;    // a packed Awaited, set while this rank waits for its only message in flight
  SharedText site;                      // "all_reduce #42 of group 'world' at train.py:31"
  SharedText why;                       // why the rank left; kept apart from `site`, which peers may be reading
};

/// Arrival of one rank at one collective: what it called, and up to 48 bytes of data. A rank alternates between two
/// lines by the parity of the sequence number, so a rank that is one collective ahead does not overwrite a line that
/// peers still read.
struct alignas(kCacheLine) Line {
  std::atomic<std::uint32_t> seq;  // stored last, with RELEASE, by the owner; loaded first, with ACQUIRE, by peers
  std::uint32_t what;              // operation, dtype, reduce op, flags
  std::uint64_t detail;            // root, count
  std::byte payload[kInlineBytes];
};
static_assert(sizeof(Line) == kCacheLine);

/// A rank's progress in chunked collectives, as counters that grow over the life of the group, and the CPU that the
/// rank runs on.
struct Progress {
  alignas(kCacheLine) std::atomic<std::uint64_t> staged;    // chunks published in the mailbox
  alignas(kCacheLine) std::atomic<std::uint64_t> consumed;  // chunks read from every peer (in all_reduce: reduced)
  alignas(kCacheLine) std::atomic<std::uint32_t> cpu;       // CPU last seen on + 1, 0: unknown; no peer spins there
};

/// A futex word that waiting threads sleep on, and the number of threads that sleep or are about to.
struct alignas(kCacheLine) Bell {
  std::atomic<std::uint32_t> rings;
  std::atomic<std::uint32_t> sleepers;
};

struct GroupHeader {
  std::uint64_t magic;
  std::uint32_t num_ranks;
  std::uint32_t node;  // NUMA node on which the region was allocated
  std::uint64_t region_bytes;
  alignas(kCacheLine) std::atomic<std::uint64_t> mailbox;  // offset; 0: not made yet
  std::atomic<std::uint32_t> attached;  // ranks that map the region; the last one to leave frees it
  alignas(kCacheLine) std::atomic<std::uint64_t> group_failure;  // 0, or a packed GroupFailure: see failure.h
  alignas(kCacheLine) Bell bell;  // all ranks sleep here in collectives
};

/// Describes one fragment of a message, in a record of a Channel.
struct Fragment {
  std::uint64_t message_bytes;
  std::int64_t tag;
  std::uint32_t fragment_bytes;
  std::uint16_t dtype;
  std::uint16_t is_first;  // 1 for the first fragment of a message
};

/// Announces a fragment, and holds its data if the data fits, so that one cache line carries a small message.
struct alignas(kCacheLine) Record {
  static constexpr std::size_t kInline = 32;
  std::atomic<std::uint64_t> number;  // counts from 1; stored last, with RELEASE, by the sender; loaded first, with ACQUIRE
  Fragment fragment;
  std::byte data[kInline];
};
static_assert(sizeof(Record) == kCacheLine);

/// Two rings from one rank to another: records, and the bytes of fragments too large for a record. Record numbers and
/// byte positions only grow. The sender keeps its own positions in private memory, and reads the receiver's positions
/// (below) only when a ring seems full.
struct Channel {
  static constexpr std::size_t kRecords = 128;
  alignas(kCacheLine) std::atomic<std::uint64_t> num_taken;  // records copied out; the receiver stores it with RELEASE
  std::atomic<std::uint64_t> bytes_taken;                    // position in the byte ring; also stored with RELEASE
  Record records[kRecords];
  alignas(kCacheLine) std::byte ring[kChannelBytes];
};

struct SegmentHeader {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t reserved;
  std::uint64_t nonce[2];
  std::atomic<std::uint64_t> next_free;  // offset of the first byte never allocated
};
static_assert(sizeof(SegmentHeader) <= kPage);

}  // namespace phalanx
