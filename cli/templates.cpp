// gcoalesce templates: the files that name prompts, variables and policies.
#include "templates/template.hpp"

#include <CLI/App.hpp>
#include <filesystem>
#include <fmt/format.h>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/ids.hpp"
#include "base/units.hpp"
#include "cli/attach.hpp"
#include "cli/commands.hpp"
#include "cli/inspect.hpp"
#include "cli/render.hpp"
#include "cli/report.hpp"
#include "cli/template_facts.hpp"
#include "cli/view/escape.hpp"
#include "cli/view/table.hpp"
#include "cli/view/terminal.hpp"

namespace gcoalesce::cli {
namespace {

constexpr const char* kCheckFooter = R"(
Reads one file <id>.json, or every *.json of a directory, as gcoalesced does when it
starts and on SIGHUP. Exits with 0 when all are well; else with 2, and says which file,
which member and what was expected. --json prints {"version":1,"ok":true,"templates":[…]}
or {"version":1,"ok":false,"error":{…}} on standard output.

The manual page gcoalesce-template(5) tells what a file may say.)";

constexpr const char* kListFooter = R"(
The templates in force, out of the segment: it needs no running broker. REQUESTS are
those that were answered, CALLS the upstream calls for them.)";

constexpr const char* kShowFooter = R"(
What is in force, the broker's options filled in where the file says nothing, and the
file as the broker read it. Limits of 0 are none but the broker's own.)";

constexpr const char* kReloadFooter = R"(
Makes the broker read its templates and its API key again, as SIGHUP does: all of them,
or, where a file is wrong, none. It then says why and exits with 2. The broker logs who
said it, and may want its admin group for it.)";

std::string or_dash(const std::string& text) {
    return text.empty() ? "-" : text;
}

nlohmann::ordered_json to_json(const Template& of) {
    nlohmann::ordered_json json{{"id", of.id},
                                {"description", of.description},
                                {"model", nullptr},
                                {"revision", to_hex(of.revision)},
                                {"variables", nlohmann::ordered_json::array()}};
    if (!of.model.empty()) json["model"] = of.model; // "default" has none
    for (const TemplateVariable& variable : of.variables)
        json["variables"].push_back({{"name", variable.name}, {"required", !variable.default_value}});
    return json;
}

// "topic tone?": the question mark says that a request may leave it out.
std::string variable_names(const Template& of) {
    std::string names;
    for (const TemplateVariable& variable : of.variables)
        names += fmt::format("{}{}{}", names.empty() ? "" : " ", variable.name, variable.default_value ? "?" : "");
    return or_dash(names);
}

Result<std::vector<Template>> load(const std::string& path) {
    std::error_code ignored;
    if (std::filesystem::is_directory(path, ignored)) return load_templates(path);
    Result<Template> one = load_template(path);
    if (!one) return tl::unexpected<Error>(one.error());
    std::vector<Template> all;
    all.push_back(std::move(*one));
    return all;
}

void run_check(Context& context, const std::string& path, bool as_json) {
    const Result<std::vector<Template>> loaded = load(path);
    if (!loaded) context.exit = ExitCode::usage;
    if (as_json) { // a verdict either way, so it is data
        nlohmann::ordered_json json{{"version", 1}, {"ok", loaded.has_value()}};
        if (loaded) {
            json["templates"] = nlohmann::ordered_json::array();
            for (const Template& one : *loaded) json["templates"].push_back(to_json(one));
        } else {
            json["error"] = error_json(loaded.error());
        }
        write_out(json_line(json));
        return;
    }
    if (!loaded) return report(loaded.error());
    Table table({{"TEMPLATE"}, {"REVISION"}, {"MODEL"}, {"VARIABLES"}});
    for (const Template& one : *loaded)
        table.add({one.id, to_hex(one.revision), or_dash(one.model), variable_names(one)});
    write_out(table.render(output_columns()));
}

// What the file says beside the policy. Without a file: the id and nothing.
Template file_of(const TemplateFacts& facts) {
    if (!facts.source.empty()) {
        if (Result<Template> parsed = parse_template(facts.id(), facts.source)) return std::move(*parsed);
    }
    Template bare;
    bare.id = facts.id();
    return bare;
}

std::uint64_t requests(const TemplateFacts& facts) {
    std::uint64_t sum = 0;
    for (std::size_t status = GCOALESCE_STARTED; status <= GCOALESCE_BYPASS; ++status) sum += facts.counts[status];
    return sum;
}

