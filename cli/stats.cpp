// gcoalesce stats: the broker's counters, latencies and errors.
#include <CLI/App.hpp>
#include <fmt/format.h>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <vector>

#include "cli/commands.hpp"
#include "cli/inspect.hpp"
#include "cli/render.hpp"
#include "cli/usage.hpp"
#include "cli/view/escape.hpp"
#include "cli/view/prometheus.hpp"
#include "cli/view/table.hpp"
#include "cli/view/terminal.hpp"
#include "cli/view/utf8.hpp"

namespace gcoalesce::cli {
namespace {

constexpr const char* kFooter = R"(
REQUESTS: how they were served; RESUMED SHARE is of those that were.
CALLS: PAID are HTTP requests sent upstream, retries and failed ones included; AVOIDED
are requests that cost none; COALESCED is their share. TOKENS as upstream reported
them, of failed calls too; PROMPT without those that it had CACHED. SINCE PUSH: the
share of requests that cost no call, by the seconds since the last push. With
--state-dir these are kept across restarts.

Latencies and counters count since the broker's start. A latency is estimated from a
histogram whose buckets double: FIRST EVENT from a stream's opening, JOIN from a
request's arrival at the broker to its stream. Names, units and meanings of counters
are the broker's own, so that a newer broker's show too.

Reads the segment alone; where the broker is dead, it shows what that left, says so,
and exits with 3.)";

struct Latency {
    std::uint64_t count = 0;
    double mean_us = 0, p50_us = 0, p90_us = 0, p99_us = 0;
};

Latency latency_of(const Histogram& histogram) {
    const Buckets buckets = buckets_of(histogram);
    Latency latency;
    latency.count = std::accumulate(buckets.begin(), buckets.end(), std::uint64_t{0});
    if (latency.count == 0) return latency;
    latency.mean_us =
        static_cast<double>(histogram.sum_us.load(std::memory_order_relaxed)) / static_cast<double>(latency.count);
    latency.p50_us = quantile_us(buckets, 0.5).value_or(0);
    latency.p90_us = quantile_us(buckets, 0.9).value_or(0);
    latency.p99_us = quantile_us(buckets, 0.99).value_or(0);
    return latency;
}

std::string format_us(double us) {
    if (us < 1000) return fmt::format("{:.0f}us", us);
    if (us < 1e6) return fmt::format("{:.1f}ms", us / 1e3);
    return fmt::format("{:.1f}s", us / 1e6);
}

nlohmann::ordered_json to_json(const Latency& latency) {
    return {{"count", latency.count},
            {"mean_us", std::llround(latency.mean_us)},
            {"p50_us", std::llround(latency.p50_us)},
            {"p90_us", std::llround(latency.p90_us)},
            {"p99_us", std::llround(latency.p99_us)}};
}

nlohmann::ordered_json to_json(const Inspection& inspected) {
    const SegmentView& segment = inspected.segment.view;
    const Nanos now = system_clock().monotonic();
    const std::vector<TemplateUsage> usage = all_usage(segment);
    const std::vector<DistinctError> errors = distinct_errors(segment);
    const SnapshotFacts snapshots = snapshot_facts(segment);
    nlohmann::ordered_json json{{"version", 1},
                                {"broker", to_json(inspected.broker)},
                                {"memory_bytes", segment.header().prefix.total_bytes},
                                {"extents_bytes", segment.header().extents.count},
                                {"extents_free_bytes", segment.header().extents_free.load(std::memory_order_relaxed)},
                                {"snapshots",
                                 {{"kept", snapshots.kept},
                                  {"kept_bytes", snapshots.bytes},
                                  {"degraded", snapshots.degraded},
                                  {"reason", nullptr}}},
                                {"total", to_json(sum(usage))},
                                {"templates", nlohmann::ordered_json::array()},
                                {"counters", nlohmann::ordered_json::object()},
                                {"errors", nlohmann::ordered_json::array()}};
    if (snapshots.degraded) json["snapshots"]["reason"] = snapshots.reason;
    for (const TemplateUsage& one : usage) {
        const TemplateEntry& entry = segment.template_entry(one.index);
        const Nanos window = entry.window_until.load(std::memory_order_acquire) - now;
        nlohmann::ordered_json of{{"id", one.id}, {"window_remaining_ms", to_ms(window > 0 ? window : 0)}};
        of.update(to_json(one.usage));
        of["first_event"] = to_json(latency_of(entry.first_event));
        of["join"] = to_json(latency_of(entry.join));
        json["templates"].push_back(std::move(of));
    }
    for (std::uint32_t i = 0; i < segment.counter_count(); ++i) {
        const CounterEntry& counter = segment.counter(i);
        const bool gauge = counter.text.kind == static_cast<std::uint32_t>(CounterKind::gauge);
        json["counters"][std::string(counter.text.name.view())] = {
            {"value", counter.value.load(std::memory_order_relaxed)},
            {"unit", counter.text.unit.view()},
            {"kind", gauge ? "gauge" : "counter"},
            {"help", counter.text.help.view()}};
    }
    for (const DistinctError& error : errors) {
        json["errors"].push_back({{"code", code_name(static_cast<Code>(error.facts.code))},
                                  {"upstream_status", error.facts.upstream_status},
                                  {"count", error.count},
                                  {"first_wall_ms", to_ms(error.facts.first_wall_ns)},
                                  {"last_wall_ms", to_ms(error.facts.last_wall_ns)},
                                  {"message", error.facts.message.view()}});
    }
    return json;
}

std::string percent(std::uint64_t part, std::uint64_t whole) {
    const std::optional<double> known = ratio(part, whole);
    return known ? fmt::format("{:.1f}%", *known * 100) : "-";
}

// A table of numbers, of which none may be missing: where the columns do not fit, each row stands by itself, a line for
// each column.
class Numbers {
  public:
    explicit Numbers(std::vector<Column> columns) : columns_(std::move(columns)) {}

