// Durations and sizes as people write them: "200ms", "6s", "10min"; "48MiB", "4096".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/clock.hpp"
#include "base/error.hpp"

namespace gcoalesce {

// "250ms", "1.5s", "10min", "2h", "1d"; a bare number is refused, since its unit would be a guess. 0 .. 10 years.
Result<Nanos> parse_duration(std::string_view text);
// Bytes, or with KiB, MiB, GiB (KB, MB, GB are refused: they are read both ways). 0 .. 2^62.
Result<std::uint64_t> parse_size(std::string_view text);

std::string format_duration(Nanos duration);  // "4.2s", "180ms", "3min"
std::string format_size(std::uint64_t bytes); // "48.0MiB", "812B"

} // namespace gcoalesce
