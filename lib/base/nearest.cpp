#include "base/nearest.hpp"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

namespace gcoalesce {
namespace {

// Levenshtein's distance, one row of the table at a time.
std::size_t distance(std::string_view from, std::string_view to) {
    std::vector<std::size_t> row(to.size() + 1);
    std::iota(row.begin(), row.end(), std::size_t{0});
    for (std::size_t i = 0; i < from.size(); ++i) {
        std::size_t diagonal = std::exchange(row[0], i + 1);
        for (std::size_t j = 0; j < to.size(); ++j) {
            const std::size_t replaced = diagonal + (from[i] == to[j] ? 0 : 1);
            diagonal = std::exchange(row[j + 1], std::min({replaced, row[j] + 1, row[j + 1] + 1}));
        }
    }
    return row.back();
}

} // namespace

std::string nearest(std::string_view word, std::span<const std::string> known) {
    word = word.substr(0, 64); // nobody means a longer one
    std::string best;
    std::size_t fewest = 2 + word.size() / 3; // two letters changed places: two edits
    for (const std::string& candidate : known) {
        const std::size_t edits = distance(word, candidate);
        if (edits < fewest && edits < candidate.size()) {
            fewest = edits;
            best = candidate;
        }
    }
    return best;
}

std::string did_you_mean(std::string_view word, std::span<const std::string> known) {
    const std::string near = nearest(word, known);
    return near.empty() ? near : "; did you mean \"" + near + "\"?";
}

} // namespace gcoalesce
