#include "cli/gateway/answer.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <span>

#include "base/ids.hpp"
#include "protocol/sse.hpp"

namespace gcoalesce::gateway {
namespace {

constexpr std::size_t kSmall = 8 * 1024;   // bytes of an event that is rather copied than sent from where it stands
constexpr std::size_t kAtOnce = 16 * 1024; // bytes that are gathered before they are sent
constexpr std::string_view kJson = "application/json; charset=UTF-8";
constexpr std::string_view kEventStream = "text/event-stream";

bool has_line_break(std::string_view json) {
    return json.find('\n') != std::string_view::npos || json.find('\r') != std::string_view::npos;
}

// The document on one line.
std::string on_one_line(std::string_view json) {
    const std::string framed = frame_sse(json);
    constexpr std::string_view open = "data: ", close = "\r\n\r\n";
    return framed.substr(open.size(), framed.size() - open.size() - close.size());
}

} // namespace

void Piece::clear() {
    head.reset();
    before.clear();
    span = behind = {};
}

Response response_of(const Problem& problem) {
    Response response;
    response.body = document_of(problem);
    response.head.status = problem.status;
    response.head.content_type = kJson;
    response.head.length = response.body.size();
    if (const std::string seconds = retry_after(problem.error); !seconds.empty())
        response.head.fields.emplace_back("Retry-After", seconds);
    if (problem.status == 401) response.head.fields.emplace_back("WWW-Authenticate", "Bearer");
    return response;
}

Step Answer::next(Piece& piece) {
    while (piece.before.size() < kAtOnce) {
        client::Event event;
        const Code code = subscription_.next_span(client::milliseconds(0), event);
        if (!begun_ && !opening()) {
            if (wrong_key())
                return give_up(
                    {GCOALESCE_BAD_REQUEST, "Last-Event-ID names a stream of another key than X-Coalesce-Key", 0},
                    piece);
            if (wish_.form == Form::created) return tell_created(piece);
            if (wish_.form == Form::event_source && code == GCOALESCE_TIMED_OUT) {
                begin(piece, kEventStream, std::nullopt);
                return Step::more;
            }
        }
        if (code == GCOALESCE_TIMED_OUT) return piece.head || !piece.before.empty() ? Step::more : Step::nothing;
        if (code != GCOALESCE_OK) return end(code, piece);
        if (!add(event, piece))
            return fail(
                problem_of({GCOALESCE_EVICTED, "the broker needed the answer's memory before it was read", 1000}),
                piece);
        if (wish_.form == Form::unary) {
            over_ = true;
            return Step::whole;
        }
        if (!piece.span.empty()) return Step::more;
    }
    return Step::more;
}

void Answer::begin(Piece& piece, std::string_view content_type, std::optional<std::size_t> length) {
    begun_ = true;
    Head& head = piece.head.emplace();
    head.content_type = content_type;
    head.length = length;
    head.fields = fields();
    if (wish_.form != Form::unary) head.fields.emplace_back("Cache-Control", "no-store");
    id_ = to_hex(StreamId{subscription_.info().stream_id});
    if (wish_.form == Form::event_source) piece.before += "retry: 1000\n\n";
}

// False: what was copied is not what had been published, and has been taken back.
bool Answer::add(const client::Event& event, Piece& piece) {
    const bool had_begun = begun_;
    const std::size_t kept = piece.before.size();
    if (wish_.form == Form::passed && !begun_) { // the head that the broker makes of upstream's
        const nlohmann::json head = nlohmann::json::parse(event.data, nullptr, false);
        content_type_ = head.value("content_type", "");
        begin(piece, content_type_, std::nullopt);
        piece.head->status = head.value("status", 200u);
        return true;
    }
    if (!begun_)
        begin(piece, wish_.form == Form::unary || wish_.form == Form::array ? kJson : kEventStream,
              wish_.form == Form::unary ? std::optional(event.data.size()) : std::nullopt);
    const bool first = events_++ == 0;
    std::string_view close;
    bool one_line = true;
    switch (wish_.form) {
    case Form::sse:
        piece.before += "data: ";
        close = "\r\n\r\n";
        break;
    case Form::sse_ids:
    case Form::event_source:
        fmt::format_to(std::back_inserter(piece.before), "id: {}.{}\ndata: ", id_, event.number);
        close = "\n\n";
        break;
    case Form::chat:
        piece.before += "data: ";
        close = "\n\n";
        break;
    case Form::array: piece.before += first ? "[" : "\n,\r\n"; [[fallthrough]];
    case Form::unary:
    case Form::passed:
    case Form::created: one_line = false; break;
    }
    if (one_line && has_line_break(event.data)) {
        piece.before += on_one_line(event.data);
    } else if (event.data.size() <= kSmall) {
        piece.before += event.data;
    } else {
        piece.span = event.data;
        piece.behind = close;
        return true;
    }
    piece.before += close;
    if (subscription_.valid()) return true;
    piece.before.resize(kept);
    if (!had_begun) piece.clear();
    begun_ = had_begun;
    return false;
}

// What is said of the answer, whichever way it goes.
std::vector<std::pair<std::string, std::string>> Answer::fields() const {
    const gcoalesce_info info = subscription_.info();
    if (info.status == GCOALESCE_OPENING) return {};
    return {{"X-Coalesce-Status", gcoalesce_status_name(info.status)},
            {"X-Coalesce-Key", to_hex(std::span(info.key))},
            {"X-Coalesce-Stream", to_hex(StreamId{info.stream_id})},
            {"Age", std::to_string(info.age_ms / 1000)}};
}

bool Answer::wrong_key() const {
    if (wish_.key.empty()) return false;
    const gcoalesce_info info = subscription_.info();
    return to_hex(std::span(info.key)) != wish_.key;
}

Step Answer::give_up(const Error& error, Piece& piece) {
    return fail(problem_of(error), piece);
}

// Before the first byte an error is the response; after it, it goes into the stream, and the connection ends without
// the response's end: with both, no client takes what came for the whole.
Step Answer::fail(const Problem& problem, Piece& piece) {
    over_ = true;
    if (!begun_) {
        Response response = response_of(problem);
        const auto more = fields();
        response.head.fields.insert(response.head.fields.end(), more.begin(), more.end());
        piece.clear();
        piece.head = std::move(response.head);
        piece.before = std::move(response.body);
        begun_ = true;
        return Step::whole;
    }
    if (wish_.form == Form::array) {
        piece.before += (events_ == 0 ? "[" : "\n,\r\n") + line_of(problem) + "\n]";
    } else if (wish_.form != Form::unary && wish_.form != Form::passed) {
        piece.before += "data: " + line_of(problem) + (wish_.form == Form::sse ? "\r\n\r\n" : "\n\n");
    }
    return Step::broken;
}

Step Answer::tell_created(Piece& piece) {
    over_ = true;
    const gcoalesce_info info = subscription_.info();
    const std::string id = to_hex(StreamId{info.stream_id}), url = "/v1/streams/" + id;
    const nlohmann::ordered_json body{{"stream", id},
                                      {"url", url},
                                      {"key", to_hex(std::span(info.key))},
                                      {"status", gcoalesce_status_name(info.status)}};
    piece.before = body.dump() + "\n";
    begin(piece, kJson, piece.before.size());
    piece.head->status = 201;
    piece.head->fields.emplace_back("Location", url);
    return Step::whole;
}

Step Answer::end(Code code, Piece& piece) {
    const std::optional<gcoalesce_ending> ending = subscription_.ending();
    const bool complete = code == GCOALESCE_END && ending && ending->kind == GCOALESCE_COMPLETE;
    Error error{code, "", 0};
    int upstream_status = 0;
    if (ending) {
        error = {ending->code, ending->message, ending->retry_ms};
        upstream_status = ending->upstream_status;
    }
    if (code != GCOALESCE_END) error.code = code;
    const auto problem = [&] {
        Problem told = problem_of(error, upstream_status);
        told.upstreams = subscription_.error_document();
        return told;
    };
    if (error.message.empty()) error.message = client::message();
    if (error.code >= GCOALESCE_ABSENT && error.code <= GCOALESCE_FOREIGN && error.retry_ms == 0) error.retry_ms = 1000;

    const bool all_read = code == GCOALESCE_END && wish_.resumed && events_ == 0 && !begun_;
    // An EventSource that is told this asks no more. Where nothing ever came nothing was read: an error like any other.
    if (all_read && (complete || ending->events > 0)) {
        begin(piece, {}, std::nullopt);
        piece.clear();
        Head& head = piece.head.emplace();
        head.status = 204;
        head.fields = fields();
        head.fields.emplace_back("X-Coalesce-Ending", gcoalesce_ending_name(ending->kind));
        over_ = true;
        return Step::whole;
    }
    if (wish_.form == Form::event_source && begun_) {
        nlohmann::ordered_json told{{"ending", gcoalesce_ending_name(ending ? ending->kind : GCOALESCE_IN_FLIGHT)}};
        if (complete)
            told["finish_reason"] = ending->finish_reason;
        else
            told.update(nlohmann::ordered_json::parse(line_of(problem())));
        piece.before +=
            "event: end\ndata: " + told.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n\n";
        over_ = true;
        return Step::whole;
    }
    if (!complete) return fail(problem(), piece);
    over_ = true;
    if (!begun_) begin(piece, wish_.form == Form::array ? kJson : kEventStream, std::nullopt);
    if (wish_.form == Form::array) piece.before += events_ == 0 ? "[]" : "\n]";
    if (wish_.form == Form::chat) piece.before += "data: [DONE]\n\n";
    return Step::whole;
}

std::string_view Answer::heartbeat() const {
    const bool may = wish_.form == Form::sse_ids || wish_.form == Form::event_source;
    return may && begun_ && !over_ ? ":\n\n" : "";
}

std::string Answer::story() const {
    const gcoalesce_info info = subscription_.info();
    if (info.status == GCOALESCE_OPENING) return "-";
    return fmt::format("{} {}", gcoalesce_status_name(info.status), to_hex(StreamId{info.stream_id}));
}

} // namespace gcoalesce::gateway
