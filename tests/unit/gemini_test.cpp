#include "protocol/gemini.hpp"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdio>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <set>

#include "protocol/sse.hpp"
#include "tests/support/fixtures.hpp"
#include "tests/unit/gemini_fixture_rows.hpp"
#include "tests/unit/pieces.hpp"

namespace {

using namespace gcoalesce;
using namespace gcoalesce::test;
using Catch::Matchers::Contains;

constexpr std::size_t kLimit = 4 << 20;

// A call's whole course: what a reader of it sees.
struct Answer {
    Outcome outcome;
    std::vector<std::string> events;
};

bool operator==(const Answer& a, const Answer& b) {
    const auto told = [](const Outcome& o) {
        return std::tuple(o.kind, o.code, o.http_status, o.retry_ms, o.reusable, o.finish_reason, o.model_version,
                          o.message, o.usage.prompt, o.usage.cached, o.usage.thoughts, o.usage.answer, o.usage.tool_use,
                          o.usage.total);
    };
    return told(a.outcome) == told(b.outcome) && a.events == b.events;
}

std::ostream& operator<<(std::ostream& out, const Answer& answer) {
    const Outcome& o = answer.outcome;
    return out << "kind " << o.kind << ' ' << code_name(o.code) << " http " << o.http_status << " retry " << o.retry_ms
               << " reason " << o.finish_reason << " reusable " << o.reusable << " events " << answer.events.size()
               << ": " << o.message;
}

struct Call {
    Method method = Method::stream;
    int http_status = 200;
    bool clean = true;
    std::size_t limit = kLimit;
};

Answer read(const std::string& body, const Call& call = {}, const Cuts& cuts = {}) {
    Answer answer;
    const auto take = [&](std::string_view json) { answer.events.emplace_back(json); };
    AnswerReader reader(call.method, call.http_status, call.limit);
    bool go_on = true;
    feed_cut(body, cuts, [&](std::string_view piece) {
        if (go_on) go_on = reader.feed(piece, take);
    });
    answer.outcome = reader.finish(call.clean, take);
    return answer;
}

// Reads it whole, byte by byte and in random pieces, which must all be the same.
Answer read_any(const std::string& body, const Call& call = {}) {
    static std::mt19937 random(7);
    const Answer whole = read(body, call);
    CHECK(read(body, call, every_byte(body.size())) == whole);
    for (int i = 0; i < 10; ++i) {
        const Cuts cuts = random_cuts(body.size(), random);
        INFO("cut at " << Catch::Detail::stringify(cuts));
        CHECK(read(body, call, cuts) == whole);
    }
    return whole;
}

void check(const Answer& answer, const Expected& expected) {
    CHECK(answer.outcome.kind == expected.kind);
    CHECK(code_name(answer.outcome.code) == std::string(code_name(expected.code)));
    CHECK(answer.outcome.finish_reason == expected.reason);
    CHECK(answer.outcome.http_status == expected.http_status);
    CHECK(answer.outcome.retry_ms == expected.retry_ms);
    CHECK(answer.outcome.reusable ==
          (expected.kind == GCOALESCE_COMPLETE && std::string_view(expected.reason) == "STOP"));
    CHECK(answer.outcome.message.empty() == (expected.kind == GCOALESCE_COMPLETE));
    CHECK(answer.outcome.message.size() <= 200);
}

void check_usage(const Usage& usage, const Usage& expected) {
    CHECK(usage.prompt == expected.prompt);
    CHECK(usage.cached == expected.cached);
    CHECK(usage.thoughts == expected.thoughts);
    CHECK(usage.answer == expected.answer);
    CHECK(usage.tool_use == expected.tool_use);
    CHECK(usage.total == expected.total);
}

// ---- Samples of each wire shape, of our own writing -------------------------------------------------------------

std::string event_with(const std::string& text, const std::string& reason = "") {
    return fmt::format(
        R"({{"candidates": [{{"content": {{"parts": [{{"text": "{}"}}],"role": "model"}},{}"index": 0}}],)"
        R"("usageMetadata": {{"promptTokenCount": 7,"totalTokenCount": 7}},"modelVersion": "gemini-2.5-flash"}})",
        text, reason.empty() ? "" : fmt::format(R"("finishReason": "{}",)", reason));
}

std::string framed(const std::vector<std::string>& events) {
    std::string body;
    for (const std::string& event : events) body += frame_sse(event);
    return body;
}

std::string replaced(std::string text, std::string_view from, std::string_view to) {
    for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
        text.replace(at, from.size(), to);
    return text;
}

const std::string kHello = event_with("Hello");
const std::string kWorld = event_with(" world", "STOP");
const std::string kReasonOnly = R"({"candidates": [{"finishReason": "STOP","index": 0}],"usageMetadata": )"
                                R"({"promptTokenCount": 7,"candidatesTokenCount": 2,"totalTokenCount": 9}})";
const std::string kBlocked =
    R"({"promptFeedback": {"blockReason": "SAFETY"},"usageMetadata": {"promptTokenCount": 7}})";
const std::string kOverloaded =
    "{\n  \"error\": {\n    \"code\": 503,\n    \"message\": \"The model is overloaded. Please try "
    "again later.\",\n    \"status\": \"UNAVAILABLE\"\n  }\n}\n";
const std::string kQuota =
    "{\n  \"error\": {\n    \"code\": 429,\n    \"message\": \"You exceeded your current quota. Please "
    "retry in 36.42s.\",\n    \"status\": \"RESOURCE_EXHAUSTED\",\n    \"details\": [\n      {\n        "
    "\"@type\": \"type.googleapis.com/google.rpc.RetryInfo\",\n        \"retryDelay\": \"36s\"\n      }\n "
    "   ]\n  }\n}\n";
const std::string kBadKey =
    "{\n  \"error\": {\n    \"code\": 400,\n    \"message\": \"API key not valid. Please pass a valid API key.\",\n    "
    "\"status\": \"INVALID_ARGUMENT\",\n    \"details\": [\n      {\n        \"@type\": "
    "\"type.googleapis.com/google.rpc.ErrorInfo\",\n        \"reason\": \"API_KEY_INVALID\"\n      },\n      {\n       "
    " "
    "\"@type\": \"type.googleapis.com/google.rpc.DebugInfo\",\n        \"detail\": \"Invalid API key: hunter2\"\n      "
    "}\n    "
    "]\n  }\n}\n";
const std::string kHtml =
    "<!DOCTYPE html>\n<html lang=en>\n  <title>Error 404 (Not Found)!!1</title>\n\n  <p>That's an error.\n";
const std::string kArray = "[" + kHello + "\n,\r\n" + kWorld + "\n]\n";

const Call kUnary = {.method = Method::unary};
const Call kBroken = {.clean = false};
const Call kUnaryBroken = {.method = Method::unary, .clean = false};
const std::string kNothingNew = R"({"candidates": [{"content": {},"index": 0}],"turnToken": "x"})";
const std::string kPretty = "{\n  \"candidates\": [\n    {\n      \"finishReason\": \"STOP\"\n    }\n  ]\n}\n";

struct Sample {
    std::string name;
    std::string body;
    Call call;
    Expected expected;
    std::vector<std::string> events;
};

// One call a sample: g++ takes minutes over one initialiser list of them all.
class Samples {
  public:
    Samples() {
        add_whole();
        add_cut();
        add_errors_inside();
        add_http_errors();
        add_none();
    }
    std::vector<Sample> all;

