// What stands behind gcoalesce_subscription: one reader of one stream, from asking to the ending.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "client/attachment.hpp"
#include "segment/reader.hpp"

namespace gcoalesce {

// Used by one thread at a time.
class Subscription {
  public:
    // gcoalesce_open()'s contract.
    static Result<std::unique_ptr<Subscription>> open(std::shared_ptr<Attachment> attachment, Asked asked,
                                                      const Wishes& wishes);
    ~Subscription();
    Subscription(const Subscription&) = delete;
    Subscription& operator=(const Subscription&) = delete;

    bool in_child() const { return attachment_->in_child(); }

    // gcoalesce_next()'s contract, and with `copy` false gcoalesce_next_span()'s. For any code but GCOALESCE_OK, why()
    // is its sentence.
    Code next(Nanos timeout, bool copy, gcoalesce_event& event);
    bool span_valid() const { return session_ && reader_.valid(); }

    // GCOALESCE_OK: it has ended, and `ending` is filled (but for its size). GCOALESCE_TIMED_OUT: not yet. An opening
    // that was refused: its code, and `ending` says the rest.
    Code ending(gcoalesce_ending& ending) const;
    gcoalesce_info info() const;
    const std::string& error_document() const { return document_; } // "": none was told, or it has not ended

    const std::string& why() const { return why_; } // until the next call

  private:
    Subscription(std::shared_ptr<Attachment> attachment, std::shared_ptr<const Request> request, const Wishes& wishes);

    bool join(const std::shared_ptr<Session>& session, const Key& key);
    void read_from(std::shared_ptr<Session> session, std::uint32_t slot, std::uint64_t identity);
    bool ask_alone();
    Code settle(Nanos timeout, Nanos deadline);
    void ask(bool again);
    void unpin();
    Code finish(Code code, std::string why);
    Code conclude();
    Code interrupted();
    Code cut_off(const std::string& why);
    bool may_ask_again() const;

    const std::shared_ptr<Attachment> attachment_;
    std::shared_ptr<const Request> request_; // kept until the first event was read: till then it may be asked anew
    Wishes wishes_;
    bool seen_ = false;          // an event was read
    std::uint64_t revision_ = 0; // the template's, when the broker was asked
    bool key_known_ = false;     // the memo has it

    // Asking, reading, or over: in this order, and back to asking when a broker is lost.
    std::shared_ptr<Pending> pending_;
    std::shared_ptr<Session> session_; // null: not reading yet
    StreamReader reader_;
    std::uint32_t slot_ = 0;
    Code over_ = GCOALESCE_OK; // what every further call answers
    gcoalesce_status status_ = GCOALESCE_OPENING;
    StreamId stream_id_ = 0;
    Key key_{};

    std::string event_;
    std::string why_;
    gcoalesce_ending ending_{};
    std::string document_;
};

} // namespace gcoalesce
