// The codes with which gcoalesce ends; gcoalesce(1) lists them under EXIT STATUS.
#pragma once

namespace gcoalesce::cli {

enum class ExitCode : int {
    ok = 0,
    failed = 1,        // upstream or run-time failure; also gone and not_found
    usage = 2,         // the command line, or the request, is wrong
    no_broker = 3,     // the broker cannot be reached
    key = 4,           // the API key is missing or refused (401, 403)
    rate_limited = 5,  // 429, busy, draining
    blocked = 6,       // the content was blocked, or there is no candidate
    timed_out = 7,     // the command's own --timeout
    partial = 8,       // some output, then a failure
    wrong_version = 9, // a broker or a segment of another version
    interrupted = 130, // SIGINT
};

} // namespace gcoalesce::cli
