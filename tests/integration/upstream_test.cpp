#include "broker/curl_upstream.hpp"

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/write.hpp>
#include <catch2/catch.hpp>
#include <csignal>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "broker/asio_timers.hpp"
#include "broker/producer.hpp"
#include "tests/support/memory_segment.hpp"
#include "tests/support/sim.hpp"
#include "tests/support/tls_front.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;
namespace asio = boost::asio;
using asio::ip::tcp;

namespace {

// What one call told.
struct Recorder final : UpstreamEvents {
    std::vector<std::string> order; // "sent", "head", "bytes" (once in a row), "done"
    int status = 0;
    std::int64_t retry_after_ms = 0;
    std::string body;
    bool done = false;
    bool clean = false;
    Error error;
    std::function<void(const std::string& what)> then; // runs within the event
    std::unique_ptr<RunningCall> running;

    void tell(const char* what) {
        if (order.empty() || order.back() != what) order.emplace_back(what);
        if (const auto run = then) run(what); // a copy: it may destroy the call and clear itself
    }
    void on_sent() override { tell("sent"); }
    void on_head(int http_status, std::int64_t retry_after) override {
        status = http_status;
        retry_after_ms = retry_after;
        tell("head");
    }
    void on_bytes(std::string_view bytes) override {
        body += bytes;
        tell("bytes");
    }
    void on_done(bool was_clean, const Error& why) override {
        done = true;
        clean = was_clean;
        error = why;
        tell("done");
    }

    std::size_t events() const { // of an event stream
        std::size_t count = 0;
        for (std::size_t at = 0; (at = body.find("data: ", at)) != std::string::npos; ++at) ++count;
        return count;
    }
};

struct Bench {
    explicit Bench(CurlUpstreamOptions options) : upstream(make(options)) { std::signal(SIGPIPE, SIG_IGN); }
    explicit Bench(const std::string& url) : Bench(with_url(url)) {}

    static CurlUpstreamOptions with_url(const std::string& url) {
        CurlUpstreamOptions options;
        options.url = url;
        return options;
    }
    std::unique_ptr<CurlUpstream> make(const CurlUpstreamOptions& options) {
        auto made = CurlUpstream::create(loop, options);
        if (!made) throw std::runtime_error(made.error().message);
        return *std::move(made);
    }

    void start(Recorder& recorder, const std::string& body, Method method = Method::stream,
               const std::string& model = "gemini-2.5-flash") {
        const bool quiet = recorder.order.empty();
        recorder.running = upstream->start({method, model, std::make_shared<const std::string>(body)}, recorder);
        if (quiet) CHECK(recorder.order.empty()); // nothing is told from within start()
    }

    template <class Condition>
    void run_until(Condition condition) {
        loop.restart();
        const auto watchdog = std::chrono::steady_clock::now() + std::chrono::seconds(60);
        while (!condition()) {
            if (std::chrono::steady_clock::now() > watchdog) throw std::runtime_error("nothing came within a minute");
            loop.run_one_for(std::chrono::milliseconds(50));
        }
    }
    void finish(Recorder& recorder) {
        run_until([&] { return recorder.done; });
    }
    void ask(Recorder& recorder, const std::string& prompt, Method method = Method::stream) {
        start(recorder, prompt_body(prompt), method);
        finish(recorder);
    }

    asio::io_context loop;
    std::unique_ptr<CurlUpstream> upstream;
};

// Takes one connection after the other; whenever what it has read ends as told, it answers with the same bytes.
class RawServer {
  public:
    RawServer(std::string end_of_request, std::string response, bool close)
        : end_(std::move(end_of_request)),
          response_(std::move(response)),
          close_(close),
          thread_([this] { serve(); }) {}
    ~RawServer() {
        ::shutdown(acceptor_.native_handle(), SHUT_RDWR); // wakes accept()
        ::shutdown(connection_, SHUT_RDWR);
        thread_.join();
    }
    std::string url() const { return fmt::format("http://127.0.0.1:{}", acceptor_.local_endpoint().port()); }
    // Once a call is done, its request stands here.
    const std::string& request() const { return request_; }
    int connections() const { return connections_; }

