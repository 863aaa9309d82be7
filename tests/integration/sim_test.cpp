// gcoalesce sim as its clients see it: the bytes, the endings, the counters.
#include <algorithm>
#include <arpa/inet.h>
#include <array>
#include <catch2/catch.hpp>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <poll.h>
#include <set>
#include <stdexcept>
#include <sys/resource.h>
#include <sys/socket.h>
#include <thread>
#include <vector>

#include "base/fd.hpp"
#include "protocol/gemini.hpp"
#include "tests/support/fixtures.hpp"
#include "tests/support/http.hpp"
#include "tests/support/sim.hpp"

using namespace gcoalesce::test;
using gcoalesce::UniqueFd;
using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;
namespace fs = std::filesystem;

namespace {

const std::string kModel = "/v1beta/models/gemini-2.5-flash";
const std::string kStream = ":streamGenerateContent?alt=sse";
const std::string kArray = ":streamGenerateContent";
const std::string kUnary = ":generateContent";

HttpResponse ask(const Sim& sim, const std::string& prompt, const std::string& method = kStream,
                 const std::vector<std::string>& headers = {}) {
    return http(sim.url() + kModel + method, prompt_body(prompt), headers);
}

// The documents of a stream in Google's framing; fails the test where it is framed otherwise.
std::vector<Json> events(std::string_view body) {
    std::vector<Json> documents;
    while (!body.empty()) {
        const std::size_t end = body.find("\r\n\r\n");
        REQUIRE(body.starts_with("data: {"));
        REQUIRE(end != std::string_view::npos);
        const std::string_view line = body.substr(6, end - 6);
        REQUIRE(line.find_first_of("\r\n") == std::string_view::npos);
        documents.push_back(Json::parse(line));
        body.remove_prefix(end + 4);
    }
    return documents;
}

std::string text_of(const Json& event, std::size_t candidate = 0) {
    std::string text;
    for (const Json& part : event["candidates"][candidate]["content"]["parts"]) text += part["text"].get<std::string>();
    return text;
}

bool contains(const std::string& text, std::string_view part) {
    return text.find(part) != std::string::npos;
}

// How a connection ended.
enum class End { open, closed, reset };

// A client that sees the bytes.
class RawClient {
  public:
    explicit RawClient(std::uint16_t port) : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_port = htons(port);
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        const timeval watchdog{60, 0};
        ::setsockopt(fd_.get(), SOL_SOCKET, SO_RCVTIMEO, &watchdog, sizeof watchdog);
        if (::connect(fd_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
            throw std::system_error(errno, std::generic_category(), "connect");
    }

    void send(std::string_view bytes) {
        while (!bytes.empty()) {
            const ssize_t sent = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
            if (sent <= 0) throw std::system_error(errno, std::generic_category(), "send");
            bytes.remove_prefix(static_cast<std::size_t>(sent));
        }
    }

    // What comes up to and including `mark`; all that comes, where it does not.
    std::string read_until(std::string_view mark) {
        std::size_t end = 0;
        while ((end = buffer_.find(mark)) == std::string::npos && fill()) {
        }
        if (end == std::string::npos) return std::exchange(buffer_, {});
        std::string found = buffer_.substr(0, end + mark.size());
        buffer_.erase(0, found.size());
        return found;
    }

    std::string read_all() {
        while (fill()) {
        }
        return std::exchange(buffer_, {});
    }

    End end() const { return end_; }

    // Whether anything is there to be read, or comes within the time.
    bool has_more(std::chrono::milliseconds time) {
        pollfd poll{fd_.get(), POLLIN, 0};
        return !buffer_.empty() || ::poll(&poll, 1, static_cast<int>(time.count())) != 0;
    }

  private:
    bool fill() {
        if (end_ != End::open) return false;
        std::array<char, 65536> bytes{};
        const ssize_t got = ::recv(fd_.get(), bytes.data(), bytes.size(), 0);
        if (got > 0) {
            buffer_.append(bytes.data(), static_cast<std::size_t>(got));
            return true;
        }
        if (got == 0)
            end_ = End::closed;
        else if (errno == ECONNRESET)
            end_ = End::reset;
        else
            throw std::system_error(errno, std::generic_category(), "recv");
        return false;
    }

    UniqueFd fd_;
    std::string buffer_;
    End end_ = End::open;
};

std::string raw_request(const std::string& path, const std::string& body, const std::string& fields = {}) {
    return "POST " + path + " HTTP/1.1\r\nHost: sim\r\n" + fields + "Content-Length: " + std::to_string(body.size()) +
           "\r\n\r\n" + body;
}

// The chunks of a chunked body as they were sent; the last, empty one too.
std::vector<std::string> chunks(std::string_view body) {
    std::vector<std::string> found;
    while (!body.empty()) {
        const std::size_t line = body.find("\r\n"), size = std::stoul(std::string(body.substr(0, line)), nullptr, 16);
        found.emplace_back(body.substr(line + 2, size));
        REQUIRE(body.substr(line + 2 + size, 2) == "\r\n");
        body.remove_prefix(line + 2 + size + 2);
    }
    return found;
}

struct RawAnswer {
    std::string head, body;
    End end = End::open;
};

RawAnswer raw_ask(const Sim& sim, const std::string& prompt, const std::string& method = kStream) {
    RawClient client(sim.port());
    client.send(raw_request(kModel + method, prompt_body(prompt), "Connection: close\r\n"));
    RawAnswer answer;
    answer.head = client.read_until("\r\n\r\n");
    answer.body = client.read_all();
    answer.end = client.end();
    return answer;
}

// Waits, by asking again, for the counters to satisfy `wanted`.
template <class Wanted>
Json wait_for_calls(const Sim& sim, Wanted wanted) {
    const auto watchdog = Clock::now() + 60s;
    for (;;) {
        Json calls = Json::parse(sim.calls());
        if (wanted(calls)) return calls;
        if (Clock::now() > watchdog) throw std::runtime_error("the counters stay at " + calls.dump());
        std::this_thread::yield();
    }
}

class Folder {
  public:
    Folder() {
        std::string name = (fs::temp_directory_path() / "gcoalesce-sim-XXXXXX").string();
        if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp");
        path_ = name;
    }
    ~Folder() { fs::remove_all(path_); }
    Folder(const Folder&) = delete;
    Folder& operator=(const Folder&) = delete;

    const fs::path& path() const { return path_; }
    void write(const std::string& name, std::string_view bytes) const {
        fs::create_directories((path_ / name).parent_path());
        std::ofstream(path_ / name, std::ios::binary) << bytes;
    }

