// One request and its answer.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "cli/attach.hpp"
#include "cli/exit_codes.hpp"

namespace gcoalesce::cli {

// {"contents":[…]}, and "systemInstruction" where `system` is not empty. GCOALESCE_BAD_REQUEST: no valid UTF-8.
Result<std::string> prompt_body(std::string_view prompt, std::string_view system);

struct Question {
    std::string model;       // "" with a template, or to resume
    std::string body;        // or a template's variables
    std::string template_id; // "": the default one's, of whole requests
    bool stream = true;
    gcoalesce_sharing sharing = GCOALESCE_SHARE;
    std::string realm, explicit_key, resume; // "": none
    std::int64_t max_age_ms = 0;             // as in gcoalesce_request
    bool no_store = false;
    Nanos timeout = 0; // from asking to the end
};

// Not thread-safe. The attachment must outlive it.
class Exchange {
  public:
    Exchange(gcoalesce_attachment& attachment, const Question& question);

    enum class Step { event, nothing, over };
    // The next event's JSON, valid until the next call; waits for it until `until` (monotonic) at most.
    Step next(Nanos until, std::string_view& event);

    Nanos deadline() const { return deadline_; }
    std::uint64_t events() const { return events_; }
    const std::string& text() const { return text_; } // of the answer so far, thoughts apart
    // What to resume behind: the last event that was read, or the stream's beginning. "": there is no stream yet.
    std::string last_event_id() const;

    // All below: once it is over.

    // What went wrong. An answer without text that ended with another reason than STOP did go wrong.
    const std::optional<Error>& failure() const { return failure_; }
    ExitCode exit_code() const;
    // For people: what else there is to say of an answer that did not fail; "" mostly.
    std::string remark() const;
    // How it was served, when what came, and what it cost: one line.
    std::string status_line() const;
    // All of that and the text, as one object.
    nlohmann::ordered_json to_json() const;

  private:
    Step end(std::optional<Error> failure);
    Step judge(Code code);

    SubscriptionPtr subscription_;
    Nanos asked_ = 0, deadline_ = 0, first_event_ = 0, over_ = 0;
    Nanos unanswered_since_ = 0; // by the broker; 0: it has answered
    std::uint64_t events_ = 0, event_bytes_ = 0, last_number_ = 0;
    std::string text_, thoughts_;
    std::optional<Error> failure_;
    bool blocked_ = false;
    bool goes_on_ = false; // behind events that were read before: the text may have been there
    gcoalesce_info info_{};
    gcoalesce_ending ending_{};
};

} // namespace gcoalesce::cli