  private:
    void serve() {
        for (;;) {
            boost::system::error_code failed;
            tcp::socket socket(loop_);
            acceptor_.accept(socket, failed);
            if (failed) return;
            connection_ = socket.native_handle();
            ++connections_;
            std::string read;
            char buffer[65536];
            while (!failed) {
                read.append(buffer, socket.read_some(asio::buffer(buffer), failed));
                if (!read.ends_with(end_)) continue;
                request_ = std::exchange(read, {});
                asio::write(socket, asio::buffer(response_), failed);
                if (close_) break;
            }
            connection_ = -1;
        }
    }

    asio::io_context loop_;
    tcp::acceptor acceptor_{loop_, {asio::ip::address_v4::loopback(), 0}};
    std::string end_, response_, request_;
    bool close_;
    std::atomic<int> connection_{-1}, connections_{0};
    std::thread thread_;
};

constexpr const char* kBody = R"({"contents": []})";
constexpr const char* kEmptyOk = "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";

std::uint64_t count(const Sim& sim, const char* what) {
    return nlohmann::json::parse(sim.calls()).at(what).get<std::uint64_t>();
}

// Until the other side has seen that the call is gone; the loop runs on meanwhile.
void run_until_none_in_flight(Bench& bench, const Sim& sim) {
    bench.run_until([&] {
        bench.loop.poll();
        bench.loop.restart();
        return count(sim, "in_flight") == 0;
    });
}

using Order = std::vector<std::string>;

} // namespace

// ---- what goes upstream ---------------------------------------------------------------------------------------------

TEST_CASE("The request on the wire is Gemini's: path, key, type, body byte for byte, and no Expect") {
    RawServer server(kBody, kEmptyOk, false);
    Bench bench(server.url() + "/");
    bench.upstream->set_key(ApiKey("test-key-1"));
    struct Row {
        Method method;
        const char *model, *line;
    };
    for (const Row& row :
         {Row{Method::stream, "gemini-2.5-flash", "POST /v1beta/models/gemini-2.5-flash:streamGenerateContent?alt=sse"},
          Row{Method::unary, "gemini-2.5-pro", "POST /v1beta/models/gemini-2.5-pro:generateContent"},
          Row{Method::unary, "tunedModels/mine", "POST /v1beta/tunedModels/mine:generateContent"}}) {
        Recorder call;
        bench.start(call, kBody, row.method, row.model);
        bench.finish(call);
        const std::string& request = server.request();
        CHECK_THAT(request, Catch::StartsWith(std::string(row.line) + " HTTP/1.1\r\n"));
        CHECK_THAT(request, Catch::Contains("\r\nx-goog-api-key: test-key-1\r\n"));
        CHECK_THAT(request, Catch::Contains("\r\ncontent-type: application/json\r\n"));
        CHECK_THAT(request, Catch::Contains("\r\nUser-Agent: gcoalesce/"));
        CHECK_THAT(request, Catch::Contains("\r\nAccept-Encoding: ") && Catch::Contains("gzip"));
        CHECK_THAT(request, Catch::EndsWith(std::string("\r\n\r\n") + kBody));
        CHECK_THAT(request, !Catch::Contains("\r\nExpect:"));
        CHECK(call.clean);
        CHECK(call.order == Order{"sent", "head", "done"});
    }
}

TEST_CASE("A key that is set later goes with the calls that start later; without one no header goes") {
    RawServer server(kBody, kEmptyOk, false);
    Bench bench(server.url());
    for (const char* key : {"", "first", "second"}) {
        if (*key != '\0') bench.upstream->set_key(ApiKey(key));
        Recorder call;
        bench.start(call, kBody);
        bench.finish(call);
        if (*key == '\0') {
            CHECK_THAT(server.request(), !Catch::Contains("x-goog-api-key"));
        } else {
            CHECK_THAT(server.request(), Catch::Contains(fmt::format("x-goog-api-key: {}\r\n", key)));
        }
    }
    CHECK(server.connections() == 1); // kept from call to call
}

