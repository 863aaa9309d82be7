// How commands tell that something did not work.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "base/error.hpp"
#include "cli/exit_codes.hpp"

namespace gcoalesce::cli {

struct Context;

// The exit code for a request, an attachment or a segment that failed so. upstream_status: HTTP's, 0 when there is
// none.
ExitCode exit_code_of(Code code, int upstream_status = 0);

// "1 event", "2 events".
std::string counted(std::uint64_t count, std::string_view noun);

// One line on standard error, "gcoalesce: " and the sentence.
void complain(std::string_view sentence);

// {"code":…,"message":…}, and "retry_ms" where that is known.
nlohmann::ordered_json error_json(const Error& error);

// The same for an error. json: one JSON object in its place, {"error":{…}}.
void report(const Error& error, bool json = false);
// And sets the exit code that belongs to it.
void report(Context& context, const Error& error, bool json);

} // namespace gcoalesce::cli
