#include "broker/producer.hpp"

#include <catch2/catch.hpp>

#include "tests/support/fake_timers.hpp"
#include "tests/support/fake_upstream.hpp"
#include "tests/support/memory_segment.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;

namespace {

// One producer with its surroundings. As in the broker, the producer is destroyed by the call that tells its end.
struct Bench {
    explicit Bench(const MemorySegmentOptions& options = {}) : segment(clock, options) {}

    void start(Method method = Method::stream) {
        StreamOpening opening;
        opening.stream_id = 1;
        opening.method = method;
        stream = segment.store().open(opening, true).value();
        producer = std::make_unique<Producer>(
            segment.store(), upstream, timers, refusals, stream,
            UpstreamCall{method, "gemini-2.5-flash", std::make_shared<const std::string>("{}")}, limits, check,
            [this](const Outcome& told) {
                ++endings;
                outcome = told;
                producer.reset();
            });
    }

    FakeUpstream::Started& call() { return upstream.calls.back(); }
    std::size_t calls() const { return upstream.calls.size(); }
    std::vector<std::string> published() const { return segment.events(stream); }

    // Goes through the wait before the next try.
    void next_try() {
        const std::size_t before = calls();
        while (calls() == before) timers.advance(timers.next().value());
    }

    FakeClock clock;
    FakeTimers timers{clock};
    MemorySegment segment;
    FakeUpstream upstream;
    ProducerLimits limits;
    Refusals refusals;
    AnswerCheck check;
    StreamRef stream;
    int endings = 0;
    Outcome outcome;
    std::unique_ptr<Producer> producer;
};

// The producer has told this end once and left nothing behind.
void check_end(const Bench& bench, gcoalesce_ending_kind kind, Code code) {
    INFO(bench.outcome.message);
    CHECK(bench.endings == 1);
    CHECK(bench.outcome.kind == kind);
    CHECK(std::string(code_name(bench.outcome.code)) == code_name(code));
    CHECK(bench.outcome.message.empty() == (code == GCOALESCE_OK));
    CHECK(bench.outcome.message.find('\n') == std::string::npos);
    CHECK(bench.timers.waiting() == 0);
    for (const auto& call : bench.upstream.calls) CHECK(call.over());
}

} // namespace

// ---- endings --------------------------------------------------------------------------------------------------------

TEST_CASE("A stream's events are published as they come, untouched, and the end tells what upstream reported") {
    Bench bench;
    bench.start();
    CHECK(bench.calls() == 1);
    CHECK(*bench.call().call.body == "{}");
    bench.call().sent();
    bench.call().head(200);
    CHECK(bench.segment.slot(bench.stream).upstream_status == 200);
    bench.call().bytes(sse(answer_json("one")));
    CHECK(bench.published() == std::vector{answer_json("one")});
    bench.call().bytes(sse(answer_json("two")) + sse(answer_json("three", "STOP")));
    CHECK(bench.published() == std::vector{answer_json("one"), answer_json("two"), answer_json("three", "STOP")});
    CHECK(bench.endings == 0);
    bench.call().done();
    check_end(bench, GCOALESCE_COMPLETE, GCOALESCE_OK);
    CHECK(bench.outcome.reusable);
    CHECK(bench.outcome.finish_reason == "STOP");
    CHECK(bench.outcome.model_version == "gemini-2.5-flash");
    CHECK(bench.outcome.usage.total == 12);
    CHECK(bench.outcome.http_status == 200);
    CHECK(bench.outcome.retry_ms == 0);
    CHECK_FALSE(bench.call().cancelled);
    CHECK(bench.segment.store().counted(Counter::upstream_calls) == 1);
    CHECK(bench.segment.store().counted(Counter::upstream_retries) == 0);
    // Ending the stream is its owner's business.
    CHECK(bench.segment.store().joinable(bench.stream) == Store::Joinable::in_flight);
}

TEST_CASE("A call without streaming publishes its whole body as one event, at its end") {
    Bench bench;
    bench.start(Method::unary);
    const std::string body = answer_json("all", "STOP");
    bench.call().sent();
    bench.call().head(200);
    bench.call().bytes(body.substr(0, 20));
    bench.call().bytes(body.substr(20));
    CHECK(bench.published().empty());
    bench.call().done();
    CHECK(bench.published() == std::vector{body});
    check_end(bench, GCOALESCE_COMPLETE, GCOALESCE_OK);
    CHECK(bench.outcome.reusable);
}

