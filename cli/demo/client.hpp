// One client process of the demo.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <sys/types.h>
#include <vector>

#include "base/clock.hpp"
#include "segment/mapping.hpp"

namespace gcoalesce::cli::demo {

// What it saw.
struct Report {
    pid_t pid = 0;
    unsigned requests = 0, whole = 0;
    std::uint64_t bytes = 0;
    std::vector<Nanos> first_event;           // of each request that got one, since all asked
    std::map<std::string, unsigned> digests;  // SHA-256 of the events of each whole answer
    std::map<std::string, unsigned> statuses; // how they were served
    std::string text;                         // of one of the answers
    std::string trouble;                      // the first thing that went wrong
};

// One line of JSON, and back.
std::string to_line(const Report& report);
Report parse_report(std::string_view line);

// Attaches, writes a line to `out`, waits for the end of the file `go`, asks, and reads all answers in one event loop.
Report run_client(const Instance& instance, unsigned requests, int out, int go);

} // namespace gcoalesce::cli::demo
