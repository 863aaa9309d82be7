// gcoalesce key: how a request's key comes about, and what would become of the request now.
#include <CLI/App.hpp>
#include <algorithm>
#include <fmt/format.h>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <unistd.h>
#include <vector>

#include "base/canonical_json.hpp"
#include "base/units.hpp"
#include "cli/commands.hpp"
#include "cli/inspect.hpp"
#include "cli/render.hpp"
#include "cli/report.hpp"
#include "cli/request_options.hpp"
#include "cli/template_facts.hpp"
#include "cli/view/escape.hpp"
#include "cli/view/terminal.hpp"
#include "cli/view/utf8.hpp"
#include "protocol/control.hpp"
#include "protocol/key.hpp"
#include "templates/template.hpp"

namespace gcoalesce::cli {
namespace {

constexpr const char* kFooter = R"(
Takes the request as `ask` does, asks nobody, and prints all that goes into its key: two
requests share an answer if, and only if, they agree in all of it. The body counts in a
canonical form; what that left out, filled in or spelled in another way is told.

Then it says what would happen to the request at this moment: it would *join* a running
stream, *hit* a finished answer that is still fresh, *start* a call, or be refused
(*busy*: the stream has all the readers that its template allows; *draining*, or *none*
where there is no broker). What upstream refuses for now, and whether there are more calls
than allowed at once, only the broker knows: `gcoalesce log --filter kind=retry,refused`.

Templates and streams are read out of the segment; it needs no running broker.)";

// What distinguishes the canonical form from what was given; JSON pointers and names.
struct Changes {
    std::vector<std::string> left_out, filled_in, normalised;
    std::size_t sorted = 0; // objects whose members stood in another order
    bool respelled = false; // space, escapes, numbers
};

struct Explained {
    TemplateFacts facts;
    KeyParts parts;
    std::string realm, model, asked; // what the parts view
    std::string canonical;           // of the body or the variables, also beside an explicit key
    bool realm_ignored = false;
    Changes changes;
    Key key{};
};

// Objects whose members are not in the order of their names' bytes.
std::size_t unsorted(const nlohmann::ordered_json& value) {
    std::size_t count = 0;
    if (value.is_object()) {
        const auto& members = value.get_ref<const nlohmann::ordered_json::object_t&>();
        count = std::ranges::is_sorted(members, std::less{},
                                       [](const auto& member) -> const std::string& { return member.first; })
                    ? 0
                    : 1;
    }
    if (value.is_structured())
        for (const nlohmann::ordered_json& inner : value) count += unsorted(inner);
    return count;
}

// canonical_request()'s rules, told of a body that it took.
Changes changes_of(const std::string& body, const std::string& canonical) {
    Changes changes;
    const auto given = nlohmann::ordered_json::parse(body);
    changes.sorted = unsorted(given);
    nlohmann::json sorted = given;
    for (const char* name : {"generationConfig", "safetySettings", "tools"}) {
        const auto member = sorted.find(name);
        if (member == sorted.end() || !member->is_structured() || !member->empty()) continue;
        if (member->is_object() != (std::string_view(name) == "generationConfig")) continue;
        changes.left_out.push_back(std::string("/") + name);
        sorted.erase(member);
    }
    const auto contents = sorted.find("contents");
    if (contents != sorted.end() && contents->is_array() && contents->size() == 1 && contents->front().is_object() &&
        !contents->front().contains("role")) {
        contents->front()["role"] = "user";
        changes.filled_in.emplace_back("/contents/0/role");
    }
    changes.respelled = given.dump() != body || sorted.dump() != canonical;
    return changes;
}

Changes changes_of(const Template& with, const std::string& variables, const TemplateValues& values) {
    Changes changes;
    const auto given = nlohmann::json::parse(variables);
    for (std::size_t i = 0; i < with.variables.size(); ++i) {
        const std::string& name = with.variables[i].name;
        const auto value = given.find(name);
        if (value == given.end())
            changes.filled_in.push_back(name);
        else if (*value != values.values[i])
            changes.normalised.push_back(name);
    }
    return changes;
}

// As the broker's prepare() has it.
Result<void> explain(Explained& to, const SegmentView& segment, const Question& question) {
    if (question.body.empty() || question.body.size() > kMaxBody)
        return fail(GCOALESCE_BAD_REQUEST, "expected a request body of 1 to {} bytes, found {}", kMaxBody,
                    question.body.size());
    if (question.realm.size() > kMaxRealm) return fail(GCOALESCE_BAD_REQUEST, "a realm has at most 128 bytes");
    if (question.explicit_key.size() > kMaxExplicitKey)
        return fail(GCOALESCE_BAD_REQUEST, "an explicit key has at most 256 bytes");
    const std::string id = question.template_id.empty() ? std::string(kDefaultTemplate) : question.template_id;
    Result<TemplateFacts> facts = find_template(segment, id);
    if (!facts) return tl::unexpected(facts.error());
    to.facts = *std::move(facts);

    if (id == kDefaultTemplate) {
        Result<std::string> model = resolve_model(question.model);
        if (!model) return tl::unexpected(model.error());
        to.model = *std::move(model);
        Result<std::string> canonical = canonical_request(question.body);
        if (!canonical) return tl::unexpected(canonical.error());
        to.canonical = *std::move(canonical);
        to.changes = changes_of(question.body, to.canonical);
    } else {
        if (to.facts.source.empty())
            return fail(GCOALESCE_NO_MEMORY, "the segment had no room for the file of template \"{}\"", id);
        const Result<Template> file = parse_template(id, to.facts.source);
        if (!file) return tl::unexpected(file.error());
        const Result<TemplateValues> values = read_variables(*file, question.body);
        if (!values) return tl::unexpected(values.error());
        to.model = file->model;
        to.canonical = values->canonical;
        to.changes = changes_of(*file, question.body, *values);
    }
    if (!question.explicit_key.empty() && !to.facts.has(template_explicit_keys))
        return fail(GCOALESCE_BAD_REQUEST, "template \"{}\" does not let requests bring a key of their own", id);
    if (to.facts.has(template_realms))
        to.realm = question.realm;
    else
        to.realm_ignored = !question.realm.empty();
    to.asked = question.explicit_key.empty() ? to.canonical : question.explicit_key;

    to.parts.realm = to.realm;
    to.parts.template_id = to.facts.policy.id.view();
    to.parts.template_revision = to.facts.policy.revision;
    to.parts.model = to.model;
    to.parts.method = question.stream ? Method::stream : Method::unary;
    to.parts.asked = to.asked;
    to.parts.explicit_key = !question.explicit_key.empty();
    to.key = compute_key(to.parts);
    return {};
}

// ---- what would happen now -----------------------------------------------------------------------------------------

struct Verdict {
    const char* word; // "join", "hit", "start", "busy", "draining", "none"
    std::string why;
    std::optional<StreamFacts> stream = std::nullopt; // that it is about
    bool maybe_on_disk = false;
};

bool open_to(const StreamFacts& stream, Nanos now) {
    return stream.open_to_joiners && (stream.in_flight || stream.fresh_for(now) > 0);
}

std::optional<StreamFacts> joinable(const SegmentView& segment, const Key& key, Nanos now) {
    const std::optional<SegmentView::Found> found = segment.look_up(key);
    if (!found) return std::nullopt;
    std::optional<StreamFacts> stream = stream_facts(segment, found->slot);
    if (!stream || stream->identity != found->identity || stream->key != key || !open_to(*stream, now))
        return std::nullopt;
    return stream;
}

// Why the stream is given to nobody any more.
std::string why_not(const StreamFacts& stream, Nanos now) {
    const SlotEnding& ending = stream.ending;
    if (stream.in_flight) return "the one in flight was purged, and takes no more readers";
    if (ending.kind != GCOALESCE_COMPLETE)
        return fmt::format("the last one is not reusable: it ended {} ({}: {})", stream.state(),
                           code_name(static_cast<Code>(ending.code)), ending.message.view());
    if (ending.reusable == 0 && ending.finish_reason.view() != "STOP")
        return fmt::format("the last one is complete but not reusable: its finish reason is {}",
                           ending.finish_reason.view());
    if (ending.reusable == 0)
        return "the last one is complete but not reusable: it was asked with --no-store, purged or replaced, or "
               "answers are kept for 0s";
    if (stream.fresh_for(now) > 0) return "the last one was purged or replaced";
    return fmt::format("the last one was fresh until {} ago", format_duration(now - stream.fresh_until));
}

Verdict verdict_of(const Inspection& inspected, const Explained& explained, Nanos now) {
    const SegmentView& segment = inspected.segment.view;
    const TemplateFacts& facts = explained.facts;
    const BrokerFacts& broker = inspected.broker;
    if (!broker.reachable) return {"none", fmt::format("the broker is {}", broker.state)};
    if (const std::optional<StreamFacts> stream = joinable(segment, explained.key, now)) {
        if (facts.policy.subscribers != 0 && stream->subscribers >= facts.policy.subscribers)
            return {"busy", fmt::format("the stream has {} readers, the most allowed", stream->subscribers), stream};
        if (stream->in_flight)
            return {"join",
                    fmt::format("one is in flight for {}, with {} and {}",
                                format_duration(now - stream->opening.opened_ns), counted(stream->events, "event"),
                                counted(stream->subscribers, "reader")),
                    stream};
        return {"hit",
                fmt::format("one is complete with {}, and fresh for {}", counted(stream->events, "event"),
                            format_duration(stream->fresh_for(now))),
                stream};
    }
    Verdict verdict{"start", "no stream in the segment has this key"};
    for (const StreamFacts& stream : all_streams(segment)) { // the newest that others might have shared
        const bool shared = stream.opening.sharing != GCOALESCE_SHARE_NOT && stream.opening.individual_of == 0;
        if (stream.key != explained.key || !shared) continue;
        verdict.stream = stream;
        verdict.why = why_not(stream, now);
        break;
    }
    if (broker.state == "draining") return {"draining", verdict.why + ", and the broker is shutting down"};
    // What is on disk, the broker alone knows.
    const Nanos age = verdict.stream && !verdict.stream->in_flight ? now - verdict.stream->ending.ended_ns : 0;
    const bool plain = facts.pushed != 0 && now - facts.pushed >= facts.policy.kv_after && age < facts.policy.kv_ttl;
    verdict.maybe_on_disk = facts.has(template_snapshots) && (plain || !verdict.stream);
    return verdict;
}

std::string sentence(const Verdict& verdict) {
    const std::string_view word = verdict.word;
    std::string text = word == "join"    ? "would join"
                       : word == "hit"   ? "would read a finished answer"
                       : word == "start" ? "would start a call"
                       : word == "none"  ? "would find no broker"
                                         : "would be refused";
    text += ": " + verdict.why;
    if (verdict.maybe_on_disk) text += "; unless the broker has its answer on disk";
    return text;
}

// ---- output --------------------------------------------------------------------------------------------------------

std::string list_of(const std::vector<std::string>& names) {
    return fmt::format("{}", fmt::join(names, ", "));
}

std::string to_text(const Explained& explained, const Verdict& verdict) {
    const KeyParts& parts = explained.parts;
    const Changes& changes = explained.changes;
    const bool whole = parts.template_id == kDefaultTemplate;
    constexpr std::size_t kIndent = 11;
    const std::size_t width = output_columns();
    std::string text;
    const auto line = [&](std::string_view name, std::string_view value) {
        const std::string label = fmt::format("{:<10}", name), escaped = escape_controls(value);
        if (name == "body" || name == "variables")
            text +=
                hanging(label, width != 0 ? shortened(escaped, width - std::min(width, kIndent)) : escaped, kIndent, 0);
        else
            text += hanging(label, escaped, kIndent, name == "key" ? 0 : width); // to be copied as one word
    };
    line("encoding", kKeyEncoding);
    if (!explained.facts.has(template_realms))
        line("realm", explained.realm_ignored ? "everyone: the template keeps no realms apart, --realm does not count"
                                              : "everyone");
    else
        line("realm", parts.realm.empty() ? "none given: shared with those who give none" : escape_line(parts.realm));
    line("template", fmt::format("{}, revision {}", parts.template_id, to_hex(parts.template_revision)));
    line("model", parts.model);
    line("method", parts.method == Method::stream ? "stream (streamGenerateContent)" : "unary (generateContent)");
    if (parts.explicit_key)
        line("asked", fmt::format("explicit key \"{}\", in place of the {}", escape_line(parts.asked),
                                  whole ? "body" : "variables"));
    else
        line("asked", fmt::format("the {} below, {}", whole ? "body" : "variables",
                                  counted(explained.canonical.size(), "byte")));
    line(whole ? "body" : "variables", explained.canonical);
    if (!changes.left_out.empty()) line("", "left out, since empty: " + list_of(changes.left_out));
    if (!changes.filled_in.empty())
        line("", fmt::format("filled in: {}{}", list_of(changes.filled_in), whole ? " (\"user\")" : ""));
    if (!changes.normalised.empty()) line("", "normalised: " + list_of(changes.normalised));
    if (changes.sorted > 0) line("", fmt::format("put in order: the members of {}", counted(changes.sorted, "object")));
    if (changes.respelled) line("", "in one spelling: space, escapes and numbers");
    line("key", to_hex(explained.key));
    line("now", sentence(verdict));
    return text;
}

nlohmann::ordered_json to_json(const Explained& explained, const Verdict& verdict, Nanos now) {
    const KeyParts& parts = explained.parts;
    const Changes& changes = explained.changes;
    const bool whole = parts.template_id == kDefaultTemplate;
    nlohmann::ordered_json json{
        {"encoding", kKeyEncoding},      {"realm", nullptr},
        {"template", parts.template_id}, {"revision", to_hex(parts.template_revision)},
        {"model", parts.model},          {"method", parts.method == Method::stream ? "stream" : "unary"},
        {"explicit_key", nullptr},       {whole ? "body" : "variables", explained.canonical}};
    if (!parts.realm.empty()) json["realm"] = parts.realm;
    if (parts.explicit_key) json["explicit_key"] = parts.asked;
    nlohmann::ordered_json verdict_json{{"verdict", verdict.word},
                                        {"why", verdict.why},
                                        {"maybe_on_disk", verdict.maybe_on_disk},
                                        {"stream_id", nullptr},
                                        {"fresh_for_ms", 0}};
    if (verdict.stream) {
        verdict_json["stream_id"] = to_hex(verdict.stream->opening.stream_id);
        if (verdict.stream->open_to_joiners) verdict_json["fresh_for_ms"] = to_ms(verdict.stream->fresh_for(now));
    }
    return {{"version", 1},
            {"key", to_hex(explained.key)},
            {"parts", json},
            {"changes",
             {{"left_out", changes.left_out},
              {"filled_in", changes.filled_in},
              {"normalised", changes.normalised},
              {"sorted_objects", changes.sorted},
              {"respelled", changes.respelled}}},
            {"now", verdict_json}};
}

void run_key(const RequestOptions& options, Context& context, bool as_json) {
    check_combination(options);
    Question question = question_of(options);
    question.body = body_of(options);
    const std::optional<Inspection> inspected = inspect(context, as_json);
    if (!inspected) return;
    Explained explained;
    if (const Result<void> done = explain(explained, inspected->segment.view, question); !done) {
        report(context, done.error(), as_json);
        return;
    }
    const Nanos now = system_clock().monotonic();
    const Verdict verdict = verdict_of(*inspected, explained, now);
    write_out(as_json ? json_line(to_json(explained, verdict, now)) : to_text(explained, verdict));
}

} // namespace

void add_key(CLI::App& app, Context& context) {
    CLI::App* command = app.add_subcommand("key", "explain a request's key, and what would become of the request now");
    auto options = std::make_shared<RequestOptions>();
    auto json = std::make_shared<bool>(false);
    add_request_options(*command, *options);
    command->add_flag("--json", *json, "one JSON object");
    command->footer(kFooter);
    command->callback([options, json, &context] { run_key(*options, context, *json); });
}

} // namespace gcoalesce::cli
