// Those that a herd of HTTP clients can ask: the gateway, its peers, and the least that any server could do.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/process.hpp"

namespace gcoalesce::bench {

inline constexpr const char* kStreamPath = "/v1beta/models/gemini-2.5-flash:streamGenerateContent?alt=sse";

// The bytes of a POST to kStreamPath, as every client of a herd sends them.
std::string request_bytes(const std::string& body);

// Each runs until the object goes, and listens when it is there.
class HttpServer {
  public:
    virtual ~HttpServer() = default;
    virtual std::uint16_t port() const = 0;
};

// `gcoalesce serve`, attached to the broker of runtime_dir.
class GatewayServer final : public HttpServer {
  public:
    explicit GatewayServer(const std::string& runtime_dir);
    std::uint16_t port() const override { return port_; }
    pid_t pid() const { return process_.pid(); }

  private:
    test::Process process_;
    std::uint16_t port_ = 0;
};

// The distribution's nginx or Varnish before `upstream` (a URL), made to coalesce POSTs by their body as well as its
// manual lets it: nginx by proxy_cache_lock, Varnish by vmod bodyaccess and streaming. null: it is not installed.
std::unique_ptr<HttpServer> nginx_before(const std::string& upstream);
std::unique_ptr<HttpServer> varnish_before(const std::string& upstream);

// A loop over epoll that knows the answer: it sends `pieces` to whoever has sent request_bytes bytes, the first one
// `latency_ms` after the first such client, the others gap_ms apart. Nothing can be quicker: it is the floor.
class BareServer final : public HttpServer {
  public:
    BareServer(std::vector<std::string> pieces, std::size_t request_bytes, int latency_ms, int gap_ms);
    ~BareServer() override;
    std::uint16_t port() const override { return port_; }

  private:
    pid_t pid_ = -1;
    std::uint16_t port_ = 0;
};

} // namespace gcoalesce::bench
