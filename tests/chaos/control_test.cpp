// What a client may do to the control socket and to its own lane: it harms itself alone.

#include <array>
#include <catch2/catch.hpp>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <system_error>
#include <vector>

#include "protocol/control.hpp"
#include "segment/lane.hpp"
#include "tests/chaos/client.hpp"
#include "tests/support/broker.hpp"
#include "tests/support/sim.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;

namespace {

std::string length_of(std::uint32_t length) {
    return std::string(reinterpret_cast<const char*>(&length), sizeof length); // little-endian, as this machine is
}

std::string framed(const std::string& payload) {
    return length_of(static_cast<std::uint32_t>(payload.size())) + payload;
}

// A connection that says what it likes.
class Raw {
  public:
    explicit Raw(const Instance& instance) : socket_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
        sockaddr_un address{};
        address.sun_family = AF_UNIX;
        instance.socket_path().copy(address.sun_path, sizeof address.sun_path - 1);
        const timeval watchdog{120, 0};
        ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &watchdog, sizeof watchdog);
        ::setsockopt(socket_.get(), SOL_SOCKET, SO_SNDTIMEO, &watchdog, sizeof watchdog);
        if (::connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
            throw std::system_error(errno, std::generic_category(), "connect");
    }

    // False: the broker has closed the connection.
    bool send(std::string_view bytes) {
        while (!bytes.empty()) {
            const ssize_t sent = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
            if (sent < 0 && (errno == EPIPE || errno == ECONNRESET)) return false;
            if (sent < 0) throw std::system_error(errno, std::generic_category(), "send");
            bytes.remove_prefix(static_cast<std::size_t>(sent));
        }
        return true;
    }

    bool send_with_descriptors(std::string_view bytes, const std::vector<int>& sent) {
        std::vector<char> control(CMSG_SPACE(sent.size() * sizeof(int)));
        iovec vector{const_cast<char*>(bytes.data()), bytes.size()};
        msghdr header{};
        header.msg_iov = &vector;
        header.msg_iovlen = 1;
        header.msg_control = control.data();
        header.msg_controllen = control.size();
        cmsghdr* part = CMSG_FIRSTHDR(&header);
        part->cmsg_level = SOL_SOCKET;
        part->cmsg_type = SCM_RIGHTS;
        part->cmsg_len = CMSG_LEN(sent.size() * sizeof(int));
        std::memcpy(CMSG_DATA(part), sent.data(), sent.size() * sizeof(int));
        return ::sendmsg(socket_.get(), &header, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
    }

    // Nothing more will come from here.
    void finish() { ::shutdown(socket_.get(), SHUT_WR); }

    // The broker's next message, its descriptors in `descriptors`; nullopt: it closed the connection.
    std::optional<Message> next() {
        for (;;) {
            std::string_view frame;
            if (splitter_.next(frame).value()) return decode(frame).value();
            std::array<char, 4096> bytes{};
            alignas(cmsghdr) std::array<char, CMSG_SPACE(8 * sizeof(int))> control{};
            iovec vector{bytes.data(), bytes.size()};
            msghdr header{};
            header.msg_iov = &vector;
            header.msg_iovlen = 1;
            header.msg_control = control.data();
            header.msg_controllen = control.size();
            const ssize_t got = ::recvmsg(socket_.get(), &header, MSG_CMSG_CLOEXEC);
            for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr; part = CMSG_NXTHDR(&header, part)) {
                if (part->cmsg_type != SCM_RIGHTS) continue;
                for (std::size_t at = CMSG_LEN(0); at < part->cmsg_len; at += sizeof(int)) {
                    int fd = -1;
                    std::memcpy(&fd, reinterpret_cast<char*>(part) + at, sizeof fd);
                    descriptors.emplace_back(fd);
                }
            }
            if (got < 0 && errno != ECONNRESET) throw std::system_error(errno, std::generic_category(), "recv");
            if (got <= 0) return std::nullopt;
            splitter_.feed({bytes.data(), static_cast<std::size_t>(got)});
        }
    }

    template <class T>
    T expect() {
        const std::optional<Message> message = next();
        if (!message || !std::holds_alternative<T>(*message)) throw std::runtime_error("the broker answers otherwise");
        return std::get<T>(*message);
    }