  private:
    void add(const char* name, const std::string& body, const Call& call, const Expected& expected,
             std::initializer_list<std::string_view> events) {
        all.push_back({name, body, call, expected, {events.begin(), events.end()}});
    }

    // Whole answers.
    void add_whole() {
        add("CRLF", framed({kHello, kWorld}), {}, complete("STOP"), {kHello, kWorld});
        add("LF", replaced(framed({kHello, kWorld}), "\r\n", "\n"), {}, complete("STOP"), {kHello, kWorld});
        add("CR", replaced(framed({kHello, kWorld}), "\r\n", "\r"), {}, complete("STOP"), {kHello, kWorld});
        add("no space", "data:" + kWorld + "\n\n", {}, complete("STOP"), {kWorld});
        add("byte order mark", "\xEF\xBB\xBF" + framed({kWorld}), {}, complete("STOP"), {kWorld});
        add("no final blank line", framed({kHello}) + "data: " + kWorld, {}, complete("STOP"), {kHello, kWorld});
        add("half a final blank line", framed({kHello}) + "data: " + kWorld + "\r\n", {}, complete("STOP"),
            {kHello, kWorld});
        add("comments, ids and blank data between",
            ": hi\n\nid: 1\nevent: x\ndata: " + kHello + "\n\ndata:\n\nretry: 5\n\ndata:  \n\n" + framed({kWorld}) +
                ": bye",
            {}, complete("STOP"), {kHello, kWorld});
        add("several data lines", "data: {\"candidates\":\ndata: [{\"finishReason\": \"STOP\"}]}\n\n", {},
            complete("STOP"), {"{\"candidates\":\n[{\"finishReason\": \"STOP\"}]}"});
        add("spaces in an open line", "data:      " + kWorld + "  \n\n", {}, complete("STOP"),
            {"     " + kWorld + "  "});
        add("T32: STOP in every event",
            framed({event_with("a", "STOP"), event_with("b", "STOP"), event_with("c", "STOP")}), {}, complete("STOP"),
            {event_with("a", "STOP"), event_with("b", "STOP"), event_with("c", "STOP")});
        add("an event without a reason after STOP", framed({kWorld, kNothingNew}), {}, complete("STOP"),
            {kWorld, kNothingNew});
        add("T31: a last event with a reason only", framed({kHello, kReasonOnly}), {}, complete("STOP"),
            {kHello, kReasonOnly});
        add("T36: MAX_TOKENS without parts", framed({R"({"candidates": [{"finishReason": "MAX_TOKENS"}]})"}), {},
            complete("MAX_TOKENS"), {R"({"candidates": [{"finishReason": "MAX_TOKENS"}]})"});
        add("T36: STOP, then RECITATION", framed({kWorld, event_with("", "RECITATION")}), {}, complete("RECITATION"),
            {kWorld, event_with("", "RECITATION")});
        add("T36: a blocked prompt", framed({kBlocked}), {}, complete("SAFETY"), {kBlocked});
        add("T36: blocked after text", framed({kHello, kBlocked}), {}, complete("SAFETY"), {kHello, kBlocked});
        add("a reason of the future", framed({event_with("x", "TOO_BRIGHT")}), {}, complete("TOO_BRIGHT"),
            {event_with("x", "TOO_BRIGHT")});
        add("unary", kPretty, kUnary, complete("STOP"), {kPretty});
        add("unary, blocked", kBlocked, kUnary, complete("SAFETY"), {kBlocked});
    }

    // Answers that end too early.
    void add_cut() {
        add("T30: no reason", framed({kHello, kHello}), {}, cut_short(), {kHello, kHello});
        add("a reason that is none", framed({event_with("x", "FINISH_REASON_UNSPECIFIED")}), {}, cut_short(),
            {event_with("x", "FINISH_REASON_UNSPECIFIED")});
        add("cut within an event", framed({kHello}) + "data: " + kWorld.substr(0, 60), {}, cut_short(), {kHello});
        add("cut within an event after STOP", framed({kWorld}) + "data: " + kHello.substr(0, 60), {},
            {GCOALESCE_TRUNCATED, GCOALESCE_CUT_SHORT, "STOP"}, {kWorld});
        add("cut within a field name after STOP", framed({kWorld}) + "dat", {},
            {GCOALESCE_TRUNCATED, GCOALESCE_CUT_SHORT, "STOP"}, {kWorld});
        add("broken after STOP", framed({kHello, kWorld}), kBroken, {GCOALESCE_TRUNCATED, GCOALESCE_CUT_SHORT, "STOP"},
            {kHello, kWorld});
        add("broken before the final blank line", framed({kHello}) + "data: " + kWorld, kBroken, cut_short(), {kHello});
        add("broken before any event", "data: " + kHello.substr(0, 60), kBroken,
            {GCOALESCE_FAILED, GCOALESCE_CONNECT_FAILED}, {});
        add("broken at once", "", kBroken, {GCOALESCE_FAILED, GCOALESCE_CONNECT_FAILED}, {});
        add("unary without a reason", kHello, kUnary, cut_short(), {kHello});
        add("unary, broken", kWorld, kUnaryBroken, {GCOALESCE_FAILED, GCOALESCE_CONNECT_FAILED}, {});
        add("unary, broken within", kWorld.substr(0, 40), kUnaryBroken, {GCOALESCE_FAILED, GCOALESCE_CONNECT_FAILED},
            {});
    }

