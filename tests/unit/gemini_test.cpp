#include "protocol/gemini.hpp"

#include <algorithm>
#include <array>
#include <catch2/catch.hpp>
#include <cstdio>
#include <fmt/format.h>
#include <iterator>
#include <map>
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

// The documents that the samples are made of, by name.
const std::map<std::string, std::string, std::less<>>& documents() {
    static const auto made = [] {
        std::map<std::string, std::string, std::less<>> all;
        all["hello"] = kHello;
        all["world"] = kWorld;
        all["bare stop"] = kReasonOnly;
        all["blocked"] = kBlocked;
        all["overloaded"] = kOverloaded;
        all["overloaded crlf"] = replaced(kOverloaded, "\n", "\r\n");
        all["overloaded line"] = replaced(kOverloaded, "\n", "");
        all["quota"] = kQuota;
        all["bad key"] = kBadKey;
        all["html"] = kHtml;
        all["array"] = kArray;
        all["a stop"] = event_with("a", "STOP");
        all["recitation"] = event_with("", "RECITATION");
        all["future"] = event_with("x", "TOO_BRIGHT");
        all["unspecified"] = event_with("x", "FINISH_REASON_UNSPECIFIED");
        all["no utf-8"] = event_with("caf\xE9", "STOP");
        all["nul"] = kWorld + '\0';
        all["bom"] = "\xEF\xBB\xBF" + kWorld;
        all["two"] = kWorld + kWorld;
        all["in array"] = "[" + kWorld + "]";
        all["overloaded in array"] = "[" + kOverloaded + "]";
        all["max tokens"] = R"({"candidates": [{"finishReason": "MAX_TOKENS"}]})";
        all["nothing new"] = R"({"candidates": [{"content": {},"index": 0}],"turnToken": "x"})";
        all["lines"] = "{\"candidates\":\n[{\"finishReason\": \"STOP\"}]}";
        all["padded"] = "     " + kWorld + "  ";
        all["pretty"] = "{\n  \"candidates\": [\n    {\n      \"finishReason\": \"STOP\"\n    }\n  ]\n}\n";
        all["count"] = R"({"totalTokens": 258})";
        all["no code"] = R"({"error":{"message":"no"}})";
        all["word"] = R"({"error":"Too many requests"})";
        all["nonsense"] = "nonsense";
        all["number"] = "5";
        all["done"] = "[DONE]";
        return all;
    }();
    return made;
}

// A sample's body: <name> stands for a document in an event's frame, (name) for the document as it is, (name/50) for
// its first 50 bytes; all else stands for itself.
std::string body_of(std::string_view recipe) {
    std::string body;
    for (std::size_t at = 0; at < recipe.size();) {
        if (recipe[at] != '<' && recipe[at] != '(') {
            body += recipe[at++];
            continue;
        }
        const std::size_t end = recipe.find_first_of(">)", at);
        const std::string_view name = recipe.substr(at + 1, end - at - 1);
        const std::size_t slash = name.find('/');
        const std::string& document = documents().find(name.substr(0, slash))->second;
        const std::string part = slash == std::string_view::npos
                                     ? document
                                     : document.substr(0, std::stoul(std::string(name.substr(slash + 1))));
        body += recipe[at] == '<' ? frame_sse(part) : part;
        at = end + 1;
    }
    return body;
}

struct Sample {
    std::string_view name;
    std::string_view recipe;
    Call call;
    Expected expected;
    std::array<std::string_view, 3> events; // their documents' names
};

constexpr Call kStream;
constexpr Call kUnary = {.method = Method::unary};
constexpr Call kBroken = {.clean = false};
constexpr Call kUnaryBroken = {.method = Method::unary, .clean = false};
constexpr Call http(int status, bool clean = true) {
    return {.http_status = status, .clean = clean};
}

constexpr Expected kCutAfterStop = {GCOALESCE_TRUNCATED, GCOALESCE_CUT_SHORT, "STOP"};
constexpr Expected kConnectFailed = {GCOALESCE_FAILED, GCOALESCE_CONNECT_FAILED};

