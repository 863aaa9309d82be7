// What the commands print, to the letter: each line of the transcripts in tests/golden that begins with "$ " is given
// to a shell, and what comes of it is compared with what stands below it.
#include <catch2/catch.hpp>
#include <csignal>
#include <fmt/format.h>
#include <regex>

#include "cli/view/utf8.hpp"
#include "tests/integration/cli_segment.hpp"
#include "tests/support/fixtures.hpp"
#include "tests/support/terminal.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;

namespace {

std::string replaced(std::string text, const std::string& what, const std::string& by) {
    for (std::size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += by.size())
        text.replace(at, what.size(), by);
    return text;
}

// What is this run's, and no other's.
std::string masked(std::string text, const Instance& instance) {
    text = replaced(std::move(text), instance.runtime_dir, "RUN");
    text = replaced(std::move(text), instance.segment_name(::geteuid()), "/SEGMENT");
    const std::pair<const char*, const char*> marks[] = {
        {R"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d{3})?)", "DATE"},
        {R"(\d\d:\d\d:\d\d\.\d{3})", "HH:MM:SS.mmm"},
        {R"(\b\d+(\.\d+)?(ms|s) (ago|more|after)\b)", "SPAN $3"},
        {R"((after|fresh for|within) \d+(\.\d+)?(ms|s)\b)", "$1 SPAN"},
        {R"((pid|broker|gcoalesced) \d+)", "$1 N"},
        {R"(revision(s?) [0-9a-f]{16})", "revision$1 REVISION"},
        {R"re("([a-z_]*revision)":"[0-9a-f]{16}")re", R"("$1":"REVISION")"},
        {R"re("([a-z_]*_ms|pid|uid)":\d+)re", R"("$1":N)"},
        {R"(stream [0-9a-f]{16})", "stream STREAM"},
        {R"re("((last_event|stream)_id)":"[0-9a-f]{16})re", R"("$1":"STREAM)"},
        {R"(http://127\.0\.0\.1:\d+)", "http://UPSTREAM"},
        {R"(127\.0\.0\.1 port \d+)", "UPSTREAM"},
    };
    for (const auto& [pattern, mark] : marks) text = std::regex_replace(text, std::regex(pattern), mark);
    return text;
}

std::string marked(const std::string& text, const std::string& mark) {
    std::string out, line;
    for (std::istringstream lines(text); std::getline(lines, line);) out += mark + line + "\n";
    if (!text.empty() && !text.ends_with('\n')) out += mark + "(no line feed)\n";
    return out;
}

std::vector<std::string> in_shell(const Instance& instance, const std::string& line) {
    const std::string directory = std::filesystem::path(gcoalesce_program()).parent_path();
    return {"/usr/bin/env",
            "PATH=" + directory + ":/usr/bin:/bin",
            "GCOALESCE_RUNTIME_DIR=" + instance.runtime_dir,
            "GCOALESCE_INSTANCE=" + instance.name,
            "TZ=UTC",
            "/bin/sh",
            "-c",
            "cd \"$GCOALESCE_RUNTIME_DIR\"; " + line};
}

// On standard error: "! ", an exit code but 0: "= ".
std::string typed(const Instance& instance, const std::string& line) {
    const Ran ran = run(in_shell(instance, line));
    return marked(ran.out, "") + marked(ran.err, "! ") + (ran.code != 0 ? fmt::format("= {}\n", ran.code) : "");
}

// The same on a terminal so wide, where the two outputs are one.
std::string typed_on(const Instance& instance, const std::string& line, unsigned short columns) {
    Terminal terminal(in_shell(instance, line), columns, 24);
    const int code = terminal.wait();
    const std::string written = replaced(terminal.written(), "\r\n", "\n");
    std::string row;
    for (std::istringstream rows(written); std::getline(rows, row);) {
        INFO(line << ": " << row);
        CHECK(cli::display_width(row) <= columns);
    }
    return marked(written, "") + (code != 0 ? fmt::format("= {}\n", code) : "");
}

// The transcript as it is, and as it comes out now, which is left in the working directory where they differ.
template <class Type>
void check_transcript(const std::string& name, const Instance& instance, const Type& type) {
    const std::string told = read_file(source_dir() / "tests/golden" / name);
    std::string now, line;
    for (std::istringstream lines(told); std::getline(lines, line);) {
        if (line.starts_with("#")) now += line + "\n";
        if (line.starts_with("$ ")) now += line + "\n" + masked(type(instance, line.substr(2)), instance) + "\n";
    }
    if (now == told) return;
    std::ofstream(name + ".now") << now;
    std::istringstream old_lines(told), new_lines(now);
    std::string before, after, command;
    while (std::getline(old_lines, before) && std::getline(new_lines, after) && before == after) {
        if (after.starts_with("$ ")) command = after;
    }
    FAIL(name << ": " << command << "\nexpected: " << before << "\n   found: " << after << "\nthe whole of it is in "
              << (std::filesystem::current_path() / (name + ".now")).string());
}

// Hours old, so that no age changes while the test runs.
void age(Segment& segment, StreamRef stream, Nanos by) {
    segment.broker.with_store([&](Store& store) {
        Slot& slot = const_cast<Slot&>(store.slot(stream.slot));
        SlotOpening opening = slot.opening.load();
        opening.opened_ns -= by;
        opening.opened_wall_ns -= by;
        slot.opening.store(opening);
        if (const Nanos first = slot.first_event_ns.load(); first != 0)
            slot.first_event_ns = opening.opened_ns + kSecond;
    });
}

constexpr Nanos kHour = 3600 * kSecond;

// One of each sort, and what went wrong with them.
void fill(Segment& segment) {
    const StreamRef good = segment.open(key_of({0xaa, 0xbb, 0xcc}), 0x1a2b3c4d5e6f7081, {text_event("a \\u001b[1m b")});
    segment.end(good, complete(), 100 * kHour);
    const StreamRef bad = segment.open(key_of({0xbb, 0xcc}), 0x2a2b3c4d5e6f7081, {text_event("half")});
    SlotEnding ending{};
    ending.kind = GCOALESCE_TRUNCATED;
    ending.code = GCOALESCE_CUT_SHORT;
    ending.upstream_status = 200;
    ending.message.assign("upstream closed the connection before the answer's end");
    segment.end(bad, ending);
    const StreamRef running = segment.open(key_of({0xbb, 0xcd}), 0x3a2b3c4d5e6f7081, {text_event("so far")});
    age(segment, good, 5 * kHour);
    age(segment, bad, 4 * kHour);
    age(segment, running, 3 * kHour);
    segment.broker.with_store([](Store& store) {
        Histogram& latencies = const_cast<TemplateEntry&>(store.view().template_entry(0)).first_event;
        for (auto& bucket : latencies.buckets) bucket = 0; // which are this machine's
        latencies.sum_us = 0;
        store.note_error(GCOALESCE_RATE_LIMITED, 429, "upstream's quota of requests a minute is used up: \x1b]0;x\x07");
    });
}

} // namespace

