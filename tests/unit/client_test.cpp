#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <poll.h>
#include <regex>
#include <set>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <thread>

#include "client/subscription.hpp"
#include "gcoalesce/gcoalesce.hpp"
#include "tests/support/fake_broker.hpp"
#include "tests/support/fixtures.hpp"
#include "tests/support/process.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;
using namespace std::chrono_literals;

namespace {

constexpr const char* kModel = "gemini-2.5-flash";
constexpr auto kWatchdog = std::chrono::milliseconds(30s); // no measurement: one that hangs fails

gcoalesce_code attach(client::Attachment& attachment, const ScratchInstance& where,
                      std::chrono::milliseconds timeout = 0ms) {
    return attachment.attach({where->name, where->runtime_dir, "client_tests"}, timeout);
}

client::Attachment attached_to(const ScratchInstance& where) {
    client::Attachment attachment;
    const gcoalesce_code code = attach(attachment, where);
    INFO(client::message());
    REQUIRE(code == GCOALESCE_OK);
    return attachment;
}

std::string body_of(const std::string& prompt) {
    return R"({"contents":[{"parts":[{"text":")" + prompt + R"("}]}]})";
}

client::Subscription opened(client::Attachment& attachment, const std::string& prompt,
                            gcoalesce_sharing sharing = GCOALESCE_SHARE) {
    const std::string body = body_of(prompt);
    client::Subscription subscription;
    REQUIRE(attachment.open({kModel, body, true, sharing}, subscription) == GCOALESCE_OK);
    return subscription;
}

// The stream that answers a request which is not under way yet; the subscription reads it.
StreamRef started(FakeBroker& broker, client::Attachment& attachment, const std::string& prompt,
                  client::Subscription& subscription, gcoalesce_sharing sharing = GCOALESCE_SHARE) {
    const std::size_t before = broker.streams();
    subscription = opened(attachment, prompt, sharing);
    client::Event event;
    while (subscription.info().status == GCOALESCE_OPENING)
        REQUIRE(subscription.next(1ms, event) == GCOALESCE_TIMED_OUT);
    return broker.stream(before);
}

void publish(FakeBroker& broker, StreamRef stream, const std::string& event) {
    broker.with_store([&](Store& store) {
        // Called by any thread, and Catch's assertions belong to one.
        if (const Result<void> published = store.append(stream, event); !published)
            throw std::runtime_error(published.error().message);
    });
}

void finish(FakeBroker& broker, StreamRef stream, Nanos fresh_for = 0) {
    SlotEnding ending{};
    ending.kind = GCOALESCE_COMPLETE;
    ending.finish_reason.assign("STOP");
    ending.prompt_tokens = 3;
    ending.total_tokens = 7;
    broker.with_store([&](Store& store) { store.end(stream, ending, fresh_for); });
}

// The rest of the stream; the ending's code, or the code with which reading stopped, goes to `last`.
std::vector<std::string> read_all(client::Subscription& subscription, gcoalesce_code& last) {
    std::vector<std::string> events;
    client::Event event;
    while ((last = subscription.next(kWatchdog, event)) == GCOALESCE_OK) events.emplace_back(event.data);
    return events;
}

std::vector<std::string> read_all(client::Subscription& subscription) {
    gcoalesce_code last = GCOALESCE_OK;
    std::vector<std::string> events = read_all(subscription, last);
    CHECK(last == GCOALESCE_END);
    return events;
}

// Pins of all lanes on the stream; the slot is closed to joiners by asking.
std::uint64_t pins(FakeBroker& broker, StreamRef stream) {
    return broker.with_store([&](Store& store) { return store.close_to_joiners(stream); });
}

bool readable(int fd, std::chrono::milliseconds timeout = 0ms) {
    pollfd poll{fd, POLLIN, 0};
    return ::poll(&poll, 1, static_cast<int>(timeout.count())) == 1;
}

// The segment behind the broker's back, for what no broker would write.
struct WritableSegment {
    explicit WritableSegment(const ScratchInstance& where) {
        const UniqueFd fd(::open(("/dev/shm" + where.segment_name()).c_str(), O_RDWR | O_CLOEXEC));
        struct stat file {};
        REQUIRE(::fstat(fd.get(), &file) == 0);
        mapping = *Mapping::of(fd.get(), static_cast<std::size_t>(file.st_size), true);
        view = *SegmentView::check(mapping.data(), mapping.bytes());
    }
    Mapping mapping;
    SegmentView view;
};

// Runs in a forked child; true if it returned true there.
template <class Call>
bool in_child(Call call) {
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        ::alarm(30);
        ::_exit(call() ? 0 : 1);
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

} // namespace

// ---- attaching -----------------------------------------------------------------------------------------------------

TEST_CASE("without a broker attaching says absent, and how to start one") {
    const ScratchInstance where;
    client::Attachment attachment;
    CHECK(attach(attachment, where) == GCOALESCE_ABSENT);
    CHECK_THAT(client::message(), Catch::Contains("gcoalesced"));
    CHECK_FALSE(attachment);
}

TEST_CASE("attaching waits for a broker that is not there yet") {
    const ScratchInstance where;
    std::atomic<bool> trying{false};
    std::optional<FakeBroker> broker;
    std::thread starter([&] {
        while (!trying) std::this_thread::yield();
        broker.emplace(*where);
    });
    client::Attachment attachment;
    trying = true;
    CHECK(attach(attachment, where, kWatchdog) == GCOALESCE_OK);
    starter.join();
}

TEST_CASE("a broker that does not answer is unresponsive") {
    const ScratchInstance where;
    FakeBrokerOptions options;
    options.mute_connections = ~std::uint64_t{0};
    const FakeBroker broker(*where, options);
    client::Attachment attachment;
    const auto timeout = GENERATE(0ms, 50ms, 1500ms); // the last one is longer than a try
    const auto before = std::chrono::steady_clock::now();
    CHECK(attach(attachment, where, timeout) == GCOALESCE_UNRESPONSIVE);
    CHECK(std::chrono::steady_clock::now() - before >= timeout);
    CHECK_THAT(client::message(), Catch::Contains("does not answer"));
}

TEST_CASE("a broker that does not answer is tried again within the timeout, each time for longer") {
    const ScratchInstance where;
    FakeBrokerOptions options;
    SECTION("it never answers those who came at first") {
        options.mute_connections = 1;
        const FakeBroker broker(*where, options);
        client::Attachment attachment;
        CHECK(attach(attachment, where, kWatchdog) == GCOALESCE_OK);
    }
    SECTION("it always takes longer than the first try waits") {
        options.welcome_after = 1200 * kMillisecond;
        const FakeBroker broker(*where, options);
        client::Attachment attachment;
        CHECK(attach(attachment, where, kWatchdog) == GCOALESCE_OK);
    }
}

TEST_CASE("a broker that lives, but whose socket was removed, is told from one that is absent") {
    const ScratchInstance where;
    const FakeBroker broker(*where);
    std::filesystem::remove(where->socket_path());
    client::Attachment attachment;
    CHECK(attach(attachment, where) == GCOALESCE_UNRESPONSIVE);
    CHECK_THAT(client::message(), Catch::Contains("was the socket removed?"));
}

TEST_CASE("a broker that was killed is dead, by proof") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    broker.die();
    client::Attachment attachment;
    CHECK(attach(attachment, where) == GCOALESCE_BROKER_DEAD);
    CHECK_THAT(client::message(), Catch::Contains("died"));
}

TEST_CASE("what the welcome brings is checked before it is used") {
    struct Row {
        const char* name;
        void (*change)(FakeBrokerOptions&);
        gcoalesce_code code;
        const char* says;
    };
    const Row row = GENERATE(values<Row>({
        {"another protocol", [](FakeBrokerOptions& o) { o.protocol = 7; }, GCOALESCE_WRONG_VERSION,
         "control protocol 7, this program 1"},
        {"a lane too short", [](FakeBrokerOptions& o) { o.lane_missing_bytes = 16; }, GCOALESCE_FOREIGN, "lane"},
        {"a lane that could be cut", [](FakeBrokerOptions& o) { o.lane_sealed = false; }, GCOALESCE_FOREIGN, "sealed"},
        {"too few descriptors", [](FakeBrokerOptions& o) { o.welcome_descriptors = 2; }, GCOALESCE_FOREIGN,
         "2 descriptors"},
        {"no descriptors", [](FakeBrokerOptions& o) { o.welcome_descriptors = 0; }, GCOALESCE_FOREIGN, "0 descriptors"},
        {"too many descriptors", [](FakeBrokerOptions& o) { o.welcome_descriptors = 9; }, GCOALESCE_FOREIGN,
         "descriptors"},
        {"a goodbye",
         [](FakeBrokerOptions& o) {
             o.goodbye_for_hello = message::Goodbye{GCOALESCE_NO_PERMISSION, "not you"};
         },
         GCOALESCE_NO_PERMISSION, "not you"},
    }));
    DYNAMIC_SECTION(row.name) {
        const ScratchInstance where;
        FakeBrokerOptions options;
        row.change(options);
        const FakeBroker broker(*where, options);
        const auto descriptors = [] {
            return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                                 std::filesystem::directory_iterator());
        };
        const auto before = descriptors();
        client::Attachment attachment;
        CHECK(attach(attachment, where) == row.code);
        CHECK_THAT(client::message(), Catch::Contains(row.says));
        broker.wait_until([&] { return broker.connections() == 0; });
        CHECK(descriptors() <= before); // strays were closed
    }
}

