// gcoalesce serve's own routes: streams for EventSource, the window, tokens, health.
#include <catch2/catch.hpp>
#include <csignal>
#include <future>

#include "base/sha256.hpp"
#include "protocol/sse.hpp"
#include "tests/integration/gateway_support.hpp"
#include "tests/support/exposition.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;
using Json = nlohmann::json;

namespace {

struct Event {
    std::string id, type, data;
    bool operator==(const Event&) const = default;
};

// As an EventSource reads them.
std::vector<Event> events(const std::string& body) {
    std::vector<Event> all;
    SseParser parser(1 << 20);
    REQUIRE(parser.feed(body, [&](const SseEvent& event) {
        all.push_back({std::string(event.last_event_id), std::string(event.type), std::string(event.data)});
    }));
    return all;
}

std::string id_of(const HttpResponse& created) {
    return Json::parse(created.body).at("stream");
}

// A gateway before a broker whose streams linger.
struct Stage {
    explicit Stage(std::vector<std::string> broker_options = {}, std::vector<std::string> arguments = {})
        : world(std::move(broker_options)), gateway(world, std::move(arguments)) {
        gateway.wait_until_ready();
    }
    World world;
    Gateway gateway;

    std::string create(const std::string& prompt) {
        const HttpResponse created = gateway.post(kCreate, prompt_body(prompt));
        REQUIRE(created.status == 201);
        return id_of(created);
    }
    // Read to its end.
    std::vector<Event> read(const std::string& id, const std::vector<std::string>& headers = {}) {
        const HttpResponse response = gateway.get("/v1/streams/" + id, headers);
        CHECK(response.status == 200);
        CHECK(response.error.empty());
        return events(response.body);
    }
};

std::string in_hex(const std::string& text) {
    // sha256sum, as whoever writes a token file runs it.
    const Ran ran = run({"/bin/sh", "-c", "printf %s \"$0\" | sha256sum", text});
    return ran.out.substr(0, 64);
}

} // namespace

TEST_CASE("a stream is created, found at its URL, and read with ids and an end") {
    Stage stage;
    const HttpResponse created = stage.gateway.post(kCreate, prompt_body("tell [sim events=5]"));
    CHECK(created.status == 201);
    const Json told = Json::parse(created.body);
    const std::string id = told.at("stream");
    CHECK(field(created, "Location") == "/v1/streams/" + id);
    CHECK(told.at("url") == "/v1/streams/" + id);
    CHECK(told.at("status") == "started");
    CHECK(field(created, "X-Coalesce-Key") == told.at("key"));

    const HttpResponse response = stage.gateway.get("/v1/streams/" + id);
    CHECK(field(response, "Content-Type") == "text/event-stream");
    const std::vector<Event> all = events(response.body);
    REQUIRE(all.size() == 6);
    for (std::size_t i = 0; i < 5; ++i) CHECK(all[i].id == id + "." + std::to_string(i + 1));
    CHECK(response.body.find("id: " + id + ".1\ndata: {") != std::string::npos); // in one block
    CHECK(all.back().type == "end");
    CHECK(Json::parse(all.back().data) == Json{{"ending", "complete"}, {"finish_reason", "STOP"}});
    CHECK(stage.world.calls() == 1);

    CHECK(id_of(stage.gateway.post(kCreate, prompt_body("tell [sim events=5]"))) == id);
}

