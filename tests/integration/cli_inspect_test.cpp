// keys, dump and stats: what they show of a segment whose every word is known, since the test itself wrote it.
#include <catch2/catch.hpp>
#include <csignal>
#include <thread>

#include "base/ids.hpp"
#include "base/sha256.hpp"
#include "cli/inspect.hpp"
#include "tests/integration/cli_segment.hpp"
#include "tests/support/memory_segment.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;

TEST_CASE("keys --json tells each stream in the words of the segment") {
    Segment segment;
    const Key kept = key_of({0xaa, 0xbb, 0xcc, 0xdd, 0xee}), running = key_of({0x11, 0x22, 0x33, 0x44});
    const StreamRef ended = segment.open(kept, 0xfeed, {text_event("one"), text_event("two")});
    segment.end(ended, complete(), 3600 * kSecond);
    segment.open(running, 0xbeef, {text_event("half")});

    const Ran ran = segment.run({"keys", "--json"});
    CHECK(ran.code == 0);
    CHECK(ran.err.empty());
    REQUIRE(ran.lines().size() == 1);
    const auto json = ran.json();
    CHECK(json["version"] == 1);
    CHECK(json["broker"]["pid"] == ::getpid());
    CHECK(json["broker"]["state"] == "serving");
    CHECK(json["broker"]["instance"] == "scratch");
    CHECK(json["broker"]["segment"] == "/dev/shm" + segment.directory.segment_name());
    CHECK(json["broker"]["heartbeat_age_ms"].is_number_integer());
    REQUIRE(json["keys"].size() == 2);

    const auto& newest = json["keys"][0];
    CHECK(newest["key"] == to_hex(running));
    CHECK(newest["stream_id"] == "000000000000beef");
    CHECK(newest["template"] == "default");
    CHECK(newest["model"] == "gemini-2.5-flash");
    CHECK(newest["method"] == "stream");
    CHECK(newest["state"] == "in_flight");
    CHECK(newest["joinable"] == true);
    CHECK(newest["events"] == 1);
    CHECK(newest["fresh_for_ms"] == 0);
    CHECK(newest["first_event_ms"].is_number_integer());
    CHECK_FALSE(newest.contains("finish_reason"));

    const auto& oldest = json["keys"][1];
    CHECK(oldest["key"] == to_hex(kept));
    CHECK(oldest["state"] == "complete");
    CHECK(oldest["joinable"] == true);
    CHECK(oldest["evicted"] == false);
    CHECK(oldest["events"] == 2);
    CHECK(oldest["event_bytes"] == text_event("one").size() + text_event("two").size());
    CHECK(oldest["fresh_for_ms"] > 3'000'000);
    CHECK(oldest["reusable"] == true);
    CHECK(oldest["finish_reason"] == "STOP");
    CHECK(oldest["code"] == "ok");
    CHECK(oldest["total_tokens"] == 12);
}

TEST_CASE("keys prints a table on standard output, and of the broker on standard error") {
    Segment segment;
    const StreamRef bad = segment.open(key_of({0xab, 0xcd, 0xef, 0x01}), 1, {text_event("half")});
    SlotEnding ending{};
    ending.kind = GCOALESCE_TRUNCATED;
    ending.code = GCOALESCE_CUT_SHORT;
    segment.end(bad, ending);
    const StreamRef lost = segment.open(key_of({0x22}), 2, {text_event("gone")});
    segment.end(lost, complete(), kSecond);

    const Ran ran = segment.run_after_evicting(lost, {"keys"});
    CHECK(ran.code == 0);
    CHECK(ran.says("broker " + std::to_string(::getpid()) + " is serving"));
    const std::vector<std::string> lines = ran.lines();
    REQUIRE(lines.size() == 3);
    CHECK(lines[0].starts_with("KEY       STREAM    STATE"));
    CHECK(lines[1].starts_with("22000000  00000000  evicted"));
    CHECK(lines[2].starts_with("abcdef01  00000000  truncated"));

    SpawnOptions narrow; // meant for a terminal: a pipe gets all of it
    narrow.env = {"COLUMNS=20"};
    CHECK(run(segment.command({"keys"}), narrow).lines()[0].ends_with("MODEL"));
}

TEST_CASE("keys of an idle broker is a title and nothing else, and an empty list") {
    const Segment segment;
    CHECK(segment.run({"keys"}).lines().size() == 1);
    CHECK(segment.run({"keys", "--json"}).json()["keys"] == nlohmann::json::array());
}

