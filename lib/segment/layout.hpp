// The segment: one block of shared memory in which the broker keeps streams, and which everyone else maps read-only.
//
// Plain structs with fixed-width fields, addressed by offsets from the segment's start. A reader of another process may
// look at any word at any moment, so every word that changes after the ready word was stored is read and written
// atomically: single words as std::atomic, whole structs and event bytes word by word through copy_in() and
// copy_out(). There is no lock, and there are no fences: the order that an argument needs stands on the accesses
// themselves, where ThreadSanitizer understands it too.
//
// The table in gcoalesce-segment(5) tells the same layout to people; a test compares the two.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <string_view>
#include <type_traits>

#include "base/clock.hpp"
#include "base/ids.hpp"

namespace gcoalesce {

static_assert(std::endian::native == std::endian::little, "the layout is defined little-endian");
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free,
              "an atomic with a hidden lock does not work between processes");

template <class T>
using Shared = std::atomic<T>;

constexpr std::uint64_t kMagic = 0x65'63'73'6c'61'6f'63'67; // "gcoalsce" in memory
constexpr std::uint32_t kLayoutMajor = 1;                   // another major is refused
constexpr std::uint32_t kLayoutMinor = 0;                   // a newer minor only adds

// ---- copying through shared memory ---------------------------------------------------------------------------------
//
// A copy may race with the broker filling the memory anew (a recycled slot, an evicted stream). The reader checks the
// slot's generation and evicted word *after* its copy and throws the copy away if they say so. For that check to be
// sound, (a) the broker changes those words before it writes new bytes, and each new word is a release-store, so that
// whoever reads one of them also sees the changed words; (b) each word is read by an acquire-load, so that the check
// cannot be moved before it. On x86-64 both are plain moves.

inline void copy_in(std::byte* to, const void* from, std::size_t bytes) {
    const auto* source = static_cast<const std::byte*>(from);
    for (std::size_t at = 0; at < bytes; at += 8) {
        std::uint64_t word = 0;
        std::memcpy(&word, source + at, bytes - at < 8 ? bytes - at : 8);
        __atomic_store_n(reinterpret_cast<std::uint64_t*>(to + at), word, __ATOMIC_RELEASE);
    }
}

inline void copy_out(void* to, const std::byte* from, std::size_t bytes) {
    auto* target = static_cast<std::byte*>(to);
    for (std::size_t at = 0; at < bytes; at += 8) {
        const std::uint64_t word = __atomic_load_n(reinterpret_cast<const std::uint64_t*>(from + at), __ATOMIC_ACQUIRE);
        std::memcpy(target + at, &word, bytes - at < 8 ? bytes - at : 8);
    }
}

// A struct that is written and read whole.
template <class T>
class Record {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 8 == 0);

  public:
    void store(const T& value) { copy_in(bytes_, &value, sizeof value); }
    T load() const {
        T value;
        copy_out(&value, bytes_, sizeof value);
        return value;
    }

  private:
    alignas(8) std::byte bytes_[sizeof(T)];
};

// A text in a fixed field: cut to fit at a UTF-8 boundary, ended by NUL.
template <std::size_t N>
struct Text {
    char bytes[N];

    void assign(std::string_view text) {
        std::size_t length = text.size() < N - 1 ? text.size() : N - 1;
        while (length > 0 && length < text.size() && (static_cast<unsigned char>(text[length]) & 0xC0) == 0x80)
            --length;
        std::memset(bytes, 0, N);
        if (length > 0) std::memcpy(bytes, text.data(), length);
    }
    std::string_view view() const { return {bytes, ::strnlen(bytes, N)}; }
};

// ---- header --------------------------------------------------------------------------------------------------------

enum class BrokerState : std::uint32_t { starting = 0, serving = 1, draining = 2, closed = 3 };

struct Table {
    std::uint64_t offset; // bytes from the segment's start, a multiple of 64
    std::uint64_t count;  // elements; for the extents: bytes
};

// These 40 bytes keep their place and meaning in every version, so that versions can refuse each other by name.
struct Prefix {
    std::uint64_t magic;
    std::uint32_t layout_major;
    std::uint32_t layout_minor;
    std::uint64_t total_bytes;
    std::uint64_t fingerprint;   // of the sizes and offsets of this major's structs
    Shared<std::uint32_t> ready; // 0 while the broker fills the rest; stored last, with release
    std::uint32_t header_bytes;
};

