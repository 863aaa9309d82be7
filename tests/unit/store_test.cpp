#include <catch2/catch.hpp>
#include <random>

#include "segment/join.hpp"
#include "tests/support/fake_timers.hpp"
#include "tests/support/memory_segment.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;

namespace {

constexpr std::uint32_t kSlots = 16;

Key key_of(std::uint64_t number) {
    Key key{};
    for (std::size_t i = 0; i < 8; ++i) key[i] = static_cast<std::uint8_t>(number >> (8 * i));
    key[31] = 1;
    return key;
}

// A store with fake time, and lanes that count what is sent on their wake sockets.
struct World {
    FakeClock clock;
    MemorySegment segment;
    Store& store;
    std::map<LaneId, int> wakes;
    std::vector<Mapping> lanes;

    explicit World(std::size_t extent_bytes = 1 << 20)
        : segment(clock, {kSlots, extent_bytes, {TemplateSettings{}}}), store(segment.store()) {}

    Lane attach(LaneId id) {
        lanes.push_back(anonymous_memory(lane_bytes(kSlots)));
        LanePort port;
        port.mapping = lanes.back();
        port.send_wake = [this, id] { return ++wakes[id], true; };
        port.client_name = "test";
        store.add_lane(id, std::move(port));
        return Lane(lanes.back().data(), kSlots);
    }
    StreamRef open(std::uint64_t key, bool indexed = true) {
        StreamOpening opening;
        opening.key = key_of(key);
        opening.stream_id = key * 1000 + 1;
        opening.request = "{\"contents\":[]}";
        return store.open(opening, indexed).value();
    }
    StreamRef finished(std::uint64_t key, std::size_t bytes = 10, Nanos fresh_for = 200 * kMillisecond) {
        const StreamRef stream = open(key);
        REQUIRE(store.append(stream, std::string(bytes, 'x')));
        end(stream, fresh_for);
        return stream;
    }
    void end(StreamRef stream, Nanos fresh_for = 200 * kMillisecond) {
        SlotEnding ending{};
        ending.kind = fresh_for > 0 ? GCOALESCE_COMPLETE : GCOALESCE_TRUNCATED;
        ending.code = fresh_for > 0 ? GCOALESCE_OK : GCOALESCE_CUT_SHORT;
        store.end(stream, ending, fresh_for);
    }
    std::optional<Joined> join(const Lane& lane, std::uint64_t key) {
        return try_join(store.view(), lane, key_of(key), clock.monotonic());
    }
    bool holds(StreamRef stream) { return store.ref(stream.slot) == stream && store.pins(stream) < UINT64_MAX; }
};

} // namespace

TEST_CASE("an error document stands beside the ending for as long as its stream, and its memory comes back") {
    World world;
    const Shared<std::uint64_t>& free = world.store.view().header().extents_free;
    const auto document_of = [&](const std::string& document) {
        const StreamRef stream = world.open(2);
        world.store.end(stream, SlotEnding{}, 0, document);
        StreamReader reader(world.store.view(), stream.slot, stream.identity);
        std::string told = reader.document(reader.ending());
        CHECK(world.store.retire(stream));
        return told;
    };
    const std::string most(kMostDocument, 'x');
    CHECK(document_of("").empty());
    const std::uint64_t before = free.load();
    CHECK(document_of("{\"error\": {}}") == "{\"error\": {}}");
    CHECK(document_of(most) == most);
    CHECK(document_of(most + "x").empty());
    CHECK(free.load() == before);
}

TEST_CASE("events come back whole and in order, whatever their sizes") {
    World world(24 << 20);
    const StreamRef stream = world.open(1);
    std::mt19937 random(7);
    std::vector<std::string> sent;
    for (const std::size_t size : {0u, 1u, 7u, 8u, 9u, 4000u, 4088u, 5000u, 3u, 1u << 20, 6u << 20, 100u})
        sent.emplace_back(size, static_cast<char>('a' + sent.size()));
    for (int i = 0; i < 300; ++i) sent.emplace_back(random() % 3000, static_cast<char>('a' + i % 26));
    for (const std::string& event : sent) REQUIRE(world.store.append(stream, event));
    CHECK(world.segment.events(stream) == sent);
    const std::uint64_t committed = world.segment.slot(stream).committed_bytes.load();
    std::uint64_t total = 0;
    for (const std::string& event : sent) total += event.size();
    CHECK(committed == total);
}

