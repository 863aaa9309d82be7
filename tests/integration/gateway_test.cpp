// gcoalesce serve on Gemini's own paths, with a real broker and a stand-in for Gemini.
#include <catch2/catch.hpp>
#include <csignal>
#include <future>
#include <set>

#include "tests/integration/gateway_support.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;
using Json = nlohmann::json;

namespace {

std::int64_t subscribers(const World& world) {
    std::int64_t all = 0;
    const Json keys = world.run({"keys", "--json"}).json();
    for (const Json& stream : keys.at("keys")) all += stream.at("subscribers").get<std::int64_t>();
    return all;
}

// Asks so often at once; all of them read before the answer goes on.
std::vector<HttpResponse> herd(World& world, const Gateway& gateway, const std::string& path, const std::string& body,
                               std::int64_t size) {
    std::vector<std::future<HttpResponse>> asked;
    for (std::int64_t i = 0; i < size; ++i)
        asked.push_back(std::async(std::launch::async, [&] { return gateway.post(path, body); }));
    CHECK(eventually([&] { return subscribers(world) == size; }));
    world.sim().release();
    std::vector<HttpResponse> responses;
    for (auto& one : asked) responses.push_back(one.get());
    return responses;
}

} // namespace

TEST_CASE("a response through the gateway has upstream's own bytes, in each of Gemini's forms") {
    World world;
    const Gateway gateway(world);
    gateway.wait_until_ready();
    const std::string body = prompt_body("one [sim events=7 thoughts=1]");
    for (const std::string& path : {kSse, kUnary}) {
        const HttpResponse through = gateway.post(path, body);
        world.sim().reset(); // so that the direct call is the first one of its body, too
        const HttpResponse direct = http(world.sim().url() + path, body);
        CHECK(through.error.empty());
        CHECK(through.status == 200);
        CHECK(through.body == direct.body);
        CHECK(field(through, "Content-Type") == field(direct, "Content-Type"));
        world.sim().reset();
    }
    SECTION("the array has the stream's documents") {
        const HttpResponse array = gateway.post(kArray, body);
        CHECK(array.status == 200);
        CHECK(field(array, "Content-Type").starts_with("application/json"));
        const HttpResponse direct = http(world.sim().url() + kArray, prompt_body("other"));
        CHECK(array.body.starts_with("[{"));
        CHECK(direct.body.find("\n,\r\n") != std::string::npos);
        CHECK(array.body.find("\n,\r\n") != std::string::npos);
        CHECK(Json::parse(array.body).size() == 7);
    }
}

TEST_CASE("paths with any version and with none are one service, and bodies that say the same share one call") {
    World world;
    const Gateway gateway(world);
    gateway.wait_until_ready();
    std::set<std::string> bodies, keys;
    for (const char* version : {"/v1beta", "/v1", "/v1alpha", ""}) {
        const HttpResponse response =
            gateway.post(std::string(version) + "/models/gemini-2.5-flash:streamGenerateContent?alt=sse&key=abc",
                         prompt_body("same"));
        CHECK(response.status == 200);
        bodies.insert(response.body);
        keys.insert(field(response, "X-Coalesce-Key"));
    }
    CHECK(world.calls() == 1);
    CHECK(bodies.size() == 1);
    CHECK(keys.size() == 1);
}

TEST_CASE("a herd causes one call, and each of it reads the whole answer and how it was served") {
    World world;
    const Gateway gateway(world);
    gateway.wait_until_ready();
    const std::vector<HttpResponse> all =
        herd(world, gateway, kSse, prompt_body("herd [sim events=20 hold-after=1]"), 40);
    std::map<std::string, int> statuses;
    for (const HttpResponse& response : all) {
        CHECK(response.status == 200);
        CHECK(response.error.empty());
        CHECK(response.body == all.front().body);
        CHECK(field(response, "X-Coalesce-Stream") == field(all.front(), "X-Coalesce-Stream"));
        CHECK(field(response, "Age") == "0");
        ++statuses[field(response, "X-Coalesce-Status")];
    }
    CHECK(world.calls() == 1);
    CHECK(statuses == std::map<std::string, int>{{"started", 1}, {"joined", 39}});
    CHECK(field(gateway.post(kSse, prompt_body("herd [sim events=20 hold-after=1]")), "X-Coalesce-Status") == "fresh");
}

