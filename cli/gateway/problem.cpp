#include "cli/gateway/problem.hpp"

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>
#include <utility>

namespace gcoalesce::gateway {
namespace {

unsigned status_of(Code code) {
    switch (code) {
    case GCOALESCE_BAD_REQUEST: return 400;
    case GCOALESCE_NO_PERMISSION: return 403;
    case GCOALESCE_NOT_FOUND: return 404;
    case GCOALESCE_GONE: return 410;
    case GCOALESCE_BUSY:
    case GCOALESCE_RATE_LIMITED: return 429;
    case GCOALESCE_CALL_CANCELLED: return 499;
    case GCOALESCE_INTERNAL:
    case GCOALESCE_IO: return 500;
    case GCOALESCE_KEY_REFUSED:
    case GCOALESCE_UPSTREAM_ERROR:
    case GCOALESCE_CONNECT_FAILED:
    case GCOALESCE_BAD_ANSWER:
    case GCOALESCE_TOO_LARGE:
    case GCOALESCE_CUT_SHORT:
    case GCOALESCE_SCHEMA_BROKEN: return 502;
    case GCOALESCE_TIMED_OUT:
    case GCOALESCE_FIRST_EVENT_TIMEOUT:
    case GCOALESCE_EVENT_GAP_TIMEOUT:
    case GCOALESCE_CALL_TIMEOUT: return 504;
    default: return 503; // no broker, no key, no memory: the service is not there just now
    }
}

// google.rpc.Code's word, which SDKs show.
const char* word_of(unsigned status) {
    switch (status) {
    case 400:
    case 413:
    case 415:
    case 431: return "INVALID_ARGUMENT";
    case 401: return "UNAUTHENTICATED";
    case 403: return "PERMISSION_DENIED";
    case 404:
    case 410: return "NOT_FOUND";
    case 408:
    case 504: return "DEADLINE_EXCEEDED";
    case 429: return "RESOURCE_EXHAUSTED";
    case 499: return "CANCELLED";
    case 405:
    case 501: return "UNIMPLEMENTED";
    case 502:
    case 503: return "UNAVAILABLE";
    default: return status < 500 ? "FAILED_PRECONDITION" : "INTERNAL";
    }
}

nlohmann::ordered_json json_of(const Problem& problem) {
    std::string reason = code_name(problem.error.code);
    std::ranges::transform(reason, reason.begin(), [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
    nlohmann::ordered_json details = nlohmann::ordered_json::array();
    details.push_back(
        {{"@type", "type.googleapis.com/google.rpc.ErrorInfo"}, {"reason", reason}, {"domain", "gcoalesce"}});
    if (const std::string seconds = retry_after(problem.error); !seconds.empty())
        details.push_back({{"@type", "type.googleapis.com/google.rpc.RetryInfo"}, {"retryDelay", seconds + "s"}});
    return {{"error",
             {{"code", problem.status},
              {"message", problem.error.message},
              {"status", word_of(problem.status)},
              {"details", details}}}};
}

std::string dumped(const nlohmann::ordered_json& json, int indent) {
    return json.dump(indent, ' ', false, nlohmann::json::error_handler_t::replace);
}

} // namespace

Problem problem_of(const Error& error, int upstream_status) {
    const bool told = upstream_status >= 400 && upstream_status <= 599;
    return {told ? static_cast<unsigned>(upstream_status) : status_of(error.code), error};
}

Problem with_status(unsigned status, Code code, std::string sentence, std::int64_t retry_ms) {
    return {status, {code, std::move(sentence), retry_ms}};
}

Problem bad_request(std::string sentence) {
    return with_status(400, GCOALESCE_BAD_REQUEST, std::move(sentence));
}

std::string document_of(const Problem& problem) {
    return (problem.upstreams.empty() ? dumped(json_of(problem), 2) : problem.upstreams) + "\n";
}

std::string line_of(const Problem& problem) {
    const auto own = nlohmann::ordered_json::parse(problem.upstreams, nullptr, false);
    return dumped(own.is_object() ? own : json_of(problem), -1);
}

std::string retry_after(const Error& error) {
    return error.retry_ms > 0 ? std::to_string((error.retry_ms + 999) / 1000) : std::string();
}

} // namespace gcoalesce::gateway