TEST_CASE("a stream is created of a template and its variables") {
    const TemplateDirectory templates;
    templates.write("weather.json",
                    R"({"model": "gemini-2.5-flash", "prompt": "The weather in {{city}}", "variables": {"city": {}}})");
    Stage stage({"--templates", templates.path()});
    const HttpResponse created =
        stage.gateway.post("/v1/streams", R"({"template": "weather", "variables": {"city": "Oslo"}})");
    CHECK(created.status == 201);
    CHECK(stage.read(id_of(created)).back().type == "end");
    CHECK(stage.gateway.post("/v1/streams", R"({"template": "none", "variables": {}})").status == 404);
    CHECK(stage.gateway.post("/v1/streams", R"({"template": "weather", "more": 1})").status == 400);
    CHECK(stage.gateway.post("/v1/streams", "no JSON").status == 400);
    // As the variables were spelled, whichever way they come; none of them twice.
    const std::string number = R"({"city": 1.10})";
    const HttpResponse body =
        stage.gateway.post("/v1/streams", R"({"template": "weather", "variables": )" + number + "}");
    const HttpResponse header = stage.gateway.get("/v1/streams/" + id_of(body));
    const HttpResponse asked =
        stage.gateway.post(kSse, "{}", {"X-Coalesce-Template: weather", "X-Coalesce-Vars: " + number});
    CHECK(field(header, "X-Coalesce-Key") == field(asked, "X-Coalesce-Key"));
    for (const char* twice : {R"({"template": "weather", "variables": {"city": "a", "city": "b"}})",
                              R"({"template": "weather", "template": "weather", "variables": {"city": "a"}})",
                              R"({"template": "weather", "variables": {"city": "a"}, "variables": {"city": "a"}})"})
        CHECK(stage.gateway.post("/v1/streams", twice).status == 400);
}

TEST_CASE("T54: behind the last event of an ended stream there is nothing, behind event k comes k+1") {
    Stage stage;
    const std::string id = stage.create("resume [sim events=6]");
    const std::vector<Event> all = stage.read(id);
    REQUIRE(all.size() == 7);
    const HttpResponse end = stage.gateway.get("/v1/streams/" + id, {"Last-Event-ID: " + id + ".6"});
    CHECK(end.status == 204);
    CHECK(end.body.empty());
    CHECK(field(end, "X-Coalesce-Ending") == "complete");
    for (std::size_t k = 0; k < 6; ++k) {
        const std::vector<Event> rest = stage.read(id, {"Last-Event-ID: " + id + "." + std::to_string(k)});
        CHECK(rest == std::vector<Event>(all.begin() + static_cast<std::ptrdiff_t>(k), all.end()));
    }
    // Where a client cannot set a header.
    CHECK(events(stage.gateway.get("/v1/streams/" + id + "?lastEventId=" + id + ".4").body).size() == 3);
    CHECK(stage.world.calls() == 1);
}

TEST_CASE("a stream that failed before its first event is an error to whoever comes to read it") {
    Stage stage;
    const std::string id = stage.create("nothing [sim status=503]");
    HttpResponse response;
    CHECK(eventually([&] {
        response = stage.gateway.get("/v1/streams/" + id); // while it runs, an event tells the error
        return response.status != 200;
    }));
    CHECK(response.status == 503);
    CHECK(Json::parse(response.body).at("error").at("status") == "UNAVAILABLE");
}

TEST_CASE("T55: an id that is malformed, of another stream, in the future or unknown is refused in so many words") {
    Stage stage;
    const std::string id = stage.create("ids [sim events=3]"), other = stage.create("other");
    stage.read(id);
    const auto status = [&](const std::string& path, const std::string& last) {
        const HttpResponse response = stage.gateway.get(path, {"Last-Event-ID: " + last});
        CHECK_FALSE(Json::parse(response.body).at("error").at("message").get<std::string>().empty());
        return response.status;
    };
    const std::string path = "/v1/streams/" + id;
    CHECK(status(path, "nonsense") == 400);
    CHECK(status(path, other + ".1") == 400);
    CHECK(status(path, id + ".99") == 400);
    CHECK(status("/v1/streams/0123456789abcdef", "0123456789abcdef.1") == 404);
    CHECK(stage.gateway.get("/v1/streams/xyz").status == 400);
}

