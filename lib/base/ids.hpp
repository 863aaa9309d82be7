// The names of things: keys (32 bytes), stream ids (64 random bits), event ids ("<stream id>.<number>").
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace gcoalesce {

using Key = std::array<std::uint8_t, 32>;
using StreamId = std::uint64_t;

std::string to_hex(std::span<const std::uint8_t> bytes);
std::string to_hex(StreamId id); // 16 lower-case digits

// Whole ids only, lower or upper case; anything else is nullopt.
std::optional<Key> parse_key(std::string_view hex);
std::optional<StreamId> parse_stream_id(std::string_view hex);

// "<stream id>.<number>", the number from 1; "<stream id>" alone, or .0, stands before the first event.
struct EventId {
    StreamId stream;
    std::uint64_t number;
};
std::string to_text(const EventId& id);
std::optional<EventId> parse_event_id(std::string_view text);

// From the kernel's generator (getrandom); never 0. Thread-safe.
std::uint64_t random_u64();

} // namespace gcoalesce
