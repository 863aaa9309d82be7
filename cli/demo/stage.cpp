#include "cli/demo/stage.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <fmt/format.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <system_error>

#include "cli/demo/client.hpp"

extern "C" { // which glibc 2.36 forgets there
}

namespace gcoalesce::cli::demo {
namespace {

namespace fs = std::filesystem;

constexpr int kStopMs = 5000;

[[noreturn]] void throw_errno(const char* what) {
    throw std::system_error(errno, std::generic_category(), what);
}

sigset_t held_back() {
    sigset_t set;
    ::sigemptyset(&set);
    for (const int number : {SIGINT, SIGTERM, SIGHUP}) ::sigaddset(&set, number);
    return set;
}

std::string own_program() {
    return fs::read_symlink("/proc/self/exe").string();
}

// Beside us, as installed, or as built; else where PATH has it.
std::string broker_program() {
    const fs::path here = fs::path(own_program()).parent_path();
    for (const char* place : {"gcoalesced", "../sbin/gcoalesced", "../broker/gcoalesced"}) {
        if (::access((here / place).c_str(), X_OK) == 0) return (here / place).string();
    }
    return "gcoalesced";
}

// Ours, without what would configure a broker from outside, and with a key that opens nothing.
std::vector<std::string> environment() {
    std::vector<std::string> variables;
    for (char** variable = environ; *variable != nullptr; ++variable) {
        const std::string_view text(*variable);
        const bool configures = text.starts_with("GCOALESCE_") || text.starts_with("CREDENTIALS_DIRECTORY=") ||
                                text.starts_with("GEMINI_API_KEY=");
        if (!configures) variables.emplace_back(text);
    }
    variables.emplace_back("GEMINI_API_KEY=demo");
    return variables;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
    std::vector<char*> list;
    for (std::string& text : texts) list.push_back(text.data());
    list.push_back(nullptr);
    return list;
}

// In a child, first of all: it lives no longer than we do, and hears signals again.
void begin_child(pid_t parent) {
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() != parent) ::_exit(1);
    const sigset_t set = held_back();
    ::sigprocmask(SIG_UNBLOCK, &set, nullptr);
}

UniqueFd open_process(pid_t pid) {
    return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))); // glibc 2.36 declares it for C only
}

bool wait_for(pid_t pid, int ms) {
    const UniqueFd process = open_process(pid);
    pollfd fd{process.get(), POLLIN, 0};
    return process && ::poll(&fd, 1, ms) > 0;
}

} // namespace

Stage::Stage(Nanos watchdog) : deadline_(system_clock().monotonic() + watchdog) {
    const sigset_t set = held_back();
    ::sigprocmask(SIG_BLOCK, &set, nullptr);
    signals_ = UniqueFd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
    std::array<int, 2> ends{};
    if (!signals_ || ::pipe2(ends.data(), O_CLOEXEC) != 0) throw_errno("no descriptors");
    go_read_ = UniqueFd(ends[0]);
    go_write_ = UniqueFd(ends[1]);
    std::string place = (fs::temp_directory_path() / "gcoalesce-demo-XXXXXX").string();
    if (::mkdtemp(place.data()) == nullptr) throw_errno("cannot make a directory for the demo");
    instance_.runtime_dir = place;
}

Stage::~Stage() {
    stop_all();
    ::shm_unlink(instance_.segment_name(::geteuid()).c_str()); // where the broker could not
    std::error_code ignored;
    fs::remove_all(instance_.runtime_dir, ignored);
    const sigset_t set = held_back();
    ::sigprocmask(SIG_UNBLOCK, &set, nullptr);
}

void Stage::stop_all() {
    for (const pid_t pid : children_) ::kill(pid, SIGTERM);
    for (const pid_t pid : children_) {
        if (!wait_for(pid, kStopMs)) ::kill(pid, SIGKILL);
        while (::waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
        }
    }
    children_.clear();
}

