#include "cli/redact.hpp"

#include <algorithm>
#include <array>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace gcoalesce::cli {
namespace {

using Json = nlohmann::ordered_json;

// What may be looked into. Anything else, an argument of a function call for one, is content.
constexpr std::array kStructure{
    "candidates",
    "content",
    "contents",
    "parts",
    "systemInstruction",
    "inlineData",
    "fileData",
    "functionCall",
    "functionResponse",
    "safetyRatings",
    "safetySettings",
    "promptFeedback",
    "usageMetadata",
    "error",
    "details",
    "thinkingConfig",
    "generationConfig",
    "promptTokensDetails",
    "cacheTokensDetails",
    "candidatesTokensDetails",
};

// Words of the protocol.
constexpr std::array kWords{
    "role",     "finishReason", "blockReason", "modelVersion", "responseId",       "mimeType",
    "category", "probability",  "severity",    "threshold",    "modality",         "status",
    "reason",   "@type",        "model",       "createTime",   "responseMimeType", "thinkingLevel",
};

constexpr int kDeepest = 64;

bool among(const auto& names, const std::string& name) {
    return std::ranges::find(names, name) != names.end();
}

Json sized(const Json& value) {
    const std::size_t bytes = value.is_string() ? value.get_ref<const std::string&>().size()
                                                : value.dump(-1, ' ', false, Json::error_handler_t::replace).size();
    return fmt::format("[{} byte{}]", bytes, bytes == 1 ? "" : "s");
}

Json redacted(const Json& value);

Json member(const std::string& name, const Json& value) {
    if (value.is_structured()) return among(kStructure, name) ? redacted(value) : sized(value);
    if (value.is_string()) return among(kWords, name) ? value : sized(value);
    return value;
}

Json redacted(const Json& value) {
    Json out = value;
    if (value.is_array()) {
        for (Json& inner : out) inner = inner.is_structured() ? redacted(inner) : sized(inner);
    } else if (value.is_object()) {
        for (const auto& [name, inner] : value.items()) out[name] = member(name, inner);
    } else {
        out = sized(value);
    }
    return out;
}

} // namespace

std::string redact(std::string_view json) {
    // What is nested deeper than any answer is content: it goes before anything recurses into it.
    const auto shallow = [](int depth, Json::parse_event_t, Json&) { return depth < kDeepest; };
    const Json document = Json::parse(json, shallow, false);
    const Json out = document.is_discarded() ? sized(Json(json)) : redacted(document);
    return out.dump(-1, ' ', false, Json::error_handler_t::replace);
}

} // namespace gcoalesce::cli
