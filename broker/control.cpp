#include "broker/control.hpp"

#include <algorithm>
#include <array>
#include <boost/asio/io_context.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/thread_pool.hpp>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/log.hpp"
#include "broker/request.hpp"
#include "protocol/control.hpp"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 // Linux 6.5; Debian 12's headers are older than many kernels it runs on
#endif

namespace gcoalesce {
namespace asio = boost::asio;
using boost::system::error_code;
namespace {

constexpr auto kAcceptPause = std::chrono::milliseconds(100); // when descriptors have run out
constexpr std::size_t kReadAtOnce = 64 * 1024;

std::chrono::nanoseconds as_chrono(Nanos time) {
    return std::chrono::nanoseconds(time);
}

std::vector<gid_t> groups_of(int socket) {
    std::vector<gid_t> groups(64);
    for (;;) {
        auto bytes = static_cast<socklen_t>(groups.size() * sizeof(gid_t));
        if (::getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, groups.data(), &bytes) == 0) {
            groups.resize(bytes / sizeof(gid_t));
            return groups;
        }
        if (errno != ERANGE) return {};
        groups.resize(bytes / sizeof(gid_t));
    }
}

// "a,b" as its parts; "" has none.
std::vector<std::string> parts_of(const std::string& list) {
    std::vector<std::string> parts;
    for (std::size_t at = 0; at < list.size();) {
        const std::size_t comma = std::min(list.find(',', at), list.size());
        parts.push_back(list.substr(at, comma - at));
        at = comma + 1;
    }
    return parts;
}

} // namespace

struct Connection;

struct ControlServer::State {
    asio::io_context& loop;
    asio::local::stream_protocol::acceptor acceptor;
    asio::steady_timer accept_pause;
    UniqueFd segment_fd;
    Store& store;
    Coalescer& coalescer;
    ControlOptions options;
    ControlLimits limits;
    std::size_t body_bytes = 0; // within limits.body_bytes
    std::uint64_t next_attachment = 1;
    std::unordered_set<std::shared_ptr<Connection>> connections;
    asio::thread_pool worker{1};

    State(asio::io_context& io, UniqueFd listener, UniqueFd segment, Store& the_store, Coalescer& the_coalescer,
          ControlOptions the_options, const ControlLimits& the_limits)
        : loop(io),
          acceptor(io, asio::local::stream_protocol(), listener.release()),
          accept_pause(io),
          segment_fd(std::move(segment)),
          store(the_store),
          coalescer(the_coalescer),
          options(std::move(the_options)),
          limits(the_limits) {}
};

// One client. Kept alive by the server's list until it is over, and by its own pending handlers after that.
struct Connection : std::enable_shared_from_this<Connection> {
    using Server = ControlServer::State;

    std::weak_ptr<Server> server_;
    asio::local::stream_protocol::socket socket;
    asio::steady_timer deadline;                             // hello, later: how long a lane outlives its connection
    std::unique_ptr<asio::posix::stream_descriptor> process; // a pidfd: readable when the process has ended
    UniqueFd wake;                                           // the broker's end of the wake socket
    ucred peer{};
    std::vector<gid_t> groups;     // the peer's, when it connected
    std::uint32_t stamped_pid = 0; // by the kernel, with the last message
    enum class Stage { hello, ready, attached, over } stage = Stage::hello;
    bool connected = true;
    LaneId attachment = 0;
    Nanos attached_at = 0;
    Mapping lane;
    std::string name;
    FrameSplitter frames;
    std::string output;
    std::size_t written = 0;
    bool writing = false;
    bool closing = false; // after what is queued has been written

    struct Receiving { // an `open` whose body is arriving
        message::Open open;
        std::string body;
        std::uint64_t left = 0;
        std::shared_ptr<const TemplateSettings> settings; // the template's
        bool refused = false;                             // answered already: the body is only passed over
        Nanos arrived = 0;
    };
    std::optional<Receiving> receiving;
    struct Parsing { // with the worker
        std::uint64_t id;
        bool withdrawn = false;
    };
    std::vector<std::shared_ptr<Parsing>> parsing;
    std::unordered_map<std::uint64_t, Coalescer::Ticket> waiting; // with the coalescer, by the client's id

