#include "broker/ledger.hpp"

#include <algorithm>
#include <fmt/format.h>
#include <iterator>
#include <sstream>

#include "broker/snapshots.hpp"

namespace gcoalesce {

LedgerCounts ledger_counts(const TemplateEntry& entry) {
    LedgerCounts counts{};
    for (std::size_t i = 0; i < counts.size(); ++i) counts[i] = entry.counts[i].load(std::memory_order_relaxed);
    return counts;
}

std::string ledger_name(std::string_view template_id) {
    return fmt::format("ledger.{}", template_id);
}

std::string write_ledger(const LedgerCounts& counts) {
    std::string text;
    for (std::size_t i = 0; i < std::size(kTemplateCounterNames); ++i) {
        if (counts[i] != 0) fmt::format_to(std::back_inserter(text), "{} {} ", kTemplateCounterNames[i], counts[i]);
    }
    return text;
}

LedgerCounts read_ledger(const std::string& kept) {
    LedgerCounts counts{};
    std::istringstream words(kept);
    std::string name;
    for (std::uint64_t value = 0; words >> name >> value;) {
        const auto found = std::ranges::find(kTemplateCounterNames, name);
        if (found != std::end(kTemplateCounterNames))
            counts[static_cast<std::size_t>(found - std::begin(kTemplateCounterNames))] = value;
    }
    return counts;
}

void rescue_ledger(const SegmentView& dead, Snapshots& to) {
    if (!to.ready()) return;
    for (std::uint32_t i = 0; i < dead.template_count(); ++i) {
        const std::optional<TemplatePolicy> policy = dead.policy(i);
        if (!policy) continue;
        const std::string name = ledger_name(policy->id.view());
        const std::string kept = to.get(name).value_or("");
        const LedgerCounts before = read_ledger(kept);
        LedgerCounts counts = ledger_counts(dead.template_entry(i));
        for (std::size_t nth = 0; nth < counts.size(); ++nth) counts[nth] = std::max(counts[nth], before[nth]);
        if (std::string now = write_ledger(counts); now != kept) to.put(name, std::move(now));
    }
}

} // namespace gcoalesce
