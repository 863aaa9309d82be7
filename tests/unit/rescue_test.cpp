// What the next broker saves of a dead one's segment: a store that nobody runs any more, read as it stands.
#include "broker/rescue.hpp"

#include <catch2/catch.hpp>

#include "broker/store.hpp"
#include "tests/support/memory_segment.hpp"
#include "tests/support/snapshots.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;

namespace {

using Known = Snapshots::Known;

SlotEnding complete() {
    SlotEnding ending{};
    ending.kind = GCOALESCE_COMPLETE;
    ending.finish_reason.assign("STOP");
    ending.total_tokens = 12;
    return ending;
}

TemplateSettings short_lived() {
    TemplateSettings settings;
    settings.id = "short";
    settings.snapshot_ttl = 20 * kSecond;
    return settings;
}

// A dead broker's segment and the next one's store of snapshots, in one boot.
struct World {
    explicit World(const SnapshotOptions& options = StoreLife::defaults()) : life(directory.path, options) {}

    StreamRef open(StreamId id, const std::vector<std::string>& events, std::uint32_t of = 0, bool kept = true) {
        StreamOpening opening;
        opening.key = key_number(id);
        opening.stream_id = id;
        opening.template_index = of;
        opening.realm = id + 7;
        opening.kept = kept;
        opening.model = "gemini-2.5-flash";
        opening.request = "{\"a\":1}";
        const StreamRef stream = segment.store().open(opening, true).value();
        for (const std::string& event : events) REQUIRE(segment.store().append(stream, event));
        return stream;
    }
    StreamRef ended(StreamId id, Nanos fresh_for = 60 * kSecond, std::uint32_t of = 0, bool kept = true) {
        const StreamRef stream = open(id, {"one", "two"}, of, kept);
        segment.store().end(stream, complete(), fresh_for);
        return stream;
    }
    Slot& slot(StreamRef stream) { return const_cast<Slot&>(segment.slot(stream)); } // what nobody should write
    void die() { segment.store().heartbeat(); }
    void pass(Nanos time) { life.timers.advance(time); }
    Rescued rescue(const std::string& boot = boot_id()) {
        return gcoalesce::rescue(segment.store().view(), *life.store, life.clock, boot, 60 * kSecond);
    }
    Known known(StreamId id) const { return life.store->known(id); }

    TempDirectory directory;
    StoreLife life;
    MemorySegment segment{life.clock, {.slots = 64, .templates = {TemplateSettings{}, short_lived()}}};
};

} // namespace

TEST_CASE("what had ended in a dead broker's segment is saved with the rest of its time and its freshness") {
    World world;
    const StreamRef stream = world.ended(1);
    world.ended(2, 0);
    world.ended(3, 60 * kSecond, 1);
    world.pass(5 * kSecond);
    world.die();
    world.pass(10 * kSecond);
    const Nanos ended = world.segment.slot(stream).ending.load().ended_ns;
    const Rescued rescued = world.rescue();
    CHECK(rescued.ended == 3);
    CHECK(rescued.interrupted == 0);
    CHECK(rescued.left_out == 0);

    const auto facts = world.life.store->newest(key_number(1));
    REQUIRE(facts);
    CHECK(facts->stream_id == 1);
    CHECK(facts->realm == 8);
    CHECK(facts->template_id == "default");
    CHECK(facts->ended_boottime_ns == ended + kSecond); // the fake clock's difference
    CHECK(facts->fresh_until_boottime_ns == ended + 60 * kSecond + kSecond);
    CHECK(facts->expires_boottime_ns == ended + 600 * kSecond + kSecond);
    const auto loaded = world.life.load(1);
    REQUIRE(loaded);
    CHECK(loaded->events == std::vector<std::string>{"one", "two"});
    CHECK(loaded->ending.kind == GCOALESCE_COMPLETE);
    CHECK(loaded->ending.reusable == 1);
    CHECK(loaded->ending.finish_reason.view() == "STOP");
    CHECK(loaded->ending.total_tokens == 12);
    CHECK(loaded->ending.ended_ns == ended);
    CHECK(loaded->model == "gemini-2.5-flash");
    CHECK(loaded->request_head == "{\"a\":1}");
    CHECK_FALSE(world.life.store->newest(key_number(2))); // not for new requests
    CHECK(world.known(2) == Known::here);                 // but for those who read it
    CHECK(world.life.store->find(3)->template_id == "short");
    world.pass(5 * kSecond);
    CHECK(world.known(3) == Known::gone);
    CHECK(world.known(1) == Known::here);
}

TEST_CASE("what ran when the broker died is saved as interrupted at its last heartbeat, and is not reused") {
    World world;
    world.open(1, {"one"});
    world.open(2, {}); // nobody has seen anything of it
    world.die();
    const Nanos death = world.life.clock.monotonic();
    world.pass(10 * kSecond);
    const Rescued rescued = world.rescue();
    CHECK(rescued.interrupted == 1);
    CHECK(rescued.ended == 0);
    CHECK(rescued.left_out == 0);
    const auto loaded = world.life.load(1);
    REQUIRE(loaded);
    CHECK(loaded->events == std::vector<std::string>{"one"});
    CHECK(loaded->ending.kind == GCOALESCE_INTERRUPTED);
    CHECK(loaded->ending.code == GCOALESCE_BROKER_DEAD);
    CHECK(loaded->ending.reusable == 0);
    CHECK(loaded->ending.ended_ns == death);
    CHECK(loaded->ending.message.view() == "the broker died in the midst of the answer");
    CHECK_FALSE(world.life.store->newest(key_number(1)));
    CHECK(world.known(2) == Known::gone);
}

