// Errors as the Gemini API tells them.
#pragma once

#include <cstdint>
#include <string>

#include "base/error.hpp"

namespace gcoalesce::gateway {

struct Problem {
    unsigned status = 500; // HTTP's
    Error error;
    std::string upstreams{}; // its own document, JSON text; "": it told none
};

// upstream_status: what upstream answered, 0 when it did not.
Problem problem_of(const Error& error, int upstream_status = 0);

// Of this status, whatever the code's would be.
Problem with_status(unsigned status, Code code, std::string sentence, std::int64_t retry_ms = 0);
Problem bad_request(std::string sentence); // 400

// Upstream's own document where there is one. Else {"error":{"code":…,"message":…,"status":…,"details":[…]}}, with
// ErrorInfo (the code's word, domain "gcoalesce") and, where it is known when asking again may help, RetryInfo.
std::string document_of(const Problem& problem); // over several lines, as in a body
std::string line_of(const Problem& problem);     // one line, as in a stream

// Seconds, rounded up; "": not known.
std::string retry_after(const Error& error);

} // namespace gcoalesce::gateway
