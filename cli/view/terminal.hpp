// Standard output and standard error, and whether a person looks at them.
#pragma once

#include <cstddef>
#include <string_view>

namespace gcoalesce::cli {

bool is_terminal(int fd);

// Where tables are cut: COLUMNS, else the width of the terminal on standard output; 0: nowhere, it goes to a program.
std::size_t output_columns();

// Writes all of it to standard output at once. Throws std::system_error when that fails; a reader who has gone ends the
// program by SIGPIPE, as everywhere.
void write_out(std::string_view bytes);

// The same for standard error, where nothing can be done about a failure.
void write_err(std::string_view bytes);

} // namespace gcoalesce::cli
