// push_fortnight: what a fortnight of evening pushes costs under three policies, in Markdown. The same output each run.

#include <cstdio>
#include <exception>
#include <fmt/format.h>

#include "tests/bench/bench.hpp"
#include "tests/bench/fortnight.hpp"

namespace gcoalesce::bench {
namespace {

// ---- fixed before the first run ------------------------------------------------------------------------------------

constexpr PushPlan kFortnight{
    .seed = 20'251'130,
    .pushes = 14,
    .requests = 800,
    .templates = 30,
    .keys = 40,
    .exponent = 1.1,
    .early = 0.5,
    .early_for = 5 * kSecond,
    .tail_mean = 15 * kSecond,
    .tail_end = 60 * kSecond,
    .answer_min = 2 * kSecond,
    .answer_max = 8 * kSecond,
    .answer_events = 5, // the first one after a fifth of the answer's time
};
constexpr double kExponents[] = {0.8, 1.0, 1.1, 1.3};
constexpr double kEarly[] = {0.3, 0.5, 0.7};
constexpr double kTarget = 0.71; // coalesce rate

PushPolicy uncoalesced() {
    PushPolicy policy;
    policy.name = "no coalescing";
    policy.sharing = GCOALESCE_SHARE_NOT;
    return policy;
}

PushPolicy fixed_ttl() {
    PushPolicy policy;
    policy.name = "fixed TTL 1 s";
    policy.settings.ttl_idle = policy.settings.ttl_window = kSecond; // so the window changes nothing
    return policy;
}

PushPolicy hybrid() {
    PushPolicy policy;
    policy.name = "hybrid";
    policy.settings.window = 6 * kSecond;
    policy.settings.ttl_idle = 200 * kMillisecond;
    policy.settings.ttl_window = 5 * kSecond;
    policy.settings.kv_after = 30 * kSecond;
    policy.settings.kv_ttl = 600 * kSecond;
    policy.on_disk = true;
    return policy;
}

// --------------------------------------------------------------------------------------------------------------------

using Pushes = std::vector<std::vector<PushRequest>>;

double ratio(std::uint64_t part, std::uint64_t whole) {
    return static_cast<double>(part) / static_cast<double>(whole);
}

std::string percent(double of) {
    return fmt::format("{:.1f} %", 100 * of);
}

struct Figures {
    std::uint64_t calls = 0, requests = 0, coalesced = 0;
    std::string by_second;                                              // four columns
    double first_event_p50 = 0, first_event_p99 = 0, staleness_p99 = 0; // ms
    double rate() const { return ratio(coalesced, requests); }
};

Figures figures(const PushPlan& plan, const Pushes& pushes, const PushPolicy& policy) {
    const PushLedger ledger = simulate(plan, pushes, policy);
    if (ledger.seen != ledger.told) throw std::runtime_error("the segment's counters differ from what was seen");
    Figures all;
    all.calls = ledger.seen.calls;
    for (std::size_t i = 0; i < ledger.seen.requests.size(); ++i) {
        all.requests += ledger.seen.requests[i];
        all.coalesced += ledger.seen.coalesced[i];
        all.by_second += fmt::format(" | {}", percent(ratio(ledger.seen.coalesced[i], ledger.seen.requests[i])));
    }
    Samples first_event, staleness;
    for (const Nanos one : ledger.first_event) first_event.add(static_cast<double>(to_ms(one)));
    for (const Nanos one : ledger.staleness) staleness.add(static_cast<double>(to_ms(one)));
    all.first_event_p50 = first_event.percentile(50);
    all.first_event_p99 = first_event.percentile(99);
    all.staleness_p99 = staleness.percentile(99);
    return all;
}

void compare_policies() {
    const Pushes pushes = draw(kFortnight);
    fmt::print(
        "| policy | upstream calls | requests | coalesce rate | 0-5 s | 5-10 s | 10-30 s | 30 s on "
        "| first event p50 / p99 | staleness p99 |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n");
    for (const PushPolicy& policy : {uncoalesced(), fixed_ttl(), hybrid()}) {
        const Figures seen = figures(kFortnight, pushes, policy);
        fmt::print("| {} | {} | {} | {}{} | {:.0f} / {:.0f} ms | {:.0f} ms |\n", policy.name, seen.calls, seen.requests,
                   percent(seen.rate()), seen.by_second, seen.first_event_p50, seen.first_event_p99,
                   seen.staleness_p99);
    }
    const std::uint64_t requests = static_cast<std::uint64_t>(kFortnight.pushes * kFortnight.requests);
    const std::uint64_t least = distinct(pushes);
    fmt::print("| one call for each key that a push touches | {} | {} | {} | | | | | | |\n\n", least, requests,
               percent(1 - ratio(least, requests)));
    PushPlan larger = kFortnight;
    while (expected_bound(larger) < kTarget) larger.requests += 10;
    fmt::print("By expectation that bound is {}; it reaches {} from {} requests a push on.\n\n",
               percent(expected_bound(kFortnight)), percent(kTarget), larger.requests);
}

void sweep() {
    fmt::print("| exponent | within 5 s | calls: least / fixed / hybrid | coalesce rate: most / fixed / hybrid "
               "| first event p99: fixed / hybrid | staleness p99: fixed / hybrid |\n"
               "| --- | --- | --- | --- | --- | --- |\n");
    for (const double exponent : kExponents) {
        for (const double early : kEarly) {
            PushPlan plan = kFortnight;
            plan.exponent = exponent;
            plan.early = early;
            const Pushes pushes = draw(plan);
            const std::uint64_t least = distinct(pushes);
            const Figures fixed = figures(plan, pushes, fixed_ttl());
            const Figures ours = figures(plan, pushes, hybrid());
            fmt::print("| {:.1f} | {:.1f} | {} / {} / {} | {} / {} / {} | {:.0f} / {:.0f} ms | {:.0f} / {:.0f} ms |\n",
                       exponent, early, least, fixed.calls, ours.calls, percent(1 - ratio(least, fixed.requests)),
                       percent(fixed.rate()), percent(ours.rate()), fixed.first_event_p99, ours.first_event_p99,
                       fixed.staleness_p99, ours.staleness_p99);
        }
    }
}

} // namespace
} // namespace gcoalesce::bench

int main() {
    try {
        gcoalesce::bench::compare_policies();
        gcoalesce::bench::sweep();
    } catch (const std::exception& error) {
        fmt::print(stderr, "push_fortnight: {}\n", error.what());
        return 1;
    }
    return 0;
}
