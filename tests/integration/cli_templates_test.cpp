// gcoalesce templates, as those who write templates and those who run a broker use it.
#include <catch2/catch.hpp>
#include <csignal>
#include <fstream>
#include <iterator>

#include "tests/integration/cli_support.hpp"

using namespace gcoalesce::test;

namespace {

Ran check(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {gcoalesce_program(), "templates", "check"});
    return run(std::move(arguments));
}

constexpr const char* kGood = R"({"model": "models/gemini-2.5-flash", "prompt": "On {{topic}} in {{tone}}",
    "variables": {"topic": {}, "tone": {"default": "prose"}}})";

} // namespace

TEST_CASE("templates check lists what a directory has, and exits with 0") {
    const TemplateDirectory directory;
    directory.write("news.json", kGood);
    directory.write("default.json", R"({"ttl_idle": "1s"})");
    directory.write("notes.txt", "not one of them");
    const Ran table = check({directory.path()});
    CHECK(table.code == 0);
    CHECK(table.err.empty());
    REQUIRE(table.lines().size() == 3);
    CHECK(table.lines()[1].starts_with("default "));
    CHECK(table.lines()[2].starts_with("news "));
    CHECK(table.lines()[2].ends_with("  gemini-2.5-flash  tone? topic"));

    const Ran json = check({directory.path(), "--json"});
    CHECK(json.code == 0);
    CHECK(json.json().at("version") == 1);
    CHECK(json.json().at("ok") == true);
    const auto templates = json.json().at("templates");
    REQUIRE(templates.size() == 2);
    CHECK(templates[0].at("id") == "default");
    CHECK(templates[0].at("model").is_null());
    CHECK(templates[1].at("model") == "gemini-2.5-flash");
    CHECK(templates[1].at("revision").get<std::string>().size() == 16);
    CHECK(templates[1].at("variables") ==
          nlohmann::json::parse(R"([{"name":"tone","required":false},{"name":"topic","required":true}])"));
}

TEST_CASE("templates check takes one file, and needs no broker for it") {
    const TemplateDirectory directory;
    const std::string path = directory.write("news.json", kGood);
    directory.write("broken.json", "{");
    const Ran one = check({path});
    CHECK(one.code == 0);
    CHECK(one.lines().size() == 2);
}

TEST_CASE("templates check names the file, the member and the nearest known name, and exits with 2") {
    const TemplateDirectory directory;
    directory.write("news.json", kGood);
    const std::string bad =
        directory.write("sports.json", R"({"model": "m", "prompt": "p", "limits": {"in_flite": 1}})");
    const std::string message = bad + ": /limits/in_flite: unknown member; did you mean \"in_flight\"?";
    for (const std::string& path : {bad, directory.path()}) {
        const Ran ran = check({path});
        CHECK(ran.code == 2);
        CHECK(ran.out.empty());
        CHECK(ran.err == "gcoalesce: " + message + "\n");

        const Ran json = check({path, "--json"});
        CHECK(json.code == 2);
        CHECK(json.err.empty());
        CHECK(json.json() == nlohmann::json{{"version", 1},
                                            {"ok", false},
                                            {"error", {{"code", "bad_request"}, {"message", message}}}});
    }
    const Ran absent = check({directory.path() + "/absent.json"});
    CHECK(absent.code == 2);
    CHECK(absent.err == "gcoalesce: " + directory.path() + "/absent.json: No such file or directory\n");
}

TEST_CASE("templates suggests the command that was meant") {
    const Ran ran = run({gcoalesce_program(), "templates", "chek"});
    CHECK(ran.code == 2);
    CHECK(ran.err == "gcoalesce templates: unknown command \"chek\"; did you mean \"check\"?\n"
                     "try 'gcoalesce templates --help'\n");
    CHECK(run({gcoalesce_program(), "templates", "relaod"}).err.find("did you mean \"reload\"?") != std::string::npos);
    CHECK(run({gcoalesce_program(), "templates", "show"}).err ==
          "gcoalesce templates show: ID is required\ntry 'gcoalesce templates show --help'\n");
    CHECK(run({gcoalesce_program(), "templates"}).code == 2);
    CHECK(run({gcoalesce_program(), "templates", "check"}).err ==
          "gcoalesce templates check: PATH is required\ntry 'gcoalesce templates check --help'\n");
}

