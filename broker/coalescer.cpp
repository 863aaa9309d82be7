#include "broker/coalescer.hpp"

#include <algorithm>

#include "base/log.hpp"

namespace gcoalesce {
namespace {

constexpr Nanos kMinute = 60 * kSecond;
constexpr std::size_t kMostRefusals = 1024; // models remembered as refusing

SlotEnding ending_of(const Outcome& outcome) {
    SlotEnding ending{};
    ending.kind = outcome.kind;
    ending.code = outcome.code;
    ending.upstream_status = outcome.http_status;
    ending.retry_ms = outcome.retry_ms;
    ending.prompt_tokens = outcome.usage.prompt;
    ending.cached_tokens = outcome.usage.cached;
    ending.thought_tokens = outcome.usage.thoughts;
    ending.answer_tokens = outcome.usage.answer;
    ending.total_tokens = outcome.usage.total;
    ending.finish_reason.assign(outcome.finish_reason);
    ending.model_version.assign(outcome.model_version);
    ending.message.assign(outcome.message);
    return ending;
}

tl::unexpected<Error> with_retry(tl::unexpected<Error> failure, std::int64_t retry_ms) {
    failure.value().retry_ms = std::max<std::int64_t>(retry_ms, 1);
    return failure;
}

} // namespace

Coalescer::Coalescer(Store& store, Upstream& upstream, Timers& timers, const TemplateSettings& settings,
                     const ProducerLimits& producer_limits, const CoalescerLimits& limits)
    : store_(store),
      upstream_(upstream),
      timers_(timers),
      settings_(settings),
      producer_limits_(producer_limits),
      limits_(limits) {}

Coalescer::~Coalescer() = default;

// The first that applies, in the order that README's architecture gives.
Result<OpenAnswer> Coalescer::open(const OpenRequest& request) {
    if (request.sharing == GCOALESCE_SHARE) {
        if (const auto stream = store_.find(request.key)) {
            const Store::Joinable joinable = store_.joinable(*stream);
            if (joinable != Store::Joinable::no) {
                if (limits_.subscribers != 0 && store_.pins(*stream) >= limits_.subscribers)
                    return with_retry(
                        fail(GCOALESCE_BUSY, "the stream has its {} readers already", limits_.subscribers), 1000);
                if (Result<void> pinned = store_.pin(request.lane, *stream); !pinned)
                    return tl::unexpected(pinned.error());
                const bool fresh = joinable == Store::Joinable::fresh;
                store_.count(fresh ? Counter::requests_fresh : Counter::requests_joined);
                return OpenAnswer{*stream, store_.stream_id(*stream), fresh ? GCOALESCE_FRESH : GCOALESCE_JOINED};
            }
        }
    }
    if (Result<void> allowed = check_limits(request); !allowed) return tl::unexpected(allowed.error());
    return start(request);
}

Result<void> Coalescer::check_limits(const OpenRequest& request) {
    const Nanos now = timers_.clock().monotonic();
    if (draining_)
        return with_retry(fail(GCOALESCE_DRAINING, "the broker is shutting down: ask again when it is back"), 1000);
    if (producers_.size() >= limits_.in_flight)
        return with_retry(fail(GCOALESCE_BUSY,
                               "{} answers are being produced, the most allowed at once: ask again later",
                               producers_.size()),
                          1000);
    while (!started_.empty() && now - started_.front() >= kMinute) started_.pop_front();
    if (limits_.calls_a_minute != 0 && started_.size() >= limits_.calls_a_minute)
        return with_retry(
            fail(GCOALESCE_BUSY, "{} calls were started within the last minute, the most allowed", started_.size()),
            to_ms(started_.front() + kMinute - now));
    if (const auto known = refusals_.find(request.model); known != refusals_.end()) {
        if (now < known->second.until)
            return with_retry(fail(known->second.outcome.code, "{}", known->second.outcome.message),
                              to_ms(known->second.until - now));
        refusals_.erase(known);
    }
    if (key_missing_)
        return fail(GCOALESCE_KEY_MISSING, "the broker has no API key: put one into its credential gemini-api-key, the "
                                           "file of --api-key-file, or GEMINI_API_KEY, and restart it");
    return {};
}

Result<OpenAnswer> Coalescer::start(const OpenRequest& request) {
    const bool shared = request.sharing != GCOALESCE_SHARE_NOT;
    StreamOpening opening;
    opening.key = request.key;
    opening.stream_id = random_u64();
    opening.method = request.method;
    opening.sharing = request.sharing;
    opening.model = request.model;
    opening.request = *request.body;
    const Result<StreamRef> stream = store_.open(opening, shared);
    if (!stream) return tl::unexpected(stream.error());
    if (Result<void> pinned = store_.pin(request.lane, *stream); !pinned) {
        // The lane went away between asking and now: nobody would read, so nothing is called.
        SlotEnding ending{};
        ending.kind = GCOALESCE_FAILED;
        ending.code = pinned.error().code;
        store_.end(*stream, ending, 0);
        return tl::unexpected(pinned.error());
    }
    const Nanos now = timers_.clock().monotonic();
    if (limits_.calls_a_minute != 0) started_.push_back(now);
    store_.count(shared ? Counter::requests_started : Counter::requests_bypass);
    producers_[stream->slot] = std::make_unique<Producer>(
        store_, upstream_, timers_, *stream, UpstreamCall{request.method, request.model, request.body},
        producer_limits_, [this, stream = *stream, model = request.model, now, shared](const Outcome& outcome) {
            ended(stream, model, now, shared, outcome);
        });
    return OpenAnswer{*stream, opening.stream_id, shared ? GCOALESCE_STARTED : GCOALESCE_BYPASS};
}

void Coalescer::ended(StreamRef stream, const std::string& model, Nanos opened, bool shared, const Outcome& outcome) {
    const Nanos now = timers_.clock().monotonic();
    // Remembered before the ending shows: whoever sees it and asks again is told the rest of the delay.
    if ((outcome.http_status == 429 || outcome.http_status == 503) && outcome.retry_ms > 0) {
        if (refusals_.size() >= kMostRefusals)
            std::erase_if(refusals_, [&](const auto& entry) { return entry.second.until <= now; });
        if (refusals_.size() < kMostRefusals) refusals_[model] = {now + from_ms(outcome.retry_ms), outcome};
    }
    // Upstream's own words stay out of the log: they may repeat what was asked. Readers and `gcoalesce stats` show
    // them.
    if (outcome.code != GCOALESCE_OK && store_.note_error(outcome.code, outcome.http_status, outcome.message))
        log(LogLevel::warning, "a stream of {} {}: {}, HTTP status {} (logged once; `gcoalesce stats` counts on)",
            model, outcome.kind == GCOALESCE_TRUNCATED ? "was truncated" : "failed", code_name(outcome.code),
            outcome.http_status);
    const Nanos ttl = window_.touched(opened) ? settings_.ttl_window : settings_.ttl_idle;
    store_.end(stream, ending_of(outcome), shared && outcome.reusable ? ttl : 0);
    producers_.erase(stream.slot); // last: it destroys the producer that calls us
}

Nanos Coalescer::notify_on(Nanos duration) {
    const Nanos now = timers_.clock().monotonic();
    window_.on(now, duration != 0 ? duration : settings_.window);
    store_.set_window(0, window_.until());
    store_.log(LogKind::notify, 1, {}, static_cast<std::uint64_t>(to_ms(window_.remaining(now))));
    return window_.remaining(now);
}

void Coalescer::notify_off() {
    window_.off(timers_.clock().monotonic());
    store_.set_window(0, window_.until());
    store_.log(LogKind::notify, 0);
}

Nanos Coalescer::window_remaining() const {
    return window_.remaining(timers_.clock().monotonic());
}

void Coalescer::interrupt_all() {
    while (!producers_.empty()) {
        const std::uint32_t slot = producers_.begin()->first;
        producers_.erase(producers_.begin());
        SlotEnding ending{};
        ending.kind = GCOALESCE_INTERRUPTED;
        ending.code = GCOALESCE_CLOSED;
        ending.message.assign("the broker shut down before the answer was whole");
        store_.end(store_.ref(slot), ending, 0);
    }
}

} // namespace gcoalesce
