// cancel, purge, notify status and keys --template, before a real broker and a stand-in for Gemini.
#include <catch2/catch.hpp>
#include <csignal>
#include <sys/stat.h>

#include "tests/integration/cli_support.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;

namespace {

constexpr const char* kHeld = "Slowly. [sim events=3 hold-after=2]";

std::string key_of(const World& world, const std::vector<std::string>& request) {
    std::vector<std::string> arguments = request;
    arguments.insert(arguments.begin(), {"key", "--json"});
    return world.run(arguments).json()["key"];
}

const char* const kTemplate = R"({"model": "gemini-2.5-flash", "prompt": "On {{topic}}", "variables": {"topic": {}}})";

} // namespace

TEST_CASE("T72: cancel ends a running stream for its readers with what came, and may be said again") {
    World world;
    const std::string key = key_of(world, {kHeld});
    Process reader(world.command({"ask", "--events", kHeld}));
    const std::string first = reader.read_line();
    reader.read_line();
    const Ran cancelled = world.run({"cancel", key.substr(0, 8)});
    CHECK(cancelled.code == 0);
    CHECK(cancelled.err.empty());
    CHECK(cancelled.out == "1 stream cancelled\n");
    CHECK(reader.wait() == 8);
    CHECK(reader.out().starts_with(first));
    CHECK(reader.err().find("an operator cancelled the call") != std::string::npos);

    // The stream is there for as long as it lingers.
    CHECK(world.run({"cancel", key}).out == "0 streams cancelled: it had ended already\n");
    CHECK(world.run({"cancel", key, "--json"}).out == "{\"version\":1,\"cancelled\":0}\n");
    const auto keys = world.run({"keys", "--json"}).json()["keys"];
    REQUIRE(keys.size() == 1);
    CHECK(keys[0]["state"] == "cancelled");
    CHECK(keys[0]["joinable"] == false);

    Process again(world.command({"ask", "--events", kHeld}));
    again.read_line();
    CHECK(world.calls() == 2);
    world.sim().release();
    CHECK(again.wait() == 0);
}

TEST_CASE("cancel and purge of a name that is unknown, short or of several streams say so") {
    World world;
    for (const char* command : {"cancel", "purge"}) {
        const Ran unknown = world.run({command, "0123456789abcdef"});
        CHECK(unknown.code == 1);
        CHECK(unknown.out.empty());
        CHECK(unknown.err.starts_with("gcoalesce: no stream begins with \"0123456789abcdef\""));
        CHECK(nlohmann::json::parse(world.run({command, "0123456789abcdef", "--json"}).err)["error"]["code"] ==
              "not_found");
        for (const char* bad : {"abc", "xyzw"}) {
            const Ran refused = world.run({command, bad});
            CHECK(refused.code == 2);
            CHECK(refused.err == "gcoalesce: expected the first 4 or more hex digits of a key or a stream id\n");
        }
    }
    CHECK(world.run({"cancel"}).err == "gcoalesce cancel: KEY is required\ntry 'gcoalesce cancel --help'\n");
    CHECK(world.run({"cancle", "abcd"}).says("did you mean \"cancel\"?"));
    CHECK(world.run({"purg", "abcd"}).says("did you mean \"purge\"?"));
}

TEST_CASE("purge drops one answer, a template's, or all, and says how many") {
    const TemplateDirectory directory;
    directory.write("news.json", kTemplate);
    World world({"--templates", directory.path()});
    const auto ask_all = [&] {
        for (const char* prompt : {"One.", "Two."}) REQUIRE(world.run({"ask", prompt}).code == 0);
        for (const char* topic : {"topic=rain", "topic=snow"})
            REQUIRE(world.run({"ask", "-t", "news", "--var", topic}).code == 0);
    };
    ask_all();
    CHECK(world.calls() == 4);
    const Ran one = world.run({"purge", key_of(world, {"One."}).substr(0, 12)});
    CHECK(one.code == 0);
    CHECK(one.err.empty());
    CHECK(one.out == "1 stream dropped\n");
    ask_all();
    CHECK(world.calls() == 5);
    CHECK(world.run({"purge", "--template", "news"}).out == "2 streams dropped\n");
    ask_all();
    CHECK(world.calls() == 7);
    CHECK(world.run({"purge", "--all", "--yes", "--json"}).out == "{\"version\":1,\"dropped\":4}\n");
    ask_all();
    CHECK(world.calls() == 11);

    const Ran unknown = world.run({"purge", "--template", "nwes"});
    CHECK(unknown.code == 1);
    CHECK(unknown.err == "gcoalesce: there is no template \"nwes\"\n");
    for (const std::vector<std::string>& arguments :
         {std::vector<std::string>{"purge"}, {"purge", "abcd", "--all"}, {"purge", "--all", "--template", "news"}}) {
        const Ran refused = world.run(arguments);
        CHECK(refused.code == 2);
        CHECK(refused.says("KEY, --template, --all: expected one of them"));
    }
}

TEST_CASE("purge --all asks on a terminal, and wants --yes where there is none") {
    World world;
    REQUIRE(world.run({"ask", "Hi."}).code == 0);
    const Ran piped = world.run({"purge", "--all"}, "y\n");
    CHECK(piped.code == 2);
    CHECK(piped.says("--all: expected --yes beside it"));
    const auto asked = [&](const std::string& answer) {
        SpawnOptions options;
        options.input = answer;
        return run({"script", "-qec", quoted(world.command({"purge", "--all"})), "/dev/null"}, options);
    };
    const Ran no = asked("n\n");
    CHECK(no.code == 1);
    CHECK(no.out.find("Drop every answer that the broker keeps? [y/N] ") != std::string::npos);
    CHECK(no.out.find("nothing was dropped") != std::string::npos);
    const Ran yes = asked("y\n");
    CHECK(yes.code == 0);
    CHECK(yes.out.find("1 stream dropped") != std::string::npos);
}

