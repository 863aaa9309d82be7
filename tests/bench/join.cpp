// Joining a running stream through the library, beside a Redis GET of 1 KiB over a Unix socket.

#include <fmt/format.h>
#include <hiredis/hiredis.h>

#include "tests/bench/bench.hpp"
#include "tests/bench/client.hpp"

namespace gcoalesce::bench {

void join() {
    constexpr int kRounds = 40;
    constexpr int kBatch = 5000;
    Setup setup;
    const std::string socket = setup.runtime_dir + "/redis.sock";
    test::Process redis({"redis-server", "--port", "0", "--unixsocket", socket, "--save", "", "--appendonly", "no"});
    std::unique_ptr<redisContext, void (*)(redisContext*)> context(nullptr, redisFree);
    while (!context || context->err != 0) context.reset(redisConnectUnix(socket.c_str()));
    const std::string value(1024, 'v');
    freeReplyObject(redisCommand(context.get(), "SET key %b", value.data(), value.size()));

    const Client client(setup.runtime_dir);
    std::string prompt = "[sim events=1 hang-after=1] ";
    prompt.append(1024 - prompt.size(), 'p');
    const std::string body = test::prompt_body(prompt);
    gcoalesce_subscription* holder = client.open(body); // keeps the stream running
    gcoalesce_event event{};
    check(gcoalesce_next(holder, 10'000, &event));

    Samples ours, peer;
    for (int round = 0; round < kRounds; ++round) {
        double start = now_us();
        for (int i = 0; i < kBatch; ++i) {
            gcoalesce_subscription* joined = client.open(body);
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
    gcoalesce_subscription* last = client.open(body);
    check(gcoalesce_info_of(last, &info));
    if (info.status != GCOALESCE_JOINED) throw std::runtime_error("the last one did not join");
    gcoalesce_close(last);
    gcoalesce_close(holder);
    report("join (1 KiB prompt) / Redis GET (1 KiB, Unix socket)",
           fmt::format("{:.2f} us / {:.2f} us", ours.median(), peer.median()),
           fmt::format("{:.3f}, target at most 0.100", ours.median() / peer.median()));
}

} // namespace gcoalesce::bench