struct Header {
    Prefix prefix;
    Table counters, templates, index, slots, log, errors, extents;
    std::uint64_t epoch; // random, one a broker's life
    std::int32_t broker_pid;
    std::uint32_t reserved;
    std::uint64_t broker_start_ticks; // field 22 of /proc/<pid>/stat
    std::int64_t created_wall_ns;
    std::int64_t created_boottime_ns;
    Text<40> boot_id;
    Text<64> instance;
    Text<32> version; // of the program, for people

    alignas(64) Shared<std::uint32_t> state; // BrokerState
    Shared<std::int64_t> heartbeat_ns;       // monotonic, every 100 ms
    Shared<std::int64_t> heartbeat_wall_ns;  // for "dead since" once the machine's clock is all that is left
    Shared<std::uint64_t> log_next;          // number of the next log record
    Shared<std::uint64_t> extents_free;      // bytes
};

// ---- templates -----------------------------------------------------------------------------------------------------

constexpr std::size_t kHistogramBuckets = 32;

struct Histogram { // bucket i counts what took less than 2^i us (and at least 2^(i-1)); the last one all the rest
    Shared<std::uint64_t> count, sum_us;
    Shared<std::uint64_t> buckets[kHistogramBuckets];
};

enum TemplateFlags : std::uint32_t {
    template_fast_path = 1,     // no access rules, no limit of subscribers: joining needs no broker
    template_explicit_keys = 2, // a request may bring a key of its own
    template_realms = 4,        // each realm shares for itself
    template_snapshots = 8,     // finished answers are kept on disk
    template_schema = 16,       // answers are checked
    template_live = 32,         // though readers see them before the check
    template_strict = 64,       // after a failed check everyone gets a call of their own
    template_removed = 128      // no longer in force; what was asked of it is still shown
};

struct TemplatePolicy {
    Text<64> id;
    std::uint64_t revision; // of what shapes the answers: part of every key
    std::uint32_t flags;    // TemplateFlags
    std::uint32_t max_individual;
    Nanos ttl_idle, ttl_window, window, linger, snapshot_ttl, kv_after, kv_ttl;
    Nanos cancel_after;                        // abandoned calls; -1: they finish
    std::uint64_t in_flight, calls_a_minute;   // limits; 0: none
    std::uint64_t subscribers, stream_bytes;   // limits; 0: none
    std::uint64_t pool_bytes;                  // limit of extents
    std::uint64_t source_offset, source_bytes; // of an extent with the template's file; 0: built in
};

// X(identifier, unit, help): what is counted for each template. The first eight are by gcoalesce_status.
#define GCOALESCE_TEMPLATE_COUNTERS(X)                                                                                 \
    X(requests_refused, "requests", "requests refused with an error before any stream")                                \
    X(requests_started, "requests", "requests that caused an upstream call")                                           \
    X(requests_joined, "requests", "requests that joined a running stream")                                            \
    X(requests_fresh, "requests", "requests answered by a complete stream that was still fresh")                       \
    X(requests_snapshot, "requests", "requests answered by a stream that was kept on disk")                            \
    X(requests_resumed, "requests", "requests that went on where an earlier reader had stopped")                       \
    X(requests_individual, "requests", "requests asked again alone after an invalid answer")                           \
    X(requests_bypass, "requests", "requests that wanted a call of their own")                                         \
    X(upstream_calls, "calls", "HTTP requests sent upstream, retries included")                                        \
    X(prompt_tokens_paid, "tokens", "prompt tokens that upstream reported, cached ones apart")                         \
    X(cached_tokens_paid, "tokens", "prompt tokens that upstream had cached")                                          \
    X(thought_tokens_paid, "tokens", "thought tokens that upstream reported")                                          \
    X(answer_tokens_paid, "tokens", "answer tokens that upstream reported")                                            \
    X(prompt_tokens_avoided, "tokens", "prompt tokens that shared answers did not cost again")                         \
    X(cached_tokens_avoided, "tokens", "cached prompt tokens that shared answers did not cost again")                  \
    X(thought_tokens_avoided, "tokens", "thought tokens that shared answers did not cost again")                       \
    X(answer_tokens_avoided, "tokens", "answer tokens that shared answers did not cost again")                         \
    X(requests_0s, "requests", "requests within 5 s of a push")                                                        \
    X(requests_5s, "requests", "requests 5 to 10 s after a push")                                                      \
    X(requests_10s, "requests", "requests 10 to 30 s after a push")                                                    \
    X(requests_30s, "requests", "requests later than that, or before any push")                                        \
    X(coalesced_0s, "requests", "those of requests_0s that cost no call")                                              \
    X(coalesced_5s, "requests", "those of requests_5s that cost no call")                                              \
    X(coalesced_10s, "requests", "those of requests_10s that cost no call")                                            \
    X(coalesced_30s, "requests", "those of requests_30s that cost no call")

