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

// A process's own memory that is in RAM, without what it shares.
std::uint64_t private_bytes(pid_t pid) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/smaps_rollup");
    std::uint64_t kib = 0;
    for (std::string line; std::getline(file, line);) {
        if (line.starts_with("Private_")) kib += std::stoull(line.substr(line.find(':') + 1));
    }
    return kib * 1024;
}

} // namespace

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
