// The C ABI over the classes beside it: checks arguments, catches everything, keeps the thread's last sentence.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "client/subscription.hpp"
#include "gcoalesce/gcoalesce.h"
#include "protocol/control.hpp"
#include "protocol/key.hpp"

using namespace gcoalesce;

struct gcoalesce_attachment {
    std::shared_ptr<Attachment> core;
};

struct gcoalesce_subscription {
    std::unique_ptr<Subscription> core;
};

namespace {

constexpr std::int64_t kLongestNotify = 24LL * 3600 * 1000;
constexpr std::int64_t kLongestTimeoutMs = 365LL * 24 * 3600 * 1000;
constexpr const char* kForked = "this handle belongs to the parent process: attach again";

// The sentence of the thread's last failure: `fixed` where it is set, for which no memory is needed.
thread_local const char* fixed = "";
thread_local std::string composed;

Code tell(Code code, const char* sentence) {
    fixed = sentence;
    return code;
}

Code tell(Code code, const std::string& sentence) {
    fixed = nullptr;
    composed.assign(sentence);
    return code;
}

Code tell(const Error& error) {
    return tell(error.code, error.message);
}

// No exception crosses the ABI.
template <class Call>
Code guarded(const Call& call) noexcept {
    try {
        return call();
    } catch (const std::bad_alloc&) {
        return tell(GCOALESCE_NO_MEMORY, "this process has no memory left");
    } catch (const std::exception& error) {
        try {
            return tell(GCOALESCE_INTERNAL, std::string("a bug in libgcoalesce: ") + error.what());
        } catch (...) {
            return tell(GCOALESCE_NO_MEMORY, "this process has no memory left");
        }
    } catch (...) {
        return tell(GCOALESCE_INTERNAL, "a bug in libgcoalesce");
    }
}

Code bad(const char* sentence) {
    return tell(GCOALESCE_BAD_REQUEST, sentence);
}

Code next(gcoalesce_subscription* subscription, std::int64_t timeout_ms, bool copy, gcoalesce_event* event) {
    return guarded([&] {
        if (subscription == nullptr || event == nullptr) return bad("a subscription and an event are needed");
        if (timeout_ms < 0) return bad("a timeout of 0 or more milliseconds is needed");
        if (subscription->core->in_child()) return tell(GCOALESCE_ATTACHED_BEFORE_FORK, kForked);
        const Code code = subscription->core->next(from_ms(std::min(timeout_ms, kLongestTimeoutMs)), copy, *event);
        return code == GCOALESCE_OK ? code : tell(code, subscription->core->why());
    });
}

// Asks the broker something other than a stream and waits for its answer.
Code command(gcoalesce_attachment* attachment, Message message, std::int64_t timeout_ms, std::uint64_t& number) {
    if (attachment == nullptr) return bad("an attachment is needed");
    if (timeout_ms < 0) return bad("a timeout of 0 or more milliseconds is needed");
    if (attachment->core->in_child()) return tell(GCOALESCE_ATTACHED_BEFORE_FORK, kForked);
    Attachment& core = *attachment->core;
    const std::shared_ptr<Pending> pending = core.ask(std::move(message));
    const Nanos deadline = system_clock().monotonic() + from_ms(std::min(timeout_ms, kLongestTimeoutMs));
    if (!core.wait(*pending, deadline) && !core.withdraw(*pending)) {
        const std::string trouble = core.trouble();
        return tell(GCOALESCE_TIMED_OUT, trouble.empty() ? "the broker has not answered within the time allowed"
                                                         : "no broker answered: " + trouble);
    }
    if (pending->refusal.code != GCOALESCE_OK) return tell(pending->refusal);
    number = pending->number;
    return GCOALESCE_OK;
}

Method method_of(gcoalesce_dialect dialect, bool stream) {
    switch (dialect) {
    case GCOALESCE_OPENAI: return stream ? Method::chat_stream : Method::chat_unary;
    case GCOALESCE_PASS: return Method::pass;
    case GCOALESCE_GEMINI: break;
    }
    return stream ? Method::stream : Method::unary;
}

// Fills a struct of the caller's up to the size that he knows.
template <class T>
void fill(T* to, const T& from) {
    const std::size_t size = to->size;
    std::memcpy(to, &from, std::min(size, sizeof from));
    to->size = size;
}

} // namespace