namespace {

// A segment's file with any contents, under the instance's name.
class ForgedSegment {
  public:
    ForgedSegment(const ScratchInstance& where, std::string_view bytes, bool locked = false, mode_t mode = 0640)
        : path_("/dev/shm" + where.segment_name()) {
        const UniqueFd lock_file(::open(where->lock_path().c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0640));
        ::unlink(path_.c_str());
        fd_ = UniqueFd(::open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
        REQUIRE(fd_);
        REQUIRE(::fchmod(fd_.get(), mode) == 0);
        REQUIRE(::write(fd_.get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
        if (locked) REQUIRE(take_broker_lock(fd_.get()));
    }

  private:
    std::string path_;
    UniqueFd fd_;
};

// The bytes of a sound segment that says "serving" and whose heart beats.
std::string sound_segment() {
    const std::size_t bytes = Store::table_bytes(16) + (1 << 20);
    const UniqueFd memory(::memfd_create("gcoalesce-test", MFD_CLOEXEC));
    REQUIRE(::ftruncate(memory.get(), static_cast<off_t>(bytes)) == 0);
    Mapping mapping = *Mapping::of(memory.get(), bytes, true);
    StoreOptions options;
    options.slots = 16;
    const auto store = *Store::create(mapping, options, {TemplateSettings{}}, system_clock());
    store->set_ready();
    return std::string(reinterpret_cast<const char*>(mapping.data()), bytes);
}

template <class T>
void set(std::string& bytes, std::size_t offset, T value) {
    std::memcpy(bytes.data() + offset, &value, sizeof value);
}

} // namespace

TEST_CASE("T24: each kind of bad segment gets its own answer, and the version is told before anything else") {
    struct Row {
        const char* name;
        void (*forge)(std::string&);
        bool locked;
        gcoalesce_code code;
        const char* says;
    };
    const Row row = GENERATE(values<Row>({
        {"empty, and somebody works on it", [](std::string& s) { s.clear(); }, true, GCOALESCE_STARTING, "starting"},
        {"empty, and nobody works on it", [](std::string& s) { s.clear(); }, false, GCOALESCE_BROKER_DEAD,
         "died before it was ready"},
        {"shorter than a prefix", [](std::string& s) { s.resize(39); }, false, GCOALESCE_TOO_SHORT, "39 bytes"},
        {"cut after the header", [](std::string& s) { s.resize(4096); }, true, GCOALESCE_TOO_SHORT, "claims"},
        {"another magic", [](std::string& s) { set(s, 0, std::uint64_t{1}); }, true, GCOALESCE_FOREIGN, "no segment"},
        {"garbage", [](std::string& s) { std::fill(s.begin(), s.end(), '\xA5'); }, true, GCOALESCE_FOREIGN,
         "no segment"},
        {"a future major that claims more bytes than there are",
         [](std::string& s) {
             set(s, 8, std::uint32_t{9});
             set(s, 16, std::uint64_t{1} << 40);
             set(s, 24, std::uint64_t{0});
         },
         true, GCOALESCE_WRONG_VERSION, "layout 9.0, this program reads layout 1.x"},
        {"another fingerprint", [](std::string& s) { set(s, 24, std::uint64_t{0xABCD}); }, true,
         GCOALESCE_WRONG_VERSION, "000000000000abcd"},
        {"never ready, and somebody works on it", [](std::string& s) { set(s, 32, std::uint32_t{0}); }, true,
         GCOALESCE_STARTING, "starting"},
        {"never ready, and nobody works on it", [](std::string& s) { set(s, 32, std::uint32_t{0}); }, false,
         GCOALESCE_BROKER_DEAD, "died before it was ready"},
        {"a table beyond its end",
         [](std::string& s) { set(s, offsetof(Header, slots) + 8, std::uint64_t{kMaxSlots}); }, true, GCOALESCE_FOREIGN,
         "damaged"},
        {"closed",
         [](std::string& s) { set(s, offsetof(Header, state), static_cast<std::uint32_t>(BrokerState::closed)); },
         false, GCOALESCE_CLOSED, "has shut down"},
        {"draining",
         [](std::string& s) { set(s, offsetof(Header, state), static_cast<std::uint32_t>(BrokerState::draining)); },
         true, GCOALESCE_DRAINING, "shutting down"},
        {"serving, and nobody holds the lock", [](std::string&) {}, false, GCOALESCE_BROKER_DEAD, "died"},
        {"its heart stopped",
         [](std::string& s) { set(s, offsetof(Header, heartbeat_ns), system_clock().monotonic() - 5 * kSecond); }, true,
         GCOALESCE_UNRESPONSIVE, "has not beaten"},
    }));
    DYNAMIC_SECTION(row.name) {
        const ScratchInstance where;
        std::string bytes = sound_segment();
        row.forge(bytes);
        const ForgedSegment forged(where, bytes, row.locked);
        client::Attachment attachment;
        CHECK(attach(attachment, where) == row.code);
        CHECK_THAT(client::message(), Catch::Contains(row.says));
    }
}

TEST_CASE("a segment that anybody could have made is foreign") {
    const ScratchInstance where;
    const std::string path = "/dev/shm" + where.segment_name();
    client::Attachment attachment;
    SECTION("another mode") {
        const ForgedSegment forged(where, sound_segment(), true, 0666);
        CHECK(attach(attachment, where) == GCOALESCE_FOREIGN);
        CHECK_THAT(client::message(), Catch::Contains("mode 666, expected 640"));
    }
    SECTION("a second link") {
        const ForgedSegment forged(where, sound_segment(), true);
        REQUIRE(::link(path.c_str(), (path + "-link").c_str()) == 0);
        CHECK(attach(attachment, where) == GCOALESCE_FOREIGN);
        ::unlink((path + "-link").c_str());
        CHECK_THAT(client::message(), Catch::Contains("links"));
    }
    SECTION("a symbolic link") {
        const ForgedSegment forged(where, "");
        ::unlink(path.c_str());
        REQUIRE(::symlink("/dev/null", path.c_str()) == 0);
        CHECK(attach(attachment, where) == GCOALESCE_FOREIGN);
    }
}

TEST_CASE("whose segment is trusted: the listener's, and where root listens the owner's of the runtime directory") {
    if (::geteuid() != 0) {
        WARN("skipped: only root can give files away");
        return;
    }
    constexpr uid_t kBroker = 4242, kOther = 4243;
    struct Row {
        const char* what;
        uid_t listener, segment, directory;
        gcoalesce_code code;
    };
    const Row row = GENERATE(values<Row>({
        {"a broker by itself", 0, 0, 0, GCOALESCE_OK},
        {"a broker that runs as its own user", kBroker, kBroker, kBroker, GCOALESCE_OK},
        {"a service manager's socket, not yet the broker's own", 0, kBroker, kBroker, GCOALESCE_OK},
        {"root's socket, and a segment of somebody else than the directory", 0, kBroker, kOther, GCOALESCE_FOREIGN},
        {"root's socket and directory, somebody's segment", 0, kBroker, 0, GCOALESCE_FOREIGN},
        {"a user's socket, and a segment of the directory's owner", kBroker, kOther, kOther, GCOALESCE_FOREIGN},
    }));
    INFO(row.what);
    const ScratchInstance where;
    REQUIRE(::chown(where->runtime_dir.c_str(), row.listener, 0) == 0);
    // The kernel tells clients who called listen().
    REQUIRE(::seteuid(row.listener) == 0);
    const FakeBroker broker(*where);
    REQUIRE(::seteuid(0) == 0);
    REQUIRE(::chown(("/dev/shm" + where.segment_name()).c_str(), row.segment, 0) == 0);
    REQUIRE(::chown(where->runtime_dir.c_str(), row.directory, 0) == 0);

    client::Attachment attachment;
    CHECK(attach(attachment, where) == row.code);
    if (row.code != GCOALESCE_OK) CHECK_THAT(client::message(), Catch::Contains("belongs to uid"));
}

TEST_CASE("16b: who may not connect is told so, not that there is no broker") {
    const ScratchInstance where;
    const FakeBroker broker(*where);
    const auto refused = [&] {
        client::Attachment attachment;
        return attach(attachment, where) == GCOALESCE_NO_PERMISSION &&
               std::strstr(client::message(), "be a member of the broker's group") != nullptr;
    };
    REQUIRE(::chmod(where->runtime_dir.c_str(), 0755) == 0);
    REQUIRE(::chmod(where->socket_path().c_str(), 0) == 0);
    if (::geteuid() != 0)
        CHECK(refused());
    else // the kernel refuses root nothing
        CHECK(in_child([&] { return ::setresuid(65534, 65534, 65534) == 0 && refused(); }));
}

namespace {

// A listener that never accepts by itself, with the smallest queue there is.
UniqueFd raw_listener(const ScratchInstance& where, sockaddr_un& address) {
    UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    address.sun_family = AF_UNIX;
    const std::string path = where->socket_path();
    REQUIRE(path.size() < sizeof address.sun_path);
    std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
    REQUIRE(::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
    REQUIRE(::listen(fd.get(), 0) == 0);
    return fd;
}

} // namespace

TEST_CASE("a broker whose queue of connections stays full is unresponsive") {
    const ScratchInstance where;
    sockaddr_un address{};
    const UniqueFd listener = raw_listener(where, address);
    std::vector<UniqueFd> queue;
    do {
        queue.emplace_back(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    } while (::connect(queue.back().get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
    client::Attachment attachment;
    CHECK(attach(attachment, where, 50ms) == GCOALESCE_UNRESPONSIVE);
}

TEST_CASE("something else that listens at the socket is foreign, and something that hangs up is told from a broker") {
    const ScratchInstance where;
    sockaddr_un address{};
    const UniqueFd listener = raw_listener(where, address);
    const std::string answer = GENERATE(as<std::string>(), "HTTP/1.1 400 Bad Request\r\n\r\n", encode(message::Ready{}),
                                        encode(message::Goodbye{GCOALESCE_DRAINING, "no"}), "");
    std::thread server([&] {
        const UniqueFd socket(::accept(listener.get(), nullptr, nullptr));
        char hello[256];
        (void)!::recv(socket.get(), hello, sizeof hello, 0);
        (void)!::send(socket.get(), answer.data(), answer.size(), MSG_NOSIGNAL);
    });
    client::Attachment attachment;
    const gcoalesce_code code = attach(attachment, where);
    server.join();
    if (answer.empty())
        CHECK(code == GCOALESCE_ABSENT); // no segment either
    else if (answer.find("goodbye") != std::string::npos)
        CHECK(code == GCOALESCE_DRAINING);
    else
        CHECK(code == GCOALESCE_FOREIGN);
}

TEST_CASE("a runtime directory too long for a socket is refused with its reason") {
    client::Attachment attachment;
    CHECK(attachment.attach({"test", "/tmp/" + std::string(120, 'x'), ""}, 0ms) == GCOALESCE_BAD_REQUEST);
    CHECK_THAT(client::message(), Catch::Contains("too long"));
}

// ---- opening -------------------------------------------------------------------------------------------------------

TEST_CASE("a request is opened, its events are read in order, and its ending is told") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    client::Attachment attachment = attached_to(where);
    client::Subscription subscription;
    const StreamRef stream = started(broker, attachment, "hello", subscription);
    CHECK(subscription.info().status == GCOALESCE_STARTED);
    CHECK(subscription.info().stream_id != 0);
    CHECK_FALSE(subscription.ending());
    publish(broker, stream, R"({"n":1})");
    publish(broker, stream, R"({"n":2})");
    client::Event event;
    REQUIRE(subscription.next(kWatchdog, event) == GCOALESCE_OK);
    CHECK(event.number == 1);
    CHECK(event.data == R"({"n":1})");
    finish(broker, stream);
    CHECK(read_all(subscription) == std::vector<std::string>{R"({"n":2})"});

    const std::optional<gcoalesce_ending> ending = subscription.ending();
    REQUIRE(ending);
    CHECK(ending->kind == GCOALESCE_COMPLETE);
    CHECK(ending->code == GCOALESCE_OK);
    CHECK(ending->events == 2);
    CHECK(ending->event_bytes == 14);
    CHECK(ending->prompt_tokens == 3);
    CHECK(ending->total_tokens == 7);
    CHECK(std::string(ending->finish_reason) == "STOP");
    CHECK(subscription.next(0ms, event) == GCOALESCE_END); // and again

    CHECK(pins(broker, stream) == 1); // spans stay good until the close
    subscription.close();
    CHECK(pins(broker, stream) == 0);
}

TEST_CASE("a request for a running stream joins it without asking the broker, and reads it from the first byte") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    client::Attachment attachment = attached_to(where);
    client::Subscription first;
    const StreamRef stream = started(broker, attachment, "hello", first);
    publish(broker, stream, "1");
    client::Subscription second = opened(attachment, "hello");
    CHECK(second.info().status == GCOALESCE_JOINED);
    CHECK(second.info().stream_id == first.info().stream_id);
    CHECK(std::memcmp(second.info().key, first.info().key, sizeof(gcoalesce_info::key)) == 0);
    client::Attachment other_process = attached_to(where);
    client::Subscription third = opened(other_process, "hello");
    CHECK(third.info().status == GCOALESCE_JOINED);
    CHECK(broker.opens() == 1);
    publish(broker, stream, "2");
    finish(broker, stream);
    for (client::Subscription* reader : {&first, &second, &third})
        CHECK(read_all(*reader) == std::vector<std::string>{"1", "2"});
    CHECK(pins(broker, stream) == 3);
    first.close();
    second.close();
    third.close();
    CHECK(pins(broker, stream) == 0);
    broker.with_store([&](Store& store) {
        store.sweep();
        CHECK(store.counted(Counter::requests_joined) == 2);
    });
}

TEST_CASE("two spellings of one request join, and requests that differ do not") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    client::Attachment attachment = attached_to(where);
    client::Subscription first;
    started(broker, attachment, "hello", first);
    client::Subscription other;
    const std::string spelled = R"({ "contents" : [ { "role":"user", "parts":[ {"text":"h\u0065llo"} ] } ] })";
    REQUIRE(attachment.open({std::string("models/") + kModel, spelled}, other) == GCOALESCE_OK);
    CHECK(other.info().status == GCOALESCE_JOINED);
    const std::string body = body_of("hello");
    REQUIRE(attachment.open({kModel, body, false}, other) == GCOALESCE_OK); // not streamed
    CHECK(other.info().status == GCOALESCE_OPENING);
    REQUIRE(attachment.open({"gemini-2.5-pro", body}, other) == GCOALESCE_OK);
    CHECK(other.info().status == GCOALESCE_OPENING);
    const std::string close = body_of("hellp");
    REQUIRE(attachment.open({kModel, close}, other) == GCOALESCE_OK);
    CHECK(other.info().status == GCOALESCE_OPENING);
}

TEST_CASE("a complete answer is joined while it is fresh, and asked for anew after that") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    client::Attachment attachment = attached_to(where);
    client::Subscription first;
    const StreamRef stream = started(broker, attachment, "hello", first);
    publish(broker, stream, "1");
    finish(broker, stream, 3600 * kSecond);
    client::Subscription fresh = opened(attachment, "hello");
    CHECK(fresh.info().status == GCOALESCE_FRESH);
    CHECK(read_all(fresh) == std::vector<std::string>{"1"});
    CHECK(broker.opens() == 1);

    client::Subscription second;
    const StreamRef stale = started(broker, attachment, "other", second);
    finish(broker, stale, 1); // a nanosecond
    client::Subscription anew = opened(attachment, "other");
    CHECK(anew.info().status == GCOALESCE_OPENING);
    broker.wait_until([&] { return broker.streams() == 3; });
}

TEST_CASE("nothing is joined on the fast path that is closed, spoiled, or not for sharing") {
    const ScratchInstance where;
    FakeBrokerOptions options;
    const bool allowed = GENERATE(true, false);
    options.settings.subscribers = allowed ? 0 : 100;
    FakeBroker broker(*where, options);
    client::Attachment attachment = attached_to(where);
    client::Subscription first;
    const StreamRef stream = started(broker, attachment, "hello", first);
    broker.hold();
    if (!allowed) { // the template has rules that only the broker can apply
        CHECK(opened(attachment, "hello").info().status == GCOALESCE_OPENING);
        return;
    }
    CHECK(opened(attachment, "hello").info().status == GCOALESCE_JOINED);
    CHECK(opened(attachment, "hello", GCOALESCE_SHARE_NOT).info().status == GCOALESCE_OPENING);
    CHECK(opened(attachment, "hello", GCOALESCE_SHARE_REFRESH).info().status == GCOALESCE_OPENING);

    SECTION("closed to joiners, index entry or not") {
        broker.with_store([&](Store& store) { store.close_to_joiners(stream); });
        CHECK(opened(attachment, "hello").info().status == GCOALESCE_OPENING);
    }
    const WritableSegment segment(where);
    SECTION("a template of another revision") {
        TemplatePolicy policy = segment.view.template_entry(0).policy.load();
        ++policy.revision;
        const_cast<TemplateEntry&>(segment.view.template_entry(0)).policy.store(policy);
        CHECK(opened(attachment, "hello").info().status == GCOALESCE_OPENING);
    }
    SECTION("a slot with another key behind the same fingerprint") {
        auto& slot = const_cast<Slot&>(segment.view.slot(stream.slot));
        Key key = slot.key.load();
        key[31] ^= 1;
        slot.key.store(key);
        CHECK(opened(attachment, "hello").info().status == GCOALESCE_OPENING);
    }
    CHECK(pins(broker, stream) == 1); // undone: the first subscription's alone is left
}

TEST_CASE("a wrong request is refused at once, and the sentence does not repeat it") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    client::Attachment attachment = attached_to(where);
    client::Subscription subscription;
    CHECK(attachment.open({kModel, "{\"secret\":1,\"secret\":2}"}, subscription) == GCOALESCE_BAD_REQUEST);
    CHECK(attachment.open({kModel, "[]"}, subscription) == GCOALESCE_BAD_REQUEST);
    CHECK(attachment.open({kModel, std::string_view("", 0)}, subscription) == GCOALESCE_BAD_REQUEST);
    CHECK(attachment.open({"", "{}"}, subscription) == GCOALESCE_BAD_REQUEST);
    CHECK(attachment.open({"a/../b", "{}"}, subscription) == GCOALESCE_BAD_REQUEST);
    CHECK(attachment.open({kModel, "{}", true, static_cast<gcoalesce_sharing>(3)}, subscription) ==
          GCOALESCE_BAD_REQUEST);
    CHECK_FALSE(subscription);
    CHECK(broker.opens() == 0);

    gcoalesce_request request{};
    request.size = sizeof request - 1;
    request.model = kModel;
    request.body = "{}";
    request.body_bytes = 2;
    gcoalesce_subscription* out = nullptr;
    CHECK(gcoalesce_open(attachment.get(), &request, &out) == GCOALESCE_BAD_REQUEST);
    request.size = sizeof request;
    request.body_bytes = 33 << 20;
    CHECK(gcoalesce_open(attachment.get(), &request, &out) == GCOALESCE_BAD_REQUEST);
    CHECK(gcoalesce_open(nullptr, &request, &out) == GCOALESCE_BAD_REQUEST);
    CHECK(out == nullptr);
}

TEST_CASE("a refused opening answers its code for ever, and tells the delay") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    broker.hold();
    client::Attachment attachment = attached_to(where);
    client::Subscription subscription = opened(attachment, "hello");
    client::Event event;
    CHECK(subscription.next(0ms, event) == GCOALESCE_TIMED_OUT);
    broker.refuse(broker.wait_for_held(1)[0], GCOALESCE_BUSY, "too many", 1500);
    for (int i = 0; i < 2; ++i) {
        CHECK(subscription.next(kWatchdog, event) == GCOALESCE_BUSY);
        CHECK(std::string(client::message()) == "too many");
    }
    const std::optional<gcoalesce_ending> ending = subscription.ending();
    REQUIRE(ending);
    CHECK(ending->kind == GCOALESCE_FAILED);
    CHECK(ending->code == GCOALESCE_BUSY);
    CHECK(ending->retry_ms == 1500);
}

TEST_CASE("closing takes back an opening under way, however its answer comes") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    broker.hold();
    client::Attachment attachment = attached_to(where);
    client::Subscription subscription = opened(attachment, "hello");
    const FakeBroker::Call call = broker.wait_for_held(1)[0];
    std::optional<StreamRef> stream;
    const int answer = GENERATE(0, 1, 2, 3);
    if (answer == 0) { // the answer comes before the close, and nobody has looked at it
        stream = broker.answer(call);
        subscription.close();
    } else if (answer == 1) { // it crosses the withdrawal
        subscription.close();
        broker.wait_until([&] { return broker.withdraws() == 1; });
        stream = broker.answer(call);
    } else if (answer == 2) {
        subscription.close();
        broker.wait_until([&] { return broker.withdraws() == 1; });
        broker.answer_withdrawn(call);
    } else {
        subscription.close();
        broker.refuse(call, GCOALESCE_BUSY, "too many");
    }
    // The connection is in order: another request is served over it, and its waiting takes the answer to the first.
    broker.serve();
    client::Subscription next;
    const StreamRef other = started(broker, attachment, "another", next);
    publish(broker, other, "1");
    finish(broker, other);
    CHECK(read_all(next) == std::vector<std::string>{"1"});
    if (stream) CHECK(pins(broker, *stream) == 0);
    CHECK(broker.attaches() == 1);
}

