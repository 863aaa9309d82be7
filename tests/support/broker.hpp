// `gcoalesced` as a child process, in a runtime directory of its own.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "segment/counters.hpp"
#include "segment/mapping.hpp"
#include "tests/support/instance.hpp"
#include "tests/support/process.hpp"

namespace gcoalesce::test {

// The path of the gcoalesced that belongs to this build.
std::string gcoalesced_program();

// What starts a broker of the instance that takes its answers from `upstream`, a URL. Where `arguments` do not tell,
// its memory is small, so that it starts fast.
std::vector<std::string> broker_command(const Instance& instance, const std::string& upstream,
                                        std::vector<std::string> arguments = {});

class Broker {
  public:
    // Serves when the constructor returns. Throws, with what it wrote, where it does not.
    Broker(const Instance& instance, const std::string& upstream, std::vector<std::string> arguments = {});

    Process& process() { return process_; }
    int stop(); // SIGTERM; its exit code

    // What anybody may read; stays readable when the broker has gone.
    const SegmentView& view() const { return segment_.view; }
    std::uint64_t counted(Counter counter) const;
    std::uint64_t extents_free() const;

  private:
    Process process_;
    OpenSegment segment_;
};

// Whether a child of this process has ended; it stays to be reaped.
bool has_ended(pid_t pid);

// Looks until it holds. False: not within the watchdog's time.
bool eventually(const std::function<bool()>& holds, std::chrono::seconds watchdog = std::chrono::seconds(60));

} // namespace gcoalesce::test
