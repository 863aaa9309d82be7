#include "broker/api_key.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <unistd.h>
#include <utility>

#include "base/fd.hpp"

namespace gcoalesce {
namespace {

constexpr std::size_t kMostBytes = 4096;
constexpr const char* kVariable = "GEMINI_API_KEY";

bool printable(char c) {
    return c > ' ' && c <= '~';
}

tl::unexpected<Error> too_long(const std::string& source) {
    return fail(GCOALESCE_BAD_REQUEST, "{} is too long for an API key: more than {} bytes", source, kMostBytes);
}

Result<ApiKey> checked(ApiKey raw, const std::string& source) {
    constexpr std::string_view blanks = " \t\r\n";
    std::string_view key = raw.text();
    key.remove_prefix(std::min(key.find_first_not_of(blanks), key.size()));
    key = key.substr(0, key.find_last_not_of(blanks) + 1);
    if (key.empty()) return fail(GCOALESCE_BAD_REQUEST, "expected an API key in {}, found nothing", source);
    if (key.size() > kMostBytes) return too_long(source);
    if (!std::all_of(key.begin(), key.end(), printable))
        return fail(GCOALESCE_BAD_REQUEST,
                    "{} is no API key: it has a character that is no letter, digit or ASCII sign", source);
    return ApiKey(std::string(key));
}

// nullopt: there is no such file.
Result<std::optional<ApiKey>> read_key(const std::string& path) {
    const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY));
    if (!fd && errno == ENOENT) return std::nullopt;
    if (!fd) return fail_errno(GCOALESCE_IO, "cannot open the API key's file " + path);
    std::string text(2 * kMostBytes, '\0'); // room for white space
    std::size_t length = 0;
    while (length < text.size()) {
        const ssize_t got = ::read(fd.get(), text.data() + length, text.size() - length);
        if (got == 0) break;
        if (got > 0) {
            length += static_cast<std::size_t>(got);
        } else if (errno != EINTR) {
            return fail_errno(GCOALESCE_IO, "cannot read the API key's file " + path);
        }
    }
    if (length == text.size()) return too_long(path);
    text.resize(length);
    return checked(ApiKey(std::move(text)), path).map([](ApiKey&& key) { return std::optional(std::move(key)); });
}

} // namespace

ApiKey& ApiKey::operator=(ApiKey&& other) noexcept {
    if (this != &other) {
        wipe();
        text_ = std::move(other.text_);
        other.wipe();
    }
    return *this;
}

void ApiKey::wipe() noexcept {
    text_.resize(text_.capacity()); // what lies behind a shortened text, too; allocates nothing
    ::explicit_bzero(text_.data(), text_.size());
    text_.clear();
}

Result<std::optional<ApiKey>> ApiKey::load(const std::string& file) {
    std::optional<ApiKey> from_environment;
    if (char* const value = std::getenv(kVariable)) {
        from_environment.emplace(value);
        ::explicit_bzero(value, std::strlen(value)); // else /proc/<pid>/environ goes on showing it
        ::unsetenv(kVariable);
    }
    if (const char* const directory = std::getenv("CREDENTIALS_DIRECTORY")) {
        Result<std::optional<ApiKey>> credential = read_key(std::string(directory) + "/gemini-api-key");
        if (!credential || *credential) return credential;
    }
    if (!file.empty()) {
        Result<std::optional<ApiKey>> given = read_key(file);
        if (given && !*given) return fail(GCOALESCE_IO, "the API key's file {} does not exist", file);
        return given;
    }
    if (!from_environment) return std::nullopt;
    return checked(*std::move(from_environment), kVariable).map([](ApiKey&& key) {
        return std::optional(std::move(key));
    });
}

} // namespace gcoalesce
