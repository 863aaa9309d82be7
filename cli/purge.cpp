// gcoalesce purge: drops answers that are kept for later requests.
#include <CLI/App.hpp>
#include <fmt/format.h>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <unistd.h>

#include "cli/attach.hpp"
#include "cli/commands.hpp"
#include "cli/render.hpp"
#include "cli/report.hpp"
#include "cli/view/terminal.hpp"

namespace gcoalesce::cli {
namespace {

constexpr const char* kFooter = R"(
Drops answers from the segment and from the disk. Readers of a running stream finish,
but it is given to nobody any more: later requests start anew. What has left the segment
and is on disk alone is named by its whole key. `gcoalesce keys` lists keys. The broker
logs who said it, and may want its admin group for it.

--all asks before it does so, or takes --yes for the answer.)";

struct Arguments {
    std::string key, template_id;
    bool all = false, yes = false, json = false;
};

bool confirmed(const Arguments& arguments) {
    if (!arguments.all || arguments.yes) return true;
    if (!is_terminal(STDIN_FILENO) || !is_terminal(STDERR_FILENO))
        throw CLI::ValidationError("--all", "expected --yes beside it, for there is nobody to ask");
    write_err("Drop every answer that the broker keeps? [y/N] ");
    std::string answer;
    std::getline(std::cin, answer);
    return answer == "y" || answer == "Y" || answer == "yes";
}

void run_purge(Context& context, const Arguments& arguments) {
    if (!arguments.key.empty() + !arguments.template_id.empty() + arguments.all != 1)
        throw CLI::ValidationError("KEY, --template, --all", "expected one of them");
    if (!confirmed(arguments)) {
        complain("nothing was dropped");
        context.exit = ExitCode::failed;
        return;
    }
    const gcoalesce_purge_scope scope = arguments.all           ? GCOALESCE_PURGE_ALL
                                        : arguments.key.empty() ? GCOALESCE_PURGE_TEMPLATE
                                                                : GCOALESCE_PURGE_STREAM;
    const std::string& target = arguments.key.empty() ? arguments.template_id : arguments.key;
    std::uint64_t streams = 0;
    const Result<void> told = tell_broker(context, [&](gcoalesce_attachment* broker, std::int64_t timeout_ms) {
        return gcoalesce_purge(broker, scope, arguments.all ? nullptr : target.c_str(), timeout_ms, &streams);
    });
    if (!told) {
        report(context, told.error(), arguments.json);
    } else if (arguments.json) {
        write_out(json_line({{"version", 1}, {"dropped", streams}}));
    } else {
        write_out(fmt::format("{} dropped\n", counted(streams, "stream")));
    }
}

} // namespace

void add_purge(CLI::App& app, Context& context) {
    CLI::App* command = app.add_subcommand("purge", "drop answers that are kept for later requests");
    auto arguments = std::make_shared<Arguments>();
    command->add_option("KEY", arguments->key, "the first four or more digits of a key or stream id");
    command->add_option("--template", arguments->template_id, "all of this template")->type_name("ID");
    command->add_flag("--all", arguments->all, "all there are");
    command->add_flag("--yes", arguments->yes, "do not ask");
    command->add_flag("--json", arguments->json, "one JSON object");
    command->footer(kFooter);
    command->callback([arguments, &context] { run_purge(context, *arguments); });
}

} // namespace gcoalesce::cli
