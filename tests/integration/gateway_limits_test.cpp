// What clients may do to a gateway that is not as HTTP's authors meant it.
#include <atomic>
#include <catch2/catch.hpp>

#include "tests/integration/gateway_support.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;
using Json = nlohmann::json;

TEST_CASE("bytes that come one by one prolong no request's time, in the head and in the body") {
    World world;
    const Gateway gateway(world, {"--request-timeout", "400ms", "--idle-timeout", "10min"});
    const std::string head = "POST " + kSse + " HTTP/1.1\r\nHost: x\r\n";
    for (const std::string& begin :
         {std::string("POST "), head + "X-Slow: ", head + "Content-Length: 100000\r\n\r\n{"}) {
        CAPTURE(begin);
        Wire wire(gateway.port());
        wire.send(begin);
        std::atomic<bool> over{false};
        std::thread drips([&] {
            try {
                while (!over) {
                    wire.send("x");
                    std::this_thread::sleep_for(std::chrono::milliseconds(20));
                }
            } catch (const std::exception&) { // cut off
            }
        });
        const std::string answer = wire.read_until("\r\n\r\n");
        over = true;
        drips.join();
        CHECK(answer.starts_with("HTTP/1.1 408 "));
        CHECK(answer.find("Connection: close\r\n") != std::string::npos);
    }
    CHECK(world.calls() == 0);
}

TEST_CASE("a body that is too large is refused by its announcement, or where the limit is passed, and then cut off") {
    World world;
    const Gateway gateway(world, {"--max-body", "64KiB"});
    const std::string head = "POST " + kSse + " HTTP/1.1\r\nHost: x\r\n";
    Wire announced(gateway.port());
    announced.send(head + "Content-Length: 99999999999\r\nExpect: 100-continue\r\n\r\n"); // and not a byte of it
    CHECK(announced.read_to_end().starts_with("HTTP/1.1 413 "));

    Wire endless(gateway.port());
    endless.send(head + "Transfer-Encoding: chunked\r\n\r\n");
    const std::string chunk = "1000\r\n" + std::string(0x1000, ' ') + "\r\n";
    const auto pour = [&] {
        for (;;) endless.send(chunk);
    };
    CHECK_THROWS(pour());

    Wire endless_head(gateway.port());
    const auto pour_head = [&] {
        endless_head.send("GET / HTTP/1.1\r\n");
        for (;;) endless_head.send("X-Field: " + std::string(1000, 'x') + "\r\n");
    };
    CHECK_THROWS(pour_head());
    CHECK(gateway.get("/healthz").status == 200);
    CHECK(world.calls() == 0);
}

TEST_CASE("neither the head of a chunk nor a trailer is taken without end") {
    World world;
    const Gateway gateway(world, {"--request-timeout", "10min"});
    for (const std::string& begin : {std::string("5;"), std::string("0\r\nX: ")}) {
        CAPTURE(begin);
        Wire wire(gateway.port());
        wire.send("POST " + kSse + " HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + begin +
                  std::string(256u << 10, 'x'));
        CHECK(wire.read_until("\r\n\r\n").starts_with("HTTP/1.1 431 "));
    }
    CHECK(world.calls() == 0);
}

TEST_CASE("a transfer encoding that is not chunked is refused, and what stands behind it is no request") {
    World world;
    const Gateway gateway(world);
    for (const char* encoding : {"gzip", "xchunked", "chunked, identity", "gzip, chunked", "\"chunked\""}) {
        CAPTURE(encoding);
        Wire wire(gateway.port());
        wire.send("POST " + kSse + " HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: " + encoding +
                  "\r\n\r\nGET /healthz HTTP/1.1\r\nHost: x\r\n\r\n");
        const std::string all = wire.read_to_end();
        CHECK((all.starts_with("HTTP/1.1 501 ") || all.starts_with("HTTP/1.1 400 ")));
        CHECK(all.find("HTTP/1.1 ", 1) == std::string::npos); // no second response
    }
    CHECK(world.calls() == 0);
}

TEST_CASE("streams that are asked for one behind the other come in order, and HEAD has a body's head alone") {
    World world;
    const Gateway gateway(world);
    gateway.wait_until_ready();
    Wire wire(gateway.port());
    for (const char* prompt : {"one [sim events=3 gap=20ms]", "two [sim events=3]", "three"})
        wire.post(kSse, prompt_body(prompt));
    wire.send("HEAD /v1beta/models HTTP/1.1\r\nHost: x\r\n\r\nHEAD /nothing HTTP/1.1\r\nHost: x\r\n\r\n");
    wire.send("GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    for (const char* prompt : {"one", "two", "three"}) {
        CHECK(wire.read_until("\r\n\r\n").starts_with("HTTP/1.1 200 OK\r\n"));
        CHECK(wire.read_until("\r\n0\r\n\r\n").find("Answer to: " + std::string(prompt)) != std::string::npos);
    }
    CHECK(wire.read_until("\r\n\r\n").starts_with("HTTP/1.1 200 OK\r\n"));
    CHECK(wire.read_until("\r\n\r\n").starts_with("HTTP/1.1 404 "));
    const std::string last = wire.read_to_end();
    CHECK(last.starts_with("HTTP/1.1 200 OK\r\n"));
    CHECK(last.ends_with("{\"status\":\"ok\"}\n"));
}

TEST_CASE("a client that asks for ever and reads nothing is read from no more, and costs little") {
    World world;
    Gateway gateway(world, {"--stall-timeout", "10min", "--log-level", "warning"});
    gateway.wait_until_ready();
    const std::string body = prompt_body("much [sim events=20 size=50000]");
    CHECK(gateway.post(kSse, body).status == 200);
    Wire wire(gateway.port(), 4096);
    // Its answers fill the way back; its further requests fill what is read ahead, then the way there.
    std::size_t asked = 0;
    const std::string one =
        "POST " + kSse + " HTTP/1.1\r\nHost: x\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
    while (wire.try_send(one)) ++asked;
    CHECK(asked > 0);
    CHECK(private_bytes(gateway.process().pid()) < 32u << 20);
    CHECK(gateway.post(kSse, body).status == 200);
    for (int i = 0; i < 3; ++i) CHECK(wire.read_until("\r\n0\r\n\r\n").find("HTTP/1.1 200 OK") != std::string::npos);
}

TEST_CASE("a client that resets its connection, or ends its side of it, leaves its stream") {
    World world;
    const Gateway gateway(world);
    gateway.wait_until_ready();
    const std::string body = prompt_body("gone [sim events=8 hold-after=2]");
    const auto readers = [&] {
        std::int64_t all = 0;
        const Json keys = world.run({"keys", "--json"}).json();
        for (const Json& key : keys.at("keys")) all += key.at("subscribers").get<std::int64_t>();
        return all;
    };
    for (const bool reset : {true, false}) {
        Wire wire(gateway.port());
        wire.post(kSse, body);
        wire.read_until("data: ");
        CHECK(eventually([&] { return readers() == 1; }));
        if (reset)
            wire.reset();
        else
            wire.end_sending();
        CHECK(eventually([&] { return readers() == 0; }));
    }
    // One that went away before its answer had begun.
    Wire early(gateway.port());
    early.post(kSse, prompt_body("early [sim hold-after=0]"));
    CHECK(eventually([&] { return readers() == 1; }));
    early.close();
    CHECK(eventually([&] { return readers() == 0; }));
    world.sim().release();
}
