// Herds of HTTP clients with one prompt: when the first byte of the answer reaches each of them, how many calls it
// took, and whether they all got the same. Then how fast answers are that are there already.

#include <algorithm>
#include <arpa/inet.h>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <fmt/format.h>
#include <fstream>
#include <functional>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <optional>
#include <regex>
#include <set>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/fd.hpp"
#include "tests/bench/bench.hpp"
#include "tests/bench/http_servers.hpp"
#include "tests/support/http.hpp"
#include "tests/support/server_program.hpp"

namespace gcoalesce::bench {
namespace {

namespace http = boost::beast::http;

constexpr int kEvents = 20, kGapMs = 50, kLatencyMs = 300;
constexpr double kMeasureMemoryAt = 0.9e6; // us after the start: all have their first byte, none is done
constexpr double kWatchdog = 60e6;         // us
constexpr std::string_view kLastChunk = "\r\n0\r\n\r\n";

struct Client {
    UniqueFd fd;
    double start = 0, first = 0, last = 0; // us; 0: not yet
    std::string got;
    bool over = false;
};

struct Herd {
    Samples first_us; // from the client's connect() to the first byte of its answer's body
    double last_us = 0;
    std::size_t failed = 0;   // no whole answer with status 200
    std::size_t distinct = 0; // bodies
};

// A response's body; nullopt: it is not whole, or its status is not 200.
std::optional<std::string> body_of(const std::string& bytes) {
    http::response_parser<http::string_body> parser;
    boost::system::error_code error;
    parser.eager(true);
    const char* at = bytes.data();
    for (std::size_t left = bytes.size(); left > 0 && !parser.is_done();) {
        const std::size_t used = parser.put(boost::asio::buffer(at, left), error);
        if (error || used == 0) return std::nullopt;
        at += used;
        left -= used;
    }
    if (!parser.is_done() || parser.get().result() != http::status::ok) return std::nullopt;
    return std::move(parser.get().body());
}

// Cheap, since it stands between the arrival of one client's bytes and the next one's.
bool looks_whole(const Client& client) {
    if (client.got.ends_with(kLastChunk)) return true;
    const std::size_t head = client.got.find("\r\n\r\n"), field = client.got.find("Content-Length: ");
    return head != std::string::npos && field < head && body_of(client.got).has_value();
}

void take(Client& client, double present) {
    static std::vector<char> bytes(1 << 16);
    for (;;) {
        const ssize_t got = ::recv(client.fd.get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
        if (got < 0 && errno == EAGAIN) break;
        if (got <= 0) {
            client.over = true;
            return;
        }
        client.got.append(bytes.data(), static_cast<std::size_t>(got));
        if (static_cast<std::size_t>(got) < bytes.size()) break;
    }
    if (client.first == 0) {
        const std::size_t head = client.got.find("\r\n\r\n");
        if (head != std::string::npos && client.got.size() > head + 4) client.first = present;
    }
    if (looks_whole(client)) {
        client.last = present;
        client.over = true;
    }
}

// All of them connect and ask, one behind the other without a pause; one thread reads what comes.
Herd run_herd(std::uint16_t port, std::size_t count, const std::string& request, std::size_t answer_size,
              const std::function<void()>& measure_memory = {}) {
    const UniqueFd poll(::epoll_create1(EPOLL_CLOEXEC));
    std::vector<Client> clients(count);
    for (Client& client : clients) client.got.reserve(answer_size);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);

    std::vector<epoll_event> events(1024);
    std::size_t started = 0, over = 0;
    bool measured = !measure_memory;
    const double begin = now_us();
    while (over < count && now_us() < begin + kWatchdog) {
        for (int burst = 0; burst < 64 && started < count; ++burst, ++started) {
            Client& client = clients[started];
            client.start = now_us();
            client.fd = UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
            const int on = 1;
            ::setsockopt(client.fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
            ::connect(client.fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
            epoll_event wanted{EPOLLOUT, {}};
            wanted.data.u64 = started;
            ::epoll_ctl(poll.get(), EPOLL_CTL_ADD, client.fd.get(), &wanted);
        }
        const int ready =
            ::epoll_wait(poll.get(), events.data(), static_cast<int>(events.size()), started < count ? 0 : 10);
        const double present = now_us();
        for (int i = 0; i < ready; ++i) {
            epoll_event& event = events[static_cast<std::size_t>(i)];
            Client& client = clients[event.data.u64];
            if (event.events & EPOLLOUT) {
                const ssize_t sent = ::send(client.fd.get(), request.data(), request.size(), MSG_NOSIGNAL);
                client.over = sent != static_cast<ssize_t>(request.size());
                event.events = EPOLLIN;
                ::epoll_ctl(poll.get(), EPOLL_CTL_MOD, client.fd.get(), &event);
            } else {
                take(client, present);
            }
            if (!client.over) continue;
            ++over;
            ::epoll_ctl(poll.get(), EPOLL_CTL_DEL, client.fd.get(), nullptr);
        }
        if (!measured && present > begin + kMeasureMemoryAt) {
            measured = true;
            measure_memory();
        }
    }

    Herd herd;
    std::set<std::string> bodies;
    for (Client& client : clients) {
        const linger abort{1, 0}; // leaves no TIME_WAIT behind: ports would run out
        ::setsockopt(client.fd.get(), SOL_SOCKET, SO_LINGER, &abort, sizeof abort);
        std::optional<std::string> body = client.last != 0 ? body_of(client.got) : std::nullopt;
        if (!body) {
            ++herd.failed;
            continue;
        }
        bodies.insert(std::move(*body));
        herd.first_us.add(client.first - client.start);
        herd.last_us = std::max(herd.last_us, client.last - client.start);
    }
    herd.distinct = bodies.size();
    return herd;
}

// A process's own memory that is in RAM, without the segment and what else it shares.
double private_mib(pid_t pid) {
    std::ifstream file(fmt::format("/proc/{}/smaps_rollup", pid));
    double kib = 0;
    for (std::string line; std::getline(file, line);) {
        if (line.starts_with("Private_")) kib += std::stod(line.substr(line.find(':') + 1));
    }
    return kib / 1024;
}

std::string prompt(std::size_t clients, int round) {
    return test::prompt_body(fmt::format("[sim events={} gap={}ms latency={}ms size=300] {} ask, round {}", kEvents,
                                         kGapMs, kLatencyMs, clients, round));
}

// What the bare server sends: the head with the first event, then an event at a time, in chunks like upstream's.
std::vector<std::string> pieces_of(const test::HttpResponse& direct) {
    std::vector<std::string> pieces;
    for (std::size_t at = 0, end; (end = direct.body.find("\r\n\r\n", at)) != std::string::npos; at = end + 4) {
        const std::string event = direct.body.substr(at, end + 4 - at);
        pieces.push_back(fmt::format("{:x}\r\n{}\r\n", event.size(), event));
    }
    pieces.at(0).insert(0, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n");
    pieces.back() += "0\r\n\r\n";
    return pieces;
}

} // namespace

void herd(std::size_t count, double target) {
    constexpr int kRounds = 5;
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &limit);

    Setup setup;
    GatewayServer gateway(setup.runtime_dir);
    const auto varnish = varnish_before(setup.sim.url());
    const auto nginx = nginx_before(setup.sim.url());
    const std::string sample = prompt(count, 0);
    const test::HttpResponse direct = test::http(setup.sim.url() + kStreamPath, sample);
    if (direct.status != 200) throw std::runtime_error("the lone call failed: " + direct.error);
    const std::size_t answer_size = 2 * direct.body.size() + 2048;

    struct Contender {
        const char* name;
        std::uint16_t port;
        Samples p50{}, p99{}, last{};
        std::size_t calls = 0, distinct = 0, failed = 0; // the worst round
    };
    BareServer bare(pieces_of(direct), request_bytes(prompt(count, 0)).size(), kLatencyMs, kGapMs);
    std::vector<Contender> contenders{{"gcoalesce serve", gateway.port()}, {"bare epoll loop", bare.port()}};
    if (varnish) contenders.push_back({"Varnish", varnish->port()});
    if (nginx) contenders.push_back({"nginx", nginx->port()});
    Samples alone, memory;
    for (int round = 0; round < kRounds; ++round) {
        const std::string request = request_bytes(prompt(count, round));
        alone.add(run_herd(setup.sim.port(), 1, request, answer_size).first_us.median());
        for (std::size_t turn = 0; turn < contenders.size(); ++turn) { // each is the first one in some round
            Contender& contender = contenders[(turn + static_cast<std::size_t>(round)) % contenders.size()];
            setup.sim.reset();
            std::function<void()> measure;
            if (contender.port == gateway.port())
                measure = [&] { memory.add(private_mib(gateway.pid()) + private_mib(setup.broker->pid())); };
            Herd herd = run_herd(contender.port, count, request, answer_size, measure);
            const std::string told = setup.sim.calls();
            const std::size_t at = told.find("\"calls\":") + 8;
            contender.calls = std::max(contender.calls, std::stoul(told.substr(at)));
            contender.distinct = std::max(contender.distinct, herd.distinct);
            contender.failed = std::max(contender.failed, herd.failed);
            if (herd.failed == count) continue;
            contender.p50.add(herd.first_us.median());
            contender.p99.add(herd.first_us.percentile(99));
            contender.last.add(herd.last_us);
        }
    }
    for (Contender& contender : contenders) {
        const bool ours = contender.port == gateway.port();
        const std::string name = fmt::format("{} HTTP clients: {}", count, contender.name);
        if (contender.p99.empty()) {
            report(name, "no round had an answer", "");
            continue;
        }
        const std::string other = contender.failed == 0 ? "" : fmt::format(", {} failed", contender.failed);
        report(name,
               fmt::format("first byte p50 {:.0f} ms, p99 {:.0f} ms (alone {:.0f} ms), last done {:.0f} ms, calls: "
                           "{}, different bodies: {}{}{}",
                           contender.p50.median() / 1000, contender.p99.median() / 1000, alone.median() / 1000,
                           contender.last.median() / 1000, contender.calls, contender.distinct, other,
                           ours ? fmt::format(", {:.0f} MiB", memory.percentile(100)) : ""),
               fmt::format("{:.2f}{}", contender.p99.median() / alone.median(),
                           ours ? fmt::format(", target at most {:.2f}", target) : ""));
    }
}

void fresh() {
    constexpr int kRounds = 3;
    const std::string wrk = test::find_program("wrk");
    if (wrk.empty()) return report("fresh answers over HTTP", "not run: wrk is not installed", "");
    Setup setup({"--ttl-idle", "10m"});
    GatewayServer gateway(setup.runtime_dir);
    const auto varnish = varnish_before(setup.sim.url());
    const auto nginx = nginx_before(setup.sim.url());
    std::vector<std::pair<std::string, std::uint16_t>> contenders{{"gcoalesce serve", gateway.port()}};
    if (varnish) contenders.emplace_back("Varnish", varnish->port());
    if (nginx) contenders.emplace_back("nginx", nginx->port());

    const std::string body = test::prompt_body(fmt::format("[sim events={} size=300] fresh", kEvents));
    const std::string script = setup.runtime_dir + "/post.lua";
    std::ofstream(script) << "wrk.method = 'POST'\nwrk.body = [[" << body
                          << "]]\nwrk.headers['Content-Type'] = 'application/json'\n";
    std::vector<Samples> seen(contenders.size());
    for (int round = 0; round < kRounds; ++round) {
        for (std::size_t i = 0; i < contenders.size(); ++i) {
            const std::string url = fmt::format("http://127.0.0.1:{}{}", contenders[i].second, kStreamPath);
            if (test::http(url, body).status != 200) throw std::runtime_error(contenders[i].first + " has no answer");
            test::Process load({wrk, "-t", "1", "-c", "64", "-d", "4s", "-s", script, url});
            if (load.wait() != 0) throw std::runtime_error("wrk failed: " + load.err());
            std::smatch found;
            const std::string& out = load.out();
            if (out.find("Non-2xx") != std::string::npos || out.find("Socket errors") != std::string::npos)
                throw std::runtime_error(contenders[i].first + ": " + out);
            if (!std::regex_search(out, found, std::regex(R"(Requests/sec:\s+([0-9.]+))")))
                throw std::runtime_error("unexpected words of wrk: " + out);
            seen[i].add(std::stod(found[1]));
        }
    }
    for (std::size_t i = 0; i < contenders.size(); ++i)
        report(fmt::format("fresh answers over HTTP, 64 connections: {}", contenders[i].first),
               fmt::format("{:.0f} requests a second", seen[i].median()),
               fmt::format("{:.2f}", seen[i].median() / seen[0].median()));
}

} // namespace gcoalesce::bench
