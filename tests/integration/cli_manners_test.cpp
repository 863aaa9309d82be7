// What all commands have in common where somebody looks or nobody listens: full disks, readers that leave, terminals,
// Ctrl-C; and that a crowd of lookers is nothing to the broker.
#include <array>
#include <catch2/catch.hpp>
#include <csignal>
#include <fmt/format.h>
#include <map>
#include <memory>
#include <set>
#include <sys/stat.h>

#include "tests/integration/cli_segment.hpp"
#include "tests/support/terminal.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;

namespace {

using Words = std::vector<std::string>;

// Every command that prints and ends. KEY is a stream's that has ended.
std::vector<Words> printing(const std::string& key, const std::string& template_file) {
    const Words plan{"estimate", "--notifications", "1", "--requests", "2", "--rate", "0.5", "--cost", "3"};
    const Words gate{"advise", "--identical", "50", "--templates", "yes", "--streaming", "yes", "--spend", "5"};
    std::vector<Words> all{
        {"ask", "Hi."},
        {"ask", "--events", "Hi."},
        {"ask", "--sse", "Hi."},
        {"ask", "--json", "Hi."},
        {"keys"},
        {"keys", "--json"},
        {"keys", "--watch"},
        {"show", key},
        {"show", key, "--json"},
        {"dump", key},
        {"dump", key, "--format", "raw"},
        {"dump", key, "--format", "json"},
        {"log"},
        {"log", "--json"},
        {"top", "--every", "10ms"},
        {"top", "--every", "10ms", "--json"},
        {"clients", "--json"},
        {"clients"},
        {"doctor"},
        {"doctor", "--json"},
        {"key", "Hi."},
        {"key", "Hi.", "--json"},
        {"stats"},
        {"stats", "--json"},
        {"stats", "--prometheus"},
        plan,
        gate,
        {"notify", "on", "--for", "1s"},
        {"notify", "status"},
        {"notify", "off", "--json"},
        {"templates", "list"},
        {"templates", "list", "--json"},
        {"templates", "show", "default"},
        {"templates", "show", "default", "--json"},
        {"templates", "check", template_file},
        {"templates", "check", template_file, "--json"},
        {"templates", "reload"},
        {"demo", "--requests", "2", "--processes", "1"},
        {"demo", "--requests", "2", "--processes", "1", "--json"},
        {"sim"},
        {"serve", "--listen", "127.0.0.1:0"},
        {"help"},
        {"version"},
        {"keys", "--help"},
        {"cancel", key},
        {"cancel", key, "--json"},
        {"purge", key}, // what it drops is gone: last
        {"purge", "--all", "--yes", "--json"},
    };
    return all;
}

// Runs the command with its standard output as the shell's redirection has it.
Ran redirected(const std::string& before, const Words& command, const std::string& to) {
    Words shell{"/bin/bash", "-c", before + "exec \"$0\" \"$@\" " + to};
    shell.insert(shell.end(), command.begin(), command.end());
    return run(std::move(shell));
}

// Nobody reads what it prints, and it does not wait for that.
Words unread(const Words& command, const std::string& input = "/dev/null") {
    Words shell{"/bin/sh", "-c", "exec \"$0\" \"$@\" > /dev/null < " + input};
    shell.insert(shell.end(), command.begin(), command.end());
    return shell;
}

std::string joined(const Words& words) {
    std::string line;
    for (const std::string& word : words) line += word + " ";
    return line;
}

} // namespace

TEST_CASE("every command says that its output cannot be written, and dies quietly of a reader that left") {
    const TemplateDirectory directory;
    const std::string file = directory.write("news.json", R"({"model": "gemini-2.5-flash", "prompt": "News."})");
    World world;
    const auto key = world.run({"ask", "--json", "Hi."}).json()["key"].get<std::string>();
    REQUIRE(world.run({"notify", "on", "--for", "1h"}).code == 0);
    for (const Words& command : printing(key, file)) {
        INFO("gcoalesce " << joined(command));
        const Ran full = redirected("", world.command(command), "> /dev/full");
        CHECK(full.code == 1);
        CHECK(full.err.ends_with("gcoalesce: cannot write to standard output: No space left on device\n"));
    }
    REQUIRE(world.run({"ask", "Hi."}).code == 0);
    for (const Words& command : printing(key, file)) {
        INFO("gcoalesce " << joined(command));
        // The pipe has no reader by the time the command starts.
        const Ran left = redirected("exec 3> >(:); wait $!; ", world.command(command), ">&3");
        CHECK(left.code == 128 + SIGPIPE);
        CHECK(left.err.find("cannot write") == std::string::npos);
    }
}