    // Error documents with status 200.
    void add_errors_inside() {
        add("T33: an error in an event", framed({kHello, kOverloaded}), {}, upstream_error(503), {kHello});
        add("T33: an error in an event after STOP", framed({kWorld, kOverloaded}), {}, upstream_error(503), {kWorld});
        add("T33: an error in an event, then cut", framed({kHello, kOverloaded}), kBroken, upstream_error(503),
            {kHello});
        add("an error in a last event without a blank line",
            framed({kHello}) + "data: " + replaced(kOverloaded, "\n", ""), kBroken, upstream_error(503), {kHello});
        add("half an error in an event", framed({kHello}) + "data: {\"error\": {\"code\": 503,\"mess", kBroken,
            upstream_error(503), {kHello});
        add("a bare error", framed({kHello}) + kOverloaded, {}, upstream_error(503), {kHello});
        add("a bare error after STOP", framed({kWorld}) + kOverloaded, {}, upstream_error(503), {kWorld});
        add("a bare error after STOP, broken", framed({kWorld}) + kOverloaded, kBroken, upstream_error(503), {kWorld});
        add("a bare error without a final line end", framed({kHello}) + kOverloaded.substr(0, kOverloaded.size() - 1),
            {}, upstream_error(503), {kHello});
        add("a bare error with CRLF", framed({kHello}) + replaced(kOverloaded, "\n", "\r\n"), {}, upstream_error(503),
            {kHello});
        add("a bare error in one line", framed({kHello}) + R"({"error":{"code":503}})", {}, upstream_error(503),
            {kHello});
        add("a bare error right behind an event's line", "data: " + kHello + "\n" + kOverloaded, {},
            upstream_error(503), {kHello});
        add("a bare error behind half an event", "data: " + kHello.substr(0, 50) + "\n" + kOverloaded, {},
            upstream_error(503), {});
        add("a bare error behind spaces", framed({kHello}) + "\n  \t" + kOverloaded, {}, upstream_error(503), {kHello});
        add("a bare error, then more events", framed({kHello}) + kOverloaded + "\n\n" + framed({kWorld}), {},
            upstream_error(503), {kHello});
        add("half a bare error", framed({kHello}) + kOverloaded.substr(0, 50), {}, upstream_error(503), {kHello});
        add("half a bare error, broken", framed({kHello}) + kOverloaded.substr(0, 50), kBroken, upstream_error(503),
            {kHello});
        add("an error in an array", framed({kHello}) + "[" + kOverloaded + "]", {}, upstream_error(503), {kHello});
        add("an error in an array in an event", framed({kHello, "[" + kOverloaded + "]"}), {}, upstream_error(503),
            {kHello});
        add("T35: nothing but an error", kQuota, {}, {GCOALESCE_FAILED, GCOALESCE_RATE_LIMITED, "", 429, 36000}, {});
        add("T35: nothing but an error, unary", kQuota, kUnary,
            {GCOALESCE_FAILED, GCOALESCE_RATE_LIMITED, "", 429, 36000}, {});
        add("T35: nothing but an error in an array, unary", "[" + kOverloaded + "]", kUnary, upstream_error(503), {});
        add("half an error, unary", kOverloaded.substr(0, 50), kUnaryBroken, upstream_error(503), {});
        add("an error without a code", framed({R"({"error":{"message":"no"}})"}), {}, upstream_error(200), {});
        add("an error that is a word", framed({R"({"error":"Too many requests"})"}), {}, upstream_error(200), {});
    }

    // HTTP errors.
    void add_http_errors() {
        add("T37: HTTP 429", kQuota, {.http_status = 429}, {GCOALESCE_FAILED, GCOALESCE_RATE_LIMITED, "", 429, 36000},
            {});
        add("HTTP 400, bad key", kBadKey, {.http_status = 400}, key_refused(400), {});
        add("HTTP 503", kOverloaded, {.http_status = 503}, upstream_error(503), {});
        add("HTTP 503, broken", kOverloaded.substr(0, 20), {.http_status = 503, .clean = false}, upstream_error(503),
            {});
        add("HTTP 503, another code inside", kQuota, {.http_status = 503},
            {GCOALESCE_FAILED, GCOALESCE_UPSTREAM_ERROR, "", 503, 36000}, {});
        add("HTTP 404, a page", kHtml, {.http_status = 404}, upstream_error(404), {});
        add("HTTP 401, empty", "", {.http_status = 401}, key_refused(401), {});
        add("HTTP 500 with an answer", framed({kWorld}), {.http_status = 500}, upstream_error(500), {});
        add("HTTP 302", "", {.http_status = 302}, upstream_error(302), {});
    }

