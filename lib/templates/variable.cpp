#include "templates/variable.hpp"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <re2/re2.h>
#include <utf8proc.h>

namespace gcoalesce {
namespace {

const std::uint8_t* bytes_of(std::string_view text) {
    return reinterpret_cast<const std::uint8_t*>(text.data());
}

// Calls take(code point, its bytes) for each.
template <class F>
void for_each_code_point(std::string_view text, F&& take) {
    while (!text.empty()) {
        utf8proc_int32_t code_point = 0;
        const utf8proc_ssize_t taken =
            utf8proc_iterate(bytes_of(text), static_cast<utf8proc_ssize_t>(text.size()), &code_point);
        const std::size_t size = taken > 0 ? static_cast<std::size_t>(taken) : 1;
        take(code_point, text.substr(0, size));
        text.remove_prefix(size);
    }
}

// More combining marks in a row than any language has (Unicode Standard Annex 15, Stream-Safe Text Format): sorting
// them would cost the square of their number.
bool is_stream_safe(std::string_view text) {
    constexpr int most = 30;
    int run = 0;
    int longest = 0;
    for_each_code_point(text, [&](utf8proc_int32_t code_point, std::string_view) {
        run = code_point >= 0 && utf8proc_get_property(code_point)->combining_class != 0 ? run + 1 : 0;
        longest = std::max(longest, run);
    });
    return longest <= most;
}

std::string composed(std::string_view text) {
    if (!is_stream_safe(text)) return std::string(text);
    utf8proc_uint8_t* out = nullptr;
    const auto options = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    const utf8proc_ssize_t size =
        utf8proc_map(bytes_of(text), static_cast<utf8proc_ssize_t>(text.size()), &out, options);
    const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(out, &std::free);
    if (size == UTF8PROC_ERROR_NOMEM) throw std::bad_alloc();
    if (size < 0) return std::string(text); // no UTF-8: what nobody hands us stays as it is
    return {reinterpret_cast<const char*>(out), static_cast<std::size_t>(size)};
}

std::string lower_case(std::string_view text) {
    std::string out;
    for_each_code_point(text, [&](utf8proc_int32_t code_point, std::string_view bytes) {
        const utf8proc_int32_t lower = utf8proc_tolower(code_point);
        if (lower == code_point) {
            out += bytes;
        } else {
            std::uint8_t encoded[4];
            const utf8proc_ssize_t size = utf8proc_encode_char(lower, encoded);
            out.append(reinterpret_cast<const char*>(encoded), static_cast<std::size_t>(size));
        }
    });
    return out;
}

// White_Space is these controls and the three categories of separators (Unicode's PropList.txt).
bool is_space(utf8proc_int32_t code_point) {
    if ((code_point >= 0x09 && code_point <= 0x0D) || code_point == 0x85) return true;
    const utf8proc_category_t category = utf8proc_category(code_point);
    return category == UTF8PROC_CATEGORY_ZS || category == UTF8PROC_CATEGORY_ZL || category == UTF8PROC_CATEGORY_ZP;
}

std::string spaced(std::string_view text, bool collapse, bool trim) {
    std::string out;
    std::string run; // of white space, as it shall stand if something follows
    bool begun = false;
    for_each_code_point(text, [&](utf8proc_int32_t code_point, std::string_view bytes) {
        if (is_space(code_point)) {
            if (!collapse)
                run += bytes;
            else if (run.empty())
                run = " ";
            return;
        }
        if (begun || !trim) out += run;
        out += bytes;
        run.clear();
        begun = true;
    });
    if (!trim) out += run;
    return out;
}

std::size_t code_points(std::string_view text) {
    return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

// The texts in quotes, as many as stay readable.
std::string listed(const std::vector<std::string>& texts) {
    constexpr std::size_t most_bytes = 200;
    std::string out;
    for (std::size_t i = 0; i < texts.size(); ++i) {
        const std::string next = fmt::format("{}\"{}\"", i == 0 ? "" : ", ", texts[i]);
        if (i > 0 && out.size() + next.size() > most_bytes) return fmt::format("{} and {} more", out, texts.size() - i);
        out += next;
    }
    return out;
}

} // namespace

std::string normalised(const TemplateVariable& variable, std::string_view value) {
    std::string text(value);
    if (variable.nfc) text = composed(text);
    if (variable.lowercase) {
        text = lower_case(text);
        if (variable.nfc) text = composed(text); // a few lower-case letters compose where their capitals do not
    }
    if (variable.collapse_spaces || variable.trim) text = spaced(text, variable.collapse_spaces, variable.trim);
    return text;
}

std::string objection(const TemplateVariable& variable, std::string_view value) {
    const auto& allowed = variable.allowed;
    if (!allowed.empty() && std::find(allowed.begin(), allowed.end(), value) == allowed.end())
        return "is none of the allowed values: " + listed(allowed);
    const std::size_t length = code_points(value);
    if (length > variable.max_length)
        return fmt::format("has {} characters; at most {} are allowed", length, variable.max_length);
    if (length < variable.min_length)
        return fmt::format("has {} characters; at least {} are needed", length, variable.min_length);
    if (variable.matcher && !RE2::FullMatch(value, *variable.matcher))
        return fmt::format("does not match the pattern {}", variable.pattern);
    return {};
}

Result<void> set_pattern(TemplateVariable& variable, const std::string& pattern) {
    RE2::Options options;
    options.set_log_errors(false);
    auto matcher = std::make_shared<const RE2>(pattern, options);
    if (!matcher->ok())
        return fail(GCOALESCE_BAD_REQUEST, "expected a regular expression of RE2: {}", matcher->error());
    variable.pattern = pattern;
    variable.matcher = std::move(matcher);
    return {};
}

} // namespace gcoalesce
