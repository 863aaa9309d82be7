#include "protocol/query.hpp"

#include <algorithm>
#include <charconv>

namespace gcoalesce {

bool QueryParameter::is_credential() const {
    std::string_view plain = name;
    if (plain.starts_with('$')) plain.remove_prefix(1); // so written, a system parameter is no method's own
    for (const std::string_view known : {"key", "access_token", "oauth_token"}) {
        if (std::ranges::equal(plain, known, [](char a, char b) { return (a >= 'A' && a <= 'Z' ? a + 32 : a) == b; }))
            return true;
    }
    return false;
}

std::vector<QueryParameter> query_parameters(std::string_view query) {
    std::vector<QueryParameter> all;
    while (!query.empty()) {
        const std::string_view text = query.substr(0, query.find('&'));
        query.remove_prefix(std::min(text.size() + 1, query.size()));
        if (text.empty()) continue;
        const std::size_t equals = std::min(text.find('='), text.size());
        all.push_back({query_decoded(text.substr(0, equals)), text.substr(std::min(equals + 1, text.size())), text});
    }
    return all;
}

std::string query_decoded(std::string_view text) {
    std::string plain;
    plain.reserve(text.size());
    while (!text.empty()) {
        unsigned char byte = 0;
        const std::string_view digits = text.front() == '%' ? text.substr(1, 2) : std::string_view();
        const auto [end, wrong] = std::from_chars(digits.data(), digits.data() + digits.size(), byte, 16);
        const bool encoded = digits.size() == 2 && wrong == std::errc() && end == digits.data() + digits.size();
        plain += encoded ? static_cast<char>(byte) : text.front() == '+' ? ' ' : text.front();
        text.remove_prefix(encoded ? 3 : 1);
    }
    return plain;
}

} // namespace gcoalesce
