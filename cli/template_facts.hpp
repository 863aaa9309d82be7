// Templates as the segment tells of them.
#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "segment/mapping.hpp"

namespace gcoalesce::cli {

// One template as it stood at one moment.
struct TemplateFacts {
    TemplatePolicy policy{};
    std::string source;                 // the file's text; "": built in, or the segment had no room for it
    Nanos window_until = 0, pushed = 0; // monotonic; pushed 0: never
    std::array<std::uint64_t, kTemplateCounters> counts{};

    std::string id() const { return std::string(policy.id.view()); }
    bool has(TemplateFlags flag) const { return (policy.flags & flag) != 0; }
    std::uint64_t count(TemplateCounter counter) const { return counts[static_cast<std::size_t>(counter)]; }
    // How long the window stays open, rounded up to whole milliseconds as the broker tells it; 0: it is closed.
    Nanos window_remaining(Nanos now) const;
};

// Nothing: a free entry, or one that is not whole (its broker died while writing it).
std::optional<TemplateFacts> template_facts(const SegmentView& segment, std::uint32_t index);

// Those in force, by id.
std::vector<TemplateFacts> all_templates(const SegmentView& segment);

// The one in force of this id. GCOALESCE_NOT_FOUND names the nearest.
Result<TemplateFacts> find_template(const SegmentView& segment, std::string_view id);

// Whether there are all of these, in force or no longer: such may have left streams. GCOALESCE_NOT_FOUND names the
// nearest.
Result<void> check_templates(const SegmentView& segment, const std::vector<std::string>& ids);

// "open for 4.2s" or "closed"; and the same as "window", "remaining_ms" and "last_push_age_ms".
std::string window_words(Nanos remaining);
nlohmann::ordered_json window_json(const TemplateFacts& facts, Nanos now);

// How long ago the window was last opened: "3min ago", "never".
std::string push_words(const TemplateFacts& facts, Nanos now);

} // namespace gcoalesce::cli
