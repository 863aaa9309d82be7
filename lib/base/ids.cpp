#include "base/ids.hpp"

#include <cerrno>
#include <charconv>
#include <fmt/format.h>
#include <sys/random.h>

namespace gcoalesce {
namespace {

int hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

bool parse_hex(std::string_view hex, std::span<std::uint8_t> out) {
    if (hex.size() != out.size() * 2) return false;
    for (std::size_t i = 0; i < out.size(); ++i) {
        const int high = hex_digit(hex[2 * i]);
        const int low = hex_digit(hex[2 * i + 1]);
        if (high < 0 || low < 0) return false;
        out[i] = static_cast<std::uint8_t>(high * 16 + low);
    }
    return true;
}

} // namespace

std::string to_hex(std::span<const std::uint8_t> bytes) {
    constexpr char digits[] = "0123456789abcdef";
    std::string out;
    out.reserve(bytes.size() * 2);
    for (const std::uint8_t byte : bytes) {
        out.push_back(digits[byte >> 4]);
        out.push_back(digits[byte & 15]);
    }
    return out;
}

std::string to_hex(StreamId id) {
    return fmt::format("{:016x}", id);
}

std::optional<Key> parse_key(std::string_view hex) {
    Key key{};
    if (!parse_hex(hex, key)) return std::nullopt;
    return key;
}

std::optional<StreamId> parse_stream_id(std::string_view hex) {
    std::array<std::uint8_t, 8> bytes{};
    if (!parse_hex(hex, bytes)) return std::nullopt;
    StreamId id = 0;
    for (const std::uint8_t byte : bytes) id = (id << 8) | byte;
    return id;
}

std::string to_text(const EventId& id) {
    return fmt::format("{:016x}.{}", id.stream, id.number);
}

std::optional<EventId> parse_event_id(std::string_view text) {
    const std::size_t dot = text.find('.');
    const std::optional<StreamId> stream = parse_stream_id(text.substr(0, dot));
    if (!stream || *stream == 0) return std::nullopt;
    EventId id{*stream, 0};
    if (dot == std::string_view::npos) return id;
    const char* const end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data() + dot + 1, end, id.number);
    if (error != std::errc() || rest != end) return std::nullopt;
    return id;
}

std::uint64_t random_u64() {
    std::uint64_t value = 0;
    while (value == 0) {
        // Up to 256 bytes come whole or not at all (getrandom(2)); before the pool is ready it may be interrupted.
        if (::getrandom(&value, sizeof value, 0) != sizeof value) value = 0;
    }
    return value;
}

} // namespace gcoalesce