    // The goodbye, behind whatever comes before it; nullopt: closed without one.
    std::optional<message::Goodbye> goodbye() {
        std::optional<message::Goodbye> last;
        while (const std::optional<Message> message = next()) {
            last.reset();
            if (const auto* goodbye = std::get_if<message::Goodbye>(&*message)) last = *goodbye;
        }
        return last;
    }

    message::Welcome say_hello() {
        send(encode(message::Hello{kProtocolVersion, "raw"}));
        return expect<message::Welcome>();
    }
    message::Welcome attach() {
        const message::Welcome welcome = say_hello();
        send(encode(message::Ready{}));
        return welcome;
    }

    std::vector<UniqueFd> descriptors; // segment, lane, wake socket, once it was welcomed

  private:
    UniqueFd socket_;
    FrameSplitter splitter_;
};

std::string open_message(std::uint64_t id, const std::string& body, std::optional<std::uint64_t> claimed = {}) {
    message::Open open;
    open.id = id;
    open.model = "gemini-2.5-flash";
    open.body_bytes = claimed.value_or(body.size());
    std::string bytes = encode(open);
    append_body_frames(bytes, body);
    return bytes;
}

// A client that behaves, and tells whether it is served.
class Neighbour {
  public:
    explicit Neighbour(const Instance& instance)
        : child_([&instance](Line& line) {
              const Attachment attachment = attach(instance);
              line.tell();
              for (int number = 0;; ++number) {
                  line.hear();
                  Reader reader(attachment, {"neighbour " + std::to_string(number)});
                  line.tell(reader.read_to_end().complete());
              }
          }) {
        child_.line().hear();
    }
    bool served() {
        child_.line().tell();
        return child_.line().hear<bool>();
    }

  private:
    Child child_;
};

// Its open descriptors; nullopt where that may not be seen.
std::optional<std::size_t> descriptors_of(pid_t pid) {
    std::error_code error;
    const std::filesystem::directory_iterator entries("/proc/" + std::to_string(pid) + "/fd", error);
    if (error) return std::nullopt;
    return static_cast<std::size_t>(std::distance(begin(entries), end(entries)));
}

enum class Stage { connected, welcomed, attached };

Raw client_at(Stage stage, const Instance& instance) {
    Raw raw(instance);
    if (stage == Stage::welcomed) raw.say_hello();
    if (stage == Stage::attached) raw.attach();
    return raw;
}

std::string filled(char first, std::size_t bytes) {
    return framed(std::string(bytes, first));
}

} // namespace

