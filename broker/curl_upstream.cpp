#include "broker/curl_upstream.hpp"

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/address.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cstring>
#include <curl/curl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <new>
#include <sys/socket.h>
#include <unistd.h>
#include <unordered_map>
#include <utility>
#include <vector>

namespace gcoalesce {
namespace asio = boost::asio;
namespace {

constexpr long kWarmUpMs = 10'000;
constexpr long kKeptConnections = 16;
constexpr int kDeadAfterMs = 20'000; // sent bytes, or keep-alive probes, unanswered for so long
constexpr std::int64_t kMostRetrySeconds = 24 * 3600;
constexpr std::string_view kKeyField = "x-goog-api-key: ";
constexpr std::string_view kRedacted = "[redacted]";
constexpr std::size_t kLeastKey = 12; // bytes; anything shorter may be a word

struct CloseEasy {
    void operator()(CURL* easy) const { curl_easy_cleanup(easy); }
};
using Easy = std::unique_ptr<CURL, CloseEasy>;
using Headers = std::shared_ptr<curl_slist>;

// Header lines, wiped when the last call that uses them is gone.
void add(Headers& headers, const char* line) {
    curl_slist* const first = headers.get();
    curl_slist* const longer = curl_slist_append(first, line);
    if (longer == nullptr) throw std::bad_alloc();
    if (first != nullptr) return; // appended in place
    headers.reset(longer, [](curl_slist* list) {
        for (curl_slist* each = list; each != nullptr; each = each->next)
            ::explicit_bzero(each->data, std::strlen(each->data));
        curl_slist_free_all(list);
    });
}

struct Url {
    std::string base;            // without a slash at its end
    bool secure = false;         // https
    bool plain_loopback = false; // http to this machine
};

bool is_loopback(std::string host) {
    if (host == "localhost") return true;
    if (host.starts_with('[')) host = host.substr(1, host.size() - 2);
    boost::system::error_code none;
    const asio::ip::address address = asio::ip::make_address(host, none);
    return !none && address.is_loopback();
}

Result<Url> parse_url(const std::string& text) {
    const std::unique_ptr<CURLU, decltype(&curl_url_cleanup)> parsed(curl_url(), &curl_url_cleanup);
    if (!parsed) throw std::bad_alloc();
    if (const CURLUcode code = curl_url_set(parsed.get(), CURLUPART_URL, text.c_str(), 0); code != CURLUE_OK)
        return fail(GCOALESCE_BAD_REQUEST, "expected an upstream URL such as https://host, found one that is none: {}",
                    curl_url_strerror(code));
    const auto part = [&](CURLUPart which) {
        char* found = nullptr;
        curl_url_get(parsed.get(), which, &found, 0);
        std::string copy = found != nullptr ? found : "";
        curl_free(found);
        return copy;
    };
    const std::string scheme = part(CURLUPART_SCHEME);
    if (scheme != "https" && scheme != "http")
        return fail(GCOALESCE_BAD_REQUEST, "expected an upstream URL with http or https, found {}", scheme);
    for (const CURLUPart extra : {CURLUPART_USER, CURLUPART_PASSWORD, CURLUPART_QUERY, CURLUPART_FRAGMENT}) {
        if (!part(extra).empty())
            return fail(GCOALESCE_BAD_REQUEST,
                        "expected an upstream URL of scheme, host, port and path alone, without user, query, fragment");
    }
    Url url;
    url.base = text.substr(0, text.find_last_not_of('/') + 1);
    url.secure = scheme == "https";
    url.plain_loopback = !url.secure && is_loopback(part(CURLUPART_HOST));
    return url;
}

// A dead peer of a kept connection is noticed in seconds, not after the first event's limit.
int on_new_socket(void*, curl_socket_t fd, curlsocktype) {
    ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &kDeadAfterMs, sizeof kDeadAfterMs);
    return CURL_SOCKOPT_OK;
}

} // namespace

// One transfer.
struct CurlCall {
    UpstreamEvents* events = nullptr; // null: nobody listens any more
    std::shared_ptr<const std::string> body;
    Headers headers;
    Easy easy; // before it goes, it is taken out of the multi handle
    char error[CURL_ERROR_SIZE] = {};
    bool begun = false;
    bool sent = false;
    bool head = false;