TEST_CASE("T30: a stream that ends cleanly without a finish reason is truncated, and keeps its events") {
    Bench bench;
    bench.start();
    bench.call().respond(200, sse(answer_json("one")) + sse(answer_json("two")));
    check_end(bench, GCOALESCE_TRUNCATED, GCOALESCE_CUT_SHORT);
    CHECK_FALSE(bench.outcome.reusable);
    CHECK(bench.published().size() == 2);
    CHECK(bench.calls() == 1);
}

TEST_CASE("T31: a last event with a finish reason and usage, but no parts, completes the answer") {
    Bench bench;
    bench.start();
    const std::string last =
        R"({"candidates": [{"finishReason": "STOP","index": 0}],"usageMetadata": {"totalTokenCount": 9}})";
    bench.call().respond(200, sse(answer_json("one")) + sse(last));
    check_end(bench, GCOALESCE_COMPLETE, GCOALESCE_OK);
    CHECK(bench.outcome.reusable);
    CHECK(bench.outcome.usage.total == 9);
    CHECK(bench.published().size() == 2);
}

TEST_CASE("T32: a finish reason in every event ends nothing; the end of the body does") {
    Bench bench;
    bench.start();
    bench.call().sent();
    bench.call().head(200);
    for (const char* text : {"one", "two", "three"}) {
        bench.call().bytes(sse(answer_json(text, "STOP")));
        CHECK(bench.endings == 0);
    }
    bench.call().done();
    check_end(bench, GCOALESCE_COMPLETE, GCOALESCE_OK);
    CHECK(bench.published().size() == 3);
}

TEST_CASE("T33: an error document amid the events fails the stream at once, with the document's status") {
    const bool framed = GENERATE(true, false);
    const std::string error = error_json(503, "UNAVAILABLE", "3s");
    Bench bench;
    bench.start();
    bench.call().sent();
    bench.call().head(200);
    bench.call().bytes(sse(answer_json("one", "STOP")));
    bench.call().bytes(framed ? sse(error) : error + "\n");
    check_end(bench, GCOALESCE_FAILED, GCOALESCE_UPSTREAM_ERROR);
    CHECK(bench.call().cancelled);
    CHECK(bench.outcome.http_status == 503);
    CHECK(bench.outcome.retry_ms == 3000);
    CHECK(bench.segment.slot(bench.stream).upstream_status == 503);
    CHECK(bench.published().size() == 1);
    CHECK(bench.calls() == 1);
}

TEST_CASE("T35: an error document in place of the first event is a failure, and tried again where its status allows") {
    const Method method = GENERATE(Method::stream, Method::unary);
    Bench bench;
    SECTION("503: yes") {
        bench.start(method);
        bench.call().respond(200, error_json(503, "UNAVAILABLE"));
        CHECK(bench.endings == 0);
        bench.next_try();
        bench.call().respond(200, method == Method::stream ? sse(answer_json("x", "STOP")) : answer_json("x", "STOP"));
        check_end(bench, GCOALESCE_COMPLETE, GCOALESCE_OK);
        CHECK(bench.published().size() == 1);
    }
    SECTION("400: no") {
        bench.start(method);
        bench.call().respond(200, error_json(400, "INVALID_ARGUMENT"));
        check_end(bench, GCOALESCE_FAILED, GCOALESCE_UPSTREAM_ERROR);
        CHECK(bench.outcome.http_status == 400);
        CHECK(bench.calls() == 1);
    }
}

TEST_CASE("T36: an answer cut by MAX_TOKENS or SAFETY, or a blocked prompt, is complete, but not reusable") {
    const std::string reason = GENERATE("MAX_TOKENS", "SAFETY", "RECITATION", "blocked");
    Bench bench;
    bench.start();
    bench.call().respond(200, reason == "blocked" ? sse(R"({"promptFeedback": {"blockReason": "SAFETY"}})")
                                                  : sse(answer_json("one", reason)));
    check_end(bench, GCOALESCE_COMPLETE, GCOALESCE_OK);
    CHECK_FALSE(bench.outcome.reusable);
    CHECK(bench.outcome.finish_reason == (reason == "blocked" ? "SAFETY" : reason));
    CHECK(bench.published().size() == 1);
}

