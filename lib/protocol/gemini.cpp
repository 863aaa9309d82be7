#include "protocol/gemini.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "base/units.hpp"
#include "protocol/sse.hpp"

namespace gcoalesce {
namespace {

constexpr std::size_t kMaxDepth = 200;
constexpr std::size_t kMaxDocument = 256 * 1024;     // of an error document that is read; real ones have a few KiB
constexpr std::size_t kMaxShownDocument = 16 * 1024; // of one that is handed on
constexpr int kMaxShownDepth = 16;
constexpr std::size_t kMaxMessage = 200;
constexpr std::size_t kMaxCandidates = 64; // Gemini allows 8
constexpr std::int64_t kMaxRetryMs = 24 * 3600 * 1000;

bool is_blank(char c) {
    return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

std::string_view trimmed(std::string_view text) {
    while (!text.empty() && is_blank(text.front())) text.remove_prefix(1);
    while (!text.empty() && is_blank(text.back())) text.remove_suffix(1);
    return text;
}

// ---- Text for people --------------------------------------------------------------------------------------------

// Google's keys begin with "AIza"; its newer keys and OAuth tokens are long and mix cases and digits, as names do not.
bool looks_like_key(std::string_view word) {
    if (word.starts_with("AIz") && word.size() >= 8) return true;
    const auto any = [&](char from, char to) {
        return std::any_of(word.begin(), word.end(), [&](char c) { return c >= from && c <= to; });
    };
    return word.size() >= 24 && any('a', 'z') && any('A', 'Z') && any('0', '9');
}

std::string redacted(std::string_view text) {
    const auto in_word = [](char c) {
        return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
    };
    std::string out;
    for (std::size_t at = 0; at < text.size();) {
        if (!in_word(text[at])) {
            out += text[at++];
            continue;
        }
        std::size_t end = at;
        while (end < text.size() && in_word(text[end])) ++end;
        const std::string_view word = text.substr(at, end - at);
        out += looks_like_key(word) || out.ends_with("key=") ? "[redacted]" : word;
        at = end;
    }
    return out;
}

// One line without control characters (C0, DEL, C1) or Unicode's line separators; at most `limit` bytes of UTF-8.
std::string one_line(std::string_view text, std::size_t limit) {
    std::string out;
    for (std::size_t at = 0; at < text.size();) {
        const std::string_view rest = text.substr(at);
        const auto byte = [&](std::size_t i) { return i < rest.size() ? static_cast<unsigned char>(rest[i]) : 0; };
        std::size_t skip = 0;
        if (byte(0) <= 0x20 || byte(0) == 0x7F) skip = 1;
        if (byte(0) == 0xC2 && byte(1) >= 0x80 && byte(1) <= 0x9F) skip = 2;
        if (byte(0) == 0xE2 && byte(1) == 0x80 && (byte(2) == 0xA8 || byte(2) == 0xA9)) skip = 3;
        if (skip == 0) {
            out += text[at++];
            continue;
        }
        if (!out.empty() && out.back() != ' ') out += ' ';
        at += skip;
    }
    if (out.size() > limit) {
        std::size_t cut = limit;
        while (cut > 0 && (static_cast<unsigned char>(out[cut]) & 0xC0) == 0x80) --cut;
        out.resize(cut);
    }
    while (out.ends_with(' ')) out.pop_back();
    return out;
}

// ---- Reading JSON -----------------------------------------------------------------------------------------------

// What the events of one answer have told.
struct Facts {
    Usage usage;
    std::map<std::int64_t, std::string> reasons; // by candidate; "": none yet
    bool too_many = false;                       // candidates, more than are told apart
    std::string block_reason;
    std::string model_version;
};

struct ErrorDocument {
    std::int64_t code = 0;
    std::string status;
    std::string message;
    bool key_invalid = false;
    std::string retry_delay;
};

// Takes the parser's events of one document, a GenerateContentResponse or an error, and keeps what is of use: so a
// megabyte of base64 is never stored, and depth costs nothing but a byte a level.
class Scan {
  public:
    Facts facts;
    std::optional<ErrorDocument> error;
    bool object = false;                       // the document is an object
    bool answer = false;                       // with candidates or a prompt feedback
    EventText* text = nullptr;                 // where to put the first candidate's text
    std::vector<std::string>* texts = nullptr; // where to put each candidate's, its thoughts left out

    bool null() { return true; }
    bool boolean(bool value) {
        if (at() == At::part && key_ == "thought") thought_ = value;
        return true;
    }
    bool number_integer(std::int64_t value) { return number(value); }
    bool number_unsigned(std::uint64_t value) {
        constexpr auto most = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
        return number(static_cast<std::int64_t>(std::min(value, most)));
    }
    bool number_float(double, const std::string&) { return true; } // none of what is looked for is a fraction
    bool binary(std::vector<std::uint8_t>&) { return false; }      // not in JSON

    bool string(std::string& value) {
        switch (at()) {
        case At::root:
            if (key_ == "modelVersion") facts.model_version = one_line(value, 128);
            if (key_ == "error") error.emplace().message = std::move(value); // as some proxies have it
            break;
        case At::candidate:
            // The OpenAI form's words for what Gemini calls STOP.
            if (key_ == "finish_reason")
                reason_ = value == "stop" || value == "tool_calls" ? "STOP" : one_line(value, 39);
            if (key_ == "finishReason" && value != "FINISH_REASON_UNSPECIFIED") reason_ = one_line(value, 39);
            break;
        case At::part:
            if (key_ == "text" && (text != nullptr || texts != nullptr)) part_ += value;
            break;
        case At::feedback:
            if (key_ == "blockReason" && value != "BLOCK_REASON_UNSPECIFIED") facts.block_reason = one_line(value, 39);
            break;
        case At::error:
            if (key_ == "message")
                error->message = std::move(value);
            else if (key_ == "status")
                error->status = std::move(value);
            break;
        case At::detail: // of ErrorInfo and RetryInfo; DebugInfo repeats the API key and is never kept
            if (key_ == "reason" && value == "API_KEY_INVALID") error->key_invalid = true;
            if (key_ == "retryDelay") error->retry_delay = std::move(value);
            break;
        default: break;
        }
        return true;
    }

    bool key(std::string& name) {
        key_.swap(name);
        if (at() == At::root && (key_ == "candidates" || key_ == "promptFeedback" || key_ == "choices")) answer = true;
        return true;
    }

    bool start_object(std::size_t) {
        if (path_.empty()) object = true;
        const At inner = object_in(at());
        if (inner == At::candidate) {
            index_ = position_++;
            reason_.clear();
            candidate_text_ = {};
        } else if (inner == At::error) {
            error.emplace();
        } else if (inner == At::part) {
            thought_ = false;
            part_.clear();
        }
        return push(inner);
    }

    bool end_object() {
        if (at() == At::part) {
            (thought_ ? candidate_text_.thoughts : candidate_text_.text) += part_;
        } else if (at() == At::candidate) {
            end_candidate();
        }
        path_.pop_back();
        return true;
    }

    bool start_array(std::size_t) {
        const At inner = array_in(at());
        if (inner == At::candidates) position_ = 0;
        return push(inner);
    }
    bool end_array() {
        path_.pop_back();
        return true;
    }

    bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception&) { return false; }

  private:
    // Where in the document an object or array stands.
    enum class At : std::uint8_t {
        outside,
        other,
        documents,
        root,
        candidates,
        candidate,
        content,
        parts,
        part,
        feedback,
        usage,
        error,
        details,
        detail
    };

    At at() const { return path_.empty() ? At::outside : path_.back(); }

    At object_in(At outer) const {
        switch (outer) {
        case At::outside:
        case At::documents: return At::root;
        case At::root:
            if (key_ == "promptFeedback") return At::feedback;
            if (key_ == "usageMetadata" || key_ == "usage") return At::usage;
            return key_ == "error" ? At::error : At::other;
        case At::candidates: return At::candidate;
        case At::candidate: return key_ == "content" ? At::content : At::other;
        case At::parts: return At::part;
        case At::details: return At::detail;
        default: return At::other;
        }
    }

    At array_in(At outer) const {
        switch (outer) {
        case At::outside: return At::documents;
        case At::root: return key_ == "candidates" || key_ == "choices" ? At::candidates : At::other;
        case At::content: return key_ == "parts" ? At::parts : At::other;
        case At::error: return key_ == "details" ? At::details : At::other;
        default: return At::other;
        }
    }

    bool push(At inner) {
        if (path_.size() == kMaxDepth) return false;
        path_.push_back(inner);
        return true;
    }

    bool number(std::int64_t value) {
        if (at() == At::candidate && key_ == "index") index_ = value;
        if (at() == At::error && key_ == "code") error->code = value;
        if (at() == At::usage) {
            const std::pair<const char*, std::int64_t*> counts[] = {{"promptTokenCount", &facts.usage.prompt},
                                                                    {"cachedContentTokenCount", &facts.usage.cached},
                                                                    {"thoughtsTokenCount", &facts.usage.thoughts},
                                                                    {"candidatesTokenCount", &facts.usage.answer},
                                                                    {"toolUsePromptTokenCount", &facts.usage.tool_use},
                                                                    {"totalTokenCount", &facts.usage.total},
                                                                    {"prompt_tokens", &facts.usage.prompt},
                                                                    {"completion_tokens", &facts.usage.answer},
                                                                    {"total_tokens", &facts.usage.total}};
            for (const auto& [name, count] : counts) {
                if (key_ == name) *count = std::max<std::int64_t>(value, 0);
            }
        }
        return true;
    }

    // Only here is the candidate's index known, which may stand behind all else; without one, its place counts.
    void end_candidate() {
        if (text != nullptr && index_ == 0) {
            text->text += candidate_text_.text;
            text->thoughts += candidate_text_.thoughts;
        }
        if (texts != nullptr && index_ >= 0 && index_ < static_cast<std::int64_t>(kMaxCandidates)) {
            const auto place = static_cast<std::size_t>(index_);
            if (texts->size() <= place) texts->resize(place + 1);
            (*texts)[place] += candidate_text_.text;
        }
        const auto known = facts.reasons.find(index_);
        if (known != facts.reasons.end()) {
            if (!reason_.empty()) known->second = reason_; // a later event without a reason takes none back
        } else if (facts.reasons.size() < kMaxCandidates) {
            facts.reasons.emplace(index_, reason_);
        } else {
            facts.too_many = true;
        }
    }

    std::vector<At> path_;
    std::string key_; // the last one read
    std::int64_t position_ = 0;
    std::int64_t index_ = 0;
    std::string reason_;
    bool thought_ = false;
    std::string part_;
    EventText candidate_text_;
};

// The whole text must be one document, or else (prefix) begin with one. False: it is not; then `scan` holds what was
// read before the fault.
bool read_json(std::string_view json, bool prefix, Scan& scan) {
    // nlohmann takes a NUL for the end and skips a byte order mark; the clients that get these bytes do neither.
    if (json.starts_with("\xEF\xBB\xBF") || (!prefix && json.find('\0') != std::string_view::npos)) return false;
    return nlohmann::json::sax_parse(json.data(), json.data() + json.size(), &scan,
                                     nlohmann::json::input_format_t::json, !prefix);
}

// ---- Errors -----------------------------------------------------------------------------------------------------

// "34.4s", and Go's "1h2m3.5s"; 0: not understood.
std::int64_t parse_retry(std::string_view text) {
    std::int64_t sum = 0;
    while (!text.empty()) {
        const std::size_t unit = text.find_first_not_of("0123456789.");
        if (unit == std::string_view::npos) return 0;
        const std::size_t end = std::min(text.find_first_of("0123456789.", unit), text.size());
        const Result<Nanos> part = parse_duration(text.substr(0, end));
        if (!part) return 0;
        sum = std::min(sum + (*part + kMillisecond - 1) / kMillisecond, kMaxRetryMs);
        text.remove_prefix(end);
    }
    return sum;
}

std::int64_t retry_of(const ErrorDocument& error) {
    if (!error.retry_delay.empty()) return parse_retry(error.retry_delay);
    constexpr std::string_view words = "retry in ";
    const std::size_t found = error.message.find(words);
    if (found == std::string::npos) return 0;
    std::string_view delay = std::string_view(error.message).substr(found + words.size());
    delay = delay.substr(0, delay.find_first_not_of("0123456789.hms"));
    while (delay.ends_with('.')) delay.remove_suffix(1); // the sentence's
    return parse_retry(delay);
}

Outcome failed(Code code, int http_status, std::string message) {
    Outcome outcome;
    outcome.kind = GCOALESCE_FAILED;
    outcome.code = code;
    outcome.http_status = http_status;
    outcome.message = std::move(message);
    return outcome;
}

Outcome failed_upstream(int http_status, const std::optional<ErrorDocument>& error) {
    Code code = GCOALESCE_UPSTREAM_ERROR;
    if (http_status == 429) code = GCOALESCE_RATE_LIMITED;
    if (http_status == 401 || http_status == 403 || (error && error->key_invalid)) code = GCOALESCE_KEY_REFUSED;
    std::string text = fmt::format("upstream answered {}", http_status);
    if (error && !error->status.empty()) text += " " + error->status;
    if (error && !error->message.empty()) text += ": " + error->message;
    Outcome outcome = failed(code, http_status, one_line(redacted(text), kMaxMessage));
    if (error) outcome.retry_ms = retry_of(*error);
    return outcome;
}

bool is_debug_info(const nlohmann::ordered_json& value) {
    const auto type = value.find("@type");
    return type != value.end() && type->is_string() &&
           type->get_ref<const std::string&>().find("DebugInfo") != std::string::npos;
}

// Takes out what may be key material, and DebugInfo, which repeats the key.
void redact(nlohmann::ordered_json& json) {
    if (json.is_string()) json = redacted(json.get_ref<const std::string&>());
    for (auto it = json.begin(); json.is_structured() && it != json.end();) {
        if (is_debug_info(*it)) {
            it = json.erase(it);
        } else {
            redact(*it);
            ++it;
        }
    }
}

// The error as callers may see it, as Google's servers lay JSON out: upstream's, but for what would show a key, and for
// the array that the OpenAI form wraps it in at times, which its SDK cannot read. Written anew, so that nothing is in
// it that was not looked at (a member that comes twice, bytes behind the end). "": there is none in this text, or one
// of a size or depth that no real one has.
std::string error_document(std::string_view text) {
    text = trimmed(text);
    if (text.size() > kMaxShownDocument) return {};
    bool deep = false;
    const auto shallow = [&](int depth, nlohmann::ordered_json::parse_event_t, const nlohmann::ordered_json&) {
        deep = deep || depth > kMaxShownDepth;
        return !deep;
    };
    nlohmann::ordered_json json = nlohmann::ordered_json::parse(text, shallow, false);
    if (!deep && json.is_array() && json.size() == 1) json = nlohmann::ordered_json(std::move(json.front()));
    if (deep || !json.is_object() || !json.contains("error") || !json["error"].is_object()) return {};
    redact(json);
    std::string shown = json.dump(2);
    if (redacted(shown) != shown) return {}; // in a name, say
    return shown;
}

// An error document that came with status 200 tells its own.
Outcome failed_inside(int http_status, const ErrorDocument& error, std::string_view text) {
    const bool told = error.code >= 400 && error.code <= 599;
    Outcome outcome = failed_upstream(told ? static_cast<int>(error.code) : http_status, error);
    outcome.document = error_document(text);
    return outcome;
}

} // namespace

Outcome outcome_of_error(int http_status, std::string_view body) {
    Scan scan;
    read_json(trimmed(body.substr(0, kMaxDocument)), true, scan); // a document that was cut off tells something, too
    Outcome outcome = failed_upstream(http_status, scan.error);
    outcome.document = error_document(body);
    return outcome;
}

EventText event_text(std::string_view json) {
    EventText text;
    Scan scan;
    scan.text = &text;
    if (!read_json(json, false, scan) || !scan.object) return {};
    return text;
}

void add_texts(std::string_view json, std::vector<std::string>& texts) {
    Scan scan;
    scan.texts = &texts;
    read_json(json, false, scan);
}

// ---- AnswerReader -----------------------------------------------------------------------------------------------

struct AnswerReader::State {
    State(Method of, int status, std::size_t limit)
        : method(of), http_status(status), max_event_bytes(limit), parser(limit) {}

