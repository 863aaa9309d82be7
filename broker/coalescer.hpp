// Decides what a request gets: a stream that runs, one that is fresh, a new one, or a refusal with a reason.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>

#include "broker/producer.hpp"
#include "broker/store.hpp"
#include "broker/timers.hpp"
#include "broker/upstream.hpp"
#include "broker/window.hpp"

namespace gcoalesce {

struct OpenRequest {
    LaneId lane = 0;
    std::string model; // resolve_model()'s form
    Method method = Method::stream;
    gcoalesce_sharing sharing = GCOALESCE_SHARE;
    std::shared_ptr<const std::string> body;
    Key key{};
};

struct OpenAnswer {
    StreamRef stream;
    StreamId stream_id = 0;
    gcoalesce_status status = GCOALESCE_STARTED;
};

struct CoalescerLimits {
    std::uint32_t in_flight = 512;    // streams being produced at once
    std::uint32_t calls_a_minute = 0; // streams started within any 60 s; 0: no limit
    std::uint64_t subscribers = 0;    // readers of one stream; 0: no limit
};

// Single-threaded: the event loop's.
class Coalescer {
  public:
    Coalescer(Store& store, Upstream& upstream, Timers& timers, const TemplateSettings& settings,
              const ProducerLimits& producer_limits, const CoalescerLimits& limits);
    ~Coalescer();

    // Decides at once and pins the stream in the requester's lane. Errors: GCOALESCE_BUSY (with a retry delay),
    // _DRAINING, _KEY_MISSING, what upstream is known to refuse with, _NOT_FOUND (the lane).
    Result<OpenAnswer> open(const OpenRequest& request);

    // No API key: every request that needs a call is refused. Told at start and whenever the key is read again.
    void set_key_missing(bool missing) { key_missing_ = missing; }

    // Returns how long the window stays open. duration 0: the template's `window`.
    Nanos notify_on(Nanos duration);
    void notify_off();
    Nanos window_remaining() const;

    // New requests are refused from now on; running streams go on.
    void drain() { draining_ = true; }
    std::size_t in_flight() const { return producers_.size(); }
    // Ends what still runs as `interrupted`.
    void interrupt_all();

  private:
    struct Refusal {
        Nanos until;
        Outcome outcome;
    };
    Result<void> check_limits(const OpenRequest& request);
    Result<OpenAnswer> start(const OpenRequest& request);
    void ended(StreamRef stream, const std::string& model, Nanos opened, bool shared, const Outcome& outcome);

    Store& store_;
    Upstream& upstream_;
    Timers& timers_;
    TemplateSettings settings_;
    ProducerLimits producer_limits_;
    CoalescerLimits limits_;
    Window window_;
    bool draining_ = false;
    bool key_missing_ = false;
    std::unordered_map<std::uint32_t, std::unique_ptr<Producer>> producers_; // by slot
    std::map<std::string, Refusal> refusals_;                                // by model
    std::deque<Nanos> started_;                                              // within the last minute
};

} // namespace gcoalesce