TEST_CASE("readers of two gateways share one call") {
    World world;
    const Gateway one(world), other(world);
    one.wait_until_ready();
    other.wait_until_ready();
    auto first = std::async(std::launch::async, [&] { return one.post(kSse, prompt_body("x [sim hold-after=1]")); });
    auto second = std::async(std::launch::async, [&] { return other.post(kSse, prompt_body("x [sim hold-after=1]")); });
    CHECK(eventually([&] { return subscribers(world) == 2; }));
    world.sim().release();
    CHECK(first.get().body == second.get().body);
    CHECK(world.calls() == 1);
}

TEST_CASE("an error before the first byte is the response, with its status, its words and when to ask again") {
    World world;
    const Gateway gateway(world);
    gateway.wait_until_ready();
    const auto error = [&](const std::string& path, const std::string& prompt, int status) {
        const HttpResponse response = gateway.post(path, prompt_body(prompt));
        CHECK(response.status == status);
        CHECK(response.error.empty());
        CHECK(field(response, "Content-Type").starts_with("application/json"));
        const Json document = Json::parse(response.body);
        CHECK(document.at("error").at("code") == status);
        return std::pair(response, document.at("error").at("status").get<std::string>());
    };
    for (const std::string& path : {kSse, kArray, kUnary}) {
        CHECK(error(path, "a [sim status=503]", 503).second == "UNAVAILABLE");
        CHECK(error(path, "b [sim status=500]", 500).second == "INTERNAL");
        CHECK(error(path, "c [sim empty]", 502).second == "UNAVAILABLE");
    }
    const auto [limited, word] = error(kSse, "d [sim status=429 retry=36s]", 429);
    CHECK(word == "RESOURCE_EXHAUSTED");
    const int seconds = std::stoi(field(limited, "Retry-After"));
    CHECK((seconds > 30 && seconds <= 36));
    // Upstream's own, to the byte.
    CHECK(limited.body ==
          http(world.sim().url() + kSse, prompt_body("d [sim status=429 retry=36s]"), {"x-goog-api-key: k"}).body);
    CHECK(Json::parse(limited.body).at("error").at("details").at(0).at("@type") ==
          "type.googleapis.com/google.rpc.QuotaFailure");
    CHECK(gateway.post("/v1beta/models/unknown-model:generateContent", prompt_body("e")).status == 404);
    CHECK(gateway.post(kSse, "no json").status == 400);
}

TEST_CASE("a failure in mid-stream is told in the stream, and the response has no end") {
    World world;
    const Gateway gateway(world);
    gateway.wait_until_ready();
    for (const std::string prompt : {"[sim events=6 cut-after=2]", "[sim events=6 truncate-after=2]",
                                     "[sim events=6 error-after=2]", "[sim events=6 bare-error-after=2]"}) {
        CAPTURE(prompt);
        const HttpResponse response = gateway.post(kSse, prompt_body("x " + prompt));
        CHECK(response.status == 200);
        CHECK_FALSE(response.error.empty()); // no last chunk
        CHECK(response.body.ends_with("}\r\n\r\n"));
        const std::size_t last = response.body.rfind("data: ");
        const Json document = Json::parse(response.body.substr(last + 6));
        CHECK(document.at("error").at("code").get<int>() >= 500);
        CHECK_FALSE(document.at("error").at("message").get<std::string>().empty());
        const bool upstreams = prompt.find("error-after") != std::string::npos;
        CHECK(document.at("error").contains("details") != upstreams); // which tells none, and ours the code's word
    }
    SECTION("in an array, too") {
        const HttpResponse response = gateway.post(kArray, prompt_body("y [sim events=6 cut-after=2]"));
        CHECK_FALSE(response.error.empty());
        const Json array = Json::parse(response.body);
        CHECK(array.size() == 3);
        CHECK(array.back().contains("error"));
    }
}

TEST_CASE("T27: what upstream says in its head goes to nobody") {
    World world;
    const Gateway gateway(world);
    gateway.wait_until_ready();
    const HttpResponse direct = http(world.sim().url() + kSse, prompt_body("head"));
    REQUIRE(direct.head.find("Server-Timing") != std::string::npos);
    const HttpResponse response = gateway.post(kSse, prompt_body("head"));
    for (const char* name :
         {"Server-Timing", "Server", "Alt-Svc", "Content-Disposition", "Set-Cookie", "X-Frame-Options"})
        CHECK(field(response, name).empty());
}

