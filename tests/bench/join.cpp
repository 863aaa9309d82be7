// Joining a running stream of a template through the library, beside a Redis GET of 1 KiB over a Unix socket.

#include <fmt/format.h>
#include <hiredis/hiredis.h>

#include "tests/bench/bench.hpp"
#include "tests/bench/client.hpp"

namespace gcoalesce::bench {

void join() {
    constexpr int kRounds = 40;
    constexpr int kBatch = 5000;
    // What is asked upstream is 1 KiB: the template's own words and the variables in their places.
    const std::string topic(250, 't');
    std::string words = "[sim events=1 hang-after=1] ";
    words.append(1024 - words.size() - topic.size() - 5, 'w');
    const Setup setup({}, fmt::format(R"({{"model": "gemini-2.5-flash", "prompt": "{}{{{{topic}}}}{{{{tone}}}}",)"
                                      R"( "variables": {{"topic": {{}}, "tone": {{"default": "plain"}}}}}})",
                                      words));
    const std::string variables = fmt::format(R"({{"topic": "{}", "tone": "prose"}})", topic);
    const std::string socket = setup.runtime_dir + "/redis.sock";
    test::Process redis({"redis-server", "--port", "0", "--unixsocket", socket, "--save", "", "--appendonly", "no"});
    std::unique_ptr<redisContext, void (*)(redisContext*)> context(nullptr, redisFree);
    while (!context || context->err != 0) context.reset(redisConnectUnix(socket.c_str()));
    const std::string value(1024, 'v');
    freeReplyObject(redisCommand(context.get(), "SET key %b", value.data(), value.size()));

    const Client client(setup.runtime_dir);
    gcoalesce_subscription* holder = client.open("bench", variables); // keeps the stream running
    gcoalesce_event event{};
    check(gcoalesce_next(holder, 10'000, &event));

    Samples ours, peer;
    for (int round = 0; round < kRounds; ++round) {
        double start = now_us();
        for (int i = 0; i < kBatch; ++i) {
            gcoalesce_subscription* joined = client.open("bench", variables);
            gcoalesce_close(joined);
        }
        ours.add((now_us() - start) / kBatch);
        start = now_us();
        for (int i = 0; i < kBatch; ++i) {
            auto* reply = static_cast<redisReply*>(redisCommand(context.get(), "GET key"));
            if (reply == nullptr || reply->len != value.size()) throw std::runtime_error("redis gave another answer");
            freeReplyObject(reply);
        }
        peer.add((now_us() - start) / kBatch);
    }
    gcoalesce_info info{};
    info.size = sizeof info;
    gcoalesce_subscription* last = client.open("bench", variables);
    check(gcoalesce_info_of(last, &info));
    if (info.status != GCOALESCE_JOINED) throw std::runtime_error("the last one did not join");
    gcoalesce_close(last);
    gcoalesce_close(holder);
    report("join (1 KiB prompt, template and variables) / Redis GET (1 KiB, Unix socket)",
           fmt::format("{:.2f} us / {:.2f} us", ours.median(), peer.median()),
           fmt::format("{:.3f}, target at most 0.100", ours.median() / peer.median()));
}

} // namespace gcoalesce::bench
