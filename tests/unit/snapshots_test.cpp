// What the snapshot store keeps, for how long, and how it is found again.
#include "broker/snapshots.hpp"

#include <catch2/catch.hpp>
#include <fstream>
#include <random>
#include <set>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/support/fixtures.hpp"
#include "tests/support/snapshots.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;

namespace {

constexpr Nanos kMinute = 60 * kSecond;
constexpr Nanos kHour = 60 * kMinute;
using Known = Snapshots::Known;

unsigned mode_of(const std::filesystem::path& path) {
    struct stat info {};
    REQUIRE(::lstat(path.c_str(), &info) == 0);
    return info.st_mode & 07777;
}

bool directory_contains(const std::filesystem::path& directory, const std::string& needle) {
    for (const auto& entry : std::filesystem::directory_iterator(directory))
        if (read_file(entry.path()).find(needle) != std::string::npos) return true;
    return false;
}

std::uintmax_t directory_bytes(const std::filesystem::path& directory) {
    std::uintmax_t bytes = 0;
    for (const auto& entry : std::filesystem::directory_iterator(directory)) bytes += entry.file_size();
    return bytes;
}

} // namespace

TEST_CASE("T60: a snapshot comes back byte for byte, with its boundaries, from the queue, the file and the next life") {
    const TempDirectory directory;
    {
        StoreLife life(directory.path);
        for (std::uint64_t number = 0; number < 40; ++number) life.save(number);
        for (std::uint64_t number = 0; number < 40; ++number) CHECK(life.whole(number)); // written or not
        life.settle();
        CHECK(life.store->state().saved == 40);
        for (std::uint64_t number = 0; number < 40; ++number) CHECK(life.whole(number));
    }
    StoreLife life(directory.path);
    CHECK(life.store->state().count == 40);
    for (std::uint64_t number = 0; number < 40; ++number) CHECK(life.whole(number));
    const auto loaded = life.load_number(7);
    REQUIRE(loaded);
    const Snapshot made = make_snapshot(7, life.clock);
    CHECK(loaded->opened_ns == made.opened_ns);
    CHECK(loaded->first_event_ns == made.first_event_ns);
    CHECK(loaded->opened_wall_ns == made.opened_wall_ns);
    CHECK(loaded->ending.ended_ns == made.ending.ended_ns);
    CHECK(loaded->ending.ended_wall_ns == made.ending.ended_wall_ns);
    CHECK(loaded->facts == *life.store->find(stream_number(7)));
    CHECK(loaded->facts.events == made.events.size());
    CHECK(loaded->facts.fresh_until_boottime_ns == made.facts.fresh_until_boottime_ns);
}

TEST_CASE("An answer without events and one with an event of 4 MiB are kept as they are") {
    const TempDirectory directory;
    StoreLife life(directory.path);
    Snapshot none = make_snapshot(1, life.clock);
    none.events.clear();
    Snapshot large = make_snapshot(2, life.clock);
    large.events = {std::string(4 << 20, '\xff'), "", "{}"};
    life.store->save(none, kHour);
    life.store->save(large, kHour);
    life.settle();
    const auto loaded_none = life.load_number(1), loaded_large = life.load_number(2);
    REQUIRE(loaded_none);
    REQUIRE(loaded_large);
    CHECK(loaded_none->events.empty());
    CHECK((loaded_large->events == large.events));
}

TEST_CASE("The file is its owner's alone, and so is a directory that had to be made") {
    const TempDirectory directory;
    const StoreLife life(directory.path / "state" / "gcoalesce");
    CHECK(mode_of(life.file) == 0600);
    CHECK(mode_of(life.file.string() + "-wal") == 0600);
    CHECK(mode_of(life.file.parent_path()) == 0700);
}

TEST_CASE("T56: kept, known once, and never known are three answers, also in the next life") {
    const TempDirectory directory;
    const auto check = [](StoreLife& life) {
        CHECK(life.store->known(stream_number(1)) == Known::here);
        CHECK(life.store->known(stream_number(2)) == Known::gone);
        CHECK(life.store->known(stream_number(3)) == Known::gone);
        CHECK(life.store->known(stream_number(4)) == Known::gone);
        CHECK(life.store->known(stream_number(5)) == Known::no);
        CHECK(life.load_number(1).has_value());
        CHECK(life.load_number(2).error().code == GCOALESCE_GONE);
        CHECK(life.load_number(3).error().code == GCOALESCE_GONE);
        CHECK(life.load_number(5).error().code == GCOALESCE_NOT_FOUND);
    };
    {
        StoreLife life(directory.path);
        life.save(1);
        life.save(2);
        life.store->remember_gone(stream_number(1)); // it is here
        life.store->remember_gone(stream_number(3));
        life.save(4, 0); // not to be kept
        CHECK(life.store->purge(key_number(2)) == 1);
        check(life);
        life.settle();
    }
    StoreLife life(directory.path);
    check(life);
    life.save(3); // what was gone may come after all
    CHECK(life.whole(3));
    life.settle();
    life.store.reset();
    StoreLife next(directory.path);
    CHECK(next.whole(3));
}