TEST_CASE("Cache-Control says what a request takes and what it leaves") {
    World world;
    const Gateway gateway(world);
    gateway.wait_until_ready();
    const auto status = [&](const std::string& prompt, const std::string& control) {
        return field(gateway.post(kSse, prompt_body(prompt), {"Cache-Control: " + control}), "X-Coalesce-Status");
    };
    CHECK(status("a", "max-age=60") == "started");
    CHECK(status("a", "max-age=60") == "fresh");
    CHECK(status("a", "max-age=60, No-Cache") == "started");
    CHECK(status("a", "max-age=0") == "started");
    CHECK(status("b", "no-store") == "started");
    CHECK(status("b", "max-age=60") == "started");
    // A field that comes twice is one list.
    CHECK(status("c", "max-age=60") == "started");
    CHECK(field(gateway.post(kSse, prompt_body("c"), {"Cache-Control: max-age=60", "Cache-Control: no-cache"}),
                "X-Coalesce-Status") == "started");
    CHECK(gateway
              .post(kSse, prompt_body("c"),
                    {"X-Coalesce-Template: default", "X-Coalesce-Delay: 1ms", "X-Coalesce-Delay: 1ms"})
              .status == 400);
}

TEST_CASE("a template is asked by its name and variables, whatever the body") {
    const TemplateDirectory templates;
    templates.write("weather.json", R"({"model": "gemini-2.5-flash", "prompt": "The weather in {{city}}",
                                        "variables": {"city": {"normalize": ["trim", "lowercase"]}}})");
    World world({"--templates", templates.path()});
    const Gateway gateway(world);
    gateway.wait_until_ready();
    const HttpResponse oslo =
        gateway.post(kSse, "{}", {"X-Coalesce-Template: weather", R"(X-Coalesce-Vars: {"city": "Oslo"})"});
    const HttpResponse same = gateway.post(kSse, prompt_body("x"),
                                           {"X-Coalesce-Template: weather", R"(X-Coalesce-Vars: {"city": " OSLO "})"});
    CHECK(oslo.status == 200);
    CHECK(field(same, "X-Coalesce-Status") == "fresh");
    CHECK(same.body == oslo.body);
    CHECK(gateway.post(kSse, "{}", {"X-Coalesce-Template: none"}).status == 404);
    CHECK(gateway.post(kSse, "{}", {"X-Coalesce-Template: weather"}).status == 400);
    CHECK(gateway.post(kSse, "{}", {R"(X-Coalesce-Vars: {"city": "Oslo"})"}).status == 400);
}

TEST_CASE("a request with a delay is asked at once and read later") {
    World world;
    const Gateway gateway(world);
    gateway.wait_until_ready();
    Wire wire(gateway.port());
    wire.post(kSse, prompt_body("later"), "X-Coalesce-Delay: 300ms\r\n");
    CHECK(eventually([&] { return world.calls() == 1; }));
    CHECK(wire.read_until("\r\n\r\n").starts_with("HTTP/1.1 200 OK\r\n"));
    wire.read_until("0\r\n\r\n");
    CHECK(gateway.post(kSse, prompt_body("x"), {"X-Coalesce-Delay: soon"}).status == 400);
}

