// One line an event on standard error, for programs; the library itself never prints.
#pragma once

#include <fmt/format.h>
#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

#include "base/error.hpp"

namespace gcoalesce {

// error: someone must act; warning: something was lost or refused; info: life of the program; debug: each request.
enum class LogLevel { error = 3, warning = 4, info = 6, debug = 7 }; // syslog's numbers, as systemd reads them

Result<LogLevel> parse_log_level(std::string_view name);
void set_log_level(LogLevel level); // at start, before other threads

// What a line is about, for those who filter: {"CODE", "rate_limited"}. Upper case, "_" and digits.
struct LogField {
    std::string_view name;
    std::string value;
};
using LogFields = std::initializer_list<LogField>;

// Takes the lines instead of standard error, from any thread. False: it could not, and standard error gets the line.
using LogSink = std::function<bool(LogLevel, std::string_view line, LogFields)>;
void set_log_sink(LogSink sink); // at start, before other threads

bool log_enabled(LogLevel level);
// Thread-safe; one write(2) a line. Standard error gets no fields: what matters to people stands in the line.
void log_line(LogLevel level, std::string_view line, LogFields fields = {});

// Neither prompts nor keys belong in the arguments.
template <class... Args>
void log(LogLevel level, fmt::format_string<Args...> format, Args&&... args) {
    if (log_enabled(level)) log_line(level, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void log(LogLevel level, LogFields fields, fmt::format_string<Args...> format, Args&&... args) {
    if (log_enabled(level)) log_line(level, fmt::format(format, std::forward<Args>(args)...), fields);
}

} // namespace gcoalesce
