// gcoalesce key: what it explains is what the broker does.
#include <catch2/catch.hpp>
#include <csignal>

#include "base/canonical_json.hpp"
#include "base/ids.hpp"
#include "protocol/key.hpp"
#include "tests/integration/cli_support.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;

namespace {

Ran run_with(const World& world, const std::string& name, std::vector<std::string> request,
             const std::vector<std::string>& flags = {"--json"}) {
    request.insert(request.begin(), name);
    request.insert(request.end(), flags.begin(), flags.end());
    return world.run(request);
}

nlohmann::json explained(const World& world, const std::vector<std::string>& request) {
    const Ran ran = run_with(world, "key", request);
    CHECK(ran.code == 0);
    CHECK(ran.err.empty());
    return ran.json();
}

constexpr const char* kNews = R"({"model": "gemini-2.5-flash", "prompt": "On {{topic}} in {{tone}}",
    "variables": {"topic": {"normalize": ["lowercase", "trim"]}, "tone": {"default": "prose"}}})";
constexpr const char* kOwn = R"({"model": "gemini-2.5-pro", "prompt": "For {{whom}}", "variables": {"whom": {}},
    "realm": "token", "explicit_keys": true})";

} // namespace

TEST_CASE("the key that key prints is the broker's, for whole requests, templates, realms and explicit keys") {
    const TemplateDirectory directory;
    directory.write("news.json", kNews);
    directory.write("own.json", kOwn);
    directory.write("default.json", R"({"realm": "token", "explicit_keys": true})");
    const TemporaryFile body(R"( {"generationConfig": {}, "tools": [], "contents": [{"parts": [{"text": "a\/b"}]}],
        "temperature": 1.0} )");
    const std::vector<std::vector<std::string>> requests{
        {"Why?"},
        {"Why?", "--system", "Be brief."},
        {"Why?", "-m", "models/gemini-2.5-pro"},
        {"Why?", "--no-stream"},
        {"Why?", "--realm", "red"},
        {"Why?", "--explicit-key", "mine"},
        {"--request", body.path()},
        {"-t", "news", "--var", "topic=Rain"},
        {"-t", "news", "--var", "topic=Rain", "--var", "tone=verse", "--no-stream"},
        {"-t", "own", "--var", "whom=Ann"},
        {"-t", "own", "--var", "whom=Ann", "--realm", "red"},
        {"-t", "own", "--var", "whom=Ann", "--realm", "red", "--explicit-key", "mine"},
    };
    // default.json brings a revision of its own; without it the built-in one is in force.
    const World with_templates({"--templates", directory.path()}), bare;
    for (const World* world : {&with_templates, &bare}) {
        std::vector<std::string> keys;
        for (const std::vector<std::string>& request : requests) {
            const bool known = world == &with_templates || (request[0] != "-t" && request.back() != "mine");
            if (!known) continue;
            CAPTURE(request);
            const auto before = explained(*world, request);
            const std::string key = before["key"];
            const bool shared = std::ranges::find(keys, key) != keys.end(); // a realm that the bare one does not heed
            CHECK(before["now"]["verdict"] == (shared ? "hit" : "start"));
            const auto asked = run_with(*world, "ask", request).json();
            CHECK(asked["key"] == key);
            CHECK(asked["status"] == (shared ? "fresh" : "started"));
            const auto listed = world->run({"keys", "--json"}).json()["keys"];
            CHECK(std::ranges::any_of(listed, [&](const auto& one) { return one["key"] == key; }));
            const auto after = explained(*world, request);
            CHECK(after["key"] == key);
            CHECK(after["now"]["verdict"] == "hit");
            CHECK(after["now"]["stream_id"] == asked["stream_id"]);
            CHECK(after["now"]["fresh_for_ms"] > 0);
            if (!shared) keys.push_back(key);
        }
        CHECK(keys.size() == (world == &bare ? 5 : requests.size()));
    }
}

