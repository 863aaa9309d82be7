// gcoalesce keys: what is in flight and what is kept.
#include <CLI/App.hpp>
#include <CLI/Validators.hpp>
#include <algorithm>
#include <array>
#include <chrono>
#include <fmt/format.h>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/arguments.hpp"
#include "base/nearest.hpp"
#include "base/units.hpp"
#include "cli/commands.hpp"
#include "cli/inspect.hpp"
#include "cli/option_values.hpp"
#include "cli/render.hpp"
#include "cli/report.hpp"
#include "cli/stream_json.hpp"
#include "cli/template_facts.hpp"
#include "cli/view/table.hpp"
#include "cli/view/terminal.hpp"

namespace gcoalesce::cli {
namespace {

constexpr const char* kFooter = R"(
One line for each stream in the segment, the newest first. FRESH FOR: how long equal
requests still read it. JOINS: the requests that it served beside the one that it was
opened for. A state other than complete says how the stream went wrong; "evicted" that
its events are gone.

Filters that are given more than once let pass what fits any of them; different ones,
what fits all. --watch shows it again and again: on a terminal in place, else one table,
or with --json one object a line, after the other.

Reads the segment alone: it needs no running broker and disturbs none. Where the
broker is dead, it shows what that left, says so, and exits with 3.)";

constexpr std::array kStates{"in_flight", "complete",  "failed",      "truncated",
                             "invalid",   "cancelled", "interrupted", "evicted"};
constexpr std::array kOrders{"age",   "key",         "stream", "state", "template", "events",
                             "bytes", "subscribers", "joins",  "fresh", "model"};

struct Arguments {
    std::vector<std::string> templates, states, prefixes;
    std::string older_than, younger_than, sort = "age", every = "1s";
    bool reverse = false, watch = false, json = false;
    std::uint64_t count = 0;
};

// What of the command line is no text.
struct Selection {
    std::vector<std::string> templates, states, prefixes; // lower-case digits
    Nanos least_age = 0, most_age = INT64_MAX;

