// Errors as the Gemini API tells them.
#pragma once

#include <string>

#include "base/error.hpp"

namespace gcoalesce::gateway {

struct Problem {
    unsigned status = 500; // HTTP's
    Error error;
};

// upstream_status: what upstream answered, 0 when it did not.
Problem problem_of(const Error& error, int upstream_status = 0);

// {"error":{"code":…,"message":…,"status":…,"details":[…]}}, with ErrorInfo (the code's word, domain "gcoalesce") and,
// where it is known when asking again may help, RetryInfo.
std::string document_of(const Problem& problem); // over several lines, as in a body
std::string line_of(const Problem& problem);     // one line, as in a stream

// Seconds, rounded up; "": not known.
std::string retry_after(const Error& error);

} // namespace gcoalesce::gateway