TEST_CASE("10: what a dead broker left is shown, it is called dead, and the exit code is 3") {
    Segment segment;
    segment.open(key_of({0xab, 0xcd, 0xef}), 7, {text_event("left "), text_event("behind")});
    segment.broker.die();

    const Ran keys = segment.run({"keys"});
    CHECK(keys.code == 3);
    CHECK(keys.says("is dead since"));
    REQUIRE(keys.lines().size() == 2);
    CHECK(keys.lines()[1].starts_with("abcdef00  00000000  in_flight"));
    const Ran json = segment.run({"keys", "--json"});
    CHECK(json.code == 3);
    CHECK(json.json()["broker"]["state"] == "dead");
    CHECK(json.json()["keys"].size() == 1);

    const Ran dump = segment.run({"dump", "abcd"});
    CHECK(dump.code == 3);
    CHECK(dump.out == "left behind");
    const Ran followed = segment.run({"dump", "--follow", "abcd"});
    CHECK(followed.code == 8);
    CHECK(followed.out == "left behind");
    CHECK(followed.says("the broker died"));
    CHECK(segment.run({"stats"}).code == 3);
}

TEST_CASE("a broker whose heart stands still is unresponsive, not dead") {
    Segment segment;
    segment.broker.stop_heartbeat();
    const Mapping mapping = segment.writable();
    reinterpret_cast<Header*>(mapping.data())->heartbeat_ns = system_clock().monotonic() - 10 * kSecond;
    const Ran ran = segment.run({"keys", "--json"});
    CHECK(ran.code == 3);
    CHECK(ran.says("is unresponsive, heartbeat 10."));
    CHECK(ran.json()["broker"]["state"] == "unresponsive");
}

TEST_CASE("16b: no broker, no permission and another layout are three sentences and three exit codes") {
    for (const char* name : {"keys", "stats"}) {
        const ScratchInstance nobody;
        const Ran absent = run(command(*nobody, {name}));
        CHECK(absent.code == 3);
        CHECK(absent.out.empty());
        CHECK(absent.err.starts_with("gcoalesce: no broker of instance \"scratch\" has run in "));
        CHECK(std::count(absent.err.begin(), absent.err.end(), '\n') == 1);

        Segment segment;
        reinterpret_cast<Prefix*>(segment.writable().data())->layout_major = 99;
        const Ran other = segment.run({name});
        CHECK(other.code == 9);
        CHECK(other.out.empty());
        CHECK(other.says("has layout 99.0, this program reads layout 1.x"));

        // Root may enter any directory, unless it has laid that power down.
        std::vector<std::string> powerless = segment.command({name});
        if (::geteuid() == 0)
            powerless.insert(powerless.begin(), {"setpriv", "--bounding-set", "-dac_override,-dac_read_search"});
        ::chmod(segment.directory->runtime_dir.c_str(), 0);
        const Ran refused = run(powerless);
        ::chmod(segment.directory->runtime_dir.c_str(), 0700);
        CHECK(refused.code == 1);
        CHECK(refused.out.empty());
        CHECK(refused.says("no permission to enter"));
    }
}

TEST_CASE("gcoalesce --version tells this program's versions, and with -v the broker's") {
    const Segment segment;
    const Ran own = segment.run({"--version"});
    CHECK(own.out.starts_with("gcoalesce 0."));
    CHECK(own.lines().size() == 1);
    const Ran both = segment.run({"-v", "--version"});
    CHECK(both.code == 0);
    REQUIRE(both.lines().size() == 2);
    CHECK(both.lines()[1].starts_with("gcoalesced "));
    CHECK(both.lines()[1].ends_with("serving"));
}

TEST_CASE("errors of commands with --json are one JSON object on standard error") {
    const ScratchInstance nobody;
    const Ran ran = run(command(*nobody, {"keys", "--json"}));
    CHECK(ran.code == 3);
    CHECK(nlohmann::json::parse(ran.err)["error"]["code"] == "absent");
}

