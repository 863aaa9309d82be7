// Clients that die at any instant, that fork, and that outlive their broker.

#include <catch2/catch.hpp>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <optional>
#include <poll.h>
#include <random>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include "tests/chaos/client.hpp"
#include "tests/support/broker.hpp"
#include "tests/support/sim.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;

namespace {

// All that clients leave in a broker is gone again.
bool is_empty(const Broker& broker, std::uint64_t extents_at_start) {
    return broker.counted(Counter::clients_attached) == 0 && broker.counted(Counter::slots_in_use) == 0 &&
           broker.extents_free() == extents_at_start;
}

// Lanes that a process still has in its memory; nullopt where that may not be seen.
std::optional<std::uint64_t> mapped_lanes(pid_t pid) {
    std::ifstream maps("/proc/" + std::to_string(pid) + "/maps");
    if (!maps) return std::nullopt;
    std::uint64_t lanes = 0;
    for (std::string line; std::getline(maps, line);) lanes += line.find("gcoalesce-lane") != std::string::npos ? 1 : 0;
    return lanes;
}

constexpr std::uint64_t kKeys = 50, kSurvivors = 5, kAlive = 50, kEvents = 40;

Ask key_number(std::uint64_t number) {
    return {"[sim gap=20ms events=40] key " + std::to_string(number)};
}

// Asks, reads and leaves, in every order, until it is killed.
[[noreturn]] void victim(const Instance& instance, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const Attachment attachment = attach(instance);
    for (;;) {
        std::deque<Reader> readers;
        for (int i = 0; i < 2; ++i) readers.emplace_back(attachment, key_number(random() % kKeys));
        switch (random() % 3) {
        case 0: readers.front().next(static_cast<std::int64_t>(random() % 20)); break;
        case 1: readers.front().read(1 + random() % kEvents); break;
        case 2: read_all(attachment, readers); break;
        }
        readers.pop_front(); // and the other one before it knows how it is served, or in the midst of its answer
        readers.back().next(static_cast<std::int64_t>(random() % 20));
    }
}

struct Tally {
    std::uint64_t answers, whole;
};

// Reads its keys again and again, to the end, until it is told to stop.
void survivor(const Instance& instance, std::uint64_t first_key, Line& line) {
    const Attachment attachment = attach(instance);
    Tally tally{};
    while (!line.has_news()) {
        std::deque<Reader> readers;
        for (std::uint64_t k = 0; k < kKeys / kSurvivors; ++k)
            readers.emplace_back(attachment, key_number(first_key + k));
        read_all(attachment, readers);
        for (const Reader& reader : readers) {
            const Seen& seen = reader.seen();
            ++tally.answers;
            if (seen.complete() && seen.events == kEvents && seen.misplaced == 0) ++tally.whole;
        }
        if (tally.answers == readers.size()) line.tell(); // all keys of this one have streamed
    }
    line.hear();
    line.tell(tally);
}

} // namespace