TEST_CASE("Ctrl-C ends every command that goes on, with 130") {
    World world;
    Process asking(world.command({"ask", "Hold. [sim events=3 hold-after=2]"}));
    CHECK(eventually([&] { return world.broker().counted(Counter::events_published) == 2; }));
    const auto key = world.run({"keys", "--json"}).json()["keys"][0]["key"].get<std::string>();
    const std::pair<Words, std::string> going_on[] = {
        {{"keys", "--watch"}, "in_flight"},
        {{"log"}, "first_event"},
        {{"dump", key, "--follow"}, "Answer"},
        {{"top", "--every", "50ms"}, "KEY"},
        {{"ask", "Hold. [sim events=3 hold-after=2]"}, "Answer"},
    };
    for (const auto& [command, first] : going_on) {
        INFO("gcoalesce " << joined(command));
        Terminal terminal(world.command(command), 100, 24);
        terminal.wait_for(first);
        terminal.type("\x03");
        CHECK(terminal.wait() == 128 + SIGINT);
    }
    world.sim().release();
    CHECK(asking.wait() == 0);
}

TEST_CASE("top gives the terminal back when it is told to end") {
    Segment segment;
    segment.open(key_of({0xab, 0xcd}), 1);
    const std::string go = segment.directory->runtime_dir + "/go";
    REQUIRE(::mkfifo(go.c_str(), 0600) == 0);
    for (const int number : {SIGTERM, SIGHUP}) {
        const std::string script = fmt::format("stty -g; exec 3<&0; \"$0\" \"$@\" <&3 & pid=$!; read word < {}; "
                                               "kill -{} $pid; wait $pid; echo ended $?.; stty -g",
                                               go, number);
        Words shell{"/bin/sh", "-c", script};
        for (const std::string& word : segment.command({"top", "--every", "50ms"})) shell.push_back(word);
        Terminal terminal(shell, 100, 24);
        terminal.wait_for("abcd0000  in_flight");
        std::ofstream(go) << "now\n";
        CHECK(terminal.wait() == 0);
        const std::string written = terminal.written();
        const std::string before = written.substr(0, written.find('\n') + 1);
        CHECK(written.ends_with(fmt::format("ended {}.\r\n{}", 128 + number, before)));
    }
}

TEST_CASE("JSON on a terminal has no character that commands it, and says the same") {
    const std::string evil = "a\x7f"
                             "b\xc2\x9b"
                             "31mc\\u001b]0;x\\u0007d"; // DEL, CSI as one character, OSC
    Segment segment;
    segment.broker.with_store([&](Store& store) {
        StreamOpening opening;
        opening.key = key_of({0xab, 0xcd});
        opening.stream_id = 5;
        opening.model = "m\xc2\x9b"
                        "31m";
        opening.request = "{\"a\":\"" + evil + "\"}";
        const StreamRef stream = store.open(opening, true).value();
        REQUIRE(store.append(stream, text_event(evil)));
    });
    const std::vector<Words> commands{{"dump", "abcd", "--format", "json"},
                                      {"dump", "abcd", "--format", "raw"},
                                      {"dump", "abcd", "--format", "sse"},
                                      {"dump", "abcd"},
                                      {"show", "abcd", "--json"},
                                      {"show", "abcd"},
                                      {"keys", "--json"},
                                      {"keys"},
                                      {"log", "--once", "--json"},
                                      {"top", "--once", "--json", "--every", "10ms"},
                                      {"key", evil},
                                      {"key", evil, "--json"}};
    for (const Words& command : commands) {
        INFO("gcoalesce " << joined(command));
        Terminal terminal(segment.command(command), 200, 60);
        CHECK(terminal.wait() == 0);
        for (const char* control : {"\x7f", "\xc2\x9b", "\x1b", "\x07"})
            CHECK(terminal.written().find(control) == std::string::npos);
        if (std::ranges::find(command, "--json") == command.end() && command.back() != "json") continue;
        std::istringstream lines(terminal.written());
        for (std::string line; std::getline(lines, line);) {
            if (line.starts_with("{")) CHECK(nlohmann::json::accept(line));
        }
    }
    Terminal terminal(segment.command({"dump", "abcd", "--format", "json"}), 200, 60);
    CHECK(terminal.wait() == 0);
    const std::string piped = segment.run({"dump", "abcd", "--format", "json"}).out;
    CHECK(nlohmann::json::parse(terminal.written().substr(0, terminal.written().find('\n'))) ==
          nlohmann::json::parse(piped.substr(0, piped.find('\n'))));
    CHECK(piped.find("\xc2\x9b") != std::string::npos); // a pipe has the bytes
}

TEST_CASE("what ask prints as JSON on a terminal has no character that commands it") {
    World world;
    for (const char* form : {"--json", "--events", "--sse"}) {
        INFO(form);
        Terminal terminal(world.command({"ask", form,
                                         "a\x7f"
                                         "b\xc2\x9b"
                                         "31mc\x1b[31md [sim events=3]"}),
                          200, 60);
        CHECK(terminal.wait() == 0);
        for (const char* control : {"\x7f", "\xc2\x9b", "\x1b"})
            CHECK(terminal.written().find(control) == std::string::npos);
        CHECK(terminal.written().find("\\u009b31mc") != std::string::npos);
    }
}

