// The canonical form of a request body: equal for bodies that ask the same, different for all others.
#pragma once

#include <string>
#include <string_view>

#include "base/error.hpp"

namespace gcoalesce {

// Members sorted by their UTF-8 bytes, no space between tokens, strings in one spelling, numbers in one spelling by
// value (1, 1.0 and 10e-1 are one; integers of any size stay exact, nothing passes through double). Dropped, since SDKs
// differ there and the answer does not: empty "generationConfig", "safetySettings", "tools" at the top level. A
// missing "role" of the only element of "contents" reads "user". Every other member counts, unknown ones too.
// Errors: GCOALESCE_BAD_REQUEST for anything but one JSON object of valid UTF-8, for duplicate members, and for
// documents deeper than 200 levels, and for numbers beyond the range of double (1e309); the message names the place,
// never the text. Cost: linear but for sorting members; memory: a few times the body.
Result<std::string> canonical_request(std::string_view body);

} // namespace gcoalesce
