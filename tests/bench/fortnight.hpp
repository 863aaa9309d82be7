// Evening pushes through the real coalescer, store and snapshots, with a clock and an upstream that are moved by hand.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "broker/policy.hpp"
#include "gcoalesce/gcoalesce.h"

namespace gcoalesce::bench {

// Who asks what, when, and how long the answer takes.
struct PushPlan {
    std::uint64_t seed;
    int pushes;        // one a day
    int requests;      // a push, each for one of the templates, all of them alike
    int templates;     //
    int keys;          // a template; asked for by Zipf's law
    double exponent;   // of that law
    double early;      // the share of the requests that comes within `early_for`, evenly
    Nanos early_for;   //
    Nanos tail_mean;   // the rest comes behind it, exponentially ever fewer,
    Nanos tail_end;    // up to here
    Nanos answer_min;  // a call that a request starts takes from this
    Nanos answer_max;  // to this, evenly
    int answer_events; // that come evenly spaced, the last one with the end
};

struct PushRequest {
    Nanos at; // behind its push
    int of, key;
    Nanos answer; // how long its call takes, if it starts one
};

// The same for the same plan, on every machine (up to the last bit of pow and log). By time of arrival.
std::vector<std::vector<PushRequest>> draw(const PushPlan& plan);

// What no policy can go below that forgets between two pushes: one call for every key that a push touches.
std::uint64_t distinct(const std::vector<std::vector<PushRequest>>& pushes);

// The same by expectation, as the share of the requests that need no call.
double expected_bound(const PushPlan& plan);

struct PushPolicy {
    std::string name;
    gcoalesce_sharing sharing = GCOALESCE_SHARE;
    TemplateSettings settings; // of every template; the id aside
    bool on_disk = false;      // has a snapshot store
};

// Requests 0 to 5, 5 to 10, 10 to 30 and 30 or more seconds behind their push.
struct PushCounts {
    std::uint64_t calls = 0;
    std::array<std::uint64_t, 4> requests{}, coalesced{};
    bool operator==(const PushCounts&) const = default;
};

struct PushLedger {
    PushCounts seen;                // by the simulation: whether upstream was called when somebody asked
    PushCounts told;                // by the segment's counters
    std::vector<Nanos> first_event; // from each request to the first event; 0: it was there
    std::vector<Nanos> staleness;   // of the answer that each request got; 0: it was still running
};

// `notify on` comes with each push whatever the policy is, since it is what the counters count from.
// Throws std::runtime_error where a request is refused or the snapshot store drops something.
PushLedger simulate(const PushPlan& plan, const std::vector<std::vector<PushRequest>>& pushes,
                    const PushPolicy& policy);

} // namespace gcoalesce::bench
