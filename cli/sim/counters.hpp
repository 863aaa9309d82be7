// What the stand-in counts, for tests to look at.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace gcoalesce::sim {

// A call is a POST to generateContent or streamGenerateContent whose body has arrived. Not thread-safe.
struct Counters {
    std::uint64_t calls = 0, in_flight = 0;
    std::uint64_t most_in_flight = 0; // at any moment
    std::uint64_t aborted = 0;        // calls whose client closed before the end
    std::uint64_t connections = 0, open_connections = 0;
    std::map<std::string, std::uint64_t> by_body;   // by SHA-256 of the raw body, hex
    std::map<std::string, std::uint64_t> by_status; // by HTTP status; a call without any is not in it

    std::string json() const; // the body of GET /sim/calls
    void reset();             // but for what is under way, which goes on being counted
};

// Counts one call, or one connection, for as long as it lasts.
class Gauge {
  public:
    explicit Gauge(std::uint64_t& count) : count_(count) { ++count_; }
    ~Gauge() { --count_; }
    Gauge(const Gauge&) = delete;
    Gauge& operator=(const Gauge&) = delete;

  private:
    std::uint64_t& count_;
};

} // namespace gcoalesce::sim
