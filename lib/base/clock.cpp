#include "base/clock.hpp"

#include <ctime>
#include <fstream>

namespace gcoalesce {
namespace {

Nanos read(clockid_t id) {
    timespec now{};
    ::clock_gettime(id, &now);
    return static_cast<Nanos>(now.tv_sec) * kSecond + now.tv_nsec;
}

class SystemClock final : public Clock {
  public:
    Nanos monotonic() const override { return read(CLOCK_MONOTONIC); }
    Nanos boottime() const override { return read(CLOCK_BOOTTIME); }
    Nanos wall() const override { return read(CLOCK_REALTIME); }
};

} // namespace

const Clock& system_clock() {
    static const SystemClock clock;
    return clock;
}

std::string boot_id() {
    std::string line;
    std::ifstream file("/proc/sys/kernel/random/boot_id");
    std::getline(file, line);
    return line;
}

} // namespace gcoalesce