TEST_CASE("one connection takes request after request, also when they come before their answers") {
    World world;
    const Gateway gateway(world);
    gateway.wait_until_ready();
    Wire wire(gateway.port());
    const std::string body = prompt_body("pipelined");
    const std::string one =
        "POST " + kUnary + " HTTP/1.1\r\nHost: x\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
    wire.send(one + one + "GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    const std::string all = wire.read_to_end();
    std::size_t answers = 0;
    for (std::size_t at = all.find("HTTP/1.1 200"); at != std::string::npos; at = all.find("HTTP/1.1 200", at + 1))
        ++answers;
    CHECK(answers == 3);
    CHECK(world.calls() == 1);
    CHECK(all.ends_with("{\"status\":\"ok\"}\n"));
}

TEST_CASE("HTTP/1.0 gets a body that ends with the connection") {
    World world;
    const Gateway gateway(world);
    gateway.wait_until_ready();
    Wire wire(gateway.port());
    const std::string body = prompt_body("old");
    wire.send("POST " + kSse + " HTTP/1.0\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body);
    const std::string all = wire.read_to_end();
    CHECK(all.find("Transfer-Encoding") == std::string::npos);
    CHECK(all.substr(all.find("\r\n\r\n") + 4) == gateway.post(kSse, body).body);
}

TEST_CASE("HEAD, OPTIONS, wrong methods and unknown paths are answered as HTTP has it") {
    World world;
    const Gateway gateway(world, {"--cors-origin", "https://app.example"});
    gateway.wait_until_ready();
    Wire wire(gateway.port());
    wire.send("HEAD /healthz HTTP/1.1\r\nHost: x\r\n\r\nOPTIONS " + kSse +
              " HTTP/1.1\r\nHost: x\r\nOrigin: https://app.example\r\nAccess-Control-Request-Method: POST\r\n"
              "Access-Control-Request-Headers: x-goog-api-key,content-type\r\n\r\n"
              "GET " +
              kSse + " HTTP/1.1\r\nHost: x\r\n\r\n");
    CHECK(wire.read_until("\r\n\r\n").find("Content-Length: 16\r\n") != std::string::npos);
    const std::string preflight = wire.read_until("\r\n\r\n");
    CHECK(preflight.starts_with("HTTP/1.1 204"));
    CHECK(preflight.find("Access-Control-Allow-Origin: https://app.example\r\n") != std::string::npos);
    CHECK(preflight.find("Access-Control-Allow-Headers: x-goog-api-key,content-type\r\n") != std::string::npos);
    const std::string wrong = wire.read_until("\r\n\r\n");
    CHECK(wrong.starts_with("HTTP/1.1 405"));
    CHECK(wrong.find("Allow: POST, OPTIONS\r\n") != std::string::npos);
    CHECK(gateway.post("/nothing", "{}").status == 404);
    CHECK(field(gateway.post(kSse, prompt_body("x"), {"Origin: https://app.example"}), "Access-Control-Allow-Origin") ==
          "https://app.example");
    CHECK(gateway.post(kSse, prompt_body("x"), {"Origin: https://evil.example"}).status == 403);
}

TEST_CASE("a name that a page could have led here is refused where no token is asked for, but for an allowed one") {
    World world;
    const Gateway gateway(world, {"--allow-host", "LLM.example.org"});
    gateway.wait_until_ready();
    const HttpResponse refused = gateway.get("/v1beta/models", {"Host: evil.example:8790"});
    CHECK(refused.status == 403);
    CHECK(Json::parse(refused.body).at("error").at("message").get<std::string>().find("--allow-host evil.example") !=
          std::string::npos);
    CHECK(gateway.get("/healthz", {"Host: llm.example.org"}).status == 200);
    CHECK(gateway.get("/healthz", {"Host: gateway:8790"}).status == 200);
    CHECK(gateway.get("/healthz", {"Host: [::1]:8790"}).status == 200);
    CHECK(gateway.get("/v1beta/models", {"Sec-Fetch-Site: cross-site"}).status == 403); // an image's, say
    CHECK(gateway.get("/healthz", {"Sec-Fetch-Site: none"}).status == 200);             // somebody typed it
    for (const char* hosts : {"", "Host: localhost\r\nHost: evil.example\r\n"}) {
        Wire wire(gateway.port());
        wire.send(std::string("GET /healthz HTTP/1.1\r\n") + hosts + "\r\n");
        CHECK(wire.read_until("\r\n").starts_with("HTTP/1.1 400"));
    }
    CHECK(world.calls() == 0);
}

TEST_CASE("a gateway under test serves on, however long its log grows and nobody reads it") {
    World world;
    const Gateway gateway(world);
    for (int i = 0; i < 40; ++i) REQUIRE(gateway.get("/" + std::string(8'000, 'x')).status == 404);
}

TEST_CASE("what is too large, encoded or no HTTP is refused, and nothing of it reaches the broker") {
    World world;
    const Gateway gateway(world, {"--max-body", "64KiB"});
    gateway.wait_until_ready();
    CHECK(gateway.post(kSse, prompt_body(std::string(100'000, 'x'))).status == 413);
    CHECK(gateway.post(kSse, prompt_body("x"), {"X-Long: " + std::string(40'000, 'x')}).status == 431);
    CHECK(gateway.post(kSse, prompt_body("x"), {"Content-Encoding: gzip"}).status == 415);
    Wire wire(gateway.port());
    wire.send("\x16\x03\x01 no HTTP at all\r\n\r\n");
    CHECK(wire.read_to_end().starts_with("HTTP/1.1 400"));
    CHECK(world.calls() == 0);
}

TEST_CASE("a request that does not come whole in time is refused, and an idle connection is closed") {
    World world;
    const Gateway gateway(world, {"--request-timeout", "200ms", "--idle-timeout", "200ms"});
    Wire slow(gateway.port()), body(gateway.port()), idle(gateway.port());
    slow.send("POST /v1beta/mod");
    body.send("POST " + kSse + " HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{");
    CHECK(slow.read_to_end().starts_with("HTTP/1.1 408"));
    CHECK(body.read_to_end().starts_with("HTTP/1.1 408"));
    CHECK(idle.read_to_end().empty());
}

TEST_CASE("without a broker requests are told so, and answered once it is there") {
    const ScratchInstance instance;
    const Sim sim;
    const Gateway gateway(command(*instance, {"serve"}));
    const HttpResponse none = gateway.post(kSse, prompt_body("x"));
    CHECK(none.status == 503);
    CHECK(field(none, "Retry-After") == "1");
    CHECK(
        eventually([&] { return gateway.post(kSse, prompt_body("x")).body.find("gcoalesced") != std::string::npos; }));
    CHECK(gateway.get("/healthz").status == 503);
    {
        Broker broker(*instance, sim.url());
        gateway.wait_until_ready();
        CHECK(gateway.post(kSse, prompt_body("x")).status == 200);
        broker.process().signal(SIGKILL);
        broker.process().wait();
    }
    const HttpResponse dead = gateway.post(kSse, prompt_body("y"));
    CHECK(dead.status == 503);
    CHECK(gateway.get("/readyz").status == 503);
    const Broker next(*instance, sim.url());
    CHECK(eventually([&] { return gateway.post(kSse, prompt_body("z")).status == 200; }));
}

TEST_CASE("a client that goes away leaves its stream at once, and the others read on") {
    World world;
    const Gateway gateway(world);
    gateway.wait_until_ready();
    const std::string body = prompt_body("leave [sim events=8 hold-after=2]");
    Wire leaves(gateway.port());
    leaves.post(kSse, body);
    leaves.read_until("data: ");
    auto stays = std::async(std::launch::async, [&] { return gateway.post(kSse, body); });
    CHECK(eventually([&] { return subscribers(world) == 2; }));
    leaves.close();
    CHECK(eventually([&] { return subscribers(world) == 1; }));
    world.sim().release();
    CHECK(stays.get().error.empty());
    CHECK(world.calls() == 1);
}

TEST_CASE("a client that takes nothing is cut off after its time, and costs the others nothing") {
    World world({"--memory", "32MiB"});
    Gateway gateway(world, {"--stall-timeout", "300ms"});
    gateway.wait_until_ready();
    const std::string body = prompt_body("large [sim events=30 size=100000 hold-after=1]");
    Wire stalled(gateway.port(), 4096);
    stalled.post(kSse, body);
    stalled.read_until("data: ");
    auto reads = std::async(std::launch::async, [&] { return gateway.post(kSse, body); });
    CHECK(eventually([&] { return subscribers(world) == 2; }));
    world.sim().release();
    const HttpResponse whole = reads.get();
    CHECK(whole.error.empty());
    CHECK(whole.body.size() > 3'000'000);
    gateway.process().wait_for_err("client stalled");
    CHECK_FALSE(stalled.read_to_end().ends_with("0\r\n\r\n"));
    CHECK(eventually([&] { return subscribers(world) == 0; }));
}

TEST_CASE("SIGTERM lets an answer end, takes no further request and exits with 0") {
    World world;
    Gateway gateway(world);
    gateway.wait_until_ready();
    const std::string body = prompt_body("drain [sim events=5 hold-after=2]");
    Wire wire(gateway.port());
    wire.post(kSse, body);
    wire.read_until("data: ");
    gateway.process().signal(SIGTERM);
    CHECK(eventually([&] { return gateway.get("/healthz").status == 0; })); // it listens no more
    world.sim().release();
    CHECK(wire.read_to_end().ends_with("0\r\n\r\n"));
    CHECK(gateway.process().wait() == 0);
}

TEST_CASE("a Unix socket serves, and anything but this machine wants tokens") {
    World world;
    const TemplateDirectory directory;
    const std::string path = directory.path() + "/gateway.sock";
    const Gateway gateway(world, {"--listen", "unix:" + path});
    CHECK(gateway.url() == "unix:" + path);
    const UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof address.sun_path - 1);
    CHECK(::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);

    const Ran refused = world.run({"serve", "--listen", "0.0.0.0:0"});
    CHECK(refused.code == 2);
    CHECK(refused.says("--token-file"));
    CHECK(world.run({"serve", "--listen", "nonsense"}).code == 2);
    CHECK(world.run({"serve", "--listen", "unix:" + path}).says("already"));
}

TEST_CASE("one line a request is logged, and neither key nor prompt is in it") {
    World world;
    Gateway gateway(world);
    gateway.wait_until_ready();
    gateway.post(kSse + "&key=AIzaSecret0123456789", prompt_body("private words"), {"x-goog-api-key: AIzaOther"});
    gateway.process().wait_for_err(":streamGenerateContent\" 200 whole");
    CHECK(gateway.process().err().find("started") != std::string::npos);
    for (const char* secret : {"AIza", "private", "alt=sse"})
        CHECK(gateway.process().err().find(secret) == std::string::npos);
}