TEST_CASE("detaching takes back the pins that came for nobody") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    broker.hold();
    client::Attachment attachment = attached_to(where);
    client::Subscription subscription = opened(attachment, "hello");
    const FakeBroker::Call call = broker.wait_for_held(1)[0];
    subscription.close();
    broker.wait_until([&] { return broker.withdraws() == 1; });
    const StreamRef stream = broker.answer(call);
    REQUIRE(pins(broker, stream) == 1);
    attachment.detach();
    CHECK(pins(broker, stream) == 0);
}

TEST_CASE("a subscription outlives its attachment for closing") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    client::Attachment attachment = attached_to(where);
    client::Subscription reading;
    const StreamRef stream = started(broker, attachment, "hello", reading);
    broker.hold();
    client::Subscription opening = opened(attachment, "other");
    attachment.detach();
    opening.close();
    CHECK(pins(broker, stream) == 1);
    reading.close();
    CHECK(pins(broker, stream) == 0);
}

TEST_CASE("a large body does not make opening wait, and reaches the broker whole while somebody reads") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    client::Attachment attachment = attached_to(where);
    client::Subscription reader;
    const StreamRef stream = started(broker, attachment, "a stream to sleep on", reader);
    broker.hold();
    const std::string body = body_of(std::string(2 * 1024 * 1024, 'x'));
    client::Subscription large;
    // The broker's thread stands still meanwhile: no socket takes 2 MiB, so a blocking send would hang here.
    broker.with_store([&](Store&) { REQUIRE(attachment.open({kModel, body}, large) == GCOALESCE_OK); });
    // Nobody waits for the large one: the reader of another stream looks after it.
    std::atomic<bool> arrived{false};
    std::thread sleeper([&] {
        client::Event event;
        while (!arrived && reader.next(50ms, event) == GCOALESCE_TIMED_OUT) {
        }
    });
    const std::deque<FakeBroker::Call> calls = broker.wait_for_held(1);
    arrived = true;
    sleeper.join();
    CHECK((calls[0].body == body));
    (void)stream;
}