TEST_CASE("T42: the same events are published wherever the connection cuts the body") {
    const std::string body = ": a comment\r\n\r\n" + sse(answer_json("gr\u00fc\u00df \u2028 dich")) +
                             "data: {\"candidates\":\ndata: []}\n\n" + sse(answer_json("end", "STOP"));
    Bench whole;
    whole.start();
    whole.call().respond(200, body);
    check_end(whole, GCOALESCE_COMPLETE, GCOALESCE_OK);
    const std::vector<std::string> expected = whole.published();
    CHECK(expected.size() == 3);

    for (std::size_t cut = 1; cut < body.size(); ++cut) {
        Bench bench;
        bench.start();
        bench.call().sent();
        bench.call().head(200);
        bench.call().bytes(body.substr(0, cut));
        bench.call().bytes(body.substr(cut));
        bench.call().done();
        INFO("cut at " << cut);
        REQUIRE(bench.published() == expected);
        REQUIRE(bench.outcome.kind == GCOALESCE_COMPLETE);
    }
    Bench bench;
    bench.start();
    bench.call().sent();
    bench.call().head(200);
    for (const char byte : body) bench.call().bytes({&byte, 1});
    bench.call().done();
    CHECK(bench.published() == expected);
    CHECK(bench.outcome.kind == GCOALESCE_COMPLETE);
}

TEST_CASE("A connection that breaks after an event truncates the stream, and the message says what broke") {
    Bench bench;
    bench.start();
    bench.call().sent();
    bench.call().head(200);
    bench.call().bytes(sse(answer_json("one")));
    bench.call().broken("the other side hung up");
    check_end(bench, GCOALESCE_TRUNCATED, GCOALESCE_CUT_SHORT);
    CHECK_THAT(bench.outcome.message, Catch::Contains("the other side hung up"));
    CHECK(bench.calls() == 1);
}

TEST_CASE("An answer that is none is given up as soon as that shows") {
    Bench bench;
    bench.start();
    bench.call().sent();
    bench.call().head(200);
    bench.call().bytes(sse("this is no JSON"));
    check_end(bench, GCOALESCE_FAILED, GCOALESCE_BAD_ANSWER);
    CHECK(bench.call().cancelled);
    CHECK(bench.calls() == 1);
}

TEST_CASE("A stream may hold its limit of bytes, and not one more") {
    const std::string first = answer_json("one"), last = answer_json("two", "STOP");
    Bench bench;
    SECTION("exactly") {
        bench.limits.stream_bytes = first.size() + last.size();
        bench.start();
        bench.call().respond(200, sse(first) + sse(last));
        check_end(bench, GCOALESCE_COMPLETE, GCOALESCE_OK);
        CHECK(bench.published().size() == 2);
    }
    SECTION("one more") {
        bench.limits.stream_bytes = first.size() + last.size() - 1;
        bench.start();
        bench.call().sent();
        bench.call().head(200);
        bench.call().bytes(sse(first) + sse(last) + sse(first));
        check_end(bench, GCOALESCE_FAILED, GCOALESCE_TOO_LARGE);
        CHECK_FALSE(bench.outcome.reusable);
        CHECK(bench.call().cancelled);
        CHECK(bench.published() == std::vector{first});
    }
    SECTION("a single event") {
        bench.limits.stream_bytes = first.size() - 1;
        bench.start();
        bench.call().respond(200, sse(first));
        check_end(bench, GCOALESCE_FAILED, GCOALESCE_TOO_LARGE);
        CHECK(bench.published().empty());
        CHECK(bench.calls() == 1);
    }
    SECTION("a call without streaming") {
        bench.limits.stream_bytes = last.size() - 1;
        bench.start(Method::unary);
        bench.call().respond(200, last);
        check_end(bench, GCOALESCE_FAILED, GCOALESCE_TOO_LARGE);
        CHECK(bench.published().empty());
    }
}