enum class TemplateCounter : std::uint32_t {
#define GCOALESCE_TEMPLATE_COUNTER(identifier, unit, help) identifier,
    GCOALESCE_TEMPLATE_COUNTERS(GCOALESCE_TEMPLATE_COUNTER)
#undef GCOALESCE_TEMPLATE_COUNTER
        count
};
constexpr std::size_t kTemplateCounters = 32; // room for later ones
constexpr std::string_view kTemplateCounterNames[] = {
#define GCOALESCE_TEMPLATE_COUNTER(identifier, unit, help) #identifier,
    GCOALESCE_TEMPLATE_COUNTERS(GCOALESCE_TEMPLATE_COUNTER)
#undef GCOALESCE_TEMPLATE_COUNTER
};

struct alignas(64) TemplateEntry {
    Shared<std::uint64_t> sequence; // odd while the policy is being written; 0: a free entry
    Record<TemplatePolicy> policy;
    Shared<Nanos> window_until; // monotonic
    Shared<Nanos> pushed;       // when the window was last opened, monotonic; 0: never
    Shared<std::uint64_t> counts[kTemplateCounters];
    Histogram first_event, join;
};

// ---- index ---------------------------------------------------------------------------------------------------------

// Open addressing from fingerprint & (count - 1), at most kIndexProbes entries on. A reader may find a torn or stale
// pair; the slot's generation and full key, checked under the reader's pin, decide (rule 4).
constexpr std::size_t kIndexProbes = 16;

struct IndexEntry {
    Shared<std::uint64_t> fingerprint; // first 8 bytes of the key; 0: empty
    Shared<std::uint64_t> reference;   // slot + 1 in the low 16 bits, generation identity above
};

constexpr std::uint32_t kMaxSlots = 65535; // slot + 1 has 16 bits

constexpr std::uint64_t index_reference(std::uint32_t slot, std::uint64_t generation) {
    return (generation >> 1) << 16 | (slot + 1);
}

inline std::uint64_t key_fingerprint(const Key& key) {
    std::uint64_t value = 0;
    std::memcpy(&value, key.data(), sizeof value);
    return value != 0 ? value : 1;
}

// ---- slots ---------------------------------------------------------------------------------------------------------

enum class SlotState : std::uint32_t { free = 0, in_flight = 1, ended = 2 };

enum class AnswerChecking : std::uint8_t { none = 0, checked = 1, impossible = 2 }; // against a schema

struct SlotOpening { // stored while the slot is closed, before it is opened
    StreamId stream_id;
    std::uint32_t template_index;
    std::uint8_t method;   // Method
    std::uint8_t sharing;  // gcoalesce_sharing
    std::uint8_t status;   // gcoalesce_status: how the first request for it was served
    std::uint8_t checking; // AnswerChecking
    std::uint64_t template_revision;
    std::uint64_t realm;    // 0: everyone
    StreamId individual_of; // the invalid stream that it was asked in place of; 0: none
    Nanos opened_ns;        // monotonic
    std::int64_t opened_wall_ns;
    Key request_digest;           // SHA-256 of the body behind its length (8 bytes, little-endian)
    std::uint64_t request_bytes;  // the body's full length
    std::uint64_t request_offset; // of an extent with the body's first request_kept bytes; 0: none
    std::uint64_t request_kept;
    Text<128> model;
};

constexpr std::uint64_t kMostDocument = 64 << 10; // bytes of an error document that is kept

struct SlotEnding {    // stored before the state says "ended"
    std::int32_t kind; // gcoalesce_ending_kind
    std::int32_t code; // gcoalesce_code
    std::int32_t upstream_status;
    std::int32_t reusable;
    std::int64_t retry_ms;
    std::int64_t prompt_tokens, cached_tokens, thought_tokens, answer_tokens, total_tokens;
    Nanos ended_ns;
    std::int64_t ended_wall_ns;
    Text<40> finish_reason;
    Text<64> model_version;
    Text<256> message;
    std::uint64_t document_offset; // of an extent with upstream's error document; 0: none
    std::uint64_t document_bytes;
};

