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

struct Request {
    std::string model; // resolve_model()'s form
    Method method = Method::stream;
    std::string body;
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
    std::optional<Found> find(std::string_view model, Method method, std::string_view body,
                              std::uint64_t revision) const;

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
