#include "base/canonical_json.hpp"

#include <algorithm>
#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

namespace {

using gcoalesce::canonical_request;

std::string canonical(const std::string& body) {
    const auto result = canonical_request(body);
    INFO(body.substr(0, 2000));
    if (!result) FAIL(result.error().message);
    return *result;
}

// What a request's member reads in canonical form; for short checks of one value.
std::string canonical_value(const std::string& value) {
    const std::string whole = canonical("{\"x\":" + value + "}");
    return whole.substr(5, whole.size() - 6);
}

std::string refusal(const std::string& body) {
    const auto result = canonical_request(body);
    INFO(body.substr(0, 2000));
    REQUIRE_FALSE(result.has_value());
    CHECK(result.error().code == GCOALESCE_BAD_REQUEST);
    return result.error().message;
}

// ---- Random documents, and random ways to spell them ------------------------------------------------------------

struct Value {
    enum Kind { null, yes, no, number, text, array, object } kind = null;
    std::string digits; // of a number: a whole number without zeros at either end, times ten to `exponent`
    int exponent = 0;
    bool negative = false;
    std::vector<std::string> characters; // of a text, one each
    std::vector<Value> items;
    std::vector<std::vector<std::string>> names; // of the members whose values are the items
};

class Random {
  public:
    explicit Random(unsigned seed) : engine_(seed) {}
    std::size_t below(std::size_t limit) { return engine_() % limit; }
    bool one_in(std::size_t n) { return below(n) == 0; }

    std::vector<std::string> text() {
        static const std::vector<std::string> alphabet = {"a",
                                                          "b",
                                                          "Z",
                                                          "0",
                                                          " ",
                                                          "\"",
                                                          "\\",
                                                          "/",
                                                          "\n",
                                                          "\t",
                                                          "\x01",
                                                          "\x7F",
                                                          "\xC3\xA4",
                                                          "\xE2\x80\xA8",
                                                          "\xF0\x9F\x98\x80"};
        std::vector<std::string> characters(below(6));
        for (std::string& character : characters) character = alphabet[below(alphabet.size())];
        return characters;
    }