struct alignas(64) Slot {
    // Bit 0: closed to joiners. The rest is the identity of what the slot holds: {slot, identity} never comes again.
    Shared<std::uint64_t> generation;
    Shared<std::uint32_t> state;           // SlotState
    Shared<std::uint32_t> wake;            // futex word: changes with every publication
    Shared<std::uint64_t> committed;       // events
    Shared<std::uint64_t> committed_bytes; // of those events
    Shared<std::uint64_t> first_extent;    // 0: none yet
    Shared<Nanos> fresh_until;             // monotonic; 0: must not be reused
    Shared<std::uint32_t> evicted;         // 1: the extents are gone
    Shared<std::uint32_t> retries;
    Shared<Nanos> first_event_ns; // monotonic; 0: none yet

    // For inspectors, folded in from the lanes.
    alignas(64) Shared<std::uint32_t> subscribers;
    Shared<std::uint32_t> upstream_status;
    Shared<std::uint64_t> joins;

    Record<Key> key; // stored while the slot is closed, before it is opened
    Record<SlotOpening> opening;
    Record<SlotEnding> ending;

    Shared<std::uint32_t> ephemeral; // 1: must not outlive the segment: nobody may put it on disk
};

constexpr std::uint64_t kClosedToJoiners = 1;

// ---- extents -------------------------------------------------------------------------------------------------------

// A stream's events stand in extents, each event whole in one of them: an 8-byte length, the bytes, padding to 8.
// Where the next event did not fit, kContinued stands in place of a length (or fewer than 8 bytes are left).
struct Extent {
    Shared<std::uint64_t> next;     // offset of the next extent; stored before the count that needs it is committed
    Shared<std::uint64_t> capacity; // bytes that follow this header
};

constexpr std::uint64_t kContinued = ~std::uint64_t{0};

constexpr std::uint64_t record_bytes(std::uint64_t length) {
    return 8 + (length + 7) / 8 * 8;
}

// ---- log and errors ------------------------------------------------------------------------------------------------

enum class LogKind : std::uint32_t {
    started = 1,
    first_event,
    ended,
    retired,
    retry,
    notify,
    attached,
    detached,
    evicted,
    revoked,
    refused,
    closed,
    cancelled,
    purged,
    demoted,
    resumed,
    reloaded,
    restored
};

struct LogFacts {
    Nanos when_ns; // monotonic
    std::int64_t when_wall_ns;
    std::uint32_t kind; // LogKind
    std::int32_t code;  // gcoalesce_code, or what the kind says
    StreamId stream_id;
    std::uint64_t key_prefix;     // first 8 bytes
    std::uint64_t number;         // events, bytes, ms, pid: by kind
    std::uint32_t template_index; // of a stream or a window; kNoTemplate: of none
    std::int32_t upstream_status; // HTTP's; 0: none
    Text<64> text;                // client name, finish reason, code's name, time: by kind
};
constexpr std::uint32_t kNoTemplate = ~std::uint32_t{0};

struct alignas(64) LogRecord {
    // 2n+1 while record n is being written, 2n+2 when it is whole.
    Shared<std::uint64_t> sequence;
    Record<LogFacts> facts;
};

struct ErrorFacts {
    std::int32_t code; // gcoalesce_code; 0: free entry
    std::int32_t upstream_status;
    std::int64_t first_wall_ns, last_wall_ns;
    Text<256> message;
};

struct alignas(64) ErrorEntry {     // each distinct error once
    Shared<std::uint64_t> sequence; // odd while the facts are being written
    Shared<std::uint64_t> count;
    Record<ErrorFacts> facts;
};

// ---- counters ------------------------------------------------------------------------------------------------------

enum class CounterKind : std::uint32_t { counter = 0, gauge = 1 };

struct CounterText { // stored before the ready word, never changed
    Text<48> name;
    Text<16> unit;
    Text<120> help;
    std::uint32_t kind; // CounterKind
    std::uint32_t reserved;
};

struct alignas(64) CounterEntry {
    CounterText text;
    Shared<std::uint64_t> value;
};