TEST_CASE("T84: an event for which the segment has no room fails the stream, also after others") {
    MemorySegmentOptions small;
    small.extent_bytes = 256 * 1024;
    const Method method = GENERATE(Method::stream, Method::unary);
    Bench bench(small);
    bench.start(method);
    const std::string large = answer_json(std::string(512 * 1024, 'x'), "STOP");
    bench.call().respond(200, method == Method::unary ? large : sse(answer_json("one")) + sse(large));
    check_end(bench, GCOALESCE_FAILED, GCOALESCE_NO_MEMORY);
    CHECK(bench.published().size() == (method == Method::unary ? 0 : 1));
    CHECK(bench.calls() == 1);
}

// ---- limits of time -------------------------------------------------------------------------------------------------

TEST_CASE("T40: an upstream that takes the request and never answers fails the call at the first event's limit") {
    Bench bench;
    bench.start();
    bench.timers.advance(2 * kSecond);
    bench.call().sent(); // the limit counts from here
    bench.timers.advance(bench.limits.first_event - 1);
    CHECK(bench.endings == 0);
    SECTION("no head") {}
    SECTION("a head, and bytes that are no event") {
        bench.call().head(200);
        bench.call().bytes(": still there\r\n\r\ndata: {\"candid");
    }
    bench.timers.advance(1);
    check_end(bench, GCOALESCE_FAILED, GCOALESCE_FIRST_EVENT_TIMEOUT);
    CHECK(bench.call().cancelled);
    CHECK(bench.calls() == 1);
}

TEST_CASE("T41: a silence between two events truncates the stream at its limit, and a shorter one does not") {
    Bench bench;
    bench.start();
    bench.call().sent();
    bench.call().head(200);
    for (int i = 0; i < 4; ++i) {
        bench.call().bytes(sse(answer_json("word")));
        bench.timers.advance(bench.limits.event_gap - 1);
        CHECK(bench.endings == 0);
    }
    SECTION("nothing at all") {}
    SECTION("bytes, but no event") {
        bench.call().bytes(": still there\r\n\r\ndata: {\"candid");
    }
    bench.timers.advance(1);
    check_end(bench, GCOALESCE_TRUNCATED, GCOALESCE_EVENT_GAP_TIMEOUT);
    CHECK(bench.call().cancelled);
    CHECK(bench.published().size() == 4);
    CHECK(bench.outcome.usage.total == 12); // what was told stays told
    CHECK(bench.outcome.http_status == 200);
}

TEST_CASE("A whole answer whose connection never ends is truncated too: nobody can know that it is whole") {
    Bench bench;
    bench.start();
    bench.call().sent();
    bench.call().head(200);
    bench.call().bytes(sse(answer_json("all", "STOP")));
    bench.timers.advance(bench.limits.event_gap);
    check_end(bench, GCOALESCE_TRUNCATED, GCOALESCE_EVENT_GAP_TIMEOUT);
    CHECK_FALSE(bench.outcome.reusable);
}

TEST_CASE("The whole call has a limit, however steadily events come") {
    Bench bench;
    bench.start();
    bench.call().sent();
    bench.call().head(200);
    for (Nanos passed = 0; passed < bench.limits.whole_call - 10 * kSecond; passed += 10 * kSecond) {
        bench.timers.advance(10 * kSecond);
        bench.call().bytes(sse(answer_json("word")));
    }
    bench.timers.advance(10 * kSecond - 1);
    CHECK(bench.endings == 0);
    bench.timers.advance(1);
    check_end(bench, GCOALESCE_TRUNCATED, GCOALESCE_CALL_TIMEOUT);
    CHECK(bench.call().cancelled);
}

TEST_CASE("A request that is never sent whole fails at the whole call's limit") {
    Bench bench;
    bench.start();
    bench.timers.advance(bench.limits.whole_call - 1);
    CHECK(bench.endings == 0);
    bench.timers.advance(1);
    check_end(bench, GCOALESCE_FAILED, GCOALESCE_CALL_TIMEOUT);
}

