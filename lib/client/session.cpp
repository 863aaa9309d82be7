#include "client/session.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

namespace gcoalesce {
namespace {

constexpr Nanos kHeartbeatDoubtful = kSecond;
constexpr Nanos kAskKernelEvery = 50 * kMillisecond;
constexpr Nanos kConnectAgain = 5 * kMillisecond; // while the listener's queue is full

// The same clock as the heartbeat's, a few milliseconds behind it at most, at a quarter of the cost: look() is called
// for each subscription that an event loop asks.
Nanos coarse_now() {
    timespec now{};
    ::clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return static_cast<Nanos>(now.tv_sec) * kSecond + now.tv_nsec;
}

Result<Mapping> map_lane(int fd, const message::Welcome& welcome, std::uint32_t slots) {
    struct stat file {};
    if (::fstat(fd, &file) != 0) return fail_errno(GCOALESCE_IO, "cannot examine the lane");
    const std::uint64_t expected = lane_bytes(slots);
    if (!S_ISREG(file.st_mode) || static_cast<std::uint64_t>(file.st_size) != expected)
        return fail(GCOALESCE_FOREIGN, "the lane that the broker handed out has {} bytes, expected {}", file.st_size,
                    expected);
    // Without the seal, cutting the file would kill this process with SIGBUS.
    const int seals = ::fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0)
        return fail(GCOALESCE_FOREIGN, "the lane that the broker handed out is not sealed against shrinking");
    Result<Mapping> mapping = Mapping::of(fd, expected, true);
    if (!mapping) return mapping;
    const auto& header = *reinterpret_cast<const LaneHeader*>(mapping->data());
    if (header.magic != kMagic || header.epoch != welcome.epoch || header.attachment != welcome.attachment ||
        header.slots != slots)
        return fail(GCOALESCE_FOREIGN, "the lane that the broker handed out is not this attachment's");
    return mapping;
}

// Who must own what the broker hands out: whoever listened when we connected. Where that is root it may be the service
// manager, which connects us to the broker that it starts; then the owner of the runtime directory is as good.
unsigned owner_of_segment(const Instance& instance, unsigned listener, int segment) {
    struct stat file {};
    struct stat directory {};
    if (listener == 0 && ::fstat(segment, &file) == 0 && ::stat(instance.runtime_dir.c_str(), &directory) == 0 &&
        file.st_uid == directory.st_uid)
        return directory.st_uid;
    return listener;
}

} // namespace

// ---- session -------------------------------------------------------------------------------------------------------

Session::Session(OpenSegment segment, Mapping lane, UniqueFd wake)
    : segment_(std::move(segment)),
      lane_mapping_(std::move(lane)),
      lane_(lane_mapping_.data(), segment_.view.slot_count()),
      wake_(std::move(wake)) {}

std::optional<TemplatePolicy> Session::policy(std::string_view template_id) {
    const auto in_force = [&](std::uint32_t i) {
        std::optional<TemplatePolicy> policy = view().policy(i);
        if (policy && (policy->id.view() != template_id || (policy->flags & template_removed) != 0)) policy.reset();
        return policy;
    };
    const auto known = templates_.find(template_id);
    if (known != templates_.end()) {
        if (std::optional<TemplatePolicy> policy = in_force(known->second)) return policy;
        templates_.erase(known);
    }
    for (std::uint32_t i = 0; i < view().template_count(); ++i) {
        if (std::optional<TemplatePolicy> policy = in_force(i)) {
            templates_.emplace(template_id, i);
            return policy;
        }
    }
    return std::nullopt;
}

Session::Fate Session::look(bool certain) {
    const Fate known = fate();
    if (known != Fate::alive) return known;
    const Header& header = view().header();
    const Nanos now = coarse_now();
    const bool closed = header.state.load(std::memory_order_acquire) == static_cast<std::uint32_t>(BrokerState::closed);
    if (!certain && !closed && !suspected_.load(std::memory_order_acquire) &&
        now - header.heartbeat_ns.load(std::memory_order_acquire) <= kHeartbeatDoubtful)
        return Fate::alive;
    Nanos asked = asked_kernel_.load(std::memory_order_relaxed);
    if (!certain && !closed && (now - asked < kAskKernelEvery || !asked_kernel_.compare_exchange_strong(asked, now)))
        return fate();
    switch (segment_.liveness(now)) {
    case Liveness::closed: fate_.store(Fate::closed, std::memory_order_release); break;
    case Liveness::dead: fate_.store(Fate::dead, std::memory_order_release); break;
    case Liveness::alive:
    case Liveness::unresponsive:
    case Liveness::unknown: break;
    }
    return fate();
}

// ---- attaching -----------------------------------------------------------------------------------------------------

Error why_no_answer(const Instance& instance, Nanos now) {
    const Result<OpenSegment> segment = open_segment(instance);
    if (!segment) return segment.error();
    const Header& header = segment->view.header();
    const std::string who = fmt::format("the broker of instance \"{}\" (pid {})", instance.name, header.broker_pid);
    switch (segment->liveness(now)) {
    case Liveness::closed: return fail(GCOALESCE_CLOSED, "{} has shut down: start gcoalesced again", who).value();
    case Liveness::dead: return fail(GCOALESCE_BROKER_DEAD, "{} died: start gcoalesced again", who).value();
    case Liveness::unknown:
        return fail(GCOALESCE_UNRESPONSIVE,
                    "nobody answers at {}, and the kernel does not tell whether {} lives: see its log",
                    instance.socket_path(), who)
            .value();
    case Liveness::unresponsive:
        return fail(GCOALESCE_UNRESPONSIVE, "{} lives, but its heart has not beaten for {} ms: see its log, or kill it",
                    who, to_ms(now - header.heartbeat_ns.load(std::memory_order_acquire)))
            .value();
    case Liveness::alive: break;
    }
    switch (static_cast<BrokerState>(header.state.load(std::memory_order_acquire))) {
    case BrokerState::starting: return fail(GCOALESCE_STARTING, "{} is starting", who).value();
    case BrokerState::draining:
    case BrokerState::closed:
        return fail(GCOALESCE_DRAINING, "{} is shutting down and takes nobody any more", who).value();
    case BrokerState::serving: break;
    }
    return fail(GCOALESCE_UNRESPONSIVE, "{} lives, but nobody listens at {}: was the socket removed? restart it", who,
                instance.socket_path())
        .value();
}

