// The inspectors as a person on call uses them: filters, terminals, what happened, who holds what.
#include <atomic>
#include <catch2/catch.hpp>
#include <csignal>
#include <fmt/format.h>
#include <memory>
#include <regex>
#include <thread>

#include "base/ids.hpp"
#include "cli/doctor.hpp"
#include "cli/redact.hpp"
#include "tests/integration/cli_segment.hpp"
#include "tests/support/terminal.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;

namespace {

SlotEnding ending_of(gcoalesce_ending_kind kind, Code code, const std::string& message) {
    SlotEnding ending{};
    ending.kind = kind;
    ending.code = code;
    ending.upstream_status = 503;
    ending.message.assign(message);
    return ending;
}

// Times and pids are this run's.
std::string masked(std::string text) {
    const std::pair<const char*, const char*> marks[] = {
        {R"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d{3})?)", "DATE"},
        {R"(\d\d:\d\d:\d\d\.\d{3})", "TIME"},
        {R"(\b\d+(\.\d+)?(ns|us|ms|s|min)\b)", "SPAN"},
        {R"(pid \d+)", "pid N"},
        {R"(broker \d+)", "broker N"},
    };
    for (const auto& [pattern, mark] : marks) text = std::regex_replace(text, std::regex(pattern), mark);
    return text;
}

std::vector<std::string> keys_of(const Ran& ran) {
    std::vector<std::string> keys;
    const auto json = ran.json();
    for (const auto& one : json["keys"]) keys.push_back(one["key"].get<std::string>().substr(0, 4));
    return keys;
}

using Words = std::vector<std::string>;

} // namespace

// ---- keys ----------------------------------------------------------------------------------------------------------

TEST_CASE("keys lists what its filters let pass, in the order that is wanted") {
    Segment segment;
    const StreamRef oldest = segment.open(key_of({0xaa, 0x01}), 0x1000000000000001, {text_event("one"), "{}"});
    segment.end(oldest, complete(), 3600 * kSecond);
    const StreamRef failed = segment.open(key_of({0xbb, 0x02}), 0x2000000000000002);
    segment.end(failed, ending_of(GCOALESCE_FAILED, GCOALESCE_UPSTREAM_ERROR, "overloaded"));
    segment.open(key_of({0xaa, 0x03}), 0x3000000000000003, {text_event("a longer one, by far")});
    const auto keys = [&](Words arguments) {
        arguments.insert(arguments.begin(), {"keys", "--json"});
        return keys_of(segment.run(arguments));
    };
    CHECK(keys({}) == Words{"aa03", "bb02", "aa01"});
    CHECK(keys({"-r"}) == Words{"aa01", "bb02", "aa03"});
    CHECK(keys({"--state", "failed"}) == Words{"bb02"});
    CHECK(keys({"--state", "failed", "--state", "in_flight"}) == Words{"aa03", "bb02"});
    CHECK(keys({"--key", "AA"}) == Words{"aa03", "aa01"});
    CHECK(keys({"--key", "2000"}) == Words{"bb02"}); // a stream's id
    CHECK(keys({"--key", "aa", "--state", "complete"}) == Words{"aa01"});
    CHECK(keys({"--older-than", "1h"}).empty());
    CHECK(keys({"--younger-than", "1h"}).size() == 3);
    CHECK(keys({"--template", "default"}).size() == 3);
    CHECK(keys({"--sort", "key"}) == Words{"aa01", "aa03", "bb02"});
    CHECK(keys({"--sort", "events"}) == Words{"aa01", "aa03", "bb02"});
    CHECK(keys({"--sort", "bytes", "-r"}) == Words{"bb02", "aa01", "aa03"});
    CHECK(keys({"--sort", "fresh"})[0] == "aa01");
    CHECK(keys({"--sort", "state"}) == Words{"aa01", "bb02", "aa03"});
}

TEST_CASE("keys tells what is wrong with a filter, and the nearest that is right") {
    Segment segment;
    const auto check = [&](Words arguments, int code, const std::string& err) {
        arguments.insert(arguments.begin(), "keys");
        const Ran ran = segment.run(arguments);
        CHECK(ran.code == code);
        CHECK(ran.out.empty());
        CHECK(ran.err == err);
    };
    const std::string hint = "\ntry 'gcoalesce keys --help'\n";
    check({"--state", "complet"}, 2,
          "gcoalesce keys: --state: expected one of in_flight, complete, failed, truncated, invalid, cancelled, "
          "interrupted, evicted, found \"complet\"; did you mean \"complete\"?" +
              hint);
    check(
        {"--sort", "joined"}, 2,
        "gcoalesce keys: --sort: expected one of age, key, stream, state, template, events, bytes, subscribers, joins, "
        "fresh, model, found \"joined\"; did you mean \"joins\"?" +
            hint);
    check({"--key", "xyz"}, 2, "gcoalesce keys: --key: expected hexadecimal digits, found \"xyz\"" + hint);
    check({"--older-than", "5"}, 2,
          "gcoalesce keys: --older-than: expected a duration such as 200ms, 6s, 10min or 2h, found \"5\"" + hint);
    check({"--template", "defualt"}, 1, "gcoalesce: there is no template \"defualt\"; did you mean \"default\"?\n");
}

