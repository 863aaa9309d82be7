#include "cli/view/utf8.hpp"

#include <algorithm>
#include <cwchar>

namespace gcoalesce::cli {
namespace {

// wcwidth(3) knows wide and combining characters as soon as main() has set a UTF-8 locale.
std::size_t width(char32_t character) {
    if (character == kNoCharacter) return 1;
    const int columns = ::wcwidth(static_cast<wchar_t>(character));
    return columns < 0 ? 1 : static_cast<std::size_t>(columns);
}

} // namespace

Utf8 first_character(std::string_view text) {
    const auto lead = static_cast<unsigned char>(text[0]);
    if (lead < 0x80) return {lead, 1};
    const std::size_t bytes = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
    if (lead < 0xC2 || lead > 0xF4 || text.size() < bytes) return {kNoCharacter, 1};
    char32_t character = lead & (0xFFu >> (bytes + 1));
    for (std::size_t i = 1; i < bytes; ++i) {
        const auto next = static_cast<unsigned char>(text[i]);
        if ((next & 0xC0) != 0x80) return {kNoCharacter, 1};
        character = character << 6 | (next & 0x3F);
    }
    constexpr char32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    const bool surrogate = character >= 0xD800 && character < 0xE000;
    if (character < least[bytes] || character > 0x10FFFF || surrogate) return {kNoCharacter, 1};
    return {character, bytes};
}

std::size_t display_width(std::string_view text) {
    std::size_t columns = 0;
    while (!text.empty()) {
        const Utf8 next = first_character(text);
        columns += width(next.character);
        text.remove_prefix(next.bytes);
    }
    return columns;
}

std::string shortened(std::string_view text, std::size_t columns) {
    if (display_width(text) <= columns) return std::string(text);
    return columns == 0 ? "" : std::string(display_prefix(text, columns - 1)) + "…";
}

std::string_view display_prefix(std::string_view text, std::size_t columns) {
    std::size_t end = 0;
    while (end < text.size()) {
        const Utf8 next = first_character(text.substr(end));
        const std::size_t needed = width(next.character);
        if (needed > columns) break;
        columns -= needed;
        end += next.bytes;
    }
    return text.substr(0, end);
}

std::vector<std::string> wrapped(std::string_view text, std::size_t columns) {
    std::vector<std::string> lines;
    while (display_width(text) > columns) {
        std::string_view line = display_prefix(text, columns);
        if (line.empty()) line = text.substr(0, first_character(text).bytes); // wider than the terminal
        std::string_view rest = text.substr(line.size());
        if (!rest.starts_with(' ')) { // within a word
            const std::size_t blank = line.find_last_of(' ');
            const bool leading = line.find_first_not_of(' ') > blank;
            if (blank != std::string_view::npos && !leading) {
                line = line.substr(0, blank);
                rest = text.substr(blank);
            }
        }
        lines.emplace_back(line.substr(0, line.find_last_not_of(' ') + 1));
        text = rest.substr(std::min(rest.find_first_not_of(' '), rest.size()));
    }
    if (!text.empty() || lines.empty()) lines.emplace_back(text);
    return lines;
}

std::string hanging(std::string_view label, std::string_view text, std::size_t indent, std::size_t width) {
    constexpr std::size_t kLeastText = 24, kBelow = 4;
    std::string out(label);
    if (width != 0 && indent + kLeastText > width && indent + display_width(text) > width) {
        if (!label.empty()) out += '\n';
        indent = std::min(kBelow, width - 1);
        out.append(indent, ' ');
    } else {
        out.append(indent - std::min(indent, display_width(label)), ' ');
    }
    if (width == 0) return out.append(text) + '\n';
    std::string_view before;
    const std::string margin = '\n' + std::string(indent, ' ');
    for (const std::string& line : wrapped(text, std::max<std::size_t>(width - std::min(width, indent), 1))) {
        out.append(before).append(line);
        before = margin;
    }
    return out + '\n';
}

} // namespace gcoalesce::cli
