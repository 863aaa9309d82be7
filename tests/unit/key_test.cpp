#include "protocol/key.hpp"

#include <algorithm>
#include <catch2/catch.hpp>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <thread>

#include "base/canonical_json.hpp"

namespace {

using gcoalesce::compute_key;
using gcoalesce::is_api_key;
using gcoalesce::KeyParts;
using gcoalesce::Method;
using gcoalesce::realm_of_api_key;
using gcoalesce::resolve_model;

KeyParts sample() {
    KeyParts parts;
    parts.model = "gemini-2.5-flash";
    parts.asked = R"({"contents":[{"parts":[{"text":"hi"}],"role":"user"}]})";
    return parts;
}

TEST_CASE("The key of a given request never changes") {
    // Snapshots and other hosts know requests by it: a change needs a new encoding name in key.cpp.
    CHECK(gcoalesce::to_hex(compute_key(sample())) ==
          "0bab434eb1964cc850a2c3984cafb443a48968af26ac195b1fd1b73a1fa44abc");
}

TEST_CASE("T21: each part of a request changes its key") {
    std::vector<KeyParts> all(9, sample());
    all[1].realm = "team-a";
    all[2].template_id = "headline";
    all[3].template_revision = 2;
    all[4].model = "gemini-2.5-pro";
    all[5].method = Method::unary;
    all[6].asked = R"({"contents":[{"parts":[{"text":"hi!"}],"role":"user"}]})";
    all[7].asked = "";
    all[8].realm = "default"; // the same words in another part
    all[8].template_id = "";
    std::set<gcoalesce::Key> keys;
    for (const KeyParts& parts : all) keys.insert(compute_key(parts));
    CHECK(keys.size() == all.size());
}

// ---- whole requests -------------------------------------------------------------------------------------------------

gcoalesce::Key key_of_body(const std::string& body, const std::string& model = "gemini-2.5-flash") {
    INFO(body);
    const auto canonical = gcoalesce::canonical_request(body);
    REQUIRE(canonical);
    const std::string resolved = resolve_model(model).value();
    KeyParts parts;
    parts.model = resolved;
    parts.asked = *canonical;
    return compute_key(parts);
}

// A body with everything that shapes an answer.
constexpr const char* kRich = R"({
  "contents": [{"role": "user", "parts": [{"text": "hi"}, {"inlineData": {"mimeType": "image/png", "data": "AA=="}}]},
               {"role": "model", "parts": [{"text": "yes?", "thoughtSignature": "c2ln", "thought": true},
                                           {"functionCall": {"id": "1", "name": "f", "args": {"a": 1}}}]},
               {"role": "user", "parts": [{"functionResponse": {"id": "1", "name": "f", "response": {"r": 2}}},
                                          {"fileData": {"mimeType": "text/plain", "fileUri": "files/a"},
                                           "videoMetadata": {"fps": 1}}]}],
  "systemInstruction": {"role": "user", "parts": [{"text": "be brief"}]},
  "generationConfig": {"temperature": 0.5, "topP": 0.9, "topK": 40, "candidateCount": 1, "maxOutputTokens": 100,
    "stopSequences": ["x", "y"], "seed": 9007199254740993, "presencePenalty": 0.1, "frequencyPenalty": -0.1,
    "responseMimeType": "application/json", "responseSchema": {"type": "OBJECT", "properties": {"a": {"type": "STRING"}},
    "propertyOrdering": ["a"]}, "responseJsonSchema": {"type": ["object", "null"]}, "responseModalities": ["TEXT"],
    "responseLogprobs": true, "logprobs": 3, "mediaResolution": "MEDIA_RESOLUTION_LOW",
    "thinkingConfig": {"thinkingBudget": 0, "thinkingLevel": "LOW", "includeThoughts": false},
    "speechConfig": {"voiceConfig": {"prebuiltVoiceConfig": {"voiceName": "Kore"}}}},
  "safetySettings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"},
                     {"category": "HARM_CATEGORY_HATE_SPEECH", "threshold": "BLOCK_NONE"}],
  "tools": [{"functionDeclarations": [{"name": "f", "description": "d", "parameters": {"type": "OBJECT"}}]},
            {"googleSearch": {}}, {"codeExecution": {}}, {"urlContext": {}}],
  "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
  "cachedContent": "cachedContents/a",
  "labels": {"team": "a"},
  "somethingNew": {"deep": [true, null]}
})";

