// The pin / close / retire / wake protocol under fire: one writer, and readers that are real processes (or threads,
// where ThreadSanitizer looks on) running the same code as the library.

#include <catch2/catch.hpp>
#include <cstdlib>
#include <poll.h>
#include <random>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <thread>

#include "broker/store.hpp"
#include "segment/join.hpp"
#include "segment/reader.hpp"

using namespace gcoalesce;

namespace {

#if defined(__SANITIZE_THREAD__)
constexpr bool kThreads = true;
#else
constexpr bool kThreads = false;
#endif

constexpr std::uint32_t kSlots = 24; // few, so that they are recycled all the time
constexpr std::size_t kKeys = 12;
constexpr std::size_t kClients = 4;
constexpr Nanos kWatchdog = 30 * kSecond; // a wait this long, though something was published, is a lost wake-up

// In shared memory: what the clients found.
struct Tally {
    Shared<std::uint64_t> joins, misses, events, ended, lost, waits;
    Shared<std::uint32_t> failures;
    Shared<std::uint32_t> stop;
    char first_failure[256];
};

struct World {
    Mapping segment;
    std::vector<Mapping> lanes;
    std::vector<std::array<int, 2>> wakes;
    Mapping tally_memory;
    Tally& tally() const { return *reinterpret_cast<Tally*>(tally_memory.data()); }
};

Mapping shared_memory(std::size_t bytes) {
    const UniqueFd fd(::memfd_create("hammer", MFD_CLOEXEC));
    REQUIRE(::ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0);
    return Mapping::of(fd.get(), bytes, true).value();
}

Key key_number(std::size_t i) {
    Key key{};
    key[0] = static_cast<std::uint8_t>(i + 1);
    key[31] = static_cast<std::uint8_t>(i + 1);
    return key;
}

// Every event tells where it belongs: key, stream, number, and filler that follows from them.
std::string event_of(std::size_t key, StreamId stream, std::uint64_t number) {
    std::string event = fmt::format("{}/{:016x}/{}/", key, stream, number);
    event.append((stream + number * 7) % 300, static_cast<char>('a' + (stream + number) % 26));
    return event;
}

void fail_client(Tally& tally, const std::string& what) {
    if (tally.failures.fetch_add(1) == 0) what.copy(tally.first_failure, sizeof tally.first_failure - 1);
}

// Reads a joined stream; waiting on the futex, on the wake socket, or not at all.
enum class Waiting { none, futex, socket };

void read_stream(const SegmentView& view, const Lane& lane, int wake, const Joined& joined, std::size_t key,
                 Waiting waiting, Tally& tally) {
    StreamReader reader(view, joined.slot, joined.identity);
    // Pinned: the slot's facts are the stream's until we leave.
    const StreamId stream = view.slot(joined.slot).opening.load().stream_id;
    std::string event;
    for (;;) {
        const std::uint32_t seen = reader.wake_word();
        ReadStatus status = reader.next(event);
        if (status == ReadStatus::nothing && waiting == Waiting::socket) {
            char drained = 0;
            while (::recv(wake, &drained, 1, MSG_DONTWAIT) == 1) {
            }
            lane.ask();
            status = reader.next(event); // looks again behind ask()
            if (status == ReadStatus::nothing) {
                pollfd poll_wake{wake, POLLIN, 0};
                const int ready = ::poll(&poll_wake, 1, static_cast<int>(to_ms(kWatchdog)));
                tally.waits.fetch_add(1, std::memory_order_relaxed);
                if (ready == 0 && reader.wake_word() != seen) fail_client(tally, "a wake-up over the socket was lost");
                continue;
            }
        }
        switch (status) {
        case ReadStatus::event:
            lane.moved(joined.slot);
            tally.events.fetch_add(1, std::memory_order_relaxed);
            if (event != event_of(key, stream, reader.events_read()))
                fail_client(tally, "a reader of key " + std::to_string(key) + " was given " + event.substr(0, 80));
            continue;
        case ReadStatus::nothing: {
            if (waiting == Waiting::none) return;
            const Nanos before = system_clock().monotonic();
            reader.wait(seen, kWatchdog);
            tally.waits.fetch_add(1, std::memory_order_relaxed);
            if (system_clock().monotonic() - before >= kWatchdog && reader.wake_word() != seen)
                fail_client(tally, "a futex wake-up was lost");
            continue;
        }
        case ReadStatus::end: {
            tally.ended.fetch_add(1, std::memory_order_relaxed);
            const auto told = static_cast<std::uint64_t>(reader.ending().total_tokens);
            if (told != reader.events_read()) fail_client(tally, "an ending came before its stream's last event");
            return;
        }
        case ReadStatus::lost: tally.lost.fetch_add(1, std::memory_order_relaxed); return;
        }
    }
}

void client(const World& world, std::size_t number) {
    Tally& tally = world.tally();
    const SegmentView view = SegmentView::check(world.segment.data(), world.segment.bytes()).value();
    const Lane lane(world.lanes[number].data(), kSlots);
    std::mt19937_64 random(number + 1);
    while (tally.stop.load(std::memory_order_relaxed) == 0) {
        const std::size_t key = random() % kKeys;
        const std::optional<Joined> joined = try_join(view, lane, key_number(key), system_clock().monotonic());
        if (!joined) {
            tally.misses.fetch_add(1, std::memory_order_relaxed);
            continue;
        }
        tally.joins.fetch_add(1, std::memory_order_relaxed);
        const std::uint64_t dice = random() % 256;
        if (dice < 200) {
            // Only in and out: most of the traffic is the handshake itself.
            if (view.slot(joined->slot).key.load() != key_number(key))
                fail_client(tally, "pinned, and yet another key");
        } else {
            read_stream(view, lane, world.wakes[number][1], *joined, key,
                        dice < 224   ? Waiting::none
                        : dice < 240 ? Waiting::futex
                                     : Waiting::socket,
                        tally);
        }
        lane.unpin(joined->slot);
    }
}

struct Running { // one stream of the writer's
    StreamRef stream;
    StreamId id = 0;
    std::size_t key = 0;
    std::uint64_t events = 0;
    bool in_flight = false;
};

void hammer(std::uint64_t operations) {
    World world;
    world.segment = shared_memory(Store::table_bytes(kSlots) + (1 << 20));
    world.tally_memory = shared_memory(4096);
    StoreOptions options;
    options.slots = kSlots;
    options.instance = "hammer";
    options.stall_timeout = 0; // any reader that pauses may be evicted, when the test says so
    TemplateSettings settings;
    settings.linger = 0;
    std::unique_ptr<Store> store = Store::create(world.segment, options, {settings}, system_clock()).value();
    store->set_ready();
    const std::uint64_t free_at_start = store->view().header().extents_free.load();

    for (std::size_t i = 0; i < kClients; ++i) {
        std::array<int, 2> wake{};
        REQUIRE(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, wake.data()) == 0);
        world.wakes.push_back(wake);
        world.lanes.push_back(shared_memory(lane_bytes(kSlots)));
        LanePort port;
        port.mapping = world.lanes.back();
        port.send_wake = [fd = wake[0]] { return ::send(fd, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL) == 1; };
        store->add_lane(i + 1, std::move(port));
    }
    std::vector<std::thread> threads;
    std::vector<pid_t> processes;
    for (std::size_t i = 0; i < kClients; ++i) {
        if (kThreads) {
            threads.emplace_back([&world, i] { client(world, i); });
            continue;
        }
        const pid_t pid = ::fork();
        REQUIRE(pid >= 0);
        if (pid == 0) {
            ::prctl(PR_SET_PDEATHSIG, SIGKILL);
            client(world, i);
            ::_exit(0);
        }
        processes.push_back(pid);
    }