TEST_CASE("a body too large to be made canonical by its caller joins once the broker has told its key") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    client::Attachment attachment = attached_to(where);
    const std::string prompt(300 * 1024, 'x');
    client::Subscription first;
    started(broker, attachment, prompt, first);
    client::Subscription second = opened(attachment, prompt);
    CHECK(second.info().status == GCOALESCE_JOINED);
    CHECK(broker.opens() == 1);
}

// ---- reading -------------------------------------------------------------------------------------------------------

TEST_CASE("a read waits no longer than it may, and loses nothing by that") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    client::Attachment attachment = attached_to(where);
    client::Subscription subscription;
    const StreamRef stream = started(broker, attachment, "hello", subscription);
    client::Event event;
    const auto before = std::chrono::steady_clock::now();
    CHECK(subscription.next(300ms, event) == GCOALESCE_TIMED_OUT);
    CHECK(std::chrono::steady_clock::now() - before >= 300ms);
    CHECK(subscription.next(0ms, event) == GCOALESCE_TIMED_OUT);
    CHECK_THAT(client::message(), Catch::Contains("no event"));
    CHECK(gcoalesce_next(subscription.get(), -1, nullptr) == GCOALESCE_BAD_REQUEST);
    publish(broker, stream, "1");
    CHECK(subscription.next(0ms, event) == GCOALESCE_OK);
    CHECK(event.data == "1");
}

