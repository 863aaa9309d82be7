#include "cli/sim/answer.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>
#include <vector>

#include "protocol/sse.hpp"

namespace gcoalesce::sim {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::uint64_t kMostBytes = 256ULL << 20;
constexpr std::uint64_t kCharsPerToken = 4;

std::string pretty(const Json& document) {
    return document.dump(2, ' ', false, Json::error_handler_t::replace);
}

// Google's spacing within one line: a blank after each colon and nowhere else. That is a dump with an indent of
// nothing, less its line breaks (those within strings are escaped).
std::string one_line(const Json& document) {
    std::string text = document.dump(0, ' ', false, Json::error_handler_t::replace);
    std::erase(text, '\n');
    return text;
}

std::string in_array(const std::string& document) {
    return "[" + document + "]";
}

// --- errors ---

struct Status {
    int code;
    const char* name;
    const char* message;
};

constexpr std::array<Status, 10> kStatuses{{
    {400, "INVALID_ARGUMENT", "Request contains an invalid argument."},
    {401, "UNAUTHENTICATED", "Request had invalid authentication credentials."},
    {403, "PERMISSION_DENIED", "The caller does not have permission"},
    {404, "NOT_FOUND", "Requested entity was not found."},
    {429, "RESOURCE_EXHAUSTED", "You exceeded your current quota, please check your plan and billing details."},
    {499, "CANCELLED", "The operation was cancelled."},
    {500, "INTERNAL", "An internal error has occurred. Please retry."},
    {501, "UNIMPLEMENTED", "Operation is not implemented, or supported, or enabled."},
    {503, "UNAVAILABLE", "The model is overloaded. Please try again later."},
    {504, "DEADLINE_EXCEEDED", "Deadline expired before operation could complete."},
}};

Json error_json(int status, std::string message) {
    const auto* known = std::ranges::find(kStatuses, status, &Status::code);
    const bool found = known != kStatuses.end();
    if (message.empty()) message = found ? known->message : "Unknown error.";
    return {{"error", {{"code", status}, {"message", message}, {"status", found ? known->name : "UNKNOWN"}}}};
}

// A protobuf Duration: "36s", "34.4s".
std::string seconds(Nanos duration) {
    std::string text = fmt::format("{}.{:09}", duration / kSecond, duration % kSecond);
    text.erase(text.find_last_not_of('0') + 1);
    if (text.back() == '.') text.pop_back();
    return text + "s";
}

Json type(const char* name) {
    return {{"@type", std::string("type.googleapis.com/google.rpc.") + name}};
}

// The error with the details that Google adds to its kind.
Json scripted_error(const Call& call, const Script& script, int status) {
    const bool bad_key = script.reason == "API_KEY_INVALID";
    Json document = error_json(status, bad_key ? "API key not valid. Please pass a valid API key." : "");
    Json& error = document["error"];
    Json details = Json::array();
    if (!script.reason.empty()) {
        Json info = type("ErrorInfo");
        info["reason"] = script.reason;
        info["domain"] = "googleapis.com";
        info["metadata"] = {{"service", "generativelanguage.googleapis.com"}};
        details.push_back(std::move(info));
    }
    if (bad_key) {
        Json localized = type("LocalizedMessage");
        localized["locale"] = "en-US";
        localized["message"] = error["message"];
        details.push_back(std::move(localized));
        Json debug = type("DebugInfo");
        debug["detail"] = "Invalid API key: " + call.api_key;
        details.push_back(std::move(debug));
    }
    if (status == 429) {
        Json quota = type("QuotaFailure");
        quota["violations"] =
            Json::array({{{"quotaMetric", "generativelanguage.googleapis.com/generate_content_requests"},
                          {"quotaId", "GenerateRequestsPerMinutePerProjectPerModel-FreeTier"},
                          {"quotaDimensions", {{"location", "global"}, {"model", call.model}}},
                          {"quotaValue", "10"}}});
        details.push_back(std::move(quota));
        Json help = type("Help");
        help["links"] = Json::array({{{"description", "Learn more about Gemini API quotas"},
                                      {"url", "https://ai.google.dev/gemini-api/docs/rate-limits"}}});
        details.push_back(std::move(help));
    }
    if (script.retry) {
        if (status == 429)
            error["message"] =
                error["message"].get<std::string>() + "\nPlease retry in " + seconds(*script.retry) + ".";
        Json retry = type("RetryInfo");
        retry["retryDelay"] = seconds(*script.retry);
        details.push_back(std::move(retry));
    }
    if (!details.empty()) error["details"] = std::move(details);
    return document;
}

std::string html_page(int status) {
    return fmt::format("<!DOCTYPE html>\n<html lang=en>\n  <meta charset=utf-8>\n  <title>Error {0}</title>\n"
                       "  <p><b>{0}.</b> <ins>That’s an error.</ins>\n"
                       "  <p>The requested URL was not answered.  <ins>That’s all we know.</ins>\n",
                       status);
}

// --- the words of an answer ---

constexpr std::array<std::string_view, 32> kWords{
    "the",   "stream", "of",    "one",  "answer", "carries", "every",      "reader", "along", "Zürich", "and",
    "naïve", "event",  "after", "here", "memory", "shared",  "\"quoted\"", "many",   "words", "come",   "slowly",
    "日本",  "from",   "a",     "far",  "model",  "without", "end;",       "still",  "they",  "arrive"};

class Words {
  public:
    explicit Words(std::uint64_t seed) : state_(seed) {}

