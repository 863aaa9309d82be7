// Many clients of one gateway at once.
#include <catch2/catch.hpp>
#include <memory>
#include <sys/resource.h>

#include "tests/integration/gateway_support.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;
using Json = nlohmann::json;

namespace {

constexpr std::size_t kClients = 1500;

void allow_many_descriptors() {
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &limit);
    if (limit.rlim_cur < 2 * kClients) throw std::runtime_error("too few descriptors on this machine");
}

} // namespace

TEST_CASE("readers that take nothing share the one copy of what waits for them, and get all of it when they go on") {
    constexpr std::size_t stalled = 200, events = 30, size = 100'000; // 3 MB for each of them
    allow_many_descriptors();
    World world({"--memory", "32MiB"});
    Gateway gateway(world, {"--log-level", "warning"});
    gateway.wait_until_ready();
    const std::string body = prompt_body("large [sim events=30 size=100000 hold-after=1]");
    std::vector<std::unique_ptr<Wire>> wires;
    for (std::size_t i = 0; i < stalled; ++i) {
        wires.push_back(std::make_unique<Wire>(gateway.port(), 4096));
        wires.back()->post(kSse, body);
        wires.back()->read_until("\r\n\r\n");
    }
    world.sim().release();
    const HttpResponse whole = gateway.post(kSse, body);
    CHECK(whole.error.empty());
    CHECK(whole.body.size() > events * size);
    CHECK(eventually([&] {
        return world.run({"keys", "--json"}).json().at("keys").at(0).at("subscribers") == stalled;
    }));
    CHECK(private_bytes(gateway.process().pid()) < 32u << 20);
    for (std::size_t i = 0; i < stalled; i += 40) {
        std::string read;
        for (std::size_t chunk = 1; chunk != 0;) {
            chunk = std::stoul(wires[i]->read_until("\r\n"), nullptr, 16);
            read += wires[i]->read_bytes(chunk + 2).substr(0, chunk);
        }
        CHECK((read == whole.body));
    }
    CHECK(world.calls() == 1);
}

TEST_CASE("a herd of many connections causes one call, all of it reads the same bytes, and it takes little memory") {
    allow_many_descriptors();
    World world;
    Gateway gateway(world, {"--log-level", "warning"});
    gateway.wait_until_ready();
    const std::uint64_t before = private_bytes(gateway.process().pid());
    const std::string body = prompt_body("all at once [sim events=20 hold-after=1 size=300]");
    std::vector<std::unique_ptr<Wire>> wires;
    for (std::size_t i = 0; i < kClients; ++i) {
        wires.push_back(std::make_unique<Wire>(gateway.port()));
        wires.back()->post(kSse, body);
    }
    CHECK(eventually([&] {
        const Json keys = world.run({"keys", "--json"}).json().at("keys");
        return keys.size() == 1 && keys[0].at("subscribers") == kClients;
    }));
    world.sim().release();
    std::string first;
    for (const auto& wire : wires) {
        const std::string head = wire->read_until("\r\n\r\n");
        CHECK(head.starts_with("HTTP/1.1 200 OK\r\n"));
        const std::string answer = wire->read_until("\r\n0\r\n\r\n");
        if (first.empty()) first = answer;
        // Chunks may be cut otherwise; the events in them are the same.
        CHECK(std::ranges::count(answer, '{') == std::ranges::count(first, '{'));
    }
    CHECK(world.calls() == 1);
    CHECK(private_bytes(gateway.process().pid()) - before < kClients * 4096); // nothing of what was sent is kept
    // The connections take further requests.
    wires.front()->post(kSse, body);
    CHECK(wires.front()->read_until("\r\n\r\n").find("X-Coalesce-Status: fresh\r\n") != std::string::npos);
}
