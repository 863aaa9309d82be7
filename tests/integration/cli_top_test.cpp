// gcoalesce top: in a pipe, and on a terminal that is typed on, resized and left.
#include <catch2/catch.hpp>
#include <csignal>

#include "cli/view/utf8.hpp"
#include "tests/integration/cli_segment.hpp"
#include "tests/support/terminal.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;

namespace {

std::string line_with(const std::vector<std::string>& lines, const std::string& words) {
    for (const std::string& line : lines) {
        if (line.find(words) != std::string::npos) return line;
    }
    return "";
}

} // namespace

TEST_CASE("T100: top in a pipe is one view of rates, savings and the hottest keys") {
    World world;
    REQUIRE(world.run({"ask", "Hi. [sim events=2]"}).code == 0);
    for (int i = 0; i < 3; ++i) REQUIRE(world.run({"ask", "Hi. [sim events=2]"}).code == 0);
    REQUIRE(world.run({"ask", "Another."}).code == 0);
    REQUIRE(world.run({"notify", "on", "--for", "1h"}).code == 0);
    CHECK(eventually([&] { return world.run({"keys", "--json"}).json()["keys"][1]["joins"] == 3; }));

    const Ran json = world.run({"top", "--json", "--every", "10ms"});
    CHECK(json.code == 0);
    const auto told = json.json();
    CHECK(told["version"] == 1);
    CHECK(told["broker"]["state"] == "serving");
    CHECK(told["requests"] == 5);
    CHECK(told["calls_avoided"] == 3);
    CHECK(told["total_coalesce_rate"] == 0.6);
    CHECK(told["requests_per_second"] == 0.0);
    CHECK(told["coalesce_rate"].is_null()); // nobody asked meanwhile
    CHECK(told["templates"][0]["id"] == "default");
    CHECK(told["templates"][0]["window"] == "open");
    CHECK(told["templates"][0]["first_event_p50_us"].is_number_integer());
    REQUIRE(told["keys"].size() == 2);
    CHECK(world.run({"top", "--json", "--every", "10ms", "--filter", "no such"}).json()["keys"].empty());

    const Ran text = world.run({"top", "--every", "10ms"});
    CHECK(text.code == 0);
    CHECK(text.err.empty());
    CHECK(text.out.find('\x1b') == std::string::npos);
    CHECK(line_with(text.lines(), "requests 0.0/s").find("coalesced - now, 60.0 % in all") != std::string::npos);
    CHECK(line_with(text.lines(), "calls avoided 3 of 5").find("in flight 0") != std::string::npos);
    CHECK(line_with(text.lines(), "windows:").find("default open for") != std::string::npos);
    CHECK(line_with(text.lines(), "TEMPLATE").starts_with("TEMPLATE  REQ/S  CALLS/S  AVOIDED  COALESCED"));
    CHECK(line_with(text.lines(), "KEY  ").starts_with("KEY       STATE"));
}

TEST_CASE("top without a broker, and of a dead one") {
    const ScratchInstance nowhere;
    const Ran absent = run(command(*nowhere, {"top"}));
    CHECK(absent.code == 3);
    CHECK(absent.says("no broker of instance"));
    Segment segment;
    segment.open(key_of({0xab, 0xcd}), 1);
    segment.broker.die();
    const Ran dead = segment.run({"top"});
    CHECK(dead.code == 3);
    CHECK(dead.says("is dead since"));
    CHECK(line_with(dead.lines(), "abcd0000").starts_with("abcd0000  in_flight"));
    const Ran usage = segment.run({"top", "--every", "1ms"});
    CHECK(usage.code == 2);
    CHECK(usage.err == "gcoalesce top: --every: expected 10ms to 1h, found 1ms\ntry 'gcoalesce top --help'\n");
}

TEST_CASE("top on a terminal goes on with what happens, filters, helps and ends") {
    Segment segment;
    segment.open(key_of({0xab, 0xcd}), 1);
    Terminal terminal(segment.command({"top", "--every", "20ms"}), 100, 30);
    terminal.wait_for("abcd0000  in_flight");
    CHECK(line_with(terminal.screen(), "requests").starts_with("requests "));
    segment.open(key_of({0x12, 0x34}), 2);
    terminal.wait_for("12340000  in_flight");

    terminal.type("f");
    terminal.wait_for("filter: _");
    terminal.type("1234");
    terminal.wait_for("filter: 1234_");
    terminal.wait_for("abcd0000", false);
    terminal.type("\r");
    terminal.wait_for("filter: 1234_", false);
    terminal.wait_for("filter: 1234");
    CHECK_FALSE(line_with(terminal.screen(), "12340000").empty());
    terminal.type("\x1b");
    terminal.wait_for("abcd0000");

    terminal.type("?");
    terminal.wait_for("ends it, as Ctrl-C does");
    CHECK(line_with(terminal.screen(), "abcd0000").empty());
    terminal.type("h");
    terminal.wait_for("abcd0000");
    terminal.type("q");
    CHECK(terminal.wait() == 0);

    Terminal other(segment.command({"top", "--every", "20ms"}), 100, 30);
    other.wait_for("abcd0000");
    other.type("\x03");
    CHECK(other.wait() == 130);
}

TEST_CASE("top fits the terminal, whatever that becomes") {
    Segment segment;
    segment.broker.with_store([](Store& store) {
        for (std::uint8_t i = 1; i <= 40; ++i) {
            StreamOpening opening;
            opening.key = key_of({0xab, i});
            opening.stream_id = i;
            opening.model = "模型-with-a-long-name\x1b[2J";
            REQUIRE(store.open(opening, true));
        }
    });
    Terminal terminal(segment.command({"top", "--every", "20ms"}), 120, 30);
    terminal.wait_for("模型-with-a");
    CHECK(terminal.written().find("\x1b[2J模") == std::string::npos);
    CHECK(terminal.screen().size() == 30);
    terminal.resize(40, 20);
    terminal.wait_for("模型", false);
    terminal.wait_for("KEY       STATE");
    for (const std::string& line : terminal.screen()) CHECK(cli::display_width(line) <= 40);
    terminal.resize(120, 50);
    terminal.wait_for("模型-with-a");
    terminal.wait_for("ab040000"); // in a line that there was not before
    terminal.type("q");
    CHECK(terminal.wait() == 0);
}

TEST_CASE("top stays when its broker goes, and finds the next one") {
    const ScratchInstance instance;
    auto broker = std::make_unique<FakeBroker>(*instance);
    Terminal terminal(command(*instance, {"top", "--every", "20ms"}), 100, 30);
    terminal.wait_for("serving");
    broker->stop();
    terminal.wait_for("no broker of instance");
    broker = std::make_unique<FakeBroker>(*instance);
    terminal.wait_for("no broker of instance", false);
    terminal.wait_for("serving");
    terminal.type("q");
    CHECK(terminal.wait() == 0);
}

TEST_CASE("top on a terminal that nobody knows says what to do") {
    Segment segment;
    Terminal terminal(segment.command({"top"}), 100, 30, {"TERM=no-such-terminal"});
    CHECK(terminal.wait() == 1);
    CHECK(terminal.written().find("cannot paint on a terminal of type \"no-such-terminal\": set TERM, or use --once") !=
          std::string::npos);
}
