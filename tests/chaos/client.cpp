#include "tests/chaos/client.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <poll.h>
#include <stdexcept>
#include <string_view>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <system_error>
#include <unistd.h>

#include "tests/support/sim.hpp"

namespace gcoalesce::test {
namespace {

constexpr std::int64_t kWatchdogMs = 120'000;

[[noreturn]] void throw_errno(const char* what) {
    throw std::system_error(errno, std::generic_category(), what);
}

[[noreturn]] void throw_code(const char* what, gcoalesce_code code) {
    throw std::runtime_error(std::string(what) + ": " + gcoalesce_code_name(code) + ": " + gcoalesce_message());
}

[[noreturn]] void run(const std::function<void(Line&)>& work, UniqueFd end) {
    for (const int number : {SIGTERM, SIGINT, SIGABRT, SIGSEGV, SIGFPE, SIGILL}) ::signal(number, SIG_DFL); // Catch's
    int code = 0;
    try {
        Line line(std::move(end));
        work(line);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "client process %d: %s\n", ::getpid(), error.what());
        code = 1;
    }
    ::_exit(code); // not what the parent would do at its end
}

} // namespace

// ---- the line ------------------------------------------------------------------------------------------------------

Line::Line(UniqueFd socket) : socket_(std::move(socket)) {
    const timeval watchdog{kWatchdogMs / 1000, 0};
    for (const int which : {SO_RCVTIMEO, SO_SNDTIMEO})
        if (::setsockopt(socket_.get(), SOL_SOCKET, which, &watchdog, sizeof watchdog) != 0) throw_errno("setsockopt");
}

void Line::send(const void* bytes, std::size_t count) {
    while (::send(socket_.get(), bytes, count, MSG_NOSIGNAL) < 0)
        if (errno != EINTR) throw_errno("telling the other process");
}

void Line::receive(void* bytes, std::size_t count) {
    ssize_t got = -1;
    while ((got = ::recv(socket_.get(), bytes, count, MSG_TRUNC)) < 0)
        if (errno != EINTR) throw_errno("hearing the other process");
    if (got == 0) throw std::runtime_error("the other process has gone without telling what it should");
    if (static_cast<std::size_t>(got) != count) throw std::logic_error("the other process tells something else");
}

bool Line::has_news() const {
    pollfd poll{socket_.get(), POLLIN, 0};
    return ::poll(&poll, 1, 0) == 1;
}

// ---- the child -----------------------------------------------------------------------------------------------------

Child::Child(const std::function<void(Line&)>& work) {
    std::array<int, 2> ends{};
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0) throw_errno("socketpair");
    UniqueFd ours(ends[0]), theirs(ends[1]);
    const pid_t parent = ::getpid();
    pid_ = ::fork();
    if (pid_ < 0) throw_errno("fork");
    if (pid_ == 0) {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (::getppid() != parent) ::_exit(1);
        ours.reset();
        run(work, std::move(theirs));
    }
    line_ = std::make_unique<Line>(std::move(ours));
    // glibc 2.36 declares pidfd_open for C alone.
    pidfd_ = UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
}

