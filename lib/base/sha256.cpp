#include "base/sha256.hpp"

#include <new>
#include <openssl/evp.h>

namespace gcoalesce {

struct Sha256::Context {
    EVP_MD_CTX* state = EVP_MD_CTX_new();
    // Fetched once an object: EVP_sha256() would be looked up again at each start.
    EVP_MD* algorithm = EVP_MD_fetch(nullptr, "SHA256", nullptr);
    Context() {
        if (state == nullptr || algorithm == nullptr) throw std::bad_alloc();
        EVP_DigestInit_ex2(state, algorithm, nullptr);
    }
    ~Context() {
        EVP_MD_CTX_free(state);
        EVP_MD_free(algorithm);
    }
};

Sha256::Sha256() : context_(std::make_unique<Context>()) {}
Sha256::~Sha256() = default;

void Sha256::field(std::string_view bytes) {
    field(static_cast<std::uint64_t>(bytes.size()));
    EVP_DigestUpdate(context_->state, bytes.data(), bytes.size());
}

void Sha256::field(std::uint64_t number) {
    std::uint8_t little_endian[8];
    for (std::uint8_t& byte : little_endian) {
        byte = static_cast<std::uint8_t>(number);
        number >>= 8;
    }
    EVP_DigestUpdate(context_->state, little_endian, sizeof little_endian);
}

Key Sha256::finish() {
    Key key{};
    EVP_DigestFinal_ex(context_->state, key.data(), nullptr);
    EVP_DigestInit_ex2(context_->state, nullptr, nullptr);
    return key;
}

} // namespace gcoalesce
