#include "tests/bench/fortnight.hpp"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <utility>

#include "broker/coalescer.hpp"
#include "tests/support/fake_timers.hpp"
#include "tests/support/fake_upstream.hpp"
#include "tests/support/memory_segment.hpp"
#include "tests/support/snapshots.hpp"

namespace gcoalesce::bench {
namespace {

constexpr std::uint32_t kSlots = 1024;
constexpr Nanos kBeat = kSecond; // between two sweeps, which only free what nobody needs
constexpr Nanos kDay = 86'400 * kSecond;
constexpr Nanos kWatched = 120 * kSecond; // all that a push leads to is over: the last answer, the linger behind it

// Zipf's law, for 0 to keys - 1.
std::vector<double> shares(const PushPlan& plan) {
    std::vector<double> all;
    double sum = 0;
    for (int key = 1; key <= plan.keys; ++key) sum += all.emplace_back(std::pow(key, -plan.exponent));
    for (double& share : all) share /= sum;
    return all;
}

std::string template_id(int number) {
    return fmt::format("push-{:02}", number);
}

class Simulation {
  public:
    Simulation(const PushPlan& plan, const PushPolicy& policy)
        : plan_(plan),
          policy_(policy),
          templates_(settings()),
          segment_(clock_, {.slots = kSlots, .extent_bytes = 64 << 20, .templates = templates_}) {
        LanePort port;
        port.mapping = lane_memory_;
        port.send_wake = [] { return true; };
        segment_.store().add_lane(1, std::move(port));
        if (policy.on_disk) {
            SnapshotOptions options = test::StoreLife::defaults();
            options.directory = directory_.path.string();
            options.instance = "fortnight";
            auto opened = Snapshots::open(options, timers_, loop_.post());
            if (!opened) throw std::runtime_error(opened.error().message);
            snapshots_ = std::move(*opened);
        }
        CoalescerLimits limits;
        limits.in_flight = kSlots;
        coalescer_ = std::make_unique<Coalescer>(segment_.store(), upstream_, timers_, snapshots_.get(), templates_,
                                                 ProducerLimits{}, limits);
    }

    void push(const std::vector<PushRequest>& requests) {
        const Nanos start = clock_.monotonic();
        pushed_ = start;
        if (!coalescer_->notify_on({}, 0)) throw std::runtime_error("the window did not open");
        std::vector<std::unique_ptr<Timer>> arrivals;
        for (const PushRequest& request : requests)
            arrivals.push_back(timers_.after(request.at, [this, &request] { ask(request); }));
        while (clock_.monotonic() - start < kWatched) {
            timers_.advance(kBeat);
            segment_.store().sweep();
        }
        steps_.clear();
        if (coalescer_->in_flight() != 0 || segment_.store().streams_in_use() != 0)
            throw std::runtime_error("something is left of a push");
        if (snapshots_) {
            const bool written = snapshots_->flush(60 * kSecond);
            const SnapshotState state = snapshots_->state();
            if (!written || state.degraded || state.dropped != 0)
                throw std::runtime_error("the snapshot store did not keep up");
        }
        timers_.advance(kDay - (clock_.monotonic() - start));
    }

    PushLedger ledger() {
        ledger_.seen.calls = upstream_.calls.size();
        const Store& store = segment_.store();
        for (std::uint32_t index = 0; index < templates_.size(); ++index) {
            const auto counted = [&](TemplateCounter first, std::uint32_t nth = 0) {
                return store.counted(index, static_cast<TemplateCounter>(static_cast<std::uint32_t>(first) + nth));
            };
            ledger_.told.calls += counted(TemplateCounter::upstream_calls);
            for (std::uint32_t nth = 0; nth < 4; ++nth) {
                ledger_.told.requests[nth] += counted(TemplateCounter::requests_0s, nth);
                ledger_.told.coalesced[nth] += counted(TemplateCounter::coalesced_0s, nth);
            }
        }
        return std::move(ledger_);
    }

  private:
    std::vector<TemplateSettings> settings() const {
        std::vector<TemplateSettings> all{TemplateSettings{}};
        for (int i = 0; i < plan_.templates; ++i) all.emplace_back(policy_.settings).id = template_id(i);
        return all;
    }

    void ask(const PushRequest& asked) {
        OpenRequest request;
        request.lane = 1;
        request.settings = coalescer_->settings(template_id(asked.of));
        request.model = "gemini-2.5-flash";
        request.sharing = policy_.sharing;
        request.body = body_;
        request.key = test::key_number(static_cast<std::uint64_t>(asked.of * plan_.keys + asked.key));
        const std::size_t calls = upstream_.calls.size();
        std::optional<Result<OpenAnswer>> told;
        coalescer_->open(std::move(request), [&](const Result<OpenAnswer>& answer) { told = answer; });
        if (!told) loop_.until([&] { return told.has_value(); }); // the disk: no time passes by the clock
        if (!*told) throw std::runtime_error("a request was refused: " + told->error().message);
        const bool started = upstream_.calls.size() != calls;
        note(started);
        const StreamRef stream = (*told)->stream;
        if (segment_.store().ended(stream)) {
            ledger_.first_event.push_back(0);
            ledger_.staleness.push_back(clock_.monotonic() - segment_.slot(stream).ending.load().ended_ns);
            lane_.unpin(stream.slot);
            return;
        }
        readers_[stream.slot].push_back(clock_.monotonic());
        ledger_.staleness.push_back(0);
        if (started) answer(stream, upstream_.calls.back(), asked.answer);
    }