TEST_CASE("T50: readers that join at any time while events are published read each one once, in order") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    client::Attachment attachment = attached_to(where);
    client::Subscription first;
    const StreamRef stream = started(broker, attachment, "hello", first);
    constexpr int kEvents = 300;
    std::vector<std::string> expected;
    for (int i = 0; i < kEvents; ++i)
        expected.push_back(std::to_string(i) + std::string(static_cast<std::size_t>(i * 7 % 500), 'x'));
    std::vector<std::vector<std::string>> seen(8);
    std::vector<gcoalesce_code> codes(seen.size());
    std::vector<std::thread> readers;
    for (std::size_t r = 0; r < seen.size(); ++r)
        readers.emplace_back([&, r] {
            client::Attachment own;
            if (r % 2 == 1 && attach(own, where) != GCOALESCE_OK) return;
            const std::string body = body_of("hello");
            client::Subscription subscription;
            if ((r % 2 == 1 ? own : attachment).open({kModel, body}, subscription) != GCOALESCE_OK) return;
            seen[r] = read_all(subscription, codes[r]);
        });
    for (const std::string& event : expected) publish(broker, stream, event);
    // Joiners that come too late would start another stream; they are in before the end.
    broker.wait_until([&] {
        return broker.with_store([&](Store& store) {
            store.sweep();
            return store.view().slot(stream.slot).subscribers.load() == readers.size() + 1;
        });
    });
    finish(broker, stream);
    for (std::thread& reader : readers) reader.join();
    for (std::size_t r = 0; r < seen.size(); ++r) {
        CHECK(codes[r] == GCOALESCE_END);
        CHECK((seen[r] == expected));
    }
    CHECK((read_all(first) == expected));
}

TEST_CASE("T53: an ending whose wake-up is missed is seen all the same") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    client::Attachment attachment = attached_to(where);
    client::Subscription subscription;
    const StreamRef stream = started(broker, attachment, "hello", subscription);
    // Straight into the segment, without a wake: as a reader would see it that was not on the CPU when the wake came.
    const WritableSegment segment(where);
    std::atomic<bool> reading{false};
    gcoalesce_code code = GCOALESCE_OK;
    std::thread reader([&] {
        client::Event event;
        reading = true;
        code = subscription.next(kWatchdog, event);
    });
    while (!reading) std::this_thread::yield();
    const_cast<Slot&>(segment.view.slot(stream.slot)).state.store(static_cast<std::uint32_t>(SlotState::ended));
    reader.join();
    CHECK(code == GCOALESCE_END);
}

TEST_CASE("a span is read where it stands, and is invalid once the stream was evicted") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    client::Attachment attachment = attached_to(where);
    client::Subscription subscription;
    const StreamRef stream = started(broker, attachment, "hello", subscription);
    publish(broker, stream, "one");
    publish(broker, stream, "two");
    finish(broker, stream);
    client::Event event;
    REQUIRE(subscription.next_span(0ms, event) == GCOALESCE_OK);
    CHECK(event.data == "one");
    CHECK(subscription.valid());
    broker.with_store([&](Store& store) { store.evict(stream); });
    CHECK_FALSE(subscription.valid());
    for (int i = 0; i < 2; ++i) CHECK(subscription.next_span(0ms, event) == GCOALESCE_EVICTED);
    CHECK_FALSE(subscription.ending());
    CHECK(pins(broker, stream) == 1);
    subscription.close();
    CHECK(pins(broker, stream) == 0);
}

TEST_CASE(
    "a client whose pins were taken back reads on, loses what is recycled, and attaches anew for the next request") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    client::Attachment attachment = attached_to(where);
    client::Subscription kept, lost;
    const StreamRef keeps = started(broker, attachment, "kept", kept);
    const StreamRef loses = started(broker, attachment, "lost", lost);
    publish(broker, keeps, "1");
    publish(broker, loses, "1");
    client::Event event;
    REQUIRE(lost.next(0ms, event) == GCOALESCE_OK);
    finish(broker, keeps);
    finish(broker, loses);
    broker.revoke_lanes();
    broker.with_store([&](Store& store) {
        CHECK(store.close_to_joiners(loses) == 0);
        CHECK(store.retire(loses));
    });
    CHECK(lost.next(0ms, event) == GCOALESCE_EVICTED);
    CHECK(read_all(kept) == std::vector<std::string>{"1"});

    client::Subscription next;
    const StreamRef stream = started(broker, attachment, "next", next);
    CHECK(broker.attaches() == 2);
    CHECK(pins(broker, stream) == 1);
}

// ---- event loops ---------------------------------------------------------------------------------------------------

TEST_CASE("one descriptor tells a thousand subscriptions of every event, with one wake-up each") {
    const ScratchInstance where;
    FakeBrokerOptions options;
    options.slots = 64;
    FakeBroker broker(*where, options);
    client::Attachment attachment = attached_to(where);
    const int fd = attachment.fd();
    REQUIRE(fd >= 0);
    constexpr std::size_t kReaders = 1000;
    constexpr int kEvents = 50;
    std::vector<client::Subscription> readers(kReaders);
    const StreamRef stream = started(broker, attachment, "hello", readers[0]);
    for (std::size_t i = 1; i < kReaders; ++i) readers[i] = opened(attachment, "hello");
    std::thread producer([&] {
        for (int i = 0; i < kEvents; ++i) publish(broker, stream, std::to_string(i));
        finish(broker, stream);
    });
    std::vector<int> seen(kReaders);
    std::size_t ended = 0;
    bool in_order = true;
    std::size_t rounds = 0;
    while (ended < kReaders && readable(fd, kWatchdog)) {
        REQUIRE(attachment.dispatch() == GCOALESCE_OK);
        ++rounds;
        for (std::size_t i = 0; i < kReaders; ++i) {
            if (seen[i] < 0) continue;
            client::Event event;
            gcoalesce_code code = GCOALESCE_OK;
            while ((code = readers[i].next(0ms, event)) == GCOALESCE_OK)
                in_order = in_order && event.data == std::to_string(seen[i]++);
            if (code != GCOALESCE_TIMED_OUT) {
                in_order = in_order && code == GCOALESCE_END && seen[i] == kEvents;
                seen[i] = -1;
                ++ended;
            }
        }
    }
    producer.join();
    CHECK(ended == kReaders);
    CHECK(in_order);
    broker.with_store([&](Store& store) {
        CHECK(store.counted(Counter::wakes_socket) <= kEvents + 1);
        CHECK(store.counted(Counter::wakes_socket_failed) == 0);
    });
}

TEST_CASE("the descriptor tells of what no broker will tell: events that were there, an answer another thread took") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    client::Attachment attachment = attached_to(where);
    const int fd = attachment.fd();
    const auto quiet = [&] { // no subscription, so that no timer either
        while (readable(fd)) REQUIRE(attachment.dispatch() == GCOALESCE_OK);
    };
    client::Event event;
    SECTION("a stream that was joined with all its events in it") {
        client::Attachment other = attached_to(where);
        client::Subscription starter;
        const StreamRef stream = started(broker, other, "hello", starter);
        publish(broker, stream, "1");
        finish(broker, stream, 3600 * kSecond);
        quiet();
        client::Subscription joined = opened(attachment, "hello");
        CHECK(joined.info().status == GCOALESCE_FRESH);
        CHECK(readable(fd, kWatchdog));
    }
    SECTION("an opening whose answer a blocking reader took off the socket") {
        broker.hold();
        client::Subscription mine = opened(attachment, "mine");
        client::Subscription blocking = opened(attachment, "blocking");
        const std::deque<FakeBroker::Call> calls = broker.wait_for_held(2);
        std::thread reader([&] {
            client::Event ignored;
            while (blocking.next(kWatchdog, ignored) == GCOALESCE_OK) {
            }
        });
        const StreamRef stream = broker.answer(calls[0]);
        const StreamRef other = broker.answer(calls[1]);
        finish(broker, other);
        reader.join(); // whoever took the answers, they are taken
        publish(broker, stream, "1");
        gcoalesce_code code = GCOALESCE_TIMED_OUT;
        while (code == GCOALESCE_TIMED_OUT && readable(fd, kWatchdog)) {
            REQUIRE(attachment.dispatch() == GCOALESCE_OK);
            code = mine.next(0ms, event);
        }
        CHECK(code == GCOALESCE_OK);
    }
}

