#include "base/log.hpp"

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <unistd.h>

namespace gcoalesce {
namespace {

std::atomic<int> current{static_cast<int>(LogLevel::info)};

LogSink& sink() {
    static LogSink current_sink;
    return current_sink;
}

const char* word(LogLevel level) {
    switch (level) {
    case LogLevel::error: return "error";
    case LogLevel::warning: return "warning";
    case LogLevel::info: return "info";
    case LogLevel::debug: return "debug";
    }
    return "?";
}

} // namespace

Result<LogLevel> parse_log_level(std::string_view name) {
    for (const LogLevel level : {LogLevel::error, LogLevel::warning, LogLevel::info, LogLevel::debug}) {
        if (name == word(level)) return level;
    }
    return fail(GCOALESCE_BAD_REQUEST, "expected error, warning, info or debug, found \"{}\"", name);
}

void set_log_level(LogLevel level) {
    current.store(static_cast<int>(level), std::memory_order_relaxed);
}

void set_log_sink(LogSink to) {
    sink() = std::move(to);
}

bool log_enabled(LogLevel level) {
    return static_cast<int>(level) <= current.load(std::memory_order_relaxed);
}

void log_line(LogLevel level, std::string_view line, LogFields fields) {
    if (sink() && sink()(level, line, fields)) return;
    // Under systemd the journal keeps the time; it reads the level from the prefix (sd-daemon(3)).
    static const bool journal = std::getenv("JOURNAL_STREAM") != nullptr;
    const std::string text = journal ? fmt::format("<{}>{}\n", static_cast<int>(level), line)
                                     : fmt::format("{}: {}: {}\n", ::program_invocation_short_name, word(level), line);
    // A log that cannot be written is no reason to stop serving.
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
}

} // namespace gcoalesce
