// gcoalesce show: all that the segment knows of one stream, but for its events.
#include <CLI/App.hpp>
#include <fmt/format.h>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/units.hpp"
#include "cli/commands.hpp"
#include "cli/find_stream.hpp"
#include "cli/inspect.hpp"
#include "cli/log_ring.hpp"
#include "cli/redact.hpp"
#include "cli/render.hpp"
#include "cli/report.hpp"
#include "cli/stream_json.hpp"
#include "cli/view/escape.hpp"
#include "cli/view/terminal.hpp"
#include "cli/view/utf8.hpp"
#include "protocol/gemini.hpp"
#include "segment/reader.hpp"

namespace gcoalesce::cli {
namespace {

constexpr const char* kFooter = R"(
NAME is a key or a stream id as `keys` shows them, or the first four digits or more
of one. Where a key has several streams, its newest is meant.

The request is what the broker kept of it, its first 4 KiB; --redact shows how long it
was and what its form is, and nothing that it says. Retries are taken from the log,
which holds the last 4096 records of all streams. The policy is the template's that is
in force now; where that has changed since, it says so. `dump` shows the events.

Reads the segment alone, and pins nothing: what it shows may be gone a moment later.
Exit codes: 1 no such stream; 3 its broker is dead (what is there is shown).)";

struct Arguments {
    std::string name;
    bool redact = false, json = false;
};

// The stream, and what is not in its slot.
struct Shown {
    StreamFacts stream;
    std::optional<TemplatePolicy> policy; // nothing: it is changing at this moment, or gone
    std::string request;                  // as much as was kept
    std::string document;                 // upstream's own error; "": it told none
    std::vector<LogFacts> retries;
};

// Nothing: the slot went to another stream meanwhile.
std::optional<Shown> look(const SegmentView& segment, const StreamFacts& stream) {
    Shown shown{stream, std::nullopt, {}, {}, {}};
    const SlotOpening& opening = stream.opening;
    if (opening.template_index < segment.template_count()) shown.policy = segment.policy(opening.template_index);
    if (opening.request_kept > 0) {
        const std::byte* head = segment.extent_bytes(opening.request_offset, opening.request_kept);
        if (head == nullptr) return std::nullopt;
        shown.request.resize(opening.request_kept);
        copy_out(shown.request.data(), head, shown.request.size());
    }
    if (!stream.in_flight) shown.document = StreamReader(segment, stream.slot, stream.identity).document(stream.ending);
    // Behind the copies: the identity advances before the extent is anybody else's.
    if (segment.slot(stream.slot).generation.load(std::memory_order_acquire) >> 1 != stream.identity)
        return std::nullopt;
    for (LogCursor log(segment); const std::optional<LogFacts> record = log.next();) {
        if (record->kind == static_cast<std::uint32_t>(LogKind::retry) && record->stream_id == opening.stream_id)
            shown.retries.push_back(*record);
    }
    return shown;
}

const char* sharing_word(const SlotOpening& opening) {
    switch (static_cast<gcoalesce_sharing>(opening.sharing)) {
    case GCOALESCE_SHARE_NOT: return "bypass";
    case GCOALESCE_SHARE_REFRESH: return "refresh";
    case GCOALESCE_SHARE: break;
    }
    return "share";
}

const char* checking_word(const SlotOpening& opening) {
    switch (static_cast<AnswerChecking>(opening.checking)) {
    case AnswerChecking::checked: return "checked";
    case AnswerChecking::impossible: return "impossible";
    case AnswerChecking::none: break;
    }
    return "none";
}

nlohmann::ordered_json policy_json(const TemplatePolicy& policy) {
    using Json = nlohmann::ordered_json;
    return {{"revision", to_hex(policy.revision)},
            {"ttl_idle_ms", to_ms(policy.ttl_idle)},
            {"ttl_window_ms", to_ms(policy.ttl_window)},
            {"default_window_ms", to_ms(policy.window)},
            {"linger_ms", to_ms(policy.linger)},
            {"snapshots", (policy.flags & template_snapshots) != 0},
            {"snapshot_ttl_ms", to_ms(policy.snapshot_ttl)},
            {"kv_after_ms", to_ms(policy.kv_after)},
            {"kv_ttl_ms", to_ms(policy.kv_ttl)},
            {"cancel_after_ms", policy.cancel_after < 0 ? Json(nullptr) : Json(to_ms(policy.cancel_after))},
            {"delivery", (policy.flags & template_live) != 0 ? "live" : "validated"}};
}

nlohmann::ordered_json to_json(const Shown& shown, const SegmentView& segment, const Arguments& arguments, Nanos now) {
    const SlotOpening& opening = shown.stream.opening;
    nlohmann::ordered_json json = stream_json(shown.stream, segment, now);
    json["status"] = gcoalesce_status_name(static_cast<gcoalesce_status>(opening.status));
    json["sharing"] = sharing_word(opening);
    const auto hex_or_null = [](std::uint64_t id) {
        return id == 0 ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(to_hex(id));
    };
    json["realm"] = hex_or_null(opening.realm);
    json["individual_of"] = hex_or_null(opening.individual_of);
    json["checking"] = checking_word(opening);
    if (!shown.stream.in_flight) {
        json["ended_wall_ms"] = to_ms(shown.stream.ending.ended_wall_ns);
        json["model_version"] = shown.stream.ending.model_version.view();
        json["retry_ms"] = shown.stream.ending.retry_ms;
        const auto document = nlohmann::ordered_json::parse(shown.document, nullptr, false);
        json["error_document"] = document.is_object() && !arguments.redact ? document : nlohmann::ordered_json(nullptr);
    }
    json["retried"] = nlohmann::ordered_json::array();
    for (const LogFacts& retry : shown.retries)
        json["retried"].push_back({{"retry", retry.number},
                                   {"after_ms", to_ms(retry.when_ns - opening.opened_ns)},
                                   {"code", code_name(static_cast<Code>(retry.code))},
                                   {"upstream_status", retry.upstream_status}});
    json["template_revision"] = to_hex(opening.template_revision);
    json["policy"] = shown.policy ? policy_json(*shown.policy) : nlohmann::ordered_json(nullptr);
    json["request"] = {{"digest", to_hex(opening.request_digest)},
                       {"bytes", opening.request_bytes},
                       {"kept_bytes", opening.request_kept},
                       {"kept", arguments.redact ? redact(shown.request) : shown.request}};
    return json;
}

// "2025-03-09 14:05:07.123"
std::string format_wall_ms(std::int64_t wall_ns) {
    return fmt::format("{}.{:03}", format_wall(wall_ns), wall_ns / kMillisecond % 1000);
}

std::string tokens_words(const SlotEnding& ending) {
    return fmt::format("{} prompt ({} cached), {} thoughts, {} answer, {} in all", ending.prompt_tokens,
                       ending.cached_tokens, ending.thought_tokens, ending.answer_tokens, ending.total_tokens);
}

// Labels and values, one a line.
class Sheet {
  public:
    void add(std::string_view label, std::string_view value) {
        out_ += hanging(label, escape_line(value), kLabel, width_);
    }
    void more(std::string_view value) { add("", value); }
    std::string take() { return std::move(out_); }

