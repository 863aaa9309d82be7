// Many event-loop subscribers on one key: how long until the last one is done, and what an event costs the broker.

#include <csignal>
#include <curl/curl.h>
#include <fmt/format.h>
#include <fstream>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/bench/bench.hpp"
#include "tests/bench/client.hpp"
#include "tests/support/http.hpp"

namespace gcoalesce::bench {
namespace {

std::vector<gcoalesce_subscription*> open_many(const Client& client, const std::string& body, std::size_t count) {
    std::vector<gcoalesce_subscription*> open;
    for (std::size_t i = 0; i < count; ++i) open.push_back(client.open(body));
    return open;
}

// Reads all of them to their ends on one event loop.
void read_all(const Client& client, std::vector<gcoalesce_subscription*> open) {
    pollfd poll_fd{gcoalesce_fd(client.attachment()), POLLIN, 0};
    while (!open.empty()) {
        ::poll(&poll_fd, 1, 1000);
        check(gcoalesce_dispatch(client.attachment()));
        for (std::size_t i = 0; i < open.size();) {
            gcoalesce_event event{};
            gcoalesce_code code = GCOALESCE_OK;
            while ((code = gcoalesce_next_span(open[i], 0, &event)) == GCOALESCE_OK) {
            }
            if (code == GCOALESCE_TIMED_OUT) {
                ++i;
                continue;
            }
            if (code != GCOALESCE_END) check(code);
            gcoalesce_close(open[i]);
            open[i] = open.back();
            open.pop_back();
        }
    }
}

std::string calls(const test::Sim& sim) {
    const std::string text = sim.calls();
    const std::size_t at = text.find("\"calls\":") + 8;
    return text.substr(at, text.find_first_of(",}", at) - at);
}

std::uint64_t cpu_ns(pid_t pid) {
    std::ifstream file(fmt::format("/proc/{}/schedstat", pid));
    std::uint64_t ran = 0;
    file >> ran;
    return ran;
}

} // namespace

void fan_out() {
    constexpr int kProcesses = 8;
    constexpr std::size_t kEach = 1250;
    Setup setup;
    Samples ours, peer;
    std::string made;
    for (int round = 0; round < 5; ++round) {
        const std::string body = test::prompt_body(fmt::format("[sim events=40 gap=50ms size=400] round {}", round));
        setup.sim.reset();
        std::vector<int> ready;
        std::vector<pid_t> readers;
        int start_pipe[2], done_pipe[2];
        if (::pipe(start_pipe) != 0 || ::pipe(done_pipe) != 0) throw std::runtime_error("no pipe");
        for (int i = 0; i < kProcesses; ++i) {
            const pid_t pid = ::fork();
            if (pid == 0) {
                ::prctl(PR_SET_PDEATHSIG, SIGKILL);
                ::close(start_pipe[1]);
                char go = 0;
                try {
                    const Client client(setup.runtime_dir);
                    if (::write(done_pipe[1], "r", 1) != 1 || ::read(start_pipe[0], &go, 1) < 0) ::_exit(1);
                    read_all(client, open_many(client, body, kEach));
                } catch (const std::exception&) {
                    ::_exit(1);
                }
                ::_exit(0);
            }
            readers.push_back(pid);
        }
        char byte = 0;
        for (int i = 0; i < kProcesses; ++i) {
            if (::read(done_pipe[0], &byte, 1) != 1) throw std::runtime_error("a reader died");
        }
        double start = now_us();
        ::close(start_pipe[1]); // all of them read "end" now
        for (const pid_t pid : readers) {
            int status = 0;
            ::waitpid(pid, &status, 0);
            if (status != 0) throw std::runtime_error("a reader failed");
        }
        ours.add((now_us() - start) / 1e6);
        for (const int fd : {start_pipe[0], done_pipe[0], done_pipe[1]}) ::close(fd);
        made = calls(setup.sim);
        // The upstream's own duration, by a lone caller of the same.
        start = now_us();
        const test::HttpResponse alone =
            test::http(setup.sim.url() + "/v1beta/models/gemini-2.5-flash:streamGenerateContent?alt=sse", body,
                       {"content-type: application/json"});
        if (alone.status != 200) throw std::runtime_error("the lone call failed: " + alone.error);
        peer.add((now_us() - start) / 1e6);
    }
    report("10,000 event-loop subscribers in 8 processes / one direct call",
           fmt::format("{:.3f} s / {:.3f} s, {} call", ours.median(), peer.median(), made),
           fmt::format("{:.3f}, target at most 1.050", ours.median() / peer.median()));
}

void event_cost() {
    constexpr int kEvents = 1000;
    Setup setup({"--stream-limit", "32MiB"});
    Samples one, many;
    const Client client(setup.runtime_dir);
    for (int round = 0; round < 7; ++round) {
        for (const std::size_t subscribers : {std::size_t{1}, std::size_t{10'000}}) {
            const std::string body = test::prompt_body(fmt::format(
                "[sim events={} gap=5ms size=400 first=500ms] {} in round {}", kEvents, subscribers, round));
            std::vector<gcoalesce_subscription*> all = open_many(client, body, subscribers);
            gcoalesce_event event{};
            check(gcoalesce_next(all.front(), 20'000, &event)); // opening is not an event's cost: all are in
            const std::uint64_t before = cpu_ns(setup.broker->pid());
            read_all(client, std::move(all));
            (subscribers == 1 ? one : many)
                .add(static_cast<double>(cpu_ns(setup.broker->pid()) - before) / 1000 / kEvents);
        }
    }
    report("broker CPU an event: 10,000 event-loop subscribers in a process / 1",
           fmt::format("{:.1f} us / {:.1f} us", many.median(), one.median()),
           fmt::format("{:.2f}, target 1.00", many.median() / one.median()));
}

} // namespace gcoalesce::bench