TEST_CASE("The key that a call goes with is taken out of a text, and no word is taken for one") {
    Bench bench("http://127.0.0.1:9");
    const auto without = [&](const std::string& text, std::shared_ptr<const ApiKey> own = nullptr) {
        UpstreamCall call;
        call.api_key = std::move(own);
        return bench.upstream->without_key(call, text);
    };
    CHECK(without("no key at all") == "no key at all");
    bench.upstream->set_key(ApiKey("any"));
    CHECK(without("any text") == "any text");
    bench.upstream->set_key(ApiKey("0123456789abcdef"));
    CHECK(without("0123456789abcdef, x0123456789abcdefx") == "[redacted], x[redacted]x");
    CHECK(without("cut: 0123456789") == "cut: [redacted]");
    CHECK(without("cut: 01234") == "cut: 01234"); // too little to be of use
    bench.upstream->set_key(ApiKey(R"(q"uote\back-slash)"));
    CHECK(without(R"({"m": "q\"uote\\back-slash"} q"uote\back-slash)") == R"({"m": "[redacted]"} [redacted])");
    bench.upstream->set_key(ApiKey("0123456789abcdef"));
    const auto own = std::make_shared<const ApiKey>("the callers own");
    CHECK(without("the callers own 0123456789abcdef", own) == "[redacted] 0123456789abcdef");
}

TEST_CASE("The environment's proxies do not count, an option's does") {
    RawServer server(kBody, kEmptyOk, false);
    ::setenv("http_proxy", "http://127.0.0.1:9", 1);
    ::setenv("ALL_PROXY", "http://127.0.0.1:9", 1);
    ::setenv("NO_PROXY", "*", 1);
    {
        Bench bench(server.url());
        Recorder direct;
        bench.start(direct, kBody);
        bench.finish(direct);
        CHECK(direct.clean);
    }
    CHECK_THAT(server.request(), Catch::StartsWith("POST /v1beta/"));
    CurlUpstreamOptions options;
    options.url = "http://upstream.invalid";
    options.proxy = server.url();
    {
        Bench bench(options);
        Recorder proxied;
        bench.start(proxied, kBody);
        bench.finish(proxied);
        CHECK(proxied.clean);
    }
    for (const char* name : {"http_proxy", "ALL_PROXY", "NO_PROXY"}) ::unsetenv(name);
    CHECK_THAT(server.request(), Catch::StartsWith("POST http://upstream.invalid/v1beta/"));
}

TEST_CASE("A request body of megabytes arrives whole, and on_sent tells when") {
    Sim sim;
    Bench bench(sim.url());
    Recorder call;
    bench.ask(call, std::string(8 << 20, 'x'));
    CHECK(call.status == 200);
    CHECK(call.clean);
    CHECK(call.order == Order{"sent", "head", "bytes", "done"});
    CHECK(call.events() == 4);
}

TEST_CASE("What is no URL for an upstream is refused, and so is a CA file that cannot be read") {
    asio::io_context loop;
    for (const char* url : {"", "generativelanguage.googleapis.com", "ftp://host", "https://user@host",
                            "https://user:secret@host", "https://host/?key=secret", "https://host/#a", "https://"}) {
        const auto made = CurlUpstream::create(loop, Bench::with_url(url));
        INFO(url);
        REQUIRE_FALSE(made);
        CHECK(made.error().code == GCOALESCE_BAD_REQUEST);
        CHECK_THAT(made.error().message, !Catch::Contains("secret"));
    }
    CurlUpstreamOptions options;
    options.ca_file = "/nonexistent/ca.pem";
    const auto made = CurlUpstream::create(loop, options);
    REQUIRE_FALSE(made);
    CHECK_THAT(made.error().message, Catch::Contains("/nonexistent/ca.pem"));
}