    // libcurl's callbacks. Whoever is told something may destroy the call: `events` is loaded anew each time.

    // libcurl would send a request again, unasked and uncounted, where a kept connection broke before an answer, and
    // upstream may have begun to work on the first one. Whether to try again is the producer's to decide.
    static int on_request(void* self, char*, char*, int, int) {
        auto& call = *static_cast<CurlCall*>(self);
        return std::exchange(call.begun, true) ? CURL_PREREQFUNC_ABORT : CURL_PREREQFUNC_OK;
    }

    static int on_progress(void* self, curl_off_t, curl_off_t, curl_off_t, curl_off_t uploaded) {
        auto& call = *static_cast<CurlCall*>(self);
        if (!call.sent && static_cast<std::size_t>(uploaded) >= call.body->size()) {
            call.sent = true;
            if (call.events != nullptr) call.events->on_sent();
        }
        return call.events != nullptr ? 0 : 1;
    }

    static std::size_t on_header(char* line, std::size_t, std::size_t bytes, void* self) {
        auto& call = *static_cast<CurlCall*>(self);
        if (bytes > 0 && (line[0] == '\r' || line[0] == '\n')) call.end_of_header();
        return call.events != nullptr ? bytes : 0; // 0 breaks the transfer off
    }

    void end_of_header() {
        long status = 0;
        curl_easy_getinfo(easy.get(), CURLINFO_RESPONSE_CODE, &status);
        // 1xx: another one follows; but for 101, behind which libcurl takes the rest for a body.
        if ((status < 200 && status != 101) || head || events == nullptr) return;
        head = true;
        char* type = nullptr;
        if (curl_easy_getinfo(easy.get(), CURLINFO_CONTENT_TYPE, &type) == CURLE_OK && type != nullptr)
            events->on_content_type(type);
        if (events == nullptr) return;
        curl_off_t seconds = 0;
        curl_easy_getinfo(easy.get(), CURLINFO_RETRY_AFTER, &seconds);
        events->on_head(static_cast<int>(status), std::clamp<std::int64_t>(seconds, 0, kMostRetrySeconds) * 1000);
    }

    static std::size_t on_body(char* data, std::size_t, std::size_t bytes, void* self) {
        auto& call = *static_cast<CurlCall*>(self);
        if (call.events != nullptr) call.events->on_bytes({data, bytes});
        return call.events != nullptr ? bytes : 0;
    }

    Error why(CURLcode code) const {
        if (code == CURLE_ABORTED_BY_CALLBACK) // by on_request: in every other case nobody asks why
            return {GCOALESCE_CONNECT_FAILED, "upstream closed a kept connection instead of answering", 0};
        std::string message = fmt::format("upstream: {}", curl_easy_strerror(code));
        if (error[0] != '\0') message += fmt::format(" ({})", error);
        return {GCOALESCE_CONNECT_FAILED, std::move(message), 0};
    }
};

// The multi handle on the event loop. While libcurl runs (inside_), it must not be called: what is started or cancelled
// from within an event waits until it has come back.
struct CurlUpstream::Multi : std::enable_shared_from_this<Multi> {
    // libcurl owns the descriptor; this only waits for it.
    struct Socket {
        explicit Socket(asio::io_context& loop) : descriptor(loop) {}
        asio::posix::stream_descriptor descriptor;
        int wanted = CURL_POLL_NONE; // CURL_POLL_NONE also once libcurl has let go of it
        bool reading = false;        // a wait is under way
        bool writing = false;
    };

