// The gateway's process: listens, attaches, and lets the broker's news through to its readers.
#pragma once

#include <functional>
#include <string>

#include "base/error.hpp"
#include "cli/gateway/options.hpp"

namespace gcoalesce::gateway {

// Serves until SIGINT or SIGTERM, then lets answers under way end; a second signal ends it at once. It needs no broker
// to start: without one, requests are told so. on_listening gets "http://ADDRESS:PORT" or "unix:PATH" once connections
// are accepted. Errors: GCOALESCE_BAD_REQUEST (the options), GCOALESCE_IO (cannot listen). Call it once, from one
// thread.
Result<void> serve(const Options& options, const std::function<void(const std::string& url)>& on_listening);

} // namespace gcoalesce::gateway
