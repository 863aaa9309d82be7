// Every way in which an answer can end, reached for real, seen by readers in two processes, and what a request that
// comes right after it gets.

#include <array>
#include <catch2/catch.hpp>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <poll.h>
#include <vector>

#include "tests/chaos/client.hpp"
#include "tests/support/broker.hpp"
#include "tests/support/sim.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;

namespace {

std::uint64_t upstream_calls(const Sim& sim) {
    return nlohmann::json::parse(sim.calls()).at("calls").get<std::uint64_t>();
}

struct Case {
    const char* script;
    gcoalesce_ending_kind kind;
    gcoalesce_code code;
    int status; // the upstream's
    std::uint64_t events;
    const char* finish = "";
    bool reusable = false;
    bool stream = true;
};

// A model each: what upstream is known to refuse is kept by model.
Ask ask_of(const std::vector<Case>& cases, std::size_t number) {
    return {std::string("[sim ") + cases[number].script + "] " + std::to_string(number),
            "gemini-case-" + std::to_string(number), cases[number].stream};
}

constexpr std::size_t kProcesses = 2, kReaders = 2;

// What one process saw of one case: its readers, and a request made when the first of them had seen the ending.
struct Report {
    std::array<Seen, kReaders> seen;
    Seen after;
};

void ask_all(const Instance& instance, const std::vector<Case>& cases, Line& line) {
    const Attachment attachment = attach(instance);
    line.tell();
    line.hear();
    std::deque<Reader> readers;
    for (std::size_t i = 0; i < cases.size(); ++i)
        for (std::size_t k = 0; k < kReaders; ++k) readers.emplace_back(attachment, ask_of(cases, i));
    std::vector<std::size_t> after(cases.size()); // where in `readers`; 0: not asked again yet
    read_all(attachment, readers, [&] {
        for (std::size_t i = 0; i < cases.size(); ++i) {
            if (after[i] != 0 || !readers[i * kReaders].over()) continue;
            after[i] = readers.size();
            readers.emplace_back(attachment, ask_of(cases, i));
        }
    });
    for (std::size_t i = 0; i < cases.size(); ++i) {
        Report report{};
        for (std::size_t k = 0; k < kReaders; ++k) report.seen[k] = readers[i * kReaders + k].seen();
        report.after = readers[after[i]].seen();
        line.tell(report);
    }
}

std::uint64_t requests(const Broker& broker) {
    return broker.counted(Counter::requests_started) + broker.counted(Counter::requests_joined);
}

// By case, what each process reports. `held`: the sim that holds the answers back, to be let go once everybody reads.
std::vector<std::array<Report, kProcesses>> reach(const Instance& instance, const Broker& broker,
                                                  const std::vector<Case>& cases, const Sim* held) {
    std::vector<std::unique_ptr<Child>> children;
    for (std::size_t p = 0; p < kProcesses; ++p)
        children.push_back(std::make_unique<Child>([&](Line& line) { ask_all(instance, cases, line); }));
    for (const auto& child : children) child->line().hear();
    const std::uint64_t before = requests(broker);
    for (const auto& child : children) child->line().tell();
    if (held != nullptr) {
        REQUIRE(eventually([&] { return requests(broker) == before + cases.size() * kProcesses * kReaders; }));
        held->release();
    }
    std::vector<std::array<Report, kProcesses>> reports(cases.size());
    for (auto& by_process : reports)
        for (std::size_t p = 0; p < kProcesses; ++p) by_process[p] = children[p]->line().hear<Report>();
    return reports;
}

void check_ending(const Case& expected, const Seen& seen) {
    const gcoalesce_ending& ending = seen.ending;
    INFO(ending.message);
    CHECK(seen.code == GCOALESCE_END);
    CHECK(gcoalesce_ending_name(ending.kind) == std::string(gcoalesce_ending_name(expected.kind)));
    CHECK(gcoalesce_code_name(ending.code) == std::string(gcoalesce_code_name(expected.code)));
    CHECK(ending.upstream_status == expected.status);
    CHECK(ending.finish_reason == std::string(expected.finish));
    CHECK((ending.reusable != 0) == expected.reusable);
    CHECK(seen.events == expected.events);
    CHECK(ending.events == expected.events);
    CHECK(seen.misplaced == 0);
    if (expected.kind != GCOALESCE_COMPLETE) CHECK(ending.message != std::string());
}

// Everybody saw the same, and who asked afterwards got that answer only if it may be reused.
void check_case(const Case& expected, const std::array<Report, kProcesses>& reports) {
    CAPTURE(expected.script, expected.stream);
    const Seen& first = reports.front().seen.front();
    check_ending(expected, first);
    int started = 0;
    for (const Report& report : reports) {
        for (const Seen& seen : report.seen) {
            CHECK(seen.info.stream_id == first.info.stream_id);
            CHECK(seen.digest == first.digest);
            check_ending(expected, seen);
            started += seen.info.status == GCOALESCE_STARTED ? 1 : 0;
        }
        if (expected.reusable) {
            CHECK(report.after.info.status == GCOALESCE_FRESH);
            CHECK(report.after.info.stream_id == first.info.stream_id);
            CHECK(report.after.digest == first.digest);
        } else {
            CHECK(report.after.info.status != GCOALESCE_FRESH);
            CHECK(report.after.info.stream_id != first.info.stream_id);
            CHECK(report.after.info.stream_id != 0);
        }
    }
    CHECK(started == 1);
}

// By model, of the first stream that asked it.
std::map<std::string, std::uint64_t> retries_of(const Broker& broker) {
    std::map<std::string, std::uint64_t> retries;
    for (std::uint32_t i = 0; i < broker.view().slot_count(); ++i) {
        const Slot& slot = broker.view().slot(i);
        retries.emplace(slot.opening.load().model.view(), slot.retries.load());
    }
    return retries;
}

} // namespace