TEST_CASE("Without a key only plain http to this machine may be called") {
    asio::io_context loop;
    const auto needs_key = [&](const char* url) {
        const auto upstream = CurlUpstream::create(loop, Bench::with_url(url)).value();
        const bool needed = upstream->needs_key();
        upstream->set_key(ApiKey("k"));
        CHECK_FALSE(upstream->needs_key());
        return needed;
    };
    for (const char* url :
         {"https://generativelanguage.googleapis.com", "https://127.0.0.1:1", "http://example.org",
          "http://127.0.0.1.example.org", "http://localhost.example.org", "http://10.0.0.1", "http://[2001:db8::1]"}) {
        INFO(url);
        CHECK(needs_key(url));
    }
    for (const char* url :
         {"http://localhost:8080", "http://127.0.0.1:8080", "http://127.1.2.3/prefix", "http://[::1]:8080"}) {
        INFO(url);
        CHECK_FALSE(needs_key(url));
    }
}

// ---- what comes back ------------------------------------------------------------------------------------------------

TEST_CASE("A stream arrives whole, in order, and ends cleanly") {
    Sim sim;
    Bench bench(sim.url());
    Recorder call;
    bench.ask(call, "hello [sim events=7 latency=20ms first=20ms gap=5ms]");
    CHECK(call.order == Order{"sent", "head", "bytes", "done"});
    CHECK(call.status == 200);
    CHECK(call.retry_after_ms == 0);
    CHECK(call.events() == 7);
    CHECK(call.clean);
    CHECK(count(sim, "calls") == 1);
}

TEST_CASE("A call without streaming arrives as one document") {
    Sim sim;
    Bench bench(sim.url());
    Recorder call;
    bench.ask(call, "hello", Method::unary);
    CHECK(call.clean);
    CHECK(nlohmann::json::parse(call.body).contains("candidates"));
}

TEST_CASE("An HTTP error arrives with its status, its Retry-After and its body") {
    Sim sim;
    Bench bench(sim.url());
    Recorder call;
    bench.ask(call, "hello [sim status=429 retry=3s retry-header]");
    CHECK(call.status == 429);
    CHECK(call.retry_after_ms == 3000);
    CHECK(call.clean);
    CHECK(nlohmann::json::parse(call.body).at("error").at("code") == 429);
}

TEST_CASE("A Retry-After as a date counts from now, and an absurd one is a day") {
    struct Row {
        const char* value;
        std::int64_t expected_ms;
    };
    for (const Row& row : {Row{"7", 7000}, Row{"Fri, 01 Jan 2100 00:00:00 GMT", 86'400'000},
                           Row{"Mon, 01 Jan 2001 00:00:00 GMT", 0}, Row{"999999999999", 86'400'000}, Row{"soon", 0}}) {
        RawServer server(
            kBody, fmt::format("HTTP/1.1 503 X\r\nRetry-After: {}\r\nContent-Length: 0\r\n\r\n", row.value), true);
        Bench bench(server.url());
        Recorder call;
        bench.start(call, kBody);
        bench.finish(call);
        INFO(row.value);
        CHECK(call.status == 503);
        CHECK(call.retry_after_ms == row.expected_ms);
    }
}

TEST_CASE("Redirects are not followed, interim responses are passed over, compressed bodies are decoded") {
    struct Row {
        std::string response;
        int status;
        const char* body;
    };
    const std::string zipped("\x1f\x8b\x08\0\0\0\0\0\0\x03\xcb\xc8\x04\0\xac\x2a\x93\xd8\x02\0\0\0", 22);
    for (const Row& row :
         {Row{"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n", 302, ""},
          Row{"HTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", 200, "hi"},
          Row{"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 22\r\n\r\n" + zipped, 200, "hi"}}) {
        RawServer server(kBody, row.response, false);
        Bench bench(server.url());
        Recorder call;
        bench.start(call, kBody);
        bench.finish(call);
        CHECK(call.clean);
        CHECK(call.error.message == "");
        CHECK(call.status == row.status);
        CHECK(call.body == row.body);
        CHECK(std::count(call.order.begin(), call.order.end(), "head") == 1);
    }
}

TEST_CASE("A change of protocol that nobody asked for is an answer like any other, and breaks nothing") {
    for (const char* body : {"", "{\"error\": {}}"}) {
        RawServer server(
            kBody, std::string("HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n") + body, true);
        Bench bench(server.url());
        for (int i = 0; i < 5; ++i) {
            Recorder call;
            bench.start(call, kBody);
            bench.finish(call);
            CHECK(call.status == 101);
            CHECK((call.body.empty() || call.body == body));
        }
    }
}

