#include "broker/asio_timers.hpp"

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <utility>

namespace gcoalesce {
namespace {

// What the timer and its handler share: a handler that is queued already when its timer is destroyed finds no action.
struct Pending {
    explicit Pending(boost::asio::io_context& loop) : timer(loop) {}
    boost::asio::steady_timer timer; // std::chrono::steady_clock reads CLOCK_MONOTONIC, as Clock::monotonic() does
    std::function<void()> action;
};

class AsioTimer final : public Timer {
  public:
    explicit AsioTimer(std::shared_ptr<Pending> pending) : pending_(std::move(pending)) {}
    ~AsioTimer() override {
        pending_->action = nullptr;
        pending_->timer.cancel();
    }

  private:
    std::shared_ptr<Pending> pending_;
};

} // namespace

std::unique_ptr<Timer> AsioTimers::after(Nanos delay, std::function<void()> action) {
    auto pending = std::make_shared<Pending>(loop_);
    pending->action = std::move(action);
    pending->timer.expires_after(std::chrono::nanoseconds(std::max<Nanos>(delay, 0)));
    pending->timer.async_wait([pending](const boost::system::error_code&) {
        if (const auto run = std::exchange(pending->action, nullptr)) run();
    });
    return std::make_unique<AsioTimer>(std::move(pending));
}

} // namespace gcoalesce