TEST_CASE("what must not be on disk is not put there by a rescue: no-store, snapshots off, purged, known already") {
    World world;
    world.ended(1, 0, 0, false);
    world.open(2, {"one"}, 0, false);
    const StreamRef purged = world.ended(3);
    Mapping memory = anonymous_memory(lane_bytes(64));
    LanePort port;
    port.mapping = memory;
    world.segment.store().add_lane(1, std::move(port));
    REQUIRE(world.segment.store().pin(1, purged)); // a reader keeps it in its slot
    world.segment.store().drop(purged);
    REQUIRE(world.segment.slot(purged).state.load() == static_cast<std::uint32_t>(SlotState::ended));
    const StreamRef known = world.ended(4);
    Snapshot older = make_snapshot(4, world.life.clock);
    older.facts.stream_id = 4;
    world.life.store->save(older, 60 * kSecond);
    world.ended(5);
    world.life.store->remember_gone(5);
    world.die();
    const Rescued rescued = world.rescue();
    CHECK(rescued.ended + rescued.interrupted + rescued.left_out == 0);
    for (const StreamId id : {1, 2, 3, 5}) CHECK(world.known(id) == Known::gone);
    CHECK(world.life.load(4)->events == older.events);
    CHECK(world.slot(known).ephemeral.load() == 0);
    CHECK(world.rescue().ended == 0); // a second time there is nothing left to do
}

TEST_CASE("of another boot nothing is fresh, and the wall clock says how much of its time is left") {
    World world;
    world.ended(1);
    world.ended(2, 60 * kSecond, 1);
    world.open(3, {"one"});
    world.die();
    world.pass(15 * kSecond);
    const Rescued rescued = world.rescue("another boot");
    CHECK(rescued.ended == 2);
    CHECK(rescued.interrupted == 1);
    const auto facts = world.life.store->newest(key_number(1));
    REQUIRE(facts);
    CHECK(facts->fresh_until_boottime_ns == 0);
    CHECK(facts->expires_boottime_ns == world.life.clock.boottime() + 585 * kSecond);
    world.pass(5 * kSecond);
    CHECK(world.known(2) == Known::gone);
    CHECK(world.known(3) == Known::here);
}

TEST_CASE("T92: a wall clock that was set by an hour makes nothing of a rescue live longer than its time") {
    const Nanos step = GENERATE(3600, -3600) * kSecond;
    const bool same_boot = GENERATE(true, false);
    World world;
    world.ended(1);
    world.die();
    world.life.clock.step_wall(step);
    world.rescue(same_boot ? boot_id() : "another boot");
    if (same_boot || step < 0) {
        REQUIRE(world.known(1) == Known::here);
        CHECK(world.life.store->find(1)->expires_boottime_ns <= world.life.clock.boottime() + 600 * kSecond);
    }
    world.pass(600 * kSecond);
    CHECK(world.known(1) == Known::gone);
}

TEST_CASE("slots whose words do not fit together are left out, and the others are saved") {
    World world;
    const StreamRef bad = world.ended(1);
    world.ended(2);
    Slot& slot = world.slot(bad);
    SECTION("more events than there can be") {
        slot.committed = UINT64_MAX / 2;
    }
    SECTION("more events than there are") {
        slot.committed = 10'000; // there are zeros behind the last one
    }
    SECTION("an extent that lies elsewhere") {
        slot.first_extent = 8;
    }
    SECTION("a chain that is a circle") {
        const auto* extent = reinterpret_cast<const Extent*>(
            world.segment.store().view().extent_bytes(slot.first_extent.load(), sizeof(Extent)));
        REQUIRE(extent != nullptr);
        const_cast<Extent*>(extent)->next = slot.first_extent.load();
        const_cast<Extent*>(extent)->capacity = 24; // what its two events take is more
        slot.committed = 1 << 20;
    }
    SECTION("a circle of empty extents") {
        const auto* extent = reinterpret_cast<const Extent*>(
            world.segment.store().view().extent_bytes(slot.first_extent.load(), sizeof(Extent)));
        REQUIRE(extent != nullptr);
        const_cast<Extent*>(extent)->next = slot.first_extent.load();
        const_cast<Extent*>(extent)->capacity = 0;
    }
    SECTION("an ending that there is not") {
        SlotEnding ending = slot.ending.load();
        ending.kind = 99;
        slot.ending.store(ending);
    }
    SECTION("a template that there is not") {
        SlotOpening opening = slot.opening.load();
        opening.template_index = 1 << 20;
        slot.opening.store(opening);
    }
    SECTION("a method that there is not") {
        SlotOpening opening = slot.opening.load();
        opening.method = 77;
        slot.opening.store(opening);
    }
    SECTION("evicted") {
        slot.evicted = 1;
    }
    world.die();
    const Rescued rescued = world.rescue();
    CHECK(rescued.left_out == 1);
    CHECK(rescued.ended == 1);
    CHECK(world.known(1) == Known::gone);
    CHECK(world.life.load(2)->events.size() == 2);
}

TEST_CASE("more answers than the store's queue holds are all saved") {
    SnapshotOptions options = StoreLife::defaults();
    options.queue_bytes = 6 << 20;
    World world(options);
    for (StreamId id = 1; id <= 12; ++id) {
        const StreamRef stream = world.open(id, {std::string(1 << 20, static_cast<char>('a' + id))});
        world.segment.store().end(stream, complete(), 60 * kSecond);
        world.pass(kMillisecond);
    }
    world.die();
    CHECK(world.rescue().ended == 12);
    for (StreamId id = 1; id <= 12; ++id) CHECK(world.known(id) == Known::here);
    CHECK(world.life.store->state().dropped == 0);
    CHECK(world.life.store->state().queued == 0); // all of it is on disk: the segment may go
}