    // lead, then words: a few, or so many that the text has `size` bytes.
    std::string text(std::string lead, std::uint64_t size) {
        if (size == 0) {
            for (int i = 0; i < 6; ++i) append(lead);
            return lead;
        }
        lead.reserve(size + 16);
        while (lead.size() < size) append(lead);
        std::size_t cut = size;
        while (cut > 0 && cut < lead.size() && (static_cast<unsigned char>(lead[cut]) & 0xC0) == 0x80) --cut;
        lead.resize(cut);
        lead.resize(size, '.');
        return lead;
    }

  private:
    void append(std::string& text) {
        if (!text.empty() || started_) text += ' ';
        started_ = true;
        text += kWords[next() % kWords.size()];
    }

    // splitmix64: small, and the same everywhere (Steele, Lea, Flood 2014).
    std::uint64_t next() {
        std::uint64_t z = state_ += 0x9E3779B97F4A7C15;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
        return z ^ (z >> 31);
    }

    std::uint64_t state_;
    bool started_ = false;
};

std::string first_characters(std::string_view text, std::size_t most) {
    std::size_t end = 0;
    while (end < text.size() && most > 0) {
        do ++end;
        while (end < text.size() && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80);
        --most;
    }
    return std::string(text.substr(0, end));
}

// The events of one generated answer, in their order.
class Events {
  public:
    Events(const Call& call, const Script& script)
        : model_(call.model),
          response_id_(call.body_hash.substr(0, 16) + "-" + std::to_string(call.number)),
          echo_(first_characters(call.question.text, 60)),
          prompt_tokens_(call.question.tokens),
          script_(script) {
        std::uint64_t seed = 0;
        std::from_chars(call.body_hash.data(), call.body_hash.data() + 16, seed, 16);
        for (std::uint64_t i = 0; i < script.candidates; ++i) words_.emplace_back(seed + i);
    }

    std::uint64_t count() const { return script_.block.empty() ? script_.events : 1; }

