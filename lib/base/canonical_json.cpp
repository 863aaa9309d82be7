#include "base/canonical_json.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

namespace gcoalesce {
namespace {

constexpr std::size_t kMaxDepth = 200;

// The body as an iterator that lets the handler of the events see how far the parser has read.
class Cursor {
  public:
    using iterator_category = std::input_iterator_tag;
    using value_type = char;
    using difference_type = std::ptrdiff_t;
    using pointer = const char*;
    using reference = const char&;

    Cursor(const char* at, std::size_t* read) : at_(at), read_(read) {}
    reference operator*() const { return *at_; }
    Cursor& operator++() {
        ++at_;
        ++*read_;
        return *this;
    }
    bool operator==(const Cursor& other) const { return at_ == other.at_; }

  private:
    const char* at_;
    std::size_t* read_;
};

struct Span {
    std::size_t begin;
    std::size_t end;
};

// Takes the parser's events and writes the canonical text in one pass, in the order of the body; an object whose
// members stand in another order than the canonical one is only noted, and put in order when all is copied out. So
// each byte is written twice at most, however deep it stands.
class Canonicaliser {
  public:
    explicit Canonicaliser(std::size_t size_hint) { text_.reserve(size_hint); }

    std::size_t read = 0; // bytes of the body that the parser has taken
    std::optional<Error> error;

    std::string take() {
        if (reorders_.empty()) return std::move(text_);
        std::sort(reorders_.begin(), reorders_.end(),
                  [](const Reorder& a, const Reorder& b) { return a.object.begin < b.object.begin; });
        std::string out;
        out.reserve(text_.size());
        copy_out({0, text_.size()}, out);
        return out;
    }

    // The interface that nlohmann::json::sax_parse calls.
    bool null() { return scalar("null"); }
    bool boolean(bool value) { return scalar(value ? "true" : "false"); }
    bool number_integer(std::int64_t value) { return number(fmt::format_int(value).c_str()); }
    bool number_unsigned(std::uint64_t value) { return number(fmt::format_int(value).c_str()); }
    bool number_float(double, const std::string& spelling) { return number(spelling); }
    bool binary(std::vector<std::uint8_t>&) { return false; } // not in JSON
    bool string(std::string& value) {
        if (!begin_value()) return false;
        put_string(value);
        return true;
    }
    bool start_object(std::size_t) { return open(true); }
    bool start_array(std::size_t) { return open(false); }

    bool key(std::string& name) {
        end_member();
        if (levels_.back().count++ > 0) text_ += ',';
        members_.push_back({{names_.size(), names_.size() + name.size()}, {text_.size(), 0}, read});
        names_ += name;
        put_string(name);
        text_ += ':';
        return true;
    }

    bool end_object() {
        end_member();
        // The first of the contents stays open until what follows tells whether it is the only one.
        if (levels_.back().turn && !has_role(levels_.back())) {
            turn_open_ = true;
            return true;
        }
        return close_object();
    }

    bool end_array() {
        if (turn_open_) {
            turn_open_ = false;
            std::string role = "role";
            key(role);
            put_string("user");
            end_member();
            if (!close_object()) return false;
        }
        text_ += ']';
        levels_.pop_back();
        return true;
    }

    // The parser's own words quote the text, so only the place is taken from it.
    bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& what) {
        const bool number = what.id == 406;
        refuse(position, number ? "a number beyond the range of double" : "no valid JSON in UTF-8");
        return false;
    }

    bool refuse(std::size_t position, std::string_view what) {
        if (!error)
            error = Error{GCOALESCE_BAD_REQUEST, fmt::format("the request body has {} at byte {}", what, position), 0};
        return false;
    }

  private:
    struct Member {
        Span name; // in names_, decoded
        Span text; // in text_, `"name":value`; empty when dropped
        std::size_t read;
    };
    struct Level {
        bool object;
        bool contents = false; // the array of the turns
        bool turn = false;     // its first object
        bool dropped = false;  // a member was dropped
        std::size_t begin;     // in text_
        std::size_t names;     // where its members' names begin in names_
        std::size_t members;   // the first in members_
        std::size_t count = 0; // elements or members so far
    };
    struct Reorder {
        Span object;
        std::size_t first, count; // in order_
    };

    std::string_view name(const Member& member) const {
        return std::string_view(names_).substr(member.name.begin, member.name.end - member.name.begin);
    }

    bool has_role(const Level& level) const {
        return std::any_of(members_.begin() + static_cast<std::ptrdiff_t>(level.members), members_.end(),
                           [&](const Member& member) { return name(member) == "role"; });
    }

    bool begin_value() {
        if (turn_open_) {
            turn_open_ = false;
            if (!close_object()) return false;
        }
        if (levels_.empty()) return true;
        if (!levels_.back().object && levels_.back().count++ > 0) text_ += ',';
        return true;
    }

    bool scalar(std::string_view spelling) {
        if (!begin_value()) return false;
        text_ += spelling;
        return true;
    }

    bool open(bool object) {
        if (!begin_value()) return false;
        if (levels_.size() == kMaxDepth) return refuse(read, "more than 200 levels");
        Level level{.object = object, .begin = text_.size(), .names = names_.size(), .members = members_.size()};
        if (!levels_.empty()) {
            const Level& parent = levels_.back();
            level.contents = !object && levels_.size() == 1 && parent.object && name(members_.back()) == "contents";
            level.turn = object && parent.contents && parent.count == 1;
        }
        levels_.push_back(level);
        text_ += object ? '{' : '[';
        return true;
    }

