#include "broker/status.hpp"

#include <catch2/catch.hpp>

#include "tests/support/fake_timers.hpp"
#include "tests/support/memory_segment.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;

TEST_CASE("the status line tells what is in flight, the calls, the share of requests without one, and the window") {
    FakeClock clock;
    MemorySegment segment(clock);
    Store& store = segment.store();
    CHECK(status_line(store.view(), {}) == "0 in flight; 0 calls for 0 requests; window closed");

    store.count(0, TemplateCounter::upstream_calls, 6); // one of them a retry
    store.count_request(0, GCOALESCE_STARTED, false, 3);
    store.count_request(0, GCOALESCE_INDIVIDUAL, false, 1);
    store.count_request(0, GCOALESCE_BYPASS, false, 2);
    store.count_request(0, GCOALESCE_JOINED, true, 1990);
    store.count_request(0, GCOALESCE_FRESH, true, 3);
    store.count_request(0, GCOALESCE_SNAPSHOT, true, 1);
    store.count_request(0, GCOALESCE_RESUMED, false, 7);   // of a stream that another request had paid, or shared
    store.count_request(0, GCOALESCE_OPENING, false, 500); // got no stream
    CHECK(status_line(store.view(), {3 * kSecond + 1, false, false}) ==
          "0 in flight; 6 calls for 2000 requests, 99.7 % coalesced; window open for 4 s");
    store.count_request(0, GCOALESCE_JOINED, true, 1'000'000);
    CHECK_THAT(status_line(store.view(), {}), Catch::Contains("99.9 % coalesced")); // not all of them
}

TEST_CASE("the status line begins with what is wrong") {
    FakeClock clock;
    MemorySegment segment(clock);
    CHECK_THAT(status_line(segment.store().view(), {0, true, false}), Catch::StartsWith("NO API KEY"));
    CHECK_THAT(status_line(segment.store().view(), {0, true, true}), Catch::StartsWith("shutting down; NO API KEY"));
    segment.store().set(Counter::snapshots_degraded, 1);
    CHECK_THAT(status_line(segment.store().view(), {}), Catch::StartsWith("answers are not kept on disk"));
}