  private:
    fs::path path_;
};

} // namespace

// --- framing ---

TEST_CASE("a stream goes in the framing of the real service, byte for byte") {
    const Sim sim;
    const RawAnswer answer = raw_ask(sim, "hello [sim events=2]");
    const std::vector<std::string> sent = chunks(answer.body);
    REQUIRE(sent.size() == 3);
    CHECK(
        sent[0] ==
        "data: "
        R"({"candidates": [{"content": {"parts": [{"text": "Answer to: hello 日本 far \"quoted\" model \"quoted\" naïve"}],)"
        R"("role": "model"},"index": 0}],)"
        R"("usageMetadata": {"promptTokenCount": 6,"candidatesTokenCount": 15,"totalTokenCount": 21,"promptTokensDetails": [{"modality": "TEXT","tokenCount": 6}]},)"
        R"("modelVersion": "gemini-2.5-flash","responseId": "73ffebb3141ab2bc-1"})"
        "\r\n\r\n");
    CHECK(
        sent[1] ==
        "data: "
        R"({"candidates": [{"content": {"parts": [{"text": " slowly event one model event stream"}],"role": "model"},)"
        R"("finishReason": "STOP","index": 0}],)"
        R"("usageMetadata": {"promptTokenCount": 6,"candidatesTokenCount": 25,"totalTokenCount": 31,"promptTokensDetails": [{"modality": "TEXT","tokenCount": 6}]},)"
        R"("modelVersion": "gemini-2.5-flash","responseId": "73ffebb3141ab2bc-1"})"
        "\r\n\r\n");
    CHECK(sent[2].empty());
    CHECK(answer.end == End::closed);
}

TEST_CASE("a stream's head has the fields that the real service was recorded with") {
    const Sim sim;
    std::string head = raw_ask(sim, "hello").head;
    const auto blank_out = [&](const std::string& field) {
        const std::size_t begin = head.find(field) + field.size();
        head.replace(begin, head.find('\r', begin) - begin, "*");
    };
    blank_out("Date: ");
    blank_out("dur=");
    CHECK(head == "HTTP/1.1 200 OK\r\n"
                  "Content-Type: text/event-stream\r\n"
                  "Content-Disposition: attachment\r\n"
                  "Vary: Origin\r\n"
                  "Vary: X-Origin\r\n"
                  "Vary: Referer\r\n"
                  "Transfer-Encoding: chunked\r\n"
                  "Connection: close\r\n"
                  "Date: *\r\n"
                  "Server: scaffolding on HTTPServer2\r\n"
                  "X-XSS-Protection: 0\r\n"
                  "X-Frame-Options: SAMEORIGIN\r\n"
                  "X-Content-Type-Options: nosniff\r\n"
                  "Server-Timing: gfet4t7; dur=*\r\n"
                  "Alt-Svc: h3=\":443\"; ma=2592000,h3-29=\":443\"; ma=2592000\r\n"
                  "\r\n");
}

TEST_CASE("without alt=sse a stream is a JSON array, sent element by element") {
    const Sim sim;
    const RawAnswer answer = raw_ask(sim, "hello [sim events=3]", kArray);
    CHECK(contains(answer.head, "\r\nContent-Type: application/json; charset=UTF-8\r\n"));
    const std::vector<std::string> sent = chunks(answer.body);
    REQUIRE(sent.size() == 5);
    const std::vector<Json> streamed = events(ask(sim, "hello [sim events=3]").body);
    std::string all;
    for (std::size_t i = 0; i < 3; ++i) {
        Json document = streamed[i];
        document["responseId"] = "*";
        std::string element = sent[i];
        const std::string id = "\"responseId\": \"";
        const std::size_t begin = element.find(id) + id.size();
        element.replace(begin, element.find('"', begin) - begin, "*");
        CHECK(element == (i == 0 ? "[" : ",\r\n") + document.dump(2) + "\n");
        all += sent[i];
    }
    CHECK(sent[3] == "]");
    CHECK(Json::parse(all + sent[3]).size() == 3);
}

TEST_CASE("a call without streaming gets one indented document with the whole text") {
    const Sim sim;
    const HttpResponse unary = ask(sim, "hello [sim events=5 thoughts=2]", kUnary);
    CHECK(contains(unary.head, "\r\nContent-Type: application/json; charset=UTF-8\r\n"));
    const Json document = Json::parse(unary.body);
    CHECK(unary.body == document.dump(2) + "\n");

    const std::vector<Json> streamed = events(ask(sim, "hello [sim events=5 thoughts=2]").body);
    REQUIRE(streamed.size() == 5);
    const Json& parts = document["candidates"][0]["content"]["parts"];
    REQUIRE(parts.size() == 2);
    CHECK(parts[0]["text"] == text_of(streamed[0]) + text_of(streamed[1]));
    CHECK(parts[0]["thought"] == true);
    CHECK(parts[1]["text"] == text_of(streamed[2]) + text_of(streamed[3]) + text_of(streamed[4]));
    CHECK(document["candidates"][0]["finishReason"] == "STOP");
    CHECK(document["usageMetadata"] == streamed[4]["usageMetadata"]);
}

TEST_CASE("alt=sse changes nothing for a call without streaming") {
    const Sim sim;
    const HttpResponse plain = ask(sim, "hello", kUnary), sse = ask(sim, "hello", kUnary + "?alt=sse");
    CHECK(contains(sse.head, "application/json"));
    CHECK(text_of(Json::parse(sse.body)) == text_of(Json::parse(plain.body)));
}

TEST_CASE("usage is told in every event, and grows") {
    const Sim sim;
    std::int64_t total = 0;
    for (const Json& event : events(ask(sim, "hello [sim events=6 thoughts=2]").body)) {
        const Json& usage = event["usageMetadata"];
        CHECK(usage["totalTokenCount"] > total);
        total = usage["totalTokenCount"];
        CHECK(total == usage["promptTokenCount"].get<std::int64_t>() + usage.value("candidatesTokenCount", 0) +
                           usage.value("thoughtsTokenCount", 0));
        CHECK(event["modelVersion"] == "gemini-2.5-flash");
    }
}

TEST_CASE("an answer depends on the request's body alone, and its responseId tells the calls apart") {
    const auto split = [](std::string body, std::set<std::string>& ids) {
        const std::string field = "\"responseId\": \"";
        for (std::size_t at = 0; (at = body.find(field, at)) != std::string::npos;) {
            at += field.size();
            const std::size_t end = body.find('"', at);
            ids.insert(body.substr(at, end - at));
            body.replace(at, end - at, "*");
        }
        return body;
    };
    std::set<std::string> first_ids, second_ids, other_ids, elsewhere_ids;
    const Sim sim, elsewhere;
    const std::string first = split(ask(sim, "one").body, first_ids), second = split(ask(sim, "one").body, second_ids);
    CHECK(first == second);
    CHECK(first == split(ask(elsewhere, "one").body, elsewhere_ids));
    CHECK(first != split(ask(sim, "two").body, other_ids));
    REQUIRE(first_ids.size() == 1);
    REQUIRE(second_ids.size() == 1);
    CHECK(first_ids == elsewhere_ids);
    CHECK(first_ids.begin()->ends_with("-1"));
    CHECK(second_ids.begin()->ends_with("-2"));

    // Bodies that differ elsewhere get other words as well.
    const std::string body = R"({"contents":[{"parts":[{"text":"one"}]}],"generationConfig":{"temperature":)";
    const auto words = [&](const char* temperature) {
        return text_of(Json::parse(http(sim.url() + kModel + kUnary, body + temperature + "}}").body));
    };
    CHECK(words("0.1") != words("0.2"));
    sim.reset();
    CHECK(events(ask(sim, "one").body)[0]["responseId"].get<std::string>().ends_with("-1"));
}

