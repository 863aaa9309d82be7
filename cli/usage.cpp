#include "cli/usage.hpp"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

namespace gcoalesce::cli {
namespace {

nlohmann::ordered_json ratio_json(std::uint64_t part, std::uint64_t whole) {
    const std::optional<double> known = ratio(part, whole);
    return known ? nlohmann::ordered_json(*known) : nlohmann::ordered_json(nullptr);
}

} // namespace

Tokens& Tokens::operator+=(const Tokens& more) {
    prompt += more.prompt;
    cached += more.cached;
    thoughts += more.thoughts;
    answer += more.answer;
    return *this;
}

Usage& Usage::operator+=(const Usage& more) {
    for (std::size_t i = 0; i < requests.size(); ++i) requests[i] += more.requests[i];
    calls_paid += more.calls_paid;
    paid += more.paid;
    avoided += more.avoided;
    for (std::size_t i = 0; i < since_push.size(); ++i) {
        since_push[i].requests += more.since_push[i].requests;
        since_push[i].coalesced += more.since_push[i].coalesced;
    }
    return *this;
}

std::uint64_t Usage::served() const {
    return std::accumulate(requests.begin() + GCOALESCE_STARTED, requests.end(), std::uint64_t{0});
}

Usage::Share Usage::whole() const {
    Share all;
    for (const Share& share : since_push) {
        all.requests += share.requests;
        all.coalesced += share.coalesced;
    }
    return all;
}

std::optional<double> ratio(std::uint64_t part, std::uint64_t whole) {
    if (whole == 0) return std::nullopt;
    return static_cast<double>(part) / static_cast<double>(whole);
}

Usage usage_of(const TemplateEntry& entry) {
    const auto count = [&](TemplateCounter counter, std::size_t nth = 0) {
        return entry.counts[static_cast<std::size_t>(counter) + nth].load(std::memory_order_relaxed);
    };
    Usage usage;
    for (std::size_t status = 0; status < kStatuses; ++status)
        usage.requests[status] = count(TemplateCounter::requests_refused, status); // the first ones are by status
    usage.calls_paid = count(TemplateCounter::upstream_calls);
    usage.paid = {count(TemplateCounter::prompt_tokens_paid), count(TemplateCounter::cached_tokens_paid),
                  count(TemplateCounter::thought_tokens_paid), count(TemplateCounter::answer_tokens_paid)};
    usage.avoided = {count(TemplateCounter::prompt_tokens_avoided), count(TemplateCounter::cached_tokens_avoided),
                     count(TemplateCounter::thought_tokens_avoided), count(TemplateCounter::answer_tokens_avoided)};
    for (std::size_t i = 0; i < usage.since_push.size(); ++i)
        usage.since_push[i] = {count(TemplateCounter::requests_0s, i), count(TemplateCounter::coalesced_0s, i)};
    return usage;
}

Buckets buckets_of(const Histogram& histogram) {
    Buckets buckets{};
    for (std::size_t i = 0; i < buckets.size(); ++i) buckets[i] = histogram.buckets[i].load(std::memory_order_relaxed);
    return buckets;
}

std::optional<double> quantile_us(const Buckets& buckets, double q) {
    const std::uint64_t count = std::accumulate(buckets.begin(), buckets.end(), std::uint64_t{0});
    if (count == 0) return std::nullopt;
    double left = q * static_cast<double>(count);
    for (std::size_t i = 0; i < buckets.size(); ++i) {
        const auto here = static_cast<double>(buckets[i]);
        const double low = i == 0 ? 0 : std::exp2(static_cast<double>(i - 1)), high = std::exp2(static_cast<double>(i));
        if (here > 0 && left <= here) return low + (high - low) * left / here;
        left -= here;
    }
    return std::exp2(static_cast<double>(buckets.size() - 1));
}

std::vector<TemplateUsage> all_usage(const SegmentView& segment) {
    std::vector<TemplateUsage> all;
    for (std::uint32_t i = 0; i < segment.template_count(); ++i) {
        if (const std::optional<TemplatePolicy> policy = segment.policy(i))
            all.push_back({i, std::string(policy->id.view()), usage_of(segment.template_entry(i))});
    }
    std::ranges::sort(all, std::less{}, &TemplateUsage::id);
    return all;
}

Usage sum(const std::vector<TemplateUsage>& all) {
    Usage total;
    for (const TemplateUsage& one : all) total += one.usage;
    return total;
}

nlohmann::ordered_json to_json(const Tokens& tokens) {
    return {
        {"prompt", tokens.prompt}, {"cached", tokens.cached}, {"thoughts", tokens.thoughts}, {"answer", tokens.answer}};
}

nlohmann::ordered_json to_json(const Usage& usage) {
    nlohmann::ordered_json json{{"requests", nlohmann::ordered_json::object()}};
    for (std::size_t status = GCOALESCE_STARTED; status < kStatuses; ++status)
        json["requests"][gcoalesce_status_name(static_cast<gcoalesce_status>(status))] = usage.requests[status];
    json["requests"]["refused"] = usage.requests[GCOALESCE_OPENING];
    const Usage::Share whole = usage.whole();
    json["served"] = usage.served();
    json["resumed_ratio"] = ratio_json(usage.requests[GCOALESCE_RESUMED], usage.served());
    json["calls_paid"] = usage.calls_paid;
    json["calls_avoided"] = whole.coalesced;
    json["coalesced_ratio"] = ratio_json(whole.coalesced, whole.requests);
    json["tokens_paid"] = to_json(usage.paid);
    json["tokens_avoided"] = to_json(usage.avoided);
    json["since_push"] = nlohmann::ordered_json::array();
    for (std::size_t i = 0; i < kSincePush.size(); ++i) {
        const Usage::Share& share = usage.since_push[i];
        json["since_push"].push_back({{"seconds", kSincePush[i]},
                                      {"requests", share.requests},
                                      {"coalesced", share.coalesced},
                                      {"coalesced_ratio", ratio_json(share.coalesced, share.requests)}});
    }
    return json;
}

} // namespace gcoalesce::cli
