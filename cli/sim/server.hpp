// The stand-in's HTTP side: one thread, HTTP/1.1 (and 1.0) without TLS.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "base/error.hpp"
#include "cli/sim/script.hpp"

namespace gcoalesce::sim {

struct ServerOptions {
    std::string bind = "127.0.0.1"; // an address, IPv4 or IPv6
    std::uint16_t port = 0;         // 0: any free one
    Script defaults;
    bool require_key = false;
    std::optional<std::string> accept_key; // the only API key that is valid
    std::string replay;                    // a folder of recorded files, or one such file for every call; "": none
};

// Serves until SIGINT or SIGTERM. on_listening gets "http://ADDRESS:PORT" once connections are accepted.
// Errors: GCOALESCE_IO (cannot listen, no such file), GCOALESCE_BAD_REQUEST (no address). Call it once, from one
// thread.
Result<void> serve(const ServerOptions& options, const std::function<void(const std::string& url)>& on_listening);

} // namespace gcoalesce::sim