extern "C" {

gcoalesce_code gcoalesce_attach(const gcoalesce_attach_options* options, int64_t timeout_ms,
                                gcoalesce_attachment** out) {
    return guarded([&] {
        if (options == nullptr || out == nullptr) return bad("options and a place for the attachment are needed");
        if (options->size < sizeof *options) return bad("gcoalesce_attach_options.size is not set");
        if (timeout_ms < 0) return bad("a timeout of 0 or more milliseconds is needed");
        Result<Instance> instance = resolve_instance(options->instance, options->runtime_dir);
        if (!instance) return tell(instance.error());
        std::string name = options->client_name != nullptr ? options->client_name : ::program_invocation_short_name;
        auto handle = std::make_unique<gcoalesce_attachment>();
        Result<std::shared_ptr<Attachment>> attached = Attachment::attach(
            std::move(*instance), std::move(name), from_ms(std::min<std::int64_t>(timeout_ms, kLongestTimeoutMs)));
        if (!attached) return tell(attached.error());
        handle->core = std::move(*attached);
        *out = handle.release();
        return GCOALESCE_OK;
    });
}

void gcoalesce_detach(gcoalesce_attachment* attachment) {
    // In a forked child everything is left as it is: the descriptors are the parent's too, and go with exec or exit.
    if (attachment == nullptr || attachment->core->in_child()) return;
    guarded([&] {
        attachment->core->detach();
        return GCOALESCE_OK;
    });
    delete attachment;
}

gcoalesce_code gcoalesce_open(gcoalesce_attachment* attachment, const gcoalesce_request* request,
                              gcoalesce_subscription** out) {
    return guarded([&] {
        if (attachment == nullptr || request == nullptr || out == nullptr)
            return bad("an attachment, a request and a place for the subscription are needed");
        if (request->size < sizeof *request) return bad("gcoalesce_request.size is not set");
        if (request->dialect < GCOALESCE_GEMINI || request->dialect > GCOALESCE_PASS)
            return bad("gcoalesce_request.dialect is none of gcoalesce_dialect");
        if (request->sharing < GCOALESCE_SHARE || request->sharing > GCOALESCE_SHARE_REFRESH)
            return bad("gcoalesce_request.sharing is none of gcoalesce_sharing");
        if (attachment->core->in_child()) return tell(GCOALESCE_ATTACHED_BEFORE_FORK, kForked);
        const auto text = [](const char* given) { return std::string_view(given != nullptr ? given : ""); };
        Asked asked;
        asked.template_id = request->template_id != nullptr ? request->template_id : kDefaultTemplate;
        asked.model = text(request->model);
        asked.method = method_of(request->dialect, request->stream != 0);
        asked.realm = text(request->realm);
        asked.explicit_key = text(request->explicit_key);
        const std::string_view api_key = text(request->api_key);
        const std::string key_realm = realm_of_api_key(api_key);
        asked.own_api_key = !api_key.empty();
        if (asked.own_api_key) asked.realm = key_realm;
        if (request->body != nullptr) asked.body = {request->body, request->body_bytes};
        asked.verb = text(request->verb);
        asked.path = text(request->path);
        const bool pass = request->dialect == GCOALESCE_PASS;
        if (pass == asked.path.empty() || pass == asked.verb.empty())
            return bad("a verb and a path go with GCOALESCE_PASS, and nothing else");
        if (asked.path.size() > kMaxPath || asked.verb.size() > kMaxVerb) return bad("the path has at most 1024 bytes");
        if (request->dialect != GCOALESCE_GEMINI && asked.template_id != kDefaultTemplate)
            return bad("a template speaks Gemini's own dialect");
        if (asked.template_id.size() > kMaxTemplateId) return bad("a template's id has at most 63 bytes");
        if (asked.realm.size() > kMaxRealm) return bad("a realm has at most 128 bytes");
        if (asked.own_api_key && !is_api_key(api_key))
            return bad("an API key has at most 256 bytes, each of them a letter, a digit or an ASCII sign");
        if (asked.explicit_key.size() > kMaxExplicitKey) return bad("an explicit key has at most 256 bytes");
        Wishes wishes;
        wishes.sharing = request->sharing;
        wishes.max_age_ms = std::clamp<std::int64_t>(request->max_age_ms, -1, kLongestTimeoutMs);
        wishes.no_store = request->no_store != 0;
        if (request->resume != nullptr) {
            const std::optional<EventId> from = parse_event_id(request->resume);
            if (!from) return bad("expected an event's id such as 9f3c2a71d04b55e8.17 to resume after");
            wishes.resume = from->stream;
            wishes.resume_after = from->number;
            wishes.realm = asked.realm;
        } else if (!pass &&
                   (request->body == nullptr || (request->model == nullptr && request->template_id == nullptr))) {
            return bad("a model and a body are needed, or a template and its variables");
        }
        if (wishes.resume == 0) wishes.api_key = api_key;
        auto handle = std::make_unique<gcoalesce_subscription>();
        Result<std::unique_ptr<Subscription>> opened = Subscription::open(attachment->core, asked, wishes);
        if (!opened) return tell(opened.error());
        handle->core = std::move(*opened);
        *out = handle.release();
        return GCOALESCE_OK;
    });
}

gcoalesce_code gcoalesce_next(gcoalesce_subscription* subscription, int64_t timeout_ms, gcoalesce_event* event) {
    return next(subscription, timeout_ms, true, event);
}

gcoalesce_code gcoalesce_next_span(gcoalesce_subscription* subscription, int64_t timeout_ms, gcoalesce_event* event) {
    return next(subscription, timeout_ms, false, event);
}

int gcoalesce_span_valid(const gcoalesce_subscription* subscription) {
    if (subscription == nullptr || subscription->core->in_child()) return 0;
    return subscription->core->span_valid() ? 1 : 0;
}

gcoalesce_code gcoalesce_ending_of(const gcoalesce_subscription* subscription, gcoalesce_ending* ending) {
    return guarded([&] {
        if (subscription == nullptr || ending == nullptr) return bad("a subscription and an ending are needed");
        if (ending->size < sizeof *ending) return bad("gcoalesce_ending.size is not set");
        if (subscription->core->in_child()) return tell(GCOALESCE_ATTACHED_BEFORE_FORK, kForked);
        gcoalesce_ending found{};
        const Code code = subscription->core->ending(found);
        if (code == GCOALESCE_TIMED_OUT) return tell(code, "the stream has not ended");
        fill(ending, found);
        return code == GCOALESCE_OK ? code : tell(code, subscription->core->why());
    });
}

const char* gcoalesce_error_document(const gcoalesce_subscription* subscription) {
    if (subscription == nullptr || subscription->core->in_child()) return "";
    return subscription->core->error_document().c_str();
}

gcoalesce_code gcoalesce_info_of(const gcoalesce_subscription* subscription, gcoalesce_info* info) {
    return guarded([&] {
        if (subscription == nullptr || info == nullptr) return bad("a subscription and an info are needed");
        if (info->size < sizeof *info) return bad("gcoalesce_info.size is not set");
        if (subscription->core->in_child()) return tell(GCOALESCE_ATTACHED_BEFORE_FORK, kForked);
        fill(info, subscription->core->info());
        return GCOALESCE_OK;
    });
}

void gcoalesce_close(gcoalesce_subscription* subscription) {
    if (subscription == nullptr || subscription->core->in_child()) return; // as gcoalesce_detach
    guarded([&] {
        subscription->core.reset();
        return GCOALESCE_OK;
    });
    delete subscription;
}

int gcoalesce_fd(gcoalesce_attachment* attachment) {
    if (attachment == nullptr) return -1;
    if (attachment->core->in_child()) {
        tell(GCOALESCE_ATTACHED_BEFORE_FORK, kForked);
        return -1;
    }
    return attachment->core->fd();
}

gcoalesce_code gcoalesce_dispatch(gcoalesce_attachment* attachment) {
    return guarded([&] {
        if (attachment == nullptr) return bad("an attachment is needed");
        if (attachment->core->in_child()) return tell(GCOALESCE_ATTACHED_BEFORE_FORK, kForked);
        attachment->core->dispatch();
        return GCOALESCE_OK;
    });
}

gcoalesce_code gcoalesce_notify(gcoalesce_attachment* attachment, gcoalesce_notify_action action,
                                const char* template_ids, int64_t for_ms, int64_t timeout_ms, int64_t* remaining_ms) {
    return guarded([&] {
        if (remaining_ms == nullptr) return bad("a place for the remaining time is needed");
        if (action < GCOALESCE_NOTIFY_STATUS || action > GCOALESCE_NOTIFY_OFF)
            return bad("the action is none of gcoalesce_notify_action");
        if (for_ms < 0 || for_ms > kLongestNotify) return bad("the window opens for at most one day (86400000 ms)");
        message::Notify notify;
        notify.action = action;
        notify.templates = template_ids != nullptr ? template_ids : "";
        notify.for_ms = for_ms;
        if (notify.templates.size() > kMaxTemplateList) return bad("the list of templates has at most 1024 bytes");
        std::uint64_t number = 0;
        const Code code = command(attachment, std::move(notify), timeout_ms, number);
        if (code == GCOALESCE_OK) *remaining_ms = static_cast<std::int64_t>(number);
        return code;
    });
}

gcoalesce_code gcoalesce_cancel(gcoalesce_attachment* attachment, const char* target, int64_t timeout_ms,
                                uint64_t* streams) {
    return guarded([&] {
        if (target == nullptr || streams == nullptr) return bad("a target and a place for the count are needed");
        if (std::strlen(target) > kMaxTarget) return bad("a key has at most 64 digits");
        return command(attachment, message::Cancel{0, target}, timeout_ms, *streams);
    });
}

gcoalesce_code gcoalesce_purge(gcoalesce_attachment* attachment, gcoalesce_purge_scope scope, const char* target,
                               int64_t timeout_ms, uint64_t* streams) {
    return guarded([&] {
        if (scope < GCOALESCE_PURGE_STREAM || scope > GCOALESCE_PURGE_ALL)
            return bad("the scope is none of gcoalesce_purge_scope");
        if ((target == nullptr && scope != GCOALESCE_PURGE_ALL) || streams == nullptr)
            return bad("a target and a place for the count are needed");
        if (target != nullptr && std::strlen(target) > kMaxTarget) return bad("a key has at most 64 digits");
        return command(attachment, message::Purge{0, scope, target != nullptr ? target : ""}, timeout_ms, *streams);
    });
}

gcoalesce_code gcoalesce_reload(gcoalesce_attachment* attachment, int64_t timeout_ms) {
    return guarded([&] {
        std::uint64_t ignored = 0;
        return command(attachment, message::Reload{}, timeout_ms, ignored);
    });
}

const char* gcoalesce_message(void) {
    return fixed != nullptr ? fixed : composed.c_str();
}

const char* gcoalesce_code_name(gcoalesce_code code) {
    return code_name(code);
}

const char* gcoalesce_ending_name(gcoalesce_ending_kind kind) {
    switch (kind) {
    case GCOALESCE_IN_FLIGHT: return "in_flight";
    case GCOALESCE_COMPLETE: return "complete";
    case GCOALESCE_FAILED: return "failed";
    case GCOALESCE_TRUNCATED: return "truncated";
    case GCOALESCE_INVALID: return "invalid";
    case GCOALESCE_CANCELLED: return "cancelled";
    case GCOALESCE_INTERRUPTED: return "interrupted";
    }
    return "unknown";
}

const char* gcoalesce_status_name(gcoalesce_status status) {
    switch (status) {
    case GCOALESCE_OPENING: return "opening";
    case GCOALESCE_STARTED: return "started";
    case GCOALESCE_JOINED: return "joined";
    case GCOALESCE_FRESH: return "fresh";
    case GCOALESCE_SNAPSHOT: return "snapshot";
    case GCOALESCE_RESUMED: return "resumed";
    case GCOALESCE_INDIVIDUAL: return "individual";
    case GCOALESCE_BYPASS: return "bypass";
    }
    return "unknown";
}

} // extern "C"
