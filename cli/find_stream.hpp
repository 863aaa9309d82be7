// The stream that a person means by some digits.
#pragma once

#include <optional>
#include <string>

#include "cli/commands.hpp"
#include "cli/inspect.hpp"

namespace gcoalesce::cli {

// name: the first four digits or more of a key or a stream id. Where a key has several streams, its newest is meant.
// Nothing: it has reported why and set context.exit; of several that fit, each on a line of standard error. Throws
// CLI::ValidationError for what are no such digits.
std::optional<StreamFacts> find_stream(Context& context, const SegmentView& segment, const std::string& name,
                                       bool json = false);

} // namespace gcoalesce::cli
