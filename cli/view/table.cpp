#include "cli/view/table.hpp"

#include <algorithm>

#include "cli/view/escape.hpp"
#include "cli/view/utf8.hpp"

namespace gcoalesce::cli {

void Table::add(std::vector<std::string> cells) {
    for (std::string& cell : cells) cell = escape_line(cell);
    rows_.push_back(std::move(cells));
}

std::string Table::render(std::size_t width) const {
    std::vector<std::string> titles;
    std::vector<std::size_t> widths;
    for (std::size_t i = 0; i < columns_.size(); ++i) {
        titles.push_back(columns_[i].title);
        widths.push_back(display_width(columns_[i].title));
        for (const auto& row : rows_) widths[i] = std::max(widths[i], display_width(row[i]));
    }
    std::string out;
    const auto print = [&](const std::vector<std::string>& cells) {
        std::string line;
        for (std::size_t i = 0; i < cells.size(); ++i) {
            const std::string padding(widths[i] - display_width(cells[i]), ' ');
            if (columns_[i].align == Align::right) line += padding;
            line += cells[i];
            if (columns_[i].align == Align::left) line += padding;
            if (i + 1 < cells.size()) line += "  ";
        }
        line.erase(line.find_last_not_of(' ') + 1);
        if (width != 0) line = display_prefix(line, width);
        out += line + '\n';
    };
    print(titles);
    for (const auto& row : rows_) print(row);
    return out;
}

} // namespace gcoalesce::cli
