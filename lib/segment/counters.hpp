// The broker's counters: declared here, once. The segment carries name, unit, kind and help, so that an older program
// shows a newer broker's counters by their right names.
#pragma once

#include "segment/layout.hpp"

namespace gcoalesce {

// X(identifier, kind, unit, help)
#define GCOALESCE_COUNTERS(X)                                                                                          \
    X(requests_started, counter, "requests", "requests that caused an upstream call")                                  \
    X(requests_joined, counter, "requests", "requests that joined a running stream")                                   \
    X(requests_fresh, counter, "requests", "requests answered by a complete stream that was still fresh")              \
    X(requests_snapshot, counter, "requests", "requests answered by a stream that was kept on disk")                   \
    X(requests_resumed, counter, "requests", "requests that went on where an earlier reader had stopped")              \
    X(resumed_running, counter, "requests", "resumed requests that found their stream running")                        \
    X(resumed_kept, counter, "requests", "resumed requests that found their stream ended and kept")                    \
    X(resumed_snapshot, counter, "requests", "resumed requests that found their stream on disk")                       \
    X(resumed_gone, counter, "requests", "resumed requests whose stream was no longer kept")                           \
    X(requests_individual, counter, "requests", "requests asked again alone after an invalid answer")                  \
    X(requests_bypass, counter, "requests", "requests that wanted a call of their own")                                \
    X(requests_refused, counter, "requests", "requests refused with an error before any stream")                       \
    X(requests_withdrawn, counter, "requests", "requests taken back before they were answered")                        \
    X(upstream_calls, counter, "calls", "HTTP requests sent upstream, retries included")                               \
    X(upstream_retries, counter, "calls", "HTTP requests sent upstream again after a failure")                         \
    X(streams_complete, counter, "streams", "streams that ended complete")                                             \
    X(streams_failed, counter, "streams", "streams that ended failed")                                                 \
    X(streams_truncated, counter, "streams", "streams that ended truncated")                                           \
    X(streams_invalid, counter, "streams", "streams that ended invalid: not what their schema demands")                \
    X(streams_cancelled, counter, "streams", "streams that ended cancelled")                                           \
    X(streams_interrupted, counter, "streams", "streams that ended interrupted")                                       \
    X(streams_unchecked, counter, "streams", "complete streams whose request had a schema that cannot be checked")     \
    X(streams_purged, counter, "streams", "streams that were dropped by a command or a reload")                        \
    X(streams_reusable, counter, "streams", "complete streams that later requests were allowed to read")               \
    X(streams_retired, counter, "streams", "streams that left the segment")                                            \
    X(streams_evicted, counter, "streams", "streams that lost their events because no reader moved")                   \
    X(events_published, counter, "events", "events published to readers")                                              \
    X(bytes_published, counter, "bytes", "bytes of those events")                                                      \
    X(wakes_futex, counter, "wakes", "publications that woke the sleepers of a stream")                                \
    X(wakes_socket, counter, "wakes", "sends on clients' wake sockets")                                                \
    X(wakes_socket_failed, counter, "wakes", "sends that failed because the client does not drain its socket")         \
    X(connections_accepted, counter, "connections", "connections to the control socket")                               \
    X(connections_refused, counter, "connections", "connections closed for a bad frame, a late hello or a limit")      \
    X(clients_attached, gauge, "clients", "clients attached now")                                                      \
    X(clients_died, counter, "clients", "clients whose process ended while attached")                                  \
    X(lanes_revoked, counter, "clients", "clients whose pins were taken away")                                         \
    X(slots_in_use, gauge, "slots", "slots that hold a stream")                                                        \
    X(streams_in_flight, gauge, "streams", "streams that are being produced")                                          \
    X(individuals_queued, gauge, "requests", "requests that wait for their turn after an invalid answer")              \
    X(upstream_connections, counter, "connections", "connections opened to upstream")                                  \
    X(snapshots_kept, gauge, "streams", "streams that are kept on disk")                                               \
    X(snapshot_bytes, gauge, "bytes", "bytes that they take there")                                                    \
    X(snapshots_off, gauge, "flag", "1: nothing is kept on disk: the broker has no state directory")                   \
    X(snapshots_degraded, gauge, "flag", "1: the disk does not take them; the errors say why")                         \
    X(api_key_missing, gauge, "flag", "1: upstream wants an API key and the broker has none")                          \
    X(tokens_prompt, counter, "tokens", "prompt tokens that upstream reported")                                        \
    X(tokens_answer, counter, "tokens", "answer tokens that upstream reported, thoughts apart")                        \
    X(tokens_thoughts, counter, "tokens", "thought tokens that upstream reported")

enum class Counter : std::uint32_t {
#define GCOALESCE_COUNTER(identifier, kind, unit, help) identifier,
    GCOALESCE_COUNTERS(GCOALESCE_COUNTER)
#undef GCOALESCE_COUNTER
        count
};

struct CounterDeclaration {
    const char* name;
    CounterKind kind;
    const char* unit;
    const char* help;
};

constexpr CounterDeclaration kCounters[] = {
#define GCOALESCE_COUNTER(identifier, kind, unit, help) {#identifier, CounterKind::kind, unit, help},
    GCOALESCE_COUNTERS(GCOALESCE_COUNTER)
#undef GCOALESCE_COUNTER
};

static_assert(std::size(kCounters) == static_cast<std::size_t>(Counter::count));

} // namespace gcoalesce
