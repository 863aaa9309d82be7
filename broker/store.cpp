#include "broker/store.hpp"

#include <algorithm>
#include <boost/interprocess/indexes/iset_index.hpp>
#include <boost/interprocess/managed_external_buffer.hpp>
#include <boost/interprocess/mem_algo/rbtree_best_fit.hpp>
#include <boost/interprocess/sync/mutex_family.hpp>
#include <fstream>
#include <unistd.h>

#include "base/units.hpp"
#include "segment/futex.hpp"

namespace gcoalesce {
namespace bip = boost::interprocess;
namespace {

constexpr std::uint64_t kMostTemplates = 256;
constexpr std::uint64_t kTemplateRoom = 32; // at least
constexpr std::uint64_t kLogRecords = 4096;
constexpr std::uint64_t kErrors = 128;
constexpr std::uint64_t kFirstExtent = 4096;
constexpr std::uint64_t kLargestExtent = 1 << 20;
constexpr std::uint64_t kLeastExtents = 256 * 1024;
constexpr std::uint64_t kRequestKept = 4096;
constexpr Nanos kMovesEvery = kSecond;
// More joins than this between two sweeps cannot have happened: a lane that says so was scribbled on.
constexpr std::uint64_t kMostJoinsASweep = 1 << 24;
// Nor can one process have this many readers of one stream.
constexpr std::uint32_t kMostPins = 1 << 24;

std::uint64_t index_entries(std::uint32_t slots) {
    return std::bit_ceil(std::uint64_t{slots} * 4);
}

std::uint64_t template_room(std::size_t templates) {
    return std::min(std::max(kTemplateRoom, 2 * std::uint64_t{templates}), kMostTemplates);
}

std::uint64_t aligned(std::uint64_t offset) {
    return (offset + 63) / 64 * 64;
}

std::string first_line_of(const char* path) {
    std::string line;
    std::ifstream file(path);
    std::getline(file, line);
    return line;
}

// Field 22 of /proc/self/stat: the clock ticks between boot and this process's start. The name, field 2, may hold
// blanks and parentheses; the last ")" ends it (proc(5)).
std::uint64_t start_ticks() {
    const std::string line = first_line_of("/proc/self/stat");
    const std::size_t name_end = line.rfind(')');
    if (name_end == std::string::npos) return 0;
    std::size_t at = name_end + 2;
    for (int field = 3; field < 22 && at != std::string::npos; ++field) {
        at = line.find(' ', at);
        if (at != std::string::npos) ++at;
    }
    return at == std::string::npos ? 0 : std::strtoull(line.c_str() + at, nullptr, 10);
}

void add(Histogram& histogram, Nanos took) {
    const std::uint64_t us = static_cast<std::uint64_t>(std::max<Nanos>(took, 0)) / 1000;
    const std::size_t bucket =
        std::min<std::size_t>(static_cast<std::size_t>(std::bit_width(us)), kHistogramBuckets - 1);
    histogram.buckets[bucket].fetch_add(1, std::memory_order_relaxed);
    histogram.sum_us.fetch_add(us, std::memory_order_relaxed);
    histogram.count.fetch_add(1, std::memory_order_release);
}

} // namespace

// The extents' book-keeping is Boost's, lies within the pool, and is nobody's business but this process's.
struct Store::Pool {
    using Buffer =
        bip::basic_managed_external_buffer<char, bip::rbtree_best_fit<bip::null_mutex_family>, bip::iset_index>;
    Buffer buffer;
    std::byte* base; // the segment's
    Pool(std::byte* segment, const Table& extents)
        : buffer(bip::create_only, segment + extents.offset, extents.count), base(segment) {}

    std::uint64_t allocate(std::uint64_t bytes) {
        void* found = buffer.allocate(bytes, std::nothrow);
        return found == nullptr ? 0 : static_cast<std::uint64_t>(static_cast<std::byte*>(found) - base);
    }
    void free(std::uint64_t offset) { buffer.deallocate(base + offset); }
    std::uint64_t available() const { return buffer.get_free_memory(); }
};

struct Store::Private {
    bool in_use = false;
    bool indexed = false;
    bool ended = false;
    Key key{};
    std::uint32_t template_index = 0;
    std::uint64_t request_extent = 0, document_extent = 0; // 0: none
    std::uint64_t last_extent = 0;                         // where the next event goes
    std::uint64_t capacity = 0;                            // of that extent
    std::uint64_t within = 0;                              // bytes of it in use
    std::uint64_t held = 0;                                // bytes of all extents
    std::uint64_t coalesced = 0; // requests that read it at no cost, before its cost was known
    bool dropped = false;
    bool served = false; // somebody was given it
    bool paid = true;    // a call was made for it
    StreamId stream_id = 0;
    Nanos opened = 0;
    Nanos ended_at = 0;
    Nanos last_left = 0; // when a subscriber was last seen
};

struct Store::LaneState {
    LaneId id;
    LanePort port;
    Lane lane;
    bool revoked = false;
    std::uint32_t changes = 0;
    struct Seen {
        std::uint32_t slot;
        std::uint32_t pins;
        std::uint32_t moves;
        Nanos moved;
        bool stray = false; // on a slot that holds nothing, at the last look
    };
    std::vector<Seen> seen; // of the pinned slots, by slot

