#include "base/units.hpp"

#include <array>
#include <charconv>
#include <cmath>

namespace gcoalesce {
namespace {

struct Unit {
    std::string_view name;
    double factor;
};

constexpr std::array<Unit, 6> kTimes{
    {{"ms", 1e6}, {"s", 1e9}, {"min", 6e10}, {"m", 6e10}, {"h", 3.6e12}, {"d", 8.64e13}}};
constexpr std::array<Unit, 5> kSizes{{{"", 1}, {"B", 1}, {"KiB", 1024.0}, {"MiB", 1048576.0}, {"GiB", 1073741824.0}}};

// The number in front and what follows it; false where there is no such number.
bool split(std::string_view text, double& number, std::string_view& unit) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number, std::chars_format::fixed);
    if (error != std::errc() || number < 0) return false;
    unit = text.substr(static_cast<std::size_t>(end - text.data()));
    return true;
}

} // namespace

Result<Nanos> parse_duration(std::string_view text) {
    double number = 0;
    std::string_view unit;
    if (split(text, number, unit)) {
        for (const Unit& known : kTimes) {
            if (unit == known.name && number * known.factor <= 3.2e17)
                return static_cast<Nanos>(std::llround(number * known.factor));
        }
    }
    return fail(GCOALESCE_BAD_REQUEST, "expected a duration such as 200ms, 6s, 10min or 2h, found \"{}\"", text);
}

Result<std::uint64_t> parse_size(std::string_view text) {
    double number = 0;
    std::string_view unit;
    if (split(text, number, unit)) {
        for (const Unit& known : kSizes) {
            if (unit == known.name && number * known.factor <= 4.6e18)
                return static_cast<std::uint64_t>(std::llround(number * known.factor));
        }
    }
    return fail(GCOALESCE_BAD_REQUEST, "expected a size such as 4096, 512KiB or 48MiB, found \"{}\"", text);
}

std::string format_duration(Nanos duration) {
    if (duration < 0) return "-" + format_duration(-duration);
    if (duration < kSecond) return fmt::format("{}ms", to_ms(duration));
    if (duration < 120 * kSecond) return fmt::format("{:.1f}s", static_cast<double>(duration) / 1e9);
    if (duration < 7200 * kSecond) return fmt::format("{}min", duration / (60 * kSecond));
    if (duration < 48 * 3600 * kSecond) return fmt::format("{}h", duration / (3600 * kSecond));
    return fmt::format("{}d", duration / (24 * 3600 * kSecond));
}

std::string format_size(std::uint64_t bytes) {
    if (bytes < 1024) return fmt::format("{}B", bytes);
    const double value = static_cast<double>(bytes);
    if (bytes < 1024 * 1024) return fmt::format("{:.1f}KiB", value / 1024);
    if (bytes < 1024ULL * 1024 * 1024) return fmt::format("{:.1f}MiB", value / 1048576);
    return fmt::format("{:.1f}GiB", value / 1073741824);
}

} // namespace gcoalesce
