// The forms in which commands show events and documents.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace gcoalesce::cli {

enum class Form {
    text,  // the answer's text, as it grows
    lines, // each event's JSON, one a line: untouched, or compacted where it has line breaks (a unary body)
    sse    // framed as Gemini frames it
};

// What the event adds to the output.
std::string render(Form form, std::string_view event);

// JSON on one line, its values as they were. Bytes that are no JSON stay, but for their line breaks.
std::string one_line(std::string_view json);

// What render() made, fit for a terminal: nothing in it commands that, and JSON says the same.
std::string for_terminal(Form form, std::string_view rendered);

// A document of our own as one line of output, LF included, that may go to a terminal. What is no UTF-8 in it becomes
// U+FFFD.
std::string json_line(const nlohmann::ordered_json& json);

} // namespace gcoalesce::cli