    std::mt19937_64 random(42);
    std::array<Running, kKeys> running{};
    std::uint64_t closings = 0;
    Tally& tally = world.tally();
    const auto finish = [&](Running& run) {
        SlotEnding ending{};
        ending.total_tokens = static_cast<std::int64_t>(run.events);
        const bool good = random() % 2 == 0;
        ending.kind = good ? GCOALESCE_COMPLETE : GCOALESCE_TRUNCATED;
        ending.code = good ? GCOALESCE_OK : GCOALESCE_CUT_SHORT;
        if (!good) ++closings;
        store->end(run.stream, ending, good ? kMillisecond : 0);
        run.in_flight = false;
    };
    for (std::uint64_t step = 0;; ++step) {
        if (step % 64 == 0) {
            const std::uint64_t done = tally.joins.load() + closings + store->counted(Counter::streams_retired);
            if (done >= operations || tally.failures.load() != 0) break;
            store->sweep();
        }
        Running& run = running[random() % kKeys];
        const std::uint64_t dice = random() % 100;
        if (run.in_flight && dice < 70) {
            const Result<void> appended = store->append(run.stream, event_of(run.key, run.id, run.events + 1));
            if (appended) ++run.events;
        } else if (run.in_flight) {
            finish(run);
        } else if (dice < 60) {
            const auto key = static_cast<std::size_t>(&run - running.data());
            StreamOpening opening;
            opening.key = key_number(key);
            opening.stream_id = random();
            const Result<StreamRef> stream = store->open(opening, true); // replaces, and so closes, an older one
            ++closings;
            if (stream) run = {*stream, opening.stream_id, key, 0, true};
        } else if (dice < 90) {
            // Closing by decision, as a cancellation does: pins that turn up take it back.
            if (store->joinable(run.stream) != Store::Joinable::no) {
                ++closings;
                if (store->close_to_joiners(run.stream) != 0)
                    store->reopen(run.stream);
                else
                    store->retire(run.stream);
            }
        } else if (dice < 92 && !kThreads) {
            // Not where ThreadSanitizer looks on: a reader that is being evicted reads what is written, by design, and
            // throws it away; the pool's own book-keeping writes there with plain stores.
            store->evict(run.stream);
        }
    }
    for (Running& run : running) {
        if (run.in_flight) finish(run);
    }
    tally.stop.store(1);
    for (std::thread& thread : threads) thread.join();
    for (const pid_t pid : processes) {
        int status = 0;
        REQUIRE(::waitpid(pid, &status, 0) == pid);
        CHECK(status == 0);
    }
    for (const auto& wake : world.wakes) {
        ::close(wake[0]);
        ::close(wake[1]);
    }