using Json = nlohmann::json;

// All documents that differ from this one in a single place: a value changed, a member or an item left out or added,
// two items swapped.
void differing(const Json& whole, Json::json_pointer at, std::vector<Json>& out) {
    const Json& here = whole.at(at);
    const auto with = [&](const Json& value) {
        Json other = whole;
        other.at(at) = value;
        out.push_back(std::move(other));
    };
    if (here.is_boolean()) with(!here.get<bool>());
    if (here.is_string()) with(here.get<std::string>() + "x");
    if (here.is_number_integer()) with(here.get<std::int64_t>() + 1);
    if (here.is_number_float()) with(here.get<double>() * 2);
    if (here.is_null()) with(0);
    if (here.is_object()) {
        Json more = here;
        more["unheardOf"] = 1;
        with(more);
        for (const auto& [name, value] : here.items()) {
            Json less = here;
            less.erase(name);
            with(less);
            differing(whole, at / name, out);
        }
    }
    if (here.is_array()) {
        Json more = here;
        more.push_back("more");
        with(more);
        for (std::size_t i = 0; i < here.size(); ++i) {
            Json less = here;
            less.erase(i);
            with(less);
            if (i > 0) {
                Json swapped = here;
                std::swap(swapped[i], swapped[i - 1]);
                with(swapped);
            }
            differing(whole, at / i, out);
        }
    }
}

TEST_CASE("T21: a request that differs in any one place of any field that Gemini documents has another key") {
    const Json rich = Json::parse(kRich);
    std::vector<Json> others;
    differing(rich, Json::json_pointer(), others);
    CHECK(others.size() > 200);
    std::set<gcoalesce::Key> keys = {key_of_body(rich.dump()), key_of_body(rich.dump(), "gemini-2.5-pro")};
    std::set<std::string> bodies = {rich.dump()};
    std::size_t distinct = 2;
    for (const Json& other : others) {
        if (!bodies.insert(other.dump()).second) continue; // the same change made in two ways
        ++distinct;
        INFO(other.dump());
        CHECK(keys.insert(key_of_body(other.dump())).second);
    }
    CHECK(keys.size() == distinct);
}

TEST_CASE("T20: a rich request has one key in 10,000 orders and spacings") {
    const Json rich = Json::parse(kRich);
    const gcoalesce::Key key = key_of_body(kRich);
    std::mt19937 random(20);
    const std::function<std::string(const Json&)> spelled = [&](const Json& value) -> std::string {
        const std::string space(random() % 3, " \n\t"[random() % 3]);
        std::vector<std::string> parts;
        if (value.is_object()) {
            for (const auto& [name, member] : value.items())
                parts.push_back(space + Json(name).dump() + space + ":" + spelled(member));
            std::shuffle(parts.begin(), parts.end(), random);
        } else if (value.is_array()) {
            for (const Json& item : value) parts.push_back(spelled(item));
        } else if (value.is_number()) {
            const bool fraction = value.is_number_float();
            const char* more[] = {"", "e0", "E+00", fraction ? "00" : ".0"};
            return space + value.dump() + more[random() % 4] + space;
        } else {
            return space + value.dump() + space;
        }
        std::string inside;
        for (const std::string& part : parts) inside += (inside.empty() ? "" : ",") + part;
        return space + (value.is_object() ? "{" + inside + "}" : "[" + inside + "]") + space;
    };
    for (int round = 0; round < 10'000; ++round) {
        const std::string body = spelled(rich);
        const auto canonical = gcoalesce::canonical_request(body);
        REQUIRE(canonical);
        const std::string model =
            resolve_model(round % 2 == 0 ? "gemini-2.5-flash" : "models/gemini-2.5-flash").value();
        KeyParts parts;
        parts.model = model;
        parts.asked = *canonical;
        if (compute_key(parts) != key) FAIL(body);
    }
}