TEST_CASE("Of the ids that are gone the last 65,536 are known, in memory and in the file") {
    const TempDirectory directory;
    const std::uint64_t last = Snapshots::kGoneIds + 1000;
    const auto check = [&](const StoreLife& life) {
        CHECK(life.store->known(stream_number(1000)) == Known::no);
        CHECK(life.store->known(stream_number(1001)) == Known::gone);
        CHECK(life.store->known(stream_number(last)) == Known::gone);
    };
    {
        StoreLife life(directory.path);
        for (std::uint64_t number = 1; number <= last; ++number) life.store->remember_gone(stream_number(number));
        life.settle();
        check(life);
    }
    const StoreLife life(directory.path);
    check(life);
}

TEST_CASE("The newest of a key is the one that ended last, if it is complete and reusable and not expired") {
    const TempDirectory directory;
    const Key key = key_number(1000);
    StoreLife life(directory.path);
    const auto save = [&](std::uint64_t number, gcoalesce_ending_kind kind, bool reusable, Nanos ttl) {
        Snapshot snapshot = make_snapshot(number, life.clock);
        snapshot.facts.key = key;
        snapshot.ending.kind = kind;
        snapshot.ending.reusable = reusable ? 1 : 0;
        life.store->save(snapshot, ttl);
        life.timers.advance(kSecond);
    };
    const auto newest = [&]() -> std::uint64_t {
        const auto facts = life.store->newest(key);
        for (std::uint64_t number = 1; facts && number < 10; ++number)
            if (facts->stream_id == stream_number(number)) return number;
        return 0;
    };
    CHECK(newest() == 0);
    const Snapshot early = make_snapshot(1, life.clock);
    life.timers.advance(kSecond);
    save(2, GCOALESCE_COMPLETE, true, kHour);
    save(3, GCOALESCE_COMPLETE, true, kMinute);
    save(4, GCOALESCE_COMPLETE, false, kHour);
    save(5, GCOALESCE_INTERRUPTED, false, kHour);
    CHECK(newest() == 3);
    Snapshot late = early; // saved last, but it ended first
    late.facts.key = key;
    life.store->save(late, kHour);
    CHECK(newest() == 3);
    CHECK(life.store->find(stream_number(5))->kind == GCOALESCE_INTERRUPTED);
    life.settle();
    const auto before = life.store->newest(key);
    life.store.reset();

    StoreLife next(directory.path);
    CHECK(next.store->newest(key) == before);
    next.timers.advance(kMinute + 10 * kSecond);
    REQUIRE(next.store->newest(key));
    CHECK(next.store->newest(key)->stream_id == stream_number(2));
    CHECK(next.store->purge(key) == 4);
    CHECK(!next.store->newest(key));
}

TEST_CASE("A stream that is saved again is kept once, as it was saved last") {
    const TempDirectory directory;
    StoreLife life(directory.path);
    Snapshot snapshot = make_snapshot(1, life.clock);
    for (int round = 0; round < 20; ++round) {
        snapshot.events = {"round " + std::to_string(round)};
        life.store->save(snapshot, kHour);
        if (round % 7 == 0) life.settle();
        CHECK(life.store->state().count == 1);
    }
    life.settle();
    life.store.reset();
    StoreLife next(directory.path);
    CHECK(next.store->state().count == 1);
    CHECK(next.load_number(1)->events == std::vector<std::string>{"round 19"});
    CHECK(next.store->purge_all() == 1);
    next.settle();
    next.store.reset();
    CHECK(StoreLife(directory.path).store->state().count == 0);
}

