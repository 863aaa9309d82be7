#include "client/request.hpp"

#include <functional>

namespace gcoalesce {
namespace {

constexpr std::size_t kMostEntries = 256;
constexpr std::size_t kMostBytes = 8 * 1024 * 1024;

std::uint64_t hash_of(std::string_view model, Method method, std::string_view body) {
    const std::hash<std::string_view> hash;
    return hash(body) * 31 + hash(model) * 7 + static_cast<std::uint64_t>(method);
}

} // namespace

std::optional<KeyMemo::Found> KeyMemo::find(std::string_view model, Method method, std::string_view body,
                                            std::uint64_t revision) const {
    if (body.size() > kMostBytes) return std::nullopt; // never remembered
    const auto found = entries_.find(hash_of(model, method, body));
    if (found == entries_.end()) return std::nullopt;
    const Entry& entry = found->second;
    // A hash that fits proves nothing: a wrong key would be a wrong answer.
    if (entry.request->method != method || entry.request->model != model || entry.request->body != body)
        return std::nullopt;
    return Found{entry.request, entry.revision == revision ? std::optional(entry.key) : std::nullopt};
}

void KeyMemo::remember(std::shared_ptr<const Request> request, std::uint64_t revision, const Key& key) {
    const std::size_t bytes = request->body.size();
    if (bytes > kMostBytes) return;
    const std::uint64_t hash = hash_of(request->model, request->method, request->body);
    if (const auto old = entries_.find(hash); old != entries_.end()) {
        bytes_ -= old->second.request->body.size();
        old->second = Entry{std::move(request), revision, key};
    } else {
        entries_.emplace(hash, Entry{std::move(request), revision, key});
        order_.push_back(hash);
    }
    bytes_ += bytes;
    while (order_.size() > kMostEntries || bytes_ > kMostBytes) {
        const auto oldest = entries_.find(order_.front());
        bytes_ -= oldest->second.request->body.size();
        entries_.erase(oldest);
        order_.pop_front();
    }
}

} // namespace gcoalesce