    Json next() {
        const std::uint64_t index = index_++;
        Json event = Json::object();
        if (!script_.block.empty()) {
            event["promptFeedback"] = {{"blockReason", script_.block}};
            return finished(std::move(event));
        }
        const bool thought = index < script_.thoughts, last = index + 1 == script_.events;
        std::string lead;
        if (index == script_.thoughts)
            lead = "Answer to: " + echo_;
        else if (index == 0)
            lead = "Thinking about: " + echo_;

        Json& candidates = event["candidates"] = Json::array();
        for (std::uint64_t i = 0; i < script_.candidates; ++i) {
            Json candidate = Json::object();
            if (!(last && script_.finish_alone)) {
                Json part = {{"text", words_[i].text(lead, script_.size)}};
                (thought ? thought_tokens_ : answer_tokens_) +=
                    1 + part["text"].get_ref<const std::string&>().size() / kCharsPerToken;
                if (thought) part["thought"] = true;
                candidate["content"] = {{"parts", Json::array({std::move(part)})}, {"role", "model"}};
            }
            if (script_.stop_every || (last && !script_.truncate_after)) candidate["finishReason"] = script_.finish;
            candidate["index"] = i;
            candidates.push_back(std::move(candidate));
        }
        return finished(std::move(event));
    }

    // The whole answer as one document: the events' texts joined, thoughts and answer apart.
    Json joined() {
        Json whole = next();
        for (std::uint64_t i = 1; i < count(); ++i) {
            Json event = next();
            for (std::size_t c = 0; c < whole["candidates"].size(); ++c)
                join(whole["candidates"][c], event["candidates"][c]);
            whole["usageMetadata"] = std::move(event["usageMetadata"]);
        }
        return whole;
    }

  private:
    static void join(Json& whole, Json& candidate) {
        if (candidate.contains("finishReason")) {
            // Before the index, where Google has it.
            whole.erase("index");
            whole["finishReason"] = candidate["finishReason"];
            whole["index"] = candidate["index"];
        }
        if (!candidate.contains("content")) return;
        Json& parts = whole["content"]["parts"];
        Json& part = candidate["content"]["parts"][0];
        if (parts.back().contains("thought") == part.contains("thought"))
            parts.back()["text"].get_ref<std::string&>() += part["text"].get_ref<const std::string&>();
        else
            parts.push_back(std::move(part));
    }

    Json finished(Json event) const {
        Json usage = {{"promptTokenCount", prompt_tokens_}};
        if (answer_tokens_ > 0) usage["candidatesTokenCount"] = answer_tokens_;
        usage["totalTokenCount"] = prompt_tokens_ + answer_tokens_ + thought_tokens_;
        usage["promptTokensDetails"] = Json::array({{{"modality", "TEXT"}, {"tokenCount", prompt_tokens_}}});
        if (thought_tokens_ > 0) usage["thoughtsTokenCount"] = thought_tokens_;
        event["usageMetadata"] = std::move(usage);
        event["modelVersion"] = model_;
        event["responseId"] = response_id_;
        return event;
    }