TEST_CASE("Snapshots expire after their ttl, and are neither found nor in the file any more") {
    const TempDirectory directory;
    StoreLife life(directory.path);
    life.save(1, kMinute);
    life.save(2, kHour);
    life.settle();
    life.clock.advance(kMinute - 1);
    CHECK(life.here(1));
    life.clock.advance(1); // no timer ran
    CHECK(life.gone(1));
    CHECK(!life.store->find(stream_number(1)));
    CHECK(!life.store->newest(key_number(1)));
    CHECK(life.load_number(1).error().code == GCOALESCE_GONE);
    life.timers.advance(kSecond);
    CHECK(life.store->state().count == 1);
    CHECK(life.store->state().expired == 1);
    CHECK(life.gone(1));
    CHECK(life.whole(2));
    life.settle();
    life.timers.advance(kHour);
    CHECK(life.store->state().count == 0);
    CHECK(life.timers.waiting() == 0);
    life.settle();
    life.store.reset();
    const StoreLife next(directory.path);
    CHECK(next.store->state().count == 0);
    CHECK(next.gone(2));
}

TEST_CASE("T92: an hour's step of the wall clock, forth or back, neither loses a snapshot nor makes it live longer") {
    const TempDirectory directory;
    const Nanos step = GENERATE(kHour, -kHour);
    {
        StoreLife life(directory.path);
        life.save(1, 10 * kMinute);
        life.clock.step_wall(step);
        life.timers.advance(10 * kMinute - kSecond);
        CHECK(life.here(1));
        life.save(2, 10 * kMinute);
        life.timers.advance(2 * kSecond);
        CHECK(life.gone(1));
        life.settle();
    }
    StoreLife same_boot(directory.path);
    same_boot.clock.advance(10 * kMinute + kSecond);
    same_boot.clock.step_wall(-step);
    CHECK(same_boot.whole(2));
    same_boot.timers.advance(10 * kMinute - 3 * kSecond);
    CHECK(same_boot.here(2));
    same_boot.timers.advance(2 * kSecond);
    CHECK(same_boot.gone(2));
}

TEST_CASE("T92: after a reboot the wall clock says how old snapshots are; set back, none lives longer than its ttl") {
    const TempDirectory directory;
    Nanos ended_wall = 0;
    {
        StoreLife life(directory.path);
        life.clock.advance(5 * kHour); // far beyond the next boot's boot time
        ended_wall = life.clock.wall();
        life.save(1, 10 * kMinute);
        life.settle();
    }
    StoreLife life(directory.path, StoreLife::defaults(), "boot-2"); // its clocks begin anew
    // The default clock's wall time is five hours before what was saved: as if it was set back.
    REQUIRE(life.here(1));
    const auto facts = life.store->find(stream_number(1));
    CHECK(facts->ended_boottime_ns == life.clock.boottime());
    CHECK(facts->expires_boottime_ns == life.clock.boottime() + 10 * kMinute);
    CHECK(facts->fresh_until_boottime_ns == 0);
    const auto loaded = life.load_number(1);
    REQUIRE(loaded);
    CHECK(loaded->facts == *facts);
    CHECK(loaded->ending.ended_ns == life.clock.monotonic()); // the answer's own spans stay what they were
    CHECK(loaded->ending.ended_ns - loaded->opened_ns == 3 * kSecond);
    CHECK(loaded->ending.ended_ns - loaded->first_event_ns == 2 * kSecond);
    CHECK(loaded->ending.ended_wall_ns == ended_wall);
    life.timers.advance(10 * kMinute);
    CHECK(life.gone(1));
}

TEST_CASE("T92: after a reboot with a right clock a snapshot has the rest of its ttl, and none once that is over") {
    const TempDirectory directory;
    {
        StoreLife life(directory.path);
        life.save(1, 10 * kMinute);
        life.save(2, 30 * kMinute);
        life.settle();
    }
    // Opening reads the clock: the second life begins twelve minutes later by its wall.
    struct Later {
        FakeClock clock;
        FakeTimers timers{clock};
        HandLoop loop;
    } later;
    later.clock.step_wall(12 * kMinute);
    SnapshotOptions options = StoreLife::defaults();
    options.directory = directory.path.string();
    options.instance = "default";
    options.boot_id = "boot-2";
    const auto store = Snapshots::open(options, later.timers, later.loop.post());
    REQUIRE(store);
    CHECK((*store)->known(stream_number(1)) == Known::gone);
    CHECK((*store)->state().expired == 1);
    const auto facts = (*store)->find(stream_number(2));
    REQUIRE(facts);
    CHECK(facts->ended_boottime_ns == later.clock.boottime() - 12 * kMinute);
    CHECK(facts->expires_boottime_ns == later.clock.boottime() + 18 * kMinute);
}

