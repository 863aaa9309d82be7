#include "protocol/key.hpp"

#include <algorithm>

#include "base/sha256.hpp"
#include "protocol/control.hpp"

namespace gcoalesce {
namespace {

bool allowed(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '-' ||
           c == '_' || c == '/';
}

// A path with such a segment would be another path once "." and ".." are resolved (RFC 3986, 5.2.4).
bool has_odd_segment(std::string_view path) {
    for (;;) {
        const std::size_t slash = path.find('/');
        const std::string_view segment = path.substr(0, slash);
        if (segment.empty() || segment == "." || segment == "..") return true;
        if (slash == std::string_view::npos) return false;
        path.remove_prefix(slash + 1);
    }
}

} // namespace

Key compute_key(const KeyParts& parts) {
    thread_local Sha256 hash; // setting one up costs more than hashing a short request
    hash.field(kKeyEncoding);
    hash.field(parts.realm);
    hash.field(parts.template_id);
    hash.field(parts.template_revision);
    hash.field(parts.model);
    hash.field(static_cast<std::uint64_t>(parts.method));
    hash.field(parts.explicit_key ? "explicit" : "asked");
    hash.field(parts.asked);
    return hash.finish();
}

bool is_api_key(std::string_view text) {
    return !text.empty() && text.size() <= kMaxApiKey &&
           std::all_of(text.begin(), text.end(), [](char c) { return c > ' ' && c <= '~'; });
}

std::string realm_of_api_key(std::string_view api_key) {
    if (api_key.empty()) return {};
    Sha256 hash;
    hash.field(api_key);
    return "key-" + to_hex(hash.finish()).substr(0, 32);
}

Result<std::string> resolve_model(std::string_view model) {
    constexpr std::string_view prefix = "models/";
    if (model.starts_with(prefix)) model.remove_prefix(prefix.size());
    if (model.empty()) return fail(GCOALESCE_BAD_REQUEST, "expected a model such as gemini-2.5-flash, found none");
    if (model.size() > 128)
        return fail(GCOALESCE_BAD_REQUEST, "the model's name has {} bytes; at most 128 are allowed", model.size());
    const auto bad = std::find_if_not(model.begin(), model.end(), allowed);
    if (bad != model.end())
        return fail(
            GCOALESCE_BAD_REQUEST,
            "the model's name has byte 0x{:02x} at {}; letters, digits, \".\", \"-\", \"_\" and \"/\" are allowed",
            static_cast<unsigned>(static_cast<unsigned char>(*bad)), bad - model.begin());
    if (has_odd_segment(model))
        return fail(GCOALESCE_BAD_REQUEST, "the model's name has an empty part, \".\" or \"..\" between slashes");
    return std::string(model);
}

} // namespace gcoalesce
