// Standard output and standard error, and whether a person looks at them.
#pragma once

#include <cstddef>
#include <string_view>

namespace gcoalesce::cli {

bool is_terminal(int fd);

// What tables must fit into: COLUMNS, else the width of the terminal on standard output; 0: anything fits, since it
// goes to a program.
std::size_t output_columns();
// Likewise LINES and the terminal's height.
std::size_t output_lines();

// A screen that is painted again and again: the text in place of what stood there, without a flicker. Lines are cut at
// the terminal's width, and those beyond its height are left out.
void repaint(std::string_view text);

// Writes all of it to standard output at once. Throws std::system_error when that fails; a reader who has gone ends the
// program by SIGPIPE, as everywhere.
void write_out(std::string_view bytes);

// The same for standard error, where nothing can be done about a failure.
void write_err(std::string_view bytes);

} // namespace gcoalesce::cli
