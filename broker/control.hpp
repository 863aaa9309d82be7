// The control socket: who attaches, and what they ask.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "base/fd.hpp"
#include "broker/coalescer.hpp"
#include "broker/store.hpp"

namespace boost::asio {
class io_context;
}

namespace gcoalesce {

struct ControlOptions {
    std::optional<std::uint32_t> admin_group; // who may notify, cancel, purge, reload; absent: everyone who may attach
    Nanos stall_timeout = 60 * kSecond;       // how long a lane with pins outlives its connection
    std::function<Result<void>()> reload;     // reads templates and API key again
};

struct ControlLimits {
    std::size_t descriptors = 16384;               // of connections and, two each, of attached clients
    std::size_t body_bytes = 256ull * 1024 * 1024; // of bodies that are being received or parsed, over all clients
    std::size_t parse_inline = 256 * 1024;         // larger bodies are parsed on the worker
    std::size_t unread_answers = 1 << 20;          // bytes a client may leave unread
    Nanos hello = 5 * kSecond;                     // from the connection to `ready`
};

// Serves clients until it is destroyed. Event loop only. What a client sends can cost it its connection, and nobody
// else anything.
class ControlServer {
  public:
    // listener: a listening, non-blocking Unix stream socket. segment_fd: the segment, opened read-only: every client
    // gets a copy. The referenced objects must outlive the server.
    ControlServer(boost::asio::io_context& loop, UniqueFd listener, UniqueFd segment_fd, Store& store,
                  Coalescer& coalescer, ControlOptions options, const ControlLimits& limits = {});
    ~ControlServer();

    void stop_listening(); // connections stay
    void goodbye_all(Code code, const std::string& message);

    struct State; // the implementation's own

  private:
    std::shared_ptr<State> state_;
};

// Binds and listens at `path` with mode 0660, in place of a dead broker's socket. The caller holds the instance's lock.
// GCOALESCE_BUSY: somebody listens there all the same.
Result<UniqueFd> listen_at(const std::string& path);

} // namespace gcoalesce
