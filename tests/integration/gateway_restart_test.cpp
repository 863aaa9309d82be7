// Gateways that are killed and come back, while their clients read.
#include <atomic>
#include <catch2/catch.hpp>
#include <csignal>
#include <future>
#include <memory>

#include "protocol/sse.hpp"
#include "tests/integration/gateway_support.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;
using Json = nlohmann::json;

namespace {

constexpr int kStreams = 3, kEvents = 60, kSources = 20, kReaders = 8; // of each stream
constexpr int kKills = 4;

struct Source { // what an EventSource has read
    std::vector<std::string> ids, data;
    Json end;
    int connections = 0; // that brought something
};

// As an EventSource does it: reads, and whenever its connection ends asks for what comes behind the last id; until it
// is told that there is no more.
Source read_as_event_source(const std::string& url) {
    Source source;
    for (;;) {
        std::vector<std::string> headers{"Accept: text/event-stream"};
        if (!source.ids.empty()) headers.push_back("Last-Event-ID: " + source.ids.back());
        const HttpResponse response = http(url, {}, headers);
        if (response.status == 204) return source;
        if (response.status == 200 && !response.body.empty()) {
            ++source.connections;
            SseParser parser(1 << 20); // an event that did not come whole is none
            const auto parsed = parser.feed(response.body, [&](const SseEvent& event) {
                if (event.type == "end") {
                    source.end = Json::parse(event.data);
                    return;
                }
                source.ids.emplace_back(event.last_event_id);
                source.data.emplace_back(event.data);
            });
            if (!parsed) throw std::runtime_error("no event stream: " + response.body);
        } else if (response.status != 0 && response.status != 503) {
            throw std::runtime_error("an EventSource gives up: " + response.head);
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(20)); // the pause that each EventSource makes
    }
}

struct Read {
    std::string body;
    int broken = 0; // answers that did not come whole
};

// As an application does it that asks again whenever its answer breaks off.
Read read_whole(const std::string& url, const std::string& body) {
    Read read;
    for (;;) {
        HttpResponse response = http(url, body);
        if (response.status == 200 && response.error.empty()) {
            read.body = std::move(response.body);
            return read;
        }
        if (response.status == 200) ++read.broken;
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
}

} // namespace

TEST_CASE("gateways that are killed under load come back, and all their readers end with the exact answers") {
    World world;
    auto gateway = std::make_unique<Gateway>(world, std::vector<std::string>{"--log-level", "error"});
    gateway->wait_until_ready();
    const std::string url = gateway->url(), port = std::to_string(gateway->port());
    std::vector<std::string> bodies, streams;
    for (int i = 0; i < kStreams; ++i) {
        bodies.push_back(prompt_body("killed " + std::to_string(i) + " [sim events=60 gap=60ms]"));
        streams.push_back(url + Json::parse(gateway->post(kCreate, bodies.back()).body).at("url").get<std::string>());
    }
    std::vector<std::future<Source>> sources;
    std::vector<std::future<Read>> readers;
    for (int i = 0; i < kStreams * kSources; ++i)
        sources.push_back(std::async(std::launch::async, [at = streams[static_cast<std::size_t>(i % kStreams)]] {
            return read_as_event_source(at);
        }));
    for (int i = 0; i < kStreams * kReaders; ++i)
        readers.push_back(std::async(std::launch::async, [&url, body = bodies[static_cast<std::size_t>(i % kStreams)]] {
            return read_whole(url + kSse, body);
        }));
    const auto read = [&] { // of the stream that is furthest behind
        std::uint64_t least = kEvents;
        const Json keys = world.run({"keys", "--json"}).json();
        for (const Json& key : keys.at("keys")) least = std::min(least, key.at("events").get<std::uint64_t>());
        return least;
    };
    for (std::uint64_t kill = 1; kill <= kKills; ++kill) {
        REQUIRE(eventually([&] { return read() >= kill * kEvents / (kKills + 1); }));
        gateway->process().signal(SIGKILL);
        gateway->process().wait();
        gateway = std::make_unique<Gateway>(
            world, std::vector<std::string>{"--log-level", "error", "--listen", "127.0.0.1:" + port});
    }

    std::vector<std::vector<std::string>> expected;
    std::vector<std::string> whole;
    for (std::size_t i = 0; i < kStreams; ++i) {
        whole.push_back(read_whole(url + kSse, bodies[i]).body);
        expected.push_back(read_as_event_source(streams[i]).data);
        CHECK(expected[i].size() == kEvents);
    }
    int cut = 0;
    for (std::size_t i = 0; i < sources.size(); ++i) {
        const Source source = sources[i].get();
        CHECK((source.data == expected[i % kStreams]));
        const std::string id = streams[i % kStreams].substr(streams[i % kStreams].rfind('/') + 1);
        for (std::size_t n = 0; n < source.ids.size(); ++n) CHECK(source.ids[n] == id + "." + std::to_string(n + 1));
        CHECK(source.end.value("ending", "") == "complete");
        cut += source.connections > 1 ? 1 : 0;
    }
    CHECK(cut > static_cast<int>(sources.size()) / 2); // else nothing was tried
    int broken = 0;
    for (std::size_t i = 0; i < readers.size(); ++i) {
        const Read one = readers[i].get();
        CHECK((one.body == whole[i % kStreams]));
        broken += one.broken;
    }
    CHECK(broken > 0);
    CHECK(world.calls() == kStreams);
}

TEST_CASE("a request that has waited long for its first event is asked anew where its broker dies and another comes") {
    const ScratchInstance instance;
    const Sim sim;
    const Gateway gateway(command(*instance, {"serve"}));
    auto broker = std::make_unique<Broker>(*instance, sim.url());
    gateway.wait_until_ready();
    std::string head;
    // Where the machine is so slow that no broker comes within a second the client is rightly told so.
    for (int round = 0; round < 20 && !head.starts_with("HTTP/1.1 200 "); ++round) {
        const std::string prompt = "patient " + std::to_string(round);
        Wire wire(gateway.port());
        wire.post(kSse, prompt_body(prompt + " [sim events=2 latency=4s]"));
        REQUIRE(eventually([&] {
            const auto keys = run(command(*instance, {"keys", "--json", "--state", "in_flight"})).json().at("keys");
            return !keys.empty() && keys[0].at("age_ms") > 1500;
        }));
        broker->process().signal(SIGKILL);
        broker->process().wait();
        REQUIRE(eventually([&] { return gateway.get("/healthz").status == 503; }));
        // No wait for anything: as long as it takes, at a look every 100 ms, to give the waiter up too early.
        std::this_thread::sleep_for(std::chrono::milliseconds(250));
        broker = std::make_unique<Broker>(*instance, sim.url());
        head = wire.read_until("\r\n\r\n");
    }
    CHECK(head.starts_with("HTTP/1.1 200 "));
}