    std::string model_, response_id_, echo_;
    std::uint64_t prompt_tokens_, answer_tokens_ = 0, thought_tokens_ = 0, index_ = 0;
    Script script_;
    std::vector<Words> words_;
};

// --- from documents to the wire ---

// A whole answer, or one event of it, in the OpenAI form.
Json as_chat(const Json& event, bool streamed) {
    Json chat = {{"id", event["responseId"]},
                 {"object", streamed ? "chat.completion.chunk" : "chat.completion"},
                 {"created", 1750000000},
                 {"model", event["modelVersion"]},
                 {"choices", Json::array()}};
    for (const Json& candidate : event.value("candidates", Json::array())) {
        std::string text;
        for (const Json& part : candidate.value("content", Json::object()).value("parts", Json::array()))
            if (!part.contains("thought")) text += part["text"].get_ref<const std::string&>();
        Json choice = {{streamed ? "delta" : "message", {{"role", "assistant"}, {"content", std::move(text)}}}};
        if (const std::string reason = candidate.value("finishReason", ""); !reason.empty())
            choice["finish_reason"] = reason == "STOP" ? "stop" : reason == "MAX_TOKENS" ? "length" : "content_filter";
        choice["index"] = candidate["index"];
        chat["choices"].push_back(std::move(choice));
    }
    const Json& usage = event["usageMetadata"];
    chat["usage"] = {{"completion_tokens", usage.value("candidatesTokenCount", 0)},
                     {"prompt_tokens", usage["promptTokenCount"]},
                     {"total_tokens", usage["totalTokenCount"]}};
    return chat;
}

// What stands in front of, and behind, one element of an array that is sent bit by bit.
std::string element(const std::string& document, bool is_first) {
    return (is_first ? "[" : ",\r\n") + document + "\n";
}

std::string close_array(bool is_empty) {
    return is_empty ? "[]" : "]";
}

const char* content_type(Form form) {
    return form == Form::sse || form == Form::chat ? "text/event-stream" : "application/json; charset=UTF-8";
}

// The first of a script's stops: after how many pieces, and how.
struct Stop {
    std::uint64_t at;
    std::optional<std::uint64_t> Script::*key = nullptr;
};

Stop first_stop(const Script& script, Form form, std::uint64_t pieces) {
    Stop stop{pieces};
    const auto consider = [&](std::optional<std::uint64_t> Script::*key) {
        if ((script.*key) && (stop.key == nullptr || *(script.*key) < stop.at))
            stop = {std::min(*(script.*key), pieces), key};
    };
    for (auto key : {&Script::cut_after, &Script::reset_after, &Script::hang_after}) consider(key);
    if (form == Form::unary || form == Form::chat_unary) return stop; // the others change what the one document says
    for (auto key :
         {&Script::error_after, &Script::bare_error_after, &Script::invalid_json_after, &Script::truncate_after})
        consider(key);
    return stop;
}

// Fills in pieces, last and ending of an answer that would have `pieces` of them.
void stop_where_told(Answer& answer, const Call& call, Form form, const Script& script, std::uint64_t pieces) {
    const Stop stop = first_stop(script, form, pieces);
    answer.pieces = stop.at;
    if (stop.key == &Script::cut_after) answer.ending = Ending::cut;
    if (stop.key == &Script::reset_after) answer.ending = Ending::reset;
    if (stop.key == &Script::hang_after) answer.ending = Ending::hang;
    if (answer.ending != Ending::clean) return;

    const bool array = form == Form::array, nothing_yet = stop.at == 0;
    const Json error = scripted_error(call, script, script.error_status);
    const auto wrapped = [&](std::string document) { return script.array_error ? in_array(document) : document; };
    if (stop.key == &Script::bare_error_after) {
        answer.last = wrapped(pretty(error)) + "\n";
    } else if (stop.key == &Script::error_after) {
        answer.last = array ? element(pretty(error), nothing_yet) + "]" : frame_sse(wrapped(one_line(error)));
    } else if (stop.key == &Script::invalid_json_after) {
        const std::string broken = R"({"candidates": [{"content": {"parts": [{"text": "cut)";
        answer.last = array ? element(broken, nothing_yet) + "]" : "data: " + broken + "\r\n\r\n";
    } else if (array) {
        answer.last = close_array(nothing_yet);
    } else if (form == Form::chat && stop.key == nullptr) {
        answer.last = "data: [DONE]\n\n";
    }
}

// Hands out a text in `pieces` parts of about the same size.
std::function<std::string()> in_parts(std::string text, std::uint64_t pieces) {
    return [text = std::move(text), pieces, sent = std::uint64_t{0}]() mutable {
        const std::size_t begin = text.size() * sent / pieces, end = text.size() * (sent + 1) / pieces;
        ++sent;
        return text.substr(begin, end - begin);
    };
}

Answer whole_body(int status, const char* type, std::string body) {
    Answer answer;
    answer.status = status;
    answer.content_type = type;
    answer.last = std::move(body);
    return answer;
}

} // namespace

