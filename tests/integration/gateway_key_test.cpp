// gcoalesce serve --pass-key: calls that are made with the caller's own API key.
#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/integration/gateway_support.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;
using Json = nlohmann::json;

namespace {

const std::string kMine = "AIzaMine0123456789abcdefghijklmnopqrstu";
const std::string kOther = "AIzaOther123456789abcdefghijklmnopqrstu";

std::vector<std::string> with(const std::string& key) {
    return {"x-goog-api-key: " + key};
}

std::string contents(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

} // namespace

TEST_CASE("with --pass-key a call is made with the key of the request that causes it, else with the broker's") {
    const TemplateDirectory templates;
    templates.write("say.json",
                    R"({"model": "gemini-2.5-flash", "prompt": "Say {{what}}", "variables": {"what": {}}})");
    const TemporaryFile brokers("AIzaBrokers\n"), accepted((GENERATE(true, false) ? kMine : "AIzaBrokers") + "\n");
    World world({"--api-key-file", brokers.path(), "--templates", templates.path()}, {"--accept-key", accepted.path()});
    const Gateway gateway(world, {"--pass-key"});
    gateway.wait_until_ready();
    const bool mine = contents(accepted.path()) == kMine + "\n"; // else upstream takes the broker's alone
    const auto status = [](const HttpResponse& response) {
        CHECK(response.body.find("AIza") == std::string::npos);
        return response.status;
    };
    const int with_mine = mine ? 200 : 400, without = mine ? 400 : 200;
    const std::string bearer = "Authorization: Bearer " + kMine;
    CHECK(status(gateway.post(kSse, prompt_body("a"), with(kMine))) == with_mine);
    CHECK(status(gateway.post(kUnary + "?key=" + kMine, prompt_body("b"))) == with_mine);
    CHECK(status(gateway.post(kUnary + "?k%65y=" + kMine, prompt_body("c"))) == with_mine);
    CHECK(status(gateway.post(kChat, chat_body("d"), {bearer})) == with_mine);
    CHECK(status(gateway.get("/v1beta/models", with(kMine))) == with_mine);
    CHECK(status(gateway.post(kModelPath + ":countTokens?key=" + kMine, prompt_body("e"))) == with_mine);
    CHECK(status(gateway.post(kSse, "{}",
                              {"X-Coalesce-Template: say", R"(X-Coalesce-Vars: {"what": "yes"})", with(kMine)[0]})) ==
          with_mine);
    CHECK(status(gateway.post(kSse, prompt_body("a"))) == without);
    CHECK(status(gateway.post(kChat, chat_body("d"))) == without);
    CHECK(status(gateway.get("/v1beta/models")) == without);
}

TEST_CASE("an answer that one key paid for is shared with requests of that key alone") {
    World world;
    const Gateway gateway(world, {"--pass-key"}), plain(world);
    gateway.wait_until_ready();
    plain.wait_until_ready();
    const auto served = [](const Gateway& by, const std::string& key) {
        return field(by.post(kSse, prompt_body("whose"), key.empty() ? std::vector<std::string>{} : with(key)),
                     "X-Coalesce-Status");
    };
    CHECK(served(gateway, kMine) == "started");
    CHECK(served(gateway, kMine) == "fresh");
    CHECK(served(gateway, kOther) == "started");
    CHECK(served(gateway, kMine) == "fresh");
    CHECK(served(gateway, "") == "started");
    CHECK(served(plain, kMine) == "fresh"); // of the broker's key, which everybody shares
    CHECK(world.calls() == 3);

    SECTION("a running one, too") {
        const std::string body = prompt_body("running [sim events=4 hold-after=1]");
        Wire first(gateway.port()), same(gateway.port()), other(gateway.port());
        first.post(kSse, body, with(kMine)[0] + "\r\n");
        first.read_until("data: ");
        same.post(kSse, body, with(kMine)[0] + "\r\n");
        CHECK(same.read_until("\r\n\r\n").find("X-Coalesce-Status: joined") != std::string::npos);
        other.post(kSse, body, with(kOther)[0] + "\r\n");
        CHECK(other.read_until("\r\n\r\n").find("X-Coalesce-Status: started") != std::string::npos);
        CHECK(world.calls() == 5);
    }
    SECTION("and so is its stream, which goes on for that key alone") {
        const HttpResponse created = gateway.post(kCreate, prompt_body("mine"), with(kMine));
        REQUIRE(created.status == 201);
        const std::string url = Json::parse(created.body).at("url");
        CHECK(gateway.get(url + "?key=" + kMine).status == 200);
        CHECK(gateway.get(url, with(kMine)).status == 200);
        CHECK(gateway.get(url).status == 404);
        CHECK(gateway.get(url, with(kOther)).status == 404);
        const std::string behind = "Last-Event-ID: " + url.substr(url.rfind('/') + 1) + ".1";
        const auto goes_on = [&](const std::string& key) {
            return gateway.post(kSse, prompt_body("mine"), {"X-Coalesce-Key: auto", behind, with(key)[0]});
        };
        CHECK(field(goes_on(kMine), "X-Coalesce-Status") == "resumed");
        CHECK(goes_on(kOther).status == 404);
        CHECK(world.calls() == 4);
    }
}

TEST_CASE(
    "a key that is passed on is nowhere to be found: not in the segment, in logs, on disk, nor in what is shown") {
    const TemplateDirectory state;
    const TemporaryFile accepted(kMine + "\n");
    ScratchInstance instance;
    const Sim sim({"--accept-key", accepted.path()});
    Broker broker(*instance, sim.url(), {"--state-dir", state.path(), "--log-level", "debug", "--retries", "0"});
    Gateway gateway(command(*instance, {"serve", "--pass-key", "--log-level", "debug"}));
    gateway.wait_until_ready();
    const HttpResponse good = gateway.post(kSse, prompt_body("secret"), with(kMine));
    CHECK(good.status == 200);
    CHECK(gateway.post(kSse, prompt_body("secret"), with(kOther)).status == 400);
    CHECK(gateway.get("/v1beta/models?%6bey=" + kMine).status == 200);
    CHECK(gateway.get("/v1beta/models?KEY=" + kMine).status == 403); // no name of a key: upstream got none
    CHECK(eventually([&] { return broker.counted(Counter::snapshots_kept) == 1; }));
    gateway.process().wait_for_err("GET /v1beta/models\" 403");

    std::string everything = contents("/dev/shm" + instance.segment_name());
    REQUIRE(everything.find("secret") != std::string::npos); // the request's head is there, its key is not
    for (const auto& file : std::filesystem::recursive_directory_iterator(state.path())) {
        if (file.is_regular_file()) everything += contents(file.path());
    }
    for (const std::vector<std::string>& words : std::vector<std::vector<std::string>>{
             {"show", field(good, "X-Coalesce-Key"), "--json"}, {"keys", "--json"}, {"log"}, {"stats"}, {"clients"}})
        everything += run(command(*instance, words)).out;
    everything += gateway.process().err() + broker.process().err();
    CHECK(everything.find("AIza") == std::string::npos);
}

TEST_CASE("a key that no header can carry is refused, and --pass-key goes with no tokens") {
    World world;
    Gateway gateway(world, {"--pass-key"});
    gateway.wait_until_ready();
    for (const std::string& key :
         {std::string(300, 'k'), std::string("a%0d%0ab"), std::string("a+b"), std::string("%ff")}) {
        const HttpResponse refused = gateway.post(kUnary + "?key=" + key, prompt_body("x"));
        CHECK(refused.status == 400);
        CHECK(refused.body.find("API key") != std::string::npos);
        CHECK(refused.body.find(key) == std::string::npos);
    }
    CHECK(world.calls() == 0);
    const TemporaryFile tokens("ann:" + std::string(64, '0') + "\n");
    const Ran both = world.run({"serve", "--listen", "127.0.0.1:0", "--pass-key", "--token-file", tokens.path()});
    CHECK(both.code == 2);
    CHECK(both.says("--token-file"));
}
