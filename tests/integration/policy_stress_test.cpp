// Policies under many readers at once: invalid answers, abandoned calls, large bodies.
#include <catch2/catch.hpp>
#include <chrono>
#include <csignal>
#include <deque>
#include <fmt/format.h>
#include <random>
#include <thread>

#include "tests/integration/policy_support.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;

namespace {

constexpr std::size_t kProcesses = 5, kReaders = 20; // in each

// One event with this text, whole.
std::string event(const std::string& text) {
    return R"({"candidates":[{"content":{"parts":[{"text":")" + text +
           R"("}],"role":"model"},"finishReason":"STOP","index":0}]})";
}
std::string sse(const std::string& text) {
    return "data: " + event(text) + "\r\n\r\n";
}
const std::string kGood = R"({\"a\": 1})", kBad = R"({\"b\": 1})";

// A template whose calls are held until the upstream lets go, and then take a moment, so that they overlap.
std::string checked(const std::string& script, const std::string& policy = {}) {
    return R"({"model": "gemini-2.5-flash", "prompt": "{{topic}} [sim hold-after=0 latency=20ms )" + script +
           R"(]", "variables": {"topic": {}}, "response_json_schema": {"type": "object", "required": ["a"],
           "properties": {"a": {"type": "integer"}}})" +
           policy + "}";
}

// What became of readers.
struct Tally {
    std::uint64_t good = 0, invalid = 0, other = 0, individual = 0, events = 0;
    void add(const Seen& seen, const Key& wanted) {
        if (seen.complete() && seen.digest == wanted && seen.misplaced == 0)
            ++good;
        else if (seen.code == GCOALESCE_END && seen.ending.kind == GCOALESCE_INVALID &&
                 seen.ending.code == GCOALESCE_SCHEMA_BROKEN &&
                 std::string(seen.ending.message).find("\"a\"") != std::string::npos)
            ++invalid;
        else
            ++other;
        individual += seen.info.status == GCOALESCE_INDIVIDUAL;
        events += seen.events;
    }
    void add(const Tally& more) {
        good += more.good;
        invalid += more.invalid;
        other += more.other;
        individual += more.individual;
        events += more.events;
    }
};

// All ask the same at once; the upstream answers when all of them wait for the one call.
Tally all_ask(Stage& stage, const Wish& wish) {
    const Key wanted = digest_of(event(kGood));
    std::deque<Child> children;
    for (std::size_t i = 0; i < kProcesses; ++i)
        children.emplace_back([&](Line& line) {
            const Attachment client = stage.attach();
            std::deque<Reader> readers;
            for (std::size_t k = 0; k < kReaders; ++k) readers.push_back(ask(client, wish));
            for (Reader& reader : readers) reader.served();
            line.tell();
            read_all(client, readers);
            Tally tally;
            for (const Reader& reader : readers) tally.add(reader.seen(), wanted);
            line.tell(tally);
        });
    for (Child& child : children) child.line().hear();
    CHECK(stage.counted() == 1);
    stage.sim().release();
    Tally all;
    for (Child& child : children) all.add(child.line().hear<Tally>());
    for (Child& child : children) CHECK(child.wait() == 0);
    return all;
}

constexpr std::uint64_t kAll = kProcesses * kReaders;

} // namespace

TEST_CASE("T97: 100 readers of an invalid answer share the first valid one, and a few calls at most are made for it") {
    Stage stage;
    stage.recordings().write("good", sse(kGood));
    stage.recordings().write("bad", sse(kBad));
    stage.templates().write("checked.json", checked("fail-first=1 fail-replay=bad replay=good"));
    stage.start();
    Tally all;
    SECTION("by a template's schema") {
        all = all_ask(stage, by_template("checked", R"({"topic":"x"})"));
    }
    SECTION("by the request's own schema") {
        Wish wish = prompt("y [sim hold-after=0 latency=20ms fail-first=1 fail-replay=bad replay=good]");
        wish.body.insert(wish.body.size() - 1, R"(,"generationConfig":{"responseSchema":{"type":"OBJECT",)"
                                               R"("required":["a"],"properties":{"a":{"type":"INTEGER"}}}})");
        all = all_ask(stage, wish);
    }
    CHECK(all.good == kAll);
    CHECK(all.individual == kAll);
    CHECK(stage.counted() >= 2);
    CHECK(stage.counted() <= 1 + 8);
    CHECK(stage.counted("most_in_flight") <= 8);
    CHECK(eventually([&] { return stage.broker().counted(Counter::streams_in_flight) == 0; }));
    CHECK(stage.broker().counted(Counter::individuals_queued) == 0);
    CHECK(stage.broker().counted(Counter::requests_individual) == kAll);
}