TEST_CASE("templates list and show tell what is in force, what became of requests, and the file") {
    const TemplateDirectory directory;
    directory.write("news.json", kGood);
    directory.write("plain.json", R"({"model": "gemini-2.5-pro", "prompt": "Hello", "description": "Says\thello",
        "ttl_idle": "1h", "on_abandon": "cancel:10s", "snapshots": false, "limits": {"in_flight": 7, "stream_bytes": "64KiB"},
        "response_schema": {"type": "STRING"}, "delivery": "live", "strict_individual": true, "max_individual": 3,
        "realm": "token", "explicit_keys": true})");
    const World world({"--templates", directory.path(), "--ttl-window", "9s"});
    for (int i = 0; i < 3; ++i) REQUIRE(world.run({"ask", "-t", "news", "--var", "topic=rain"}).code == 0);
    CHECK(world.run({"ask", "-t", "news"}).code == 2);

    const Ran table = world.run({"templates", "list"});
    CHECK(table.code == 0);
    CHECK(table.err.empty());
    const std::vector<std::string> lines = table.lines();
    REQUIRE(lines.size() == 4);
    CHECK(lines[0] == "TEMPLATE  REVISION          WINDOW  REQUESTS  CALLS  REFUSED  MODEL             VARIABLES");
    CHECK(lines[1].starts_with("default   0000000000000001  closed         0      0 "));
    CHECK(lines[1].ends_with("  -                 -"));
    CHECK(lines[2].starts_with("news "));
    CHECK(lines[2].find("  closed         3 ") != std::string::npos);
    CHECK(lines[2].ends_with("  gemini-2.5-flash  tone? topic"));
    CHECK(lines[3].starts_with("plain "));

    const auto listed = world.run({"templates", "list", "--json"}).json();
    CHECK(listed["version"] == 1);
    CHECK(listed["broker"]["state"] == "serving");
    REQUIRE(listed["templates"].size() == 3);
    const auto& news = listed["templates"][1];
    CHECK(news["id"] == "news");
    CHECK(news["model"] == "gemini-2.5-flash");
    CHECK(news["revision"] == check({directory.path(), "--json"}).json()["templates"][0]["revision"]);
    CHECK(news["ttl_window_ms"] == 9000); // the broker's option, for the file says nothing
    CHECK(news["cancel_after_ms"].is_null());
    CHECK(news["window"] == "closed");
    CHECK(news["last_push_age_ms"].is_null());
    CHECK(news["counters"]["requests_started"] == 1);
    CHECK(news["counters"]["requests_fresh"] == 2);

    const auto shown = world.run({"templates", "show", "plain", "--json"}).json();
    CHECK(shown["version"] == 1);
    const auto& plain = shown["template"];
    CHECK(plain["description"] == "Says\thello");
    CHECK(plain["ttl_idle_ms"] == 3'600'000);
    CHECK(plain["cancel_after_ms"] == 10'000);
    CHECK(plain["snapshots"] == false);
    CHECK(plain["limits"]["in_flight"] == 7);
    CHECK(plain["limits"]["stream_bytes"] == 65536);
    CHECK(plain["limits"]["pool_bytes"] > 0);
    CHECK(plain["checked"] == true);
    CHECK(plain["delivery"] == "live");
    CHECK(plain["strict_individual"] == true);
    CHECK(plain["max_individual"] == 3);
    CHECK(plain["realm"] == "token");
    CHECK(plain["explicit_keys"] == true);
    std::ifstream file(directory.path() + "/plain.json");
    CHECK(plain["source"] == std::string(std::istreambuf_iterator<char>(file), {}));

    const Ran text = world.run({"templates", "show", "news"});
    CHECK(text.code == 0);
    CHECK(text.err.empty());
    CHECK(text.out.find("\nttl_idle               10min\n") != std::string::npos);
    CHECK(text.out.find("\non_abandon             finish\n") != std::string::npos);
    CHECK(text.out.find("requests answered by a complete stream that was still fresh") != std::string::npos);
    CHECK(text.out.ends_with(std::string("\n\n") + kGood + "\n"));
    CHECK(world.run({"templates", "show", "default", "--json"}).json()["template"]["source"] == "");
}