TEST_CASE("keys --watch shows them again and again, and --count ends it") {
    Segment segment;
    segment.open(key_of({0xaa, 0x01}), 1);
    const Ran json = segment.run({"keys", "--watch", "--json", "--every", "10ms", "-n", "3"});
    CHECK(json.code == 0);
    CHECK(json.lines().size() == 3);
    for (const std::string& line : json.lines()) CHECK(nlohmann::json::parse(line)["keys"].size() == 1);

    Process watching(segment.command({"keys", "--watch", "--every", "10ms"}));
    CHECK(watching.read_line().starts_with("KEY"));
    CHECK(watching.read_line().starts_with("aa010000"));
    CHECK(watching.read_line().empty());
    CHECK(watching.read_line().starts_with("KEY"));
    segment.broker.die();
    CHECK(watching.wait() == 3);
    CHECK(watching.err().find("is dead since") != std::string::npos);
}

TEST_CASE("keys --watch on a terminal paints in place") {
    Segment segment;
    segment.open(key_of({0xaa, 0x01}), 1);
    Terminal terminal(segment.command({"keys", "--watch", "--every", "10ms"}), 80, 24);
    terminal.wait_for("aa010000");
    segment.open(key_of({0xbb, 0x02}), 2);
    terminal.wait_for("bb020000");
    CHECK(terminal.screen()[2].starts_with("KEY       STREAM    STATE"));
    CHECK(terminal.screen()[3].starts_with("bb020000"));
    terminal.type("\x03");
    CHECK(terminal.wait() == 128 + SIGINT);
}

TEST_CASE("tables on a terminal of 40 columns stay within it, and keep what matters most whole") {
    Segment segment;
    segment.broker.with_store([](Store& store) {
        StreamOpening opening;
        opening.key = key_of({0xaa, 0x01});
        opening.stream_id = 0x123456789abcdef0;
        opening.model = "模型\x1b[31m";
        const StreamRef stream = store.open(opening, true).value();
        for (int i = 0; i < 1234; ++i) REQUIRE(store.append(stream, "{}"));
    });
    Terminal terminal(segment.command({"keys"}), 40, 24);
    CHECK(terminal.wait() == 0);
    bool found = false;
    for (const std::string& line : terminal.screen()) {
        if (!line.starts_with("aa010000")) continue;
        found = true;
        CHECK(line.starts_with("aa010000  12345678  in_flight"));
        CHECK(line.size() <= 40);
    }
    CHECK(found);
    Terminal wide(segment.command({"keys"}), 200, 24);
    CHECK(wide.wait() == 0);
    CHECK(wide.written().find("模型\\x1b[31m") != std::string::npos); // as text: nothing commands the terminal
    CHECK(wide.written().find("\x1b[31m") == std::string::npos);
}

TEST_CASE("T101: JOINS counts the requests that a stream served beside the one that it was opened for") {
    World world;
    REQUIRE(world.run({"ask", "Hi"}).code == 0);
    const auto joins = [&] { return world.run({"keys", "--json"}).json()["keys"][0]["joins"]; };
    CHECK(eventually([&] { return joins() == 0; }));
    REQUIRE(world.run({"ask", "Hi"}).code == 0);
    REQUIRE(world.run({"ask", "Hi"}).code == 0);
    CHECK(eventually([&] { return joins() == 2; }));

    REQUIRE(world.run({"ask", "--refresh", "Hi"}).code == 0);
    const auto keys = world.run({"keys", "--json"}).json()["keys"];
    REQUIRE(keys.size() == 2); // one key, two streams: told apart by STREAM
    CHECK(keys[0]["key"] == keys[1]["key"]);
    CHECK(keys[0]["stream_id"] != keys[1]["stream_id"]);
    const std::vector<std::string> lines = world.run({"keys"}).lines();
    REQUIRE(lines.size() == 3);
    CHECK(lines[1].substr(0, 18) != lines[2].substr(0, 18));
}

// ---- show ----------------------------------------------------------------------------------------------------------