TEST_CASE("A call without streaming has the whole call's limit alone") {
    Bench bench;
    bench.start(Method::unary);
    bench.call().sent();
    bench.call().head(200);
    bench.call().bytes("{");
    bench.timers.advance(bench.limits.whole_call - 1);
    CHECK(bench.endings == 0);
    bench.timers.advance(1);
    check_end(bench, GCOALESCE_FAILED, GCOALESCE_CALL_TIMEOUT);
}

TEST_CASE("The whole call's limit covers all tries and the waits between them; the first event's starts anew") {
    Bench bench;
    bench.limits.first_event = 200 * kSecond;
    bench.start();
    const Nanos begin = bench.clock.monotonic();
    bench.call().sent();
    bench.timers.advance(150 * kSecond);
    bench.call().broken();
    bench.next_try();
    const Nanos second = bench.clock.monotonic();
    bench.call().sent();
    bench.timers.advance(begin + bench.limits.whole_call - 1 - second);
    CHECK(bench.endings == 0); // the first try's limit would have passed
    bench.timers.advance(1);
    check_end(bench, GCOALESCE_FAILED, GCOALESCE_CALL_TIMEOUT);
    CHECK(bench.calls() == 2);
}

// ---- retries --------------------------------------------------------------------------------------------------------

TEST_CASE("Statuses that may pass are tried again, others are not") {
    for (const int status : {429, 500, 502, 503, 504}) {
        Bench bench;
        bench.start();
        bench.call().respond(status, error_json(status, "STATUS"));
        INFO(status);
        CHECK(bench.segment.slot(bench.stream).upstream_status == static_cast<unsigned>(status));
        REQUIRE(bench.endings == 0);
        bench.next_try();
        bench.call().answer({"fine"});
        check_end(bench, GCOALESCE_COMPLETE, GCOALESCE_OK);
        CHECK(bench.segment.slot(bench.stream).retries == 1);
    }
    for (const int status : {302, 400, 401, 403, 404, 501}) {
        Bench bench;
        bench.start();
        bench.call().respond(status, error_json(status, "STATUS"));
        INFO(status);
        CHECK(bench.endings == 1);
        CHECK(bench.outcome.http_status == status);
        CHECK(bench.calls() == 1);
    }
}

TEST_CASE("An empty answer is tried again, a page of HTML is not") {
    Bench bench;
    bench.start();
    bench.call().respond(200, "");
    CHECK(bench.endings == 0);
    bench.next_try();
    bench.call().respond(200, "<html><body>Welcome to the hotel's network</body></html>");
    check_end(bench, GCOALESCE_FAILED, GCOALESCE_BAD_ANSWER);
    CHECK(bench.calls() == 2);
}

TEST_CASE("T38: a connection that breaks before the first event is tried again as often as allowed, not more") {
    const int retries = GENERATE(0, 1, 2, 5);
    const bool head = GENERATE(false, true);
    Bench bench;
    bench.limits.retries = retries;
    bench.start();
    for (int i = 0; i <= retries; ++i) {
        CHECK(bench.calls() == static_cast<std::size_t>(i) + 1);
        bench.call().sent();
        if (head) {
            bench.call().head(200);
            bench.call().bytes("data: {\"candidates\"");
        }
        bench.call().broken("reset by the test");
        if (i < retries) bench.next_try();
    }
    check_end(bench, GCOALESCE_FAILED, GCOALESCE_CONNECT_FAILED);
    CHECK_THAT(bench.outcome.message, Catch::Contains("reset by the test"));
    CHECK(bench.published().empty());
    CHECK(bench.segment.store().counted(Counter::upstream_calls) == static_cast<std::uint64_t>(retries) + 1);
    CHECK(bench.segment.store().counted(Counter::upstream_retries) == static_cast<std::uint64_t>(retries));
    CHECK(bench.segment.slot(bench.stream).retries == static_cast<std::uint32_t>(retries));
}

