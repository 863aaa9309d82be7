#include "broker/status.hpp"

#include "segment/counters.hpp"

namespace gcoalesce {

std::string status_line(const SegmentView& segment, const StatusFacts& facts) {
    const auto counted = [&segment](Counter counter) {
        return segment.counter(static_cast<std::uint32_t>(counter)).value.load(std::memory_order_relaxed);
    };
    std::string line;
    if (facts.draining) line += "shutting down; ";
    if (facts.key_missing) line += "NO API KEY, requests are refused; ";
    if (counted(Counter::snapshots_degraded) != 0) line += "answers are not kept on disk, the log says why; ";

    // The ledger's, which goes on across restarts, as `gcoalesce stats` tells it: resumed and refused ones aside.
    std::uint64_t calls = 0, answered = 0, shared = 0;
    for (std::uint32_t i = 0; i < segment.template_count(); ++i) {
        const auto told = [&](TemplateCounter counter, std::size_t nth = 0) {
            return segment.template_entry(i).counts[static_cast<std::size_t>(counter) + nth].load(
                std::memory_order_relaxed);
        };
        calls += told(TemplateCounter::upstream_calls);
        for (std::size_t since = 0; since < 4; ++since) { // seconds since the push, in four classes
            answered += told(TemplateCounter::requests_0s, since);
            shared += told(TemplateCounter::coalesced_0s, since);
        }
    }
    line += fmt::format("{} in flight; {} calls for {} requests", counted(Counter::streams_in_flight), calls, answered);
    // In tenths, cut off: it says 100 % only where that is so.
    if (answered != 0)
        line += fmt::format(", {}.{} % coalesced", shared * 100 / answered, shared * 1000 / answered % 10);
    if (facts.window > 0)
        line += fmt::format("; window open for {} s", (facts.window + kSecond - 1) / kSecond);
    else
        line += "; window closed";
    return line;
}

} // namespace gcoalesce