// --- what a script can ask for ---

TEST_CASE("the script's shape keys shape the events") {
    const Sim sim;
    const auto stream = [&](const std::string& script) { return events(ask(sim, "x [sim " + script + "]").body); };

    SECTION("events") {
        CHECK(stream("events=1").size() == 1);
        CHECK(stream("events=36").size() == 36);
    }
    SECTION("size counts the bytes of each event's text, and cuts no character in two") {
        for (const char* size : {"1", "7", "64", "1000", "2MiB"}) {
            const std::uint64_t bytes = std::string(size) == "2MiB" ? 2 << 20 : std::stoull(size);
            for (const Json& event :
                 events(ask(sim, std::string("日本日本日本 [sim events=2 size=") + size + "]").body))
                CHECK(text_of(event).size() == bytes);
        }
    }
    SECTION("candidates") {
        const Json event = stream("candidates=3 events=1")[0];
        REQUIRE(event["candidates"].size() == 3);
        for (std::size_t i = 0; i < 3; ++i) CHECK(event["candidates"][i]["index"] == i);
        CHECK(text_of(event, 0) != text_of(event, 1));
    }
    SECTION("thoughts") {
        const std::vector<Json> got = stream("thoughts=2 events=3");
        CHECK(got[0]["candidates"][0]["content"]["parts"][0]["thought"] == true);
        CHECK(got[1]["candidates"][0]["content"]["parts"][0]["thought"] == true);
        CHECK_FALSE(got[2]["candidates"][0]["content"]["parts"][0].contains("thought"));
        CHECK(got[1]["usageMetadata"]["thoughtsTokenCount"] > 0);
        CHECK_FALSE(got[1]["usageMetadata"].contains("candidatesTokenCount"));
    }
    SECTION("finish stands in the last event alone") {
        const std::vector<Json> got = stream("finish=MAX_TOKENS events=3");
        CHECK_FALSE(got[1]["candidates"][0].contains("finishReason"));
        CHECK(got[2]["candidates"][0]["finishReason"] == "MAX_TOKENS");
    }
    SECTION("stop-every") {
        for (const Json& event : stream("stop-every events=3")) CHECK(event["candidates"][0]["finishReason"] == "STOP");
    }
    SECTION("finish-alone") {
        const Json last = stream("finish-alone events=3")[2];
        CHECK_FALSE(last["candidates"][0].contains("content"));
        CHECK(last["candidates"][0]["finishReason"] == "STOP");
        CHECK(last.contains("usageMetadata"));
    }
    SECTION("block") {
        const std::vector<Json> got = stream("block=SAFETY events=3");
        REQUIRE(got.size() == 1);
        CHECK(got[0]["promptFeedback"] == Json{{"blockReason", "SAFETY"}});
        CHECK_FALSE(got[0].contains("candidates"));
    }
    SECTION("no-final-blank") {
        const std::string body = ask(sim, "x [sim no-final-blank events=2]").body;
        CHECK(body.ends_with("}"));
        CHECK(events(body + "\r\n\r\n").size() == 2);
    }
}

TEST_CASE("chunk cuts the body at every so many bytes, whatever stands there") {
    const Sim sim;
    const std::string whole = ask(sim, "日本 [sim events=3 chunk=1]").body;
    CHECK(events(whole).size() == 3);
    for (const std::size_t size : {1, 7, 1000}) {
        const std::string prompt = "日本 [sim events=3 chunk=" + std::to_string(size) + "]";
        std::vector<std::string> sent = chunks(raw_ask(sim, prompt).body);
        CHECK(sent.back().empty());
        sent.pop_back();
        std::string joined;
        for (std::size_t i = 0; i < sent.size(); ++i) {
            CHECK((i + 1 == sent.size() ? sent[i].size() <= size : sent[i].size() == size));
            joined += sent[i];
        }
        CHECK(events(joined).size() == 3);
    }
    // A gap sends what there is: the event before it arrives whole.
    std::size_t ends = 0;
    for (const std::string& chunk : chunks(raw_ask(sim, "x [sim events=2 gap=1ms chunk=100]").body))
        ends += chunk.ends_with("\r\n\r\n") ? 1U : 0U;
    CHECK(ends == 2);
    const std::string document = ask(sim, "x [sim chunk=3]", kUnary).body;
    CHECK(Json::parse(document)["candidates"].size() == 1);
}

TEST_CASE("the waits of a script come where it says") {
    const Sim sim;
    RawClient client(sim.port());
    const auto start = Clock::now();
    client.send(raw_request(kModel + kStream, prompt_body("x [sim latency=30ms first=40ms gap=50ms events=3]")));
    CHECK(client.read_until("\r\n\r\n").starts_with("HTTP/1.1 200"));
    CHECK(Clock::now() - start >= 30ms);
    CHECK(contains(client.read_until("\r\n\r\n"), "data: "));
    CHECK(Clock::now() - start >= 70ms);
    client.read_until("\r\n\r\n");
    CHECK(Clock::now() - start >= 120ms);
    client.read_until("0\r\n\r\n");
    CHECK(Clock::now() - start >= 170ms);
}

TEST_CASE("an error by status has the document that the real service sends") {
    const Sim sim;
    for (const auto& [status, name] : std::vector<std::pair<int, std::string>>{{400, "INVALID_ARGUMENT"},
                                                                               {401, "UNAUTHENTICATED"},
                                                                               {403, "PERMISSION_DENIED"},
                                                                               {404, "NOT_FOUND"},
                                                                               {429, "RESOURCE_EXHAUSTED"},
                                                                               {499, "CANCELLED"},
                                                                               {500, "INTERNAL"},
                                                                               {503, "UNAVAILABLE"},
                                                                               {504, "DEADLINE_EXCEEDED"}}) {
        const HttpResponse response = ask(sim, "x [sim status=" + std::to_string(status) + "]");
        CHECK(response.status == status);
        CHECK(response.error.empty());
        const Json document = Json::parse(response.body);
        CHECK(response.body == document.dump(2) + "\n");
        CHECK(document["error"]["code"] == status);
        CHECK(document["error"]["status"] == name);
        CHECK_FALSE(document["error"]["message"].get<std::string>().empty());
        // On a stream the recorded errors were JSON under the stream's content type.
        CHECK(contains(response.head, "\r\nContent-Type: text/event-stream\r\n"));
    }
    CHECK(
        contains(ask(sim, "x [sim status=503]", kUnary).head, "\r\nContent-Type: application/json; charset=UTF-8\r\n"));
    CHECK(ask(sim, "x [sim status=302]").status == 302);
    CHECK(contains(ask(sim, "x [sim status=302]").head, "\r\nLocation: "));
}

