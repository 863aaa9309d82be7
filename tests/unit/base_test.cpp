#include <catch2/catch.hpp>
#include <cerrno>
#include <fcntl.h>
#include <set>
#include <string>
#include <vector>

#include "base/arguments.hpp"
#include "base/clock.hpp"
#include "base/error.hpp"
#include "base/fd.hpp"
#include "base/ids.hpp"
#include "base/log.hpp"
#include "base/nearest.hpp"
#include "base/sha256.hpp"
#include "base/units.hpp"

namespace {

using namespace gcoalesce;

// ---- Ids --------------------------------------------------------------------------------------------------------

TEST_CASE("Keys and stream ids survive the way to hex and back") {
    Key key{};
    for (std::size_t i = 0; i < key.size(); ++i) key[i] = static_cast<std::uint8_t>(i * 37 + 200);
    const std::string hex = to_hex(key);
    CHECK(hex.size() == 64);
    CHECK(hex.substr(0, 8) == "c8ed1237");
    CHECK(parse_key(hex) == key);
    CHECK(to_hex(StreamId{0x9f3c2a71d04b55e8}) == "9f3c2a71d04b55e8");
    CHECK(to_hex(StreamId{5}) == "0000000000000005");
    CHECK(parse_stream_id("9f3c2a71d04b55e8") == 0x9f3c2a71d04b55e8);
    CHECK(parse_stream_id("9F3C2A71D04B55E8") == 0x9f3c2a71d04b55e8);
}

TEST_CASE("Anything but a whole id is refused") {
    for (const char* text : {"", "9f3c", "9f3c2a71d04b55e", "9f3c2a71d04b55e80", "9f3c2a71d04b55eg", " 9f3c2a71d04b55e",
                             "0x3c2a71d04b55e8", "+f3c2a71d04b55e8"}) {
        INFO(text);
        CHECK_FALSE(parse_stream_id(text));
        CHECK_FALSE(parse_key(text));
    }
    CHECK_FALSE(parse_key(std::string(63, 'a')));
    CHECK_FALSE(parse_key(std::string(65, 'a')));
    CHECK_FALSE(parse_key(std::string(63, 'a') + "-"));
}

TEST_CASE("Random numbers are never 0 and do not repeat") {
    std::set<std::uint64_t> seen;
    for (int i = 0; i < 1000; ++i) seen.insert(random_u64());
    CHECK(seen.size() == 1000);
    CHECK(seen.count(0) == 0);
}

// ---- Units ------------------------------------------------------------------------------------------------------

TEST_CASE("Durations are read with their unit") {
    const std::pair<const char*, Nanos> good[] = {{"250ms", from_ms(250)},     {"0s", 0},
                                                  {"1.5s", from_ms(1500)},     {"6s", 6 * kSecond},
                                                  {"10min", 600 * kSecond},    {"2m", 120 * kSecond},
                                                  {"2h", 7200 * kSecond},      {"1d", 86400 * kSecond},
                                                  {"0.5ms", kMillisecond / 2}, {"3650d", 3650 * 86400 * kSecond}};
    for (const auto& [text, expected] : good) {
        INFO(text);
        CHECK(parse_duration(text) == expected);
    }
}

TEST_CASE("A duration without a unit, or out of range, is refused with examples") {
    for (const char* text :
         {"", "5", "s", "-1s", "1 s", "1sec", "1e3s", "nan s", "inf", "infs", "1000000d", "5S", "1s "}) {
        INFO(text);
        const auto parsed = parse_duration(text);
        REQUIRE_FALSE(parsed.has_value());
        CHECK(parsed.error().code == GCOALESCE_BAD_REQUEST);
        CHECK(parsed.error().message.find("200ms") != std::string::npos);
    }
}

TEST_CASE("Sizes are read in bytes and binary units alone") {
    const std::pair<const char*, std::uint64_t> good[] = {
        {"4096", 4096}, {"0", 0}, {"12B", 12}, {"512KiB", 512 << 10}, {"48MiB", 48 << 20}, {"1.5GiB", 3ULL << 29}};
    for (const auto& [text, expected] : good) {
        INFO(text);
        CHECK(parse_size(text) == expected);
    }
    for (const char* text : {"", "48MB", "1k", "-1", "1 MiB", "MiB", "99999999999GiB", "0x10"}) {
        INFO(text);
        REQUIRE_FALSE(parse_size(text).has_value());
        CHECK(parse_size(text).error().code == GCOALESCE_BAD_REQUEST);
    }
}

TEST_CASE("Durations and sizes are shown short") {
    CHECK(format_duration(from_ms(180)) == "180ms");
    CHECK(format_duration(from_ms(4200)) == "4.2s");
    CHECK(format_duration(180 * kSecond) == "3min");
    CHECK(format_duration(3 * 3600 * kSecond) == "3h");
    CHECK(format_duration(3 * 86400 * kSecond) == "3d");
    CHECK(format_duration(-from_ms(180)) == "-180ms");
    CHECK(format_size(812) == "812B");
    CHECK(format_size(1536) == "1.5KiB");
    CHECK(format_size(48 << 20) == "48.0MiB");
    CHECK(format_size(3ULL << 30) == "3.0GiB");
}

// ---- SHA-256 ----------------------------------------------------------------------------------------------------

TEST_CASE("Fields are hashed behind their length, as eight bytes with the lowest first") {
    // sha256sum of the same bytes.
    Sha256 hash;
    CHECK(to_hex(hash.finish()) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    hash.field("abc");
    CHECK(to_hex(hash.finish()) == "ce91dc5eec0139adf091900d225971d6ad246a845bad791b5693a9d0d55dd391");
    hash.field(std::uint64_t{0x0102030405060708});
    CHECK(to_hex(hash.finish()) == "380b980886b7a3e726b5c2776160d7842b8f139eaea1e6acf7442cdf890e6287");
}

TEST_CASE("No two lists of fields hash the same bytes") {
    const auto digest = [](const std::vector<std::string>& fields) {
        Sha256 hash;
        for (const std::string& field : fields) hash.field(field);
        return hash.finish();
    };
    CHECK(digest({"ab", "c"}) != digest({"a", "bc"}));
    CHECK(digest({"abc"}) != digest({"abc", ""}));
    CHECK(digest({}) != digest({""}));
    CHECK(digest({"abc"}) == digest({"abc"}));
}

// ---- Errors, log, clock, descriptors ----------------------------------------------------------------------------

TEST_CASE("Every code has a word of its own") {
    std::set<std::string> words;
    int codes = 0;
    for (int code = 0; code < 100; ++code) {
        const std::string word = code_name(static_cast<Code>(code));
        if (word == "unknown") continue;
        ++codes;
        words.insert(word);
        CHECK(word.find_first_not_of("abcdefghijklmnopqrstuvwxyz_") == std::string::npos);
    }
    CHECK(words.size() == static_cast<std::size_t>(codes));
    CHECK(codes > 30);
    CHECK(std::string(code_name(GCOALESCE_OK)) == "ok");
    CHECK(std::string(code_name(GCOALESCE_BUSY)) == "busy");
    CHECK(std::string(code_name(GCOALESCE_INTERNAL)) == "internal");
}

TEST_CASE("A failed system call says what errno says") {
    errno = ENOENT;
    const Result<int> result = fail_errno(GCOALESCE_IO, "cannot open the store");
    REQUIRE_FALSE(result.has_value());
    CHECK(result.error().code == GCOALESCE_IO);
    CHECK(result.error().message == "cannot open the store: No such file or directory");
}

TEST_CASE("Log levels are known by their words") {
    CHECK(parse_log_level("debug") == LogLevel::debug);
    CHECK(parse_log_level("error") == LogLevel::error);
    CHECK_FALSE(parse_log_level("loud").has_value());
    CHECK(log_enabled(LogLevel::error));
    CHECK_FALSE(log_enabled(LogLevel::debug)); // the default is info
}

TEST_CASE("The machine's clocks go forward and count from where they should") {
    const Clock& clock = system_clock();
    const Nanos first = clock.monotonic();
    CHECK(clock.monotonic() >= first);
    CHECK(clock.boottime() >= first); // it also counts suspended time
    CHECK(clock.wall() > 1'700'000'000 * kSecond);
}

TEST_CASE("A descriptor is closed once, by its last owner") {
    const auto is_open = [](int fd) { return ::fcntl(fd, F_GETFD) != -1; };
    UniqueFd first(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    REQUIRE(first);
    const int number = first.get();
    UniqueFd second(std::move(first));
    CHECK(second.get() == number);
    CHECK(is_open(number));
    UniqueFd third(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    const int replaced = third.get();
    third = std::move(second);
    CHECK_FALSE(is_open(replaced));
    CHECK(third.get() == number);
    const int released = third.release();
    CHECK_FALSE(third);
    CHECK(is_open(released));
    UniqueFd(released).reset();
    CHECK_FALSE(is_open(released));
}

// ---- Words ------------------------------------------------------------------------------------------------------

TEST_CASE("An option's empty value is one, and what stands behind -- is none of an option's") {
    const auto takes_value = [](const std::string& name) { return name == "--text"; };
    const auto put = [&](std::vector<std::string> given) { return with_empty_values(given, takes_value); };
    using Words = std::vector<std::string>;
    CHECK(put({"a", "--text=", "b"}) == Words{"a", "--text", "", "b"});
    CHECK(put({"--text=x", "--text", "--text=", "--flag="}) == Words{"--text=x", "--text", "--text=", "--flag="});
    CHECK(put({"--", "--text="}) == Words{"--", "--text="});
    CHECK(put({"--text", "--", "--text="}) == Words{"--text", "--", "--text", ""});
}

TEST_CASE("Numbers with leading zeros or of another base are none that people mean") {
    for (const char* good : {"0", "10", "-1", "+5", "0.5", "-0.5", "1e3", "", "few"})
        CHECK(complaint_of_number(good).empty());
    for (const char* bad : {"010", "00", "-01", "0x10", "0X1", "0x1p3"}) CHECK_FALSE(complaint_of_number(bad).empty());
}

TEST_CASE("A slip of the pen is told from another word") {
    const std::vector<std::string> known{"ask", "keys", "notify", "stats"};
    CHECK(nearest("kyes", known) == "keys");
    CHECK(nearest("stat", known) == "stats");
    CHECK(nearest("notfiy", known) == "notify");
    CHECK(nearest("sim", known).empty());
    CHECK(nearest("", known).empty());
    CHECK(nearest(std::string(100'000, 'k'), known).empty());
}

TEST_CASE("a log sink gets the lines that the level lets through, with their fields") {
    std::vector<std::string> got;
    set_log_sink([&got](LogLevel level, std::string_view line, LogFields fields) {
        std::string entry = fmt::format("{} {}", static_cast<int>(level), line);
        for (const LogField& field : fields) entry += fmt::format(" {}={}", field.name, field.value);
        got.push_back(entry);
        return true;
    });
    log(LogLevel::warning, {{"CODE", "busy"}, {"TEMPLATE", "news"}}, "{} of {}", 1, 2);
    log(LogLevel::info, "plain");
    log(LogLevel::debug, {{"CODE", "ok"}}, "nobody asked for this");
    set_log_sink({});
    CHECK(got == std::vector<std::string>{"4 1 of 2 CODE=busy TEMPLATE=news", "6 plain"});
}

} // namespace
