#include "base/error.hpp"

#include <cerrno>
#include <system_error>

namespace gcoalesce {

const char* code_name(Code code) noexcept {
    switch (code) {
    case GCOALESCE_OK: return "ok";
    case GCOALESCE_ABSENT: return "absent";
    case GCOALESCE_STARTING: return "starting";
    case GCOALESCE_WRONG_VERSION: return "wrong_version";
    case GCOALESCE_TOO_SHORT: return "too_short";
    case GCOALESCE_CLOSED: return "closed";
    case GCOALESCE_BROKER_DEAD: return "broker_dead";
    case GCOALESCE_UNRESPONSIVE: return "unresponsive";
    case GCOALESCE_NO_PERMISSION: return "no_permission";
    case GCOALESCE_FOREIGN: return "foreign";
    case GCOALESCE_ATTACHED_BEFORE_FORK: return "attached_before_fork";
    case GCOALESCE_BAD_REQUEST: return "bad_request";
    case GCOALESCE_NOT_FOUND: return "not_found";
    case GCOALESCE_GONE: return "gone";
    case GCOALESCE_BUSY: return "busy";
    case GCOALESCE_DRAINING: return "draining";
    case GCOALESCE_TIMED_OUT: return "timed_out";
    case GCOALESCE_END: return "end";
    case GCOALESCE_EVICTED: return "evicted";
    case GCOALESCE_KEY_MISSING: return "key_missing";
    case GCOALESCE_KEY_REFUSED: return "key_refused";
    case GCOALESCE_RATE_LIMITED: return "rate_limited";
    case GCOALESCE_UPSTREAM_ERROR: return "upstream_error";
    case GCOALESCE_CONNECT_FAILED: return "connect_failed";
    case GCOALESCE_BAD_ANSWER: return "bad_answer";
    case GCOALESCE_FIRST_EVENT_TIMEOUT: return "first_event_timeout";
    case GCOALESCE_EVENT_GAP_TIMEOUT: return "event_gap_timeout";
    case GCOALESCE_CALL_TIMEOUT: return "call_timeout";
    case GCOALESCE_TOO_LARGE: return "too_large";
    case GCOALESCE_NO_MEMORY: return "no_memory";
    case GCOALESCE_CUT_SHORT: return "cut_short";
    case GCOALESCE_SCHEMA_BROKEN: return "schema_broken";
    case GCOALESCE_CALL_CANCELLED: return "call_cancelled";
    case GCOALESCE_IO: return "io";
    case GCOALESCE_INTERNAL: return "internal";
    }
    return "unknown";
}

tl::unexpected<Error> fail_errno(Code code, const std::string& what) {
    const int saved = errno;
    return fail(code, "{}: {}", what, std::generic_category().message(saved));
}

} // namespace gcoalesce