TEST_CASE("RetryInfo, Retry-After and the reason of an error are the script's") {
    const Sim sim;
    const HttpResponse quota = ask(sim, "x [sim status=429 retry=34.4s retry-header]");
    const Json error = Json::parse(quota.body)["error"];
    CHECK(error["details"][0]["@type"] == "type.googleapis.com/google.rpc.QuotaFailure");
    CHECK(error["details"][0]["violations"][0]["quotaDimensions"]["model"] == "gemini-2.5-flash");
    CHECK(error["details"].back() ==
          Json{{"@type", "type.googleapis.com/google.rpc.RetryInfo"}, {"retryDelay", "34.4s"}});
    CHECK(contains(error["message"], "Please retry in 34.4s."));
    CHECK(contains(quota.head, "\r\nRetry-After: 35\r\n"));
    CHECK_FALSE(contains(ask(sim, "x [sim status=429 retry=36s]").head, "Retry-After"));
    CHECK(gcoalesce::outcome_of_error(429, quota.body).retry_ms == 34400);

    const Json refused = Json::parse(ask(sim, "x [sim status=400 reason=API_KEY_INVALID]").body)["error"];
    CHECK(refused["details"][0]["reason"] == "API_KEY_INVALID");
    CHECK(refused["status"] == "INVALID_ARGUMENT");
}

TEST_CASE("bodies that are no answer: in an array, HTML, nothing at all") {
    const Sim sim;
    const HttpResponse wrapped = ask(sim, "x [sim status=503 array-error]");
    CHECK(wrapped.status == 503);
    CHECK(Json::parse(wrapped.body)[0]["error"]["code"] == 503);

    const HttpResponse html = ask(sim, "x [sim html]");
    CHECK(html.status == 404);
    CHECK(html.body.starts_with("<!DOCTYPE html>"));
    CHECK(contains(html.head, "\r\nContent-Type: text/html"));
    CHECK(ask(sim, "x [sim html status=200]").status == 200);

    for (const std::string& method : {kStream, kArray, kUnary}) {
        const HttpResponse empty = ask(sim, "x [sim empty]", method);
        CHECK(empty.status == 200);
        CHECK(empty.body.empty());
        CHECK(empty.error.empty());
    }
}

TEST_CASE("an error in mid-stream comes framed or bare, at any place") {
    const Sim sim;
    for (const std::uint64_t at : {0, 1, 3}) {
        const std::string n = std::to_string(at);
        const HttpResponse framed = ask(sim, "x [sim events=3 error-after=" + n + " error-status=500]");
        CHECK(framed.status == 200);
        CHECK(framed.error.empty());
        const std::vector<Json> got = events(framed.body);
        REQUIRE(got.size() == at + 1);
        CHECK(got.back()["error"]["code"] == 500);
        CHECK(got.back()["error"]["status"] == "INTERNAL");

        const HttpResponse bare = ask(sim, "x [sim events=3 bare-error-after=" + n + "]");
        const std::size_t begin = bare.body.find("{\n  \"error\": {\n    \"code\": 503,");
        REQUIRE(begin != std::string::npos);
        CHECK(events(bare.body.substr(0, begin)).size() == at);
        CHECK(Json::parse(bare.body.substr(begin))["error"]["status"] == "UNAVAILABLE");
        CHECK(bare.body.ends_with("}\n"));
        CHECK(bare.error.empty());
    }
    const std::string after_stop = ask(sim, "x [sim events=2 bare-error-after=events]").body;
    CHECK(contains(after_stop, "\"finishReason\": \"STOP\""));
    CHECK(after_stop.find("\"error\"") > after_stop.find("\"STOP\""));
    CHECK(contains(ask(sim, "x [sim bare-error-after=1 array-error]").body, "\r\n\r\n[{\n  \"error\""));

    const Json array = Json::parse(ask(sim, "x [sim events=3 error-after=2]", kArray).body);
    REQUIRE(array.size() == 3);
    CHECK(array[2]["error"]["code"] == 503);
    CHECK(Json::parse(ask(sim, "x [sim error-after=0]", kArray).body).size() == 1);
    const HttpResponse unary = ask(sim, "x [sim error-after=0]", kUnary);
    CHECK(unary.status == 200);
    CHECK(Json::parse(unary.body)["error"]["code"] == 503);
}

TEST_CASE("an event that is no JSON, and an end without a finish reason, end cleanly") {
    const Sim sim;
    const HttpResponse invalid = ask(sim, "x [sim events=3 invalid-json-after=2]");
    CHECK(invalid.error.empty());
    const std::size_t last = invalid.body.rfind("data: ");
    CHECK(events(invalid.body.substr(0, last)).size() == 2);
    CHECK_FALSE(Json::accept(invalid.body.substr(last + 6)));
    CHECK(invalid.body.ends_with("\r\n\r\n"));
    CHECK_FALSE(Json::accept(ask(sim, "x [sim invalid-json-after=0]", kUnary).body));
    CHECK_FALSE(Json::accept(ask(sim, "x [sim invalid-json-after=1]", kArray).body));

    for (const char* after : {"0", "2", "events"}) {
        const HttpResponse truncated = ask(sim, std::string("x [sim events=3 truncate-after=") + after + "]");
        CHECK(truncated.error.empty());
        CHECK_FALSE(contains(truncated.body, "finishReason"));
        CHECK(events(truncated.body).size() == (std::string(after) == "events" ? 3 : std::stoul(after)));
    }
    CHECK(Json::parse(ask(sim, "x [sim truncate-after=0]", kArray).body) == Json::array());
    CHECK_FALSE(contains(ask(sim, "x [sim truncate-after=0]", kUnary).body, "finishReason"));
}