    Multi(asio::io_context& event_loop, Url to) : loop(event_loop), url(std::move(to)), timer(event_loop) {
        if (!multi || !prototype) throw std::bad_alloc();
        set_key(nullptr);
        curl_multi_setopt(multi.get(), CURLMOPT_SOCKETFUNCTION, &Multi::on_socket);
        curl_multi_setopt(multi.get(), CURLMOPT_SOCKETDATA, this);
        curl_multi_setopt(multi.get(), CURLMOPT_TIMERFUNCTION, &Multi::on_timer);
        curl_multi_setopt(multi.get(), CURLMOPT_TIMERDATA, this);
        // Calls share a connection that stands. They do not wait for one that is being made to see whether they can
        // (CURLOPT_PIPEWAIT): libcurl 7.88 lets them wait without a limit, fails them one by one where it does not come
        // about, and against a server of HTTP/1.1 keeps them until the first one's answer has ended.
        curl_multi_setopt(multi.get(), CURLMOPT_PIPELINING, static_cast<long>(CURLPIPE_MULTIPLEX));
        curl_multi_setopt(multi.get(), CURLMOPT_MAXCONNECTS, kKeptConnections);
    }

    ~Multi() {
        for (const auto& [easy, call] : attached) curl_multi_remove_handle(multi.get(), easy);
        multi.reset(); // closes the kept connections, through on_socket
    }

    asio::io_context& loop;
    const Url url;
    Headers headers, bearer_headers;
    bool has_key = false;
    asio::steady_timer timer;
    std::unordered_map<curl_socket_t, std::shared_ptr<Socket>> sockets;
    std::unordered_map<CURL*, std::shared_ptr<CurlCall>> attached;
    std::vector<std::shared_ptr<CurlCall>> to_attach, to_detach;
    bool inside = false;
    std::function<void(std::size_t)> connected;
    std::weak_ptr<CurlCall> warming;
    Easy prototype{curl_easy_init()}; // with all options that are the same for every call
    std::unique_ptr<CURLM, decltype(&curl_multi_cleanup)> multi{curl_multi_init(), &curl_multi_cleanup};

    void set_key(const ApiKey* key) {
        has_key = key != nullptr;
        headers = headers_with(key, false);
        bearer_headers = headers_with(key, true);
    }

    // Within the header that brings it: there is no further copy. "": none.
    std::string_view key() const {
        for (const curl_slist* line = headers.get(); line != nullptr; line = line->next) {
            const std::string_view text(line->data);
            if (text.starts_with(kKeyField)) return text.substr(kKeyField.size());
        }
        return {};
    }

    static Headers headers_with(const ApiKey* key, bool bearer) {
        Headers list;
        add(list, "content-type: application/json");
        add(list, "Expect:"); // else a large body waits a second for leave to come
        if (key == nullptr) return list;
        std::string line = bearer ? "authorization: Bearer " : std::string(kKeyField);
        line.reserve(line.size() + key->text().size()); // no copy left behind by growing
        line += key->text();
        add(list, line.c_str());
        ::explicit_bzero(line.data(), line.size());
        return list;
    }

    Result<void> set_up(const CurlUpstreamOptions& options) {
        CURLcode worst = CURLE_OK;
        const auto set = [&](CURLoption option, auto value) {
            if (const CURLcode code = curl_easy_setopt(prototype.get(), option, value); code != CURLE_OK) worst = code;
        };
        set(CURLOPT_PROTOCOLS_STR, url.secure ? "https" : "http");
        set(CURLOPT_HTTP_VERSION, static_cast<long>(CURL_HTTP_VERSION_2TLS));
        set(CURLOPT_SSLVERSION, static_cast<long>(CURL_SSLVERSION_TLSv1_2));
        if (!options.ca_file.empty()) set(CURLOPT_CAINFO, options.ca_file.c_str());
        set(CURLOPT_PROXY, options.proxy.c_str()); // "" keeps the environment's out
        set(CURLOPT_NOPROXY, "");
        set(CURLOPT_FOLLOWLOCATION, 0L);
        set(CURLOPT_CONNECTTIMEOUT_MS, static_cast<long>(to_ms(options.connect_timeout)));
        set(CURLOPT_NOSIGNAL, 1L);
        set(CURLOPT_QUICK_EXIT, 1L); // else ending a call whose name is being looked up waits for that
        set(CURLOPT_TCP_KEEPALIVE, 1L);
        set(CURLOPT_TCP_KEEPIDLE, 30L);
        set(CURLOPT_TCP_KEEPINTVL, 10L);
        set(CURLOPT_SOCKOPTFUNCTION, &on_new_socket);
        set(CURLOPT_USERAGENT, "gcoalesce/" GCOALESCE_VERSION);
        set(CURLOPT_ACCEPT_ENCODING, ""); // all that libcurl decodes
        set(CURLOPT_POST, 1L);
        set(CURLOPT_NOPROGRESS, 0L);
        set(CURLOPT_PREREQFUNCTION, &CurlCall::on_request);
        set(CURLOPT_XFERINFOFUNCTION, &CurlCall::on_progress);
        set(CURLOPT_HEADERFUNCTION, &CurlCall::on_header);
        set(CURLOPT_WRITEFUNCTION, &CurlCall::on_body);
        if (worst != CURLE_OK)
            return fail(GCOALESCE_INTERNAL, "libcurl refuses an option: {}", curl_easy_strerror(worst));
        return {};
    }

