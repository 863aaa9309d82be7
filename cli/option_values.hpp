// Texts of the command line as what they mean. Each throws a CLI::ValidationError that names the option.
#pragma once

#include <string>

#include "base/clock.hpp"

namespace gcoalesce::cli {

Nanos duration_of(const std::string& option, const std::string& text);

// How a key or a stream id begins, in lower case.
std::string digits_of(const std::string& option, std::string text);

} // namespace gcoalesce::cli
