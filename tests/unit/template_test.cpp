#include "templates/template.hpp"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <regex>
#include <set>
#include <sstream>
#include <sys/stat.h>

#include "base/units.hpp"
#include "protocol/key.hpp"
#include "tests/support/fixtures.hpp"

namespace {

using namespace gcoalesce;
using Json = nlohmann::ordered_json;

// A template with every member but "response_json_schema", which excludes "response_schema".
constexpr const char* kFull = R"({
  "description": "what it is for",
  "model": "models/gemini-2.5-flash",
  "system_instruction": "Speak {{tone}}.",
  "prompt": "About {{topic}}: {{ topic }}, {{extra}}",
  "variables": {
    "tone": {"enum": ["plain", "warm"], "normalize": ["lowercase", "trim"], "default": "plain"},
    "topic": {"min_length": 2, "max_length": 20, "pattern": "[a-z ]+"},
    "extra": {"default": ""}
  },
  "generation_config": {"temperature": 0.5, "maxOutputTokens": 100},
  "safety_settings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}],
  "tools": [{"googleSearch": {}}],
  "tool_config": {"functionCallingConfig": {"mode": "NONE"}},
  "response_schema": {"type": "OBJECT", "properties": {"z": {"type": "STRING"}, "a": {"type": "INTEGER"}}},
  "ttl_idle": "1s", "ttl_window": "2s", "window": "3s", "linger": "4s",
  "snapshots": false, "snapshot_ttl": "5min", "kv_after": "6s", "kv_ttl": "7s",
  "on_abandon": "cancel:1500ms",
  "limits": {"in_flight": 1, "subscribers": 2, "calls_a_minute": 3, "stream_bytes": "1MiB", "pool_share": 4},
  "allow": {"uids": [1000], "groups": ["staff", 50]},
  "delivery": "live", "max_individual": 9, "strict_individual": true,
  "realm": "token", "explicit_keys": true
})";

Template parsed(const std::string& text, const std::string& id = "news") {
    Result<Template> made = parse_template(id, text);
    INFO(text);
    if (!made) FAIL(made.error().message);
    return std::move(*made);
}

std::string refusal(const std::string& text, const std::string& id = "news") {
    const Result<Template> made = parse_template(id, text);
    INFO(text);
    REQUIRE_FALSE(made.has_value());
    CHECK(made.error().code == GCOALESCE_BAD_REQUEST);
    return made.error().message;
}

// A template with this one variable, which the prompt is.
Template with_variable(const std::string& rule, const std::string& name = "v") {
    return parsed(R"({"model": "m", "prompt": "{{)" + name + R"(}}", "variables": {")" + name + "\": " + rule + "}}");
}

TemplateValues values(const Template& of, const std::string& json) {
    Result<TemplateValues> read = read_variables(of, json);
    if (!read) FAIL(read.error().message);
    return std::move(*read);
}

std::string objection_to(const Template& of, const std::string& json) {
    const Result<TemplateValues> read = read_variables(of, json);
    INFO(json);
    REQUIRE_FALSE(read.has_value());
    CHECK(read.error().code == GCOALESCE_BAD_REQUEST);
    return read.error().message;
}

std::string prompt_of(const std::string& body) {
    return nlohmann::json::parse(body).at("contents").at(0).at("parts").at(0).at("text");
}

// The same document in another spelling: members in another order, other white space, other escapes, and below
// "generation_config", whose numbers may have any spelling, other numbers of the same value.
std::string respelled(const Json& json, std::mt19937& random, bool numbers = false) {
    const auto one_in = [&](unsigned n) { return random() % n == 0; };
    const auto space = [&] {
        std::string blanks;
        while (one_in(2)) blanks += " \n\t\r"[random() % 4];
        return blanks;
    };
    const auto text = [&](const std::string& of) { // the template below is ASCII without anything to escape
        std::string out = "\"";
        for (const char c : of)
            out += one_in(4) ? fmt::format("\\u{:04x}", static_cast<unsigned>(c)) : std::string(1, c);
        return out + '"';
    };
    std::string out = space();
    if (json.is_object()) {
        std::vector<std::pair<std::string, Json>> members;
        for (const auto& [name, value] : json.items()) members.emplace_back(name, value);
        std::shuffle(members.begin(), members.end(), random);
        out += '{' + space();
        for (std::size_t i = 0; i < members.size(); ++i)
            out += (i > 0 ? "," : "") + space() + text(members[i].first) + space() + ":" +
                   respelled(members[i].second, random, numbers || members[i].first == "generation_config");
        out += '}';
    } else if (json.is_array()) {
        out += '[';
        for (std::size_t i = 0; i < json.size(); ++i) out += (i > 0 ? "," : "") + respelled(json[i], random, numbers);
        out += ']';
    } else if (json.is_string()) {
        out += text(json.get<std::string>());
    } else if (json.is_number() && numbers) {
        const std::vector<std::string> zeros{"", "e0", "E+00", json.is_number_float() ? "0" : ".0"};
        out += json.dump() + zeros[random() % zeros.size()];
    } else {
        out += json.dump();
    }
    return out + space();
}

class TemporaryDirectory {
  public:
    TemporaryDirectory() {
        std::string path = (std::filesystem::temp_directory_path() / "gcoalesce-test-XXXXXX").string();
        REQUIRE(::mkdtemp(path.data()) != nullptr);
        path_ = path;
    }
    ~TemporaryDirectory() { std::filesystem::remove_all(path_); }
    TemporaryDirectory(const TemporaryDirectory&) = delete;
    TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

