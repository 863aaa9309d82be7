// gcoalesce templates: the files that name prompts, variables and policies.
#include "templates/template.hpp"

#include <CLI/App.hpp>
#include <filesystem>
#include <fmt/format.h>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/ids.hpp"
#include "cli/commands.hpp"
#include "cli/render.hpp"
#include "cli/report.hpp"
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
    for (const Template& one : *loaded) {
        std::string variables;
        for (const TemplateVariable& variable : one.variables)
            variables +=
                fmt::format("{}{}{}", variables.empty() ? "" : " ", variable.name, variable.default_value ? "?" : "");
        table.add(
            {one.id, to_hex(one.revision), one.model.empty() ? "-" : one.model, variables.empty() ? "-" : variables});
    }
    write_out(table.render(output_columns()));
}

} // namespace

void add_templates(CLI::App& app, Context& context) {
    CLI::App* command = app.add_subcommand("templates", "the named prompts and their policies");
    command->require_subcommand(1);
    CLI::App* check = command->add_subcommand("check", "say whether a template file, or a directory of them, is well");
    auto path = std::make_shared<std::string>();
    auto json = std::make_shared<bool>(false);
    check->add_option("PATH", *path, "a file <id>.json, or a directory of such files")
        ->required()
        ->type_name("FILE|DIR");
    check->add_flag("--json", *json, "one JSON object");
    check->footer(kCheckFooter);
    check->callback([path, json, &context] { run_check(context, *path, *json); });
}

} // namespace gcoalesce::cli
