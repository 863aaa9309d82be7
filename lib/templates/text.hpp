// Small judgements on texts that come from outside; for lib/templates alone.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>

namespace gcoalesce {

// Letters, digits and the bytes of `also`, 1 .. 63 bytes.
inline bool is_word(std::string_view text, std::string_view also) {
    return !text.empty() && text.size() <= 63 && std::all_of(text.begin(), text.end(), [&](char c) {
        return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
               also.find(c) != std::string_view::npos;
    });
}

inline bool is_variable_name(std::string_view text) {
    return is_word(text, "_");
}

// Where a text has what nlohmann lets pass, and JSON does not: a byte order mark, and a NUL, which it takes for the
// end.
inline std::optional<std::size_t> odd_byte(std::string_view text) {
    if (text.starts_with("\xEF\xBB\xBF")) return 0;
    const std::size_t nul = text.find('\0');
    return nul == std::string_view::npos ? std::nullopt : std::optional(nul);
}

// One name on the way of a JSON pointer, escaped (RFC 6901, 3).
inline void append_pointer(std::string& pointer, std::string_view name) {
    pointer += '/';
    for (const char c : name) {
        if (c == '~')
            pointer += "~0";
        else if (c == '/')
            pointer += "~1";
        else
            pointer += c;
    }
}

} // namespace gcoalesce