TEST_CASE("show tells all about a stream") {
    Segment segment;
    const StreamRef stream = segment.open(key_of({0xab, 0xcd, 0xef}), 0x9f3c2a71d04b55e8);
    segment.broker.with_store([&](Store& store) {
        store.count_retry(stream, GCOALESCE_UPSTREAM_ERROR, 503, kSecond);
        store.count_retry(stream, GCOALESCE_RATE_LIMITED, 429, 29 * kSecond);
        store.set_upstream_status(stream, 200);
    });
    segment.append(stream, text_event("hello"));
    SlotEnding ending = complete();
    ending.upstream_status = 200;
    ending.model_version.assign("gemini-2.5-flash-001");
    segment.end(stream, ending);

    const Ran ran = segment.run({"show", "abcd"});
    CHECK(ran.code == 0);
    CHECK(ran.err.empty());
    const std::string revision = segment.run({"templates", "list", "--json"}).json()["templates"][0]["revision"];
    const std::string expected =
        "key          abcdef0000000000000000000000000000000000000000000000000000000000\n"
        "stream       9f3c2a71d04b55e8\n"
        "template     default, revision " +
        revision +
        "\n"
        "model        gemini-2.5-flash, stream\n"
        "             answered by gemini-2.5-flash-001\n"
        "opened for   started\n"
        "opened       DATE, SPAN ago\n"
        "first event  SPAN after it was opened\n"
        "ended        DATE, SPAN after it was opened\n"
        "ending       complete, finish reason STOP, HTTP 200\n"
        "tokens       7 prompt (0 cached), 0 thoughts, 5 answer, 12 in all\n"
        "events       1, 82B\n"
        "joinable     no: new requests do not find it\n"
        "readers      0 now; 0 joined\n"
        "retries      2\n"
        "             +SPAN  number 1: upstream_error, HTTP 503, again in SPAN\n"
        "             +SPAN  number 2: rate_limited, HTTP 429, again in SPAN\n"
        "policy       ttl_idle SPAN, ttl_window SPAN, linger SPAN, on_abandon finish\n"
        "             snapshot_ttl SPAN, kv_after SPAN, kv_ttl SPAN\n"
        "request      2B, SHA-256 0000000000000000000000000000000000000000000000000000000000000000\n"
        "\n"
        "{}\n";
    CHECK(masked(ran.out) == expected);

    const auto json = segment.run({"show", "9f3c", "--json"}).json();
    CHECK(json["version"] == 1);
    CHECK(json["broker"]["state"] == "serving");
    const auto& told = json["stream"];
    CHECK(told["stream_id"] == "9f3c2a71d04b55e8");
    CHECK(told["status"] == "started");
    CHECK(told["sharing"] == "share");
    CHECK(told["realm"].is_null());
    CHECK(told["finish_reason"] == "STOP");
    CHECK(told["model_version"] == "gemini-2.5-flash-001");
    REQUIRE(told["retried"].size() == 2);
    CHECK(told["retried"][0]["code"] == "upstream_error");
    CHECK(told["retried"][1]["upstream_status"] == 429);
    CHECK(told["policy"]["revision"] == told["template_revision"]);
    CHECK(told["policy"]["cancel_after_ms"].is_null());
    CHECK(told["request"]["bytes"] == 2);
    CHECK(told["request"]["kept"] == "{}");
}

TEST_CASE("show has the error as upstream told it, but for redacted ones") {
    World world;
    const std::string prompt = "[sim status=429]";
    CHECK(world.run({"ask", prompt}).code != 0);
    const std::string key = world.run({"keys", "--json"}).json().at("keys").at(0).at("key");
    const Ran shown = world.run({"show", key});
    CHECK(shown.out.find("upstream     told this error:\n             {\n") != std::string::npos);
    CHECK(shown.out.find("\"@type\": \"type.googleapis.com/google.rpc.QuotaFailure\"") != std::string::npos);
    const auto told = world.run({"show", key, "--json"}).json().at("stream").at("error_document");
    CHECK(told.at("error").at("status") == "RESOURCE_EXHAUSTED");
    CHECK(world.run({"show", key, "--redact"}).out.find("QuotaFailure") == std::string::npos);
    CHECK(world.run({"show", key, "--redact", "--json"}).json().at("stream").at("error_document").is_null());
}

TEST_CASE("show of a running stream, and of one whose request was long or must not be told") {
    World world;
    const std::string prompt = std::string(6000, 'x') + " [sim hold-after=1]";
    Process asking(world.command({"ask", prompt}));
    CHECK(eventually([&] { return world.broker().counted(Counter::events_published) == 1; }));
    const auto json = world.run({"keys", "--json"}).json();
    const std::string key = json["keys"][0]["key"];
    const Ran ran = world.run({"show", key});
    CHECK(ran.code == 0);
    CHECK(ran.out.find("ended        no, it is in flight\n") != std::string::npos);
    CHECK(ran.out.find("joinable     yes, while it runs\n") != std::string::npos);
    CHECK(ran.out.find("its first 4.0KiB:\n\n{\"contents\":") != std::string::npos);
    const Ran redacted = world.run({"show", "--redact", key});
    CHECK(redacted.out.find("xxx") == std::string::npos);
    CHECK(redacted.out.find("[4096 bytes]") != std::string::npos);
    world.sim().release();
    CHECK(asking.wait() == 0);
}

TEST_CASE("show wants a name that fits one stream") {
    Segment segment;
    segment.open(key_of({0xab, 0xcd, 0x01}), 1);
    segment.open(key_of({0xab, 0xcd, 0x02}), 2);
    const auto check = [&](Words arguments, int code, const std::string& err) {
        arguments.insert(arguments.begin(), "show");
        const Ran ran = segment.run(arguments);
        CHECK(ran.code == code);
        CHECK(ran.out.empty());
        CHECK(ran.err == err);
    };
    check({"dead"}, 1,
          "gcoalesce: no stream's key or id begins with \"dead\": `gcoalesce keys` lists them; one that is on disk "
          "alone `gcoalesce ask --resume ID.0` brings back\n");
    check({"dead", "--json"}, 1,
          "{\"error\":{\"code\":\"not_found\",\"message\":\"no stream's key or id begins with \\\"dead\\\": `gcoalesce "
          "keys` lists them; one that is on disk alone `gcoalesce ask --resume ID.0` brings back\"}}\n");
    check({"abcd", "--json"}, 1,
          "{\"error\":{\"code\":\"not_found\",\"message\":\"\\\"abcd\\\" fits 2 streams, tell more digits\"}}\n");
    check({"abc"}, 2,
          "gcoalesce show: NAME: expected 4 to 64 hexadecimal digits, found \"abc\"\ntry 'gcoalesce show --help'\n");
    segment.broker.die();
    const Ran dead = segment.run({"show", "abcd01"});
    CHECK(dead.code == 3);
    CHECK(dead.out.starts_with("key          abcd01"));
    CHECK(dead.out.find("ended        no, and the broker is dead\n") != std::string::npos);
    CHECK(dead.out.find("joinable     no: the broker is dead\n") != std::string::npos);
}