    INFO(tally.first_failure);
    CHECK(tally.failures.load() == 0);
    // Nothing leaked: no pin, no slot, no byte of the pool.
    for (const Mapping& lane : world.lanes) {
        for (std::uint32_t slot = 0; slot < kSlots; ++slot) CHECK(Lane(lane.data(), kSlots).pins(slot) == 0);
    }
    while (store->streams_in_use() != 0) store->sweep(); // what is fresh for another millisecond
    CHECK(store->view().header().extents_free.load() == free_at_start);
    CHECK(tally.events.load() > 0);
    CHECK(tally.ended.load() > 0);
    CHECK(tally.waits.load() > 0);
    WARN(fmt::format("{} joins, {} misses, {} closings, {} retirements; {} events read, {} waits, {} readers evicted",
                     tally.joins.load(), tally.misses.load(), closings, store->counted(Counter::streams_retired),
                     tally.events.load(), tally.waits.load(), tally.lost.load()));
}

} // namespace

// GCOALESCE_HAMMER_OPERATIONS asks for more or fewer.
TEST_CASE("millions of joins, closings and retirements leave every answer right and nothing behind") {
    const char* asked = std::getenv("GCOALESCE_HAMMER_OPERATIONS");
    hammer(asked != nullptr ? std::strtoull(asked, nullptr, 10) : kThreads ? 300'000 : 10'000'000);
}
