// A JSON object's members, each as text.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace gcoalesce::gateway {

using Members = std::vector<std::pair<std::string, std::string>>; // name, value's text

// In the order in which they stand, those of one name too. White space aside, a value's text is as it was, numbers
// above all: 1.10 stays 1.10, and 12345678901234567890123 what it is. nullopt: it is no JSON object (RFC 8259), or
// more.
std::optional<Members> members_of(std::string_view json);

// Whether it is one JSON document and nothing else: no byte order mark, nothing behind its end.
bool is_json(std::string_view text);

} // namespace gcoalesce::gateway
