// The first event through broker and library, beside libcurl alone against the same upstream, connections warm.

#include <curl/curl.h>
#include <fmt/format.h>

#include "tests/bench/bench.hpp"
#include "tests/bench/client.hpp"

namespace gcoalesce::bench {
namespace {

double first_at = 0;

std::size_t on_bytes(char*, std::size_t size, std::size_t count, void*) {
    if (first_at == 0) first_at = now_us();
    return size * count;
}

} // namespace

void first_event() {
    constexpr int kRounds = 400;
    Setup setup;
    const Client client(setup.runtime_dir);
    const std::unique_ptr<CURL, void (*)(CURL*)> curl(curl_easy_init(), curl_easy_cleanup);
    const std::unique_ptr<curl_slist, void (*)(curl_slist*)> headers(
        curl_slist_append(nullptr, "content-type: application/json"), curl_slist_free_all);
    const std::string url = setup.sim.url() + "/v1beta/models/gemini-2.5-flash:streamGenerateContent?alt=sse";
    curl_easy_setopt(curl.get(), CURLOPT_URL, url.c_str());
    curl_easy_setopt(curl.get(), CURLOPT_HTTPHEADER, headers.get());
    curl_easy_setopt(curl.get(), CURLOPT_WRITEFUNCTION, on_bytes);

    Samples ours, peer;
    for (int round = 0; round < kRounds; ++round) {
        const std::string body = test::prompt_body(fmt::format("[sim events=3] question {}", round));
        double start = now_us();
        gcoalesce_subscription* subscription = client.open(body);
        gcoalesce_event event{};
        check(gcoalesce_next(subscription, 10'000, &event));
        ours.add(now_us() - start);
        while (gcoalesce_next(subscription, 10'000, &event) == GCOALESCE_OK) {
        }
        gcoalesce_close(subscription);

        curl_easy_setopt(curl.get(), CURLOPT_POSTFIELDS, body.c_str());
        first_at = 0;
        start = now_us();
        if (curl_easy_perform(curl.get()) != CURLE_OK) throw std::runtime_error("curl failed");
        peer.add(first_at - start);
    }
    report("first event through broker and library / libcurl alone",
           fmt::format("{:.0f} us / {:.0f} us (p99 {:.0f} / {:.0f})", ours.median(), peer.median(), ours.percentile(99),
                       peer.percentile(99)),
           fmt::format("{:.3f} ms more, target at most 1 ms more", (ours.median() - peer.median()) / 1000));
}

} // namespace gcoalesce::bench
