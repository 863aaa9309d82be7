#include "client/subscription.hpp"

#include <algorithm>

#include "base/canonical_json.hpp"
#include "protocol/key.hpp"
#include "segment/join.hpp"

namespace gcoalesce {
namespace {

// Up to here the first of many identical requests is made canonical on its caller's thread, which takes up to a few
// milliseconds. A larger one would make gcoalesce_open wait: the broker's worker does it, and its answer brings the key
// for the next ones.
constexpr std::size_t kCanonicalHere = 256 * 1024;

// While bytes for the broker are queued, a reader that sleeps on a stream looks after them this often.
constexpr Nanos kOutputSlice = kMillisecond;

constexpr Nanos kLongestTimeout = 365LL * 24 * 3600 * kSecond;

void put(char* to, std::size_t room, std::string_view text) {
    const std::size_t length = std::min(text.size(), room - 1);
    std::memset(to, 0, room);
    std::memcpy(to, text.data(), length);
}

} // namespace

Subscription::Subscription(std::shared_ptr<Attachment> attachment, std::shared_ptr<const Request> request,
                           const Wishes& wishes)
    : attachment_(std::move(attachment)), request_(std::move(request)), wishes_(wishes) {
    attachment_->subscriptions.fetch_add(1, std::memory_order_relaxed);
}

Subscription::~Subscription() {
    attachment_->subscriptions.fetch_sub(1, std::memory_order_relaxed);
    if (attachment_->abandoned()) return;
    if (pending_ && attachment_->withdraw(*pending_) && pending_->session)
        pending_->session->lane().unpin(pending_->opened.slot);
    unpin();
}

// ---- asking --------------------------------------------------------------------------------------------------------

Result<std::unique_ptr<Subscription>> Subscription::open(std::shared_ptr<Attachment> attachment, Asked asked,
                                                         const Wishes& wishes) {
    if (wishes.resume != 0) { // whatever else was asked, the stream is named
        std::unique_ptr<Subscription> made(new Subscription(std::move(attachment), nullptr, wishes));
        made->ask(false);
        return made;
    }
    const bool pass = asked.method == Method::pass;
    if ((asked.body.empty() && !pass) || asked.body.size() > kMaxBody)
        return fail(GCOALESCE_BAD_REQUEST, "expected a request body of 1 to {} bytes, found {}", kMaxBody,
                    asked.body.size());
    std::string model;
    const bool whole = asked.template_id == kDefaultTemplate; // else the template names the model
    if (pass) {                                               // it has a path in place of a model, and nobody shares it
        std::unique_ptr<Subscription> made(
            new Subscription(std::move(attachment), std::make_shared<const Request>(asked), wishes));
        made->wishes_.sharing = GCOALESCE_SHARE_NOT;
        made->wishes_.no_store = true;
        made->key_known_ = true;
        made->ask(false);
        return made;
    }
    if (whole) {
        Result<std::string> resolved = resolve_model(asked.model);
        if (!resolved) return tl::unexpected(resolved.error());
        model = std::move(*resolved);
        asked.model = model;
    } else if (!asked.model.empty()) {
        return fail(GCOALESCE_BAD_REQUEST, "expected no model: template \"{}\" names it", asked.template_id);
    }

    Attachment::Recalled recalled = attachment->recall(asked);
    const std::uint32_t flags = recalled.policy.flags;
    std::shared_ptr<const Request> request =
        recalled.found ? recalled.found->request : std::make_shared<const Request>(asked);
    std::optional<Key> key = recalled.found ? recalled.found->key : std::nullopt;
    const bool fast = recalled.session && wishes.sharing == GCOALESCE_SHARE && (flags & template_fast_path) != 0 &&
                      !recalled.session->lane().revoked();
    // A template's variables are the broker's to judge: its answer brings the key for the next ones.
    if (fast && !key && whole && asked.explicit_key.empty() && asked.body.size() <= kCanonicalHere) {
        const Result<std::string> canonical = canonical_request(asked.body);
        if (!canonical) return tl::unexpected(canonical.error());
        KeyParts parts;
        parts.realm = (flags & template_realms) != 0 || asked.own_api_key ? asked.realm : "";
        parts.template_id = asked.template_id;
        parts.template_revision = recalled.policy.revision;
        parts.model = asked.model;
        parts.method = asked.method;
        parts.asked = *canonical;
        key = compute_key(parts);
        attachment->remember(request, recalled.policy.revision, *key);
    }

    std::unique_ptr<Subscription> made(new Subscription(std::move(attachment), std::move(request), wishes));
    made->revision_ = recalled.policy.revision;
    made->key_known_ = key.has_value() || !recalled.session;
    if (fast && key && made->join(recalled.session, *key)) {
        made->attachment_->kick();
        return made;
    }
    made->ask(false);
    return made;
}

bool Subscription::join(const std::shared_ptr<Session>& session, const Key& key) {
    const std::int64_t age = wishes_.max_age_ms;
    const std::optional<Joined> joined = try_join(session->view(), session->lane(), key, system_clock().monotonic(),
                                                  age == 0  ? kAnyAge
                                                  : age < 0 ? -1
                                                            : from_ms(age));
    if (!joined) return false;
    status_ = joined->fresh ? GCOALESCE_FRESH : GCOALESCE_JOINED;
    stream_id_ = session->view().slot(joined->slot).opening.load().stream_id;
    key_ = key;
    read_from(session, joined->slot, joined->identity);
    return true;
}

void Subscription::read_from(std::shared_ptr<Session> session, std::uint32_t slot, std::uint64_t identity) {
    session_ = std::move(session);
    slot_ = slot;
    reader_ = StreamReader(session_->view(), slot, identity);
}

void Subscription::ask(bool again) {
    unpin();
    status_ = GCOALESCE_OPENING;
    stream_id_ = 0;
    key_ = Key{};
    pending_ = attachment_->ask(request_, wishes_, again);
}

// The shared answer is not what its schema demands, and this caller saw nothing of it: once, a call of its own.
bool Subscription::ask_alone() {
    if (request_ == nullptr || wishes_.individual_of != 0) return false;
    wishes_.individual_of = stream_id_;
    ask(true);
    return true;
}

void Subscription::unpin() {
    if (!session_) return;
    session_->lane().unpin(slot_);
    session_.reset();
}

// Takes the broker's answer, once there is one.
Code Subscription::settle(Nanos timeout, Nanos deadline) {
    if (!pending_->settled.load(std::memory_order_acquire)) {
        if (timeout == 0)
            attachment_->glance();
        else
            attachment_->wait(*pending_, deadline);
        if (!pending_->settled.load(std::memory_order_acquire)) {
            why_ = "the broker has not answered yet";
            if (timeout == 0) return GCOALESCE_TIMED_OUT;
            if (const std::string trouble = attachment_->trouble(); !trouble.empty())
                why_ = "no broker answered within the time allowed: " + trouble;
            return GCOALESCE_TIMED_OUT;
        }
    }
    const std::shared_ptr<Pending> answered = std::move(pending_);
    pending_.reset();
    if (answered->refusal.code != GCOALESCE_OK) {
        if (seen_) return cut_off(answered->refusal.message);
        ending_.kind = GCOALESCE_FAILED;
        ending_.code = answered->refusal.code;
        ending_.retry_ms = answered->refusal.retry_ms;
        put(ending_.message, sizeof ending_.message, answered->refusal.message);
        return finish(answered->refusal.code, answered->refusal.message);
    }
    const message::Opened& opened = answered->opened;
    status_ = opened.status;
    stream_id_ = opened.stream_id;
    key_ = opened.key;
    read_from(answered->session, opened.slot, opened.identity);
    while (reader_.events_read() < wishes_.resume_after) { // the broker has seen that they are there
        std::string_view skipped;
        if (reader_.next_span(skipped) != ReadStatus::event) break;
    }
    const bool shared = request_ && wishes_.sharing == GCOALESCE_SHARE && wishes_.individual_of == 0;
    if (!key_known_ && shared) attachment_->remember(request_, revision_, opened.key);
    key_known_ = true;
    return GCOALESCE_OK;
}

// ---- reading -------------------------------------------------------------------------------------------------------

Code Subscription::next(Nanos timeout, bool copy, gcoalesce_event& event) {
    if (over_ != GCOALESCE_OK) return over_;
    const Nanos deadline = timeout == 0 ? 0 : system_clock().monotonic() + std::min(timeout, kLongestTimeout);
    for (;;) {
        if (pending_) {
            if (const Code code = settle(timeout, deadline); code != GCOALESCE_OK) return code;
        }
        // Known before the read: what the broker published before it went is read, and then this stands.
        const bool gone = session_->fate() != Session::Fate::alive;
        if (gone && may_ask_again()) {
            ask(true);
            continue;
        }
        const std::uint32_t word = timeout == 0 ? 0 : reader_.wake_word();
        std::string_view span;
        const ReadStatus status = copy ? reader_.next(event_) : reader_.next_span(span);
        switch (status) {
        case ReadStatus::event:
            session_->lane().moved(slot_);
            seen_ = true;
            request_.reset();
            event.number = reader_.events_read();
            event.data = copy ? event_.data() : span.data();
            event.bytes = copy ? event_.size() : span.size();
            return GCOALESCE_OK;
        case ReadStatus::end:
            if (reader_.ending().kind == GCOALESCE_INVALID && reader_.same_stream() && ask_alone()) continue;
            return conclude();
        case ReadStatus::lost:
            // Pins that the broker took back for the whole process are not this reader's fault.
            if (!seen_ && session_->lane().revoked()) {
                ask(true);
                continue;
            }
            // A new broker took the dead one's memory back, and has on disk what stood there.
            if (gone || session_->look(true) != Session::Fate::alive) {
                if (seen_) {
                    wishes_.resume = stream_id_;
                    wishes_.resume_after = reader_.events_read();
                }
                ask(true);
                continue;
            }
            return finish(GCOALESCE_EVICTED, "this reader stood still for too long, and the broker needed the memory");
        case ReadStatus::nothing: break;
        }
        if (gone) return interrupted();
        if (session_->look() != Session::Fate::alive) continue; // and read once more, knowing it
        if (timeout != 0) {
            const Nanos left = deadline - system_clock().monotonic();
            if (left > 0) {
                reader_.wait(word, std::min(left, attachment_->has_output() ? kOutputSlice : kSlice));
                attachment_->glance();
                continue;
            }
        }
        why_ = "no event within the time allowed";
        return GCOALESCE_TIMED_OUT;
    }
}

// Nothing was read of the stream, and nothing more will come: the caller cannot tell a new one from it.
bool Subscription::may_ask_again() const {
    // What is passed on may have done its work before the broker went.
    if (request_ && request_->asked().method == Method::pass) return false;
    return !seen_ &&
           reader_.slot().state.load(std::memory_order_acquire) != static_cast<std::uint32_t>(SlotState::ended);
}

Code Subscription::finish(Code code, std::string why) {
    over_ = code;
    why_ = std::move(why);
    request_.reset();
    // The memory of a broker that is gone is not held longer than it is read.
    if (session_ && session_->fate() != Session::Fate::alive) unpin();
    return code;
}

Code Subscription::ending(gcoalesce_ending& ending) const {
    if (over_ == GCOALESCE_OK) return GCOALESCE_TIMED_OUT;
    const std::size_t size = ending.size;
    ending = ending_;
    ending.size = size;
    return over_ == GCOALESCE_END ? GCOALESCE_OK : over_;
}

// The ending is copied, so that it stays when the slot is another stream's.
Code Subscription::conclude() {
    const Slot& slot = reader_.slot();
    const SlotEnding ending = reader_.ending();
    ending_.kind = static_cast<gcoalesce_ending_kind>(ending.kind);
    ending_.code = static_cast<gcoalesce_code>(ending.code);
    ending_.upstream_status = ending.upstream_status;
    ending_.reusable = ending.reusable;
    ending_.retry_ms = ending.retry_ms;
    ending_.events = slot.committed.load(std::memory_order_acquire);
    ending_.event_bytes = slot.committed_bytes.load(std::memory_order_acquire);
    ending_.prompt_tokens = ending.prompt_tokens;
    ending_.cached_tokens = ending.cached_tokens;
    ending_.thought_tokens = ending.thought_tokens;
    ending_.answer_tokens = ending.answer_tokens;
    ending_.total_tokens = ending.total_tokens;
    put(ending_.finish_reason, sizeof ending_.finish_reason, ending.finish_reason.view());
    put(ending_.message, sizeof ending_.message, ending.message.view());
    document_ = reader_.document(ending);
    if (!reader_.same_stream()) {
        ending_ = gcoalesce_ending{};
        document_.clear();
        return finish(GCOALESCE_EVICTED, "this reader stood still for too long, and the broker needed the memory");
    }
    return finish(GCOALESCE_END, "the stream has ended: gcoalesce_ending_of tells how");
}

Code Subscription::interrupted() {
    const Slot& slot = reader_.slot();
    const bool died = session_->fate() == Session::Fate::dead;
    ending_.kind = GCOALESCE_INTERRUPTED;
    ending_.code = died ? GCOALESCE_BROKER_DEAD : GCOALESCE_CLOSED;
    ending_.events = slot.committed.load(std::memory_order_acquire);
    ending_.event_bytes = slot.committed_bytes.load(std::memory_order_acquire);
    put(ending_.message, sizeof ending_.message,
        died ? "the broker died in the midst of the answer" : "the broker shut down in the midst of the answer");
    return finish(GCOALESCE_END, ending_.message);
}

// The broker died after some of the answer was read, and the next one does not have the rest.
Code Subscription::cut_off(const std::string& why) {
    ending_.kind = GCOALESCE_INTERRUPTED;
    ending_.code = GCOALESCE_BROKER_DEAD;
    ending_.events = wishes_.resume_after;
    stream_id_ = wishes_.resume;
    put(ending_.message, sizeof ending_.message, "the broker died, and the rest of the answer cannot be had: " + why);
    return finish(GCOALESCE_END, ending_.message);
}

gcoalesce_info Subscription::info() const {
    gcoalesce_info info{};
    info.size = sizeof info;
    info.status = status_;
    info.stream_id = stream_id_;
    std::copy(key_.begin(), key_.end(), info.key);
    if (session_ &&
        reader_.slot().state.load(std::memory_order_acquire) == static_cast<std::uint32_t>(SlotState::ended)) {
        const Nanos age = system_clock().monotonic() - reader_.slot().ending.load().ended_ns;
        if (reader_.same_stream()) info.age_ms = std::max<std::int64_t>(to_ms(age), 0);
    }
    return info;
}

} // namespace gcoalesce