TEST_CASE("dump shows a stream in each form") {
    Segment segment;
    const std::string thought =
        R"({"candidates":[{"content":{"parts":[{"text":"hm","thought":true}]}}], "odd" : 1.50})";
    const std::string broken = "{\"candidates\":\n[{\"content\":{\"parts\":[{\"text\":\" there\"}]}}]}";
    const StreamRef stream =
        segment.open(key_of({0xab, 0xcd, 0xef}), 0x9f3c2a71d04b55e8, {thought, text_event("hello"), broken});
    segment.end(stream, complete(), kSecond);

    const Ran text = segment.run({"dump", "abcdef"});
    CHECK(text.code == 0);
    CHECK(text.out == "hello there");
    CHECK(text.err.empty());
    CHECK(segment.run({"dump", "ABCDEF"}).out == "hello there");
    CHECK(segment.run({"dump", "9f3c"}).out == "hello there"); // the stream's id
    CHECK(segment.run({"dump", "9f3c2a71d04b55e8", "--from", "3"}).out == " there");

    CHECK(segment.run({"dump", "9f3c", "--format", "raw"}).out ==
          thought + "\n" + text_event("hello") + "\n" + broken + "\n");
    CHECK(segment.run({"dump", "9f3c", "--format", "sse"}).out.starts_with("data: " + thought + "\r\n\r\ndata: "));

    const Ran json = segment.run({"dump", "9f3c", "--format", "json", "--from", "2"});
    REQUIRE(json.lines().size() == 3);
    CHECK(json.lines()[0] == "{\"number\":2,\"data\":" + text_event("hello") + "}");
    const auto ending = nlohmann::json::parse(json.lines()[2])["ending"];
    CHECK(ending["kind"] == "complete");
    CHECK(ending["finish_reason"] == "STOP");
    CHECK(ending["events"] == 3);
}

TEST_CASE("dump tells how a stream ended that did not end well") {
    Segment segment;
    const StreamRef stream = segment.open(key_of({0xab, 0xcd}), 5, {text_event("half")});
    SlotEnding ending{};
    ending.kind = GCOALESCE_TRUNCATED;
    ending.code = GCOALESCE_CUT_SHORT;
    ending.message.assign("no finish reason");
    segment.end(stream, ending);
    const Ran ran = segment.run({"dump", "abcd"});
    CHECK(ran.code == 0);
    CHECK(ran.out == "half");
    CHECK(ran.err == "gcoalesce: the stream ended truncated (cut_short) after 1 event: no finish reason\n");
}

TEST_CASE("dump wants a name that fits one stream, and lists them where it fits several") {
    Segment segment;
    segment.open(key_of({0xab, 0xcd, 0x01}), 0x1111000000000000, {text_event("first")});
    segment.open(key_of({0xab, 0xcd, 0x02}), 0x2222000000000000, {text_event("second")});
    const StreamRef old = segment.open(key_of({0x77, 0x77, 0x77}), 3, {text_event("old")});
    segment.end(old, complete());
    segment.open(key_of({0x77, 0x77, 0x77}), 4, {text_event("new")});

    const Ran several = segment.run({"dump", "abcd"});
    CHECK(several.code == 1);
    CHECK(several.out.empty());
    CHECK(several.says("\"abcd\" fits 2 streams"));
    CHECK(several.says(to_hex(key_of({0xab, 0xcd, 0x01}))));
    CHECK(several.says("2222000000000000"));
    CHECK(segment.run({"dump", "abcd02"}).out == "second");
    CHECK(segment.run({"dump", "777777"}).out == "new"); // one key, its newest stream

    const Ran none = segment.run({"dump", "dead"});
    CHECK(none.code == 1);
    CHECK(none.says("no stream's key or id begins with \"dead\""));
    CHECK(segment.run({"dump", "abc"}).code == 2);
    CHECK(segment.run({"dump", "key1"}).code == 2);
    CHECK(segment.run({"dump"}).code == 2);
    CHECK(segment.run({"dump", "abcd", "--format", "xml"}).code == 2);
    const Ran zero = segment.run({"dump", "abcd", "--from", "0"});
    CHECK(zero.code == 2);
    CHECK(zero.err == "gcoalesce dump: --from: events are numbered from 1, found \"0\"\n"
                      "try 'gcoalesce dump --help'\n");
}

TEST_CASE("dump of a running stream shows what there is, and with --follow the rest as it comes") {
    Segment segment;
    const StreamRef stream = segment.open(key_of({0xab, 0xcd}), 5, {text_event("one")});
    const Ran now = segment.run({"dump", "abcd"});
    CHECK(now.code == 0);
    CHECK(now.out == "one");
    CHECK(now.says("in flight, 1 event so far"));

    Process follower(segment.command({"dump", "abcd", "--follow", "--format", "raw"}));
    CHECK(follower.read_line() == text_event("one"));
    segment.append(stream, text_event("two"));
    CHECK(follower.read_line() == text_event("two"));
    segment.end(stream, complete());
    CHECK(follower.wait() == 0);
}

TEST_CASE("dump --follow of a broker that dies says that the rest will not come") {
    Segment segment;
    segment.open(key_of({0xab, 0xcd}), 5, {text_event("one")});
    Process follower(segment.command({"dump", "abcd", "--follow", "--format", "raw"}));
    CHECK(follower.read_line() == text_event("one"));
    segment.broker.die();
    CHECK(follower.wait() == 8);
    CHECK(follower.err().find("the rest of the stream will not come") != std::string::npos);
}