TEST_CASE("T20: the bodies that real SDKs send for one prompt have one key") {
    const gcoalesce::Key genai = key_of_body(R"({"contents":[{"parts":[{"text":"hi"}],"role":"user"}]})");
    CHECK(key_of_body(
              R"({"generationConfig":{},"safetySettings":[],"contents":[{"role":"user","parts":[{"text":"hi"}]}]})") ==
          genai);
    CHECK(key_of_body(R"({"generationConfig":{},"contents":[{"role":"user","parts":[{"text":"hi"}]}]})") == genai);
    CHECK(key_of_body(R"({"contents":[{"parts":[{"text":"hi"}]}]})") == genai);
}

TEST_CASE("Bytes cannot wander from one part of the key to the next") {
    KeyParts left = sample();
    KeyParts right = sample();
    left.realm = "ab";
    left.template_id = "c";
    right.realm = "a";
    right.template_id = "bc";
    CHECK(compute_key(left) != compute_key(right));
}

TEST_CASE("T20: the key is the same on every thread and every time") {
    const gcoalesce::Key first = compute_key(sample());
    for (int i = 0; i < 100; ++i) REQUIRE(compute_key(sample()) == first);
    gcoalesce::Key other{};
    std::thread([&] { other = compute_key(sample()); }).join();
    CHECK(other == first);
}

TEST_CASE("T25: sampled requests are shared like any other, and an unset temperature is not one of 0") {
    const auto body = [](const std::string& temperature) {
        return R"({"contents":[{"parts":[{"text":"hi"}]}],"generationConfig":{"candidateCount":1)" + temperature + "}}";
    };
    CHECK(key_of_body(body("")) == key_of_body(body("")));
    CHECK(key_of_body(body(R"(,"temperature":1.5)")) == key_of_body(body(R"(,"temperature":1.5)")));
    CHECK(key_of_body(body("")) != key_of_body(body(R"(,"temperature":0)")));
    CHECK(key_of_body(body("")) != key_of_body(body(R"(,"temperature":1)")));
}

TEST_CASE("A model is one with and without its prefix") {
    CHECK(resolve_model("gemini-2.5-flash") == std::string("gemini-2.5-flash"));
    CHECK(resolve_model("models/gemini-2.5-flash") == std::string("gemini-2.5-flash"));
    CHECK(resolve_model("tunedModels/my_model.1") == std::string("tunedModels/my_model.1"));
    CHECK(resolve_model(std::string(128, 'm')) == std::string(128, 'm'));
}

TEST_CASE("A model that would change the upstream's URL is refused") {
    const std::string refused[] = {"",
                                   "models/",
                                   std::string(129, 'm'),
                                   "a b",
                                   "a?alt=json",
                                   "a#b",
                                   "a:generate",
                                   "a%2e",
                                   "..",
                                   "a/../b",
                                   "./a",
                                   "a//b",
                                   "/a",
                                   "a/",
                                   "a\\b",
                                   "a\r\nb",
                                   "g\xC3\xA4",
                                   "models//a",
                                   std::string("a\0b", 3)};
    for (const std::string& model : refused) {
        INFO(model);
        const auto resolved = resolve_model(model);
        REQUIRE_FALSE(resolved.has_value());
        CHECK(resolved.error().code == GCOALESCE_BAD_REQUEST);
        CHECK(resolved.error().message.find('\n') == std::string::npos);
    }
}

TEST_CASE("A caller's own API key is what a header line can carry, and its realm is its hash") {
    CHECK(is_api_key("AIzaSy0-_"));
    CHECK(is_api_key(std::string(256, 'k')));
    for (const std::string& none : {std::string(), std::string(257, 'k'), std::string("a b"), std::string("a\r\nb"),
                                    std::string("k\xC3\xA4"), std::string("a\0b", 3)})
        CHECK_FALSE(is_api_key(none));
    CHECK(realm_of_api_key("").empty());
    CHECK(realm_of_api_key("AIzaMine") == realm_of_api_key("AIzaMine"));
    CHECK(realm_of_api_key("AIzaMine") != realm_of_api_key("AIzaOther"));
    CHECK(realm_of_api_key("AIzaMine").size() == 36);
    CHECK(realm_of_api_key("AIzaMine").find("AIza") == std::string::npos);
}

} // namespace