TEST_CASE("T97: where each pays for itself there are as many calls as readers, and no more than allowed at once") {
    Stage stage;
    stage.recordings().write("good", sse(kGood));
    stage.recordings().write("bad", sse(kBad));
    stage.templates().write("checked.json", checked("fail-first=1 fail-replay=bad replay=good",
                                                    R"(, "strict_individual": true, "max_individual": 3)"));
    stage.start();
    const Tally all = all_ask(stage, by_template("checked", R"({"topic":"x"})"));
    CHECK(all.good == kAll);
    CHECK(all.individual == kAll);
    CHECK(stage.counted() == 1 + kAll);
    CHECK(stage.counted("most_in_flight") == 3);
}

TEST_CASE("T97: where no answer is valid everybody learns what is wrong, after one call of his own and never more") {
    Stage stage;
    stage.recordings().write("bad", sse(kBad));
    stage.templates().write("checked.json", checked("replay=bad"));
    stage.start();
    const Tally all = all_ask(stage, by_template("checked", R"({"topic":"x"})"));
    CHECK(all.invalid == kAll);
    CHECK(all.events == 0); // nobody saw a bad one
    CHECK(all.individual == kAll);
    CHECK(stage.counted() == 1 + kAll);
    CHECK(stage.counted("most_in_flight") == 8);
    // Whoever comes later starts anew, and is told the same after his own two calls.
    const Answered later = stage.run({"ask", "-t", "checked", "--var", "topic=x", "--json"});
    CHECK(later.code == 1);
    CHECK(later.says(R"(\"a\")"));
    CHECK(stage.counted() == 1 + kAll + 2);
}

TEST_CASE("T97: readers that die while they wait for a call of their own hold up nobody") {
    Stage stage;
    stage.recordings().write("good", sse(kGood));
    stage.recordings().write("bad", sse(kBad));
    stage.templates().write("checked.json", checked("fail-first=1 fail-replay=bad replay=good",
                                                    R"(, "strict_individual": true, "max_individual": 2)"));
    stage.start();
    const Wish wish = by_template("checked", R"({"topic":"x"})");
    const auto readers_of = [&](std::size_t count) {
        return [&stage, wish, count](Line& line) {
            const Attachment client = stage.attach();
            std::deque<Reader> readers;
            for (std::size_t k = 0; k < count; ++k) readers.push_back(ask(client, wish));
            for (Reader& reader : readers) reader.served();
            line.tell();
            read_all(client, readers);
            Tally tally;
            for (const Reader& reader : readers) tally.add(reader.seen(), digest_of(event(kGood)));
            line.tell(tally);
        };
    };
    Child dies(readers_of(40)), lives(readers_of(10));
    dies.line().hear();
    lives.line().hear();
    stage.sim().release();
    CHECK(eventually([&] { return stage.counted() >= 2; }));
    dies.signal(SIGKILL);
    CHECK(lives.line().hear<Tally>().good == 10);
    CHECK(lives.wait() == 0);
    CHECK(dies.wait() == 128 + SIGKILL);
    CHECK(eventually([&] { return stage.broker().counted(Counter::streams_in_flight) == 0; }));
    CHECK(stage.broker().counted(Counter::individuals_queued) == 0);
    CHECK(stage.counted("most_in_flight") <= 2);
}

// ---- abandoned calls
// -------------------------------------------------------------------------------------------------

TEST_CASE("T71: a call whose only reader is killed ends upstream where the template says so, and goes on where not") {
    const bool cancels = GENERATE(true, false);
    Stage stage;
    stage.templates().write("default.json", cancels ? R"({"on_abandon": "cancel:1ms"})" : "{}");
    stage.start();
    const auto reader = stage.begin({"ask", "leave me [sim hold-after=2]", "--events"});
    reader->read_line();
    reader->read_line();
    CHECK(stage.counted("in_flight") == 1);
    reader->signal(SIGKILL);
    CHECK(reader->wait() == 128 + SIGKILL);
    if (cancels) {
        CHECK(eventually([&] { return stage.counted("in_flight") == 0; }));
        CHECK(stage.counted("aborted") == 1);
        CHECK(stage.broker().counted(Counter::streams_cancelled) == 1);
        stage.sim().release();
    } else {
        CHECK(eventually([&] { return stage.broker().counted(Counter::clients_died) == 1; }));
        stage.sim().release();
        CHECK(eventually([&] { return stage.broker().counted(Counter::streams_complete) == 1; }));
    }
    const Answered next = stage.run({"ask", "leave me [sim hold-after=2]", "--json"});
    CHECK(next.code == 0);
    CHECK(next.told("status") == (cancels ? "started" : "fresh"));
    CHECK(next.told("events") == "4");
}

