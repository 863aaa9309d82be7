// From an `open` message and its body to what the coalescer decides on.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "broker/api_key.hpp"
#include "broker/policy.hpp"
#include "broker/store.hpp"
#include "protocol/control.hpp"
#include "templates/schema.hpp"

namespace gcoalesce {

struct OpenRequest {
    LaneId lane = 0;
    std::shared_ptr<const TemplateSettings> settings; // the template's, when the request came; null: a stream to resume
    std::string model;                                // resolve_model()'s form
    Method method = Method::stream;
    std::string verb, path; // of Method::pass
    gcoalesce_sharing sharing = GCOALESCE_SHARE;
    std::shared_ptr<const std::string> body; // what goes upstream
    Key digest{};                            // of the body
    Key key{};
    std::uint64_t realm = 0;               // whom it is shared with; 0: everyone
    std::shared_ptr<const ApiKey> api_key; // the caller's own; null: the broker's
    std::optional<Nanos> max_age;          // of a finished answer; absent: while it is fresh
    bool no_store = false;                 // an answer that it causes is not kept
    StreamId individual_of = 0;            // the invalid stream that it is asked in place of
    StreamId resume = 0;                   // the stream to go on with, behind event resume_after
    std::uint64_t resume_after = 0;
    std::optional<Schema> schema; // the template's, or the one that the request brings
    bool unchecked = false;       // it brings one that cannot be checked

    std::uint64_t payer() const { return api_key ? realm : 0; } // whose quota a call draws on; 0: the broker's
};

// Renders a template, makes the body canonical, computes the key: the costs of a request, linear in its body. settings:
// of the template that the message names. Errors: GCOALESCE_BAD_REQUEST. Thread-safe.
Result<OpenRequest> prepare(const message::Open& open, std::shared_ptr<const std::string> body,
                            std::shared_ptr<const TemplateSettings> settings);

// A realm's name as slots carry it; "" is 0, everyone.
std::uint64_t realm_number(std::string_view realm);

} // namespace gcoalesce