TEST_CASE("dump of an evicted stream says that its events are gone") {
    Segment segment;
    const StreamRef stream = segment.open(key_of({0xab, 0xcd}), 5, {text_event("one")});
    segment.end(stream, complete(), kSecond);
    const Ran ran = segment.run_after_evicting(stream, {"dump", "abcd"});
    CHECK(ran.code == 1);
    CHECK(ran.out.empty());
    CHECK(ran.says("have left the segment"));
}

TEST_CASE("stats shows counters by the names in the segment, latencies and distinct errors") {
    Segment segment;
    segment.broker.with_store([](Store& store) {
        store.count(Counter::requests_joined, 41);
        for (int i = 0; i < 100; ++i) store.count_join_time(0, i < 98 ? 100'000 : 3'000'000);
        store.note_error(GCOALESCE_RATE_LIMITED, 429, "slow\tdown");
        store.note_error(GCOALESCE_RATE_LIMITED, 429, "slow\tdown");
    });
    { // as a newer broker would
        const Mapping mapping = segment.writable();
        const Header& header = *reinterpret_cast<const Header*>(mapping.data());
        auto* counters = reinterpret_cast<CounterEntry*>(mapping.data() + header.counters.offset);
        counters[0].text.name.assign("brand_new");
        counters[0].text.help.assign("something that this program never heard of");
    }
    const auto json = segment.run({"stats", "--json"}).json();
    CHECK(json["version"] == 1);
    CHECK(json["broker"]["state"] == "serving");
    CHECK(json["counters"]["requests_joined"]["value"] == 41);
    CHECK(json["counters"]["requests_joined"]["unit"] == "requests");
    CHECK(json["counters"]["requests_joined"]["kind"] == "counter");
    CHECK(json["counters"]["clients_attached"]["kind"] == "gauge");
    CHECK(json["counters"]["brand_new"]["help"] == "something that this program never heard of");
    const auto& join = json["templates"][0]["join"];
    CHECK(json["templates"][0]["id"] == "default");
    CHECK(join["count"] == 100);
    CHECK(join["mean_us"] == 158);
    CHECK(join["p50_us"] >= 64);
    CHECK(join["p50_us"] <= 128);
    CHECK(join["p99_us"] >= 2048);
    CHECK(join["p99_us"] <= 4096);
    REQUIRE(json["errors"].size() == 1);
    CHECK(json["errors"][0]["code"] == "rate_limited");
    CHECK(json["errors"][0]["count"] == 2);
    CHECK(json["errors"][0]["upstream_status"] == 429);

    const Ran table = segment.run({"stats"});
    CHECK(table.code == 0);
    CHECK(table.err.empty());
    CHECK(table.out.find("requests that joined a running stream") != std::string::npos);
    CHECK(table.out.find("brand_new") != std::string::npos);
    CHECK(table.out.find("slow\\tdown") != std::string::npos);
}

TEST_CASE("an inspector beside a broker that recycles its slots never shows half of one stream and half of another") {
    MemorySegmentOptions options;
    options.slots = 1; // each stream in the place of the one before
    MemorySegment segment(system_clock(), options);
    Store& store = segment.store();
    std::atomic<bool> stop{false};
    std::thread broker([&] {
        for (StreamId id = 1; !stop; ++id) {
            StreamOpening opening;
            opening.key.fill(static_cast<std::uint8_t>(id));
            opening.stream_id = id;
            opening.model = "gemini-" + std::to_string(id);
            const StreamRef stream = store.open(opening, true).value();
            SlotEnding ending = complete();
            ending.total_tokens = static_cast<std::int64_t>(id);
            store.end(stream, ending, 0);
            store.retire(stream);
        }
    });
    std::uint64_t seen = 0, torn = 0;
    while (seen < 20'000) {
        const auto facts = cli::stream_facts(store.view(), 0);
        if (!facts) continue;
        ++seen;
        const StreamId id = facts->opening.stream_id;
        const bool whole = facts->key[0] == static_cast<std::uint8_t>(id) && facts->key[31] == facts->key[0] &&
                           facts->opening.model.view() == "gemini-" + std::to_string(id) &&
                           (facts->in_flight || facts->ending.total_tokens == static_cast<std::int64_t>(id));
        torn += whole ? 0 : 1;
    }
    stop = true;
    broker.join();
    CHECK(torn == 0);
}