TEST_CASE("every usage error of every command is what the transcript says") {
    const ScratchInstance nowhere;
    check_transcript("usage.txt", *nowhere, typed);
}

TEST_CASE("every command without a broker says what the transcript says") {
    const ScratchInstance nowhere;
    check_transcript("nobody.txt", *nowhere, typed);
}

TEST_CASE("every command shows of a known segment what the transcript shows") {
    Segment segment;
    fill(segment);
    check_transcript("segment.txt", *segment.directory, typed);
}

TEST_CASE("every error of a broker and of upstream is told as the transcript tells it") {
    const ScratchInstance instance;
    const Sim sim;
    TemplateDirectory templates;
    templates.write("news.json", R"({"model": "gemini-2.5-flash", "prompt": "News of {{place}}, please. [sim events=2]",
                                     "variables": {"place": {"enum": ["here", "there"]}}})");
    const Broker broker(*instance, sim.url(),
                        {"--retries", "0", "--ttl-idle", "10min", "--templates", templates.path()});
    check_transcript("broker.txt", *instance, [&](const Instance& at, const std::string& line) {
        return replaced(typed(at, replaced(line, "TEMPLATES", templates.path())), templates.path(), "TEMPLATES");
    });
}

TEST_CASE("every listing stays within a terminal of 40 columns, and is what the transcript shows") {
    Segment segment;
    fill(segment);
    check_transcript("narrow.txt", *segment.directory,
                     [](const Instance& at, const std::string& line) { return typed_on(at, line, 40); });
}

TEST_CASE("what a machine's own names make longer stays within a terminal of 40 columns, too") {
    const ScratchInstance instance;
    const Sim sim;
    const Broker broker(*instance, sim.url());
    Process asking(command(*instance, {"ask", "Hold. [sim events=2 hold-after=1]"}));
    CHECK(eventually([&] { return broker.counted(Counter::events_published) == 1; }));
    const std::string key = run(command(*instance, {"keys", "--json"})).json()["keys"][0]["key"];
    CHECK(typed_on(*instance, "gcoalesce doctor", 40).find("\n    -> ") != std::string::npos);
    CHECK(typed_on(*instance, "gcoalesce clients", 40).starts_with("CLIENT "));
    Terminal show(in_shell(*instance, "gcoalesce show " + key), 40, 24);
    CHECK(show.wait() == 0);
    // The request at its end stands as it was asked.
    CHECK(show.written().starts_with("key          " + key.substr(0, 27) + "\r\n             " + key.substr(27, 27)));
    CHECK(typed_on(*instance, "gcoalesce templates show default", 40).find("ttl_idle") != std::string::npos);
    sim.release();
    CHECK(asking.wait() == 0);
}