TEST_CASE("T56: a stream that was dropped is gone, one on disk goes on, one that never was is unknown") {
    SECTION("no disk") {
        Stage stage({"--linger", "1ms", "--ttl-idle", "1ms"});
        const std::string id = stage.create("drop");
        // Not by reading it: whoever reads a stream keeps it.
        CHECK(eventually([&] { return stage.world.run({"keys", "--json"}).json().at("keys").empty(); }));
        CHECK(stage.gateway.get("/v1/streams/" + id).status == 410);
    }
    SECTION("a disk") {
        const TemplateDirectory state;
        Stage stage({"--linger", "1ms", "--ttl-idle", "1ms", "--state-dir", state.path()});
        const std::string id = stage.create("keep [sim events=4]");
        CHECK(eventually([&] {
            return stage.world.run({"keys", "--json"}).json().at("keys").empty() && // it has left the segment
                   stage.world.broker().counted(Counter::snapshots_kept) == 1;
        }));
        CHECK(stage.read(id, {"Last-Event-ID: " + id + ".2"}).size() == 3);
    }
}

TEST_CASE("T57: an id of before a restart goes on with its own answer or is refused") {
    const ScratchInstance instance;
    const Sim sim;
    const TemplateDirectory state;
    const bool disk = GENERATE(true, false);
    std::vector<std::string> options{"--retries", "0"};
    if (disk) options.insert(options.end(), {"--state-dir", state.path()});
    const Gateway gateway(command(*instance, {"serve"}));
    std::string id, before;
    {
        Broker broker(*instance, sim.url(), options);
        gateway.wait_until_ready();
        id = id_of(gateway.post(kCreate, prompt_body("restart [sim events=4]")));
        before = gateway.get("/v1/streams/" + id).body;
        CHECK(broker.stop() == 0);
    }
    const Broker next(*instance, sim.url(), options);
    CHECK(eventually([&] { return gateway.post(kSse, prompt_body("other")).status == 200; }));
    CHECK(gateway.post(kSse, prompt_body("restart [sim events=4]")).status == 200); // another answer to the same key
    const HttpResponse after = gateway.get("/v1/streams/" + id, {"Last-Event-ID: " + id + ".2"});
    if (disk) {
        CHECK(after.status == 200);
        const std::vector<Event> all = events(before), rest = events(after.body);
        REQUIRE(rest.size() == 3);
        CHECK(std::equal(rest.begin(), rest.end(), all.begin() + 2));
    } else {
        CHECK((after.status == 404 || after.status == 410));
    }
}

TEST_CASE("T58: two readers of one stream each get all of it, and a late one what was before") {
    Stage stage;
    const std::string id = stage.create("tabs [sim events=6 hold-after=3]");
    Wire early(stage.gateway.port());
    early.send("GET /v1/streams/" + id + " HTTP/1.1\r\nHost: x\r\n\r\n");
    early.read_until(id + ".3\n");
    Wire late(stage.gateway.port());
    late.send("GET /v1/streams/" + id + " HTTP/1.1\r\nHost: x\r\n\r\n");
    late.read_until(id + ".3\n");
    stage.world.sim().release();
    for (Wire* wire : {&early, &late}) CHECK(wire->read_until("0\r\n\r\n").find(id + ".6\n") != std::string::npos);
    CHECK(stage.world.calls() == 1);
}

TEST_CASE("T41: silence below the limit reaches readers as heartbeats, silence beyond it as a truncated end") {
    Stage stage({"--event-gap-timeout", "1s"}, {"--heartbeat", "100ms"});
    const std::string id = stage.create("silent [sim events=6 hang-after=2]");
    const HttpResponse response = stage.gateway.get("/v1/streams/" + id);
    CHECK(response.status == 200);
    std::size_t beats = 0;
    for (std::size_t at = response.body.find("\n\n:\n\n"); at != std::string::npos;
         at = response.body.find("\n\n:\n\n", at + 1))
        ++beats;
    CHECK(beats >= 1);
    const std::vector<Event> all = events(response.body);
    REQUIRE(all.size() == 3);
    const Json end = Json::parse(all.back().data);
    CHECK(end.at("ending") == "truncated");
    CHECK(end.at("error").at("code") == 504);
    const HttpResponse again = stage.gateway.get("/v1/streams/" + id, {"Last-Event-ID: " + all[1].id});
    CHECK(again.status == 204);
    CHECK(field(again, "X-Coalesce-Ending") == "truncated");
}