    std::string write(const std::string& name, const std::string& text) const {
        std::ofstream(path_ / name, std::ios::binary) << text;
        return (path_ / name).string();
    }
    std::string path() const { return path_.string(); }

  private:
    std::filesystem::path path_;
};

// The members that a manual page describes: "*limits.in\_flight* (integer)" at the start of a line.
std::multiset<std::string> members_of_the_manual(const std::string& page) {
    const std::regex heading(R"(\*([A-Za-z._\\]+)\* \(.*\))");
    std::multiset<std::string> members;
    std::string line;
    for (std::istringstream lines(page); std::getline(lines, line);) {
        std::smatch found;
        if (!std::regex_match(line, found, heading)) continue;
        std::string name = found[1];
        std::erase(name, '\\');
        members.insert(name);
    }
    return members;
}

std::string manual() {
    return test::read_file(test::source_dir() / "man/gcoalesce-template.5.scd");
}

} // namespace

// ---- files --------------------------------------------------------------------------------------------------------

TEST_CASE("a template says all that its file says") {
    const Template full = parsed(kFull);
    CHECK(full.id == "news");
    CHECK(full.description == "what it is for");
    CHECK(full.source == kFull);
    CHECK(full.model == "gemini-2.5-flash");
    REQUIRE(full.variables.size() == 3);
    CHECK(full.variables[0].name == "extra");
    CHECK(full.variables[0].default_value == "");
    CHECK(full.variables[1].name == "tone");
    CHECK(full.variables[1].allowed == std::vector<std::string>{"plain", "warm"});
    CHECK(full.variables[2].name == "topic");
    CHECK(full.variables[2].min_length == 2);
    CHECK(full.variables[2].max_length == 20);
    CHECK_FALSE(full.variables[2].default_value);
    CHECK(full.schema.has_value());
    CHECK(full.ttl_idle == kSecond);
    CHECK(full.ttl_window == 2 * kSecond);
    CHECK(full.window == 3 * kSecond);
    CHECK(full.linger == 4 * kSecond);
    CHECK_FALSE(full.snapshots);
    CHECK(full.snapshot_ttl == 300 * kSecond);
    CHECK(full.kv_after == 6 * kSecond);
    CHECK(full.kv_ttl == 7 * kSecond);
    CHECK(full.cancel_after == 1500 * kMillisecond);
    CHECK(full.limits.in_flight == 1);
    CHECK(full.limits.subscribers == 2);
    CHECK(full.limits.calls_a_minute == 3);
    CHECK(full.limits.stream_bytes == 1024U * 1024);
    CHECK(full.limits.pool_share == 4U);
    REQUIRE(full.allow);
    CHECK(full.allow->uids == std::vector<std::uint32_t>{1000});
    CHECK(full.allow->gids == std::vector<std::uint32_t>{50});
    CHECK(full.allow->groups == std::vector<std::string>{"staff"});
    CHECK(full.delivery == TemplateDelivery::live);
    CHECK(full.max_individual == 9);
    CHECK(full.strict_individual);
    CHECK(full.realm == TemplateRealm::token);
    CHECK(full.explicit_keys);
}

TEST_CASE("what a template leaves out has the default of its manual page, or is the broker's to say") {
    const Template least = parsed(R"({"model": "m", "prompt": "p"})");
    for (const auto& time : {least.ttl_idle, least.ttl_window, least.window, least.linger, least.snapshot_ttl,
                             least.kv_after, least.kv_ttl, least.cancel_after})
        CHECK_FALSE(time);
    CHECK(least.snapshots);
    CHECK(least.limits.in_flight == 0);
    CHECK(least.limits.subscribers == 0);
    CHECK(least.limits.calls_a_minute == 0);
    CHECK_FALSE(least.limits.stream_bytes);
    CHECK_FALSE(least.limits.pool_share);
    CHECK_FALSE(least.allow);
    CHECK(least.delivery == TemplateDelivery::validated);
    CHECK(least.max_individual == 8);
    CHECK_FALSE(least.strict_individual);
    CHECK(least.realm == TemplateRealm::everyone);
    CHECK_FALSE(least.explicit_keys);
    CHECK_FALSE(least.schema);
    CHECK(with_variable("{}").variables[0].max_length == 256);
    CHECK_FALSE(parsed(R"({"model": "m", "prompt": "p", "on_abandon": "finish"})").cancel_after);
}

TEST_CASE("default has a policy, and no prompt") {
    const Template made =
        parsed(R"({"description": "d", "ttl_idle": "9s", "realm": "token", "limits": {"in_flight": 7}})", "default");
    CHECK(made.ttl_idle == 9 * kSecond);
    CHECK(made.limits.in_flight == 7);
    CHECK(made.model.empty());
    CHECK(made.prompt.empty());
    const Json full = Json::parse(kFull);
    for (const char* member : {"model", "system_instruction", "prompt", "variables", "generation_config",
                               "safety_settings", "tools", "tool_config", "response_schema"}) {
        const Json file{{member, full.at(member)}};
        CHECK(refusal(file.dump(), "default")
                  .starts_with(fmt::format("/{}: the template \"default\" has a policy only", member)));
    }
}