Result<Question> read_question(std::string_view body) {
    Json document;
    try {
        document = Json::parse(body, [](int depth, Json::parse_event_t, Json&) {
            if (depth > 100) throw std::length_error("nesting"); // before it costs memory and stack
            return true;
        });
    } catch (const Json::exception&) {
        return fail(GCOALESCE_BAD_REQUEST, "Invalid JSON payload received. Parsing terminated before end of input.");
    } catch (const std::length_error&) {
        return fail(GCOALESCE_BAD_REQUEST,
                    "Invalid JSON payload received. Message too deep. Max recursion depth reached.");
    }
    if (document.is_object() && document.contains("messages") && document["messages"].is_array()) {
        Json turns = Json::array(); // of the OpenAI form, as Gemini has them
        for (const Json& message : document["messages"]) {
            if (!message.is_object() || !message.contains("content") || !message["content"].is_string()) continue;
            turns.push_back(
                {{"role", message.value("role", "user")}, {"parts", Json::array({{{"text", message["content"]}}})}});
        }
        document["contents"] = std::move(turns);
    }
    const auto contents = document.is_object() ? document.find("contents") : document.end();
    if (!document.is_object() || contents == document.end() || !contents->is_array() || contents->empty())
        return fail(GCOALESCE_BAD_REQUEST, "* GenerateContentRequest.contents: contents is not specified\n");

    Question question;
    std::size_t bytes = 0;
    for (const Json& content : *contents) {
        if (!content.is_object() || !content.contains("parts") || !content["parts"].is_array()) continue;
        std::string text;
        for (const Json& part : content["parts"])
            if (part.is_object() && part.contains("text") && part["text"].is_string())
                text += part["text"].get_ref<const std::string&>();
        bytes += text.size();
        if (!content.contains("role") || content["role"] == "user") question.text = std::move(text);
    }
    question.tokens = 1 + bytes / kCharsPerToken;

    constexpr std::string_view opening = "[sim ";
    const std::size_t begin = question.text.find(opening);
    const std::size_t end = begin == std::string::npos ? begin : question.text.find(']', begin);
    if (end != std::string::npos) {
        question.script = question.text.substr(begin + opening.size(), end - begin - opening.size());
        question.text.erase(begin, end + 1 - begin);
        question.text.erase(question.text.find_last_not_of(' ') + 1);
        question.text.erase(0, question.text.find_first_not_of(' '));
    }
    return question;
}

Chat read_chat(std::string_view body) {
    const Json document = Json::parse(body, nullptr, false);
    Chat chat;
    if (!document.is_object()) return chat;
    if (document.contains("model") && document["model"].is_string()) chat.model = document["model"];
    if (document.contains("stream") && document["stream"] == true) chat.form = Form::chat;
    return chat;
}

Result<Answer> make_answer(const Call& call, const Script& script) {
    const int status = script.status.value_or(script.html ? 404 : 200);
    Answer answer;
    if (script.empty) {
        answer = whole_body(200, content_type(call.form), "");
    } else if (script.html) {
        answer = whole_body(status, "text/html; charset=UTF-8", html_page(status));
    } else if (status != 200) {
        const std::string document = pretty(scripted_error(call, script, status)) + "\n";
        answer = whole_body(status, content_type(call.form), script.array_error ? in_array(document) : document);
        if (script.retry_header && script.retry)
            answer.retry_after = std::to_string((*script.retry + kSecond - 1) / kSecond);
    }
    if (!answer.content_type.empty()) {
        // Such a body is one piece, and may stop before it (0) or behind it as well.
        answer.next = in_parts(std::exchange(answer.last, {}), 1);
        stop_where_told(answer, call, Form::unary, script, 1);
        return answer;
    }

    const bool unary = call.form == Form::unary || call.form == Form::chat_unary;
    const std::uint64_t events_in_piece = unary ? script.events : 1;
    if (script.size * script.candidates * events_in_piece > kMostBytes)
        return fail(GCOALESCE_TOO_LARGE, "the script asks for more than 256 MiB in one document");

    answer.content_type = content_type(call.form);
    auto events = std::make_shared<Events>(call, script);
    if (unary) {
        const auto whole = [&] {
            return call.form == Form::unary ? events->joined() : as_chat(events->joined(), false);
        };
        std::string document =
            pretty(script.error_after || script.bare_error_after ? scripted_error(call, script, script.error_status)
                                                                 : whole()) +
            "\n";
        if (script.invalid_json_after) document.resize(document.size() / 2);
        answer.next = in_parts(std::move(document), script.events);
        stop_where_told(answer, call, call.form, script, script.events);
        return answer;
    }
    stop_where_told(answer, call, call.form, script, events->count());
    answer.next = [events, form = call.form, blank = !script.no_final_blank, left = answer.pieces,
                   is_first = true]() mutable {
        const Json event = events->next();
        --left;
        if (form == Form::chat) return "data: " + as_chat(event, true).dump() + "\n\n";
        if (form == Form::array) return element(pretty(event), std::exchange(is_first, false));
        std::string framed = frame_sse(one_line(event));
        if (left == 0 && !blank) framed.resize(framed.size() - std::string_view("\r\n\r\n").size());
        return framed;
    };
    return answer;
}