Child::~Child() {
    if (code_ >= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
}

void Child::signal(int number) const {
    if (::kill(pid_, number) != 0) throw_errno("kill");
}

void Child::stop() const {
    signal(SIGSTOP);
    int status = 0;
    if (::waitpid(pid_, &status, WUNTRACED) != pid_ || !WIFSTOPPED(status))
        throw std::runtime_error("the client process ended before it could be stopped");
}

int Child::wait() {
    if (code_ >= 0) return code_;
    pollfd ended{pidfd_.get(), POLLIN, 0};
    if (::poll(&ended, 1, static_cast<int>(kWatchdogMs)) != 1)
        throw std::runtime_error("a client process does not end");
    int status = 0;
    if (::waitpid(pid_, &status, 0) != pid_) throw_errno("waitpid");
    code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return code_;
}

// ---- in the child --------------------------------------------------------------------------------------------------

Attachment attach(const Instance& instance, std::int64_t timeout_ms) {
    gcoalesce_attach_options options{};
    options.size = sizeof options;
    options.instance = instance.name.c_str();
    options.runtime_dir = instance.runtime_dir.c_str();
    options.client_name = "chaos";
    gcoalesce_attachment* attachment = nullptr;
    const gcoalesce_code code = gcoalesce_attach(&options, timeout_ms, &attachment);
    if (code != GCOALESCE_OK) throw_code("attaching", code);
    return Attachment(attachment);
}

Reader::Reader(const Attachment& attachment, const Ask& ask) : digest_(std::make_unique<Sha256>()) {
    const std::string body = prompt_body(ask.prompt);
    gcoalesce_request request{};
    request.size = sizeof request;
    request.model = ask.model.c_str();
    request.body = body.data();
    request.body_bytes = body.size();
    request.stream = ask.stream ? 1 : 0;
    request.sharing = ask.sharing;
    open(attachment, request);
}

Reader::Reader(const Attachment& attachment, const gcoalesce_request& request, std::uint64_t after)
    : digest_(std::make_unique<Sha256>()), number_(after) {
    open(attachment, request);
}

void Reader::open(const Attachment& attachment, const gcoalesce_request& request) {
    gcoalesce_subscription* subscription = nullptr;
    const gcoalesce_code code = gcoalesce_open(attachment.get(), &request, &subscription);
    if (code != GCOALESCE_OK) throw_code("opening", code);
    subscription_.reset(subscription);
}

gcoalesce_code Reader::next(std::int64_t timeout_ms) {
    if (over()) return seen_.code;
    gcoalesce_event event{};
    seen_.code = gcoalesce_next(subscription_.get(), timeout_ms, &event);
    if (seen_.code == GCOALESCE_OK) {
        ++seen_.events;
        if (event.number != ++number_) ++seen_.misplaced;
        seen_.bytes += event.bytes;
        digest_->field(std::string_view(event.data, event.bytes));
    } else if (over()) {
        seen_.ending.size = sizeof seen_.ending;
        gcoalesce_ending_of(subscription_.get(), &seen_.ending);
        seen_.info.size = sizeof seen_.info;
        gcoalesce_info_of(subscription_.get(), &seen_.info);
        seen_.digest = digest_->finish();
    }
    return seen_.code;
}

void Reader::read(std::uint64_t events) {
    while (seen_.events < events) {
        const gcoalesce_code code = next(kWatchdogMs);
        if (code != GCOALESCE_OK) throw_code("waiting for an event", code);
    }
}

const Seen& Reader::read_to_end() {
    while (!over()) {
        if (next(kWatchdogMs) == GCOALESCE_TIMED_OUT) throw_code("waiting for the end", GCOALESCE_TIMED_OUT);
    }
    return seen_;
}

gcoalesce_info Reader::served() {
    gcoalesce_info info{};
    info.size = sizeof info;
    // There is no call that waits for this alone; the shortest read does, and whatever it reads counts.
    for (std::int64_t waited = 0; info.stream_id == 0; ++waited) {
        const gcoalesce_code code = next(1);
        if (over() && code != GCOALESCE_END) throw_code("being served", code);
        if (waited == kWatchdogMs) throw_code("being served", code);
        gcoalesce_info_of(subscription_.get(), &info);
    }
    return info;
}

void read_all(const Attachment& attachment, std::deque<Reader>& readers, const std::function<void()>& step) {
    const int fd = gcoalesce_fd(attachment.get());
    for (;;) {
        gcoalesce_dispatch(attachment.get());
        for (Reader& reader : readers) {
            while (reader.next(0) == GCOALESCE_OK) {
            }
        }
        const std::size_t before = readers.size();
        if (step) step();
        if (readers.size() == before && std::all_of(readers.begin(), readers.end(), [](auto& r) { return r.over(); }))
            return;
        pollfd poll{fd, POLLIN, 0};
        if (::poll(&poll, 1, static_cast<int>(kWatchdogMs)) == 0) throw std::runtime_error("nothing to read");
    }
}

} // namespace gcoalesce::test
