// From a request to the key under which it is shared.
#pragma once

#include <string>
#include <string_view>

#include "base/error.hpp"
#include "base/ids.hpp"
#include "protocol/gemini.hpp"

namespace gcoalesce {

constexpr std::string_view kDefaultTemplate = "default"; // of whole request bodies

// The encoding's own name, its first field: changes with every change of the encoding or of canonical_request(), for
// keys outlive a release in snapshots.
constexpr std::string_view kKeyEncoding = "gcoalesce key 1";

// All that decides whether two requests ask the same. Views: the caller keeps the texts.
struct KeyParts {
    std::string_view realm = ""; // "": everyone shares
    std::string_view template_id = kDefaultTemplate;
    std::uint64_t template_revision = 1;
    std::string_view model; // resolve_model()'s form
    Method method = Method::stream;
    // What is asked: canonical_request()'s form of a whole request, the canonical variables of a template, or, with
    // `explicit_key`, the caller's own name for it.
    std::string_view asked;
    bool explicit_key = false;
};

// SHA-256 over the parts in a versioned, unambiguous encoding. Thread-safe.
Key compute_key(const KeyParts& parts);

// Whether a caller's key may stand in a header line: 1 to kMaxApiKey printable ASCII characters without spaces.
bool is_api_key(std::string_view text);

// The realm of whoever brings this key, named by the key's hash; "" for "".
std::string realm_of_api_key(std::string_view api_key);

// "models/x" and "x" are one model; refused (GCOALESCE_BAD_REQUEST): empty, over 128 bytes, or with characters that
// would change the upstream URL (only letters, digits, ".", "-", "_", and "/" as in "tunedModels/x").
Result<std::string> resolve_model(std::string_view model);

} // namespace gcoalesce
