#include "cli/stream_json.hpp"

#include <nlohmann/json.hpp>

#include "cli/report.hpp"
#include "protocol/gemini.hpp"

namespace gcoalesce::cli {

nlohmann::ordered_json stream_json(const StreamFacts& stream, const SegmentView& segment, Nanos now) {
    nlohmann::ordered_json json{
        {"key", to_hex(stream.key)},
        {"stream_id", to_hex(stream.opening.stream_id)},
        {"template", template_name(segment, stream.opening.template_index)},
        {"model", stream.opening.model.view()},
        {"method", method_name(static_cast<Method>(stream.opening.method))},
        {"state", stream.state()},
        {"joinable", stream.open_to_joiners && (stream.in_flight || stream.fresh_for(now) > 0)},
        {"evicted", stream.evicted},
        {"opened_wall_ms", to_ms(stream.opening.opened_wall_ns)},
        {"age_ms", to_ms(now - stream.opening.opened_ns)},
        {"first_event_ms", nullptr},
        {"events", stream.events},
        {"event_bytes", stream.event_bytes},
        {"subscribers", stream.subscribers},
        {"joins", stream.joins},
        {"retries", stream.retries},
        {"upstream_status", stream.upstream_status},
        {"fresh_for_ms", to_ms(stream.fresh_for(now))},
    };
    if (stream.first_event_ns != 0) json["first_event_ms"] = to_ms(stream.first_event_ns - stream.opening.opened_ns);
    if (stream.in_flight) return json;
    json["duration_ms"] = nullptr;
    if (!stream.from_disk()) json["duration_ms"] = to_ms(stream.ending.ended_ns - stream.opening.opened_ns);
    json["reusable"] = stream.ending.reusable != 0;
    json["finish_reason"] = stream.ending.finish_reason.view();
    json["code"] = code_name(static_cast<Code>(stream.ending.code));
    json["message"] = stream.ending.message.view();
    json["prompt_tokens"] = stream.ending.prompt_tokens;
    json["cached_tokens"] = stream.ending.cached_tokens;
    json["thought_tokens"] = stream.ending.thought_tokens;
    json["answer_tokens"] = stream.ending.answer_tokens;
    json["total_tokens"] = stream.ending.total_tokens;
    return json;
}

} // namespace gcoalesce::cli