    void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }

    std::string render(std::size_t width) const {
        Table whole(columns_);
        for (const std::vector<std::string>& row : rows_) whole.add(row);
        const std::string wide = whole.render(0);
        if (width == 0 || wide.find('\n') <= width) return wide;
        std::string narrow;
        for (const std::vector<std::string>& row : rows_) {
            Table one({{columns_[0].title}, {row[0], Align::right}});
            for (std::size_t i = 1; i < row.size(); ++i) one.add({columns_[i].title, row[i]});
            narrow += (narrow.empty() ? "" : "\n") + one.render(width);
        }
        return narrow;
    }

  private:
    std::vector<Column> columns_;
    std::vector<std::vector<std::string>> rows_;
};

// Tables in the order in which somebody who was paged wants them; each starts with the template.
std::string usage_tables(const std::vector<TemplateUsage>& all, std::size_t width) {
    std::vector<Column> statuses{{"TEMPLATE"}};
    for (const char* title : {"STARTED", "JOINED", "FRESH", "SNAPSHOT", "RESUMED", "INDIVIDUAL", "BYPASS"})
        statuses.push_back({title, Align::right});
    statuses.push_back({"REFUSED", Align::right});
    statuses.push_back({"RESUMED SHARE", Align::right});
    Numbers requests(statuses);
    Numbers calls({{"TEMPLATE"},
                   {"CALLS PAID", Align::right},
                   {"AVOIDED", Align::right},
                   {"COALESCED", Align::right},
                   {"0-5 S SINCE PUSH", Align::right},
                   {"5-10 S", Align::right},
                   {"10-30 S", Align::right},
                   {"30+ S", Align::right}});
    Numbers tokens({{"TEMPLATE"},
                    {"TOKENS"},
                    {"PROMPT", Align::right},
                    {"CACHED", Align::right},
                    {"THOUGHTS", Align::right},
                    {"ANSWER", Align::right}});
    const auto add = [&](const std::string& id, const Usage& usage) {
        std::vector<std::string> row{id};
        for (std::size_t status = GCOALESCE_STARTED; status < kStatuses; ++status)
            row.push_back(fmt::to_string(usage.requests[status]));
        row.push_back(fmt::to_string(usage.requests[GCOALESCE_OPENING]));
        row.push_back(percent(usage.requests[GCOALESCE_RESUMED], usage.served()));
        requests.add(std::move(row));
        const Usage::Share whole = usage.whole();
        row = {id, fmt::to_string(usage.calls_paid), fmt::to_string(whole.coalesced),
               percent(whole.coalesced, whole.requests)};
        for (const Usage::Share& share : usage.since_push)
            row.push_back(share.requests == 0
                              ? "-"
                              : fmt::format("{} of {}", percent(share.coalesced, share.requests), share.requests));
        calls.add(std::move(row));
        for (const auto& [what, of] : {std::pair{"paid", &usage.paid}, {"avoided", &usage.avoided}})
            tokens.add({id, what, fmt::to_string(of->prompt), fmt::to_string(of->cached), fmt::to_string(of->thoughts),
                        fmt::to_string(of->answer)});
    };
    for (const TemplateUsage& one : all) add(one.id, one.usage);
    if (all.size() > 1) add("(all)", sum(all));
    return requests.render(width) + "\n" + calls.render(width) + "\n" + tokens.render(width);
}

