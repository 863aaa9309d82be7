// The simulation of tests/bench/push_fortnight in small: that its figures can be believed.
#include <catch2/catch.hpp>

#include <numeric>

#include "tests/bench/fortnight.hpp"

using namespace gcoalesce;
using namespace gcoalesce::bench;

namespace {

constexpr PushPlan kSmall{.seed = 1,
                          .pushes = 2,
                          .requests = 120,
                          .templates = 3,
                          .keys = 8,
                          .exponent = 1.1,
                          .early = 0.5,
                          .early_for = 5 * kSecond,
                          .tail_mean = 15 * kSecond,
                          .tail_end = 60 * kSecond,
                          .answer_min = 2 * kSecond,
                          .answer_max = 8 * kSecond,
                          .answer_events = 5};

} // namespace

TEST_CASE("after simulated pushes the segment's counters say what was seen, second by second") {
    const auto pushes = draw(kSmall);
    PushPolicy policy;
    SECTION("nothing is shared") {
        policy.sharing = GCOALESCE_SHARE_NOT;
    }
    SECTION("for a fixed time") {
        policy.settings.ttl_idle = policy.settings.ttl_window = kSecond;
    }
    SECTION("with a window and plain caching from the disk") {
        policy.settings.kv_ttl = 600 * kSecond;
        policy.on_disk = true;
    }
    const PushLedger ledger = simulate(kSmall, pushes, policy);
    CHECK(ledger.seen == ledger.told);
    const auto sum = [](const auto& of) { return std::accumulate(of.begin(), of.end(), std::uint64_t{0}); };
    CHECK(sum(ledger.seen.requests) == 240);
    CHECK(ledger.first_event.size() == 240);
    CHECK(ledger.staleness.size() == 240);
    CHECK(ledger.seen.calls + sum(ledger.seen.coalesced) == 240);
    if (policy.sharing == GCOALESCE_SHARE_NOT)
        CHECK(ledger.seen.calls == 240);
    else
        CHECK(ledger.seen.calls < 240);
    CHECK(ledger.seen.calls >= distinct(pushes));
    // Once more, it comes out the same.
    const PushLedger again = simulate(kSmall, draw(kSmall), policy);
    CHECK(again.seen == ledger.seen);
    CHECK(again.first_event == ledger.first_event);
    CHECK(again.staleness == ledger.staleness);
}
