// What each template's requests cost and spared, as the snapshot store keeps it across restarts.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "segment/mapping.hpp"

namespace gcoalesce {

class Snapshots;

using LedgerCounts = std::array<std::uint64_t, kTemplateCounters>; // by TemplateCounter

LedgerCounts ledger_counts(const TemplateEntry& entry);

// The small fact of this name holds "<counter> <value>" for each counter that is not 0, so that counters may come and
// go between two versions.
std::string ledger_name(std::string_view template_id);
std::string write_ledger(const LedgerCounts& counts);
LedgerCounts read_ledger(const std::string& kept);

// What a broker counted after it last wrote its ledger, and died. Counters only grow: the larger number is the later
// one. Nothing where the file could not be read: then what is kept is not known.
void rescue_ledger(const SegmentView& dead, Snapshots& to);

} // namespace gcoalesce