    Method method;
    int http_status;
    std::size_t max_event_bytes;

    std::optional<Outcome> outcome; // stands, whatever else comes
    Facts facts;
    std::uint64_t events = 0;

    // A stream. A line that begins with a bracket is no line of SSE: from there on, the body is a document.
    SseParser parser;
    bool anything = false; // a byte that is not blank
    bool line_start = true;
    bool in_document = false;
    std::size_t tried = 0; // bytes of the document when it was last looked at

    std::string body; // the document, the whole unary body, or the body of an HTTP error

    void decide(Outcome found) {
        found.usage = facts.usage;
        found.model_version = facts.model_version;
        outcome = std::move(found);
    }

    // Reads one event, or what may be one. False: it is not one whole document.
    bool read_event(std::string_view json, Scan& scan) const {
        scan.facts = facts;
        return read_json(json, false, scan);
    }

    void take_event(std::string_view json, bool whole, Scan& scan, const OnEvent& on_event) {
        if (scan.error) return decide(failed_inside(http_status, *scan.error, json));
        if (!whole || !scan.object)
            return decide(failed(GCOALESCE_BAD_ANSWER, http_status,
                                 fmt::format("event {} of the answer is no JSON object", events + 1)));
        facts = std::move(scan.facts);
        ++events;
        on_event(json);
    }

