// The one writer of the segment: slots, index, extents, lanes, counters, logs.
//
// The steps below carry the names of the model in tests/model; lib/segment/lane.hpp tells the other half of each.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "broker/ledger.hpp"
#include "broker/policy.hpp"
#include "protocol/gemini.hpp"
#include "segment/counters.hpp"
#include "segment/lane.hpp"
#include "segment/mapping.hpp"

namespace gcoalesce {

// One stream: a slot and the identity of what it holds. Stays meaningful (as "gone") after the slot was recycled.
struct StreamRef {
    std::uint32_t slot = 0;
    std::uint64_t identity = 0; // generation >> 1
    bool operator==(const StreamRef&) const = default;
};

struct StoreOptions {
    std::uint32_t slots = 4096; // 1 .. kMaxSlots
    std::string instance;
    Nanos stall_timeout = 60 * kSecond; // a reader that did not move for this long may be evicted under pressure
};

struct StreamOpening {
    Key key{};
    StreamId stream_id = 0;
    std::uint32_t template_index = 0;
    Method method = Method::stream;
    gcoalesce_sharing sharing = GCOALESCE_SHARE;
    gcoalesce_status status = GCOALESCE_STARTED;
    AnswerChecking checking = AnswerChecking::none;
    std::uint64_t realm = 0;
    StreamId individual_of = 0;
    bool kept = true; // may outlive the segment, on disk
    std::string_view model;
    std::string_view request; // the body; its first 4 KiB are kept for people who look at the stream
    Key request_digest{};
};

// A client's lane, and how to send on its wake socket (never blocking; false: the socket is full or gone).
struct LanePort {
    Mapping mapping;
    std::function<bool()> send_wake;
    std::string client_name;
    std::int32_t pid = 0;
};
using LaneId = std::uint64_t; // the attachment id

// Single-threaded: the event loop's.
class Store {
  public:
    // The bytes a segment needs besides its extents.
    static std::size_t table_bytes(std::uint32_t slots, std::size_t templates = 1);
    // GCOALESCE_BAD_REQUEST: too few bytes for the tables and 256 KiB of extents, or slots or templates out of range.
    static Result<void> check_size(std::uint64_t bytes, std::uint32_t slots, std::size_t templates);

    // Another set in place of the present one; the first must be the default one. Streams of a template that is gone,
    // or that has another revision, are closed to joiners. GCOALESCE_BAD_REQUEST: more than there is room for (twice as
    // many as at the start, 32 at least), and nothing has changed.
    Result<void> set_templates(const std::vector<TemplateSettings>& templates);
    std::optional<std::uint32_t> template_index(std::string_view id) const; // of those in force

    // Formats `memory`, which must be zero, and keeps it. Not ready for readers before set_ready().
    // Errors: those of check_size().
    static Result<std::unique_ptr<Store>> create(Mapping memory, const StoreOptions& options,
                                                 const std::vector<TemplateSettings>& templates, const Clock& clock);
    ~Store();

    void set_ready(); // last of all: stores the ready word and the state `serving`
    void set_state(BrokerState state);
    void heartbeat();

    const SegmentView& view() const { return view_; }
    const Clock& clock() const { return clock_; }
    std::uint64_t epoch() const { return view_.header().epoch; }

    // ---- streams ----

    // Takes a free slot (retiring the oldest unpinned stream if it must) and shows it to joiners, index entry last.
    // indexed: later requests for the key find it, in place of an older stream, which is closed. Not indexed: it stays
    // closed from the start. GCOALESCE_BUSY: every slot holds a stream that somebody needs.
    Result<StreamRef> open(const StreamOpening& opening, bool indexed);

    // A stream that had ended before: all of it at once. fresh_for: 0: requests for its key do not find it. Errors: as
    // open() and append().
    Result<StreamRef> restore(const StreamOpening& opening, const std::vector<std::string>& events,
                              const SlotEnding& ending, Nanos fresh_for);

    // The stream that requests for this key find, if any: joinable or not.
    std::optional<StreamRef> find(const Key& key) const;

    enum class Joinable { no, in_flight, fresh };
    Joinable joinable(StreamRef stream) const; // that is: open to joiners, and in flight or complete and fresh

    // By its id, while it can still be read.
    std::optional<StreamRef> find_stream(StreamId id) const;
    // Those whose key or stream id begins with these digits.
    std::vector<StreamRef> match(std::string_view hex) const;
    std::vector<StreamRef> of_template(std::uint32_t index) const;

    StreamId stream_id(StreamRef stream) const;
    SlotOpening opening(StreamRef stream) const { return slots_[stream.slot].opening.load(); }
    const Slot& slot(std::uint32_t number) const { return slots_[number]; }
    bool ended(StreamRef stream) const;
    StreamRef ref(std::uint32_t slot) const {
        return {slot, slots_[slot].generation.load(std::memory_order_relaxed) >> 1};
    }
    // Readers at this moment, over all lanes.
    std::uint64_t pins(StreamRef stream) const { return holds(stream) ? pins_on(stream.slot) : 0; }

    // Publishes one event: bytes first, the count last, then wakes. GCOALESCE_NO_MEMORY: nothing was published.
    Result<void> append(StreamRef stream, std::string_view event);

    // Publishes the ending. fresh_for: 0 for every ending that must not be reused: the slot is closed to joiners
    // *before* the ending shows, so that whoever sees it and asks again starts anew. document: upstream's error, kept
    // beside the ending as long as memory can be had for it.
    void end(StreamRef stream, SlotEnding ending, Nanos fresh_for, std::string_view document = {});

    // The call failed so, and is made again after this time; then upstream_retries counts it.
    void count_retry(StreamRef stream, Code failure, int upstream_status, Nanos again_in);
    void set_upstream_status(StreamRef stream, int status);

