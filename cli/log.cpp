// gcoalesce log: what happened to streams and clients, as it happens.
#include <CLI/App.hpp>
#include <algorithm>
#include <chrono>
#include <deque>
#include <fmt/format.h>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "base/nearest.hpp"
#include "base/units.hpp"
#include "cli/commands.hpp"
#include "cli/inspect.hpp"
#include "cli/log_ring.hpp"
#include "cli/option_values.hpp"
#include "cli/render.hpp"
#include "cli/report.hpp"
#include "cli/template_facts.hpp"
#include "cli/view/escape.hpp"
#include "cli/view/terminal.hpp"
#include "cli/view/utf8.hpp"

namespace gcoalesce::cli {
namespace {

constexpr auto kSlice = std::chrono::milliseconds(100);
constexpr std::size_t kLastOnes = 20; // shown on a terminal before it follows
constexpr std::size_t kTemplateColumns = 12;
constexpr std::size_t kContinued = 4; // further right than the line that it goes on from

constexpr const char* kFooter = R"(
The broker keeps the last 4096 records since its start: when a stream started or came
back from disk, had its first event, was retried, ended, left; who attached; what was
refused; when the window was opened.

On a terminal it shows the last 20 and then follows; in a pipe, all that are there.
--follow and --once choose. A follower that falls behind is told how many it missed.
It needs no running broker: of a dead one, it shows what came last, and exits with 3.

  --filter key=DIGITS        of this key or stream, by its first digits
  --filter template=ID       of this template
  --filter kind=KIND,KIND    of these kinds: started, first_event, ended, retired, retry,
                             notify, attached, detached, evicted, revoked, refused,
                             closed, cancelled, purged, demoted, resumed,
                             reloaded, restored
Filters of one sort let pass what fits any of them; those of different sorts, what fits all.
With --json each line is an object; what was missed is {"missed":N}.)";

struct Arguments {
    std::vector<std::string> filters;
    std::string since;
    bool follow = false, once = false, json = false;
};

struct Filter {
    std::vector<std::string> digits, templates, kinds;

    bool takes(const LogFacts& record, const SegmentView& segment) const;
};

bool Filter::takes(const LogFacts& record, const SegmentView& segment) const {
    const auto fits = [](const std::vector<std::string>& wanted, const auto& one) {
        return wanted.empty() || std::ranges::any_of(wanted, one);
    };
    if (!fits(kinds, [&](const std::string& kind) { return kind == log_kind_name(record.kind); })) return false;
    if (!digits.empty() && record.stream_id == 0) return false;
    const std::string stream = to_hex(record.stream_id), key = key_prefix_hex(record.key_prefix);
    if (!fits(digits, [&](const std::string& wanted) {
            // The record has the key's first 16 digits: more of them cannot be compared.
            return stream.starts_with(wanted) || key.starts_with(wanted.substr(0, key.size()));
        }))
        return false;
    if (!templates.empty() && record.template_index == kNoTemplate) return false;
    return fits(templates, [&](const std::string& id) { return id == template_name(segment, record.template_index); });
}

void add_kinds(Filter& filter, std::string_view list) {
    const std::vector<std::string> known = log_kinds();
    while (!list.empty()) {
        const std::string kind(list.substr(0, list.find(',')));
        list.remove_prefix(std::min(list.size(), kind.size() + 1));
        if (std::ranges::find(known, kind) == known.end())
            throw CLI::ValidationError("--filter",
                                       fmt::format("there is no kind \"{}\"{}", kind, did_you_mean(kind, known)));
        filter.kinds.push_back(kind);
    }
}

Filter filter_of(const std::vector<std::string>& expressions) {
    Filter filter;
    for (const std::string& expression : expressions) {
        const std::size_t at = expression.find('=');
        const std::string name = expression.substr(0, at);
        std::string value = at == std::string::npos ? "" : expression.substr(at + 1);
        if (value.empty() || (name != "key" && name != "template" && name != "kind"))
            throw CLI::ValidationError(
                "--filter", fmt::format("expected key=DIGITS, template=ID or kind=KIND, found \"{}\"", expression));
        if (name == "template") {
            filter.templates.push_back(value);
        } else if (name == "kind") {
            add_kinds(filter, value);
        } else {
            filter.digits.push_back(digits_of("--filter", value));
        }
    }
    return filter;
}

// "14:05:07.123  ended        aabbccdd  9f3c2a71  weather       complete STOP, 12 events"
std::string to_line(const LogFacts& record, const SegmentView& segment) {
    const bool stream = record.stream_id != 0;
    std::string id = record.template_index == kNoTemplate ? "-" : template_name(segment, record.template_index);
    id += std::string(kTemplateColumns - std::min(kTemplateColumns, display_width(id)), ' ');
    const std::string wall = format_wall(record.when_wall_ns);
    const std::string line = fmt::format("{}.{:03}  {:<11}  {:<8}  {:<8}  {}  {}", wall.substr(wall.find(' ') + 1),
                                         record.when_wall_ns / kMillisecond % 1000, log_kind_name(record.kind),
                                         stream ? key_prefix_hex(record.key_prefix).substr(0, 8) : "-",
                                         stream ? to_hex(record.stream_id).substr(0, 8) : "-", escape_line(id),
                                         escape_line(log_details(record)));
    const std::string_view text = std::string_view(line).substr(0, line.find_last_not_of(' ') + 1);
    const std::size_t width = output_columns();
    if (width <= kContinued || display_width(text) <= width) return std::string(text) + "\n"; // 0: a pipe
    return fmt::format("{}\n", fmt::join(wrapped(text, width - kContinued), "\n" + std::string(kContinued, ' ')));
}

class Printer {
  public:
    Printer(const SegmentView& segment, bool json) : segment_(segment), json_(json) {}

