// One reader's answer, from the broker's stream to the bytes of a response.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "cli/gateway/problem.hpp"
#include "gcoalesce/gcoalesce.hpp"

namespace gcoalesce::gateway {

enum class Form {
    unary,        // one JSON document
    array,        // a JSON array that grows, as Gemini streams without alt=sse
    sse,          // events as Gemini frames them: nothing but data, the one form that every client SDK takes
    sse_ids,      // the same with an id in each event's block, for those who asked for it
    event_source, // likewise, for EventSource: it starts at once and tells its end
    chat,         // events of the OpenAI form, and [DONE]
    passed,       // what upstream says to a call that is passed on
    created       // where the stream can be read, without reading it
};

struct Head {
    unsigned status = 200;
    std::string_view content_type;
    std::optional<std::size_t> length; // of the body; absent: it ends with its last chunk
    std::vector<std::pair<std::string, std::string>> fields{};
};

// A response that needs nothing more than to be sent.
struct Response {
    Head head;
    std::string body;
};
Response response_of(const Problem& problem);

// A piece of a response. `span` stands in shared memory between the two texts of ours.
struct Piece {
    std::optional<Head> head; // before the first one
    std::string before;       // of the body
    std::string_view span;
    std::string_view behind;
    void clear();
};

enum class Step {
    nothing, // not yet: after the next dispatch
    more,    // send it, then ask for the next
    whole,   // send it, and that is all
    broken   // send it, then end the connection so that nobody takes the response for whole
};

// Reads one subscription as fast as its client takes the pieces. What the client does not take stays in the segment,
// where there is one copy for all readers.
class Answer {
  public:
    struct Wish {
        Form form = Form::sse;
        Nanos read_from = 0;  // monotonic: not before
        std::string key;      // the key in hex that the stream must have; "": any
        bool resumed = false; // what was read before counts: nothing left is no error
    };
    Answer(client::Subscription subscription, Wish wish)
        : subscription_(std::move(subscription)), wish_(std::move(wish)) {}

    Step next(Piece& piece);

    // After a span has been sent: whether it still was what had been published.
    bool valid() const { return subscription_.valid(); }

    // The broker has it, and has not answered.
    bool opening() const { return !over_ && subscription_.info().status == GCOALESCE_OPENING; }
    Nanos read_from() const { return wish_.read_from; }
    // Ends it with an error before anything was sent.
    Step give_up(const Error& error, Piece& piece);

    // A comment that keeps connections open; "" where the form has none, or it has not begun.
    std::string_view heartbeat() const;

    std::string story() const; // for the access log: how it was served, and the stream's id

  private:
    Step fail(const Problem& problem, Piece& piece);
    Step tell_created(Piece& piece);
    Step end(Code code, Piece& piece);
    void begin(Piece& piece, std::string_view content_type, std::optional<std::size_t> length);
    bool add(const client::Event& event, Piece& piece);
    std::vector<std::pair<std::string, std::string>> fields() const;
    bool wrong_key() const;

    client::Subscription subscription_;
    Wish wish_;
    bool begun_ = false;
    bool over_ = false;
    std::uint64_t events_ = 0;
    std::string content_type_; // of a call that is passed on
    std::string id_;           // of the stream, for the events' ids
};

} // namespace gcoalesce::gateway
