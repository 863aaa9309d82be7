#include "broker/asio_timers.hpp"

#include <boost/asio/io_context.hpp>
#include <catch2/catch.hpp>
#include <vector>

using namespace gcoalesce;

TEST_CASE("Timers run once, in the order of their times, not before them, and never within the call that asks") {
    boost::asio::io_context loop;
    AsioTimers timers(loop);
    const Nanos start = timers.clock().monotonic();
    std::vector<int> ran;
    bool late_enough = true;
    const auto record = [&](int number, Nanos delay) {
        return timers.after(delay, [&, number, delay] {
            ran.push_back(number);
            late_enough = late_enough && timers.clock().monotonic() - start >= delay;
        });
    };
    const auto third = record(3, 30 * kMillisecond);
    const auto second = record(2, 10 * kMillisecond);
    const auto first = record(1, 0);
    const auto overdue = record(0, -kSecond);
    CHECK(ran.empty());
    loop.run();
    CHECK(std::vector<int>(ran.begin() + 2, ran.end()) == std::vector{2, 3});
    CHECK(ran.size() == 4);
    CHECK(late_enough);
}

TEST_CASE("A timer that was destroyed does not run, even where it was due already") {
    boost::asio::io_context loop;
    AsioTimers timers(loop);
    int ran = 0;
    std::unique_ptr<Timer> one, other;
    // Both are due when the loop begins: whichever runs first destroys the other one, whose turn is next.
    one = timers.after(0, [&] {
        ++ran;
        other.reset();
    });
    other = timers.after(0, [&] {
        ++ran;
        one.reset();
    });
    timers.after(0, [&] { ++ran; }).reset();
    loop.run();
    CHECK(ran == 1);
}

TEST_CASE("A timer may be destroyed or replaced by its own action") {
    boost::asio::io_context loop;
    AsioTimers timers(loop);
    std::vector<int> ran;
    std::unique_ptr<Timer> timer;
    timer = timers.after(0, [&, keep = std::vector<int>{1, 2, 3}] {
        timer = timers.after(0, [&] {
            ran.push_back(9);
            timer.reset();
        });
        ran = keep; // the action outlives its timer
    });
    loop.run();
    CHECK(ran == std::vector{1, 2, 3, 9});
}
