#include "cli/option_values.hpp"

#include <CLI/Error.hpp>
#include <algorithm>
#include <cctype>
#include <fmt/format.h>

#include "base/units.hpp"

namespace gcoalesce::cli {

Nanos duration_of(const std::string& option, const std::string& text) {
    const Result<Nanos> duration = parse_duration(text);
    if (!duration) throw CLI::ValidationError(option, duration.error().message);
    return *duration;
}

std::string digits_of(const std::string& option, std::string text) {
    if (!std::ranges::all_of(text, [](unsigned char c) { return std::isxdigit(c) != 0; }))
        throw CLI::ValidationError(option, fmt::format("expected hexadecimal digits, found \"{}\"", text));
    std::ranges::transform(text, text.begin(), [](unsigned char c) { return std::tolower(c); });
    return text;
}

} // namespace gcoalesce::cli
