#include <utility> // Asio 1.18 uses std::exchange without saying so

#include "cli/gateway/connection.hpp"

#include <algorithm>
#include <array>
#include <boost/asio/buffer.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/string.hpp>
#include <boost/beast/http/empty_body.hpp>
#include <boost/beast/http/message.hpp>
#include <boost/beast/http/write.hpp>
#include <cerrno>
#include <ctime>
#include <nlohmann/json.hpp>
#include <sstream>
#include <sys/socket.h>
#include <sys/uio.h>

#include "base/ids.hpp"
#include "base/log.hpp"
#include "base/units.hpp"
#include "cli/view/prometheus.hpp"
#include "protocol/key.hpp"

namespace gcoalesce::gateway {
namespace {

namespace net = boost::asio;
namespace http = boost::beast::http;
using boost::system::error_code;

constexpr std::size_t kReadSize = 64u << 10;
constexpr std::size_t kMostAhead = 64u << 10; // bytes of further requests that are read while one is answered
constexpr Nanos kLinger = 2 * kSecond;
constexpr Nanos kWithoutBroker = 800 * kMillisecond; // another one may come; with two ticks it is the promised second
constexpr Nanos kLongestDelay = 60 * kSecond;

constexpr const char* kExposed = "X-Coalesce-Status, X-Coalesce-Key, X-Coalesce-Stream, X-Coalesce-Ending, Age, "
                                 "Retry-After, Location";

Nanos now() {
    return system_clock().monotonic();
}

std::string_view view(boost::beast::string_view text) {
    return {text.data(), text.size()};
}

boost::beast::string_view view(std::string_view text) {
    return {text.data(), text.size()};
}

std::string date() {
    const std::time_t time = std::time(nullptr);
    std::tm utc{};
    ::gmtime_r(&time, &utc);
    std::array<char, 64> text{};
    return {text.data(), std::strftime(text.data(), text.size(), "%a, %d %b %Y %H:%M:%S GMT", &utc)};
}

Problem bad_request(std::string sentence) {
    return problem_of({GCOALESCE_BAD_REQUEST, std::move(sentence), 0});
}

Problem with_status(unsigned status, Code code, std::string sentence, std::int64_t retry_ms = 0) {
    return {status, {code, std::move(sentence), retry_ms}};
}

Problem not_http(error_code error, const Options& options) {
    if (error == http::error::body_limit)
        return with_status(
            413, GCOALESCE_TOO_LARGE,
            fmt::format("the request's body has more than {}, the most allowed", format_size(options.max_body)));
    if (error == http::error::header_limit)
        return with_status(
            431, GCOALESCE_TOO_LARGE,
            fmt::format("the request's head has more than {}, the most allowed", format_size(options.max_head)));
    return bad_request("expected a request of HTTP/1.1, found none: " + error.message());
}

Response json_response(const nlohmann::ordered_json& json) {
    Response response;
    response.body = json.dump() + "\n";
    response.head.content_type = "application/json; charset=UTF-8";
    response.head.length = response.body.size();
    return response;
}

} // namespace

Connection::Connection(World& world, Socket socket, std::string peer)
    : world_(world), socket_(std::move(socket)), peer_(std::move(peer)), since_(now()) {}

void Connection::start() {
    wait_readable();
}

// What is thrown while one connection is served (its memory has run out, say) ends that connection and no other.
template <class Work>
void Connection::guard(const Work& work) {
    try {
        work();
    } catch (const std::exception& error) {
        gcoalesce::log(LogLevel::error, "{} \"{}\": {}", peer_, line_, error.what());
        close();
    }
}

// ---- receiving -----------------------------------------------------------------------------------------------------

void Connection::wait_readable() {
    if (waiting_ || state_ == State::closed) return;
    if (state_ == State::answering && in_.size() >= kMostAhead) return;
    waiting_ = true;
    socket_.async_wait(Socket::wait_read, [self = shared_from_this()](error_code error) {
        self->waiting_ = false;
        if (!error && self->state_ != State::closed) self->guard([&] { self->on_readable(); });
    });
}

void Connection::on_readable() {
    static thread_local std::array<char, kReadSize> bytes;
    const ssize_t got = ::recv(socket_.native_handle(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return wait_readable();
    if (got <= 0) {
        if (state_ == State::answering) finish("client gone");
        return close();
    }
    if (state_ != State::lingering) {
        const auto size = static_cast<std::size_t>(got);
        net::buffer_copy(in_.prepare(size), net::buffer(bytes.data(), size));
        in_.commit(size);
        if (state_ != State::answering) parse();
    }
    wait_readable();
}

// Takes the requests that have come, until one of them has to wait for its answer.
void Connection::parse() {
    if (std::exchange(parsing_, true)) return;
    while (in_.size() > 0 && (state_ == State::idle || state_ == State::receiving)) {
        if (!parse_some()) break;
    }
    parsing_ = false;
    if (in_.size() == 0) in_ = {};
}

// False: more bytes are needed, or the connection takes none any more.
bool Connection::parse_some() {
    if (state_ == State::idle) {
        state_ = State::receiving;
        since_ = now();
        admitted_ = false;
        parser_.emplace();
        parser_->header_limit(static_cast<std::uint32_t>(world_.options.max_head));
        parser_->body_limit(world_.options.max_body);
        parser_->eager(true);
    }
    error_code error;
    in_.consume(parser_->put(in_.data(), error));
    const bool needs_more = error == http::error::need_more;
    if (error && !needs_more) return refuse(not_http(error, world_.options)), false;
    if (!admitted_ && parser_->is_header_done() && !admit()) return false;
    // A body's bytes are taken as they come. What is left is the head of a chunk or a trailer, which nobody else
    // limits.
    if (admitted_ && needs_more && in_.size() > world_.options.max_head)
        return refuse(with_status(431, GCOALESCE_TOO_LARGE,
                                  fmt::format("a chunk's head or the trailer has more than {}, the most allowed",
                                              format_size(world_.options.max_head)))),
               false;
    hold_bodies(parser_->get().body().capacity());
    if (world_.bodies > world_.options.max_bodies)
        return refuse(with_status(503, GCOALESCE_BUSY, "too many large requests are being received: ask again", 1000)),
               false;
    if (!parser_->is_done()) return !needs_more;
    serve();
    parser_.reset();
    hold_bodies(0);
    return true;
}

void Connection::hold_bodies(std::size_t bytes) {
    world_.bodies += bytes - bodies_;
    bodies_ = bytes;
}

// Looks at a request's head, before its body is taken. False: it has been refused.
bool Connection::admit() {
    admitted_ = true;
    const auto& request = parser_->get();
    ++number_;
    http_1_1_ = request.version() >= 11;
    keep_alive_ = request.keep_alive();
    head_only_ = request.method() == http::verb::head;
    const Target target(view(request.target()));
    line_ = fmt::format("{} {}", view(request.method_string()), target.path());
    status_ = 0;
    sent_ = 0;
    caller_ = {};

    origin_.clear();
    if (const std::string origin = field("Origin"); !origin.empty()) {
        const auto& allowed = world_.options.cors_origins;
        const bool all = std::ranges::find(allowed, "*") != allowed.end();
        if (!all && std::ranges::find(allowed, origin) == allowed.end())
            return refuse(with_status(403, GCOALESCE_NO_PERMISSION,
                                      "pages of this origin may not ask: gcoalesce serve --cors-origin lets them")),
                   false;
        origin_ = all ? "*" : origin;
    }
    if (request.method() == http::verb::options) return true;

    const Service service = route_of(target).service;
    const std::string key = credential(target);
    if (service == Service::health || service == Service::ready) {
    } else if (world_.tokens) {
        const Caller* known = world_.tokens->find(key);
        if (known == nullptr)
            return refuse(with_status(401, GCOALESCE_NO_PERMISSION,
                                      "expected one of this gateway's tokens, as a bearer or in place of the API key")),
                   false;
        caller_ = *known;
    } else {
        caller_.realm = realm_of_api_key(key);
        if (world_.options.pass_key) caller_.api_key = key;
    }
    // Whoever stands before us may see another end of such a request than we would (RFC 9112, section 6.1).
    const std::string transfer = field("Transfer-Encoding");
    const bool chunked = http_1_1_ && request.count(http::field::transfer_encoding) == 1 &&
                         boost::beast::iequals(view(std::string_view(transfer)), "chunked");
    if (request.count(http::field::transfer_encoding) > 0 && !chunked)
        return refuse(with_status(501, GCOALESCE_BAD_REQUEST, "expected no transfer encoding but chunked")), false;
    const std::string encoding = field("Content-Encoding");
    if (!encoding.empty() && !boost::beast::iequals(view(std::string_view(encoding)), "identity"))
        return refuse(with_status(415, GCOALESCE_BAD_REQUEST, "expected a body without a content encoding")), false;
    if (http_1_1_ && !parser_->is_done() && boost::beast::iequals(request[http::field::expect], "100-continue")) {
        constexpr std::string_view go_on = "HTTP/1.1 100 Continue\r\n\r\n";
        ::send(socket_.native_handle(), go_on.data(), go_on.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    return true;
}

std::string Connection::field(std::string_view name) const {
    return std::string(view(parser_->get()[view(name)]));
}

// The key or token that the request brings, wherever the API's clients put it.
std::string Connection::credential(const Target& target) const {
    if (std::string key = field("x-goog-api-key"); !key.empty()) return key;
    const std::string authorization = field("Authorization");
    constexpr std::string_view bearer = "bearer ";
    if (authorization.size() > bearer.size() &&
        boost::beast::iequals(view(std::string_view(authorization).substr(0, bearer.size())), view(bearer)))
        return authorization.substr(bearer.size());
    return target.query("key").value_or("");
}

// ---- serving -------------------------------------------------------------------------------------------------------

void Connection::serve() {
    state_ = State::answering;
    since_ = progress_ = now();
    step_ = Step::nothing;
    const auto& request = parser_->get();
    const Target target(view(request.target()));
    const Route route = route_of(target);
    const http::verb verb = request.method();

    if (verb == http::verb::options) {
        Response response{{204, {}, std::nullopt, {{"Allow", std::string(route.allow) + ", OPTIONS"}}}, {}};
        if (!origin_.empty()) {
            const std::string wanted = field("Access-Control-Request-Headers");
            auto& fields = response.head.fields;
            fields.emplace_back("Access-Control-Allow-Methods", "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS");
            if (!wanted.empty()) fields.emplace_back("Access-Control-Allow-Headers", wanted);
            fields.emplace_back("Access-Control-Max-Age", "600");
        }
        return respond(std::move(response));
    }
    if (route.service == Service::unknown)
        return respond(response_of(with_status(404, GCOALESCE_NOT_FOUND, "there is nothing at " + target.path())));
    const std::string_view asked = verb == http::verb::head ? "HEAD" : view(request.method_string());
    const bool allowed = (", " + std::string(route.allow) + ",").find(fmt::format(", {},", asked)) != std::string::npos;
    if (!allowed) {
        Response response = response_of(with_status(
            405, GCOALESCE_BAD_REQUEST, fmt::format("expected one of the methods {}, OPTIONS", route.allow)));
        response.head.fields.emplace_back("Allow", std::string(route.allow) + ", OPTIONS");
        return respond(std::move(response));
    }
    switch (route.service) {
    case Service::unary:
    case Service::stream: return ask(target, route);
    case Service::chat: return chat();
    case Service::pass: return pass(route);
    case Service::create_stream: return create_stream(target);
    case Service::read_stream: return read_stream(target, route);
    case Service::notify: return notify(target);
    case Service::health:
    case Service::ready: {
        const Result<void> well = world_.health(route.service == Service::ready);
        if (!well) return respond(response_of(with_status(503, well.error().code, well.error().message, 1000)));
        return respond(json_response({{"status", "ok"}}));
    }
    case Service::metrics: {
        Result<std::string> metrics = world_.metrics();
        if (!metrics)
            return respond(response_of(with_status(503, metrics.error().code, metrics.error().message, 1000)));
        Response response{{200, cli::kPrometheusType, metrics->size(), {}}, std::move(*metrics)};
        return respond(std::move(response));
    }
    case Service::unknown: break;
    }
}

// A request that says whose it is, and nothing else yet.
client::Request Connection::callers_own() const {
    client::Request request;
    request.realm = caller_.realm;
    request.api_key = caller_.api_key;
    return request;
}

void Connection::ask(const Target& target, const Route& route) {
    client::Request request = callers_own();
    Answer::Wish wish;
    request.stream = route.service == Service::stream;
    wish.form = !request.stream ? Form::unary : target.query("alt").value_or("") == "sse" ? Form::sse : Form::array;
    const Freshness freshness = freshness_of(field("Cache-Control"));
    request.max_age = client::milliseconds(freshness.max_age_ms);
    request.no_store = freshness.no_store;

    request.template_id = field("X-Coalesce-Template");
    const std::string variables = field("X-Coalesce-Vars");
    if (request.template_id.empty() && !variables.empty())
        return respond(response_of(bad_request("expected X-Coalesce-Template beside X-Coalesce-Vars")));
    if (request.template_id.empty() || request.template_id == "default") {
        request.model = route.model;
        request.body = parser_->get().body();
    } else { // which names its model, and is asked by its variables alone
        request.body = variables.empty() ? std::string_view("{}") : std::string_view(variables);
    }

    // Whoever names a key wants ids in the events, and may go on where an earlier answer broke off.
    if (const std::string key = field("X-Coalesce-Key"); !key.empty()) {
        const std::optional<Key> whole = parse_key(key);
        if (wish.form == Form::sse) wish.form = Form::sse_ids;
        if (!whole && key != "auto") request.explicit_key = key;
        if (const std::string last = field("Last-Event-ID"); !last.empty()) {
            if (!parse_event_id(last))
                return respond(response_of(
                    bad_request("expected a Last-Event-ID such as 9f3c2a71d04b55e8.17, as the events had it")));
            if (whole) wish.key = to_hex(*whole);
            request = callers_own();
            request.resume = last;
            wish.resumed = true;
        }
    }

    if (const std::string delay = field("X-Coalesce-Delay"); !delay.empty()) {
        const Result<Nanos> duration = parse_duration(delay);
        if (!duration || *duration > kLongestDelay)
            return respond(response_of(bad_request("expected an X-Coalesce-Delay such as 200ms, 60s at most")));
        wish.read_from = now() + *duration;
    }
    open(request, std::move(wish));
}

void Connection::chat() {
    const std::string& body = parser_->get().body();
    const nlohmann::json asked = nlohmann::json::parse(body, nullptr, false);
    if (!asked.is_object() || !asked.contains("model") || !asked["model"].is_string())
        return respond(response_of(bad_request("expected a JSON object with a model and messages")));
    client::Request request = callers_own();
    request.dialect = GCOALESCE_OPENAI;
    request.model = asked["model"].get<std::string>();
    request.stream = asked.value("stream", nlohmann::json(false)) == true;
    request.body = body;
    const Freshness freshness = freshness_of(field("Cache-Control"));
    request.max_age = client::milliseconds(freshness.max_age_ms);
    request.no_store = freshness.no_store;
    open(request, {request.stream ? Form::chat : Form::unary, 0, {}, false});
}

void Connection::pass(const Route& route) {
    client::Request request = callers_own();
    request.dialect = GCOALESCE_PASS;
    request.verb = head_only_ ? "GET" : std::string(view(parser_->get().method_string()));
    request.path = route.path;
    request.body = parser_->get().body();
    open(request, {Form::passed, 0, {}, false});
}

// A template and its variables as JSON; or, with a model in the query, a whole request of the API, which goes upstream
// as it is.
void Connection::create_stream(const Target& target) {
    client::Request request = callers_own();
    std::string variables;
    if (const std::optional<std::string> model = target.query("model")) {
        request.model = *model;
        request.body = parser_->get().body();
    } else {
        const nlohmann::ordered_json asked = nlohmann::ordered_json::parse(parser_->get().body(), nullptr, false);
        const auto id = asked.find("template");
        if (!asked.is_object() || id == asked.end() || !id->is_string())
            return respond(
                response_of(bad_request("expected {\"template\": ID, \"variables\": {...}}, or a whole request "
                                        "of the API and its model in the query: ?model=gemini-2.5-flash")));
        for (const auto& [name, value] : asked.items()) {
            if (name != "template" && name != "variables")
                return respond(response_of(bad_request("expected template and variables, found another member")));
        }
        request.template_id = id->get<std::string>();
        variables = asked.contains("variables") ? asked["variables"].dump() : "{}";
        request.body = variables;
    }
    open(request, {Form::created, 0, {}, false});
}

void Connection::read_stream(const Target& target, const Route& route) {
    const std::optional<StreamId> stream = parse_stream_id(route.stream);
    if (!stream)
        return respond(response_of(bad_request("expected a stream's id of 16 hexadecimal digits in the path")));
    std::string last = field("Last-Event-ID");
    for (const char* name : {"last_event_id", "lastEventId"}) {
        if (last.empty()) last = target.query(name).value_or("");
    }
    EventId from{*stream, 0};
    if (!last.empty()) {
        const std::optional<EventId> read = parse_event_id(last);
        if (!read || read->stream != *stream)
            return respond(response_of(
                bad_request(fmt::format("expected a Last-Event-ID of this stream, such as {}.17", to_hex(*stream)))));
        from = *read;
    }
    client::Request request = callers_own();
    request.resume = to_text(from);
    open(request, {Form::event_source, 0, {}, true});
}

void Connection::open(const client::Request& request, Answer::Wish wish) {
    Result<client::Subscription> subscription = world_.open(request);
    if (!subscription) {
        Error error = subscription.error();
        if (error.code != GCOALESCE_BAD_REQUEST) error.retry_ms = 1000;
        return respond(response_of(problem_of(error)));
    }
    answer_ = std::make_unique<Answer>(std::move(*subscription), std::move(wish));
    if (answer_->read_from() != 0) {
        const auto timer = std::make_shared<net::steady_timer>(socket_.get_executor());
        timer->expires_after(std::chrono::nanoseconds(answer_->read_from() - now()));
        timer->async_wait([self = shared_from_this()](error_code cancelled) {
            if (!cancelled) self->pump();
        });
        delay_ = timer;
    }
    world_.add_reader(shared_from_this());
    send_on();
}

void Connection::notify(const Target& target) {
    if (!caller_.admin)
        return respond(response_of(with_status(403, GCOALESCE_NO_PERMISSION,
                                               "notify needs a token whose line in --token-file ends in :admin")));
    World::Notify wanted;
    std::string action = target.query("action").value_or("on"), duration = target.query("for").value_or("");
    wanted.templates = target.query("template").value_or("");
    if (const std::string& body = parser_->get().body(); !body.empty()) {
        const nlohmann::json asked = nlohmann::json::parse(body, nullptr, false);
        bool good = asked.is_object();
        for (const auto& [name, value] : asked.items()) {
            if (name == "templates" && value.is_array()) {
                wanted.templates.clear();
                for (const auto& id : value) {
                    good = good && id.is_string();
                    if (good) wanted.templates += (wanted.templates.empty() ? "" : ",") + id.get<std::string>();
                }
            } else if ((name == "action" || name == "for") && value.is_string()) {
                (name == "for" ? duration : action) = value.get<std::string>();
            } else {
                good = false;
            }
        }
        if (!good)
            return respond(response_of(bad_request(
                "expected {\"action\": \"on\" or \"off\", \"templates\": [ID...], \"for\": \"6s\"}, each of them "
                "optional")));
    }
    if (action != "on" && action != "off") return respond(response_of(bad_request("expected the action on or off")));
    if (action == "off") wanted.action = GCOALESCE_NOTIFY_OFF;
    if (!duration.empty()) {
        const Result<Nanos> parsed = parse_duration(duration);
        if (!parsed) return respond(response_of(bad_request(parsed.error().message)));
        wanted.for_ms = to_ms(*parsed);
    }
    world_.notify(wanted, [weak = weak_from_this(), number = number_](const Result<std::int64_t>& remaining) {
        const auto self = weak.lock();
        if (!self || self->state_ != State::answering || self->number_ != number) return;
        self->guard([&] {
            self->respond(remaining ? json_response({{"window_open_ms", *remaining}})
                                    : response_of(problem_of(remaining.error())));
        });
    });
}

// ---- responding ----------------------------------------------------------------------------------------------------

void Connection::respond(Response response) {
    answer_.reset();
    Piece piece;
    piece.head = std::move(response.head);
    piece.before = std::move(response.body);
    deliver(piece, Step::whole);
}

void Connection::refuse(const Problem& problem) {
    keep_alive_ = false;
    state_ = State::answering;
    since_ = progress_ = now();
    respond(response_of(problem));
}

bool Connection::pump() {
    const auto self = shared_from_this();
    guard([this] { send_on(); });
    return state_ == State::answering && answer_ != nullptr;
}

void Connection::send_on() {
    Piece& piece = world_.piece;
    while (state_ == State::answering && answer_ && !unsent_) {
        if (answer_->read_from() != 0 && answer_->read_from() > now()) break;
        piece.clear();
        const Step step = answer_->next(piece);
        if (step == Step::nothing) break;
        deliver(piece, step);
    }
}

std::string Connection::head_text(const Head& head) const {
    http::response<http::empty_body> response;
    response.version(http_1_1_ ? 11 : 10);
    response.result(head.status);
    if (head.status == 499) response.reason("Cancelled");
    response.set(http::field::date, view(std::string_view(date())));
    if (!head.content_type.empty()) response.set(http::field::content_type, view(head.content_type));
    for (const auto& [name, value] : head.fields)
        response.insert(view(std::string_view(name)), view(std::string_view(value)));
    if (!origin_.empty()) {
        response.set(http::field::access_control_allow_origin, view(std::string_view(origin_)));
        response.set(http::field::access_control_expose_headers, kExposed);
        if (origin_ != "*") response.insert(http::field::vary, "Origin");
    }
    if (head.length)
        response.content_length(*head.length);
    else if (chunked_)
        response.chunked(true);
    response.keep_alive(keep_alive_);
    std::ostringstream text;
    text << response.base();
    return std::move(text).str();
}

// Sends a piece; `step` follows when all of it has gone. Once the client has it, or the rest of it is in unsent_, the
// piece and the world's text are free for another response, which may begin in here.
void Connection::deliver(Piece& piece, Step step) {
    ++world_.pieces;
    std::string& first = world_.text;
    first.clear();
    bool body = !head_only_;
    if (piece.head) {
        status_ = piece.head->status;
        body = body && status_ != 204;
        const bool ends_itself = piece.head->length || status_ == 204;
        chunked_ = http_1_1_ && !ends_itself;
        keep_alive_ = keep_alive_ && !world_.draining && (http_1_1_ || ends_itself);
        first = head_text(*piece.head);
    }
    if (head_only_) step = Step::whole;
    Parts parts{};
    std::string last;
    if (body) {
        const std::size_t size = piece.before.size() + piece.span.size() + piece.behind.size();
        if (chunked_ && size > 0) fmt::format_to(std::back_inserter(first), "{:x}\r\n", size);
        first += piece.before;
        parts[1] = piece.span;
        last = piece.behind;
        if (chunked_ && size > 0) last += "\r\n";
        if (chunked_ && step == Step::whole) last += "0\r\n\r\n";
    }
    parts[0] = first;
    parts[2] = last;
    step_ = step;
    spanned_ = !parts[1].empty();
    if (!send(parts)) return;
    if (size_of(parts) == 0) return delivered();
    unsent_ = Unsent{std::string(parts[0]), parts[1], std::string(parts[2]), 0};
    wait_writable();
}

std::size_t Connection::size_of(const Parts& parts) {
    return parts[0].size() + parts[1].size() + parts[2].size();
}

// Takes away from the parts what the client takes now. False: the client is gone.
bool Connection::send(Parts& parts) {
    while (size_of(parts) > 0) {
        std::array<iovec, 3> vectors{};
        std::size_t count = 0;
        for (const std::string_view part : parts) {
            if (!part.empty()) vectors[count++] = {const_cast<char*>(part.data()), part.size()};
        }
        msghdr message{};
        message.msg_iov = vectors.data();
        message.msg_iovlen = count;
        const ssize_t sent = ::sendmsg(socket_.native_handle(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0 && errno == EAGAIN) return true;
        if (sent < 0) {
            finish("client gone");
            close();
            return false;
        }
        sent_ += static_cast<std::uint64_t>(sent);
        progress_ = now();
        auto left = static_cast<std::size_t>(sent);
        for (std::string_view& part : parts) {
            const std::size_t taken = std::min(left, part.size());
            part.remove_prefix(taken);
            left -= taken;
        }
    }
    return true;
}

void Connection::wait_writable() {
    socket_.async_wait(Socket::wait_write, [self = shared_from_this()](error_code error) {
        if (error || self->state_ != State::answering || !self->unsent_) return;
        self->guard([&] {
            self->flush();
            self->send_on();
        });
    });
}

// The client takes more of what it left.
void Connection::flush() {
    Parts parts{unsent_->first, unsent_->span, unsent_->last};
    const std::size_t all = size_of(parts);
    std::size_t skip = unsent_->sent;
    for (std::string_view& part : parts) {
        const std::size_t passed = std::min(skip, part.size());
        part.remove_prefix(passed);
        skip -= passed;
    }
    if (!send(parts)) return;
    unsent_->sent = all - size_of(parts);
    if (unsent_->sent < all) return wait_writable();
    unsent_.reset();
    delivered();
}

// All of a piece has gone.
void Connection::delivered() {
    const bool spoilt = spanned_ && answer_ && !answer_->valid();
    if (spoilt || step_ == Step::broken) {
        finish(spoilt ? "evicted" : "broken off");
        keep_alive_ = false;
        return linger();
    }
    if (step_ != Step::whole) return;
    finish("whole");
    if (!keep_alive_ || world_.draining) return linger();
    state_ = State::idle;
    since_ = now();
    parse();
    wait_readable();
}

// The request has its answer, or nobody to take it.
void Connection::finish(const char* how) {
    gcoalesce::log(LogLevel::info, "{} \"{}\" {} {} {}B {}ms {}{}{}", peer_, line_.empty() ? "-" : line_, status_, how,
                   sent_, to_ms(now() - since_), answer_ ? answer_->story() : "-", caller_.name.empty() ? "" : " ",
                   caller_.name);
    answer_.reset();
    delay_.reset();
    unsent_.reset();
    line_.clear();
}

void Connection::linger() {
    state_ = State::lingering;
    since_ = now();
    in_ = {};
    error_code gone;
    socket_.shutdown(Socket::shutdown_send, gone);
    if (gone) return close();
    wait_readable();
}

void Connection::close() {
    if (state_ == State::closed) return;
    state_ = State::closed;
    answer_.reset();
    delay_.reset();
    parser_.reset();
    hold_bodies(0);
    error_code ignored;
    socket_.close(ignored);
    world_.remove(shared_from_this());
}

// ---- time ----------------------------------------------------------------------------------------------------------

void Connection::tick(Nanos present) {
    guard([&] { look_at_clock(present); });
}

void Connection::look_at_clock(Nanos present) {
    const Nanos passed = present - since_;
    switch (state_) {
    case State::idle:
        if (world_.draining || passed > world_.options.idle) close();
        return;
    case State::receiving:
        if (passed > world_.options.request)
            refuse(with_status(
                408, GCOALESCE_TIMED_OUT,
                fmt::format("the request did not come whole within {}", format_duration(world_.options.request))));
        return;
    case State::lingering:
        if (passed > kLinger) close();
        return;
    case State::answering: break;
    case State::closed: return;
    }
    if (unsent_) {
        if (present - progress_ <= world_.options.stall) return;
        finish("client stalled");
        return close();
    }
    if (!answer_) return;
    Piece piece;
    if (answer_->opening()) {
        const Result<void> well = world_.health(false);
        if (well || present - std::max(since_, world_.unwell_since) <= kWithoutBroker) return;
        const Step step = answer_->give_up({well.error().code, well.error().message, 1000}, piece);
        deliver(piece, step);
    } else if (present - progress_ >= world_.options.heartbeat) {
        piece.before = answer_->heartbeat();
        if (!piece.before.empty()) deliver(piece, Step::more);
    }
}

} // namespace gcoalesce::gateway