TEST_CASE("T39: after the first event nothing is tried again, and no reader sees an event twice") {
    Bench bench;
    bench.limits.retries = 5;
    bench.start();
    bench.call().sent();
    bench.call().head(200);
    bench.call().bytes(sse(answer_json("one")));
    SECTION("the connection breaks") {
        bench.call().broken();
    }
    SECTION("an error document") {
        bench.call().bytes(sse(error_json(503, "UNAVAILABLE")));
    }
    SECTION("the body ends") {
        bench.call().done();
    }
    SECTION("silence") {
        bench.timers.advance(bench.limits.event_gap);
    }
    CHECK(bench.endings == 1);
    bench.timers.advance(bench.limits.whole_call);
    CHECK(bench.calls() == 1);
    CHECK(bench.endings == 1);
    CHECK(bench.published().size() == 1);
}

TEST_CASE("A failed try is told of when it fails, not when its wait is over") {
    Bench bench;
    bench.start();
    bench.call().respond(429, error_json(429, "RESOURCE_EXHAUSTED", "30s"));
    CHECK(bench.calls() == 1);
    CHECK(bench.segment.slot(bench.stream).retries == 1);
    CHECK(bench.segment.slot(bench.stream).upstream_status == 429);
    const SegmentView& view = bench.segment.store().view();
    std::uint64_t noted = 0;
    for (std::uint32_t i = 0; i < view.header().errors.count; ++i) noted += view.error(i).count.load();
    CHECK(noted == 1);
}

TEST_CASE("A body that comes without a status fails the call and nothing else") {
    Bench bench;
    bench.limits.retries = 0;
    bench.start();
    bench.call().sent();
    bench.call().bytes("{}");
    check_end(bench, GCOALESCE_FAILED, GCOALESCE_BAD_ANSWER);
}

TEST_CASE("The key that a call went with is in nothing that is told of it, however it looks") {
    Bench bench;
    bench.limits.retries = 0;
    bench.upstream.key = "a-key-of-words";
    bench.start();
    bench.call().respond(400, R"({"error": {"code": 400, "message": "no such key: a-key-of-words"}})");
    check_end(bench, GCOALESCE_FAILED, GCOALESCE_UPSTREAM_ERROR);
    CHECK(bench.outcome.message == "upstream answered 400: no such key: [redacted]");
    CHECK(bench.outcome.document.find("a-key-of-words") == std::string::npos);
    CHECK(bench.outcome.document.find("[redacted]") != std::string::npos);
}

TEST_CASE("The waits before retries are random below a bound that doubles from 500 ms to 8 s") {
    std::vector<Nanos> longest(8, 0);
    for (int run = 0; run < 100; ++run) {
        Bench bench({1, 256 * 1024, {TemplateSettings{}}});
        bench.limits.retries = 8;
        bench.start();
        for (std::size_t i = 0; i < longest.size(); ++i) {
            const Nanos failed = bench.clock.monotonic();
            bench.call().broken();
            bench.next_try();
            const Nanos waited = bench.clock.monotonic() - failed;
            REQUIRE(waited <= std::min(8 * kSecond, (500 * kMillisecond) << i));
            longest[i] = std::max(longest[i], waited);
        }
    }
    // One of a hundred waits passes half of its bound (all fail to do so once in 2^100 runs of this test).
    for (std::size_t i = 0; i < longest.size(); ++i) {
        INFO("retry " << i + 1);
        CHECK(longest[i] > std::min(8 * kSecond, (500 * kMillisecond) << i) / 2);
    }
}

TEST_CASE("T37: no second call comes before the delay that upstream told, and RetryInfo wins over Retry-After") {
    struct Row {
        int status;
        const char* retry_info;
        std::int64_t retry_after_ms;
        Nanos expected;
    };
    for (const Row& row :
         {Row{429, "36s", 0, 36 * kSecond}, Row{503, "", 7000, 7 * kSecond}, Row{429, "34.4s", 2000, from_ms(34400)}}) {
        Bench bench;
        bench.start();
        bench.call().respond(row.status, error_json(row.status, "STATUS", row.retry_info), row.retry_after_ms);
        bench.timers.advance(row.expected - 1);
        CHECK(bench.calls() == 1);
        bench.timers.advance(1);
        CHECK(bench.calls() == 2);
        CHECK(bench.endings == 0);
    }
}

