// UTF-8, a character at a time.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace gcoalesce::cli {

constexpr char32_t kNoCharacter = 0xFFFFFFFF; // a byte that begins no character

struct Utf8 {
    char32_t character;
    std::size_t bytes; // at least 1
};

// The first character of a text that is not empty. Overlong forms, surrogates and cut sequences are no characters
// (RFC 3629).
Utf8 first_character(std::string_view text);

// How many columns of a terminal the text takes. Characters that a terminal does not know count as one.
std::size_t display_width(std::string_view text);

// The text, or as much of it as fits with a "…" behind it.
std::string shortened(std::string_view text, std::size_t columns);

// The longest beginning that takes at most so many columns.
std::string_view display_prefix(std::string_view text, std::size_t columns);

// Its lines, broken at blanks so that each takes at most `columns` (at least 1); a word that is longer is broken, too.
std::vector<std::string> wrapped(std::string_view text, std::size_t columns);

// "label" and the text behind it from column `indent` on, in as many lines as that takes, each ended by LF. Where that
// leaves the text too little room, it stands below the label, further left. width: the terminal's; 0: one line.
std::string hanging(std::string_view label, std::string_view text, std::size_t indent, std::size_t width);

} // namespace gcoalesce::cli