Client Stage::start(std::vector<std::string> command) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw_errno("no descriptors");
    Client child;
    child.out = UniqueFd(ends[0]);
    const UniqueFd child_out(ends[1]);
    std::vector<std::string> variables = environment();
    const std::vector<char*> arguments = pointers(command), environs = pointers(variables);
    const pid_t parent = ::getpid();
    child.pid = ::fork();
    if (child.pid < 0) throw_errno("cannot start a process");
    if (child.pid == 0) {
        begin_child(parent);
        ::dup2(child_out.get(), STDOUT_FILENO);
        ::execvpe(arguments[0], arguments.data(), environs.data());
        ::_exit(127);
    }
    children_.push_back(child.pid);
    return child;
}

std::string Stage::start_sim() {
    Client sim = start({own_program(), "sim", "--port", "0", "--latency", "200ms", "--events", "24", "--gap", "40ms"});
    const std::string line = read_line(sim);
    return line.substr(line.rfind(' ') + 1);
}

void Stage::start_broker(const std::string& upstream, const std::string& ca_file) {
    std::vector<std::string> command{broker_program(),
                                     "--instance",
                                     instance_.name,
                                     "--runtime-dir",
                                     instance_.runtime_dir,
                                     "--upstream",
                                     upstream,
                                     "--memory",
                                     "16MiB",
                                     "--streams",
                                     "64",
                                     "--drain-timeout",
                                     "0ms",
                                     "--log-level",
                                     "error"};
    if (!ca_file.empty()) command.insert(command.end(), {"--ca-file", ca_file});
    broker_ = start(std::move(command)).pid;
}

Client Stage::start_client(unsigned requests) {
    std::array<int, 2> ends{};
    if (::pipe2(ends.data(), O_CLOEXEC) != 0) throw_errno("no descriptors");
    Client child;
    child.out = UniqueFd(ends[0]);
    UniqueFd child_out(ends[1]);
    const pid_t parent = ::getpid();
    child.pid = ::fork();
    if (child.pid < 0) throw_errno("cannot start a process");
    if (child.pid == 0) {
        begin_child(parent);
        go_write_.reset(); // or its end would never come
        int code = 1;
        try {
            const std::string line = to_line(run_client(instance_, requests, child_out.get(), go_read_.get()));
            std::size_t written = 0;
            while (written < line.size()) {
                const ssize_t sent = ::write(child_out.get(), line.data() + written, line.size() - written);
                if (sent < 0 && errno != EINTR) break;
                if (sent > 0) written += static_cast<std::size_t>(sent);
            }
            code = 0;
        } catch (const std::exception& error) {
            fmt::print(stderr, "gcoalesce: {}\n", error.what());
        }
        ::_exit(code);
    }
    children_.push_back(child.pid);
    return child;
}

void Stage::go() {
    go_write_.reset();
}

std::string Stage::read_line(Client& client) {
    const UniqueFd broker = broker_ > 0 ? open_process(broker_) : UniqueFd();
    for (;;) {
        if (const std::size_t end = client.pending.find('\n'); end != std::string::npos) {
            std::string line = client.pending.substr(0, end);
            client.pending.erase(0, end + 1);
            return line;
        }
        const Nanos left = deadline_ - system_clock().monotonic();
        if (left <= 0) throw std::runtime_error("the demo took too long and was stopped");
        std::array<pollfd, 3> fds{
            {{client.out.get(), POLLIN, 0}, {signals_.get(), POLLIN, 0}, {broker.get(), POLLIN, 0}}};
        if (::poll(fds.data(), fds.size(), static_cast<int>(to_ms(left) + 1)) < 0 && errno != EINTR)
            throw_errno("cannot wait");
        if (signalfd_siginfo signal{}; ::read(signals_.get(), &signal, sizeof signal) == sizeof signal)
            throw Interrupted{static_cast<int>(signal.ssi_signo)};
        if (fds[2].revents != 0)
            throw std::runtime_error("the demo's broker ended: is gcoalesced installed beside gcoalesce, or in PATH?");
        if (fds[0].revents == 0) continue;
        std::array<char, 65536> buffer{};
        const ssize_t got = ::read(client.out.get(), buffer.data(), buffer.size());
        if (got == 0) throw std::runtime_error("one of the demo's processes ended before its time");
        if (got > 0) client.pending.append(buffer.data(), static_cast<std::size_t>(got));
    }
}

} // namespace gcoalesce::cli::demo
