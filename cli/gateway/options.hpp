// How a gateway is to serve.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "segment/mapping.hpp"

namespace gcoalesce::gateway {

struct Options {
    Instance instance;
    std::string listen = "127.0.0.1:8790"; // "ADDRESS:PORT", or "unix:PATH"
    std::string token_file;                // "": everyone who can connect may ask
    bool pass_key = false;                 // what a caller causes is called with the caller's own API key
    std::vector<std::string> hosts;        // names with dots that Host may have where there are no tokens
    std::vector<std::string> cors_origins; // whose pages may ask; "*": everyone's
    std::size_t max_body = 32u << 20;      // bytes of one request's body
    std::size_t max_bodies = 256u << 20;   // of all bodies that are being received
    std::size_t max_head = 32u << 10;      // bytes of a request's head
    std::size_t max_connections = 16384;
    Nanos idle = 75 * kSecond;      // a connection without a request
    Nanos request = 30 * kSecond;   // from a request's first byte to its last
    Nanos stall = 60 * kSecond;     // a client that takes nothing of what is there for it
    Nanos heartbeat = 15 * kSecond; // a comment, where ids go along and nothing else comes
    Nanos drain = 10 * kSecond;     // for answers under way, once the gateway is told to end
};

} // namespace gcoalesce::gateway
