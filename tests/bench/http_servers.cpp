#include "tests/bench/http_servers.hpp"

#include <arpa/inet.h>
#include <csignal>
#include <fmt/format.h>
#include <fstream>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdexcept>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/fd.hpp"
#include "tests/bench/bench.hpp"
#include "tests/support/http.hpp"
#include "tests/support/server_program.hpp"
#include "tests/support/sim.hpp"

namespace gcoalesce::bench {
namespace {

std::uint16_t port_of(const std::string& url) {
    return static_cast<std::uint16_t>(std::stoi(url.substr(url.rfind(':') + 1)));
}

// A program of the distribution with a configuration of ours, in a folder of its own.
class Configured final : public HttpServer {
  public:
    // Both texts get the folder {0}, our port {1} and the upstream's {2}.
    Configured(const std::string& name, const char* file_name, const char* configuration, const std::string& upstream,
               std::vector<std::string> arguments)
        : port_(test::free_port()) {
        char folder[] = "/tmp/gcoalesce-bench-XXXXXX";
        if (::mkdtemp(folder) == nullptr) throw std::runtime_error("no temporary directory");
        folder_ = folder;
        const auto fill = [&](const std::string& text) {
            return fmt::format(fmt::runtime(text), folder_.string(), port_, port_of(upstream));
        };
        std::ofstream(folder_ / file_name) << fill(configuration);
        arguments.insert(arguments.begin(), test::find_program(name));
        for (std::string& argument : arguments) argument = fill(argument);
        process_ = std::make_unique<test::Process>(arguments);
        try {
            test::wait_for_listener(port_, name);
        } catch (const std::exception& error) {
            process_->signal(SIGTERM);
            process_->wait();
            throw std::runtime_error(error.what() + (": " + process_->err()));
        }
    }
    ~Configured() override {
        process_->signal(SIGTERM); // it has children of its own
        try {
            process_->wait();
        } catch (const std::exception&) { // it is killed, then
        }
        process_.reset();
        std::error_code ignored;
        std::filesystem::remove_all(folder_, ignored);
    }
    std::uint16_t port() const override { return port_; }

  private:
    std::uint16_t port_;
    std::filesystem::path folder_;
    std::unique_ptr<test::Process> process_;
};

constexpr const char* kNginx = R"(
daemon off;
user root;
worker_processes auto;
worker_rlimit_nofile 20000;
pid {0}/nginx.pid;
error_log {0}/error.log;
events {{ worker_connections 15000; }}
http {{
  access_log off;
  keepalive_requests 1000000;
  client_body_buffer_size 16k;
  client_body_temp_path {0}/body;
  proxy_temp_path {0}/proxy;
  fastcgi_temp_path {0}/fastcgi;
  uwsgi_temp_path {0}/uwsgi;
  scgi_temp_path {0}/scgi;
  proxy_cache_path {0}/cache keys_zone=answers:10m use_temp_path=off;
  server {{
    listen 127.0.0.1:{1} backlog=4096;
    location / {{
      proxy_pass http://127.0.0.1:{2};
      proxy_http_version 1.1;
      proxy_cache answers;
      proxy_cache_methods POST;
      proxy_cache_key "$request_uri|$request_body";
      proxy_cache_valid 200 10m;
      proxy_ignore_headers Cache-Control Expires Vary Set-Cookie;
      proxy_cache_lock on;
      proxy_cache_lock_timeout 60s;
      proxy_cache_lock_age 60s;
    }}
  }}
}}
)";

constexpr const char* kVarnish = R"(
vcl 4.1;
import std;
import bodyaccess;
backend default {{ .host = "127.0.0.1"; .port = "{2}"; .first_byte_timeout = 60s; }}
sub vcl_recv {{
  std.cache_req_body(64KB);
  return (hash);
}}
sub vcl_hash {{
  hash_data(req.url);
  bodyaccess.hash_req_body();
  return (lookup);
}}
sub vcl_backend_fetch {{
  set bereq.method = "POST";
}}
sub vcl_backend_response {{
  set beresp.do_stream = true;
  set beresp.ttl = 10m;
  return (deliver);
}}
)";

// ---- the floor -----------------------------------------------------------------------------------------------------

struct Reader {
    std::size_t received = 0; // of the request
    std::size_t piece = 0;    // the next one
};