TEST_CASE("A connection that breaks is no clean end, and the error tells what happened") {
    Sim sim;
    Bench bench(sim.url());
    struct Row {
        const char* script;
        int status;
        std::size_t events;
    };
    for (const Row& row : {Row{"reset-after=0", 0, 0}, Row{"reset-after=2", 200, 2}, Row{"cut-after=0", 200, 0},
                           Row{"cut-after=3", 200, 3}}) {
        Recorder call;
        bench.ask(call, fmt::format("hello [sim {}]", row.script));
        INFO(row.script << ": " << call.error.message);
        CHECK_FALSE(call.clean);
        CHECK(call.error.code == GCOALESCE_CONNECT_FAILED);
        CHECK_THAT(call.error.message, Catch::StartsWith("upstream: "));
        CHECK(call.error.message.find('\n') == std::string::npos);
        CHECK(call.status == row.status);
        CHECK(call.events() == row.events);
        Recorder next;
        bench.ask(next, "hello");
        CHECK(next.clean);
    }
}

TEST_CASE("A body that is shorter than its Content-Length is no clean end") {
    RawServer server(kBody, "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nfour", true);
    Bench bench(server.url());
    Recorder call;
    bench.start(call, kBody);
    bench.finish(call);
    CHECK_FALSE(call.clean);
    CHECK(call.body == "four");
}

TEST_CASE("Nobody listens, no such host, no HTTP: the call fails, and the loop goes on") {
    RawServer gibberish(kBody, "SSH-2.0-OpenSSH_9.2\r\n", true);
    const std::string url =
        GENERATE_REF(std::string("http://127.0.0.1:9"), std::string("http://upstream.invalid"), gibberish.url());
    Bench bench(url);
    Recorder call;
    bench.start(call, kBody);
    bench.finish(call);
    CAPTURE(url, call.error.message);
    CHECK_FALSE(call.clean);
    CHECK(call.error.code == GCOALESCE_CONNECT_FAILED);
    CHECK(call.status == 0);
}

TEST_CASE("Where no connection comes about, all calls fail at the limit, not one after the other") {
    asio::io_context other;
    tcp::acceptor silent(other, {asio::ip::address_v4::loopback(), 0}); // TCP, but no TLS
    CurlUpstreamOptions options;
    options.url = fmt::format("https://127.0.0.1:{}", silent.local_endpoint().port());
    options.connect_timeout = 200 * kMillisecond;
    Bench bench(options);
    std::vector<Recorder> calls(400); // one by one they would take longer than the watchdog waits
    std::size_t done = 0;
    for (Recorder& call : calls) {
        call.then = [&done](const std::string& what) { done += what == "done"; };
        bench.start(call, kBody);
    }
    bench.run_until([&] { return done == calls.size(); });
    for (const Recorder& call : calls) {
        CHECK(call.order == Order{"done"});
        CHECK_FALSE(call.clean);
        CHECK(call.error.code == GCOALESCE_CONNECT_FAILED);
    }
}

TEST_CASE("An answer without a body ends cleanly with no bytes") {
    Sim sim;
    Bench bench(sim.url());
    Recorder call;
    bench.ask(call, "hello [sim empty]");
    CHECK(call.clean);
    CHECK(call.order == Order{"sent", "head", "done"});
}

TEST_CASE("Large events in odd pieces arrive whole") {
    Sim sim;
    Bench bench(sim.url());
    Recorder call;
    bench.ask(call, "hello [sim events=6 size=2MiB chunk=7777]");
    CHECK(call.clean);
    CHECK(call.events() == 6);
    CHECK(call.body.size() > 12u << 20);
}