    std::string call_url(const UpstreamCall& call) const {
        if (call.method == Method::pass) return url.base + call.path;
        if (speaks_openai(call)) return url.base + "/v1beta/openai/chat/completions";
        return fmt::format("{}/v1beta/{}{}:{}", url.base, call.model.find('/') == std::string::npos ? "models/" : "",
                           call.model,
                           call.method == Method::stream ? "streamGenerateContent?alt=sse" : "generateContent");
    }

    // Where the API wants its key as a bearer's.
    static bool speaks_openai(const UpstreamCall& call) {
        return call.method == Method::chat_stream || call.method == Method::chat_unary ||
               call.path.find("/openai/") != std::string::npos;
    }

    std::shared_ptr<CurlCall> start(const UpstreamCall& what, UpstreamEvents& events) {
        auto call = std::make_shared<CurlCall>();
        call->events = &events;
        call->body = what.body;
        const bool bearer = speaks_openai(what);
        call->headers = what.api_key ? headers_with(what.api_key.get(), bearer) : bearer ? bearer_headers : headers;
        call->easy.reset(curl_easy_duphandle(prototype.get()));
        if (!call->easy) throw std::bad_alloc();
        CURL* const easy = call->easy.get();
        curl_easy_setopt(easy, CURLOPT_URL, call_url(what).c_str());
        curl_easy_setopt(easy, CURLOPT_HTTPHEADER, call->headers.get());
        if (call->body->empty() && what.verb == "GET") {
            curl_easy_setopt(easy, CURLOPT_HTTPGET, 1L);
        } else {
            curl_easy_setopt(easy, CURLOPT_POSTFIELDS, call->body->data());
            curl_easy_setopt(easy, CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(call->body->size()));
        }
        if (!what.verb.empty()) curl_easy_setopt(easy, CURLOPT_CUSTOMREQUEST, what.verb.c_str());
        curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, call->error);
        curl_easy_setopt(easy, CURLOPT_PREREQDATA, call.get());
        curl_easy_setopt(easy, CURLOPT_XFERINFODATA, call.get());
        curl_easy_setopt(easy, CURLOPT_HEADERDATA, call.get());
        curl_easy_setopt(easy, CURLOPT_WRITEDATA, call.get());
        launch(call);
        return call;
    }

    void launch(const std::shared_ptr<CurlCall>& call) {
        if (inside) {
            to_attach.push_back(call);
        } else {
            attach(call);
        }
    }

    // One at a time: it holds the connection that the next one would find.
    void warm_up() {
        if (const auto last = warming.lock(); last && last->events != nullptr) return;
        static struct : UpstreamEvents {
            void on_sent() override {}
            void on_head(int, std::int64_t) override {}
            void on_bytes(std::string_view) override {}
            void on_done(bool, const Error&) override {}
        } nobody;
        const auto call = std::make_shared<CurlCall>();
        call->events = &nobody;
        call->body = std::make_shared<const std::string>();
        call->easy.reset(curl_easy_duphandle(prototype.get()));
        if (!call->easy) throw std::bad_alloc();
        CURL* const easy = call->easy.get();
        curl_easy_setopt(easy, CURLOPT_URL, (url.base + "/").c_str());
        curl_easy_setopt(easy, CURLOPT_NOBODY, 1L); // HEAD
        curl_easy_setopt(easy, CURLOPT_TIMEOUT_MS, kWarmUpMs);
        curl_easy_setopt(easy, CURLOPT_PREREQDATA, call.get());
        curl_easy_setopt(easy, CURLOPT_XFERINFODATA, call.get());
        curl_easy_setopt(easy, CURLOPT_HEADERDATA, call.get());
        curl_easy_setopt(easy, CURLOPT_WRITEDATA, call.get());
        warming = call;
        launch(call);
    }

    void cancel(const std::shared_ptr<CurlCall>& call) {
        call->events = nullptr;
        if (inside) {
            to_detach.push_back(call);
        } else {
            detach(call);
        }
    }

    void attach(const std::shared_ptr<CurlCall>& call) {
        // Only asks for a timer; the work begins on the event loop.
        if (curl_multi_add_handle(multi.get(), call->easy.get()) != CURLM_OK) throw std::bad_alloc();
        attached.emplace(call->easy.get(), call);
    }

    void detach(const std::shared_ptr<CurlCall>& call) {
        if (attached.erase(call->easy.get()) != 0) curl_multi_remove_handle(multi.get(), call->easy.get());
    }

    // Lets libcurl work, then does what had to wait and tells what has ended.
    void act(curl_socket_t fd, int ready) {
        const auto alive = shared_from_this();
        int running = 0;
        inside = true;
        curl_multi_socket_action(multi.get(), fd, ready, &running);
        inside = false;
        for (const auto& call : std::exchange(to_detach, {})) detach(call);
        for (const auto& call : std::exchange(to_attach, {})) {
            if (call->events != nullptr) attach(call);
        }
        int left = 0;
        while (CURLMsg* const message = curl_multi_info_read(multi.get(), &left)) {
            if (message->msg != CURLMSG_DONE) continue;
            const CURLcode code = message->data.result; // the message goes with the handle
            const auto call = attached.at(message->easy_handle);
            long opened = 0;
            curl_easy_getinfo(call->easy.get(), CURLINFO_NUM_CONNECTS, &opened);
            if (opened > 0 && connected) connected(static_cast<std::size_t>(opened));
            detach(call);
            if (UpstreamEvents* const events = std::exchange(call->events, nullptr))
                events->on_done(code == CURLE_OK, code == CURLE_OK ? Error{} : call->why(code));
        }
    }

    static int on_timer(CURLM*, long ms, void* self) {
        auto& multi = *static_cast<Multi*>(self);
        if (ms < 0) {
            multi.timer.cancel();
            return 0;
        }
        multi.timer.expires_after(std::chrono::milliseconds(ms));
        multi.timer.async_wait([weak = multi.weak_from_this()](const boost::system::error_code& cancelled) {
            if (const auto alive = weak.lock(); alive && !cancelled) alive->act(CURL_SOCKET_TIMEOUT, 0);
        });
        return 0;
    }

    static int on_socket(CURL*, curl_socket_t fd, int what, void* self, void*) {
        auto& multi = *static_cast<Multi*>(self);
        if (what == CURL_POLL_REMOVE) {
            // Comes before the descriptor is closed, and its number may be another socket's a moment later.
            const auto found = multi.sockets.find(fd);
            if (found == multi.sockets.end()) return 0;
            found->second->wanted = CURL_POLL_NONE;
            found->second->descriptor.release();
            multi.sockets.erase(found);
            return 0;
        }
        auto& socket = multi.sockets[fd];
        if (!socket) {
            socket = std::make_shared<Socket>(multi.loop);
            boost::system::error_code failed; // then nothing comes of the call, and its limits end it
            socket->descriptor.assign(fd, failed);
        }
        socket->wanted = what;
        multi.wait(fd, socket);
        return 0;
    }

    void wait(curl_socket_t fd, const std::shared_ptr<Socket>& socket) {
        if ((socket->wanted & CURL_POLL_IN) != 0)
            wait(fd, socket, asio::posix::descriptor_base::wait_read, &Socket::reading, CURL_CSELECT_IN);
        if ((socket->wanted & CURL_POLL_OUT) != 0)
            wait(fd, socket, asio::posix::descriptor_base::wait_write, &Socket::writing, CURL_CSELECT_OUT);
    }

    void wait(curl_socket_t fd, const std::shared_ptr<Socket>& socket, asio::posix::descriptor_base::wait_type kind,
              bool Socket::*waiting, int ready) {
        static_assert(CURL_POLL_IN == CURL_CSELECT_IN && CURL_POLL_OUT == CURL_CSELECT_OUT);
        if (std::exchange((*socket).*waiting, true)) return;
        socket->descriptor.async_wait(
            kind, [weak = weak_from_this(), fd, socket, waiting, ready](const boost::system::error_code& failed) {
                (*socket).*waiting = false;
                const auto alive = weak.lock();
                // Not wanted: libcurl changed its mind, or let go of the socket, while this stood in the loop's queue.
                if (!alive || failed || (socket->wanted & ready) == 0) return;
                alive->act(fd, ready);
                alive->wait(fd, socket);
            });
    }
};

