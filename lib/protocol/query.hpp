// The query of a URL, read as a list of parameters.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace gcoalesce {

struct QueryParameter {
    std::string name;       // decoded
    std::string_view value; // as it stands in the query
    std::string_view text;  // the whole parameter, likewise

    // It brings a key or token of Google's APIs, under whichever of their names.
    bool is_credential() const;
};

// query: without its question mark; empty parameters are passed over. The views are into it. Thread-safe.
std::vector<QueryParameter> query_parameters(std::string_view query);

// Percent-encoding (RFC 3986, 2.1) undone, and "+" read as a space, as HTML forms write it. A "%" without two hex
// digits behind it stands for itself.
std::string query_decoded(std::string_view text);

} // namespace gcoalesce
