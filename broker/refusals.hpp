// What upstream said about when to ask again, remembered for each model and each key that pays: nobody calls before.
#pragma once

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "base/clock.hpp"
#include "protocol/gemini.hpp"

namespace gcoalesce {

// Single-threaded. Times are monotonic.
class Refusals {
  public:
    struct Refusal {
        Nanos until;
        Outcome outcome;
    };

    // Takes note of an outcome that names a delay (429 and 503 with RetryInfo or Retry-After); passes over all others.
    void note(const std::string& model, std::uint64_t payer, const Outcome& outcome, Nanos now) {
        if ((outcome.http_status != 429 && outcome.http_status != 503) || outcome.retry_ms <= 0) return;
        if (known_.size() >= kMost) std::erase_if(known_, [&](const auto& one) { return one.second.until <= now; });
        if (known_.size() >= kMost && !known_.contains({model, payer})) return;
        const Nanos until = now + from_ms(outcome.retry_ms);
        Refusal& known = known_[{model, payer}];
        if (until > known.until) known = {until, outcome};
    }

    // The one that still holds.
    std::optional<Refusal> find(const std::string& model, std::uint64_t payer, Nanos now) {
        const auto known = known_.find({model, payer});
        if (known == known_.end()) return std::nullopt;
        if (now < known->second.until) return known->second;
        known_.erase(known);
        return std::nullopt;
    }

  private:
    static constexpr std::size_t kMost = 1024;
    std::map<std::pair<std::string, std::uint64_t>, Refusal> known_;
};

} // namespace gcoalesce