// ---- dump ----------------------------------------------------------------------------------------------------------

TEST_CASE("what is redacted keeps the protocol's words and numbers, and nothing that anybody said") {
    using cli::redact;
    CHECK(
        redact(R"({"candidates":[{"content":{"role":"model","parts":[{"text":"secret"},{"thought":true,"text":"s"}]},)"
               R"("finishReason":"STOP","index":0}],"usageMetadata":{"promptTokenCount":7},"modelVersion":"m-1"})") ==
        R"({"candidates":[{"content":{"role":"model","parts":[{"text":"[6 bytes]"},{"thought":true,"text":"[1 byte]"}]},)"
        R"("finishReason":"STOP","index":0}],"usageMetadata":{"promptTokenCount":7},"modelVersion":"m-1"})");
    CHECK(redact(R"({"functionCall":{"name":"pay","args":{"card":4242}}})") ==
          R"({"functionCall":{"name":"[3 bytes]","args":"[13 bytes]"}})");
    CHECK(redact(R"(["said"])") == R"(["[4 bytes]"])");
    CHECK(redact("no JSON, secret") == "\"[15 bytes]\"");
    const std::string deep = std::string(100'000, '[') + std::string(100'000, ']');
    CHECK(redact(R"({"content":)" + deep + "}").size() < 1000);
}

TEST_CASE("dump --redact shows the form of an answer and not what it says") {
    Segment segment;
    const StreamRef stream = segment.open(key_of({0xab, 0xcd}), 5, {text_event("my secret")});
    segment.end(stream, complete());
    for (const char* format : {"text", "sse", "raw", "json"}) {
        const Ran ran = segment.run({"dump", "abcd", "--redact", "--format", format});
        INFO(format);
        CHECK(ran.code == 0);
        CHECK(ran.out.find("secret") == std::string::npos);
        CHECK(ran.out.find("[9 bytes]") != std::string::npos);
    }
}

TEST_CASE("dump --format raw is every byte of the stream, whatever the bytes are") {
    Segment segment;
    std::string odd = "{\"candidates\" :\r\n[ ], \"x\":\"\xff\xfe\"}";
    odd += std::string("\0\x1b[31m", 6);
    const std::string large(300'000, 'z');
    const StreamRef stream = segment.open(key_of({0xab, 0xcd}), 5, {odd, large, "{}"});
    segment.end(stream, complete());
    CHECK(segment.run({"dump", "abcd", "--format", "raw"}).out == odd + "\n" + large + "\n{}\n");
    CHECK(segment.run({"dump", "abcd", "--format", "raw", "--from", "3"}).out == "{}\n");
    const Ran beyond = segment.run({"dump", "abcd", "--format", "raw", "--from", "4"});
    CHECK(beyond.code == 0);
    CHECK(beyond.out.empty());
}

TEST_CASE("an inspector beside a writer that recycles slots at full speed never shows bytes of another stream") {
    Segment segment;
    // Copying a large one takes long enough for the writer to come back to the same memory meanwhile.
    const auto filling = [](StreamId id) {
        return std::string(id % 4 == 0 ? id % 1000 : 300'000, static_cast<char>('a' + id % 26));
    };
    std::atomic<bool> stop{false};
    std::atomic<std::uint64_t> cycles{0};
    std::thread writer([&] {
        for (StreamId id = 1; !stop; ++id, ++cycles) {
            segment.broker.with_store([&](Store& store) {
                const std::string request = fmt::format("{{\"stream\":{}}}", id);
                StreamOpening opening;
                opening.key = key_of({0xab, 0xcd});
                opening.stream_id = id;
                opening.model = "gemini-2.5-flash";
                opening.request = request;
                const StreamRef stream = store.open(opening, true).value();
                for (int event = 1; event <= 5; ++event)
                    REQUIRE(store.append(stream, fmt::format("{} {} {}", id, event, filling(id))));
                store.end(stream, complete(), 0);
                store.retire(stream);
            });
        }
    });
    std::size_t events = 0, shown = 0;
    for (int round = 0; round < 50 || events == 0 || shown == 0; ++round) {
        const Ran dump = segment.run({"dump", "abcd", "--format", "raw"});
        StreamId stream = 0;
        int last = 0;
        for (const std::string& line : dump.lines()) {
            std::istringstream words(line);
            StreamId id = 0;
            int event = 0;
            std::string text;
            words >> id >> event >> text;
            if (stream == 0) stream = id;
            REQUIRE(id == stream);
            REQUIRE(event == ++last);
            REQUIRE(text == filling(id));
            ++events;
        }
        const Ran show = segment.run({"show", "abcd", "--json"});
        if (show.code != 0) continue;
        ++shown;
        const auto told = show.json()["stream"];
        CHECK(told["request"]["kept"] ==
              fmt::format("{{\"stream\":{}}}", parse_stream_id(told["stream_id"].get<std::string>()).value()));
    }
    stop = true;
    writer.join();
    WARN(cycles << " streams; " << events << " events dumped, " << shown << " streams shown");
}

// ---- log -----------------------------------------------------------------------------------------------------------

TEST_CASE("log tells what happened to streams, and its filters what of it is wanted") {
    Segment segment;
    const StreamRef one = segment.open(key_of({0xab, 0xcd, 0xef}), 0x9f3c2a71d04b55e8, {"{}", "{}"});
    segment.end(one, complete());
    const StreamRef two = segment.open(key_of({0x11, 0x22}), 0x1111111111111111);
    segment.broker.with_store([&](Store& store) {
        store.count_retry(two, GCOALESCE_UPSTREAM_ERROR, 503, kSecond);
        store.log(LogKind::notify, 1, {}, 6000, {}, 0);
        store.log(LogKind::refused, GCOALESCE_BUSY, {}, 1000);
    });
    segment.end(two, ending_of(GCOALESCE_FAILED, GCOALESCE_UPSTREAM_ERROR, "overloaded"));

    const Ran ran = segment.run({"log"});
    CHECK(ran.code == 0);
    CHECK(ran.err.empty());
    std::string out; // but for what the broker's sweeps did meanwhile
    for (const std::string& line : ran.lines()) {
        if (line.find("retired") == std::string::npos) out += line + "\n";
    }
    CHECK(masked(out) ==
          "TIME  started      abcdef00  9f3c2a71  default       request of 2B\n"
          "TIME  first_event  abcdef00  9f3c2a71  default       after SPAN\n"
          "TIME  ended        abcdef00  9f3c2a71  default       complete STOP, 2 events\n"
          "TIME  started      11220000  11111111  default       request of 2B\n"
          "TIME  retry        11220000  11111111  default       number 1: upstream_error, HTTP 503, again in SPAN\n"
          "TIME  notify       -         -         default       the window is open for SPAN\n"
          "TIME  refused      -         -         -             busy, try again in SPAN\n"
          "TIME  ended        11220000  11111111  default       failed upstream_error, 0 events, HTTP 503\n");

    const auto kinds = [&](Words filters) {
        Words arguments{"log", "--json"};
        for (const std::string& filter : filters) arguments.insert(arguments.end(), {"--filter", filter});
        Words found;
        for (const std::string& line : segment.run(arguments).lines()) {
            const std::string kind = nlohmann::json::parse(line)["kind"];
            if (kind != "retired") found.push_back(kind);
        }
        return found;
    };
    CHECK(kinds({"key=1122"}) == Words{"started", "retry", "ended"});
    CHECK(kinds({"key=9F3C2A71D04B55E8"}) == Words{"started", "first_event", "ended"}); // a stream's id
    CHECK(kinds({"key=" + to_hex(key_of({0x11, 0x22})), "kind=retry,started"}) == Words{"started", "retry"});
    CHECK(kinds({"kind=refused", "kind=notify"}) == Words{"notify", "refused"});
    CHECK(kinds({"template=default"}).size() == 7);
    CHECK(kinds({"template=other"}).empty());
    const auto json = nlohmann::json::parse(segment.run({"log", "--json", "--filter", "kind=retry"}).out);
    CHECK(json["stream_id"] == "1111111111111111");
    CHECK(json["key_prefix"] == "1122000000000000");
    CHECK(json["template"] == "default");
    CHECK(json["code"] == "upstream_error");
    CHECK(json["upstream_status"] == 503);
    CHECK(json["retry"] == 1);
    CHECK(json["wall_ms"].is_number_integer());
    CHECK(segment.run({"log", "--since", "1h"}).lines().size() >= 8);
    CHECK(segment.run({"log", "--since", "0s"}).out.empty());
}

TEST_CASE("log tells of which template a refused request was") {
    World world({"--max-in-flight", "1"});
    Process asking(world.command({"ask", "Hi. [sim hold-after=0]"}));
    CHECK(eventually([&] { return world.broker().counted(Counter::streams_in_flight) == 1; }));
    CHECK(world.run({"ask", "Another."}).code == 5);
    const Ran log = world.run({"log", "--filter", "kind=refused", "--filter", "template=default"});
    CHECK(log.code == 0);
    CHECK(masked(log.out).starts_with("TIME  refused      -         -         default       busy"));
    world.sim().release();
}

TEST_CASE("log tells what is wrong with a filter") {
    Segment segment;
    const auto check = [&](Words arguments, const std::string& complaint) {
        arguments.insert(arguments.begin(), "log");
        const Ran ran = segment.run(arguments);
        CHECK(ran.code == 2);
        CHECK(ran.err == "gcoalesce log: " + complaint + "\ntry 'gcoalesce log --help'\n");
    };
    check({"--filter", "retry"}, "--filter: expected key=DIGITS, template=ID or kind=KIND, found \"retry\"");
    check({"--filter", "kind=retired,retri"}, "--filter: there is no kind \"retri\"; did you mean \"retry\"?");
    check({"--filter", "key=xy"}, "--filter: expected hexadecimal digits, found \"xy\"");
    const Ran ran = segment.run({"log", "--filter", "template=defalt"});
    CHECK(ran.code == 1);
    CHECK(ran.err == "gcoalesce: there is no template \"defalt\"; did you mean \"default\"?\n");
    check({"--follow", "--once"}, "--follow, --once: expected one of them");
    check({"--since", "yesterday"}, "--since: expected a duration such as 200ms, 6s, 10min or 2h, found \"yesterday\"");
}

TEST_CASE("log --follow goes on with what comes, tells what it missed, and ends with its broker") {
    Segment segment;
    segment.broker.with_store([](Store& store) { store.log(LogKind::reloaded, 0, {}, 1); });
    Process following(segment.command({"log", "--follow", "--filter", "kind=reloaded", "--json"}));
    const auto templates = [&] {
        const auto line = nlohmann::json::parse(following.read_line());
        return line.contains("missed") ? nlohmann::json("missed") : line["templates"];
    };
    CHECK(templates() == 1);
    segment.broker.with_store([](Store& store) { store.log(LogKind::reloaded, 0, {}, 2); });
    CHECK(templates() == 2);
    following.signal(SIGSTOP);
    segment.broker.with_store([](Store& store) {
        for (std::uint64_t i = 0; i < 2 * store.view().header().log.count; ++i) store.log(LogKind::refused);
        store.log(LogKind::reloaded, 0, {}, 3);
    });
    following.signal(SIGCONT);
    CHECK(templates() == "missed");
    CHECK(templates() == 3);
    segment.broker.die();
    CHECK(following.wait() == 3);
    CHECK(following.err() == "gcoalesce: the broker died: there will be no more of it\n");
}

TEST_CASE("log after a crash shows what happened just before, on a terminal too") {
    Segment segment;
    const StreamRef stream = segment.open(key_of({0xab, 0xcd}), 5, {"{}"});
    segment.broker.with_store([&](Store& store) {
        for (int i = 0; i < 30; ++i) store.log(LogKind::refused, GCOALESCE_BUSY);
        store.count_retry(stream, GCOALESCE_CONNECT_FAILED, 0, kSecond);
    });
    segment.broker.die();
    const Ran ran = segment.run({"log"});
    CHECK(ran.code == 3);
    CHECK(ran.says("is dead since"));
    CHECK(ran.lines().size() == 33);
    CHECK(ran.lines().back().find("retry        abcd0000  00000000  default       number 1: connect_failed") !=
          std::string::npos);
    Terminal terminal(segment.command({"log"}), 120, 40);
    CHECK(terminal.wait() == 3);
    CHECK(std::ranges::count_if(terminal.screen(), [](const std::string& line) {
              return line.find("refused") != std::string::npos;
          }) == 19); // the last 20 records, and the end of it: there is nothing to follow
}

// ---- clients -------------------------------------------------------------------------------------------------------

TEST_CASE("clients tells who is attached and what each of them pins") {
    World world;
    CHECK(world.run({"clients", "--json"}).json() == nlohmann::json::parse(R"({"version":1,"clients":[]})"));
    Process asking(world.command({"ask", "Hi. [sim hold-after=1]"}));
    CHECK(eventually([&] { return world.broker().counted(Counter::events_published) == 1; }));
    const std::string stream = world.run({"keys", "--json"}).json()["keys"][0]["stream_id"];

    const auto clients = world.run({"clients", "--json"}).json()["clients"];
    REQUIRE(clients.size() == 1);
    CHECK(clients[0]["name"] == "gcoalesce");
    CHECK(clients[0]["pid"] == asking.pid());
    CHECK(clients[0]["uid"] == ::geteuid());
    CHECK(clients[0]["state"] == "attached");
    CHECK(clients[0]["readers"] == 1);
    CHECK(clients[0]["pinned_streams"] == 1);
    CHECK(clients[0]["pinned_bytes"] > 0);
    CHECK(clients[0]["pins"] == nlohmann::json::array({{{"stream_id", stream}, {"readers", 1}}}));

    const Ran table = world.run({"clients"});
    CHECK(table.code == 0);
    REQUIRE(table.lines().size() == 2);
    CHECK(std::regex_replace(table.lines()[0], std::regex(" +"), " ") ==
          "CLIENT PID USER STATE FOR WAITING READERS STREAMS BYTES PINS");
    CHECK(table.lines()[1].starts_with("gcoalesce  "));
    CHECK(table.lines()[1].ends_with(stream + ":1"));
    world.sim().release();
    CHECK(asking.wait() == 0);
    CHECK(eventually([&] { return world.run({"clients", "--json"}).json()["clients"].empty(); }));
}

TEST_CASE("clients of more than one answer's worth come all, each once") {
    World world;
    std::vector<std::unique_ptr<Process>> asking;
    for (int i = 0; i < 70; ++i)
        asking.push_back(std::make_unique<Process>(world.command({"ask", "Hi. [sim hold-after=0 latency=0ms]"})));
    CHECK(eventually([&] { return world.broker().counted(Counter::clients_attached) == 70; }));
    std::vector<std::uint64_t> ids;
    const auto json = world.run({"clients", "--json"}).json();
    for (const auto& client : json["clients"]) ids.push_back(client["attachment"]);
    CHECK(ids.size() == 70);
    CHECK(std::ranges::is_sorted(ids));
    CHECK(std::ranges::adjacent_find(ids) == ids.end());
}

TEST_CASE("clients says how many of very many pinned streams it does not list") {
    World world;
    std::string prompts;
    for (int i = 0; i < 70; ++i) prompts += fmt::format("Line {} [sim hold-after=1]\n", i);
    const TemporaryFile file(prompts);
    Process asking({"/bin/sh", "-c", quoted(world.command({"ask", "--lines", "-j", "70"})) + "< " + file.path()});
    REQUIRE(eventually([&] { return world.broker().counted(Counter::events_published) == 70; }));
    const auto client = world.run({"clients", "--json"}).json()["clients"][0];
    CHECK(client["pinned_streams"] == 70);
    CHECK(client["pins"].size() + client["pins_left_out"].get<std::size_t>() == 70);
    CHECK(client["pins_left_out"] > 0);
    CHECK(client["pins"].back()["readers"] == 1);
    CHECK(world.run({"clients"}).lines()[1].ends_with(fmt::format(":1 and {} more", client["pins_left_out"].dump())));
    world.sim().release();
    CHECK(asking.wait() == 0);
}

TEST_CASE("clients without a broker says so") {
    const ScratchInstance nowhere;
    const Ran ran = run(command(*nowhere, {"clients"}));
    CHECK(ran.code == 3);
    CHECK(ran.out.empty());
    CHECK(ran.says("no broker of instance \"scratch\" has run in " + nowhere->runtime_dir));
    const Ran json = run(command(*nowhere, {"clients", "--json"}));
    CHECK(json.code == 3);
    CHECK(nlohmann::json::parse(json.err)["error"]["code"] == "absent");
}

// ---- doctor --------------------------------------------------------------------------------------------------------

namespace {

nlohmann::json finding(const Ran& ran, const std::string& check) {
    const auto json = ran.json();
    for (const auto& one : json["findings"]) {
        if (one["check"] == check) return one;
    }
    return nullptr;
}

} // namespace

TEST_CASE("doctor finds nothing wrong with a broker that is well, and asks upstream if told to") {
    World world;
    const Ran ran = world.run({"doctor", "--online", "--json"});
    CHECK(ran.code == 0);
    CHECK(ran.json()["ok"] == true);
    for (const char* check :
         {"directory", "group", "segment", "broker", "memory", "key", "clock", "socket", "online"}) {
        INFO(check);
        CHECK(finding(ran, check)["result"] == "ok");
    }
    CHECK(finding(ran, "snapshots")["found"] == "off: answers do not outlive the segment");
    CHECK(world.calls() == 1);
    CHECK(world.run({"doctor"}).code == 0);
    CHECK(world.calls() == 1);
    const Ran text = world.run({"doctor"});
    CHECK(text.lines()[0].starts_with("ok       directory  "));
    CHECK(text.out.find("note     snapshots  off: answers do not outlive the segment\n"
                        "                    -> --state-dir DIR turns them on\n") != std::string::npos);
}

TEST_CASE("doctor says of each thing that is not well what to do") {
    const ScratchInstance nowhere;
    const Ran absent = run(command(*nowhere, {"doctor", "--json"}));
    CHECK(absent.code == 3);
    CHECK(absent.json()["ok"] == false);
    CHECK(finding(absent, "segment")["result"] == "failure");
    CHECK_FALSE(finding(absent, "segment")["advice"].get<std::string>().empty());

    Segment segment;
    segment.broker.die();
    const Ran dead = segment.run({"doctor", "--json"});
    CHECK(dead.code == 3);
    CHECK(finding(dead, "broker")["found"].get<std::string>().find("died about") != std::string::npos);
    CHECK(finding(dead, "socket")["result"] == "failure");

    World refused({}, {"--status", "401"});
    const Ran key = refused.run({"doctor", "--online", "--json"});
    CHECK(key.code == 4);
    CHECK(finding(key, "online")["result"] == "failure");
    CHECK(finding(key, "online")["advice"] == "put a valid key in its place, then `gcoalesce templates reload`");
    CHECK(finding(refused.run({"doctor", "--json"}), "key")["found"].get<std::string>().find("upstream refused it") !=
          std::string::npos);
}

TEST_CASE("doctor says when there is no API key, and when the disk refuses snapshots") {
    const ScratchInstance instance;
    std::vector<std::string> keyless = broker_command(*instance, "https://127.0.0.1:1");
    keyless.insert(keyless.begin(), {"env", "-u", "GEMINI_API_KEY"});
    Process broker(keyless);
    broker.wait_for_err("NO API KEY");
    const Ran ran = run(command(*instance, {"doctor", "--json"}));
    CHECK(ran.code == 4);
    CHECK(finding(ran, "key")["found"] == "the broker has no API key");

    Segment degraded;
    degraded.broker.with_store([](Store& store) {
        store.set(Counter::snapshots_off, 0);
        store.set(Counter::snapshots_degraded, 1);
        store.note_error(GCOALESCE_IO, 0, "snapshots: degraded: disk full");
    });
    const Ran disk = degraded.run({"doctor", "--json"});
    CHECK(finding(disk, "snapshots")["result"] == "warning");
    CHECK(finding(disk, "snapshots")["found"].get<std::string>().ends_with("0 answers kept, 0B; disk full"));
}

TEST_CASE("doctor tells a user who is no member from one whose session is older than the membership") {
    using cli::Finding;
    cli::Membership user{1000, 33, "ann", "gcoalesce", true, true};
    CHECK(cli::judge(user).result == Finding::Result::ok);
    user.in_process = false;
    Finding found = cli::judge(user);
    CHECK(found.result == Finding::Result::failure);
    CHECK(found.found.find("since this session was started") != std::string::npos);
    CHECK(found.advice.find("newgrp gcoalesce") != std::string::npos);
    user.in_database = false;
    found = cli::judge(user);
    CHECK(found.result == Finding::Result::failure);
    CHECK(found.advice.find("adduser ann gcoalesce") != std::string::npos);
    user.owner = 1000;
    CHECK(cli::judge(user).result == Finding::Result::ok);
    user = {0, 33, "root", "gcoalesce", false, false};
    CHECK(cli::judge(user).result == Finding::Result::ok);
}

// ---- ask, help -----------------------------------------------------------------------------------------------------

TEST_CASE("ask --resume behind the last event of a stream that ended prints nothing, and is no failure") {
    World world;
    for (const std::string& prompt :
         {std::string("Hi. [sim events=3]"), std::string("Hi. [sim events=3 finish=MAX_TOKENS]")}) {
        const auto asked = world.run({"ask", "--json", prompt}).json();
        const Ran resumed = world.run({"ask", "--resume", asked["last_event_id"]});
        INFO(prompt);
        CHECK(resumed.code == 0);
        CHECK(resumed.out.empty());
        if (asked["finish_reason"] == "STOP") CHECK(resumed.err.empty());
        CHECK(world.run({"ask", "--resume", asked["last_event_id"], "--json"}).json()["last_event_id"] ==
              asked["last_event_id"]);
    }
}

TEST_CASE("Ctrl-C on a running ask tells how to go on with the answer") {
    World world;
    Process asking(world.command({"ask", "--status", "--events", "Hi. [sim events=4 hold-after=2]"}));
    asking.read_line();
    asking.read_line();
    const std::string stream = world.run({"keys", "--json"}).json()["keys"][0]["stream_id"];
    asking.signal(SIGINT);
    CHECK(asking.wait() == 128 + SIGINT);
    CHECK(asking.err() == "gcoalesce: interrupted; `gcoalesce ask --resume " + stream + ".2` goes on with it\n");
    world.sim().release();
    const Ran rest = world.run({"ask", "--events", "--resume", stream + ".2"});
    CHECK(rest.code == 0);
    CHECK(rest.lines().size() == 2);
}

TEST_CASE("Ctrl-C on a terminal tells it without being asked, on a line of its own") {
    World world;
    Terminal terminal(world.command({"ask", "Hello. [sim events=4 hold-after=2]"}), 100, 24);
    terminal.wait_for("Answer to: Hello.");
    const auto stream = [&] { return world.run({"keys", "--json"}).json()["keys"][0]; };
    CHECK(eventually([&] { return stream()["events"] == 2; }));
    const std::string id = stream()["stream_id"];
    terminal.type("\x03");
    CHECK(terminal.wait() == 128 + SIGINT);
    CHECK(terminal.written().find("\ngcoalesce: interrupted; `gcoalesce ask --resume " + id) != std::string::npos);
    world.sim().release();
}

TEST_CASE("help and version are commands, too, and help names what no command means") {
    const std::string program = gcoalesce_program();
    const Ran help = run({program, "help"});
    CHECK(help.code == 0);
    CHECK(help.out == run({program, "--help"}).out);
    CHECK(help.out.find("With text on standard input and no command it is `ask`") != std::string::npos);
    CHECK(run({program, "help", "keys"}).out == run({program, "keys", "--help"}).out);
    CHECK(run({program, "version"}).out == run({program, "--version"}).out);
    const Ran unknown = run({program, "help", "kyes"});
    CHECK(unknown.code == 2);
    CHECK(unknown.err == "gcoalesce help: COMMAND: there is no command \"kyes\"; did you mean \"keys\"?\n"
                         "try 'gcoalesce help --help'\n");
}

TEST_CASE("a help text that cannot be written is a failure of either program") {
    for (const std::string& program : {gcoalesce_program(), gcoalesced_program()}) {
        const Ran ran = run({"/bin/sh", "-c", "exec \"$0\" --help > /dev/full", program});
        CHECK(ran.code == 1);
        CHECK(ran.says("cannot write to standard output: No space left on device"));
    }
}