constexpr Sample kSamples[] = {
    // Whole answers.
    {"CRLF", "<hello><world>", kStream, complete("STOP"), {"hello", "world"}},
    {"LF", "data: (hello)\n\ndata: (world)\n\n", kStream, complete("STOP"), {"hello", "world"}},
    {"CR", "data: (hello)\r\rdata: (world)\r\r", kStream, complete("STOP"), {"hello", "world"}},
    {"no space", "data:(world)\n\n", kStream, complete("STOP"), {"world"}},
    {"byte order mark", "\xEF\xBB\xBF<world>", kStream, complete("STOP"), {"world"}},
    {"no final blank line", "<hello>data: (world)", kStream, complete("STOP"), {"hello", "world"}},
    {"half a final blank line", "<hello>data: (world)\r\n", kStream, complete("STOP"), {"hello", "world"}},
    {"comments, ids and blank data between",
     ": hi\n\nid: 1\nevent: x\ndata: (hello)\n\ndata:\n\nretry: 5\n\ndata:  \n\n<world>: bye",
     kStream,
     complete("STOP"),
     {"hello", "world"}},
    {"several data lines",
     "data: {\"candidates\":\ndata: [{\"finishReason\": \"STOP\"}]}\n\n",
     kStream,
     complete("STOP"),
     {"lines"}},
    {"spaces in an open line", "data:      (world)  \n\n", kStream, complete("STOP"), {"padded"}},
    {"T32: STOP in every event", "<a stop><a stop><world>", kStream, complete("STOP"), {"a stop", "a stop", "world"}},
    {"an event without a reason after STOP",
     "<world><nothing new>",
     kStream,
     complete("STOP"),
     {"world", "nothing new"}},
    {"T31: a last event with a reason only", "<hello><bare stop>", kStream, complete("STOP"), {"hello", "bare stop"}},
    {"T36: MAX_TOKENS without parts", "<max tokens>", kStream, complete("MAX_TOKENS"), {"max tokens"}},
    {"T36: STOP, then RECITATION", "<world><recitation>", kStream, complete("RECITATION"), {"world", "recitation"}},
    {"T36: a blocked prompt", "<blocked>", kStream, complete("SAFETY"), {"blocked"}},
    {"T36: blocked after text", "<hello><blocked>", kStream, complete("SAFETY"), {"hello", "blocked"}},
    {"a reason of the future", "<future>", kStream, complete("TOO_BRIGHT"), {"future"}},
    {"unary", "(pretty)", kUnary, complete("STOP"), {"pretty"}},
    {"unary, blocked", "(blocked)", kUnary, complete("SAFETY"), {"blocked"}},

    // Answers that end too early.
    {"T30: no reason", "<hello><hello>", kStream, cut_short(), {"hello", "hello"}},
    {"a reason that is none", "<unspecified>", kStream, cut_short(), {"unspecified"}},
    {"cut within an event", "<hello>data: (world/60)", kStream, cut_short(), {"hello"}},
    {"cut within an event after STOP", "<world>data: (hello/60)", kStream, kCutAfterStop, {"world"}},
    {"cut within a field name after STOP", "<world>dat", kStream, kCutAfterStop, {"world"}},
    {"broken after STOP", "<hello><world>", kBroken, kCutAfterStop, {"hello", "world"}},
    {"broken before the final blank line", "<hello>data: (world)", kBroken, cut_short(), {"hello"}},
    {"broken before any event", "data: (hello/60)", kBroken, kConnectFailed, {}},
    {"broken at once", "", kBroken, kConnectFailed, {}},
    {"unary without a reason", "(hello)", kUnary, cut_short(), {"hello"}},
    {"unary, broken", "(world)", kUnaryBroken, kConnectFailed, {}},
    {"unary, broken within", "(world/40)", kUnaryBroken, kConnectFailed, {}},

    // Error documents with status 200.
    {"T33: an error in an event", "<hello><overloaded>", kStream, upstream_error(503), {"hello"}},
    {"T33: an error in an event after STOP", "<world><overloaded>", kStream, upstream_error(503), {"world"}},
    {"T33: an error in an event, then cut", "<hello><overloaded>", kBroken, upstream_error(503), {"hello"}},
    {"an error in a last event without a blank line",
     "<hello>data: (overloaded line)",
     kBroken,
     upstream_error(503),
     {"hello"}},
    {"half an error in an event", "<hello>data: (overloaded line/40)", kStream, upstream_error(503), {"hello"}},
    {"half an error in an event, broken", "<hello>data: (overloaded line/40)", kBroken, upstream_error(503), {"hello"}},
    {"a bare error", "<hello>(overloaded)", kStream, upstream_error(503), {"hello"}},
    {"a bare error after STOP", "<world>(overloaded)", kStream, upstream_error(503), {"world"}},
    {"a bare error after STOP, broken", "<world>(overloaded)", kBroken, upstream_error(503), {"world"}},
    {"a bare error with CRLF", "<hello>(overloaded crlf)", kStream, upstream_error(503), {"hello"}},
    {"a bare error in one line", "<hello>(overloaded line)", kStream, upstream_error(503), {"hello"}},
    {"a bare error right behind an event's line",
     "data: (hello)\n(overloaded)",
     kStream,
     upstream_error(503),
     {"hello"}},
    {"a bare error behind half an event", "data: (hello/50)\n(overloaded)", kStream, upstream_error(503), {}},
    {"a bare error behind spaces", "<hello>\n  \t(overloaded)", kStream, upstream_error(503), {"hello"}},
    {"a bare error, then more events", "<hello>(overloaded)\n\n<world>", kStream, upstream_error(503), {"hello"}},
    {"half a bare error", "<hello>(overloaded/50)", kStream, upstream_error(503), {"hello"}},
    {"half a bare error, broken", "<hello>(overloaded/50)", kBroken, upstream_error(503), {"hello"}},
    {"an error in an array", "<hello>(overloaded in array)", kStream, upstream_error(503), {"hello"}},
    {"an error in an array in an event", "<hello><overloaded in array>", kStream, upstream_error(503), {"hello"}},
    {"T35: nothing but an error", "(quota)", kStream, rate_limited(36000), {}},
    {"T35: nothing but an error, unary", "(quota)", kUnary, rate_limited(36000), {}},
    {"T35: nothing but an error in an array, unary", "(overloaded in array)", kUnary, upstream_error(503), {}},
    {"half an error, unary", "(overloaded/50)", kUnaryBroken, upstream_error(503), {}},
    {"an error without a code", "<no code>", kStream, upstream_error(200), {}},
    {"an error that is a word", "<word>", kStream, upstream_error(200), {}},

    // HTTP errors.
    {"T37: HTTP 429", "(quota)", http(429), rate_limited(36000), {}},
    {"HTTP 400, bad key", "(bad key)", http(400), key_refused(400), {}},
    {"HTTP 503", "(overloaded)", http(503), upstream_error(503), {}},
    {"HTTP 503, broken", "(overloaded/20)", http(503, false), upstream_error(503), {}},
    {"HTTP 503, another code inside",
     "(quota)",
     http(503),
     {GCOALESCE_FAILED, GCOALESCE_UPSTREAM_ERROR, "", 503, 36000},
     {}},
    {"HTTP 404, a page", "(html)", http(404), upstream_error(404), {}},
    {"HTTP 401, empty", "", http(401), key_refused(401), {}},
    {"HTTP 500 with an answer", "<world>", http(500), upstream_error(500), {}},
    {"HTTP 302", "", http(302), upstream_error(302), {}},

    // No answers.
    {"empty", "", kStream, bad_answer(), {}},
    {"blank", "\r\n \r\n", kStream, bad_answer(), {}},
    {"empty, unary", "", kUnary, bad_answer(), {}},
    {"blank, unary", " \n", kUnary, bad_answer(), {}},
    {"a page", "(html)", kStream, bad_answer(), {}},
    {"a page, unary", "(html)", kUnary, bad_answer(), {}},
    {"comments only", ": hi\n\n: ho\n\n", kStream, bad_answer(), {}},
    {"cut within the first event", "data: (hello/60)", kStream, bad_answer(), {}},
    {"a unary answer to a stream call", "(world)", kStream, bad_answer(), {}},
    {"an array of answers", "(array)", kStream, bad_answer(), {}},
    {"an array of answers, unary", "(array)", kUnary, bad_answer(), {}},
    {"an array of answers after events", "<hello>(array)", kStream, bad_answer(), {"hello"}},
    {"a stream to a unary call", "<world>", kUnary, bad_answer(), {}},
    {"another document, unary", "(count)", kUnary, bad_answer(), {}},
    {"two documents, unary", "(two)", kUnary, bad_answer(), {}},
    {"bare words that begin like JSON", "<hello>{nonsense", kStream, bad_answer(), {"hello"}},
    {"an event that is no JSON", "<hello><nonsense><world>", kStream, bad_answer(), {"hello"}},
    {"an event that is half JSON", "<hello><world/60><world>", kStream, bad_answer(), {"hello"}},
    {"an event that is a number", "<hello><number>", kStream, bad_answer(), {"hello"}},
    {"an event that is an array", "<hello><in array>", kStream, bad_answer(), {"hello"}},
    {"an event of two documents", "<hello><two>", kStream, bad_answer(), {"hello"}},
    {"OpenAI's end mark", "<world><done>", kStream, bad_answer(), {"world"}},
    {"a NUL behind an event", "<hello><nul>", kStream, bad_answer(), {"hello"}},
    {"a byte order mark in an event", "<hello><bom>", kStream, bad_answer(), {"hello"}},
    {"an event that is no UTF-8", "<hello><no utf-8>", kStream, bad_answer(), {"hello"}},
};