TEST_CASE("key explains field by field what goes into the key, and what the canonical form changed") {
    const World world;
    const std::string canonical =
        R"({"contents":[{"parts":[{"text":"Hi."}],"role":"user"}],"generationConfig":{"temperature":5e-1}})";
    const TemporaryFile body(
        R"({"generationConfig": {"temperature": 0.5}, "tools": [], "contents": [{"parts": [{"text": "Hi."}]}]})");
    KeyParts parts;
    parts.model = "gemini-2.5-flash";
    parts.asked = canonical;
    const std::string key = to_hex(compute_key(parts));
    const Ran text = world.run({"key", "--request", body.path()});
    CHECK(text.code == 0);
    CHECK(text.err.empty());
    CHECK(text.out == "encoding   gcoalesce key 1\n"
                      "realm      everyone\n"
                      "template   default, revision 0000000000000001\n"
                      "model      gemini-2.5-flash\n"
                      "method     stream (streamGenerateContent)\n"
                      "asked      the body below, 95 bytes\n"
                      "body       " +
                          canonical +
                          "\n"
                          "           left out, since empty: /tools\n"
                          "           filled in: /contents/0/role (\"user\")\n"
                          "           put in order: the members of 1 object\n"
                          "           in one spelling: space, escapes and numbers\n"
                          "key        " +
                          key +
                          "\n"
                          "now        would start a call: no stream in the segment has this key; unless the broker has "
                          "its answer on disk\n");

    const auto json = explained(world, {"--request", body.path()});
    CHECK(json["version"] == 1);
    CHECK(json["key"] == key);
    CHECK(json["parts"] == nlohmann::json({{"encoding", "gcoalesce key 1"},
                                           {"realm", nullptr},
                                           {"template", "default"},
                                           {"revision", "0000000000000001"},
                                           {"model", "gemini-2.5-flash"},
                                           {"method", "stream"},
                                           {"explicit_key", nullptr},
                                           {"body", canonical}}));
    CHECK(json["changes"] == nlohmann::json({{"left_out", {"/tools"}},
                                             {"filled_in", {"/contents/0/role"}},
                                             {"normalised", nlohmann::json::array()},
                                             {"sorted_objects", 1},
                                             {"respelled", true}}));

    const TemporaryFile same(canonical);
    const auto none = explained(world, {"--request", same.path()});
    CHECK(none["key"] == key);
    CHECK(none["changes"]["left_out"].empty());
    CHECK(none["changes"]["filled_in"].empty());
    CHECK(none["changes"]["sorted_objects"] == 0);
    CHECK(world.run({"key", "Hi.", "--realm", "red"})
              .out.find("realm      everyone: the template keeps no realms apart, --realm does not count\n") !=
          std::string::npos);
}

TEST_CASE("of a template key tells the variables, normalised, with defaults, and the realm or the explicit key") {
    const TemplateDirectory directory;
    directory.write("news.json", kNews);
    directory.write("own.json", kOwn);
    const World world({"--templates", directory.path()});
    const auto news = explained(world, {"-t", "news", "--var", "topic= Rain "});
    CHECK(news["parts"]["template"] == "news");
    CHECK(news["parts"]["model"] == "gemini-2.5-flash");
    CHECK(news["parts"]["variables"] == R"({"tone":"prose","topic":"rain"})");
    CHECK_FALSE(news["parts"].contains("body"));
    CHECK(news["changes"]["filled_in"] == nlohmann::json({"tone"}));
    CHECK(news["changes"]["normalised"] == nlohmann::json({"topic"}));
    CHECK(news["parts"]["revision"] ==
          world.run({"templates", "show", "news", "--json"}).json()["template"]["revision"]);

    const Ran own = world.run({"key", "-t", "own", "--var", "whom=Ann", "--realm", "red", "--explicit-key", "a\nb"});
    CHECK(own.code == 0);
    CHECK(own.lines()[1] == "realm      red");
    CHECK(own.lines()[3] == "model      gemini-2.5-pro");
    CHECK(own.lines()[5] == "asked      explicit key \"a\\nb\", in place of the variables");
    CHECK(own.lines()[6] == "variables  {\"whom\":\"Ann\"}");
    CHECK(world.run({"key", "-t", "own", "--var", "whom=Ann"}).lines()[1] ==
          "realm      none given: shared with those who give none");
}

TEST_CASE("key says whether the request would join, hit or start, and why") {
    World world({"--ttl-idle", "10min"});
    const auto now = [&](const std::string& prompt) { return explained(world, {prompt})["now"]; };
    const std::string held = "Slowly. [sim events=3 hold-after=2]";
    CHECK(now(held)["verdict"] == "start");
    Process reader(world.command({"ask", "--events", held}));
    reader.read_line();
    reader.read_line();
    // The reader is counted at the broker's next beat.
    REQUIRE(eventually([&] { return now(held)["why"].get<std::string>().ends_with("with 2 events and 1 reader"); }));
    const auto join = now(held);
    CHECK(join["verdict"] == "join");
    CHECK(join["why"].get<std::string>().starts_with("one is in flight for "));
    CHECK(join["why"].get<std::string>().ends_with(", with 2 events and 1 reader"));
    CHECK(join["maybe_on_disk"] == false);
    CHECK(world.run({"key", held}).lines().back().starts_with("now        would join: one is in flight for "));
    const std::string key = explained(world, {held})["key"];
    REQUIRE(world.run({"purge", key}).code == 0);
    CHECK(now(held)["verdict"] == "start");
    CHECK(now(held)["why"] == "the one in flight was purged, and takes no more readers");
    world.sim().release();
    CHECK(reader.wait() == 0);

    REQUIRE(world.run({"ask", "Quick. [sim events=2]"}).code == 0);
    const auto hit = now("Quick. [sim events=2]");
    CHECK(hit["verdict"] == "hit");
    CHECK(hit["why"].get<std::string>().starts_with("one is complete with 2 events, and fresh for "));

    CHECK(world.run({"ask", "Bad. [sim status=500]"}).code == 1);
    const auto failed = now("Bad. [sim status=500]");
    CHECK(failed["verdict"] == "start");
    CHECK(
        failed["why"].get<std::string>().starts_with("the last one is not reusable: it ended failed (upstream_error"));
    CHECK(world.run({"ask", "Long. [sim finish=MAX_TOKENS]"}).code == 0);
    CHECK(now("Long. [sim finish=MAX_TOKENS]")["why"] ==
          "the last one is complete but not reusable: its finish reason is MAX_TOKENS");
    REQUIRE(world.run({"ask", "--no-store", "Secret."}).code == 0);
    CHECK(now("Secret.")["why"].get<std::string>().find("--no-store") != std::string::npos);
    CHECK(world.run({"ask", "--bypass", "Alone."}).code == 0);
    CHECK(now("Alone.")["why"] == "no stream in the segment has this key");
}