TEST_CASE("T83: beyond its size the store drops the oldest, whether written or not, and the file stays within it") {
    const TempDirectory directory;
    SnapshotOptions options = StoreLife::defaults();
    options.max_bytes = 1 << 20;
    std::uint64_t kept = 0;
    {
        StoreLife life(directory.path, options);
        for (std::uint64_t number = 0; number < 2000; ++number) {
            life.save(number);
            if (number % 100 == 0) life.settle();
        }
        life.settle();
        const SnapshotState state = life.store->state();
        CHECK(state.bytes <= options.max_bytes);
        CHECK(state.bytes > options.max_bytes - 20000);
        CHECK(state.count + state.evicted == 2000);
        kept = state.count;
        for (std::uint64_t number = 0; number < 2000; ++number) REQUIRE(life.here(number) == (number >= 2000 - kept));
    }
    CHECK(directory_bytes(directory.path) <= options.max_bytes * 3 / 2); // free pages are at most a third on top
    options.max_bytes /= 2;                                              // and a smaller limit holds from the start
    StoreLife life(directory.path, options);
    CHECK(life.store->state().bytes <= options.max_bytes);
    CHECK(life.here(1999));
    life.settle();
    life.store.reset();
    CHECK(directory_bytes(directory.path) <= options.max_bytes * 3 / 2);
}

TEST_CASE("Many small answers take no more of the disk than they are counted for") {
    const TempDirectory directory;
    StoreLife life(directory.path);
    for (std::uint64_t number = 0; number < 1000; ++number) {
        Snapshot snapshot = make_snapshot(number, life.clock);
        snapshot.events = {std::string(100 + 7 * number, 'x')}; // around every page boundary
        life.store->save(snapshot, kHour);
    }
    life.settle();
    const std::uint64_t counted = life.store->state().bytes;
    life.store.reset();
    CHECK(directory_bytes(directory.path) <= counted);
    CHECK(directory_bytes(directory.path) > counted / 2);
}

