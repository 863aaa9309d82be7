#include <utility> // Asio 1.18 uses std::exchange without saying so

#include "cli/gateway/server.hpp"

#include <algorithm>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/thread_pool.hpp>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstring>
#include <netinet/tcp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <thread>
#include <unordered_set>
#include <vector>

#include "base/fd.hpp"
#include "base/log.hpp"
#include "cli/gateway/connection.hpp"
#include "cli/view/prometheus.hpp"

namespace gcoalesce::gateway {
namespace {

namespace net = boost::asio;
using boost::system::error_code;
using net::generic::stream_protocol;

constexpr auto kTick = std::chrono::milliseconds(100);
constexpr auto kAcceptPause = std::chrono::milliseconds(100); // when descriptors have run out
constexpr int kAcceptAtOnce = 256;
constexpr std::size_t kPumpAtOnce = 256;
constexpr auto kAttachFor = std::chrono::milliseconds(250);
constexpr std::int64_t kNotifyMs = 5000;
constexpr rlim_t kOtherDescriptors = 64; // than connections'

// ---- listening -----------------------------------------------------------------------------------------------------

struct Listener {
    UniqueFd fd;
    std::string url;
    std::string path; // of a Unix socket, to be unlinked; else ""
};

Result<UniqueFd> listen_on(const sockaddr* address, socklen_t length, const std::string& what) {
    UniqueFd fd(::socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd) return fail_errno(GCOALESCE_IO, "cannot make a socket");
    const int on = 1;
    if (address->sa_family != AF_UNIX) ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (::bind(fd.get(), address, length) != 0) return fail_errno(GCOALESCE_IO, "cannot bind " + what);
    if (address->sa_family == AF_UNIX) ::chmod(reinterpret_cast<const sockaddr_un*>(address)->sun_path, 0660);
    if (::listen(fd.get(), SOMAXCONN) != 0) return fail_errno(GCOALESCE_IO, "cannot listen on " + what);
    return fd;
}

Result<Listener> listen_at_path(const std::string& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (path.empty() || path.size() >= sizeof address.sun_path)
        return fail(GCOALESCE_BAD_REQUEST, "expected --listen unix:PATH with a path of 1 to {} bytes",
                    sizeof address.sun_path - 1);
    std::memcpy(address.sun_path, path.data(), path.size());
    const auto* generic = reinterpret_cast<const sockaddr*>(&address);
    struct stat found {};
    if (::lstat(path.c_str(), &found) == 0) {
        if (!S_ISSOCK(found.st_mode)) return fail(GCOALESCE_BAD_REQUEST, "{} is there, and is no socket", path);
        const UniqueFd probe(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
        if (::connect(probe.get(), generic, sizeof address) == 0 || errno == EAGAIN)
            return fail(GCOALESCE_IO, "somebody listens on {} already", path);
        ::unlink(path.c_str()); // a dead gateway's
    }
    Result<UniqueFd> fd = listen_on(generic, sizeof address, path);
    if (!fd) return tl::unexpected(fd.error());
    return Listener{std::move(*fd), "unix:" + path, path};
}

Result<Listener> listen_as_told(const Options& options) {
    constexpr std::string_view unix_prefix = "unix:";
    if (options.listen.starts_with(unix_prefix)) return listen_at_path(options.listen.substr(unix_prefix.size()));
    const std::size_t colon = options.listen.rfind(':');
    std::string host = options.listen.substr(0, colon);
    const std::string port_text = colon == std::string::npos ? "" : options.listen.substr(colon + 1);
    std::uint16_t port = 0;
    const auto [end, wrong] = std::from_chars(port_text.data(), port_text.data() + port_text.size(), port);
    if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
    if (host == "localhost") host = "127.0.0.1";
    error_code no_address;
    const auto address = net::ip::make_address(host, no_address);
    if (no_address || wrong != std::errc() || port_text.empty() || end != port_text.data() + port_text.size())
        return fail(GCOALESCE_BAD_REQUEST, "expected --listen ADDRESS:PORT or unix:PATH, found \"{}\"", options.listen);
    if (!address.is_loopback() && options.token_file.empty())
        return fail(GCOALESCE_BAD_REQUEST,
                    "{} can be reached from other machines, which needs --token-file: whoever reaches the gateway "
                    "without tokens spends your API key's quota",
                    options.listen);
    const net::ip::tcp::endpoint endpoint(address, port);
    Result<UniqueFd> fd = listen_on(endpoint.data(), static_cast<socklen_t>(endpoint.size()), options.listen);
    if (!fd) return tl::unexpected(fd.error());
    net::ip::tcp::endpoint bound;
    socklen_t size = static_cast<socklen_t>(bound.capacity());
    ::getsockname(fd->get(), bound.data(), &size);
    const std::string shown = address.is_v6() ? "[" + address.to_string() + "]" : address.to_string();
    return Listener{std::move(*fd), fmt::format("http://{}:{}", shown, bound.port()), {}};
}

// As many as the system lets us have, but for a few others.
std::size_t descriptors_for_connections() {
    rlimit limit{};
    if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return 1024 - kOtherDescriptors;
    limit.rlim_cur = limit.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &limit);
    ::getrlimit(RLIMIT_NOFILE, &limit);
    return limit.rlim_cur > 2 * kOtherDescriptors ? static_cast<std::size_t>(limit.rlim_cur - kOtherDescriptors) : 1;
}

// ---- the process ---------------------------------------------------------------------------------------------------

class Server final : public World {
  public:
    Server(const Options& given, Listener listener)
        : World(given),
          acceptor_(io_, stream_protocol(listener_family(listener), 0), listener.fd.release()),
          most_(std::min(given.max_connections, descriptors_for_connections())),
          pause_(io_),
          ticker_(io_),
          signals_(io_, SIGINT, SIGTERM),
          path_(listener.path) {
        acceptor_.non_blocking(true);
    }

