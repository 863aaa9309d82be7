// `gcoalesce sim` as a child process: the upstream of a test.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/support/process.hpp"

namespace gcoalesce::test {

// The path of the gcoalesce that belongs to this build.
std::string gcoalesce_program();

class Sim {
  public:
    // Runs until the object goes; listens on a free port of 127.0.0.1 when the constructor returns.
    explicit Sim(std::vector<std::string> arguments = {});

    const std::string& url() const { return url_; } // "http://127.0.0.1:PORT"
    std::uint16_t port() const;
    std::string calls() const; // GET /sim/calls
    void reset() const;        // POST /sim/reset
    void release() const;      // POST /sim/release
    Process& process() { return process_; }

  private:
    Process process_;
    std::string url_;
};

// A request body whose only user turn is `prompt`, which has no character that JSON escapes.
std::string prompt_body(const std::string& prompt);

} // namespace gcoalesce::test