TEST_CASE("T37: a delay that does not fit into the call's rest ends it at once, and the outcome tells the delay") {
    Bench bench;
    bench.limits.whole_call = 46 * kSecond;
    bench.start();
    bench.timers.advance(10 * kSecond);
    SECTION("it just fits") {
        bench.call().respond(429, error_json(429, "RESOURCE_EXHAUSTED", "35.999s"));
        CHECK(bench.endings == 0);
        bench.next_try();
        bench.call().respond(429, error_json(429, "RESOURCE_EXHAUSTED", "1s"));
        check_end(bench, GCOALESCE_FAILED, GCOALESCE_RATE_LIMITED);
        CHECK(bench.outcome.retry_ms == 1000);
    }
    SECTION("it does not: RetryInfo") {
        bench.call().respond(429, error_json(429, "RESOURCE_EXHAUSTED", "36s"));
        check_end(bench, GCOALESCE_FAILED, GCOALESCE_RATE_LIMITED);
        CHECK(bench.outcome.retry_ms == 36000);
        CHECK(bench.outcome.http_status == 429);
        CHECK(bench.calls() == 1);
    }
    SECTION("it does not: Retry-After") {
        bench.call().respond(503, "", 40000);
        check_end(bench, GCOALESCE_FAILED, GCOALESCE_UPSTREAM_ERROR);
        CHECK(bench.outcome.retry_ms == 40000);
        CHECK(bench.calls() == 1);
    }
}

TEST_CASE("After the last try the outcome still tells when asking again may help") {
    Bench bench;
    bench.limits.retries = 0;
    bench.start();
    bench.call().respond(503, error_json(503, "UNAVAILABLE", "4s"), 9000);
    check_end(bench, GCOALESCE_FAILED, GCOALESCE_UPSTREAM_ERROR);
    CHECK(bench.outcome.retry_ms == 4000);
    CHECK(bench.outcome.http_status == 503);
}

TEST_CASE("A large error body is read to its end or to a bound, and never held for the readers") {
    Bench bench;
    bench.start();
    bench.call().sent();
    bench.call().head(400);
    const std::string piece(64 * 1024, ' ');
    for (int i = 0; i < 1024 && !bench.call().over(); ++i) bench.call().bytes(piece);
    check_end(bench, GCOALESCE_FAILED, GCOALESCE_UPSTREAM_ERROR);
    CHECK(bench.call().cancelled);
    CHECK(bench.published().empty());
}

// ---- destruction ----------------------------------------------------------------------------------------------------

TEST_CASE("A producer that is destroyed cancels its call and tells nothing, whatever it was doing") {
    Bench bench;
    bench.start();
    SECTION("just started") {}
    SECTION("sent") {
        bench.call().sent();
    }
    SECTION("with a head") {
        bench.call().sent();
        bench.call().head(200);
    }
    SECTION("after an event") {
        bench.call().sent();
        bench.call().head(200);
        bench.call().bytes(sse(answer_json("one")) + "data: {\"cand");
    }
    SECTION("waiting for a retry") {
        bench.call().respond(503, "");
    }
    bench.producer.reset();
    CHECK(bench.timers.waiting() == 0);
    for (const auto& call : bench.upstream.calls) CHECK(call.over());
    bench.timers.advance(1000 * kSecond);
    CHECK(bench.endings == 0);
    CHECK(bench.calls() == 1);
}

TEST_CASE("A producer may be destroyed by whoever is woken by its event") {
    const bool at_the_end = GENERATE(false, true); // a unary body is published from on_done
    Bench bench;
    bench.start(at_the_end ? Method::unary : Method::stream);
    const Mapping lane_memory = anonymous_memory(lane_bytes(16));
    LanePort port;
    port.mapping = lane_memory;
    port.send_wake = [&bench] {
        bench.producer.reset();
        return true;
    };
    bench.segment.store().add_lane(1, port);
    REQUIRE(bench.segment.store().pin(1, bench.stream));
    Lane(lane_memory.data(), 16).ask();
    bench.call().respond(200, at_the_end ? answer_json("all", "STOP")
                                         : sse(answer_json("one")) + sse(answer_json("two")) +
                                               sse(answer_json("three", "STOP")));
    CHECK(bench.producer == nullptr);
    CHECK(bench.published().size() == 1);
    CHECK(bench.endings == 0);
    CHECK(bench.timers.waiting() == 0);
    CHECK(bench.call().over());
}