TEST_CASE("T98: a template that is wrong is refused with the place and what was expected there") {
    const auto check = [](const std::string& members, const std::string& message) {
        CHECK(refusal(R"({"model": "m", "prompt": "p")" + (members.empty() ? "" : ", " + members) + "}") == message);
    };
    // Unknown members, at every level.
    check(R"("linger_": "1s")", R"(/linger_: unknown member; did you mean "linger"?)");
    check(R"("frobnicate": 1)", "/frobnicate: unknown member");
    check(R"("limits": {"inflight": 1})", R"(/limits/inflight: unknown member; did you mean "in_flight"?)");
    check(R"("allow": {"uid": [1]})", R"(/allow/uid: unknown member; did you mean "uids"?)");
    check(R"("variables": {"v": {"max_lenght": 1}})",
          R"(/variables/v/max_lenght: unknown member; did you mean "max_length"?)");
    check(R"("a/b~c": 1)", "/a~1b~0c: unknown member");
    // Kinds of values.
    check(R"("description": 5)", "/description: expected a text, found 5");
    check(R"("description": null)", "/description: expected a text, found null");
    check(R"("variables": [])", "/variables: expected an object, found an array");
    check(R"("variables": {"v": "x"})", "/variables/v: expected an object, found a text");
    check(R"("generation_config": [])", "/generation_config: expected an object, found an array");
    check(R"("safety_settings": {})", "/safety_settings: expected an array, found an object");
    check(R"("tools": {})", "/tools: expected an array, found an object");
    check(R"("tool_config": 1)", "/tool_config: expected an object, found 1");
    check(R"("response_schema": true)", "/response_schema: expected an object, found true");
    check(R"("limits": 1)", "/limits: expected an object, found 1");
    check(R"("snapshots": "off")", "/snapshots: expected true or false, found a text");
    check(R"("explicit_keys": 1)", "/explicit_keys: expected true or false, found 1");
    // Durations, sizes, numbers, words.
    check(R"("ttl_idle": 5)", R"(/ttl_idle: expected a duration as a text, such as "5s", found 5)");
    check(R"("kv_ttl": "5")", R"(/kv_ttl: expected a duration such as 200ms, 6s, 10min or 2h, found "5")");
    check(R"("on_abandon": "cancel")", R"(/on_abandon: expected "finish" or "cancel:DURATION", found "cancel")");
    check(R"("on_abandon": "cancel:soon")",
          R"(/on_abandon: expected a duration such as 200ms, 6s, 10min or 2h, found "soon")");
    check(R"("on_abandon": 1)", R"(/on_abandon: expected "finish" or "cancel:DURATION", found 1)");
    check(R"("limits": {"stream_bytes": 4})",
          R"(/limits/stream_bytes: expected a size as a text, such as "4MiB", found 4)");
    check(R"("limits": {"stream_bytes": "0"})", R"(/limits/stream_bytes: expected a size of at least 1B, found "0")");
    check(R"("limits": {"stream_bytes": "4MB"})",
          R"(/limits/stream_bytes: expected a size such as 4096, 512KiB or 48MiB, found "4MB")");
    check(R"("limits": {"in_flight": -1})", "/limits/in_flight: expected a whole number from 0 to 1000000, found -1");
    check(R"("limits": {"in_flight": 1.5})", "/limits/in_flight: expected a whole number from 0 to 1000000, found 1.5");
    check(R"("limits": {"pool_share": 0})", "/limits/pool_share: expected a whole number from 1 to 100, found 0");
    check(R"("limits": {"pool_share": 101})", "/limits/pool_share: expected a whole number from 1 to 100, found 101");
    check(R"("max_individual": 1001)", "/max_individual: expected a whole number from 1 to 1000, found 1001");
    check(R"("max_individual": 0)", "/max_individual: expected a whole number from 1 to 1000, found 0");
    check(R"("delivery": "valid")", R"(/delivery: expected "validated" or "live", found "valid")");
    check(R"("realm": "tokens")", R"(/realm: expected "everyone" or "token", found "tokens"; did you mean "token"?)");
    check(R"("realm": [])", R"(/realm: expected "everyone" or "token", found an array)");
    // Who may use it.
    check(R"("allow": {})",
          R"(/allow: expected at least one of "uids" or "groups"; without "allow" everyone may use the template)");
    check(R"("allow": {"uids": [1, "root"]})",
          "/allow/uids/1: expected a whole number from 0 to 4294967294, found a text");
    check(R"("allow": {"groups": [""]})", R"(/allow/groups/0: expected the name of a group, found "")");
    check(R"("allow": {"groups": "staff"})", "/allow/groups: expected an array, found a text");
    // Schemas.
    check(R"("response_schema": {"type": "STRIN"})",
          R"(/response_schema/type: unknown type "STRIN"; did you mean "string"?)");
    check(R"("response_json_schema": {"properties": {"a": {"typ": "string"}}})",
          R"(/response_json_schema/properties/a/typ: unknown keyword "typ"; did you mean "type"?)");
    check(R"("response_schema": {}, "response_json_schema": {})",
          "/response_json_schema: response_schema is there as well; keep one");
    for (const std::string name : {"responseMimeType", "response_mime_type", "responseSchema", "response_json_schema"})
        check(R"("response_schema": {}, "generation_config": {")" + name + R"(": "application/json"})",
              "/generation_config/" + name + R"(: "response_schema" sets this; drop it here)");
}

TEST_CASE("model and prompt are needed, and must be usable") {
    CHECK(refusal("{}") == R"(/model: missing; expected a model such as "gemini-2.5-flash")");
    CHECK(refusal(R"({"model": "m"})") == "/prompt: missing; expected a text");
    CHECK(refusal(R"({"model": "m", "prompt": ""})") == "/prompt: expected a text, found an empty one");
    CHECK(refusal(R"({"model": "../m", "prompt": "p"})").starts_with("/model: the model's name has an empty part"));
    CHECK(refusal("[1]") == "expected an object, found an array");
}

