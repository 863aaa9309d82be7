// The segment's numbers for Prometheus.
#pragma once

#include <string>
#include <string_view>

#include "segment/mapping.hpp"

namespace gcoalesce::cli {

constexpr std::string_view kPrometheusType = "text/plain; version=0.0.4; charset=utf-8"; // its HTTP content type

// Prometheus's text exposition format 0.0.4, as it stands at this moment: broker, memory, each counter by the name and
// with the help that stand in the segment, and for each template requests, calls, tokens and latencies.
// up: whether the broker behind the segment can be reached. Thread-safe; disturbs no broker.
std::string prometheus(const SegmentView& segment, bool up);

} // namespace gcoalesce::cli