TEST_CASE("whatever is no message at its place gets a goodbye that says why, and others are served meanwhile") {
    using enum Stage;
    const Sim sim;
    const ScratchInstance instance;
    Broker broker(*instance, sim.url());
    Neighbour neighbour(*instance);
    const std::string hello = encode(message::Hello{kProtocolVersion, "raw"}), ready = encode(message::Ready{}),
                      body = prompt_body("hello");
    struct Bad {
        Stage stage;
        std::string bytes;
        const char* why; // in the goodbye's sentence
        gcoalesce_code code = GCOALESCE_BAD_REQUEST;
    };
    const std::vector<Bad> table{
        // Frames.
        {connected, length_of(0), "a frame of 1 to 65536"},
        {connected, length_of(65537), "found one of 65537"},
        {connected, length_of(UINT32_MAX) + "x", "a frame of 1 to 65536"},
        {connected, "GET / HTTP/1.1\r\n\r\n", "a frame of 1 to 65536"},
        {attached, length_of(0), "a frame of 1 to 65536"},
        {attached, length_of(1u << 31), "a frame of 1 to 65536"},
        // Depth, and numbers of nodes.
        {connected, filled('\x81', 65536), "at most 2048 bytes"},
        {connected, filled('\x5f', 65536), "at most 2048 bytes"},
        {attached, filled('\x7f', 65536), "at most 2048 bytes"},
        {connected, filled('\x81', 2048), "an array"},
        {connected, filled('\x9f', 2048), "an array"},
        {connected, filled('\x5f', 2048), "CBOR"},
        {connected, filled('\x7f', 2048), "CBOR"},
        {connected, filled('\xc1', 2048), "CBOR"},
        {connected, framed("\xa1\x61t\xa1\x61t\x01"), "a map within the map"},
        {connected, framed("\xba\xff\xff\xff\xff"), "CBOR"},
        {connected, framed("\x7b\x7f\xff\xff\xff\xff\xff\xff\xff"), "CBOR"},
        {connected, framed([] {
             std::string map("\xb8\x28\x61t\x65ready");
             for (int i = 0; i < 39; ++i)
                 map +=
                     std::string("\x62") + static_cast<char>('0' + i / 10) + static_cast<char>('0' + i % 10) + "\x01";
             return map;
         }()),
         "too many members"},
        // Types.
        {connected, framed("\x01"), "no map"},
        {connected, framed("\xa0"), "\"t\""},
        {connected, framed("\xa1\x61t\x01"), "\"t\""},
        {connected, framed("\xa1\x61t\x65hullo"), "unknown message"},
        {connected, framed("\xa1\x61t\x65hello"), "missing"},
        {connected,
         framed("\xa3\x61t\x65hello\x64name\x61x\x68protocol\x61"
                "1"),
         "wrong type"},
        {connected, framed("\xa3\x61t\x65hello\x64name\x61x\x68protocol\x20"), "out of range"},
        {connected, framed("\xa3\x61t\x65hello\x64name\x41x\x68protocol\x01"), "wrong type"},
        {connected, framed(hello.substr(4) + "x"), "CBOR"},
        // Versions.
        {connected, encode(message::Hello{kProtocolVersion + 1, "newer"}), "control protocol 2",
         GCOALESCE_WRONG_VERSION},
        {connected, encode(message::Hello{0, "older"}), "control protocol 0", GCOALESCE_WRONG_VERSION},
        // Order.
        {connected, ready, "expected hello"},
        {connected, open_message(1, body), "expected hello"},
        {connected, encode(message::Welcome{}), "expected hello"},
        {welcomed, hello, "expected ready"},
        {welcomed, open_message(1, body), "expected ready"},
        {welcomed, encode(message::Withdraw{1}), "expected ready"},
        {attached, hello, "expected a request or a command"},
        {attached, ready, "expected a request or a command"},
        {attached, encode(message::Opened{}), "expected a request or a command"},
        {attached, encode(message::Goodbye{}), "expected a request or a command"},
        // Bodies.
        {attached, open_message(1, "", 0), "1 to 33554432 bytes"},
        {attached, open_message(1, "", kMaxBody + 1), "1 to 33554432 bytes"},
        {attached, open_message(1, "", UINT64_MAX), "1 to 33554432 bytes"},
        {attached, open_message(1, body, body.size() - 1), "longer than its open message"},
        {attached, open_message(1, "x", 100) + encode(message::Notify{}) + filled('y', 100), "longer than its open"},
        {attached, open_message(1, "x", 100) + length_of(0), "a frame of 1 to 65536"},
    };
    for (const Bad& bad : table) {
        CAPTURE(static_cast<int>(bad.stage), bad.why);
        Raw raw = client_at(bad.stage, *instance);
        raw.send(bad.bytes);
        CHECK(neighbour.served());
        const std::optional<message::Goodbye> goodbye = raw.goodbye();
        REQUIRE(goodbye);
        CHECK(gcoalesce_code_name(goodbye->code) == std::string(gcoalesce_code_name(bad.code)));
        CHECK_THAT(goodbye->message, Catch::Contains(bad.why));
    }
    CHECK(broker.counted(Counter::connections_refused) == table.size());
    CHECK(eventually([&] { return broker.counted(Counter::clients_attached) == 1; }));
}

