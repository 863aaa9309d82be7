// The policy in force for one template: what its file says, and the broker's options where it says nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "protocol/key.hpp"

namespace gcoalesce {

struct Template;

struct TemplateSettings {
    std::string id{kDefaultTemplate};
    std::uint64_t revision = 1; // of what shapes the answers

    Nanos ttl_idle = 200 * kMillisecond;       // how long a complete answer is fresh
    Nanos ttl_window = 5 * kSecond;            // the same if the window was open at any moment of its flight
    Nanos window = 6 * kSecond;                // how long `notify on` opens it
    Nanos linger = 30 * kSecond;               // stay in the segment after the last reader left
    Nanos snapshot_ttl = 600 * kSecond;        // stay on disk
    Nanos kv_after = 30 * kSecond, kv_ttl = 0; // plain caching, that long after a push; kv_ttl 0: none
    bool snapshots = true;                     // on disk at all
    std::optional<Nanos> cancel_after;         // a call without readers for so long is cancelled; else it finishes

    std::uint64_t in_flight = 0;          // limits; 0: none but the broker's
    std::uint64_t calls_a_minute = 0;     //
    std::uint64_t subscribers = 0;        // readers of one stream
    std::size_t stream_bytes = 4 << 20;   // of one answer
    std::uint32_t pool_share = 100;       // percent of the segment's extents, 1..100
    std::uint32_t max_individual = 8;     // calls at once for those whose shared answer was invalid
    bool strict_individual = false;       // each of them pays for itself
    bool live = false;                    // readers see events before the schema's check
    bool realms = false;                  // each realm shares for itself
    bool explicit_keys = false;           // requests may bring their own
    std::vector<std::uint32_t> uids;      // who may use it; both empty: everyone who may attach
    std::vector<std::uint32_t> groups;    //
    std::shared_ptr<const Template> file; // null: built in, for whole request bodies

    bool checked() const;            // answers have a schema to hold to
    std::string_view source() const; // the file's text; "": built in
    bool for_everyone() const { return uids.empty() && groups.empty(); }
    bool fast_path() const { return for_everyone() && subscribers == 0; }
};

// Absent members of the file are the defaults', which are the broker's options. GCOALESCE_BAD_REQUEST: a group that
// does not exist here.
Result<TemplateSettings> settings_of(Template file, const TemplateSettings& defaults);

// All templates of a directory ("": none) behind the default one, which default.json may change. All or nothing; the
// message begins with the path that is wrong.
Result<std::vector<TemplateSettings>> load_settings(const std::string& directory, const TemplateSettings& defaults);

} // namespace gcoalesce
