// What the stand-in says: the documents of the Gemini API, and the bytes in which they go over the wire.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "base/error.hpp"
#include "cli/sim/script.hpp"

namespace gcoalesce::sim {

enum class Form {
    sse,        // streamGenerateContent?alt=sse
    array,      // the same without alt=sse
    unary,      // generateContent
    chat,       // chat/completions of the OpenAI form, streamed
    chat_unary, // and not
};

// What the stand-in reads in a request's body.
struct Question {
    std::string text;   // the last user turn's, without its marker
    std::string script; // what its marker "[sim …]" says
    std::uint64_t tokens = 0;
};

// Errors: GCOALESCE_BAD_REQUEST for what the API would refuse too: no JSON object, no contents, deeper than 100 levels.
Result<Question> read_question(std::string_view body);

// What a body of chat/completions asks for; an empty model where it names none.
struct Chat {
    std::string model;
    Form form = Form::chat_unary;
};
Chat read_chat(std::string_view body);

struct Call {
    std::string model;
    Form form = Form::sse;
    std::string body_hash;    // hex; the answer's words depend on it alone
    std::uint64_t number = 1; // which call of this body it is; only responseId tells
    std::string api_key;      // as presented; Google's error for a wrong one repeats it
    Question question;
};

enum class Ending { clean, cut, reset, hang };

// One response. The pieces go out one by one, with the script's gaps between them; then `last`, then the ending.
struct Answer {
    int status = 200;
    std::string content_type;
    std::string retry_after; // the header's value; "": no header
    std::uint64_t pieces = 0;
    std::function<std::string()> next; // the next piece; called at most `pieces` times
    std::string last;                  // may be empty
    Ending ending = Ending::clean;

    // Not even a response's head is sent.
    bool without_head() const {
        return pieces == 0 && last.empty() && (ending == Ending::hang || ending == Ending::reset);
    }
};

// The answer that `script` describes. Errors: GCOALESCE_TOO_LARGE where a single piece would pass 256 MiB.
Result<Answer> make_answer(const Call& call, const Script& script);

// A recorded file, byte for byte: an event stream goes event by event; an error document has its own HTTP status.
Answer replay_answer(const Call& call, const Script& script, std::string recorded);

// An error document such as Google's; `message` "": Google's words for that status.
Answer error_answer(Form form, int status, const std::string& message = {});

Answer document_answer(std::string json);

// The bodies of GET models, GET models/{m} and countTokens.
std::string model_list();
std::string model_document(const std::string& model);
std::string token_count(std::uint64_t tokens);

} // namespace gcoalesce::sim
