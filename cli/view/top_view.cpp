#include "cli/view/top_view.hpp"

#include <algorithm>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>

#include "base/units.hpp"
#include "cli/view/escape.hpp"
#include "cli/view/table.hpp"
#include "cli/view/utf8.hpp"

namespace gcoalesce::cli {
namespace {

using Requests = Usage::Share;

Requests operator-(const Requests& newer, const Requests& older) {
    return {newer.requests - older.requests, newer.coalesced - older.coalesced};
}

std::optional<double> coalesced(const Requests& requests) {
    return ratio(requests.coalesced, requests.requests);
}

std::string percent(const std::optional<double>& ratio) {
    return ratio ? fmt::format("{:.1f} %", 100 * *ratio) : "-";
}

struct Interval {
    Nanos length = 0; // 0: there is no older sample of this broker

    std::optional<double> rate(std::uint64_t more) const {
        if (length <= 0) return std::nullopt;
        return static_cast<double>(more) * static_cast<double>(kSecond) / static_cast<double>(length);
    }
    std::string rate_words(std::uint64_t more) const {
        const std::optional<double> rated = rate(more);
        return rated ? fmt::format("{:.1f}", *rated) : "-";
    }
};

Interval between(const TopSample& before, const TopSample& now) {
    return {before.epoch == now.epoch ? now.when - before.when : 0};
}

std::string latency_words(const std::optional<double>& us) {
    return us ? format_duration(static_cast<Nanos>(*us * 1000)) : "-";
}

struct TemplateRow {
    const TopSample::OfTemplate* of;
    Requests total, recent;
    std::uint64_t upstream_calls; // recent ones, retries included
    std::optional<double> p50, p99;
};

// The slowest upstream first.
std::vector<TemplateRow> template_rows(const TopSample& now, const TopSample& before) {
    std::vector<TemplateRow> rows;
    for (const TopSample::OfTemplate& of : now.templates) {
        TemplateRow row{
            &of, of.usage.whole(), {}, 0, quantile_us(of.first_event, 0.5), quantile_us(of.first_event, 0.99)};
        for (const TopSample::OfTemplate& old : before.templates) {
            if (before.epoch != now.epoch || old.facts.id() != of.facts.id()) continue;
            row.recent = row.total - old.usage.whole();
            row.upstream_calls = of.usage.calls_paid - old.usage.calls_paid;
        }
        rows.push_back(row);
    }
    std::ranges::stable_sort(rows, std::greater{}, [](const TemplateRow& row) { return row.p99.value_or(-1); });
    return rows;
}

struct KeyRow {
    const StreamFacts* stream;
    const std::string* template_id;
    std::uint64_t recent_joins;
};

bool passes(const StreamFacts& stream, const std::string& id, const std::string& filter) {
    const auto has = [&](std::string_view text) { return text.find(filter) != std::string_view::npos; };
    return has(to_hex(stream.key)) || has(to_hex(stream.opening.stream_id)) || has(id) || has(stream.state()) ||
           has(stream.opening.model.view());
}

// The hottest first.
std::vector<KeyRow> key_rows(const TopSample& now, const TopSample& before, const std::string& filter) {
    std::map<StreamId, std::uint64_t> joins;
    if (before.epoch == now.epoch) {
        for (const StreamFacts& stream : before.streams) joins[stream.opening.stream_id] = stream.joins;
    }
    std::vector<KeyRow> rows;
    for (std::size_t i = 0; i < now.streams.size(); ++i) {
        const StreamFacts& stream = now.streams[i];
        if (!passes(stream, now.stream_templates[i], filter)) continue;
        rows.push_back({&stream, &now.stream_templates[i], stream.joins - joins[stream.opening.stream_id]});
    }
    std::ranges::stable_sort(rows, std::greater{}, [](const KeyRow& row) {
        return std::pair{row.recent_joins, std::uint64_t{row.stream->subscribers}};
    });
    return rows;
}

std::string windows_words(const TopSample& now) {
    std::string open;
    std::size_t closed = 0;
    for (const TopSample::OfTemplate& of : now.templates) {
        const Nanos remaining = of.facts.window_remaining(now.when);
        if (remaining == 0)
            ++closed;
        else
            open += fmt::format("{}{} {}", open.empty() ? "" : ", ", of.facts.id(), window_words(remaining));
    }
    if (open.empty()) return "closed";
    return closed == 0 ? open : fmt::format("{}; {} closed", open, closed);
}

// Words one after the other, two blanks apart, on as many lines as they need.
std::vector<std::string> wrapped(const std::vector<std::string>& words, std::size_t columns) {
    std::vector<std::string> lines;
    for (const std::string& word : words) {
        if (lines.empty() || (columns != 0 && display_width(lines.back()) + 2 + display_width(word) > columns))
            lines.push_back(word);
        else
            lines.back() += "  " + word;
    }
    return lines;
}

std::vector<std::string> head(const TopSample& now, const TopSample& before, const std::string& filter,
                              std::size_t columns) {
    const Interval interval = between(before, now);
    const Requests total = now.usage.whole();
    const Requests recent = interval.length > 0 ? total - before.usage.whole() : Requests{};
    const std::uint64_t calls = now.usage.calls_paid;
    const std::uint64_t used = now.extents - std::min(now.extents, now.extents_free);
    std::uint64_t readers = 0;
    for (const StreamFacts& stream : now.streams) readers += stream.subscribers;
    std::vector<std::string> lines;
    const auto add = [&](const std::vector<std::string>& words) {
        for (std::string& line : wrapped(words, columns)) lines.push_back(std::move(line));
    };
    add({fmt::format("{}  {}", format_wall(now.wall_ns), now.broker.instance),
         fmt::format("broker {} {}", now.broker.pid, now.broker.state)});
    if (!filter.empty()) add({fmt::format("filter: {}", filter)});
    add({fmt::format("requests {}/s", interval.rate_words(recent.requests)),
         fmt::format("calls {}/s", interval.rate_words(interval.length > 0 ? calls - before.usage.calls_paid : 0)),
         fmt::format("coalesced {} now, {} in all", percent(coalesced(recent)), percent(coalesced(total)))});
    add({fmt::format("calls avoided {} of {}", total.coalesced, total.requests),
         fmt::format("in flight {}", now.count("streams_in_flight")), fmt::format("readers {}", readers),
         fmt::format("clients {}", now.count("clients_attached"))});
    add({fmt::format("memory {} of {}", format_size(used), format_size(now.extents)),
         fmt::format("streams {} of {}", now.count("slots_in_use"), now.slots),
         fmt::format("windows: {}", windows_words(now))});
    return lines;
}

std::string templates_table(const TopSample& now, const TopSample& before, std::size_t columns) {
    const Interval interval = between(before, now);
    Table table({{"TEMPLATE"},
                 {"REQ/S", Align::right},
                 {"CALLS/S", Align::right},
                 {"AVOIDED", Align::right},
                 {"COALESCED", Align::right},
                 {"P50", Align::right},
                 {"P99", Align::right},
                 {"WINDOW"}});
    for (const TemplateRow& row : template_rows(now, before))
        table.add({row.of->facts.id(), interval.rate_words(row.recent.requests),
                   interval.rate_words(row.upstream_calls), fmt::to_string(row.total.coalesced),
                   percent(coalesced(row.total)), latency_words(row.p50), latency_words(row.p99),
                   window_words(row.of->facts.window_remaining(now.when))});
    return table.render(columns);
}

std::string keys_table(const TopSample& now, const TopSample& before, const std::string& filter, std::size_t columns) {
    const Interval interval = between(before, now);
    Table table({{"KEY"},
                 {"STATE"},
                 {"READERS", Align::right},
                 {"JOINS/S", Align::right},
                 {"JOINS", Align::right},
                 {"AGE", Align::right},
                 {"TEMPLATE"},
                 {"FIRST", Align::right},
                 {"EVENTS", Align::right},
                 {"BYTES", Align::right},
                 {"MODEL"}});
    for (const KeyRow& row : key_rows(now, before, filter)) {
        const StreamFacts& stream = *row.stream;
        const Nanos opened = stream.opening.opened_ns;
        table.add({to_hex(std::span(stream.key).first(4)), stream.evicted ? "evicted" : stream.state(),
                   fmt::to_string(stream.subscribers), interval.rate_words(row.recent_joins),
                   fmt::to_string(stream.joins), format_duration(now.when - opened), *row.template_id,
                   stream.first_event_ns != 0 ? format_duration(stream.first_event_ns - opened) : "-",
                   fmt::to_string(stream.events), format_size(stream.event_bytes),
                   std::string(stream.opening.model.view())});
    }
    return table.render(columns);
}

nlohmann::ordered_json or_null(const std::optional<double>& number) {
    return number ? nlohmann::ordered_json(*number) : nlohmann::ordered_json(nullptr);
}

nlohmann::ordered_json us_or_null(const std::optional<double>& us) {
    return us ? nlohmann::ordered_json(std::llround(*us)) : nlohmann::ordered_json(nullptr);
}

} // namespace

std::uint64_t TopSample::count(const std::string& counter) const {
    const auto found = counters.find(counter);
    return found == counters.end() ? 0 : found->second;
}

TopSample take_sample(const Inspection& inspected) {
    const SegmentView& segment = inspected.segment.view;
    TopSample sample;
    sample.when = system_clock().monotonic();
    sample.wall_ns = system_clock().wall();
    sample.epoch = segment.header().epoch;
    sample.broker = inspected.broker;
    for (std::uint32_t i = 0; i < segment.counter_count(); ++i)
        sample.counters.emplace(segment.counter(i).text.name.view(),
                                segment.counter(i).value.load(std::memory_order_relaxed));
    for (std::uint32_t i = 0; i < segment.template_count(); ++i) {
        std::optional<TemplateFacts> facts = template_facts(segment, i);
        if (!facts || facts->has(template_removed)) continue;
        const TemplateEntry& entry = segment.template_entry(i);
        TopSample::OfTemplate of{std::move(*facts), usage_of(entry), buckets_of(entry.first_event)};
        sample.templates.push_back(std::move(of));
    }
    sample.usage = sum(all_usage(segment));
    sample.streams = all_streams(segment);
    for (const StreamFacts& stream : sample.streams)
        sample.stream_templates.push_back(template_name(segment, stream.opening.template_index));
    sample.slots = segment.slot_count();
    sample.extents = segment.header().extents.count;
    sample.extents_free = segment.header().extents_free.load(std::memory_order_relaxed);
    return sample;
}

std::vector<TopLine> top_lines(const TopSample& now, const TopSample& before, const std::string& filter,
                               std::size_t columns, std::size_t lines) {
    std::vector<TopLine> out;
    const auto add_table = [&](std::string_view table) {
        out.push_back({"", false});
        for (bool heading = true; !table.empty(); heading = false) {
            const std::size_t end = table.find('\n');
            out.push_back({std::string(table.substr(0, end)), heading});
            table.remove_prefix(end + 1);
        }
    };
    for (const std::string& line : head(now, before, filter, columns)) {
        const std::string safe = escape_line(line);
        out.push_back({columns == 0 ? safe : shortened(safe, columns), false});
    }
    add_table(templates_table(now, before, columns));
    add_table(keys_table(now, before, filter, columns));
    if (lines != 0 && out.size() > lines) out.resize(lines);
    return out;
}

nlohmann::ordered_json top_json(const TopSample& now, const TopSample& before, const std::string& filter) {
    const Interval interval = between(before, now);
    const Requests total = now.usage.whole();
    const Requests recent = interval.length > 0 ? total - before.usage.whole() : Requests{};
    const std::uint64_t calls = interval.length > 0 ? now.usage.calls_paid - before.usage.calls_paid : 0;
    nlohmann::ordered_json json{{"version", 1},
                                {"broker", to_json(now.broker)},
                                {"interval_ms", to_ms(interval.length)},
                                {"requests_per_second", or_null(interval.rate(recent.requests))},
                                {"calls_per_second", or_null(interval.rate(calls))},
                                {"coalesce_rate", or_null(coalesced(recent))},
                                {"total_coalesce_rate", or_null(coalesced(total))},
                                {"requests", total.requests},
                                {"calls_avoided", total.coalesced},
                                {"in_flight", now.count("streams_in_flight")},
                                {"clients", now.count("clients_attached")},
                                {"slots_in_use", now.count("slots_in_use")},
                                {"slots", now.slots},
                                {"extents_bytes", now.extents},
                                {"extents_free_bytes", now.extents_free},
                                {"templates", nlohmann::ordered_json::array()},
                                {"keys", nlohmann::ordered_json::array()}};
    for (const TemplateRow& row : template_rows(now, before)) {
        nlohmann::ordered_json one{{"id", row.of->facts.id()},
                                   {"requests_per_second", or_null(interval.rate(row.recent.requests))},
                                   {"calls_per_second", or_null(interval.rate(row.upstream_calls))},
                                   {"calls_avoided", row.total.coalesced},
                                   {"total_coalesce_rate", or_null(coalesced(row.total))},
                                   {"first_event_p50_us", us_or_null(row.p50)},
                                   {"first_event_p99_us", us_or_null(row.p99)}};
        one.update(window_json(row.of->facts, now.when));
        json["templates"].push_back(std::move(one));
    }
    for (const KeyRow& row : key_rows(now, before, filter)) {
        json["keys"].push_back({{"key", to_hex(row.stream->key)},
                                {"stream_id", to_hex(row.stream->opening.stream_id)},
                                {"template", *row.template_id},
                                {"state", row.stream->state()},
                                {"subscribers", row.stream->subscribers},
                                {"joins", row.stream->joins},
                                {"joins_per_second", or_null(interval.rate(row.recent_joins))},
                                {"age_ms", to_ms(now.when - row.stream->opening.opened_ns)},
                                {"events", row.stream->events},
                                {"event_bytes", row.stream->event_bytes}});
    }
    return json;
}

} // namespace gcoalesce::cli
