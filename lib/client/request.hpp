// What a caller asks, and the key it is shared under as far as this process can tell.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "base/ids.hpp"
#include "protocol/gemini.hpp"

namespace gcoalesce {

// What decides whether two requests ask the same, as the caller gave it. Views: somebody keeps the texts.
struct Asked {
    std::string_view template_id;
    std::string_view model; // resolve_model()'s form; "" with a template
    Method method = Method::stream;
    std::string_view body; // or a template's variables
    std::string_view realm{};
    std::string_view explicit_key{};
    std::string_view verb{}, path{}; // of a call that is passed on
    bool own_api_key = false;        // the realm is that of the caller's key, and counts whatever the template says

    bool operator==(const Asked&) const = default;
};

// The same with texts of its own.
class Request {
  public:
    explicit Request(const Asked& asked)
        : template_id_(asked.template_id),
          model_(asked.model),
          method_(asked.method),
          body_(asked.body),
          realm_(asked.realm),
          explicit_key_(asked.explicit_key),
          verb_(asked.verb),
          path_(asked.path),
          own_api_key_(asked.own_api_key) {}

    Asked asked() const {
        return {template_id_, model_, method_, body_, realm_, explicit_key_, verb_, path_, own_api_key_};
    }
    std::size_t bytes() const { return body_.size(); }

  private:
    std::string template_id_, model_;
    Method method_;
    std::string body_, realm_, explicit_key_, verb_, path_;
    bool own_api_key_;
};

// What one requester wants besides; none of it is part of the key.
struct Wishes {
    gcoalesce_sharing sharing = GCOALESCE_SHARE;
    std::int64_t max_age_ms = 0; // as gcoalesce_request tells it
    bool no_store = false;
    StreamId individual_of = 0; // the invalid stream in whose place it is asked
    StreamId resume = 0;        // the stream to go on with, behind this event
    std::uint64_t resume_after = 0;
    std::string realm{};   // whose a stream to resume has to be
    std::string api_key{}; // the caller's own, for a call that it causes; "": the broker's
};

// Remembers the keys of recent requests. Identical requests are the workload: the first one of them pays for the
// canonical form and the hash, the others for a comparison, and all share one copy of the body. Not thread-safe.
class KeyMemo {
  public:
    struct Found {
        std::shared_ptr<const Request> request;
        std::optional<Key> key; // of this revision of the template
    };
    // The request whose bytes are the same, if it is remembered.
    std::optional<Found> find(const Asked& asked, std::uint64_t revision) const;

    void remember(std::shared_ptr<const Request> request, std::uint64_t revision, const Key& key);

  private:
    struct Entry {
        std::shared_ptr<const Request> request;
        std::uint64_t revision;
        Key key;
    };
    std::unordered_map<std::uint64_t, Entry> entries_; // by a hash of the request
    std::deque<std::uint64_t> order_;                  // oldest first
    std::size_t bytes_ = 0;                            // of bodies
};

} // namespace gcoalesce
