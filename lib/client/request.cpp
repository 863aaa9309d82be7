#include "client/request.hpp"

#include <functional>

namespace gcoalesce {
namespace {

constexpr std::size_t kMostEntries = 256;
constexpr std::size_t kMostBytes = 8 * 1024 * 1024;

std::uint64_t hash_of(const Asked& asked) {
    const std::hash<std::string_view> hash;
    std::uint64_t value = static_cast<std::uint64_t>(asked.method);
    for (const std::string_view text : {asked.template_id, asked.model, asked.body, asked.realm, asked.explicit_key})
        value = value * 31 + hash(text);
    return value;
}

} // namespace

std::optional<KeyMemo::Found> KeyMemo::find(const Asked& asked, std::uint64_t revision) const {
    if (asked.body.size() > kMostBytes) return std::nullopt; // never remembered
    const auto found = entries_.find(hash_of(asked));
    if (found == entries_.end()) return std::nullopt;
    const Entry& entry = found->second;
    // A hash that fits proves nothing: a wrong key would be a wrong answer.
    if (entry.request->asked() != asked) return std::nullopt;
    return Found{entry.request, entry.revision == revision ? std::optional(entry.key) : std::nullopt};
}

void KeyMemo::remember(std::shared_ptr<const Request> request, std::uint64_t revision, const Key& key) {
    const std::size_t bytes = request->bytes();
    if (bytes > kMostBytes) return;
    const std::uint64_t hash = hash_of(request->asked());
    if (const auto old = entries_.find(hash); old != entries_.end()) {
        bytes_ -= old->second.request->bytes();
        old->second = Entry{std::move(request), revision, key};
    } else {
        entries_.emplace(hash, Entry{std::move(request), revision, key});
        order_.push_back(hash);
    }
    bytes_ += bytes;
    while (order_.size() > kMostEntries || bytes_ > kMostBytes) {
        const auto oldest = entries_.find(order_.front());
        bytes_ -= oldest->second.request->bytes();
        entries_.erase(oldest);
        order_.pop_front();
    }
}

} // namespace gcoalesce