TEST_CASE("a cut closes the connection without the last chunk") {
    const Sim sim;
    for (const std::uint64_t at : {0, 2, 3}) {
        const RawAnswer answer = raw_ask(sim, "x [sim events=3 cut-after=" + std::to_string(at) + "]");
        CHECK(answer.head.starts_with("HTTP/1.1 200"));
        CHECK(chunks(answer.body).size() == at);
        CHECK(answer.end == End::closed);
        CHECK_FALSE(ask(sim, "x [sim events=3 cut-after=" + std::to_string(at) + "]").error.empty());
    }
    const HttpResponse unary = ask(sim, "x [sim events=4 cut-after=2]", kUnary);
    CHECK_FALSE(unary.error.empty());
    CHECK_FALSE(unary.body.empty());
    CHECK_FALSE(Json::accept(unary.body));
}

TEST_CASE("a reset arrives behind the events that the script wants sent, or before the head") {
    const Sim sim;
    const RawAnswer none = raw_ask(sim, "x [sim reset-after=0]");
    CHECK(none.head.empty());
    CHECK(none.end == End::reset);
    for (const std::uint64_t at : {1, 3}) {
        const RawAnswer answer = raw_ask(sim, "x [sim events=3 size=300KiB reset-after=" + std::to_string(at) + "]");
        CHECK(answer.head.starts_with("HTTP/1.1 200"));
        CHECK(chunks(answer.body).size() == at);
        CHECK(answer.end == End::reset);
    }
    CHECK(Json::parse(sim.calls())["in_flight"] == 0);
    CHECK(Json::parse(sim.calls())["by_status"] == Json{{"200", 2}});
}

TEST_CASE("a hanging call stays open until its client leaves, which is counted") {
    const Sim sim;
    {
        RawClient silent(sim.port()), stuck(sim.port());
        silent.send(raw_request(kModel + kStream, prompt_body("x [sim hang-after=0]")));
        stuck.send(raw_request(kModel + kStream, prompt_body("x [sim hang-after=1]")));
        stuck.read_until("\r\n\r\n");
        CHECK(contains(stuck.read_until("\r\n\r\n"), "data: "));
        const Json calls = wait_for_calls(sim, [](const Json& now) { return now["in_flight"] == 2; });
        CHECK(calls["aborted"] == 0);
        CHECK(calls["by_status"] == Json{{"200", 1}});
    }
    const Json calls = wait_for_calls(sim, [](const Json& now) { return now["in_flight"] == 0; });
    CHECK(calls["aborted"] == 2);
    CHECK(calls["most_in_flight"] == 2);
    sim.reset();
    CHECK(Json::parse(sim.calls())["most_in_flight"] == 0);
    CHECK(calls["calls"] == 2);
}

TEST_CASE("a held call goes on when all are let go, and so do later ones until the next reset") {
    const Sim sim;
    RawClient silent(sim.port()), midway(sim.port()), almost(sim.port());
    silent.send(raw_request(kModel + kStream, prompt_body("x [sim hold-after=0]")));
    midway.send(raw_request(kModel + kStream, prompt_body("x [sim hold-after=1]")));
    almost.send(raw_request(kModel + kStream, prompt_body("x [sim hold-after=events events=1]")));
    for (RawClient* client : {&midway, &almost}) {
        client->read_until("\r\n\r\n");
        CHECK(contains(client->read_until("\r\n\r\n"), "data: "));
    }
    wait_for_calls(sim, [](const Json& now) { return now["in_flight"] == 3; });
    CHECK_FALSE(silent.has_more(100ms));
    sim.release();
    for (RawClient* client : {&silent, &midway, &almost}) {
        const std::string rest = client->read_until("\r\n0\r\n\r\n");
        CHECK(rest.ends_with("\r\n0\r\n\r\n"));
    }
    CHECK(events(ask(sim, "y [sim hold-after=0]").body).size() == 4);
    sim.reset();
    silent.send(raw_request(kModel + kStream, prompt_body("x [sim hold-after=0]")));
    wait_for_calls(sim, [](const Json& now) { return now["in_flight"] == 1; });
    CHECK_FALSE(silent.has_more(100ms));
}

TEST_CASE("fail-first lets a body's first calls go wrong and its later ones succeed") {
    const Sim sim;
    const auto status = [&](const std::string& prompt) { return ask(sim, prompt).status; };
    const std::string twice = "x [sim fail-first=2 status=429]";
    CHECK(status(twice) == 429);
    CHECK(status("y [sim fail-first=1]") == 503);
    CHECK(status(twice) == 429);
    CHECK(status(twice) == 200);
    CHECK(status("y [sim fail-first=1]") == 200);

    const std::string reset = "z [sim fail-first=1 reset-after=0 events=2]";
    CHECK(ask(sim, reset).status == 0);
    CHECK(events(ask(sim, reset).body).size() == 2);
}

TEST_CASE("a script comes from the command line, from the prompt, and from a header, the later one winning") {
    const Sim sim({"--events", "7", "--stop-every"});
    CHECK(events(ask(sim, "x").body).size() == 7);
    CHECK(events(ask(sim, "x [sim events=3]").body).size() == 3);
    const std::vector<Json> got =
        events(ask(sim, "x [sim events=3]", kStream, {"x-sim-script: events=5,size=10"}).body);
    REQUIRE(got.size() == 5);
    CHECK(text_of(got[0]).size() == 10);
    CHECK(got[0]["candidates"][0]["finishReason"] == "STOP");
    CHECK(text_of(events(ask(sim, "[sim events=2,size=0] tell me").body)[0]).starts_with("Answer to: tell me "));

    // The last user turn speaks, not an earlier one and not the model's.
    const std::string body = R"({"contents":[{"role":"user","parts":[{"text":"[sim events=2]"}]},)"
                             R"({"role":"user","parts":[{"text":"last "},{"text":"turn [sim events=4]"}]},)"
                             R"({"role":"model","parts":[{"text":"[sim events=9]"}]}]})";
    const std::vector<Json> turn = events(http(sim.url() + kModel + kStream, body).body);
    REQUIRE(turn.size() == 4);
    CHECK(text_of(turn[0]).starts_with("Answer to: last turn "));
}

TEST_CASE("a script that is wrong is refused with what is wrong") {
    const Sim sim;
    const auto message = [&](const std::string& script) {
        const HttpResponse response = ask(sim, "x [sim " + script + "]", kUnary);
        CHECK(response.status == 400);
        return Json::parse(response.body)["error"]["message"].get<std::string>();
    };
    CHECK(message("evnts=3") == "sim: unknown script key \"evnts\"; did you mean \"events\"?");
    CHECK(message("events=0") == "sim: script key events: expected a number from 1 to 1000000, found \"0\"");
    CHECK(message("events=3x") == "sim: script key events: expected a number from 1 to 1000000, found \"3x\"");
    CHECK(message("gap=5") == "sim: script key gap: expected a duration such as 200ms, 6s, 10min or 2h, found \"5\"");
    CHECK(message("size=65MiB") == "sim: script key size: expected at most 64.0MiB, found 65.0MiB");
    CHECK(message("empty=1") == "sim: script key empty: takes no value, found \"1\"");
    CHECK(message("finish") == "sim: script key finish: expected a word, found nothing");
    CHECK(message("size=64MiB events=5") == "sim: the script asks for more than 256 MiB in one document");
    CHECK(message("replay=x.txt") == "sim: nothing to replay: sim was started without --replay");
}

