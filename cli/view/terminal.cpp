#include "cli/view/terminal.hpp"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <poll.h>
#include <string>
#include <sys/ioctl.h>
#include <system_error>
#include <unistd.h>

#include "cli/view/utf8.hpp"

namespace gcoalesce::cli {
namespace {

void wait_writable(int fd) {
    pollfd entry{fd, POLLOUT, 0};
    ::poll(&entry, 1, -1);
}

// Of standard output, where that is a terminal.
std::size_t extent(const char* variable, unsigned short winsize::*field) {
    if (!is_terminal(STDOUT_FILENO)) return 0;
    if (const char* told = std::getenv(variable); told != nullptr) {
        const std::string_view text(told);
        std::size_t number = 0;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
        if (error == std::errc() && end == text.data() + text.size()) return number;
    }
    winsize size{};
    return ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 ? size.*field : 0;
}

bool write_all(int fd, std::string_view bytes) {
    while (!bytes.empty()) {
        const ssize_t written = ::write(fd, bytes.data(), bytes.size());
        if (written >= 0)
            bytes.remove_prefix(static_cast<std::size_t>(written));
        else if (errno == EAGAIN)
            wait_writable(fd); // someone else made the shared description non-blocking
        else if (errno != EINTR)
            return false;
    }
    return true;
}

} // namespace

bool is_terminal(int fd) {
    return ::isatty(fd) == 1;
}

std::size_t output_columns() {
    return extent("COLUMNS", &winsize::ws_col);
}

std::size_t output_lines() {
    return extent("LINES", &winsize::ws_row);
}

void repaint(std::string_view text) {
    const std::size_t most = output_lines(), width = output_columns();
    std::string out = "\x1b[H";
    for (std::size_t line = 1; !text.empty(); ++line) {
        const std::size_t end = std::min(text.find('\n'), text.size());
        out += width == 0 ? std::string(text.substr(0, end)) : shortened(text.substr(0, end), width);
        out += "\x1b[K"; // what is left of a longer line
        text.remove_prefix(std::min(end + 1, text.size()));
        if (line == most) break; // a line feed would scroll
        out += '\n';
    }
    write_out(out + "\x1b[J");
}

void write_out(std::string_view bytes) {
    if (write_all(STDOUT_FILENO, bytes)) return;
    const int error = errno;
    if (error == EPIPE) { // a parent that ignores SIGPIPE has left us that
        std::signal(SIGPIPE, SIG_DFL);
        ::raise(SIGPIPE);
    }
    throw std::system_error(error, std::generic_category(), "cannot write to standard output");
}

void write_err(std::string_view bytes) {
    write_all(STDERR_FILENO, bytes);
}

} // namespace gcoalesce::cli