    // Takes the stream out of the index and closes its slot; returns how many pins it has, exactly: after this, no
    // further joiner can come (lane.hpp: the broker's half of the handshake). Idempotent.
    std::uint64_t close_to_joiners(StreamRef stream);
    // Takes it back, when a pin turned up and the stream is still good.
    void reopen(StreamRef stream);
    // Closes it for good: its readers finish, nobody finds it again by key or id, and it goes with its last reader.
    void drop(StreamRef stream);

    // Closed, ended and without a pin: the slot advances to its next identity and its extents are free. False: not yet.
    bool retire(StreamRef stream);

    // Takes an ended stream's extents away from readers that stand still; they get "lost".
    void evict(StreamRef stream);

    // ---- lanes ----

    void add_lane(LaneId id, LanePort port);
    void remove_lane(LaneId id); // with all its pins: the client is dead or has said goodbye
    // The lane's pins no longer count; its client learns it at its next look.
    void revoke_lane(LaneId id);
    Result<void> pin(LaneId id, StreamRef stream); // on a client's behalf; GCOALESCE_NOT_FOUND: no such lane
    std::size_t lane_count() const { return lanes_.size(); }

    // Every 100 ms: folds what lanes changed into the slots, retires what has lingered long enough.
    void sweep();

    // ---- telling people ----

    void count(Counter counter, std::uint64_t add = 1);
    void set(Counter gauge, std::uint64_t value);
    std::uint64_t counted(Counter counter) const;
    void log(LogKind kind, std::int32_t code = 0, std::optional<StreamRef> stream = {}, std::uint64_t number = 0,
             std::string_view text = {}, std::uint32_t template_index = kNoTemplate);
    // True: it stands there for the first time.
    bool note_error(Code code, int upstream_status, std::string_view message);
    void set_window(std::uint32_t template_index, Nanos until, Nanos pushed);
    // Requests of a template, by how they were served; GCOALESCE_OPENING: they were refused. coalesced: they cost no
    // call.
    void count_request(std::uint32_t template_index, gcoalesce_status status, bool coalesced, std::uint64_t add = 1);
    // A request that reads a stream which another one paid for.
    void count_avoided(StreamRef stream, std::uint64_t add = 1);
    void count(std::uint32_t template_index, TemplateCounter counter, std::uint64_t add = 1);
    std::uint64_t counted(std::uint32_t template_index, TemplateCounter counter) const;
    LedgerCounts counted(std::uint32_t template_index) const { return ledger_counts(templates_[template_index]); }
    void count_join_time(std::uint32_t template_index, Nanos took);

    std::size_t streams_in_use() const;

  private:
    struct Pool;
    struct Private; // what the broker alone knows of a slot
    struct LaneState;
    struct TemplateState {
        Nanos linger = 0;
        std::uint64_t pool_bytes = 0; // the most that its streams may hold
        std::uint64_t held = 0;       // bytes of their extents
        std::uint64_t source = 0;     // extent of its file's text
        std::uint64_t streams = 0;    // in use
    };

    Store(Mapping memory, const StoreOptions& options, const Clock& clock);

    Slot& slot(StreamRef stream) { return slots_[stream.slot]; }
    bool holds(StreamRef stream) const;
    std::uint64_t pins_on(std::uint32_t slot) const;
    Result<void> put(StreamRef stream, std::string_view event);
    Nanos landed(StreamRef stream);
    void publish(Slot& slot, std::uint32_t index);
    std::uint64_t allocate(std::uint64_t bytes); // an offset; 0: none
    enum class Wanted { slot, extents };
    // Frees something, of one template's if it is told; false: nothing can go.
    bool reclaim(Wanted wanted, std::optional<std::uint32_t> only = {});
    void free_extents(std::uint32_t slot);
    Result<std::uint32_t> place_for(const TemplateSettings& settings);
    void write_policy(std::uint32_t index, const TemplateSettings& settings);
    void count_tokens_avoided(std::uint32_t slot, std::uint64_t times);
    void take_joins(LaneState& lane, std::uint32_t slot);
    void index(std::uint32_t slot, const Key& key);
    void unindex(std::uint32_t slot);
    void fold(LaneState& lane, Nanos now);
    void look_at_moves(LaneState& lane, Nanos now);
    void forget(LaneState& lane);
    bool stalled_only(std::uint32_t slot, Nanos now) const;
    bool revoke_greediest(Nanos now);

    Mapping memory_;
    StoreOptions options_;
    const Clock& clock_;
    SegmentView view_;
    Header* header_;
    CounterEntry* counters_;
    TemplateEntry* templates_;
    IndexEntry* index_;
    Slot* slots_;
    LogRecord* log_;
    ErrorEntry* errors_;
    std::unique_ptr<Pool> pool_;
    std::vector<Private> private_;
    // Pins by slot, as the last sweep saw them: the sum of every lane's `seen`, whatever streams came and went
    // meanwhile.
    std::vector<std::uint64_t> subscribers_;
    std::vector<TemplateState> template_states_;
    std::vector<std::uint32_t> free_; // the last one first: low slots stay warm, lanes touch few pages
    struct KeyHash {
        std::size_t operator()(const Key& key) const { return key_fingerprint(key); }
    };
    std::unordered_map<Key, std::uint32_t, KeyHash> indexed_;
    std::unordered_map<StreamId, std::uint32_t> by_id_;
    std::vector<std::unique_ptr<LaneState>> lanes_;
    std::size_t in_flight_ = 0;
    std::uint32_t swept_to_ = 0; // slots ever used: sweeps look no further
    Nanos moves_seen_ = 0;
};

} // namespace gcoalesce
