// What a gateway does while its broker says nothing.
#include <catch2/catch.hpp>
#include <chrono>
#include <memory>

#include "tests/integration/gateway_support.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;

TEST_CASE(
    "many who wait for a broker that says nothing cost one look at it in each tick, and are told when it is over") {
    const ScratchInstance instance;
    FakeBroker broker(*instance);
    broker.hold();
    const Gateway gateway(command(*instance, {"serve"}));
    gateway.wait_until_ready();
    std::vector<std::unique_ptr<Wire>> waiting;
    for (int i = 0; i < 200; ++i) {
        waiting.push_back(std::make_unique<Wire>(gateway.port()));
        waiting.back()->post(kUnary, prompt_body("wait " + std::to_string(i)));
    }
    broker.wait_for_held(waiting.size());
    Opens opens("/dev/shm" + instance.segment_name());
    const auto begun = std::chrono::steady_clock::now();
    CHECK(eventually([&] { return opens.count() >= 30; })); // once they have waited for a second
    const auto passed = std::chrono::steady_clock::now() - begun;
    CHECK(opens.count() <= passed / std::chrono::milliseconds(100) + 2);

    broker.stop_heartbeat();
    for (const auto& wire : waiting) {
        CHECK(wire->read_until("\r\n\r\n").starts_with("HTTP/1.1 503 "));
        CHECK(wire->read_until("}\n").find("UNRESPONSIVE") != std::string::npos);
    }
    CHECK(gateway.get("/healthz").status == 503);
    CHECK(gateway.post(kUnary, prompt_body("again")).status == 503);
}
