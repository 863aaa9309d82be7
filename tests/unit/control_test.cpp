#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>
#include <random>

#include "protocol/control.hpp"

using namespace gcoalesce;
using nlohmann::json;

namespace {

std::string payload_of(const std::string& frame) {
    return frame.substr(4);
}

std::string cbor(const json& value) {
    const std::vector<std::uint8_t> bytes = json::to_cbor(value);
    return {bytes.begin(), bytes.end()};
}

void refused(const std::string& payload, const std::string& words) {
    const Result<Message> message = decode(payload);
    REQUIRE_FALSE(message);
    CHECK(message.error().code == GCOALESCE_BAD_REQUEST);
    INFO(message.error().message);
    CHECK(message.error().message.find(words) != std::string::npos);
}

} // namespace

TEST_CASE("every message comes back as it was sent") {
    message::Opened opened;
    opened.id = UINT64_MAX;
    opened.slot = 4095;
    opened.identity = 1ull << 40;
    opened.stream_id = 0x9f3c2a71d04b55e8;
    opened.key.fill(0xAB);
    opened.status = GCOALESCE_FRESH;
    const auto back = std::get<message::Opened>(decode(payload_of(encode(opened))).value());
    CHECK(back.id == opened.id);
    CHECK(back.slot == opened.slot);
    CHECK(back.identity == opened.identity);
    CHECK(back.stream_id == opened.stream_id);
    CHECK(back.key == opened.key);
    CHECK(back.status == opened.status);

    message::Open asked;
    asked.id = 7;
    asked.template_id = "weather";
    asked.model = "gemini";
    asked.method = Method::unary;
    asked.sharing = GCOALESCE_SHARE_REFRESH;
    asked.realm = "mine";
    asked.explicit_key = "a name";
    asked.api_key = "AIzaMine";
    asked.max_age_ms = -1;
    asked.no_store = true;
    asked.individual_of = 8;
    asked.resume = 9;
    asked.resume_after = 10;
    asked.body_bytes = 12345;
    const auto open = std::get<message::Open>(decode(payload_of(encode(asked))).value());
    CHECK(open.template_id == "weather");
    CHECK(open.realm == "mine");
    CHECK(open.explicit_key == "a name");
    CHECK(open.api_key == "AIzaMine");
    asked.api_key.clear(); // as clients of before have it: no member at all
    CHECK(payload_of(encode(asked)).find("api_key") == std::string::npos);
    CHECK(std::get<message::Open>(decode(payload_of(encode(asked))).value()).api_key.empty());
    CHECK(open.max_age_ms == -1);
    CHECK(open.no_store);
    CHECK(open.individual_of == 8);
    CHECK(open.resume == 9);
    CHECK(open.resume_after == 10);
    CHECK(open.model == "gemini");
    CHECK(open.method == Method::unary);
    CHECK(open.sharing == GCOALESCE_SHARE_REFRESH);
    CHECK(open.body_bytes == 12345);
    CHECK(std::get<message::Refused>(
              decode(payload_of(encode(message::Refused{1, GCOALESCE_BUSY, "words", 250}))).value())
              .retry_ms == 250);
    CHECK(std::get<message::Hello>(decode(payload_of(encode(message::Hello{1, "me"}))).value()).name == "me");
    for (const Message& message :
         {Message(message::Welcome{1, 2, 3}), Message(message::Ready{}), Message(message::Withdraw{4}),
          Message(message::Withdrawn{5}), Message(message::Notify{6, GCOALESCE_NOTIFY_ON, 6000}),
          Message(message::Window{7, 5999}), Message(message::Cancel{8, "abcd"}),
          Message(message::Purge{9, GCOALESCE_PURGE_TEMPLATE, "weather"}), Message(message::Reload{10}),
          Message(message::Clients{12, 13}),
          Message(message::Client{1, 2, "app", 3, 4, 5, true, false, 6, 7, 8, 9, "000000000000beef:7"}),
          Message(message::Done{11, 12}), Message(message::Goodbye{GCOALESCE_BUSY, "full"})})
        CHECK(decode(payload_of(encode(message))).value().index() == message.index());
}

