// Time that tests move by hand.
#pragma once

#include <map>
#include <new>
#include <optional>
#include <utility>

#include "broker/timers.hpp"

namespace gcoalesce::test {

class FakeClock final : public Clock {
  public:
    Nanos monotonic() const override { return now_; }
    Nanos boottime() const override { return now_ + kSecond; }
    Nanos wall() const override { return now_ + 1'700'000'000 * kSecond + wall_steps_; }

    void advance(Nanos by) { now_ += by; }
    void step_wall(Nanos by) { wall_steps_ += by; } // somebody sets the wall clock

  private:
    Nanos now_ = 1000 * kSecond, wall_steps_ = 0;
};

class FakeTimers final : public Timers {
  public:
    explicit FakeTimers(FakeClock& clock) : clock_(clock) {}

    const Clock& clock() const override { return clock_; }

    std::unique_ptr<Timer> after(Nanos delay, std::function<void()> action) override {
        if (std::exchange(fail_next, false)) throw std::bad_alloc();
        const Due due{clock_.monotonic() + delay, ++made_};
        waiting_.emplace(due, std::move(action));
        return std::make_unique<Waiting>(waiting_, due);
    }

    // Moves the clock, and on its way runs what falls due, each at its own moment, also what is added meanwhile.
    void advance(Nanos by) {
        const Nanos until = clock_.monotonic() + by;
        while (!waiting_.empty() && waiting_.begin()->first.first <= until) {
            const auto next = waiting_.extract(waiting_.begin());
            clock_.advance(next.key().first - clock_.monotonic());
            next.mapped()();
        }
        clock_.advance(until - clock_.monotonic());
    }

    bool fail_next = false; // the next timer cannot be had

    std::size_t waiting() const { return waiting_.size(); }

    // How long until the next one runs; nullopt: none waits.
    std::optional<Nanos> next() const {
        if (waiting_.empty()) return std::nullopt;
        return waiting_.begin()->first.first - clock_.monotonic();
    }

  private:
    using Due = std::pair<Nanos, std::uint64_t>; // equals run in the order in which they were asked for
    using Queue = std::map<Due, std::function<void()>>;

    class Waiting final : public Timer {
      public:
        Waiting(Queue& queue, Due due) : queue_(queue), due_(due) {}
        ~Waiting() override { queue_.erase(due_); }

      private:
        Queue& queue_;
        Due due_;
    };

    FakeClock& clock_;
    Queue waiting_;
    std::uint64_t made_ = 0;
};

} // namespace gcoalesce::test
