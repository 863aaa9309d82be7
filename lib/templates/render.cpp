// What a request gives a template, and what goes upstream for it.
#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/nearest.hpp"
#include "templates/template.hpp"
#include "templates/text.hpp"

namespace gcoalesce {
namespace {

using Json = nlohmann::ordered_json;

// Names are of a client's choice, so only what looks like one is repeated.
std::string spoken(std::string_view name) {
    return is_variable_name(name) ? fmt::format("the variable \"{}\"", name) : "a variable of another sort of name";
}

// Takes the parser's events of an object of scalars.
class ValueReader {
  public:
    std::map<std::string, std::string> values;
    std::string complaint;

    bool null() { return refuse("null"); }
    bool boolean(bool value) { return take(value ? "true" : "false"); }
    bool number_integer(std::int64_t value) { return take(fmt::to_string(value)); }
    bool number_unsigned(std::uint64_t value) { return take(fmt::to_string(value)); }
    bool number_float(double, std::string spelling) {
        // nlohmann spells the point as the locale has it.
        for (char& c : spelling) {
            if (std::string_view("+-0123456789eE").find(c) == std::string_view::npos) c = '.';
        }
        return take(std::move(spelling));
    }
    bool binary(std::vector<std::uint8_t>&) { return false; } // not in JSON
    bool string(std::string& value) { return take(std::move(value)); }
    bool start_object(std::size_t) { return open_ ? refuse("an object") : (open_ = true); }
    bool end_object() { return true; }
    bool start_array(std::size_t) { return refuse("an array"); }
    bool end_array() { return false; }
    bool key(std::string& name) {
        name_ = std::move(name);
        return true;
    }
    bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& what) {
        return no_json(position,
                       what.id == 406 ? "have a number beyond the range of double" : "are no valid JSON in UTF-8");
    }
    bool no_json(std::size_t position, std::string_view why) {
        complaint = fmt::format("the variables {} at byte {}", why, position);
        return false;
    }

  private:
    bool take(std::string value) {
        if (!open_) return refuse("a single value");
        if (!values.emplace(name_, std::move(value)).second) complaint = spoken(name_) + " is given twice";
        return complaint.empty();
    }
    bool refuse(std::string_view what) {
        complaint = open_ ? fmt::format("{} is {}; expected a text, a number, true or false", spoken(name_), what)
                          : fmt::format("the variables are {}; expected an object", what);
        return false;
    }

    bool open_ = false;
    std::string name_;
};

std::string joined(const std::vector<TemplatePiece>& pieces, const std::vector<std::string>& values) {
    std::string text;
    for (const TemplatePiece& piece : pieces) text += piece.variable ? values[*piece.variable] : piece.literal;
    return text;
}

} // namespace

Result<TemplateValues> read_variables(const Template& with, std::string_view json) {
    ValueReader given;
    if (const auto odd = odd_byte(json))
        given.no_json(*odd, "are no valid JSON in UTF-8");
    else if (!json.empty())
        nlohmann::json::sax_parse(json.begin(), json.end(), &given);
    if (!given.complaint.empty()) return fail(GCOALESCE_BAD_REQUEST, "{}", given.complaint);

    std::vector<std::string> known;
    for (const TemplateVariable& variable : with.variables) known.push_back(variable.name);
    for (const auto& [name, value] : given.values) {
        if (std::find(known.begin(), known.end(), name) != known.end()) continue;
        return fail(GCOALESCE_BAD_REQUEST, "{} is unknown to the template \"{}\"{}", spoken(name), with.id,
                    did_you_mean(name, known));
    }

    TemplateValues out;
    Json canonical = Json::object();
    for (const TemplateVariable& variable : with.variables) {
        const auto value = given.values.find(variable.name);
        if (value == given.values.end() && !variable.default_value)
            return fail(GCOALESCE_BAD_REQUEST, "the variable \"{}\" is missing, which the template \"{}\" needs",
                        variable.name, with.id);
        std::string text = value == given.values.end() ? *variable.default_value : normalised(variable, value->second);
        if (const std::string wrong = objection(variable, text); !wrong.empty())
            return fail(GCOALESCE_BAD_REQUEST, "the variable \"{}\" {}", variable.name, wrong);
        canonical[variable.name] = text;
        out.values.push_back(std::move(text));
    }
    out.canonical = canonical.dump();
    return out;
}

std::string render(const Template& with, const TemplateValues& values) {
    Json body = Json::object();
    const auto text_part = [&](const std::vector<TemplatePiece>& pieces) {
        return Json::array({Json::object({{"text", joined(pieces, values.values)}})});
    };
    body["contents"] = Json::array({Json::object({{"role", "user"}, {"parts", text_part(with.prompt)}})});
    if (!with.system_instruction.empty())
        body["systemInstruction"] = Json::object({{"parts", text_part(with.system_instruction)}});
    const Json fixed = Json::parse(with.request);
    for (const auto& [name, value] : fixed.items()) body[name] = value;
    return body.dump();
}

} // namespace gcoalesce
