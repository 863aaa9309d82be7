#include "cli/log_ring.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "base/units.hpp"
#include "cli/inspect.hpp"
#include "cli/report.hpp"

namespace gcoalesce::cli {
namespace {

// By LogKind, from 1.
constexpr std::array kKinds{"started",   "first_event", "ended",   "retired", "retry",    "notify",
                            "attached",  "detached",    "evicted", "revoked", "refused",  "closed",
                            "cancelled", "purged",      "demoted", "resumed", "reloaded", "restored"};
static_assert(kKinds.size() == static_cast<std::size_t>(LogKind::restored));

std::string status_words(const LogFacts& record) {
    return record.upstream_status != 0 ? fmt::format(", HTTP {}", record.upstream_status) : "";
}

} // namespace

LogCursor::LogCursor(const SegmentView& segment) : segment_(segment) {
    const std::uint64_t next = segment.header().log_next.load(std::memory_order_acquire);
    at_ = next - std::min<std::uint64_t>(next, segment.header().log.count);
}

std::optional<LogFacts> LogCursor::next() {
    for (;;) {
        const std::uint64_t next = segment_.header().log_next.load(std::memory_order_acquire);
        if (at_ >= next) return std::nullopt;
        const std::uint64_t oldest = next - std::min<std::uint64_t>(next, segment_.header().log.count);
        if (at_ < oldest) {
            missed_ += oldest - at_;
            at_ = oldest;
        }
        const LogRecord& record = segment_.log_record(at_);
        const std::uint64_t whole = 2 * at_ + 2;
        const bool before = record.sequence.load(std::memory_order_acquire) == whole;
        const LogFacts facts = record.facts.load();
        ++at_;
        // Acquire-loads before it: a record that was written over meanwhile shows here (copy_in()).
        if (before && record.sequence.load(std::memory_order_acquire) == whole) return facts;
        ++missed_;
    }
}

std::string log_kind_name(std::uint32_t kind) {
    return kind >= 1 && kind <= kKinds.size() ? kKinds[kind - 1] : fmt::format("kind_{}", kind);
}

std::vector<std::string> log_kinds() {
    return {kKinds.begin(), kKinds.end()};
}

std::string key_prefix_hex(std::uint64_t fingerprint) {
    std::array<std::uint8_t, sizeof fingerprint> bytes{};
    std::memcpy(bytes.data(), &fingerprint, sizeof fingerprint);
    return to_hex(bytes);
}

std::string log_details(const LogFacts& record) {
    const std::string text(record.text.view());
    const Nanos time = from_ms(static_cast<std::int64_t>(std::min<std::uint64_t>(record.number, INT64_MAX / kSecond)));
    switch (static_cast<LogKind>(record.kind)) {
    case LogKind::started: return fmt::format("request of {}", format_size(record.number));
    case LogKind::restored: return "from disk";
    case LogKind::first_event: return fmt::format("after {}", format_duration(time));
    case LogKind::ended:
        return fmt::format("{}{}, {}{}", gcoalesce_ending_name(static_cast<gcoalesce_ending_kind>(record.code)),
                           text.empty() ? "" : " " + text, counted(record.number, "event"), status_words(record));
    case LogKind::retired: return counted(record.number, "event");
    case LogKind::retry:
        return fmt::format("number {}: {}{}{}", record.number, code_name(static_cast<Code>(record.code)),
                           status_words(record), text.empty() ? "" : ", again in " + text);
    case LogKind::notify:
        return record.code != 0 ? fmt::format("the window is open for {}", format_duration(time))
                                : "the window is closed";
    case LogKind::attached:
    case LogKind::detached:
    case LogKind::revoked: return fmt::format("{} (pid {})", text, record.number);
    case LogKind::refused:
        return fmt::format("{}{}", code_name(static_cast<Code>(record.code)),
                           record.number != 0 ? fmt::format(", try again in {}", format_duration(time)) : "");
    case LogKind::closed: return "the broker has shut down";
    case LogKind::demoted: return fmt::format("asked again alone; {} under way before it", record.number);
    case LogKind::reloaded: return counted(record.number, "template");
    case LogKind::evicted: return "its events are gone";
    case LogKind::resumed: return fmt::format("behind event {}", record.number);
    case LogKind::cancelled: return "by an operator";
    case LogKind::purged: break;
    }
    return text;
}

nlohmann::ordered_json to_json(const LogFacts& record, std::uint64_t number, const SegmentView& segment) {
    nlohmann::ordered_json json{{"number", number},
                                {"wall_ms", to_ms(record.when_wall_ns)},
                                {"monotonic_ms", to_ms(record.when_ns)},
                                {"kind", log_kind_name(record.kind)},
                                {"key_prefix", nullptr},
                                {"stream_id", nullptr},
                                {"template", nullptr}};
    if (record.stream_id != 0) {
        json["key_prefix"] = key_prefix_hex(record.key_prefix);
        json["stream_id"] = to_hex(record.stream_id);
    }
    if (record.template_index != kNoTemplate) json["template"] = template_name(segment, record.template_index);
    switch (static_cast<LogKind>(record.kind)) {
    case LogKind::started: json["request_bytes"] = record.number; break;
    case LogKind::first_event: json["first_event_ms"] = record.number; break;
    case LogKind::ended:
        json["ending"] = gcoalesce_ending_name(static_cast<gcoalesce_ending_kind>(record.code));
        json[record.code == GCOALESCE_COMPLETE ? "finish_reason" : "code"] = record.text.view();
        json["events"] = record.number;
        break;
    case LogKind::retired: json["events"] = record.number; break;
    case LogKind::retry:
        json["retry"] = record.number;
        if (const auto again_in = parse_duration(record.text.view())) json["again_in_ms"] = to_ms(*again_in);
        json["code"] = code_name(static_cast<Code>(record.code));
        break;
    case LogKind::notify:
        json["window"] = record.code != 0 ? "open" : "closed";
        json["remaining_ms"] = record.number;
        break;
    case LogKind::attached:
    case LogKind::detached:
    case LogKind::revoked:
        json["name"] = record.text.view();
        json["pid"] = record.number;
        break;
    case LogKind::refused:
        json["code"] = code_name(static_cast<Code>(record.code));
        json["retry_ms"] = record.number;
        break;
    case LogKind::demoted: json["under_way"] = record.number; break;
    case LogKind::reloaded: json["templates"] = record.number; break;
    default: break;
    }
    if (record.upstream_status != 0) json["upstream_status"] = record.upstream_status;
    return json;
}

} // namespace gcoalesce::cli