TEST_CASE("T71: a request that arrives while the call is being cancelled gets a healthy one, at any moment") {
    constexpr int kRounds = 8, kPrompts = 40;
    Stage stage({"--memory", "32MiB"});
    stage.templates().write("default.json", R"({"on_abandon": "cancel:1ms"})");
    stage.start();
    const auto text = [](int round, int i) { return fmt::format("{}.{} [sim events=3 gap=150ms]", round, i); };
    std::mt19937 random(std::random_device{}());
    int anew = 0, joined = 0;
    for (int round = 0; round < kRounds; ++round) {
        Child leaves([&](Line& line) {
            const Attachment client = stage.attach();
            std::deque<Reader> readers;
            for (int i = 0; i < kPrompts; ++i) readers.push_back(ask(client, prompt(text(round, i))));
            for (Reader& reader : readers) reader.read(1);
            line.tell();
            line.hear(); // until it is killed
        });
        leaves.line().hear();
        const Attachment client = stage.attach();
        leaves.signal(SIGKILL);
        std::deque<Reader> readers;
        for (int i = 0; i < kPrompts; ++i) { // spread over the time in which the broker finds and cancels them
            std::this_thread::sleep_for(std::chrono::microseconds(random() % 10'000));
            readers.push_back(ask(client, prompt(text(round, i))));
        }
        for (Reader& reader : readers) {
            const Seen& seen = reader.read_to_end();
            INFO(seen.ending.message);
            CHECK(seen.complete());
            CHECK(seen.events == 3);
            CHECK(seen.misplaced == 0);
            (seen.info.status == GCOALESCE_STARTED ? anew : joined) += 1;
        }
        leaves.wait();
    }
    INFO(anew << " started anew, " << joined << " joined");
    CHECK(eventually([&] { return stage.counted("in_flight") == 0; }));
    // Those that were cancelled, and no others, had to be asked anew; some had sent all that they had by then.
    CHECK(stage.broker().counted(Counter::streams_cancelled) == static_cast<std::uint64_t>(anew));
    CHECK(stage.counted("aborted") <= anew);
    CHECK(stage.counted("aborted") > 0);
    CHECK(anew > 0);
    CHECK(joined > 0);
}

// ---- large bodies
// ----------------------------------------------------------------------------------------------------

TEST_CASE("bodies of 32 MiB do not stall others: these are served while the broker takes and reads them") {
    constexpr std::size_t kLarge = 2;
    Stage stage;
    stage.start();
    std::deque<Child> children;
    for (std::size_t i = 0; i < kLarge; ++i)
        children.emplace_back([&, i](Line& line) {
            const Attachment client = stage.attach();
            Wish wish = prompt(fmt::format("large {} ", i));
            wish.body.insert(wish.body.find("large"), std::string((32 << 20) - wish.body.size(), 'x'));
            line.tell();
            line.hear();
            Reader reader = ask(client, wish);
            while (!reader.over()) reader.next(1000); // however long a slow machine takes
            line.tell(reader.seen());
        });
    for (Child& child : children) child.line().hear();
    const Attachment client = stage.attach();
    const Seen small = answer_to(client, prompt("small"));
    for (Child& child : children) child.line().tell();

    using Clock = std::chrono::steady_clock;
    const Clock::time_point begin = Clock::now();
    Clock::duration longest{};
    int served = 0;
    // Each is decided by the broker's loop, without the upstream.
    while (stage.broker().counted(Counter::upstream_calls) < 1 + kLarge &&
           !(children[0].line().has_news() && children[1].line().has_news())) {
        const Clock::time_point asked = Clock::now();
        REQUIRE(answer_to(client, resuming(small.info.stream_id, 1)).complete());
        longest = std::max(longest, Clock::now() - asked);
        ++served;
    }
    const Clock::duration whole = Clock::now() - begin;
    const auto ms = [](Clock::duration time) { return std::chrono::duration<double, std::milli>(time).count(); };
    INFO(served << " served within " << ms(whole) << " ms, the slowest in " << ms(longest) << " ms");
    CHECK(served >= 20);
    CHECK(longest < whole / 3); // neither was read while all others waited
    for (Child& child : children) {
        const Seen seen = child.line().hear<Seen>();
        CHECK(seen.complete());
        CHECK(child.wait() == 0);
    }
}