TEST_CASE("T30 to T36: every ending reaches every reader, and only what ended with STOP is reused") {
    const Sim sim({"--hold-after", "0"});
    const ScratchInstance instance;
    const Broker broker(*instance, sim.url(), {"--retries", "0", "--ttl-idle", "10min"});
    constexpr auto complete = GCOALESCE_COMPLETE;
    constexpr auto failed = GCOALESCE_FAILED;
    constexpr auto truncated = GCOALESCE_TRUNCATED;
    const std::vector<Case> cases{
        {"events=4", complete, GCOALESCE_OK, 200, 4, "STOP", true},
        {"events=1", complete, GCOALESCE_OK, 200, 1, "STOP", true, false},
        {"finish-alone", complete, GCOALESCE_OK, 200, 4, "STOP", true}, // T31
        {"stop-every", complete, GCOALESCE_OK, 200, 4, "STOP", true},   // T32
        {"no-final-blank", complete, GCOALESCE_OK, 200, 4, "STOP", true},
        {"candidates=3", complete, GCOALESCE_OK, 200, 4, "STOP", true},
        {"thoughts=2", complete, GCOALESCE_OK, 200, 4, "STOP", true},

        {"finish=MAX_TOKENS", complete, GCOALESCE_OK, 200, 4, "MAX_TOKENS"}, // T36
        {"finish=MAX_TOKENS", complete, GCOALESCE_OK, 200, 1, "MAX_TOKENS", false, false},
        {"finish=SAFETY", complete, GCOALESCE_OK, 200, 4, "SAFETY"},
        {"finish=RECITATION", complete, GCOALESCE_OK, 200, 4, "RECITATION"},
        {"block=SAFETY", complete, GCOALESCE_OK, 200, 1, "SAFETY"},
        {"block=OTHER", complete, GCOALESCE_OK, 200, 1, "OTHER", false, false},

        {"status=302", failed, GCOALESCE_UPSTREAM_ERROR, 302, 0},
        {"status=400", failed, GCOALESCE_UPSTREAM_ERROR, 400, 0},
        {"status=400,reason=API_KEY_INVALID", failed, GCOALESCE_KEY_REFUSED, 400, 0},
        {"status=403", failed, GCOALESCE_KEY_REFUSED, 403, 0},
        {"status=429", failed, GCOALESCE_RATE_LIMITED, 429, 0},
        {"status=500", failed, GCOALESCE_UPSTREAM_ERROR, 500, 0},
        {"status=500", failed, GCOALESCE_UPSTREAM_ERROR, 500, 0, "", false, false},
        {"status=503,array-error", failed, GCOALESCE_UPSTREAM_ERROR, 503, 0},
        {"html", failed, GCOALESCE_UPSTREAM_ERROR, 404, 0},
        {"html,status=200", failed, GCOALESCE_BAD_ANSWER, 200, 0},
        {"empty", failed, GCOALESCE_BAD_ANSWER, 200, 0},
        {"empty", failed, GCOALESCE_BAD_ANSWER, 200, 0, "", false, false},
        {"reset-after=0", failed, GCOALESCE_CONNECT_FAILED, 0, 0},
        {"cut-after=0", failed, GCOALESCE_CONNECT_FAILED, 200, 0},
        {"cut-after=1", failed, GCOALESCE_CONNECT_FAILED, 200, 0, "", false, false},

        {"error-after=0", failed, GCOALESCE_UPSTREAM_ERROR, 503, 0}, // T35
        {"bare-error-after=0,array-error", failed, GCOALESCE_UPSTREAM_ERROR, 503, 0},
        {"error-after=2", failed, GCOALESCE_UPSTREAM_ERROR, 503, 2}, // T33
        {"error-after=2,error-status=429", failed, GCOALESCE_RATE_LIMITED, 429, 2},
        {"error-after=2,array-error", failed, GCOALESCE_UPSTREAM_ERROR, 503, 2},
        {"bare-error-after=2", failed, GCOALESCE_UPSTREAM_ERROR, 503, 2},
        {"bare-error-after=2,array-error,chunk=7", failed, GCOALESCE_UPSTREAM_ERROR, 503, 2},
        {"error-after=events", failed, GCOALESCE_UPSTREAM_ERROR, 503, 4}, // behind STOP
        {"bare-error-after=events,error-status=500", failed, GCOALESCE_UPSTREAM_ERROR, 500, 4},
        {"invalid-json-after=2", failed, GCOALESCE_BAD_ANSWER, 200, 2},

        {"truncate-after=2", truncated, GCOALESCE_CUT_SHORT, 200, 2}, // T30
        {"truncate-after=1", truncated, GCOALESCE_CUT_SHORT, 200, 1},
        {"cut-after=2", truncated, GCOALESCE_CUT_SHORT, 200, 2},
        {"reset-after=2", truncated, GCOALESCE_CUT_SHORT, 200, 2},
    };
    const auto reports = reach(*instance, broker, cases, &sim);
    for (std::size_t i = 0; i < cases.size(); ++i) check_case(cases[i], reports[i]);
    CHECK(broker.counted(Counter::upstream_retries) == 0);
}