    Connection(const std::shared_ptr<Server>& server, asio::local::stream_protocol::socket accepted)
        : server_(server), socket(std::move(accepted)), deadline(server->loop) {}

    void start(Server& server) {
        int on = 1;
        ::setsockopt(socket.native_handle(), SOL_SOCKET, SO_PASSCRED, &on, sizeof on);
        socklen_t length = sizeof peer;
        ::getsockopt(socket.native_handle(), SOL_SOCKET, SO_PEERCRED, &peer, &length);
        groups = groups_of(socket.native_handle());
        socket.native_non_blocking(true);
        deadline.expires_after(as_chrono(server.limits.hello));
        deadline.async_wait([self = shared_from_this()](error_code error) {
            if (error || self->stage == Stage::attached || self->stage == Stage::over) return;
            self->say_goodbye(GCOALESCE_TIMED_OUT, "no hello and ready within the time allowed");
        });
        wait_readable();
    }

    // ---- input ----

    void wait_readable() {
        if (!connected || closing) return;
        socket.async_wait(socket.wait_read, [self = shared_from_this()](error_code error) {
            if (!error) self->read();
        });
    }

    // recvmsg rather than asio's read: the kernel's stamp of the sender comes beside the bytes.
    void read() {
        if (!connected || closing) return;
        std::array<char, kReadAtOnce> bytes;
        alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(ucred)) + CMSG_SPACE(16 * sizeof(int))> control;
        iovec vector{bytes.data(), bytes.size()};
        msghdr header{};
        header.msg_iov = &vector;
        header.msg_iovlen = 1;
        header.msg_control = control.data();
        header.msg_controllen = control.size();
        const ssize_t got = ::recvmsg(socket.native_handle(), &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) return wait_readable();
        for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr; part = CMSG_NXTHDR(&header, part)) {
            if (part->cmsg_level != SOL_SOCKET) continue;
            if (part->cmsg_type == SCM_CREDENTIALS) {
                ucred stamp{};
                std::memcpy(&stamp, CMSG_DATA(part), sizeof stamp);
                stamped_pid = static_cast<std::uint32_t>(stamp.pid);
            } else if (part->cmsg_type == SCM_RIGHTS) { // nobody asked for descriptors
                const std::size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
                for (std::size_t i = 0; i < count; ++i) {
                    int fd = -1;
                    std::memcpy(&fd, CMSG_DATA(part) + i * sizeof fd, sizeof fd);
                    ::close(fd);
                }
            }
        }
        if (got <= 0) return lost_connection();
        frames.feed({bytes.data(), static_cast<std::size_t>(got)});
        take_frames();
        wait_readable();
    }

    void take_frames() {
        const auto server = server_.lock();
        while (server && connected && !closing) {
            std::string_view frame;
            const Result<bool> more = frames.next(frame);
            if (!more) return refuse_connection(*server, more.error());
            if (!*more) return;
            if (receiving) {
                take_body(*server, frame);
                continue;
            }
            Result<Message> message = decode(frame);
            if (!message) return refuse_connection(*server, message.error());
            if (const Result<void> taken = take(*server, *message); !taken)
                return refuse_connection(*server, taken.error());
        }
    }

    Result<void> take(Server& server, Message& message) {
        if (auto* hello = std::get_if<message::Hello>(&message); hello != nullptr && stage == Stage::hello)
            return take_hello(server, *hello);
        if (std::holds_alternative<message::Ready>(message) && stage == Stage::ready) {
            stage = Stage::attached;
            attached_at = server.store.clock().monotonic();
            deadline.cancel();
            watch_process(server);
            return {};
        }
        if (stage == Stage::attached) {
            if (auto* open = std::get_if<message::Open>(&message)) return take_open(server, *open);
            if (auto* withdraw = std::get_if<message::Withdraw>(&message)) {
                take_withdraw(server, withdraw->id);
                return {};
            }
            if (auto* notify = std::get_if<message::Notify>(&message)) return take_notify(server, *notify);
            if (auto* cancel = std::get_if<message::Cancel>(&message)) return take_cancel(server, *cancel);
            if (auto* purge = std::get_if<message::Purge>(&message)) return take_purge(server, *purge);
            if (auto* reload = std::get_if<message::Reload>(&message)) return take_reload(server, *reload);
            if (auto* clients = std::get_if<message::Clients>(&message)) {
                take_clients(server, *clients);
                return {};
            }
        }
        return fail(GCOALESCE_BAD_REQUEST, "a message that has no place here: expected {}",
                    stage == Stage::hello   ? "hello"
                    : stage == Stage::ready ? "ready"
                                            : "a request or a command");
    }

    // ---- attaching ----

    Result<void> take_hello(Server& server, message::Hello& hello) {
        if (hello.protocol != kProtocolVersion)
            return fail(GCOALESCE_WRONG_VERSION,
                        "the client speaks control protocol {}, this broker {}: install both from one version",
                        hello.protocol, kProtocolVersion);
        name = hello.name.substr(0, 63);
        std::array<int, 2> wakes{-1, -1};
        if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, wakes.data()) != 0)
            return fail_errno(GCOALESCE_BUSY, "no wake socket for one more client");
        wake = UniqueFd(wakes[0]);
        const UniqueFd their_wake(wakes[1]);
        const UniqueFd memory(
            static_cast<int>(::syscall(SYS_memfd_create, "gcoalesce-lane", MFD_CLOEXEC | MFD_ALLOW_SEALING)));
        const std::uint32_t slots = server.store.view().slot_count();
        const std::size_t bytes = lane_bytes(slots);
        if (!memory || ::ftruncate(memory.get(), static_cast<off_t>(bytes)) != 0 ||
            ::fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
            return fail_errno(GCOALESCE_BUSY, "no lane for one more client");
        Result<Mapping> mapping = Mapping::of(memory.get(), bytes, true);
        if (!mapping) return tl::unexpected(mapping.error());
        lane = *mapping;
        attachment = server.next_attachment++;
        auto& header = *reinterpret_cast<LaneHeader*>(lane.data());
        header.magic = kMagic;
        header.epoch = server.store.epoch();
        header.attachment = attachment;
        header.slots = slots;
        // Known to the store before the client can know its lane: from its first pin on, every pin counts.
        LanePort port;
        port.mapping = lane;
        port.client_name = name;
        port.pid = peer.pid;
        port.send_wake = [fd = wake.get()] {
            const char one = 1;
            return ::send(fd, &one, 1, MSG_DONTWAIT | MSG_NOSIGNAL) == 1;
        };
        server.store.add_lane(attachment, std::move(port));
        stage = Stage::ready;

        message::Welcome welcome;
        welcome.epoch = server.store.epoch();
        welcome.attachment = attachment;
        return send_welcome(encode(welcome), {server.segment_fd.get(), memory.get(), their_wake.get()});
    }

    // The descriptors go with the first byte; a fresh socket takes so small a frame whole.
    Result<void> send_welcome(const std::string& frame, const std::array<int, kWelcomeDescriptors>& descriptors) {
        alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof descriptors)> control{};
        iovec vector{const_cast<char*>(frame.data()), frame.size()};
        msghdr header{};
        header.msg_iov = &vector;
        header.msg_iovlen = 1;
        header.msg_control = control.data();
        header.msg_controllen = control.size();
        cmsghdr* part = CMSG_FIRSTHDR(&header);
        part->cmsg_level = SOL_SOCKET;
        part->cmsg_type = SCM_RIGHTS;
        part->cmsg_len = CMSG_LEN(sizeof descriptors);
        std::memcpy(CMSG_DATA(part), descriptors.data(), sizeof descriptors);
        if (::sendmsg(socket.native_handle(), &header, MSG_DONTWAIT | MSG_NOSIGNAL) !=
            static_cast<ssize_t>(frame.size()))
            return fail_errno(GCOALESCE_IO, "the client does not take its welcome");
        return {};
    }

    // Death is proved by a pidfd: it is not fooled by a forked child that keeps the socket open, nor by a reused pid.
    void watch_process(Server& server) {
        int fd = -1;
        socklen_t length = sizeof fd;
        if (::getsockopt(socket.native_handle(), SOL_SOCKET, SO_PEERPIDFD, &fd, &length) != 0) {
            // An older kernel: the pid of the connection, if the process that says "ready" now is still the one that
            // connected. Another pid namespace shows as pid 0: then the connection alone must do.
            if (peer.pid <= 0 || stamped_pid != static_cast<std::uint32_t>(peer.pid)) return;
            fd = static_cast<int>(::syscall(SYS_pidfd_open, peer.pid, 0));
        }
        if (fd < 0) return;
        ::fcntl(fd, F_SETFD, FD_CLOEXEC);
        process = std::make_unique<asio::posix::stream_descriptor>(server.loop, fd);
        process->async_wait(process->wait_read, [self = shared_from_this()](error_code error) {
            if (error) return;
            if (const auto alive = self->server_.lock()) {
                if (self->stage == Stage::attached) alive->store.count(Counter::clients_died);
                self->over(*alive);
            }
        });
    }

    // ---- asking ----

    Result<void> take_open(Server& server, message::Open& open) {
        if (waiting.contains(open.id)) return fail(GCOALESCE_BAD_REQUEST, "an id that is still under way");
        if (open.resume != 0) {
            if (open.body_bytes != 0) return fail(GCOALESCE_BAD_REQUEST, "a stream to resume, and a body");
            OpenRequest request;
            request.realm = realm_number(open.realm);
            request.resume = open.resume;
            request.resume_after = open.resume_after;
            Receiving asked{};
            asked.open = std::move(open);
            asked.arrived = server.store.clock().monotonic();
            decide(server, asked, std::move(request));
            return {};
        }
        const bool pass = open.method == Method::pass;
        if ((open.body_bytes == 0 && !pass) || open.body_bytes > kMaxBody)
            return fail(GCOALESCE_BAD_REQUEST, "expected a request body of 1 to {} bytes, found {}", kMaxBody,
                        open.body_bytes);
        if (open.method < Method::stream) // the message's own limit is the other one
            return fail(GCOALESCE_BAD_REQUEST, "expected a method from 1 to {}", static_cast<int>(Method::pass));
        receiving = Receiving{}; // not emplace(): clang 14 thinks there were no default constructor
        receiving->left = open.body_bytes;
        receiving->arrived = server.store.clock().monotonic();
        receiving->open = std::move(open);
        const auto pass_over = [&](const Error& error) {
            server.store.count_request(0, GCOALESCE_OPENING, false);
            refuse(server, receiving->open.id, error, template_of(server, receiving->open));
            receiving->refused = true;
        };
        receiving->settings = server.coalescer.settings(receiving->open.template_id);
        if (!receiving->settings) {
            pass_over(
                Error{GCOALESCE_NOT_FOUND, fmt::format("there is no template \"{}\"", receiving->open.template_id), 0});
        } else if (!may_use(*receiving->settings)) {
            pass_over(Error{GCOALESCE_NO_PERMISSION,
                            fmt::format("template \"{}\" is not for uid {}: see its \"allow\"",
                                        receiving->open.template_id, peer.uid),
                            0});
        } else if (server.body_bytes + receiving->left > server.limits.body_bytes) {
            pass_over(Error{GCOALESCE_BUSY, "the broker is receiving too many large requests: ask again", 1000});
        } else {
            server.body_bytes += receiving->left;
            receiving->body.reserve(receiving->left);
        }
        if (receiving->left == 0) take_body(server, {}); // there is none to wait for
        return {};
    }

    bool in_group(std::uint32_t group) const {
        return peer.gid == group || std::find(groups.begin(), groups.end(), group) != groups.end();
    }

    bool is_master() const { return peer.uid == 0 || peer.uid == ::geteuid(); }

    bool may_use(const TemplateSettings& settings) const {
        if (settings.for_everyone() || is_master()) return true;
        return std::find(settings.uids.begin(), settings.uids.end(), peer.uid) != settings.uids.end() ||
               std::any_of(settings.groups.begin(), settings.groups.end(),
                           [&](std::uint32_t group) { return in_group(group); });
    }

    // Whether this client may command; else it has been told.
    bool may_command(Server& server, std::uint64_t id, const char* what) {
        if (!server.options.admin_group || is_master() || in_group(*server.options.admin_group)) return true;
        gcoalesce::log(LogLevel::warning, {{"COMMAND", what}, {"UID", fmt::to_string(peer.uid)}},
                       "refusing {} by uid {} (pid {}): not in the admin group", what, peer.uid, peer.pid);
        refuse(server, id,
               Error{GCOALESCE_NO_PERMISSION,
                     fmt::format("{} needs membership in the broker's admin group (gid {})", what,
                                 *server.options.admin_group),
                     0});
        return false;
    }

    void take_body(Server& server, std::string_view bytes) {
        if (bytes.size() > receiving->left)
            return refuse_connection(server,
                                     fail(GCOALESCE_BAD_REQUEST, "a body longer than its open message says").value());
        receiving->left -= bytes.size();
        if (!receiving->refused) receiving->body.append(bytes);
        if (receiving->left > 0) return;
        Receiving whole = std::move(*receiving);
        receiving.reset();
        if (whole.refused) return;
        auto body = std::make_shared<const std::string>(std::move(whole.body));
        if (body->size() <= server.limits.parse_inline) {
            server.body_bytes -= body->size();
            return decide(server, whole, prepare(whole.open, body, whole.settings));
        }
        auto work = std::make_shared<Parsing>(Parsing{whole.open.id});
        parsing.push_back(work);
        whole.body.clear();
        asio::post(server.worker,
                   [self = shared_from_this(), work, body, whole = std::move(whole), &loop = server.loop]() mutable {
                       Result<OpenRequest> request = prepare(whole.open, body, whole.settings);
                       asio::post(loop, [self, work, bytes = body->size(), whole = std::move(whole),
                                         request = std::move(request)]() mutable {
                           const auto alive = self->server_.lock();
                           if (!alive) return;
                           alive->body_bytes -= bytes;
                           std::erase(self->parsing, work);
                           if (work->withdrawn || self->stage != Stage::attached || !self->connected) return;
                           self->decide(*alive, whole, std::move(request));
                       });
                   });
    }

    void decide(Server& server, const Receiving& asked, Result<OpenRequest> request) {
        const std::uint64_t id = asked.open.id;
        const Nanos arrived = asked.arrived;
        if (!request) {
            server.store.count_request(server.store.template_index(asked.open.template_id).value_or(0),
                                       GCOALESCE_OPENING, false);
            return refuse(server, id, request.error(), template_of(server, asked.open));
        }
        request->lane = attachment;
        const Coalescer::Ticket ticket = server.coalescer.open(
            std::move(*request), [self = shared_from_this(), id, arrived,
                                  wanted = template_of(server, asked.open)](const Result<OpenAnswer>& answer) {
                self->waiting.erase(id);
                const auto alive = self->server_.lock();
                if (!alive) return;
                if (!answer) return self->refuse(*alive, id, answer.error(), wanted);
                const std::uint32_t index = alive->store.opening(answer->stream).template_index;
                alive->store.count_join_time(index, alive->store.clock().monotonic() - arrived);
                message::Opened opened;
                opened.id = id;
                opened.slot = answer->stream.slot;
                opened.identity = answer->stream.identity;
                opened.stream_id = answer->stream_id;
                opened.key = answer->key;
                opened.status = answer->status;
                self->send(encode(opened));
            });
        if (ticket != 0) waiting.emplace(id, ticket);
    }

    // For the log.
    static std::uint32_t template_of(const Server& server, const message::Open& open) {
        if (open.resume != 0) return kNoTemplate; // whatever its stream's is
        return server.store.template_index(open.template_id).value_or(kNoTemplate);
    }

    void refuse(Server& server, std::uint64_t id, const Error& error, std::uint32_t template_index = kNoTemplate) {
        server.store.log(LogKind::refused, error.code, {}, static_cast<std::uint64_t>(error.retry_ms), {},
                         template_index);
        send(encode(message::Refused{id, error.code, error.message, error.retry_ms}));
    }

    // Exactly one answer an open: where it has been sent already, the client undoes the pin itself when it arrives.
    void take_withdraw(Server& server, std::uint64_t id) {
        if (const auto asked = waiting.find(id); asked != waiting.end()) {
            server.coalescer.withdraw(asked->second);
            waiting.erase(asked);
            server.store.count(Counter::requests_withdrawn);
            send(encode(message::Withdrawn{id}));
            return;
        }
        for (const auto& work : parsing) {
            if (work->id != id || work->withdrawn) continue;
            work->withdrawn = true;
            server.store.count(Counter::requests_withdrawn);
            send(encode(message::Withdrawn{id}));
            return;
        }
    }

    Result<void> take_notify(Server& server, const message::Notify& notify) {
        constexpr std::int64_t kDay = 24 * 3600 * 1000;
        if (notify.for_ms > kDay) {
            refuse(server, notify.id,
                   Error{GCOALESCE_BAD_REQUEST, "the window opens for at most one day (86400000 ms)", 0});
            return {};
        }
        Coalescer& coalescer = server.coalescer;
        const std::vector<std::string> ids = parts_of(notify.templates);
        const bool on = notify.action == GCOALESCE_NOTIFY_ON;
        if (notify.action != GCOALESCE_NOTIFY_STATUS && !may_command(server, notify.id, "notify")) return {};
        const Result<Nanos> remaining = on ? coalescer.notify_on(ids, from_ms(notify.for_ms))
                                        : notify.action == GCOALESCE_NOTIFY_OFF ? coalescer.notify_off(ids)
                                                                                : coalescer.window_remaining(ids);
        if (!remaining) {
            refuse(server, notify.id, remaining.error());
            return {};
        }
        if (notify.action != GCOALESCE_NOTIFY_STATUS)
            gcoalesce::log(LogLevel::info, {{"COMMAND", "notify"}, {"UID", fmt::to_string(peer.uid)}},
                           "notify {} for {} by uid {} (pid {}): the window is open for {} ms", on ? "on" : "off",
                           ids.empty() ? "all templates" : notify.templates, peer.uid, peer.pid, to_ms(*remaining));
        // Rounded up: 0 says "closed".
        send(encode(message::Window{notify.id, to_ms(*remaining + kMillisecond - 1)}));
        return {};
    }

    void answer_command(Server& server, std::uint64_t id, const std::string& what, const Result<std::size_t>& done) {
        if (!done) return refuse(server, id, done.error());
        gcoalesce::log(LogLevel::info, {{"COMMAND", what.substr(0, what.find(' '))}, {"UID", fmt::to_string(peer.uid)}},
                       "{} by uid {} (pid {}): {} streams", what, peer.uid, peer.pid, *done);
        send(encode(message::Done{id, *done}));
    }

    Result<void> take_cancel(Server& server, const message::Cancel& cancel) {
        if (may_command(server, cancel.id, "cancel"))
            answer_command(server, cancel.id, "cancel " + cancel.target, server.coalescer.cancel(cancel.target));
        return {};
    }

    Result<void> take_purge(Server& server, const message::Purge& purge) {
        if (may_command(server, purge.id, "purge"))
            answer_command(server, purge.id,
                           purge.scope == GCOALESCE_PURGE_ALL ? "purge of all" : "purge of " + purge.target,
                           server.coalescer.purge(purge.scope, purge.target));
        return {};
    }

    Result<void> take_reload(Server& server, const message::Reload& reload) {
        if (!may_command(server, reload.id, "reload")) return {};
        const Result<void> done = server.options.reload ? server.options.reload() : Result<void>{};
        if (!done) {
            refuse(server, reload.id, done.error());
            return {};
        }
        answer_command(server, reload.id, "reload", std::size_t{0});
        return {};
    }

    // A bounded number of clients for each question, so that however many there are, nobody waits for the answer.
    void take_clients(Server& server, const message::Clients& asked) {
        std::vector<const Connection*> others;
        for (const auto& connection : server.connections) {
            if (connection->attachment > asked.after && connection->attached_at != 0)
                others.push_back(connection.get());
        }
        const std::size_t told = std::min(others.size(), kClientsAtOnce);
        std::ranges::partial_sort(others, others.begin() + static_cast<std::ptrdiff_t>(told), std::less{},
                                  [](const Connection* other) { return other->attachment; });
        for (std::size_t i = 0; i < told; ++i) {
            message::Client client = others[i]->describe(server);
            client.id = asked.id;
            send(encode(client));
        }
        send(encode(message::Done{asked.id, others.size() - told}));
    }

    message::Client describe(Server& server) const {
        message::Client client;
        client.attachment = attachment;
        client.name = name;
        client.pid = static_cast<std::uint32_t>(peer.pid);
        client.uid = peer.uid;
        client.attached_ms = to_ms(server.store.clock().monotonic() - attached_at);
        client.connected = connected;
        client.waiting = waiting.size() + parsing.size() + (receiving ? 1 : 0);
        const Lane view(lane.data(), server.store.view().slot_count());
        client.revoked = view.revoked();
        for (std::uint32_t number = 0; number < view.slots() && !client.revoked; ++number) {
            const std::uint32_t pins = view.pins(number);
            const Slot& slot = server.store.slot(number);
            // What a client scribbles into its lane on a free slot is no pin.
            if (pins == 0 || slot.state.load(std::memory_order_relaxed) == static_cast<std::uint32_t>(SlotState::free))
                continue;
            client.readers += pins;
            ++client.pinned_streams;
            if (slot.evicted.load(std::memory_order_relaxed) == 0)
                client.pinned_bytes += slot.committed_bytes.load(std::memory_order_relaxed);
            const std::string one = fmt::format("{}{}:{}", client.pinned.empty() ? "" : ",",
                                                to_hex(server.store.stream_id(server.store.ref(number))), pins);
            if (client.pinned.size() + one.size() <= kMaxPins) client.pinned += one;
        }
        return client;
    }

    // ---- output ----

    void send(const std::string& frame) {
        if (!connected || closing) return;
        output += frame;
        const auto server = server_.lock();
        if (server && output.size() - written > server->limits.unread_answers) return lost_connection();
        if (!writing) write();
    }

    void write() {
        while (written < output.size()) {
            const ssize_t sent = ::send(socket.native_handle(), output.data() + written, output.size() - written,
                                        MSG_DONTWAIT | MSG_NOSIGNAL);
            if (sent > 0) {
                written += static_cast<std::size_t>(sent);
                continue;
            }
            if (sent < 0 && errno == EINTR) continue;
            if (sent < 0 && errno == EAGAIN) {
                writing = true;
                socket.async_wait(socket.wait_write, [self = shared_from_this()](error_code error) {
                    self->writing = false;
                    if (!error && self->connected) self->write();
                });
                return;
            }
            // Not here: the caller is in the midst of something. The end of the connection shows when reading.
            output.clear();
            written = 0;
            return;
        }
        output.clear();
        written = 0;
        if (closing) lost_connection();
    }

    // ---- endings ----

    void refuse_connection(Server& server, const Error& error) {
        server.store.count(Counter::connections_refused);
        gcoalesce::log(LogLevel::debug, "closing the connection of pid {} (uid {}): {}", peer.pid, peer.uid,
                       error.message);
        say_goodbye(error.code, error.message);
    }

    void say_goodbye(Code code, const std::string& message) {
        if (!connected || closing) return;
        send(encode(message::Goodbye{code, message}));
        closing = true;
        if (!writing) lost_connection();
    }

    // The connection has ended. The lane's pins go with it, unless its process lives on and holds some: then its
    // readers are treated like any that do not move.
    void lost_connection() {
        if (!connected) return;
        connected = false;
        error_code ignored;
        socket.close(ignored);
        const auto server = server_.lock();
        if (!server) return;
        if (receiving && !receiving->refused) server->body_bytes -= receiving->open.body_bytes;
        receiving.reset();
        for (const auto& [id, ticket] : waiting) server->coalescer.withdraw(ticket);
        waiting.clear();
        if (stage != Stage::attached || process == nullptr || !holds_pins(*server)) return over(*server);
        deadline.expires_after(as_chrono(server->options.stall_timeout));
        deadline.async_wait([self = shared_from_this()](error_code error) {
            if (error || self->stage == Stage::over) return;
            if (const auto alive = self->server_.lock()) self->over(*alive);
        });
    }

    bool holds_pins(Server& server) const {
        const Lane view(lane.data(), server.store.view().slot_count());
        if (view.revoked()) return false; // they no longer count
        for (std::uint32_t slot = 0; slot < view.slots(); ++slot) {
            if (view.pins(slot) != 0) return true;
        }
        return false;
    }

    void over(Server& server) {
        if (stage == Stage::over) return;
        const bool had_lane = stage != Stage::hello;
        stage = Stage::over;
        if (connected) {
            connected = false;
            error_code ignored;
            socket.close(ignored);
            if (receiving && !receiving->refused) server.body_bytes -= receiving->open.body_bytes;
            receiving.reset();
        }
        for (const auto& [id, ticket] : waiting) server.coalescer.withdraw(ticket);
        waiting.clear();
        deadline.cancel();
        if (process) {
            error_code ignored;
            process->close(ignored);
        }
        if (had_lane) server.store.remove_lane(attachment);
        server.connections.erase(shared_from_this());
    }
};

