#include "cli/view/escape.hpp"

#include <cstdint>
#include <fmt/format.h>
#include <iterator>

#include "cli/view/utf8.hpp"

namespace gcoalesce::cli {
namespace {

std::string escape(std::string_view text, bool one_line) {
    std::string out;
    out.reserve(text.size());
    while (!text.empty()) {
        const Utf8 next = first_character(text);
        const std::string_view bytes = text.substr(0, next.bytes);
        const char32_t c = next.character;
        const bool line_break = c == '\n' || c == '\t' || c == '\r';
        if (one_line && (line_break || c == '\\')) {
            out += '\\';
            out += c == '\n' ? 'n' : c == '\t' ? 't' : c == '\r' ? 'r' : '\\';
        } else if (c == kNoCharacter || (c < 0x20 && !line_break) || (c == '\r' && !text.starts_with("\r\n")) ||
                   (c >= 0x7F && c < 0xA0)) {
            for (const char byte : bytes)
                fmt::format_to(std::back_inserter(out), "\\x{:02x}", static_cast<unsigned char>(byte));
        } else {
            out += bytes;
        }
        text.remove_prefix(bytes.size());
    }
    return out;
}

} // namespace

std::string escape_controls(std::string_view text) {
    return escape(text, false);
}

std::string escape_line(std::string_view text) {
    return escape(text, true);
}

std::string escape_json(std::string_view json) {
    std::string out;
    out.reserve(json.size());
    for (std::size_t i = 0; i < json.size(); ++i) {
        const auto byte = static_cast<unsigned char>(json[i]);
        const auto next = static_cast<unsigned char>(i + 1 < json.size() ? json[i + 1] : 0);
        if (byte == 0x7F) {
            out += "\\u007f";
        } else if (byte == 0xC2 && next >= 0x80 && next < 0xA0) { // U+0080 .. U+009F
            fmt::format_to(std::back_inserter(out), "\\u00{:02x}", next);
            ++i;
        } else {
            out += json[i];
        }
    }
    return out;
}

} // namespace gcoalesce::cli