TEST_CASE("the descriptor is quiet when nothing is new, and when no subscription is left") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    client::Attachment attachment = attached_to(where);
    const int fd = attachment.fd();
    CHECK(readable(fd)); // the first dispatch asks
    REQUIRE(attachment.dispatch() == GCOALESCE_OK);
    CHECK_FALSE(readable(fd, 300ms)); // and no timer runs
    client::Subscription subscription = opened(attachment, "hello");
    CHECK(readable(fd, kWatchdog));
    subscription.close();
    while (readable(fd, 300ms)) REQUIRE(attachment.dispatch() == GCOALESCE_OK);
    CHECK(fd == attachment.fd());
}

TEST_CASE("an event loop goes on with the next broker under the same descriptor") {
    const ScratchInstance where;
    std::optional<FakeBroker> broker;
    broker.emplace(*where);
    client::Attachment attachment = attached_to(where);
    const int fd = attachment.fd();
    client::Subscription waiting, reading;
    const StreamRef half = started(*broker, attachment, "half", reading);
    publish(*broker, half, "1");
    started(*broker, attachment, "none", waiting);
    client::Event event;
    REQUIRE(reading.next(0ms, event) == GCOALESCE_OK);
    broker->die();

    gcoalesce_code code = GCOALESCE_TIMED_OUT;
    while (code == GCOALESCE_TIMED_OUT && readable(fd, kWatchdog)) {
        REQUIRE(attachment.dispatch() == GCOALESCE_OK);
        code = reading.next(0ms, event);
    }
    CHECK(code == GCOALESCE_END);
    REQUIRE(reading.ending());
    CHECK(reading.ending()->kind == GCOALESCE_INTERRUPTED);
    CHECK(reading.ending()->code == GCOALESCE_BROKER_DEAD);
    CHECK(waiting.next(0ms, event) == GCOALESCE_TIMED_OUT);

    broker.emplace(*where);
    std::thread answers([&] {
        broker->wait_until([&] { return broker->streams() == 1; });
        publish(*broker, broker->stream(0), "anew");
        finish(*broker, broker->stream(0));
    });
    std::vector<std::string> seen;
    code = GCOALESCE_TIMED_OUT;
    while (code != GCOALESCE_END && readable(fd, kWatchdog)) {
        REQUIRE(attachment.dispatch() == GCOALESCE_OK);
        while ((code = waiting.next(0ms, event)) == GCOALESCE_OK) seen.emplace_back(event.data);
        if (code != GCOALESCE_TIMED_OUT) break;
    }
    answers.join();
    CHECK(code == GCOALESCE_END);
    CHECK(seen == std::vector<std::string>{"anew"});
    CHECK(fd == attachment.fd());
}

// ---- the broker goes -----------------------------------------------------------------------------------------------

TEST_CASE("T81: when the broker is killed, a reader reads what is there and learns that it was interrupted") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    client::Attachment attachment = attached_to(where);
    client::Subscription half, whole;
    const StreamRef running = started(broker, attachment, "half", half);
    const StreamRef ended = started(broker, attachment, "whole", whole);
    publish(broker, running, "1");
    publish(broker, running, "2");
    publish(broker, ended, "1");
    finish(broker, ended);
    client::Event event;
    REQUIRE(half.next(0ms, event) == GCOALESCE_OK);
    std::thread killer([&] { broker.die(); });
    CHECK(read_all(half) == std::vector<std::string>{"2"});
    killer.join();
    REQUIRE(half.ending());
    CHECK(half.ending()->kind == GCOALESCE_INTERRUPTED);
    CHECK(half.ending()->code == GCOALESCE_BROKER_DEAD);
    CHECK(half.ending()->events == 2);
    CHECK(read_all(whole) == std::vector<std::string>{"1"});
    REQUIRE(whole.ending());
    CHECK(whole.ending()->kind == GCOALESCE_COMPLETE);
}

TEST_CASE("the memory of a broker that is gone is let go of once nothing is left to read in it") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    client::Attachment attachment = attached_to(where);
    const auto mapped = [&] { // read-only: the broker in this process has it too
        std::ifstream maps("/proc/self/maps");
        int count = 0;
        for (std::string line; std::getline(maps, line);)
            count += line.find(where.segment_name()) != std::string::npos && line.find(" r--s ") != std::string::npos;
        return count;
    };
    REQUIRE(mapped() == 1);
    attachment.fd();
    client::Event event;
    SECTION("by an idle client, when it next looks") {
        broker.die();
    }
    SECTION("by its readers, each at its end") {
        client::Subscription whole, half;
        const StreamRef ended = started(broker, attachment, "whole", whole);
        publish(broker, ended, "1");
        finish(broker, ended);
        publish(broker, started(broker, attachment, "half", half), "1");
        REQUIRE(half.next(kWatchdog, event) == GCOALESCE_OK);
        broker.die();
        while (half.next(kWatchdog, event) != GCOALESCE_END) {
        }
        CHECK(mapped() == 1); // one of them may go on reading
        CHECK(read_all(whole) == std::vector<std::string>{"1"});
        CHECK(whole.ending()->kind == GCOALESCE_COMPLETE);
        CHECK(whole.next(0ms, event) == GCOALESCE_END);
        CHECK_FALSE(whole.valid());
        REQUIRE(attachment.dispatch() == GCOALESCE_OK);
        CHECK(mapped() == 0);
        return;
    }
    REQUIRE(attachment.dispatch() == GCOALESCE_OK);
    while (mapped() != 0 && readable(attachment.fd(), kWatchdog)) REQUIRE(attachment.dispatch() == GCOALESCE_OK);
    CHECK(mapped() == 0);
}

TEST_CASE("31: a broker that shuts down in the midst of a stream is told from one that died") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    client::Attachment attachment = attached_to(where);
    client::Subscription subscription;
    const StreamRef stream = started(broker, attachment, "hello", subscription);
    publish(broker, stream, "1");
    client::Event event;
    REQUIRE(subscription.next(0ms, event) == GCOALESCE_OK);
    broker.stop();
    CHECK(read_all(subscription).empty());
    REQUIRE(subscription.ending());
    CHECK(subscription.ending()->kind == GCOALESCE_INTERRUPTED);
    CHECK(subscription.ending()->code == GCOALESCE_CLOSED);
}

TEST_CASE("a request that had seen nothing when the broker died is asked of the next one, within the read's timeout") {
    const ScratchInstance where;
    std::optional<FakeBroker> broker;
    broker.emplace(*where);
    client::Attachment attachment = attached_to(where);
    client::Subscription reading, opening;
    started(*broker, attachment, "reading", reading);
    broker->hold();
    opening = opened(attachment, "opening");
    broker->wait_for_held(1);
    broker->die();
    client::Event event;
    CHECK(reading.next(400ms, event) == GCOALESCE_TIMED_OUT);
    CHECK_THAT(client::message(), Catch::Contains("died")); // what is waited for

    std::thread next([&] {
        broker.emplace(*where);
        broker->wait_until([&] { return broker->streams() == 2; });
        for (std::size_t i = 0; i < 2; ++i) {
            publish(*broker, broker->stream(i), "anew");
            finish(*broker, broker->stream(i));
        }
    });
    CHECK(read_all(reading) == std::vector<std::string>{"anew"});
    CHECK(read_all(opening) == std::vector<std::string>{"anew"});
    next.join();
    CHECK(broker->attaches() == 1);
}

TEST_CASE("a request made while there is no broker gets the clear error, and the next one finds a new broker") {
    const ScratchInstance where;
    std::optional<FakeBroker> broker;
    broker.emplace(*where);
    client::Attachment attachment = attached_to(where);
    broker->stop();
    client::Event event;
    client::Subscription subscription = opened(attachment, "one that notices");
    CHECK(subscription.next(400ms, event) == GCOALESCE_TIMED_OUT);
    subscription = opened(attachment, "one that knows");
    CHECK(subscription.next(kWatchdog, event) == GCOALESCE_ABSENT);
    CHECK_THAT(client::message(), Catch::Contains("gcoalesced"));

    broker.emplace(*where);
    const StreamRef stream = started(*broker, attachment, "hello", subscription);
    finish(*broker, stream);
    CHECK(read_all(subscription).empty());
}

