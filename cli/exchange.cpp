#include "cli/exchange.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>

#include "base/ids.hpp"
#include "base/units.hpp"
#include "cli/report.hpp"
#include "protocol/gemini.hpp"

namespace gcoalesce::cli {
namespace {

// For a broker to answer an opening, or to come back when it was lost before the first event.
constexpr Nanos kBrokerPatience = 10 * kSecond;

} // namespace

Result<std::string> prompt_body(std::string_view prompt, std::string_view system) {
    const auto parts = [](std::string_view text) {
        return nlohmann::ordered_json{{"parts", nlohmann::ordered_json::array({{{"text", text}}})}};
    };
    nlohmann::ordered_json turn{{"role", "user"}};
    turn.update(parts(prompt));
    nlohmann::ordered_json body{{"contents", nlohmann::ordered_json::array({turn})}};
    if (!system.empty()) body["systemInstruction"] = parts(system);
    try {
        return body.dump();
    } catch (const nlohmann::json::type_error&) {
        return fail(GCOALESCE_BAD_REQUEST, "the text is not valid UTF-8");
    }
}

Exchange::Exchange(gcoalesce_attachment& attachment, const Question& question)
    : asked_(system_clock().monotonic()), deadline_(asked_ + question.timeout), unanswered_since_(asked_) {
    info_.size = sizeof info_;
    ending_.size = sizeof ending_;
    gcoalesce_request request{};
    request.size = sizeof request;
    const auto text = [](const std::string& given) { return given.empty() ? nullptr : given.c_str(); };
    request.model = text(question.model);
    request.template_id = text(question.template_id);
    request.realm = text(question.realm);
    request.explicit_key = text(question.explicit_key);
    request.resume = text(question.resume);
    if (const std::optional<EventId> read = parse_event_id(question.resume)) {
        last_number_ = read->number;
        goes_on_ = last_number_ > 0;
    }
    request.max_age_ms = question.max_age_ms;
    request.no_store = question.no_store ? 1 : 0;
    request.body = question.body.data();
    request.body_bytes = question.body.size();
    request.stream = question.stream ? 1 : 0;
    request.sharing = question.sharing;
    gcoalesce_subscription* subscription = nullptr;
    const gcoalesce_code code = gcoalesce_open(&attachment, &request, &subscription);
    subscription_.reset(subscription);
    if (code != GCOALESCE_OK) end(last_error(code));
}

Exchange::Step Exchange::next(Nanos until, std::string_view& event) {
    if (over_ != 0) return Step::over;
    const Nanos wait = std::max<Nanos>(0, std::min(until, deadline_) - system_clock().monotonic());
    gcoalesce_event taken{};
    const gcoalesce_code code = gcoalesce_next(subscription_.get(), to_ms(wait + kMillisecond - 1), &taken);
    if (code == GCOALESCE_OK) {
        if (events_++ == 0) {
            first_event_ = system_clock().monotonic();
            gcoalesce_info_of(subscription_.get(), &info_);
        }
        event_bytes_ += taken.bytes;
        last_number_ = taken.number;
        event = {taken.data, taken.bytes};
        EventText more = event_text(event);
        text_ += more.text;
        thoughts_ += more.thoughts;
        return Step::event;
    }
    if (code != GCOALESCE_TIMED_OUT) return judge(code);

    const std::string why = gcoalesce_message();
    const Nanos now = system_clock().monotonic();
    gcoalesce_info_of(subscription_.get(), &info_);
    if (info_.status != GCOALESCE_OPENING)
        unanswered_since_ = 0;
    else if (unanswered_since_ == 0)
        unanswered_since_ = now; // the broker was lost, and the library asks again
    if (now >= deadline_)
        return end(Error{GCOALESCE_TIMED_OUT,
                         fmt::format("no whole answer within {}", format_duration(deadline_ - asked_)), 0});
    if (unanswered_since_ != 0 && now - unanswered_since_ >= kBrokerPatience)
        return end(Error{GCOALESCE_UNRESPONSIVE, why, 0});
    return Step::nothing;
}

// The library's last word on it.
Exchange::Step Exchange::judge(Code code) {
    Error error = last_error(code);
    gcoalesce_ending_of(subscription_.get(), &ending_); // filled for a refused opening too
    if (code != GCOALESCE_END) {
        error.retry_ms = ending_.retry_ms;
        return end(std::move(error));
    }
    const std::string_view reason = ending_.finish_reason;
    if (ending_.kind != GCOALESCE_COMPLETE) return end(Error{ending_.code, ending_.message, ending_.retry_ms});
    blocked_ = text_.empty() && !goes_on_ && reason != "STOP";
    if (!blocked_) return end(std::nullopt);
    return end(Error{GCOALESCE_BAD_ANSWER,
                     fmt::format("no text: the answer was blocked or empty, its reason is {}", reason), 0});
}

Exchange::Step Exchange::end(std::optional<Error> failure) {
    over_ = system_clock().monotonic();
    failure_ = std::move(failure);
    if (subscription_) gcoalesce_info_of(subscription_.get(), &info_);
    if (failure_ && events_ > 0 && !blocked_) {
        failure_->message =
            fmt::format("the answer broke off ({}, {}) after {}: {}", gcoalesce_ending_name(ending_.kind),
                        code_name(failure_->code), counted(events_, "event"), failure_->message);
        if (ending_.kind == GCOALESCE_IN_FLIGHT) // it goes on without us
            failure_->message += fmt::format("; --resume {} goes on behind them", last_event_id());
    }
    subscription_.reset(); // others may be waiting for the room that the stream takes
    return Step::over;
}

std::string Exchange::last_event_id() const {
    return info_.stream_id == 0 ? "" : to_text(EventId{info_.stream_id, last_number_});
}

ExitCode Exchange::exit_code() const {
    if (!failure_) return ExitCode::ok;
    if (blocked_) return ExitCode::blocked;
    if (events_ > 0) return ExitCode::partial;
    return exit_code_of(failure_->code, ending_.upstream_status);
}

std::string Exchange::remark() const {
    if (failure_) return {};
    const std::string_view reason = ending_.finish_reason;
    if (reason != "STOP") return fmt::format("the answer stopped early: {}", reason);
    return text_.empty() && !goes_on_ ? "the answer has no text; --events shows what it has" : "";
}

std::string Exchange::status_line() const {
    std::string line = gcoalesce_status_name(info_.status);
    if (info_.stream_id != 0)
        line += fmt::format(", key {}, stream {}", to_hex(std::span(info_.key).first(4)), to_hex(info_.stream_id));
    if (first_event_ != 0) line += fmt::format(", first event after {}", format_duration(first_event_ - asked_));
    line += fmt::format(", {} after {}: {}, {}", gcoalesce_ending_name(ending_.kind), format_duration(over_ - asked_),
                        counted(events_, "event"), format_size(event_bytes_));
    if (ending_.total_tokens != 0)
        line += fmt::format("; tokens: {} prompt ({} cached), {} thoughts, {} answer, {} in all", ending_.prompt_tokens,
                            ending_.cached_tokens, ending_.thought_tokens, ending_.answer_tokens, ending_.total_tokens);
    return line;
}

nlohmann::ordered_json Exchange::to_json() const {
    nlohmann::ordered_json json{{"text", text_}};
    if (!thoughts_.empty()) json["thoughts"] = thoughts_;
    json["status"] = gcoalesce_status_name(info_.status);
    json["key"] = to_hex(info_.key);
    json["stream_id"] = to_hex(info_.stream_id);
    json["last_event_id"] = last_event_id();
    json["ending"] = gcoalesce_ending_name(ending_.kind);
    json["finish_reason"] = ending_.finish_reason;
    json["events"] = events_;
    json["event_bytes"] = event_bytes_;
    json["first_event_ms"] = first_event_ != 0 ? nlohmann::ordered_json(to_ms(first_event_ - asked_)) : nullptr;
    json["total_ms"] = to_ms(over_ - asked_);
    json["prompt_tokens"] = ending_.prompt_tokens;
    json["cached_tokens"] = ending_.cached_tokens;
    json["thought_tokens"] = ending_.thought_tokens;
    json["answer_tokens"] = ending_.answer_tokens;
    json["total_tokens"] = ending_.total_tokens;
    return json;
}

} // namespace gcoalesce::cli