TEST_CASE("a request that is wrong in itself is refused, and its connection serves the next one") {
    const Sim sim;
    const ScratchInstance instance;
    const Broker broker(*instance, sim.url());
    Raw raw(*instance);
    raw.attach();
    std::uint64_t id = 0;
    for (const std::string& body : {std::string("x"), std::string("{"), std::string("[]"), std::string(3, '\0'),
                                    std::string(300'000, '['), std::string("{\"contents\":[],\"contents\":[]}")}) {
        raw.send(open_message(++id, body));
        const auto refused = raw.expect<message::Refused>();
        CHECK(refused.id == id);
        CHECK(refused.code == GCOALESCE_BAD_REQUEST);
        CHECK(refused.message != std::string());
    }
    message::Open open;
    open.id = ++id;
    open.model = "../../etc";
    open.body_bytes = 1;
    raw.send(encode(open) + framed("x"));
    CHECK(raw.expect<message::Refused>().code == GCOALESCE_BAD_REQUEST);
    raw.send(encode(message::Withdraw{12345})); // of nothing: passed over
    raw.send(encode(message::Notify{++id, GCOALESCE_NOTIFY_ON, INT64_MAX}));
    CHECK(raw.expect<message::Refused>().id == id);
    raw.send(open_message(++id, prompt_body("at last")));
    CHECK(raw.expect<message::Opened>().id == id);
}

TEST_CASE("half of anything costs nobody else anything, whether the rest never comes or the sender goes") {
    const Sim sim;
    const ScratchInstance instance;
    Broker broker(*instance, sim.url());
    Neighbour neighbour(*instance);
    const std::string body(200'000, 'b');
    const std::string whole = encode(message::Hello{kProtocolVersion, "raw"}) + encode(message::Ready{}) +
                              open_message(1, prompt_body(body)) + encode(message::Notify{2});
    std::vector<std::unique_ptr<Raw>> waiting;
    for (std::size_t cut = 0; cut < whole.size(); cut += cut < 400 ? 7 : 30'011) {
        CAPTURE(cut);
        Raw leaving(*instance);
        leaving.send(std::string_view(whole).substr(0, cut));
        leaving.finish();
        while (leaving.next()) {
        }
        waiting.push_back(std::make_unique<Raw>(*instance));
        waiting.back()->send(std::string_view(whole).substr(0, cut));
    }
    CHECK(neighbour.served());
    // Who is not attached after five seconds is sent away, by name; who is may take his time.
    std::uint64_t sent_away = 0;
    for (const auto& raw : waiting) {
        std::optional<Message> message = raw->next();
        if (message && std::holds_alternative<message::Welcome>(*message)) {
            if (raw->descriptors.size() == kWelcomeDescriptors) raw->descriptors.clear();
            continue;
        }
        REQUIRE(message);
        CHECK(std::get<message::Goodbye>(*message).code == GCOALESCE_TIMED_OUT);
        CHECK(!raw->next());
        ++sent_away;
    }
    CHECK(sent_away > 0);
    CHECK(sent_away < waiting.size());
    CHECK(neighbour.served());
    waiting.clear();
    CHECK(eventually([&] { return broker.counted(Counter::clients_attached) == 1; }));
}

TEST_CASE("bodies that are announced and never come take no room for longer than their senders stay") {
    const Sim sim;
    const ScratchInstance instance;
    const Broker broker(*instance, sim.url());
    Neighbour neighbour(*instance);
    const std::string announcement = open_message(1, "x", kMaxBody);
    for (int round = 0; round < 3; ++round) {
        std::vector<std::unique_ptr<Raw>> clients; // 256 MiB of bodies at once are taken, 8 times 32
        for (int i = 0; i < 8; ++i) {
            clients.push_back(std::make_unique<Raw>(*instance));
            clients.back()->attach();
            clients.back()->send(announcement);
            // Answered at once, and so behind the announcement.
            clients.back()->send(framed("x"));
        }
        // Each of them is known to have been counted when this one is told that there is no room.
        Raw ninth(*instance);
        ninth.attach();
        CHECK(eventually([&] {
            ninth.send(open_message(7, "x"));
            const std::optional<Message> answer = ninth.next();
            const auto* refused = answer ? std::get_if<message::Refused>(&*answer) : nullptr;
            return refused != nullptr && refused->code == GCOALESCE_BUSY && refused->retry_ms > 0;
        }));
    }
    // All have gone: there is room again.
    CHECK(eventually([&] { return broker.counted(Counter::clients_attached) == 1; }));
    CHECK(neighbour.served());
}

TEST_CASE("descriptors that a client sends along are closed") {
    const Sim sim;
    const ScratchInstance instance;
    Broker broker(*instance, sim.url());
    Neighbour neighbour(*instance);
    CHECK(neighbour.served());
    const std::optional<std::size_t> before = descriptors_of(broker.process().pid());
    for (const std::size_t count : {1u, 16u, 17u, 253u}) {
        Raw raw(*instance);
        const std::vector<int> descriptors(count, STDERR_FILENO);
        CHECK(raw.send_with_descriptors(encode(message::Hello{kProtocolVersion, "raw"}), descriptors));
        raw.expect<message::Welcome>();
        CHECK(raw.send_with_descriptors(encode(message::Ready{}), descriptors));
        CHECK(raw.send_with_descriptors(encode(message::Notify{1}), descriptors));
        CHECK(raw.expect<message::Window>().id == 1);
    }
    CHECK(neighbour.served());
    if (before) CHECK(eventually([&] { return descriptors_of(broker.process().pid()) == before; }));
}

TEST_CASE("10,000 connections with random and mutated bytes are answered or closed, and others are served") {
    const Sim sim;
    const ScratchInstance instance;
    Broker broker(*instance, sim.url(), {"--linger", "100ms", "--max-in-flight", "64", "--stall-timeout", "1s"});
    Neighbour neighbour(*instance);
    std::mt19937_64 random(10);
    const auto mutate = [&](std::string bytes) {
        for (std::uint64_t n = random() % 4; n > 0; --n) bytes[random() % bytes.size()] = static_cast<char>(random());
        if (random() % 8 == 0) bytes.resize(random() % bytes.size());
        if (random() % 8 == 0) bytes.insert(random() % (bytes.size() + 1), 1, static_cast<char>(random()));
        return bytes;
    };
    const auto garbage = [&] {
        std::string payload(1 + random() % 300, '\0');
        for (char& byte : payload) byte = static_cast<char>(random());
        return framed(payload);
    };
    const std::string hello = encode(message::Hello{kProtocolVersion, "raw"}), ready = encode(message::Ready{});
    const auto some = [&]() -> std::string {
        switch (random() % 5) {
        case 0: return garbage();
        case 1: return mutate(hello);
        case 2: return hello + mutate(ready);
        case 3: return hello + ready + garbage();
        default:
            return hello + ready + mutate(open_message(1, prompt_body("random"))) + mutate(encode(message::Notify{2})) +
                   mutate(encode(message::Withdraw{1}));
        }
    };
    std::uint64_t goodbyes = 0;
    for (int round = 0; round < 100; ++round) {
        std::vector<std::unique_ptr<Raw>> connections;
        for (int i = 0; i < 100; ++i) {
            connections.push_back(std::make_unique<Raw>(*instance));
            connections.back()->send(some());
            connections.back()->finish();
        }
        for (const auto& connection : connections) goodbyes += connection->goodbye() ? 1 : 0;
        if (round % 5 == 0) CHECK(neighbour.served());
    }
    CHECK(goodbyes > 5000);
    CHECK(neighbour.served());
    CHECK(eventually(
        [&] { return broker.counted(Counter::clients_attached) == 1 && broker.counted(Counter::slots_in_use) == 0; }));
}

TEST_CASE("a client that never reads its answers loses its connection, and nobody else waits for it") {
    const Sim sim;
    const ScratchInstance instance;
    const Broker broker(*instance, sim.url());
    Neighbour neighbour(*instance);
    Raw raw(*instance);
    raw.attach();
    std::string many;
    for (std::uint64_t i = 0; i < 1000; ++i) many += encode(message::Notify{i});
    // Many times what the kernel and the broker keep for it.
    int rounds = 0;
    while (raw.send(many) && ++rounds < 1000) CHECK(neighbour.served());
    CHECK(rounds < 1000);
    CHECK(eventually([&] { return broker.counted(Counter::clients_attached) == 1; }));
}

namespace {

struct LaneOf {
    explicit LaneOf(Raw& raw)
        : segment(adopt_segment(std::move(raw.descriptors.at(0)), ::geteuid()).value()),
          mapping(Mapping::of(raw.descriptors.at(1).get(), lane_bytes(segment.view.slot_count()), true).value()),
          lane(mapping.data(), segment.view.slot_count()) {}
    OpenSegment segment;
    Mapping mapping;
    Lane lane;
};

} // namespace

TEST_CASE("a client that never drains its wake socket harms itself alone") {
    const Sim sim;
    const ScratchInstance instance;
    const Broker broker(*instance, sim.url());
    Neighbour neighbour(*instance);
    Child filler([&](Line& line) {
        Raw raw(*instance);
        raw.attach();
        const LaneOf mine(raw);
        for (std::uint64_t id = 1;; ++id) {
            raw.send(open_message(id, prompt_body("[sim gap=1ms events=2000] wake " + std::to_string(id))));
            const auto opened = raw.expect<message::Opened>();
            if (id == 1) line.tell();
            const Slot& slot = mine.segment.view.slot(opened.slot);
            while (slot.state.load() == static_cast<std::uint32_t>(SlotState::in_flight)) {
                mine.lane.ask(); // for each event anew, and takes none of what it is sent
                ::sched_yield();
            }
        }
    });
    filler.line().hear();
    CHECK(eventually([&] { return broker.counted(Counter::wakes_socket_failed) > 0; }));
    const std::uint64_t failed = broker.counted(Counter::wakes_socket_failed);
    CHECK(neighbour.served());
    CHECK(eventually([&] { return broker.counted(Counter::wakes_socket_failed) > failed; }));
    filler.signal(SIGKILL);
    CHECK(eventually([&] { return broker.counted(Counter::clients_attached) == 1; }));
    CHECK(neighbour.served());
}

TEST_CASE("a client that scribbles its whole lane harms itself alone") {
    const Sim sim;
    const ScratchInstance instance;
    const Broker broker(*instance, sim.url(), {"--linger", "100ms", "--streams", "64"});
    const std::uint64_t extents_at_start = broker.extents_free();
    Child reader([&](Line& line) {
        const Attachment attachment = attach(*instance);
        line.tell();
        for (int number = 0; !line.has_news(); ++number) {
            std::deque<Reader> readers;
            for (int i = 0; i < 10; ++i)
                readers.emplace_back(attachment, Ask{"[sim gap=10ms events=36] beside the scribbler " +
                                                     std::to_string(number) + " " + std::to_string(i % 5)});
            read_all(attachment, readers);
            for (const Reader& one : readers)
                if (!one.seen().complete() || one.seen().events != 36)
                    throw std::runtime_error(std::string("an answer is not whole: ") +
                                             gcoalesce_code_name(one.seen().code) + ": " + one.seen().ending.message);
        }
    });
    reader.line().hear();
    std::mt19937_64 random(5);
    for (int round = 0; round < 5; ++round) {
        Raw raw(*instance);
        raw.attach();
        raw.send(open_message(1, prompt_body("scribble")));
        raw.expect<message::Opened>();
        const LaneOf mine(raw);
        for (int times = 0; times < 10; ++times) {
            // From the second round on the header stays as it is, so that the pins are looked at.
            for (std::size_t at = round == 0 ? 0 : sizeof(LaneHeader); at < mine.mapping.bytes(); at += 8) {
                const std::uint64_t word = random();
                __atomic_store_n(reinterpret_cast<std::uint64_t*>(mine.mapping.data() + at), word, __ATOMIC_RELAXED);
            }
            mine.lane.header().changes.fetch_add(1);
            const std::uint64_t beat = static_cast<std::uint64_t>(broker.view().header().heartbeat_ns.load());
            CHECK(eventually(
                [&] { return static_cast<std::uint64_t>(broker.view().header().heartbeat_ns.load()) != beat; }));
        }
        // While the scribbler stays, its pins are found to be none.
        if (round > 0) CHECK(eventually([&] { return mine.lane.revoked(); }));
    }
    reader.line().tell();
    CHECK(reader.wait() == 0);
    CHECK(broker.counted(Counter::lanes_revoked) >= 4);
    CHECK(eventually([&] {
        return broker.counted(Counter::clients_attached) == 0 && broker.counted(Counter::slots_in_use) == 0 &&
               broker.extents_free() == extents_at_start;
    }));
}

TEST_CASE("case 16: a client can neither cut its lane, nor write or cut the segment, by what it was given") {
    const Sim sim;
    const ScratchInstance instance;
    const Broker broker(*instance, sim.url());
    Neighbour neighbour(*instance);
    Raw raw(*instance);
    raw.attach();
    const int segment = raw.descriptors.at(0).get(), lane = raw.descriptors.at(1).get();
    CHECK(::ftruncate(lane, 0) != 0);
    CHECK(errno == EPERM);
    CHECK(::ftruncate(lane, 1 << 20) != 0);
    CHECK(::fcntl(lane, F_ADD_SEALS, F_SEAL_WRITE) != 0); // no further seal, which would stop the broker's pins
    CHECK(::ftruncate(segment, 0) != 0);
    CHECK(::write(segment, "x", 1) < 0);
    CHECK(!Mapping::of(segment, 4096, true));
    CHECK(neighbour.served());
}

TEST_CASE("case 7: a client killed at any step of attaching and asking leaves nothing behind") {
    const Sim sim;
    const ScratchInstance instance;
    const Broker broker(*instance, sim.url(), {"--linger", "100ms", "--ttl-idle", "0ms"});
    const std::uint64_t extents_at_start = broker.extents_free();
    Neighbour neighbour(*instance);
    const std::string open = open_message(1, prompt_body("[sim gap=10ms events=36] killed"));
    const std::vector<std::function<void(Raw&)>> steps{
        [](Raw& raw) {
            raw.send(encode(message::Hello{kProtocolVersion, "raw"}).substr(0, 9));
        },
        [](Raw& raw) {
            raw.send(encode(message::Hello{kProtocolVersion, "raw"}).substr(9));
        },
        [](Raw& raw) { raw.expect<message::Welcome>(); },
        [](Raw& raw) { raw.send(encode(message::Ready{})); },
        [&](Raw& raw) { raw.send(open.substr(0, 20)); },
        [&](Raw& raw) { raw.send(open.substr(20, open.size() - 30)); },
        [&](Raw& raw) { raw.send(open.substr(open.size() - 10)); },
        [](Raw& raw) { raw.expect<message::Opened>(); },
        [](Raw& raw) { raw.send(encode(message::Withdraw{1})); },
    };
    for (std::size_t last = 0; last <= steps.size(); ++last) {
        CAPTURE(last);
        Child client([&](Line& line) {
            Raw raw(*instance);
            for (std::size_t i = 0; i < last; ++i) steps[i](raw);
            line.tell();
            line.hear();
        });
        client.line().hear();
        client.signal(SIGKILL);
        client.wait();
        CHECK(neighbour.served());
    }
    CHECK(eventually([&] {
        return broker.counted(Counter::clients_attached) == 1 && broker.counted(Counter::slots_in_use) == 0 &&
               broker.extents_free() == extents_at_start;
    }));
}

TEST_CASE("10,000 connections of which 2,000 attach are borne, and others are served meanwhile") {
    constexpr std::size_t kConnections = 10'000, kAttached = 2'000;
    rlimit limit{};
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &limit) == 0);
    const rlimit before = limit;
    // The broker's side: a connection each, and for the attached ones a wake socket and a pidfd.
    constexpr rlim_t needed = kConnections + 2 * kAttached + 200;
    if (limit.rlim_max < needed) {
        std::printf("SKIPPED: %lu descriptors are needed, the hard limit is %lu\n", static_cast<unsigned long>(needed),
                    static_cast<unsigned long>(limit.rlim_max));
        return;
    }
    const Sim sim;
    const ScratchInstance instance;
    Broker broker(*instance, sim.url());
    Neighbour neighbour(*instance);
    limit.rlim_cur = limit.rlim_max;
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &limit) == 0);
    {
        std::vector<std::unique_ptr<Raw>> connections;
        std::vector<Raw*> attached;
        for (std::size_t i = 0; i < kConnections; ++i) {
            connections.push_back(std::make_unique<Raw>(*instance));
            if (i % (kConnections / kAttached) == 0) {
                connections.back()->attach();
                connections.back()->descriptors.clear();
                attached.push_back(connections.back().get());
            }
            if (i % 1000 == 0) CHECK(neighbour.served());
        }
        CHECK(neighbour.served());
        CHECK(eventually([&] { return broker.counted(Counter::clients_attached) == kAttached + 1; }));
        for (std::size_t i = 0; i < attached.size(); i += 100) {
            attached[i]->send(encode(message::Notify{i}));
            CHECK(attached[i]->expect<message::Window>().id == i);
        }
        // The others are sent away when they have said nothing for long enough.
        std::size_t sent_away = 0;
        for (std::size_t i = 1; i < kConnections; i += 97) {
            if (i % (kConnections / kAttached) == 0) continue;
            const std::optional<message::Goodbye> goodbye = connections[i]->goodbye();
            REQUIRE(goodbye);
            CHECK(goodbye->code == GCOALESCE_TIMED_OUT);
            ++sent_away;
        }
        CHECK(sent_away > 0);
        CHECK(neighbour.served());
    }
    ::setrlimit(RLIMIT_NOFILE, &before);
    CHECK(eventually([&] { return broker.counted(Counter::clients_attached) == 1; }));
    CHECK(broker.counted(Counter::connections_accepted) == kConnections + 1);
    CHECK(neighbour.served());
}
