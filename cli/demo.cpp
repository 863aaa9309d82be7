// gcoalesce demo: the main job before one's eyes. A private broker and a stand-in for Gemini, many processes that ask
// the same at once, and a table of what happened.
#include <CLI/App.hpp>
#include <CLI/Validators.hpp>
#include <algorithm>
#include <csignal>
#include <curl/curl.h>
#include <fmt/format.h>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "base/arguments.hpp"
#include "base/units.hpp"
#include "cli/commands.hpp"
#include "cli/demo/client.hpp"
#include "cli/demo/stage.hpp"
#include "cli/render.hpp"
#include "cli/report.hpp"
#include "cli/view/escape.hpp"
#include "cli/view/table.hpp"
#include "cli/view/terminal.hpp"

namespace gcoalesce::cli {
namespace {

constexpr Nanos kWatchdog = 120 * kSecond;

constexpr const char* kFooter = R"(
Starts gcoalesced and `gcoalesce sim` for itself, in a directory of its own under
TMPDIR, and removes all of it afterwards. No API key is used. --upstream asks another
sim, or a TLS front of one, in place of its own.

Exit code 0: one upstream call was made, and every answer was whole and the same.)";

struct Arguments {
    unsigned requests = 100, processes = 8;
    std::string upstream, ca_file;
    bool json = false;
};

std::size_t append(char* data, std::size_t size, std::size_t count, void* to) {
    static_cast<std::string*>(to)->append(data, size * count);
    return size * count;
}

// How many calls the stand-in has counted.
std::int64_t upstream_calls(const std::string& url, const std::string& ca_file) {
    const std::unique_ptr<CURL, decltype(&curl_easy_cleanup)> curl(curl_easy_init(), curl_easy_cleanup);
    std::string body;
    curl_easy_setopt(curl.get(), CURLOPT_URL, (url + "/sim/calls").c_str());
    curl_easy_setopt(curl.get(), CURLOPT_TIMEOUT, 10L);
    curl_easy_setopt(curl.get(), CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(curl.get(), CURLOPT_FAILONERROR, 1L);
    curl_easy_setopt(curl.get(), CURLOPT_PROXY, "");
    curl_easy_setopt(curl.get(), CURLOPT_WRITEFUNCTION, append);
    curl_easy_setopt(curl.get(), CURLOPT_WRITEDATA, &body);
    if (!ca_file.empty()) curl_easy_setopt(curl.get(), CURLOPT_CAINFO, ca_file.c_str());
    if (const CURLcode code = curl_easy_perform(curl.get()); code != CURLE_OK)
        throw std::runtime_error(fmt::format("cannot ask {} for its count of calls, is it a `gcoalesce sim`? {}", url,
                                             curl_easy_strerror(code)));
    const auto json = nlohmann::json::parse(body, nullptr, false);
    if (!json.is_object() || !json.contains("calls"))
        throw std::runtime_error(url + "/sim/calls does not answer as `gcoalesce sim` would");
    return json["calls"].get<std::int64_t>();
}

// What all the processes saw.
struct Outcome {
    unsigned requests = 0;
    std::int64_t calls = 0;
    std::vector<demo::Report> reports; // one a process
    std::map<std::string, unsigned> digests, statuses;
    std::vector<Nanos> first_event;
    unsigned whole = 0;
    std::string text, trouble;

    bool good() const { return calls == 1 && whole == requests && digests.size() == 1; }
};

Nanos median(std::vector<Nanos> times) {
    if (times.empty()) return 0;
    std::ranges::nth_element(times, times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2));
    return times[times.size() / 2];
}

Nanos least(const std::vector<Nanos>& times) {
    return times.empty() ? 0 : *std::ranges::min_element(times);
}

Nanos most(const std::vector<Nanos>& times) {
    return times.empty() ? 0 : *std::ranges::max_element(times);
}

unsigned of(const std::map<std::string, unsigned>& statuses, const char* status) {
    const auto found = statuses.find(status);
    return found == statuses.end() ? 0 : found->second;
}

Outcome sum_up(std::vector<demo::Report> reports, unsigned requests, std::int64_t calls) {
    Outcome outcome;
    outcome.requests = requests;
    outcome.calls = calls;
    for (const demo::Report& report : reports) {
        for (const auto& [digest, count] : report.digests) outcome.digests[digest] += count;
        for (const auto& [status, count] : report.statuses) outcome.statuses[status] += count;
        outcome.first_event.insert(outcome.first_event.end(), report.first_event.begin(), report.first_event.end());
        outcome.whole += report.whole;
        if (outcome.text.empty()) outcome.text = report.text;
        if (outcome.trouble.empty()) outcome.trouble = report.trouble;
    }
    outcome.reports = std::move(reports);
    return outcome;
}

std::string to_text(const Outcome& outcome) {
    Table table({{"PROCESS"},
                 {"REQUESTS", Align::right},
                 {"FIRST EVENT: MIN", Align::right},
                 {"MEDIAN", Align::right},
                 {"MAX", Align::right},
                 {"BYTES READ", Align::right},
                 {"STARTED", Align::right},
                 {"JOINED", Align::right},
                 {"FRESH", Align::right}});
    const auto add = [&](const std::string& name, std::uint64_t requests, const std::vector<Nanos>& first,
                         std::uint64_t bytes, const std::map<std::string, unsigned>& statuses) {
        table.add({name, fmt::to_string(requests), format_duration(least(first)), format_duration(median(first)),
                   format_duration(most(first)), format_size(bytes), fmt::to_string(of(statuses, "started")),
                   fmt::to_string(of(statuses, "joined")), fmt::to_string(of(statuses, "fresh"))});
    };
    std::uint64_t bytes = 0;
    for (const demo::Report& report : outcome.reports) {
        add(fmt::to_string(report.pid), report.requests, report.first_event, report.bytes, report.statuses);
        bytes += report.bytes;
    }
    add("all", outcome.requests, outcome.first_event, bytes, outcome.statuses);
    std::string out = table.render(output_columns());
    out += fmt::format("\nupstream calls    {}\nwhole answers     {} of {}\ndifferent answers {}\n", outcome.calls,
                       outcome.whole, outcome.requests, outcome.digests.size());
    for (const auto& [digest, count] : outcome.digests) out += fmt::format("  SHA-256 {}  {} times\n", digest, count);
    return out + "\n" + escape_controls(outcome.text) + "\n";
}

nlohmann::ordered_json to_json(const Outcome& outcome) {
    const auto times = [](nlohmann::ordered_json json, const std::vector<Nanos>& first) {
        json["first_event_min_ms"] = to_ms(least(first));
        json["first_event_median_ms"] = to_ms(median(first));
        json["first_event_max_ms"] = to_ms(most(first));
        return json;
    };
    nlohmann::ordered_json json = times({{"version", 1},
                                         {"requests", outcome.requests},
                                         {"upstream_calls", outcome.calls},
                                         {"whole", outcome.whole},
                                         {"different_answers", outcome.digests.size()},
                                         {"statuses", outcome.statuses},
                                         {"text", outcome.text}},
                                        outcome.first_event);
    json["processes"] = nlohmann::ordered_json::array();
    for (const demo::Report& report : outcome.reports)
        json["processes"].push_back(times({{"pid", report.pid},
                                           {"requests", report.requests},
                                           {"event_bytes", report.bytes},
                                           {"statuses", report.statuses}},
                                          report.first_event));
    return json;
}

Outcome play(const Arguments& arguments, demo::Stage& stage) {
    const std::string url = arguments.upstream.empty() ? stage.start_sim() : arguments.upstream;
    stage.start_broker(url, arguments.ca_file);
    // Before any thread exists: libcurl may start some.
    std::vector<demo::Client> clients;
    const unsigned processes = std::min(arguments.processes, arguments.requests);
    for (unsigned i = 0; i < processes; ++i) {
        const unsigned share = arguments.requests / processes + (i < arguments.requests % processes ? 1 : 0);
        clients.push_back(stage.start_client(share));
    }
    for (demo::Client& client : clients) stage.read_line(client); // attached, and waits for the others
    curl_global_init(CURL_GLOBAL_DEFAULT);
    const std::int64_t before = upstream_calls(url, arguments.ca_file);
    stage.go();
    std::vector<demo::Report> reports;
    for (demo::Client& client : clients) reports.push_back(demo::parse_report(stage.read_line(client)));
    return sum_up(std::move(reports), arguments.requests, upstream_calls(url, arguments.ca_file) - before);
}

void run_demo(const Arguments& arguments, Context& context) {
    int signal = 0;
    try {
        demo::Stage stage(kWatchdog);
        const Outcome outcome = play(arguments, stage);
        write_out(arguments.json ? json_line(to_json(outcome)) : to_text(outcome));
        if (!outcome.good()) {
            complain(outcome.trouble.empty() ? "expected one upstream call and the same whole answer for everyone"
                                             : outcome.trouble);
            context.exit = ExitCode::failed;
        }
    } catch (const demo::Interrupted& interrupted) {
        signal = interrupted.signal;
    } // everything is cleaned up here
    if (signal == 0) return;
    std::signal(signal, SIG_DFL);
    ::raise(signal);
}

} // namespace

void add_demo(CLI::App& app, Context& context) {
    CLI::App* command = app.add_subcommand("demo", "many processes, one upstream call, and a table of what happened");
    auto arguments = std::make_shared<Arguments>();
    command->add_option("--requests", arguments->requests, "so many requests at once (default 100)")
        ->check(complaint_of_number)
        ->check(CLI::Range(1u, 10'000u))
        ->type_name("N");
    command->add_option("--processes", arguments->processes, "from so many processes (default 8)")
        ->check(complaint_of_number)
        ->check(CLI::Range(1u, 64u))
        ->type_name("N");
    command->add_option("--upstream", arguments->upstream, "a `gcoalesce sim` that runs already")->type_name("URL");
    command->add_option("--ca-file", arguments->ca_file, "trust these CA certificates for it")->type_name("FILE");
    command->add_flag("--json", arguments->json, "one JSON object");
    command->footer(kFooter);
    command->callback([arguments, &context] { run_demo(*arguments, context); });
}

} // namespace gcoalesce::cli