// GCOALESCE_CHAOS_CLIENTS asks for more or fewer.
TEST_CASE(
    "T80: a thousand clients killed at any instant leave nothing behind, and every survivor reads whole answers") {
    const char* asked = std::getenv("GCOALESCE_CHAOS_CLIENTS");
    const std::uint64_t clients = asked != nullptr ? std::strtoull(asked, nullptr, 10) : 1000;
    const Sim sim;
    const ScratchInstance instance;
    Broker broker(*instance, sim.url(), {"--linger", "100ms", "--ttl-idle", "50ms"});
    const std::uint64_t extents_at_start = broker.extents_free();

    std::vector<std::unique_ptr<Child>> survivors;
    for (std::uint64_t i = 0; i < kSurvivors; ++i)
        survivors.push_back(
            std::make_unique<Child>([&, i](Line& line) { survivor(*instance, i * kKeys / kSurvivors, line); }));
    for (const auto& child : survivors) child->line().hear();

    std::mt19937_64 random(80);
    std::vector<std::unique_ptr<Child>> victims;
    for (std::uint64_t started = 0; started < clients || !victims.empty();) {
        if (started < clients) {
            const std::uint64_t seed = random();
            victims.push_back(std::make_unique<Child>([&, seed](Line&) { victim(*instance, seed); }));
            ++started;
        }
        const timespec pause{0, static_cast<long>(random() % 3'000'000)}; // the instant is what is random
        ::nanosleep(&pause, nullptr);
        if (started < clients && victims.size() < kAlive) continue;
        const std::size_t one = random() % victims.size();
        victims[one]->signal(SIGKILL);
        CHECK(victims[one]->wait() == 128 + SIGKILL);
        std::swap(victims[one], victims.back());
        victims.pop_back();
    }
    for (const auto& child : survivors) child->line().tell();
    Tally sum{};
    for (const auto& child : survivors) {
        const auto tally = child->line().hear<Tally>();
        sum.answers += tally.answers;
        sum.whole += tally.whole;
        CHECK(child->wait() == 0);
    }
    CHECK(sum.answers >= kKeys);
    CHECK(sum.whole == sum.answers);

    CHECK(eventually([&] { return is_empty(broker, extents_at_start); }));
    CHECK(broker.counted(Counter::slots_in_use) == 0);
    CHECK(broker.extents_free() == extents_at_start);
    CHECK(broker.counted(Counter::clients_attached) == 0);
    CHECK(broker.counted(Counter::lanes_revoked) == 0);
    CHECK(eventually([&] { return mapped_lanes(broker.process().pid()).value_or(0) == 0; }));
    // And the broker serves as on its first day.
    Child last([&](Line& line) { line.tell(Reader(attach(*instance), key_number(0)).read_to_end()); });
    CHECK(last.line().hear<Seen>().complete());
    WARN(clients << " clients were killed beside " << sum.answers << " whole answers of survivors");
}

TEST_CASE("case 30: the pins of a killed client go although a child of it holds its sockets") {
    REQUIRE(::prctl(PR_SET_CHILD_SUBREAPER, 1) == 0); // the grandchild will be ours to reap
    const Sim sim;
    const ScratchInstance instance;
    const Broker broker(*instance, sim.url());
    auto parent = std::make_unique<Child>([&](Line& line) {
        const Attachment attachment = attach(*instance);
        Reader reader(attachment, {"[sim gap=50ms events=2000] fork and die"});
        reader.read(2);
        const pid_t child = ::fork();
        if (child == 0) {
            try {
                for (;;) line.hear<int>(); // holds everything until the test ends
            } catch (const std::exception&) {
                ::_exit(0);
            }
        }
        line.tell(child);
        for (;;) reader.next(1000);
    });
    const auto grandchild = parent->line().hear<pid_t>();
    REQUIRE(grandchild > 0);
    const Slot& slot = broker.view().slot(0);
    REQUIRE(eventually([&] { return slot.subscribers.load() == 1; }));

    parent->signal(SIGKILL);
    REQUIRE(parent->wait() == 128 + SIGKILL);
    CHECK(eventually([&] { return broker.counted(Counter::clients_attached) == 0 && slot.subscribers.load() == 0; }));
    CHECK(broker.counted(Counter::clients_died) == 1);
    CHECK(::kill(grandchild, 0) == 0); // it lived all the while
    parent.reset();
    int status = -1;
    CHECK(::waitpid(grandchild, &status, 0) == grandchild);
    CHECK(status == 0);
    ::prctl(PR_SET_CHILD_SUBREAPER, 0);
}

