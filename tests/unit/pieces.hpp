// Ways to cut a body into the pieces in which a reader may get it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <random>
#include <string_view>
#include <vector>

namespace gcoalesce::test {

using Cuts = std::vector<std::size_t>; // ascending offsets

inline Cuts every_byte(std::size_t size) {
    Cuts cuts(size);
    for (std::size_t i = 0; i < size; ++i) cuts[i] = i;
    return cuts;
}

inline Cuts random_cuts(std::size_t size, std::mt19937& random) {
    Cuts cuts(random() % 8);
    for (std::size_t& cut : cuts) cut = size == 0 ? 0 : random() % size;
    std::sort(cuts.begin(), cuts.end());
    return cuts;
}

// Each piece is a block of its own, so that AddressSanitizer sees a read beyond it.
template <class Take>
void feed_cut(std::string_view text, const Cuts& cuts, Take take) {
    std::size_t begin = 0;
    for (std::size_t i = 0; i <= cuts.size(); ++i) {
        const std::size_t end = i < cuts.size() ? std::min(cuts[i], text.size()) : text.size();
        const std::size_t size = end - begin;
        const auto block = std::make_unique<char[]>(size);
        std::copy_n(text.data() + begin, size, block.get());
        take(std::string_view(block.get(), size));
        begin = end;
    }
}

} // namespace gcoalesce::test
