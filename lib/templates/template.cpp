#include "templates/template.hpp"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <span>
#include <sys/stat.h>
#include <tuple>
#include <utility>

#include "base/canonical_json.hpp"
#include "base/fd.hpp"
#include "base/nearest.hpp"
#include "base/sha256.hpp"
#include "base/units.hpp"
#include "protocol/key.hpp"
#include "templates/text.hpp"

namespace gcoalesce {
namespace {

// The order of a schema's properties shapes the answer, so what goes upstream keeps the file's.
using Json = nlohmann::ordered_json;

constexpr std::size_t kMaxDepth = 100;
constexpr std::size_t kMaxFileBytes = 1024 * 1024;
constexpr std::size_t kMaxTemplates = 255;

// Changes with every change of what a template's members mean for the answer.
constexpr std::string_view kRevisionEncoding = "gcoalesce template 1";

// JSON pointers (RFC 6901).
std::string below(std::string pointer, std::string_view name) {
    append_pointer(pointer, name);
    return pointer;
}
std::string below(const std::string& pointer, std::size_t index) {
    return fmt::format("{}/{}", pointer, index);
}

// ---- the text as JSON -------------------------------------------------------------------------------------------

// Follows the parser through the document, since it says neither where a member stands nor that it stood there before.
class Watch {
  public:
    std::string complaint; // the first, with its place; "": none

    bool operator()(int, Json::parse_event_t event, const Json& parsed) {
        using Event = Json::parse_event_t;
        if (!complaint.empty()) return false; // nothing else of the document counts
        switch (event) {
        case Event::key:
            levels_.back().name = parsed.get_ref<const std::string&>();
            if (!levels_.back().names.insert(levels_.back().name).second) complain("a duplicate member");
            break;
        case Event::value: element(); break;
        case Event::object_start:
        case Event::array_start:
            element();
            levels_.push_back({.array = event == Event::array_start, .count = 0, .name = {}, .names = {}});
            if (levels_.size() > kMaxDepth) complain(fmt::format("more than {} levels", kMaxDepth));
            break;
        case Event::object_end:
        case Event::array_end: levels_.pop_back(); break;
        }
        return complaint.empty();
    }

    void number_out_of_range() { // which the parser tells before it tells of the value
        element();
        complain("a number beyond the range of double");
    }

  private:
    struct Level {
        bool array;
        std::size_t count;
        std::string name;
        std::set<std::string> names;
    };

    std::string place() const {
        std::string pointer;
        for (const Level& level : levels_) {
            if (level.array && level.count > 0)
                pointer = below(pointer, level.count - 1);
            else if (!level.array && !level.name.empty())
                pointer = below(pointer, level.name);
        }
        return pointer;
    }

    void element() {
        if (!levels_.empty() && levels_.back().array) ++levels_.back().count;
    }
    void complain(std::string_view what) {
        if (complaint.empty()) complaint = fmt::format("{}: {}", place(), what);
    }

    std::vector<Level> levels_;
};

tl::unexpected<Error> no_json(std::string_view text, std::size_t byte) {
    const std::string_view before = text.substr(0, byte);
    const auto lines = std::count(before.begin(), before.end(), '\n');
    const std::size_t line_start = before.rfind('\n') + 1; // npos + 1 is 0
    return fail(GCOALESCE_BAD_REQUEST, "line {}, column {}: expected JSON in UTF-8, without comments", lines + 1,
                before.size() - line_start + 1);
}

Result<Json> parse_json(std::string_view text) {
    if (const auto odd = odd_byte(text)) return no_json(text, *odd);
    Watch watch;
    Json json;
    try {
        json = Json::parse(text.begin(), text.end(), std::ref(watch));
    } catch (const Json::parse_error& error) {
        return no_json(text, std::min(text.size(), error.byte - std::min<std::size_t>(error.byte, 1)));
    } catch (const Json::out_of_range&) {
        watch.number_out_of_range();
    }
    if (!watch.complaint.empty()) return fail(GCOALESCE_BAD_REQUEST, "{}", watch.complaint);
    return json;
}

// ---- members ----------------------------------------------------------------------------------------------------

// One value of the file, where it stands, and where to say what is wrong with it: the first complaint counts.
struct Value {
    const Json& json;
    std::string path;
    std::string& complaint;