std::string to_text(const SegmentView& segment) {
    const std::size_t width = output_columns();
    const std::vector<TemplateUsage> usage = all_usage(segment);
    const std::vector<DistinctError> errors = distinct_errors(segment);
    Numbers latencies({{"TEMPLATE"},
                       {"LATENCY"},
                       {"COUNT", Align::right},
                       {"MEAN", Align::right},
                       {"P50", Align::right},
                       {"P90", Align::right},
                       {"P99", Align::right}});
    for (const TemplateUsage& one : usage) {
        const auto add = [&](const char* what, const Histogram& histogram) {
            const Latency latency = latency_of(histogram);
            if (latency.count == 0) {
                latencies.add({one.id, what, "0", "-", "-", "-", "-"});
            } else {
                latencies.add({one.id, what, fmt::to_string(latency.count), format_us(latency.mean_us),
                               format_us(latency.p50_us), format_us(latency.p90_us), format_us(latency.p99_us)});
            }
        };
        add("first event", segment.template_entry(one.index).first_event);
        add("join", segment.template_entry(one.index).join);
    }
    Table counters({{"COUNTER"}, {"VALUE", Align::right}, {"UNIT"}, {"MEANING", Align::wrapped}});
    for (std::uint32_t i = 0; i < segment.counter_count(); ++i) {
        const CounterEntry& counter = segment.counter(i);
        counters.add({std::string(counter.text.name.view()),
                      fmt::to_string(counter.value.load(std::memory_order_relaxed)),
                      std::string(counter.text.unit.view()), std::string(counter.text.help.view())});
    }
    std::string out;
    if (const SnapshotFacts snapshots = snapshot_facts(segment); snapshots.degraded)
        out = hanging("", "SNAPSHOTS DEGRADED: " + escape_line(snapshots.reason), 0, width) + "\n";
    out += usage_tables(usage, width) + "\n" + latencies.render(width) + "\n" + counters.render(width);
    if (!errors.empty()) {
        Table table(
            {{"ERROR"}, {"COUNT", Align::right}, {"LAST"}, {"STATUS", Align::right}, {"MESSAGE", Align::wrapped}});
        for (const DistinctError& error : errors)
            table.add({code_name(static_cast<Code>(error.facts.code)), fmt::to_string(error.count),
                       format_wall(error.facts.last_wall_ns),
                       error.facts.upstream_status != 0 ? fmt::to_string(error.facts.upstream_status) : "-",
                       std::string(error.facts.message.view())});
        out += "\n" + table.render(width);
    }
    return out;
}

enum class StatsForm { text, json, prometheus };

void run_stats(Context& context, StatsForm form) {
    const std::optional<Inspection> inspected = inspect(context, form == StatsForm::json);
    if (!inspected) return;
    const SegmentView& segment = inspected->segment.view;
    switch (form) {
    case StatsForm::text: return write_out(to_text(segment));
    case StatsForm::json: return write_out(json_line(to_json(*inspected)));
    case StatsForm::prometheus: return write_out(prometheus(segment, inspected->broker.reachable));
    }
}

} // namespace

void add_stats(CLI::App& app, Context& context) {
    CLI::App* command = app.add_subcommand("stats", "requests, calls, tokens, latencies, counters and errors");
    auto form = std::make_shared<StatsForm>(StatsForm::text);
    CLI::Option* json = command->add_flag_callback(
        "--json", [form] { *form = StatsForm::json; }, "one JSON object");
    command
        ->add_flag_callback(
            "--prometheus", [form] { *form = StatsForm::prometheus; }, "Prometheus's text exposition format 0.0.4")
        ->excludes(json);
    command->footer(kFooter);
    command->callback([form, &context] { run_stats(context, *form); });
}

} // namespace gcoalesce::cli