TEST_CASE("Each wire shape has its outcome, cut at every byte") {
    for (const Sample& sample : kSamples) {
        const std::string body = body_of(sample.recipe);
        INFO(sample.name << "\n" << body);
        const Answer whole = read_any(body, sample.call);
        check(whole, sample.expected);
        std::vector<std::string> events;
        for (const std::string_view name : sample.events) {
            if (!name.empty()) events.push_back(documents().find(name)->second);
        }
        CHECK(whole.events == events);
        for (std::size_t cut = 0; cut <= body.size(); ++cut) {
            INFO("cut at " << cut);
            CHECK((read(body, sample.call, {cut}) == whole));
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

TEST_CASE("An error's document is handed on as it came, but for keys and the array around it") {
    const auto document = [](const std::string& body) { return outcome_of_error(400, body).document; };
    CHECK(document(kQuota) + "\n" == kQuota);
    CHECK(document("[" + kQuota + "]") == nlohmann::ordered_json::parse(kQuota).dump(2));

    const std::string key = std::string("AIza") + "SyA1234567890abcdefghijklmnopqrstuv"; // as above
    const auto details = nlohmann::json::parse(document(kBadKey)).at("error").at("details");
    REQUIRE(details.size() == 1);
    CHECK(details[0].at("reason") == "API_KEY_INVALID");
    const nlohmann::json redacted = nlohmann::json::parse(
        document(error_body("bad: " + key, R"([{"@type":"x","metadata":{"consumer":"api_key:)" + key + "\"}}]")));
    CHECK(redacted.at("error").at("message") == "bad: [redacted]");
    CHECK(redacted.at("error").at("details")[0].at("metadata").at("consumer") == "api_key:[redacted]");

    // What was not looked at is not handed on: DebugInfo wherever it stands, members that come twice, what stands
    // behind the end.
    const std::string debug = R"({"@type":"type.googleapis.com/google.rpc.DebugInfo","detail":"hunter2"})";
    for (const std::string& body :
         {R"({"error":{"details":)" + debug + "}}", R"({"error":{"code":400},"details":[)" + debug + "]}",
          R"({"error":{"details":[{"links":[)" + debug + "]}]}}",
          R"({"error":{"details":[)" + debug + R"(],"details":[]}})",
          std::string(R"({"error":{"message":"key=hunter2","message":"m"}})"),
          std::string("{\"error\":{}}\0 hunter2", 21), std::string("\xEF\xBB\xBF{\"error\":{}}")}) {
        INFO(body);
        const std::string shown = document(body);
        CHECK_THAT(shown, !Contains("hunter2") && !Contains("DebugInfo"));
        CHECK((shown.empty() || shown.starts_with("{\n  \"error\": {")));
    }

    // In the midst of an answer as at its beginning, bare or framed.
    for (const std::string& body : {framed({kHello}) + kQuota, framed({kHello, replaced(kQuota, "\n", "")})}) {
        AnswerReader reader(Method::stream, 200, 1 << 20);
        reader.feed(body, [](std::string_view) {});
        CHECK(nlohmann::json::parse(reader.finish(true, [](std::string_view) {}).document) ==
              nlohmann::json::parse(kQuota));
    }

    for (const std::string& none :
         {std::string(), kHtml, kQuota.substr(0, kQuota.size() / 2), kHello, std::string("[]"), std::string("null"),
          std::string(R"({"error":"words"})"), kQuota + kQuota, error_body(std::string(20'000, 'x')),
          "{\"error\":{\"" + key + "\":1}}", std::string("{\"error\":{\"a\":\"\xFF\"}}"),
          "{\"error\":{\"a\":" + std::string(5'000, '[') + std::string(5'000, ']') + "}}"}) {
        INFO(none.substr(0, 100));
        CHECK(document(none).empty());
    }
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
        std::string body = body_of(kSamples[random() % std::size(kSamples)].recipe);
        if (round % 8 == 0) {
            body.clear();
            for (std::size_t i = random() % 30; i > 0; --i) body += tokens[random() % tokens.size()];
        } else if (round % 8 == 1) {
            body.resize(random() % 100);
            for (char& c : body) c = static_cast<char>(random());
        }
        for (std::size_t changes = random() % 4; changes > 0; --changes) {
            const std::size_t at = body.empty() ? 0 : random() % body.size();
            const std::string other = body_of(kSamples[random() % std::size(kSamples)].recipe);
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

// ---- the OpenAI form, and what is passed on ----------------------------------------------------------------------

const std::string kChatStart =
    R"(data: {"choices":[{"delta":{"content":"Hi"},"index":0}],"object":"chat.completion.chunk"})"
    "\n\n";
const std::string kChatEnd = R"(data: {"choices":[{"delta":{},"finish_reason":"stop","index":0}],)"
                             R"("usage":{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9}})"
                             "\n\n";

TEST_CASE("a stream of the OpenAI form is complete with a reason; its [DONE] is no event") {
    Call call;
    call.method = Method::chat_stream;
    for (const std::string done : {"data: [DONE]\n\n", "data: [DONE]\r\n\r\n", "data: [DONE]", ""}) {
        const std::string body = kChatStart + kChatEnd + done;
        const Answer answer = read(body, call);
        CHECK(answer.outcome.kind == GCOALESCE_COMPLETE);
        CHECK(answer.outcome.reusable);
        CHECK(answer.outcome.finish_reason == "STOP");
        CHECK(answer.outcome.usage.prompt == 7);
        CHECK(answer.outcome.usage.answer == 2);
        CHECK(answer.outcome.usage.total == 9);
        CHECK(answer.events.size() == 2);
        CHECK(read(body, call, every_byte(body.size())) == answer);
    }
    CHECK(read(kChatStart + "data: [DONE]\n\n", call).outcome.kind == GCOALESCE_TRUNCATED);
    CHECK(read(kChatStart + kChatEnd, {Method::chat_stream, 200, false, kLimit}).outcome.kind == GCOALESCE_TRUNCATED);
    const Answer error = read(kChatStart + R"([{"error":{"code":503,"status":"UNAVAILABLE"}}])", call);
    CHECK(error.outcome.http_status == 503);
}

TEST_CASE("an answer of the OpenAI form in one piece is judged by its reason") {
    Call call;
    call.method = Method::chat_unary;
    const auto with = [&](const std::string& reason) {
        return read(R"({"choices":[{"message":{"content":"x"},"finish_reason":")" + reason + R"(","index":0}]})", call)
            .outcome;
    };
    CHECK(with("stop").reusable);
    CHECK(with("tool_calls").reusable);
    CHECK(with("length").kind == GCOALESCE_COMPLETE);
    CHECK(with("length").finish_reason == "length");
    CHECK_FALSE(with("length").reusable);
    CHECK(read("{}", call).outcome.kind == GCOALESCE_FAILED);
}

TEST_CASE("what is passed on is handed out in its pieces, whatever it is, and never reused") {
    Call call;
    call.method = Method::pass;
    const std::string body("\0 no JSON\r\n", 11);
    const Answer answer = read(body, call);
    CHECK(answer.outcome.kind == GCOALESCE_COMPLETE);
    CHECK_FALSE(answer.outcome.reusable);
    CHECK(answer.events == std::vector<std::string>{body});
    CHECK(read("", {Method::pass, 204, true, kLimit}).outcome.kind == GCOALESCE_COMPLETE);
    CHECK(read(body, {Method::pass, 200, false, kLimit}).outcome.kind == GCOALESCE_TRUNCATED);
    CHECK(read(R"({"error":{"code":404}})", {Method::pass, 404, true, kLimit}).outcome.code ==
          GCOALESCE_UPSTREAM_ERROR);
}

} // namespace