    // No answers.
    void add_none() {
        add("empty", "", {}, bad_answer(), {});
        add("blank", "\r\n \r\n", {}, bad_answer(), {});
        add("empty, unary", "", kUnary, bad_answer(), {});
        add("blank, unary", " \n", kUnary, bad_answer(), {});
        add("a page", kHtml, {}, bad_answer(), {});
        add("a page, unary", kHtml, kUnary, bad_answer(), {});
        add("comments only", ": hi\n\n: ho\n\n", {}, bad_answer(), {});
        add("cut within the first event", "data: " + kHello.substr(0, 60), {}, bad_answer(), {});
        add("a unary answer to a stream call", kWorld, {}, bad_answer(), {});
        add("an array of answers", kArray, {}, bad_answer(), {});
        add("an array of answers, unary", kArray, kUnary, bad_answer(), {});
        add("an array of answers after events", framed({kHello}) + kArray, {}, bad_answer(), {kHello});
        add("a stream to a unary call", framed({kWorld}), kUnary, bad_answer(), {});
        add("another document, unary", R"({"totalTokens": 258})", kUnary, bad_answer(), {});
        add("two documents, unary", kWorld + kWorld, kUnary, bad_answer(), {});
        add("bare words that begin like JSON", framed({kHello}) + "{nonsense", {}, bad_answer(), {kHello});
        add("an event that is no JSON", framed({kHello, "nonsense", kWorld}), {}, bad_answer(), {kHello});
        add("an event that is half JSON", framed({kHello, kWorld.substr(0, 60)}), {}, bad_answer(), {kHello});
        add("an event that is a number", framed({kHello, "5"}), {}, bad_answer(), {kHello});
        add("an event that is an array", framed({kHello, "[" + kWorld + "]"}), {}, bad_answer(), {kHello});
        add("an event of two documents", framed({kHello, kWorld + kWorld}), {}, bad_answer(), {kHello});
        add("OpenAI's end mark", framed({kWorld, "[DONE]"}), {}, bad_answer(), {kWorld});
        add("a NUL behind an event", framed({kHello, kWorld + std::string(1, '\0')}), {}, bad_answer(), {kHello});
        add("a byte order mark in an event", framed({kHello, "\xEF\xBB\xBF" + kWorld}), {}, bad_answer(), {kHello});
        add("an event that is no UTF-8", framed({kHello, event_with("caf\xE9", "STOP")}), {}, bad_answer(), {kHello});
    }
};

const std::vector<Sample>& samples() {
    static const Samples made;
    return made.all;
}

TEST_CASE("Each wire shape has its outcome, cut at every byte") {
    for (const Sample& sample : samples()) {
        INFO(sample.name << "\n" << sample.body);
        const Answer whole = read_any(sample.body, sample.call);
        CHECK(whole.events == sample.events);
        check(whole, sample.expected);
        for (std::size_t cut = 0; cut <= sample.body.size(); ++cut) {
            INFO("cut at " << cut);
            if (!(read(sample.body, sample.call, {cut}) == whole))
                CHECK(read(sample.body, sample.call, {cut}) == whole);
        }
    }
}

// ---- Recorded answers -------------------------------------------------------------------------------------------

// The payloads of a recorded stream, by another way than the parser's.
std::vector<std::string> payloads(const std::string& body) {
    std::vector<std::string> found;
    const std::string text = replaced(body, "\r\n", "\n");
    for (std::size_t at = 0; at < text.size();) {
        const std::size_t end = std::min(text.find('\n', at), text.size());
        if (text.compare(at, 6, "data: ") == 0) found.push_back(text.substr(at + 6, end - at - 6));
        at = end + 1;
    }
    return found;
}

std::vector<std::string> lines(const std::string& text) {
    std::vector<std::string> found;
    for (std::size_t at = 0; at < text.size();) {
        const std::size_t end = std::min(text.find('\n', at), text.size());
        if (end > at) found.push_back(text.substr(at, end - at));
        at = end + 1;
    }
    return found;
}

void check_row(const Row& row, const std::string& body) {
    std::vector<std::string> events;
    Answer answer;
    switch (row.shape) {
    case Shape::stream:
        answer = read_any(body);
        events = payloads(body);
        break;
    case Shape::chunks:
        events = lines(body);
        answer = read_any(framed(events));
        check(read_any(body), bad_answer()); // without frames it is no stream
        break;
    case Shape::unary:
        answer = read_any(body, kUnary);
        if (row.events == 1) events = {body};
        break;
    case Shape::array:
        answer = read_any(body);
        check(read_any(body, kUnary), row.expected);
        break;
    case Shape::error: {
        answer = read_any(body, {.http_status = row.expected.http_status});
        check(read_any(body, {.method = Method::unary, .http_status = row.expected.http_status}), row.expected);
        check({outcome_of_error(row.expected.http_status, body), {}}, row.expected);
        if (body.find("\"error\"") == std::string::npos) {
            check(read_any(body), bad_answer());
            check(read_any(body, kUnary), bad_answer());
            break;
        }
        const std::string before = framed({kWorld});
        for (const std::string& wrapped : {body, "[" + body + "]", frame_sse(body)}) {
            check(read_any(wrapped), row.expected);
            const Answer inside = read_any(before + wrapped);
            check(inside, row.expected);
            CHECK(inside.events == std::vector<std::string>{kWorld});
        }
        check(read_any(body, kUnary), row.expected);
        break;
    }
    }
    check(answer, row.expected);
    check_usage(answer.outcome.usage, row.usage);
    CHECK(events.size() == row.events);
    CHECK((answer.events == events)); // in brackets: Catch would print megabytes
    CHECK_THAT(answer.outcome.message, !Contains("AIz") && !Contains("key1234") && !Contains("ORIGINAL ERROR"));
}

TEST_CASE("Every recorded answer comes to its outcome, in any pieces") {
    GCOALESCE_REQUIRE_FIXTURES(fixtures);
    const std::filesystem::path root = fixtures / "gemini";
    std::set<std::string> known;
    for (const Rows& folder : kFixtureRows) {
        for (const Row& row : folder.rows) {
            const std::string path = std::string(folder.folder) + "/" + row.file;
            INFO(path);
            known.insert(path);
            check_row(row, read_file(root / path));
        }
    }
    for (const auto& entry : std::filesystem::recursive_directory_iterator(root)) {
        const std::string name = entry.path().filename();
        if (!entry.is_regular_file() || name == "LICENSE" || name == "INDEX.md") continue;
        INFO("a recorded answer without a row: " << entry.path());
        CHECK(known.count(std::filesystem::relative(entry.path(), root)) == 1);
    }
    CHECK(known.size() > 150);
}

// ---- Candidates, reasons, usage ---------------------------------------------------------------------------------

Answer read_events(const std::vector<std::string>& events) {
    return read_any(framed(events));
}

TEST_CASE("An answer can be used again only if every candidate stopped by itself") {
    struct {
        const char* candidates;
        const char* reason;
        bool reusable;
    } const cases[] = {
        {R"([{"index":0,"finishReason":"STOP"},{"index":1,"finishReason":"STOP"}])", "STOP", true},
        {R"([{"index":0,"finishReason":"STOP"},{"index":1,"finishReason":"SAFETY"}])", "SAFETY", false},
        {R"([{"index":1,"finishReason":"OTHER"},{"index":0,"finishReason":"SAFETY"}])", "SAFETY", false},
        {R"([{"finishReason":"SAFETY"},{"finishReason":"STOP"}])", "SAFETY", false},
        {R"([{"finishReason":"STOP"},{"finishReason":"STOP"}])", "STOP", true},
        {R"([{"finishReason":"STOP","index":0},{"index":1}])", "STOP", false},
        {R"([{"finishReason":"STOP"},{}])", "STOP", false},
        {R"([{"finishReason":null},{"finishReason":"STOP"}])", "STOP", false},
    };
    for (const auto& each : cases) {
        INFO(each.candidates);
        const Outcome outcome = read_events({fmt::format(R"({{"candidates":{}}})", each.candidates)}).outcome;
        CHECK(outcome.kind == GCOALESCE_COMPLETE);
        CHECK(outcome.finish_reason == each.reason);
        CHECK(outcome.reusable == each.reusable);
    }
}

TEST_CASE("Candidates that come in events of their own are told apart") {
    const std::string first = R"({"candidates":[{"content":{"parts":[{"text":"a"}]},"index":0}]})";
    const std::string second = R"({"candidates":[{"content":{"parts":[{"text":"b"}]},"index":1}]})";
    const std::string stop0 = R"({"candidates":[{"finishReason":"STOP"}]})";
    const std::string stop1 = R"({"candidates":[{"finishReason":"STOP","index":1}]})";
    CHECK(read_events({first, second, stop0, stop1}).outcome.reusable);
    CHECK_FALSE(read_events({first, second, stop0}).outcome.reusable);
    CHECK_FALSE(read_events({first, second, stop1}).outcome.reusable);
    CHECK(read_events({first, second, stop1}).outcome.kind == GCOALESCE_COMPLETE);
}

TEST_CASE("More candidates than are told apart are never used again") {
    std::string candidates;
    for (int i = 0; i < 1000; ++i)
        candidates +=
            fmt::format(R"({}{{"index":{},"finishReason":"{}"}})", i > 0 ? "," : "", i, i < 999 ? "STOP" : "SAFETY");
    CHECK_FALSE(read_events({"{\"candidates\":[" + candidates + "]}"}).outcome.reusable);
}

TEST_CASE("A reason that only looks like one does not end an answer") {
    for (
        const char* event :
        {R"({"finishReason":"STOP"})", R"({"candidates":{"finishReason":"STOP"}})",
         R"({"candidates":[{"x":{"finishReason":"STOP"}}]})", R"({"candidates":[{"finishReason":""}]})",
         R"({"candidates":[{"finishReason":1}]})", R"({"candidates":[{"finishReason":["STOP"]}]})",
         R"({"x":[{"finishReason":"STOP"}]})", R"({"blockReason":"SAFETY"})",
         R"({"candidates":[{"content":{"parts":[{"text":"","finishReason":"STOP"}]}}]})",
         R"({"candidates":[{"content":{"parts":[{"functionCall":{"args":{"candidates":[{"finishReason":"STOP"}]}}}]}}]})",
         R"({"promptFeedback":{"blockReason":"BLOCK_REASON_UNSPECIFIED"}})",
         R"({"promptFeedback":{"safetyRatings":[]}})", "{}"}) {
        INFO(event);
        check(read_events({event}), cut_short());
    }
}

TEST_CASE("An error is one only at the top of a document") {
    for (const char* event : {R"({"candidates":[{"finishReason":"STOP","error":{"code":503}}]})",
                              R"({"candidates":[{"finishReason":"STOP"}],"error":null})",
                              R"({"candidates":[{"finishReason":"STOP"}],"x":{"error":{"code":503}}})"}) {
        INFO(event);
        check(read_events({event}), complete("STOP"));
    }
}

TEST_CASE("Tokens are those that the last event told") {
    const auto usage = [](const std::string& counts) {
        return R"({"candidates":[{}],"usageMetadata":{)" + counts + "}}";
    };
    const Outcome outcome =
        read_events(
            {usage(R"("promptTokenCount":7,"totalTokenCount":7)"),
             usage(R"("promptTokenCount":8,"candidatesTokenCount":5,"thoughtsTokenCount":3,"totalTokenCount":16)"),
             usage(
                 R"("candidatesTokenCount":9,"cachedContentTokenCount":4,"toolUsePromptTokenCount":2,)"
                 R"("promptTokensDetails":[{"modality":"TEXT","tokenCount":99,"totalTokenCount":99}],"totalTokenCount":26)"),
             R"({"candidates":[{"finishReason":"STOP"}],"totalTokenCount":1})"})
            .outcome;
    check_usage(outcome.usage, {8, 4, 3, 9, 2, 26});
    check_usage(
        read_events({usage(R"("promptTokenCount":-5,"totalTokenCount":18446744073709551615,"thoughtsTokenCount":1.5)")})
            .outcome.usage,
        {0, 0, 0, 0, 0, std::numeric_limits<std::int64_t>::max()});
}

TEST_CASE("A failed answer still tells the tokens and the model that were told") {
    const Outcome outcome = read_any(framed({kHello}) + kOverloaded).outcome;
    CHECK(outcome.usage.prompt == 7);
    CHECK(outcome.model_version == "gemini-2.5-flash");
}

TEST_CASE("An event's bytes pass untouched, unknown members and odd spacing included") {
    const std::string odd =
        " {\t\"candidates\" :[ {\"finishReason\":\"\\u0053TOP\"  ,\"new\":[1.50e+2,{}, null]}]  ,\"turnToken\":"
        "\"v1_\xE2\x80\xA8\\/\xF0\x9F\x98\x80\xC2\x85\" , \"createTime\":\"x\", \"n\":123456789012345678901} ";
    const Answer answer = read_any("data:" + odd + "\n\n"); // one space after the colon belongs to the framing
    REQUIRE(answer.events.size() == 1);
    CHECK(answer.events[0] == odd.substr(1));
    CHECK(answer.outcome.reusable);
    CHECK(read_any(odd, kUnary).events == std::vector<std::string>{odd});
}

// ---- Size and depth ---------------------------------------------------------------------------------------------

TEST_CASE("An event of megabytes passes") {
    const std::string image = R"({"candidates":[{"content":{"parts":[{"inlineData":{"mimeType":"image/png","data":")" +
                              std::string(1322000, 'A') + R"("}}]},"finishReason":"STOP"}]})";
    const Answer answer = read(framed({kHello, image}));
    check(answer, complete("STOP"));
    REQUIRE(answer.events.size() == 2);
    CHECK((answer.events[1] == image));
    CHECK((read(framed({kHello, image}), {}, every_byte(image.size())) == answer));
}