TEST_CASE("T50: a reader that joins at any event gets every byte once (10,000 random joins)") {
    std::mt19937 random(50);
    for (int round = 0; round < 100; ++round) {
        World world;
        const Lane lane = world.attach(1);
        const StreamRef stream = world.open(1);
        std::string whole;
        std::vector<std::pair<StreamReader, std::string>> readers;
        for (int event = 0; event <= 36; ++event) {
            const std::size_t joins =
                random() % 6 + (event == 36 ? 100 - std::min<std::size_t>(readers.size(), 99) : 0);
            for (std::size_t i = 0; i < joins && readers.size() < 100; ++i) {
                const auto joined = world.join(lane, 1);
                REQUIRE(joined);
                readers.emplace_back(StreamReader(world.store.view(), joined->slot, joined->identity), "");
            }
            if (event == 36) break;
            const std::string text = fmt::format("<{}:{}>", event, std::string(random() % 700, 'e'));
            whole += text;
            REQUIRE(world.store.append(stream, text));
            for (auto& [reader, got] : readers) { // some read on, some fall behind
                std::string next;
                while (random() % 3 != 0 && reader.next(next) == ReadStatus::event) got += next;
            }
        }
        world.end(stream);
        REQUIRE(readers.size() == 100);
        for (auto& [reader, got] : readers) {
            std::string next;
            ReadStatus status = ReadStatus::event;
            while ((status = reader.next(next)) == ReadStatus::event) got += next;
            REQUIRE(status == ReadStatus::end);
            REQUIRE(got == whole);
        }
    }
}

TEST_CASE("T87: a reader of a stream without events waits, and sees the first one") {
    World world;
    const StreamRef stream = world.open(1);
    StreamReader reader(world.store.view(), stream.slot, stream.identity);
    std::string event;
    const std::uint32_t seen = reader.wake_word();
    CHECK(reader.next(event) == ReadStatus::nothing);
    REQUIRE(world.store.append(stream, "first"));
    CHECK(reader.wake_word() != seen); // a futex wait on `seen` would return at once
    CHECK(reader.next(event) == ReadStatus::event);
    CHECK(event == "first");
}

TEST_CASE("a complete answer is joined while fresh and not a moment longer") {
    World world;
    const Lane lane = world.attach(1);
    const StreamRef stream = world.finished(1, 10, 200 * kMillisecond);
    world.clock.advance(200 * kMillisecond - 1);
    CHECK(world.store.joinable(stream) == Store::Joinable::fresh);
    const auto joined = world.join(lane, 1);
    REQUIRE(joined);
    CHECK(joined->fresh);
    world.clock.advance(1);
    CHECK(world.store.joinable(stream) == Store::Joinable::no);
    CHECK_FALSE(world.join(lane, 1));
    CHECK(lane.pins(stream.slot) == 1); // the one that succeeded; the other took its pin back
}

TEST_CASE("an ending that must not be reused leaves nothing to join") {
    World world;
    const Lane lane = world.attach(1);
    const StreamRef stream = world.open(1);
    REQUIRE(world.join(lane, 1));
    world.end(stream, 0);
    CHECK_FALSE(world.join(lane, 1));
    CHECK_FALSE(world.store.find(key_of(1)));
    CHECK(lane.pins(stream.slot) == 1);
    // Those who had joined read on and learn the ending.
    StreamReader reader(world.store.view(), stream.slot, stream.identity);
    std::string event;
    CHECK(reader.next(event) == ReadStatus::end);
    CHECK(reader.ending().kind == GCOALESCE_TRUNCATED);
}

