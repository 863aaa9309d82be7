#include "cli/find_stream.hpp"

#include <CLI/Error.hpp>
#include <algorithm>
#include <cctype>
#include <fmt/format.h>
#include <vector>

#include "cli/report.hpp"

namespace gcoalesce::cli {
namespace {

std::string describe(const StreamFacts& stream) {
    return fmt::format("key {}, stream {}, {}, {}", to_hex(stream.key), to_hex(stream.opening.stream_id),
                       stream.state(), counted(stream.events, "event"));
}

// One for each key, the newest; and one for each stream id.
std::vector<StreamFacts> matches(const SegmentView& segment, const std::string& digits) {
    std::vector<StreamFacts> found;
    for (const StreamFacts& stream : all_streams(segment)) {
        const auto same_key = [&](const StreamFacts& other) { return other.key == stream.key; };
        if (to_hex(stream.opening.stream_id).starts_with(digits) ||
            (to_hex(stream.key).starts_with(digits) && std::ranges::none_of(found, same_key)))
            found.push_back(stream);
    }
    return found;
}

} // namespace

std::optional<StreamFacts> find_stream(Context& context, const SegmentView& segment, const std::string& name,
                                       bool json) {
    const bool hex = std::ranges::all_of(name, [](unsigned char c) { return std::isxdigit(c) != 0; });
    if (!hex || name.size() < 4 || name.size() > 64)
        throw CLI::ValidationError("NAME", fmt::format("expected 4 to 64 hexadecimal digits, found \"{}\"", name));
    std::string digits = name;
    std::ranges::transform(digits, digits.begin(), [](unsigned char c) { return std::tolower(c); });
    const std::vector<StreamFacts> found = matches(segment, digits);
    if (found.size() == 1) return found.front();
    if (found.empty()) {
        report(context,
               Error{GCOALESCE_NOT_FOUND,
                     fmt::format(
                         "no stream's key or id begins with \"{}\": `gcoalesce keys` lists them; one that is on disk "
                         "alone `gcoalesce ask --resume ID.0` brings back",
                         digits),
                     0},
               json);
        return std::nullopt;
    }
    report(context,
           Error{GCOALESCE_NOT_FOUND,
                 fmt::format("\"{}\" fits {} streams, tell more digits{}", digits, found.size(), json ? "" : ":"), 0},
           json);
    if (!json) {
        for (const StreamFacts& stream : found) complain(describe(stream));
    }
    return std::nullopt;
}

} // namespace gcoalesce::cli