    bool takes(const StreamFacts& stream, const SegmentView& segment, Nanos now) const;
};

const char* shown_state(const StreamFacts& stream) {
    return stream.evicted ? "evicted" : stream.state();
}

bool any(const std::vector<std::string>& wanted, const std::function<bool(const std::string&)>& fits) {
    return wanted.empty() || std::ranges::any_of(wanted, fits);
}

bool Selection::takes(const StreamFacts& stream, const SegmentView& segment, Nanos now) const {
    const Nanos age = now - stream.opening.opened_ns;
    if (age < least_age || age > most_age) return false;
    return any(states, [&](const std::string& state) { return state == shown_state(stream); }) &&
           any(templates,
               [&](const std::string& id) { return id == template_name(segment, stream.opening.template_index); }) &&
           any(prefixes, [&](const std::string& digits) {
               return to_hex(stream.key).starts_with(digits) || to_hex(stream.opening.stream_id).starts_with(digits);
           });
}

template <std::size_t N>
void check_word(const char* option, const std::string& word, const std::array<const char*, N>& known) {
    if (std::ranges::find(known, word) != known.end()) return;
    const std::vector<std::string> words(known.begin(), known.end());
    throw CLI::ValidationError(option, fmt::format("expected one of {}, found \"{}\"{}", fmt::join(words, ", "), word,
                                                   did_you_mean(word, words)));
}

Selection selection_of(const Arguments& arguments) {
    Selection selection{arguments.templates, arguments.states, arguments.prefixes};
    for (const std::string& state : arguments.states) check_word("--state", state, kStates);
    for (std::string& digits : selection.prefixes) digits = digits_of("--key", digits);
    if (!arguments.older_than.empty()) selection.least_age = duration_of("--older-than", arguments.older_than);
    if (!arguments.younger_than.empty()) selection.most_age = duration_of("--younger-than", arguments.younger_than);
    return selection;
}

// Texts from a to z, numbers from the largest; times from now on away.
void sort(std::vector<StreamFacts>& streams, const std::string& by, const SegmentView& segment, Nanos now) {
    const auto largest = [&](auto number) { std::ranges::stable_sort(streams, std::greater{}, number); };
    const auto first = [&](auto text) { std::ranges::stable_sort(streams, std::less{}, text); };
    const auto fresh_for = [&](const StreamFacts& s) { return s.open_to_joiners ? s.fresh_for(now) : 0; };
    if (by == "key") return first(&StreamFacts::key);
    if (by == "stream") return first([](const StreamFacts& s) { return s.opening.stream_id; });
    if (by == "state") return first([](const StreamFacts& s) { return std::string_view(shown_state(s)); });
    if (by == "template")
        return first([&](const StreamFacts& s) { return template_name(segment, s.opening.template_index); });
    if (by == "model") return first([](const StreamFacts& s) { return std::string(s.opening.model.view()); });
    if (by == "events") return largest(&StreamFacts::events);
    if (by == "bytes") return largest(&StreamFacts::event_bytes);
    if (by == "subscribers") return largest(&StreamFacts::subscribers);
    if (by == "joins") return largest(&StreamFacts::joins);
    if (by == "fresh") return largest(fresh_for);
    // "age": as all_streams() has them
}

std::string table_of(const std::vector<StreamFacts>& streams, const SegmentView& segment, Nanos now) {
    Table table({{"KEY"},
                 {"STREAM"},
                 {"STATE"},
                 {"AGE", Align::right},
                 {"TEMPLATE"},
                 {"EVENTS", Align::right},
                 {"BYTES", Align::right},
                 {"SUBSCRIBERS", Align::right},
                 {"JOINS", Align::right},
                 {"FRESH FOR", Align::right},
                 {"MODEL"}});
    for (const StreamFacts& stream : streams) {
        const Nanos fresh = stream.open_to_joiners ? stream.fresh_for(now) : 0;
        table.add({to_hex(std::span(stream.key).first(4)), to_hex(stream.opening.stream_id).substr(0, 8),
                   shown_state(stream), format_duration(now - stream.opening.opened_ns),
                   template_name(segment, stream.opening.template_index), fmt::to_string(stream.events),
                   format_size(stream.event_bytes), fmt::to_string(stream.subscribers), fmt::to_string(stream.joins),
                   fresh > 0 ? format_duration(fresh) : "-", std::string(stream.opening.model.view())});
    }
    return table.render(output_columns());
}

// Shows them as they stand now. False: that was not possible, or will not change any more.
bool show(Context& context, const Arguments& arguments, const Selection& selection) {
    const std::optional<Inspection> inspected = inspect(context, arguments.json);
    if (!inspected) return false;
    const SegmentView& segment = inspected->segment.view;
    if (const Result<void> known = check_templates(segment, selection.templates); !known) {
        report(context, known.error(), arguments.json);
        return false;
    }
    const Nanos now = system_clock().monotonic();
    std::vector<StreamFacts> streams = all_streams(segment);
    std::erase_if(streams, [&](const StreamFacts& stream) { return !selection.takes(stream, segment, now); });
    sort(streams, arguments.sort, segment, now);
    if (arguments.reverse) std::ranges::reverse(streams);
    if (arguments.json) {
        nlohmann::ordered_json json{{"version", 1}, {"broker", to_json(inspected->broker)}};
        json["keys"] = nlohmann::ordered_json::array();
        for (const StreamFacts& stream : streams) json["keys"].push_back(stream_json(stream, segment, now));
        write_out(json_line(json));
    } else if (arguments.watch && is_terminal(1)) {
        repaint(broker_line(inspected->broker) + "\n\n" + table_of(streams, segment, now));
    } else {
        if (inspected->broker.reachable && !context.verbose && !arguments.watch)
            complain(broker_line(inspected->broker));
        write_out(table_of(streams, segment, now) + (arguments.watch ? "\n" : ""));
    }
    return inspected->broker.reachable;
}

void run_keys(const Arguments& arguments, Context& context) {
    const Selection selection = selection_of(arguments);
    check_word("--sort", arguments.sort, kOrders);
    const Nanos every = duration_of("--every", arguments.every);
    if (every < 10 * kMillisecond)
        throw CLI::ValidationError("--every", "expected at least 10ms, found " + arguments.every);
    if (arguments.watch && is_terminal(1) && !arguments.json) write_out("\x1b[2J");
    for (std::uint64_t shown = 1; show(context, arguments, selection) && arguments.watch; ++shown) {
        if (shown == arguments.count) return;
        std::this_thread::sleep_for(std::chrono::nanoseconds(every));
    }
}

} // namespace

void add_keys(CLI::App& app, Context& context) {
    CLI::App* command = app.add_subcommand("keys", "what is in flight and what is kept");
    auto arguments = std::make_shared<Arguments>();
    command->add_option("--template", arguments->templates, "of this template (may be given again)")
        ->type_name("ID")
        ->allow_extra_args(false)
        ->group("Filters");
    command->add_option("--state", arguments->states, fmt::format("in this state: {}", fmt::join(kStates, ", ")))
        ->type_name("STATE")
        ->allow_extra_args(false)
        ->group("Filters");
    command->add_option("--key", arguments->prefixes, "whose key or stream id begins so")
        ->type_name("DIGITS")
        ->allow_extra_args(false)
        ->group("Filters");
    command->add_option("--older-than", arguments->older_than, "opened at least this long ago")
        ->type_name("DURATION")
        ->group("Filters");
    command->add_option("--younger-than", arguments->younger_than, "opened at most this long ago")
        ->type_name("DURATION")
        ->group("Filters");
    command->add_option("--sort", arguments->sort, fmt::format("by {} (default age)", fmt::join(kOrders, ", ")))
        ->type_name("BY");
    command->add_flag("-r,--reverse", arguments->reverse, "the other way round");
    command->add_flag("--watch", arguments->watch, "again and again");
    command->add_option("--every", arguments->every, "with --watch: how often (default 1s)")->type_name("DURATION");
    command->add_option("-n,--count", arguments->count, "with --watch: so many times, then end")
        ->check(complaint_of_number)
        ->type_name("N");
    command->add_flag("--json", arguments->json, "one JSON object");
    command->footer(kFooter);
    command->callback([arguments, &context] { run_keys(*arguments, context); });
}

} // namespace gcoalesce::cli
