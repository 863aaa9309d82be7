// What upstream said about when to ask again, remembered for each model: nobody calls it before.
#pragma once

#include <algorithm>
#include <map>
#include <optional>
#include <string>

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
    void note(const std::string& model, const Outcome& outcome, Nanos now) {
        if ((outcome.http_status != 429 && outcome.http_status != 503) || outcome.retry_ms <= 0) return;
        if (by_model_.size() >= kMost)
            std::erase_if(by_model_, [&](const auto& one) { return one.second.until <= now; });
        if (by_model_.size() >= kMost && !by_model_.contains(model)) return;
        const Nanos until = now + from_ms(outcome.retry_ms);
        Refusal& known = by_model_[model];
        if (until > known.until) known = {until, outcome};
    }

    // The one that still holds.
    std::optional<Refusal> find(const std::string& model, Nanos now) {
        const auto known = by_model_.find(model);
        if (known == by_model_.end()) return std::nullopt;
        if (now < known->second.until) return known->second;
        by_model_.erase(known);
        return std::nullopt;
    }

  private:
    static constexpr std::size_t kMost = 1024; // models
    std::map<std::string, Refusal> by_model_;
};

} // namespace gcoalesce