TEST_CASE("what is no strict JSON is refused with its place") {
    CHECK(refusal("{\n  \"model\": \"m\", // a comment\n}") ==
          "line 2, column 17: expected JSON in UTF-8, without comments");
    CHECK(refusal("") == "line 1, column 1: expected JSON in UTF-8, without comments");
    CHECK(refusal("\xEF\xBB\xBF{}") == "line 1, column 1: expected JSON in UTF-8, without comments");
    CHECK(refusal(std::string("{}\0x", 4)) == "line 1, column 3: expected JSON in UTF-8, without comments");
    CHECK(refusal("{\"description\": \"\xFF\"}").starts_with("line 1, column 1"));
    CHECK(refusal(R"({"model": "m", "model": "n"})") == "/model: a duplicate member");
    CHECK(refusal(R"({"limits": {"in_flight": 1, "subscribers": 2, "in_flight": 3}})") ==
          "/limits/in_flight: a duplicate member");
    CHECK(refusal(R"({"tools": [1, {"a": [{}, {"b": 1, "b": 2}]}]})") == "/tools/1/a/1/b: a duplicate member");
    CHECK(refusal(R"({"tools": [1, 1e999]})") == "/tools/1: a number beyond the range of double");
    const std::string deep = R"({"tools": )" + std::string(100, '[') + std::string(100, ']') + "}";
    CHECK(refusal(deep).ends_with("/0: more than 100 levels"));
    CHECK(refusal(std::string(1'000'000, '[')).starts_with("line 1"));
}