    std::uint32_t pins(std::uint32_t slot) const { return revoked ? 0 : lane.pins(slot); }
};

// ---- making it -----------------------------------------------------------------------------------------------------

std::size_t Store::table_bytes(std::uint32_t slots, std::size_t templates) {
    std::uint64_t at = aligned(sizeof(Header));
    at = aligned(at + std::size(kCounters) * sizeof(CounterEntry));
    at = aligned(at + template_room(templates) * sizeof(TemplateEntry));
    at = aligned(at + index_entries(slots) * sizeof(IndexEntry));
    at = aligned(at + std::uint64_t{slots} * sizeof(Slot));
    at = aligned(at + kLogRecords * sizeof(LogRecord));
    return aligned(at + kErrors * sizeof(ErrorEntry));
}

Store::Store(Mapping memory, const StoreOptions& options, const Clock& clock)
    : memory_(std::move(memory)),
      options_(options),
      clock_(clock),
      header_(reinterpret_cast<Header*>(memory_.data())),
      private_(options.slots),
      subscribers_(options.slots) {}

Store::~Store() = default;

Result<void> Store::check_size(std::uint64_t bytes, std::uint32_t slots, std::size_t templates) {
    if (slots < 1 || slots > kMaxSlots)
        return fail(GCOALESCE_BAD_REQUEST, "expected 1 to {} streams, found {}", kMaxSlots, slots);
    const std::uint64_t needed = table_bytes(slots, templates) + kLeastExtents;
    if (bytes < needed)
        return fail(GCOALESCE_BAD_REQUEST,
                    "{} streams need a memory of at least {} bytes, found {}: raise --memory or "
                    "lower --streams",
                    slots, needed, bytes);
    if (templates < 1 || templates > kMostTemplates)
        return fail(GCOALESCE_BAD_REQUEST, "expected 1 to {} templates, found {}", kMostTemplates, templates);
    return {};
}

Result<std::unique_ptr<Store>> Store::create(Mapping memory, const StoreOptions& options,
                                             const std::vector<TemplateSettings>& templates, const Clock& clock) {
    if (const Result<void> fits = check_size(memory.bytes(), options.slots, templates.size()); !fits)
        return tl::unexpected(fits.error());

    std::unique_ptr<Store> store(new Store(std::move(memory), options, clock));
    std::byte* base = store->memory_.data();
    Header& header = *store->header_;
    std::uint64_t at = aligned(sizeof(Header));
    const auto place = [&](Table& table, std::uint64_t count, std::uint64_t stride) {
        table = {at, count};
        at = aligned(at + count * stride);
        return base + table.offset;
    };
    store->counters_ =
        reinterpret_cast<CounterEntry*>(place(header.counters, std::size(kCounters), sizeof(CounterEntry)));
    store->templates_ = reinterpret_cast<TemplateEntry*>(
        place(header.templates, template_room(templates.size()), sizeof(TemplateEntry)));
    store->index_ =
        reinterpret_cast<IndexEntry*>(place(header.index, index_entries(options.slots), sizeof(IndexEntry)));
    store->slots_ = reinterpret_cast<Slot*>(place(header.slots, options.slots, sizeof(Slot)));
    store->log_ = reinterpret_cast<LogRecord*>(place(header.log, kLogRecords, sizeof(LogRecord)));
    store->errors_ = reinterpret_cast<ErrorEntry*>(place(header.errors, kErrors, sizeof(ErrorEntry)));
    header.extents = {at, (store->memory_.bytes() - at) / 64 * 64};

    header.prefix.magic = kMagic;
    header.prefix.layout_major = kLayoutMajor;
    header.prefix.layout_minor = kLayoutMinor;
    header.prefix.total_bytes = store->memory_.bytes();
    header.prefix.fingerprint = kFingerprint;
    header.prefix.header_bytes = sizeof(Header);
    header.epoch = random_u64();
    header.broker_pid = ::getpid();
    header.broker_start_ticks = start_ticks();
    header.created_wall_ns = clock.wall();
    header.created_boottime_ns = clock.boottime();
    header.boot_id.assign(boot_id());
    header.instance.assign(options.instance);
    header.version.assign(GCOALESCE_VERSION);

    for (std::size_t i = 0; i < std::size(kCounters); ++i) {
        CounterText& text = store->counters_[i].text;
        text.name.assign(kCounters[i].name);
        text.unit.assign(kCounters[i].unit);
        text.help.assign(kCounters[i].help);
        text.kind = static_cast<std::uint32_t>(kCounters[i].kind);
    }
    store->free_.reserve(options.slots);
    for (std::uint32_t i = options.slots; i-- > 0;) {
        store->slots_[i].generation.store(kClosedToJoiners, std::memory_order_relaxed);
        store->free_.push_back(i);
    }
    store->pool_ = std::make_unique<Pool>(base, header.extents);
    store->template_states_.resize(header.templates.count);
    if (Result<void> set = store->set_templates(templates); !set) return tl::unexpected(set.error());
    header.extents_free.store(store->pool_->available(), std::memory_order_relaxed);
    store->heartbeat();

    header.prefix.ready.store(1, std::memory_order_relaxed); // nobody reads through this view but ourselves, yet
    Result<SegmentView> view = SegmentView::check(base, store->memory_.bytes());
    header.prefix.ready.store(0, std::memory_order_relaxed);
    if (!view) return tl::unexpected(view.error());
    store->view_ = *view;
    return store;
}

void Store::set_ready() {
    header_->state.store(static_cast<std::uint32_t>(BrokerState::serving), std::memory_order_release);
    // Publish last: whoever loads this word with acquire sees everything above.
    header_->prefix.ready.store(1, std::memory_order_release);
}

void Store::set_state(BrokerState state) {
    header_->state.store(static_cast<std::uint32_t>(state), std::memory_order_release);
}

void Store::heartbeat() {
    header_->heartbeat_wall_ns.store(clock_.wall(), std::memory_order_relaxed);
    header_->heartbeat_ns.store(clock_.monotonic(), std::memory_order_release);
}

// ---- templates -----------------------------------------------------------------------------------------------------

// The entry that has the template already, or a free one: never used, or of a template that is gone with its streams.
Result<std::uint32_t> Store::place_for(const TemplateSettings& settings) {
    std::optional<std::uint32_t> free;
    for (std::uint32_t i = 0; i < header_->templates.count; ++i) {
        const std::uint64_t sequence = templates_[i].sequence.load(std::memory_order_relaxed);
        const TemplatePolicy policy = templates_[i].policy.load();
        if (sequence != 0 && policy.id.view() == settings.id) return i;
        const bool unused =
            sequence == 0 || ((policy.flags & template_removed) != 0 && template_states_[i].streams == 0);
        if (unused && !free) free = i;
    }
    if (!free)
        return fail(GCOALESCE_BAD_REQUEST, "there is room for {} templates, and no more: restart the broker",
                    header_->templates.count);
    return *free;
}

void Store::write_policy(std::uint32_t index, const TemplateSettings& settings) {
    TemplateEntry& entry = templates_[index];
    TemplateState& state = template_states_[index];
    const TemplatePolicy old = entry.policy.load();
    TemplatePolicy policy{};
    policy.id.assign(settings.id);
    policy.revision = settings.revision;
    const auto flag = [&](bool wanted, TemplateFlags which) {
        if (wanted) policy.flags |= which;
    };
    flag(settings.fast_path(), template_fast_path);
    flag(settings.explicit_keys, template_explicit_keys);
    flag(settings.realms, template_realms);
    flag(settings.snapshots, template_snapshots);
    flag(settings.checked(), template_schema);
    flag(settings.live, template_live);
    flag(settings.strict_individual, template_strict);
    policy.max_individual = settings.max_individual;
    policy.ttl_idle = settings.ttl_idle;
    policy.ttl_window = settings.ttl_window;
    policy.window = settings.window;
    policy.linger = settings.linger;
    policy.snapshot_ttl = settings.snapshot_ttl;
    policy.kv_after = settings.kv_after;
    policy.kv_ttl = settings.kv_ttl;
    policy.cancel_after = settings.cancel_after.value_or(-1);
    policy.in_flight = settings.in_flight;
    policy.calls_a_minute = settings.calls_a_minute;
    policy.subscribers = settings.subscribers;
    policy.stream_bytes = settings.stream_bytes;
    policy.pool_bytes = header_->extents.count / 100 * settings.pool_share;
    if (const std::string_view source = settings.source(); !source.empty()) {
        if (const std::uint64_t offset = allocate(aligned(source.size())); offset != 0) {
            copy_in(memory_.data() + offset, source.data(), source.size());
            policy.source_offset = offset;
            policy.source_bytes = source.size();
        }
    }
    // A reader loads the sequence, copies, and loads it again: any change between shows (copy_in()'s argument).
    const std::uint64_t sequence = entry.sequence.load(std::memory_order_relaxed);
    const bool another = sequence == 0 || old.id.view() != settings.id;
    entry.sequence.store(sequence + 1, std::memory_order_release);
    entry.policy.store(policy);
    if (another) { // what was counted here was another template's
        for (Shared<std::uint64_t>& value : entry.counts) value.store(0, std::memory_order_relaxed);
        for (Histogram* histogram : {&entry.first_event, &entry.join}) {
            for (Shared<std::uint64_t>& value : histogram->buckets) value.store(0, std::memory_order_relaxed);
            histogram->sum_us.store(0, std::memory_order_relaxed);
            histogram->count.store(0, std::memory_order_relaxed);
        }
        entry.window_until.store(0, std::memory_order_relaxed);
        entry.pushed.store(0, std::memory_order_relaxed);
        state.held = 0;
    }
    entry.sequence.store(sequence + 2, std::memory_order_release);
    if (state.source != 0) pool_->free(state.source);
    state.source = policy.source_offset;
    state.linger = settings.linger;
    state.pool_bytes = policy.pool_bytes;
}

Result<void> Store::set_templates(const std::vector<TemplateSettings>& templates) {
    std::size_t new_ones = 0;
    std::size_t free_places = 0;
    for (std::uint32_t i = 0; i < header_->templates.count; ++i) {
        const TemplatePolicy policy = templates_[i].policy.load();
        const bool used = templates_[i].sequence.load(std::memory_order_relaxed) != 0;
        if (!used || ((policy.flags & template_removed) != 0 && template_states_[i].streams == 0)) ++free_places;
    }
    for (const TemplateSettings& settings : templates) new_ones += template_index(settings.id).has_value() ? 0 : 1;
    if (new_ones > free_places)
        return fail(GCOALESCE_BAD_REQUEST,
                    "expected at most {} templates that were not there at the start, found {}: restart the broker",
                    free_places, new_ones);
    for (std::uint32_t i = 0; i < header_->templates.count; ++i) {
        if (templates_[i].sequence.load(std::memory_order_relaxed) == 0) continue;
        const TemplatePolicy old = templates_[i].policy.load();
        const auto now = std::find_if(templates.begin(), templates.end(),
                                      [&](const TemplateSettings& settings) { return settings.id == old.id.view(); });
        if (now != templates.end() && now->revision == old.revision && (old.flags & template_removed) == 0) continue;
        for (const StreamRef stream : of_template(i)) close_to_joiners(stream);
        if (now != templates.end() || (old.flags & template_removed) != 0) continue;
        TemplatePolicy gone = old;
        gone.flags |= template_removed;
        gone.flags &= ~std::uint32_t{template_fast_path};
        const std::uint64_t sequence = templates_[i].sequence.load(std::memory_order_relaxed);
        templates_[i].sequence.store(sequence + 1, std::memory_order_release);
        templates_[i].policy.store(gone);
        templates_[i].sequence.store(sequence + 2, std::memory_order_release);
    }
    for (const TemplateSettings& settings : templates) {
        const Result<std::uint32_t> index = place_for(settings);
        if (!index) return tl::unexpected(index.error());
        write_policy(*index, settings);
    }
    header_->extents_free.store(pool_->available(), std::memory_order_relaxed);
    return {};
}

std::optional<std::uint32_t> Store::template_index(std::string_view id) const {
    for (std::uint32_t i = 0; i < header_->templates.count; ++i) {
        if (templates_[i].sequence.load(std::memory_order_relaxed) == 0) continue;
        const TemplatePolicy policy = templates_[i].policy.load();
        if (policy.id.view() == id && (policy.flags & template_removed) == 0) return i;
    }
    return std::nullopt;
}

// ---- index ---------------------------------------------------------------------------------------------------------

// The shared index is a projection of indexed_: where its probes are full, clients miss and ask.
void Store::index(std::uint32_t slot, const Key& key) {
    indexed_[key] = slot;
    private_[slot].indexed = true;
    const std::uint64_t fingerprint = key_fingerprint(key);
    const std::uint64_t mask = header_->index.count - 1;
    for (std::uint64_t probe = 0; probe < kIndexProbes; ++probe) {
        IndexEntry& entry = index_[(fingerprint + probe) & mask];
        if (entry.fingerprint.load(std::memory_order_relaxed) != 0) continue;
        entry.reference.store(index_reference(slot, slots_[slot].generation.load(std::memory_order_relaxed)),
                              std::memory_order_release);
        entry.fingerprint.store(fingerprint, std::memory_order_release);
        return;
    }
}

void Store::unindex(std::uint32_t slot) {
    Private& known = private_[slot];
    if (!known.indexed) return;
    known.indexed = false;
    const auto found = indexed_.find(known.key);
    if (found != indexed_.end() && found->second == slot) indexed_.erase(found);
    const std::uint64_t fingerprint = key_fingerprint(known.key);
    const std::uint64_t mask = header_->index.count - 1;
    for (std::uint64_t probe = 0; probe < kIndexProbes; ++probe) {
        IndexEntry& entry = index_[(fingerprint + probe) & mask];
        if (entry.fingerprint.load(std::memory_order_relaxed) == fingerprint &&
            (entry.reference.load(std::memory_order_relaxed) & 0xFFFF) == slot + 1)
            entry.fingerprint.store(0, std::memory_order_release);
    }
}

// ---- streams -------------------------------------------------------------------------------------------------------

bool Store::holds(StreamRef stream) const {
    return stream.slot < options_.slots && private_[stream.slot].in_use &&
           slots_[stream.slot].generation.load(std::memory_order_relaxed) >> 1 == stream.identity;
}

Result<StreamRef> Store::open(const StreamOpening& opening, bool indexed) {
    while (free_.empty()) {
        if (!reclaim(Wanted::slot)) {
            auto failure =
                fail(GCOALESCE_BUSY, "all {} streams of the broker are in use: ask again later, or raise --streams",
                     options_.slots);
            failure.value().retry_ms = 1000;
            return failure;
        }
    }
    const std::uint32_t number = free_.back();
    free_.pop_back();
    set(Counter::slots_in_use, streams_in_use());
    set(Counter::streams_in_flight, ++in_flight_);
    swept_to_ = std::max(swept_to_, number + 1);
    Slot& s = slots_[number];
    Private& known = private_[number];
    const Nanos now = clock_.monotonic();
    known = Private{};
    known.in_use = true;
    known.key = opening.key;
    known.template_index = opening.template_index;
    known.stream_id = opening.stream_id;
    known.opened = now;
    known.last_left = now;
    known.paid = opening.status != GCOALESCE_SNAPSHOT;
    ++template_states_[opening.template_index].streams;
    by_id_[opening.stream_id] = number;

    // The slot is closed and free: nobody but a stale joiner, who will see "closed" and go, and an inspector, who
    // checks the identity after its copy, looks at it while it is filled.
    SlotOpening facts{};
    facts.stream_id = opening.stream_id;
    facts.template_index = opening.template_index;
    facts.method = static_cast<std::uint8_t>(opening.method);
    facts.sharing = static_cast<std::uint8_t>(opening.sharing);
    facts.status = static_cast<std::uint8_t>(opening.status);
    facts.checking = static_cast<std::uint8_t>(opening.checking);
    facts.template_revision = view_.policy(opening.template_index).value_or(TemplatePolicy{}).revision;
    facts.realm = opening.realm;
    facts.individual_of = opening.individual_of;
    facts.opened_ns = now;
    facts.opened_wall_ns = clock_.wall();
    facts.request_bytes = opening.request.size();
    facts.request_digest = opening.request_digest;
    facts.model.assign(opening.model);
    if (const std::uint64_t kept = std::min<std::uint64_t>(opening.request.size(), kRequestKept); kept > 0) {
        if (const std::uint64_t offset = pool_->allocate(aligned(kept)); offset != 0) {
            copy_in(memory_.data() + offset, opening.request.data(), kept);
            facts.request_offset = offset;
            facts.request_kept = kept;
            known.request_extent = offset;
        }
    }
    s.key.store(opening.key);
    s.opening.store(facts);
    s.ending.store(SlotEnding{});
    s.committed.store(0, std::memory_order_release);
    s.committed_bytes.store(0, std::memory_order_release);
    s.first_extent.store(0, std::memory_order_release);
    s.fresh_until.store(0, std::memory_order_release);
    s.retries.store(0, std::memory_order_release);
    s.first_event_ns.store(0, std::memory_order_release);
    s.subscribers.store(0, std::memory_order_release);
    s.upstream_status.store(0, std::memory_order_release);
    s.joins.store(0, std::memory_order_release);
    s.ephemeral.store(opening.kept ? 0 : 1, std::memory_order_release);
    s.evicted.store(0, std::memory_order_release);
    s.state.store(static_cast<std::uint32_t>(SlotState::in_flight), std::memory_order_release);

    const StreamRef stream = ref(number);
    if (indexed) {
        if (const auto older = indexed_.find(opening.key); older != indexed_.end())
            close_to_joiners(ref(older->second));
        s.generation.store(stream.identity << 1, std::memory_order_seq_cst); // open to joiners: live last
        index(number, opening.key);
    }
    const bool from_disk = opening.status == GCOALESCE_SNAPSHOT;
    log(from_disk ? LogKind::restored : LogKind::started, 0, stream, opening.request.size());
    header_->extents_free.store(pool_->available(), std::memory_order_relaxed);
    return stream;
}

std::optional<StreamRef> Store::find_stream(StreamId id) const {
    const auto found = by_id_.find(id);
    if (found == by_id_.end() || private_[found->second].dropped) return std::nullopt;
    if (slots_[found->second].evicted.load(std::memory_order_relaxed) != 0) return std::nullopt;
    return ref(found->second);
}

std::vector<StreamRef> Store::match(std::string_view hex) const {
    std::vector<StreamRef> found;
    for (std::uint32_t i = 0; i < swept_to_; ++i) {
        if (!private_[i].in_use) continue;
        if (to_hex(private_[i].key).starts_with(hex) || to_hex(private_[i].stream_id).starts_with(hex))
            found.push_back(ref(i));
    }
    return found;
}

std::vector<StreamRef> Store::of_template(std::uint32_t index) const {
    std::vector<StreamRef> found;
    for (std::uint32_t i = 0; i < swept_to_; ++i) {
        if (private_[i].in_use && private_[i].template_index == index) found.push_back(ref(i));
    }
    return found;
}

bool Store::ended(StreamRef stream) const {
    return !holds(stream) || private_[stream.slot].ended;
}

std::optional<StreamRef> Store::find(const Key& key) const {
    const auto found = indexed_.find(key);
    if (found == indexed_.end()) return std::nullopt;
    return ref(found->second);
}

Store::Joinable Store::joinable(StreamRef stream) const {
    if (!holds(stream)) return Joinable::no;
    const Slot& s = slots_[stream.slot];
    if ((s.generation.load(std::memory_order_relaxed) & kClosedToJoiners) != 0) return Joinable::no;
    if (!private_[stream.slot].ended) return Joinable::in_flight;
    return clock_.monotonic() < s.fresh_until.load(std::memory_order_relaxed) ? Joinable::fresh : Joinable::no;
}

StreamId Store::stream_id(StreamRef stream) const {
    return slots_[stream.slot].opening.load().stream_id;
}

// Writes an event behind the last one; the count that shows it is the caller's to store.
Result<void> Store::put(StreamRef stream, std::string_view event) {
    Slot& s = slot(stream);
    Private& known = private_[stream.slot];
    const std::uint64_t needed = record_bytes(event.size());
    if (known.last_extent == 0 || known.capacity - known.within < needed) {
        const std::uint64_t doubled =
            known.last_extent == 0 ? kFirstExtent : std::min(2 * known.capacity, kLargestExtent);
        std::uint64_t capacity = std::max(doubled, needed);
        TemplateState& share = template_states_[known.template_index];
        if (share.held + sizeof(Extent) + capacity > share.pool_bytes) capacity = needed;
        while (share.held + sizeof(Extent) + capacity > share.pool_bytes) {
            if (!reclaim(Wanted::extents, known.template_index))
                return fail(GCOALESCE_NO_MEMORY, "the template's share of the segment, {}, is full: raise {}",
                            format_size(share.pool_bytes),
                            share.pool_bytes < header_->extents.count / 100 * 100 ? "its pool_share" : "--memory");
        }
        std::uint64_t offset = pool_->allocate(sizeof(Extent) + capacity);
        if (offset == 0) {
            capacity = needed;
            offset = allocate(sizeof(Extent) + capacity);
        }
        if (offset == 0)
            return fail(GCOALESCE_NO_MEMORY, "the segment has no room for an event of {} bytes: raise --memory",
                        event.size());
        auto& extent = *reinterpret_cast<Extent*>(memory_.data() + offset);
        extent.next.store(0, std::memory_order_release);
        extent.capacity.store(capacity, std::memory_order_release);
        if (known.last_extent == 0) {
            s.first_extent.store(offset, std::memory_order_release);
        } else {
            auto& last = *reinterpret_cast<Extent*>(memory_.data() + known.last_extent);
            if (known.capacity - known.within >= 8)
                copy_in(memory_.data() + known.last_extent + sizeof(Extent) + known.within, &kContinued, 8);
            last.next.store(offset, std::memory_order_release);
        }
        known.last_extent = offset;
        known.capacity = capacity;
        known.within = 0;
        known.held += sizeof(Extent) + capacity;
        share.held += sizeof(Extent) + capacity;
        header_->extents_free.store(pool_->available(), std::memory_order_relaxed);
    }
    std::byte* at = memory_.data() + known.last_extent + sizeof(Extent) + known.within;
    const std::uint64_t length = event.size();
    copy_in(at, &length, 8);
    copy_in(at + 8, event.data(), event.size());
    known.within += needed;
    return {};
}

Result<StreamRef> Store::restore(const StreamOpening& opening, const std::vector<std::string>& events,
                                 const SlotEnding& ending, Nanos fresh_for) {
    const Result<StreamRef> stream = open(opening, false); // closed: nobody looks at it while it is filled
    if (!stream) return stream;
    Slot& s = slot(*stream);
    std::uint64_t bytes = 0;
    for (const std::string& event : events) {
        if (const Result<void> done = put(*stream, event); !done) {
            landed(*stream);
            drop(*stream);
            return tl::unexpected(done.error());
        }
        bytes += event.size();
    }
    const Nanos now = landed(*stream);
    SlotEnding again = ending;
    again.reusable = fresh_for > 0 ? 1 : 0;
    s.ending.store(again);
    s.committed_bytes.store(bytes, std::memory_order_relaxed);
    s.committed.store(events.size(), std::memory_order_seq_cst);
    s.fresh_until.store(fresh_for > 0 ? now + fresh_for : 0, std::memory_order_release);
    s.state.store(static_cast<std::uint32_t>(SlotState::ended), std::memory_order_seq_cst);
    if (fresh_for > 0) reopen(*stream);
    return stream;
}

Result<void> Store::append(StreamRef stream, std::string_view event) {
    if (!holds(stream) || private_[stream.slot].ended)
        return fail(GCOALESCE_INTERNAL, "an event for a stream that is not in flight");
    if (Result<void> done = put(stream, event); !done) return done;
    Slot& s = slot(stream);
    Private& known = private_[stream.slot];
    const std::uint64_t committed = s.committed.load(std::memory_order_relaxed);
    if (committed == 0) {
        const Nanos now = clock_.monotonic();
        s.first_event_ns.store(now, std::memory_order_relaxed);
        add(templates_[known.template_index].first_event, now - known.opened);
        log(LogKind::first_event, 0, stream, static_cast<std::uint64_t>(to_ms(now - known.opened)));
    }
    s.committed_bytes.store(s.committed_bytes.load(std::memory_order_relaxed) + event.size(),
                            std::memory_order_relaxed);
    // Publish: everything above is visible to whoever loads this count (release), and this store comes before the
    // loads of `asked` in publish() (seq_cst).
    s.committed.store(committed + 1, std::memory_order_seq_cst);
    count(Counter::events_published);
    count(Counter::bytes_published, event.size());
    publish(s, stream.slot);
    return {};
}

void Store::publish(Slot& s, std::uint32_t number) {
    // Readers load `wake`, then the counts, then sleep on the `wake` that they loaded: having stored the counts first,
    // either they see the new counts or the kernel sees that `wake` has changed.
    s.wake.fetch_add(1, std::memory_order_seq_cst);
    count(Counter::wakes_futex);
    futex_wake_all(s.wake);
    for (const auto& lane : lanes_) {
        if (lane->lane.pins(number) == 0 || !lane->lane.take_ask()) continue;
        count(lane->port.send_wake() ? Counter::wakes_socket : Counter::wakes_socket_failed);
    }
}

// Nothing more comes to the stream. Returns the time.
Nanos Store::landed(StreamRef stream) {
    Private& known = private_[stream.slot];
    const Nanos now = clock_.monotonic();
    known.ended = true;
    known.ended_at = now;
    known.last_left = now;
    set(Counter::streams_in_flight, --in_flight_);
    return now;
}

void Store::end(StreamRef stream, SlotEnding ending, Nanos fresh_for, std::string_view document) {
    if (!holds(stream) || private_[stream.slot].ended) return;
    Slot& s = slot(stream);
    Private& known = private_[stream.slot];
    const bool open_to_joiners = (s.generation.load(std::memory_order_relaxed) & kClosedToJoiners) == 0;
    const bool reusable = fresh_for > 0 && open_to_joiners;
    if (!reusable) close_to_joiners(stream); // first; the ending shows after
    const Nanos now = landed(stream);
    ending.ended_ns = now;
    ending.ended_wall_ns = clock_.wall();
    ending.reusable = reusable ? 1 : 0;
    ending.document_offset = ending.document_bytes = 0;
    const bool kept = !document.empty() && document.size() <= kMostDocument;
    if (const std::uint64_t offset = kept ? pool_->allocate(aligned(document.size())) : 0; offset != 0) {
        copy_in(memory_.data() + offset, document.data(), document.size());
        known.document_extent = ending.document_offset = offset;
        ending.document_bytes = document.size();
    }
    s.ending.store(ending);
    s.fresh_until.store(reusable ? now + fresh_for : 0, std::memory_order_release);
    s.state.store(static_cast<std::uint32_t>(SlotState::ended), std::memory_order_seq_cst);
    switch (ending.kind) {
    case GCOALESCE_COMPLETE: count(Counter::streams_complete); break;
    case GCOALESCE_TRUNCATED: count(Counter::streams_truncated); break;
    case GCOALESCE_INVALID: count(Counter::streams_invalid); break;
    case GCOALESCE_CANCELLED: count(Counter::streams_cancelled); break;
    case GCOALESCE_INTERRUPTED: count(Counter::streams_interrupted); break;
    default: count(Counter::streams_failed); break;
    }
    if (reusable) count(Counter::streams_reusable);
    if (known.paid) {
        const auto told = [](std::int64_t tokens) {
            return static_cast<std::uint64_t>(std::max<std::int64_t>(tokens, 0));
        };
        count(Counter::tokens_prompt, told(ending.prompt_tokens));
        count(Counter::tokens_answer, told(ending.answer_tokens));
        count(Counter::tokens_thoughts, told(ending.thought_tokens));
        count(known.template_index, TemplateCounter::prompt_tokens_paid,
              told(ending.prompt_tokens - ending.cached_tokens));
        count(known.template_index, TemplateCounter::cached_tokens_paid, told(ending.cached_tokens));
        count(known.template_index, TemplateCounter::thought_tokens_paid, told(ending.thought_tokens));
        count(known.template_index, TemplateCounter::answer_tokens_paid, told(ending.answer_tokens));
    }
    count_tokens_avoided(stream.slot, known.coalesced);
    const bool complete = ending.kind == GCOALESCE_COMPLETE;
    log(LogKind::ended, ending.kind, stream, s.committed.load(std::memory_order_relaxed),
        complete ? ending.finish_reason.view() : code_name(static_cast<Code>(ending.code)));
    publish(s, stream.slot);
}

void Store::count_retry(StreamRef stream, Code failure, int upstream_status, Nanos again_in) {
    if (!holds(stream)) return;
    set_upstream_status(stream, upstream_status);
    const std::uint32_t retry = slot(stream).retries.fetch_add(1, std::memory_order_relaxed) + 1;
    log(LogKind::retry, failure, stream, retry, format_duration(again_in));
}

void Store::set_upstream_status(StreamRef stream, int status) {
    if (holds(stream))
        slot(stream).upstream_status.store(static_cast<std::uint32_t>(status), std::memory_order_relaxed);
}

// ---- closing, retiring, evicting -----------------------------------------------------------------------------------

std::uint64_t Store::pins_on(std::uint32_t number) const {
    std::uint64_t pins = 0;
    for (const auto& lane : lanes_) pins += lane->pins(number);
    return pins;
}

std::uint64_t Store::close_to_joiners(StreamRef stream) {
    if (!holds(stream)) return 0;
    unindex(stream.slot);
    // The broker's half of the handshake of lane.hpp: the closed bit first, the pins after, both seq_cst.
    slot(stream).generation.fetch_or(kClosedToJoiners, std::memory_order_seq_cst);
    return pins_on(stream.slot);
}

void Store::reopen(StreamRef stream) {
    if (!holds(stream)) return;
    const auto newer = indexed_.find(private_[stream.slot].key);
    if (newer != indexed_.end() && newer->second != stream.slot) return; // requests find another stream by now
    slot(stream).generation.fetch_and(~kClosedToJoiners, std::memory_order_seq_cst);
    if (!private_[stream.slot].indexed) index(stream.slot, private_[stream.slot].key);
}

void Store::drop(StreamRef stream) {
    if (!holds(stream)) return;
    close_to_joiners(stream);
    private_[stream.slot].dropped = true;
    slot(stream).ephemeral.store(1, std::memory_order_release);
    count(Counter::streams_purged);
    log(LogKind::purged, 0, stream);
    retire(stream); // else with its last reader
}

bool Store::retire(StreamRef stream) {
    if (!holds(stream) || !private_[stream.slot].ended) return false;
    Slot& s = slot(stream);
    if ((s.generation.load(std::memory_order_relaxed) & kClosedToJoiners) == 0) return false;
    if (pins_on(stream.slot) != 0) return false;                    // look again later
    for (const auto& lane : lanes_) take_joins(*lane, stream.slot); // they are not the next one's
    Private& known = private_[stream.slot];
    log(LogKind::retired, 0, stream, s.committed.load(std::memory_order_relaxed));
    // Free before the identity advances: nobody finds the old stream's facts under the new identity. That advances
    // before any byte is written anew: an inspector's check after its copy sees it (copy_in()). An exchange, since the
    // pool's book-keeping writes into freed extents with plain stores.
    s.state.store(static_cast<std::uint32_t>(SlotState::free), std::memory_order_release);
    s.generation.exchange(((stream.identity + 1) << 1) | kClosedToJoiners, std::memory_order_seq_cst);
    free_extents(stream.slot);
    if (known.request_extent != 0) pool_->free(known.request_extent);
    if (known.document_extent != 0) pool_->free(known.document_extent);
    s.subscribers.store(0, std::memory_order_relaxed);
    if (const auto found = by_id_.find(known.stream_id); found != by_id_.end() && found->second == stream.slot)
        by_id_.erase(found);
    --template_states_[known.template_index].streams;
    known = Private{};
    free_.push_back(stream.slot);
    set(Counter::slots_in_use, streams_in_use());
    count(Counter::streams_retired);
    header_->extents_free.store(pool_->available(), std::memory_order_relaxed);
    return true;
}

void Store::free_extents(std::uint32_t number) {
    std::uint64_t offset = slots_[number].first_extent.load(std::memory_order_relaxed);
    while (offset != 0) {
        const auto& extent = *reinterpret_cast<const Extent*>(memory_.data() + offset);
        const std::uint64_t next = extent.next.load(std::memory_order_relaxed);
        pool_->free(offset);
        offset = next;
    }
    slots_[number].first_extent.store(0, std::memory_order_release);
    template_states_[private_[number].template_index].held -= private_[number].held;
    private_[number].held = 0;
}

void Store::evict(StreamRef stream) {
    if (!holds(stream) || !private_[stream.slot].ended) return;
    close_to_joiners(stream);
    Slot& s = slot(stream);
    s.evicted.store(1, std::memory_order_seq_cst);
    count(Counter::streams_evicted);
    log(LogKind::evicted, 0, stream);
    // Before the extents are freed: the pool's book-keeping writes into them at once, with plain stores, and the system
    // call in here keeps those behind `evicted` on every machine.
    publish(s, stream.slot);
    free_extents(stream.slot);
}

std::uint64_t Store::allocate(std::uint64_t bytes) {
    for (;;) {
        if (const std::uint64_t offset = pool_->allocate(bytes); offset != 0) return offset;
        if (!reclaim(Wanted::extents)) return 0;
    }
}

// Oldest first: what nobody reads and is past its freshness, then what nobody reads, then what only readers that stand
// still hold; at the very last the pins of the lane that holds most.
bool Store::reclaim(Wanted wanted, std::optional<std::uint32_t> only) {
    const Nanos now = clock_.monotonic();
    for (const bool fresh_too : {false, true}) {
        std::vector<std::uint32_t> candidates;
        for (std::uint32_t i = 0; i < swept_to_; ++i) {
            const Private& known = private_[i];
            if (!known.in_use || !known.ended) continue;
            if (only && (known.template_index != *only || known.held == 0)) continue;
            if (!fresh_too && now < slots_[i].fresh_until.load(std::memory_order_relaxed)) continue;
            candidates.push_back(i);
        }
        std::sort(candidates.begin(), candidates.end(),
                  [&](std::uint32_t a, std::uint32_t b) { return private_[a].ended_at < private_[b].ended_at; });
        for (const std::uint32_t i : candidates) {
            const StreamRef stream = ref(i);
            const bool was_open = joinable(stream) != Joinable::no;
            // A late joiner's passing pin may show up at the second look: then another one goes.
            if (close_to_joiners(stream) == 0 && retire(stream)) return true;
            if (was_open) reopen(stream);
        }
    }
    if (wanted == Wanted::extents) { // an eviction frees no slot
        std::vector<std::uint32_t> candidates;
        for (std::uint32_t i = 0; i < swept_to_; ++i) {
            const Private& known = private_[i];
            if (only && known.template_index != *only) continue;
            if (known.in_use && known.ended && known.held != 0 && stalled_only(i, now)) candidates.push_back(i);
        }
        std::sort(candidates.begin(), candidates.end(),
                  [&](std::uint32_t a, std::uint32_t b) { return private_[a].held > private_[b].held; });
        for (const std::uint32_t i : candidates) {
            // Decided behind the closing, as everything that rests on who reads: a newcomer has moved (try_join()).
            const StreamRef stream = ref(i);
            const bool was_open = joinable(stream) != Joinable::no;
            close_to_joiners(stream);
            if (stalled_only(i, now)) {
                evict(stream);
                return true;
            }
            if (was_open) reopen(stream);
        }
    }
    return !only && revoke_greediest(now);
}

// Whether every lane that pins the slot has had no reader of it move for the stall timeout.
bool Store::stalled_only(std::uint32_t number, Nanos now) const {
    for (const auto& lane : lanes_) {
        if (lane->pins(number) == 0) continue;
        const auto seen = std::lower_bound(lane->seen.begin(), lane->seen.end(), number,
                                           [](const LaneState::Seen& a, std::uint32_t b) { return a.slot < b; });
        if (seen == lane->seen.end() || seen->slot != number) return false;
        if (seen->moves != lane->lane.entry(number).moves.load(std::memory_order_relaxed)) return false;
        if (now - seen->moved < options_.stall_timeout) return false;
    }
    return true;
}

// The quota of one lane: under pressure, half of the slots or of the pool, in streams that ended longer than the stall
// timeout ago. A client within its rights never comes near: its readers move on and leave.
bool Store::revoke_greediest(Nanos now) {
    LaneState* greediest = nullptr;
    std::uint64_t most = 0;
    for (const auto& lane : lanes_) {
        if (lane->revoked) continue;
        std::uint64_t slots = 0;
        std::uint64_t bytes = 0;
        for (std::uint32_t i = 0; i < swept_to_; ++i) {
            if (!private_[i].in_use || !private_[i].ended || lane->pins(i) == 0) continue;
            if (now - private_[i].ended_at < options_.stall_timeout) continue;
            ++slots;
            bytes += private_[i].held;
        }
        if (slots <= options_.slots / 2 && bytes <= header_->extents.count / 2) continue;
        if (slots + bytes > most) {
            most = slots + bytes;
            greediest = lane.get();
        }
    }
    if (greediest == nullptr) return false;
    revoke_lane(greediest->id);
    return true;
}

// ---- lanes ---------------------------------------------------------------------------------------------------------

void Store::add_lane(LaneId id, LanePort port) {
    auto state = std::make_unique<LaneState>();
    state->id = id;
    state->port = std::move(port);
    state->lane = Lane(state->port.mapping.data(), options_.slots);
    log(LogKind::attached, 0, {}, static_cast<std::uint64_t>(state->port.pid), state->port.client_name);
    lanes_.push_back(std::move(state));
    set(Counter::clients_attached, lanes_.size());
}

void Store::forget(LaneState& lane) {
    const Nanos now = clock_.monotonic();
    for (const LaneState::Seen& seen : lane.seen) {
        subscribers_[seen.slot] -= seen.pins;
        private_[seen.slot].last_left = now;
    }
    lane.seen.clear();
}

void Store::remove_lane(LaneId id) {
    const auto found = std::find_if(lanes_.begin(), lanes_.end(), [&](const auto& lane) { return lane->id == id; });
    if (found == lanes_.end()) return;
    if (!(*found)->revoked) fold(**found, clock_.monotonic()); // its last joins still count
    forget(**found);
    (*found)->lane.header().revoked.store(1, std::memory_order_release); // should its process live on
    log(LogKind::detached, 0, {}, static_cast<std::uint64_t>((*found)->port.pid), (*found)->port.client_name);
    lanes_.erase(found);
    set(Counter::clients_attached, lanes_.size());
}

void Store::revoke_lane(LaneId id) {
    for (const auto& lane : lanes_) {
        if (lane->id != id || lane->revoked) continue;
        // The client's readers check the slot's identity and `evicted` after every copy, so what they hold stays safe
        // to read whatever happens to the slots; this word only tells them sooner and by name.
        lane->lane.header().revoked.store(1, std::memory_order_release);
        lane->revoked = true;
        forget(*lane);
        count(Counter::lanes_revoked);
        log(LogKind::revoked, 0, {}, static_cast<std::uint64_t>(lane->port.pid), lane->port.client_name);
        lane->port.send_wake();
    }
}

Result<void> Store::pin(LaneId id, StreamRef stream) {
    for (const auto& lane : lanes_) {
        if (lane->id != id) continue;
        if (lane->revoked) return fail(GCOALESCE_EVICTED, "this client's pins were taken away: attach again");
        lane->lane.pin(stream.slot);
        private_[stream.slot].last_left = clock_.monotonic();
        for (LaneState::Seen& seen : lane->seen) { // a new reader has the stall timeout before it
            if (seen.slot == stream.slot) seen.moved = clock_.monotonic();
        }
        // It was opened for the first one.
        if (std::exchange(private_[stream.slot].served, true))
            slots_[stream.slot].joins.fetch_add(1, std::memory_order_relaxed);
        return {};
    }
    return fail(GCOALESCE_NOT_FOUND, "no such attachment");
}

// Counts what joined the slot through this lane since the last look.
void Store::take_joins(LaneState& lane, std::uint32_t number) {
    PinEntry& entry = lane.lane.entry(number);
    const Private& known = private_[number];
    for (const auto& [word, status] : {std::pair{&entry.joined, GCOALESCE_JOINED}, {&entry.fresh, GCOALESCE_FRESH}}) {
        const std::uint32_t joins = word->load(std::memory_order_relaxed);
        if (joins == 0) continue;
        word->fetch_sub(joins, std::memory_order_relaxed);
        if (!known.in_use || joins >= kMostJoinsASweep) continue;
        slots_[number].joins.fetch_add(joins, std::memory_order_relaxed);
        count_request(known.template_index, status, true, joins);
        count_avoided(ref(number), joins);
    }
}

void Store::fold(LaneState& state, Nanos now) {
    const LaneHeader& header = state.lane.header();
    // Loaded before the entries: what changes while we look makes the next sweep look again.
    const std::uint32_t changes = header.changes.load(std::memory_order_acquire);
    if (changes == state.changes) return;
    state.changes = changes;

    std::vector<LaneState::Seen> seen;
    auto old = state.seen.begin();
    for (std::uint32_t i = 0; i < swept_to_; ++i) {
        PinEntry& entry = state.lane.entry(i);
        const std::uint32_t pins = entry.pins.load(std::memory_order_relaxed);
        const bool joins =
            entry.joined.load(std::memory_order_relaxed) != 0 || entry.fresh.load(std::memory_order_relaxed) != 0;
        const bool was = old != state.seen.end() && old->slot == i;
        if (pins == 0 && !joins && !was) continue;
        Private& known = private_[i];
        if (joins) {
            take_joins(state, i);
            known.last_left = now;
        }
        const std::uint32_t before = was ? old->pins : 0;
        subscribers_[i] += pins;
        subscribers_[i] -= before;
        if (pins != before) known.last_left = now;
        if (pins != 0) {
            if (was && pins == before && !joins)
                seen.push_back(*old);
            else
                seen.push_back({i, pins, entry.moves.load(std::memory_order_relaxed), now});
        }
        if (was) ++old;
    }
    state.seen = std::move(seen);
    // At once: meanwhile nothing can be retired.
    if (std::any_of(state.seen.begin(), state.seen.end(), [](const auto& one) { return one.pins > kMostPins; }))
        revoke_lane(state.id);
}

// A joiner pins a slot that holds nothing for an instant at most, before it looks at the generation. A lane that keeps
// such a pin from one look to the next was scribbled on, as one that has more pins than readers can be: nothing it says
// counts.
void Store::look_at_moves(LaneState& lane, Nanos now) {
    for (LaneState::Seen& seen : lane.seen) {
        const bool stray = !private_[seen.slot].in_use;
        if (stray && seen.stray) return revoke_lane(lane.id);
        seen.stray = stray;
        const std::uint32_t moves = lane.lane.entry(seen.slot).moves.load(std::memory_order_relaxed);
        if (moves == seen.moves) continue;
        seen.moves = moves;
        seen.moved = now;
    }
}

void Store::sweep() {
    const Nanos now = clock_.monotonic();
    for (const auto& lane : lanes_) {
        if (!lane->revoked) fold(*lane, now);
    }
    if (now - moves_seen_ >= kMovesEvery) {
        moves_seen_ = now;
        for (const auto& lane : lanes_) look_at_moves(*lane, now);
    }
    for (std::uint32_t i = 0; i < swept_to_; ++i) {
        Private& known = private_[i];
        if (!known.in_use) continue;
        slots_[i].subscribers.store(static_cast<std::uint32_t>(std::min<std::uint64_t>(subscribers_[i], UINT32_MAX)),
                                    std::memory_order_relaxed);
        if (!known.ended || subscribers_[i] != 0) continue;
        const bool evicted = slots_[i].evicted.load(std::memory_order_relaxed) != 0;
        const Nanos linger = template_states_[known.template_index].linger;
        if (!evicted && !known.dropped &&
            (now - known.last_left < linger || now < slots_[i].fresh_until.load(std::memory_order_relaxed)))
            continue;
        const StreamRef stream = ref(i);
        close_to_joiners(stream);
        retire(stream);
    }
}

// ---- telling people ------------------------------------------------------------------------------------------------

void Store::count(Counter counter, std::uint64_t add) {
    // One writer: no read-modify-write needed.
    Shared<std::uint64_t>& value = counters_[static_cast<std::size_t>(counter)].value;
    value.store(value.load(std::memory_order_relaxed) + add, std::memory_order_relaxed);
}

std::uint64_t Store::counted(Counter counter) const {
    return counters_[static_cast<std::size_t>(counter)].value.load(std::memory_order_relaxed);
}

void Store::set(Counter counter, std::uint64_t value) {
    counters_[static_cast<std::size_t>(counter)].value.store(value, std::memory_order_relaxed);
}

void Store::log(LogKind kind, std::int32_t code, std::optional<StreamRef> stream, std::uint64_t number,
                std::string_view text, std::uint32_t template_index) {
    const std::uint64_t next = header_->log_next.load(std::memory_order_relaxed);
    LogRecord& record = log_[next % header_->log.count];
    LogFacts facts{};
    facts.when_ns = clock_.monotonic();
    facts.when_wall_ns = clock_.wall();
    facts.kind = static_cast<std::uint32_t>(kind);
    facts.code = code;
    facts.number = number;
    facts.template_index = template_index;
    facts.text.assign(text);
    if (stream && holds(*stream)) {
        facts.template_index = private_[stream->slot].template_index;
        facts.upstream_status =
            static_cast<std::int32_t>(slot(*stream).upstream_status.load(std::memory_order_relaxed));
        facts.stream_id = slot(*stream).opening.load().stream_id;
        facts.key_prefix = key_fingerprint(private_[stream->slot].key);
    }
    // A reader loads the sequence, copies, and loads it again: any change between shows (copy_in()'s argument).
    record.sequence.store(2 * next + 1, std::memory_order_release);
    record.facts.store(facts);
    record.sequence.store(2 * next + 2, std::memory_order_release);
    header_->log_next.store(next + 1, std::memory_order_release);
}

bool Store::note_error(Code code, int upstream_status, std::string_view message) {
    const std::int64_t now = clock_.wall();
    ErrorEntry* place = nullptr;
    std::int64_t oldest = INT64_MAX;
    ErrorFacts facts{};
    facts.message.assign(message);
    for (std::uint64_t i = 0; i < header_->errors.count; ++i) {
        const ErrorFacts known = errors_[i].facts.load();
        if (known.code == code && known.upstream_status == upstream_status &&
            known.message.view() == facts.message.view()) {
            place = &errors_[i];
            facts.first_wall_ns = known.first_wall_ns;
            break;
        }
        if (known.last_wall_ns < oldest) { // free entries have 0
            oldest = known.last_wall_ns;
            place = &errors_[i];
        }
    }
    const bool known = facts.first_wall_ns != 0;
    facts.code = code;
    facts.upstream_status = upstream_status;
    facts.last_wall_ns = now;
    if (!known) facts.first_wall_ns = now;
    const std::uint64_t sequence = place->sequence.load(std::memory_order_relaxed);
    place->sequence.store(sequence + 1, std::memory_order_release);
    place->facts.store(facts);
    place->count.store(known ? place->count.load(std::memory_order_relaxed) + 1 : 1, std::memory_order_release);
    place->sequence.store(sequence + 2, std::memory_order_release);
    return !known;
}

void Store::set_window(std::uint32_t template_index, Nanos until, Nanos pushed) {
    templates_[template_index].window_until.store(until, std::memory_order_release);
    templates_[template_index].pushed.store(pushed, std::memory_order_release);
}

void Store::count(std::uint32_t template_index, TemplateCounter counter, std::uint64_t add) {
    Shared<std::uint64_t>& value = templates_[template_index].counts[static_cast<std::size_t>(counter)];
    value.store(value.load(std::memory_order_relaxed) + add, std::memory_order_relaxed);
}

std::uint64_t Store::counted(std::uint32_t template_index, TemplateCounter counter) const {
    return templates_[template_index].counts[static_cast<std::size_t>(counter)].load(std::memory_order_relaxed);
}

void Store::count_request(std::uint32_t template_index, gcoalesce_status status, bool coalesced, std::uint64_t add) {
    constexpr Counter totals[] = {Counter::requests_refused,    Counter::requests_started,  Counter::requests_joined,
                                  Counter::requests_fresh,      Counter::requests_snapshot, Counter::requests_resumed,
                                  Counter::requests_individual, Counter::requests_bypass};
    count(totals[status], add);
    count(template_index, static_cast<TemplateCounter>(status), add); // the first of them are by status
    if (status == GCOALESCE_OPENING || status == GCOALESCE_RESUMED) return;
    const Nanos pushed = templates_[template_index].pushed.load(std::memory_order_relaxed);
    const Nanos since = pushed == 0 ? 3600 * kSecond : clock_.monotonic() - pushed;
    const std::uint32_t bucket = since < 5 * kSecond ? 0 : since < 10 * kSecond ? 1 : since < 30 * kSecond ? 2 : 3;
    const auto nth = [&](TemplateCounter first) {
        return static_cast<TemplateCounter>(static_cast<std::uint32_t>(first) + bucket);
    };
    count(template_index, nth(TemplateCounter::requests_0s), add);
    if (coalesced) count(template_index, nth(TemplateCounter::coalesced_0s), add);
}

void Store::count_avoided(StreamRef stream, std::uint64_t add) {
    if (!holds(stream)) return;
    if (private_[stream.slot].ended)
        count_tokens_avoided(stream.slot, add);
    else
        private_[stream.slot].coalesced += add; // until its cost is known
}

void Store::count_tokens_avoided(std::uint32_t number, std::uint64_t times) {
    if (times == 0) return;
    const SlotEnding ending = slots_[number].ending.load();
    const auto add = [&](TemplateCounter counter, std::int64_t tokens) {
        count(private_[number].template_index, counter,
              static_cast<std::uint64_t>(std::max<std::int64_t>(tokens, 0)) * times);
    };
    add(TemplateCounter::prompt_tokens_avoided, ending.prompt_tokens - ending.cached_tokens);
    add(TemplateCounter::cached_tokens_avoided, ending.cached_tokens);
    add(TemplateCounter::thought_tokens_avoided, ending.thought_tokens);
    add(TemplateCounter::answer_tokens_avoided, ending.answer_tokens);
}

void Store::count_join_time(std::uint32_t template_index, Nanos took) {
    add(templates_[template_index].join, took);
}

std::size_t Store::streams_in_use() const {
    return options_.slots - free_.size();
}

} // namespace gcoalesce
