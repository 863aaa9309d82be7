#include "cli/gateway/members.hpp"

#include <cstdint>
#include <nlohmann/json.hpp>
#include <utility>

namespace gcoalesce::gateway {
namespace {

// Writes what it is told of: numbers as they were spelled, which a parsed document no longer knows.
class Writer {
  public:
    Members members;

    bool null() { return value("null"); }
    bool boolean(bool is) { return value(is ? "true" : "false"); }
    bool number_integer(std::int64_t number) { return value(std::to_string(number)); }
    bool number_unsigned(std::uint64_t number) { return value(std::to_string(number)); }
    bool number_float(double, const std::string& text) { return value(text); } // integers too large for 64 bits, too
    bool string(std::string& text) { return value(nlohmann::json(text).dump()); }
    bool binary(std::vector<std::uint8_t>&) { return false; } // not in JSON

    bool start_object(std::size_t) {
        if (!levels_.empty()) value("{");
        levels_.push_back({false, true});
        return true;
    }
    bool key(std::string& name) {
        if (levels_.size() == 1) {
            members.emplace_back(name, "");
        } else {
            separate();
            text() += nlohmann::json(name).dump() + ":";
        }
        return true;
    }
    bool end_object() { return end("}"); }
    bool start_array(std::size_t) {
        if (!value("[")) return false;
        levels_.push_back({true, true});
        return true;
    }
    bool end_array() { return end("]"); }
    bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception&) { return false; }

  private:
    struct Level {
        bool array, first;
    };

    std::string& text() { return members.back().second; }
    void separate() {
        if (!std::exchange(levels_.back().first, false)) text() += ',';
    }
    // False: outside of any object.
    bool value(std::string_view written) {
        if (levels_.empty()) return false;
        if (levels_.back().array) separate();
        text() += written;
        return true;
    }
    bool end(std::string_view bracket) {
        levels_.pop_back();
        if (!levels_.empty()) text() += bracket;
        return true;
    }

    std::vector<Level> levels_;
};

// To nlohmann's parser a NUL is the end, and a byte order mark nothing.
bool is_plain(std::string_view text) {
    return text.find('\0') == std::string_view::npos && !text.starts_with("\xEF\xBB\xBF");
}

} // namespace

std::optional<Members> members_of(std::string_view json) {
    Writer writer;
    if (!is_plain(json) || !nlohmann::json::sax_parse(json, &writer)) return std::nullopt;
    return std::move(writer.members);
}

bool is_json(std::string_view text) {
    return is_plain(text) && nlohmann::json::accept(text);
}

} // namespace gcoalesce::gateway
