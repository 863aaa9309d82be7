// What the segment tells people who only look: `keys`, `show`, `dump`, `log`, `top` and `stats` need no broker, and
// disturb none.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/error.hpp"
#include "cli/commands.hpp"
#include "segment/counters.hpp"
#include "segment/mapping.hpp"

namespace gcoalesce::cli {

// The broker behind a segment, at the moment of opening.
struct BrokerFacts {
    std::int32_t pid = 0;
    std::string state; // "starting", "serving", "draining", "closed"; or "dead", "unresponsive", "unknown"
    bool reachable = false;
    Nanos heartbeat_age = 0;
    std::int64_t heartbeat_wall_ns = 0;
    std::string instance, runtime_dir, segment, version, layout;
};

struct Inspection {
    OpenSegment segment;
    BrokerFacts broker;
};

// Opens the segment that the command line means. Errors: resolve_instance()'s and open_segment()'s.
Result<Inspection> look(const Context& context);

// The same. Where it cannot, it has reported why and set context.exit; where the
// broker of what is shown cannot be reached, it has said so on standard error and set context.exit to no_broker.
std::optional<Inspection> inspect(Context& context, bool json);

// "broker 4711 is serving, heartbeat 40ms ago; segment /dev/shm/…"
std::string broker_line(const BrokerFacts& broker);

nlohmann::ordered_json to_json(const BrokerFacts& broker);

// One stream as it stood at one moment.
struct StreamFacts {
    std::uint32_t slot = 0;
    std::uint64_t identity = 0;
    Key key{};
    SlotOpening opening{};
    SlotEnding ending{};
    bool in_flight = false, open_to_joiners = false, evicted = false;
    std::uint64_t events = 0, event_bytes = 0, joins = 0;
    std::uint32_t subscribers = 0, retries = 0;
    std::int32_t upstream_status = 0;
    Nanos first_event_ns = 0, fresh_until = 0; // monotonic; 0: none

    const char* state() const; // "in_flight", or the ending's word
    bool from_disk() const { return !in_flight && ending.ended_ns < opening.opened_ns; } // older than its slot
    Nanos fresh_for(Nanos now) const { return fresh_until > now ? fresh_until - now : 0; }
};

// Nothing: the slot is free, or changed hands while it was being copied.
std::optional<StreamFacts> stream_facts(const SegmentView& segment, std::uint32_t slot);

// All of them, the newest first.
std::vector<StreamFacts> all_streams(const SegmentView& segment);

// What went wrong with upstream or the broker's own means, told apart by code, status and message.
struct DistinctError {
    ErrorFacts facts{};
    std::uint64_t count = 0;
};
std::vector<DistinctError> distinct_errors(const SegmentView& segment);

// By its name, which an older or a newer broker may not have: 0.
std::uint64_t counted(const SegmentView& segment, Counter counter);

// Of the store on disk, as the broker saw it at its last look, a second ago at most.
struct SnapshotFacts {
    bool off = false, degraded = false;
    std::uint64_t kept = 0, bytes = 0;
    std::string reason; // of being degraded; "": none, or the broker's log has it
};
SnapshotFacts snapshot_facts(const SegmentView& segment);

std::string template_name(const SegmentView& segment, std::uint32_t index);

// "2025-03-09 14:05:07", local time.
std::string format_wall(std::int64_t wall_ns);

} // namespace gcoalesce::cli
