// What a request gets, by its template's policy: the coalescer with a fake clock and upstream, and a real snapshot
// store.
#include <catch2/catch.hpp>

#include "broker/coalescer.hpp"
#include "tests/support/fake_timers.hpp"
#include "tests/support/fake_upstream.hpp"
#include "tests/support/memory_segment.hpp"
#include "tests/support/snapshots.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;

namespace {

Key key_of(char name) {
    Key key{};
    key.fill(static_cast<std::uint8_t>(name));
    return key;
}

TemplateSettings named(std::string id) {
    TemplateSettings settings;
    settings.id = std::move(id);
    return settings;
}

Schema schema() {
    return Schema::compile(R"({"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}})",
                           Schema::Form::json_schema)
        .value();
}

constexpr std::string_view kGood = R"({\"a\": 1})"; // as they stand within a JSON string
constexpr std::string_view kBad = R"({\"b\": 1})";

// A request whose reply may come later.
struct Asked {
    std::optional<Result<OpenAnswer>> told;
    Coalescer::Ticket ticket = 0;

    const OpenAnswer& answer() const { return told.value().value(); }
    gcoalesce_status status() const { return answer().status; }
    Code refused() const { return told.value() ? GCOALESCE_OK : told->error().code; }
};

struct World {
    explicit World(std::vector<TemplateSettings> templates = {TemplateSettings{}}, bool on_disk = false)
        : segment(clock, {.slots = 256, .templates = templates}) {
        LanePort port;
        port.mapping = lane_memory;
        port.send_wake = [] { return true; };
        store.add_lane(1, std::move(port));
        if (on_disk) open_snapshots();
        ProducerLimits limits;
        limits.retries = retries;
        coalescer =
            std::make_unique<Coalescer>(store, upstream, timers, snapshots.get(), templates, limits, CoalescerLimits{});
    }

    void open_snapshots() {
        SnapshotOptions options = StoreLife::defaults();
        options.directory = directory.path.string();
        options.instance = "test";
        snapshots = *Snapshots::open(options, timers, loop.post());
        loop.until([&] { return snapshots->ready(); });
    }

    OpenRequest request(char key, const std::string& of = "default") const {
        OpenRequest request;
        request.lane = 1;
        request.settings = coalescer->settings(of);
        request.model = "gemini-2.5-flash";
        request.body = std::make_shared<const std::string>("{}");
        request.key = key_of(key);
        return request;
    }

    // The reply may come as long as the returned object lives.
    std::unique_ptr<Asked> ask(OpenRequest request) {
        auto asked = std::make_unique<Asked>();
        asked->ticket = coalescer->open(std::move(request),
                                        [to = asked.get()](const Result<OpenAnswer>& answer) { to->told = answer; });
        return asked;
    }
    std::unique_ptr<Asked> ask(char key, const std::string& of = "default") { return ask(request(key, of)); }
    std::unique_ptr<Asked> resume(StreamId stream, std::uint64_t after, std::uint64_t realm = 0) {
        OpenRequest request;
        request.lane = 1;
        request.resume = stream;
        request.resume_after = after;
        request.realm = realm;
        return ask(std::move(request));
    }
    void wait_for(const Asked& asked) {
        loop.until([&] { return asked.told.has_value(); });
    }

    void leave(const Asked& asked) { lane.unpin(asked.answer().stream.slot); }
    SlotEnding ending(const Asked& asked) { return segment.slot(asked.answer().stream).ending.load(); }
    FakeUpstream::Started& last() { return upstream.calls.back(); }
    std::size_t calls() const { return upstream.calls.size(); }
    // As the broker's beat does, for so long.
    void pass(Nanos time) {
        for (Nanos gone = 0; gone < time; gone += 100 * kMillisecond) {
            timers.advance(100 * kMillisecond);
            store.sweep();
            coalescer->beat();
        }
    }

    int retries = 0;
    FakeClock clock;
    FakeTimers timers{clock};
    MemorySegment segment;
    Store& store = segment.store();
    FakeUpstream upstream;
    Mapping lane_memory = anonymous_memory(lane_bytes(256));
    Lane lane{lane_memory.data(), 256};
    TempDirectory directory;
    HandLoop loop;
    std::unique_ptr<Snapshots> snapshots;
    std::unique_ptr<Coalescer> coalescer;
};

} // namespace

// ---- limits and windows --------------------------------------------------------------------------------------------

TEST_CASE("a template's limits on calls never touch another template's") {
    TemplateSettings few = named("few");
    few.in_flight = 1;
    TemplateSettings slow = named("slow");
    slow.calls_a_minute = 1;
    World world({TemplateSettings{}, few, slow});
    REQUIRE(world.ask('a', "few")->status() == GCOALESCE_STARTED);
    const auto refused = world.ask('b', "few");
    CHECK(refused->refused() == GCOALESCE_BUSY);
    CHECK(refused->told->error().retry_ms > 0);
    CHECK(world.ask('a', "few")->status() == GCOALESCE_JOINED);
    REQUIRE(world.ask('c', "slow")->status() == GCOALESCE_STARTED);
    world.last().answer({"x"});
    CHECK(world.ask('d', "slow")->refused() == GCOALESCE_BUSY);
    for (char key = 'e'; key < 'z'; ++key) CHECK(world.ask(key)->status() == GCOALESCE_STARTED);
    world.timers.advance(60 * kSecond);
    CHECK(world.ask('d', "slow")->status() == GCOALESCE_STARTED);
    CHECK(world.ask('b', "few")->refused() == GCOALESCE_BUSY); // its first call still runs
}

