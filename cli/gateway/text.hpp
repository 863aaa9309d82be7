// Beast's texts and ours.
#pragma once

#include <boost/beast/core/string.hpp>
#include <string_view>

namespace gcoalesce::gateway {

inline std::string_view view(boost::beast::string_view text) {
    return {text.data(), text.size()};
}

inline boost::beast::string_view view(std::string_view text) {
    return {text.data(), text.size()};
}

// Words of HTTP, whose case does not count.
inline bool same_word(std::string_view one, std::string_view other) {
    return boost::beast::iequals(view(one), view(other));
}

} // namespace gcoalesce::gateway