TEST_CASE("T41: heartbeats go to those whose events have ids; on the API's own paths silence adds not one byte") {
    Stage stage({}, {"--heartbeat", "100ms"});
    const std::string prompt = "quiet [sim events=5 hold-after=2]", chat = "/v1beta/openai/chat/completions";
    const std::string body = prompt_body(prompt);
    const std::string chat_body = Json{
        {"model", "gemini-2.5-flash"},
        {"messages", Json::array({{{"role", "user"}, {"content", prompt}}})},
        {"stream", true}}.dump();
    const std::string id = stage.create(prompt);
    Wire sse(stage.gateway.port()), array(stage.gateway.port()), chats(stage.gateway.port());
    sse.post(kSse, body);
    array.post(kArray, body);
    chats.post(chat, chat_body);
    std::vector<std::string> begun;
    for (Wire* wire : {&sse, &array, &chats}) begun.push_back(wire->read_until("\r\n\r\n"));
    Wire source(stage.gateway.port()), with_ids(stage.gateway.port());
    source.send("GET /v1/streams/" + id + " HTTP/1.1\r\nHost: x\r\n\r\n");
    with_ids.post(kSse, body, "X-Coalesce-Key: auto\r\n");
    for (Wire* wire : {&source, &with_ids}) {
        wire->read_until(".2\ndata: ");
        for (int beat = 0; beat < 4; ++beat) wire->read_until("\r\n:\n\n\r\n"); // a chunk of its own
    }
    stage.world.sim().release();
    for (Wire* wire : {&source, &with_ids})
        CHECK(wire->read_until("0\r\n\r\n").find(".5\ndata: ") != std::string::npos);
    const auto whole = [](Wire& wire) {
        std::string text;
        for (;;) { // chunk by chunk
            const std::size_t size = std::stoul(wire.read_until("\r\n"), nullptr, 16);
            const std::string chunk = wire.read_bytes(size + 2);
            if (size == 0) return text;
            text += chunk.substr(0, size);
        }
    };
    const std::string all = whole(sse);
    CHECK(whole(array) == stage.gateway.post(kArray, body).body);
    CHECK(whole(chats) == stage.gateway.post(chat, chat_body).body);
    CHECK(all == stage.gateway.post(kSse, body).body);
    CHECK(stage.world.calls() == 2);
    stage.world.sim().reset();
    auto direct = std::async(std::launch::async, [&] { return http(stage.world.sim().url() + kSse, body); });
    CHECK(eventually([&] { return stage.world.calls() == 1; }));
    stage.world.sim().release();
    CHECK(all == direct.get().body);
}

TEST_CASE("a client of the Gemini path that names a key gets ids, and goes on where it stopped") {
    Stage stage;
    const std::string body = prompt_body("opted in [sim events=5]");
    const HttpResponse first = stage.gateway.post(kSse, body, {"X-Coalesce-Key: auto"});
    const std::vector<Event> all = events(first.body);
    REQUIRE(all.size() == 5);
    const std::string key = field(first, "X-Coalesce-Key"), id = field(first, "X-Coalesce-Stream");
    CHECK(all.back().id == id + ".5");
    const auto resume = [&](const std::string& with, const std::string& last) {
        return stage.gateway.post(kSse, body, {"X-Coalesce-Key: " + with, "Last-Event-ID: " + last});
    };
    const HttpResponse rest = resume(key, id + ".3");
    CHECK(field(rest, "X-Coalesce-Status") == "resumed");
    CHECK(events(rest.body) == std::vector<Event>(all.begin() + 3, all.end()));
    CHECK(resume(key, id + ".5").status == 204);
    CHECK(resume(std::string(64, '0'), id + ".3").status == 400); // another key's answer is spliced to nothing
    CHECK(resume(key, "0123456789abcdef.1").status == 404);
    // Without the key, the header means nothing here.
    CHECK(stage.gateway.post(kSse, body, {"Last-Event-ID: " + id + ".3"}).body.starts_with("data: "));
    CHECK(stage.world.calls() == 1);
}