TEST_CASE("a template's share of memory is its own: full, it fails its own streams and no other's") {
    TemplateSettings small = named("small");
    small.pool_share = 1; // of 16 MiB
    World world({TemplateSettings{}, small});
    const auto first = world.ask('a', "small");
    const auto other = world.ask('b');
    const std::string large(100 * 1024, 'x');
    world.upstream.calls[0].sent();
    world.upstream.calls[0].head(200);
    world.upstream.calls[0].bytes(sse(answer_json(large)));
    CHECK_FALSE(world.upstream.calls[0].over());
    world.upstream.calls[0].bytes(sse(answer_json(large)));
    CHECK(world.ending(*first).kind == GCOALESCE_FAILED);
    CHECK(world.ending(*first).code == GCOALESCE_NO_MEMORY);
    world.upstream.calls[1].sent();
    world.upstream.calls[1].head(200);
    for (int i = 0; i < 20; ++i) world.upstream.calls[1].bytes(sse(answer_json(large)));
    CHECK_FALSE(world.upstream.calls[1].over());
    CHECK(world.segment.events(other->answer().stream).size() == 20);
    // What the share's own streams held is given to the next one, once nobody reads it.
    world.leave(*first);
    const auto again = world.ask('c', "small");
    world.last().answer({large});
    CHECK(world.ending(*again).kind == GCOALESCE_COMPLETE);
}

TEST_CASE("the window opens for the templates that are named, and its opening warms the connection up") {
    World world({TemplateSettings{}, named("one"), named("two")});
    CHECK(world.upstream.warm_ups == 0);
    CHECK(world.coalescer->notify_on({"one"}, 4 * kSecond) == 4 * kSecond);
    CHECK(world.upstream.warm_ups == 1);
    CHECK(world.coalescer->window_remaining({"two"}) == 0);
    CHECK(world.coalescer->window_remaining({}) == 4 * kSecond);
    CHECK(world.coalescer->notify_on({"one", "nobody"}, 0).error().code == GCOALESCE_NOT_FOUND);
    const auto fresh_for = [&](char key, const std::string& of) {
        const auto asked = world.ask(key, of);
        world.last().answer({"x"});
        return to_ms(world.segment.slot(asked->answer().stream).fresh_until.load() - world.clock.monotonic());
    };
    CHECK(fresh_for('a', "one") == 5000);
    CHECK(fresh_for('b', "two") == 200);
    REQUIRE(world.coalescer->notify_off({"one"}));
    CHECK(world.coalescer->window_remaining({}) == 0);
}

TEST_CASE("T90: opening and closing the window changes what ends afterwards, and nothing that was stamped") {
    World world;
    const auto first = world.ask('a');
    world.last().answer({"x"});
    const Nanos stamped = world.segment.slot(first->answer().stream).fresh_until.load();
    REQUIRE(world.coalescer->notify_on({}, 0));
    CHECK(world.segment.slot(first->answer().stream).fresh_until.load() == stamped);
    world.timers.advance(200 * kMillisecond);
    const auto second = world.ask('a');
    CHECK(second->status() == GCOALESCE_STARTED);
    world.timers.advance(kMillisecond);
    REQUIRE(world.coalescer->notify_off({}));
    world.last().answer({"x"}); // T91: it had been open during the flight
    CHECK(world.segment.slot(second->answer().stream).fresh_until.load() == world.clock.monotonic() + 5 * kSecond);
}

// ---- upstream care -------------------------------------------------------------------------------------------------

