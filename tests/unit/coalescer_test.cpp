#include <catch2/catch.hpp>

#include "broker/coalescer.hpp"
#include "tests/support/fake_timers.hpp"
#include "tests/support/fake_upstream.hpp"
#include "tests/support/memory_segment.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;

namespace {

Key key_of(char name) {
    Key key{};
    key.fill(static_cast<std::uint8_t>(name));
    return key;
}

struct World {
    FakeClock clock;
    FakeTimers timers{clock};
    MemorySegment segment{clock};
    Store& store = segment.store();
    FakeUpstream upstream;
    Mapping lane_memory = anonymous_memory(lane_bytes(16));
    Lane lane{lane_memory.data(), 16};
    std::unique_ptr<Coalescer> coalescer;

    TemplateSettings settings;

    explicit World(const CoalescerLimits& limits = {}, int retries = 0, TemplateSettings of = {})
        : settings(std::move(of)) {
        LanePort port;
        port.mapping = lane_memory;
        port.send_wake = [] { return true; };
        store.add_lane(1, std::move(port));
        ProducerLimits producer;
        producer.retries = retries;
        coalescer =
            std::make_unique<Coalescer>(store, upstream, timers, nullptr, std::vector{settings}, producer, limits);
    }
    Result<OpenAnswer> open(char key, gcoalesce_sharing sharing = GCOALESCE_SHARE,
                            std::string model = "gemini-2.5-flash") {
        OpenRequest request;
        request.lane = 1;
        request.model = std::move(model);
        request.sharing = sharing;
        request.body = std::make_shared<const std::string>("{}");
        request.key = key_of(key);
        request.settings = coalescer->settings(settings.id);
        std::optional<Result<OpenAnswer>> told;
        coalescer->open(std::move(request), [&](const Result<OpenAnswer>& answer) { told = answer; });
        return told.value(); // at once, in all that these tests ask
    }
    SlotEnding ending(StreamRef stream) { return segment.slot(stream).ending.load(); }
};

} // namespace

TEST_CASE("T01: a thousand identical requests cause one call") {
    World world;
    const OpenAnswer first = world.open('a').value();
    CHECK(first.status == GCOALESCE_STARTED);
    for (int i = 0; i < 999; ++i) {
        const OpenAnswer joined = world.open('a').value();
        CHECK(joined.status == GCOALESCE_JOINED);
        CHECK(joined.stream == first.stream);
        CHECK(joined.stream_id == first.stream_id);
    }
    CHECK(world.upstream.calls.size() == 1);
    CHECK(world.lane.pins(first.stream.slot) == 1000);
    CHECK(world.store.counted(Counter::requests_joined) == 999);
}

TEST_CASE(
    "T06: a call that the broker itself cannot go on with fails for all who wait, and the next one starts afresh") {
    World world;
    gcoalesce_ending_kind kind = GCOALESCE_FAILED;
    StreamRef broken;
    SECTION("it cannot be started") {
        world.upstream.fail_next = true;
        broken = world.open('a').value().stream;
        CHECK(world.open('a').value().stream == broken); // its end is told behind its start
        world.timers.advance(0);
    }
    SECTION("it runs") {
        broken = world.open('a').value().stream;
        world.open('a').value();
        FakeUpstream::Started& call = world.upstream.calls[0];
        SECTION("nothing has come") {
            world.timers.fail_next = true;
            call.sent();
        }
        SECTION("an event has come") {
            call.sent();
            call.head(200);
            world.timers.fail_next = true;
            call.bytes(sse(answer_json("x")));
            kind = GCOALESCE_TRUNCATED;
        }
        CHECK(call.cancelled);
    }
    CHECK(world.ending(broken).kind == kind);
    CHECK(world.ending(broken).code == GCOALESCE_INTERNAL);
    CHECK(world.coalescer->in_flight() == 0);
    CHECK(world.open('a').value().status == GCOALESCE_STARTED);
    world.upstream.calls.back().answer({"y"});
    CHECK(world.open('a').value().status == GCOALESCE_FRESH);
}

