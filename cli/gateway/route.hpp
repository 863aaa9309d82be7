// What a request line and its fields ask for.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.hpp"

namespace gcoalesce::gateway {

// A request's target, in origin form.
class Target {
  public:
    explicit Target(std::string_view text);

    const std::string& path() const { return path_; }
    // The first value of that name, decoded; nullopt: there is none.
    std::optional<std::string> query(std::string_view name) const;
    // The first name in it that is none of these and brings no key; nullopt: there is no other.
    std::optional<std::string> query_but(std::initializer_list<std::string_view> names) const;
    // Whether a name is in it more than once.
    bool query_twice() const;
    // The whole query but for keys and tokens, with its question mark; "": there is none.
    std::string query_without_key() const;

  private:
    std::string path_;
    std::string query_;
};

enum class Service {
    unary,         // generateContent
    stream,        // streamGenerateContent
    chat,          // chat/completions of the OpenAI form
    pass,          // anything else of the API
    create_stream, // POST /v1/streams
    read_stream,   // GET /v1/streams/ID
    notify,        // POST /v1/notify
    health,        // GET /healthz
    ready,         // GET /readyz
    metrics,       // GET /metrics
    unknown
};

struct Route {
    Service service = Service::unknown;
    std::string_view allow;  // the methods of a path that has them; "": no such path
    std::string model;       // of unary and stream
    std::string_view stream; // of read_stream: the id's text, within the path
    std::string path;        // of pass: upstream's
};

// The service behind a path. Gemini's are found under /v1beta, /v1, /v1alpha and without a version.
Route route_of(const Target& target);

// The name in a Host field, without its port, in lower case; "": an address, a name of one label or one under
// localhost, which public DNS has not. Any other may be a page's own, led here to get around its browser's rules (DNS
// rebinding).
std::string public_name(std::string_view host);

// What Cache-Control asks of an answer (RFC 9111, 5.2.1), as gcoalesce_request tells it.
struct Freshness {
    std::int64_t max_age_ms = 0; // < 0: no finished answer
    bool no_store = false;
};
Freshness freshness_of(std::string_view cache_control);

} // namespace gcoalesce::gateway
