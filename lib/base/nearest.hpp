// "Did you mean …?"
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace gcoalesce {

// The known word that takes the fewest edits to become `word`, if they are few enough to be a slip; else "".
std::string nearest(std::string_view word, std::span<const std::string> known);

// `; did you mean "…"?`, or nothing.
std::string did_you_mean(std::string_view word, std::span<const std::string> known);

} // namespace gcoalesce
