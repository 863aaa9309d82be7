// How every part of gcoalesce reports that something did not work: one code, one sentence.
#pragma once

#include <cstdint>
#include <fmt/format.h>
#include <string>
#include <tl/expected.hpp>
#include <utility>

#include "gcoalesce/gcoalesce.h"

namespace gcoalesce {

using Code = gcoalesce_code;

struct Error {
    Code code = GCOALESCE_INTERNAL;
    std::string message;       // what was expected, what was found, what to do; no secrets, no prompt text
    std::int64_t retry_ms = 0; // when asking again may help; 0: not known
};

template <class T>
using Result = tl::expected<T, Error>;

// The code's word, as JSON and the log print it ("busy"). Never null. Thread-safe.
const char* code_name(Code code) noexcept;

// Builds the failure side of a Result; the message is formatted by fmt.
template <class... Args>
tl::unexpected<Error> fail(Code code, fmt::format_string<Args...> format, Args&&... args) {
    return tl::unexpected<Error>(Error{code, fmt::format(format, std::forward<Args>(args)...), 0});
}

// The same for a failed system call: appends what errno says.
tl::unexpected<Error> fail_errno(Code code, const std::string& what);

} // namespace gcoalesce