TEST_CASE("T84: an event or a unary body is taken up to the limit, and no further") {
    Call call;
    call.limit = kWorld.size();
    check(read_any(framed({kWorld}), call), complete("STOP"));
    call.limit = kWorld.size() - 1;
    check(read_any(framed({kWorld}), call), {GCOALESCE_FAILED, GCOALESCE_TOO_LARGE});
    const Answer late = read_any(framed({kBlocked, kWorld}), call);
    check(late, {GCOALESCE_FAILED, GCOALESCE_TOO_LARGE});
    CHECK(late.events.size() == 1);
    call.method = Method::unary;
    check(read_any(kWorld, call), {GCOALESCE_FAILED, GCOALESCE_TOO_LARGE});
    call.limit = kWorld.size();
    check(read_any(kWorld, call), complete("STOP"));
}

TEST_CASE("A hostile depth is refused, and crashes nothing") {
    const auto nested = [](std::size_t levels) {
        return R"({"candidates":[{"finishReason":"STOP"}],"x":)" + std::string(levels - 1, '[') +
               std::string(levels - 1, ']') + "}";
    };
    check(read(framed({nested(200)})), complete("STOP"));
    check(read(framed({nested(201)})), bad_answer());
    check(read(framed({nested(1000000)})), bad_answer());
    check(read(nested(1000000), kUnary), bad_answer());
    check(read(framed({kHello}) + std::string(3 << 20, '[')), bad_answer());
    check({outcome_of_error(500, std::string(3 << 20, '[')), {}}, upstream_error(500));
    CHECK(event_text(nested(1000000)).text.empty());
}