    Value value(int depth) {
        Value made;
        made.kind = static_cast<Value::Kind>(below(depth > 0 ? 7 : 5));
        if (made.kind == Value::number) {
            made.negative = one_in(3);
            made.digits = std::to_string(1 + below(one_in(4) ? 4'000'000'000 : 99));
            while (one_in(4)) made.digits += std::to_string(below(1'000'000'000)); // beyond 64 bits
            while (made.digits.back() == '0') made.digits.pop_back();
            made.exponent = static_cast<int>(below(9)) - 4;
        }
        if (made.kind == Value::text) made.characters = text();
        if (made.kind == Value::array || made.kind == Value::object) {
            made.items.resize(below(5));
            for (Value& item : made.items) item = value(depth - 1);
        }
        if (made.kind == Value::object) {
            for (std::size_t i = 0; i < made.items.size(); ++i) {
                made.names.push_back(text());
                made.names.back().push_back(std::to_string(i)); // so that no two are equal
            }
        }
        return made;
    }

    std::string space() {
        std::string out;
        while (one_in(3)) out += " \t\r\n"[below(4)];
        return out;
    }

    std::string spell(const std::vector<std::string>& characters) {
        std::string out = "\"";
        for (const std::string& character : characters) {
            const unsigned char first = static_cast<unsigned char>(character[0]);
            if (first < 0x20 || character == "\"" || character == "\\" || one_in(4)) {
                if (character == "\n" && one_in(2)) {
                    out += "\\n";
                } else if ((character == "\"" || character == "\\" || character == "/") && one_in(2)) {
                    out += "\\" + character;
                } else if (character.size() == 4) {
                    out += one_in(2) ? "\\ud83d\\ude00" : "\\uD83D\\uDE00";
                } else {
                    const unsigned code = character == "\xC3\xA4" ? 0xE4 : character == "\xE2\x80\xA8" ? 0x2028 : first;
                    out += one_in(2) ? fmt::format("\\u{:04x}", code) : fmt::format("\\u{:04X}", code);
                }
            } else {
                out += character;
            }
        }
        return out + "\"";
    }

    std::string spell_number(const Value& number) {
        std::string digits = number.digits;
        int exponent = number.exponent;
        for (std::size_t zeros = below(3); zeros > 0; --zeros) {
            digits += '0';
            --exponent;
        }
        std::string fraction;
        for (std::size_t shift = below(digits.size() + 3); shift > 0; --shift) {
            fraction.insert(0, 1, digits.back());
            digits.pop_back();
            if (digits.empty()) digits = "0";
            ++exponent;
        }
        while (digits.size() > 1 && digits[0] == '0') digits.erase(0, 1);
        std::string out = (number.negative ? "-" : "") + digits;
        if (!fraction.empty()) out += "." + fraction;
        if (exponent != 0 || one_in(4)) {
            out += one_in(2) ? "e" : "E";
            if (exponent >= 0 && one_in(2)) out += "+";
            out += std::to_string(exponent);
        }
        return out;
    }

    std::string spell(const Value& value) {
        std::string out;
        std::vector<std::size_t> order(value.items.size());
        for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
        switch (value.kind) {
        case Value::null: return space() + "null" + space();
        case Value::yes: return space() + "true" + space();
        case Value::no: return space() + "false" + space();
        case Value::number: return space() + spell_number(value) + space();
        case Value::text: return space() + spell(value.characters) + space();
        case Value::array:
            for (const std::size_t i : order) out += (i > 0 ? "," : "") + spell(value.items[i]);
            return space() + "[" + (out.empty() ? space() : out) + "]" + space();
        case Value::object:
            std::shuffle(order.begin(), order.end(), engine_);
            for (const std::size_t i : order)
                out +=
                    (out.empty() ? "" : ",") + space() + spell(value.names[i]) + space() + ":" + spell(value.items[i]);
            return space() + "{" + (out.empty() ? space() : out) + "}" + space();
        }
        return out;
    }

    // Changes one thing somewhere in the value. False: there is nothing to change here.
    void change(Value& value) {
        if (!value.items.empty() && !one_in(4)) return change(value.items[below(value.items.size())]);
        switch (value.kind) {
        case Value::null: value.kind = Value::no; break;
        case Value::yes: value.kind = Value::no; break;
        case Value::no: value.kind = Value::yes; break;
        case Value::number:
            if (one_in(3)) {
                value.negative = !value.negative;
            } else if (one_in(2)) {
                value.exponent += 1;
            } else {
                value.digits += '1';
            }
            break;
        case Value::text: value.characters.push_back("a"); break;
        case Value::array: value.items.emplace_back(); break;
        case Value::object:
            if (!value.names.empty() && one_in(2)) {
                value.names.back().push_back("a");
            } else {
                value.names.push_back({"n", "e", "w"});
                value.items.emplace_back();
            }
            break;
        }
    }

    Value request() {
        Value made;
        while (made.kind != Value::object) made = value(4);
        return made;
    }

  private:
    std::mt19937 engine_;
};

// ---- Properties -------------------------------------------------------------------------------------------------

TEST_CASE("T20: a request has one canonical form however it is spelled") {
    Random random(1);
    for (int round = 0; round < 10000; ++round) {
        const Value value = random.request();
        const std::string first = random.spell(value);
        const std::string second = random.spell(value);
        INFO(first << "\n" << second);
        const std::string form = canonical(first);
        REQUIRE(canonical(second) == form);
        REQUIRE(canonical(form) == form);
    }
}

TEST_CASE("T26: a request that differs in one thing has another canonical form") {
    Random random(2);
    for (int round = 0; round < 10000; ++round) {
        const Value value = random.request();
        Value other = value;
        random.change(other);
        const std::string first = random.spell(value);
        const std::string second = random.spell(other);
        INFO(first << "\n" << second);
        REQUIRE(canonical(first) != canonical(second));
    }
}

TEST_CASE("The canonical form is JSON and means what the request means") {
    Random random(3);
    for (int round = 0; round < 3000; ++round) {
        const std::string body = random.spell(random.request());
        const std::string form = canonical(body);
        INFO(body << "\n" << form);
        REQUIRE(nlohmann::json::accept(form));
        const auto strings_only = [](int, nlohmann::json::parse_event_t, nlohmann::json& parsed) {
            if (parsed.is_number()) parsed = 0; // their spelling decides whether nlohmann has them as integers
            return true;
        };
        REQUIRE(nlohmann::json::parse(form, strings_only) == nlohmann::json::parse(body, strings_only));
    }
}

TEST_CASE("Members stand in the order of their UTF-8 bytes") {
    CHECK(canonical(R"({"b":1,"a":2,"":3,"A":4,"ab":5,"\u00e4":6,"#":7,"\"":8,"\ud83d\ude00":9,"\uffff":8})") ==
          R"({"":3,"\"":8,"#":7,"A":4,"a":2,"ab":5,"b":1,)"
          "\"\xC3\xA4\":6,\"\xEF\xBF\xBF\":8,\"\xF0\x9F\x98\x80\":9}");
    CHECK(canonical(R"({"z":{"b":[{"d":1,"c":2},{"f":{"h":1,"g":2},"e":0}],"a":{"y":1,"x":2}},"a":1})") ==
          R"({"a":1,"z":{"a":{"x":2,"y":1},"b":[{"c":2,"d":1},{"e":0,"f":{"g":2,"h":1}}]}})");
}

TEST_CASE("Numbers are one when their values are") {
    for (const char* one : {"1", "1.0", "10e-1", "1e0", "0.1E+1", "100e-2", "1.000000000000000000000000000000"}) {
        INFO(one);
        CHECK(canonical_value(one) == "1");
    }
    for (const char* zero : {"0", "-0", "0.0", "-0.0", "0e5", "0E-99999999999999999999999", "0.000e+7"}) {
        INFO(zero);
        CHECK(canonical_value(zero) == "0");
    }
    CHECK(canonical_value("-0.70") == "-7e-1");
    CHECK(canonical_value("1000") == "1e3");
    CHECK(canonical_value("2048") == "2048");
    CHECK(canonical_value("1e-400") == "1e-400");
}

TEST_CASE("Numbers never pass through double") {
    CHECK(canonical_value("9007199254740993") != canonical_value("9007199254740992"));
    CHECK(canonical_value("18446744073709551617") == "18446744073709551617");
    CHECK(canonical_value("-9223372036854775809") == "-9223372036854775809");
    CHECK(canonical_value("123456789012345678901234567890") == "12345678901234567890123456789e1");
    CHECK(canonical_value("0.1") != canonical_value("0.1000000000000000055511151231257827"));
}

TEST_CASE("Members that SDKs add and that say nothing are dropped, at the top level alone") {
    const std::string plain = R"({"contents":[{"parts":[{"text":"hi"}],"role":"user"}]})";
    CHECK(canonical(plain) == plain);
    CHECK(canonical(R"({"generationConfig":{},"contents":[{"parts":[{"text":"hi"}],"role":"user"}]})") == plain);
    CHECK(canonical(R"({"contents":[{"role":"user","parts":[{"text":"hi"}]}],"tools":[ ],"safetySettings":[],
                        "generationConfig":{ }})") == plain);
    CHECK(canonical(R"({"generationConfig":{},"tools":[]})") == "{}");
    for (const char* kept : {R"({"generationConfig":{"seed":1}})", R"({"tools":{}})", R"({"tools":null})",
                             R"({"toolConfig":{}})", R"({"x":{"tools":[]}})", R"({"generationConfig":[]})"}) {
        INFO(kept);
        CHECK(canonical(kept) == kept);
    }
}

TEST_CASE("A missing role of the only turn reads user") {
    const std::string plain = R"({"contents":[{"parts":[{"text":"hi"}],"role":"user"}]})";
    CHECK(canonical(R"({"contents":[{"parts":[{"text":"hi"}]}]})") == plain);
    CHECK(canonical(R"({"contents":[{}]})") == R"({"contents":[{"role":"user"}]})");
    CHECK(canonical(R"({"contents":[{"x":2,"a":1}],"a":{"c":1,"b":[]}})") ==
          R"({"a":{"b":[],"c":1},"contents":[{"a":1,"role":"user","x":2}]})");
    for (const char* kept :
         {R"({"contents":[{"parts":[]},{"parts":[]}]})", R"({"contents":[{"parts":[]},1]})",
          R"({"contents":[1,{"parts":[]}]})", R"({"contents":[{"role":"model"}]})", R"({"contents":[{"role":null}]})",
          R"({"contents":[[{"parts":[]}]]})", R"({"contents":{"parts":[]}})", R"({"contents":[]})",
          R"({"contents":["hi"]})", R"({"x":{"contents":[{"parts":[]}]}})", R"({"x":[{"parts":[]}]})"}) {
        INFO(kept);
        CHECK(canonical(kept) == kept);
    }
}

TEST_CASE("T21: each field that shapes the answer shapes the canonical form") {
    const std::string base = R"({"contents":[{"role":"user","parts":[{"text":"hi"}]}]})";
    std::vector<std::string> forms = {canonical(base)};
    for (const char* member :
         {R"("systemInstruction":{"parts":[{"text":"be brief"}]})", R"("tools":[{"googleSearch":{}}])",
          R"("toolConfig":{"functionCallingConfig":{"mode":"ANY"}})", R"("cachedContent":"cachedContents/a")",
          R"("generationConfig":{"responseSchema":{"type":"STRING"}})",
          R"("generationConfig":{"responseMimeType":"application/json"})", R"("generationConfig":{"temperature":0})",
          R"("generationConfig":{"temperature":0.1})", R"("generationConfig":{"topP":0.5})",
          R"("generationConfig":{"topK":5})", R"("generationConfig":{"maxOutputTokens":5})",
          R"("generationConfig":{"stopSequences":["x"]})", R"("generationConfig":{"seed":5})",
          R"("generationConfig":{"thinkingConfig":{"thinkingBudget":0}})", R"("generationConfig":{"candidateCount":2})",
          R"("safetySettings":[{"category":"HARM_CATEGORY_HARASSMENT","threshold":"BLOCK_NONE"}])",
          R"("somethingNew":true)"})
        forms.push_back(canonical("{" + std::string(member) + "," + base.substr(1)));
    forms.push_back(canonical(R"({"contents":[{"role":"user","parts":[{"text":"hi!"}]}]})"));
    forms.push_back(canonical(
        R"({"contents":[{"role":"user","parts":[{"text":"hi"},{"inlineData":{"mimeType":"image/png","data":"AA=="}}]}]})"));
    std::sort(forms.begin(), forms.end());
    CHECK(std::adjacent_find(forms.begin(), forms.end()) == forms.end());
}

// ---- Refusals ---------------------------------------------------------------------------------------------------

TEST_CASE("Anything but one JSON object is refused") {
    for (const char* body : {"",
                             "  ",
                             "null",
                             "1",
                             "\"{}\"",
                             "[]",
                             "[{}]",
                             "{",
                             "}",
                             "{}x",
                             "{}{}",
                             "{},",
                             "{\"a\"}",
                             "{\"a\":}",
                             "{\"a\":1,}",
                             "{a:1}",
                             "{'a':1}",
                             "{\"a\":01}",
                             "{\"a\":+1}",
                             "{\"a\":.5}",
                             "{\"a\":NaN}",
                             "{\"a\":1 /* one */}",
                             "{\"a\":\"\t\"}",
                             "{\"a\":\"\\x\"}",
                             "{\"a\":\"\\ud800\"}",
                             "{\"a\":\"\\udc00\\ud800\"}",
                             "\xEF\xBB\xBF{}"})
        refusal(body);
    refusal(std::string("{}\0", 3));
    refusal(std::string("{}\0{\"a\":1}", 10));
    refusal(std::string("{\"a\":\"\0\"}", 9));
}

TEST_CASE("Bytes that are no UTF-8 are refused") {
    for (const char* bytes : {"\xC3", "\xA4", "\xC0\xAF", "\xED\xA0\x80", "\xF4\x90\x80\x80", "caf\xE9"}) {
        refusal("{\"a\":\"" + std::string(bytes) + "\"}");
        refusal("{\"" + std::string(bytes) + "\":1}");
    }
}

TEST_CASE("Duplicate members are refused at any depth and in any spelling") {
    for (const char* body : {R"({"a":1,"a":1})", R"({"a":1,"b":2,"a":3})", R"({"a":1,"\u0061":2})",
                             R"({"x":[{"":1,"":2}]})", R"({"tools":[],"tools":[]})", R"({"tools":[],"tools":[1]})",
                             R"({"tools":[1],"tools":[]})", R"({"contents":[{"a":1,"a":2}]})",
                             R"({"contents":[{"a":1,"a":2},1]})", R"({"contents":[{"role":"user","role":"user"}]})"})
        CHECK(refusal(body).find("duplicate") != std::string::npos);
}

TEST_CASE("A refusal names the place, never the text") {
    CHECK(refusal(R"({"secret":1,"secret":2})") == "the request body has a duplicate member at byte 20");
    CHECK(refusal(R"({"secret":"secret)").find("secret") == std::string::npos);
    CHECK(refusal(R"({"a": tecret})") == "the request body has no valid JSON in UTF-8 at byte 8");
    CHECK(refusal(R"([1])") == "the request body has no JSON object at byte 0");
    CHECK(refusal(R"({"a":1e400})").find("range of double") != std::string::npos);
    CHECK(refusal(R"({"a":1e-99999999999999999999})").find("exponent") != std::string::npos);
}

TEST_CASE("200 levels are taken and one more is refused") {
    const auto nested = [](std::size_t levels) {
        return "{\"a\":" + std::string(levels - 1, '[') + std::string(levels - 1, ']') + "}";
    };
    CHECK(canonical(nested(200)) == nested(200));
    CHECK(refusal(nested(201)) == "the request body has more than 200 levels at byte 205");
    refusal("{\"a\":" + std::string(1 << 20, '['));
    std::string objects;
    for (int i = 0; i < 100000; ++i) objects += "{\"a\":";
    refusal(objects);
}

// ---- Size -------------------------------------------------------------------------------------------------------

TEST_CASE("A body of 32 MiB is taken") {
    const std::string data((32 << 20) - 200, 'A');
    const std::string body =
        R"({"generationConfig":{},"contents":[{"role":"user","parts":[{"inlineData":{"mimeType":"image/png","data":")" +
        data + R"("}}]}]})";
    const std::string form = canonical(body);
    CHECK((form == R"({"contents":[{"parts":[{"inlineData":{"data":")" + data +
                       R"(","mimeType":"image/png"}}],"role":"user"}]})"));
}

