// The black box of a rank: its latest events, in memory that outlives the rank.
//
// A box is a range of a file that only its rank writes: a header, a ring of events, and the texts to which events refer
// by number. Any process that may open the file can read it while the rank runs, after `kill -9`, and days later.
//     BoxHeader, one page | Event[kEvents] | texts: records of a 4-byte length and UTF-8 bytes, kTextBytes in all
// src/phalanx/record/box.py reads this format: a change to it needs the same change there.
//
// Readers never mistake a half-written event for a whole one. A writer marks the slot (kBeingWritten), writes the
// event, and publishes the event by a RELEASE store of its number. A reader of a running rank accepts an event only if
// two reads of it agree. If a thread is suspended while the others fill the whole ring, it finds a newer event in its
// slot and drops its own event. If it is suspended just before it writes the end of an event, the end may reach the
// slot of a newer event. Such an end is earlier than the beginning of the newer event, and readers ignore it. The mark
// is set by compare-and-exchange, so that a thread that was suspended just before it sets the mark can't mark a newer
// event; this costs 0.5 to 1.5 ns of the 21 ns of an event. Texts are only added: their total size is stored with
// RELEASE after their bytes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "memory/layout.h"
#include "memory/tick_clock.h"

namespace phalanx {

inline constexpr std::uint64_t kBoxMagic = 0x3158'4f42'5841'4850;  // "PHAXBOX1"
inline constexpr std::uint32_t kBoxVersion = 1;
inline constexpr std::size_t kEvents = 8192;  // a power of two
inline constexpr std::size_t kTextBytes = 124 * 1024;
inline constexpr std::size_t kTextsOfGroups = 24 * 1024;
inline constexpr std::uint64_t kBeingWritten = ~std::uint64_t{0};

/// Kinds of events. The numbers are part of the file format: kinds may be added, but no number may change.
enum class EventKind : std::uint16_t {
  kNone = 0,
  kCollective,  // from call to return. code: Op | dtype << 8; text: the group; seq: the call's number; value: elements
  kMessage,     // a send, receive or signal that was waited for. code, text, value: as above; seq: the peer's rank in
                // the group + 1, 0: any
  kStep,        // an optimizer step. seq: its number; value: samples
  kPhase,       // a part of a step, or work between steps. text: its name; seq: the step's number
  kNote,        // a remark. text: its wording
  kCall,        // the call of a collective whose end is not recorded; fields as for kCollective
};

struct alignas(kCacheLine) Event {
  std::atomic<std::uint64_t> number;  // counts from 1; the slot is (number - 1) % kEvents
  std::atomic<std::uint64_t> begun_ns;  // CLOCK_MONOTONIC
  std::atomic<std::uint64_t> ended_ns;  // if not greater than begun_ns, the event has not ended
  std::atomic<std::uint64_t> what;    // from the lowest bit: kind, 16 bits; code, 16 bits; text, 32 bits
  std::atomic<std::uint64_t> where;   // low half: number of the site's text, 0: unknown; high half: kernel's thread id
  std::atomic<std::uint64_t> seq;
  std::atomic<std::uint64_t> value;
};
static_assert(sizeof(Event) == kCacheLine);

struct BoxHeader {
  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t num_slots;
  std::uint32_t text_bytes;
  std::int32_t pid;
  std::int32_t rank;
  std::int32_t world_size;
  std::uint64_t start_time;    // start of the process in clock ticks since boot; reveals that a pid was reused
  std::int64_t realtime_less_monotonic_ns;
  std::atomic<std::uint64_t> num_events;  // number of events begun since the box was made
  std::atomic<std::uint64_t> num_text_bytes;
  char host[64];
};
static_assert(sizeof(BoxHeader) <= kPage);
inline constexpr std::size_t kBoxBytes = kPage + kEvents * sizeof(Event) + kTextBytes;
static_assert(kBoxBytes % kPage == 0);

/// Writes this process's box. Any thread may write; a forked child does not.
class Recorder {
 public:
  /// Write into the file `fd` at `offset`, which must be page-aligned. The file must be long enough.
  Recorder(int fd, std::uint64_t offset, int rank, int world_size);
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  /// Return the number of a text, and add the text if it is new. Returns 0 for the empty text, and if adding the text
  /// would leave less than `spare` bytes free.
  std::uint32_t text(std::string_view words, std::size_t spare = kTextsOfGroups);

  /// Return the number of a group's name. Names of groups may use the space that text() leaves free.
  std::uint32_t name(std::string_view group) { return text(group, 0); }

  /// Record that something has begun. Returns the event's number, for end(). Returns 0, and records nothing, if the
  /// slot already holds a newer event or is being written.
  std::uint64_t begin(EventKind kind, std::uint16_t code, std::uint32_t text, std::uint32_t site, std::uint64_t seq,
                      std::uint64_t value) noexcept;
  void end(std::uint64_t number) noexcept;

 private:
  std::byte* base_;
  BoxHeader* header_;
  Event* events_;
  std::byte* texts_;
  TickClock clock_;
  std::mutex mutex_;  // guards the texts
  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;
  };
  std::unordered_map<std::string, std::uint32_t, Hash, std::equal_to<>> numbers_;
};

/// The recorder of this process; null if nothing is recorded. Leaked on purpose: threads may write while the process ends.
extern std::atomic<Recorder*> g_recorder;

/// The source line at which this thread's current call was made: the number under which Recorder::text() stored it. 0 if
/// the line is not known.
inline thread_local std::uint32_t t_site = 0;

/// Sets the source line that this thread's events show, for as long as the object lives.
class AtSite {
 public:
  explicit AtSite(std::uint32_t site) noexcept : before_(std::exchange(t_site, site)) {}
  explicit AtSite(std::string_view site) : AtSite(number_of(site)) {}
  AtSite(const AtSite&) = delete;
  AtSite& operator=(const AtSite&) = delete;
  ~AtSite() { t_site = before_; }

 private:
  static std::uint32_t number_of(std::string_view site) {
    Recorder* const recorder = g_recorder.load(std::memory_order_acquire);
    return recorder == nullptr ? 0 : recorder->text(site);
  }
  std::uint32_t before_;
};

/// An event that begins when it is constructed and ends when it is destroyed.
class Recorded {
 public:
  Recorded() = default;
  Recorded(EventKind kind, std::uint16_t code, std::uint32_t text, std::uint64_t seq, std::uint64_t value) noexcept
      // ACQUIRE: pairs with the RELEASE store that installed the recorder.
      : recorder_(g_recorder.load(std::memory_order_acquire)) {
    if (recorder_ != nullptr) number_ = recorder_->begin(kind, code, text, t_site, seq, value);
  }
  Recorded(Recorded&& other) noexcept : recorder_(other.recorder_), number_(other.number_) { other.recorder_ = nullptr; }
  Recorded& operator=(Recorded&& other) noexcept {
    std::swap(recorder_, other.recorder_);
    std::swap(number_, other.number_);
    return *this;
  }
  ~Recorded() {
    // RELAXED: if this process is a child that was forked meanwhile, it has itself stored null.
    if (recorder_ != nullptr && g_recorder.load(std::memory_order_relaxed) == recorder_) recorder_->end(number_);
  }

 private:
  Recorder* recorder_ = nullptr;
  std::uint64_t number_ = 0;
};

}  // namespace phalanx