TEST_CASE("An answer larger than the store is dropped, and so is one larger than the queue") {
    const TempDirectory directory;
    SnapshotOptions options = StoreLife::defaults();
    options.max_bytes = 100'000;
    options.queue_bytes = GENERATE(50'000U, 200'000U);
    StoreLife life(directory.path, options);
    life.save(1);
    life.settle();
    Snapshot large = make_snapshot(2, life.clock);
    large.events = {std::string(120'000, 'x')};
    life.store->save(large, kHour);
    CHECK(life.gone(2));
    CHECK(life.store->state().dropped == 1);
    CHECK(!life.store->state().degraded);
    CHECK(life.whole(1));
}

TEST_CASE("What is purged is neither in the file nor in its write-ahead log, and what is never saved never was") {
    const TempDirectory directory;
    StoreLife life(directory.path);
    const auto secret = [](int number) { return "words of answer " + std::to_string(number) + " "; };
    for (int number = 0; number < 30; ++number) {
        Snapshot snapshot = make_snapshot(static_cast<std::uint64_t>(number), life.clock);
        snapshot.events.assign(20, secret(number));
        snapshot.request_head = "prompt " + secret(number);
        life.store->save(snapshot, kHour);
    }
    life.settle();
    for (int number = 0; number < 30; ++number) CHECK(directory_contains(directory.path, secret(number)));

    CHECK(life.store->purge(key_number(4)) == 1);
    life.settle();
    CHECK(!directory_contains(directory.path, secret(4)));
    CHECK(directory_contains(directory.path, secret(5)));
    CHECK(life.store->purge_template("template-2") == 10);
    life.settle();
    for (int number = 0; number < 30; ++number)
        CHECK(directory_contains(directory.path, secret(number)) == (number % 3 != 2 && number != 4));
    CHECK(life.store->purge_template("template-9") == 0);
    CHECK(life.store->purge_all() == 19);
    CHECK(life.store->state().purged == 30);
    CHECK(life.store->state().count == 0);
    life.settle();
    CHECK(!directory_contains(directory.path, "words of answer"));
    CHECK(std::filesystem::file_size(life.file.string() + "-wal") == 0);
}

TEST_CASE("Small facts are kept across lives, each as it was put last") {
    const TempDirectory directory;
    {
        StoreLife life(directory.path);
        CHECK(!life.store->get("window.default"));
        for (int round = 0; round < 100; ++round) life.store->put("calls", std::to_string(round));
        life.store->put("window.default", std::string("with a \0 byte", 13));
        life.store->put("empty", "");
        CHECK(life.store->get("calls") == "99");
        life.settle();
    }
    const StoreLife life(directory.path);
    CHECK(life.store->get("calls") == "99");
    CHECK(life.store->get("window.default") == std::string("with a \0 byte", 13));
    CHECK(life.store->get("empty") == "");
    CHECK(!life.store->get("other"));
}

TEST_CASE("Callbacks never run within the call, and not at all once the store is destroyed") {
    const TempDirectory directory;
    StoreLife life(directory.path);
    life.save(1);
    life.settle();
    int ran = 0;
    life.store->load(stream_number(1), [&](const Result<Snapshot>&) { ++ran; });
    life.store->load(stream_number(2), [&](const Result<Snapshot>&) { ++ran; });
    CHECK(ran == 0);
    life.store.reset();
    bool last = false;
    life.loop.post()([&] { last = true; });
    life.loop.until([&] { return last; });
    CHECK(ran == 0);
}

TEST_CASE("A callback may destroy the store, ask it again, and drop what it was given") {
    const TempDirectory directory;
    StoreLife life(directory.path);
    for (std::uint64_t number = 1; number < 4; ++number) life.save(number);
    life.settle();
    int ran = 0;
    life.store->load(stream_number(1), [&](const Result<Snapshot>& first) {
        ran += first ? 1 : 100;
        life.store->purge(key_number(2));
        life.store->load(stream_number(2), [&](const Result<Snapshot>& second) {
            ran += !second && second.error().code == GCOALESCE_GONE ? 10 : 100;
            life.store->load(stream_number(3), [&](const Result<Snapshot>&) { ran += 100; });
            life.store.reset();
        });
    });
    life.loop.until([&] { return life.store == nullptr; });
    CHECK(ran == 11);
}

TEST_CASE("A load that a purge overtakes answers gone, not a fragment") {
    const TempDirectory directory;
    StoreLife life(directory.path);
    life.save(1);
    life.settle();
    std::optional<Result<Snapshot>> answer;
    life.store->load(stream_number(1), [&](Result<Snapshot> loaded) { answer = std::move(loaded); });
    life.store->purge_all();
    life.loop.until([&] { return answer.has_value(); });
    REQUIRE(!*answer);
    CHECK(answer->error().code == GCOALESCE_GONE);
}

TEST_CASE("Whatever is done in whatever order, index and file tell the same, life after life") {
    const TempDirectory directory;
    SnapshotOptions options = StoreLife::defaults();
    options.max_bytes = 300'000;
    std::mt19937_64 random(20240607);
    std::set<std::uint64_t> expected; // what expired or was evicted is asked of the store
    for (int life_number = 0; life_number < 12; ++life_number) {
        StoreLife life(directory.path, options);
        REQUIRE(life.store->ready());
        if (life_number > 0) REQUIRE(life.store->state().count == expected.size());
        for (int step = 0; step < 400; ++step) {
            const std::uint64_t number = random() % 200;
            switch (random() % 12) {
            case 0: life.timers.advance(static_cast<Nanos>(random() % 20) * kSecond); break;
            case 1:
                life.store->purge(key_number(number));
                expected.erase(number);
                break;
            case 2: life.settle(); break;
            case 3: life.store->put("step", std::to_string(step)); break;
            case 4:
                if (life.here(number)) REQUIRE(life.whole(number));
                break;
            default:
                life.save(number, static_cast<Nanos>(1 + random() % 100) * kMinute);
                expected.insert(number);
                break;
            }
            std::erase_if(expected, [&](std::uint64_t item) { return !life.here(item); });
            if (life.store->state().count != expected.size()) { // the timer is up to a second late
                life.timers.advance(kSecond);
                std::erase_if(expected, [&](std::uint64_t item) { return !life.here(item); });
            }
            REQUIRE(life.store->state().count == expected.size());
        }
        life.settle();
        // The next life's clock starts where this one's did: nothing expires in between.
        for (const std::uint64_t number : expected) REQUIRE(life.whole(number));
    }
}

TEST_CASE("of two brokers on one directory the second keeps nothing there, names the first, and takes over after it") {
    const TempDirectory directory;
    auto first = std::make_unique<StoreLife>(directory.path);
    first->save(1);
    first->settle();
    StoreLife second(directory.path);
    CHECK(second.store->state().degraded);
    CHECK(second.store->state().reason ==
          fmt::format("{} is in use by another broker (pid {})", second.file.string(), ::getpid()));
    CHECK(second.store->state().count == 0);
    second.save(2); // waits in memory
    first->save(3);
    first->settle();
    CHECK(first->whole(3));
    CHECK_FALSE(first->here(2));

    first.reset();
    second.settle();
    CHECK(second.whole(1));
    CHECK(second.whole(2));
    CHECK(second.whole(3));
    CHECK(mode_of(second.file.string() + ".lock") == 0600);
}
