// Many processes on one stream: who joins when, and who leaves, stops or falls behind, is nobody else's business.

#include <array>
#include <catch2/catch.hpp>
#include <csignal>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>
#include <vector>

#include "segment/reader.hpp"
#include "tests/chaos/client.hpp"
#include "tests/support/broker.hpp"
#include "tests/support/sim.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;

namespace {

constexpr std::uint64_t kEvents = 36;
constexpr std::uint64_t kPublications = kEvents + 1; // and the ending

using Children = std::vector<std::unique_ptr<Child>>;

std::uint64_t upstream_calls(const Sim& sim) {
    return nlohmann::json::parse(sim.calls()).at("calls").get<std::uint64_t>();
}

// What a whole answer of kEvents is to everyone who reads it.
void check_whole(const Seen& seen) {
    INFO(gcoalesce_code_name(seen.code) << ", " << seen.ending.message);
    CHECK(seen.complete());
    CHECK(seen.events == kEvents);
    CHECK(seen.misplaced == 0);
}

void check_same(const Seen& seen, const Seen& first) {
    check_whole(seen);
    CHECK(seen.bytes == first.bytes);
    CHECK(seen.digest == first.digest);
}

// The first stream that a broker of a test opens.
const Slot& first_slot(const Broker& broker) {
    return broker.view().slot(0);
}

// Lets a held answer go once so many requests in all read it.
void release_at(const Broker& broker, const Sim& sim, std::uint64_t readers) {
    REQUIRE(eventually([&] {
        return broker.counted(Counter::requests_started) + broker.counted(Counter::requests_joined) == readers;
    }));
    sim.release();
}

bool published(const Broker& broker, std::uint64_t events) {
    return first_slot(broker).committed.load() >= events;
}

} // namespace

TEST_CASE("T01: a thousand requests at one instant make one call and get the same bytes") {
    const Sim sim;
    const ScratchInstance instance;
    const Broker broker(*instance, sim.url(), {"--ttl-idle", "1min"});
    struct Report {
        Seen first;
        std::uint64_t others, same;
    };
    Children children;
    for (int i = 0; i < 20; ++i) {
        children.push_back(std::make_unique<Child>([&](Line& line) {
            const Attachment attachment = attach(*instance);
            line.tell();
            line.hear(); // the barrier
            std::deque<Reader> readers;
            for (int k = 0; k < 50; ++k) readers.emplace_back(attachment, Ask{"[sim latency=1s events=36] herd"});
            read_all(attachment, readers);
            Report report{readers.front().seen(), 0, 0};
            for (const Reader& reader : readers) {
                ++report.others;
                if (reader.seen().complete() && reader.seen().digest == report.first.digest) ++report.same;
            }
            line.tell(report);
        }));
    }
    for (const auto& child : children) child->line().hear();
    for (const auto& child : children) child->line().tell();
    std::vector<Report> reports;
    for (const auto& child : children) reports.push_back(child->line().hear<Report>());

    for (const Report& report : reports) {
        check_same(report.first, reports.front().first);
        CHECK(report.others == 50);
        CHECK(report.same == 50);
    }
    CHECK(upstream_calls(sim) == 1);
    CHECK(broker.counted(Counter::requests_started) == 1);
    for (const auto& child : children) CHECK(child->wait() == 0);
}

