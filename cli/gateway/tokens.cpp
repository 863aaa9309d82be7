#include "cli/gateway/tokens.hpp"

#include <algorithm>
#include <array>
#include <fstream>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <stdexcept>

#include "base/ids.hpp"
#include "protocol/control.hpp"

namespace gcoalesce::gateway {
namespace {

std::string sha256(std::string_view bytes) {
    std::array<std::uint8_t, EVP_MAX_MD_SIZE> digest{};
    unsigned size = 0;
    if (EVP_Digest(bytes.data(), bytes.size(), digest.data(), &size, EVP_sha256(), nullptr) != 1)
        throw std::runtime_error("SHA-256 is not to be had");
    return {reinterpret_cast<const char*>(digest.data()), size};
}

} // namespace

Result<Tokens> Tokens::read(const std::string& path) {
    std::ifstream file(path);
    if (!file) return fail_errno(GCOALESCE_IO, "cannot read the token file " + path);
    Tokens tokens;
    std::string line;
    for (int number = 1; std::getline(file, line); ++number) {
        if (line.ends_with('\r')) line.pop_back();
        if (line.empty() || line.starts_with('#')) continue;
        const std::size_t first = line.find(':');
        const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
        const std::string name = line.substr(0, first);
        const std::string hash =
            first == std::string::npos
                ? ""
                : line.substr(first + 1, second == std::string::npos ? second : second - first - 1);
        const std::string role = second == std::string::npos ? "" : line.substr(second + 1);
        const std::optional<Key> digest = parse_key(hash);
        // What stands in the line may be a token that somebody forgot to hash: it is not repeated.
        if (name.empty() || name.size() > kMaxRealm || !digest || (!role.empty() && role != "admin"))
            return fail(GCOALESCE_BAD_REQUEST,
                        "{} line {}: expected name:hash or name:hash:admin, the hash of 64 hexadecimal digits", path,
                        number);
        if (std::ranges::any_of(tokens.entries_, [&](const Entry& entry) { return entry.caller.name == name; }))
            return fail(GCOALESCE_BAD_REQUEST, "{} line {}: the name \"{}\" stands there twice", path, number, name);
        tokens.entries_.push_back({std::string(digest->begin(), digest->end()), Caller{name, name, role == "admin"}});
    }
    if (tokens.entries_.empty()) return fail(GCOALESCE_BAD_REQUEST, "{} has no token: nobody could ask", path);
    return tokens;
}

const Caller* Tokens::find(std::string_view token) const {
    const std::string digest = sha256(token);
    const Caller* found = nullptr;
    for (const Entry& entry : entries_) {
        if (CRYPTO_memcmp(entry.digest.data(), digest.data(), digest.size()) == 0) found = &entry.caller;
    }
    return found;
}

} // namespace gcoalesce::gateway