    void print(const LogFacts& record, std::uint64_t number) const {
        write_out(json_ ? json_line(to_json(record, number, segment_)) : to_line(record, segment_));
    }
    void missed(std::uint64_t count) const {
        if (count == 0) return;
        if (json_)
            write_out(json_line({{"missed", count}}));
        else
            complain(fmt::format("missed {}: the broker wrote them over", counted(count, "record")));
    }

  private:
    const SegmentView& segment_;
    bool json_;
};

void run_log(Context& context, const Arguments& arguments) {
    const Filter filter = filter_of(arguments.filters);
    if (arguments.follow && arguments.once) throw CLI::ValidationError("--follow, --once", "expected one of them");
    const bool follow = arguments.follow || (!arguments.once && is_terminal(1));
    Nanos since = INT64_MIN;
    if (!arguments.since.empty()) since = system_clock().monotonic() - duration_of("--since", arguments.since);
    const std::optional<Inspection> inspected = inspect(context, arguments.json);
    if (!inspected) return;
    const SegmentView& segment = inspected->segment.view;
    if (const Result<void> known = check_templates(segment, filter.templates); !known)
        return report(context, known.error(), arguments.json);
    const Printer printer(segment, arguments.json);
    LogCursor cursor(segment);

    // What is there already.
    std::deque<std::pair<std::uint64_t, LogFacts>> last;
    const std::size_t most = follow && arguments.since.empty() ? kLastOnes : SIZE_MAX;
    const std::uint64_t end = segment.header().log_next.load(std::memory_order_acquire);
    while (const std::optional<LogFacts> record = cursor.next()) {
        if (record->when_ns >= since && filter.takes(*record, segment)) last.emplace_back(cursor.number(), *record);
        if (last.size() > most) last.pop_front();
        if (cursor.number() + 1 >= end) break; // a busy broker would keep us here
    }
    printer.missed(cursor.take_missed());
    for (const auto& [number, record] : last) printer.print(record, number);

    for (bool last_look = false; follow;) {
        while (const std::optional<LogFacts> record = cursor.next()) {
            printer.missed(cursor.take_missed());
            if (filter.takes(*record, segment)) printer.print(*record, cursor.number());
        }
        printer.missed(cursor.take_missed());
        if (last_look) break;
        const Liveness broker = inspected->segment.liveness(system_clock().monotonic());
        last_look = broker == Liveness::dead || broker == Liveness::closed;
        if (last_look) {
            if (inspected->broker.reachable)
                complain(fmt::format("the broker {}: there will be no more of it",
                                     broker == Liveness::dead ? "died" : "has shut down"));
            context.exit = ExitCode::no_broker;
        } else {
            std::this_thread::sleep_for(kSlice);
        }
    }
}

} // namespace

void add_log(CLI::App& app, Context& context) {
    CLI::App* command = app.add_subcommand("log", "what happened to streams and clients, as it happens");
    auto arguments = std::make_shared<Arguments>();
    command->add_option("--filter", arguments->filters, "only these (may be given again)")
        ->type_name("NAME=VALUE")
        ->allow_extra_args(false);
    command->add_option("--since", arguments->since, "not older than this")->type_name("DURATION");
    command->add_flag("-f,--follow", arguments->follow, "go on with what comes, in a pipe too");
    command->add_flag("-1,--once", arguments->once, "only what is there, on a terminal too");
    command->add_flag("--json", arguments->json, "one object a line");
    command->footer(kFooter);
    command->callback([arguments, &context] { run_log(context, *arguments); });
}

} // namespace gcoalesce::cli