// --- paths and keys ---

TEST_CASE("every version's paths work, and the ones without a version") {
    const Sim sim;
    for (const char* base : {"/v1beta", "/v1", "/v1alpha", ""}) {
        for (const char* model : {"/models/gemini-2.5-flash", "/models/gemini-9-ultra", "/tunedModels/mine"}) {
            const std::string path = std::string(base) + model;
            CHECK(events(http(sim.url() + path + kStream, prompt_body("x")).body).size() == 4);
            CHECK(Json::parse(http(sim.url() + path + kUnary, prompt_body("x")).body).contains("candidates"));
        }
        const Json list = Json::parse(http(sim.url() + base + "/models").body);
        CHECK(list["models"][0]["name"] == "models/gemini-2.5-flash");
        CHECK(Json::parse(http(sim.url() + base + "/models/gemini-x").body)["name"] == "models/gemini-x");
    }
    const Json tokens = Json::parse(http(sim.url() + kModel + ":countTokens", prompt_body("12345678")).body);
    CHECK(tokens["totalTokens"] == 3);
    CHECK(tokens["promptTokensDetails"] == Json::array({{{"modality", "TEXT"}, {"tokenCount", 3}}}));
    CHECK(Json::parse(sim.calls())["calls"] == 24);
}

TEST_CASE("what the stand-in does not have is a 404 document") {
    const Sim sim;
    const HttpResponse model = http(sim.url() + "/v1beta/models/palm-2" + kStream, prompt_body("x"));
    CHECK(model.status == 404);
    CHECK(contains(model.head, "\r\nContent-Type: text/event-stream\r\n"));
    CHECK(contains(Json::parse(model.body)["error"]["message"], "models/palm-2 is not found"));
    for (const char* path :
         {"/", "/v1beta", "/v1beta/models/palm-2", "/v2/models", "/v1beta/openai/chat/completions", "/sim",
          "/v1beta/models/gemini-x:embedContent", "/v1beta/models/a/b/c", "//", "/%00", "/?alt=sse&&=&key"}) {
        const HttpResponse response = http(sim.url() + path, "{}");
        CHECK(response.status == 404);
        CHECK(Json::parse(response.body)["error"]["status"] == "NOT_FOUND");
    }
    CHECK(http(sim.url() + kModel + kUnary).status == 404); // GET
}

TEST_CASE("an API key is taken from a header, the query or a bearer token, and refused as the real service does") {
    const Folder folder;
    folder.write("key", "sesame-123\n");
    const Sim any({"--require-key"}), one({"--accept-key", (folder.path() / "key").string()});
    const std::string body = prompt_body("x");
    const auto status = [&](const Sim& sim, const std::string& query, const std::vector<std::string>& headers) {
        return http(sim.url() + kModel + kUnary + query, body, headers).status;
    };
    for (const Sim* sim : {&any, &one}) {
        const HttpResponse none = http(sim->url() + kModel + kUnary, body);
        CHECK(none.status == 403);
        CHECK(Json::parse(none.body)["error"]["status"] == "PERMISSION_DENIED");
        CHECK(http(sim->url() + "/v1beta/models").status == 403);
        CHECK(status(*sim, "", {"x-goog-api-key: sesame-123"}) == 200);
        CHECK(status(*sim, "?key=sesame-123", {}) == 200);
        CHECK(status(*sim, "?alt=json&key=sesame-123", {}) == 200);
        CHECK(status(*sim, "", {"Authorization: Bearer sesame-123"}) == 200);
    }
    CHECK(status(any, "", {"x-goog-api-key: other"}) == 200);
    const HttpResponse wrong = http(one.url() + kModel + kStream, body, {"x-goog-api-key: other-456"});
    CHECK(wrong.status == 400);
    const Json error = Json::parse(wrong.body)["error"];
    CHECK(error["message"] == "API key not valid. Please pass a valid API key.");
    CHECK(error["details"][0]["reason"] == "API_KEY_INVALID");
    CHECK(error["details"][2]["detail"] == "Invalid API key: other-456"); // as the real one repeats it

    Process without({gcoalesce_program(), "sim", "--accept-key", (folder.path() / "absent").string()});
    CHECK(without.wait() == 2);
}

// --- recorded answers ---

TEST_CASE("a recorded file is replayed byte for byte, with the status that its error has") {
    const Folder folder;
    const std::string stream =
        "data: {\"a\": 1}\n\ndata: {\"b\":\n\n\ndata: 3}\r\n\r\n\r\ndata: {\"c\": \"no final blank\"}";
    folder.write("lf.txt", stream);
    folder.write("deep/error.json", R"({"error":{"code":429,"status":"RESOURCE_EXHAUSTED"}})");
    folder.write("error.txt", R"({"error":{"code":400}})");
    folder.write("odd.json", R"({"error":{"code":"many"}})");
    folder.write("array.json", "[{\"a\": 1}\n,\r\n{}]");
    folder.write("page.html", "<html>");
    folder.write("empty.txt", "");
    const Sim sim({"--replay", folder.path().string()});
    const auto replay = [&](const std::string& name, const std::string& method = kStream) {
        return ask(sim, "x [sim replay=" + name + "]", method);
    };
    CHECK(replay("lf.txt").body == stream);
    CHECK(contains(replay("lf.txt").head, "text/event-stream"));
    CHECK(replay("lf.txt chunk=1").body == stream);
    CHECK(replay("deep/error.json", kUnary).status == 429);
    CHECK(replay("deep/error.json", kUnary).body == read_file(folder.path() / "deep/error.json"));
    CHECK(replay("error.txt").status == 400);
    CHECK(replay("odd.json").status == 200);
    CHECK(replay("array.json", kArray).body == "[{\"a\": 1}\n,\r\n{}]");
    CHECK(replay("page.html").status == 404);
    CHECK(replay("empty.txt").body.empty());
    CHECK(replay("empty.txt").status == 200);

    // Its events are events to the script's other keys.
    CHECK(replay("lf.txt truncate-after=1").body == "data: {\"a\": 1}\n\n");
    CHECK(raw_ask(sim, "x [sim replay=lf.txt cut-after=1]").end == End::closed);
    CHECK_FALSE(replay("lf.txt cut-after=2").error.empty());
    CHECK(contains(replay("lf.txt bare-error-after=1").body, "\"code\": 503"));

    // A body's first calls may get another file than its later ones.
    const std::string twice = "x [sim fail-first=2 fail-replay=lf.txt replay=error.txt]";
    CHECK(ask(sim, twice).body == stream);
    CHECK(ask(sim, twice).body == stream);
    CHECK(ask(sim, twice).status == 400);

    const Sim single({"--replay", (folder.path() / "lf.txt").string()});
    CHECK(ask(single, "anything").body == stream);
    CHECK(ask(single, "anything [sim status=500]").status == 500);
}

