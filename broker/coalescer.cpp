#include "broker/coalescer.hpp"

#include <algorithm>
#include <limits>
#include <sstream>

#include "base/log.hpp"
#include "broker/rescue.hpp"

namespace gcoalesce {
namespace {

constexpr Nanos kMinute = 60 * kSecond;
constexpr std::size_t kMostDemotions = 1024; // invalid streams whose readers may still ask
constexpr std::size_t kMostGone = 65536;     // ids of streams that were never on disk
constexpr std::size_t kLeastDigits = 4;
constexpr std::size_t kMostQueued = 4096; // requests of a template that wait for a call of their own
constexpr Nanos kLedgerEvery = kSecond;

void set_usage(SlotEnding& ending, const Usage& usage) {
    // What tools gave the model to read is priced as the prompt is, and told apart from it.
    constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
    ending.prompt_tokens = usage.prompt + std::min(usage.tool_use, most - usage.prompt);
    ending.cached_tokens = usage.cached;
    ending.thought_tokens = usage.thoughts;
    ending.answer_tokens = usage.answer;
    ending.total_tokens = usage.total;
}

SlotEnding ending_of(const Outcome& outcome) {
    SlotEnding ending{};
    ending.kind = outcome.kind;
    ending.code = outcome.code;
    ending.upstream_status = outcome.http_status;
    ending.retry_ms = outcome.retry_ms;
    set_usage(ending, outcome.usage);
    ending.finish_reason.assign(outcome.finish_reason);
    ending.model_version.assign(outcome.model_version);
    ending.message.assign(outcome.message);
    return ending;
}

SlotEnding ending_of(gcoalesce_ending_kind kind, Code code, std::string_view message) {
    SlotEnding ending{};
    ending.kind = kind;
    ending.code = code;
    ending.message.assign(message);
    return ending;
}

tl::unexpected<Error> with_retry(tl::unexpected<Error> failure, std::int64_t retry_ms) {
    failure.value().retry_ms = std::max<std::int64_t>(retry_ms, 1);
    return failure;
}

// Passes while fewer than `most` were started within the last minute; 0: always.
Result<void> check_rate(std::deque<Nanos>& started, std::uint64_t most, Nanos now, const std::string& whose) {
    while (!started.empty() && now - started.front() >= kMinute) started.pop_front();
    if (most == 0 || started.size() < most) return {};
    return with_retry(
        fail(GCOALESCE_BUSY, "{} started {} calls within the last minute, the most allowed", whose, started.size()),
        to_ms(started.front() + kMinute - now));
}

} // namespace

struct Coalescer::TemplateState {
    std::shared_ptr<const TemplateSettings> settings;
    std::uint32_t index = 0; // in the segment
    Window window;
    Nanos pushed = 0; // when the window was last opened; 0: never
    std::size_t in_flight = 0;
    std::deque<Nanos> started; // within the last minute
    std::size_t alone = 0;     // calls under way for those whose shared answer was invalid
    bool recalled = false;     // what earlier brokers counted is in its counters
    std::deque<Waiting> queue; // those who wait for such a call
};

struct Coalescer::Running {
    std::shared_ptr<TemplateState> of;
    std::shared_ptr<const TemplateSettings> settings; // in force when it was started
    std::string model;
    Nanos opened = 0;
    bool shared = false;
    bool kept = true;           // on disk, and for later requests
    StreamId individual_of = 0; // the invalid stream that it is asked in place of
    Nanos abandoned = 0;        // since when nobody reads it; 0: somebody does
    std::unique_ptr<Producer> producer;
};

// What became of an invalid stream's readers.
struct Coalescer::Demotion {
    Key key{};
    StreamId passed = 0; // the first answer of theirs that holds; 0: none yet
};

Coalescer::Coalescer(Store& store, Upstream& upstream, Timers& timers, Snapshots* snapshots,
                     const std::vector<TemplateSettings>& templates, const ProducerLimits& producer_limits,
                     const CoalescerLimits& limits)
    : store_(store),
      upstream_(upstream),
      timers_(timers),
      snapshots_(snapshots),
      producer_limits_(producer_limits),
      limits_(limits) {
    store_.set(Counter::snapshots_off, snapshots_ == nullptr ? 1 : 0);
    for (const TemplateSettings& settings : templates) {
        const auto state = std::make_shared<TemplateState>();
        state->settings = std::make_shared<const TemplateSettings>(settings);
        state->index = store_.template_index(settings.id).value_or(0);
        recall_window(*state);
        templates_.emplace(settings.id, state);
    }
}

Coalescer::~Coalescer() = default;

// ---- requests ------------------------------------------------------------------------------------------------------

std::shared_ptr<const TemplateSettings> Coalescer::settings(std::string_view id) const {
    const auto found = templates_.find(id);
    return found == templates_.end() ? nullptr : found->second->settings;
}

Coalescer::Ticket Coalescer::open(OpenRequest request, Reply reply) {
    const Ticket ticket = ++last_ticket_;
    waiting_.insert(ticket);
    decide({ticket, std::move(request), std::move(reply)}, 0);
    return waiting_.contains(ticket) ? ticket : 0;
}

bool Coalescer::withdraw(Ticket ticket) {
    if (waiting_.erase(ticket) == 0) return false;
    // Its body may be large, and the call that it waits for may take minutes.
    for (const auto& [id, of] : templates_)
        queued_ -= std::erase_if(of->queue, [&](const Waiting& waiting) { return waiting.ticket == ticket; });
    store_.set(Counter::individuals_queued, queued_);
    return true; // a load that it waits for passes it over
}

// The first that applies, in the order that README's architecture tells. skip: a snapshot that could not be loaded.
void Coalescer::decide(Waiting waiting, StreamId skip) {
    if (!waiting_.contains(waiting.ticket)) return;
    const OpenRequest& request = waiting.request;
    if (request.resume != 0) return resume(std::move(waiting), skip);
    const auto found = templates_.find(request.settings->id);
    if (found == templates_.end())
        return refuse(waiting, {GCOALESCE_NOT_FOUND, "the template was removed meanwhile", 0});
    const std::shared_ptr<TemplateState> of = found->second;
    if (request.individual_of != 0) {
        const auto demotion = demotions_.find(request.individual_of);
        if (demotion != demotions_.end() && demotion->second.key == request.key)
            return go_alone(std::move(waiting), of);
        waiting.request.individual_of = 0; // too long ago, or never: as any other
    }
    if (request.sharing == GCOALESCE_SHARE) {
        if (joined(waiting, of)) return;
        if (const StreamId kept = kept_for(request, *of); kept != 0 && kept != skip)
            return load(kept, std::move(waiting));
    }
    if (const Result<void> allowed = check_limits(request, *of); !allowed) return refuse(waiting, allowed.error());
    start(waiting, of);
}

bool Coalescer::answer(const Waiting& waiting, StreamRef stream, gcoalesce_status status, Cost cost) {
    if (const Result<void> pinned = store_.pin(waiting.request.lane, stream); !pinned) {
        refuse(waiting, pinned.error());
        return false;
    }
    if (waiting_.erase(waiting.ticket) == 0) return true;
    const SlotOpening opening = store_.opening(stream);
    if (status == GCOALESCE_RESUMED) {
        store_.count(!store_.ended(stream)                  ? Counter::resumed_running
                     : opening.status == GCOALESCE_SNAPSHOT ? Counter::resumed_snapshot
                                                            : Counter::resumed_kept);
        store_.log(LogKind::resumed, 0, stream, waiting.request.resume_after);
    }
    store_.count_request(opening.template_index, status, cost == Cost::nothing);
    if (cost == Cost::nothing) store_.count_avoided(stream);
    waiting.reply(OpenAnswer{stream, opening.stream_id, status, store_.slot(stream.slot).key.load()});
    return true;
}

void Coalescer::refuse(const Waiting& waiting, const Error& error) {
    if (waiting_.erase(waiting.ticket) == 0) return;
    const auto of = waiting.request.settings ? templates_.find(waiting.request.settings->id) : templates_.end();
    store_.count_request(of == templates_.end() ? 0 : of->second->index, GCOALESCE_OPENING, false);
    waiting.reply(tl::unexpected<Error>(error));
}

// A stream in flight, or complete and fresh.
bool Coalescer::joined(Waiting& waiting, const std::shared_ptr<TemplateState>& of) {
    const OpenRequest& request = waiting.request;
    const auto stream = store_.find(request.key);
    if (!stream) return false;
    const Store::Joinable joinable = store_.joinable(*stream);
    if (joinable == Store::Joinable::no) return false;
    const bool fresh = joinable == Store::Joinable::fresh;
    const Nanos now = timers_.clock().monotonic();
    if (fresh && request.max_age && now - store_.slot(stream->slot).ending.load().ended_ns > *request.max_age)
        return false;
    if (const std::uint64_t most = of->settings->subscribers; most != 0 && store_.pins(*stream) >= most) {
        refuse(waiting,
               with_retry(fail(GCOALESCE_BUSY, "the stream has {} readers, the most allowed", most), 1000).value());
        return true;
    }
    const bool from_disk = store_.opening(*stream).status == GCOALESCE_SNAPSHOT;
    answer(waiting, *stream,
           from_disk ? GCOALESCE_SNAPSHOT
           : fresh   ? GCOALESCE_FRESH
                     : GCOALESCE_JOINED,
           Cost::nothing);
    return true;
}

// ---- from the disk -------------------------------------------------------------------------------------------------

// The snapshot that this request may read: one that is still fresh, or, some time after a push, one that is young
// enough for plain caching. 0: none.
StreamId Coalescer::kept_for(const OpenRequest& request, const TemplateState& of) const {
    if (snapshots_ == nullptr) return 0;
    const std::optional<SnapshotFacts> facts = snapshots_->newest(request.key);
    if (!facts) return 0;
    const Nanos now = timers_.clock().boottime();
    const Nanos age = now - facts->ended_boottime_ns;
    if (request.max_age && age > *request.max_age) return 0;
    if (now < facts->fresh_until_boottime_ns) return facts->stream_id;
    const TemplateSettings& settings = *of.settings;
    const bool quiet = of.pushed != 0 && timers_.clock().monotonic() - of.pushed >= settings.kv_after;
    return quiet && age < settings.kv_ttl ? facts->stream_id : 0;
}

void Coalescer::resume(Waiting waiting, StreamId skip) {
    const OpenRequest& request = waiting.request;
    const auto check = [&](std::uint64_t realm, std::uint64_t events, bool running) -> Result<void> {
        // As if it were not there: another realm is not told that it is.
        if (realm != 0 && realm != request.realm) return fail(GCOALESCE_NOT_FOUND, "no such stream");
        if (request.resume_after <= events) return {};
        return fail(GCOALESCE_BAD_REQUEST,
                    "expected the number of an event that was read, at most {}, found {}: the "
                    "stream {} no more",
                    events, request.resume_after, running ? "has" : "ended with");
    };
    if (const auto stream = store_.find_stream(request.resume)) {
        const Slot& slot = store_.slot(stream->slot);
        const bool running = !store_.ended(*stream);
        if (const Result<void> good =
                check(store_.opening(*stream).realm, slot.committed.load(std::memory_order_relaxed), running);
            !good)
            return refuse(waiting, good.error());
        answer(waiting, *stream, GCOALESCE_RESUMED, Cost::call); // which its first request paid, or shared
        return;
    }
    const Snapshots::Known known = snapshots_ != nullptr            ? snapshots_->known(request.resume)
                                   : gone_.contains(request.resume) ? Snapshots::Known::gone
                                                                    : Snapshots::Known::no;
    if (known == Snapshots::Known::here && request.resume != skip) {
        if (const std::optional<SnapshotFacts> facts = snapshots_->find(request.resume)) {
            if (const Result<void> good = check(facts->realm, facts->events, false); !good)
                return refuse(waiting, good.error());
            return load(request.resume, std::move(waiting));
        }
    }
    if (known == Snapshots::Known::no) return refuse(waiting, {GCOALESCE_NOT_FOUND, "no such stream", 0});
    store_.count(Counter::resumed_gone);
    refuse(waiting, {GCOALESCE_GONE, "the stream is no longer kept: ask anew", 0});
}

// One load for all who wait for the stream; then each of them is decided on again, from the beginning.
void Coalescer::load(StreamId id, Waiting waiting) {
    if (const auto stream = store_.find_stream(id); stream && store_.ended(*stream)) {
        answer(waiting, *stream, GCOALESCE_SNAPSHOT, Cost::nothing);
        return;
    }
    std::vector<Waiting>& waiters = loading_[id];
    waiters.push_back(std::move(waiting));
    if (waiters.size() > 1) return;
    snapshots_->load(id, [this, id, alive = std::weak_ptr(alive_)](Result<Snapshot> loaded) {
        if (alive.expired()) return;
        std::vector<Waiting> all = std::move(loading_[id]);
        loading_.erase(id);
        Result<void> there;
        if (snapshots_->known(id) != Snapshots::Known::here) { // purged meanwhile
            there = fail(GCOALESCE_GONE, "the stream is no longer kept: ask anew");
        } else if (!loaded) {
            there = tl::unexpected(loaded.error());
        } else if (const Result<StreamRef> restored = restore(*loaded); !restored) {
            there = tl::unexpected(restored.error());
        }
        for (Waiting& one : all) {
            if (!there && one.request.resume != 0)
                refuse(one, there.error());
            else
                decide(std::move(one), there ? 0 : id);
        }
    });
}

Result<StreamRef> Coalescer::restore(const Snapshot& snapshot) {
    const auto found = templates_.find(snapshot.facts.template_id);
    StreamOpening opening;
    opening.key = snapshot.facts.key;
    opening.stream_id = snapshot.facts.stream_id;
    opening.template_index = found == templates_.end() ? 0 : found->second->index;
    opening.method = snapshot.method;
    opening.status = GCOALESCE_SNAPSHOT;
    opening.realm = snapshot.facts.realm;
    opening.model = snapshot.model;
    opening.request = snapshot.request_head;
    opening.request_digest = snapshot.request_digest;
    const Nanos fresh_for = snapshot.facts.fresh_until_boottime_ns - timers_.clock().boottime();
    return store_.restore(opening, snapshot.events, snapshot.ending, std::max<Nanos>(fresh_for, 0));
}

// ---- after an invalid answer ---------------------------------------------------------------------------------------

void Coalescer::go_alone(Waiting waiting, const std::shared_ptr<TemplateState>& of) {
    const TemplateSettings& settings = *of->settings;
    const Demotion& demotion = demotions_[waiting.request.individual_of];
    if (!settings.strict_individual && demotion.passed != 0) {
        if (const auto passed = store_.find_stream(demotion.passed)) {
            answer(waiting, *passed, GCOALESCE_INDIVIDUAL, Cost::nothing);
            return;
        }
    }
    if (of->alone >= settings.max_individual) {
        if (of->queue.size() >= kMostQueued)
            return refuse(waiting, with_retry(fail(GCOALESCE_BUSY, "{} requests wait for a call of their own already",
                                                   of->queue.size()),
                                              1000)
                                       .value());
        of->queue.push_back(std::move(waiting));
        store_.set(Counter::individuals_queued, ++queued_);
        return;
    }
    if (const Result<void> allowed = check_limits(waiting.request, *of); !allowed)
        return refuse(waiting, allowed.error());
    store_.log(LogKind::demoted, 0, {}, of->alone, {}, of->index);
    start(waiting, of);
}

// A call of theirs is over: one that waits goes on, or several, if they need none.
void Coalescer::next_alone(const std::shared_ptr<TemplateState>& of) {
    std::deque<Waiting> queue = std::move(of->queue);
    of->queue.clear();
    queued_ -= queue.size();
    store_.set(Counter::individuals_queued, queued_);
    for (Waiting& waiting : queue) decide(std::move(waiting), 0); // who must wait still queues again, in order
}

// ---- starting and ending -------------------------------------------------------------------------------------------

Result<void> Coalescer::check_limits(const OpenRequest& request, TemplateState& of) {
    const Nanos now = timers_.clock().monotonic();
    if (draining_)
        return with_retry(fail(GCOALESCE_DRAINING, "the broker is shutting down: ask again when it is back"), 1000);
    if (running_.size() >= limits_.in_flight)
        return with_retry(fail(GCOALESCE_BUSY,
                               "as many answers are being produced as are allowed at once, {} (--max-in-flight): ask "
                               "again later",
                               running_.size()),
                          1000);
    if (const std::uint64_t most = of.settings->in_flight; most != 0 && of.in_flight >= most)
        return with_retry(fail(GCOALESCE_BUSY,
                               "template \"{}\" has {} answers being produced, the most allowed at once: ask again "
                               "later",
                               of.settings->id, of.in_flight),
                          1000);
    if (Result<void> rate = check_rate(started_, limits_.calls_a_minute, now, "the broker"); !rate) return rate;
    if (Result<void> rate =
            check_rate(of.started, of.settings->calls_a_minute, now, fmt::format("template \"{}\"", of.settings->id));
        !rate)
        return rate;
    if (const auto known = refusals_.find(request.model, request.payer(), now))
        return with_retry(fail(known->outcome.code, "{}", known->outcome.message), to_ms(known->until - now));
    if (key_missing_ && !request.api_key)
        return fail(GCOALESCE_KEY_MISSING, "the broker has no API key: put one into its credential gemini-api-key, the "
                                           "file of --api-key-file, or GEMINI_API_KEY, and restart it");
    return {};
}

void Coalescer::start(const Waiting& waiting, const std::shared_ptr<TemplateState>& of) {
    const OpenRequest& request = waiting.request;
    const bool alone = request.individual_of != 0;
    const bool shared = request.sharing != GCOALESCE_SHARE_NOT && !alone;
    const gcoalesce_status status = alone ? GCOALESCE_INDIVIDUAL : shared ? GCOALESCE_STARTED : GCOALESCE_BYPASS;
    StreamOpening opening;
    opening.key = request.key;
    opening.stream_id = random_u64();
    opening.template_index = of->index;
    opening.method = request.method;
    opening.sharing = request.sharing;
    opening.status = status;
    opening.checking = request.schema      ? AnswerChecking::checked
                       : request.unchecked ? AnswerChecking::impossible
                                           : AnswerChecking::none;
    opening.realm = request.realm;
    opening.individual_of = request.individual_of;
    opening.kept = !request.no_store && of->settings->snapshots;
    opening.model = request.model;
    opening.request = *request.body;
    opening.request_digest = request.digest;
    const Result<StreamRef> stream = store_.open(opening, shared);
    if (!stream) return refuse(waiting, stream.error());

    Running& running = running_[stream->slot];
    running.of = of;
    running.settings = of->settings;
    running.model = request.model;
    running.opened = timers_.clock().monotonic();
    running.shared = shared;
    running.kept = !request.no_store;
    running.individual_of = request.individual_of;
    ++of->in_flight;
    if (alone) ++of->alone;
    // Where its client went away nobody would read, so nothing is called. One that was answered may have left by now:
    // it wanted the call.
    if (!answer(waiting, *stream, status, Cost::call)) {
        end(*stream, ending_of(GCOALESCE_FAILED, GCOALESCE_NOT_FOUND, "its client went away"), 0);
        return;
    }
    started_.push_back(running.opened);
    of->started.push_back(running.opened);
    ProducerLimits limits = producer_limits_;
    limits.stream_bytes = of->settings->stream_bytes;
    AnswerCheck check;
    check.schema = request.schema;
    check.hold = request.schema && !of->settings->live;
    running.producer = std::make_unique<Producer>(
        store_, upstream_, timers_, refusals_, *stream,
        UpstreamCall{request.method, request.model, request.body, request.verb, request.path, request.api_key,
                     request.payer()},
        limits, std::move(check), [this, stream = *stream](const Outcome& outcome) { ended(stream, outcome); });
}

void Coalescer::ended(StreamRef stream, const Outcome& outcome) {
    const Running& running = running_.at(stream.slot);
    // Upstream's own words stay out of the log: they may repeat what was asked. Readers and `gcoalesce stats` show
    // them.
    if (outcome.code != GCOALESCE_OK && store_.note_error(outcome.code, outcome.http_status, outcome.message))
        log(LogLevel::warning,
            {{"CODE", code_name(outcome.code)},
             {"TEMPLATE", running.settings->id},
             {"HTTP_STATUS", fmt::to_string(outcome.http_status)}},
            "a stream of {} {}: {}, HTTP status {} (logged once; `gcoalesce stats` counts on)", running.model,
            outcome.kind == GCOALESCE_TRUNCATED ? "was truncated" : "failed", code_name(outcome.code),
            outcome.http_status);
    const TemplateSettings& settings = *running.settings;
    const Nanos ttl = running.of->window.touched(running.opened) ? settings.ttl_window : settings.ttl_idle;
    end(stream, ending_of(outcome), running.shared && running.kept && outcome.reusable ? ttl : 0, outcome.document);
}

// However it came about. The last thing it does may be destroying the producer that calls us.
void Coalescer::end(StreamRef stream, const SlotEnding& ending, Nanos fresh_for, std::string_view document) {
    const auto node = running_.extract(stream.slot);
    const Running& was = node.mapped();
    const std::shared_ptr<TemplateState> of = was.of;
    --of->in_flight;
    const StreamId id = store_.stream_id(stream);
    if (ending.kind == GCOALESCE_INVALID && was.shared) {
        demotions_[id].key = store_.slot(stream.slot).key.load();
        demoted_.push_back(id);
        if (demoted_.size() > kMostDemotions) {
            demotions_.erase(demoted_.front());
            demoted_.pop_front();
        }
    }
    store_.end(stream, ending, fresh_for, document);
    keep(stream, was);
    if (was.individual_of == 0) return;
    --of->alone;
    const auto demotion = demotions_.find(was.individual_of);
    if (ending.kind == GCOALESCE_COMPLETE && demotion != demotions_.end() && demotion->second.passed == 0)
        demotion->second.passed = id;
    next_alone(of);
}

// For a reason of ours. What upstream reported by then is paid for.
void Coalescer::stop(StreamRef stream, gcoalesce_ending_kind kind, Code code, std::string_view message) {
    SlotEnding ending = ending_of(kind, code, message);
    if (const auto& producer = running_.at(stream.slot).producer) set_usage(ending, producer->cancel());
    end(stream, ending, 0);
}

// Puts an ended stream on disk, or notes that it will be gone once it leaves the segment.
void Coalescer::keep(StreamRef stream, const Running& was) {
    const Slot& slot = store_.slot(stream.slot);
    const StreamId id = slot.opening.load().stream_id;
    if (snapshots_ == nullptr) {
        gone_.insert(id);
        gone_order_.push_back(id);
        if (gone_order_.size() > kMostGone) {
            gone_.erase(gone_order_.front());
            gone_order_.pop_front();
        }
        return;
    }
    const bool wanted = was.kept && was.settings->snapshots && slot.committed.load(std::memory_order_relaxed) > 0;
    std::optional<Snapshot> snapshot = wanted ? copy_stream(store_.view(), stream.slot, stream.identity) : std::nullopt;
    if (!snapshot) return snapshots_->remember_gone(id);
    const Clock& clock = timers_.clock();
    const Nanos to_boottime = clock.boottime() - clock.monotonic();
    snapshot->facts.template_id = was.settings->id;
    snapshot->facts.ended_boottime_ns = snapshot->ending.ended_ns + to_boottime;
    const Nanos fresh_until = slot.fresh_until.load(std::memory_order_relaxed);
    snapshot->facts.fresh_until_boottime_ns = fresh_until == 0 ? 0 : fresh_until + to_boottime;
    snapshots_->save(std::move(*snapshot), was.settings->snapshot_ttl);
}

void Coalescer::beat() {
    end_abandoned();
    if (snapshots_ == nullptr || timers_.clock().monotonic() - ledger_kept_ < kLedgerEvery) return;
    ledger_kept_ = timers_.clock().monotonic();
    keep_ledger();
    const SnapshotState state = snapshots_->state();
    store_.set(Counter::snapshots_kept, state.count);
    store_.set(Counter::snapshot_bytes, state.bytes);
    store_.set(Counter::snapshots_degraded, state.degraded ? 1 : 0);
    if (state.degraded) store_.note_error(GCOALESCE_IO, 0, "snapshots: degraded: " + state.reason);
}

void Coalescer::keep_ledger() {
    if (snapshots_ == nullptr || !snapshots_->ready()) return;
    for (const auto& [id, of] : templates_) {
        const std::string name = ledger_name(id);
        if (!of->recalled) {
            const LedgerCounts kept = read_ledger(snapshots_->get(name).value_or(""));
            for (std::size_t i = 0; i < kept.size(); ++i)
                store_.count(of->index, static_cast<TemplateCounter>(i), kept[i]);
            of->recalled = true;
        }
        const std::string now = write_ledger(store_.counted(of->index));
        if (std::string& kept = ledger_[id]; kept != now) snapshots_->put(name, kept = now);
    }
}

void Coalescer::end_abandoned() {
    const Nanos now = timers_.clock().monotonic();
    std::vector<StreamRef> abandoned;
    for (auto& [slot, running] : running_) {
        if (!running.settings->cancel_after) continue;
        const StreamRef stream = store_.ref(slot);
        if (store_.pins(stream) != 0) {
            running.abandoned = 0;
            continue;
        }
        if (running.abandoned == 0) running.abandoned = now;
        if (now - running.abandoned < *running.settings->cancel_after) continue;
        // Decided behind the closing: whoever comes now gets a call of his own, or is seen here.
        const bool was_open = store_.joinable(stream) != Store::Joinable::no;
        if (store_.close_to_joiners(stream) == 0) {
            abandoned.push_back(stream);
        } else {
            running.abandoned = 0;
            if (was_open) store_.reopen(stream);
        }
    }
    for (const StreamRef stream : abandoned)
        stop(stream, GCOALESCE_CANCELLED, GCOALESCE_CALL_CANCELLED, "nobody was left to read the answer");
}

void Coalescer::interrupt_all() {
    while (!running_.empty())
        stop(store_.ref(running_.begin()->first), GCOALESCE_INTERRUPTED, GCOALESCE_CLOSED,
             "the broker shut down before the answer was whole");
}

// ---- operators -----------------------------------------------------------------------------------------------------

Result<std::vector<Coalescer::TemplateState*>> Coalescer::named(const std::vector<std::string>& ids) const {
    std::vector<TemplateState*> found;
    if (ids.empty()) {
        for (const auto& [id, state] : templates_) found.push_back(state.get());
        return found;
    }
    for (const std::string& id : ids) {
        const auto one = templates_.find(id);
        if (one == templates_.end()) return fail(GCOALESCE_NOT_FOUND, "there is no template \"{}\"", id);
        found.push_back(one->second.get());
    }
    return found;
}

Result<Nanos> Coalescer::notify_on(const std::vector<std::string>& ids, Nanos duration) {
    const Result<std::vector<TemplateState*>> all = named(ids);
    if (!all) return tl::unexpected(all.error());
    const Nanos now = timers_.clock().monotonic();
    for (TemplateState* of : *all) {
        of->window.on(now, duration != 0 ? duration : of->settings->window);
        of->pushed = now;
        tell_window(*of);
        store_.log(LogKind::notify, 1, {}, static_cast<std::uint64_t>(to_ms(of->window.remaining(now))), {}, of->index);
    }
    upstream_.warm_up(); // the first request of the push finds a connection
    return window_remaining(ids);
}

Result<Nanos> Coalescer::notify_off(const std::vector<std::string>& ids) {
    const Result<std::vector<TemplateState*>> all = named(ids);
    if (!all) return tl::unexpected(all.error());
    for (TemplateState* of : *all) {
        of->window.off(timers_.clock().monotonic());
        tell_window(*of);
        store_.log(LogKind::notify, 0, {}, 0, {}, of->index);
    }
    return window_remaining(ids);
}

Result<Nanos> Coalescer::window_remaining(const std::vector<std::string>& ids) const {
    const Result<std::vector<TemplateState*>> all = named(ids);
    if (!all) return tl::unexpected(all.error());
    Nanos longest = 0;
    for (const TemplateState* of : *all) longest = std::max(longest, of->window.remaining(timers_.clock().monotonic()));
    return longest;
}

// The window survives a restart of the broker: its instants are kept by boot time.
void Coalescer::tell_window(const TemplateState& of) {
    store_.set_window(of.index, of.window.until(), of.pushed);
    if (snapshots_ == nullptr) return;
    const Clock& clock = timers_.clock();
    const Nanos to_boottime = clock.boottime() - clock.monotonic();
    snapshots_->put("window." + of.settings->id, fmt::format("{} {} {}", store_.view().header().boot_id.view(),
                                                             of.window.until() + to_boottime, of.pushed + to_boottime));
}

void Coalescer::recall_window(TemplateState& of) {
    if (snapshots_ == nullptr) return;
    const std::optional<std::string> kept = snapshots_->get("window." + of.settings->id);
    if (!kept) return;
    std::istringstream words(*kept);
    std::string boot_id;
    Nanos until = 0;
    Nanos pushed = 0;
    if (!(words >> boot_id >> until >> pushed) || boot_id != store_.view().header().boot_id.view()) return;
    const Clock& clock = timers_.clock();
    const Nanos to_monotonic = clock.monotonic() - clock.boottime();
    of.window = Window(until + to_monotonic);
    of.pushed = pushed + to_monotonic;
    store_.set_window(of.index, of.window.until(), of.pushed);
}

Result<std::vector<StreamRef>> Coalescer::named(const std::string& target) const {
    std::string hex = target;
    std::transform(hex.begin(), hex.end(), hex.begin(), [](unsigned char c) { return std::tolower(c); });
    if (hex.size() < kLeastDigits || hex.find_first_not_of("0123456789abcdef") != std::string::npos)
        return fail(GCOALESCE_BAD_REQUEST, "expected the first {} or more hex digits of a key or a stream id",
                    kLeastDigits);
    std::vector<StreamRef> found = store_.match(hex);
    for (const StreamRef stream : found) {
        if (store_.slot(stream.slot).key.load() != store_.slot(found.front().slot).key.load())
            return fail(GCOALESCE_BAD_REQUEST, "{} streams of different keys begin with \"{}\": give more digits",
                        found.size(), hex);
    }
    return found;
}

Result<std::size_t> Coalescer::cancel(const std::string& target) {
    const Result<std::vector<StreamRef>> streams = named(target);
    if (!streams) return tl::unexpected(streams.error());
    if (streams->empty()) return fail(GCOALESCE_NOT_FOUND, "no stream begins with \"{}\"", target);
    std::size_t count = 0;
    for (const StreamRef stream : *streams) {
        if (!running_.contains(stream.slot)) continue; // ended, which is what was wanted
        store_.log(LogKind::cancelled, 0, stream);
        stop(stream, GCOALESCE_CANCELLED, GCOALESCE_CALL_CANCELLED, "an operator cancelled the call");
        ++count;
    }
    return count;
}

Result<std::size_t> Coalescer::purge(gcoalesce_purge_scope scope, const std::string& target) {
    std::vector<StreamRef> streams;
    std::optional<Key> key;
    if (scope == GCOALESCE_PURGE_STREAM) {
        Result<std::vector<StreamRef>> found = named(target);
        if (!found) return tl::unexpected(found.error());
        streams = std::move(*found);
        key = streams.empty() ? parse_key(target) : store_.slot(streams.front().slot).key.load();
        const bool on_disk = key && snapshots_ != nullptr && snapshots_->newest(*key);
        if (streams.empty() && !on_disk)
            return fail(GCOALESCE_NOT_FOUND, "no stream begins with \"{}\"; what is on disk alone needs the whole key",
                        target);
    } else if (scope == GCOALESCE_PURGE_TEMPLATE) {
        const auto of = templates_.find(target);
        if (of == templates_.end()) return fail(GCOALESCE_NOT_FOUND, "there is no template \"{}\"", target);
        streams = store_.of_template(of->second->index);
    } else {
        streams = store_.match("");
    }
    std::size_t count = streams.size();
    for (const StreamRef stream : streams) {
        if (snapshots_ != nullptr && snapshots_->find(store_.stream_id(stream))) --count; // it is counted there
        if (const auto running = running_.find(stream.slot); running != running_.end()) running->second.kept = false;
        store_.drop(stream);
    }
    if (snapshots_ == nullptr) return count;
    if (key) return count + snapshots_->purge(*key);
    return count + (scope == GCOALESCE_PURGE_ALL ? snapshots_->purge_all() : snapshots_->purge_template(target));
}

Result<void> Coalescer::set_templates(const std::vector<TemplateSettings>& templates) {
    keep_ledger(); // of those that go
    if (Result<void> set = store_.set_templates(templates); !set) return set;
    std::map<std::string, std::shared_ptr<TemplateState>, std::less<>> all;
    for (const TemplateSettings& settings : templates) {
        const auto old = templates_.find(settings.id);
        const auto state = old != templates_.end() ? old->second : std::make_shared<TemplateState>();
        state->settings = std::make_shared<const TemplateSettings>(settings);
        state->index = store_.template_index(settings.id).value_or(0);
        if (old == templates_.end()) {
            recall_window(*state);
            // One that comes back has its counters still, unless its entry went to another one meanwhile.
            state->recalled = ledger_.contains(settings.id) && store_.counted(state->index) != LedgerCounts{};
        }
        all.emplace(settings.id, state);
    }
    templates_ = std::move(all);
    store_.log(LogKind::reloaded, 0, {}, templates.size());
    return {};
}

} // namespace gcoalesce
