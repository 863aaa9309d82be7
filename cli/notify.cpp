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
#include "cli/report.hpp"
#include "cli/view/terminal.hpp"

namespace gcoalesce::cli {
namespace {

constexpr std::int64_t kPatienceMs = 2000;

constexpr const char* kFooter = R"(
`on` opens the window until now and --for, or leaves it open until its present end if
that is later; `off` ends it, and shortens nothing that was promised. Each prints the
state that results, and may be said again at any time.)";

struct Arguments {
    std::string action;
    std::string duration;
    std::vector<std::string> templates;
    bool json = false;
};

void run_notify(const Arguments& arguments, Context& context) {
    gcoalesce_notify_action action = GCOALESCE_NOTIFY_STATUS;
    if (arguments.action == "on") action = GCOALESCE_NOTIFY_ON;
    if (arguments.action == "off") action = GCOALESCE_NOTIFY_OFF;
    std::int64_t for_ms = 0; // the template's `window`
    if (!arguments.duration.empty()) {
        if (action != GCOALESCE_NOTIFY_ON) throw CLI::ValidationError("--for", "goes with `notify on` only");
        const Result<Nanos> duration = parse_duration(arguments.duration);
        if (!duration) throw CLI::ValidationError("--for", duration.error().message);
        for_ms = to_ms(*duration);
        if (for_ms <= 0 || for_ms > 24 * 3600 * 1000)
            throw CLI::ValidationError("--for", "expected at least 1ms and at most 1d, found " + arguments.duration);
    }

    const std::string templates = fmt::format("{}", fmt::join(arguments.templates, ","));

    const Result<AttachmentPtr> attachment = attach(context);
    Error error;
    std::int64_t remaining_ms = 0;
    if (!attachment) {
        error = attachment.error();
    } else if (const gcoalesce_code code =
                   gcoalesce_notify(attachment->get(), action, templates.empty() ? nullptr : templates.c_str(), for_ms,
                                    kPatienceMs, &remaining_ms);
               code != GCOALESCE_OK) {
        error = last_error(code);
        if (code == GCOALESCE_TIMED_OUT) error.code = GCOALESCE_UNRESPONSIVE; // the patience was ours, not the user's
    } else {
        if (arguments.json) {
            const nlohmann::ordered_json json{
                {"version", 1}, {"window", remaining_ms > 0 ? "open" : "closed"}, {"remaining_ms", remaining_ms}};
            write_out(json.dump() + "\n");
        } else {
            write_out(remaining_ms > 0 ? fmt::format("open for {}\n", format_duration(from_ms(remaining_ms)))
                                       : "closed\n");
        }
        return;
    }
    report(error, arguments.json);
    context.exit = exit_code_of(error.code);
}

} // namespace

void add_notify(CLI::App& app, Context& context) {
    CLI::App* command = app.add_subcommand("notify", "open or close the window after a push notification");
    auto arguments = std::make_shared<Arguments>();
    command->add_option("ACTION", arguments->action, "on, off or status")
        ->required()
        ->check(CLI::IsMember({"on", "off", "status"}))
        ->type_name("on|off|status");
    command->add_option("--for", arguments->duration, "how long (default: the broker's --window)")
        ->type_name("DURATION");
    command->add_option("--template", arguments->templates, "of this template only (may be given again)")
        ->type_name("ID")
        ->allow_extra_args(false);
    command->add_flag("--json", arguments->json, "one JSON object");
    command->footer(kFooter);
    command->callback([arguments, &context] { run_notify(*arguments, context); });
}

} // namespace gcoalesce::cli