TEST_CASE("whatever is no flat map of the right members is refused with the reason") {
    refused("", "CBOR");
    refused("\xff", "CBOR");
    refused(cbor(json::array({1, 2})), "an array");
    refused(cbor(7), "no map");
    refused(cbor(json::object()), "\"t\"");
    refused(cbor({{"t", 5}}), "\"t\"");
    refused(cbor({{"t", "nonsense"}}), "unknown message \"nonsense\"");
    refused(cbor({{"t", "hello"}, {"protocol", {{"deep", 1}}}}), "a map within");
    refused(cbor({{"t", "hello"}, {"protocol", 1}}), "\"name\" is missing");
    refused(cbor({{"t", "hello"}, {"protocol", "1"}, {"name", "x"}}), "\"protocol\" has the wrong type");
    refused(cbor({{"t", "hello"}, {"protocol", -1}, {"name", "x"}}), "out of range");
    refused(cbor({{"t", "hello"}, {"protocol", 1.5}, {"name", "x"}}), "a fraction");
    refused(cbor({{"t", "hello"}, {"protocol", 1ull << 40}, {"name", "x"}}), "out of range");
    refused(cbor({{"t", "hello"}, {"protocol", 1}, {"name", std::string(300, 'n')}}), "too long");
    refused(cbor({{"t", "open"}, {"id", 1}, {"template", "default"}, {"model", "m"}, {"method", 6}, {"sharing", 0}}),
            "\"method\" is out of range");
    json many{{"t", "ready"}};
    for (int i = 0; i < 40; ++i) many[std::to_string(i)] = i;
    refused(cbor(many), "too many members");
    refused(payload_of(encode(message::Ready{})) + "x", "CBOR");
    refused("\xa2\x61t\x65ready\x61t\x65ready", "a member twice");
}

TEST_CASE("unknown members are passed over, so that a newer peer can add some") {
    CHECK(
        std::holds_alternative<message::Ready>(decode(cbor({{"t", "ready"}, {"later", "x"}, {"n", nullptr}})).value()));
}

TEST_CASE("nesting as deep as a message can hold costs no stack") {
    refused(std::string(kMaxFrame, '\x81'), "at most 2048 bytes");
    refused(std::string(kMaxMessage, '\x81'), "an array");
    refused(std::string(kMaxMessage, '\xa1'), "CBOR");
    std::string maps;
    while (maps.size() + 3 < kMaxMessage)
        maps += "\xa1\x61"
                "a";
    refused(maps, "a map within");
    refused("\xa1\x61t\xbf\x61", "a map within");
    refused(std::string(kMaxMessage, '\xd8'), "CBOR"); // tags
    // Strings of indefinite length, each within another.
    refused(std::string(kMaxMessage, '\x5f'), "CBOR");
    refused(std::string(kMaxMessage, '\x7f'), "CBOR");
}

TEST_CASE("lengths that lie cost no memory") {
    refused("\x7b\xff\xff\xff\xff\xff\xff\xff\xff", "CBOR"); // a text of 2^64 bytes
    refused("\xbb\x7f\xff\xff\xff\xff\xff\xff\xff", "CBOR"); // a map of 2^63 members
    refused("\xa1\x61t\x5b\x00\x00\x00\xff\xff\xff\xff\xff", "CBOR");
}

TEST_CASE("random and mutated frames are decoded or refused, never worse") {
    std::mt19937 random(11);
    message::Open open;
    open.id = 7;
    open.model = "gemini";
    open.body_bytes = 100;
    const std::string whole = payload_of(encode(open));
    std::size_t accepted = 0;
    for (int i = 0; i < 20'000; ++i) {
        std::string bytes = whole;
        for (unsigned n = 1 + random() % 4; n > 0; --n) bytes[random() % bytes.size()] = static_cast<char>(random());
        if (random() % 4 == 0) bytes.resize(random() % bytes.size());
        accepted += decode(bytes) ? 1 : 0;
    }
    CHECK(accepted > 0); // some mutations only change a number
    CHECK(accepted < 20'000);
}

TEST_CASE("frames come out whole, however the bytes arrive") {
    std::string wire = encode(message::Hello{1, "a"}) + encode(message::Ready{});
    append_body_frames(wire, std::string(150'000, 'b'));
    wire += encode(message::Withdraw{9});
    std::mt19937 random(12);
    for (int round = 0; round < 50; ++round) {
        FrameSplitter splitter;
        std::vector<std::string> frames;
        for (std::size_t at = 0; at < wire.size();) {
            const std::size_t piece = std::min<std::size_t>(1 + random() % (round < 5 ? 3 : 70'000), wire.size() - at);
            splitter.feed(std::string_view(wire).substr(at, piece));
            at += piece;
            std::string_view frame;
            while (splitter.next(frame).value()) frames.emplace_back(frame);
        }
        REQUIRE(frames.size() == 6);
        CHECK(frames[2].size() + frames[3].size() + frames[4].size() == 150'000);
        CHECK(std::holds_alternative<message::Withdraw>(decode(frames[5]).value()));
        CHECK(splitter.pending() == 0);
    }
}

TEST_CASE("a frame of no bytes, or of more than the most, ends the conversation") {
    for (const std::uint32_t length : {std::uint32_t{0}, static_cast<std::uint32_t>(kMaxFrame + 1), UINT32_MAX}) {
        FrameSplitter splitter;
        std::string bytes(4, '\0');
        for (int i = 0; i < 4; ++i) bytes[static_cast<std::size_t>(i)] = static_cast<char>(length >> (8 * i));
        splitter.feed(bytes);
        std::string_view frame;
        CHECK_FALSE(splitter.next(frame));
    }
}