// ---- a crowd -------------------------------------------------------------------------------------------------------

TEST_CASE("a hundred inspectors at full load change no counter of the broker, take no slot and write no record") {
    constexpr std::uint64_t kPrompts = 150;
    World world;
    // One stream that runs all the time, for those who name one.
    Process holding(world.command({"ask", "Hold. [sim events=2 hold-after=1]"}));
    CHECK(eventually([&] { return world.broker().counted(Counter::events_published) == 1; }));
    const auto key = world.run({"keys", "--json"}).json()["keys"][0]["key"].get<std::string>();
    std::string prompts;
    for (std::uint64_t i = 0; i < kPrompts; ++i) prompts += fmt::format("Line {} [sim events=3 gap=50ms]\n", i);
    prompts += "Hold. [sim events=2 hold-after=1]\n"; // nobody is done before the inspectors are
    const TemporaryFile file(prompts);
    const auto load = [&] {
        return std::make_unique<Process>(unread(world.command({"ask", "--lines", "-j", "4"}), file.path()));
    };
    const std::array clients{load(), load()};

    const std::vector<Words> commands{{"keys"},
                                      {"keys", "--watch", "--json", "--every", "10ms", "-n", "20"},
                                      {"show", key},
                                      {"dump", key},
                                      {"dump", key, "--follow", "--format", "raw"},
                                      {"log", "--once"},
                                      {"log", "-f"},
                                      {"top", "--every", "10ms"},
                                      {"stats"},
                                      {"stats", "--prometheus"},
                                      {"templates", "list"},
                                      {"templates", "show", "default", "--json"},
                                      {"notify", "status"},
                                      {"key", "Line 7"}};
    std::vector<std::unique_ptr<Process>> inspectors;
    const auto start = [&](std::size_t i) {
        return std::make_unique<Process>(unread(world.command(commands[i % commands.size()])));
    };
    for (std::size_t i = 0; i < 100; ++i) inspectors.push_back(start(i));
    // A hundred of them look as long as there is load; who has ended comes again.
    std::uint64_t looks = 0, most_slots = 0;
    while (looks < 200 || world.broker().counted(Counter::streams_complete) < kPrompts) {
        for (std::size_t i = 0; i < inspectors.size(); ++i) {
            most_slots = std::max(most_slots, world.broker().counted(Counter::slots_in_use));
            if (!has_ended(inspectors[i]->pid())) continue;
            REQUIRE(inspectors[i]->wait() == 0);
            ++looks;
            inspectors[i] = start(i);
        }
    }
    world.sim().release();
    for (const auto& client : clients) CHECK(client->wait() == 0);
    CHECK(holding.wait() == 0);

    // What the load alone explains: each prompt one call, and one more request for it; two for the held one.
    const auto counted = [&](Counter counter) { return world.broker().counted(counter); };
    constexpr std::uint64_t kStreams = kPrompts + 1, kEvents = 3 * kPrompts + 2;
    CHECK(eventually([&] {
        return counted(Counter::clients_attached) == 0 &&
               counted(Counter::requests_joined) + counted(Counter::requests_fresh) == kPrompts + 2;
    }));
    const std::map<Counter, std::uint64_t> explained{
        {Counter::requests_started, kStreams}, {Counter::upstream_calls, kStreams},
        {Counter::streams_complete, kStreams}, {Counter::streams_reusable, kStreams},
        {Counter::events_published, kEvents},  {Counter::wakes_futex, kEvents + kStreams},
        {Counter::connections_accepted, 3},    {Counter::slots_in_use, kStreams},
        {Counter::snapshots_off, 1},
    };
    // Of these the load explains how many are possible, not how many come: who slept when, which connection was free.
    const std::set<Counter> open{Counter::requests_joined, Counter::requests_fresh,       Counter::bytes_published,
                                 Counter::wakes_socket,    Counter::upstream_connections, Counter::tokens_prompt,
                                 Counter::tokens_answer};
    for (std::size_t i = 0; i < std::size(kCounters); ++i) {
        const auto counter = static_cast<Counter>(i);
        if (open.contains(counter)) continue;
        INFO(kCounters[i].name);
        const auto found = explained.find(counter);
        CHECK(counted(counter) == (found == explained.end() ? 0 : found->second));
    }
    CHECK(most_slots <= kStreams);
    // Started, first event, ended; attached and detached. No inspector is in the log.
    CHECK(world.broker().view().header().log_next.load() == 3 * kStreams + 2 * 3);
    CHECK(std::uint64_t(world.calls()) == kStreams);
    WARN(looks << " looks by a hundred inspectors beside " << kStreams << " streams");
}
