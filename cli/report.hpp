// How commands tell that something did not work.
#pragma once

#include <string_view>

#include "base/error.hpp"
#include "cli/exit_codes.hpp"

namespace gcoalesce::cli {

// The exit code for a request, an attachment or a segment that failed so. upstream_status: HTTP's, 0 when there is none.
ExitCode exit_code_of(Code code, int upstream_status = 0);

// One line on standard error, "gcoalesce: " and the sentence.
void complain(std::string_view sentence);

// The same for an error. json: one JSON object in its place, {"error":{"code":…,"message":…,"retry_ms":…}}.
void report(const Error& error, bool json = false);

} // namespace gcoalesce::cli