    // A call that is passed on: its body is no business of ours.
    bool passes() const { return method == Method::pass && http_status / 100 == 2; }

    void end_pass(bool clean) {
        Outcome end;
        end.http_status = http_status;
        end.kind = clean ? GCOALESCE_COMPLETE : GCOALESCE_TRUNCATED;
        end.code = clean ? GCOALESCE_OK : GCOALESCE_CUT_SHORT;
        if (!clean) end.message = "the connection broke before the end of the response";
        decide(std::move(end));
    }

    // How a stream of the OpenAI form ends; no event.
    bool is_done(std::string_view data) const { return method == Method::chat_stream && trimmed(data) == "[DONE]"; }

    void feed_stream(std::string_view bytes, const OnEvent& on_event) {
        const std::size_t document = in_document ? 0 : find_document(bytes);
        const Result<void> fed = parser.feed(bytes.substr(0, document), [&](const SseEvent& next) {
            if (outcome || is_done(next.data) || trimmed(next.data).empty())
                return; // blank data is a way to keep a connection open
            if (next.repaired) {
                decide(failed(GCOALESCE_BAD_ANSWER, http_status,
                              fmt::format("event {} of the answer is no UTF-8", events + 1)));
                return;
            }
            Scan scan;
            const bool whole = read_event(next.data, scan);
            take_event(next.data, whole, scan, on_event);
        });
        if (outcome) return;
        if (!fed) return decide(failed(GCOALESCE_TOO_LARGE, http_status, fed.error().message));
        if (document == bytes.size()) return;
        if (!in_document) {
            in_document = true;
            flush(true, on_event);
            if (outcome) return;
        }
        feed_document(bytes.substr(document));
    }

