#include "cli/inspect.hpp"

#include <algorithm>
#include <ctime>
#include <nlohmann/json.hpp>
#include <sys/stat.h>

#include "base/units.hpp"
#include "cli/report.hpp"

namespace gcoalesce::cli {
namespace {

const char* word(BrokerState state) {
    switch (state) {
    case BrokerState::starting: return "starting";
    case BrokerState::serving: return "serving";
    case BrokerState::draining: return "draining";
    case BrokerState::closed: return "closed";
    }
    return "unknown";
}

BrokerFacts broker_facts(const OpenSegment& segment, const Instance& instance) {
    const Header& header = segment.view.header();
    const Nanos now = system_clock().monotonic();
    BrokerFacts facts;
    facts.pid = header.broker_pid;
    switch (segment.liveness(now)) {
    case Liveness::dead: facts.state = "dead"; break;
    case Liveness::unresponsive: facts.state = "unresponsive"; break;
    case Liveness::unknown: facts.state = "unknown"; break;
    case Liveness::closed: facts.state = "closed"; break;
    case Liveness::alive:
        facts.state = word(static_cast<BrokerState>(header.state.load(std::memory_order_acquire)));
        facts.reachable = true;
        break;
    }
    facts.heartbeat_age = std::max<Nanos>(0, now - header.heartbeat_ns.load(std::memory_order_acquire));
    facts.heartbeat_wall_ns = header.heartbeat_wall_ns.load(std::memory_order_acquire);
    facts.instance = instance.name;
    facts.runtime_dir = instance.runtime_dir;
    struct stat file {};
    ::fstat(segment.fd.get(), &file);
    facts.segment = "/dev/shm" + instance.segment_name(file.st_uid);
    facts.version = header.version.view();
    facts.layout = fmt::format("{}.{}", header.prefix.layout_major, header.prefix.layout_minor);
    return facts;
}

} // namespace

Result<Inspection> look(const Context& context) {
    const Result<Instance> instance = resolve_instance(context.instance.c_str(), context.runtime_dir.c_str());
    if (!instance) return tl::unexpected(instance.error());
    Result<OpenSegment> segment = open_segment(*instance);
    if (!segment) return tl::unexpected(segment.error());
    BrokerFacts broker = broker_facts(*segment, *instance);
    return Inspection{std::move(*segment), std::move(broker)};
}

std::optional<Inspection> inspect(Context& context, bool json) {
    Result<Inspection> inspected = look(context);
    if (!inspected) {
        report(context, inspected.error(), json);
        return std::nullopt;
    }
    const BrokerFacts& broker = inspected->broker;
    if (!broker.reachable || context.verbose) complain(broker_line(broker));
    if (context.verbose) complain(fmt::format("that is gcoalesced {}, layout {}", broker.version, broker.layout));
    if (!broker.reachable) context.exit = ExitCode::no_broker;
    return std::move(*inspected);
}

std::string broker_line(const BrokerFacts& broker) {
    const std::string where = fmt::format("segment {}", broker.segment);
    if (broker.state == "dead" || broker.state == "closed")
        return fmt::format("broker {} is {} since {}; {} shows what it left", broker.pid, broker.state,
                           format_wall(broker.heartbeat_wall_ns), where);
    return fmt::format("broker {} is {}, heartbeat {} ago; {}", broker.pid, broker.state,
                       format_duration(broker.heartbeat_age), where);
}

nlohmann::ordered_json to_json(const BrokerFacts& broker) {
    return {{"pid", broker.pid},
            {"state", broker.state},
            {"heartbeat_age_ms", to_ms(broker.heartbeat_age)},
            {"heartbeat_wall_ms", to_ms(broker.heartbeat_wall_ns)},
            {"instance", broker.instance},
            {"runtime_dir", broker.runtime_dir},
            {"segment", broker.segment},
            {"version", broker.version},
            {"layout", broker.layout}};
}

const char* StreamFacts::state() const {
    return gcoalesce_ending_name(in_flight ? GCOALESCE_IN_FLIGHT : static_cast<gcoalesce_ending_kind>(ending.kind));
}

std::optional<StreamFacts> stream_facts(const SegmentView& segment, std::uint32_t number) {
    const Slot& slot = segment.slot(number);
    const std::uint64_t generation = slot.generation.load(std::memory_order_acquire);
    const auto state = static_cast<SlotState>(slot.state.load(std::memory_order_acquire));
    if (state == SlotState::free) return std::nullopt;
    StreamFacts facts;
    facts.slot = number;
    facts.identity = generation >> 1;
    facts.in_flight = state == SlotState::in_flight;
    facts.open_to_joiners = (generation & kClosedToJoiners) == 0;
    facts.key = slot.key.load();
    facts.opening = slot.opening.load();
    if (!facts.in_flight) facts.ending = slot.ending.load(); // stored before the state that was just seen
    facts.evicted = slot.evicted.load(std::memory_order_acquire) != 0;
    facts.events = slot.committed.load(std::memory_order_acquire);
    facts.event_bytes = slot.committed_bytes.load(std::memory_order_acquire);
    facts.joins = slot.joins.load(std::memory_order_acquire);
    facts.subscribers = slot.subscribers.load(std::memory_order_acquire);
    facts.retries = slot.retries.load(std::memory_order_acquire);
    facts.upstream_status = static_cast<std::int32_t>(slot.upstream_status.load(std::memory_order_acquire));
    facts.first_event_ns = slot.first_event_ns.load(std::memory_order_acquire);
    facts.fresh_until = slot.fresh_until.load(std::memory_order_acquire);
    // Behind the copies: was all of it this stream's?
    if (slot.generation.load(std::memory_order_acquire) >> 1 != facts.identity) return std::nullopt;
    return facts;
}

std::vector<StreamFacts> all_streams(const SegmentView& segment) {
    std::vector<StreamFacts> streams;
    for (std::uint32_t slot = 0; slot < segment.slot_count(); ++slot) {
        if (std::optional<StreamFacts> facts = stream_facts(segment, slot)) streams.push_back(*facts);
    }
    std::ranges::stable_sort(streams, std::greater{},
                             [](const StreamFacts& stream) { return stream.opening.opened_ns; });
    return streams;
}

std::vector<DistinctError> distinct_errors(const SegmentView& segment) {
    std::vector<DistinctError> errors;
    for (std::uint32_t i = 0; i < segment.error_count(); ++i) {
        const ErrorEntry& entry = segment.error(i);
        const std::uint64_t before = entry.sequence.load(std::memory_order_acquire);
        const DistinctError error{entry.facts.load(), entry.count.load(std::memory_order_acquire)};
        const bool torn = before % 2 != 0 || entry.sequence.load(std::memory_order_acquire) != before;
        if (!torn && error.facts.code != 0) errors.push_back(error);
    }
    return errors;
}

std::uint64_t counted(const SegmentView& segment, Counter counter) {
    const std::string_view name = kCounters[static_cast<std::size_t>(counter)].name;
    for (std::uint32_t i = 0; i < segment.counter_count(); ++i) {
        if (segment.counter(i).text.name.view() == name)
            return segment.counter(i).value.load(std::memory_order_relaxed);
    }
    return 0;
}

SnapshotFacts snapshot_facts(const SegmentView& segment) {
    constexpr std::string_view kIntroduction = "snapshots: degraded: "; // of the error that the broker notes
    SnapshotFacts facts{counted(segment, Counter::snapshots_off) != 0,
                        counted(segment, Counter::snapshots_degraded) != 0, counted(segment, Counter::snapshots_kept),
                        counted(segment, Counter::snapshot_bytes), ""};
    if (!facts.degraded) return facts;
    std::int64_t last = 0;
    for (const DistinctError& error : distinct_errors(segment)) {
        const std::string_view message = error.facts.message.view();
        if (!message.starts_with(kIntroduction) || error.facts.last_wall_ns < last) continue;
        last = error.facts.last_wall_ns;
        facts.reason = message.substr(kIntroduction.size());
    }
    return facts;
}

std::string template_name(const SegmentView& segment, std::uint32_t index) {
    if (index >= segment.template_count()) return "?";
    return std::string(segment.template_entry(index).policy.load().id.view());
}

std::string format_wall(std::int64_t wall_ns) {
    const auto seconds = static_cast<std::time_t>(wall_ns / kSecond);
    std::tm local{};
    ::localtime_r(&seconds, &local);
    char text[32] = {};
    return {text, std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S", &local)};
}

} // namespace gcoalesce::cli