TEST_CASE("T40, T41: silence and slowness beyond the limits end a call for all its readers") {
    const Sim sim;
    const ScratchInstance instance;
    const Broker broker(*instance, sim.url(),
                        {"--retries", "0", "--first-event-timeout", "2s", "--event-gap-timeout", "2s", "--call-timeout",
                         "5s", "--ttl-idle", "10min"});
    const std::vector<Case> cases{
        {"hang-after=0", GCOALESCE_FAILED, GCOALESCE_FIRST_EVENT_TIMEOUT, 0, 0},    // T40
        {"hang-after=2", GCOALESCE_TRUNCATED, GCOALESCE_EVENT_GAP_TIMEOUT, 200, 2}, // T41
        {"hang-after=1,events=1", GCOALESCE_TRUNCATED, GCOALESCE_EVENT_GAP_TIMEOUT, 200, 1, "STOP"},
        {"hang-after=0", GCOALESCE_FAILED, GCOALESCE_CALL_TIMEOUT, 0, 0, "", false, false},
        {"gap=1s,events=4", GCOALESCE_COMPLETE, GCOALESCE_OK, 200, 4, "STOP", true}, // silent, but below the limit
    };
    const auto reports = reach(*instance, broker, cases, nullptr);
    for (std::size_t i = 0; i < cases.size(); ++i) check_case(cases[i], reports[i]);

    // One that always says something within the limit between events, and never ends.
    Child child([&](Line& line) {
        const Attachment attachment = attach(*instance);
        Reader mine(attachment, {"[sim gap=200ms,events=1000] endless"});
        line.tell(mine.read_to_end());
    });
    const auto endless = child.line().hear<Seen>();
    CHECK(endless.ending.kind == GCOALESCE_TRUNCATED);
    CHECK(endless.ending.code == GCOALESCE_CALL_TIMEOUT);
    CHECK(endless.events > 2);
    CHECK(endless.ending.events == endless.events);
}

