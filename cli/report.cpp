#include "cli/report.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/units.hpp"
#include "cli/commands.hpp"
#include "cli/render.hpp"
#include "cli/view/escape.hpp"
#include "cli/view/terminal.hpp"

namespace gcoalesce::cli {

ExitCode exit_code_of(Code code, int upstream_status) {
    if (upstream_status == 401 || upstream_status == 403) return ExitCode::key;
    if (upstream_status == 429) return ExitCode::rate_limited;
    switch (code) {
    case GCOALESCE_OK: return ExitCode::ok;
    case GCOALESCE_ABSENT:
    case GCOALESCE_STARTING:
    case GCOALESCE_TOO_SHORT:
    case GCOALESCE_CLOSED:
    case GCOALESCE_BROKER_DEAD:
    case GCOALESCE_UNRESPONSIVE: return ExitCode::no_broker;
    case GCOALESCE_WRONG_VERSION: return ExitCode::wrong_version;
    case GCOALESCE_BAD_REQUEST: return ExitCode::usage;
    case GCOALESCE_BUSY:
    case GCOALESCE_DRAINING:
    case GCOALESCE_RATE_LIMITED: return ExitCode::rate_limited;
    case GCOALESCE_TIMED_OUT: return ExitCode::timed_out;
    case GCOALESCE_KEY_MISSING:
    case GCOALESCE_KEY_REFUSED: return ExitCode::key;
    default: return ExitCode::failed; // no permission among them: the broker may well run
    }
}

std::string counted(std::uint64_t count, std::string_view noun) {
    return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

void complain(std::string_view sentence) {
    std::string line = escape_controls(sentence);
    std::ranges::replace(line, '\n', ' ');
    write_err(fmt::format("gcoalesce: {}\n", line));
}

nlohmann::ordered_json error_json(const Error& error) {
    nlohmann::ordered_json json{{"code", code_name(error.code)}, {"message", error.message}};
    if (error.retry_ms > 0) json["retry_ms"] = error.retry_ms;
    return json;
}

void report(const Error& error, bool json) {
    if (json) {
        write_err(json_line({{"error", error_json(error)}}));
    } else if (error.retry_ms > 0) {
        complain(fmt::format("{} (try again in {})", error.message, format_duration(from_ms(error.retry_ms))));
    } else {
        complain(error.message);
    }
}

void report(Context& context, const Error& error, bool json) {
    report(error, json);
    context.exit = exit_code_of(error.code);
}

} // namespace gcoalesce::cli
