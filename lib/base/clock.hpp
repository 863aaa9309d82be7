// Time behind an interface, so that tests move it by hand.
#pragma once

#include <cstdint>
#include <string>

namespace gcoalesce {

// Nanoseconds. Monotonic time decides everything while a machine runs; wall-clock time is only shown to people.
using Nanos = std::int64_t;

constexpr Nanos kMillisecond = 1'000'000;
constexpr Nanos kSecond = 1'000 * kMillisecond;

constexpr Nanos from_ms(std::int64_t ms) {
    return ms * kMillisecond;
}
constexpr std::int64_t to_ms(Nanos ns) {
    return ns / kMillisecond;
}

class Clock {
  public:
    virtual ~Clock() = default;
    virtual Nanos monotonic() const = 0; // CLOCK_MONOTONIC: comparable between the processes of one boot
    virtual Nanos boottime() const = 0;  // CLOCK_BOOTTIME: also counts suspended time
    virtual Nanos wall() const = 0;      // CLOCK_REALTIME since 1970, may jump
};

// The machine's clocks. Thread-safe, lives for ever.
const Clock& system_clock();

// The kernel's name for this boot (random(4)): monotonic and boot times are comparable under one such name only.
std::string boot_id();

} // namespace gcoalesce