TEST_CASE("T08: an upstream that is slower than all but its own limits is called once, however many ask meanwhile") {
    World world;
    const OpenAnswer first = world.open('a').value();
    FakeUpstream::Started& call = world.upstream.calls[0];
    const ProducerLimits limits;
    const auto others_join = [&](Nanos within) {
        for (const Nanos until = world.clock.monotonic() + within; world.clock.monotonic() < until;) {
            world.timers.advance(within / 10);
            world.store.sweep();
            CHECK(world.open('a').value().stream == first.stream);
        }
    };
    call.sent();
    others_join(limits.first_event - kSecond);
    call.head(200);
    call.bytes(sse(answer_json("slow")));
    others_join(limits.event_gap - kSecond);
    call.bytes(sse(answer_json("ly", "STOP")));
    call.done();
    CHECK(world.ending(first.stream).kind == GCOALESCE_COMPLETE);
    CHECK(world.upstream.calls.size() == 1);
}

TEST_CASE("requests that differ do not share") {
    World world;
    const OpenAnswer a = world.open('a').value();
    const OpenAnswer b = world.open('b').value();
    CHECK_FALSE(a.stream == b.stream);
    CHECK(world.upstream.calls.size() == 2);
}

TEST_CASE("T09: while a stream runs every request joins it, whatever the TTL; the TTL starts at its end") {
    World world;
    const OpenAnswer first = world.open('a').value();
    for (int i = 0; i < 100; ++i) {
        world.timers.advance(100 * kMillisecond);
        CHECK(world.open('a').value().status == GCOALESCE_JOINED);
    }
    world.upstream.calls[0].answer({"x"});
    world.timers.advance(199 * kMillisecond);
    const OpenAnswer fresh = world.open('a').value();
    CHECK(fresh.status == GCOALESCE_FRESH);
    CHECK(fresh.stream == first.stream);
    world.timers.advance(kMillisecond);
    CHECK(world.open('a').value().status == GCOALESCE_STARTED);
    CHECK(world.upstream.calls.size() == 2);
}

TEST_CASE("every ending but a reusable complete one is followed by a request that starts afresh") {
    const auto then_starts = [](const std::function<void(FakeUpstream::Started&)>& answer, gcoalesce_ending_kind kind) {
        World world;
        const OpenAnswer first = world.open('a').value();
        answer(world.upstream.calls[0]);
        CHECK(world.ending(first.stream).kind == kind);
        CHECK(world.ending(first.stream).reusable == 0);
        const Result<OpenAnswer> again = world.open('a');
        REQUIRE(again);
        CHECK(again->status == GCOALESCE_STARTED);
        CHECK_FALSE(again->stream == first.stream);
        CHECK(world.upstream.calls.size() == 2);
    };
    SECTION("failed") {
        then_starts([](auto& call) { call.respond(400, error_json(400, "INVALID_ARGUMENT")); }, GCOALESCE_FAILED);
    }
    SECTION("T30: truncated") {
        then_starts([](auto& call) { call.respond(200, sse(answer_json("half"))); }, GCOALESCE_TRUNCATED);
    }
    SECTION("T36: complete, but cut at the token limit") {
        then_starts([](auto& call) { call.respond(200, sse(answer_json("long", "MAX_TOKENS"))); }, GCOALESCE_COMPLETE);
    }
    SECTION("T36: complete, but withheld for safety") {
        then_starts([](auto& call) { call.respond(200, sse(answer_json("", "SAFETY"))); }, GCOALESCE_COMPLETE);
    }
    SECTION("T33: an error document in mid-stream") {
        then_starts(
            [](auto& call) { call.respond(200, sse(answer_json("half")) + sse(error_json(503, "UNAVAILABLE"))); },
            GCOALESCE_FAILED);
    }
    SECTION("a broken connection") {
        then_starts(
            [](auto& call) {
                call.sent();
                call.head(200);
                call.bytes(sse(answer_json("half")));
                call.broken();
            },
            GCOALESCE_TRUNCATED);
    }
}

