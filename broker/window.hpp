// The notification window: for some time after a push, answers stay fresh longer.
#pragma once

#include <algorithm>

#include "base/clock.hpp"

namespace gcoalesce {

// Times are monotonic. Single-threaded.
class Window {
  public:
    Window() = default;
    explicit Window(Nanos until) : until_(until) {}

    // Until the later of the present deadline and now + duration.
    void on(Nanos now, Nanos duration) { until_ = std::max(open(now) ? until_ : 0, now + duration); }
    // Ends it; what was stamped keeps its stamp.
    void off(Nanos now) { until_ = std::min(until_, now); }

    bool open(Nanos now) const { return now < until_; }
    Nanos remaining(Nanos now) const { return open(now) ? until_ - now : 0; }
    Nanos until() const { return until_; }

    // Whether it was open at any moment since `start`, up to now: every opening began before now, so the last one
    // tells, by when it ended or will end.
    bool touched(Nanos start) const { return until_ > start; }

  private:
    Nanos until_ = 0;
};

} // namespace gcoalesce
