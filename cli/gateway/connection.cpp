#include <utility> // Asio 1.18 uses std::exchange without saying so

#include "cli/gateway/connection.hpp"

#include <algorithm>
#include <array>
#include <boost/asio/buffer.hpp>
#include <boost/beast/http/empty_body.hpp>
#include <boost/beast/http/message.hpp>
#include <boost/beast/http/write.hpp>
#include <cerrno>
#include <ctime>
#include <sstream>
#include <sys/socket.h>
#include <sys/uio.h>

#include "base/log.hpp"
#include "base/units.hpp"
#include "cli/gateway/text.hpp"

namespace gcoalesce::gateway {
namespace {

namespace net = boost::asio;
namespace http = boost::beast::http;
using boost::system::error_code;

constexpr std::size_t kReadSize = 64u << 10;
constexpr std::size_t kMostAhead = 64u << 10; // bytes of further requests that are read while one is answered
constexpr Nanos kLinger = 2 * kSecond;
constexpr Nanos kWithoutBroker = 800 * kMillisecond; // another one may come; with two ticks it is the promised second

constexpr const char* kExposed = "X-Coalesce-Status, X-Coalesce-Key, X-Coalesce-Stream, X-Coalesce-Ending, Age, "
                                 "Retry-After, Location";

Nanos now() {
    return system_clock().monotonic();
}

std::string date() {
    const std::time_t time = std::time(nullptr);
    std::tm utc{};
    ::gmtime_r(&time, &utc);
    std::array<char, 64> text{};
    return {text.data(), std::strftime(text.data(), text.size(), "%a, %d %b %Y %H:%M:%S GMT", &utc)};
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

} // namespace

Connection::Connection(World& world, Socket socket, std::string peer)
    : world_(world), socket_(std::move(socket)), peer_(std::move(peer)), since_(now()) {}

void Connection::start() {
    wait_readable();
}

void Connection::break_off(const char* why) {
    gcoalesce::log(LogLevel::error, "{} \"{}\": {}", peer_, line_, why);
    close();
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