TEST_CASE("T102: a broker whose loop is wedged fails the health check, though its socket accepts") {
    Stage stage({}, {"--log-level", "error"}); // nobody reads its log, which would fill up while we poll
    CHECK(stage.gateway.get("/healthz").status == 200);
    stage.world.broker().process().signal(SIGSTOP);
    CHECK(eventually([&] { return stage.gateway.get("/healthz").status == 503; }));
    CHECK(stage.gateway.get("/readyz").status == 503);
    const HttpResponse asked = stage.gateway.post(kSse, prompt_body("x"));
    CHECK(asked.status == 503);
    CHECK(asked.body.find("UNRESPONSIVE") != std::string::npos);
    stage.world.broker().process().signal(SIGCONT);
    CHECK(eventually([&] { return stage.gateway.get("/healthz").status == 200; }));
    CHECK(stage.gateway.post(kSse, prompt_body("x")).status == 200);
}

TEST_CASE("the broker's numbers are there for Prometheus, and say when it is away") {
    Stage stage;
    CHECK(stage.gateway.post(kSse, prompt_body("x")).status == 200);
    const HttpResponse page = stage.gateway.get("/metrics");
    CHECK(page.status == 200);
    CHECK(field(page, "Content-Type") == "text/plain; version=0.0.4; charset=utf-8");
    const Exposition read = read_exposition(page.body);
    CHECK(read.faults == std::vector<std::string>{});
    CHECK(read.samples.at("gcoalesce_up") == 1);
    CHECK(read.samples.at("gcoalesce_upstream_calls_total") == 1);
    CHECK(stage.gateway.post("/metrics", "{}").status == 405);
    stage.world.broker().process().signal(SIGKILL);
    stage.world.broker().process().wait();
    CHECK(read_exposition(stage.gateway.get("/metrics").body).samples.at("gcoalesce_up") == 0);
}