TEST_CASE("an answer larger than a stream may be fails for all its readers") {
    const Sim sim({"--hold-after", "0"});
    const ScratchInstance instance;
    const Broker broker(*instance, sim.url(), {"--stream-limit", "64KiB", "--ttl-idle", "10min"});
    const std::vector<Case> cases{
        {"size=20KiB,events=3", GCOALESCE_COMPLETE, GCOALESCE_OK, 200, 3, "STOP", true},
        {"size=20KiB,events=8", GCOALESCE_FAILED, GCOALESCE_TOO_LARGE, 200, 3},
        {"size=65KiB,events=1", GCOALESCE_FAILED, GCOALESCE_TOO_LARGE, 200, 0},
        {"size=1MiB,events=1,chunk=10KiB", GCOALESCE_FAILED, GCOALESCE_TOO_LARGE, 200, 0},
        {"size=65KiB,events=1", GCOALESCE_FAILED, GCOALESCE_TOO_LARGE, 200, 0, "", false, false},
    };
    const auto reports = reach(*instance, broker, cases, &sim);
    for (std::size_t i = 0; i < cases.size(); ++i) check_case(cases[i], reports[i]);
}

TEST_CASE("T84: an answer for which the segment has no room fails for all its readers, and the next one fits") {
    const Sim sim({"--hold-after", "0"});
    const ScratchInstance instance;
    const Broker broker(*instance, sim.url(), {"--memory", "1MiB", "--streams", "16"});
    for (const std::vector<Case>& cases : {
             std::vector<Case>{{"size=100KiB,events=8", GCOALESCE_FAILED, GCOALESCE_NO_MEMORY, 200, 3}},
             std::vector<Case>{{"size=2MiB,events=1", GCOALESCE_FAILED, GCOALESCE_NO_MEMORY, 200, 0, "STOP"}},
             std::vector<Case>{
                 {"size=2MiB,events=1", GCOALESCE_FAILED, GCOALESCE_NO_MEMORY, 200, 0, "STOP", false, false}},
             std::vector<Case>{{"size=100KiB,events=2", GCOALESCE_COMPLETE, GCOALESCE_OK, 200, 2, "STOP", true}},
         }) {
        sim.reset(); // holds again
        check_case(cases.front(), reach(*instance, broker, cases, &sim).front());
    }
}

TEST_CASE("T83: where every slot holds a stream that is needed, one more request is told to come again") {
    const Sim sim;
    const ScratchInstance instance;
    const Broker broker(*instance, sim.url(), {"--streams", "4"});
    Child child([&](Line& line) {
        const Attachment attachment = attach(*instance);
        std::deque<Reader> running;
        for (int i = 0; i < 4; ++i)
            running.emplace_back(attachment, Ask{"[sim hold-after=0] running " + std::to_string(i)}).served();
        Reader fifth(attachment, {"one too many"});
        line.tell(fifth.read_to_end());
        for (Reader& reader : running) line.tell(reader.read_to_end());
        running.pop_front(); // one leaves, and its slot serves the next one at once: what lingers is not needed
        Reader again(attachment, {"one too many"});
        line.tell(again.read_to_end());
    });
    const auto refused = child.line().hear<Seen>();
    CHECK(refused.code == GCOALESCE_BUSY);
    CHECK(refused.ending.retry_ms > 0);
    sim.release();
    for (int i = 0; i < 5; ++i) CHECK(child.line().hear<Seen>().complete());
    CHECK(upstream_calls(sim) == 5);
}

