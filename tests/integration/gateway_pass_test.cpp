// gcoalesce serve on the rest of the API: what is passed on, and the OpenAI form.
#include <catch2/catch.hpp>
#include <future>

#include "tests/integration/gateway_support.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;
using Json = nlohmann::json;

TEST_CASE("what is no answer of a model is passed on, with upstream's own bytes, and shared with nobody") {
    World world;
    const Gateway gateway(world);
    gateway.wait_until_ready();
    const auto same = [&](const HttpResponse& through, const HttpResponse& direct) {
        CHECK(through.status == 200);
        CHECK(through.error.empty());
        CHECK(through.body == direct.body);
        CHECK(field(through, "Content-Type") == field(direct, "Content-Type"));
        CHECK(field(through, "X-Coalesce-Status") == "bypass");
    };
    const std::string count = kModelPath + ":countTokens";
    for (int i = 0; i < 2; ++i)
        same(gateway.post(count, prompt_body("how long is this")),
             http(world.sim().url() + count, prompt_body("how long is this")));
    same(gateway.get("/v1beta/models"), http(world.sim().url() + "/v1beta/models"));
    same(gateway.get("/models/gemini-2.5-pro?key=mine"), http(world.sim().url() + "/v1beta/models/gemini-2.5-pro"));
    CHECK(gateway.get("/v1beta/models/none").status == 404);
    CHECK(gateway.post(kModelPath + ":embedContent", "{}").status == 404); // the stand-in has no embeddings
    Wire wire(gateway.port());
    wire.send("GET /v1beta/../sim/calls HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    CHECK(wire.read_to_end().starts_with("HTTP/1.1 400"));
    CHECK(gateway.get("/sim/calls").status == 404);
    CHECK(eventually([&] { return world.run({"keys", "--json"}).out.find("key=") == std::string::npos; }));
}

TEST_CASE("upstream sees the broker's key and never the client's") {
    const TemporaryFile key("AIzaBrokers\n");
    World world({"--api-key-file", key.path()}, {"--accept-key", key.path()});
    Gateway gateway(world);
    gateway.wait_until_ready();
    const std::vector<std::string> mine{"x-goog-api-key: AIzaMine", "Authorization: Bearer AIzaMine"};
    CHECK(gateway.post(kSse + "&key=AIzaMine", prompt_body("x"), mine).status == 200);
    CHECK(gateway.get("/v1beta/models?key=AIzaMine", mine).status == 200);
    CHECK(gateway.post(kChat, chat_body("x", true), mine).status == 200);
    CHECK(gateway.process().err().find("AIza") == std::string::npos);
    CHECK(http(world.sim().url() + "/v1beta/models?key=AIzaMine").status == 400);
}

TEST_CASE("the OpenAI form is shared, streamed with [DONE] and not, with upstream's own bytes") {
    World world;
    const Gateway gateway(world);
    gateway.wait_until_ready();
    for (const bool stream : {true, false}) {
        const std::string body = chat_body("chat [sim events=5]", stream);
        const HttpResponse through = gateway.post(kChat, body);
        const std::string again = field(gateway.post(kChat, body), "X-Coalesce-Status");
        CHECK((again == "fresh" || again == "joined")); // a whole document is there before its stream has ended
        CHECK(world.calls() == 1);
        world.sim().reset();
        const HttpResponse direct = http(world.sim().url() + kChat, body);
        CHECK(through.status == 200);
        CHECK(through.error.empty());
        CHECK(through.body == direct.body);
        CHECK(field(through, "Content-Type") == field(direct, "Content-Type"));
        if (stream) CHECK(through.body.ends_with("data: [DONE]\n\n"));
        world.sim().reset();
    }
}

TEST_CASE("a herd of the OpenAI form causes one call, and each of the two forms has its own answer") {
    World world;
    const Gateway gateway(world);
    gateway.wait_until_ready();
    const std::string body = chat_body("many [sim events=4 hold-after=1]", true);
    std::vector<std::future<HttpResponse>> asked;
    for (int i = 0; i < 10; ++i)
        asked.push_back(std::async(std::launch::async, [&] { return gateway.post(kChat, body); }));
    CHECK(eventually([&] {
        const Json keys = world.run({"keys", "--json"}).json().at("keys");
        return keys.size() == 1 && keys[0].at("subscribers") == 10;
    }));
    world.sim().release();
    const std::string first = asked.front().get().body;
    for (std::size_t i = 1; i < asked.size(); ++i) CHECK(asked[i].get().body == first);
    CHECK(world.calls() == 1);
    CHECK(gateway.post(kChat, chat_body("many [sim events=4 hold-after=1]", false)).status == 200);
    CHECK(world.calls() == 2);
}

TEST_CASE("the OpenAI form tells errors as errors, before the first byte and in mid-stream") {
    World world;
    const Gateway gateway(world);
    gateway.wait_until_ready();
    const HttpResponse within = gateway.post(kChat, chat_body("y [sim events=4 cut-after=2]", true));
    CHECK(within.status == 200);
    CHECK_FALSE(within.error.empty());
    CHECK(within.body.find("[DONE]") == std::string::npos);
    CHECK(Json::parse(within.body.substr(within.body.rfind("data: ") + 6)).contains("error"));
    const HttpResponse before = gateway.post(kChat, chat_body("x [sim status=429 retry=7s array-error]", true));
    CHECK(before.status == 429);
    CHECK(Json::parse(before.body).at("error").at("status") == "RESOURCE_EXHAUSTED");
    CHECK_FALSE(field(before, "Retry-After").empty());
    CHECK(gateway.post(kChat, "{}").status == 400);
    CHECK(gateway.post(kChat, "no JSON").status == 400);
    CHECK(gateway.post(kChat, chat_body("x", true), {"X-Coalesce-Template: weather"}).status == 400);
}

TEST_CASE("T100: a call that is passed on counts as a request and a call, and counts no tokens") {
    World world;
    const Gateway gateway(world);
    gateway.wait_until_ready();
    CHECK(gateway.post("/v1beta/files", "no JSON", {"Content-Type: text/plain"}).status == 415);
    const HttpResponse told = gateway.post(kModelPath + ":countTokens", prompt_body("how long is this"));
    REQUIRE(told.status == 200);
    CHECK(Json::parse(told.body).at("totalTokens") > 0);
    const auto total = world.run({"stats", "--json"}).json().at("total");
    CHECK(total.at("calls_paid") == 1);
    CHECK(total.at("calls_avoided") == 0);
    CHECK(total.at("requests").at("bypass") == 1);
    const Json none{{"prompt", 0}, {"cached", 0}, {"thoughts", 0}, {"answer", 0}};
    CHECK(total.at("tokens_paid") == none);
    CHECK(total.at("tokens_avoided") == none);
    // One that is shared counts what upstream reports.
    REQUIRE(gateway.post(kSse, prompt_body("a question")).status == 200);
    CHECK(world.run({"stats", "--json"}).json().at("total").at("tokens_paid").at("prompt") > 0);
}