    ~Server() override {
        stopping_ = true;
        if (attacher_.joinable()) attacher_.join();
        worker_.join();
        if (broker_events_) broker_events_->release(); // the attachment's own
        for (const auto& connection : std::exchange(connections_, {})) connection->close();
        readers_.clear();
        if (!path_.empty()) ::unlink(path_.c_str());
    }

    void run() {
        attacher_ = std::thread([this] { attach(); });
        accept();
        tick();
        await_signal();
        io_.run();
    }

    // ---- World ----

    Result<client::Subscription> open(const client::Request& request) override {
        if (!attached_) return tl::unexpected(trouble_);
        client::Subscription subscription;
        const Code code = broker_.open(request, subscription);
        if (code != GCOALESCE_OK) return tl::unexpected(Error{code, client::message(), 0});
        return subscription;
    }

    void add_reader(const std::shared_ptr<Connection>& connection) override {
        if (!std::exchange(connection->listed, true)) readers_.push_back(connection);
    }

    void remove(const std::shared_ptr<Connection>& connection) override {
        connections_.erase(connection);
        if (full_ && connections_.size() < most_ && !draining) accept();
    }

    Result<void> health(bool takes_requests) override {
        if (!seen_) {
            seen_ = look_at_broker();
            if (*seen_)
                unwell_since = 0;
            else if (unwell_since == 0)
                unwell_since = system_clock().monotonic();
        }
        if (!*seen_) return tl::unexpected(seen_->error());
        if (!takes_requests) return {};
        if (**seen_ == BrokerState::starting) return fail(GCOALESCE_STARTING, "the broker is starting");
        if (**seen_ != BrokerState::serving || draining) return fail(GCOALESCE_DRAINING, "shutting down");
        if (!attached_) return tl::unexpected(trouble_);
        return {};
    }

    Result<std::string> metrics() override {
        const Result<OpenSegment> segment = open_segment(options.instance);
        if (!segment) return tl::unexpected(segment.error());
        return cli::prometheus(segment->view, segment->liveness(system_clock().monotonic()) == Liveness::alive);
    }

    void notify(const Notify& wanted, std::function<void(const Result<std::int64_t>&)> done) override {
        if (!attached_) return done(tl::unexpected(trouble_));
        net::post(worker_, [this, wanted, done = std::move(done)]() mutable {
            client::milliseconds remaining{0};
            const Code code = broker_.notify(wanted.action, wanted.templates, client::milliseconds(wanted.for_ms),
                                             client::milliseconds(kNotifyMs), remaining);
            Result<std::int64_t> result = remaining.count();
            if (code != GCOALESCE_OK) result = tl::unexpected(Error{code, client::message(), 0});
            net::post(io_, [done = std::move(done), result = std::move(result)] { done(result); });
        });
    }