TEST_CASE("nothing outside the folder of --replay is replayed") {
    const Folder folder;
    folder.write("secret.txt", "data: secret");
    folder.write("public/ok.txt", "data: fine");
    folder.write("public2/near.txt", "data: secret");
    fs::create_symlink(folder.path() / "secret.txt", folder.path() / "public/link.txt");
    const Sim sim({"--replay", (folder.path() / "public").string()});
    CHECK(ask(sim, "x [sim replay=ok.txt]").body == "data: fine");
    CHECK(ask(sim, "x [sim replay=./ok.txt]").body == "data: fine");
    for (const std::string& name :
         {std::string("../secret.txt"), std::string("../public2/near.txt"), std::string("link.txt"),
          (folder.path() / "secret.txt").string(), std::string("."), std::string("absent.txt"),
          std::string("x/../../secret.txt"), std::string(5000, 'x')}) {
        const HttpResponse response = ask(sim, "x [sim replay=" + name + "]");
        CHECK(response.status == 404);
        CHECK_FALSE(contains(response.body, "secret\""));
    }
    Process absent({gcoalesce_program(), "sim", "--replay", "/nowhere/at/all"});
    CHECK(absent.wait() == 1);
    CHECK(absent.err() == "gcoalesce sim: cannot replay /nowhere/at/all: No such file or directory\n");
}

TEST_CASE("every recorded answer of the public collections replays unchanged") {
    GCOALESCE_REQUIRE_FIXTURES(found);
    const fs::path root = found / "gemini";
    const Sim sim({"--replay", root.string()});
    std::size_t count = 0;
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(root)) {
        const std::string extension = entry.path().extension().string();
        if (!entry.is_regular_file() || (extension != ".txt" && extension != ".json" && extension != ".html")) continue;
        const std::string name = fs::relative(entry.path(), root).string();
        INFO(name);
        const std::string recorded = read_file(entry.path());
        const HttpResponse response = ask(sim, "x [sim replay=" + name + "]", extension == ".txt" ? kStream : kUnary);
        CHECK(response.body == recorded);
        CHECK(response.error.empty());
        ++count;
    }
    CHECK(count > 100);
}

// --- HTTP ---

TEST_CASE("one connection takes one request after another, also when they are sent at once") {
    const Sim sim;
    RawClient client(sim.port());
    const std::string request = raw_request(kModel + kStream, prompt_body("x [sim events=2 gap=1ms]"));
    client.send(request + request + request);
    for (int i = 0; i < 3; ++i) {
        CHECK(client.read_until("\r\n\r\n").starts_with("HTTP/1.1 200 OK\r\n"));
        CHECK(chunks(client.read_until("\r\n0\r\n\r\n")).size() == 3);
    }
    const Json calls = Json::parse(sim.calls());
    CHECK(calls["calls"] == 3);
    CHECK(calls["aborted"] == 0);
    CHECK(calls["connections"] == 2); // the second one asks
}

TEST_CASE("a client of HTTP/1.0 gets the bare body, ended by closing") {
    const Sim sim;
    const std::string body = prompt_body("x [sim events=2]");
    RawClient client(sim.port());
    client.send("POST " + kModel + kStream + " HTTP/1.0\r\nContent-Length: " + std::to_string(body.size()) +
                "\r\n\r\n" + body);
    CHECK_FALSE(contains(client.read_until("\r\n\r\n"), "chunked"));
    CHECK(events(client.read_all()).size() == 2);
    CHECK(client.end() == End::closed);
}

TEST_CASE("a client that waits for 100 Continue is told to go on") {
    const Sim sim;
    const std::string body = prompt_body("x");
    RawClient client(sim.port());
    client.send("POST " + kModel + kStream + " HTTP/1.1\r\nHost: sim\r\nExpect: 100-continue\r\nContent-Length: " +
                std::to_string(body.size()) + "\r\n\r\n");
    CHECK(client.read_until("\r\n\r\n") == "HTTP/1.1 100 Continue\r\n\r\n");
    client.send(body);
    CHECK(client.read_until("\r\n\r\n").starts_with("HTTP/1.1 200"));
}

TEST_CASE("a request body may come in chunks") {
    const Sim sim;
    RawClient client(sim.port());
    client.send("POST " + kModel + kStream + " HTTP/1.1\r\nHost: sim\r\nTransfer-Encoding: chunked\r\n\r\n");
    for (const char letter : prompt_body("x [sim events=3]")) client.send(std::string("1\r\n") + letter + "\r\n");
    client.send("0\r\n\r\n");
    client.read_until("\r\n\r\n");
    CHECK(chunks(client.read_until("\r\n0\r\n\r\n")).size() == 4);
}