struct CounterName {
    const char *name, *unit, *help;
};
constexpr CounterName kCounterNames[] = {
#define GCOALESCE_NAME(identifier, unit, help) {#identifier, unit, help},
    GCOALESCE_TEMPLATE_COUNTERS(GCOALESCE_NAME)
#undef GCOALESCE_NAME
};

nlohmann::ordered_json to_json(const TemplateFacts& facts, Nanos now) {
    const TemplatePolicy& policy = facts.policy;
    nlohmann::ordered_json json = to_json(file_of(facts));
    json["revision"] = to_hex(policy.revision);
    json.update(window_json(facts, now));
    json["ttl_idle_ms"] = to_ms(policy.ttl_idle);
    json["ttl_window_ms"] = to_ms(policy.ttl_window);
    json["default_window_ms"] = to_ms(policy.window);
    json["linger_ms"] = to_ms(policy.linger);
    json["snapshots"] = facts.has(template_snapshots);
    json["snapshot_ttl_ms"] = to_ms(policy.snapshot_ttl);
    json["kv_after_ms"] = to_ms(policy.kv_after);
    json["kv_ttl_ms"] = to_ms(policy.kv_ttl);
    json["cancel_after_ms"] =
        policy.cancel_after < 0 ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(to_ms(policy.cancel_after));
    json["limits"] = {{"in_flight", policy.in_flight},
                      {"subscribers", policy.subscribers},
                      {"calls_a_minute", policy.calls_a_minute},
                      {"stream_bytes", policy.stream_bytes},
                      {"pool_bytes", policy.pool_bytes}};
    json["checked"] = facts.has(template_schema);
    json["delivery"] = facts.has(template_live) ? "live" : "validated";
    json["max_individual"] = policy.max_individual;
    json["strict_individual"] = facts.has(template_strict);
    json["realm"] = facts.has(template_realms) ? "token" : "everyone";
    json["explicit_keys"] = facts.has(template_explicit_keys);
    json["counters"] = nlohmann::ordered_json::object();
    for (std::size_t i = 0; i < std::size(kCounterNames); ++i)
        json["counters"][kCounterNames[i].name] = facts.counts[i];
    return json;
}

void run_list(Context& context, bool as_json) {
    const std::optional<Inspection> inspected = inspect(context, as_json);
    if (!inspected) return;
    const std::vector<TemplateFacts> templates = all_templates(inspected->segment.view);
    const Nanos now = system_clock().monotonic();
    if (as_json) {
        nlohmann::ordered_json json{{"version", 1}, {"broker", to_json(inspected->broker)}};
        json["templates"] = nlohmann::ordered_json::array();
        for (const TemplateFacts& facts : templates) json["templates"].push_back(to_json(facts, now));
        write_out(json_line(json));
        return;
    }
    Table table({{"TEMPLATE"},
                 {"REVISION"},
                 {"WINDOW"},
                 {"REQUESTS", Align::right},
                 {"CALLS", Align::right},
                 {"REFUSED", Align::right},
                 {"MODEL"},
                 {"VARIABLES"}});
    for (const TemplateFacts& facts : templates) {
        const Template file = file_of(facts);
        table.add({facts.id(), to_hex(facts.policy.revision), window_words(facts.window_remaining(now)),
                   fmt::to_string(requests(facts)), fmt::to_string(facts.count(TemplateCounter::upstream_calls)),
                   fmt::to_string(facts.count(TemplateCounter::requests_refused)), or_dash(file.model),
                   variable_names(file)});
    }
    write_out(table.render(output_columns()));
}

