#include "protocol/sse.hpp"

#include <catch2/catch.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "tests/support/fixtures.hpp"
#include "tests/unit/pieces.hpp"

namespace {

using gcoalesce::SseEvent;
using gcoalesce::SseParser;
using gcoalesce::test::Cuts;
using gcoalesce::test::every_byte;
using gcoalesce::test::feed_cut;
using gcoalesce::test::random_cuts;

constexpr std::size_t kLimit = 8 << 20;

struct Event {
    std::string type, data, id;
    bool operator==(const Event&) const = default;
};

struct Parsed {
    std::vector<Event> events;
    std::string last_event_id;
    std::optional<std::int64_t> retry_ms;
    std::string unfinished;
    bool other_line = false;
    bool operator==(const Parsed&) const = default;
};

std::ostream& operator<<(std::ostream& out, const Parsed& parsed) {
    for (const Event& event : parsed.events) out << event.type << '|' << event.data << '|' << event.id << '\n';
    return out << "id " << parsed.last_event_id << " retry " << parsed.retry_ms.value_or(-1) << " unfinished "
               << parsed.unfinished << " other " << parsed.other_line;
}

Parsed parse(std::string_view wire, const Cuts& cuts, const std::string& initial_id = "") {
    Parsed parsed;
    SseParser parser(kLimit);
    parser.set_last_event_id(initial_id);
    feed_cut(wire, cuts, [&](std::string_view piece) {
        REQUIRE(parser.feed(piece, [&](const SseEvent& event) {
            parsed.events.push_back(
                {std::string(event.type), std::string(event.data), std::string(event.last_event_id)});
        }));
    });
    parsed.last_event_id = parser.last_event_id();
    parsed.retry_ms = parser.retry_ms();
    parsed.unfinished = parser.unfinished_data();
    parsed.other_line = parser.inside_other_line();
    return parsed;
}

std::vector<std::string> data_of(const Parsed& parsed) {
    std::vector<std::string> data;
    for (const Event& event : parsed.events) data.push_back(event.data);
    return data;
}

// The code points U+0000..U+00FF of a JSON string, as the bytes that they stand for.
std::string bytes_of(const std::string& wire) {
    std::string bytes;
    for (std::size_t i = 0; i < wire.size(); ++i) {
        const auto lead = static_cast<unsigned char>(wire[i]);
        if (lead < 0x80) {
            bytes += wire[i];
        } else {
            bytes += static_cast<char>(((lead & 3) << 6) | (static_cast<unsigned char>(wire[++i]) & 0x3F));
        }
    }
    return bytes;
}

// The standard's algorithm over a whole body, as it is written there; the text is UTF-8 without a byte order mark.
Parsed parse_by_the_book(std::string_view body) {
    Parsed parsed;
    std::vector<std::string> lines;
    std::string line;
    for (std::size_t i = 0; i < body.size(); ++i) {
        if (body[i] != '\r' && body[i] != '\n') {
            line += body[i];
            continue;
        }
        if (body[i] == '\r' && i + 1 < body.size() && body[i + 1] == '\n') ++i;
        lines.push_back(line);
        line.clear();
    }
    std::string type, id;
    std::optional<std::string> data;
    for (const std::string& each : lines) {
        if (each.empty()) {
            parsed.last_event_id = id;
            if (data) parsed.events.push_back({type.empty() ? "message" : type, *data, id});
            data.reset();
            type.clear();
            continue;
        }
        const std::size_t colon = each.find(':');
        const std::string name = each.substr(0, colon);
        std::string value = colon == std::string::npos ? "" : each.substr(colon + 1);
        if (!value.empty() && value[0] == ' ') value = value.substr(1);
        if (name == "data") data = data ? *data + "\n" + value : value;
        if (name == "event") type = value;
        if (name == "id" && value.find('\0') == std::string::npos) id = value;
        if (name == "retry" && !value.empty() && value.size() < 10 &&
            value.find_first_not_of("0123456789") == std::string::npos)
            parsed.retry_ms = std::stoll(value);
    }
    return parsed;
}

// ---- Fixtures ---------------------------------------------------------------------------------------------------

TEST_CASE("T42: every case of the public SSE suite parses the same in any pieces") {
    GCOALESCE_REQUIRE_FIXTURES(fixtures);
    const auto suite = nlohmann::json::parse(gcoalesce::test::read_file(fixtures / "sse" / "cases.json"));
    std::mt19937 random(1);
    REQUIRE(suite.at("cases").size() > 50);
    for (const auto& test : suite.at("cases")) {
        INFO(test.at("name"));
        const std::string wire = bytes_of(test.at("wire"));
        const std::string initial_id = test.value("initial_last_event_id", "");
        const auto& expected = test.at("expected");
        std::vector<Event> events;
        for (const auto& event : expected.at("events"))
            events.push_back({event.at("type"), event.at("data"), event.at("lastEventId")});

        std::vector<Cuts> ways = {{}, every_byte(wire.size())};
        for (int i = 0; i < 20; ++i) ways.push_back(random_cuts(wire.size(), random));
        if (test.contains("splits")) {
            for (const auto& splits : test.at("splits")) ways.push_back(splits.get<Cuts>());
        }
        for (const Cuts& cuts : ways) {
            const Parsed parsed = parse(wire, cuts, initial_id);
            CHECK(parsed.events == events);
            CHECK(parsed.last_event_id == expected.at("last_event_id_at_eof").get<std::string>());
            const auto& retry = expected.at("retry_ms");
            const bool also_ok =
                expected.contains("retry_ms_also_ok") && parsed.retry_ms == expected.at("retry_ms_also_ok").get<int>();
            if (!expected.value("retry_ms_any", false) && !also_ok)
                CHECK(parsed.retry_ms == (retry.is_null() ? std::nullopt : std::optional(retry.get<std::int64_t>())));
        }
    }
}

// ---- Our own samples --------------------------------------------------------------------------------------------

TEST_CASE("T42: comments, every line end and UTF-8 parse the same when cut at each byte offset") {
    const std::string wire =
        "\xEF\xBB\xBF: hello\r\n\r\nid: 7\r\nevent: note\r\ndata: one\r\ndata: tw\xC3\xB6\r\n\r\n"
        "data:\xF0\x9F\x98\x80\r\rdata: \xE2\x80\xA8 \xC2\x85\n\nretry: 250\n:\nid\ndata\n\ndata: cut";
    Parsed expected;
    expected.events = {{"note", "one\ntw\xC3\xB6", "7"},
                       {"message", "\xF0\x9F\x98\x80", "7"},
                       {"message", "\xE2\x80\xA8 \xC2\x85", "7"},
                       {"message", "", ""}};
    expected.retry_ms = 250;
    expected.unfinished = "cut";
    CHECK(parse(wire, {}) == expected);
    CHECK(parse(wire, every_byte(wire.size())) == expected);
    for (std::size_t cut = 0; cut <= wire.size(); ++cut) {
        INFO("cut at " << cut);
        CHECK(parse(wire, {cut}) == expected);
    }
}

TEST_CASE("Lines end at CR and LF bytes alone, never at the separators of Unicode") {
    const std::string data = "a\xE2\x80\xA8"
                             "b\xE2\x80\xA9"
                             "c\xC2\x85"
                             "d\x0B\x0C"
                             "e";
    CHECK(data_of(parse("data: " + data + "\n\n", {})) == std::vector<std::string>{data});
}

TEST_CASE("Any bytes parse as the standard has it, in any pieces") {
    const std::vector<std::string> tokens = {"data",  "data:",  "data: ",      "event",     "id",
                                             "id: ",  "retry:", ":",           " ",         "\n",
                                             "\r",    "\r\n",   "\n\n",        "{\"a\":1}", "12",
                                             "\t",    "x",      "event:y",     "\xC3\xA4",  std::string(1, '\0'),
                                             "Data:", "dat",    "\xE2\x80\xA8"};
    std::mt19937 random(2);
    for (int round = 0; round < 5000; ++round) {
        std::string wire;
        const std::size_t count = random() % 40;
        for (std::size_t i = 0; i < count; ++i) wire += tokens[random() % tokens.size()];
        INFO(wire);
        const Parsed whole = parse(wire, {});
        const Parsed book = parse_by_the_book(wire);
        REQUIRE(whole.events == book.events);
        REQUIRE(whole.last_event_id == book.last_event_id);
        REQUIRE(whole.retry_ms == book.retry_ms);
        REQUIRE(parse(wire, every_byte(wire.size())) == whole);
        REQUIRE(parse(wire, random_cuts(wire.size(), random)) == whole);
    }
}

TEST_CASE("Random bytes crash nothing and parse the same in any pieces") {
    std::mt19937 random(3);
    for (int round = 0; round < 3000; ++round) {
        std::string wire(random() % 60, ' ');
        for (char& c : wire) c = static_cast<char>(random());
        if (random() % 2 == 0)
            wire.insert(0, "\xEF\xBB\xBF"
                           "data:");
        wire += "\n\n";
        const Parsed whole = parse(wire, {});
        REQUIRE(parse(wire, every_byte(wire.size())) == whole);
        REQUIRE(parse(wire, random_cuts(wire.size(), random)) == whole);
    }
}

TEST_CASE("Data that is no UTF-8 is repaired and says so") {
    std::vector<std::pair<std::string, bool>> seen;
    SseParser parser(100);
    REQUIRE(parser.feed("data: good \xC3\xA4\n\ndata: bad \xC3\n\ndata: \xED\xA0\x80\n\n",
                        [&](const SseEvent& event) { seen.emplace_back(event.data, event.repaired); }));
    CHECK(seen == std::vector<std::pair<std::string, bool>>{{"good \xC3\xA4", false},
                                                            {"bad \xEF\xBF\xBD", true},
                                                            {"\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD", true}});
}

TEST_CASE("An event of 6 MiB comes whole out of reads of one byte") {
    std::string data(6 << 20, 'x');
    for (std::size_t i = 0; i < data.size(); i += 97) data[i] = static_cast<char>('a' + i % 26);
    const std::string wire = "data: " + data + "\r\n\r\ndata: next\r\n\r\n";
    SseParser parser(data.size());
    std::vector<std::string> events;
    for (const char& byte : wire) {
        if (!parser.feed({&byte, 1}, [&](const SseEvent& event) { events.emplace_back(event.data); })) FAIL("refused");
    }
    REQUIRE(events.size() == 2);
    CHECK((events[0] == data)); // in brackets: Catch would print both
    CHECK(events[1] == "next");
}

TEST_CASE("An event of many data lines has linear cost in one read") {
    std::string wire;
    std::size_t lines = 0;
    for (; wire.size() < 4 << 20; ++lines) wire += "data:\r";
    wire += "\r";
    const Parsed parsed = parse(wire, {});
    REQUIRE(parsed.events.size() == 1);
    CHECK(parsed.events[0].data.size() == lines - 1);
}

TEST_CASE("The limit holds for an event's data and for any line, in any pieces") {
    const auto accepts = [](const std::string& wire, const Cuts& cuts) {
        SseParser parser(16);
        bool good = true;
        feed_cut(wire, cuts, [&](std::string_view piece) {
            if (!good) return; // not to be fed again
            const auto fed = parser.feed(piece, [](const SseEvent&) {});
            good = fed.has_value();
            if (!good) CHECK(fed.error().code == GCOALESCE_TOO_LARGE);
        });
        return good;
    };
    const std::string at_limit(16, 'x');
    const std::vector<std::pair<std::string, bool>> samples = {
        {"data: " + at_limit + "\n\ndata: " + at_limit + "\n\n", true},
        {"data: " + at_limit + "x\n\n", false},
        {"data: " + at_limit + "x", false},
        {"data: " + at_limit + "\ndata\n\n", false},
        {"data: 1234567\ndata: 12345678\n\n", true},
        {"data: 12345678\ndata: 12345678\n\n", false},
        {"id: 123456789012\n\n", true},
        {"id: 1234567890123\n\n", false},
        {"unknown line that goes on and on", false},
        {": a comment may go on and on, since nothing of it is kept\n\n", true},
        {"data\ndata\ndata\ndata\ndata\ndata\ndata\ndata\ndata\ndata\ndata\ndata\ndata\ndata\ndata\ndata\ndata\n\n",
         true},
        {"data\ndata\ndata\ndata\ndata\ndata\ndata\ndata\ndata\ndata\ndata\ndata\ndata\ndata\ndata\ndata\ndata\ndata\n"
         "\n",
         false},
    };
    for (const auto& [wire, good] : samples) {
        INFO(wire);
        CHECK(accepts(wire, {}) == good);
        CHECK(accepts(wire, every_byte(wire.size())) == good);
    }
}

TEST_CASE("What the end of the body cut off can be looked at") {
    CHECK(parse("data: a\n\ndata: {\"b\":\ndata: 1}", {}).unfinished == "{\"b\":\n1}");
    CHECK(parse("data: a\n\ndata: b\n", {}).unfinished == "b");
    CHECK(parse("data: a\n\n", {}).unfinished.empty());
    CHECK(parse("data: a\n\ndat", {}).other_line);
    CHECK_FALSE(parse("data: a\n\n: half a comm", {}).other_line);
    CHECK_FALSE(parse("data: a\n\n  ", {}).other_line);
}

// ---- The framer -------------------------------------------------------------------------------------------------

TEST_CASE("An event is framed as one data line and CRLF CRLF, nothing else") {
    CHECK(gcoalesce::frame_sse(R"({"a": "b"})") == "data: {\"a\": \"b\"}\r\n\r\n");
}

TEST_CASE("A document over several lines is framed in one, with the same meaning") {
    const std::string pretty = "{\r\n  \"a\": [\n    1,\r    \"two\\nlines\"\n  ]\n}\n";
    const std::string framed = gcoalesce::frame_sse(pretty);
    CHECK(framed.find_first_of("\r\n") == framed.size() - 4);
    const Parsed parsed = parse(framed, {});
    REQUIRE(parsed.events.size() == 1);
    CHECK(nlohmann::json::parse(parsed.events[0].data) == nlohmann::json::parse(pretty));
}

} // namespace
