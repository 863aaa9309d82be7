// The line that `systemctl status` shows.
#pragma once

#include <string>

#include "base/units.hpp"
#include "segment/mapping.hpp"

namespace gcoalesce {

struct StatusFacts {
    Nanos window = 0; // how long the notification window stays open, of the template where that is longest
    bool key_missing = false;
    bool draining = false;
};

// What is in flight, calls, and how many requests of those that were answered with a stream cost none; what is wrong
// comes first.
std::string status_line(const SegmentView& segment, const StatusFacts& facts);

} // namespace gcoalesce