    // Where the first line that begins with a bracket starts; the size when there is none.
    std::size_t find_document(std::string_view bytes) {
        for (std::size_t at = 0; at < bytes.size(); ++at) {
            const char c = bytes[at];
            if (c == '\n' || c == '\r') {
                line_start = true;
            } else if (line_start && !is_blank(c)) {
                if (c == '{' || c == '[') return at;
                line_start = false;
                anything = true;
            }
        }
        return bytes.size();
    }

    // The last event when its final blank line is missing. False: what is left is a part of an event. After a broken
    // connection even a whole one is not handed out, but an error, or its beginning, still explains the end.
    bool flush(bool clean, const OnEvent& on_event) {
        const std::string rest = parser.unfinished_data();
        if (trimmed(rest).empty() || is_done(rest)) return true;
        Scan scan;
        const bool whole = read_event(rest, scan);
        if (scan.error || (whole && clean)) take_event(rest, whole, scan, on_event);
        return whole;
    }

    // An unframed document is looked at as soon as it may be whole, not only at the end: upstream may keep the
    // connection. That it is looked at seldom when it is large keeps the cost linear.
    void feed_document(std::string_view bytes) {
        body += bytes.substr(0, kMaxDocument - body.size());
        const bool full = body.size() == kMaxDocument;
        const bool worth = body.size() < 4096 || body.size() - tried >= tried / 8;
        if (!full && (!worth || bytes.find_first_of("}]") == std::string_view::npos)) return;
        tried = body.size();
        Scan scan;
        if (read_json(body, true, scan) || full) end_document(scan);
    }

