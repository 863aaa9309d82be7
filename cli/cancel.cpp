// gcoalesce cancel: ends a running stream for all its readers.
#include <CLI/App.hpp>
#include <fmt/format.h>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/attach.hpp"
#include "cli/commands.hpp"
#include "cli/render.hpp"
#include "cli/report.hpp"
#include "cli/view/terminal.hpp"

namespace gcoalesce::cli {
namespace {

constexpr const char* kFooter = R"(
Its readers keep what came and learn that it was cancelled; it is given to nobody any
more, and the next request starts a new call. One that has ended already is left as it
is. `gcoalesce keys` lists keys. The broker logs who said it, and may want its admin
group for it.)";

void run_cancel(Context& context, const std::string& target, bool as_json) {
    std::uint64_t streams = 0;
    const Result<void> told = tell_broker(context, [&](gcoalesce_attachment* broker, std::int64_t timeout_ms) {
        return gcoalesce_cancel(broker, target.c_str(), timeout_ms, &streams);
    });
    if (!told) {
        report(context, told.error(), as_json);
    } else if (as_json) {
        write_out(json_line({{"version", 1}, {"cancelled", streams}}));
    } else {
        write_out(
            fmt::format("{} cancelled{}\n", counted(streams, "stream"), streams == 0 ? ": it had ended already" : ""));
    }
}

} // namespace

void add_cancel(CLI::App& app, Context& context) {
    CLI::App* command = app.add_subcommand("cancel", "end a running stream for all its readers");
    auto target = std::make_shared<std::string>();
    auto json = std::make_shared<bool>(false);
    command->add_option("KEY", *target, "the first four or more digits of its key or stream id")->required();
    command->add_flag("--json", *json, "one JSON object");
    command->footer(kFooter);
    command->callback([target, json, &context] { run_cancel(context, *target, *json); });
}

} // namespace gcoalesce::cli