    template <class... Args>
    void refuse(fmt::format_string<Args...> format, Args&&... args) const {
        if (!complaint.empty()) return;
        complaint = path.empty() ? "" : path + ": "; // the pointer to the whole is an empty one
        complaint += fmt::format(format, std::forward<Args>(args)...);
    }
    Value member(std::string_view name, const Json& value) const { return {value, below(path, name), complaint}; }
    Value element(std::size_t index) const { return {json[index], below(path, index), complaint}; }

    std::string found() const {
        switch (json.type()) {
        case Json::value_t::null: return "null";
        case Json::value_t::object: return "an object";
        case Json::value_t::array: return "an array";
        case Json::value_t::string: return "a text";
        case Json::value_t::boolean: return json.get<bool>() ? "true" : "false";
        default: return json.dump();
        }
    }
    bool is(bool expected, std::string_view what) const {
        if (!expected) refuse("expected {}, found {}", what, found());
        return expected;
    }
    bool is_text(std::string_view what = "a text") const { return is(json.is_string(), what); }
    const std::string& text() const { return json.get_ref<const std::string&>(); }

    template <class T>
    void text_into(T& target) const {
        if (is_text()) target = text();
    }
    void flag_into(bool& target) const {
        if (is(json.is_boolean(), "true or false")) target = json.get<bool>();
    }
    template <class T>
    void number_into(T& target, std::uint64_t least, std::uint64_t most) const {
        const bool fits =
            json.is_number_unsigned() && json.get<std::uint64_t>() >= least && json.get<std::uint64_t>() <= most;
        if (is(fits, fmt::format("a whole number from {} to {}", least, most)))
            target = static_cast<std::uint32_t>(json.get<std::uint64_t>());
    }
    // A text that `parse` makes something of.
    template <class T, class F>
    void parsed_into(T& target, std::string_view what, F&& parse) const {
        if (!is_text(what)) return;
        const auto value = parse(text());
        if (value)
            target = *value;
        else
            refuse("{}", value.error().message);
    }
    void duration_into(std::optional<Nanos>& target) const {
        parsed_into(target, "a duration as a text, such as \"5s\"", parse_duration);
    }
    template <class T>
    void choice_into(T& target, std::initializer_list<std::pair<std::string, T>> choices) const {
        std::vector<std::string> words;
        for (const auto& [word, meaning] : choices) {
            words.push_back(word);
            if (!json.is_string() || text() != word) continue;
            target = meaning;
            return;
        }
        refuse("expected \"{}\", found {}{}", fmt::join(words, "\" or \""),
               json.is_string() ? fmt::format("\"{}\"", text()) : found(),
               json.is_string() ? did_you_mean(text(), words) : "");
    }
};

// What a member of a template bears on.
enum class Role {
    policy,  // neither answer nor key
    sharing, // the key
    content  // the answer, and so the key; not for "default"
};

// A member that an object of kind T may have, and who takes its value. One table for each kind of object says all that
// may stand in it.
template <class T>
struct Member {
    std::string_view name;
    void (*read)(const Value& value, T& into);
    Role role = Role::policy;
};

template <class T>
std::string suggestion(std::string_view name, std::span<const Member<T>> members) {
    std::vector<std::string> known;
    for (const Member<T>& member : members) known.emplace_back(member.name);
    return did_you_mean(name, known);
}

template <class T>
const Member<T>* find_member(std::string_view name, std::span<const Member<T>> members) {
    const auto found = std::find_if(members.begin(), members.end(), [&](const auto& m) { return m.name == name; });
    return found == members.end() ? nullptr : &*found;
}

template <class T, std::size_t N>
void read_object(const Value& object, const Member<T> (&members)[N], T& into) {
    if (!object.is(object.json.is_object(), "an object")) return;
    for (const auto& [name, json] : object.json.items()) {
        const Value value = object.member(name, json);
        if (const Member<T>* member = find_member<T>(name, members))
            member->read(value, into);
        else
            value.refuse("unknown member{}", suggestion<T>(name, members));
    }
}

template <class F>
void for_each_element(const Value& array, F&& take) {
    if (!array.is(array.json.is_array(), "an array")) return;
    for (std::size_t i = 0; i < array.json.size(); ++i) take(array.element(i));
}

constexpr std::uint64_t kMaxId = std::numeric_limits<std::uint32_t>::max() - 1; // the last one means "none"

constexpr Member<TemplateLimits> kLimits[] = {
    {"in_flight", [](const Value& v, TemplateLimits& l) { v.number_into(l.in_flight, 0, 1'000'000); }},
    {"subscribers", [](const Value& v, TemplateLimits& l) { v.number_into(l.subscribers, 0, 1'000'000'000); }},
    {"calls_a_minute", [](const Value& v, TemplateLimits& l) { v.number_into(l.calls_a_minute, 0, 1'000'000); }},
    {"stream_bytes",
     [](const Value& v, TemplateLimits& l) {
         v.parsed_into(l.stream_bytes, "a size as a text, such as \"4MiB\"", parse_size);
         if (l.stream_bytes == 0) v.refuse("expected a size of at least 1B, found \"{}\"", v.text());
     }},
    {"pool_share", [](const Value& v, TemplateLimits& l) { v.number_into(l.pool_share, 1, 100); }},
};

constexpr Member<TemplateAllow> kAllow[] = {
    {"uids",
     [](const Value& v, TemplateAllow& a) {
         for_each_element(v, [&](const Value& uid) { uid.number_into(a.uids.emplace_back(), 0, kMaxId); });
     }},
    {"groups",
     [](const Value& v, TemplateAllow& a) {
         for_each_element(v, [&](const Value& group) {
             if (!group.json.is_string()) return group.number_into(a.gids.emplace_back(), 0, kMaxId);
             if (group.text().empty()) return group.refuse("expected the name of a group, found \"\"");
             a.groups.push_back(group.text());
         });
     }},
};

constexpr Member<TemplateVariable> kVariable[] = {
    {"enum",
     [](const Value& v, TemplateVariable& variable) {
         for_each_element(v, [&](const Value& text) { text.text_into(variable.allowed.emplace_back()); });
         if (v.json.empty()) v.refuse("expected at least one text, found none");
     }},
    {"min_length",
     [](const Value& v, TemplateVariable& variable) { v.number_into(variable.min_length, 0, 1'000'000); }},
    {"max_length",
     [](const Value& v, TemplateVariable& variable) { v.number_into(variable.max_length, 1, 1'000'000); }},
    {"pattern",
     [](const Value& v, TemplateVariable& variable) {
         if (!v.is_text()) return;
         if (const auto set = set_pattern(variable, v.text()); !set) v.refuse("{}", set.error().message);
     }},
    {"normalize",
     [](const Value& v, TemplateVariable& variable) {
         for_each_element(v, [&](const Value& step) {
             bool TemplateVariable::*chosen = nullptr;
             step.choice_into(chosen, {{"nfc", &TemplateVariable::nfc},
                                       {"lowercase", &TemplateVariable::lowercase},
                                       {"collapse_spaces", &TemplateVariable::collapse_spaces},
                                       {"trim", &TemplateVariable::trim}});
             if (chosen != nullptr) variable.*chosen = true;
         });
     }},
    {"default", [](const Value& v, TemplateVariable& variable) { v.text_into(variable.default_value); }},
};

// A template in the making.
struct Draft {
    Template made;
    Json request = Json::object(); // what `made.request` will say
    std::optional<std::string> model, system_instruction, prompt;
    const Json* schema = nullptr;
    std::string schema_member;
    Schema::Form schema_form{};
};

template <Json::value_t kType>
void forward_as(const Value& value, Draft& draft, const char* name) {
    constexpr bool object = kType == Json::value_t::object;
    if (value.is(value.json.type() == kType, object ? "an object" : "an array")) draft.request[name] = value.json;
}

void take_schema(const Value& value, Draft& draft, const char* member, Schema::Form form) {
    if (draft.schema != nullptr) return value.refuse("{} is there as well; keep one", draft.schema_member);
    if (!value.is(value.json.is_object(), "an object")) return;
    draft.schema = &value.json;
    draft.schema_member = member;
    draft.schema_form = form;
}

void read_variable(const Value& value, TemplateVariable& variable) {
    read_object(value, kVariable, variable);
    if (variable.min_length > variable.max_length)
        value.refuse("min_length {} is above max_length {}", variable.min_length, variable.max_length);
    if (!value.complaint.empty()) return;
    for (std::size_t i = 0; i < variable.allowed.size(); ++i) {
        const std::string& text = variable.allowed[i];
        const Value place = value.member("enum", value.json["enum"]).element(i);
        if (const std::string form = normalised(variable, text); form != text)
            place.refuse("no value can be this, since values are normalised first; write \"{}\"", form);
        else if (const std::string wrong = objection(variable, text); !wrong.empty())
            place.refuse("{}", wrong);
    }
    if (!variable.default_value) return;
    variable.default_value = normalised(variable, *variable.default_value);
    if (const std::string wrong = objection(variable, *variable.default_value); !wrong.empty())
        value.member("default", value.json["default"]).refuse("{}", wrong);
}

constexpr Member<Draft> kTemplate[] = {
    {"description", [](const Value& v, Draft& d) { v.text_into(d.made.description); }},
    {"model",
     [](const Value& v, Draft& d) {
         v.parsed_into(d.model, "the name of a model", [](const std::string& name) { return resolve_model(name); });
     },
     Role::content},
    {"system_instruction", [](const Value& v, Draft& d) { v.text_into(d.system_instruction); }, Role::content},
    {"prompt", [](const Value& v, Draft& d) { v.text_into(d.prompt); }, Role::content},
    {"variables",
     [](const Value& v, Draft& d) {
         if (!v.is(v.json.is_object(), "an object")) return;
         for (const auto& [name, json] : v.json.items()) {
             TemplateVariable& variable = d.made.variables.emplace_back();
             variable.name = name;
             const Value rule = v.member(name, json);
             if (!is_variable_name(name)) rule.refuse("expected a name of 1 to 63 letters, digits and \"_\"");
             read_variable(rule, variable);
         }
         std::sort(d.made.variables.begin(), d.made.variables.end(),
                   [](const TemplateVariable& a, const TemplateVariable& b) { return a.name < b.name; });
     },
     Role::content},
    {"generation_config", [](const Value& v, Draft& d) { forward_as<Json::value_t::object>(v, d, "generationConfig"); },
     Role::content},
    {"safety_settings", [](const Value& v, Draft& d) { forward_as<Json::value_t::array>(v, d, "safetySettings"); },
     Role::content},
    {"tools", [](const Value& v, Draft& d) { forward_as<Json::value_t::array>(v, d, "tools"); }, Role::content},
    {"tool_config", [](const Value& v, Draft& d) { forward_as<Json::value_t::object>(v, d, "toolConfig"); },
     Role::content},
    {"response_schema",
     [](const Value& v, Draft& d) { take_schema(v, d, "response_schema", Schema::Form::response_schema); },
     Role::content},
    {"response_json_schema",
     [](const Value& v, Draft& d) { take_schema(v, d, "response_json_schema", Schema::Form::json_schema); },
     Role::content},
    {"ttl_idle", [](const Value& v, Draft& d) { v.duration_into(d.made.ttl_idle); }},
    {"ttl_window", [](const Value& v, Draft& d) { v.duration_into(d.made.ttl_window); }},
    {"window", [](const Value& v, Draft& d) { v.duration_into(d.made.window); }},
    {"linger", [](const Value& v, Draft& d) { v.duration_into(d.made.linger); }},
    {"snapshots", [](const Value& v, Draft& d) { v.flag_into(d.made.snapshots); }},
    {"snapshot_ttl", [](const Value& v, Draft& d) { v.duration_into(d.made.snapshot_ttl); }},
    {"kv_after", [](const Value& v, Draft& d) { v.duration_into(d.made.kv_after); }},
    {"kv_ttl", [](const Value& v, Draft& d) { v.duration_into(d.made.kv_ttl); }},
    {"on_abandon",
     [](const Value& v, Draft& d) {
         constexpr std::string_view cancel = "cancel:";
         constexpr std::string_view what = "\"finish\" or \"cancel:DURATION\"";
         if (!v.is_text(what) || v.text() == "finish") return;
         if (!v.text().starts_with(cancel)) return v.refuse("expected {}, found \"{}\"", what, v.text());
         v.parsed_into(d.made.cancel_after, what,
                       [&](const std::string& text) { return parse_duration(text.substr(cancel.size())); });
     }},
    {"limits", [](const Value& v, Draft& d) { read_object(v, kLimits, d.made.limits); }},
    {"allow",
     [](const Value& v, Draft& d) {
         TemplateAllow& allow = d.made.allow.emplace();
         read_object(v, kAllow, allow);
         if (allow.uids.empty() && allow.gids.empty() && allow.groups.empty())
             v.refuse("expected at least one of \"uids\" or \"groups\"; without \"allow\" everyone may use the "
                      "template");
     }},
    {"delivery",
     [](const Value& v, Draft& d) {
         v.choice_into(d.made.delivery, {{"validated", TemplateDelivery::validated}, {"live", TemplateDelivery::live}});
     }},
    {"max_individual", [](const Value& v, Draft& d) { v.number_into(d.made.max_individual, 1, 1000); }},
    {"strict_individual", [](const Value& v, Draft& d) { v.flag_into(d.made.strict_individual); }},
    {"realm",
     [](const Value& v, Draft& d) {
         v.choice_into(d.made.realm, {{"everyone", TemplateRealm::everyone}, {"token", TemplateRealm::token}});
     },
     Role::sharing},
    {"explicit_keys", [](const Value& v, Draft& d) { v.flag_into(d.made.explicit_keys); }, Role::sharing},
};

// ---- texts with variables ---------------------------------------------------------------------------------------

// "{{name}}" stands for a variable, "{{{{" for two braces; every other text for itself.
void split_text(const Value& value, const std::string& text, const std::vector<TemplateVariable>& variables,
                std::vector<TemplatePiece>& pieces) {
    std::string literal;
    const auto flush = [&] {
        if (!literal.empty()) pieces.push_back({std::exchange(literal, {}), std::nullopt});
    };
    for (std::size_t at = 0; at < text.size();) {
        const std::string_view rest = std::string_view(text).substr(at);
        if (rest.starts_with("{{{{")) {
            literal += "{{";
            at += 4;
            continue;
        }
        if (!rest.starts_with("{{") || rest.starts_with("{{{")) { // of three, the first stands for itself
            literal += text[at++];
            continue;
        }
        const std::size_t end = rest.find("}}");
        std::string_view name = rest.substr(2, end == std::string_view::npos ? end : end - 2);
        while (name.starts_with(' ')) name.remove_prefix(1);
        while (name.ends_with(' ')) name.remove_suffix(1);
        if (end == std::string_view::npos || !is_variable_name(name))
            return value.refuse(
                "expected a variable's name and \"}}}}\" behind the \"{{{{\" at byte {}; two braces that "
                "stand for themselves are written \"{{{{{{{{\"",
                at);
        const auto found =
            std::find_if(variables.begin(), variables.end(), [&](const auto& v) { return v.name == name; });
        if (found == variables.end()) {
            std::vector<std::string> known;
            for (const TemplateVariable& variable : variables) known.push_back(variable.name);
            return value.refuse("\"variables\" does not declare \"{}\"{}", name, did_you_mean(name, known));
        }
        flush();
        pieces.push_back({{}, static_cast<std::size_t>(found - variables.begin())});
        at += end + 2;
    }
    flush();
}

// ---- the whole --------------------------------------------------------------------------------------------------

std::uint64_t revision_of(const Json& file, const Draft& draft) {
    Json shaping = Json::object();
    for (const auto& [name, json] : file.items()) {
        if (find_member<Draft>(name, kTemplate)->role != Role::policy) shaping[name] = json;
    }
    if (draft.model) shaping["model"] = *draft.model;
    // Canonical requests and templates have no member in common that the former treats in a way of its own, but an
    // empty "tools", which means the same in both.
    const Result<std::string> canonical = canonical_request(shaping.dump());
    Sha256 hash;
    hash.field(kRevisionEncoding);
    hash.field(*canonical);
    const Key digest = hash.finish();
    std::uint64_t revision = 0;
    for (std::size_t i = 0; i < sizeof revision; ++i) revision = revision << 8 | digest[i];
    return revision;
}

void check_default(const Value& file) {
    for (const auto& [name, json] : file.json.items()) {
        const Member<Draft>* member = find_member<Draft>(name, kTemplate);
        if (member != nullptr && member->role == Role::content)
            file.member(name, json)
                .refuse(
                    "the template \"default\" has a policy only, since its requests are whole bodies; move this to a "
                    "template of another name");
    }
}

void check_texts(const Value& file, Draft& draft) {
    Template& made = draft.made;
    if (!draft.model) file.member("model", file.json).refuse("missing; expected a model such as \"gemini-2.5-flash\"");
    if (!draft.prompt) file.member("prompt", file.json).refuse("missing; expected a text");
    for (const auto& [name, text, pieces] :
         {std::tuple("system_instruction", &draft.system_instruction, &made.system_instruction),
          std::tuple("prompt", &draft.prompt, &made.prompt)}) {
        if (!*text) continue;
        const Value value = file.member(name, file.json);
        if ((*text)->empty()) value.refuse("expected a text, found an empty one");
        split_text(value, **text, made.variables, *pieces);
    }
    for (std::size_t i = 0; i < made.variables.size(); ++i) {
        const auto uses = [i](const TemplatePiece& piece) { return piece.variable == i; };
        if (std::none_of(made.prompt.begin(), made.prompt.end(), uses) &&
            std::none_of(made.system_instruction.begin(), made.system_instruction.end(), uses))
            file.member("variables", file.json)
                .member(made.variables[i].name, file.json)
                .refuse("neither \"prompt\" nor \"system_instruction\" uses this variable");
    }
}

// The schema is checked here at the end, and by Gemini, which is told of it in the generation config.
void add_schema(const Value& file, Draft& draft) {
    if (draft.schema == nullptr) return;
    Json& config = draft.request["generationConfig"];
    if (config.is_null()) config = Json::object();
    for (const char* name : {"responseMimeType", "response_mime_type", "responseSchema", "response_schema",
                             "responseJsonSchema", "response_json_schema", "_responseJsonSchema"}) {
        if (config.contains(name))
            file.member("generation_config", config)
                .member(name, config)
                .refuse("\"{}\" sets this; drop it here", draft.schema_member);
    }
    const auto schema = Schema::compile(draft.schema->dump(), draft.schema_form);
    if (!schema) {
        // Its message begins with a pointer of its own, below the member.
        if (file.complaint.empty()) file.complaint = fmt::format("/{}{}", draft.schema_member, schema.error().message);
        return;
    }
    draft.made.schema = *schema;
    config["responseMimeType"] = "application/json";
    config[draft.schema_form == Schema::Form::json_schema ? "responseJsonSchema" : "responseSchema"] = *draft.schema;
}

Result<std::string> read_file(const std::string& path) {
    const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)); // never waits for a pipe's writer
    struct stat status {};
    if (!file || ::fstat(file.get(), &status) != 0) return fail_errno(GCOALESCE_IO, path);
    if (!S_ISREG(status.st_mode)) return fail(GCOALESCE_IO, "{}: expected a plain file", path);
    std::string text(kMaxFileBytes + 1, '\0');
    std::size_t size = 0;
    for (;;) {
        const ssize_t got = ::read(file.get(), text.data() + size, text.size() - size);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return fail_errno(GCOALESCE_IO, path);
        if (got == 0) break;
        size += static_cast<std::size_t>(got);
        if (size > kMaxFileBytes)
            return fail(GCOALESCE_BAD_REQUEST, "{}: has more than 1 MiB; a template may not", path);
    }
    text.resize(size);
    return text;
}

} // namespace

bool is_template_id(std::string_view id) {
    return is_word(id, "-_");
}

Result<Template> parse_template(std::string_view id, std::string_view json_text) {
    if (!is_template_id(id))
        return fail(GCOALESCE_BAD_REQUEST, "expected a template's name of 1 to 63 letters, digits, \"-\" and \"_\"");
    const Result<Json> json = parse_json(json_text);
    if (!json) return tl::unexpected<Error>(json.error());

    std::string complaint;
    const Value file{*json, "", complaint};
    Draft draft;
    draft.made.id = id;
    draft.made.source = json_text;
    if (id == "default") check_default(file);
    read_object(file, kTemplate, draft);
    if (complaint.empty() && id != "default") {
        check_texts(file, draft);
        add_schema(file, draft);
        draft.made.model = draft.model.value_or("");
        draft.made.request = draft.request.dump();
    }
    if (!complaint.empty()) return fail(GCOALESCE_BAD_REQUEST, "{}", complaint);
    draft.made.revision = revision_of(*json, draft);
    return std::move(draft.made);
}

Result<Template> load_template(const std::string& path) {
    const Result<std::string> text = read_file(path);
    if (!text) return tl::unexpected<Error>(text.error());
    const std::filesystem::path file(path);
    const std::string id = file.stem().string();
    if (file.extension() != ".json" || !is_template_id(id))
        return fail(GCOALESCE_BAD_REQUEST,
                    "{}: expected a file <id>.json, whose id has 1 to 63 letters, digits, \"-\" and \"_\"", path);
    Result<Template> made = parse_template(id, *text);
    if (!made) made.error().message = fmt::format("{}: {}", path, made.error().message);
    return made;
}

Result<std::vector<Template>> load_templates(const std::string& directory) {
    std::vector<std::string> paths;
    std::error_code error;
    std::filesystem::directory_iterator entries(directory, error);
    for (; !error && entries != std::filesystem::directory_iterator(); entries.increment(error)) {
        const std::filesystem::path& path = entries->path();
        if (path.extension() == ".json" && !path.filename().string().starts_with('.')) paths.push_back(path.string());
    }
    if (error) return fail(GCOALESCE_IO, "{}: {}", directory, error.message());
    if (paths.size() > kMaxTemplates)
        return fail(GCOALESCE_BAD_REQUEST, "{}: has {} templates; at most {} are allowed", directory, paths.size(),
                    kMaxTemplates);
    std::sort(paths.begin(), paths.end());

    std::vector<Template> templates;
    for (const std::string& path : paths) {
        Result<Template> made = load_template(path);
        if (!made) return tl::unexpected<Error>(made.error());
        templates.push_back(std::move(*made));
    }
    std::sort(templates.begin(), templates.end(), [](const Template& a, const Template& b) { return a.id < b.id; });
    return templates;
}

std::vector<std::string> template_members() {
    std::vector<std::string> names;
    const auto add = [&](const std::string& prefix, const auto& members) {
        for (const auto& member : members) names.push_back(prefix + std::string(member.name));
    };
    add("", kTemplate);
    add("variables.NAME.", kVariable);
    add("limits.", kLimits);
    add("allow.", kAllow);
    return names;
}

} // namespace gcoalesce