TEST_CASE("a lost connection to a living broker costs its readers nothing, and the next request a new connection") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    client::Attachment attachment = attached_to(where);
    client::Subscription reading;
    const StreamRef stream = started(broker, attachment, "hello", reading);
    broker.hold();
    client::Subscription opening = opened(attachment, "opening");
    broker.wait_for_held(1);
    broker.drop_connections();
    broker.serve();
    publish(broker, stream, "1");
    client::Event event;
    REQUIRE(reading.next(kWatchdog, event) == GCOALESCE_OK);
    CHECK(opening.next(400ms, event) == GCOALESCE_TIMED_OUT); // asks again meanwhile
    broker.wait_until([&] { return broker.streams() == 2; });
    finish(broker, broker.stream(1));
    CHECK(read_all(opening).empty());
    publish(broker, stream, "2");
    finish(broker, stream);
    CHECK(read_all(reading) == std::vector<std::string>{"2"});
    CHECK(broker.attaches() == 2);
}

TEST_CASE("a goodbye with a reason refuses what was under way, and a request that ends each connection is not asked "
          "for ever") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    broker.hold();
    client::Attachment attachment = attached_to(where);
    client::Subscription subscription = opened(attachment, "hello");
    client::Event event;
    SECTION("a reason") {
        broker.wait_for_held(1);
        broker.say_goodbye(GCOALESCE_BAD_REQUEST, "no such frame");
        CHECK(subscription.next(kWatchdog, event) == GCOALESCE_BAD_REQUEST);
        CHECK_THAT(client::message(), Catch::Contains("no such frame"));
    }
    SECTION("no reason, each time") {
        gcoalesce_code code = GCOALESCE_OK;
        std::thread reader([&] { code = subscription.next(kWatchdog, event); });
        for (int i = 0; i < 3; ++i) {
            broker.wait_for_held(1);
            broker.drop_connections();
        }
        reader.join();
        CHECK(code == GCOALESCE_BROKER_DEAD);
        CHECK(broker.opens() == 3);
    }
}

TEST_CASE("a silent heart alone proves nothing: the reader waits on") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    client::Attachment attachment = attached_to(where);
    client::Subscription subscription;
    const StreamRef stream = started(broker, attachment, "hello", subscription);
    broker.stop_heartbeat();
    client::Event event;
    CHECK(subscription.next(2500ms, event) == GCOALESCE_TIMED_OUT); // past the age at which the lock is asked
    publish(broker, stream, "1");
    CHECK(subscription.next(0ms, event) == GCOALESCE_OK);
}

// ---- fork ----------------------------------------------------------------------------------------------------------

TEST_CASE("29: after a fork every call in the child says so, and the parent notices nothing") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    client::Attachment attachment = attached_to(where);
    client::Subscription subscription;
    const StreamRef stream = started(broker, attachment, "hello", subscription);
    const int fd = attachment.fd();
    const bool as_told = in_child([&] {
        client::Event event;
        client::Subscription other;
        std::chrono::milliseconds left{};
        gcoalesce_ending ending{};
        ending.size = sizeof ending;
        gcoalesce_info info{};
        info.size = sizeof info;
        bool good = attachment.fd() == -1;
        good = good && attachment.dispatch() == GCOALESCE_ATTACHED_BEFORE_FORK;
        good = good && attachment.open({kModel, "{}"}, other) == GCOALESCE_ATTACHED_BEFORE_FORK;
        good = good && attachment.notify(GCOALESCE_NOTIFY_STATUS, "", 0ms, 0ms, left) == GCOALESCE_ATTACHED_BEFORE_FORK;
        good = good && subscription.next(1000ms, event) == GCOALESCE_ATTACHED_BEFORE_FORK;
        good = good && subscription.next_span(1000ms, event) == GCOALESCE_ATTACHED_BEFORE_FORK;
        good = good && gcoalesce_ending_of(subscription.get(), &ending) == GCOALESCE_ATTACHED_BEFORE_FORK;
        good = good && gcoalesce_info_of(subscription.get(), &info) == GCOALESCE_ATTACHED_BEFORE_FORK;
        good = good && !subscription.valid();
        good = good && std::strstr(client::message(), "attach again") != nullptr;
        subscription.close();
        attachment.detach();
        return good;
    });
    CHECK(as_told);
    publish(broker, stream, "1");
    CHECK(readable(fd, kWatchdog));
    CHECK(attachment.dispatch() == GCOALESCE_OK);
    client::Event event;
    CHECK(subscription.next(0ms, event) == GCOALESCE_OK);
    CHECK(pins(broker, stream) == 1);
    CHECK(broker.attaches() == 1);
    CHECK(broker.connections() == 1);
}

TEST_CASE("a child that attaches for itself is a client of its own") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    client::Attachment attachment = attached_to(where);
    CHECK(in_child([&] {
        client::Attachment own;
        return attach(own, where, kWatchdog) == GCOALESCE_OK && attach(attachment, where, kWatchdog) == GCOALESCE_OK;
    }));
}

// ---- threads -------------------------------------------------------------------------------------------------------

TEST_CASE("many threads open, read and close over one attachment") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    client::Attachment attachment = attached_to(where);
    constexpr int kThreads = 8;
    constexpr int kRounds = 40;
    std::atomic<bool> over{false};
    std::thread producer([&] { // ends every stream with two events
        std::size_t ended = 0;
        while (!over || ended < broker.streams()) {
            if (ended == broker.streams()) {
                std::this_thread::yield();
                continue;
            }
            const StreamRef stream = broker.stream(ended++);
            publish(broker, stream, "1");
            publish(broker, stream, "2");
            finish(broker, stream, ended % 2 == 0 ? 0 : 5 * kMillisecond);
        }
    });
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t)
        threads.emplace_back([&, t] {
            for (int i = 0; i < kRounds; ++i) {
                const std::string body = body_of(std::to_string((t + i) % 5));
                client::Subscription subscription;
                if (attachment.open({kModel, body}, subscription) != GCOALESCE_OK) ++wrong;
                if (i % 7 == 3) continue; // closed at whatever stage it is
                gcoalesce_code code = GCOALESCE_OK;
                if (read_all(subscription, code) != std::vector<std::string>{"1", "2"} || code != GCOALESCE_END)
                    ++wrong;
            }
        });
    for (std::thread& thread : threads) thread.join();
    over = true;
    producer.join();
    CHECK(wrong == 0);
    attachment.detach();
    for (std::size_t i = 0; i < broker.streams(); ++i) CHECK(pins(broker, broker.stream(i)) == 0);
}

TEST_CASE("threads that wait over one connection each get their own answer, in whatever order the answers come") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    broker.hold();
    client::Attachment attachment = attached_to(where);
    constexpr std::size_t kThreads = 12;
    std::vector<gcoalesce_code> codes(kThreads, GCOALESCE_OK);
    std::vector<std::string> sentences(kThreads);
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < kThreads; ++t)
        threads.emplace_back([&, t] {
            const std::string body = body_of(std::to_string(t));
            client::Subscription subscription;
            client::Event event;
            if (attachment.open({kModel, body}, subscription) != GCOALESCE_OK) return;
            // Some leave before their answer has come, the one that polls for the others among them.
            codes[t] = subscription.next(t % 3 == 0 ? 20ms : kWatchdog, event);
            sentences[t] = client::message();
        });
    std::deque<FakeBroker::Call> calls = broker.wait_for_held(kThreads);
    const std::size_t leave = kThreads / 3;
    broker.wait_until([&] { return broker.withdraws() == leave; });
    std::reverse(calls.begin(), calls.end());
    for (const FakeBroker::Call& call : calls) broker.refuse(call, GCOALESCE_BUSY, call.body);
    for (std::thread& thread : threads) thread.join();
    for (std::size_t t = 0; t < kThreads; ++t) {
        if (t % 3 == 0) {
            CHECK(codes[t] == GCOALESCE_TIMED_OUT);
        } else {
            CHECK(codes[t] == GCOALESCE_BUSY);
            CHECK(sentences[t] == body_of(std::to_string(t)));
        }
    }
}

// ---- the rest ------------------------------------------------------------------------------------------------------

