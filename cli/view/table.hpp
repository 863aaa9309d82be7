// Tables for people.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace gcoalesce::cli {

enum class Align {
    left,
    right,
    wrapped // a text, in the last column only: what does not fit goes on in lines below
};

struct Column {
    std::string title;
    Align align = Align::left;
};

class Table {
  public:
    explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

    // One cell a column. Cells may hold anything: control characters are escaped.
    void add(std::vector<std::string> cells);

    // Titles and rows, columns two blanks apart, each line ended by LF. Where they do not fit into `width` columns of
    // the terminal, the last ones are left out, and a text that only begins to fit ends in "…": half a number would be
    // another number. A text that is wrapped goes on below, indented, and is not cut. 0: everything fits.
    std::string render(std::size_t width) const;

  private:
    std::vector<Column> columns_;
    std::vector<std::vector<std::string>> rows_;
};

} // namespace gcoalesce::cli
