// gcoalesce advise: whether to coalesce at all.
#include <CLI/App.hpp>
#include <algorithm>
#include <array>
#include <fmt/format.h>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/arguments.hpp"
#include "cli/commands.hpp"
#include "cli/inspect.hpp"
#include "cli/render.hpp"
#include "cli/report.hpp"
#include "cli/usage.hpp"
#include "cli/view/table.hpp"
#include "cli/view/terminal.hpp"
#include "cli/view/utf8.hpp"
#include "protocol/gemini.hpp"

namespace gcoalesce::cli {
namespace {

constexpr std::uint64_t kIdentical = 50;
constexpr Nanos kSoon = 10 * kSecond;

constexpr const char* kFooter = R"(
Four steps, all of which must hold for coalescing to pay:
  1  50 or more identical requests come within 10 s of a push
  2  prompts are split into a template and its variables
  3  answers are streamed
  4  more than 10,000 JPY a month are spent (--threshold, --currency)

--measured answers what the segment tells: step 1 by the key with the most requests of
those that came within 10 s of the last push and are still there, so ask within the
half minute behind it; step 2 by the share of requests that name a template, half of
them being enough; step 3 by the streams that are there. An option that is given wins.
Every step needs an answer.)";

constexpr const char* kCoalesce = "coalesce: all four steps hold";
constexpr const char* kCache = "do not coalesce: use a plain cache with in-process dedup";

struct Arguments {
    std::optional<std::uint64_t> identical;
    std::string templates, streaming; // "yes", "no", "": not told
    std::optional<double> spend;
    double threshold = 10'000;
    std::string currency = "JPY";
    bool measured = false, json = false;
};

struct Step {
    const char *name, *option, *question;
    std::optional<bool> holds;
    std::string found; // in words; or why it cannot be measured
};

using Steps = std::array<Step, 4>;

void set_identical(Step& step, std::uint64_t most) {
    step.holds = most >= kIdentical;
    step.found = fmt::format("{}", most);
}

void set_spend(Step& step, const Arguments& arguments) {
    if (!arguments.spend) return;
    step.holds = *arguments.spend > arguments.threshold;
    step.found = fmt::format("{:.2f} {} a month", *arguments.spend, arguments.currency);
}

void set_word(Step& step, const std::string& word) {
    if (word.empty()) return;
    step.holds = word == "yes";
    step.found = word;
}

// Of each key that was asked for soon behind the last push, as far as its streams are there.
void measure_identical(Step& step, const SegmentView& segment, const std::vector<StreamFacts>& streams) {
    std::map<Key, std::uint64_t> requests;
    for (const StreamFacts& stream : streams) {
        if (stream.opening.template_index >= segment.template_count()) continue;
        const Nanos pushed =
            segment.template_entry(stream.opening.template_index).pushed.load(std::memory_order_acquire);
        const Nanos since = stream.opening.opened_ns - pushed;
        if (pushed != 0 && since >= 0 && since <= kSoon) requests[stream.key] += stream.joins + 1;
    }
    if (requests.empty()) {
        step.found = "no stream of the last push is there any more";
        return;
    }
    set_identical(step, std::ranges::max_element(requests, {}, [](const auto& one) { return one.second; })->second);
}

void measure_templates(Step& step, const SegmentView& segment) {
    std::uint64_t named = 0, all = 0;
    for (const TemplateUsage& one : all_usage(segment)) {
        all += one.usage.served();
        if (one.id != "default") named += one.usage.served();
    }
    const std::optional<double> share = ratio(named, all);
    if (share) step.holds = *share >= 0.5;
    step.found = share ? fmt::format("{:.1f} % of {} requests name a template", *share * 100, all)
                       : "no requests have been counted yet";
}

void measure_streaming(Step& step, const std::vector<StreamFacts>& streams) {
    const auto count = static_cast<std::uint64_t>(std::ranges::count_if(streams, [](const StreamFacts& stream) {
        return static_cast<Method>(stream.opening.method) == Method::stream;
    }));
    const std::optional<double> share = ratio(count, streams.size());
    if (share) step.holds = *share >= 0.5;
    step.found =
        share ? fmt::format("{} of {} answers are streamed", count, streams.size()) : "no answer is in the segment";
}

void run_advise(Context& context, const Arguments& arguments) {
    Steps steps{
        Step{"identical_requests", "--identical", "50 or more identical requests within 10 s of a push", {}, {}},
        {"templates", "--templates", "prompts are split into a template and variables", {}, {}},
        {"streaming", "--streaming", "answers are streamed", {}, {}},
        {"spend", "--spend", "the monthly spend is above the threshold", {}, "it has to be told"}};
    if (arguments.measured) {
        const std::optional<Inspection> inspected = inspect(context, arguments.json);
        if (!inspected) return;
        const std::vector<StreamFacts> streams = all_streams(inspected->segment.view);
        measure_identical(steps[0], inspected->segment.view, streams);
        measure_templates(steps[1], inspected->segment.view);
        measure_streaming(steps[2], streams);
    }
    if (arguments.identical) set_identical(steps[0], *arguments.identical);
    set_word(steps[1], arguments.templates);
    set_word(steps[2], arguments.streaming);
    set_spend(steps[3], arguments);
    for (const Step& step : steps) {
        if (step.holds) continue;
        throw CLI::ValidationError(step.option, step.found.empty()
                                                    ? std::string("expected an answer to this step, or --measured")
                                                    : fmt::format("expected an answer to this step: {}", step.found));
    }
    const bool coalesce = std::ranges::all_of(steps, [](const Step& step) { return *step.holds; });
    if (arguments.json) {
        nlohmann::ordered_json json{{"version", 1}, {"advice", coalesce ? "coalesce" : "cache"}};
        json["steps"] = nlohmann::ordered_json::array();
        for (const Step& step : steps)
            json["steps"].push_back({{"step", step.name}, {"holds", *step.holds}, {"found", step.found}});
        return write_out(json_line(json));
    }
    Table table({{"STEP", Align::right}, {"HOLDS"}, {"QUESTION"}, {"FOUND", Align::wrapped}});
    for (std::size_t i = 0; i < steps.size(); ++i)
        table.add({fmt::to_string(i + 1), *steps[i].holds ? "yes" : "no", steps[i].question, steps[i].found});
    const std::size_t width = output_columns();
    write_out(table.render(width) + "\n" + hanging("", coalesce ? kCoalesce : kCache, 0, width));
}

} // namespace