TEST_CASE("key tells what is past its freshness, and what a limit of readers forbids") {
    const TemplateDirectory directory;
    directory.write("one.json", R"({"model": "gemini-2.5-flash", "prompt": "Slowly. [sim events=3 hold-after=1]",
        "limits": {"subscribers": 1}})");
    World world({"--templates", directory.path(), "--ttl-idle", "1ms"});
    REQUIRE(world.run({"ask", "Hi."}).code == 0);
    REQUIRE(eventually([&] { return explained(world, {"Hi."})["now"]["verdict"] == "start"; }));
    CHECK(explained(world, {"Hi."})["now"]["why"].get<std::string>().starts_with("the last one was fresh until "));

    Process reader(world.command({"ask", "--events", "-t", "one"}));
    reader.read_line();
    REQUIRE(eventually([&] { return explained(world, {"-t", "one"})["now"]["verdict"] == "busy"; }));
    CHECK(explained(world, {"-t", "one"})["now"]["why"] == "the stream has 1 readers, the most allowed");
    CHECK(world.run({"ask", "-t", "one"}).code == 5);
    world.sim().release();
    CHECK(reader.wait() == 0);
}

TEST_CASE("key needs the segment and no broker; a dead one is told, and the exit code is 3") {
    World world;
    const std::string key = explained(world, {"Hi."})["key"];
    world.broker().process().signal(SIGKILL);
    world.broker().process().wait();
    const Ran dead = run_with(world, "key", {"Hi."});
    CHECK(dead.code == 3);
    CHECK(dead.says("is dead since"));
    CHECK(dead.json()["key"] == key);
    CHECK(dead.json()["now"]["verdict"] == "none");
    CHECK(dead.json()["now"]["why"] == "the broker is dead");
    const ScratchInstance nobody;
    const Ran absent = run(command(*nobody, {"key", "Hi."}));
    CHECK(absent.code == 3);
    CHECK(absent.out.empty());
}

TEST_CASE("key refuses what the broker would refuse, in its words") {
    const TemplateDirectory directory;
    directory.write("news.json", kNews);
    const World world({"--templates", directory.path()});
    const TemporaryFile twice(R"({"contents":[],"contents":[]})"), empty("");
    for (const std::vector<std::string>& request : {
             std::vector<std::string>{"Hi.", "-m", "no model?"},
             {"--request", twice.path()},
             {"--request", empty.path()},
             {"Hi.", "--explicit-key", "mine"},
             {"Hi.", "--realm", std::string(129, 'r')},
             {"Hi.", "--explicit-key", std::string(257, 'k')},
             {"-t", "news"},
             {"-t", "news", "--var", "topic=x", "--var", "tpoic=y"},
         }) {
        CAPTURE(request);
        const Ran key = run_with(world, "key", request, {});
        const Ran ask = run_with(world, "ask", request, {});
        CHECK(key.code == 2);
        CHECK(key.out.empty());
        CHECK(key.err == ask.err);
        CHECK(key.code == ask.code);
    }
    const Ran unknown = world.run({"key", "-t", "nwes", "--json"});
    CHECK(unknown.code == 1);
    CHECK(
        nlohmann::json::parse(unknown.err)["error"] ==
        nlohmann::json({{"code", "not_found"}, {"message", "there is no template \"nwes\"; did you mean \"news\"?"}}));
    for (const std::vector<std::string>& arguments : {std::vector<std::string>{"key"},
                                                      {"key", "Hi.", "-t", "news"},
                                                      {"key", "Hi.", "--var", "a=b"},
                                                      {"key", "Hi.", "--request", twice.path()}})
        CHECK(world.run(arguments).code == 2);
}
