// A stream as listings print it in JSON.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "cli/inspect.hpp"

namespace gcoalesce::cli {

nlohmann::ordered_json stream_json(const StreamFacts& stream, const SegmentView& segment, Nanos now);

} // namespace gcoalesce::cli
