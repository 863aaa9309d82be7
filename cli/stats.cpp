// gcoalesce stats: the broker's counters, latencies and errors.
#include <CLI/App.hpp>
#include <array>
#include <cmath>
#include <fmt/format.h>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "cli/commands.hpp"
#include "cli/inspect.hpp"
#include "cli/render.hpp"
#include "cli/view/table.hpp"
#include "cli/view/terminal.hpp"

namespace gcoalesce::cli {
namespace {

constexpr const char* kFooter = R"(
Counters count since the broker's start; names, units and explanations are the
broker's own, so that a newer broker's counters show too. Latencies are estimated
from a histogram whose buckets double: FIRST EVENT from an upstream call's start,
JOIN from a request's arrival at the broker to its answer. Reads the segment alone;
where the broker is dead, it shows what that left, says so, and exits with 3.)";

struct Latency {
    std::uint64_t count = 0;
    double mean_us = 0, p50_us = 0, p99_us = 0;
};

// The broker goes on counting: the sum of the buckets, not `count`, belongs to the buckets that were read.
Latency latency_of(const Histogram& histogram) {
    std::array<std::uint64_t, kHistogramBuckets> buckets{};
    Latency latency;
    for (std::size_t i = 0; i < buckets.size(); ++i)
        latency.count += buckets[i] = histogram.buckets[i].load(std::memory_order_relaxed);
    if (latency.count == 0) return latency;
    const auto count = static_cast<double>(latency.count);
    latency.mean_us = static_cast<double>(histogram.sum_us.load(std::memory_order_relaxed)) / count;
    const auto quantile = [&](double q) { // as if a bucket's values lay evenly in it
        double left = q * count;
        for (std::size_t i = 0; i < buckets.size(); ++i) {
            const auto here = static_cast<double>(buckets[i]);
            const double low = i == 0 ? 0 : std::exp2(static_cast<double>(i - 1));
            const double high = std::exp2(static_cast<double>(i));
            if (left <= here && here > 0) return low + (high - low) * left / here;
            left -= here;
        }
        return std::exp2(static_cast<double>(buckets.size() - 1));
    };
    latency.p50_us = quantile(0.5);
    latency.p99_us = quantile(0.99);
    return latency;
}

std::string format_us(double us) {
    if (us < 1000) return fmt::format("{:.0f}us", us);
    if (us < 1e6) return fmt::format("{:.1f}ms", us / 1e3);
    return fmt::format("{:.1f}s", us / 1e6);
}

struct DistinctError {
    ErrorFacts facts{};
    std::uint64_t count = 0;
};

std::vector<DistinctError> distinct_errors(const SegmentView& segment) {
    std::vector<DistinctError> errors;
    for (std::uint32_t i = 0; i < segment.error_count(); ++i) {
        const ErrorEntry& entry = segment.error(i);
        const std::uint64_t before = entry.sequence.load(std::memory_order_acquire);
        const DistinctError error{entry.facts.load(), entry.count.load(std::memory_order_acquire)};
        const bool torn = before % 2 != 0 || entry.sequence.load(std::memory_order_acquire) != before;
        if (!torn && error.facts.code != 0) errors.push_back(error);
    }
    return errors;
}

nlohmann::ordered_json to_json(const Latency& latency) {
    return {{"count", latency.count},
            {"mean_us", std::llround(latency.mean_us)},
            {"p50_us", std::llround(latency.p50_us)},
            {"p99_us", std::llround(latency.p99_us)}};
}

nlohmann::ordered_json to_json(const Inspection& inspected) {
    const SegmentView& segment = inspected.segment.view;
    const Nanos now = system_clock().monotonic();
    nlohmann::ordered_json json{{"version", 1},
                                {"broker", to_json(inspected.broker)},
                                {"memory_bytes", segment.header().prefix.total_bytes},
                                {"extents_bytes", segment.header().extents.count},
                                {"extents_free_bytes", segment.header().extents_free.load(std::memory_order_relaxed)},
                                {"counters", nlohmann::ordered_json::object()},
                                {"templates", nlohmann::ordered_json::array()},
                                {"errors", nlohmann::ordered_json::array()}};
    for (std::uint32_t i = 0; i < segment.counter_count(); ++i) {
        const CounterEntry& counter = segment.counter(i);
        const bool gauge = counter.text.kind == static_cast<std::uint32_t>(CounterKind::gauge);
        json["counters"][std::string(counter.text.name.view())] = {
            {"value", counter.value.load(std::memory_order_relaxed)},
            {"unit", counter.text.unit.view()},
            {"kind", gauge ? "gauge" : "counter"},
            {"help", counter.text.help.view()}};
    }
    for (std::uint32_t i = 0; i < segment.template_count(); ++i) {
        if (!segment.policy(i)) continue;
        const TemplateEntry& entry = segment.template_entry(i);
        const Nanos window = entry.window_until.load(std::memory_order_acquire) - now;
        json["templates"].push_back({{"id", template_name(segment, i)},
                                     {"window_remaining_ms", to_ms(window > 0 ? window : 0)},
                                     {"first_event", to_json(latency_of(entry.first_event))},
                                     {"join", to_json(latency_of(entry.join))}});
    }
    for (const DistinctError& error : distinct_errors(segment)) {
        json["errors"].push_back({{"code", code_name(static_cast<Code>(error.facts.code))},
                                  {"upstream_status", error.facts.upstream_status},
                                  {"count", error.count},
                                  {"first_wall_ms", to_ms(error.facts.first_wall_ns)},
                                  {"last_wall_ms", to_ms(error.facts.last_wall_ns)},
                                  {"message", error.facts.message.view()}});
    }
    return json;
}

std::string to_text(const SegmentView& segment) {
    const std::size_t width = output_columns();
    Table counters({{"COUNTER"}, {"VALUE", Align::right}, {"UNIT"}, {"MEANING"}});
    for (std::uint32_t i = 0; i < segment.counter_count(); ++i) {
        const CounterEntry& counter = segment.counter(i);
        counters.add({std::string(counter.text.name.view()),
                      fmt::to_string(counter.value.load(std::memory_order_relaxed)),
                      std::string(counter.text.unit.view()), std::string(counter.text.help.view())});
    }
    Table latencies({{"TEMPLATE"},
                     {"LATENCY"},
                     {"COUNT", Align::right},
                     {"MEAN", Align::right},
                     {"P50", Align::right},
                     {"P99", Align::right}});
    for (std::uint32_t i = 0; i < segment.template_count(); ++i) {
        if (!segment.policy(i)) continue;
        const auto add = [&](const char* what, const Histogram& histogram) {
            const Latency latency = latency_of(histogram);
            if (latency.count == 0) {
                latencies.add({template_name(segment, i), what, "0", "-", "-", "-"});
            } else {
                latencies.add({template_name(segment, i), what, fmt::to_string(latency.count),
                               format_us(latency.mean_us), format_us(latency.p50_us), format_us(latency.p99_us)});
            }
        };
        add("first event", segment.template_entry(i).first_event);
        add("join", segment.template_entry(i).join);
    }
    std::string out = counters.render(width) + "\n" + latencies.render(width);
    if (const std::vector<DistinctError> errors = distinct_errors(segment); !errors.empty()) {
        Table table({{"ERROR"}, {"COUNT", Align::right}, {"LAST"}, {"STATUS", Align::right}, {"MESSAGE"}});
        for (const DistinctError& error : errors)
            table.add({code_name(static_cast<Code>(error.facts.code)), fmt::to_string(error.count),
                       format_wall(error.facts.last_wall_ns),
                       error.facts.upstream_status != 0 ? fmt::to_string(error.facts.upstream_status) : "-",
                       std::string(error.facts.message.view())});
        out += "\n" + table.render(width);
    }
    return out;
}

void run_stats(Context& context, bool as_json) {
    const std::optional<Inspection> inspected = inspect(context, as_json);
    if (!inspected) return;
    write_out(as_json ? json_line(to_json(*inspected)) : to_text(inspected->segment.view));
}

} // namespace

void add_stats(CLI::App& app, Context& context) {
    CLI::App* command = app.add_subcommand("stats", "counters, latencies and errors");
    auto json = std::make_shared<bool>(false);
    command->add_flag("--json", *json, "one JSON object");
    command->footer(kFooter);
    command->callback([json, &context] { run_stats(context, *json); });
}

} // namespace gcoalesce::cli