TEST_CASE("case 29: a forked child that uses its parent's handles and exits leaves the parent unaffected") {
    const Sim sim;
    const ScratchInstance instance;
    const Broker broker(*instance, sim.url(), {"--ttl-idle", "10min"});
    Child parent([&](Line& line) {
        const Attachment attachment = attach(*instance);
        const Ask ask{"[sim gap=20ms events=40] fork and stay"};
        Reader reader(attachment, ask);
        reader.read(2);
        const pid_t child = ::fork();
        if (child == 0) {
            int wrong = reader.next(1000) == GCOALESCE_ATTACHED_BEFORE_FORK ? 0 : 1;
            try {
                Reader(attachment, {"from the child"});
                wrong |= 2;
            } catch (const std::exception&) {
            }
            if (gcoalesce_fd(attachment.get()) != -1) wrong |= 4;
            if (gcoalesce_dispatch(attachment.get()) != GCOALESCE_ATTACHED_BEFORE_FORK) wrong |= 8;
            gcoalesce_detach(attachment.get());
            ::close(STDOUT_FILENO); // what the test's own buffers hold is the test's to write
            std::exit(wrong);       // normally, with all that runs then
        }
        int status = -1;
        ::waitpid(child, &status, 0);
        line.tell(status);
        line.tell(reader.read_to_end());
        line.tell(Reader(attachment, ask).read_to_end());
        line.hear();
    });
    CHECK(parent.line().hear<int>() == 0);
    const auto seen = parent.line().hear<Seen>(), again = parent.line().hear<Seen>();
    CHECK(seen.complete());
    CHECK(seen.events == kEvents);
    CHECK(again.digest == seen.digest);
    CHECK(broker.counted(Counter::clients_attached) == 1);
    CHECK(broker.counted(Counter::connections_accepted) == 1);
    parent.line().tell();
    CHECK(parent.wait() == 0);
}

TEST_CASE(
    "T62, case 27: a client that was stopped past its eviction learns it, harms no newer stream, and is served anew") {
    const Sim sim;
    const ScratchInstance instance;
    const Broker broker(
        *instance, sim.url(),
        {"--memory", "4MiB", "--streams", "16", "--stall-timeout", "1s", "--linger", "100ms", "--ttl-idle", "1ms"});
    const auto large = [](const std::string& name) { return Ask{"[sim size=50KiB,events=20] " + name}; };
    Child stopped([&](Line& line) {
        const Attachment attachment = attach(*instance);
        Reader reader(attachment, large("stopped"));
        reader.read(1);
        line.tell();
        line.hear(); // is stopped in here
        line.tell(reader.read_to_end());
        line.tell(Reader(attachment, large("anew")).read_to_end());
        line.hear();
    });
    stopped.line().hear();
    REQUIRE(eventually([&] { return broker.counted(Counter::streams_complete) == 1; }));
    stopped.stop();
    stopped.line().tell();
    Child others([&](Line& line) { // need the memory, and later the slots
        const Attachment attachment = attach(*instance);
        std::uint64_t whole = 0;
        for (int i = 0; broker.counted(Counter::streams_evicted) == 0; ++i) {
            std::deque<Reader> together; // more than there is room for beside what the stopped one holds
            for (int k = 0; k < 3; ++k)
                together.emplace_back(attachment, large("other " + std::to_string(i) + "." + std::to_string(k)));
            read_all(attachment, together);
        }
        for (int i = 0; i < 32; ++i)
            whole += Reader(attachment, large("more " + std::to_string(i))).read_to_end().complete() ? 1 : 0;
        line.tell(whole);
        line.hear();
        Reader reading(attachment, large("last"));
        line.tell(reading.read_to_end());
    });
    CHECK(others.line().hear<std::uint64_t>() == 32);
    CHECK(broker.counted(Counter::streams_evicted) > 0);
    stopped.signal(SIGCONT);
    const auto seen = stopped.line().hear<Seen>();
    CHECK(seen.code == GCOALESCE_EVICTED);
    CHECK(seen.misplaced == 0);
    CHECK(stopped.line().hear<Seen>().complete());
    others.line().tell();
    CHECK(others.line().hear<Seen>().complete());
    stopped.line().tell();
    CHECK(stopped.wait() == 0);
    CHECK(others.wait() == 0);
    CHECK(eventually([&] { return broker.counted(Counter::slots_in_use) == 0; }));
    CHECK(broker.counted(Counter::lanes_revoked) == 0);
}

