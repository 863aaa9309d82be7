// Timers of the event loop.
#pragma once

#include "broker/timers.hpp"

namespace boost::asio {
class io_context;
}

namespace gcoalesce {

class AsioTimers final : public Timers {
  public:
    explicit AsioTimers(boost::asio::io_context& loop) : loop_(loop) {} // the loop must outlive its timers

    const Clock& clock() const override { return system_clock(); }
    std::unique_ptr<Timer> after(Nanos delay, std::function<void()> action) override;

  private:
    boost::asio::io_context& loop_;
};

} // namespace gcoalesce
