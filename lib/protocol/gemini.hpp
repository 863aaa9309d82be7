// What Gemini's answers mean (Gemini API reference; what the wire really does is told by the tests' samples).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"

namespace gcoalesce {

enum class Method : std::uint8_t {
    stream = 1,      // streamGenerateContent?alt=sse
    unary = 2,       // generateContent
    chat_stream = 3, // chat/completions of the OpenAI form, as a stream
    chat_unary = 4,  // and not
    pass = 5         // any other call
};

constexpr bool streams(Method method) {
    return method == Method::stream || method == Method::chat_stream;
}

// The word above, for people and JSON.
constexpr const char* method_name(Method method) {
    switch (method) {
    case Method::stream: return "stream";
    case Method::unary: return "unary";
    case Method::chat_stream: return "chat_stream";
    case Method::chat_unary: return "chat_unary";
    case Method::pass: return "pass";
    }
    return "unknown";
}

// Tokens as the last event that told them told them (they are cumulative); 0 when never told.
struct Usage {
    std::int64_t prompt = 0, cached = 0, thoughts = 0, answer = 0, tool_use = 0, total = 0;
};

// How one upstream call ended, in the words of the ending table.
struct Outcome {
    gcoalesce_ending_kind kind = GCOALESCE_FAILED; // COMPLETE, FAILED or TRUNCATED
    Code code = GCOALESCE_INTERNAL;                // GCOALESCE_OK when complete
    int http_status = 0;                           // the response's, or that of an error document in its midst
    std::int64_t retry_ms = 0;                     // from RetryInfo; 0: not told
    bool reusable = false;                         // complete, and STOP is the reason of every candidate
    std::string finish_reason; // the first candidate's reason that is not STOP, else "STOP"; or the block reason
    std::string model_version;
    std::string message;  // for people, one line; no key material (Gemini's DebugInfo echoes keys), no answer text
    std::string document; // the error as upstream told it, {"error": {...}}, without key material; "": it told none
    Usage usage;
};

// Reads one upstream response body, in pieces of any size, and judges it. What counts as an error is decided by the
// HTTP status first, then by the first bytes, never by the content type. Not thread-safe.
class AnswerReader {
  public:
    using OnEvent = std::function<void(std::string_view json)>; // one event's bytes, untouched; lives until it returns

    // max_event_bytes: the most that one event, or a whole unary body, may have.
    AnswerReader(Method method, int http_status, std::size_t max_event_bytes);
    ~AnswerReader();
    AnswerReader(AnswerReader&&) noexcept;
    AnswerReader& operator=(AnswerReader&&) noexcept;

    // True: go on. False: the outcome stands already (an error document was found, the answer is no answer, too
    // large); more bytes need not be fed, call finish().
    bool feed(std::string_view bytes, const OnEvent& on_event);

    // The end of the body. clean: HTTP's own end was seen (last chunk, END_STREAM, Content-Length reached); not clean:
    // the connection broke, and even an answer with a reason is not complete. May still hand out a last event (a final
    // blank line that is missing, a unary body). Called once.
    Outcome finish(bool clean, const OnEvent& on_event);

  private:
    struct State;
    std::unique_ptr<State> state_;
};

// The error that a response other than 200 stands for, by status and body (any shape: JSON, array-wrapped, HTML,
// empty).
Outcome outcome_of_error(int http_status, std::string_view body);

// What one event shows a person: the text of the first candidate, and its thoughts apart. Not JSON: both empty.
struct EventText {
    std::string text;
    std::string thoughts;
};
EventText event_text(std::string_view json);

// Appends to each candidate's text, thoughts left out, what this event adds. Not JSON: nothing.
void add_texts(std::string_view json, std::vector<std::string>& texts);

} // namespace gcoalesce