TEST_CASE("T50: 10,000 readers that join at every event of a running answer get every byte once") {
    const Sim sim;
    const ScratchInstance instance;
    const Broker broker(*instance, sim.url(), {"--ttl-idle", "1min"});
    constexpr int kProcesses = 8, kEachTime = 34; // 8 * 37 * 34 joins
    struct Report {
        Seen first;
        std::uint64_t readers, same;
        std::array<std::uint64_t, kEvents + 1> joined; // by how many events of the stream this process had read
    };
    Children children;
    for (int i = 0; i < kProcesses; ++i) {
        children.push_back(std::make_unique<Child>([&](Line& line) {
            const Attachment attachment = attach(*instance);
            line.tell();
            line.hear();
            const Ask ask{"[sim hold-after=0 gap=40ms events=36] join anywhere"};
            Report report{};
            std::deque<Reader> readers;
            readers.emplace_back(attachment, ask);
            std::uint64_t next = 0;
            bool early = true;
            read_all(attachment, readers, [&] {
                const std::uint64_t read = readers.front().seen().events;
                for (; next <= read; ++next) {
                    report.joined[read] += kEachTime;
                    for (int k = 0; k < kEachTime; ++k) readers.emplace_back(attachment, ask);
                }
                if (std::exchange(early, false)) line.tell();
            });
            report.first = readers.front().seen();
            for (const Reader& reader : readers) {
                ++report.readers;
                const Seen& seen = reader.seen();
                if (seen.complete() && seen.misplaced == 0 && seen.digest == report.first.digest) ++report.same;
            }
            line.tell(report);
        }));
    }
    for (const auto& child : children) child->line().hear();
    for (const auto& child : children) child->line().tell();
    for (const auto& child : children) child->line().hear(); // each has joined before any event
    sim.release();
    std::vector<Report> reports;
    for (const auto& child : children) reports.push_back(child->line().hear<Report>());

    std::array<std::uint64_t, kEvents + 1> joined{};
    for (const Report& report : reports) {
        check_same(report.first, reports.front().first);
        CHECK(report.readers == 1 + kEachTime * (kEvents + 1));
        CHECK(report.same == report.readers);
        for (std::size_t k = 0; k < joined.size(); ++k) joined[k] += report.joined[k];
    }
    CHECK(reports.front().first.bytes == broker.counted(Counter::bytes_published));
    CHECK(upstream_calls(sim) == 1);
    CHECK(joined[0] == kProcesses * kEachTime); // later, a process that is late joins for several events at once
    CHECK(joined[kEvents] > 0);
    for (const auto& child : children) CHECK(child->wait() == 0);
}

TEST_CASE("T03: nobody notices when the process that started the call is killed") {
    const std::uint64_t killed_at = GENERATE(0u, kEvents / 2, kEvents - 1);
    CAPTURE(killed_at);
    const Sim sim;
    const ScratchInstance instance;
    const Broker broker(*instance, sim.url(), {"--ttl-idle", "1min"});
    const Ask ask{"[sim hold-after=" + std::to_string(killed_at) + " gap=10ms events=36] the show goes on"};
    const auto reader = [&](Line& line) {
        const Attachment attachment = attach(*instance);
        Reader mine(attachment, ask);
        line.tell(mine.served().status);
        line.tell(mine.read_to_end());
    };
    Child starter(reader);
    REQUIRE(starter.line().hear<gcoalesce_status>() == GCOALESCE_STARTED);
    Children others;
    for (int i = 0; i < 4; ++i) others.push_back(std::make_unique<Child>(reader));
    for (const auto& other : others) CHECK(other->line().hear<gcoalesce_status>() == GCOALESCE_JOINED);

    REQUIRE(eventually([&] { return published(broker, killed_at); }));
    starter.signal(SIGKILL);
    REQUIRE(starter.wait() == 128 + SIGKILL);
    REQUIRE(eventually([&] { return broker.counted(Counter::clients_died) == 1; }));
    sim.release();

    std::vector<Seen> seen;
    for (const auto& other : others) seen.push_back(other->line().hear<Seen>());
    for (const Seen& one : seen) check_same(one, seen.front());
    CHECK(seen.front().bytes == broker.counted(Counter::bytes_published));
    // And the answer is kept as if nothing had happened.
    Child late(reader);
    CHECK(late.line().hear<gcoalesce_status>() == GCOALESCE_FRESH);
    check_same(late.line().hear<Seen>(), seen.front());
    CHECK(upstream_calls(sim) == 1);
}