CurlUpstream::CurlUpstream(std::shared_ptr<Multi> multi) : multi_(std::move(multi)) {}
CurlUpstream::~CurlUpstream() = default;

Result<std::unique_ptr<CurlUpstream>> CurlUpstream::create(asio::io_context& loop, const CurlUpstreamOptions& options) {
    static const CURLcode initialised = curl_global_init(CURL_GLOBAL_DEFAULT);
    if (initialised != CURLE_OK)
        return fail(GCOALESCE_INTERNAL, "libcurl does not start: {}", curl_easy_strerror(initialised));
    Result<Url> url = parse_url(options.url);
    if (!url) return tl::unexpected(url.error());
    if (!options.ca_file.empty() && ::access(options.ca_file.c_str(), R_OK) != 0)
        return fail_errno(GCOALESCE_BAD_REQUEST, "cannot read the CA file " + options.ca_file);
    auto multi = std::make_shared<Multi>(loop, *std::move(url));
    if (Result<void> set_up = multi->set_up(options); !set_up) return tl::unexpected(set_up.error());
    multi->connected = options.connected;
    return std::unique_ptr<CurlUpstream>(new CurlUpstream(std::move(multi)));
}

void CurlUpstream::set_key(const ApiKey& key) {
    multi_->set_key(&key);
}

