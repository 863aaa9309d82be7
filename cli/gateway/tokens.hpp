// Who may use a gateway.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"

namespace gcoalesce::gateway {

struct Caller {
    std::string name; // the token's; "": there are no tokens
    std::string realm;
    bool admin = false;
    std::string api_key{}; // its own, that goes upstream with what it causes; "": the broker's does
};

// A file of lines "name:hash" or "name:hash:admin": the SHA-256 of a token in hex, as sha256sum prints it. Blank lines
// and lines that begin with "#" are passed over.
class Tokens {
  public:
    // Errors: GCOALESCE_BAD_REQUEST, with the line's number; GCOALESCE_IO.
    static Result<Tokens> read(const std::string& path);

    // Takes as long for any wrong token. nullptr: nobody's.
    const Caller* find(std::string_view token) const;

  private:
    struct Entry {
        std::string digest; // 32 bytes
        Caller caller;
    };
    std::vector<Entry> entries_;
};

} // namespace gcoalesce::gateway