// ---- the server ----------------------------------------------------------------------------------------------------

namespace {

void accept_next(const std::shared_ptr<ControlServer::State>& server) {
    server->acceptor.async_accept(
        [weak = std::weak_ptr(server)](error_code error, asio::local::stream_protocol::socket socket) {
            const auto alive = weak.lock();
            if (!alive || error == asio::error::operation_aborted) return;
            if (error) {
                // Out of descriptors or memory: the listener stays readable, so trying at once would spin.
                alive->accept_pause.expires_after(kAcceptPause);
                alive->accept_pause.async_wait([weak](error_code cancelled) {
                    if (const auto again = weak.lock(); again && !cancelled) accept_next(again);
                });
                return;
            }
            alive->store.count(Counter::connections_accepted);
            ::fcntl(socket.native_handle(), F_SETFD, FD_CLOEXEC);
            auto connection = std::make_shared<Connection>(alive, std::move(socket));
            alive->connections.insert(connection);
            connection->start(*alive);
            if (alive->connections.size() + 2 * alive->store.lane_count() > alive->limits.descriptors) {
                alive->store.count(Counter::connections_refused);
                connection->say_goodbye(GCOALESCE_BUSY, "the broker has as many connections as it takes");
            }
            accept_next(alive);
        });
}

} // namespace

