#include "cli/view/terminal.hpp"

#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <poll.h>
#include <sys/ioctl.h>
#include <system_error>
#include <unistd.h>

namespace gcoalesce::cli {
namespace {

void wait_writable(int fd) {
    pollfd entry{fd, POLLOUT, 0};
    ::poll(&entry, 1, -1);
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
    if (const char* told = std::getenv("COLUMNS"); told != nullptr) {
        const std::string_view text(told);
        std::size_t columns = 0;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), columns);
        if (error == std::errc() && end == text.data() + text.size()) return columns;
    }
    winsize size{};
    return ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
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