    // The last member's value is complete.
    void end_member() {
        Level& level = levels_.back();
        if (level.count == 0) return;
        Member& member = members_.back();
        member.text.end = text_.size();
        if (levels_.size() != 1) return;
        const std::string_view whole = std::string_view(text_).substr(member.text.begin);
        for (const char* empty : {R"("generationConfig":{})", R"("safetySettings":[])", R"("tools":[])"}) {
            if (whole != empty) continue;
            text_.resize(member.text.begin);
            member.text.end = member.text.begin;
            level.dropped = true;
            return;
        }
    }

    bool close_object() {
        text_ += '}';
        const Level level = levels_.back();
        levels_.pop_back();
        const auto first = members_.begin() + static_cast<std::ptrdiff_t>(level.members);
        const auto by_name = [&](const Member& a, const Member& b) { return name(a) < name(b); };
        const auto not_ascending = [&](const Member& a, const Member& b) { return name(a) >= name(b); };
        if (level.dropped || std::adjacent_find(first, members_.end(), not_ascending) != members_.end()) {
            std::sort(first, members_.end(), by_name);
            const auto twice = std::adjacent_find(first, members_.end(), not_ascending);
            if (twice != members_.end())
                return refuse(std::max(twice->read, std::next(twice)->read), "a duplicate member");
            reorders_.push_back({{level.begin, text_.size()}, order_.size(), 0});
            for (auto member = first; member != members_.end(); ++member) {
                if (member->text.begin != member->text.end) order_.push_back(member->text);
            }
            reorders_.back().count = order_.size() - reorders_.back().first;
        }
        names_.resize(level.names);
        members_.erase(first, members_.end());
        return true;
    }

    void copy_out(Span part, std::string& out) const {
        const auto starts_before = [](const Reorder& reorder, std::size_t at) { return reorder.object.begin < at; };
        for (;;) {
            const auto next = std::lower_bound(reorders_.begin(), reorders_.end(), part.begin, starts_before);
            if (next == reorders_.end() || next->object.begin >= part.end) break;
            out.append(text_, part.begin, next->object.begin - part.begin);
            out += '{';
            for (std::size_t i = 0; i < next->count; ++i) {
                if (i > 0) out += ',';
                copy_out(order_[next->first + i], out);
            }
            out += '}';
            part.begin = next->object.end;
        }
        out.append(text_, part.begin, part.end - part.begin);
    }

    void put_string(std::string_view value) {
        text_ += '"';
        std::size_t plain = 0; // where the bytes begin that stand for themselves
        for (std::size_t i = 0; i < value.size(); ++i) {
            const auto byte = static_cast<unsigned char>(value[i]);
            if (byte >= 0x20 && byte != '"' && byte != '\\') continue;
            text_.append(value, plain, i - plain);
            plain = i + 1;
            if (byte < 0x20) {
                fmt::format_to(std::back_inserter(text_), "\\u{:04x}", byte);
            } else {
                text_ += '\\';
                text_ += value[i];
            }
        }
        text_.append(value, plain);
        text_ += '"';
    }

    // One spelling for a value: its digits without zeros at either end, then "e" and a power of ten if not 0.
    bool number(std::string_view spelling) {
        if (!begin_value()) return false;
        digits_.clear();
        std::int64_t exponent = 0;
        const bool negative = spelling.front() == '-';
        if (negative) spelling.remove_prefix(1);
        bool fraction = false;
        for (std::size_t i = 0; i < spelling.size(); ++i) {
            const char c = spelling[i];
            if (c >= '0' && c <= '9') {
                if (c != '0' || !digits_.empty()) digits_ += c;
                if (fraction) --exponent;
            } else if (c == 'e' || c == 'E') {
                if (digits_.empty()) break;
                std::string_view power = spelling.substr(i + 1);
                if (power.front() == '+') power.remove_prefix(1);
                std::int64_t value = 0;
                const auto parsed = std::from_chars(power.data(), power.data() + power.size(), value);
                constexpr std::int64_t far = 1'000'000'000'000;
                if (parsed.ec != std::errc() || value < -far || value > far)
                    return refuse(read, "a number with an exponent out of all range");
                exponent += value;
                break;
            } else {
                fraction = true; // the point, which nlohmann spells as the locale has it
            }
        }
        if (digits_.empty()) {
            text_ += '0'; // -0 too
            return true;
        }
        const std::size_t last = digits_.find_last_not_of('0');
        exponent += static_cast<std::int64_t>(digits_.size() - 1 - last);
        if (negative) text_ += '-';
        text_.append(digits_, 0, last + 1);
        if (exponent != 0) fmt::format_to(std::back_inserter(text_), "e{}", exponent);
        return true;
    }

    std::string text_;
    std::string names_;           // of the members of open objects
    std::vector<Member> members_; // of open objects, the innermost's last
    std::vector<Level> levels_;   // open objects and arrays
    std::vector<Reorder> reorders_;
    std::vector<Span> order_; // their members, as they shall stand
    std::string digits_;
    bool turn_open_ = false;
};

} // namespace

Result<std::string> canonical_request(std::string_view body) {
    Canonicaliser out(body.size());
    // What nlohmann lets pass, and JSON does not: a byte order mark, and bytes behind a NUL, which it takes for the
    // end.
    const std::size_t nul = body.find('\0');
    if (body.starts_with("\xEF\xBB\xBF")) {
        out.refuse(0, "a byte order mark");
    } else if (nul != std::string_view::npos) {
        out.refuse(nul, "a NUL");
    } else if (const std::size_t start = body.find_first_not_of(" \t\r\n");
               start == std::string_view::npos || body[start] != '{') {
        out.refuse(std::min(start, body.size()), "no JSON object");
    } else {
        nlohmann::json::sax_parse(Cursor(body.data(), &out.read), Cursor(body.data() + body.size(), &out.read), &out);
    }
    if (out.error) return tl::unexpected<Error>(*out.error);
    return out.take();
}

} // namespace gcoalesce