TEST_CASE("templates list and show need no running broker; what is not there is told, with the nearest name") {
    const TemplateDirectory directory;
    directory.write("news.json", kGood);
    World world({"--templates", directory.path()});
    const Ran unknown = world.run({"templates", "show", "nwes"});
    CHECK(unknown.code == 1);
    CHECK(unknown.out.empty());
    CHECK(unknown.err == "gcoalesce: there is no template \"nwes\"; did you mean \"news\"?\n");
    const Ran json = world.run({"templates", "show", "nwes", "--json"});
    CHECK(json.code == 1);
    CHECK(nlohmann::json::parse(json.err)["error"]["code"] == "not_found");

    world.broker().process().signal(SIGKILL);
    world.broker().process().wait();
    for (const std::vector<std::string>& arguments :
         {std::vector<std::string>{"templates", "list"}, {"templates", "show", "news"}, {"notify", "status"}}) {
        const Ran dead = world.run(arguments);
        CHECK(dead.code == 3);
        CHECK(dead.says("is dead since"));
        CHECK(dead.out.find("news") != std::string::npos);
    }
    for (const std::vector<std::string>& arguments :
         {std::vector<std::string>{"templates", "list"}, {"templates", "show", "news"}, {"templates", "reload"}}) {
        const ScratchInstance nobody;
        const Ran absent = run(command(*nobody, arguments));
        CHECK(absent.code == 3);
        CHECK(absent.out.empty());
        CHECK(absent.err.starts_with("gcoalesce: "));
        CHECK(std::count(absent.err.begin(), absent.err.end(), '\n') == 1);
    }
}

TEST_CASE("templates reload puts new files in force and lists them; a bad one keeps the old, and exits with 2") {
    const TemplateDirectory directory;
    const std::string news = directory.write("news.json", kGood);
    const World world({"--templates", directory.path()});
    directory.write("more.json", R"({"model": "m", "prompt": "p"})");
    const Ran reloaded = world.run({"templates", "reload"});
    CHECK(reloaded.code == 0);
    CHECK(reloaded.err.empty());
    REQUIRE(reloaded.lines().size() == 4);
    CHECK(reloaded.lines()[2].starts_with("more "));

    std::filesystem::remove(news);
    const std::string bad = directory.write("more.json", R"({"model": "m", "prompt": "p", "liger": "1s"})");
    const Ran refused = world.run({"templates", "reload"});
    CHECK(refused.code == 2);
    CHECK(refused.out.empty());
    CHECK(refused.err == "gcoalesce: keeping the templates that are in use: " + bad +
                             ": /liger: unknown member; did you mean \"linger\"?\n");
    CHECK(nlohmann::json::parse(world.run({"templates", "reload", "--json"}).err)["error"]["code"] == "bad_request");
    CHECK(world.run({"templates", "list"}).lines().size() == 4);

    directory.write("more.json", R"({"model": "m", "prompt": "p", "linger": "1s"})");
    const auto json = world.run({"templates", "reload", "--json"}).json();
    REQUIRE(json["templates"].size() == 2);
    CHECK(json["templates"][1]["linger_ms"] == 1000);
    CHECK(world.run({"templates", "show", "news"}).code == 1); // removed
}
