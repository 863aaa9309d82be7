// One HTTP call to the Gemini API, behind an interface.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "base/error.hpp"
#include "protocol/gemini.hpp"

namespace gcoalesce {

class ApiKey;

struct UpstreamCall {
    Method method = Method::stream;
    std::string model;                       // resolve_model()'s form
    std::shared_ptr<const std::string> body; // goes upstream byte for byte
    std::string verb{}, path{};              // of Method::pass
    std::shared_ptr<const ApiKey> api_key{}; // null: the broker's
    std::uint64_t payer = 0;                 // whose quota it draws on; 0: the broker's
};

// Called on the event loop, never from within start(). After on_done nothing more comes.
class UpstreamEvents {
  public:
    virtual ~UpstreamEvents() = default;
    virtual void on_sent() = 0;                       // the whole body has been handed to the connection
    virtual void on_content_type(std::string_view) {} // before the head, where it tells one
    virtual void on_head(int http_status, std::int64_t retry_after_ms) = 0; // 0: no Retry-After header
    virtual void on_bytes(std::string_view bytes) = 0;                      // of the decoded body
    // clean: HTTP's own end of the body was seen. Otherwise `error` says what broke: GCOALESCE_CONNECT_FAILED with a
    // sentence (never the API key, never the URL's query).
    virtual void on_done(bool clean, const Error& error) = 0;
};

// A call under way. Destroying it, from within one of its events too, cancels the call: no more events come.
class RunningCall {
  public:
    virtual ~RunningCall() = default;
};

class Upstream {
  public:
    virtual ~Upstream() = default;
    // `events` must outlive the returned call.
    [[nodiscard]] virtual std::unique_ptr<RunningCall> start(const UpstreamCall& call, UpstreamEvents& events) = 0;
    // The text with the key that the call goes with taken out, should upstream have repeated it.
    virtual std::string without_key(const UpstreamCall& call, std::string text) const = 0;
    // Opens a connection, name and TLS included, where none is kept: calls are expected soon.
    virtual void warm_up() = 0;
};

} // namespace gcoalesce