TEST_CASE("T82: a client that was killed in its sleep leaves no flag behind that would keep its successor asleep") {
    const Sim sim;
    const ScratchInstance instance;
    const Broker broker(*instance, sim.url());
    const Ask held{"[sim hold-after=1] sleeps"};
    const auto sleep_then_read = [&](Line& line) {
        const Attachment attachment = attach(*instance);
        std::deque<Reader> readers;
        readers.emplace_back(attachment, held);
        readers.front().read(1);
        bool asked = false;
        // Behind the first round it has asked to be woken, and sleeps.
        read_all(attachment, readers, [&] {
            if (!std::exchange(asked, true)) line.tell();
        });
        line.tell(readers.front().seen());
    };
    for (int round = 0; round < 3; ++round) {
        Child killed(sleep_then_read);
        killed.line().hear();
        killed.signal(SIGKILL);
        killed.wait();
    }
    Child successor(sleep_then_read);
    successor.line().hear();
    const std::uint64_t sent = broker.counted(Counter::wakes_socket);
    sim.release();
    CHECK(successor.line().hear<Seen>().complete());
    CHECK(broker.counted(Counter::wakes_socket) > sent);
    CHECK(successor.wait() == 0);
}

TEST_CASE("case 31: a broker that is told to stop lets its clients read what they have, and signals none") {
    const Sim sim;
    const ScratchInstance instance;
    Broker broker(*instance, sim.url(), {"--drain-timeout", "1s", "--ttl-idle", "10min"});
    struct Report {
        Seen running, held;
        gcoalesce_code afterwards;
    };
    std::vector<std::unique_ptr<Child>> children;
    for (int i = 0; i < 3; ++i) {
        children.push_back(std::make_unique<Child>([&](Line& line) {
            const Attachment attachment = attach(*instance);
            Reader held(attachment, {"[sim events=40] finished before"}),
                running(attachment, {"[sim gap=50ms events=2000] runs"});
            held.read(1);
            running.read(2);
            line.tell();
            Report report{};
            report.running = running.read_to_end();
            line.hear(); // the broker has gone
            report.held = held.read_to_end();
            Reader late(attachment, {"too late"});
            while (late.next(1000) == GCOALESCE_TIMED_OUT) {
            }
            report.afterwards = late.seen().code;
            line.tell(report);
        }));
    }
    Child finishing([&](Line& line) {
        const Attachment attachment = attach(*instance);
        Reader mine(attachment, {"[sim hold-after=1 events=2] soon done"});
        mine.read(1);
        line.tell();
        line.tell(mine.read_to_end());
    });
    for (const auto& child : children) child->line().hear();
    finishing.line().hear();
    broker.process().signal(SIGTERM);
    REQUIRE(eventually(
        [&] { return broker.view().header().state.load() == static_cast<std::uint32_t>(BrokerState::draining); }));
    sim.release();
    CHECK(broker.process().wait() == 0);
    CHECK(finishing.line().hear<Seen>().complete()); // it had the time
    for (const auto& child : children) {
        child->line().tell();
        const auto report = child->line().hear<Report>();
        CHECK(report.running.code == GCOALESCE_END);
        CHECK(report.running.ending.kind == GCOALESCE_INTERRUPTED);
        CHECK(report.running.ending.code == GCOALESCE_CLOSED);
        CHECK(report.running.events >= 2);
        CHECK(report.running.ending.events == report.running.events);
        CHECK(report.held.complete());
        CHECK(report.held.events == kEvents);
        INFO(gcoalesce_code_name(report.afterwards));
        CHECK((report.afterwards == GCOALESCE_ABSENT || report.afterwards == GCOALESCE_CLOSED));
        CHECK(child->wait() == 0);
    }
    CHECK(finishing.wait() == 0);
    // Nothing of it is left for others to stumble over.
    struct stat found {};
    CHECK(::stat(instance->socket_path().c_str(), &found) != 0);
    CHECK(::stat(("/dev/shm" + instance.segment_name()).c_str(), &found) != 0);
}