TEST_CASE("T04: a reader that leaves, the starter too, takes nothing from those who stay or come") {
    const Sim sim;
    const ScratchInstance instance;
    const Broker broker(*instance, sim.url(), {"--ttl-idle", "1min"});
    const Ask ask{"[sim hold-after=0 gap=5ms events=36] come and go"};
    Child child([&](Line& line) {
        const Attachment attachment = attach(*instance);
        auto starter = std::make_unique<Reader>(attachment, ask);
        line.tell(starter->served().status);
        Reader stays(attachment, ask);
        auto follower = std::make_unique<Reader>(attachment, ask);
        follower->served();
        follower.reset();
        starter.reset();
        Reader comes(attachment, ask);
        line.tell(comes.served().status);
        line.tell(stays.read_to_end());
        line.tell(comes.read_to_end());
    });
    CHECK(child.line().hear<gcoalesce_status>() == GCOALESCE_STARTED);
    CHECK(child.line().hear<gcoalesce_status>() == GCOALESCE_JOINED);
    sim.release();
    const auto stayed = child.line().hear<Seen>();
    check_whole(stayed);
    check_same(child.line().hear<Seen>(), stayed);
    CHECK(upstream_calls(sim) == 1);
}

TEST_CASE("T09: while an answer runs, every request joins it, however short its freshness afterwards") {
    const Sim sim;
    const ScratchInstance instance;
    const Broker broker(*instance, sim.url(), {"--ttl-idle", "20ms"});
    const Ask ask{"[sim gap=20ms hold-after=35 events=36] longer than it stays fresh"};
    Child child([&](Line& line) {
        const Attachment attachment = attach(*instance);
        Reader starter(attachment, ask);
        starter.served();
        std::uint64_t joined = 0;
        for (std::uint64_t event = 1; event < kEvents; ++event) {
            Reader other(attachment, ask);
            starter.read(event);
            if (other.served().stream_id == starter.served().stream_id) ++joined;
        }
        line.tell(joined);
        line.tell(starter.read_to_end());
    });
    CHECK(child.line().hear<std::uint64_t>() == kEvents - 1);
    sim.release();
    check_whole(child.line().hear<Seen>());
    CHECK(upstream_calls(sim) == 1);
}

TEST_CASE("T14: one reader more than a stream may have is told to come again, and the others read on") {
    const Sim sim;
    const ScratchInstance instance;
    const Broker broker(*instance, sim.url(), {"--max-subscribers", "2"});
    const Ask ask{"[sim hold-after=0 events=36] only two"};
    Child child([&](Line& line) {
        const Attachment attachment = attach(*instance);
        Reader first(attachment, ask), second(attachment, ask), third(attachment, ask);
        line.tell(third.read_to_end());
        line.tell(first.read_to_end());
        line.tell(second.read_to_end());
    });
    const auto refused = child.line().hear<Seen>();
    CHECK(refused.code == GCOALESCE_BUSY);
    CHECK(refused.ending.retry_ms > 0);
    sim.release();
    const auto first = child.line().hear<Seen>();
    check_whole(first);
    check_same(child.line().hear<Seen>(), first);
    CHECK(upstream_calls(sim) == 1);
}

TEST_CASE("T52: a request that comes when the key is known and no event is there yet is served") {
    const Sim sim;
    const ScratchInstance instance;
    const Broker broker(*instance, sim.url());
    const Ask ask{"[sim hold-after=0 events=36] soon"};
    const auto reader = [&](Line& line) {
        const Attachment attachment = attach(*instance);
        line.tell();
        line.hear();
        Reader mine(attachment, ask);
        line.tell(mine.served().status);
        line.tell(mine.read_to_end());
    };
    Child first(reader), second(reader);
    first.line().hear();
    second.line().hear();
    first.line().tell();
    // The second one asks as soon as anything of the stream can be seen.
    REQUIRE(eventually([&] { return first_slot(broker).state.load() != 0; }));
    second.line().tell();
    CHECK(first.line().hear<gcoalesce_status>() == GCOALESCE_STARTED);
    CHECK(second.line().hear<gcoalesce_status>() == GCOALESCE_JOINED);
    sim.release();
    const auto seen = first.line().hear<Seen>();
    check_whole(seen);
    check_same(second.line().hear<Seen>(), seen);
    CHECK(upstream_calls(sim) == 1);
}