TEST_CASE("a stream that is not indexed is found by nobody") {
    World world;
    const Lane lane = world.attach(1);
    const StreamRef stream = world.open(1, false);
    CHECK_FALSE(world.join(lane, 1));
    CHECK_FALSE(world.store.find(key_of(1)));
    CHECK(world.store.joinable(stream) == Store::Joinable::no);
    REQUIRE(world.store.append(stream, "own"));
    CHECK(world.segment.events(stream) == std::vector<std::string>{"own"});
}

TEST_CASE("a newer stream replaces the older one for joiners, whose readers go on") {
    World world;
    const Lane lane = world.attach(1);
    const StreamRef older = world.open(1);
    REQUIRE(world.join(lane, 1));
    const StreamRef newer = world.open(1);
    REQUIRE(world.store.append(older, "old"));
    REQUIRE(world.store.append(newer, "new"));
    const auto joined = world.join(lane, 1);
    REQUIRE(joined);
    CHECK(joined->slot == newer.slot);
    CHECK(world.segment.events(older) == std::vector<std::string>{"old"});
    world.end(older); // an ended one does not come back into the index
    CHECK(world.store.find(key_of(1)) == newer);
}

TEST_CASE("T74: a stream lingers 30 s after its last subscriber left: kept at 29.9 s, gone at 30.1 s") {
    World world;
    const Lane lane = world.attach(1);
    const StreamRef stream = world.finished(1, 10, 100 * kSecond);
    const auto joined = world.join(lane, 1);
    REQUIRE(joined);
    for (int i = 0; i < 600; ++i) { // a minute of reading
        world.clock.advance(kHeartbeatEvery);
        world.store.sweep();
    }
    lane.unpin(joined->slot);
    world.store.sweep(); // sees that it left
    world.clock.advance(29'900 * kMillisecond);
    world.store.sweep();
    CHECK(world.holds(stream));
    world.clock.advance(200 * kMillisecond);
    world.store.sweep();
    CHECK(world.holds(stream)); // still fresh
    world.clock.advance(60 * kSecond);
    world.store.sweep();
    CHECK_FALSE(world.holds(stream));
    CHECK(world.store.streams_in_use() == 0);
}

TEST_CASE("a reader that comes and goes between two sweeps makes the linger begin anew") {
    World world;
    const Lane lane = world.attach(1);
    const StreamRef stream = world.finished(1, 10, 40 * kSecond);
    world.store.sweep();
    world.clock.advance(29 * kSecond);
    const auto joined = world.join(lane, 1);
    REQUIRE(joined);
    lane.unpin(joined->slot);
    world.store.sweep();
    world.clock.advance(29 * kSecond);
    world.store.sweep();
    CHECK(world.holds(stream));
    world.clock.advance(2 * kSecond);
    world.store.sweep();
    CHECK_FALSE(world.holds(stream));
}

TEST_CASE("a pinned stream is never retired, and goes when its reader's lane goes") {
    World world;
    const Lane lane = world.attach(1);
    const StreamRef stream = world.finished(1);
    REQUIRE(world.join(lane, 1));
    world.store.sweep();
    world.clock.advance(3600 * kSecond);
    world.store.sweep();
    CHECK(world.segment.events(stream).size() == 1);
    world.store.remove_lane(1); // SIGKILL: all its pins go at once
    world.clock.advance(31 * kSecond);
    world.store.sweep();
    CHECK_FALSE(world.holds(stream));
    CHECK(lane.revoked()); // should the process live after all, its handle learns it
}

TEST_CASE("full slots: the oldest that nobody reads gives way; when all are read, the answer is busy") {
    World world;
    const Lane lane = world.attach(1);
    std::vector<StreamRef> streams;
    for (std::uint64_t i = 0; i < kSlots; ++i) {
        streams.push_back(world.finished(i));
        world.clock.advance(kMillisecond);
    }
    REQUIRE(world.join(lane, 0)); // the oldest is being read
    world.open(100);
    CHECK(world.holds(streams[0]));
    CHECK_FALSE(world.holds(streams[1]));
    for (std::uint64_t i = 2; i < kSlots; ++i) REQUIRE(world.join(lane, i));
    StreamOpening opening;
    opening.key = key_of(200);
    const Result<StreamRef> refused = world.store.open(opening, true);
    REQUIRE_FALSE(refused);
    CHECK(refused.error().code == GCOALESCE_BUSY);
    CHECK(refused.error().retry_ms > 0);
    lane.unpin(streams[5].slot); // pressure ends: normal at once (T83)
    CHECK(world.store.open(opening, true));
}

TEST_CASE("memory pressure: what is past its freshness goes first, oldest first, fresh ones after") {
    World world(2 << 20);
    const StreamRef fresh = world.finished(1, 600'000, 3600 * kSecond);
    world.clock.advance(kSecond);
    const StreamRef old = world.finished(2, 600'000, 1);
    world.clock.advance(kSecond);
    const StreamRef newer = world.finished(3, 600'000, 1);
    world.clock.advance(kSecond);
    const StreamRef running = world.open(4);
    REQUIRE(world.store.append(running, std::string(590'000, 'r')));
    CHECK_FALSE(world.holds(old));
    CHECK(world.holds(newer));
    CHECK(world.holds(fresh));
    REQUIRE(world.store.append(running, std::string(590'000, 'r')));
    CHECK_FALSE(world.holds(newer));
    CHECK(world.holds(fresh));
    REQUIRE(world.store.append(running, std::string(590'000, 'r')));
    CHECK_FALSE(world.holds(fresh));
    CHECK(world.segment.events(running).size() == 3);
}

TEST_CASE("an answer for which no room can be made is told so, and what came before stays readable") {
    World world(1 << 20);
    const StreamRef stream = world.open(1);
    REQUIRE(world.store.append(stream, "first"));
    const Result<void> appended = world.store.append(stream, std::string(4 << 20, 'x'));
    REQUIRE_FALSE(appended);
    CHECK(appended.error().code == GCOALESCE_NO_MEMORY);
    CHECK(world.segment.events(stream) == std::vector<std::string>{"first"});
}

TEST_CASE("T63: under pressure, and only then, a reader that stands still for the stall timeout loses its stream") {
    World world(2 << 20);
    const Lane still = world.attach(1);
    const Lane moving = world.attach(2);
    const StreamRef a = world.finished(1, 900'000);
    const StreamRef b = world.finished(2, 900'000);
    REQUIRE(world.join(still, 1));
    REQUIRE(world.join(still, 2));
    REQUIRE(world.join(moving, 2));
    world.store.sweep();
    for (int second = 0; second < 61; ++second) {
        world.clock.advance(kSecond);
        moving.moved(b.slot);
        world.store.sweep();
    }
    CHECK(world.segment.events(a).size() == 1); // an hour of standing still alone costs nothing
    StreamReader reader(world.store.view(), a.slot, a.identity);
    const StreamRef running = world.open(3);
    REQUIRE(world.store.append(running, std::string(890'000, 'r')));
    std::string event;
    CHECK(reader.next(event) == ReadStatus::lost);
    CHECK(world.segment.events(b).size() == 1); // one of its readers moves
    CHECK(world.store.counted(Counter::streams_evicted) == 1);
    CHECK(world.holds(a)); // the slot waits for its pin
    still.unpin(a.slot);
    world.store.sweep();
    CHECK_FALSE(world.holds(a));
}

TEST_CASE("a lane that is scribbled on is revoked at the second look, and harms nobody else") {
    World world;
    const Lane forged = world.attach(1);
    const Lane honest = world.attach(2);
    const StreamRef mine = world.finished(1);
    REQUIRE(world.join(honest, 1));
    for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
        forged.entry(slot).pins.store(UINT32_MAX);
        forged.entry(slot).joined.store(UINT32_MAX);
        forged.entry(slot).fresh.store(UINT32_MAX);
        forged.header().changes.fetch_add(1);
    }
    for (std::uint64_t i = 2; i < 100; ++i) {
        world.finished(i);
        world.clock.advance(kSecond);
        world.store.sweep();
    }
    CHECK(world.store.counted(Counter::lanes_revoked) == 1);
    CHECK(forged.revoked());
    CHECK_FALSE(honest.revoked());
    CHECK(world.segment.events(mine).size() == 1);
    CHECK(world.store.counted(Counter::requests_joined) < 100);
    // Revoked, it may scribble on; nothing of it counts.
    forged.entry(3).pins.store(7);
    forged.header().changes.fetch_add(1);
    world.store.sweep();
    for (std::uint64_t i = 200; i < 300; ++i) {
        world.finished(i);
        world.clock.advance(kSecond);
        world.store.sweep();
    }
    CHECK(world.store.counted(Counter::lanes_revoked) == 1);
}

TEST_CASE("a lane that keeps more than half of the slots pinned long after their end is revoked when slots run out") {
    World world;
    const Lane greedy = world.attach(1);
    const Lane honest = world.attach(2);
    const StreamRef mine = world.finished(50);
    REQUIRE(world.join(honest, 50));
    for (std::uint64_t key = 1; key < kSlots; ++key) {
        const StreamRef stream = world.finished(key);
        REQUIRE(world.join(greedy, key));
        greedy.moved(stream.slot);
    }
    StreamOpening opening;
    opening.key = key_of(100);
    for (int second = 0; second < 59; ++second) { // it moves, so it is not stalled
        world.clock.advance(kSecond);
        for (std::uint32_t slot = 0; slot < kSlots; ++slot) greedy.moved(slot);
        world.store.sweep();
        CHECK_FALSE(world.store.open(opening, true));
    }
    world.clock.advance(2 * kSecond);
    CHECK(world.store.open(opening, true));
    CHECK(greedy.revoked());
    CHECK_FALSE(honest.revoked());
    CHECK(world.segment.events(mine).size() == 1);
}

TEST_CASE("one ask is answered by one send, to lanes with a reader of the stream only") {
    World world;
    const Lane reading = world.attach(1);
    const Lane elsewhere = world.attach(2);
    const StreamRef stream = world.open(1);
    world.open(2);
    REQUIRE(world.join(reading, 1));
    REQUIRE(world.join(elsewhere, 2));
    reading.ask();
    elsewhere.ask();
    REQUIRE(world.store.append(stream, "a"));
    REQUIRE(world.store.append(stream, "b"));
    CHECK(world.wakes[1] == 1);
    CHECK(world.wakes[2] == 0);
    reading.ask();
    world.end(stream);
    CHECK(world.wakes[1] == 2);
}

TEST_CASE("T12: readers that stand still change neither the number nor the order of publications and wakes") {
    const auto run = [](bool with_sleepers) {
        World world;
        const Lane lane = world.attach(1);
        const Lane sleeper = world.attach(2);
        const StreamRef stream = world.open(1);
        REQUIRE(world.join(lane, 1));
        if (with_sleepers) REQUIRE(world.join(sleeper, 1));
        std::vector<std::uint64_t> seen;
        StreamReader reader(world.store.view(), stream.slot, stream.identity);
        for (int i = 0; i < 50; ++i) {
            lane.ask();
            REQUIRE(world.store.append(stream, "event"));
            std::string event;
            REQUIRE(reader.next(event) == ReadStatus::event);
            seen.push_back(reader.wake_word());
            seen.push_back(static_cast<std::uint64_t>(world.wakes[1]));
            seen.push_back(world.store.counted(Counter::wakes_futex));
        }
        world.end(stream);
        return seen;
    };
    CHECK(run(true) == run(false));
}

TEST_CASE("an inspector never sees bytes of a recycled slot") {
    World world;
    const StreamRef stream = world.finished(1, 5000, 1);
    StreamReader reader(world.store.view(), stream.slot, stream.identity);
    world.clock.advance(31 * kSecond);
    world.store.sweep();
    REQUIRE_FALSE(world.holds(stream));
    std::string event;
    CHECK(reader.next(event) == ReadStatus::lost);
    const StreamRef next = world.finished(2, 5000);
    REQUIRE(next.slot == stream.slot);
    CHECK(reader.next(event) == ReadStatus::lost);
    CHECK_FALSE(reader.valid());
}

TEST_CASE("keys whose index entries collide are all found by the broker") {
    World world;
    std::vector<Key> keys;
    for (std::uint64_t i = 0; i < kSlots; ++i) {
        Key key{};
        key[0] = 5; // one fingerprint for all
        key[20] = static_cast<std::uint8_t>(i);
        StreamOpening opening;
        opening.key = key;
        REQUIRE(world.store.open(opening, true));
        keys.push_back(key);
    }
    const Lane lane = world.attach(1);
    for (const Key& key : keys) {
        const auto found = world.store.find(key);
        REQUIRE(found);
        CHECK(world.segment.slot(*found).key.load() == key);
        if (const auto joined = try_join(world.store.view(), lane, key, world.clock.monotonic()))
            CHECK(joined->slot == found->slot); // a reader may miss, and never finds a wrong one
    }
}

TEST_CASE("the pool has every byte back when all streams are gone") {
    World world(4 << 20);
    const std::uint64_t before = world.store.view().header().extents_free.load();
    std::mt19937 random(3);
    for (std::uint64_t i = 0; i < 500; ++i) {
        world.finished(i, random() % 200'000, 1);
        world.clock.advance(random() % 5 * kSecond);
        world.store.sweep();
    }
    world.clock.advance(100 * kSecond);
    world.store.sweep();
    CHECK(world.store.streams_in_use() == 0);
    CHECK(world.store.view().header().extents_free.load() == before);
}

TEST_CASE("a distinct error is kept once, with its count and its first and last time") {
    World world;
    for (int i = 0; i < 3; ++i) {
        world.store.note_error(GCOALESCE_RATE_LIMITED, 429, "quota");
        world.clock.advance(kSecond);
    }
    world.store.note_error(GCOALESCE_UPSTREAM_ERROR, 500, "quota");
    const SegmentView& view = world.store.view();
    CHECK(view.error(0).count.load() == 3);
    const ErrorFacts facts = view.error(0).facts.load();
    CHECK(facts.message.view() == "quota");
    CHECK(facts.last_wall_ns - facts.first_wall_ns == 2 * kSecond);
    CHECK(view.error(1).count.load() == 1);
    for (int i = 0; i < 500; ++i) {
        world.clock.advance(kSecond);
        world.store.note_error(GCOALESCE_UPSTREAM_ERROR, 500, fmt::format("error {}", i));
    }
    CHECK(view.error(0).facts.load().message.view() != "quota"); // the longest unseen gives way
}

TEST_CASE("the log tells a stream's life, and its numbering tells what a reader missed") {
    World world;
    const std::uint64_t start = world.store.view().header().log_next.load();
    const StreamRef stream = world.finished(1);
    const SegmentView& view = world.store.view();
    std::vector<std::uint32_t> kinds;
    for (std::uint64_t n = start; n < view.header().log_next.load(); ++n) {
        CHECK(view.log_record(n).sequence.load() == 2 * n + 2);
        kinds.push_back(view.log_record(n).facts.load().kind);
        CHECK(view.log_record(n).facts.load().stream_id == world.store.stream_id(stream));
    }
    CHECK(kinds == std::vector<std::uint32_t>{static_cast<std::uint32_t>(LogKind::started),
                                              static_cast<std::uint32_t>(LogKind::first_event),
                                              static_cast<std::uint32_t>(LogKind::ended)});
    for (std::uint64_t i = 0; i < view.header().log.count; ++i) world.store.log(LogKind::notify);
    CHECK(view.log_record(start).sequence.load() != 2 * start + 2); // overrun, and seen to be
}

TEST_CASE("a memory too small for the tables is refused with what is needed") {
    FakeClock clock;
    StoreOptions options;
    const Result<std::unique_ptr<Store>> store =
        Store::create(anonymous_memory(100'000), options, {TemplateSettings{}}, clock);
    REQUIRE_FALSE(store);
    CHECK(store.error().code == GCOALESCE_BAD_REQUEST);
    CHECK(store.error().message.find("--memory") != std::string::npos);
}

TEST_CASE("the default memory holds the tables of the default number of streams with most of it left for answers") {
    CHECK(Store::table_bytes(StoreOptions{}.slots) < (48u << 20) / 8);
}