TEST_CASE("the notification window is opened, asked for and closed") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    client::Attachment attachment = attached_to(where);
    std::chrono::milliseconds left{-1};
    CHECK(attachment.notify(GCOALESCE_NOTIFY_ON, "", 2s, kWatchdog, left) == GCOALESCE_OK);
    CHECK(left == 2s);
    CHECK(attachment.notify(GCOALESCE_NOTIFY_ON, "", 0s, kWatchdog, left) == GCOALESCE_OK);
    CHECK(left == 6s);
    CHECK(attachment.notify(GCOALESCE_NOTIFY_OFF, "", 0s, kWatchdog, left) == GCOALESCE_OK);
    CHECK(left == 0s);
    CHECK(attachment.notify(GCOALESCE_NOTIFY_ON, "", 25h, kWatchdog, left) == GCOALESCE_BAD_REQUEST);
    broker.die();
    CHECK(attachment.notify(GCOALESCE_NOTIFY_STATUS, "", 0s, 300ms, left) != GCOALESCE_OK);
}

TEST_CASE("upstream's error document is told with the ending, and stays when the slot is another stream's") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    client::Attachment attachment = attached_to(where);
    client::Subscription subscription, other;
    const StreamRef stream = started(broker, attachment, "refused", subscription);
    CHECK(subscription.error_document().empty());
    const std::string document = R"({"error": {"code": 429, "details": []}})";
    SlotEnding ending{};
    ending.kind = GCOALESCE_FAILED;
    ending.code = GCOALESCE_RATE_LIMITED;
    broker.with_store([&](Store& store) { store.end(stream, ending, 0, document); });
    CHECK(subscription.error_document().empty()); // until the ending has been read
    CHECK(read_all(subscription).empty());
    CHECK(subscription.error_document() == document);
    finish(broker, started(broker, attachment, "whole", other));
    CHECK(read_all(other).empty());
    CHECK(other.error_document().empty());
    CHECK(subscription.error_document() == document);
    CHECK(std::string_view(gcoalesce_error_document(nullptr)).empty());
}

TEST_CASE("structs are filled up to the size that their caller knows") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    client::Attachment attachment = attached_to(where);
    client::Subscription subscription;
    finish(broker, started(broker, attachment, "hello", subscription));
    CHECK(read_all(subscription).empty());
    struct { // of a later version of the library
        gcoalesce_ending ending;
        std::uint64_t added;
    } larger;
    std::memset(&larger, 0x5A, sizeof larger);
    larger.ending.size = sizeof larger;
    CHECK(gcoalesce_ending_of(subscription.get(), &larger.ending) == GCOALESCE_OK);
    CHECK(larger.ending.size == sizeof larger);
    CHECK(larger.ending.total_tokens == 7);
    CHECK(larger.added == 0x5A5A5A5A5A5A5A5A);
    larger.ending.size = sizeof larger.ending - 8;
    CHECK(gcoalesce_ending_of(subscription.get(), &larger.ending) == GCOALESCE_BAD_REQUEST);
}

TEST_CASE("an abandoned attachment leaves its pins behind, as a crash does") {
    const ScratchInstance where;
    FakeBroker broker(*where);
    auto attachment = *Attachment::attach(*where, "client_tests", 0);
    const std::string body = body_of("hello");
    auto subscription = *Subscription::open(
        attachment, Asked{.template_id = kDefaultTemplate, .model = kModel, .body = body}, Wishes{});
    gcoalesce_event event{};
    while (subscription->info().status == GCOALESCE_OPENING)
        REQUIRE(subscription->next(kMillisecond, true, event) == GCOALESCE_TIMED_OUT);
    attachment->abandon();
    subscription.reset();
    broker.wait_until([&] { return broker.connections() == 0; });
    CHECK(pins(broker, broker.stream(0)) == 1);
}

TEST_CASE("the memo of keys is bounded in entries and bytes, and tells requests apart by their bytes") {
    KeyMemo memo;
    const auto asked = [](std::string_view body, Method method = Method::stream, std::string_view model = kModel) {
        return Asked{.template_id = kDefaultTemplate, .model = model, .method = method, .body = body};
    };
    const auto request = [&](const std::string& body, Method method = Method::stream) {
        return std::make_shared<const Request>(asked(body, method));
    };
    Key key{};
    for (std::uint8_t i = 0; i < 255; ++i) {
        key[0] = i;
        memo.remember(request(std::to_string(i)), 1, key);
    }
    for (std::uint8_t i = 0; i < 255; ++i) {
        const auto found = memo.find(asked(std::to_string(i)), 1);
        REQUIRE(found);
        CHECK(found->key.value()[0] == i);
    }
    CHECK_FALSE(memo.find(asked("7", Method::unary), 1));
    CHECK_FALSE(memo.find(asked("7", Method::stream, "gemini-2.5-pro"), 1));
    const auto other_revision = memo.find(asked("7"), 2);
    REQUIRE(other_revision); // the bytes are known, the key is not
    CHECK_FALSE(other_revision->key);
    key[0] = 77;
    memo.remember(other_revision->request, 2, key);
    CHECK(memo.find(asked("7"), 2)->key == key);

    memo.remember(request("a"), 1, key);
    memo.remember(request("b"), 1, key);
    CHECK_FALSE(memo.find(asked("0"), 1)); // the oldest
    CHECK(memo.find(asked("b"), 1));

    const std::string large(5 << 20, 'x');
    memo.remember(request(large), 1, key);
    CHECK(memo.find(asked(large), 1));
    memo.remember(request(large + "y"), 1, key);
    CHECK(memo.find(asked(large + "y"), 1));
    CHECK_FALSE(memo.find(asked(large), 1));
    memo.remember(request(std::string(9 << 20, 'x')), 1, key);
    CHECK(memo.find(asked(large + "y"), 1));
}

TEST_CASE("the shared library exports the functions of gcoalesce.h and nothing else") {
    const std::string header =
        test::read_file(std::filesystem::path(GCOALESCE_SOURCE_DIR) / "lib/include/gcoalesce/gcoalesce.h");
    std::set<std::string> declared;
    const std::regex declaration(R"(GCOALESCE_API[^;(]*\b(gcoalesce_\w+)\()");
    for (std::sregex_iterator it(header.begin(), header.end(), declaration), end; it != end; ++it)
        declared.insert((*it)[1]);
    CHECK(declared.contains("gcoalesce_attach"));

    Process nm({"nm", "-D", "--defined-only", "--format=posix", GCOALESCE_SHARED_LIBRARY});
    REQUIRE(nm.wait() == 0);
    std::set<std::string> exported;
    std::istringstream lines(nm.out());
    for (std::string line; std::getline(lines, line);) {
        const std::string name = line.substr(0, line.find_first_of("@ "));
        if (name != "GCOALESCE_0") exported.insert(name); // the version itself
    }
    CHECK(exported == declared);
}

TEST_CASE("36: no wait in the tree is one that stays within its process") {
    const std::filesystem::path root = GCOALESCE_SOURCE_DIR;
    // The words of shared memory, by their declarations; std::atomic would let each of them wait().
    const std::string layout = test::read_file(root / "lib/segment/layout.hpp");
    std::string words;
    const std::regex declaration(R"(Shared<[^>]+> ([a-z_, \[\]A-Za-z]+);)");
    for (std::sregex_iterator it(layout.begin(), layout.end(), declaration), end; it != end; ++it) {
        const std::string names = (*it)[1];
        const std::regex name(R"([a-z_]{3,})");
        for (std::sregex_iterator one(names.begin(), names.end(), name); one != end; ++one)
            words += (words.empty() ? "" : "|") + one->str();
    }
    REQUIRE(words.find("wake") != std::string::npos);
    const std::regex local_wait("\\b(" + words + ")\\.(wait|notify_one|notify_all)\\(");
    const std::regex comment("//[^\n]*");
    std::size_t files = 0;
    for (const char* room : {"lib", "broker", "cli"}) {
        for (const auto& entry : std::filesystem::recursive_directory_iterator(root / room)) {
            const std::string extension = entry.path().extension().string();
            if (extension != ".hpp" && extension != ".cpp" && extension != ".h") continue;
            ++files;
            const std::string code = std::regex_replace(test::read_file(entry.path()), comment, "");
            INFO(entry.path());
            CHECK(code.find("FUTEX_PRIVATE_FLAG") == std::string::npos);
            CHECK(code.find("FUTEX_WAIT_PRIVATE") == std::string::npos);
            CHECK(code.find("FUTEX_WAKE_PRIVATE") == std::string::npos);
            CHECK(code.find("atomic_wait") == std::string::npos);
            CHECK_FALSE(std::regex_search(code, local_wait));
        }
    }
    CHECK(files > 20);
}