    void end_document(const Scan& scan) {
        // Without alt=sse Gemini streams a JSON array of answers, and a unary call gives one answer. Neither was asked
        // for here: to cut them into events would mean to change their bytes, so they are no answer.
        decide(scan.error ? failed_inside(http_status, *scan.error, body)
                          : failed(GCOALESCE_BAD_ANSWER, http_status,
                                   "the answer has a JSON document where an event stream was asked for"));
    }

    void end_stream(bool clean, const OnEvent& on_event) {
        if (in_document) {
            Scan scan;
            const bool whole = read_json(body, true, scan);
            return clean || whole || scan.error ? end_document(scan) : end(clean, false);
        }
        const bool whole = flush(clean, on_event) && !parser.inside_other_line();
        if (!outcome) end(clean, whole);
    }

    void end_unary(bool clean, const OnEvent& on_event) {
        anything = !trimmed(body).empty();
        Scan scan;
        const bool whole = read_event(body, scan);
        if (scan.error || (clean && whole && scan.answer)) take_event(body, whole, scan, on_event);
        if (!outcome) end(clean, whole);
    }

    // whole: nothing is left over that is only a part of something.
    void end(bool clean, bool whole) {
        Outcome end;
        end.http_status = http_status;
        bool stop = false; // is a reason
        bool all = !facts.too_many;
        for (const auto& [index, reason] : facts.reasons) {
            stop |= reason == "STOP";
            all &= reason == "STOP";
            if (end.finish_reason.empty() && reason != "STOP") end.finish_reason = reason;
        }
        if (end.finish_reason.empty()) end.finish_reason = facts.block_reason;
        if (end.finish_reason.empty() && stop) end.finish_reason = "STOP";

        if (clean && whole && !end.finish_reason.empty()) {
            end.kind = GCOALESCE_COMPLETE;
            end.code = GCOALESCE_OK;
            end.reusable = all && end.finish_reason == "STOP";
        } else if (events > 0) {
            end.kind = GCOALESCE_TRUNCATED;
            end.code = GCOALESCE_CUT_SHORT;
            end.message = fmt::format("the answer {} after {} event{}",
                                      clean && whole ? "ended without a finish reason" : "was cut off", events,
                                      events == 1 ? "" : "s");
        } else if (clean) {
            end.code = GCOALESCE_BAD_ANSWER;
            end.message = anything ? "the answer is none of Gemini's" : "the answer is empty";
        } else {
            end.code = GCOALESCE_CONNECT_FAILED;
            end.message = "the connection broke before an answer";
        }
        decide(std::move(end));
    }
};

AnswerReader::AnswerReader(Method method, int http_status, std::size_t max_event_bytes)
    : state_(std::make_unique<State>(method, http_status, max_event_bytes)) {}
AnswerReader::~AnswerReader() = default;
AnswerReader::AnswerReader(AnswerReader&&) noexcept = default;
AnswerReader& AnswerReader::operator=(AnswerReader&&) noexcept = default;

bool AnswerReader::feed(std::string_view bytes, const OnEvent& on_event) {
    State& state = *state_;
    if (state.outcome) return false;
    if (state.passes()) {
        if (!bytes.empty()) on_event(bytes);
        return true;
    }
    if (state.http_status != 200) {
        state.body += bytes.substr(0, kMaxDocument - state.body.size());
        return state.body.size() < kMaxDocument;
    }
    if (streams(state.method)) {
        state.feed_stream(bytes, on_event);
    } else if (bytes.size() > state.max_event_bytes - state.body.size()) {
        state.decide(
            failed(GCOALESCE_TOO_LARGE, 200, fmt::format("the answer has more than {} bytes", state.max_event_bytes)));
    } else {
        state.body += bytes;
    }
    return !state.outcome;
}

Outcome AnswerReader::finish(bool clean, const OnEvent& on_event) {
    State& state = *state_;
    if (state.outcome) return *state.outcome;
    if (state.passes()) {
        state.end_pass(clean);
    } else if (state.http_status != 200) {
        state.decide(outcome_of_error(state.http_status, state.body));
    } else if (streams(state.method)) {
        state.end_stream(clean, on_event);
    } else {
        state.end_unary(clean, on_event);
    }
    return *state.outcome;
}

} // namespace gcoalesce
