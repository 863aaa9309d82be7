// gcoalesce keys: what is in flight and what is kept.
#include <CLI/App.hpp>
#include <algorithm>
#include <fmt/format.h>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/nearest.hpp"
#include "base/units.hpp"
#include "cli/commands.hpp"
#include "cli/inspect.hpp"
#include "cli/render.hpp"
#include "cli/report.hpp"
#include "cli/template_facts.hpp"
#include "cli/view/table.hpp"
#include "cli/view/terminal.hpp"
#include "protocol/gemini.hpp"

namespace gcoalesce::cli {
namespace {

constexpr const char* kFooter = R"(
One line for each stream in the segment, the newest first. FRESH FOR: how long equal
requests still read it. A state other than complete says how the stream went wrong;
"evicted" that its events are gone.

Reads the segment alone: it needs no running broker and disturbs none. Where the
broker is dead, it shows what that left, says so, and exits with 3.)";

const char* method_name(std::uint8_t method) {
    switch (static_cast<Method>(method)) {
    case Method::unary: return "unary";
    case Method::chat_stream: return "chat_stream";
    case Method::chat_unary: return "chat_unary";
    case Method::pass: return "pass";
    case Method::stream: break;
    }
    return "stream";
}

nlohmann::ordered_json to_json(const StreamFacts& stream, const SegmentView& segment, Nanos now) {
    nlohmann::ordered_json json{
        {"key", to_hex(stream.key)},
        {"stream_id", to_hex(stream.opening.stream_id)},
        {"template", template_name(segment, stream.opening.template_index)},
        {"model", stream.opening.model.view()},
        {"method", method_name(stream.opening.method)},
        {"state", stream.state()},
        {"joinable", stream.open_to_joiners && (stream.in_flight || stream.fresh_for(now) > 0)},
        {"evicted", stream.evicted},
        {"opened_wall_ms", to_ms(stream.opening.opened_wall_ns)},
        {"age_ms", to_ms(now - stream.opening.opened_ns)},
        {"first_event_ms", nullptr},
        {"events", stream.events},
        {"event_bytes", stream.event_bytes},
        {"subscribers", stream.subscribers},
        {"joins", stream.joins},
        {"retries", stream.retries},
        {"upstream_status", stream.upstream_status},
        {"fresh_for_ms", to_ms(stream.fresh_for(now))},
    };
    if (stream.first_event_ns != 0) json["first_event_ms"] = to_ms(stream.first_event_ns - stream.opening.opened_ns);
    if (stream.in_flight) return json;
    json["duration_ms"] = to_ms(stream.ending.ended_ns - stream.opening.opened_ns);
    json["reusable"] = stream.ending.reusable != 0;
    json["finish_reason"] = stream.ending.finish_reason.view();
    json["code"] = code_name(static_cast<Code>(stream.ending.code));
    json["message"] = stream.ending.message.view();
    json["prompt_tokens"] = stream.ending.prompt_tokens;
    json["cached_tokens"] = stream.ending.cached_tokens;
    json["thought_tokens"] = stream.ending.thought_tokens;
    json["answer_tokens"] = stream.ending.answer_tokens;
    json["total_tokens"] = stream.ending.total_tokens;
    return json;
}

// GCOALESCE_NOT_FOUND names the nearest. Templates that are no longer in force may have left streams.
Result<void> check_known(const SegmentView& segment, const std::string& id) {
    std::vector<std::string> known;
    for (std::uint32_t i = 0; i < segment.template_count(); ++i) {
        if (const std::optional<TemplateFacts> facts = template_facts(segment, i)) known.push_back(facts->id());
    }
    if (std::ranges::find(known, id) != known.end()) return {};
    return fail(GCOALESCE_NOT_FOUND, "there is no template \"{}\"{}", id, did_you_mean(id, known));
}

void run_keys(Context& context, const std::string& only, bool as_json) {
    const std::optional<Inspection> inspected = inspect(context, as_json);
    if (!inspected) return;
    const SegmentView& segment = inspected->segment.view;
    if (const Result<void> known = only.empty() ? Result<void>{} : check_known(segment, only); !known) {
        report(context, known.error(), as_json);
        return;
    }
    std::vector<StreamFacts> streams = all_streams(segment);
    if (!only.empty())
        std::erase_if(streams, [&](const StreamFacts& stream) {
            return template_name(segment, stream.opening.template_index) != only;
        });
    const Nanos now = system_clock().monotonic();
    if (as_json) {
        nlohmann::ordered_json json{{"version", 1}, {"broker", to_json(inspected->broker)}};
        json["keys"] = nlohmann::ordered_json::array();
        for (const StreamFacts& stream : streams) json["keys"].push_back(to_json(stream, segment, now));
        write_out(json_line(json));
        return;
    }
    if (inspected->broker.reachable && !context.verbose) complain(broker_line(inspected->broker));
    Table table({{"KEY"},
                 {"TEMPLATE"},
                 {"STATE"},
                 {"AGE", Align::right},
                 {"EVENTS", Align::right},
                 {"BYTES", Align::right},
                 {"SUBSCRIBERS", Align::right},
                 {"JOINS", Align::right},
                 {"FRESH FOR", Align::right},
                 {"MODEL"}});
    for (const StreamFacts& stream : streams) {
        const Nanos fresh = stream.open_to_joiners ? stream.fresh_for(now) : 0;
        table.add({to_hex(std::span(stream.key).first(4)), template_name(segment, stream.opening.template_index),
                   stream.evicted ? "evicted" : stream.state(), format_duration(now - stream.opening.opened_ns),
                   fmt::to_string(stream.events), format_size(stream.event_bytes), fmt::to_string(stream.subscribers),
                   fmt::to_string(stream.joins), fresh > 0 ? format_duration(fresh) : "-",
                   std::string(stream.opening.model.view())});
    }
    write_out(table.render(output_columns()));
}

} // namespace

void add_keys(CLI::App& app, Context& context) {
    CLI::App* command = app.add_subcommand("keys", "what is in flight and what is kept");
    auto only = std::make_shared<std::string>();
    auto json = std::make_shared<bool>(false);
    command->add_option("--template", *only, "of this template only")->type_name("ID");
    command->add_flag("--json", *json, "one JSON object");
    command->footer(kFooter);
    command->callback([only, json, &context] { run_keys(context, *only, *json); });
}

} // namespace gcoalesce::cli
