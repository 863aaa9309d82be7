#include "templates/schema.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <re2/re2.h>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/nearest.hpp"
#include "templates/text.hpp"

namespace gcoalesce {
namespace {

using nlohmann::json;
using Index = std::size_t; // of a node

constexpr Index kNone = std::numeric_limits<Index>::max();
constexpr std::uint64_t kUnbounded = std::numeric_limits<std::uint64_t>::max();

// Objects and arrays within one another, in a schema and in an answer. It bounds the recursion over both.
constexpr std::size_t kMaxLevels = 128;
// Schemas applied within one another while an answer is checked, about a quarter of a MiB of stack. References and
// alternatives add to the answer's levels.
constexpr std::size_t kMaxFrames = 1024;
constexpr std::size_t kMaxSchemaBytes = std::size_t{1} << 20;
// A compiled pattern keeps up to kPatternMemory for its automaton once it is used.
constexpr std::size_t kMaxPatterns = 100;
constexpr std::int64_t kPatternMemory = std::int64_t{1} << 20;

// ---- JSON -------------------------------------------------------------------------------------------------------

// Builds the document from the parser's events. nlohmann's own builder knows no limit of depth and silently drops the
// first of two equal members.
class Builder {
  public:
    json root;
    std::string problem; // "": none

    // The interface that json::sax_parse calls.
    bool null() { return put(nullptr); }
    bool boolean(bool value) { return put(value); }
    bool number_integer(std::int64_t value) { return put(value); }
    bool number_unsigned(std::uint64_t value) { return put(value); }
    bool number_float(double value, const std::string&) { return put(value); }
    bool string(std::string& value) { return put(std::move(value)); }
    bool binary(std::vector<std::uint8_t>&) { return false; } // not in JSON
    bool start_object(std::size_t) { return open(json::value_t::object); }
    bool start_array(std::size_t) { return open(json::value_t::array); }
    bool end_object() { return close(); }
    bool end_array() { return close(); }
    bool key(std::string& name) {
        auto [member, fresh] = open_.back()->get_ref<json::object_t&>().try_emplace(std::move(name));
        member_ = &member->second;
        return fresh || refuse("a member is given twice in one object");
    }
    // The parser's own words quote the text, so only the place is taken from it.
    bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& what) {
        const bool number = what.id == 406;
        return refuse(fmt::format("{} at byte {}",
                                  number ? "a number beyond the range of double" : "no valid JSON in UTF-8", position));
    }

  private:
    bool refuse(std::string what) {
        if (problem.empty()) problem = std::move(what);
        return false;
    }

    json& place(json value) {
        if (open_.empty()) return root = std::move(value);
        if (open_.back()->is_array()) return open_.back()->get_ref<json::array_t&>().emplace_back(std::move(value));
        return *member_ = std::move(value);
    }

    bool put(json value) {
        place(std::move(value));
        return true;
    }

    bool open(json::value_t type) {
        if (open_.size() == kMaxLevels) return refuse(fmt::format("more than {} levels", kMaxLevels));
        open_.push_back(&place(type));
        return true;
    }

    bool close() {
        open_.pop_back();
        return true;
    }