namespace {

struct Work { // of the broker, for one answer
    std::uint64_t events, wakes;
    Seen answer;
};

// 100 fast readers in four processes; with_slow: beside them one that is stopped in its sleep, and one that reads an
// event whenever it is told to.
Work fast_readers(bool with_slow) {
    const Sim sim;
    const ScratchInstance instance;
    const Broker broker(*instance, sim.url());
    const Ask ask{"[sim hold-after=0 gap=20ms events=36] fast and slow"};
    std::unique_ptr<Child> stopped, slow;
    if (with_slow) {
        stopped = std::make_unique<Child>([&](Line& line) {
            const Attachment attachment = attach(*instance);
            Reader mine(attachment, ask);
            mine.read(3);
            line.tell();
            line.tell(mine.read_to_end());
        });
        slow = std::make_unique<Child>([&](Line& line) {
            const Attachment attachment = attach(*instance);
            Reader mine(attachment, ask);
            mine.served();
            line.tell();
            while (!mine.over()) {
                line.hear();
                mine.next(60'000);
                line.tell(mine.seen());
            }
        });
        slow->line().hear();
    }
    Children fast;
    for (int i = 0; i < 4; ++i) {
        fast.push_back(std::make_unique<Child>([&](Line& line) {
            const Attachment attachment = attach(*instance);
            std::deque<Reader> readers;
            for (int k = 0; k < 25; ++k) readers.emplace_back(attachment, ask);
            read_all(attachment, readers);
            for (const Reader& reader : readers) line.tell(reader.seen());
        }));
    }
    release_at(broker, sim, with_slow ? 102 : 100);
    const auto read_one = [&] {
        slow->line().tell();
        return slow->line().hear<Seen>();
    };
    if (with_slow) {
        stopped->line().hear();
        stopped->stop();
        CHECK(read_one().events == 1);
    }
    std::vector<Seen> seen;
    for (const auto& child : fast)
        for (int k = 0; k < 25; ++k) seen.push_back(child->line().hear<Seen>());
    for (const Seen& one : seen) check_same(one, seen.front());
    const Work work{broker.counted(Counter::events_published), broker.counted(Counter::wakes_futex), seen.front()};

    if (with_slow) {
        // All others have been done for long; what these two missed is still there for them.
        Seen last = read_one();
        CHECK(last.events == 2);
        while (last.code == GCOALESCE_OK) last = read_one();
        check_same(last, seen.front());
        stopped->signal(SIGCONT);
        check_same(stopped->line().hear<Seen>(), seen.front());
    }
    CHECK(upstream_calls(sim) == 1);
    return work;
}

} // namespace

TEST_CASE("T12: a stopped reader and a slow one change neither what the producer does nor what 100 others read") {
    const Work alone = fast_readers(false), beside = fast_readers(true);
    CHECK(beside.events == kEvents);
    CHECK(beside.wakes == kPublications);
    CHECK(beside.events == alone.events);
    CHECK(beside.wakes == alone.wakes);
    CHECK(beside.answer.bytes == alone.answer.bytes);
}

TEST_CASE("T11: a thousand sleepers in 20 processes wake for every publication, none by a timeout") {
    const Sim sim;
    const ScratchInstance instance;
    const Broker broker(*instance, sim.url());
    constexpr int kThreads = 50;
    struct Report {
        std::uint64_t events, ended, overslept;
    };
    Children children;
    for (int i = 0; i < 20; ++i) {
        children.push_back(std::make_unique<Child>([&](Line& line) {
            const OpenSegment segment = open_segment(*instance).value();
            line.tell();
            line.hear(); // by now the stream is there
            const std::uint64_t identity = segment.view.slot(0).generation.load() >> 1;
            // A sleep without slices: whoever is not woken lies there until the watchdog comes.
            constexpr Nanos kWatchdog = 60 * kSecond;
            std::array<Report, kThreads> reports{};
            std::vector<std::thread> threads;
            for (Report& report : reports) {
                threads.emplace_back([&] {
                    StreamReader reader(segment.view, 0, identity);
                    std::string event;
                    for (;;) {
                        const std::uint32_t word = reader.wake_word();
                        const ReadStatus status = reader.next(event);
                        if (status == ReadStatus::event) {
                            ++report.events;
                        } else if (status == ReadStatus::nothing) {
                            const Nanos before = system_clock().monotonic();
                            reader.wait(word, kWatchdog);
                            if (system_clock().monotonic() - before >= kWatchdog) ++report.overslept;
                        } else {
                            report.ended += status == ReadStatus::end ? 1 : 0;
                            return;
                        }
                    }
                });
            }
            for (std::thread& thread : threads) thread.join();
            Report sum{};
            for (const Report& report : reports) {
                sum.events += report.events;
                sum.ended += report.ended;
                sum.overslept += report.overslept;
            }
            line.tell(sum);
        }));
    }
    for (const auto& child : children) child->line().hear();
    Child asking([&](Line& line) {
        const Attachment attachment = attach(*instance);
        Reader mine(attachment, {"[sim latency=1s gap=50ms events=36] wake up"});
        mine.served();
        line.tell();
        line.tell(mine.read_to_end());
    });
    asking.line().hear();
    for (const auto& child : children) child->line().tell();
    for (const auto& child : children) {
        const auto report = child->line().hear<Report>();
        CHECK(report.events == kThreads * kEvents);
        CHECK(report.ended == kThreads);
        CHECK(report.overslept == 0);
    }
    check_whole(asking.line().hear<Seen>());
}

TEST_CASE("T53: a reader that was stopped in its sleep when the stream ended sees the end") {
    const bool event_loop = GENERATE(false, true);
    CAPTURE(event_loop);
    const Sim sim;
    const ScratchInstance instance;
    const Broker broker(*instance, sim.url());
    Child child([&](Line& line) {
        const Attachment attachment = attach(*instance);
        std::deque<Reader> readers;
        readers.emplace_back(attachment, Ask{"[sim gap=10ms events=36] sleep through the end"});
        readers.front().read(1);
        line.tell();
        if (event_loop) read_all(attachment, readers);
        line.tell(readers.front().read_to_end());
    });
    child.line().hear();
    child.stop();
    REQUIRE(eventually([&] { return broker.counted(Counter::streams_complete) == 1; }));
    child.signal(SIGCONT);
    check_whole(child.line().hear<Seen>());
}

TEST_CASE("T64, T65: a reader whose own waits run out again and again is told so, and misses nothing") {
    const Sim sim;
    const ScratchInstance instance;
    const Broker broker(*instance, sim.url());
    Child child([&](Line& line) {
        const Attachment attachment = attach(*instance);
        Reader mine(attachment, {"[sim hold-after=0 gap=20ms events=36] impatient"});
        std::uint64_t timeouts = 0;
        while (timeouts < 10) timeouts += mine.next(1) == GCOALESCE_TIMED_OUT ? 1 : 0;
        line.tell();
        while (!mine.over()) timeouts += mine.next(1) == GCOALESCE_TIMED_OUT ? 1 : 0;
        line.tell(timeouts);
        line.tell(mine.seen());
    });
    child.line().hear();
    sim.release();
    CHECK(child.line().hear<std::uint64_t>() >= 10);
    const auto seen = child.line().hear<Seen>();
    check_whole(seen);
    CHECK(seen.bytes == broker.counted(Counter::bytes_published));
}