TEST_CASE("A large body that is out of order at every level costs no more than one in order") {
    // Each level's large member belongs behind a small one: moving it there level by level would copy it 199 times.
    const std::string data(16 << 20, 'A');
    std::string body, form;
    for (int i = 0; i < 199; ++i) {
        body += R"({"b":)";
        form += R"({"a":1,"b":)";
    }
    body += "\"" + data + "\"";
    form += "\"" + data + "\"";
    for (int i = 0; i < 199; ++i) {
        body += R"(,"a":1})";
        form += "}";
    }
    CHECK((canonical(body) == form));
}

TEST_CASE("Random changes to a body crash nothing") {
    Random random(4);
    std::mt19937 engine(4);
    int taken = 0;
    for (int round = 0; round < 20000; ++round) {
        std::string body = random.spell(random.request());
        for (std::size_t changes = 1 + engine() % 3; changes > 0 && !body.empty(); --changes) {
            const std::size_t at = engine() % body.size();
            switch (engine() % 3) {
            case 0: body[at] = static_cast<char>(engine()); break;
            case 1: body.erase(at, 1 + engine() % 3); break;
            default: body.insert(at, 1, "{}[]\",:\\0"[engine() % 9]); break;
            }
        }
        const auto result = canonical_request(body);
        if (result) {
            ++taken;
            REQUIRE(canonical(*result) == *result);
        } else {
            REQUIRE(result.error().code == GCOALESCE_BAD_REQUEST);
        }
    }
    CHECK(taken > 0);
}

} // namespace