TEST_CASE("variables are declared and used, and their rules make sense") {
    const auto check = [](const std::string& prompt, const std::string& variables, const std::string& message) {
        CHECK(refusal(Json{{"model", "m"}, {"prompt", prompt}, {"variables", Json::parse(variables)}}.dump()) ==
              message);
    };
    check("{{topik}} {{topic}}", R"({"topic": {}})",
          R"(/prompt: "variables" does not declare "topik"; did you mean "topic"?)");
    check("p", R"({"topic": {}})", R"(/variables/topic: neither "prompt" nor "system_instruction" uses this variable)");
    check(
        "{{a b}}", "{}",
        R"(/prompt: expected a variable's name and "}}" behind the "{{" at byte 0; two braces that stand for themselves are written "{{{{")");
    check(
        "is {{", "{}",
        R"(/prompt: expected a variable's name and "}}" behind the "{{" at byte 3; two braces that stand for themselves are written "{{{{")");
    check("{{a-b}}", R"({"a-b": {}})", R"(/variables/a-b: expected a name of 1 to 63 letters, digits and "_")");
    check("{{v}}", R"({"v": {"min_length": 5, "max_length": 4}})", "/variables/v: min_length 5 is above max_length 4");
    check("{{v}}", R"({"v": {"max_length": 0}})",
          "/variables/v/max_length: expected a whole number from 1 to 1000000, found 0");
    check("{{v}}", R"({"v": {"pattern": "("}})",
          "/variables/v/pattern: expected a regular expression of RE2: missing ): (");
    check("{{v}}", R"({"v": {"enum": []}})", "/variables/v/enum: expected at least one text, found none");
    check("{{v}}", R"({"v": {"enum": ["a", 1]}})", "/variables/v/enum/1: expected a text, found 1");
    check("{{v}}", R"({"v": {"enum": ["a", "B"], "normalize": ["lowercase"]}})",
          R"(/variables/v/enum/1: no value can be this, since values are normalised first; write "b")");
    check("{{v}}", R"({"v": {"enum": ["abc"], "max_length": 2}})",
          "/variables/v/enum/0: has 3 characters; at most 2 are allowed");
    check("{{v}}", R"({"v": {"normalize": "trim"}})", "/variables/v/normalize: expected an array, found a text");
    check(
        "{{v}}", R"({"v": {"normalize": ["trin"]}})",
        R"(/variables/v/normalize/0: expected "nfc" or "lowercase" or "collapse_spaces" or "trim", found "trin"; did you mean "trim"?)");
    check("{{v}}", R"({"v": {"default": "c", "enum": ["a", "b"]}})",
          R"(/variables/v/default: is none of the allowed values: "a", "b")");
    check("{{v}}", R"({"v": {"default": 5}})", "/variables/v/default: expected a text, found 5");
    CHECK(refusal(R"({"model": "m", "prompt": "p", "system_instruction": "{{x}}"})") ==
          R"(/system_instruction: "variables" does not declare "x")");
}

TEST_CASE("a template's id is letters, digits, - and _, 1 to 63 of them") {
    for (const std::string& id : {std::string("a"), std::string("News-2_x"), std::string(63, 'x')})
        CHECK(is_template_id(id));
    for (const std::string& id :
         {std::string(), std::string("a b"), std::string("a.b"), std::string("\xC3\xA4"), std::string(64, 'x')}) {
        CHECK_FALSE(is_template_id(id));
        CHECK(refusal(R"({"model": "m", "prompt": "p"})", id).starts_with("expected a template's name"));
    }
}

// ---- directories --------------------------------------------------------------------------------------------------

TEST_CASE("a directory's templates come by id, and nothing but *.json is one") {
    const TemporaryDirectory directory;
    CHECK(load_templates(directory.path())->empty());
    for (const char* id : {"b", "a-b", "a", "B", "default"})
        directory.write(std::string(id) + ".json",
                        std::string(id) == "default" ? "{}" : R"({"model": "m", "prompt": "p"})");
    directory.write("README", "no template");
    directory.write("c.json.bak", "no template");
    directory.write(".hidden.json", "no template");
    const auto loaded = load_templates(directory.path());
    REQUIRE(loaded.has_value());
    std::vector<std::string> ids;
    for (const Template& one : *loaded) ids.push_back(one.id);
    CHECK(ids == std::vector<std::string>{"B", "a", "a-b", "b", "default"});
}

TEST_CASE("one bad file is the whole directory's error, which begins with its path") {
    const TemporaryDirectory directory;
    directory.write("a.json", R"({"model": "m", "prompt": "p"})");
    const auto error = [&] {
        const auto loaded = load_templates(directory.path());
        REQUIRE_FALSE(loaded.has_value());
        return loaded.error();
    };
    const auto check = [&](const std::string& name, Code code, const std::string& message) {
        CHECK(error().code == code);
        CHECK(error().message == directory.path() + "/" + name + ": " + message);
        std::filesystem::remove_all(directory.path() + "/" + name);
        CHECK(load_templates(directory.path()).has_value());
    };
    directory.write("b.json", R"({"modle": "m"})");
    check("b.json", GCOALESCE_BAD_REQUEST, R"(/modle: unknown member; did you mean "model"?)");
    directory.write("b c.json", "{}");
    check("b c.json", GCOALESCE_BAD_REQUEST,
          R"(expected a file <id>.json, whose id has 1 to 63 letters, digits, "-" and "_")");
    std::filesystem::create_directory(directory.path() + "/d.json");
    check("d.json", GCOALESCE_IO, "expected a plain file");
    REQUIRE(::mkfifo((directory.path() + "/f.json").c_str(), 0600) == 0);
    check("f.json", GCOALESCE_IO, "expected a plain file");
    std::filesystem::create_symlink("nowhere", directory.path() + "/l.json");
    check("l.json", GCOALESCE_IO, "No such file or directory");
    const std::string open = R"({"model": "m", "prompt": ")";
    directory.write("big.json", open + std::string(1024 * 1024 - open.size() - 1, 'x') + "\"}"); // one byte too many
    check("big.json", GCOALESCE_BAD_REQUEST, "has more than 1 MiB; a template may not");
    directory.write("big.json", open + std::string(1024 * 1024 - open.size() - 2, 'x') + "\"}");
    CHECK(load_templates(directory.path())->size() == 2);

    const auto absent = load_templates(directory.path() + "/absent");
    REQUIRE_FALSE(absent.has_value());
    CHECK(absent.error().code == GCOALESCE_IO);
    CHECK(absent.error().message == directory.path() + "/absent: No such file or directory");
}

TEST_CASE("a directory may have 255 templates, through links as well") {
    const TemporaryDirectory directory;
    const std::string first = directory.write("t0.json", R"({"model": "m", "prompt": "p"})");
    for (int i = 1; i < 255; ++i)
        std::filesystem::create_symlink(first, directory.path() + fmt::format("/t{}.json", i));
    CHECK(load_templates(directory.path())->size() == 255);
    directory.write("t255.json", "{}");
    CHECK(load_templates(directory.path()).error().message ==
          directory.path() + ": has 256 templates; at most 255 are allowed");
}

// ---- revisions ----------------------------------------------------------------------------------------------------

TEST_CASE("order, white space, escapes and spellings of numbers do not change a revision") {
    Json full = Json::parse(kFull);
    full["generation_config"]["stopSequences"] = {"end"};
    full["generation_config"]["seed"] = -1234567;
    const std::uint64_t revision = parsed(full.dump()).revision;
    std::mt19937 random(20260118);
    std::set<std::string> spellings;
    for (int i = 0; i < 500; ++i) {
        const std::string text = respelled(full, random);
        spellings.insert(text);
        REQUIRE(parsed(text).revision == revision);
    }
    CHECK(spellings.size() == 500);
    full["model"] = "gemini-2.5-flash"; // "models/" apart, the same model
    CHECK(parsed(full.dump()).revision == revision);
    CHECK(parsed(full.dump(), "other").revision == revision);
}

TEST_CASE("a revision is the same in every process and release") {
    CHECK(parsed(R"({"model": "m", "prompt": "p"})").revision ==
          parsed(R"({"prompt": "p", "model": "m"})", "x").revision);
    CHECK(fmt::format("{:016x}", parsed(R"({"model": "m", "prompt": "p"})").revision) == "4a14ef0609b1427e");
    CHECK(parsed("{}", "default").revision == parsed(R"({"ttl_idle": "9s"})", "default").revision);
}

TEST_CASE("what shapes the answer or the key changes the revision, and the rest of the policy does not") {
    struct Change {
        std::string pointer, value;
        bool shapes;
    };
    const std::vector<Change> changes{
        {"/description", R"("else")", false},
        {"/model", R"("gemini-2.5-pro")", true},
        {"/system_instruction", R"("Speak {{tone}}!")", true},
        {"/prompt", R"("About {{topic}}, {{extra}}")", true},
        {"/variables/tone/enum", R"(["plain"])", true},
        {"/variables/tone/normalize", R"(["trim"])", true},
        {"/variables/tone/default", R"("warm")", true},
        {"/variables/topic/min_length", "1", true},
        {"/variables/topic/max_length", "21", true},
        {"/variables/topic/pattern", R"("[a-z]+")", true},
        {"/generation_config", R"({"temperature": 0.5})", true},
        {"/generation_config/temperature", "0.50001", true},
        {"/generation_config/maxOutputTokens", "101", true},
        {"/generation_config/topP", "0.9", true},
        {"/generation_config/topK", "40", true},
        {"/generation_config/candidateCount", "1", true},
        {"/generation_config/stopSequences", R"(["x"])", true},
        {"/generation_config/seed", "1", true},
        {"/generation_config/presencePenalty", "0.1", true},
        {"/generation_config/frequencyPenalty", "0.1", true},
        {"/generation_config/responseModalities", R"(["TEXT"])", true},
        {"/generation_config/responseLogprobs", "true", true},
        {"/generation_config/logprobs", "2", true},
        {"/generation_config/thinkingConfig", R"({"thinkingBudget": 0})", true},
        {"/generation_config/speechConfig", R"({"languageCode": "de-DE"})", true},
        {"/generation_config/mediaResolution", R"("MEDIA_RESOLUTION_LOW")", true},
        {"/safety_settings", "[]", true},
        {"/tools", R"([{"codeExecution": {}}])", true},
        {"/tool_config", "{}", true},
        {"/response_schema/properties/a/type", R"("NUMBER")", true},
        {"/response_schema", R"({"type": "OBJECT"})", true},
        {"/response_json_schema", R"({"type": "object"})", true},
        {"/ttl_idle", R"("11s")", false},
        {"/ttl_window", R"("11s")", false},
        {"/window", R"("11s")", false},
        {"/linger", R"("11s")", false},
        {"/snapshots", "true", false},
        {"/snapshot_ttl", R"("11s")", false},
        {"/kv_after", R"("11s")", false},
        {"/kv_ttl", R"("11s")", false},
        {"/on_abandon", R"("finish")", false},
        {"/limits", "{}", false},
        {"/limits/in_flight", "11", false},
        {"/limits/subscribers", "11", false},
        {"/limits/calls_a_minute", "11", false},
        {"/limits/stream_bytes", R"("11KiB")", false},
        {"/limits/pool_share", "11", false},
        {"/allow", R"({"uids": [5]})", false},
        {"/allow/uids", "[11]", false},
        {"/allow/groups", "[11]", false},
        {"/delivery", R"("validated")", false},
        {"/max_individual", "11", false},
        {"/strict_individual", "false", false},
        {"/realm", R"("everyone")", true},
        {"/explicit_keys", "false", true},
        {"/variables", R"({"tone": {}, "topic": {}, "extra": {}})", true},
    };
    const std::uint64_t revision = parsed(kFull).revision;
    std::set<std::uint64_t> revisions{revision};
    std::set<std::string> changed;
    for (const Change& change : changes) {
        Json file = Json::parse(kFull);
        if (change.pointer == "/response_json_schema") file.erase("response_schema");
        const Json::json_pointer place(change.pointer);
        const bool there = file.contains(place) && file.at(place) == Json::parse(change.value);
        INFO(change.pointer);
        REQUIRE_FALSE(there);
        file[place] = Json::parse(change.value);
        const std::uint64_t now = parsed(file.dump()).revision;
        if (change.shapes)
            CHECK(revisions.insert(now).second);
        else
            CHECK(now == revision);
        changed.insert(change.pointer);
    }
    // No member was forgotten.
    for (const std::string& member : template_members()) {
        std::string pointer = "/" + member;
        std::replace(pointer.begin(), pointer.end(), '.', '/');
        const auto is_pointer = [&](const std::string& p) {
            return std::regex_replace(p, std::regex("^/variables/[a-z]+/"), "/variables/NAME/") == pointer;
        };
        INFO(member);
        CHECK(std::any_of(changed.begin(), changed.end(), is_pointer));
    }
}

// ---- values and requests ------------------------------------------------------------------------------------------

TEST_CASE("the request has the texts with their values, and the rest of the template as it was") {
    const Template full = parsed(kFull);
    const TemplateValues given = values(full, R"({"topic": "the sea", "tone": " WARM "})");
    CHECK(given.canonical == R"({"extra":"","tone":"warm","topic":"the sea"})");
    const std::string body = render(full, given);
    const std::string expected = R"({
        "contents": [{"role": "user", "parts": [{"text": "About the sea: the sea, "}]}],
        "systemInstruction": {"parts": [{"text": "Speak warm."}]},
        "generationConfig": {"temperature": 0.5, "maxOutputTokens": 100, "responseMimeType": "application/json",
            "responseSchema": {"type": "OBJECT", "properties": {"z": {"type": "STRING"}, "a": {"type": "INTEGER"}}}},
        "safetySettings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}],
        "tools": [{"googleSearch": {}}],
        "toolConfig": {"functionCallingConfig": {"mode": "NONE"}}
    })";
    CHECK(nlohmann::json::parse(body) == nlohmann::json::parse(expected));
    CHECK(body.find(R"({"z":{"type":"STRING"},"a":)") != std::string::npos); // in the file's order

    const Template least = parsed(R"({"model": "m", "prompt": "p", "response_json_schema": {"type": "string"}})");
    CHECK(nlohmann::json::parse(render(least, values(least, ""))) == nlohmann::json::parse(R"({
        "contents": [{"role": "user", "parts": [{"text": "p"}]}],
        "generationConfig": {"responseMimeType": "application/json", "responseJsonSchema": {"type": "string"}}})"));
}

TEST_CASE("a value is put in once, and stays a value whatever it has in it") {
    const Template made = parsed(R"({"model": "m", "prompt": "<{{a}}|{{b}}>", "system_instruction": "{{a}}",
        "variables": {"a": {}, "b": {"default": "secret"}}})");
    for (const std::string& hostile :
         {std::string("{{b}}"), std::string("{{a}}{{{{b}}"),
          std::string("\"}]}],\"tools\":[{\"googleSearch\":{}}],\"x\":[{\"y\":\""), std::string("\\u0022}"),
          std::string("line\nbreak\t\"quoted\"\\"), std::string("nul\0nul", 7),
          std::string("\xE2\x80\xA8\xF0\x9F\x98\x80"), std::string("</s>\r\n\r\ndata: {}")}) {
        const std::string body = render(made, values(made, nlohmann::json{{"a", hostile}}.dump()));
        const auto request = nlohmann::json::parse(body);
        CHECK(request.size() == 2);
        CHECK(prompt_of(body) == "<" + hostile + "|secret>");
        CHECK(request.at("systemInstruction").at("parts").at(0).at("text") == hostile);
    }
}

TEST_CASE("braces that stand for themselves") {
    const auto shows = [](const std::string& prompt, const std::string& text) {
        const Template made =
            parsed(Json{{"model", "m"}, {"prompt", prompt + "{{v}}"}, {"variables", {{"v", Json::object()}}}}.dump());
        CHECK(prompt_of(render(made, values(made, R"({"v": "V"})"))) == text + "V");
    };
    shows("{{v}}", "V");
    shows("{{ v  }}", "V");
    shows("{{{{v}}", "{{v}}");
    shows("{{{{{{v}}", "{{V");
    shows("{{{v}}}", "{V}");
    shows("{\"a\": {{v}}}", "{\"a\": V}");
    shows("{ } }} { {", "{ } }} { {");
    shows("{{v}}{{v}}", "VV");
}

TEST_CASE("values that a rule forbids are refused by name, and never quoted") {
    const std::string secret = "hunter2";
    const auto check = [&](const Template& of, const std::string& json, const std::string& message) {
        CHECK(objection_to(of, json) == message);
        CHECK(message.find(secret) == std::string::npos);
    };
    const Template any = with_variable("{}", "topic");
    check(any, "{}", R"(the variable "topic" is missing, which the template "news" needs)");
    check(any, "", R"(the variable "topic" is missing, which the template "news" needs)");
    check(any, R"({"topik": "hunter2"})",
          R"(the variable "topik" is unknown to the template "news"; did you mean "topic"?)");
    check(any, R"({"topic": "x", "other": "hunter2"})", R"(the variable "other" is unknown to the template "news")");
    check(any, R"({"topic": "x", "hunter2 is my word": 1})",
          R"(a variable of another sort of name is unknown to the template "news")");
    check(any, R"({"topic": null})", R"(the variable "topic" is null; expected a text, a number, true or false)");
    check(any, R"({"topic": ["hunter2"]})",
          R"(the variable "topic" is an array; expected a text, a number, true or false)");
    check(any, R"({"topic": {"a": "hunter2"}})",
          R"(the variable "topic" is an object; expected a text, a number, true or false)");
    check(any, R"({"topic": "hunter2", "topic": "x"})", R"(the variable "topic" is given twice)");
    check(any, R"(["hunter2"])", "the variables are an array; expected an object");
    check(any, R"("hunter2")", "the variables are a single value; expected an object");
    check(any, "null", "the variables are null; expected an object");
    check(any, R"({"topic": hunter2})", "the variables are no valid JSON in UTF-8 at byte 11");
    check(any, R"({"topic": 1e999})", "the variables have a number beyond the range of double at byte 15");
    check(any, "{\"topic\": \"hunter2\xFF\"}", "the variables are no valid JSON in UTF-8 at byte 19");
    check(any, std::string("{\"topic\": \"hunter2\"}\0{}", 22), "the variables are no valid JSON in UTF-8 at byte 20");
    check(any, "\xEF\xBB\xBF{}", "the variables are no valid JSON in UTF-8 at byte 0");
    check(any, R"({"topic": ")" + std::string(257, 'x') + "\"}",
          R"(the variable "topic" has 257 characters; at most 256 are allowed)");
    check(with_variable(R"({"min_length": 3})"), R"({"v": "\u00e4\u00e4"})",
          R"(the variable "v" has 2 characters; at least 3 are needed)");
    check(with_variable(R"({"enum": ["de", "en"]})"), R"({"v": "hunter2"})",
          R"(the variable "v" is none of the allowed values: "de", "en")");
    check(with_variable(R"({"pattern": "[0-9]+"})"), R"({"v": "12hunter2"})",
          R"(the variable "v" does not match the pattern [0-9]+)");
    check(parsed(R"({"model": "m", "prompt": "p"})"), R"({"v": 1})",
          R"(the variable "v" is unknown to the template "news")");
    check(parsed("{}", "default"), R"({"v": 1})", R"(the variable "v" is unknown to the template "default")");

    Json many;
    for (int i = 0; i < 100; ++i) many.push_back(fmt::format("value-{:03}", i));
    const std::string listed = objection_to(with_variable(Json{{"enum", many}}.dump()), R"({"v": "x"})");
    CHECK(listed.starts_with(R"(the variable "v" is none of the allowed values: "value-000", "value-001")"));
    CHECK(listed.ends_with(" more"));
    CHECK(listed.size() < 300);
}

TEST_CASE("lengths count code points, and a pattern must match the whole value") {
    const Template two = with_variable(R"({"max_length": 2})");
    CHECK(values(two, R"({"v": "\u00e4\ud83d\ude00"})").values[0] == "\xC3\xA4\xF0\x9F\x98\x80");
    CHECK(objection_to(two, R"({"v": "abc"})") == R"(the variable "v" has 3 characters; at most 2 are allowed)");
    const Template digits = with_variable(R"({"pattern": "a|[0-9]+"})");
    CHECK(values(digits, R"({"v": "123"})").values[0] == "123");
    for (const char* bad : {R"({"v": "x1"})", R"({"v": "1x"})", R"({"v": "1\n"})", R"({"v": ""})", R"({"v": "ab"})"})
        CHECK(objection_to(digits, bad).ends_with("does not match the pattern a|[0-9]+"));
}

TEST_CASE("numbers and booleans count as their text") {
    const Template any = with_variable("{}");
    const auto text = [&](const std::string& json) { return values(any, R"({"v": )" + json + "}").canonical; };
    CHECK(text("5") == text(R"("5")"));
    CHECK(text("-5") == R"({"v":"-5"})");
    CHECK(text("18446744073709551615") == R"({"v":"18446744073709551615"})");
    CHECK(text("123456789012345678901234567890") == R"({"v":"123456789012345678901234567890"})");
    CHECK(text("1.50") == R"({"v":"1.50"})");
    CHECK(text("1E+2") == R"({"v":"1E+2"})");
    CHECK(text("true") == text(R"("true")"));
    CHECK(text("false") == R"({"v":"false"})");
}

TEST_CASE("values are normalised before they are judged, and what differs there only is one") {
    const auto becomes = [](const std::string& steps, const std::string& value, const std::string& form) {
        const Template made = with_variable(R"({"normalize": )" + steps + "}");
        const std::string once = values(made, Json{{"v", value}}.dump()).values[0];
        CHECK(once == form);
        CHECK(values(made, Json{{"v", once}}.dump()).values[0] == once);
    };
    becomes("[]", "  A\n", "  A\n");
    becomes(R"(["trim"])", " \t\n a  b \u00A0\u3000", "a  b");
    becomes(R"(["trim"])", " \u2003 ", "");
    becomes(R"(["collapse_spaces"])", " \t a \u2028\u00A0 b\n", " a b ");
    becomes(R"(["collapse_spaces", "trim"])", " \t a \u2028\u00A0 b\n", "a b");
    becomes(R"(["collapse_spaces"])", "zero\u200Bwidth", "zero\u200Bwidth"); // no White_Space
    becomes(R"(["lowercase"])", "ÄÖÜ ΣΑΣ ЖИ ẞ", "äöü σασ жи ß");
    becomes(R"(["lowercase"])", "\u0130", "i"); // one code point for one
    becomes(R"(["nfc"])", "a\u0308 \u212B \uFB01", "\u00E4 \u00C5 \uFB01");
    becomes(R"(["nfc"])", "J\u030C", "J\u030C");
    becomes(R"(["lowercase", "nfc"])", "J\u030C", "\u01F0");
    becomes(R"(["nfc"])", std::string("a\0b", 3), std::string("a\0b", 3));

    const Template made =
        with_variable(R"({"normalize": ["trim", "lowercase", "nfc"], "enum": ["m\u00e4rz"], "max_length": 4})");
    const std::string canonical = values(made, R"({"v": "m\u00e4rz"})").canonical;
    for (const char* same : {R"({"v": "MA\u0308RZ"})", R"({"v": "   M\u00c4RZ   "})", R"({ "v" : "m\u0061\u0308rz" })"})
        CHECK(values(made, same).canonical == canonical);
}

TEST_CASE("equal variables have one canonical form, others another") {
    const Template made = parsed(R"({"model": "m", "prompt": "{{a}}{{b}}{{c}}",
        "variables": {"b": {}, "a": {}, "c": {"default": "x"}}})");
    const std::string form = values(made, R"({"b": "2", "a": "1"})").canonical;
    CHECK(form == R"({"a":"1","b":"2","c":"x"})");
    CHECK(values(made, R"({ "c":"x","a" : 1, "\u0062":"2" })").canonical == form);
    CHECK(values(made, R"({"a": "1", "b": "2", "c": "y"})").canonical != form);
    CHECK(values(made, R"({"a": "12", "b": ""})").canonical != values(made, R"({"a": "1", "b": "2"})").canonical);
    CHECK(values(made, R"({"a": "\",\"b\":\"", "b": ""})").canonical !=
          values(made, R"({"a": "", "b": ""})").canonical);
}

// ---- the manual ---------------------------------------------------------------------------------------------------

TEST_CASE("the manual page describes every member of a template, once, and no other") {
    const std::vector<std::string> members = template_members();
    CHECK(members_of_the_manual(manual()) == std::multiset<std::string>(members.begin(), members.end()));
}

TEST_CASE("the manual page's example is a template, and does what the page says of it") {
    const std::string page = manual();
    const std::size_t begin = page.find("```\n{") + 4;
    const Template made = parsed(page.substr(begin, page.find("```", begin) - begin), "match-report");
    const std::string canonical = values(made, R"({"match": 20260118, "language": "EN ", "words": 200})").canonical;
    CHECK(values(made, R"({"match": "20260118", "language": "en"})").canonical == canonical);
    CHECK(values(made, R"({"match": "20260118"})").canonical == canonical);
    CHECK(objection_to(made, R"({"match": "1 in verse"})").find("pattern") != std::string::npos);
    CHECK(prompt_of(render(made, values(made, R"({"match": "20260118"})"))) ==
          "Report on match 20260118 in at most 200 words.");
    REQUIRE(made.schema);
    CHECK(made.schema->check(R"({"text": "no headline"})"));
    CHECK_FALSE(made.schema->check(R"({"headline": "3:2", "text": "What a match."})"));
}

TEST_CASE("A value with more combining marks in a row than any language has is not composed, whatever its length") {
    TemplateVariable variable;
    variable.nfc = true;
    CHECK(normalised(variable, "e\u0301") == "\u00e9");
    std::string marks = "a";
    for (int i = 0; i < 200'000; ++i) marks += i % 2 == 0 ? "\u0301" : "\u0316";
    CHECK(normalised(variable, marks) == marks); // the watchdog would see it sorted
    CHECK(objection(variable, marks) == "has 200001 characters; at most 256 are allowed");
}