void add_advise(CLI::App& app, Context& context) {
    CLI::App* command = app.add_subcommand("advise", "whether coalescing pays at all");
    auto arguments = std::make_shared<Arguments>();
    command
        ->add_option("--identical", arguments->identical, "the most identical requests within 10 s of a push (step 1)")
        ->check(complaint_of_number)
        ->type_name("N");
    command->add_option("--templates", arguments->templates, "are prompts split into template and variables (step 2)")
        ->check(CLI::IsMember({"yes", "no"}))
        ->type_name("yes|no");
    command->add_option("--streaming", arguments->streaming, "are answers streamed (step 3)")
        ->check(CLI::IsMember({"yes", "no"}))
        ->type_name("yes|no");
    command->add_option("--spend", arguments->spend, "what a month's calls cost (step 4)")
        ->check(complaint_of_number)
        ->check(CLI::Range(0.0, 1e15))
        ->type_name("N");
    command->add_option("--threshold", arguments->threshold, "above which spend it pays (default 10000)")
        ->check(complaint_of_number)
        ->check(CLI::Range(0.0, 1e15))
        ->type_name("N");
    command->add_option("--currency", arguments->currency, "its name (default: JPY)")->type_name("NAME");
    command->add_flag("--measured", arguments->measured, "answer steps 1 to 3 by what the segment tells");
    command->add_flag("--json", arguments->json, "one JSON object");
    command->footer(kFooter);
    command->callback([arguments, &context] { run_advise(context, *arguments); });
}

} // namespace gcoalesce::cli