[[noreturn]] void serve_bare(int listener, const std::vector<std::string>& pieces, std::size_t request_size,
                             int latency_ms, int gap_ms) {
    const UniqueFd poll(::epoll_create1(EPOLL_CLOEXEC));
    epoll_event wanted{EPOLLIN, {}};
    wanted.data.fd = listener;
    ::epoll_ctl(poll.get(), EPOLL_CTL_ADD, listener, &wanted);
    std::vector<Reader> readers(1 << 15); // by descriptor
    std::vector<int> asking;
    double start = 0;
    std::size_t published = 0;
    const auto send_to = [&](int fd) {
        Reader& reader = readers[static_cast<std::size_t>(fd)];
        for (; reader.piece < published; ++reader.piece) {
            const std::string& piece = pieces[reader.piece];
            if (::send(fd, piece.data(), piece.size(), MSG_NOSIGNAL) < 0) break;
        }
    };
    std::vector<epoll_event> events(1024);
    char bytes[65536];
    for (;;) {
        int timeout = -1;
        if (start != 0 && published < pieces.size()) {
            const double due = start + 1000.0 * (latency_ms + gap_ms * static_cast<double>(published));
            const double left_ms = (due - now_us()) / 1000;
            if (left_ms <= 0) {
                ++published;
                for (const int fd : asking) send_to(fd);
            }
            timeout = left_ms > 0 ? static_cast<int>(left_ms) + 1 : 0; // whoever comes meanwhile is not passed over
        }
        const int count = ::epoll_wait(poll.get(), events.data(), static_cast<int>(events.size()), timeout);
        for (int i = 0; i < count; ++i) {
            const int fd = events[static_cast<std::size_t>(i)].data.fd;
            if (fd == listener) {
                for (;;) {
                    const int client = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
                    if (client < 0) break;
                    const int on = 1;
                    ::setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
                    readers[static_cast<std::size_t>(client)] = {};
                    wanted.data.fd = client;
                    ::epoll_ctl(poll.get(), EPOLL_CTL_ADD, client, &wanted);
                }
                continue;
            }
            Reader& reader = readers[static_cast<std::size_t>(fd)];
            const ssize_t got = ::recv(fd, bytes, sizeof bytes, 0);
            if (got <= 0) {
                ::close(fd);
                std::erase(asking, fd);
                if (asking.empty()) start = 0, published = 0; // the next herd
                continue;
            }
            reader.received += static_cast<std::size_t>(got);
            if (reader.received < request_size) continue;
            if (start == 0) start = now_us();
            asking.push_back(fd);
            send_to(fd);
        }
    }
}

} // namespace

std::string request_bytes(const std::string& body) {
    return fmt::format("POST {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                       "Content-Length: {}\r\n\r\n{}",
                       kStreamPath, body.size(), body);
}

GatewayServer::GatewayServer(const std::string& runtime_dir)
    : process_({test::gcoalesce_program(), "serve", "--runtime-dir", runtime_dir, "--listen", "127.0.0.1:0",
                "--log-level", "error"}) {
    const std::string line = process_.read_line();
    port_ = port_of(line);
    while (test::http(line.substr(line.find("http")) + "/readyz").status != 200) {
    }
}

std::unique_ptr<HttpServer> nginx_before(const std::string& upstream) {
    if (test::find_program("nginx").empty()) return nullptr;
    return std::make_unique<Configured>(
        "nginx", "nginx.conf", kNginx, upstream,
        std::vector<std::string>{"-p", "{0}", "-c", "{0}/nginx.conf", "-e", "{0}/error.log"});
}

// A thread for each client: there are as many as the largest herd, so that none waits for one.
std::unique_ptr<HttpServer> varnish_before(const std::string& upstream) {
    if (test::find_program("varnishd").empty()) return nullptr;
    return std::make_unique<Configured>("varnishd", "answers.vcl", kVarnish, upstream,
                                        std::vector<std::string>{"-F", "-j", "none", "-n", "{0}", "-a", "127.0.0.1:{1}",
                                                                 "-f", "{0}/answers.vcl", "-s", "malloc,256m", "-p",
                                                                 "thread_pools=2", "-p", "thread_pool_max=5200", "-p",
                                                                 "thread_pool_min=5100", "-p", "listen_depth=4096"});
}

BareServer::BareServer(std::vector<std::string> pieces, std::size_t request_size, int latency_ms, int gap_ms) {
    UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    if (::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
        ::listen(listener.get(), SOMAXCONN) != 0 ||
        ::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0)
        throw std::runtime_error("no port");
    port_ = ntohs(address.sin_port);
    pid_ = ::fork();
    if (pid_ < 0) throw std::runtime_error("no process");
    if (pid_ == 0) {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        serve_bare(listener.get(), pieces, request_size, latency_ms, gap_ms);
    }
}

BareServer::~BareServer() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
}

} // namespace gcoalesce::bench