TEST_CASE("T37: after a 429 with a delay nobody calls that model again before it is over, and all are told the rest") {
    World world;
    const OpenAnswer first = world.open('a').value();
    const OpenAnswer joined = world.open('a').value();
    CHECK(joined.stream == first.stream); // both read one ending
    world.upstream.calls[0].respond(429, error_json(429, "RESOURCE_EXHAUSTED", "36s"));
    CHECK(world.ending(first.stream).retry_ms == 36'000);
    world.timers.advance(6 * kSecond);
    for (int i = 0; i < 500; ++i) {
        const Result<OpenAnswer> refused = world.open(i % 2 == 0 ? 'a' : 'b');
        REQUIRE_FALSE(refused);
        CHECK(refused.error().code == GCOALESCE_RATE_LIMITED);
        CHECK(refused.error().retry_ms == 30'000);
    }
    CHECK(world.open('p', GCOALESCE_SHARE, "gemini-2.5-pro")); // another model is another quota
    CHECK(world.upstream.calls.size() == 2);
    world.timers.advance(30 * kSecond);
    CHECK(world.open('a'));
    CHECK(world.upstream.calls.size() == 3);
}

TEST_CASE("bypass has a call of its own that nobody joins, even while another runs") {
    World world;
    const OpenAnswer shared = world.open('a').value();
    const OpenAnswer own = world.open('a', GCOALESCE_SHARE_NOT).value();
    CHECK(own.status == GCOALESCE_BYPASS);
    CHECK_FALSE(own.stream == shared.stream);
    CHECK(world.open('a').value().stream == shared.stream);
    world.upstream.calls[1].answer({"own"});
    CHECK(world.ending(own.stream).kind == GCOALESCE_COMPLETE);
    CHECK(world.ending(own.stream).reusable == 0);
}

TEST_CASE("refresh starts a stream that later requests join at once; readers of the older one go on") {
    World world;
    const OpenAnswer older = world.open('a').value();
    const OpenAnswer newer = world.open('a', GCOALESCE_SHARE_REFRESH).value();
    CHECK(newer.status == GCOALESCE_STARTED);
    CHECK(world.open('a').value().stream == newer.stream);
    world.upstream.calls[0].answer({"old"});
    CHECK(world.segment.events(older.stream).size() == 1);
    CHECK(world.open('a').value().stream == newer.stream);
}

TEST_CASE("in the window answers stay fresh longer, if it was open at any moment of their flight") {
    World world;
    const auto fresh_for = [&](char key) {
        const OpenAnswer answer = world.open(key).value();
        return [&world, answer, index = world.upstream.calls.size() - 1] {
            world.upstream.calls[index].answer({"x"});
            return to_ms(world.segment.slot(answer.stream).fresh_until.load() - world.clock.monotonic());
        };
    };
    CHECK(fresh_for('a')() == 200);
    const auto across = fresh_for('b');
    world.coalescer->notify_on({}, 0);
    CHECK(world.coalescer->window_remaining({}).value() == 6 * kSecond);
    const auto within = fresh_for('c');
    CHECK(within() == 5000);
    world.timers.advance(7 * kSecond); // it opened and closed during the flight
    CHECK(world.coalescer->window_remaining({}).value() == 0);
    CHECK(across() == 5000);
    CHECK(fresh_for('d')() == 200);
}

TEST_CASE("notify on keeps the later deadline, and off shortens nothing that was stamped") {
    World world;
    CHECK(world.coalescer->notify_on({}, 10 * kSecond) == 10 * kSecond);
    CHECK(world.coalescer->notify_on({}, 2 * kSecond) == 10 * kSecond);
    const OpenAnswer answer = world.open('a').value();
    world.upstream.calls[0].answer({"x"});
    const Nanos stamped = world.segment.slot(answer.stream).fresh_until.load();
    world.coalescer->notify_off({});
    world.coalescer->notify_off({});
    CHECK(world.coalescer->window_remaining({}).value() == 0);
    CHECK(world.segment.slot(answer.stream).fresh_until.load() == stamped);
    world.timers.advance(4 * kSecond);
    CHECK(world.open('a').value().status == GCOALESCE_FRESH);
}

TEST_CASE("T14: limits answer busy with a delay, at once") {
    SECTION("answers in flight") {
        World world({.in_flight = 2});
        world.open('a').value();
        world.open('b').value();
        const Result<OpenAnswer> refused = world.open('c');
        REQUIRE_FALSE(refused);
        CHECK(refused.error().code == GCOALESCE_BUSY);
        CHECK(refused.error().retry_ms > 0);
        CHECK(world.open('a').value().status == GCOALESCE_JOINED); // joining costs no call
        world.upstream.calls[0].answer({"x"});
        CHECK(world.open('c'));
    }
    SECTION("readers of one stream") {
        TemplateSettings few;
        few.subscribers = 3;
        World world({}, 0, few);
        for (int i = 0; i < 3; ++i) REQUIRE(world.open('a'));
        const Result<OpenAnswer> refused = world.open('a');
        REQUIRE_FALSE(refused);
        CHECK(refused.error().code == GCOALESCE_BUSY);
        CHECK(world.upstream.calls.size() == 1);
        world.lane.unpin(0);
        CHECK(world.open('a'));
    }
    SECTION("calls a minute") {
        World world({.calls_a_minute = 2});
        world.open('a').value();
        world.timers.advance(20 * kSecond);
        world.open('b').value();
        const Result<OpenAnswer> refused = world.open('c');
        REQUIRE_FALSE(refused);
        CHECK(refused.error().retry_ms == 40'000);
        world.timers.advance(40 * kSecond);
        CHECK(world.open('c'));
    }
}

TEST_CASE("without an API key every request that needs a call is refused by name") {
    World world;
    world.coalescer->set_key_missing(true);
    const Result<OpenAnswer> refused = world.open('a');
    REQUIRE_FALSE(refused);
    CHECK(refused.error().code == GCOALESCE_KEY_MISSING);
    CHECK(world.upstream.calls.empty());
}

TEST_CASE("draining refuses new streams while running ones go on, and what still runs at the end is interrupted") {
    World world;
    const OpenAnswer first = world.open('a').value();
    const OpenAnswer second = world.open('b').value();
    world.coalescer->drain();
    CHECK(world.open('c').error().code == GCOALESCE_DRAINING);
    CHECK(world.open('a').value().status == GCOALESCE_JOINED);
    world.upstream.calls[0].answer({"x"});
    CHECK(world.ending(first.stream).kind == GCOALESCE_COMPLETE);
    CHECK(world.coalescer->in_flight() == 1);
    world.coalescer->interrupt_all();
    CHECK(world.ending(second.stream).kind == GCOALESCE_INTERRUPTED);
    CHECK(world.upstream.calls[1].cancelled);
    CHECK(world.coalescer->in_flight() == 0);
}

TEST_CASE("T03: the call belongs to the broker: when every requester's lane is gone, it completes all the same") {
    World world;
    const OpenAnswer answer = world.open('a').value();
    world.store.remove_lane(1);
    world.upstream.calls[0].answer({"x", "y"});
    CHECK(world.segment.events(answer.stream).size() == 2);
    CHECK(world.ending(answer.stream).kind == GCOALESCE_COMPLETE);
}

TEST_CASE("a request of a lane that is gone starts nothing") {
    World world;
    world.store.remove_lane(1);
    CHECK(world.open('a').error().code == GCOALESCE_NOT_FOUND);
    CHECK(world.upstream.calls.empty());
    CHECK(world.coalescer->in_flight() == 0);
}

TEST_CASE("a client that leaves as soon as it is answered has made a call all the same, which the next one joins") {
    World world;
    OpenRequest request;
    request.lane = 1;
    request.model = "gemini-2.5-flash";
    request.body = std::make_shared<const std::string>("{}");
    request.key = key_of('a');
    request.settings = world.coalescer->settings(world.settings.id);
    world.coalescer->open(std::move(request),
                          [&](const Result<OpenAnswer>& answer) { world.lane.unpin(answer.value().stream.slot); });
    REQUIRE(world.upstream.calls.size() == 1);
    CHECK(world.open('a').value().status == GCOALESCE_JOINED);
    world.upstream.calls[0].answer({"x"});
    CHECK(world.open('a').value().status == GCOALESCE_FRESH);
}