// True: connected. False: the listener's queue is full.
Result<bool> AttachTry::connect() {
    const std::string path = instance_.socket_path();
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (path.size() >= sizeof address.sun_path)
        return fail(GCOALESCE_BAD_REQUEST, "{} is too long for a socket ({} bytes at most): use another runtime dir",
                    path, sizeof address.sun_path - 1);
    std::memcpy(address.sun_path, path.data(), path.size());
    UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket) return fail_errno(GCOALESCE_IO, "cannot make a socket");
    const auto connected = [&] {
        return ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
    };
    if (connected()) {
        link_.emplace(std::move(socket));
        return true;
    }
    switch (errno) {
    case EAGAIN:
    case EINTR: return false;
    case ENOENT:
    case ECONNREFUSED: {
        const Error why = why_no_answer(instance_, system_clock().monotonic());
        // A broker that has become ready since we tried listens by now: it listens before it says so.
        if (why.code != GCOALESCE_UNRESPONSIVE || !connected()) return tl::unexpected(why);
        link_.emplace(std::move(socket));
        return true;
    }
    case EACCES:
    case EPERM:
        return fail(GCOALESCE_NO_PERMISSION,
                    "no permission to connect to {}: be a member of the broker's group (usually gcoalesce) and log in "
                    "again",
                    path);
    case ENOTDIR:
    case ENOTSOCK:
    case EPROTOTYPE: return fail_errno(GCOALESCE_FOREIGN, path + " is no socket of a broker");
    default: return fail_errno(GCOALESCE_IO, "cannot connect to " + path);
    }
}

Nanos AttachTry::next_step(Nanos now) const {
    return link_ ? deadline_ : std::min(deadline_, now + kConnectAgain);
}

Result<std::optional<AttachTry::Attached>> AttachTry::advance(Nanos now) {
    if (!link_) {
        const Result<bool> connected = connect();
        if (!connected) return tl::unexpected(connected.error());
        if (*connected) link_->push(message::Hello{kProtocolVersion, client_name_});
    }
    if (link_) {
        // A connection that ends in here still told why, where it did: read before complaining.
        link_->flush();
        const bool open = link_->receive(&descriptors_);
        Message message;
        const Result<bool> found = link_->next(message);
        if (!found)
            return fail(GCOALESCE_FOREIGN, "what listens at {} is no broker: {}", instance_.socket_path(),
                        found.error().message);
        if (*found) {
            if (const auto* goodbye = std::get_if<message::Goodbye>(&message))
                return fail(goodbye->code, "the broker refuses this client: {}", goodbye->message);
            const auto* welcome = std::get_if<message::Welcome>(&message);
            if (welcome == nullptr) return fail(GCOALESCE_FOREIGN, "the broker's first message is no welcome");
            Result<Attached> attached = accept(*welcome);
            if (!attached) return tl::unexpected(attached.error());
            return std::optional<Attached>(std::move(*attached));
        }
        if (!open) {
            Error why = why_no_answer(instance_, now);
            if (why.code == GCOALESCE_UNRESPONSIVE)
                why.message = "the broker closed the connection without a word: see its log";
            return tl::unexpected(why);
        }
    }
    if (now < deadline_) return std::optional<Attached>();
    return fail(GCOALESCE_UNRESPONSIVE, "somebody listens at {}, but does not answer: see the broker's log, or kill it",
                instance_.socket_path());
}

Result<AttachTry::Attached> AttachTry::accept(const message::Welcome& welcome) {
    if (welcome.protocol != kProtocolVersion)
        return fail(GCOALESCE_WRONG_VERSION,
                    "the broker speaks control protocol {}, this program {}: install both from one version",
                    welcome.protocol, kProtocolVersion);
    if (descriptors_.size() != kWelcomeDescriptors)
        return fail(GCOALESCE_FOREIGN, "the broker's welcome came with {} descriptors, expected {}",
                    descriptors_.size(), kWelcomeDescriptors);
    ucred broker{};
    socklen_t length = sizeof broker;
    if (::getsockopt(link_->fd(), SOL_SOCKET, SO_PEERCRED, &broker, &length) != 0)
        return fail_errno(GCOALESCE_IO, "cannot tell who serves " + instance_.socket_path());
    const unsigned owner = owner_of_segment(instance_, broker.uid, descriptors_[0].get());
    Result<OpenSegment> segment = adopt_segment(std::move(descriptors_[0]), owner);
    if (!segment) return tl::unexpected(segment.error());
    if (segment->view.header().epoch != welcome.epoch)
        return fail(GCOALESCE_FOREIGN, "the segment that the broker handed out is another broker's");
    Result<Mapping> lane = map_lane(descriptors_[1].get(), welcome, segment->view.slot_count());
    if (!lane) return tl::unexpected(lane.error());
    link_->push(message::Ready{});
    link_->flush();
    return Attached{std::make_shared<Session>(std::move(*segment), std::move(*lane), std::move(descriptors_[2])),
                    std::move(*link_)};
}

} // namespace gcoalesce
