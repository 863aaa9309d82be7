// Decides what a request gets: a stream that runs, one that is fresh, one from the disk, a new one, or a refusal with a
// reason.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "broker/producer.hpp"
#include "broker/refusals.hpp"
#include "broker/request.hpp"
#include "broker/snapshots.hpp"
#include "broker/store.hpp"
#include "broker/timers.hpp"
#include "broker/upstream.hpp"
#include "broker/window.hpp"

namespace gcoalesce {

struct OpenAnswer {
    StreamRef stream;
    StreamId stream_id = 0;
    gcoalesce_status status = GCOALESCE_STARTED;
    Key key{};
};

struct CoalescerLimits {
    std::uint32_t in_flight = 512;    // streams being produced at once, of all templates
    std::uint32_t calls_a_minute = 0; // streams started within any 60 s, of all templates; 0: no limit
};

// Single-threaded: the event loop's.
class Coalescer {
  public:
    // templates: load_settings()'s form, those of the store. snapshots: null keeps nothing on disk. The referenced
    // objects must outlive it.
    Coalescer(Store& store, Upstream& upstream, Timers& timers, Snapshots* snapshots,
              const std::vector<TemplateSettings>& templates, const ProducerLimits& producer_limits,
              const CoalescerLimits& limits);
    ~Coalescer();

    // ---- requests ----

    // The template in force under this id; null: there is none.
    std::shared_ptr<const TemplateSettings> settings(std::string_view id) const;

    // Called once, from within open() or later. Errors: GCOALESCE_BUSY (with a retry delay), _DRAINING, _KEY_MISSING,
    // what upstream is known to refuse with, _NOT_FOUND and _GONE (a stream to resume, the lane), _BAD_REQUEST.
    using Reply = std::function<void(const Result<OpenAnswer>&)>;
    using Ticket = std::uint64_t;
    // Decides, and pins the stream in the requester's lane. 0: the reply has been given; else withdraw() takes this.
    Ticket open(OpenRequest request, Reply reply);
    // The reply is not wanted any more. False: it has been given.
    bool withdraw(Ticket ticket);

    // No API key: every request that needs a call is refused. Told at start and whenever the key is read again.
    void set_key_missing(bool missing) {
        key_missing_ = missing;
        store_.set(Counter::api_key_missing, missing ? 1 : 0);
    }

    // ---- operators ----

    // Templates by id, all for none. duration 0: each template's `window`. GCOALESCE_NOT_FOUND: no such template.
    // They return the longest time that one of them stays open.
    Result<Nanos> notify_on(const std::vector<std::string>& ids, Nanos duration);
    Result<Nanos> notify_off(const std::vector<std::string>& ids);
    Result<Nanos> window_remaining(const std::vector<std::string>& ids) const;

    // Ends running streams for all their readers, who keep what came. target: the first digits, four at least, of a key
    // or a stream id. GCOALESCE_NOT_FOUND; GCOALESCE_BAD_REQUEST: too short, or several keys. Returns how many ended.
    Result<std::size_t> cancel(const std::string& target);
    // Nothing of what is there now is given to later requests, nor can it be resumed. Returns how many streams.
    Result<std::size_t> purge(gcoalesce_purge_scope scope, const std::string& target);

    // Another set of templates: all of it, or GCOALESCE_BAD_REQUEST.
    Result<void> set_templates(const std::vector<TemplateSettings>& templates);

    // ---- time ----

    // Every 100 ms, behind the store's sweep: ends calls that nobody reads any more, and keeps the ledger.
    void beat();
    // Every second by itself, and once more at the end: what requests cost and spared goes on across restarts.
    void keep_ledger();

    // New requests are refused from now on; running streams go on.
    void drain() { draining_ = true; }
    std::size_t in_flight() const { return running_.size(); }
    // Ends what still runs as `interrupted`.
    void interrupt_all();

  private:
    struct TemplateState;
    struct Running;
    struct Waiting { // a request whose reply has to wait
        Ticket ticket;
        OpenRequest request;
        Reply reply;
    };
    struct Demotion;

    void decide(Waiting waiting, StreamId skip);
    enum class Cost { call, nothing };
    bool answer(const Waiting& waiting, StreamRef stream, gcoalesce_status status, Cost cost);
    void refuse(const Waiting& waiting, const Error& error);
    bool joined(Waiting& waiting, const std::shared_ptr<TemplateState>& of);
    void resume(Waiting waiting, StreamId skip);
    void load(StreamId id, Waiting waiting);
    Result<StreamRef> restore(const Snapshot& snapshot);
    void go_alone(Waiting waiting, const std::shared_ptr<TemplateState>& of);
    void next_alone(const std::shared_ptr<TemplateState>& of);
    Result<void> check_limits(const OpenRequest& request, TemplateState& of);
    void start(const Waiting& waiting, const std::shared_ptr<TemplateState>& of);
    void ended(StreamRef stream, const Outcome& outcome);
    void end(StreamRef stream, const SlotEnding& ending, Nanos fresh_for, std::string_view document = {});
    void keep(StreamRef stream, const Running& was);
    Result<std::vector<StreamRef>> named(const std::string& target) const;
    Result<std::vector<TemplateState*>> named(const std::vector<std::string>& ids) const;
    void stop(StreamRef stream, gcoalesce_ending_kind kind, Code code, std::string_view message);
    void end_abandoned();
    void tell_window(const TemplateState& of);
    void recall_window(TemplateState& of);
    StreamId kept_for(const OpenRequest& request, const TemplateState& of) const;

    Store& store_;
    Upstream& upstream_;
    Timers& timers_;
    Snapshots* snapshots_;
    ProducerLimits producer_limits_;
    CoalescerLimits limits_;
    bool draining_ = false;
    bool key_missing_ = false;
    std::map<std::string, std::shared_ptr<TemplateState>, std::less<>> templates_; // in force
    std::unordered_map<std::uint32_t, Running> running_;                           // by slot
    std::unordered_map<StreamId, std::vector<Waiting>> loading_;                   // from the disk
    std::unordered_map<StreamId, Demotion> demotions_;                             // by the invalid stream
    std::deque<StreamId> demoted_;                                                 // oldest first
    std::unordered_set<StreamId> gone_; // of streams that ended, where there is no disk to remember them
    std::deque<StreamId> gone_order_;
    std::uint64_t queued_ = 0; // over all templates, for a call of their own
    Refusals refusals_;
    std::deque<Nanos> started_;                 // within the last minute
    std::map<std::string, std::string> ledger_; // each template's counters, as they were last kept
    Nanos ledger_kept_ = 0;
    Ticket last_ticket_ = 0;
    std::unordered_set<Ticket> waiting_;                   // replies that are still owed
    std::shared_ptr<int> alive_ = std::make_shared<int>(); // for callbacks that come after our end
};

} // namespace gcoalesce
