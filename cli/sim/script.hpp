// How an answer of the stand-in is to look, and how it is to go wrong.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/clock.hpp"
#include "base/error.hpp"

namespace gcoalesce::sim {

constexpr std::uint64_t kAllEvents = std::numeric_limits<std::uint64_t>::max(); // "events": after the last one

struct Script {
    // When.
    Nanos latency = 0, first = 0, gap = 0;
    // What.
    std::uint64_t events = 4;
    std::uint64_t size = 0;  // bytes of text in each event; 0: a few words
    std::uint64_t chunk = 0; // bytes of each HTTP chunk; 0: one chunk an event
    std::uint64_t candidates = 1, thoughts = 0;
    std::string finish = "STOP";
    bool stop_every = false, finish_alone = false, no_final_blank = false;
    std::string replay;
    // What goes wrong.
    std::optional<int> status;
    std::optional<Nanos> retry;
    std::string reason;
    bool retry_header = false, array_error = false, html = false, empty = false;
    std::string block;
    std::optional<std::uint64_t> error_after, bare_error_after, invalid_json_after, truncate_after, cut_after,
        reset_after, hang_after, hold_after;
    int error_status = 503;
    std::uint64_t fail_first = 0;
    std::string fail_replay;

    // What call `number` (from 1) of one body gets: fail_first lets only the first ones go wrong.
    Script for_call(std::uint64_t number) const;
};

// One key of a script. The command line's options, the parser and the help all come from this table.
struct ScriptKey {
    std::string name;
    std::string value; // what stands behind "="; "": a switch, which takes nothing
    Result<void> (*set)(Script& script, std::string_view value);
    std::string help;
};
std::span<const ScriptKey> script_keys();

// Sets what "key=value key=value" says, separated by blanks or commas. Errors: GCOALESCE_BAD_REQUEST, with the nearest
// key where an unknown one looks like a slip; script is then half-changed.
Result<void> apply_script(Script& script, std::string_view text);

} // namespace gcoalesce::sim