  private:
    static constexpr std::size_t kLabel = 13;
    const std::size_t width_ = output_columns();
    std::string out_;
};

void tell_ending(Sheet& sheet, const StreamFacts& stream) {
    const SlotEnding& ending = stream.ending;
    const std::string_view reason = ending.finish_reason.view();
    const Nanos opened = stream.opening.opened_ns;
    sheet.add("ended",
              fmt::format("{}, {} {}", format_wall_ms(ending.ended_wall_ns),
                          format_duration(stream.from_disk() ? opened - ending.ended_ns : ending.ended_ns - opened),
                          stream.from_disk() ? "before it was read from disk" : "after it was opened"));
    std::string how = stream.state();
    if (!reason.empty()) how += fmt::format(", finish reason {}", reason);
    if (ending.code != GCOALESCE_OK) how += fmt::format(", {}", code_name(static_cast<Code>(ending.code)));
    if (ending.upstream_status != 0) how += fmt::format(", HTTP {}", ending.upstream_status);
    if (ending.retry_ms > 0) how += fmt::format(", to be asked again in {}", format_duration(from_ms(ending.retry_ms)));
    sheet.add("ending", how);
    if (!ending.message.view().empty()) sheet.more(ending.message.view());
    sheet.add("tokens", tokens_words(ending));
}

void tell_policy(Sheet& sheet, const Shown& shown) {
    if (!shown.policy) return sheet.add("policy", "its template is no longer there");
    const TemplatePolicy& policy = *shown.policy;
    const std::string on_abandon =
        policy.cancel_after < 0 ? "finish" : "cancel:" + format_duration(policy.cancel_after);
    sheet.add("policy",
              fmt::format("ttl_idle {}, ttl_window {}, linger {}, on_abandon {}", format_duration(policy.ttl_idle),
                          format_duration(policy.ttl_window), format_duration(policy.linger), on_abandon));
    sheet.more((policy.flags & template_snapshots) != 0
                   ? fmt::format("snapshot_ttl {}, kv_after {}, kv_ttl {}", format_duration(policy.snapshot_ttl),
                                 format_duration(policy.kv_after), format_duration(policy.kv_ttl))
                   : std::string("snapshots off"));
    if (policy.revision != shown.stream.opening.template_revision)
        sheet.more(fmt::format("the template has changed since: it was revision {}",
                               to_hex(shown.stream.opening.template_revision)));
}

// Nobody goes on with the broker's streams.
bool is_gone(const BrokerFacts& broker) {
    return broker.state == "dead" || broker.state == "closed";
}

std::string freshness(const StreamFacts& stream, const BrokerFacts& broker, Nanos now) {
    if (is_gone(broker)) return "no: the broker is " + broker.state;
    if (!stream.open_to_joiners) return "no: new requests do not find it";
    if (stream.in_flight) return "yes, while it runs";
    const Nanos fresh = stream.fresh_for(now);
    return fresh > 0 ? fmt::format("yes, for {} more", format_duration(fresh)) : "no: it is no longer fresh";
}

std::string to_text(const Shown& shown, const Inspection& inspected, const Arguments& arguments, Nanos now) {
    const SegmentView& segment = inspected.segment.view;
    const BrokerFacts& broker = inspected.broker;
    const StreamFacts& stream = shown.stream;
    const SlotOpening& opening = stream.opening;
    Sheet sheet;
    sheet.add("key", to_hex(stream.key));
    sheet.add("stream", to_hex(opening.stream_id));
    sheet.add("template", fmt::format("{}, revision {}", template_name(segment, opening.template_index),
                                      to_hex(shown.policy ? shown.policy->revision : opening.template_revision)));
    sheet.add("model", fmt::format("{}, {}", opening.model.view(), method_name(static_cast<Method>(opening.method))));
    if (!stream.in_flight && !stream.ending.model_version.view().empty())
        sheet.more(fmt::format("answered by {}", stream.ending.model_version.view()));
    std::string opened_for = gcoalesce_status_name(static_cast<gcoalesce_status>(opening.status));
    if (opening.sharing == GCOALESCE_SHARE_REFRESH) opened_for += ", refresh";
    if (opening.individual_of != 0) opened_for += fmt::format(", in place of {}", to_hex(opening.individual_of));
    if (opening.realm != 0) opened_for += fmt::format(", realm {}", to_hex(opening.realm));
    if (opening.checking != 0) opened_for += fmt::format(", schema {}", checking_word(opening));
    sheet.add("opened for", opened_for);
    sheet.add("opened", fmt::format("{}, {} ago", format_wall_ms(opening.opened_wall_ns),
                                    format_duration(now - opening.opened_ns)));
    sheet.add("first event",
              stream.first_event_ns == 0
                  ? (stream.events > 0  ? "with all others, from disk"
                     : stream.in_flight ? "none yet"
                                        : "none")
                  : fmt::format("{} after it was opened", format_duration(stream.first_event_ns - opening.opened_ns)));
    if (stream.in_flight)
        sheet.add("ended", is_gone(broker) ? "no, and the broker is " + broker.state : "no, it is in flight");
    else
        tell_ending(sheet, stream);
    if (!shown.document.empty()) sheet.add("upstream", arguments.redact ? "told an error" : "told this error:");
    if (!arguments.redact) {
        std::istringstream lines(shown.document);
        for (std::string line; std::getline(lines, line);) sheet.more(line);
    }
    sheet.add("events", fmt::format("{}, {}{}", stream.events, format_size(stream.event_bytes),
                                    stream.evicted ? ": evicted, they are gone" : ""));
    sheet.add("joinable", freshness(stream, broker, now));
    sheet.add("readers", fmt::format("{} now; {} joined", stream.subscribers, stream.joins));
    sheet.add("retries", fmt::to_string(stream.retries));
    for (const LogFacts& retry : shown.retries)
        sheet.more(fmt::format("+{}  {}", format_duration(retry.when_ns - opening.opened_ns), log_details(retry)));
    if (shown.retries.size() < stream.retries)
        sheet.more(fmt::format("{} of them no longer in the log", stream.retries - shown.retries.size()));
    tell_policy(sheet, shown);
    sheet.add("request",
              fmt::format("{}, SHA-256 {}", format_size(opening.request_bytes), to_hex(opening.request_digest)));
    if (shown.request.empty()) {
        sheet.more("nothing of it was kept");
        return sheet.take();
    }
    if (opening.request_kept < opening.request_bytes)
        sheet.more(fmt::format("its first {}:", format_size(opening.request_kept)));
    std::string text = sheet.take() + "\n" + escape_controls(arguments.redact ? redact(shown.request) : shown.request);
    if (!text.ends_with('\n')) text += '\n';
    return text;
}

void run_show(Context& context, const Arguments& arguments) {
    const std::optional<Inspection> inspected = inspect(context, arguments.json);
    if (!inspected) return;
    const SegmentView& segment = inspected->segment.view;
    const std::optional<StreamFacts> stream = find_stream(context, segment, arguments.name, arguments.json);
    if (!stream) return;
    const std::optional<Shown> shown = look(segment, *stream);
    if (!shown) {
        report(context, Error{GCOALESCE_GONE, "the stream left the segment while it was being looked at", 0},
               arguments.json);
        return;
    }
    const Nanos now = system_clock().monotonic();
    if (!arguments.json) return write_out(to_text(*shown, *inspected, arguments, now));
    nlohmann::ordered_json json{{"version", 1}, {"broker", to_json(inspected->broker)}};
    json["stream"] = to_json(*shown, segment, arguments, now);
    write_out(json_line(json));
}

} // namespace

void add_show(CLI::App& app, Context& context) {
    CLI::App* command = app.add_subcommand("show", "all about one stream: times, request, policy, retries, ending");
    auto arguments = std::make_shared<Arguments>();
    command->add_option("NAME", arguments->name, "the stream's key or id, or how it begins")->required();
    command->add_flag("--redact", arguments->redact, "without what the request says");
    command->add_flag("--json", arguments->json, "one JSON object");
    command->footer(kFooter);
    command->callback([arguments, &context] { run_show(context, *arguments); });
}

} // namespace gcoalesce::cli
