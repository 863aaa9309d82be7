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

    const std::uint64_t shared = counted(Counter::requests_joined) + counted(Counter::requests_fresh) +
                                 counted(Counter::requests_snapshot) + counted(Counter::requests_resumed);
    const std::uint64_t answered = shared + counted(Counter::requests_started) + counted(Counter::requests_individual) +
                                   counted(Counter::requests_bypass);
    line += fmt::format("{} in flight; {} calls for {} requests", counted(Counter::streams_in_flight),
                        counted(Counter::upstream_calls), answered);
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