TEST_CASE("A large bare document costs no more in small pieces, and ends the call when it is too large") {
    // All brackets, so that after each byte the document might be whole.
    std::string body = framed({kHello}) + "[";
    while (body.size() < 300 * 1024) body += "{},";
    check(read(body), bad_answer());
    check(read(body, {}, every_byte(body.size())), bad_answer());
    check(read(body + framed({kWorld}), kBroken), bad_answer());
}

// ---- When the outcome stands ------------------------------------------------------------------------------------

TEST_CASE("The reader says at once when an error stands, and then takes nothing more") {
    for (const std::string& error :
         {kOverloaded, "[" + kOverloaded + "]", frame_sse(kOverloaded), frame_sse("nonsense"), kArray}) {
        INFO(error);
        int events = 0;
        const auto count = [&](std::string_view) { ++events; };
        AnswerReader reader(Method::stream, 200, kLimit);
        CHECK(reader.feed(framed({kHello}), count));
        CHECK_FALSE(reader.feed(error, count));
        CHECK_FALSE(reader.feed(framed({kWorld}), count));
        const Outcome outcome = reader.finish(true, count);
        CHECK(outcome.kind == GCOALESCE_FAILED);
        CHECK(events == 1);
    }
}

TEST_CASE("A reader can be moved in the middle of an answer") {
    const auto ignore = [](std::string_view) {};
    const std::string body = framed({kHello, kWorld});
    AnswerReader first(Method::stream, 200, kLimit);
    CHECK(first.feed(body.substr(0, 50), ignore));
    AnswerReader second(std::move(first));
    CHECK(second.feed(body.substr(50), ignore));
    CHECK(second.finish(true, ignore).reusable);
}

// ---- Errors -----------------------------------------------------------------------------------------------------

std::string error_body(const std::string& message, const std::string& details = "") {
    return nlohmann::json{{"error",
                           {{"code", 400},
                            {"message", message},
                            {"status", "INVALID_ARGUMENT"},
                            {"details", nlohmann::json::parse(details.empty() ? "[]" : details)}}}}
        .dump();
}

TEST_CASE("T37: the retry delay comes from RetryInfo, else from the message") {
    const auto from_info = [](const std::string& delay) {
        return outcome_of_error(
                   429, error_body("no", R"([{"@type":"x.QuotaFailure"},{"@type":"x.RetryInfo","retryDelay":")" +
                                             delay + "\"}]"))
            .retry_ms;
    };
    CHECK(from_info("36s") == 36000);
    CHECK(from_info("34.4s") == 34400);
    CHECK(from_info("34.074824224s") == 34075);
    CHECK(from_info("0.0001s") == 1);
    CHECK(from_info("0s") == 0);
    CHECK(from_info("99999999s") == 86400000); // a day at most
    for (const char* odd : {"", "soon", "-5s", "36", "s", "1e9s", "36s!", "..s", "99999999999999999999999s"}) {
        INFO(odd);
        CHECK(from_info(odd) == 0);
    }
    const auto from_message = [](const std::string& message) {
        return outcome_of_error(429, error_body(message)).retry_ms;
    };
    CHECK(from_message("Quota exceeded. Please retry in 36.42s.") == 36420);
    CHECK(from_message("Please retry in 36.425317693s.\n* more") == 36426);
    CHECK(from_message("Please retry in 880.6ms.") == 881);
    CHECK(from_message("Please retry in 1h2m3.5s.") == 3723500);
    CHECK(from_message("Please retry in a while.") == 0);
    CHECK(from_message("Please retry in ") == 0);
    CHECK(from_message("Please retry in ....") == 0);
    CHECK(outcome_of_error(429, error_body("Please retry in 5s.", R"([{"retryDelay":"7s"}])")).retry_ms == 7000);
}

