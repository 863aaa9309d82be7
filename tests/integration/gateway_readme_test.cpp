// The curl lines of README, as somebody pastes them into a shell.
#include <catch2/catch.hpp>
#include <functional>
#include <sstream>

#include "tests/integration/gateway_support.hpp"
#include "tests/support/exposition.hpp"
#include "tests/support/fixtures.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;
using Json = nlohmann::json;

namespace {

// The commands of all ```sh blocks of the gateway's section, in order, each on one line.
std::vector<std::string> commands() {
    std::istringstream readme(read_file(source_dir() / "README.md"));
    bool section = false, block = false;
    std::string command;
    std::vector<std::string> all;
    for (std::string line; std::getline(readme, line);) {
        if (line.starts_with("### ")) section = line == "### The HTTP gateway";
        if (!section) continue;
        if (line.starts_with("```")) {
            block = line == "```sh";
        } else if (block && line.ends_with('\\')) {
            command += line.substr(0, line.size() - 1);
        } else if (block) {
            all.push_back(command + line);
            command.clear();
        }
    }
    return all;
}

void replace(std::string& text, std::string_view what, const std::string& by) {
    for (std::size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += by.size())
        text.replace(at, what.size(), by);
}

// Each command's output, behind a line of its own. What is no call of curl's sets the stage.
std::vector<std::pair<std::string, std::string>> run_all(const Gateway& open, const Gateway& with_tokens) {
    constexpr const char* mark = "@@@";
    std::string script = "set -eu\nTOKEN=ops-secret\n";
    std::vector<std::pair<std::string, std::string>> ran;
    for (std::string command : commands()) {
        if (command.starts_with("gcoalesce serve")) continue;
        const std::string shown = command;
        replace(command, "http://127.0.0.1:8790", open.url());
        if (command.find("$TOKEN") != std::string::npos) replace(command, "$gateway", with_tokens.url());
        if (command.starts_with("curl ")) {
            ran.emplace_back(shown, "");
            script += std::string("printf '\\n%s\\n' ") + mark + "\n"; // what came before may end within a line
            command.insert(4, " -sS --fail-with-body");
        }
        script += command + "\n";
    }
    const Ran shell = run({"/bin/sh", "-c", script});
    INFO(shell.err);
    REQUIRE(shell.code == 0);
    std::size_t number = 0;
    for (const std::string& line : shell.lines()) {
        if (line == mark)
            ++number;
        else if (number > 0)
            ran.at(number - 1).second += line + "\n";
    }
    REQUIRE(number == ran.size());
    return ran;
}

std::size_t count(std::string_view text, std::string_view what) {
    std::size_t found = 0;
    for (std::size_t at = 0; (at = text.find(what, at)) != std::string_view::npos; at += what.size()) ++found;
    return found;
}

} // namespace

TEST_CASE("the curl lines of README do what it says") {
    World world;
    // printf %s ops-secret | sha256sum
    const TemporaryFile tokens("ops:" + run({"/bin/sh", "-c", "printf %s ops-secret | sha256sum"}).out.substr(0, 64) +
                               ":admin\n");
    const Gateway gateway(world), with_tokens(world, {"--token-file", tokens.path()});
    gateway.wait_until_ready();
    with_tokens.wait_until_ready();

    // What each must bring, by what stands in it: a line that nothing here knows is not tested, and fails.
    using Check = std::function<void(const std::string&)>;
    const auto answer = [](const Json& document) {
        return document.at("candidates").at(0).at("content").at("parts").at(0).at("text").get<std::string>();
    };
    const std::vector<std::pair<std::string, Check>> checks{
        {"alt=sse", [&](const std::string& out) { CHECK(count(out, "data: {\"candidates\"") == 4); }},
        {":generateContent",
         [&](const std::string& out) {
             CHECK(answer(Json::parse(out)).starts_with("Answer to: Why is the sky blue?"));
         }},
        {":streamGenerateContent\"", [&](const std::string& out) { CHECK(Json::parse(out).size() == 4); }},
        {"chat/completions", [&](const std::string& out) { CHECK(count(out, "data: [DONE]") == 1); }},
        {":countTokens", [&](const std::string& out) { CHECK(Json::parse(out).at("totalTokens") > 0); }},
        {"/v1beta/models\"", [&](const std::string& out) { CHECK_FALSE(Json::parse(out).at("models").empty()); }},
        {"Last-Event-ID",
         [&](const std::string& out) {
             CHECK(count(out, "id: ") == 2);
             CHECK(out.find(".3\ndata: {") != std::string::npos);
             CHECK(count(out, "event: end\n") == 1);
         }},
        {"$gateway$stream\"",
         [&](const std::string& out) {
             CHECK(count(out, "\ndata: {\"candidates\"") == 4);
             CHECK(count(out, "event: end\ndata: {\"ending\":\"complete\"") == 1);
         }},
        {"/v1/notify",
         [&](const std::string& out) {
             const std::int64_t open = Json::parse(out).at("window_open_ms");
             CHECK((open > 0 && open <= 6000));
         }},
        {"/healthz",
         [&](const std::string& out) {
             CHECK(Json::parse(out) == Json{{"status", "ok"}});
         }},
        {"/readyz",
         [&](const std::string& out) {
             CHECK(Json::parse(out) == Json{{"status", "ok"}});
         }},
        {"/metrics",
         [&](const std::string& out) {
             const Exposition page = read_exposition(out);
             CHECK(page.faults == std::vector<std::string>{});
             CHECK(page.samples.at("gcoalesce_up") == 1);
         }},
    };
    const auto ran = run_all(gateway, with_tokens);
    std::vector<bool> done(checks.size());
    for (const auto& [command, out] : ran) {
        CAPTURE(command, out);
        const auto check =
            std::ranges::find_if(checks, [&](const auto& one) { return command.find(one.first) != std::string::npos; });
        REQUIRE(check != checks.end());
        check->second(out);
        done[static_cast<std::size_t>(check - checks.begin())] = true;
    }
    CHECK(std::ranges::count(done, false) == 0);
    // One prompt: a call for the stream, the array of it too, one each for the answer in one piece, the OpenAI form,
    // and the tokens counted; the list of models is none of a model's.
    CHECK(world.calls() <= 5);
}
