// SHA-256 (FIPS 180-4) by OpenSSL's libcrypto.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "base/ids.hpp"

namespace gcoalesce {

// Feeds fields and returns their digest. Each field goes in behind its length, so that no two lists of fields
// hash the same bytes. Not thread-safe; one object can be used again after finish().
class Sha256 {
  public:
    Sha256();
    ~Sha256();
    Sha256(const Sha256&) = delete;
    Sha256& operator=(const Sha256&) = delete;

    void field(std::string_view bytes);
    void field(std::uint64_t number);
    Key finish();

  private:
    struct Context;
    std::unique_ptr<Context> context_;
};

} // namespace gcoalesce