TEST_CASE("An error's code follows the HTTP status, and the reason of an invalid key") {
    CHECK(outcome_of_error(429, "").code == GCOALESCE_RATE_LIMITED);
    CHECK(outcome_of_error(401, "{}").code == GCOALESCE_KEY_REFUSED);
    CHECK(outcome_of_error(403, kHtml).code == GCOALESCE_KEY_REFUSED);
    CHECK(outcome_of_error(400, kBadKey).code == GCOALESCE_KEY_REFUSED);
    CHECK(outcome_of_error(400, "[" + kBadKey + "]").code == GCOALESCE_KEY_REFUSED);
    CHECK(outcome_of_error(400, error_body("no", R"([{"reason":"SERVICE_DISABLED"}])")).code ==
          GCOALESCE_UPSTREAM_ERROR);
    for (const int status : {400, 404, 499, 500, 502, 503, 504}) {
        INFO(status);
        const Outcome outcome = outcome_of_error(status, kHtml);
        CHECK(outcome.kind == GCOALESCE_FAILED);
        CHECK(outcome.code == GCOALESCE_UPSTREAM_ERROR);
        CHECK(outcome.http_status == status);
        CHECK(outcome.message == fmt::format("upstream answered {}", status));
    }
}

TEST_CASE("An error's message says what upstream said, in one line") {
    CHECK(outcome_of_error(503, kOverloaded).message ==
          "upstream answered 503 UNAVAILABLE: The model is overloaded. Please try again later.");
    CHECK(outcome_of_error(400, error_body("a\r\n\tb\x1B[31mc\x7F d\xC2\x9B"
                                           "e\xE2\x80\xA8 f \xC3\xA4 "))
              .message == "upstream answered 400 INVALID_ARGUMENT: a b [31mc d e f \xC3\xA4");
    CHECK(outcome_of_error(429, R"({"error":"Too many requests"})").message ==
          "upstream answered 429: Too many requests");
}

TEST_CASE("A long message is cut between two characters") {
    for (std::size_t shift = 0; shift < 4; ++shift) {
        std::string text(shift, 'x');
        while (text.size() < 400) text += "\xF0\x9F\x98\x80";
        const std::string message = outcome_of_error(400, error_body(text)).message;
        CHECK(message.size() <= 200);
        CHECK(message.size() > 196);
        CHECK_NOTHROW(nlohmann::json(message).dump()); // throws where the text is no UTF-8
    }
}

TEST_CASE("Nothing that looks like a key passes into a message") {
    // Put together here, so that no scanner takes them for real ones.
    const std::string key = std::string("AIza") + "SyA1234567890abcdefghijklmnopqrstuv";
    const std::string token = std::string("ya29.") + "a0AfB_byC1234567890abcdefghijKLMNOP-xyz";
    for (const std::string& text : {"API key not found: " + key, "API key \"" + key + "\" is bad.",
                                    std::string("see https://x/v1beta/models?key=hunter2&alt=sse"), "Bearer " + token,
                                    std::string(170, 'x') + " " + key, key.substr(0, 12) + " is short"}) {
        INFO(text);
        const std::string message = outcome_of_error(400, error_body(text)).message;
        CHECK_THAT(message, !Contains("AIz") && !Contains("hunter2") && !Contains("a0AfB"));
        CHECK_THAT(outcome_of_error(400, R"({"error":")" + replaced(text, "\"", "'") + "\"}").message,
                   !Contains("AIz") && !Contains("hunter2") && !Contains("a0AfB"));
    }
    CHECK_THAT(outcome_of_error(400, error_body("key: " + key + ".")).message, Contains("key: [redacted]."));
    const std::string names = "models/gemini-2.5-flash-preview-image-generation is not found for API version v1beta";
    CHECK_THAT(outcome_of_error(404, error_body(names)).message, Contains(names));
    CHECK_THAT(outcome_of_error(400, kBadKey).message, !Contains("hunter2")); // which DebugInfo repeats
}

TEST_CASE("No text of the answer passes into a message") {
    for (const std::string& body :
         {framed({event_with("secret")}), framed({event_with("secret").substr(0, 70)}),
          framed({kHello}) + event_with("secret"), std::string("secret"), framed({"secret"})}) {
        INFO(body);
        CHECK_THAT(read_any(body).outcome.message, !Contains("secret"));
        CHECK_THAT(read_any(body, kUnary).outcome.message, !Contains("secret"));
    }
}

TEST_CASE("Reasons and model versions are bounded and of one line") {
    const std::string longer(5000, 'X');
    const Outcome outcome = read_events({R"({"candidates":[{"finishReason":"A\n)" + longer +
                                         R"("}],"modelVersion":"m\u001b)" + longer + "\"}"})
                                .outcome;
    CHECK(outcome.finish_reason == "A " + longer.substr(0, 37));
    CHECK(outcome.model_version == "m " + longer.substr(0, 126));
    CHECK_FALSE(outcome.reusable);
}

// ---- Text -------------------------------------------------------------------------------------------------------

