// One line an event on standard error, for programs; the library itself never prints.
#pragma once

#include <fmt/format.h>
#include <string>
#include <string_view>
#include <utility>

#include "base/error.hpp"

namespace gcoalesce {

// error: someone must act; warning: something was lost or refused; info: life of the program; debug: each request.
enum class LogLevel { error = 3, warning = 4, info = 6, debug = 7 }; // syslog's numbers, as systemd reads them

Result<LogLevel> parse_log_level(std::string_view name);
void set_log_level(LogLevel level); // at start, before other threads

bool log_enabled(LogLevel level);
void log_line(LogLevel level, std::string_view line); // thread-safe; one write(2) a line

// Neither prompts nor keys belong in the arguments.
template <class... Args>
void log(LogLevel level, fmt::format_string<Args...> format, Args&&... args) {
    if (log_enabled(level)) log_line(level, fmt::format(format, std::forward<Args>(args)...));
}

} // namespace gcoalesce
