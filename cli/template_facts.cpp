#include "cli/template_facts.hpp"

#include <algorithm>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <sched.h>

#include "base/nearest.hpp"
#include "base/units.hpp"

namespace gcoalesce::cli {
namespace {

constexpr int kTries = 1000; // a policy is written in microseconds

} // namespace

Nanos TemplateFacts::window_remaining(Nanos now) const {
    return window_until <= now ? 0 : (window_until - now + kMillisecond - 1) / kMillisecond * kMillisecond;
}

std::optional<TemplateFacts> template_facts(const SegmentView& segment, std::uint32_t index) {
    const TemplateEntry& entry = segment.template_entry(index);
    for (int tries = 0; tries < kTries; ++tries, ::sched_yield()) {
        const std::uint64_t sequence = entry.sequence.load(std::memory_order_acquire);
        if (sequence == 0) return std::nullopt;
        const std::optional<TemplatePolicy> policy = segment.policy(index);
        if (!policy) continue;
        TemplateFacts facts;
        facts.policy = *policy;
        if (policy->source_bytes > 0) {
            const std::byte* source = segment.extent_bytes(policy->source_offset, policy->source_bytes);
            if (source == nullptr) continue;
            facts.source.resize(policy->source_bytes);
            copy_out(facts.source.data(), source, facts.source.size());
        }
        facts.window_until = entry.window_until.load(std::memory_order_acquire);
        facts.pushed = entry.pushed.load(std::memory_order_acquire);
        for (std::size_t i = 0; i < facts.counts.size(); ++i)
            facts.counts[i] = entry.counts[i].load(std::memory_order_acquire);
        // Behind the copies: a text's extent is freed only once the sequence has moved on.
        if (entry.sequence.load(std::memory_order_acquire) == sequence) return facts;
    }
    return std::nullopt;
}

std::vector<TemplateFacts> all_templates(const SegmentView& segment) {
    std::vector<TemplateFacts> all;
    for (std::uint32_t i = 0; i < segment.template_count(); ++i) {
        std::optional<TemplateFacts> facts = template_facts(segment, i);
        if (facts && !facts->has(template_removed)) all.push_back(std::move(*facts));
    }
    std::ranges::sort(all, std::less{}, &TemplateFacts::id);
    return all;
}

Result<TemplateFacts> find_template(const SegmentView& segment, std::string_view id) {
    std::vector<std::string> known;
    for (TemplateFacts& facts : all_templates(segment)) {
        if (facts.policy.id.view() == id) return std::move(facts);
        known.push_back(facts.id());
    }
    return fail(GCOALESCE_NOT_FOUND, "there is no template \"{}\"{}", id, did_you_mean(id, known));
}

Result<void> check_templates(const SegmentView& segment, const std::vector<std::string>& ids) {
    std::vector<std::string> known;
    for (std::uint32_t i = 0; i < segment.template_count(); ++i) {
        if (const std::optional<TemplateFacts> facts = template_facts(segment, i)) known.push_back(facts->id());
    }
    for (const std::string& id : ids) {
        if (std::ranges::find(known, id) == known.end())
            return fail(GCOALESCE_NOT_FOUND, "there is no template \"{}\"{}", id, did_you_mean(id, known));
    }
    return {};
}

std::string window_words(Nanos remaining) {
    return remaining > 0 ? fmt::format("open for {}", format_duration(remaining)) : "closed";
}

nlohmann::ordered_json window_json(const TemplateFacts& facts, Nanos now) {
    const Nanos remaining = facts.window_remaining(now);
    nlohmann::ordered_json json{{"window", remaining > 0 ? "open" : "closed"},
                                {"remaining_ms", to_ms(remaining)},
                                {"last_push_age_ms", nullptr}};
    if (facts.pushed != 0) json["last_push_age_ms"] = to_ms(now - facts.pushed);
    return json;
}

std::string push_words(const TemplateFacts& facts, Nanos now) {
    return facts.pushed != 0 ? fmt::format("{} ago", format_duration(now - facts.pushed)) : "never";
}

} // namespace gcoalesce::cli
