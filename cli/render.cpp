#include "cli/render.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/view/escape.hpp"
#include "protocol/gemini.hpp"
#include "protocol/sse.hpp"

namespace gcoalesce::cli {

std::string render(Form form, std::string_view event) {
    switch (form) {
    case Form::text: return event_text(event).text;
    case Form::lines: return one_line(event) + "\n";
    case Form::sse: return frame_sse(event);
    }
    return {};
}

std::string for_terminal(Form form, std::string_view rendered) {
    return form == Form::text ? escape_controls(rendered) : escape_controls(escape_json(rendered));
}

std::string one_line(std::string_view json) {
    std::string line(json);
    if (json.find_first_of("\r\n") == std::string_view::npos) return line;
    const auto document = nlohmann::ordered_json::parse(json, nullptr, false);
    if (!document.is_discarded()) return document.dump();
    std::ranges::replace(line, '\n', ' ');
    std::ranges::replace(line, '\r', ' ');
    return line;
}

std::string json_line(const nlohmann::ordered_json& json) {
    return escape_json(json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)) + "\n";
}

} // namespace gcoalesce::cli