    void note(bool started) {
        const Nanos since = clock_.monotonic() - pushed_;
        const std::size_t when = since < 5 * kSecond ? 0 : since < 10 * kSecond ? 1 : since < 30 * kSecond ? 2 : 3;
        ++ledger_.seen.requests[when];
        if (!started) ++ledger_.seen.coalesced[when];
    }

    // The call's events, and at its end its readers leave.
    void answer(StreamRef stream, test::FakeUpstream::Started& call, Nanos takes) {
        call.sent();
        for (int event = 1; event <= plan_.answer_events; ++event) {
            const bool first = event == 1;
            const bool last = event == plan_.answer_events;
            steps_.push_back(timers_.after(takes * event / plan_.answer_events, [this, stream, &call, first, last] {
                if (first) call.head(200);
                call.bytes(test::sse(test::answer_json("some words of an answer", last ? "STOP" : "")));
                if (!last) return;
                call.done();
                const Nanos begun = segment_.slot(stream).first_event_ns.load();
                const auto readers = readers_.extract(stream.slot);
                for (const Nanos asked : readers.mapped()) {
                    ledger_.first_event.push_back(std::max<Nanos>(begun - asked, 0));
                    lane_.unpin(stream.slot);
                }
            }));
        }
    }

    const PushPlan& plan_;
    const PushPolicy& policy_;
    std::vector<TemplateSettings> templates_;
    test::FakeClock clock_;
    test::FakeTimers timers_{clock_};
    test::MemorySegment segment_;
    test::FakeUpstream upstream_;
    Mapping lane_memory_ = test::anonymous_memory(lane_bytes(kSlots));
    Lane lane_{lane_memory_.data(), kSlots};
    test::TempDirectory directory_;
    test::HandLoop loop_;
    std::unique_ptr<Snapshots> snapshots_;
    std::unique_ptr<Coalescer> coalescer_;
    std::shared_ptr<const std::string> body_ = std::make_shared<const std::string>("{}");
    Nanos pushed_ = 0;
    std::map<std::uint32_t, std::vector<Nanos>> readers_; // of running streams, by slot: when they asked
    std::vector<std::unique_ptr<Timer>> steps_;           // of the push's answers
    PushLedger ledger_;
};

} // namespace

std::vector<std::vector<PushRequest>> draw(const PushPlan& plan) {
    std::mt19937_64 random(plan.seed);
    // The standard's distributions differ from library to library; these do not.
    const auto even = [&] { return static_cast<double>(random() >> 11) * 0x1p-53; }; // in [0, 1)
    const auto scaled = [](Nanos time, double by) { return static_cast<Nanos>(static_cast<double>(time) * by); };
    const std::vector<double> by_key = shares(plan);
    const double tail = static_cast<double>(plan.tail_end - plan.early_for) / static_cast<double>(plan.tail_mean);
    std::vector<std::vector<PushRequest>> pushes(static_cast<std::size_t>(plan.pushes));
    for (std::vector<PushRequest>& push : pushes) {
        for (int i = 0; i < plan.requests; ++i) {
            PushRequest request{};
            request.of = static_cast<int>(even() * plan.templates);
            double left = even();
            while (request.key < plan.keys - 1 && (left -= by_key[static_cast<std::size_t>(request.key)]) >= 0)
                ++request.key;
            const bool early = even() < plan.early;
            const double when = even();
            request.at = early ? scaled(plan.early_for, when)
                               : plan.early_for + scaled(plan.tail_mean, -std::log1p(-when * -std::expm1(-tail)));
            request.answer = plan.answer_min + scaled(plan.answer_max - plan.answer_min, even());
            push.push_back(request);
        }
        std::stable_sort(push.begin(), push.end(),
                         [](const auto& one, const auto& other) { return one.at < other.at; });
    }
    return pushes;
}

std::uint64_t distinct(const std::vector<std::vector<PushRequest>>& pushes) {
    std::uint64_t sum = 0;
    for (const std::vector<PushRequest>& push : pushes) {
        std::set<std::pair<int, int>> keys;
        for (const PushRequest& request : push) keys.emplace(request.of, request.key);
        sum += keys.size();
    }
    return sum;
}

double expected_bound(const PushPlan& plan) {
    double touched = 0; // of one template's keys
    for (const double share : shares(plan)) touched += 1 - std::pow(1 - share / plan.templates, plan.requests);
    return 1 - touched * plan.templates / plan.requests;
}

PushLedger simulate(const PushPlan& plan, const std::vector<std::vector<PushRequest>>& pushes,
                    const PushPolicy& policy) {
    Simulation simulation(plan, policy);
    for (const std::vector<PushRequest>& push : pushes) simulation.push(push);
    return simulation.ledger();
}

} // namespace gcoalesce::bench
