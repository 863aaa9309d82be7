// The Gemini API itself, by libcurl on the event loop.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/clock.hpp"
#include "broker/api_key.hpp"
#include "broker/upstream.hpp"

namespace boost::asio {
class io_context;
}

namespace gcoalesce {

struct CurlUpstreamOptions {
    std::string url = "https://generativelanguage.googleapis.com"; // what stands before "/v1beta/models/..."
    std::string ca_file;                                           // PEM; "": the system's certificates
    std::string proxy;                   // as CURLOPT_PROXY takes it; "": none, the environment's proxies never count
    Nanos connect_timeout = 5 * kSecond; // until the request can be sent: name, TCP and TLS together
    std::function<void(std::size_t)> connected; // is told of each call that opened connections; may be empty
};

// Single-threaded: the event loop's, which must outlive it. The program must ignore SIGPIPE.
//
// HTTP/2 where TLS offers it, connections are kept for later calls. One start() is at most one HTTP request: a kept
// connection that turns out to be dead fails the call.
class CurlUpstream final : public Upstream {
  public:
    // GCOALESCE_BAD_REQUEST: the URL is no plain http or https URL, or the CA file cannot be read.
    static Result<std::unique_ptr<CurlUpstream>> create(boost::asio::io_context& loop,
                                                        const CurlUpstreamOptions& options);
    ~CurlUpstream() override; // its calls must be gone

    // For the calls started from now on. Before the first time there is no key.
    void set_key(const ApiKey& key);

    // Calls would be refused: there is no key, and the URL is not plain http to this machine, where stand-ins listen.
    bool needs_key() const;

    std::unique_ptr<RunningCall> start(const UpstreamCall& call, UpstreamEvents& events) override;
    std::string without_key(const UpstreamCall& call, std::string text) const override;
    void warm_up() override; // a HEAD of the URL's root, without the key

  private:
    struct Multi;
    explicit CurlUpstream(std::shared_ptr<Multi> multi);
    std::shared_ptr<Multi> multi_;
};

} // namespace gcoalesce
