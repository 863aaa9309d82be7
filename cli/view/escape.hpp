// Text of others on its way to a terminal.
#pragma once

#include <string>
#include <string_view>

namespace gcoalesce::cli {

// Control characters (C0 but LF, TAB and the CR of a CRLF; DEL; C1, as UTF-8 encodes it) and bytes that are no UTF-8
// become \xHH, so that nothing in the text commands the terminal.
std::string escape_controls(std::string_view text);

// The same, and LF, TAB, CR and the backslash become \n, \t, \r and \\: one line, from which the text can be had back.
std::string escape_line(std::string_view text);

// JSON that says the same, with DEL and C1 as \u00XX: they may stand in its strings as they are, C0 may not.
std::string escape_json(std::string_view json);

} // namespace gcoalesce::cli