TEST_CASE("readers of a purged running stream finish, and the next request starts anew") {
    World world;
    Process reader(world.command({"ask", "--events", kHeld}));
    reader.read_line();
    CHECK(world.run({"purge", key_of(world, {kHeld})}).out == "1 stream dropped\n");
    Process again(world.command({"ask", "--events", kHeld}));
    again.read_line();
    CHECK(world.calls() == 2);
    world.sim().release();
    CHECK(reader.wait() == 0);
    CHECK(again.wait() == 0);
}

TEST_CASE("who is not in the broker's admin group is told so, and exits with 1") {
    if (::geteuid() != 0) {
        WARN("needs root, to become somebody else");
        return;
    }
    const ScratchInstance instance;
    const Sim sim;
    const Broker broker(*instance, sim.url(), {"--admin-group", "nogroup"});
    ::chmod(instance->runtime_dir.c_str(), 0750); // the group may attach
    const auto as_nobody = [&](const std::vector<std::string>& arguments) {
        std::vector<std::string> all{"setpriv", "--reuid", "65534", "--regid", "0", "--clear-groups"};
        const std::vector<std::string> words = command(*instance, arguments);
        all.insert(all.end(), words.begin(), words.end());
        return run(all);
    };
    if (as_nobody({"--version"}).code != 0) {
        WARN("needs a build that everybody may run");
        return;
    }
    for (const std::vector<std::string>& arguments : {std::vector<std::string>{"cancel", "abcd"},
                                                      {"purge", "--all", "--yes"},
                                                      {"templates", "reload"},
                                                      {"notify", "on"}}) {
        const Ran refused = as_nobody(arguments);
        CHECK(refused.code == 1);
        CHECK(refused.out.empty());
        CHECK(refused.says("needs membership in the broker's admin group"));
    }
    CHECK(as_nobody({"notify", "status", "--template", "default"}).out == "closed\n");
    CHECK(as_nobody({"notify", "status"}).code == 0);
}

TEST_CASE("notify status lists every template's window and last push") {
    const TemplateDirectory directory;
    directory.write("news.json", kTemplate);
    directory.write("sports.json", kTemplate);
    const World world({"--templates", directory.path()});
    const Ran idle = world.run({"notify", "status"});
    CHECK(idle.code == 0);
    CHECK(idle.err.empty());
    CHECK(idle.out == "TEMPLATE  WINDOW  LAST PUSH\n"
                      "default   closed  never\n"
                      "news      closed  never\n"
                      "sports    closed  never\n");

    CHECK(world.run({"notify", "on", "--template", "news", "--for", "150min"}).out == "open for 2h\n");
    CHECK(world.run({"notify", "on", "--template", "sports", "--for", "1h"}).code == 0);
    CHECK(world.run({"notify", "off", "--template", "sports"}).out == "closed\n");
    const std::vector<std::string> lines = world.run({"notify", "status"}).lines();
    REQUIRE(lines.size() == 4);
    CHECK(lines[1].starts_with("default   closed       never"));
    CHECK(lines[2].starts_with("news      open for 2h  "));
    CHECK(lines[2].ends_with(" ago"));
    CHECK(lines[3].starts_with("sports    closed       "));
    CHECK(lines[3].ends_with(" ago"));

    const auto json = world.run({"notify", "status", "--json"}).json();
    CHECK(json["version"] == 1);
    REQUIRE(json["templates"].size() == 3);
    CHECK(
        json["templates"][0] ==
        nlohmann::json({{"id", "default"}, {"window", "closed"}, {"remaining_ms", 0}, {"last_push_age_ms", nullptr}}));
    CHECK(json["templates"][1]["window"] == "open");
    CHECK(json["templates"][1]["remaining_ms"] > 7'200'000);
    CHECK(json["templates"][1]["last_push_age_ms"].is_number_integer());

    const Ran unknown = world.run({"notify", "on", "--template", "nwes"});
    CHECK(unknown.code == 1);
    CHECK(unknown.err == "gcoalesce: there is no template \"nwes\"\n");
}

TEST_CASE("keys --template shows that template's streams only") {
    const TemplateDirectory directory;
    directory.write("news.json", kTemplate);
    directory.write("sports.json", kTemplate);
    const World world({"--templates", directory.path()});
    REQUIRE(world.run({"ask", "Hi."}).code == 0);
    REQUIRE(world.run({"ask", "-t", "news", "--var", "topic=rain"}).code == 0);
    const Ran table = world.run({"keys", "--template", "news"});
    CHECK(table.code == 0);
    REQUIRE(table.lines().size() == 2);
    CHECK(table.lines()[1].find("  news ") != std::string::npos);
    const auto json = world.run({"keys", "--json", "--template", "default"}).json();
    REQUIRE(json["keys"].size() == 1);
    CHECK(json["keys"][0]["template"] == "default");
    CHECK(world.run({"keys", "--json", "--template", "sports"}).json()["keys"].empty());

    const Ran unknown = world.run({"keys", "--template", "nwes"});
    CHECK(unknown.code == 1);
    CHECK(unknown.out.empty());
    CHECK(unknown.err == "gcoalesce: there is no template \"nwes\"; did you mean \"news\"?\n");
}
