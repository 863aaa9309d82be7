#include "tests/support/process.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <stdexcept>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <system_error>
#include <unistd.h>
#include <utility>

namespace gcoalesce::test {
namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void throw_errno(const std::string& what) {
    throw std::system_error(errno, std::generic_category(), what);
}

std::pair<UniqueFd, UniqueFd> make_pipe() {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw_errno("pipe2");
    return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

void set_nonblocking(const UniqueFd& fd) {
    if (::fcntl(fd.get(), F_SETFL, O_NONBLOCK) != 0) throw_errno("fcntl");
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
    std::vector<char*> list;
    for (std::string& text : texts) list.push_back(text.data());
    list.push_back(nullptr);
    return list;
}

// Appends all that can be read now; closes the descriptor at the end of the pipe.
void drain_pipe(UniqueFd& fd, std::string& text) {
    std::array<char, 65536> buffer{};
    while (fd) {
        const ssize_t got = ::read(fd.get(), buffer.data(), buffer.size());
        if (got > 0)
            text.append(buffer.data(), static_cast<std::size_t>(got));
        else if (got < 0 && errno == EAGAIN)
            return;
        else if (got == 0 || errno != EINTR)
            fd.reset();
    }
}

// Appends what the file has behind `text`.
void read_on(const UniqueFd& file, std::string& text) {
    std::array<char, 65536> buffer{};
    for (;;) {
        const ssize_t got = ::pread(file.get(), buffer.data(), buffer.size(), static_cast<off_t>(text.size()));
        if (got <= 0) return;
        text.append(buffer.data(), static_cast<std::size_t>(got));
    }
}

} // namespace

Process::Process(std::vector<std::string> argv, SpawnOptions options)
    : name_(argv.at(0)), input_(std::move(options.input)) {
    // A socket, so that writing to a child that has closed its input is an error and no signal.
    std::array<int, 2> input{};
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, input.data()) != 0) throw_errno("socketpair");
    in_fd_ = UniqueFd(input[0]);
    const UniqueFd child_in(input[1]);
    auto [out_fd, child_out] = make_pipe();
    out_fd_ = std::move(out_fd);
    // A file takes a server's log, however long it is and whoever reads it.
    err_fd_ = UniqueFd(::memfd_create("stderr", MFD_CLOEXEC));
    if (!err_fd_ || ::fcntl(err_fd_.get(), F_SETFL, O_APPEND) != 0) throw_errno("memfd_create");

    // The later of two settings of one name would lose.
    std::vector<std::string> environment = std::move(options.env);
    const std::size_t given = environment.size();
    for (char** item = environ; *item != nullptr; ++item) {
        const std::string_view name(*item, std::strcspn(*item, "=") + 1);
        const auto end = environment.begin() + static_cast<std::ptrdiff_t>(given);
        if (std::none_of(environment.begin(), end, [&](const std::string& text) { return text.starts_with(name); }))
            environment.emplace_back(*item);
    }
    const std::vector<char*> arguments = pointers(argv), variables = pointers(environment);
    const pid_t parent = ::getpid();

    pid_ = ::fork();
    if (pid_ < 0) throw_errno("fork");
    if (pid_ == 0) { // only calls that are safe after a fork of a threaded process
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (::getppid() != parent) ::_exit(127);
        ::dup2(child_in.get(), 0);
        ::dup2(child_out.get(), 1);
        ::dup2(err_fd_.get(), 2);
        ::execvpe(arguments[0], arguments.data(), variables.data());
        ::_exit(127);
    }
    // glibc 2.36 declares pidfd_open for C alone.
    pidfd_ = UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
    if (!pidfd_) throw_errno("pidfd_open");
    set_nonblocking(in_fd_);
    set_nonblocking(out_fd_);
    if (input_.empty()) in_fd_.reset();
}

Process::~Process() {
    if (code_ >= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
}

void Process::signal(int number) const {
    if (code_ < 0 && ::kill(pid_, number) != 0) throw_errno("kill " + name_);
}

std::string Process::describe() const {
    return name_ + "\nstdout: " + out_ + "\nstderr: " + err_;
}

// One step of moving bytes; false once the child has ended and all that it wrote is read.
bool Process::pump(Clock::time_point deadline, std::chrono::milliseconds step) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
    if (left.count() <= 0) throw std::runtime_error("deadline passed waiting for " + describe());
    std::array<pollfd, 3> fds{{{pidfd_.get(), POLLIN, 0},
                               {out_fd_ ? out_fd_.get() : -1, POLLIN, 0},
                               {in_fd_ ? in_fd_.get() : -1, POLLOUT, 0}}};
    if (::poll(fds.data(), fds.size(), static_cast<int>(std::min(left, step).count())) < 0 && errno != EINTR)
        throw_errno("poll");

    if (in_fd_ && fds[2].revents != 0) {
        const ssize_t sent = ::send(in_fd_.get(), input_.data(), input_.size(), MSG_NOSIGNAL);
        if (sent > 0) input_.erase(0, static_cast<std::size_t>(sent));
        if (input_.empty() || (sent < 0 && errno != EAGAIN && errno != EINTR)) in_fd_.reset();
    }
    drain_pipe(out_fd_, out_);
    read_on(err_fd_, err_);
    if (fds[0].revents == 0) return true;

    // It ended before this last look, so that nothing of its own is left behind.
    int status = 0;
    if (::waitpid(pid_, &status, 0) != pid_) throw_errno("waitpid");
    code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    drain_pipe(out_fd_, out_);
    read_on(err_fd_, err_);
    return false;
}

std::string Process::read_line(Seconds deadline) {
    const Clock::time_point until = Clock::now() + deadline;
    for (;;) {
        const std::size_t end = out_.find('\n', lines_end_);
        if (end != std::string::npos) {
            const std::size_t begin = std::exchange(lines_end_, end + 1);
            return out_.substr(begin, end - begin);
        }
        if (code_ >= 0 || !out_fd_) throw std::runtime_error("no further line from " + describe());
        pump(until);
    }
}

void Process::wait_for_err(std::string_view words, Seconds deadline) {
    const Clock::time_point until = Clock::now() + deadline;
    while (err_.find(words) == std::string::npos) {
        if (code_ >= 0)
            throw std::runtime_error("no \"" + std::string(words) + "\" on the standard error of " + describe());
        pump(until, std::chrono::milliseconds(1)); // a file that grows wakes nobody
    }
}

int Process::wait(Seconds deadline) {
    const Clock::time_point until = Clock::now() + deadline;
    while (code_ < 0) pump(until);
    return code_;
}

} // namespace gcoalesce::test
