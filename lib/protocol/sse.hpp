// Server-sent events, incrementally (HTML standard, 9.2.5 and 9.2.6).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.hpp"

namespace gcoalesce {

struct SseEvent {
    std::string_view type;          // "message" unless the stream named another
    std::string_view data;          // the data lines, joined by LF
    std::string_view last_event_id; // as it stands when the event is dispatched
    bool repaired = false;          // data held bytes that are no UTF-8, and has U+FFFD in their place
};

// Takes a body in pieces of any size and hands out its events. Cuts lines at the bytes CR, LF, CRLF alone, whatever
// they stand in (never at U+2028 and its like). Cost is linear in the bytes fed, however small the pieces. Not
// thread-safe.
class SseParser {
  public:
    using OnEvent = std::function<void(const SseEvent&)>; // the views live until it returns

    // limit: the most bytes that one event's data, or another line, may have. Comments have no limit, nor any cost.
    explicit SseParser(std::size_t limit) : limit_(limit) {}

    // Errors: GCOALESCE_TOO_LARGE; then the parser must not be fed again.
    Result<void> feed(std::string_view bytes, const OnEvent& on_event);

    // What an event that the end of the body cut off had gathered so far, an unfinished line included: the standard
    // discards it; a lenient reader may look whether it is whole.
    std::string unfinished_data() const;

    // The body so far ends within a line that is neither blank nor a comment nor data.
    bool inside_other_line() const;

    const std::string& last_event_id() const { return last_event_id_; } // what a reconnect would send
    void set_last_event_id(std::string id) { last_event_id_ = id_ = std::move(id); }
    std::optional<std::int64_t> retry_ms() const { return retry_ms_; } // the last valid `retry`

  private:
    bool take(std::string_view part);
    void end_line(const OnEvent& on_event);
    void dispatch(const OnEvent& on_event);

    std::size_t limit_;
    std::size_t mark_ = 0;     // bytes of a leading byte order mark seen, or 3: it is past
    bool after_cr_ = false;    // an LF that comes next belongs to the line end before
    bool in_data_ = false;     // the unfinished line is a data line, its value goes straight to data_
    bool value_start_ = false; // of that line: one space may still be dropped
    std::string line_;         // the unfinished line, if it is another one
    std::string data_;         // an LF behind each finished line
    std::string type_;
    std::string id_; // becomes last_event_id_ at the next blank line
    std::string last_event_id_;
    std::optional<std::int64_t> retry_ms_;
};

// One event as Gemini frames it and every client SDK accepts it: "data: ", one line, CRLF CRLF; nothing else.
// json: one document; line breaks between its tokens become spaces.
std::string frame_sse(std::string_view json);

} // namespace gcoalesce
