#include "broker/producer.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "base/ids.hpp"
#include "base/units.hpp"

namespace gcoalesce {
namespace {

constexpr Nanos kFirstBackOff = 500 * kMillisecond;
constexpr Nanos kLongestBackOff = 8 * kSecond;

Outcome failed(Code code, std::string message) {
    Outcome outcome;
    outcome.code = code;
    outcome.message = std::move(message);
    return outcome;
}

// The first event of a call that is passed on.
std::string head_of_pass(int http_status, const std::string& content_type) {
    return nlohmann::ordered_json{{"status", http_status}, {"content_type", content_type}}.dump(
        -1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// Exponential, with full jitter: calls that failed together do not come back together.
Nanos back_off(int retry) {
    Nanos most = kFirstBackOff;
    for (int i = 1; i < retry && most < kLongestBackOff; ++i) most *= 2;
    return static_cast<Nanos>(random_u64() % static_cast<std::uint64_t>(std::min(most, kLongestBackOff) + 1));
}

} // namespace

// Shared with the stack frames that it runs in: whoever is told of an event or of the end may destroy the Producer.
struct Producer::State final : UpstreamEvents, std::enable_shared_from_this<State> {
    State(Store& to, Upstream& from, Timers& with, Refusals& known, StreamRef fills, UpstreamCall what,
          const ProducerLimits& within, AnswerCheck expected, Ended tell)
        : store(to),
          upstream(from),
          timers(with),
          refusals(known),
          stream(fills),
          call(std::move(what)),
          limits(within),
          check(std::move(expected)),
          ended(std::move(tell)),
          deadline(timers.clock().monotonic() + limits.whole_call) {}

    Store& store;
    Upstream& upstream;
    Timers& timers;
    Refusals& refusals;
    const StreamRef stream;
    const UpstreamCall call;
    const ProducerLimits limits;
    const AnswerCheck check;
    Ended ended;
    const Nanos deadline;
    bool over = false; // ended, or destroyed

    std::unique_ptr<Timer> whole_call;
    std::unique_ptr<Timer> next_event; // the first event's, then the next one's, limit
    std::unique_ptr<Timer> next_try;

    // Of the stream.
    int tries = 0;
    std::uint64_t events = 0;
    std::size_t bytes = 0;
    std::optional<Error> refused;   // why the store, or the limit of bytes, does not take the answer
    std::vector<std::string> held;  // events that wait for the check
    std::vector<std::string> texts; // what is checked: each candidate's

    // Of the present try.
    std::unique_ptr<RunningCall> running;
    std::optional<AnswerReader> reader; // once there is a response
    std::int64_t retry_after_ms = 0;
    std::string content_type;
    bool empty = true; // no byte of the body came

    void start() {
        whole_call = timers.after(limits.whole_call, [this] {
            limit_passed(GCOALESCE_CALL_TIMEOUT,
                         fmt::format("the call took longer than {}", format_duration(limits.whole_call)));
        });
        start_try();
    }

    // One answer that cannot be gone on with, memory that cannot be had above all, is the end of that one alone, and
    // not of the broker; nor may it unwind libcurl. What is thrown while its readers are told of the end goes on.
    template <class Body>
    void guarded(Body body) {
        const auto alive = shared_from_this();
        try {
            body();
        } catch (const std::exception& error) {
            if (over) throw;
            give_up(error.what());
        }
    }

    void give_up(const std::string& why) {
        Outcome outcome = failed(GCOALESCE_INTERNAL, "the broker could not go on with this call: " + why);
        if (events > 0) outcome.kind = GCOALESCE_TRUNCATED;
        finish(outcome);
    }

    void start_try() {
        try {
            try_once();
        } catch (const std::exception& error) { // whoever starts a producer is not told of its end before it has it
            next_try = timers.after(0, [this, why = std::string(error.what())] { guarded([&] { give_up(why); }); });
        }
    }

    void try_once() {
        ++tries;
        store.count(Counter::upstream_calls);
        store.count(store.opening(stream).template_index, TemplateCounter::upstream_calls);
        reader.reset();
        retry_after_ms = 0;
        empty = true;
        running = upstream.start(call, *this);
    }

    // ---- what the call tells ---------------------------------------------------------------------------------------

    void on_sent() override {
        if (!streams(call.method) || events > 0) return;
        guarded([this] {
            next_event = timers.after(limits.first_event, [this] {
                limit_passed(GCOALESCE_FIRST_EVENT_TIMEOUT,
                             fmt::format("no event came within {} after the request was sent",
                                         format_duration(limits.first_event)));
            });
        });
    }

    void on_content_type(std::string_view type) override {
        guarded([&] { content_type = type; });
    }

    void on_head(int http_status, std::int64_t retry_after) override {
        guarded([&] {
            reader.emplace(call.method, http_status, limits.stream_bytes);
            retry_after_ms = retry_after;
            store.set_upstream_status(stream, http_status);
            if (call.method == Method::pass && http_status / 100 == 2) publish(head_of_pass(http_status, content_type));
        });
    }

    void on_bytes(std::string_view piece) override {
        guarded([&] { take(piece); });
    }

    void on_done(bool clean, const Error& error) override {
        guarded([&] {
            if (!reader) return judge(failed(error.code, error.message));
            Outcome outcome = read_to_end(clean);
            const bool broke = outcome.code == GCOALESCE_CONNECT_FAILED || outcome.code == GCOALESCE_CUT_SHORT;
            if (!clean && broke && !error.message.empty()) outcome.message += ": " + error.message;
            judge(std::move(outcome));
        });
    }

    // ---- what comes of it ------------------------------------------------------------------------------------------

    void take(std::string_view piece) {
        if (!reader) return judge(failed(GCOALESCE_BAD_ANSWER, "upstream sent a body without a status"));
        empty = empty && piece.empty();
        const std::uint64_t before = events;
        const bool more = reader->feed(piece, [this](std::string_view json) { publish(json); });
        if (over) return;
        if (!more || refused) {
            judge(read_to_end(false));
        } else if (events > before && call.method != Method::pass) {
            next_event = timers.after(limits.event_gap, [this] {
                limit_passed(GCOALESCE_EVENT_GAP_TIMEOUT, fmt::format("no event came within {} after event {}",
                                                                      format_duration(limits.event_gap), events));
            });
        }
    }

    // Called by the reader, which may have more events in hand: over and refused make them fall on deaf ears.
    void publish(std::string_view json) {
        if (over || refused) return;
        if (json.size() > limits.stream_bytes - bytes) {
            refused = Error{GCOALESCE_TOO_LARGE,
                            fmt::format("the answer has more than {}, the most that a stream may hold",
                                        format_size(limits.stream_bytes)),
                            0};
            return;
        }
        if (check.schema) add_texts(json, texts);
        if (check.hold) {
            held.emplace_back(json);
        } else if (Result<void> appended = store.append(stream, json); !appended) {
            refused = appended.error();
            return;
        }
        ++events;
        bytes += json.size();
    }

    Outcome read_to_end(bool clean) {
        Outcome outcome = reader->finish(clean, [this](std::string_view json) { publish(json); });
        if (refused) replace(outcome, GCOALESCE_FAILED, refused->code, refused->message);
        return outcome;
    }

    // A whole answer: does it hold to its schema, and may readers have it? One that upstream cut off itself
    // (MAX_TOKENS, SAFETY) cannot hold, and asking again would end alike: its reason says what it is.
    void look_at_whole(Outcome& outcome) {
        if (outcome.kind != GCOALESCE_COMPLETE) return;
        if (check.schema && outcome.reusable) {
            for (const std::string& text : texts) {
                const std::optional<Violation> violation = check.schema->check(text);
                if (!violation) continue;
                return replace(outcome, GCOALESCE_INVALID, GCOALESCE_SCHEMA_BROKEN,
                               fmt::format("the answer does not hold to its schema: at {}: {}",
                                           violation->path.empty() ? "its root" : violation->path, violation->message));
            }
        }
        for (const std::string& event : held) {
            if (const Result<void> appended = store.append(stream, event); !appended)
                return replace(outcome, GCOALESCE_FAILED, appended.error().code, appended.error().message);
        }
    }

    // What was learnt of the answer (tokens, model) stays.
    static void replace(Outcome& outcome, gcoalesce_ending_kind kind, Code code, std::string message) {
        outcome.kind = kind;
        outcome.code = code;
        outcome.message = std::move(message);
        outcome.document.clear();
        outcome.reusable = false;
        outcome.retry_ms = 0;
    }

    void limit_passed(Code code, const std::string& message) {
        guarded([&] {
            Outcome outcome = reader ? reader->finish(false, [](std::string_view) {}) : Outcome{};
            replace(outcome, events > 0 ? GCOALESCE_TRUNCATED : GCOALESCE_FAILED, code, message);
            finish(outcome);
        });
    }

    // Whether the same request may fare better. No event has been shown to anybody.
    bool worth_a_retry(const Outcome& outcome) const {
        switch (outcome.code) {
        case GCOALESCE_CONNECT_FAILED: return true;
        case GCOALESCE_RATE_LIMITED:
        case GCOALESCE_UPSTREAM_ERROR:
            return outcome.http_status == 429 || outcome.http_status == 500 || outcome.http_status == 502 ||
                   outcome.http_status == 503 || outcome.http_status == 504;
        case GCOALESCE_BAD_ANSWER: return empty; // status 200 and nothing behind it does happen
        default: return false;
        }
    }

    // The end of one try.
    void judge(Outcome outcome) {
        if (over) return;
        running.reset();
        next_event.reset();
        outcome.message = upstream.without_key(call, std::move(outcome.message));
        outcome.document = upstream.without_key(call, std::move(outcome.document));
        if (outcome.kind == GCOALESCE_FAILED && !refused && outcome.retry_ms == 0) outcome.retry_ms = retry_after_ms;
        const Nanos now = timers.clock().monotonic();
        const bool pass = call.method == Method::pass; // which may not be safe to repeat, and is of no model
        if (!pass) refusals.note(call.model, call.payer, outcome, now); // before anyone calls again, we included
        if (!pass && events == 0 && outcome.kind == GCOALESCE_FAILED && tries <= limits.retries &&
            worth_a_retry(outcome)) {
            Nanos delay = std::max(back_off(tries), from_ms(outcome.retry_ms));
            if (const auto known = refusals.find(call.model, call.payer, now))
                delay = std::max(delay, known->until - now);
            if (delay < deadline - now) {
                reader.reset();
                // Told at once, and not when the wait is over: whoever looks meanwhile wants to know why nothing comes.
                store.count_retry(stream, outcome.code, outcome.http_status, delay);
                store.note_error(outcome.code, outcome.http_status, outcome.message);
                next_try = timers.after(delay, [this] {
                    store.count(Counter::upstream_retries);
                    start_try();
                });
                return;
            }
        }
        look_at_whole(outcome);
        finish(outcome);
    }

    void finish(const Outcome& outcome) {
        stop();
        if (outcome.http_status != 0) store.set_upstream_status(stream, outcome.http_status);
        const Ended tell = std::move(ended);
        tell(outcome);
    }

    void stop() {
        over = true;
        running.reset();
        whole_call.reset();
        next_event.reset();
        next_try.reset();
    }
};

Producer::Producer(Store& store, Upstream& upstream, Timers& timers, Refusals& refusals, StreamRef stream,
                   UpstreamCall call, const ProducerLimits& limits, AnswerCheck check, Ended ended)
    : state_(std::make_shared<State>(store, upstream, timers, refusals, stream, std::move(call), limits,
                                     std::move(check), std::move(ended))) {
    state_->start();
}

Producer::~Producer() {
    state_->stop();
}

Usage Producer::cancel() {
    state_->stop();
    return state_->reader ? state_->reader->finish(false, [](std::string_view) {}).usage : Usage{};
}

} // namespace gcoalesce
