// The Gemini API key: where it comes from, and that nothing of it stays behind.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/error.hpp"

namespace gcoalesce {

// Overwrites its memory when it goes.
class ApiKey {
  public:
    // From the first of these that exists: the credential `gemini-api-key` in $CREDENTIALS_DIRECTORY (systemd.exec(5));
    // `file`, unless ""; the environment variable GEMINI_API_KEY, which is wiped and removed in any case: call this
    // while there is one thread. nullopt: none of them.
    // Errors, none of which repeats what was read: GCOALESCE_IO, a file that cannot be read, or that `file` does not
    // exist; GCOALESCE_BAD_REQUEST, what is no key: empty, over 4 KiB, or with other than printable ASCII characters
    // between the white space around it.
    static Result<std::optional<ApiKey>> load(const std::string& file);

    explicit ApiKey(std::string text) : text_(std::move(text)) {}
    ~ApiKey() { wipe(); }
    ApiKey(ApiKey&& other) noexcept : text_(std::move(other.text_)) { other.wipe(); }
    ApiKey& operator=(ApiKey&& other) noexcept;
    ApiKey(const ApiKey&) = delete;
    ApiKey& operator=(const ApiKey&) = delete;

    std::string_view text() const { return text_; }

  private:
    void wipe() noexcept;

    std::string text_;
};

} // namespace gcoalesce