TEST_CASE("300 calls at once are all answered") {
    Sim sim;
    Bench bench(sim.url());
    std::vector<Recorder> calls(300);
    std::size_t done = 0;
    for (std::size_t i = 0; i < calls.size(); ++i) {
        calls[i].then = [&done](const std::string& what) { done += what == "done"; };
        bench.start(calls[i], prompt_body(fmt::format("prompt {} [sim events=3 gap=5ms]", i)));
    }
    bench.run_until([&] { return done == calls.size(); });
    for (const Recorder& call : calls) {
        CHECK(call.clean);
        CHECK(call.events() == 3);
        CHECK(call.order.front() == "sent");
    }
    CHECK(count(sim, "calls") == 300);
}

// ---- cancelling -----------------------------------------------------------------------------------------------------

TEST_CASE("A call that is destroyed while upstream hangs is over there too") {
    const std::string script = GENERATE("hang-after=0", "hang-after=2");
    Sim sim;
    Bench bench(sim.url());
    Recorder call;
    bench.start(call, prompt_body(fmt::format("hello [sim {}]", script)));
    bench.run_until([&] { return script == "hang-after=0" ? !call.order.empty() : call.events() == 2; });
    CHECK(count(sim, "in_flight") == 1);
    call.running.reset();
    run_until_none_in_flight(bench, sim);
    CHECK_FALSE(call.done);
    Recorder next;
    bench.ask(next, "hello");
    CHECK(next.clean);
}

TEST_CASE("A call may be destroyed from within any of its events, and tells nothing more; others go on") {
    const std::string at = GENERATE("sent", "head", "bytes", "done");
    Sim sim;
    Bench bench(sim.url());
    Recorder call, other;
    call.then = [&](const std::string& what) {
        if (what == at) call.running.reset();
    };
    bench.start(other, prompt_body("other [sim events=5 gap=10ms]"));
    bench.start(call, prompt_body("hello [sim events=5 gap=10ms]"));
    bench.finish(other);
    run_until_none_in_flight(bench, sim);
    CHECK(call.order.back() == at);
    CHECK(call.done == (at == "done"));
    CHECK(other.clean);
    CHECK(other.events() == 5);
}

TEST_CASE("Another call may be destroyed or started from within an event") {
    const std::string at = GENERATE("sent", "head", "bytes", "done");
    Sim sim;
    Bench bench(sim.url());
    Recorder call, victim, follower, never;
    call.then = [&](const std::string& what) {
        if (what != at || follower.running) return;
        victim.running.reset();
        follower.running = bench.upstream->start(
            {Method::stream, "gemini-2.5-flash", std::make_shared<const std::string>(prompt_body("follower"))},
            follower);
        never.running = bench.upstream->start(
            {Method::stream, "gemini-2.5-flash", std::make_shared<const std::string>(prompt_body("never"))}, never);
        never.running.reset(); // started and given up at once
    };
    bench.start(victim, prompt_body("victim [sim hang-after=0]"));
    bench.run_until([&] { return !victim.order.empty(); });
    bench.start(call, prompt_body("hello [sim events=3 gap=5ms]"));
    bench.run_until([&] { return call.done && follower.done; });
    run_until_none_in_flight(bench, sim);
    CHECK(call.clean);
    CHECK(follower.clean);
    CHECK_FALSE(victim.done);
    CHECK(never.order.empty());
    CHECK(count(sim, "calls") == 3);
}

TEST_CASE("Calls that are started and destroyed at random leave the others alone") {
    Sim sim;
    Bench bench(sim.url());
    std::mt19937 random(GENERATE(1u, 2u));
    constexpr std::size_t kAtOnce = 20;
    std::vector<std::unique_ptr<Recorder>> calls;
    int finished = 0;
    for (int round = 0; finished < 100; ++round) {
        while (calls.size() < kAtOnce) {
            auto& call = *calls.emplace_back(std::make_unique<Recorder>());
            constexpr const char* scripts[] = {"events=3 gap=1ms", "hang-after=1", "reset-after=1", "cut-after=1",
                                               "size=100KiB"};
            bench.start(call, prompt_body(fmt::format("{} {} [sim {}]", round, calls.size(), scripts[random() % 5])));
        }
        for (int i = 0; i < 10; ++i) bench.loop.run_one_for(std::chrono::milliseconds(5));
        bench.loop.restart();
        std::erase_if(calls, [&](const auto& call) {
            if (!call->done && random() % 10 != 0) return false;
            finished += call->done;
            return true;
        });
    }
    for (const auto& call : calls) call->running.reset();
    run_until_none_in_flight(bench, sim);
    Recorder last;
    bench.ask(last, "hello");
    CHECK(last.clean);
}

