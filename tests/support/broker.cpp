#include "tests/support/broker.hpp"

#include <algorithm>
#include <stdexcept>
#include <sys/wait.h>
#include <thread>

namespace gcoalesce::test {
namespace {

// The segment of this broker, and not one that a dead broker left.
OpenSegment wait_until_serving(const Instance& instance, Process& process) {
    OpenSegment found;
    const bool serves = eventually([&] {
        Result<OpenSegment> segment = open_segment(instance);
        if (segment && segment->view.header().broker_pid == process.pid()) {
            found = std::move(*segment);
            return true;
        }
        return has_ended(process.pid());
    });
    if (found.fd) return found;
    if (serves) process.wait();
    throw std::runtime_error("the broker does not serve:\n" + process.err());
}

} // namespace

std::string gcoalesced_program() {
    return GCOALESCED;
}

std::vector<std::string> broker_command(const Instance& instance, const std::string& upstream,
                                        std::vector<std::string> arguments) {
    if (std::find(arguments.begin(), arguments.end(), "--memory") == arguments.end())
        arguments.insert(arguments.end(), {"--memory", "16MiB"});
    arguments.insert(arguments.begin(), {gcoalesced_program(), "--instance", instance.name, "--runtime-dir",
                                         instance.runtime_dir, "--upstream", upstream});
    return arguments;
}

Broker::Broker(const Instance& instance, const std::string& upstream, std::vector<std::string> arguments)
    : process_(broker_command(instance, upstream, std::move(arguments))),
      segment_(wait_until_serving(instance, process_)) {}

int Broker::stop() {
    process_.signal(SIGTERM);
    return process_.wait();
}

std::uint64_t Broker::counted(Counter counter) const {
    return view().counter(static_cast<std::uint32_t>(counter)).value.load(std::memory_order_relaxed);
}

std::uint64_t Broker::extents_free() const {
    return view().header().extents_free.load(std::memory_order_relaxed);
}

bool has_ended(pid_t pid) {
    siginfo_t info{};
    return ::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == pid;
}

bool eventually(const std::function<bool()>& holds, std::chrono::seconds watchdog) {
    const auto deadline = std::chrono::steady_clock::now() + watchdog;
    while (!holds()) {
        if (std::chrono::steady_clock::now() >= deadline) return false;
        std::this_thread::sleep_for(std::chrono::milliseconds(1)); // leaves the processor to those it waits for
    }
    return true;
}

} // namespace gcoalesce::test