  private:
    static int listener_family(const Listener& listener) {
        sockaddr_storage address{};
        socklen_t size = sizeof address;
        ::getsockname(listener.fd.get(), reinterpret_cast<sockaddr*>(&address), &size);
        return address.ss_family;
    }

    // ---- connections ----

    // A herd comes faster than its requests are served, and what finds the listener's queue full tries again a second
    // later: each turn of the loop empties the queue first.
    void accept() {
        full_ = connections_.size() >= most_;
        if (full_) return;
        acceptor_.async_wait(net::socket_base::wait_read, [this](error_code error) {
            if (error == net::error::operation_aborted || draining) return;
            for (int taken = 0; taken < kAcceptAtOnce && connections_.size() < most_; ++taken) {
                stream_protocol::socket socket(io_);
                acceptor_.accept(socket, error);
                if (error == net::error::would_block) break;
                if (error == net::error::connection_aborted || error == net::error::interrupted) continue;
                if (error) { // out of descriptors or memory: the listener stays readable, so trying at once would spin
                    pause_.expires_after(kAcceptPause);
                    pause_.async_wait([this](error_code cancelled) {
                        if (!cancelled) accept();
                    });
                    return;
                }
                take(std::move(socket));
            }
            accept();
        });
    }

    void take(stream_protocol::socket socket) {
        error_code ignored;
        const auto remote = socket.remote_endpoint(ignored);
        std::string peer = "unix";
        if (const int family = remote.protocol().family(); family == AF_INET || family == AF_INET6) {
            net::ip::tcp::endpoint endpoint;
            endpoint.resize(remote.size());
            std::memcpy(endpoint.data(), remote.data(), remote.size());
            peer = endpoint.address().to_string();
            const int on = 1;
            ::setsockopt(socket.native_handle(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        }
        const auto connection = std::make_shared<Connection>(*this, std::move(socket), std::move(peer));
        connections_.insert(connection);
        connection->start();
    }

    void tick() {
        ticker_.expires_after(kTick);
        ticker_.async_wait([this](error_code cancelled) {
            if (cancelled) return;
            const Nanos now = system_clock().monotonic();
            if (!std::exchange(seen_, std::nullopt)) unwell_since = 0;
            // A limit that has passed takes one out of the set.
            const std::vector<std::shared_ptr<Connection>> all(connections_.begin(), connections_.end());
            for (const auto& connection : all) connection->tick(now);
            pump(); // lets go of those whose answer has ended meanwhile
            if (draining && (connections_.empty() || now >= drained_by_)) return io_.stop();
            tick();
        });
    }

    void await_signal() {
        signals_.async_wait([this](error_code cancelled, int) {
            if (cancelled) return;
            if (draining) return io_.stop();
            draining = true;
            drained_by_ = system_clock().monotonic() + options.drain;
            error_code ignored;
            acceptor_.close(ignored);
            await_signal();
        });
    }

    // ---- the broker ----

    // Maps and checks the segment anew, for the broker may be another one by now.
    Result<BrokerState> look_at_broker() const {
        const Result<OpenSegment> segment = open_segment(options.instance);
        if (!segment) return tl::unexpected(segment.error());
        const Nanos now = system_clock().monotonic();
        const Header& header = segment->view.header();
        switch (segment->liveness(now)) {
        case Liveness::alive: break;
        case Liveness::closed: return fail(GCOALESCE_CLOSED, "the broker has shut down");
        case Liveness::dead: return fail(GCOALESCE_BROKER_DEAD, "the broker died");
        case Liveness::unknown:
        case Liveness::unresponsive:
            return fail(GCOALESCE_UNRESPONSIVE, "the broker's loop has not turned for {} ms",
                        to_ms(now - header.heartbeat_ns.load(std::memory_order_acquire)));
        }
        return static_cast<BrokerState>(header.state.load(std::memory_order_acquire));
    }

    // On a thread of its own: a broker that accepts and does not answer takes a second.
    void attach() {
        client::AttachOptions how;
        how.instance = options.instance.name;
        how.runtime_dir = options.instance.runtime_dir;
        how.client_name = "gcoalesce serve";
        while (!stopping_) {
            client::Attachment attachment;
            const Code code = attachment.attach(how, kAttachFor);
            if (code == GCOALESCE_OK) {
                net::post(io_, [this, made = std::make_shared<client::Attachment>(std::move(attachment))] {
                    broker_ = std::move(*made);
                    attached_ = true;
                    broker_events_.emplace(io_, broker_.fd());
                    await_broker();
                });
                return;
            }
            net::post(io_, [this, why = Error{code, client::message(), 1000}] { trouble_ = why; });
            std::this_thread::sleep_for(std::chrono::milliseconds(50)); // a refusal comes at once
        }
    }

    void await_broker() {
        broker_events_->async_wait(net::posix::descriptor_base::wait_read, [this](error_code error) {
            if (error) return;
            if (broker_.dispatch() != GCOALESCE_OK) log(LogLevel::error, "dispatch: {}", client::message());
            pump();
            await_broker();
        });
    }

    // Has all readers look for something new, in the order in which they came. Who answers a further request at once
    // stands in the list already.
    void pump() {
        if (pumping_) { // those that were looked at before the present dispatch are to look again
            const bool in_the_midst = pieces != pieces_before_;
            if (!in_the_midst || std::exchange(restarted_, true)) {
                pump_again_ = true;
                return;
            }
            // An event came after some had looked, and they have waited for it the longest. Once only: the last ones
            // shall come to their turn whatever else comes.
            readers_.erase(readers_.begin() + static_cast<std::ptrdiff_t>(kept_),
                           readers_.begin() + static_cast<std::ptrdiff_t>(pumped_));
            pumped_ = kept_ = 0;
            return;
        }
        pumping_ = true;
        restarted_ = pump_again_ = false;
        pumped_ = kept_ = 0;
        pieces_before_ = pieces;
        pump_some();
    }

    // In portions: what comes meanwhile, from newcomers above all, is not to wait until 10,000 have been served.
    void pump_some() {
        for (std::size_t count = 0; count < kPumpAtOnce && pumped_ < readers_.size(); ++count, ++pumped_) {
            std::shared_ptr<Connection> reader = std::move(readers_[pumped_]);
            if (reader->pump())
                readers_[kept_++] = std::move(reader);
            else
                reader->listed = false;
        }
        if (pumped_ < readers_.size()) return net::post(io_, [this] { pump_some(); });
        readers_.resize(kept_);
        pumping_ = false;
        if (pump_again_) pump();
    }

    net::io_context io_{1};
    net::basic_socket_acceptor<stream_protocol> acceptor_;
    const std::size_t most_;
    bool full_ = false; // accepts nobody
    net::steady_timer pause_, ticker_;
    net::signal_set signals_;
    const std::string path_;
    std::unordered_set<std::shared_ptr<Connection>> connections_;
    std::vector<std::shared_ptr<Connection>> readers_; // while they are pumped: [0, kept_) have been, and stay
    std::size_t pumped_ = 0, kept_ = 0;
    bool pumping_ = false, restarted_ = false, pump_again_ = false;
    std::uint64_t pieces_before_ = 0; // they were pumped
    Nanos drained_by_ = 0;

    client::Attachment broker_;
    std::optional<Result<BrokerState>> seen_; // since the last tick: many may wait, and one look is enough for all
    bool attached_ = false;
    Error trouble_{GCOALESCE_STARTING, "the gateway is still looking for its broker", 1000};
    std::optional<net::posix::stream_descriptor> broker_events_;
    std::atomic<bool> stopping_{false};
    std::thread attacher_;
    net::thread_pool worker_{1};
};

} // namespace

Result<void> serve(const Options& options, const std::function<void(const std::string& url)>& on_listening) {
    std::optional<Tokens> tokens;
    if (!options.token_file.empty()) {
        Result<Tokens> read = Tokens::read(options.token_file);
        if (!read) return tl::unexpected(read.error());
        tokens = std::move(*read);
    }
    if (options.pass_key) ::prctl(PR_SET_DUMPABLE, 0); // callers' keys must not end up in a core dump
    Result<Listener> listener = listen_as_told(options);
    if (!listener) return tl::unexpected(listener.error());
    const std::string url = listener->url;
    Server server(options, std::move(*listener));
    server.tokens = std::move(tokens);
    on_listening(url);
    server.run();
    return {};
}

} // namespace gcoalesce::gateway