TEST_CASE("The upstream can be destroyed while its sockets are being waited for") {
    Sim sim;
    asio::io_context loop;
    auto upstream = CurlUpstream::create(loop, Bench::with_url(sim.url())).value();
    Recorder call;
    call.running = upstream->start(
        {Method::stream, "gemini-2.5-flash", std::make_shared<const std::string>(prompt_body("x [sim hang-after=1]"))},
        call);
    while (call.body.empty()) loop.run_one();
    call.running.reset();
    upstream.reset();
    loop.restart();
    loop.run(); // what was queued runs out
    CHECK_FALSE(call.done);
}

// ---- TLS and HTTP/2 -------------------------------------------------------------------------------------------------

namespace {

CurlUpstreamOptions through(const TlsFront& front) {
    CurlUpstreamOptions options;
    options.url = front.url();
    options.ca_file = front.ca_file();
    return options;
}

} // namespace

TEST_CASE("Over TLS with a CA of ours, HTTP/2 is spoken and one connection serves call after call") {
    GCOALESCE_REQUIRE_TLS_FRONT();
    Sim sim;
    const TlsFront front(sim.url());
    Bench bench(through(front));
    for (int i = 0; i < 3; ++i) {
        Recorder call;
        bench.ask(call, fmt::format("hello {} [sim events=5 gap=5ms]", i));
        INFO(call.error.message);
        CHECK(call.clean);
        CHECK(call.events() == 5);
        CHECK(call.order == Order{"sent", "head", "bytes", "done"});
    }
    bench.run_until([&] { return front.requests().size() == 3; });
    for (const TlsFront::Request& request : front.requests()) {
        CHECK(request.protocol == "HTTP/2.0");
        CHECK(request.connection == front.requests().front().connection);
    }
}

TEST_CASE("A certificate that our CA did not sign is refused") {
    GCOALESCE_REQUIRE_TLS_FRONT();
    Sim sim;
    const TlsFront front(sim.url());
    Bench bench(front.url());
    Recorder call;
    bench.ask(call, "hello");
    CHECK_FALSE(call.clean);
    CHECK(call.error.code == GCOALESCE_CONNECT_FAILED);
    CHECK_THAT(call.error.message, Catch::Contains("certificate"));
    CHECK(count(sim, "calls") == 0);
}

TEST_CASE("Over HTTP/2, many calls at once share the connection that stands") {
    GCOALESCE_REQUIRE_TLS_FRONT();
    Sim sim;
    const TlsFront front(sim.url());
    Bench bench(through(front));
    Recorder first;
    bench.ask(first, "hello");
    std::vector<Recorder> calls(90); // libcurl puts 100 on one
    std::size_t done = 0;
    for (std::size_t i = 0; i < calls.size(); ++i) {
        calls[i].then = [&done](const std::string& what) { done += what == "done"; };
        bench.start(calls[i], prompt_body(fmt::format("prompt {} [sim events=3 gap=5ms]", i)));
    }
    bench.run_until([&] { return done == calls.size(); });
    for (const Recorder& call : calls) {
        INFO(call.error.message);
        CHECK(call.clean);
        CHECK(call.events() == 3);
    }
    bench.run_until([&] { return front.requests().size() == 91; });
    for (const TlsFront::Request& request : front.requests())
        CHECK(request.connection == front.requests().front().connection);
}

