// Answers and requests without what people said in them.
#pragma once

#include <string>
#include <string_view>

namespace gcoalesce::cli {

// The JSON of an event or of a request, compact, in which everything but the structure of Gemini's protocol is replaced
// by its size, "[12 bytes]": only members that are known to hold no content are kept. What is no JSON becomes such a
// string as a whole.
std::string redact(std::string_view json);

} // namespace gcoalesce::cli
