// libgcoalesce for C++17 and later: owning handles over gcoalesce.h, which is the contract. Header-only, no exceptions
// of its own: what can fail returns a gcoalesce_code, and message() is its sentence.
//
//     gcoalesce::client::Attachment attachment;
//     gcoalesce::client::Subscription answer;
//     if (attachment.attach({}, std::chrono::seconds(1)) != GCOALESCE_OK ||
//         attachment.open({"gemini-2.5-flash", body}, answer) != GCOALESCE_OK)
//         return complain(gcoalesce::client::message());
//     gcoalesce::client::Event event;
//     while (answer.next(std::chrono::seconds(60), event) == GCOALESCE_OK) use(event.data);
#ifndef GCOALESCE_GCOALESCE_HPP
#define GCOALESCE_GCOALESCE_HPP

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "gcoalesce/gcoalesce.h"

namespace gcoalesce {
namespace client {

using std::chrono::milliseconds;

struct AttachOptions { // empty: as a null pointer in gcoalesce_attach_options
    std::string instance;
    std::string runtime_dir;
    std::string client_name;
};

struct Request { // as gcoalesce_request; empty: as a null pointer there
    std::string model;
    std::string_view body; // copied by open()
    bool stream = true;
    gcoalesce_sharing sharing = GCOALESCE_SHARE;
    std::string template_id{};
    std::string realm{};
    std::string explicit_key{};
    milliseconds max_age{0};
    bool no_store = false;
    std::string resume{};
    gcoalesce_dialect dialect = GCOALESCE_GEMINI;
    std::string verb{};
    std::string path{};
    std::string api_key{};
};

struct Event {
    std::uint64_t number = 0;
    std::string_view data; // valid until the next call with this subscription
};

// The sentence of the last code other than GCOALESCE_OK on this thread.
inline const char* message() noexcept {
    return gcoalesce_message();
}

// One reader. Moves, does not copy. Used by one thread at a time. Empty until Attachment::open() fills it.
class Subscription {
  public:
    Subscription() noexcept = default;
    Subscription(Subscription&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    Subscription& operator=(Subscription&& other) noexcept {
        if (this != &other) {
            close();
            handle_ = std::exchange(other.handle_, nullptr);
        }
        return *this;
    }
    ~Subscription() { close(); }

    explicit operator bool() const noexcept { return handle_ != nullptr; }
    gcoalesce_subscription* get() const noexcept { return handle_; }

    // gcoalesce_next: the next event, copied.
    [[nodiscard]] gcoalesce_code next(milliseconds timeout, Event& event) noexcept {
        return read(gcoalesce_next, timeout, event);
    }
    // gcoalesce_next_span: the next event where it stands; ask valid() after its use.
    [[nodiscard]] gcoalesce_code next_span(milliseconds timeout, Event& event) noexcept {
        return read(gcoalesce_next_span, timeout, event);
    }
    bool valid() const noexcept { return gcoalesce_span_valid(handle_) != 0; }

    // How it ended: with GCOALESCE_OK, or with the code of an opening that was refused. nullopt: it has not.
    std::optional<gcoalesce_ending> ending() const noexcept {
        gcoalesce_ending found{};
        found.size = sizeof found;
        const gcoalesce_code code = gcoalesce_ending_of(handle_, &found);
        if (code == GCOALESCE_TIMED_OUT || found.kind == GCOALESCE_IN_FLIGHT) return std::nullopt;
        return found;
    }
    // gcoalesce_error_document; until close().
    std::string_view error_document() const noexcept { return gcoalesce_error_document(handle_); }
    gcoalesce_info info() const noexcept {
        gcoalesce_info found{};
        found.size = sizeof found;
        gcoalesce_info_of(handle_, &found);
        return found;
    }

    void close() noexcept { gcoalesce_close(std::exchange(handle_, nullptr)); }

  private:
    friend class Attachment;
    template <class Call>
    gcoalesce_code read(Call call, milliseconds timeout, Event& event) noexcept {
        gcoalesce_event found{};
        const gcoalesce_code code = call(handle_, timeout.count(), &found);
        if (code == GCOALESCE_OK) {
            event.number = found.number;
            event.data = std::string_view(found.data, found.bytes);
        }
        return code;
    }

    gcoalesce_subscription* handle_ = nullptr;
};

// The process's connection to a broker. Thread-safe but for attach(), detach(), moves and the destructor.
class Attachment {
  public:
    Attachment() noexcept = default;
    Attachment(Attachment&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    Attachment& operator=(Attachment&& other) noexcept {
        if (this != &other) {
            detach();
            handle_ = std::exchange(other.handle_, nullptr);
        }
        return *this;
    }
    ~Attachment() { detach(); }

    explicit operator bool() const noexcept { return handle_ != nullptr; }
    gcoalesce_attachment* get() const noexcept { return handle_; }

    [[nodiscard]] gcoalesce_code attach(const AttachOptions& options, milliseconds timeout) noexcept {
        detach();
        gcoalesce_attach_options given{};
        given.size = sizeof given;
        given.instance = text(options.instance);
        given.runtime_dir = text(options.runtime_dir);
        given.client_name = text(options.client_name);
        return gcoalesce_attach(&given, timeout.count(), &handle_);
    }

    // gcoalesce_open: never waits. Closes what `subscription` held before.
    [[nodiscard]] gcoalesce_code open(const Request& request, Subscription& subscription) noexcept {
        gcoalesce_request given{};
        given.size = sizeof given;
        given.model = text(request.model);
        given.body = request.body.data();
        given.body_bytes = request.body.size();
        given.stream = request.stream ? 1 : 0;
        given.sharing = request.sharing;
        given.template_id = text(request.template_id);
        given.realm = text(request.realm);
        given.explicit_key = text(request.explicit_key);
        given.max_age_ms = request.max_age.count();
        given.no_store = request.no_store ? 1 : 0;
        given.resume = text(request.resume);
        given.dialect = request.dialect;
        given.verb = text(request.verb);
        given.path = text(request.path);
        given.api_key = text(request.api_key);
        subscription.close();
        return gcoalesce_open(handle_, &given, &subscription.handle_);
    }

    int fd() noexcept { return gcoalesce_fd(handle_); }
    [[nodiscard]] gcoalesce_code dispatch() noexcept { return gcoalesce_dispatch(handle_); }

    [[nodiscard]] gcoalesce_code notify(gcoalesce_notify_action action, const std::string& template_ids,
                                        milliseconds for_how_long, milliseconds timeout,
                                        milliseconds& remaining) noexcept {
        std::int64_t left = 0;
        const gcoalesce_code code =
            gcoalesce_notify(handle_, action, text(template_ids), for_how_long.count(), timeout.count(), &left);
        if (code == GCOALESCE_OK) remaining = milliseconds(left);
        return code;
    }
    [[nodiscard]] gcoalesce_code cancel(const std::string& target, milliseconds timeout,
                                        std::uint64_t& streams) noexcept {
        return gcoalesce_cancel(handle_, target.c_str(), timeout.count(), &streams);
    }
    [[nodiscard]] gcoalesce_code purge(gcoalesce_purge_scope scope, const std::string& target, milliseconds timeout,
                                       std::uint64_t& streams) noexcept {
        return gcoalesce_purge(handle_, scope, target.c_str(), timeout.count(), &streams);
    }
    [[nodiscard]] gcoalesce_code reload(milliseconds timeout) noexcept {
        return gcoalesce_reload(handle_, timeout.count());
    }

    void detach() noexcept { gcoalesce_detach(std::exchange(handle_, nullptr)); }

  private:
    static const char* text(const std::string& value) noexcept { return value.empty() ? nullptr : value.c_str(); }

    gcoalesce_attachment* handle_ = nullptr;
};

} // namespace client
} // namespace gcoalesce

#endif