TEST_CASE("T35, T38, T39: retries happen before the first event only, once for all readers") {
    const Sim sim({"--hold-after", "0"});
    const ScratchInstance instance;
    const Broker broker(*instance, sim.url(), {"--ttl-idle", "10min", "--retries", "2"});
    struct Retried {
        Case expected;
        std::uint64_t retries;
    };
    const std::vector<Retried> table{
        {{"fail-first=1", GCOALESCE_COMPLETE, GCOALESCE_OK, 200, 4, "STOP", true}, 1},
        {{"fail-first=2,status=500", GCOALESCE_COMPLETE, GCOALESCE_OK, 200, 4, "STOP", true}, 2},
        {{"fail-first=1,status=429", GCOALESCE_COMPLETE, GCOALESCE_OK, 200, 4, "STOP", true}, 1},
        {{"fail-first=1,reset-after=0", GCOALESCE_COMPLETE, GCOALESCE_OK, 200, 4, "STOP", true}, 1},
        {{"fail-first=1,error-after=0", GCOALESCE_COMPLETE, GCOALESCE_OK, 200, 4, "STOP", true}, 1},
        {{"fail-first=1,empty", GCOALESCE_COMPLETE, GCOALESCE_OK, 200, 4, "STOP", true}, 1},
        {{"fail-first=1", GCOALESCE_COMPLETE, GCOALESCE_OK, 200, 1, "STOP", true, false}, 1},
        // Nothing but the tries that are allowed, however many wait.
        {{"reset-after=0", GCOALESCE_FAILED, GCOALESCE_CONNECT_FAILED, 0, 0}, 2},
        {{"status=503", GCOALESCE_FAILED, GCOALESCE_UPSTREAM_ERROR, 503, 0}, 2},
        // Not worth a second try, or shown to somebody already.
        {{"status=400", GCOALESCE_FAILED, GCOALESCE_UPSTREAM_ERROR, 400, 0}, 0},
        {{"status=403", GCOALESCE_FAILED, GCOALESCE_KEY_REFUSED, 403, 0}, 0},
        {{"html,status=200", GCOALESCE_FAILED, GCOALESCE_BAD_ANSWER, 200, 0}, 0},
        {{"error-after=2", GCOALESCE_FAILED, GCOALESCE_UPSTREAM_ERROR, 503, 2}, 0},
        {{"reset-after=2", GCOALESCE_TRUNCATED, GCOALESCE_CUT_SHORT, 200, 2}, 0},
    };
    std::vector<Case> cases;
    for (const Retried& row : table) cases.push_back(row.expected);
    const auto reports = reach(*instance, broker, cases, &sim);
    auto retries = retries_of(broker);
    for (std::size_t i = 0; i < cases.size(); ++i) {
        check_case(cases[i], reports[i]);
        CAPTURE(cases[i].script);
        CHECK(retries["gemini-case-" + std::to_string(i)] == table[i].retries);
    }
    const std::uint64_t calls = broker.counted(Counter::requests_started) + broker.counted(Counter::upstream_retries);
    CHECK(upstream_calls(sim) == calls);
    CHECK(broker.counted(Counter::upstream_calls) == calls);
}

TEST_CASE("T37: while upstream has asked for patience nobody calls it, and all are told the same") {
    const Sim sim;
    const ScratchInstance instance;
    const Broker broker(*instance, sim.url(), {"--retries", "0"});
    const Ask ask{"[sim hold-after=0 status=429 retry=3s fail-first=1] patience"};
    struct Report {
        Seen first, after;
        std::uint64_t told_the_same;
    };
    std::vector<std::unique_ptr<Child>> children;
    for (int i = 0; i < 2; ++i) {
        children.push_back(std::make_unique<Child>([&](Line& line) {
            const Attachment attachment = attach(*instance);
            line.tell();
            line.hear();
            std::deque<Reader> readers;
            for (int k = 0; k < 250; ++k) readers.emplace_back(attachment, ask);
            read_all(attachment, readers);
            Report report{};
            report.first = readers.front().seen();
            for (const Reader& reader : readers) {
                const gcoalesce_ending &mine = reader.seen().ending, &first = report.first.ending;
                if (mine.code == first.code && mine.retry_ms == first.retry_ms &&
                    std::string(mine.message) == first.message)
                    ++report.told_the_same;
            }
            Reader after(attachment, ask);
            report.after = after.read_to_end();
            line.tell(report);
            // Whoever waits as long as he is told is served.
            Reader patient(attachment, ask);
            while (patient.read_to_end().code == GCOALESCE_RATE_LIMITED) {
                ::poll(nullptr, 0, static_cast<int>(patient.seen().ending.retry_ms));
                patient = Reader(attachment, ask);
            }
            line.tell(patient.seen());
        }));
    }
    for (const auto& child : children) child->line().hear();
    for (const auto& child : children) child->line().tell();
    REQUIRE(eventually([&] { return requests(broker) == 500; }));
    sim.release();
    for (const auto& child : children) {
        const auto report = child->line().hear<Report>();
        CHECK(report.first.ending.code == GCOALESCE_RATE_LIMITED);
        CHECK(report.first.ending.upstream_status == 429);
        CHECK(report.first.ending.retry_ms == 3000);
        CHECK(report.told_the_same == 250);
        CHECK(report.after.code == GCOALESCE_RATE_LIMITED); // refused before any stream
        CHECK(report.after.ending.retry_ms > 0);
        CHECK(report.after.ending.retry_ms <= 3000);
    }
    CHECK(upstream_calls(sim) == 1);
    for (const auto& child : children) CHECK(child->line().hear<Seen>().complete());
    CHECK(upstream_calls(sim) == 2);
}
