// The segment's log: the last lifecycle records, which the broker writes over the oldest ones.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "segment/mapping.hpp"

namespace gcoalesce::cli {

// A cursor over the ring, from the oldest record that is still there. It never waits. Not thread-safe.
class LogCursor {
  public:
    explicit LogCursor(const SegmentView& segment);

    // The next record; nothing: there is none yet. Records that were written over before they could be copied are
    // passed over, and counted.
    std::optional<LogFacts> next();
    // How many that were since the last time it was asked.
    std::uint64_t take_missed() { return std::exchange(missed_, 0); }
    // Of the record that next() returned last; records are numbered from 0.
    std::uint64_t number() const { return at_ - 1; }

  private:
    SegmentView segment_;
    std::uint64_t at_ = 0, missed_ = 0;
};

// "first_event"; "kind_99" for one of a newer broker. Every word that there is, for a filter.
std::string log_kind_name(std::uint32_t kind);
std::vector<std::string> log_kinds();

// The first digits of a key, from its fingerprint.
std::string key_prefix_hex(std::uint64_t fingerprint);

// What the record says beside its time, kind, stream and template, for people: "complete STOP, 12 events".
std::string log_details(const LogFacts& record);

// All of it.
nlohmann::ordered_json to_json(const LogFacts& record, std::uint64_t number, const SegmentView& segment);

} // namespace gcoalesce::cli
