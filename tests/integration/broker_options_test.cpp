// What gcoalesced says of options that are wrong, and that it touches nothing before.
#include <catch2/catch.hpp>
#include <filesystem>

#include "tests/integration/cli_support.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;

namespace {

// Ends by itself: the options are wrong.
Ran gcoalesced(const ScratchInstance& instance, std::vector<std::string> options, SpawnOptions how = {}) {
    options.insert(options.begin(), {gcoalesced_program(), "--instance", instance->name, "--runtime-dir",
                                     instance->runtime_dir + "/made"});
    how.env.push_back("GEMINI_API_KEY=any");
    return run(std::move(options), std::move(how));
}

void refused(std::vector<std::string> options, const std::string& why) {
    const ScratchInstance instance;
    const Ran ran = gcoalesced(instance, std::move(options));
    CAPTURE(ran.err);
    CHECK(ran.code == 2);
    CHECK(ran.out.empty());
    CHECK(ran.says(why));
    Instance made = *instance;
    made.runtime_dir += "/made";
    CHECK_FALSE(std::filesystem::exists(made.runtime_dir));
    CHECK_FALSE(std::filesystem::exists("/dev/shm" + made.segment_name(::geteuid())));
}

std::string nowhere() {
    return (std::filesystem::temp_directory_path() / "gcoalesce-is-not-here").string();
}

} // namespace

TEST_CASE("gcoalesced ends with 2 and a sentence where an option's value is wrong, and has touched nothing") {
    refused({"--memory", "10"}, "4096 streams need a memory of at least ");
    refused({"--memory", "10"}, "bytes, found 10: raise --memory or lower --streams");
    refused({"--memory", "lots"}, "--memory: expected a size");
    refused({"--streams", "0"}, "--streams");
    refused({"--ttl-idle", "5"}, "--ttl-idle: expected a duration such as 200ms, 6s, 10min or 2h, found \"5\"");
    refused({"--upstream", "notaurl"}, "expected an upstream URL such as https://host, found ");
    refused({"--upstream", "ftp://host"}, "expected an upstream URL with http or https, found ftp");
    refused({"--templates", nowhere()}, "--templates: " + nowhere() + ": No such file or directory");
    refused({"--api-key-file", nowhere()}, "the API key's file " + nowhere() + " does not exist");
    refused({"--ca-file", nowhere()}, "cannot read the CA file " + nowhere());
    refused({"--admin-group", "no-such-group"}, "there is no group \"no-such-group\" here");
    refused({"--log-level", "loud"}, "--log-level");
    refused({"--config", nowhere()}, nowhere());
    const TemplateDirectory templates;
    templates.write("bad.json", R"({"model": "m", "promt": "p"})");
    refused({"--templates", templates.path()}, "/promt: unknown member; did you mean \"prompt\"?");
}

TEST_CASE("gcoalesced names the option that one it does not know may mean") {
    refused({"--memry", "64MiB"}, "gcoalesced: unknown option \"--memry\"; did you mean \"--memory\"?\n");
    refused({"--ttl-idel=5s"}, "gcoalesced: unknown option \"--ttl-idel\"; did you mean \"--ttl-idle\"?\n");
    refused({"--frobnicate"}, "gcoalesced: unknown option \"--frobnicate\"\ntry 'gcoalesced --help'\n");
    refused({"serve"}, "serve");
}

TEST_CASE("gcoalesced names file and line of what is wrong in its configuration file, and says that it is TOML") {
    const auto file = [](const std::string& text, const std::string& why) {
        const TemporaryFile config(text);
        refused({"--config", config.path()}, "gcoalesced: " + config.path() + why);
    };
    file("memory = \"64MiB\"\nstreems = 128\n", ":2: unknown option \"streems\"; did you mean \"streams\"?\n");
    file("# all is well\n\nttl-idle = 5s\n", ":3: expected TOML, such as ttl-idle = \"200ms\" or streams = 4096: ");
    file("ttl-idle\n", ":1: expected TOML, ");
    file("ttl-idle = \"1s\"\nttl-idle = \"2s\"\n", ":2: expected TOML, ");
    file("[broker]\nttl-idle = \"1s\"\n", ":1: \"broker\": expected TOML without tables and arrays, ");
    file("streams = [1, 2]\n", ":1: \"streams\": expected TOML without tables and arrays, ");
    file("streams = 16\nttl-idle = \"soon\"\n", ":2: --ttl-idle: expected a duration ");
    file("retries = 99\n", ":1: --retries: ");
    file("config = \"another\"\n", ":1: unknown option \"config\"\n");
}

TEST_CASE("a line of the file that the command line or the environment overrules may be wrong") {
    const TemporaryFile config("ttl-idle = \"soon\"\nmemory = \"10\"\n");
    const ScratchInstance instance;
    SpawnOptions how;
    how.env.push_back("GCOALESCE_TTL_IDLE=1s");
    const Ran ran = gcoalesced(instance, {"--config", config.path()}, how);
    CHECK(ran.code == 2);
    CHECK(ran.says("found 10: raise --memory")); // that line counted
    CHECK(gcoalesced(instance, {"--config", config.path(), "--ttl-idle", "1s"}).says("found 10: raise --memory"));
}

TEST_CASE("every text of the file may be empty, which is its default") {
    const TemporaryFile config(
        "instance = \"\"\nruntime-dir = \"\"\nadmin-group = \"\"\napi-key-file = \"\"\nca-file = \"\"\n"
        "proxy = \"\"\nstate-dir = \"\"\ntemplates = \"\"\nmemory = 10\n");
    const ScratchInstance instance;
    CHECK(gcoalesced(instance, {"--config", config.path()}).says("found 10: raise --memory"));
}

TEST_CASE("texts of the file may have what looks like a comment or a list") {
    const TemplateDirectory place;
    std::filesystem::create_directory(place.path() + "/a #1, b");
    const TemporaryFile config("templates = \"" + place.path() + "/a #1, b\" # here\nmemory = 10\n");
    const ScratchInstance instance;
    const Ran ran = gcoalesced(instance, {"--config", config.path()});
    CHECK(ran.says("found 10: raise --memory")); // the directory was found
}
