#include "tests/support/fake_broker.hpp"

#include <algorithm>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <stdexcept>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "base/canonical_json.hpp"
#include "protocol/key.hpp"

namespace gcoalesce::test {
namespace {

constexpr auto kWatchdog = std::chrono::seconds(30);

template <class T>
T must(Result<T> result) {
    if (!result) throw std::runtime_error(result.error().message);
    return *std::move(result);
}

void must(bool condition, const char* what) {
    if (!condition) throw std::runtime_error(std::string(what) + ": " + std::strerror(errno));
}

UniqueFd listen_at(const std::string& path) {
    UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    must(path.size() < sizeof address.sun_path, "the test's directory has too long a name");
    std::memcpy(address.sun_path, path.data(), path.size());
    ::unlink(path.c_str());
    must(::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0, "bind");
    must(::listen(fd.get(), SOMAXCONN) == 0, "listen");
    return fd;
}

} // namespace

// ---- making it -----------------------------------------------------------------------------------------------------

struct FakeBroker::Connection {
    std::uint64_t id = 0;
    UniqueFd socket;
    UniqueFd wake;
    FrameSplitter frames;
    LaneId lane = 0;
    Mapping lane_mapping;
    std::optional<Call> arriving;
    std::optional<Nanos> welcome_at; // it has said hello
};

FakeBroker::FakeBroker(const Instance& instance, FakeBrokerOptions options)
    : instance_(instance), options_(std::move(options)) {
    lock_file_ = UniqueFd(::open(instance_.lock_path().c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0640));
    must(static_cast<bool>(lock_file_), "open the lock file");
    const std::string name = instance_.segment_name(::getuid());
    ::shm_unlink(name.c_str());
    CreatedSegment created = must(create_segment(name, Store::table_bytes(options_.slots) + options_.extent_bytes));
    segment_fd_ = std::move(created.fd);
    StoreOptions store_options;
    store_options.slots = options_.slots;
    store_options.instance = instance_.name;
    store_options.stall_timeout = options_.stall_timeout;
    store_ = must(Store::create(std::move(created.mapping), store_options, {options_.settings}, system_clock()));
    listener_ = listen_at(instance_.socket_path());
    stopper_ = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    must(static_cast<bool>(stopper_), "eventfd");
    store_->set_ready();
    thread_ = std::thread([this] { run(); });
}

FakeBroker::~FakeBroker() {
    if (!over_) stop();
}

// ---- the server ----------------------------------------------------------------------------------------------------

void FakeBroker::run() {
    for (;;) {
        std::vector<pollfd> polled{{stopper_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
        std::vector<std::uint64_t> ids{0, 0};
        {
            const std::lock_guard lock(mutex_);
            if (stopping_) return;
            if (beating_) store_->heartbeat();
            store_->sweep();
            for (const auto& [id, connection] : connections_) {
                polled.push_back({connection->socket.get(), POLLIN, 0});
                ids.push_back(id);
            }
        }
        ::poll(polled.data(), polled.size(), 50);
        const std::lock_guard lock(mutex_);
        std::uint64_t count = 0;
        (void)!::read(stopper_.get(), &count, sizeof count);
        if (UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)); socket) {
            auto connection = std::make_unique<Connection>();
            connection->id = ++last_connection_;
            connection->socket = std::move(socket);
            connections_.emplace(connection->id, std::move(connection));
        }
        for (std::size_t i = 2; i < polled.size(); ++i) {
            const auto found = connections_.find(ids[i]);
            if (found != connections_.end() && polled[i].revents != 0) readable(*found->second);
        }
        for (const auto& [id, connection] : connections_) {
            if (!connection->welcome_at || *connection->welcome_at > system_clock().monotonic()) continue;
            connection->welcome_at.reset();
            welcome(*connection);
        }
        stepped_.notify_all();
    }
}

void FakeBroker::readable(Connection& connection) {
    char bytes[65536];
    const ssize_t got = ::recv(connection.socket.get(), bytes, sizeof bytes, MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
        // As the real one: pins of a process that lives on stay for a while, others go at once.
        if (!holds_pins(connection))
            store_->remove_lane(connection.lane);
        else
            left_.push_back(std::move(connection.wake));
        connections_.erase(connection.id);
        return;
    }
    if (connection.id <= options_.mute_connections) return;
    connection.frames.feed({bytes, static_cast<std::size_t>(got)});
    const std::uint64_t id = connection.id;
    for (std::string_view frame; connections_.contains(id) && must(connection.frames.next(frame));)
        take(connection, frame);
}

bool FakeBroker::holds_pins(const Connection& connection) const {
    if (connection.lane_mapping.data() == nullptr) return false;
    const Lane lane(connection.lane_mapping.data(), options_.slots);
    for (std::uint32_t slot = 0; slot < options_.slots; ++slot) {
        if (lane.pins(slot) != 0) return true;
    }
    return false;
}

void FakeBroker::take(Connection& connection, std::string_view frame) {
    if (connection.arriving) {
        Call& call = *connection.arriving;
        call.body += frame;
        if (call.body.size() < call.open.body_bytes) return;
        const Result<std::string> canonical = canonical_request(call.body);
        Call whole = std::move(call);
        connection.arriving.reset();
        ++opens_;
        if (!canonical)
            return send(connection.id,
                        message::Refused{whole.open.id, canonical.error().code, canonical.error().message, 0});
        KeyParts parts;
        parts.template_id = options_.settings.id;
        parts.template_revision = options_.settings.revision;
        parts.model = whole.open.model;
        parts.method = whole.open.method;
        parts.asked = *canonical;
        whole.key = compute_key(parts);
        if (holding_)
            held_.push_back(std::move(whole));
        else
            answer_locked(whole);
        return;
    }
    Message message = must(decode(frame));
    if (std::holds_alternative<message::Hello>(message)) {
        if (options_.welcome_after == 0) return welcome(connection);
        connection.welcome_at = system_clock().monotonic() + options_.welcome_after;
        return;
    }
    if (auto* open = std::get_if<message::Open>(&message)) {
        connection.arriving = Call{connection.id, std::move(*open), {}, {}};
    } else if (std::holds_alternative<message::Withdraw>(message)) {
        ++withdraws_; // as the real one: what was answered is not answered again, what is held the test answers
    } else if (const auto* notify = std::get_if<message::Notify>(&message)) {
        const std::int64_t open_for = notify->action == GCOALESCE_NOTIFY_OFF ? 0
                                      : notify->for_ms != 0                  ? notify->for_ms
                                                                             : to_ms(options_.settings.window);
        send(connection.id, message::Window{notify->id, open_for});
    }
}

void FakeBroker::welcome(Connection& connection) {
    if (options_.goodbye_for_hello) {
        const std::uint64_t id = connection.id;
        send(id, *options_.goodbye_for_hello);
        connections_.erase(id);
        return;
    }
    const UniqueFd readable(
        ::open(("/dev/shm" + instance_.segment_name(::getuid())).c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
    must(static_cast<bool>(readable), "open the segment");
    const UniqueFd memory(::memfd_create("gcoalesce-lane", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    const std::size_t bytes = lane_bytes(options_.slots);
    must(memory && ::ftruncate(memory.get(), static_cast<off_t>(bytes)) == 0, "make a lane");
    Mapping mapping = must(Mapping::of(memory.get(), bytes, true));
    if (options_.lane_missing_bytes > 0)
        must(::ftruncate(memory.get(), static_cast<off_t>(bytes - options_.lane_missing_bytes)) == 0, "cut the lane");
    if (options_.lane_sealed)
        must(::fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0, "seal the lane");
    int wakes[2];
    must(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, wakes) == 0, "socketpair");
    connection.wake = UniqueFd(wakes[0]);
    const UniqueFd their_wake(wakes[1]);

    connection.lane = ++attaches_;
    auto& header = *reinterpret_cast<LaneHeader*>(mapping.data());
    header.magic = kMagic;
    header.epoch = store_->epoch();
    header.attachment = connection.lane;
    header.slots = options_.slots;
    LanePort port;
    port.mapping = mapping;
    port.client_name = "test";
    port.pid = ::getpid();
    port.send_wake = [fd = wakes[0]] {
        const char one = 1;
        return ::send(fd, &one, 1, MSG_DONTWAIT | MSG_NOSIGNAL) == 1;
    };
    if (options_.lane_missing_bytes == 0) {
        connection.lane_mapping = mapping;
        store_->add_lane(connection.lane, std::move(port));
    }

    message::Welcome welcome;
    welcome.protocol = options_.protocol;
    welcome.epoch = store_->epoch();
    welcome.attachment = connection.lane;
    const std::string frame = encode(welcome);
    std::vector<int> descriptors{readable.get(), memory.get(), their_wake.get()};
    descriptors.resize(options_.welcome_descriptors, readable.get());
    std::vector<char> control(CMSG_SPACE(descriptors.size() * sizeof(int)));
    iovec vector{const_cast<char*>(frame.data()), frame.size()};
    msghdr header_out{};
    header_out.msg_iov = &vector;
    header_out.msg_iovlen = 1;
    if (!descriptors.empty()) {
        header_out.msg_control = control.data();
        header_out.msg_controllen = control.size();
        cmsghdr* part = CMSG_FIRSTHDR(&header_out);
        part->cmsg_level = SOL_SOCKET;
        part->cmsg_type = SCM_RIGHTS;
        part->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
        std::memcpy(CMSG_DATA(part), descriptors.data(), descriptors.size() * sizeof(int));
    }
    const ssize_t sent = ::sendmsg(connection.socket.get(), &header_out, MSG_NOSIGNAL);
    must(sent == static_cast<ssize_t>(frame.size()) || errno == EPIPE /* it did not wait */, "send the welcome");
}

void FakeBroker::send(std::uint64_t connection, const Message& message) {
    const auto found = connections_.find(connection);
    if (found == connections_.end()) return;
    const std::string frame = encode(message);
    ::send(found->second->socket.get(), frame.data(), frame.size(), MSG_NOSIGNAL);
}

// ---- opens ---------------------------------------------------------------------------------------------------------

void FakeBroker::hold() {
    const std::lock_guard lock(mutex_);
    holding_ = true;
}

void FakeBroker::serve() {
    const std::lock_guard lock(mutex_);
    holding_ = false;
}

std::deque<FakeBroker::Call> FakeBroker::wait_for_held(std::size_t count) {
    std::unique_lock lock(mutex_);
    if (!stepped_.wait_for(lock, kWatchdog, [&] { return held_.size() >= count; }))
        throw std::runtime_error("the broker was not asked in time");
    return std::exchange(held_, {});
}

StreamRef FakeBroker::answer(const Call& call) {
    const std::lock_guard lock(mutex_);
    return answer_locked(call);
}

StreamRef FakeBroker::answer_locked(const Call& call) {
    message::Opened opened;
    opened.id = call.open.id;
    opened.key = call.key;
    std::optional<StreamRef> stream;
    if (call.open.sharing == GCOALESCE_SHARE) stream = store_->find(call.key);
    const Store::Joinable joinable = stream ? store_->joinable(*stream) : Store::Joinable::no;
    if (joinable != Store::Joinable::no) {
        opened.status = joinable == Store::Joinable::fresh ? GCOALESCE_FRESH : GCOALESCE_JOINED;
    } else {
        StreamOpening opening;
        opening.key = call.key;
        opening.stream_id = random_u64();
        opening.method = call.open.method;
        opening.sharing = call.open.sharing;
        opening.model = call.open.model;
        opening.request = call.body;
        stream = must(store_->open(opening, call.open.sharing != GCOALESCE_SHARE_NOT));
        streams_.push_back(*stream);
        opened.status = call.open.sharing == GCOALESCE_SHARE_NOT ? GCOALESCE_BYPASS : GCOALESCE_STARTED;
    }
    opened.slot = stream->slot;
    opened.identity = stream->identity;
    opened.stream_id = store_->view().slot(stream->slot).opening.load().stream_id;
    if (const auto found = connections_.find(call.connection); found != connections_.end()) {
        const Result<void> pinned = store_->pin(found->second->lane, *stream);
        if (!pinned)
            send(call.connection, message::Refused{call.open.id, pinned.error().code, pinned.error().message, 0});
        else
            send(call.connection, opened);
    }
    return *stream;
}

void FakeBroker::refuse(const Call& call, Code code, const std::string& message, std::int64_t retry_ms) {
    const std::lock_guard lock(mutex_);
    send(call.connection, message::Refused{call.open.id, code, message, retry_ms});
}

void FakeBroker::answer_withdrawn(const Call& call) {
    const std::lock_guard lock(mutex_);
    send(call.connection, message::Withdrawn{call.open.id});
}

std::size_t FakeBroker::opens() const {
    const std::lock_guard lock(mutex_);
    return opens_;
}

std::size_t FakeBroker::withdraws() const {
    const std::lock_guard lock(mutex_);
    return withdraws_;
}

std::size_t FakeBroker::connections() const {
    const std::lock_guard lock(mutex_);
    return connections_.size();
}

std::size_t FakeBroker::attaches() const {
    const std::lock_guard lock(mutex_);
    return attaches_;
}

void FakeBroker::wait_until(const std::function<bool()>& condition) const {
    const auto deadline = std::chrono::steady_clock::now() + kWatchdog;
    while (!condition()) {
        if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error("waited in vain");
        std::unique_lock lock(mutex_);
        stepped_.wait_for(lock, std::chrono::milliseconds(20));
    }
}

StreamRef FakeBroker::stream(std::size_t number) const {
    const std::lock_guard lock(mutex_);
    return streams_.at(number);
}

std::size_t FakeBroker::streams() const {
    const std::lock_guard lock(mutex_);
    return streams_.size();
}

// ---- ends ----------------------------------------------------------------------------------------------------------

void FakeBroker::stop_heartbeat() {
    const std::lock_guard lock(mutex_);
    beating_ = false;
}

void FakeBroker::say_goodbye(Code code, const std::string& message) {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, connection] : connections_) {
        send(id, message::Goodbye{code, message});
        store_->remove_lane(connection->lane);
    }
    connections_.clear();
}

void FakeBroker::drop_connections() {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, connection] : connections_) ::shutdown(connection->socket.get(), SHUT_RDWR);
}

void FakeBroker::revoke_lanes() {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, connection] : connections_) store_->revoke_lane(connection->lane);
}

void FakeBroker::end_thread() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
        const std::uint64_t one = 1;
        (void)!::write(stopper_.get(), &one, sizeof one);
    }
    thread_.join();
    over_ = true;
}

void FakeBroker::stop() {
    end_thread();
    listener_.reset();
    ::unlink(instance_.socket_path().c_str());
    store_->set_state(BrokerState::closed);
    connections_.clear();
    left_.clear();
    ::shm_unlink(instance_.segment_name(::getuid()).c_str());
    segment_fd_.reset();
    lock_file_.reset();
}

void FakeBroker::die() {
    end_thread();
    store_.reset(); // a mapping holds the open file, and so its lock
    segment_fd_.reset();
    lock_file_.reset();
    listener_.reset();
    connections_.clear();
    left_.clear();
}

} // namespace gcoalesce::test