TEST_CASE("T37: a delay that upstream names holds for the model at once, for every key, retries and newcomers alike") {
    struct Retrying : World {
        Retrying() {
            ProducerLimits limits;
            limits.retries = 2;
            coalescer = std::make_unique<Coalescer>(store, upstream, timers, nullptr, std::vector{TemplateSettings{}},
                                                    limits, CoalescerLimits{});
        }
    } world;
    const auto first = world.ask('a');
    const auto second = world.ask('b');
    REQUIRE(world.calls() == 2);
    world.upstream.calls[0].respond(429, error_json(429, "RESOURCE_EXHAUSTED", "36s"));
    // The first one waits for its own retry; whoever comes now is told the rest of the delay.
    std::vector<std::unique_ptr<Asked>> followers;
    for (int i = 0; i < 500; ++i) followers.push_back(world.ask('a'));
    for (const auto& follower : followers) CHECK(follower->status() == GCOALESCE_JOINED);
    const auto other = world.ask('c');
    CHECK(other->refused() == GCOALESCE_RATE_LIMITED);
    CHECK(other->told->error().retry_ms == 36'000);
    // Another call of the model that fails without naming a delay waits out the one that is known.
    world.upstream.calls[1].respond(503, error_json(503, "UNAVAILABLE"));
    world.timers.advance(35 * kSecond);
    CHECK(world.calls() == 2);
    world.timers.advance(kSecond);
    CHECK(world.calls() == 4);
    CHECK(world.ask('c')->status() == GCOALESCE_STARTED);
}

TEST_CASE("a caller's own key has its own quota: what upstream refuses to one key is asked with another") {
    World world;
    const auto with_key = [&](char key, std::uint64_t realm) {
        OpenRequest request = world.request(key);
        request.api_key = std::make_shared<const ApiKey>("AIzaMine");
        request.realm = realm;
        return world.ask(std::move(request));
    };
    const auto mine = with_key('a', 1);
    CHECK(world.last().call.api_key->text() == "AIzaMine");
    world.last().respond(429, error_json(429, "RESOURCE_EXHAUSTED", "36s"));
    CHECK(with_key('b', 1)->refused() == GCOALESCE_RATE_LIMITED);
    CHECK(with_key('c', 2)->status() == GCOALESCE_STARTED);
    const auto brokers = world.ask('d');
    CHECK(brokers->status() == GCOALESCE_STARTED);
    CHECK(world.last().call.api_key == nullptr);
    world.last().respond(429, error_json(429, "RESOURCE_EXHAUSTED", "36s"));
    CHECK(world.ask('e')->refused() == GCOALESCE_RATE_LIMITED);
    CHECK(with_key('f', 2)->status() == GCOALESCE_STARTED);
    SECTION("and needs none of the broker's") {
        world.coalescer->set_key_missing(true);
        CHECK(with_key('g', 3)->status() == GCOALESCE_STARTED);
        CHECK(world.ask('h')->refused() == GCOALESCE_RATE_LIMITED);
        world.timers.advance(36 * kSecond);
        CHECK(world.ask('h')->refused() == GCOALESCE_KEY_MISSING);
    }
}

// ---- what a request may ask for ------------------------------------------------------------------------------------

TEST_CASE("T94: bypass, refresh, no-store and max-age do what they say") {
    World world;
    const auto running = world.ask('a');

    OpenRequest bypass = world.request('a');
    bypass.sharing = GCOALESCE_SHARE_NOT;
    const auto alone = world.ask(std::move(bypass));
    CHECK(alone->status() == GCOALESCE_BYPASS);
    CHECK(world.ask('a')->answer().stream == running->answer().stream); // nobody joins the one that is alone

    OpenRequest refresh = world.request('a');
    refresh.sharing = GCOALESCE_SHARE_REFRESH;
    const auto newer = world.ask(std::move(refresh));
    CHECK(newer->status() == GCOALESCE_STARTED);
    CHECK(world.ask('a')->answer().stream == newer->answer().stream);
    world.upstream.calls[0].answer({"old"}); // superseded: nobody else reads it
    CHECK(world.ending(*running).reusable == 0);
    world.upstream.calls[2].answer({"new"});
    CHECK(world.ask('a')->status() == GCOALESCE_FRESH);

    world.timers.advance(100 * kMillisecond);
    OpenRequest choosy = world.request('a');
    choosy.max_age = 100 * kMillisecond;
    CHECK(world.ask(choosy)->status() == GCOALESCE_FRESH);
    choosy.max_age = 99 * kMillisecond;
    const auto younger = world.ask(choosy);
    CHECK(younger->status() == GCOALESCE_STARTED);
    choosy.max_age = -1; // a running one will do
    CHECK(world.ask(choosy)->answer().stream == younger->answer().stream);

    OpenRequest unkept = world.request('b');
    unkept.no_store = true;
    const auto first = world.ask(unkept);
    CHECK(world.ask('b')->status() == GCOALESCE_JOINED); // the running one is shared
    world.last().answer({"x"});
    CHECK(world.ending(*first).kind == GCOALESCE_COMPLETE);
    CHECK(world.ending(*first).reusable == 0);
    CHECK(world.ask('b')->status() == GCOALESCE_STARTED);
}

// ---- abandoned, cancelled, purged ----------------------------------------------------------------------------------

TEST_CASE("T70: the requester that started a call leaves, and nobody else notices") {
    TemplateSettings impatient = named("impatient");
    impatient.cancel_after = 0;
    World world({TemplateSettings{}, impatient});
    const auto first = world.ask('a', "impatient");
    const auto second = world.ask('a', "impatient");
    world.leave(*first);
    world.pass(10 * kSecond);
    CHECK_FALSE(world.last().over());
    world.last().answer({"x"});
    CHECK(world.ending(*second).kind == GCOALESCE_COMPLETE);
}

TEST_CASE("T71: an abandoned call finishes, or is cancelled after its time unless somebody comes back") {
    TemplateSettings patient = named("patient");
    patient.cancel_after = 2 * kSecond;
    World world({TemplateSettings{}, patient});
    const auto finishing = world.ask('a');
    world.leave(*finishing);
    const auto leaving = world.ask('b', "patient");
    world.leave(*leaving);
    world.pass(1900 * kMillisecond);
    CHECK_FALSE(world.last().over());
    SECTION("nobody comes") {
        world.pass(300 * kMillisecond);
        CHECK(world.last().cancelled);
        CHECK(world.ending(*leaving).kind == GCOALESCE_CANCELLED);
        CHECK(world.ending(*leaving).code == GCOALESCE_CALL_CANCELLED);
        CHECK(world.ask('b', "patient")->status() == GCOALESCE_STARTED);
    }
    SECTION("somebody comes back in time") {
        const auto back = world.ask('b', "patient");
        CHECK(back->status() == GCOALESCE_JOINED);
        world.pass(60 * kSecond);
        CHECK_FALSE(world.last().over());
    }
    CHECK_FALSE(world.upstream.calls[0].over()); // the default finishes
    world.upstream.calls[0].answer({"x"});
    CHECK(world.ending(*finishing).kind == GCOALESCE_COMPLETE);
}

TEST_CASE("T72: cancelling ends a call for all its readers, who keep what came; again it does nothing") {
    World world;
    const auto first = world.ask('a');
    const auto second = world.ask('a');
    world.last().sent();
    world.last().head(200);
    world.last().bytes(sse(answer_json("one")));
    const std::string name = to_hex(key_of('a')).substr(0, 8);
    CHECK(world.coalescer->cancel(name) == 1u);
    CHECK(world.last().cancelled);
    CHECK(world.segment.events(first->answer().stream).size() == 1);
    CHECK(world.ending(*second).kind == GCOALESCE_CANCELLED);
    CHECK(world.coalescer->cancel(name) == 0u);
    CHECK(world.ask('a')->status() == GCOALESCE_STARTED);
    CHECK(world.coalescer->cancel("abc").error().code == GCOALESCE_BAD_REQUEST);
    CHECK(world.coalescer->cancel("zzzz").error().code == GCOALESCE_BAD_REQUEST);
    CHECK(world.coalescer->cancel("0123456789").error().code == GCOALESCE_NOT_FOUND);
    CHECK(world.coalescer->cancel(to_hex(second->answer().stream_id)) == 0u); // a stream's id will do
}

TEST_CASE("what is purged is given to nobody and cannot be resumed; readers of running streams finish") {
    World world({TemplateSettings{}, named("other")}, true);
    const auto kept = world.ask('a');
    world.last().answer({"x"});
    const auto running = world.ask('b');
    const auto others = world.ask('c', "other");
    world.last().answer({"x"});
    SECTION("by key") {
        CHECK(world.coalescer->purge(GCOALESCE_PURGE_STREAM, to_hex(key_of('a'))) == 1u);
        CHECK(world.coalescer->purge(GCOALESCE_PURGE_STREAM, to_hex(key_of('b'))) == 1u);
        CHECK(world.coalescer->purge(GCOALESCE_PURGE_STREAM, "0123456789").error().code == GCOALESCE_NOT_FOUND);
    }
    SECTION("by template") {
        CHECK(world.coalescer->purge(GCOALESCE_PURGE_TEMPLATE, "default") == 2u);
    }
    SECTION("all") {
        CHECK(world.coalescer->purge(GCOALESCE_PURGE_ALL, "") == 3u);
        CHECK(world.ask('c', "other")->status() == GCOALESCE_STARTED);
    }
    CHECK(world.segment.events(kept->answer().stream).size() == 1); // who reads it still can
    CHECK(world.resume(kept->answer().stream_id, 0)->refused() == GCOALESCE_GONE);
    CHECK(world.ask('a')->status() == GCOALESCE_STARTED);
    CHECK(world.ask('b')->status() == GCOALESCE_STARTED);
    world.upstream.calls[1].answer({"one", "two"});
    CHECK(world.ending(*running).kind == GCOALESCE_COMPLETE);
    CHECK(world.ending(*running).reusable == 0);
    CHECK(world.segment.events(running->answer().stream).size() == 2);
    world.leave(*running);
    world.store.sweep();
    CHECK(world.resume(running->answer().stream_id, 0)->refused() == GCOALESCE_GONE);
}

// ---- validation and demotion ---------------------------------------------------------------------------------------

TEST_CASE("an answer with a schema is shown once it is known to hold, and reused; one that does not is never shown") {
    World world;
    OpenRequest request = world.request('a');
    request.schema = schema();
    const auto good = world.ask(request);
    world.last().sent();
    world.last().head(200);
    world.last().bytes(sse(answer_json(kGood.substr(0, 1))));
    CHECK(world.segment.events(good->answer().stream).empty());
    world.last().bytes(sse(answer_json(kGood.substr(1), "STOP")));
    world.last().done();
    CHECK(world.segment.events(good->answer().stream).size() == 2);
    CHECK(world.ending(*good).kind == GCOALESCE_COMPLETE);
    CHECK(world.ask(request)->status() == GCOALESCE_FRESH);

    request.key = key_of('b');
    const auto bad = world.ask(request);
    world.last().answer({kBad});
    CHECK(world.ending(*bad).kind == GCOALESCE_INVALID);
    CHECK(world.ending(*bad).code == GCOALESCE_SCHEMA_BROKEN);
    CHECK(world.segment.events(bad->answer().stream).empty());
    CHECK(world.ending(*bad).message.view().find("required") != std::string_view::npos);
}

TEST_CASE("T99: with live delivery the events come at once, and the ending says that they do not hold") {
    TemplateSettings live;
    live.live = true;
    World world({live});
    OpenRequest request = world.request('a');
    request.schema = schema();
    const auto asked = world.ask(request);
    world.last().answer({kBad});
    CHECK(world.segment.events(asked->answer().stream).size() == 1);
    CHECK(world.ending(*asked).kind == GCOALESCE_INVALID);
    CHECK(world.ask(request)->status() == GCOALESCE_STARTED);
}

TEST_CASE("T96: an answer that upstream cut off is what its reason says, and is not asked again") {
    World world;
    OpenRequest request = world.request('a');
    request.schema = schema();
    const auto asked = world.ask(request);
    world.last().respond(200, sse(answer_json(R"({\"a\")", "MAX_TOKENS")));
    CHECK(world.ending(*asked).kind == GCOALESCE_COMPLETE);
    CHECK(world.ending(*asked).finish_reason.view() == "MAX_TOKENS");
    CHECK(world.ending(*asked).reusable == 0);
}

TEST_CASE("T97: readers of an invalid answer ask alone, a few at a time, and share the first answer that holds") {
    TemplateSettings of;
    of.max_individual = 8;
    of.strict_individual = GENERATE(false, true);
    World world({of});
    OpenRequest request = world.request('a');
    request.schema = schema();
    std::vector<std::unique_ptr<Asked>> readers;
    for (int i = 0; i < 100; ++i) readers.push_back(world.ask(request));
    world.last().answer({kBad});
    REQUIRE(world.ending(*readers[0]).kind == GCOALESCE_INVALID);

    request.individual_of = readers[0]->answer().stream_id;
    std::vector<std::unique_ptr<Asked>> alone;
    for (int i = 0; i < 100; ++i) alone.push_back(world.ask(request));
    CHECK(world.calls() == 1 + 8);
    std::size_t answered = 0;
    for (const auto& one : alone) answered += one->told.has_value();
    CHECK(answered == 8);
    // Two fail as well: their places go to the next ones in the queue.
    world.upstream.calls[1].answer({kBad});
    world.upstream.calls[2].respond(500, error_json(500, "INTERNAL"));
    CHECK(world.calls() == 1 + 10);
    world.upstream.calls[3].answer({kGood});
    if (!of.strict_individual) {
        CHECK(world.calls() == 1 + 10);
        for (const auto& one : alone) {
            REQUIRE(one->told);
            CHECK(one->status() == GCOALESCE_INDIVIDUAL);
        }
        CHECK(alone[99]->answer().stream == alone[2]->answer().stream);
        CHECK(world.ask(request)->answer().stream == alone[2]->answer().stream);
        return;
    }
    std::size_t most = 0;
    for (std::size_t i = 4; i < world.calls(); ++i) {
        std::size_t running = 0;
        for (const auto& call : world.upstream.calls) running += !call.over();
        most = std::max(most, running);
        world.upstream.calls[i].answer({kGood});
    }
    CHECK(most == 8);
    CHECK(world.calls() == 1 + 100);
    for (const auto& one : alone) CHECK(one->status() == GCOALESCE_INDIVIDUAL);
}

TEST_CASE("who stops waiting for a call of his own is passed over, and a forged demand is like any other request") {
    TemplateSettings of;
    of.max_individual = 1;
    World world({of});
    OpenRequest request = world.request('a');
    request.schema = schema();
    const auto first = world.ask(request);
    world.last().answer({kBad});
    request.individual_of = first->answer().stream_id;
    const auto one = world.ask(request);
    const auto two = world.ask(request);
    const auto three = world.ask(request);
    REQUIRE(two->ticket != 0);
    CHECK(world.coalescer->withdraw(two->ticket));
    CHECK_FALSE(world.coalescer->withdraw(two->ticket));
    CHECK(world.store.counted(Counter::individuals_queued) == 1); // nothing of it is kept
    world.last().answer({kBad});
    CHECK_FALSE(two->told);
    CHECK(three->status() == GCOALESCE_INDIVIDUAL);
    CHECK(world.calls() == 3);
    request.individual_of = 12345;
    CHECK(world.ask(request)->status() == GCOALESCE_STARTED);
    request.key = key_of('b');
    request.individual_of = first->answer().stream_id; // of another key
    CHECK(world.ask(request)->status() == GCOALESCE_STARTED);
}

// ---- realms --------------------------------------------------------------------------------------------------------

TEST_CASE("T22: a stream of one realm is resumed by its realm alone, and to others it does not exist") {
    World world({TemplateSettings{}}, true);
    OpenRequest request = world.request('a');
    request.realm = 77;
    const auto mine = world.ask(request);
    world.last().answer({"x"});
    const StreamId id = mine->answer().stream_id;
    CHECK(world.resume(id, 0, 77)->status() == GCOALESCE_RESUMED);
    const auto theirs = world.resume(id, 0, 78);
    const auto unknown = world.resume(id + 1, 0, 78);
    CHECK(theirs->refused() == GCOALESCE_NOT_FOUND);
    CHECK(theirs->told->error().message == unknown->told->error().message);
    world.leave(*mine);
    world.lane.unpin(mine->answer().stream.slot);
    world.pass(31 * kSecond); // from the disk likewise
    CHECK(world.resume(id, 0, 78)->refused() == GCOALESCE_NOT_FOUND);
    const auto again = world.resume(id, 1, 77);
    world.wait_for(*again);
    CHECK(again->status() == GCOALESCE_RESUMED);
}

// ---- resuming, the disk, plain caching -----------------------------------------------------------------------------

TEST_CASE("T54, T55: resuming goes on where it stopped, ends at once where all was read, and names what is wrong") {
    World world;
    const auto first = world.ask('a');
    world.last().sent();
    world.last().head(200);
    world.last().bytes(sse(answer_json("one")) + sse(answer_json("two")));
    const StreamId id = first->answer().stream_id;
    const auto running = world.resume(id, 2);
    CHECK(running->status() == GCOALESCE_RESUMED);
    CHECK(running->answer().stream == first->answer().stream);
    CHECK(world.resume(id, 3)->refused() == GCOALESCE_BAD_REQUEST); // an event that there is not
    const SegmentView& view = world.store.view();
    const LogFacts logged = view.log_record(view.header().log_next.load() - 1).facts.load();
    CHECK(logged.kind == static_cast<std::uint32_t>(LogKind::resumed));
    CHECK(logged.stream_id == id);
    CHECK(logged.number == 2);
    world.last().bytes(sse(answer_json("three", "STOP")));
    world.last().done();
    CHECK(world.resume(id, 3)->status() == GCOALESCE_RESUMED);
    CHECK(world.resume(id, 4)->refused() == GCOALESCE_BAD_REQUEST);
    CHECK(world.resume(id ^ 1, 0)->refused() == GCOALESCE_NOT_FOUND);
    CHECK(world.calls() == 1); // resuming never costs one
}

TEST_CASE("a resumption is logged and counted once its reader holds the stream, and not where it came to nothing") {
    World world;
    const auto first = world.ask('a');
    world.last().answer({"one", "two"});
    const StreamId id = first->answer().stream_id;
    const auto resumptions = [&] {
        std::uint64_t logged = 0;
        const SegmentView& view = world.store.view();
        for (std::uint64_t at = 0; at < view.header().log_next.load(); ++at)
            logged += view.log_record(at).facts.load().kind == static_cast<std::uint32_t>(LogKind::resumed) ? 1 : 0;
        CHECK(world.store.counted(Counter::resumed_kept) == logged);
        return logged;
    };
    OpenRequest gone;
    gone.lane = 99; // its client has left
    gone.resume = id;
    CHECK(world.ask(std::move(gone))->refused() == GCOALESCE_NOT_FOUND);
    CHECK(resumptions() == 0);
    std::uint64_t told = 0;
    OpenRequest request;
    request.lane = 1;
    request.resume = id;
    world.coalescer->open(std::move(request), [&](const Result<OpenAnswer>& answer) {
        CHECK(answer);
        told = resumptions(); // before the reader may be seen to read
    });
    CHECK(told == 1);
}

TEST_CASE("T56, T74: a buffer is kept for its linger; after it the disk has it, or it is gone, or never was") {
    const bool on_disk = GENERATE(true, false);
    World world({TemplateSettings{}}, on_disk);
    const auto first = world.ask('a');
    world.last().answer({"one", "two"});
    const StreamId id = first->answer().stream_id;
    world.leave(*first);
    world.pass(29'900 * kMillisecond);
    const auto in_time = world.resume(id, 1);
    CHECK(in_time->status() == GCOALESCE_RESUMED);
    CHECK(world.store.counted(Counter::resumed_kept) == 1);
    world.lane.unpin(in_time->answer().stream.slot);
    world.pass(30'100 * kMillisecond); // the linger began anew
    CHECK(world.store.streams_in_use() == 0);
    const auto late = world.resume(id, 1);
    if (on_disk) {
        world.wait_for(*late);
        CHECK(late->status() == GCOALESCE_RESUMED);
        CHECK(world.segment.events(late->answer().stream) ==
              std::vector{answer_json("one"), answer_json("two", "STOP")});
        CHECK(world.ending(*late).finish_reason.view() == "STOP");
        CHECK(world.ending(*late).total_tokens == 12);
        world.lane.unpin(late->answer().stream.slot);
        world.pass(600 * kSecond);
        CHECK(world.resume(id, 1)->refused() == GCOALESCE_GONE);
    } else {
        CHECK(late->refused() == GCOALESCE_GONE);
    }
    CHECK(world.resume(id ^ 1, 1)->refused() == GCOALESCE_NOT_FOUND);
    CHECK(world.calls() == 1);
}

TEST_CASE("many who ask for one snapshot at once load it once, and share the slot") {
    World world({TemplateSettings{}}, true);
    const auto first = world.ask('a');
    world.last().answer({"x"});
    const StreamId id = first->answer().stream_id;
    world.leave(*first);
    world.pass(31 * kSecond);
    REQUIRE(world.store.streams_in_use() == 0);
    std::vector<std::unique_ptr<Asked>> all;
    for (int i = 0; i < 50; ++i) all.push_back(world.resume(id, 0));
    CHECK_FALSE(all[0]->told);
    CHECK(world.coalescer->withdraw(all[7]->ticket));
    world.wait_for(*all[49]);
    CHECK_FALSE(all[7]->told);
    for (int i = 0; i < 50; ++i) {
        if (i != 7) CHECK(all[static_cast<std::size_t>(i)]->answer().stream == all[0]->answer().stream);
    }
    CHECK(world.store.streams_in_use() == 1);
    CHECK(world.lane.pins(all[0]->answer().stream.slot) == 49);
}

TEST_CASE("after a push: sharing while it is fresh, then one's own call, then plain caching from the disk") {
    TemplateSettings of;
    of.kv_after = 30 * kSecond;
    of.kv_ttl = 600 * kSecond;
    of.linger = kSecond;
    World world({of}, true);
    REQUIRE(world.coalescer->notify_on({}, 6 * kSecond));
    const auto first = world.ask('a');
    world.last().answer({"x"});
    world.pass(4900 * kMillisecond);
    CHECK(world.ask('a')->status() == GCOALESCE_FRESH); // the window's freshness
    world.pass(200 * kMillisecond);
    const auto second = world.ask('a');
    CHECK(second->status() == GCOALESCE_STARTED); // past it, and the push is not over
    world.last().answer({"y"});
    world.pass(24'800 * kMillisecond);
    CHECK(world.ask('a')->status() == GCOALESCE_STARTED); // 29.9 s after the push
    world.last().answer({"z"});
    world.pass(300 * kMillisecond);
    const auto cached = world.ask('a'); // 30.2 s
    world.wait_for(*cached);
    CHECK((cached->status() == GCOALESCE_SNAPSHOT || cached->status() == GCOALESCE_FRESH));
    world.pass(60 * kSecond);
    const auto later = world.ask('a');
    world.wait_for(*later);
    CHECK(later->status() == GCOALESCE_SNAPSHOT);
    CHECK(world.segment.events(later->answer().stream) == std::vector{answer_json("z", "STOP")}); // the latest
    CHECK(world.calls() == 3);
    OpenRequest choosy = world.request('a');
    choosy.max_age = kSecond;
    CHECK(world.ask(choosy)->status() == GCOALESCE_STARTED);
    REQUIRE(world.coalescer->notify_on({}, kSecond)); // the next push begins it anew
    OpenRequest any = world.request('b');
    CHECK(world.ask(any)->status() == GCOALESCE_STARTED);
    world.last().answer({"b"});
    world.pass(10 * kSecond);
    CHECK(world.ask('b')->status() == GCOALESCE_STARTED);
}

TEST_CASE("an answer that is still fresh is read from the disk when its slot was needed, and by the next broker") {
    TemplateSettings of;
    of.ttl_idle = 60 * kSecond;
    World world({of}, true);
    const auto first = world.ask('a');
    world.last().answer({"x"});
    REQUIRE(world.snapshots->flush(60 * kSecond));
    // The next broker: another segment, the same directory.
    world.coalescer.reset();
    world.snapshots.reset();
    MemorySegment next(world.clock, {.slots = 16, .templates = {of}});
    LanePort port;
    port.mapping = anonymous_memory(lane_bytes(16));
    port.send_wake = [] { return true; };
    next.store().add_lane(1, std::move(port));
    world.open_snapshots();
    Coalescer coalescer(next.store(), world.upstream, world.timers, world.snapshots.get(), {of}, {}, {});
    const auto ask = [&](OpenRequest request) {
        auto asked = std::make_unique<Asked>();
        request.settings = coalescer.settings("default");
        coalescer.open(std::move(request), [to = asked.get()](const Result<OpenAnswer>& told) { to->told = told; });
        world.loop.until([&] { return asked->told.has_value(); });
        return asked;
    };
    OpenRequest request;
    request.lane = 1;
    request.body = std::make_shared<const std::string>("{}");
    request.key = key_of('a');
    CHECK(ask(request)->status() == GCOALESCE_SNAPSHOT);
    world.timers.advance(61 * kSecond);
    CHECK(ask(request)->status() == GCOALESCE_STARTED);
    CHECK(world.calls() == 2);
}

TEST_CASE("the window outlives the broker") {
    World world({TemplateSettings{}, named("one")}, true);
    REQUIRE(world.coalescer->notify_on({"one"}, 60 * kSecond));
    REQUIRE(world.snapshots->flush(60 * kSecond));
    world.coalescer.reset();
    world.snapshots.reset();
    world.timers.advance(20 * kSecond);
    world.open_snapshots();
    const Coalescer coalescer(world.store, world.upstream, world.timers, world.snapshots.get(),
                              {TemplateSettings{}, named("one")}, {}, {});
    CHECK(coalescer.window_remaining({"one"}) == 40 * kSecond);
    CHECK(coalescer.window_remaining({"default"}) == 0);
}

TEST_CASE("T92: an hour's step of the wall clock, forth or back, changes no freshness, no linger and no window") {
    const Nanos step = GENERATE(3600, -3600) * kSecond;
    TemplateSettings of;
    of.ttl_idle = 10 * kSecond;
    World world({of}, true);
    REQUIRE(world.coalescer->notify_on({}, 40 * kSecond));
    const auto first = world.ask('a');
    world.clock.step_wall(step); // in its flight
    CHECK(world.ask('a')->status() == GCOALESCE_JOINED);
    world.lane.unpin(first->answer().stream.slot);
    world.last().answer({"x"});
    const StreamId id = first->answer().stream_id;
    world.clock.step_wall(-2 * step); // and when it is over
    CHECK(world.ask('a')->status() == GCOALESCE_FRESH);
    world.lane.unpin(first->answer().stream.slot);
    world.leave(*first);
    CHECK(to_ms(world.coalescer->window_remaining({}).value()) == 40'000);
    world.clock.step_wall(step);
    world.pass(29'900 * kMillisecond);
    CHECK(world.store.streams_in_use() == 1); // nothing is lost
    CHECK(to_ms(world.coalescer->window_remaining({}).value()) == 10'100);
    world.pass(200 * kMillisecond);
    CHECK(world.store.streams_in_use() == 0); // nothing is immortal
    CHECK(world.snapshots->known(id) == Snapshots::Known::here);
    CHECK(world.ask('a')->status() == GCOALESCE_STARTED);
    world.last().answer({"y"});
    world.pass(600 * kSecond);
    CHECK(world.snapshots->known(id) == Snapshots::Known::gone);
    CHECK(world.coalescer->window_remaining({}) == 0);
}

TEST_CASE("what is purged while it is being loaded is given to nobody") {
    TemplateSettings of;
    of.linger = kSecond;
    World world({of}, true);
    const auto first = world.ask('a');
    world.last().answer({"x"});
    const StreamId id = first->answer().stream_id;
    world.leave(*first);
    world.pass(2 * kSecond); // out of the segment, and on the disk
    REQUIRE(world.store.streams_in_use() == 0);
    const auto resumed = world.resume(id, 0);
    REQUIRE_FALSE(resumed->told);
    CHECK(world.coalescer->purge(GCOALESCE_PURGE_ALL, "") == 1u);
    world.wait_for(*resumed);
    CHECK(resumed->refused() == GCOALESCE_GONE);
    CHECK(world.resume(id, 0)->refused() == GCOALESCE_GONE);
}

// ---- reloading -----------------------------------------------------------------------------------------------------

TEST_CASE("a reload keeps what has not changed, closes what has, and refuses what it cannot place") {
    World world({TemplateSettings{}, named("one"), named("two")});
    const auto same = world.ask('a', "one");
    const auto changed = world.ask('b', "two");
    TemplateSettings longer = named("one");
    longer.ttl_idle = 9 * kSecond;
    TemplateSettings another = named("two");
    another.revision = 2;
    REQUIRE(world.coalescer->set_templates({TemplateSettings{}, longer, another, named("three")}));
    CHECK(world.ask('a', "one")->status() == GCOALESCE_JOINED);
    CHECK(world.ask('b', "two")->status() == GCOALESCE_STARTED); // in life a changed revision changes the key, too
    CHECK(world.ask('c', "three")->status() == GCOALESCE_STARTED);
    world.upstream.calls[1].answer({"x"});
    CHECK(world.ending(*changed).kind == GCOALESCE_COMPLETE);
    CHECK(world.ending(*changed).reusable == 0);

    std::vector<TemplateSettings> many{TemplateSettings{}};
    for (int i = 0; i < 200; ++i) many.push_back(named("t" + std::to_string(i)));
    CHECK(world.coalescer->set_templates(many).error().code == GCOALESCE_BAD_REQUEST);
    CHECK(world.coalescer->settings("one") != nullptr);
    REQUIRE(world.coalescer->set_templates({TemplateSettings{}}));
    CHECK(world.coalescer->settings("one") == nullptr);
    world.upstream.calls[0].answer({"x"});
    CHECK(world.ending(*same).kind == GCOALESCE_COMPLETE); // who reads it still does
}

// ---- accounting ----------------------------------------------------------------------------------------------------

TEST_CASE("T100: what was paid and what was spared is counted apart, and goes on across restarts") {
    World world({TemplateSettings{}}, true);
    const auto count = [&](TemplateCounter counter) { return world.store.counted(0, counter); };
    REQUIRE(world.coalescer->notify_on({}, 6 * kSecond));
    const auto leader = world.ask('a');
    for (int i = 0; i < 9; ++i) CHECK(world.ask('a')->status() == GCOALESCE_JOINED);
    world.last().answer({"x"}); // 7 prompt and 5 answer tokens
    for (int i = 0; i < 2; ++i) CHECK(world.ask('a')->status() == GCOALESCE_FRESH);
    world.timers.advance(6 * kSecond);
    const auto failing = world.ask('b');
    world.last().respond(200, sse(answer_json("half"))); // cut short: what it produced was paid for
    CHECK(world.ending(*failing).kind == GCOALESCE_TRUNCATED);
    CHECK(count(TemplateCounter::requests_started) == 2);
    CHECK(count(TemplateCounter::requests_joined) == 9);
    CHECK(count(TemplateCounter::requests_fresh) == 2);
    CHECK(count(TemplateCounter::prompt_tokens_paid) == 14);
    CHECK(count(TemplateCounter::answer_tokens_paid) == 10);
    CHECK(count(TemplateCounter::prompt_tokens_avoided) == 77);
    CHECK(count(TemplateCounter::answer_tokens_avoided) == 55);
    CHECK(count(TemplateCounter::requests_0s) == 12);
    CHECK(count(TemplateCounter::coalesced_0s) == 11);
    CHECK(count(TemplateCounter::requests_5s) == 1);
    CHECK(count(TemplateCounter::coalesced_5s) == 0);
    world.pass(2 * kSecond);
    REQUIRE(world.snapshots->flush(60 * kSecond));
    world.coalescer.reset();
    world.snapshots.reset();
    MemorySegment next(world.clock, {.slots = 16});
    world.open_snapshots();
    Coalescer coalescer(next.store(), world.upstream, world.timers, world.snapshots.get(), {TemplateSettings{}}, {},
                        {});
    world.timers.advance(2 * kSecond);
    coalescer.beat();
    CHECK(next.store().counted(0, TemplateCounter::requests_joined) == 9);
    CHECK(next.store().counted(0, TemplateCounter::prompt_tokens_avoided) == 77);
    coalescer.beat(); // once
    CHECK(next.store().counted(0, TemplateCounter::requests_joined) == 9);
}

TEST_CASE("T100: what tools gave a model to read counts as its prompt") {
    World world;
    const auto leader = world.ask('a');
    CHECK(world.ask('a')->status() == GCOALESCE_JOINED);
    world.last().respond(200, sse(R"({"candidates":[{"content":{"parts":[{"text":"x"}]},"finishReason":"STOP"}],)"
                                  R"("usageMetadata":{"promptTokenCount":40,"cachedContentTokenCount":30,)"
                                  R"("toolUsePromptTokenCount":200,"candidatesTokenCount":5,"totalTokenCount":245}})"));
    const SlotEnding ending = world.ending(*leader);
    CHECK(ending.kind == GCOALESCE_COMPLETE);
    CHECK(ending.prompt_tokens == 240);
    CHECK(ending.prompt_tokens + ending.thought_tokens + ending.answer_tokens == ending.total_tokens);
    const auto count = [&](TemplateCounter counter) { return world.store.counted(0, counter); };
    CHECK(count(TemplateCounter::prompt_tokens_paid) == 210);
    CHECK(count(TemplateCounter::cached_tokens_paid) == 30);
    CHECK(count(TemplateCounter::prompt_tokens_avoided) == 210);
    CHECK(count(TemplateCounter::cached_tokens_avoided) == 30);
    CHECK(world.store.counted(Counter::tokens_prompt) == 240);
}
