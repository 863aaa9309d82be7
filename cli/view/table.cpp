#include "cli/view/table.hpp"

#include <algorithm>

#include "cli/view/escape.hpp"
#include "cli/view/utf8.hpp"

namespace gcoalesce::cli {
namespace {

constexpr std::size_t kGap = 2;
constexpr std::size_t kLeastText = 4; // columns that are worth showing of a text

} // namespace

void Table::add(std::vector<std::string> cells) {
    for (std::string& cell : cells) cell = escape_line(cell);
    rows_.push_back(std::move(cells));
}

std::string Table::render(std::size_t width) const {
    const bool wraps = !columns_.empty() && columns_.back().align == Align::wrapped;
    const std::size_t plain = columns_.size() - (wraps ? 1 : 0);
    std::vector<std::size_t> widths;
    std::size_t used = 0;
    bool cut = false;
    for (std::size_t i = 0; i < plain; ++i) {
        std::size_t wanted = display_width(columns_[i].title);
        for (const auto& row : rows_) wanted = std::max(wanted, display_width(row[i]));
        const std::size_t gap = i == 0 ? 0 : kGap;
        if (width != 0 && used + gap + wanted > width) {
            const std::size_t left = width - std::min(width, used + gap);
            if (i == 0 || (columns_[i].align == Align::left && left >= kLeastText)) widths.push_back(left);
            cut = true;
            break;
        }
        used += gap + wanted;
        widths.push_back(wanted);
    }
    std::string out;
    const auto print = [&](const auto& cell) {
        std::string line;
        for (std::size_t i = 0; i < widths.size(); ++i) {
            const std::string text = shortened(cell(i), widths[i]);
            const std::string padding(widths[i] - display_width(text), ' ');
            line += i == 0 ? "" : std::string(kGap, ' ');
            line += columns_[i].align == Align::right ? padding + text : text + padding;
        }
        line.erase(line.find_last_not_of(' ') + 1);
        const std::size_t indent = cut ? width : used + kGap; // cut: none is left beside those before it
        out += wraps && !cell(plain).empty() ? hanging(line, cell(plain), indent, width) : line + '\n';
    };
    print([&](std::size_t i) { return columns_[i].title; });
    for (const auto& row : rows_) print([&](std::size_t i) { return row[i]; });
    return out;
}

} // namespace gcoalesce::cli