TEST_CASE("a bad request gets a 400 document, and harms nobody else") {
    const Sim sim;
    RawClient bystander(sim.port());
    bystander.send(raw_request(kModel + kStream, prompt_body("x [sim hang-after=1]")));
    bystander.read_until("data: ");

    SECTION("no HTTP, a head without end, a body over the limit") {
        for (const std::string& bytes :
             {std::string("hello\r\n\r\n"),
              std::string("\x16\x03\x01\x02\x00\x01", 6) + std::string(100, '\x01') + "\r\n\r\n",
              "GET / HTTP/1.1\r\nX: " + std::string(70'000, 'x') + "\r\n\r\n", std::string("GET / HTTP/9.9\r\n\r\n"),
              "POST " + kModel + kUnary + " HTTP/1.1\r\nContent-Length: 67108865\r\n\r\n",
              "POST " + kModel + kUnary + " HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
              "POST " + kModel + kUnary + " HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"}) {
            RawClient client(sim.port());
            client.send(bytes);
            CHECK(client.read_until("\r\n\r\n").starts_with("HTTP/1.1 400 Bad Request\r\n"));
            const std::string body = client.read_all();
            CHECK(contains(body, "\"status\": \"INVALID_ARGUMENT\""));
            CHECK(client.end() == End::closed);
        }
    }
    SECTION("bodies that are no request") {
        const std::string deep = R"({"contents":)" + std::string(1'000'000, '[');
        for (const std::string& body :
             std::vector<std::string>{" ", "{", "[]", "null", "{}", R"({"contents":{}})", R"({"contents":[]})",
                                      "{\"contents\":[\"\xff\"]}", deep}) {
            for (const std::string& method : {kStream, kArray, kUnary, std::string(":countTokens")}) {
                const HttpResponse response = http(sim.url() + kModel + method, body);
                CHECK(response.status == 400);
                CHECK(Json::parse(response.body)["error"]["status"] == "INVALID_ARGUMENT");
            }
        }
    }
    SECTION("odd bodies that are requests all the same") {
        for (const char* body :
             {R"({"contents":[1,"x",null,[]]})", R"({"contents":[{"parts":[1,{"text":2},{"text":"a"}]}]})",
              R"({"contents":[{"role":7,"parts":{}}]})", R"({"contents":[{"parts":[{"text":"[sim "}]}]})"})
            CHECK(http(sim.url() + kModel + kStream, body).status == 200);
    }
    SECTION("clients that leave in the middle of a request") {
        for (const std::string& bytes :
             {std::string(), std::string("POST /"), raw_request(kModel + kStream, "{}").substr(0, 60)})
            RawClient(sim.port()).send(bytes);
    }
    const Json calls =
        wait_for_calls(sim, [](const Json& now) { return now["in_flight"] == 1 && now["open_connections"] == 2; });
    CHECK(calls["aborted"] == 0);
    CHECK(events(ask(sim, "x").body).size() == 4);
}

TEST_CASE("HEAD gets a head") {
    const Sim sim;
    RawClient client(sim.port());
    client.send("HEAD /v1beta/models HTTP/1.1\r\n\r\nGET /v1beta/models HTTP/1.1\r\n\r\n");
    CHECK(client.read_until("\r\n\r\n").starts_with("HTTP/1.1 404"));
    CHECK(client.read_until("\r\n\r\n").starts_with("HTTP/1.1 200"));
}

// --- counting ---

TEST_CASE("calls are counted by body and by status, and a reset zeroes the counts") {
    const Sim sim;
    const std::string body = prompt_body("count me"), other = prompt_body("and me [sim status=503]");
    CHECK(Json::parse(sim.calls())["calls"] == 0);
    http(sim.url() + kModel + kStream, body);
    http(sim.url() + kModel + kUnary, body);
    http(sim.url() + kModel + kUnary, other);
    http(sim.url() + kModel + ":countTokens", body); // costs nothing upstream
    http(sim.url() + "/v1beta/models");
    http(sim.url() + "/nowhere", body);
    const Json calls = Json::parse(sim.calls());
    CHECK(calls["calls"] == 3);
    CHECK(calls["in_flight"] == 0);
    CHECK(calls["aborted"] == 0);
    CHECK(calls["by_body"] == Json{{"0c93859cd3ccd5c1591edba49a110d1fc9fa17451bed1ba6864c45888e873118", 1},
                                   {"b25fc73b624550d0a3676e5b079fd351f6ab3ae6bd4f742e73215b5d5b7ba254", 2}});
    CHECK(calls["by_status"] == Json{{"200", 2}, {"503", 1}});
    CHECK(calls["connections"] == 8);

    sim.reset();
    const Json zero = Json::parse(sim.calls());
    CHECK(zero["calls"] == 0);
    CHECK(zero["by_body"] == Json::object());
    CHECK(zero["by_status"] == Json::object());
    CHECK(zero["connections"] == 1);
    CHECK(zero["open_connections"] == 1);
}

TEST_CASE("a client that leaves between two events is noticed at once, not at the next write") {
    const Sim sim;
    {
        RawClient client(sim.port());
        client.send(raw_request(kModel + kStream, prompt_body("x [sim gap=1h]")));
        client.read_until("data: ");
        CHECK(Json::parse(sim.calls())["in_flight"] == 1);
    }
    CHECK(wait_for_calls(sim, [](const Json& now) { return now["in_flight"] == 0; })["aborted"] == 1);
}

// --- many ---

TEST_CASE("1,000 streams at once are all whole and all alike") {
    const Sim sim;
    const std::string request = raw_request(
        kModel + kStream, prompt_body("x [sim latency=100ms gap=2ms events=10 chunk=50]"), "Connection: close\r\n");
    std::vector<RawClient> clients;
    clients.reserve(1000);
    for (int i = 0; i < 1000; ++i) {
        clients.emplace_back(sim.port());
        clients.back().send(request);
    }
    std::set<std::string> ids, bodies;
    for (RawClient& client : clients) {
        client.read_until("\r\n\r\n");
        std::string body;
        for (const std::string& chunk : chunks(client.read_all())) body += chunk;
        CHECK(client.end() == End::closed);
        for (Json& event : events(body)) {
            ids.insert(event["responseId"]);
            event["responseId"] = "";
            body += event.dump();
        }
        bodies.insert(body.substr(body.find("\r\n\r\n{")));
    }
    CHECK(ids.size() == 1000);
    CHECK(bodies.size() == 1);
    CHECK(Json::parse(sim.calls())["calls"] == 1000);
}

TEST_CASE("2,500 connections are held open at once, and let go") {
    rlimit limit{};
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &limit) == 0);
    limit.rlim_cur = limit.rlim_max;
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &limit) == 0);
    const Sim sim;
    const std::string request = raw_request(kModel + kStream, prompt_body("x [sim hang-after=1]"));
    {
        std::vector<RawClient> clients;
        for (int i = 0; i < 2500; ++i) {
            clients.emplace_back(sim.port());
            clients.back().send(request);
        }
        for (RawClient& client : clients) CHECK(contains(client.read_until("data: "), "200 OK"));
        CHECK(wait_for_calls(sim, [](const Json& now) { return now["in_flight"] == 2500; })["open_connections"] ==
              2501);
    }
    CHECK(wait_for_calls(sim, [](const Json& now) { return now["in_flight"] == 0; })["aborted"] == 2500);
}

// --- its life ---

TEST_CASE("SIGTERM and SIGINT end it with 0, also in the middle of calls") {
    for (const int number : {SIGTERM, SIGINT}) {
        Sim sim;
        RawClient hanging(sim.port()), streaming(sim.port()), idle(sim.port());
        hanging.send(raw_request(kModel + kStream, prompt_body("x [sim hang-after=0]")));
        streaming.send(raw_request(kModel + kStream, prompt_body("x [sim gap=1h]")));
        wait_for_calls(sim, [](const Json& now) { return now["in_flight"] == 2; });
        sim.process().signal(number);
        CHECK(sim.process().wait() == 0);
        CHECK(sim.process().err().empty());
        CHECK(sim.process().out() == "listening on " + sim.url() + "\n");
    }
}

TEST_CASE("a port that is taken is a failure that names it") {
    const Sim sim;
    Process second({gcoalesce_program(), "sim", "--port", std::to_string(sim.port())});
    CHECK(second.wait() == 1);
    CHECK(second.err() == "gcoalesce sim: cannot listen on 127.0.0.1 port " + std::to_string(sim.port()) +
                              ": Address already in use\n");
}