TEST_CASE("tokens decide who may ask and who may command, and share for themselves where the template says so") {
    const TemplateDirectory templates;
    templates.write("mine.json", R"({"model": "gemini-2.5-flash", "prompt": "{{q}}", "variables": {"q": {}},
                                     "realm": "token"})");
    const TemporaryFile tokens("# who\nann:" + in_hex("ann's secret") + "\n\nops:" + in_hex("ops' secret") +
                               ":admin\n");
    Stage stage({"--templates", templates.path()}, {"--token-file", tokens.path()});
    const std::vector<std::string> ann{"Authorization: Bearer ann's secret"}, ops{"x-goog-api-key: ops' secret"};

    CHECK(stage.gateway.post(kSse, prompt_body("x")).status == 401);
    CHECK(stage.gateway.post(kSse, prompt_body("x"), {"Authorization: Bearer wrong"}).status == 401);
    CHECK(field(stage.gateway.post(kSse, prompt_body("x"), ann), "X-Coalesce-Status") == "started");
    CHECK(field(stage.gateway.post(kSse, prompt_body("x"), ops), "X-Coalesce-Status") == "fresh");
    CHECK(stage.gateway.get("/healthz").status == 200);
    stage.gateway.process().wait_for_err(" ann\n");

    const auto mine = [&](std::vector<std::string> headers) {
        headers.insert(headers.end(), {"X-Coalesce-Template: mine", R"(X-Coalesce-Vars: {"q": "x"})"});
        return field(stage.gateway.post(kSse, "{}", headers), "X-Coalesce-Status");
    };
    CHECK(mine(ann) == "started");
    CHECK(mine(ops) == "started");
    CHECK(mine(ann) == "fresh");

    SECTION("the window") {
        CHECK(stage.gateway.post("/v1/notify", "{}", ann).status == 403);
        const HttpResponse opened = stage.gateway.post("/v1/notify?for=30s&template=mine", "{}", ops);
        CHECK(opened.status == 200);
        const std::int64_t open = Json::parse(opened.body).at("window_open_ms");
        CHECK((open > 20'000 && open <= 30'000));
        CHECK(Json::parse(stage.gateway.post("/v1/notify", R"({"action": "off"})", ops).body).at("window_open_ms") ==
              0);
        CHECK(stage.gateway.post("/v1/notify", R"({"templates": ["none"]})", ops).status == 404);
        CHECK(stage.gateway.post("/v1/notify", R"({"for": "soon"})", ops).status == 400);
        CHECK(stage.gateway.post("/v1/notify", R"({"what": 1})", ops).status == 400);
        const HttpResponse misspelt = stage.gateway.post("/v1/notify?acton=off", "{}", ops);
        CHECK(misspelt.status == 400);
        CHECK(stage.gateway.post("/v1/notify?=off", "{}", ops).status == 400);
        for (const char* query : {"?template=", "?template=mine&template=", "?action=on&action=off", "?for="})
            CHECK(stage.gateway.post(std::string("/v1/notify") + query, "{}", ops).status == 400);
        CHECK(stage.gateway.post("/v1/notify?action=off", R"({"action": "on"})", ops).status == 400);
        CHECK(stage.gateway.post("/v1/notify", R"({"action": "off", "action": "on"})", ops).status == 400);
        CHECK(stage.gateway.post("/v1/notify", R"({"templates": []})", ops).status == 400);
        CHECK(stage.gateway.post("/v1/notify", R"({"templates": [""]})", ops).status == 400);
        CHECK(misspelt.body.find("found \\\"acton\\\"") != std::string::npos);
    }
}

TEST_CASE("a token file that is wrong is refused, and nothing of it is repeated") {
    World world;
    const std::string one(64, '0'), other(64, '1');
    for (const std::string& text : std::vector<std::string>{"ann:secret\n", "ann\n", "", "a:" + one + ":boss\n",
                                                            "a:" + one + "\na:" + other + "\n"}) {
        const TemporaryFile tokens(text);
        const Ran ran = world.run({"serve", "--listen", "127.0.0.1:0", "--token-file", tokens.path()});
        CHECK(ran.code == 2);
        CHECK_FALSE(ran.says("secret"));
    }
}

TEST_CASE("the window is nobody's to open where there are no tokens") {
    Stage stage;
    CHECK(stage.gateway.post("/v1/notify", "{}").status == 403);
}

TEST_CASE("readers whose gateway is killed go on at another one, and end with the exact answer") {
    Stage stage;
    Gateway other(stage.world);
    other.wait_until_ready();
    const std::string id = stage.create("killed [sim events=8 hold-after=4]");
    Wire wire(stage.gateway.port());
    wire.send("GET /v1/streams/" + id + " HTTP/1.1\r\nHost: x\r\n\r\n");
    const std::string head = wire.read_until(id + ".4\n");
    stage.gateway.process().signal(SIGKILL);
    stage.gateway.process().wait();
    stage.world.sim().release();
    const HttpResponse rest = other.get("/v1/streams/" + id, {"Last-Event-ID: " + id + ".4"});
    const std::vector<Event> all = events(other.get("/v1/streams/" + id).body);
    REQUIRE(all.size() == 9);
    CHECK(events(rest.body) == std::vector<Event>(all.begin() + 4, all.end()));
    CHECK(stage.world.calls() == 1);
}
