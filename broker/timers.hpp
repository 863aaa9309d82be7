// Doing something later, behind an interface, so that tests move time by hand.
#pragma once

#include <functional>
#include <memory>

#include "base/clock.hpp"

namespace gcoalesce {

// Destroying it cancels what has not run yet.
class Timer {
  public:
    virtual ~Timer() = default;
};

class Timers {
  public:
    virtual ~Timers() = default;
    virtual const Clock& clock() const = 0;
    // Runs `action` once, on the event loop, not before `delay` has passed and never within this call. Event loop only.
    [[nodiscard]] virtual std::unique_ptr<Timer> after(Nanos delay, std::function<void()> action) = 0;
};

} // namespace gcoalesce