ControlServer::ControlServer(asio::io_context& loop, UniqueFd listener, UniqueFd segment_fd, Store& store,
                             Coalescer& coalescer, ControlOptions options, const ControlLimits& limits)
    : state_(std::make_shared<State>(loop, std::move(listener), std::move(segment_fd), store, coalescer,
                                     std::move(options), limits)) {
    accept_next(state_);
}

ControlServer::~ControlServer() {
    stop_listening();
    state_->worker.stop();
    state_->worker.join();
    while (!state_->connections.empty()) {
        const std::shared_ptr<Connection> connection = *state_->connections.begin();
        connection->over(*state_);
    }
}

void ControlServer::stop_listening() {
    error_code ignored;
    state_->acceptor.close(ignored);
    state_->accept_pause.cancel();
}

void ControlServer::goodbye_all(Code code, const std::string& message) {
    const auto connections = state_->connections; // saying goodbye takes them out of it
    for (const auto& connection : connections) connection->say_goodbye(code, message);
}

Result<UniqueFd> listen_at(const std::string& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (path.size() >= sizeof address.sun_path)
        return fail(GCOALESCE_BAD_REQUEST,
                    "{} is too long for a socket ({} bytes at most): choose another --runtime-dir", path,
                    sizeof address.sun_path - 1);
    std::memcpy(address.sun_path, path.data(), path.size());
    UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd) return fail_errno(GCOALESCE_IO, "cannot make a socket");
    // The lock says that nobody serves it, unless somebody deleted the lock of a living broker.
    if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 || errno == EAGAIN) {
        ucred peer{};
        socklen_t length = sizeof peer;
        ::getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length);
        return fail(GCOALESCE_BUSY, "another broker (pid {}) serves {}", peer.pid > 0 ? std::to_string(peer.pid) : "?",
                    path);
    }
    ::unlink(path.c_str()); // a dead broker's
    if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
        return fail_errno(GCOALESCE_IO, "cannot bind " + path);
    if (::chmod(path.c_str(), 0660) != 0) return fail_errno(GCOALESCE_IO, "cannot set the mode of " + path);
    if (::listen(fd.get(), SOMAXCONN) != 0) return fail_errno(GCOALESCE_IO, "cannot listen on " + path);
    return fd;
}

} // namespace gcoalesce
