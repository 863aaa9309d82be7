// gcoalesce notify: the window after a push notification, in which answers stay fresh longer.
#include <CLI/App.hpp>
#include <CLI/Validators.hpp>
#include <fmt/format.h>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/units.hpp"
#include "cli/attach.hpp"
#include "cli/commands.hpp"
#include "cli/inspect.hpp"
#include "cli/option_values.hpp"
#include "cli/render.hpp"
#include "cli/report.hpp"
#include "cli/template_facts.hpp"
#include "cli/view/table.hpp"
#include "cli/view/terminal.hpp"

namespace gcoalesce::cli {
namespace {

constexpr const char* kFooter = R"(
`on` opens the window until now and --for, or leaves it open until its present end if
that is later; `off` ends it, and shortens nothing that was promised. Each prints the
state that results, of several templates that of the one that stays open longest, and
may be said again at any time. The broker logs who said it, and may want its admin
group for it.

`status` needs no broker: it lists the templates with their windows out of the segment.
With --template it asks the broker, and prints what `on` would.)";

struct Arguments {
    std::string action;
    std::string duration;
    std::vector<std::string> templates;
    bool json = false;
};

// Out of the segment: it needs no broker.
void show_all(Context& context, bool as_json) {
    const std::optional<Inspection> inspected = inspect(context, as_json);
    if (!inspected) return;
    const std::vector<TemplateFacts> templates = all_templates(inspected->segment.view);
    const Nanos now = system_clock().monotonic();
    if (as_json) {
        nlohmann::ordered_json json{{"version", 1}, {"broker", to_json(inspected->broker)}};
        json["templates"] = nlohmann::ordered_json::array();
        for (const TemplateFacts& facts : templates) {
            nlohmann::ordered_json one{{"id", facts.id()}};
            one.update(window_json(facts, now));
            json["templates"].push_back(one);
        }
        write_out(json_line(json));
        return;
    }
    Table table({{"TEMPLATE"}, {"WINDOW"}, {"LAST PUSH"}});
    for (const TemplateFacts& facts : templates)
        table.add({facts.id(), window_words(facts.window_remaining(now)), push_words(facts, now)});
    write_out(table.render(output_columns()));
}

void run_notify(const Arguments& arguments, Context& context) {
    gcoalesce_notify_action action = GCOALESCE_NOTIFY_STATUS;
    if (arguments.action == "on") action = GCOALESCE_NOTIFY_ON;
    if (arguments.action == "off") action = GCOALESCE_NOTIFY_OFF;
    std::int64_t for_ms = 0; // the template's `window`
    if (!arguments.duration.empty()) {
        if (action != GCOALESCE_NOTIFY_ON) throw CLI::ValidationError("--for", "goes with `notify on` only");
        for_ms = to_ms(duration_of("--for", arguments.duration));
        if (for_ms <= 0 || for_ms > 24 * 3600 * 1000)
            throw CLI::ValidationError("--for", "expected at least 1ms and at most 1d, found " + arguments.duration);
    }

    if (action == GCOALESCE_NOTIFY_STATUS && arguments.templates.empty()) return show_all(context, arguments.json);

    const std::string templates = fmt::format("{}", fmt::join(arguments.templates, ","));
    std::int64_t remaining_ms = 0;
    const Result<void> told = tell_broker(context, [&](gcoalesce_attachment* broker, std::int64_t timeout_ms) {
        return gcoalesce_notify(broker, action, templates.empty() ? nullptr : templates.c_str(), for_ms, timeout_ms,
                                &remaining_ms);
    });
    if (!told) {
        report(context, told.error(), arguments.json);
    } else if (arguments.json) {
        write_out(json_line(
            {{"version", 1}, {"window", remaining_ms > 0 ? "open" : "closed"}, {"remaining_ms", remaining_ms}}));
    } else {
        write_out(window_words(from_ms(remaining_ms)) + "\n");
    }
}

} // namespace

void add_notify(CLI::App& app, Context& context) {
    CLI::App* command = app.add_subcommand("notify", "open or close the window after a push notification");
    auto arguments = std::make_shared<Arguments>();
    command->add_option("ACTION", arguments->action, "on, off or status")
        ->required()
        ->check(CLI::IsMember({"on", "off", "status"}))
        ->type_name("on|off|status");
    command->add_option("--for", arguments->duration, "how long (default: the template's `window`)")
        ->type_name("DURATION");
    command->add_option("--template", arguments->templates, "of this template only (may be given again)")
        ->type_name("ID")
        ->allow_extra_args(false);
    command->add_flag("--json", arguments->json, "one JSON object");
    command->footer(kFooter);
    command->callback([arguments, &context] {
        if (std::ranges::find(arguments->templates, "") != arguments->templates.end()) // which would be all of them
            throw CLI::ValidationError("--template", "expected a template's id, found none");
        run_notify(*arguments, context);
    });
}

} // namespace gcoalesce::cli