TEST_CASE("Over HTTP/2, an answer that is cut is no clean end, and neighbours on the connection go on") {
    GCOALESCE_REQUIRE_TLS_FRONT();
    const std::string script = GENERATE("cut-after=2", "reset-after=2");
    Sim sim;
    const TlsFront front(sim.url());
    Bench bench(through(front));
    Recorder call, other;
    bench.start(other, prompt_body("other [sim events=10 gap=10ms]"));
    bench.run_until([&] { return other.events() > 0; });
    bench.start(call, prompt_body(fmt::format("hello [sim {}]", script)));
    bench.run_until([&] { return call.done && other.done; });
    CHECK(call.events() <= 2); // nginx may throw away with the stream what it had not sent
    CHECK_FALSE(call.clean);
    CHECK(call.error.code == GCOALESCE_CONNECT_FAILED);
    CHECK(other.clean);
    CHECK(other.events() == 10);
}

TEST_CASE("Over HTTP/2, a destroyed call ends upstream while its neighbours go on") {
    GCOALESCE_REQUIRE_TLS_FRONT();
    const std::string at = GENERATE("sent", "head", "bytes");
    Sim sim;
    const TlsFront front(sim.url());
    Bench bench(through(front));
    Recorder call, other;
    call.then = [&](const std::string& what) {
        if (what == at) call.running.reset();
    };
    bench.start(other, prompt_body("other [sim events=10 gap=10ms]"));
    bench.run_until([&] { return other.events() > 0; });
    bench.start(call, prompt_body("hello [sim hang-after=2]"));
    bench.finish(other);
    run_until_none_in_flight(bench, sim);
    CHECK(call.order.back() == at);
    CHECK(other.clean);
    CHECK(other.events() == 10);
}

// ---- with the producer ----------------------------------------------------------------------------------------------

TEST_CASE(
    "T35, T38, T39: producer, real time and real HTTP together: what fails first is retried, never what has begun") {
    struct Row {
        const char* script;
        gcoalesce_ending_kind kind;
        std::size_t events;
        std::uint64_t calls;
    };
    Sim sim;
    for (const Row& row :
         {Row{"", GCOALESCE_COMPLETE, 4, 1}, Row{"fail-first=1", GCOALESCE_COMPLETE, 4, 2},
          Row{"fail-first=1 reset-after=0", GCOALESCE_COMPLETE, 4, 2},
          Row{"fail-first=1 empty", GCOALESCE_COMPLETE, 4, 2},
          Row{"fail-first=1 bare-error-after=0", GCOALESCE_COMPLETE, 4, 2}, Row{"status=400", GCOALESCE_FAILED, 0, 1},
          Row{"truncate-after=2", GCOALESCE_TRUNCATED, 2, 1}, Row{"cut-after=2", GCOALESCE_TRUNCATED, 2, 1},
          Row{"error-after=2", GCOALESCE_FAILED, 2, 1}, Row{"hang-after=2", GCOALESCE_TRUNCATED, 2, 1},
          Row{"hang-after=0", GCOALESCE_FAILED, 0, 1}}) {
        sim.reset();
        Bench bench(sim.url());
        AsioTimers timers(bench.loop);
        MemorySegment segment(system_clock());
        StreamOpening opening;
        opening.stream_id = 1;
        const StreamRef stream = segment.store().open(opening, true).value();
        ProducerLimits limits;
        limits.event_gap = 3 * kSecond;
        if (row.events == 0) limits.first_event = 300 * kMillisecond; // none comes: no matter how slow the machine is
        std::optional<Outcome> outcome;
        Refusals refusals;
        std::unique_ptr<Producer> producer = std::make_unique<Producer>(
            segment.store(), *bench.upstream, timers, refusals, stream,
            UpstreamCall{Method::stream, "gemini-2.5-flash",
                         std::make_shared<const std::string>(prompt_body(fmt::format("hello [sim {}]", row.script)))},
            limits, AnswerCheck{}, [&](const Outcome& told) {
                outcome = told;
                producer.reset();
            });
        bench.run_until([&] { return outcome.has_value(); });
        INFO(row.script << ": " << outcome->message);
        CHECK(outcome->kind == row.kind);
        CHECK(segment.events(stream).size() == row.events);
        CHECK(count(sim, "calls") == row.calls);
        CHECK(segment.store().counted(Counter::upstream_calls) == row.calls);
        run_until_none_in_flight(bench, sim);
    }
}