    std::vector<json*> open_;
    json* member_ = nullptr; // of the innermost open object, the last named
};

// Sets `root`; returns what is wrong with the text, "" if nothing.
std::string parse(std::string_view text, json& root) {
    // What nlohmann lets pass, and JSON does not: a byte order mark, and bytes behind a NUL, which it takes for the
    // end.
    if (text.starts_with("\xEF\xBB\xBF")) return "a byte order mark at byte 0";
    if (const std::size_t nul = text.find('\0'); nul != text.npos) return fmt::format("a NUL at byte {}", nul);
    Builder builder;
    json::sax_parse(text.begin(), text.end(), &builder);
    root = std::move(builder.root);
    return std::move(builder.problem);
}

using Names = std::unordered_set<std::string_view>;

// Writes the JSON pointer of `wanted`, which stands somewhere in `from`. Given names, all others read "*".
bool write_path(const json& from, const json* wanted, const Names* names, std::string& path) {
    if (&from == wanted) return true;
    const std::size_t before = path.size();
    if (from.is_array()) {
        for (std::size_t i = 0; i < from.size(); ++i) {
            path += '/';
            path += fmt::format_int(i).c_str();
            if (write_path(from[i], wanted, names, path)) return true;
            path.resize(before);
        }
    } else if (from.is_object()) {
        for (const auto& [name, value] : from.get_ref<const json::object_t&>()) {
            append_pointer(path, names && !names->contains(name) ? std::string_view("*") : std::string_view(name));
            if (write_path(value, wanted, names, path)) return true;
            path.resize(before);
        }
    }
    return false;
}

// ---- Types ------------------------------------------------------------------------------------------------------

enum : unsigned { kNull = 1, kBoolean = 2, kInteger = 4, kFraction = 8, kString = 16, kArray = 32, kObject = 64 };
constexpr unsigned kNumber = kInteger | kFraction;
constexpr unsigned kAny = 127;

struct Type {
    const char* name;
    const char* one; // as a value of it is spoken of
    unsigned bits;
};
constexpr std::array<Type, 7> kTypes{{{"null", "null", kNull},
                                      {"boolean", "a boolean", kBoolean},
                                      {"number", "a number", kNumber},
                                      {"integer", "an integer", kInteger},
                                      {"string", "a string", kString},
                                      {"array", "an array", kArray},
                                      {"object", "an object", kObject}}};

unsigned type_of(const json& value) {
    switch (value.type()) {
    case json::value_t::null: return kNull;
    case json::value_t::boolean: return kBoolean;
    case json::value_t::number_integer:
    case json::value_t::number_unsigned: return kInteger;
    case json::value_t::number_float: {
        const double number = value.get<double>();
        return number == std::floor(number) ? kInteger : kFraction;
    }
    case json::value_t::string: return kString;
    case json::value_t::array: return kArray;
    default: return kObject;
    }
}

const char* one_of_type(const json& value) {
    const unsigned type = type_of(value);
    if (type == kFraction) return "a number";
    return std::find_if(kTypes.begin(), kTypes.end(), [&](const Type& known) { return known.bits == type; })->one;
}

std::string list_types(unsigned types) {
    std::string list;
    for (const Type& type : kTypes) {
        if ((types & type.bits) != type.bits || (type.bits == kInteger && (types & kFraction))) continue;
        list += list.empty() ? "" : " or ";
        list += type.name;
    }
    return list;
}

// ---- Numbers and strings ----------------------------------------------------------------------------------------

// Holds every std::int64_t, std::uint64_t and double exactly.
using Real = long double;
static_assert(std::numeric_limits<Real>::digits >= 64);

Real real(const json& number) {
    if (number.is_number_unsigned()) return static_cast<Real>(number.get<std::uint64_t>());
    if (number.is_number_integer()) return static_cast<Real>(number.get<std::int64_t>());
    return static_cast<Real>(number.get<double>());
}

// |number| = digits * 10^exponent, by the shortest digits that mean this double: 0.1 is a tenth, as its writer meant.
struct Decimal {
    std::uint64_t digits = 0;
    int exponent = 0;
};

Decimal decimal(const json& number) {
    if (number.is_number_unsigned()) return {number.get<std::uint64_t>(), 0};
    if (number.is_number_integer())
        return {std::uint64_t{0} - static_cast<std::uint64_t>(number.get<std::int64_t>()), 0};
    std::array<char, 32> text; // at most 17 digits
    const char* const end = std::to_chars(text.data(), text.data() + text.size(), std::fabs(number.get<double>()),
                                          std::chars_format::scientific)
                                .ptr;
    Decimal value;
    const char* at = text.data();
    bool fraction = false;
    for (; *at != 'e'; ++at) {
        if (*at == '.') {
            fraction = true;
            continue;
        }
        value.digits = value.digits * 10 + static_cast<std::uint64_t>(*at - '0');
        if (fraction) --value.exponent;
    }
    at += at[1] == '+' ? 2 : 1;
    int power = 0;
    std::from_chars(at, end, power);
    value.exponent += power;
    return value;
}

__extension__ using Wide = unsigned __int128;

bool is_multiple(Decimal value, Decimal divisor) {
    int shift = value.exponent - divisor.exponent;
    Wide whole = value.digits;
    Wide part = divisor.digits;
    for (; shift < 0 && part <= whole; ++shift) part *= 10;
    if (shift < 0) return whole == 0;
    for (whole %= part; shift > 0 && whole != 0; --shift) whole = whole * 10 % part;
    return whole % part == 0;
}

std::uint64_t code_points(std::string_view text) {
    return static_cast<std::uint64_t>(
        std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

re2::StringPiece piece(std::string_view text) {
    return {text.data(), text.size()};
}

// RFC 3339, section 5.6: full-date.
bool is_date(std::string_view text) {
    static const RE2 shape(R"((\d{4})-(\d\d)-(\d\d))");
    int year = 0;
    unsigned month = 0;
    unsigned day = 0;
    return RE2::FullMatch(piece(text), shape, &year, &month, &day) &&
           std::chrono::year_month_day(std::chrono::year(year), std::chrono::month(month), std::chrono::day(day)).ok();
}

// RFC 3339, section 5.6: full-time. A leap second is the last of a day in UTC.
bool is_time(std::string_view text) {
    static const RE2 shape(R"((\d\d):(\d\d):(\d\d)(?:\.\d+)?(?:[zZ]|([-+]\d\d):(\d\d)))");
    std::array<re2::StringPiece, 5> parts;
    if (!RE2::FullMatch(piece(text), shape, &parts[0], &parts[1], &parts[2], &parts[3], &parts[4])) return false;
    std::array<int, 5> numbers{};
    for (std::size_t i = 0; i < parts.size(); ++i) {
        const char* const digits = parts[i].end() - std::min<std::size_t>(parts[i].size(), 2);
        std::from_chars(digits, parts[i].end(), numbers[i]);
    }
    const auto [hour, minute, second, offset_hours, offset_minutes] = numbers;
    if (hour > 23 || minute > 59 || second > 60 || offset_hours > 23 || offset_minutes > 59) return false;
    const int offset = offset_hours * 60 + offset_minutes;
    const int utc = hour * 60 + minute + (parts[3].starts_with("-") ? offset : -offset);
    return second < 60 || (utc + 2 * 1440) % 1440 == 1439;
}

bool is_date_time(std::string_view text) {
    return text.size() > 11 && (text[10] == 'T' || text[10] == 't') && is_date(text.substr(0, 10)) &&
           is_time(text.substr(11));
}

struct Format {
    const char* name;
    bool (*holds)(const json&); // of a value of any type
};

template <bool (*check)(std::string_view)>
bool text_format(const json& value) {
    return !value.is_string() || check(value.get_ref<const std::string&>());
}

template <class Number>
bool number_format(const json& value) {
    return !value.is_number() || (real(value) >= static_cast<Real>(std::numeric_limits<Number>::lowest()) &&
                                  real(value) <= static_cast<Real>(std::numeric_limits<Number>::max()));
}

constexpr std::array<Format, 6> kFormats{{{"date-time", text_format<is_date_time>},
                                          {"date", text_format<is_date>},
                                          {"time", text_format<is_time>},
                                          {"int32", number_format<std::int32_t>},
                                          {"int64", number_format<std::int64_t>},
                                          {"float", number_format<float>}}};

// ---- The compiled form ------------------------------------------------------------------------------------------

// One schema. Pointers and views lead into the document.
struct Node {
    bool nothing = false; // the schema `false`
    bool nullable = false;
    unsigned types = kAny;
    const Format* format = nullptr;
    const json* constant = nullptr;
    const json* values = nullptr; // the array of enum
    const json* minimum = nullptr;
    const json* maximum = nullptr;
    const json* exclusive_minimum = nullptr;
    const json* exclusive_maximum = nullptr;
    const json* multiple_of = nullptr;
    std::uint64_t min_length = 0, max_length = kUnbounded;
    std::uint64_t min_items = 0, max_items = kUnbounded;
    std::uint64_t min_properties = 0, max_properties = kUnbounded;
    std::unique_ptr<RE2> pattern;
    std::map<std::string_view, Index> properties;
    std::vector<std::string_view> required;
    std::vector<Index> prefix_items, any_of, one_of;
    Index items = kNone;
    Index additional = kNone;
    Index reference = kNone;
};

} // namespace

struct Schema::Compiled {
    json document;
    std::vector<Node> nodes; // the first is the whole
    Names names;             // of members, wherever a schema names them
};

// ---- Compiling --------------------------------------------------------------------------------------------------

class SchemaCompiler {
  public:
    SchemaCompiler(Schema::Compiled& out, Schema::Form form)
        : out_(out), response_(form == Schema::Form::response_schema) {}

    Result<void> run(std::string_view text) {
        if (text.size() > kMaxSchemaBytes)
            return fail(GCOALESCE_BAD_REQUEST, ": expected at most {} bytes, found {}", kMaxSchemaBytes, text.size());
        if (const std::string problem = parse(text, out_.document); !problem.empty())
            return fail(GCOALESCE_BAD_REQUEST, ": {}", problem);
        resources_.push_back({&out_.document, {}});
        Index root = kNone;
        if (compile(out_.document, root) && resolve() && measure()) return {};
        return fail(GCOALESCE_BAD_REQUEST, "{}", error_);
    }

  private:
    using Handler = bool (SchemaCompiler::*)(json&, Node&);
    struct Keyword {
        std::string name;
        Handler handler;
    };
    // A part of the document that has an $id, and the document itself: what "#" stands for.
    struct Resource {
        const json* root;
        std::unordered_map<std::string_view, Index> anchors;
    };
    struct Reference {
        Index from;
        const json* text;
        std::size_t resource;
    };

    static const std::vector<Keyword>& json_keywords();
    static const std::vector<Keyword>& response_keywords();

    bool refuse(const json& at, std::string_view what) {
        if (error_.empty()) {
            std::string path;
            write_path(out_.document, &at, nullptr, path);
            error_ = fmt::format("{:.400}: {}", path, what);
        }
        return false;
    }

    bool expected(const json& at, std::string_view what) {
        return refuse(at, fmt::format("expected {}, found {}", what, one_of_type(at)));
    }

    bool compile(json& at, Index& index) {
        index = out_.nodes.size();
        out_.nodes.emplace_back();
        places_.push_back(&at);
        index_of_[&at] = index;
        if (at.is_boolean() && !response_) {
            out_.nodes[index].nothing = !at.get<bool>();
            return true;
        }
        if (!at.is_object()) return expected(at, response_ ? "an object" : "an object or a boolean");
        const std::size_t outer = resource_;
        const Index outer_node = std::exchange(node_, index);
        Node node;
        const bool done = identify(at) && read_keywords(at, node);
        out_.nodes[index] = std::move(node);
        resource_ = outer;
        node_ = outer_node;
        return done;
    }

    // An $id is where references within it start from, wherever it stands among the keywords.
    bool identify(json& at) {
        const auto member = response_ ? at.end() : at.find("$id");
        if (member == at.end()) return true;
        if (!member->is_string()) return expected(*member, "a string");
        std::string_view id = member->get_ref<const std::string&>();
        if (id.ends_with('#')) id.remove_suffix(1);
        if (id.empty() || id.find('#') != id.npos) return refuse(*member, "expected a URI without a fragment");
        if (&at != &out_.document) {
            resource_ = resources_.size();
            resources_.push_back({&at, {}});
        }
        return ids_.emplace(id, resource_).second || refuse(*member, "two schemas have this $id");
    }

    bool read_keywords(json& at, Node& node) {
        const std::vector<Keyword>& keywords = response_ ? response_keywords() : json_keywords();
        std::vector<const Keyword*> seen;
        for (auto& [name, value] : at.get_ref<json::object_t&>()) {
            const std::string spelled = response_ ? camel_case(name) : name;
            const auto keyword = std::find_if(keywords.begin(), keywords.end(),
                                              [&](const Keyword& known) { return known.name == spelled; });
            if (keyword == keywords.end()) return unknown_keyword(value, name, keywords);
            if (response_ && value.is_null()) continue; // proto3 JSON: not set
            if (std::find(seen.begin(), seen.end(), &*keyword) != seen.end())
                return refuse(value, fmt::format("\"{}\" is given in two spellings", keyword->name));
            seen.push_back(&*keyword);
            if (!(this->*keyword->handler)(value, node)) return false;
        }
        return !response_ || read_listed_numbers(at, node);
    }

    bool unknown_keyword(const json& at, std::string_view name, const std::vector<Keyword>& keywords) {
        std::vector<std::string> names;
        for (const Keyword& known : keywords) names.push_back(known.name);
        return refuse(at, fmt::format("unknown keyword \"{:.64}\"{}", name, did_you_mean(name, names)));
    }

    static std::string camel_case(std::string_view name) {
        std::string spelled;
        for (std::size_t i = 0; i < name.size(); ++i) {
            const bool raise = name[i] == '_' && i + 1 < name.size() && name[i + 1] >= 'a' && name[i + 1] <= 'z';
            spelled += raise ? static_cast<char>(name[++i] - 'a' + 'A') : name[i];
        }
        return spelled;
    }

    // Vertex lists the values of numeric enums as strings.
    bool read_listed_numbers(json& at, const Node& node) {
        if (!node.values || (node.types & ~(kNumber | kNull)) != 0) return true;
        for (json& value : at["enum"]) {
            json number;
            if (!parse(value.get_ref<const std::string&>(), number).empty() || !number.is_number())
                return refuse(value, "expected a number in a string, as the type is numeric");
            value = std::move(number);
        }
        return true;
    }

    // ---- Handlers of keywords

    bool annotation(json&, Node&) { return true; }
    bool text(json& value, Node&) { return value.is_string() || expected(value, "a string"); }
    bool ordering(json& value, Node&) { return strings(value); }

    bool nullable(json& value, Node& node) {
        if (!value.is_boolean()) return expected(value, "true or false");
        node.nullable = value.get<bool>();
        return true;
    }

    bool type(json& value, Node& node) {
        if (value.is_string()) {
            node.types = 0;
            return add_type(value, node);
        }
        if (response_) return expected(value, "the name of a type");
        if (!value.is_array() || value.empty()) return expected(value, "the name of a type, or a list of some");
        node.types = 0;
        return std::all_of(value.begin(), value.end(), [&](const json& name) {
            return name.is_string() ? add_type(name, node) : expected(name, "the name of a type");
        });
    }

    bool add_type(const json& value, Node& node) {
        std::string name = value.get<std::string>();
        if (response_) {
            if (name == "TYPE_UNSPECIFIED") {
                node.types = kAny;
                return true;
            }
            const bool upper = std::none_of(name.begin(), name.end(), [](char c) { return c >= 'a' && c <= 'z'; });
            if (upper)
                std::transform(name.begin(), name.end(), name.begin(),
                               [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; });
        }
        std::vector<std::string> names;
        for (const Type& known : kTypes) {
            if (name == known.name) {
                node.types |= known.bits;
                return true;
            }
            names.emplace_back(known.name);
        }
        return refuse(value, fmt::format("unknown type \"{:.64}\"{}", value.get_ref<const std::string&>(),
                                         did_you_mean(name, names)));
    }

    bool format(json& value, Node& node) {
        if (!value.is_string()) return expected(value, "a string");
        const auto known = std::find_if(kFormats.begin(), kFormats.end(), [&](const Format& each) {
            return value.get_ref<const std::string&>() == each.name;
        });
        if (known != kFormats.end()) node.format = &*known;
        return true;
    }

    bool enumeration(json& value, Node& node) {
        if (response_ ? !strings(value) : !value.is_array()) return expected(value, "an array");
        if (value.empty()) return response_ || refuse(value, "expected at least one value, found none");
        node.values = &value;
        return true;
    }

    bool constant(json& value, Node& node) {
        node.constant = &value;
        return true;
    }

    template <const json* Node::*Member>
    bool number(json& value, Node& node) {
        node.*Member = &value;
        return value.is_number() || expected(value, "a number");
    }

    bool multiple_of(json& value, Node& node) {
        node.multiple_of = &value;
        if (!value.is_number()) return expected(value, "a number");
        return real(value) > 0 || refuse(value, "expected a number above 0");
    }

    template <std::uint64_t Node::*Member>
    bool count(json& value, Node& node) {
        json number = value;
        // proto3 JSON writes 64-bit integers as strings.
        if (response_ && value.is_string() && !parse(value.get_ref<const std::string&>(), number).empty())
            number = value;
        if (!number.is_number()) return expected(value, "a whole number");
        if (type_of(number) != kInteger || real(number) < 0)
            return refuse(value, "expected a whole number of at least 0, found another one");
        // More than any answer has.
        node.*Member =
            real(number) < static_cast<Real>(kUnbounded) ? static_cast<std::uint64_t>(real(number)) : kUnbounded;
        return true;
    }

    bool pattern(json& value, Node& node) {
        if (!value.is_string()) return expected(value, "a regular expression");
        if (patterns_++ == kMaxPatterns) return refuse(value, fmt::format("more than {} patterns", kMaxPatterns));
        RE2::Options options;
        options.set_log_errors(false);
        options.set_max_mem(kPatternMemory);
        node.pattern = std::make_unique<RE2>(value.get_ref<const std::string&>(), options);
        return node.pattern->ok() ||
               refuse(value, fmt::format("expected a regular expression of RE2's: {:.200}", node.pattern->error()));
    }

    bool properties(json& value, Node& node) {
        if (!value.is_object()) return expected(value, "an object");
        for (auto& [name, schema] : value.get_ref<json::object_t&>()) {
            out_.names.insert(name);
            if (!compile(schema, node.properties[name])) return false;
        }
        return true;
    }

    bool definitions(json& value, Node&) {
        if (!value.is_object()) return expected(value, "an object");
        Index ignored = kNone;
        for (auto& [name, schema] : value.get_ref<json::object_t&>()) {
            if (!compile(schema, ignored)) return false;
        }
        return true;
    }

    bool required(json& value, Node& node) {
        if (!strings(value)) return false;
        for (const json& name : value) {
            node.required.push_back(name.get_ref<const std::string&>());
            out_.names.insert(node.required.back());
        }
        return true;
    }

    template <Index Node::*Member>
    bool schema(json& value, Node& node) {
        return compile(value, node.*Member);
    }

    // Also of a response_schema it may be a boolean.
    bool additional(json& value, Node& node) {
        if (!value.is_boolean()) return compile(value, node.additional);
        node.additional = out_.nodes.size();
        out_.nodes.emplace_back().nothing = !value.get<bool>();
        places_.push_back(&value);
        index_of_[&value] = node.additional;
        return true;
    }

    template <std::vector<Index> Node::*Member>
    bool schemas(json& value, Node& node) {
        if (!value.is_array()) return expected(value, "an array of schemas");
        if (value.empty()) return response_ || refuse(value, "expected at least one schema, found none");
        for (json& schema : value) {
            if (!compile(schema, (node.*Member).emplace_back())) return false;
        }
        return true;
    }

    bool reference(json& value, Node&) {
        if (!value.is_string()) return expected(value, "a string");
        references_.push_back({node_, &value, resource_});
        return true;
    }

    bool anchor(json& value, Node&) {
        if (!value.is_string()) return expected(value, "a string");
        const auto& name = value.get_ref<const std::string&>();
        if (name.empty() || name.find_first_of("/#%") != name.npos) return refuse(value, "expected a plain name");
        return resources_[resource_].anchors.emplace(name, node_).second ||
               refuse(value, "two schemas have this $anchor");
    }

    bool strings(const json& value) {
        if (!value.is_array()) return expected(value, "an array of strings");
        return std::all_of(value.begin(), value.end(),
                           [&](const json& each) { return each.is_string() || expected(each, "a string"); });
    }

    // ---- When all schemas are known

    bool resolve() {
        for (const Reference& reference : references_) {
            const std::string_view text = reference.text->get_ref<const std::string&>();
            const std::size_t hash = std::min(text.find('#'), text.size());
            std::size_t resource = reference.resource;
            if (hash > 0) {
                const auto id = ids_.find(text.substr(0, hash));
                if (id == ids_.end())
                    return refuse(*reference.text, "leads outside the document; expected \"#/...\", or an $id in it");
                resource = id->second;
            }
            const Index target = find(resources_[resource], decode(text.substr(std::min(hash + 1, text.size()))));
            if (target == kNone) return refuse(*reference.text, "no schema stands there");
            out_.nodes[reference.from].reference = target;
        }
        return true;
    }

    Index find(const Resource& resource, const std::string& fragment) const {
        if (!fragment.empty() && fragment.front() != '/') {
            const auto anchor = resource.anchors.find(fragment);
            return anchor == resource.anchors.end() ? kNone : anchor->second;
        }
        try {
            const json::json_pointer pointer(fragment);
            if (!resource.root->contains(pointer)) return kNone;
            const auto known = index_of_.find(&resource.root->at(pointer));
            return known == index_of_.end() ? kNone : known->second;
        } catch (const json::exception&) { // no JSON pointer
            return kNone;
        }
    }

    // RFC 3986, section 2.1. What is no escape stands for itself.
    static std::string decode(std::string_view text) {
        std::string plain;
        for (std::size_t i = 0; i < text.size(); ++i) {
            unsigned char byte = 0;
            if (text[i] == '%' && i + 2 < text.size() &&
                std::from_chars(text.data() + i + 1, text.data() + i + 3, byte, 16).ptr == text.data() + i + 3) {
                plain += static_cast<char>(byte);
                i += 2;
            } else {
                plain += text[i];
            }
        }
        return plain;
    }

    // Refuses schemas that apply themselves to the very value they are applied to.
    bool measure() {
        std::vector<std::size_t> lengths(out_.nodes.size(), 0);
        for (Index index = 0; index < out_.nodes.size(); ++index) {
            if (!measure(index, lengths, 1)) return false;
        }
        return true;
    }

    // lengths[index]: the longest chain of schemas applied to one value; 0 not known, kNone being measured.
    bool measure(Index index, std::vector<std::size_t>& lengths, std::size_t depth) {
        if (lengths[index] == kNone) return refuse(*places_[index], "refers to itself for the same value, without end");
        if (lengths[index] > 0) return true;
        const auto too_long = [&] {
            return refuse(*places_[index], fmt::format("more than {} schemas apply to one value", kMaxLevels));
        };
        if (depth > kMaxLevels) return too_long();
        lengths[index] = kNone;
        std::size_t longest = 0;
        const auto follow = [&](Index next) {
            if (!measure(next, lengths, depth + 1)) return false;
            longest = std::max(longest, lengths[next]);
            return true;
        };
        const Node& node = out_.nodes[index];
        if (node.reference != kNone && !follow(node.reference)) return false;
        if (!std::all_of(node.any_of.begin(), node.any_of.end(), follow)) return false;
        if (!std::all_of(node.one_of.begin(), node.one_of.end(), follow)) return false;
        lengths[index] = longest + 1;
        return lengths[index] <= kMaxLevels || too_long();
    }

    Schema::Compiled& out_;
    const bool response_;
    std::string error_;
    std::vector<const json*> places_; // of the nodes
    std::unordered_map<const json*, Index> index_of_;
    std::vector<Resource> resources_;
    std::unordered_map<std::string_view, std::size_t> ids_;
    std::vector<Reference> references_;
    std::size_t resource_ = 0; // that of the schema being compiled
    Index node_ = kNone;       // the schema being compiled
    std::size_t patterns_ = 0;
};

const std::vector<SchemaCompiler::Keyword>& SchemaCompiler::response_keywords() {
    using C = SchemaCompiler;
    static const std::vector<Keyword> keywords{
        {"additionalProperties", &C::additional},
        {"anyOf", &C::schemas<&Node::any_of>},
        {"default", &C::annotation},
        {"defs", &C::definitions},
        {"description", &C::text},
        {"enum", &C::enumeration},
        {"example", &C::annotation},
        {"format", &C::format},
        {"items", &C::schema<&Node::items>},
        {"maxItems", &C::count<&Node::max_items>},
        {"maxLength", &C::count<&Node::max_length>},
        {"maxProperties", &C::count<&Node::max_properties>},
        {"maximum", &C::number<&Node::maximum>},
        {"minItems", &C::count<&Node::min_items>},
        {"minLength", &C::count<&Node::min_length>},
        {"minProperties", &C::count<&Node::min_properties>},
        {"minimum", &C::number<&Node::minimum>},
        {"nullable", &C::nullable},
        {"pattern", &C::pattern},
        {"properties", &C::properties},
        {"propertyOrdering", &C::ordering},
        {"ref", &C::reference},
        {"required", &C::required},
        {"title", &C::text},
        {"type", &C::type},
    };
    return keywords;
}

const std::vector<SchemaCompiler::Keyword>& SchemaCompiler::json_keywords() {
    using C = SchemaCompiler;
    static const std::vector<Keyword> keywords = [] {
        std::vector<Keyword> all = response_keywords();
        std::erase_if(all, [](const Keyword& keyword) { return keyword.name == "defs" || keyword.name == "ref"; });
        const Keyword more[] = {
            {"$anchor", &C::anchor},
            {"$comment", &C::text},
            {"$defs", &C::definitions},
            {"$id", &C::annotation}, // see identify()
            {"$ref", &C::reference},
            {"$schema", &C::text},
            {"const", &C::constant},
            {"examples", &C::annotation},
            {"exclusiveMaximum", &C::number<&Node::exclusive_maximum>},
            {"exclusiveMinimum", &C::number<&Node::exclusive_minimum>},
            {"multipleOf", &C::multiple_of},
            {"oneOf", &C::schemas<&Node::one_of>},
            {"prefixItems", &C::schemas<&Node::prefix_items>},
        };
        all.insert(all.end(), std::begin(more), std::end(more));
        return all;
    }();
    return keywords;
}

// ---- Checking ---------------------------------------------------------------------------------------------------

class SchemaChecker {
  public:
    SchemaChecker(const Schema::Compiled& schema, const json& answer, std::size_t bytes)
        : schema_(schema),
          answer_(answer),
          steps_(1'000'000 + 16 * static_cast<std::uint64_t>(bytes)),
          budget_(steps_) {}

    std::optional<Violation> run() {
        if (fits(0, answer_, 0)) return std::nullopt;
        Violation violation;
        if (!stopped_) write_path(answer_, fault_.value, &schema_.names, violation.path);
        violation.message = say();
        return violation;
    }

  private:
    enum class Rule {
        nothing,
        type,
        constant,
        values,
        minimum,
        maximum,
        exclusive_minimum,
        exclusive_maximum,
        multiple_of,
        format,
        min_length,
        max_length,
        pattern,
        min_items,
        max_items,
        min_properties,
        max_properties,
        required,
        additional,
        any_of,
        one_of,
        several_of,
        too_costly,
        too_deep
    };
    // A rule that does not hold. It becomes words only when it is the answer: alternatives fail by the thousand.
    struct Fault {
        Rule rule = Rule::nothing;
        const Node* node = nullptr;
        const json* value = nullptr;
        std::size_t level = 0;
        std::string_view missing; // the member, for `required`
        bool alternative = false; // one of several did not fit by it
    };

    bool broken(Rule rule, const Node& node, const json& value, std::size_t level, std::string_view missing = {}) {
        if (!stopped_) fault_ = {rule, &node, &value, level, missing, false};
        return false;
    }

    // Ends the whole check.
    bool stop(Rule rule) {
        if (!stopped_) fault_.rule = rule;
        stopped_ = true;
        return false;
    }

    bool spend(std::size_t steps) {
        if (steps > steps_) return stop(Rule::too_costly);
        steps_ -= steps;
        return !stopped_;
    }

    // Reading a string, in steps.
    static std::size_t cost(std::string_view text) { return 1 + text.size() / 32; }

    bool fits(Index index, const json& value, std::size_t level) {
        if (!spend(1)) return false;
        if (frames_ == kMaxFrames) return stop(Rule::too_deep);
        ++frames_;
        const bool holds = obeys(schema_.nodes[index], value, level);
        --frames_;
        return holds;
    }

    bool obeys(const Node& node, const json& value, std::size_t level) {
        if (node.nullable && value.is_null()) return true;
        if (node.nothing) return broken(Rule::nothing, node, value, level);
        if ((node.types & type_of(value)) == 0) return broken(Rule::type, node, value, level);
        if (node.constant && !equal(*node.constant, value)) return broken(Rule::constant, node, value, level);
        if (node.values && std::none_of(node.values->begin(), node.values->end(),
                                        [&](const json& each) { return equal(each, value); }))
            return broken(Rule::values, node, value, level);
        if (node.format && !node.format->holds(value)) return broken(Rule::format, node, value, level);
        if (value.is_number() && !number(node, value, level)) return false;
        if (value.is_string() && !string(node, value, level)) return false;
        if (value.is_array() && !array(node, value, level)) return false;
        if (value.is_object() && !object(node, value, level)) return false;
        if (node.reference != kNone && !fits(node.reference, value, level)) return false;
        return (node.any_of.empty() || any_of(node, value, level)) &&
               (node.one_of.empty() || one_of(node, value, level));
    }

    bool number(const Node& node, const json& value, std::size_t level) {
        if (node.minimum && real(value) < real(*node.minimum)) return broken(Rule::minimum, node, value, level);
        if (node.maximum && real(value) > real(*node.maximum)) return broken(Rule::maximum, node, value, level);
        if (node.exclusive_minimum && real(value) <= real(*node.exclusive_minimum))
            return broken(Rule::exclusive_minimum, node, value, level);
        if (node.exclusive_maximum && real(value) >= real(*node.exclusive_maximum))
            return broken(Rule::exclusive_maximum, node, value, level);
        if (!node.multiple_of) return true;
        const Decimal whole = decimal(value);
        const Decimal part = decimal(*node.multiple_of);
        if (!spend(4 + static_cast<std::size_t>(std::abs(whole.exponent - part.exponent)))) return false;
        return is_multiple(whole, part) || broken(Rule::multiple_of, node, value, level);
    }

    bool string(const Node& node, const json& value, std::size_t level) {
        const auto& text = value.get_ref<const std::string&>();
        if (node.min_length > 0 || node.max_length != kUnbounded) {
            if (!spend(cost(text))) return false;
            const std::uint64_t length = code_points(text);
            if (length < node.min_length) return broken(Rule::min_length, node, value, level);
            if (length > node.max_length) return broken(Rule::max_length, node, value, level);
        }
        if (!node.pattern) return true;
        // At worst RE2 goes through its whole program at each byte.
        const auto program = static_cast<std::size_t>(std::max(node.pattern->ProgramSize(), 1));
        if (!spend((1 + text.size()) * (1 + program / 16))) return false;
        return RE2::PartialMatch(text, *node.pattern) || broken(Rule::pattern, node, value, level);
    }

    bool array(const Node& node, const json& value, std::size_t level) {
        if (value.size() < node.min_items) return broken(Rule::min_items, node, value, level);
        if (value.size() > node.max_items) return broken(Rule::max_items, node, value, level);
        for (std::size_t i = 0; i < value.size(); ++i) {
            const Index index = i < node.prefix_items.size() ? node.prefix_items[i] : node.items;
            if (index == kNone) break;
            if (!fits(index, value[i], level + 1)) return false;
        }
        return true;
    }

    bool object(const Node& node, const json& value, std::size_t level) {
        const auto& members = value.get_ref<const json::object_t&>();
        if (members.size() < node.min_properties) return broken(Rule::min_properties, node, value, level);
        if (members.size() > node.max_properties) return broken(Rule::max_properties, node, value, level);
        for (const std::string_view name : node.required) {
            if (!spend(cost(name))) return false;
            if (members.find(name) == members.end()) return broken(Rule::required, node, value, level, name);
        }
        if (node.properties.empty() && node.additional == kNone) return true;
        for (const auto& [name, member] : members) {
            if (!spend(cost(name))) return false;
            const auto property = node.properties.find(name);
            const Index index = property == node.properties.end() ? node.additional : property->second;
            if (index == kNone) continue;
            if (property == node.properties.end() && schema_.nodes[index].nothing)
                return broken(Rule::additional, node, member, level + 1);
            if (!fits(index, member, level + 1)) return false;
        }
        return true;
    }

    bool any_of(const Node& node, const json& value, std::size_t level) {
        Fault closest{Rule::any_of, &node, &value, level, {}, false};
        for (const Index index : node.any_of) {
            if (fits(index, value, level)) return true;
            if (stopped_) return false;
            remember(closest);
        }
        fault_ = closest;
        return false;
    }

    bool one_of(const Node& node, const json& value, std::size_t level) {
        Fault closest{Rule::one_of, &node, &value, level, {}, false};
        bool found = false;
        for (const Index index : node.one_of) {
            const bool holds = fits(index, value, level);
            if (stopped_) return false;
            if (!holds)
                remember(closest);
            else if (std::exchange(found, true))
                return broken(Rule::several_of, node, value, level);
        }
        if (!found) fault_ = closest;
        return found;
    }

    void remember(Fault& closest) const {
        if (fault_.level <= closest.level) return;
        closest = fault_;
        closest.alternative = true;
    }

    // As JSON values: numbers by value, members in any order.
    bool equal(const json& a, const json& b) {
        if (!spend(1)) return false;
        if (a.is_number() && b.is_number()) return real(a) == real(b);
        if (a.type() != b.type() || a.size() != b.size()) return false;
        if (a.is_string()) return spend(cost(a.get_ref<const std::string&>())) && a == b;
        if (a.is_array())
            return std::equal(a.begin(), a.end(), b.begin(), [&](const json& x, const json& y) { return equal(x, y); });
        if (!a.is_object()) return a == b;
        const auto& x = a.get_ref<const json::object_t&>();
        const auto& y = b.get_ref<const json::object_t&>();
        return std::equal(x.begin(), x.end(), y.begin(), [&](const auto& left, const auto& right) {
            return spend(cost(left.first)) && left.first == right.first && equal(left.second, right.second);
        });
    }

    std::string say() const {
        if (stopped_) return say_stopped();
        return say_broken() + (fault_.alternative ? " (in the alternative that fits best)" : "");
    }

    std::string say_stopped() const {
        if (fault_.rule == Rule::too_costly)
            return fmt::format("too costly to check: more than {} steps; the schema's alternatives multiply", budget_);
        return fmt::format("too deep to check: more than {} schemas within one another", kMaxFrames);
    }

    std::string say_broken() const {
        const Node& node = *fault_.node;
        const json& value = *fault_.value;
        const auto bound = [](const char* keyword, const char* relation, const json& limit, const char* found) {
            return fmt::format("\"{}\": expected {} {}, found {}", keyword, relation, limit.dump(), found);
        };
        const auto size = [](const char* keyword, const char* relation, std::uint64_t limit, const char* what,
                             std::uint64_t found) {
            return fmt::format("\"{}\": expected {} {} {}, found {}", keyword, relation, limit, what, found);
        };
        const auto length = [&] { return code_points(value.get_ref<const std::string&>()); };
        switch (fault_.rule) {
        case Rule::nothing: return fmt::format("the schema is false: expected no value, found {}", one_of_type(value));
        case Rule::type:
            return fmt::format("\"type\": expected {}, found {}", list_types(node.types | (node.nullable ? kNull : 0u)),
                               one_of_type(value));
        case Rule::constant:
            return fmt::format("\"const\": expected one value, {}, found {} that differs", one_of_type(*node.constant),
                               one_of_type(value));
        case Rule::values:
            return fmt::format("\"enum\": expected one of {} values, found {} that is none of them",
                               node.values->size(), one_of_type(value));
        case Rule::minimum: return bound("minimum", "at least", *node.minimum, "less");
        case Rule::maximum: return bound("maximum", "at most", *node.maximum, "more");
        case Rule::exclusive_minimum: return bound("exclusiveMinimum", "more than", *node.exclusive_minimum, "no more");
        case Rule::exclusive_maximum: return bound("exclusiveMaximum", "less than", *node.exclusive_maximum, "no less");
        case Rule::multiple_of: return bound("multipleOf", "a multiple of", *node.multiple_of, "another number");
        case Rule::format:
            return fmt::format("\"format\": expected {}, found {} that is none", node.format->name, one_of_type(value));
        case Rule::min_length: return size("minLength", "at least", node.min_length, "characters", length());
        case Rule::max_length: return size("maxLength", "at most", node.max_length, "characters", length());
        case Rule::pattern:
            return fmt::format("\"pattern\": expected a match, found none in a string of {} characters", length());
        case Rule::min_items: return size("minItems", "at least", node.min_items, "items", value.size());
        case Rule::max_items: return size("maxItems", "at most", node.max_items, "items", value.size());
        case Rule::min_properties:
            return size("minProperties", "at least", node.min_properties, "members", value.size());
        case Rule::max_properties:
            return size("maxProperties", "at most", node.max_properties, "members", value.size());
        case Rule::required:
            return fmt::format("\"required\": expected a member \"{:.64}\", found none", fault_.missing);
        case Rule::additional:
            return fmt::format("\"additionalProperties\": expected no members but {} that are named, found another",
                               node.properties.size());
        case Rule::any_of:
            return fmt::format("\"anyOf\": expected one of {} alternatives, found {} that fits none",
                               node.any_of.size(), one_of_type(value));
        case Rule::one_of:
            return fmt::format("\"oneOf\": expected one of {} alternatives, found {} that fits none",
                               node.one_of.size(), one_of_type(value));
        case Rule::several_of:
            return fmt::format("\"oneOf\": expected exactly one of {} alternatives, found {} that fits several",
                               node.one_of.size(), one_of_type(value));
        case Rule::too_costly:
        case Rule::too_deep: break; // see say_stopped()
        }
        return {};
    }

    const Schema::Compiled& schema_;
    const json& answer_;
    std::uint64_t steps_; // left
    const std::uint64_t budget_;
    std::size_t frames_ = 0;
    Fault fault_;
    bool stopped_ = false;
};

Result<Schema> Schema::compile(std::string_view json_text, Form form) {
    auto compiled = std::make_shared<Compiled>();
    if (auto done = SchemaCompiler(*compiled, form).run(json_text); !done) return tl::unexpected<Error>(done.error());
    return Schema(std::move(compiled));
}

std::optional<Violation> Schema::check(std::string_view json_text) const {
    json answer;
    if (const std::string problem = parse(json_text, answer); !problem.empty())
        return Violation{"", "not readable: " + problem};
    return SchemaChecker(*compiled_, answer, json_text.size()).run();
}

} // namespace gcoalesce
