// What one variable of a template may be, and the form in which a value counts.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"

namespace re2 {
class RE2;
}

namespace gcoalesce {

// Lengths are in code points.
struct TemplateVariable {
    std::string name;
    bool nfc = false, lowercase = false, collapse_spaces = false, trim = false; // before all checks, in this order
    std::size_t min_length = 0, max_length = 256;
    std::vector<std::string> allowed;         // "enum"; empty: any
    std::string pattern;                      // "": any
    std::shared_ptr<const re2::RE2> matcher;  // of the pattern; null: none
    std::optional<std::string> default_value; // normalised; absent: the variable is required
};

// The value in the form that its variable wants: NFC (Unicode Standard Annex 15); lower case by Unicode's simple
// mapping, one code point for one, without regard to language or place in the word; runs of white space (Unicode's
// White_Space) as one space; none of it at either end. A text with more than 30 combining marks in a row is not
// composed. The value must be UTF-8. What is normalised stays as it is.
std::string normalised(const TemplateVariable& variable, std::string_view value);

// What the rule has against a normalised value, as the rest of a sentence about it ("has 300 characters; at most 256
// are allowed"), which never quotes it; "": nothing.
std::string objection(const TemplateVariable& variable, std::string_view value);

// Sets pattern and matcher. GCOALESCE_BAD_REQUEST: RE2 does not take it.
Result<void> set_pattern(TemplateVariable& variable, const std::string& pattern);

} // namespace gcoalesce