// ---- lanes ---------------------------------------------------------------------------------------------------------

// A lane is a client's own small shared memory (a sealed memfd): this header, then for each slot a PinEntry. The client
// and, on its behalf, the broker write it; whatever a client scribbles there, it harms itself alone.
struct LaneHeader {
    std::uint64_t magic;
    std::uint64_t epoch;      // the broker's
    std::uint64_t attachment; // id
    std::uint64_t slots;

    alignas(64) Shared<std::uint32_t> asked; // 1: send on the wake socket at the next publication
    Shared<std::uint32_t> changes;           // moves with each change of a pin or join: sweeps skip what did not move

    alignas(64) Shared<std::uint32_t> revoked; // the broker's word: 1: this lane's pins no longer count
};

struct PinEntry {
    Shared<std::uint32_t> pins;   // readers of the slot
    Shared<std::uint32_t> joined; // requests served on the fast path while it was in flight, and not yet counted
    Shared<std::uint32_t> fresh;  // the same when it had ended
    Shared<std::uint32_t> moves;  // changes when a reader of the slot moves on
};

// ---- the layout is a contract --------------------------------------------------------------------------------------
// Once released, a changed number here is a new kLayoutMajor, and a changed table in gcoalesce-segment(5).

static_assert(sizeof(Prefix) == 40);
static_assert(sizeof(Header) == 448);
static_assert(sizeof(TemplatePolicy) == 200);
static_assert(sizeof(TemplateEntry) == 1024);
static_assert(sizeof(IndexEntry) == 16);
static_assert(sizeof(Slot) == 832);
static_assert(sizeof(Extent) == 16);
static_assert(sizeof(LogRecord) == 128);
static_assert(sizeof(ErrorEntry) == 320);
static_assert(sizeof(CounterEntry) == 256);
static_assert(sizeof(LaneHeader) == 192);
static_assert(sizeof(PinEntry) == 16);
static_assert(static_cast<std::size_t>(TemplateCounter::count) <= kTemplateCounters);

constexpr std::uint64_t fingerprint_of(std::initializer_list<std::uint64_t> numbers) {
    std::uint64_t hash = 0xcbf29ce484222325; // FNV-1a over whole numbers: a mismatch detector, nothing more
    for (const std::uint64_t number : numbers) hash = (hash ^ number) * 0x100000001b3;
    return hash;
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
constexpr std::uint64_t kFingerprint = fingerprint_of({kLayoutMajor,
                                                       sizeof(Header),
                                                       offsetof(Header, counters),
                                                       offsetof(Header, epoch),
                                                       offsetof(Header, state),
                                                       offsetof(Header, log_next),
                                                       sizeof(TemplateEntry),
                                                       offsetof(TemplatePolicy, cancel_after),
                                                       offsetof(TemplateEntry, policy),
                                                       offsetof(TemplateEntry, counts),
                                                       offsetof(TemplateEntry, window_until),
                                                       offsetof(TemplateEntry, first_event),
                                                       offsetof(TemplateEntry, join),
                                                       sizeof(IndexEntry),
                                                       sizeof(Slot),
                                                       offsetof(Slot, generation),
                                                       offsetof(Slot, state),
                                                       offsetof(Slot, wake),
                                                       offsetof(Slot, committed),
                                                       offsetof(Slot, first_extent),
                                                       offsetof(Slot, fresh_until),
                                                       offsetof(Slot, evicted),
                                                       offsetof(Slot, subscribers),
                                                       offsetof(Slot, joins),
                                                       offsetof(Slot, key),
                                                       offsetof(Slot, opening),
                                                       offsetof(Slot, ending),
                                                       offsetof(Slot, ephemeral),
                                                       offsetof(SlotOpening, realm),
                                                       offsetof(SlotOpening, model),
                                                       offsetof(SlotEnding, message),
                                                       offsetof(SlotEnding, document_offset),
                                                       sizeof(Extent),
                                                       sizeof(LogRecord),
                                                       offsetof(LogFacts, text),
                                                       sizeof(ErrorEntry),
                                                       sizeof(CounterEntry),
                                                       offsetof(CounterEntry, value),
                                                       sizeof(LaneHeader),
                                                       offsetof(LaneHeader, asked),
                                                       offsetof(LaneHeader, revoked),
                                                       sizeof(PinEntry)});
#pragma GCC diagnostic pop

} // namespace gcoalesce