std::string CurlUpstream::without_key(const UpstreamCall& call, std::string text) const {
    const std::string_view key = call.api_key ? call.api_key->text() : multi_->key();
    if (key.size() < kLeastKey) return text;
    std::string escaped;             // as JSON has it
    escaped.reserve(2 * key.size()); // no copy left behind by growing
    for (const char c : key) {
        if (c == '"' || c == '\\') escaped += '\\';
        escaped += c;
    }
    for (const std::string_view secret : {std::string_view(escaped), key}) {
        for (std::size_t at = 0; (at = text.find(secret, at)) != std::string::npos; at += kRedacted.size())
            text.replace(at, secret.size(), kRedacted);
        // Where the text was cut within it.
        for (std::size_t left = std::min(secret.size() - 1, text.size()); left >= kLeastKey / 2; --left) {
            if (!text.ends_with(secret.substr(0, left))) continue;
            text.replace(text.size() - left, left, kRedacted);
            break;
        }
    }
    ::explicit_bzero(escaped.data(), escaped.size());
    return text;
}

void CurlUpstream::warm_up() {
    multi_->warm_up();
}

bool CurlUpstream::needs_key() const {
    return !multi_->has_key && !multi_->url.plain_loopback;
}

std::unique_ptr<RunningCall> CurlUpstream::start(const UpstreamCall& call, UpstreamEvents& events) {
    class Running final : public RunningCall {
      public:
        Running(std::shared_ptr<Multi> multi, std::shared_ptr<CurlCall> started)
            : multi_(std::move(multi)), call_(std::move(started)) {}
        ~Running() override { multi_->cancel(call_); }

      private:
        std::shared_ptr<Multi> multi_;
        std::shared_ptr<CurlCall> call_;
    };
    return std::make_unique<Running>(multi_, multi_->start(call, events));
}

} // namespace gcoalesce
