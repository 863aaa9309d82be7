// Owns one upstream call, retries included, and fills one stream.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "broker/refusals.hpp"
#include "broker/store.hpp"
#include "broker/timers.hpp"
#include "broker/upstream.hpp"
#include "templates/schema.hpp"

namespace gcoalesce {

struct ProducerLimits {
    Nanos first_event = 120 * kSecond; // from the moment the body is sent
    Nanos event_gap = 60 * kSecond;    // between two events
    Nanos whole_call = 300 * kSecond;  // retries and their waits included; a call without streaming has only this one
    int retries = 2;                   // after the first try, and only before the first event
    std::size_t stream_bytes = 4 << 20;
};

// What a whole answer must be like, and whether readers see it before that is known.
struct AnswerCheck {
    std::optional<Schema> schema; // of each candidate's text, where STOP is its reason; absent: anything goes
    bool hold = false;            // nothing is published before the check has passed
};

// Single-threaded: the event loop's.
class Producer {
  public:
    // `ended` is called once, on the event loop, never from within the constructor, as the last thing this object does:
    // it may destroy it. The stream is still in flight then; ending it is the caller's business (it knows the policy).
    // The outcome's retry_ms is RetryInfo's, else that of the Retry-After header.
    using Ended = std::function<void(const Outcome&)>;

    // Starts the call at once. The referenced objects must outlive it. An answer that does not pass the check ends
    // GCOALESCE_INVALID; where it was held back, no event of it was published.
    Producer(Store& store, Upstream& upstream, Timers& timers, Refusals& refusals, StreamRef stream, UpstreamCall call,
             const ProducerLimits& limits, AnswerCheck check, Ended ended);
    ~Producer(); // at any time: cancels what is under way; `ended` is not called any more
    Producer(const Producer&) = delete;
    Producer& operator=(const Producer&) = delete;

    // Cancels what is under way, without telling `ended`. Returns what upstream had reported by then: it is paid for.
    Usage cancel();

  private:
    struct State;
    std::shared_ptr<State> state_;
};

} // namespace gcoalesce