Answer replay_answer(const Call& call, const Script& script, std::string recorded) {
    Answer answer;
    std::vector<std::string> pieces;
    if (recorded.starts_with("data")) {
        answer.content_type = content_type(Form::sse);
        std::string_view rest = recorded;
        while (!rest.empty()) {
            const std::size_t lf = rest.find("\n\n"), crlf = rest.find("\r\n\r\n");
            const std::size_t end = lf < crlf ? lf + 2 : crlf < lf ? crlf + 4 : rest.size();
            pieces.emplace_back(rest.substr(0, end));
            rest.remove_prefix(end);
        }
    } else if (recorded.starts_with("<")) {
        answer.content_type = "text/html; charset=UTF-8";
        answer.status = 404;
        pieces.push_back(std::move(recorded));
    } else {
        answer.content_type = content_type(call.form);
        const Json document = Json::parse(recorded, nullptr, false);
        if (document.is_object() && document.contains("error") && document["error"].is_object()) {
            const Json& code = document["error"].value("code", Json());
            if (code.is_number_integer() && code >= 400 && code <= 599) answer.status = code.get<int>();
        }
        pieces.push_back(std::move(recorded));
    }
    const std::uint64_t count = pieces.size();
    answer.next = [pieces = std::move(pieces), i = std::size_t{0}]() mutable { return std::move(pieces[i++]); };
    const Form form = call.form == Form::array ? Form::unary : call.form; // the file has its own brackets
    stop_where_told(answer, call, form, script, count);
    return answer;
}

Answer error_answer(Form form, int status, const std::string& message) {
    return whole_body(status, content_type(form), pretty(error_json(status, message)) + "\n");
}

Answer document_answer(std::string json) {
    return whole_body(200, content_type(Form::unary), std::move(json));
}

std::string model_document(const std::string& model) {
    return pretty({{"name", "models/" + model},
                   {"version", "001"},
                   {"displayName", model},
                   {"inputTokenLimit", 1048576},
                   {"outputTokenLimit", 65536},
                   {"supportedGenerationMethods", {"generateContent", "countTokens"}}}) +
           "\n";
}

std::string model_list() {
    Json list = {{"models", Json::array()}};
    for (const char* model : {"gemini-2.5-flash", "gemini-2.5-flash-lite", "gemini-2.5-pro"})
        list["models"].push_back(Json::parse(model_document(model)));
    return pretty(list) + "\n";
}

std::string token_count(std::uint64_t tokens) {
    return pretty({{"totalTokens", tokens},
                   {"promptTokensDetails", Json::array({{{"modality", "TEXT"}, {"tokenCount", tokens}}})}}) +
           "\n";
}

} // namespace gcoalesce::sim