TEST_CASE("An event's text is that of the first candidate, its thoughts apart") {
    const auto text_of = [](const std::string& json) {
        const EventText text = event_text(json);
        return text.text + "|" + text.thoughts;
    };
    CHECK(text_of(kHello) == "Hello|");
    CHECK(text_of(R"({"candidates":[{"content":{"parts":[{"text":"a"},{"text":"b\u00e4\n"}]}}]})") == "ab\xC3\xA4\n|");
    CHECK(text_of(R"({"candidates":[{"content":{"parts":[{"text":"t","thought":true},{"text":"a"}]}}]})") == "a|t");
    CHECK(text_of(
              R"({"candidates":[{"content":{"parts":[{"thought":true,"text":"t"},{"thought":false,"text":"a"}]}}]})") ==
          "a|t");
    CHECK(
        text_of(
            R"({"candidates":[{"content":{"parts":[{"text":"b"}]},"index":1},{"content":{"parts":[{"text":"a"}]},"index":0}]})") ==
        "a|");
    CHECK(text_of(R"({"candidates":[{"content":{"parts":[{"text":"a"}]}},{"content":{"parts":[{"text":"b"}]}}]})") ==
          "a|");
    CHECK(text_of(R"({"candidates":[{"content":{"parts":[{"text":"b"}]},"index":1}]})") == "|");
    CHECK(
        text_of(
            R"({"candidates":[{"content":{"parts":[{"functionCall":{"args":{"text":"x"}}},{"executableCode":{"code":"y"}},)"
            R"({"text":"","thoughtSignature":"z"}]}}]})") == "|");
    for (const char* none :
         {"", "nonsense", "{}", "[]", "5", "null", "{\"candidates\":[{\"content\":{\"parts\":[{\"text\":\"a\"}]}}]",
          "[{\"candidates\":[{\"content\":{\"parts\":[{\"text\":\"a\"}]}}]}]"}) {
        INFO(none);
        CHECK(text_of(none) == "|");
    }
    CHECK(text_of(kBlocked) == "|");
    CHECK(text_of(kOverloaded) == "|");
}

TEST_CASE("The texts of a recorded stream put together are the whole answer") {
    GCOALESCE_REQUIRE_FIXTURES(fixtures);
    const std::string folder = "firebase-vertexai-sdk-test-data/mock-responses/vertexai/";
    std::string text, by_json;
    const Answer answer = read(read_file(fixtures / "gemini" / (folder + "streaming-success-utf8.txt")));
    for (const std::string& event : answer.events) {
        text += event_text(event).text;
        const auto document = nlohmann::json::parse(event);
        for (const auto& part : document.at("candidates").at(0).at("content").at("parts"))
            by_json += part.at("text").get<std::string>();
    }
    CHECK(text == by_json);
    CHECK(text.size() > 500);
}

// ---- Robustness -------------------------------------------------------------------------------------------------

// What must hold for any bytes whatever.
void check_sane(const Answer& answer, const Call& call) {
    const Outcome& o = answer.outcome;
    REQUIRE((o.kind == GCOALESCE_COMPLETE || o.kind == GCOALESCE_FAILED || o.kind == GCOALESCE_TRUNCATED));
    REQUIRE((o.kind == GCOALESCE_COMPLETE) == (o.code == GCOALESCE_OK));
    REQUIRE((o.kind == GCOALESCE_COMPLETE) == o.message.empty());
    if (o.kind == GCOALESCE_COMPLETE) REQUIRE((call.clean && call.http_status == 200 && !o.finish_reason.empty()));
    if (o.kind != GCOALESCE_FAILED) REQUIRE(!answer.events.empty());
    if (o.reusable) REQUIRE((o.kind == GCOALESCE_COMPLETE && o.finish_reason == "STOP"));
    REQUIRE(o.message.size() <= 200);
    REQUIRE(o.retry_ms >= 0);
    for (const std::string& event : answer.events) REQUIRE(nlohmann::json::parse(event).is_object());
    REQUIRE_NOTHROW(nlohmann::json({o.message, o.finish_reason, o.model_version}).dump());
}

TEST_CASE("Any bytes have one outcome in any pieces, and crash nothing") {
    std::mt19937 random(8);
    const std::vector<std::string> tokens = {"data: ",
                                             "\r\n",
                                             "\n",
                                             "\r\n\r\n",
                                             "{",
                                             "}",
                                             "[",
                                             "]",
                                             "\"",
                                             ":",
                                             ",",
                                             "error",
                                             "code",
                                             "\"candidates\":[{\"finishReason\":\"STOP\"}]",
                                             "{\"error\":{\"code\":503}}",
                                             " ",
                                             "null",
                                             "\xEF\xBB\xBF",
                                             "\xC3",
                                             "\xE2\x80\xA8",
                                             std::string(1, '\0'),
                                             "<html>",
                                             ": ",
                                             "id: 1",
                                             "\\u00"};
    int complete_ones = 0;
    for (int round = 0; round < 6000; ++round) {
        const Sample& sample = samples()[random() % samples().size()];
        std::string body = sample.body;
        if (round % 8 == 0) {
            body.clear();
            for (std::size_t i = random() % 30; i > 0; --i) body += tokens[random() % tokens.size()];
        } else if (round % 8 == 1) {
            body.resize(random() % 100);
            for (char& c : body) c = static_cast<char>(random());
        }
        for (std::size_t changes = random() % 4; changes > 0; --changes) {
            const std::size_t at = body.empty() ? 0 : random() % body.size();
            const std::string& other = samples()[random() % samples().size()].body;
            switch (random() % 6) {
            case 0: body.erase(at, 1 + random() % 20); break;
            case 1: body.insert(at, tokens[random() % tokens.size()]); break;
            case 2: body.insert(at, other); break;
            case 3: body.resize(at); break;
            case 4: body += other; break;
            default:
                if (!body.empty()) body[at] = static_cast<char>(random());
            }
        }
        Call call;
        call.method = random() % 4 == 0 ? Method::unary : Method::stream;
        call.http_status = random() % 8 == 0 ? 400 + static_cast<int>(random() % 200) : 200;
        call.clean = random() % 3 != 0;
        if (random() % 8 == 0) call.limit = 1 + random() % 600;
        INFO(body);
        const Answer whole = read(body, call);
        check_sane(whole, call);
        complete_ones += whole.outcome.kind == GCOALESCE_COMPLETE;
        REQUIRE(read(body, call, every_byte(body.size())) == whole);
        REQUIRE(read(body, call, random_cuts(body.size(), random)) == whole);
        REQUIRE(read(body, call, random_cuts(body.size(), random)) == whole);
        event_text(body);
    }
    CHECK(complete_ones > 50); // or the changes leave nothing to test
}

} // namespace