std::string to_text(const TemplateFacts& facts, Nanos now) {
    const TemplatePolicy& policy = facts.policy;
    const Template file = file_of(facts);
    const auto yes = [](bool is) { return std::string(is ? "yes" : "no"); };
    Table members({{"MEMBER"}, {"IN FORCE", Align::wrapped}});
    members.add({"id", facts.id()});
    members.add({"description", or_dash(file.description)});
    members.add({"revision", to_hex(policy.revision)});
    members.add({"model", or_dash(file.model)});
    members.add({"variables", variable_names(file)});
    members.add({"ttl_idle", format_duration(policy.ttl_idle)});
    members.add({"ttl_window", format_duration(policy.ttl_window)});
    members.add({"window", fmt::format("{}; now {}, last push {}", format_duration(policy.window),
                                       window_words(facts.window_remaining(now)), push_words(facts, now))});
    members.add({"linger", format_duration(policy.linger)});
    members.add({"snapshots", yes(facts.has(template_snapshots))});
    members.add({"snapshot_ttl", format_duration(policy.snapshot_ttl)});
    members.add({"kv_after", format_duration(policy.kv_after)});
    members.add({"kv_ttl", format_duration(policy.kv_ttl)});
    members.add({"on_abandon", policy.cancel_after < 0 ? "finish" : "cancel:" + format_duration(policy.cancel_after)});
    members.add({"limits.in_flight", fmt::to_string(policy.in_flight)});
    members.add({"limits.subscribers", fmt::to_string(policy.subscribers)});
    members.add({"limits.calls_a_minute", fmt::to_string(policy.calls_a_minute)});
    members.add({"limits.stream_bytes", format_size(policy.stream_bytes)});
    members.add({"limits.pool_share", format_size(policy.pool_bytes)});
    members.add({"checked", yes(facts.has(template_schema))});
    members.add({"delivery", facts.has(template_live) ? "live" : "validated"});
    members.add({"max_individual", fmt::to_string(policy.max_individual)});
    members.add({"strict_individual", yes(facts.has(template_strict))});
    members.add({"realm", facts.has(template_realms) ? "token" : "everyone"});
    members.add({"explicit_keys", yes(facts.has(template_explicit_keys))});
    Table counters({{"COUNTER"}, {"VALUE", Align::right}, {"UNIT"}, {"MEANING", Align::wrapped}});
    for (std::size_t i = 0; i < std::size(kCounterNames); ++i)
        counters.add(
            {kCounterNames[i].name, fmt::to_string(facts.counts[i]), kCounterNames[i].unit, kCounterNames[i].help});
    const std::size_t width = output_columns();
    std::string text = members.render(width) + "\n" + counters.render(width);
    if (!facts.source.empty()) text += "\n" + escape_controls(facts.source);
    if (!text.ends_with('\n')) text += '\n';
    return text;
}

void run_show(Context& context, const std::string& id, bool as_json) {
    const std::optional<Inspection> inspected = inspect(context, as_json);
    if (!inspected) return;
    const Result<TemplateFacts> facts = find_template(inspected->segment.view, id);
    if (!facts) {
        report(context, facts.error(), as_json);
        return;
    }
    const Nanos now = system_clock().monotonic();
    if (!as_json) return write_out(to_text(*facts, now));
    nlohmann::ordered_json json{{"version", 1}, {"broker", to_json(inspected->broker)}};
    json["template"] = to_json(*facts, now);
    json["template"]["source"] = facts->source;
    write_out(json_line(json));
}

void run_reload(Context& context, bool as_json) {
    const Result<void> told = tell_broker(context, [](gcoalesce_attachment* broker, std::int64_t timeout_ms) {
        return gcoalesce_reload(broker, timeout_ms);
    });
    if (!told) {
        report(context, told.error(), as_json);
        return;
    }
    run_list(context, as_json);
}

} // namespace

void add_templates(CLI::App& app, Context& context) {
    CLI::App* command = app.add_subcommand("templates", "the named prompts and their policies");
    command->require_subcommand(1);
    auto path = std::make_shared<std::string>();
    auto id = std::make_shared<std::string>();
    auto json = std::make_shared<bool>(false); // at most one of the commands is given

    CLI::App* list = command->add_subcommand("list", "which there are, and what became of their requests");
    list->add_flag("--json", *json, "one JSON object");
    list->footer(kListFooter);
    list->callback([json, &context] { run_list(context, *json); });

    CLI::App* show = command->add_subcommand("show", "all about one: its policy in force, its counters, its file");
    show->add_option("ID", *id, "which")->required();
    show->add_flag("--json", *json, "one JSON object");
    show->footer(kShowFooter);
    show->callback([id, json, &context] { run_show(context, *id, *json); });

    CLI::App* check = command->add_subcommand("check", "say whether a template file, or a directory of them, is well");
    check->add_option("PATH", *path, "a file <id>.json, or a directory of such files")
        ->required()
        ->type_name("FILE|DIR");
    check->add_flag("--json", *json, "one JSON object");
    check->footer(kCheckFooter);
    check->callback([path, json, &context] { run_check(context, *path, *json); });

    CLI::App* reload = command->add_subcommand("reload", "make the broker read its templates and its API key again");
    reload->add_flag("--json", *json, "one JSON object");
    reload->footer(kReloadFooter);
    reload->callback([json, &context] { run_reload(context, *json); });
}

} // namespace gcoalesce::cli
