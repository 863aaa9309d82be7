// Asio 1.18 does not believe that clang (and so clang-tidy) has the coroutines of C++20.
#if defined(__clang__)
#define BOOST_ASIO_HAS_CO_AWAIT 1
#define BOOST_ASIO_HAS_STD_COROUTINE 1
#endif
#include <utility> // Asio 1.18 uses std::exchange without saying so

#include "cli/sim/server.hpp"

#include <algorithm>
#include <array>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/core/string.hpp>
#include <boost/beast/http/empty_body.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <boost/beast/http/write.hpp>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <ctime>
#include <linux/sockios.h>
#include <memory>
#include <openssl/evp.h>
#include <optional>
#include <set>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include "base/ids.hpp"
#include "cli/sim/answer.hpp"
#include "cli/sim/counters.hpp"
#include "cli/sim/recordings.hpp"

namespace gcoalesce::sim {
namespace {

namespace net = boost::asio;
namespace http = boost::beast::http;
using boost::system::error_code;
using net::awaitable;
using net::use_awaitable;
using net::ip::tcp;
using SteadyTime = std::chrono::steady_clock::time_point;

constexpr std::uint64_t kBodyLimit = 64ULL << 20;
constexpr std::uint32_t kHeaderLimit = 64U << 10;
constexpr std::size_t kReadSize = 64U << 10;
constexpr std::size_t kWriteSize = 64U << 10; // small HTTP chunks are gathered up to this before they are written

// --- requests ---

struct Target {
    std::string_view path, alt, key;
};

Target split_target(std::string_view target) {
    const std::size_t mark = target.find('?');
    Target parts{target.substr(0, mark), {}, {}};
    std::string_view query = mark == std::string_view::npos ? std::string_view() : target.substr(mark + 1);
    while (!query.empty()) {
        const std::string_view item = query.substr(0, query.find('&'));
        query.remove_prefix(std::min(item.size() + 1, query.size()));
        if (item.starts_with("alt=")) parts.alt = item.substr(4);
        if (item.starts_with("key=")) parts.key = item.substr(4);
    }
    return parts;
}

// "/v1beta/models/x:method" -> "models", "x", "method"; the version may be missing.
struct Resource {
    std::string_view collection, name, method;
};

Resource split_path(std::string_view path) {
    for (std::string_view version : {"/v1beta/", "/v1alpha/", "/v1/", "/"}) {
        if (path.starts_with(version)) {
            path.remove_prefix(version.size());
            break;
        }
    }
    Resource resource;
    resource.collection = path.substr(0, path.find('/'));
    path.remove_prefix(std::min(resource.collection.size() + 1, path.size()));
    resource.name = path.substr(0, path.find(':'));
    path.remove_prefix(std::min(resource.name.size() + 1, path.size()));
    resource.method = path;
    return resource;
}

// The stand-in has every gemini model, so that it need not be told of new ones.
bool known_model(const Resource& resource) {
    if (resource.name.find('/') != std::string_view::npos) return false;
    return (resource.collection == "models" && resource.name.starts_with("gemini-")) ||
           (resource.collection == "tunedModels" && !resource.name.empty());
}

std::string sha256_hex(std::string_view bytes) {
    std::array<std::uint8_t, EVP_MAX_MD_SIZE> digest{};
    unsigned size = 0;
    if (EVP_Digest(bytes.data(), bytes.size(), digest.data(), &size, EVP_sha256(), nullptr) != 1)
        throw std::runtime_error("SHA-256 is not to be had");
    return to_hex(std::span(digest.data(), size));
}

// What all connections share.
struct World {
    explicit World(const ServerOptions& given) : options(given), recordings(given.replay) {}

    const ServerOptions& options;
    const Recordings recordings;
    Counters counters;
    bool released = false; // what hold-after holds
    std::set<net::steady_timer*> held;
};

// Has the timer cancelled when what hold-after holds is let go.
class Held {
  public:
    Held(World& world, net::steady_timer& timer) : world_(world), timer_(timer) { world_.held.insert(&timer_); }
    ~Held() { world_.held.erase(&timer_); }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;

  private:
    World& world_;
    net::steady_timer& timer_;
};

// --- one connection ---

class Connection : public std::enable_shared_from_this<Connection> {
  public:
    Connection(tcp::socket socket, World& world)
        : socket_(std::move(socket)), timer_(socket_.get_executor()), world_(world) {}

    // Answers requests until either side has enough of it.
    awaitable<void> run() {
        const auto keep = shared_from_this();
        const Gauge open(world_.counters.open_connections);
        ++world_.counters.connections;
        try {
            socket_.set_option(tcp::no_delay(true));
            while (co_await read_request()) {
                if (!co_await answer_request()) break;
            }
        } catch (const std::exception&) {
            // The connection broke, or the answer had no room in memory: both end this connection and no other.
        }
        error_code ignored;
        socket_.close(ignored);
    }

  private:
    using Parser = http::request_parser<http::string_body>;
    const http::request<http::string_body>& request() const { return parser_->get(); }
    static std::string_view view(boost::beast::string_view text) { return {text.data(), text.size()}; }

    // False: no further request, or one that was no HTTP (which has been answered).
    awaitable<bool> read_request() {
        parser_.emplace();
        parser_->header_limit(kHeaderLimit);
        parser_->body_limit(kBodyLimit);
        parser_->eager(true);
        bool may_wait = true; // for "100 Continue"
        while (!parser_->is_done()) {
            error_code error;
            const std::size_t used = parser_->put(buffer_.data(), error);
            buffer_.consume(used);
            if (!error && used > 0) continue;
            if (error && error != http::error::need_more) {
                co_await refuse(error);
                co_return false;
            }
            if (may_wait && parser_->is_header_done()) {
                may_wait = false;
                if (boost::beast::iequals(request()[http::field::expect], "100-continue"))
                    co_await write("HTTP/1.1 100 Continue\r\n\r\n");
            }
            const auto space = buffer_.prepare(kReadSize);
            buffer_.commit(co_await socket_.async_read_some(space, net::redirect_error(use_awaitable, error)));
            if (error) co_return false;
        }
        co_return true;
    }

    awaitable<void> refuse(error_code error) {
        start_response();
        keep_alive_ = false;
        // Not within the co_await: g++ 12 destroys the temporaries of a conditional there twice.
        const std::string message = error == http::error::body_limit
                                        ? "Request payload size exceeds the limit: 67108864 bytes."
                                        : "The request is no HTTP: " + error.message() + ".";
        co_await send(error_answer(Form::unary, 400, message));
        co_await linger();
    }

    void start_response() {
        http_1_1_ = request().version() >= 11;
        keep_alive_ = http_1_1_ && request().keep_alive();
        head_only_ = request().method() == http::verb::head;
        received_ = std::chrono::steady_clock::now();
        script_ = {};
    }

    // True: the connection can take another request.
    awaitable<bool> answer_request() {
        start_response();
        const Target target = split_target(view(request().target()));
        const Resource resource = split_path(target.path);
        const bool post = request().method() == http::verb::post, get = request().method() == http::verb::get;

        const bool streams = resource.method == "streamGenerateContent";
        if (post && (streams || resource.method == "generateContent")) {
            co_await answer_call(target, resource,
                                 !streams              ? Form::unary
                                 : target.alt == "sse" ? Form::sse
                                                       : Form::array);
            co_return keep_alive_;
        }

        if (post && target.path.ends_with("/openai/chat/completions")) {
            const Chat chat = read_chat(request().body());
            const std::string_view model =
                std::string_view(chat.model).substr(chat.model.starts_with("models/") ? 7 : 0);
            co_await answer_call(target, {"models", model, "chat/completions"}, chat.form);
            co_return keep_alive_;
        }

        Answer answer = error_answer(Form::unary, 404, "");
        if (get && target.path == "/sim/calls") {
            answer = document_answer(world_.counters.json());
        } else if (post && target.path == "/sim/reset") {
            world_.counters.reset();
            world_.released = false;
            answer = document_answer(world_.counters.json());
        } else if (post && target.path == "/sim/release") {
            world_.released = true;
            for (net::steady_timer* timer : world_.held) timer->cancel();
            answer = document_answer(world_.counters.json());
        } else if (auto refused = check_key(target)) {
            answer = *std::move(refused);
        } else if (get && resource.collection == "models" && resource.name.empty()) {
            answer = document_answer(model_list());
        } else if (get && known_model(resource) && resource.method.empty()) {
            answer = document_answer(model_document(std::string(resource.name)));
        } else if (post && known_model(resource) && resource.method == "countTokens") {
            const auto question = read_question(request().body());
            answer = question ? document_answer(token_count(question->tokens))
                              : error_answer(Form::unary, 400, question.error().message);
        }
        co_await send(std::move(answer));
        co_return keep_alive_;
    }

    awaitable<void> answer_call(Target target, Resource resource, Form form) {
        Counters& counters = world_.counters;
        Call call;
        call.model = resource.name;
        call.form = form;
        call.body_hash = sha256_hex(request().body());
        call.number = ++counters.by_body[call.body_hash];
        call.api_key = api_key(target);
        ++counters.calls;
        const Gauge in_flight(counters.in_flight);
        counters.most_in_flight = std::max(counters.most_in_flight, counters.in_flight);

        Answer answer = choose_answer(target, resource, call);
        if (!answer.without_head()) ++counters.by_status[std::to_string(answer.status)];
        watch();
        bool whole = false;
        try {
            co_await send(std::move(answer));
            whole = true;
        } catch (const boost::system::system_error&) {
        }
        if (!whole) {
            ++counters.aborted;
            keep_alive_ = false;
        }
        unwatch();
    }

    Answer choose_answer(const Target& target, const Resource& resource, Call& call) {
        if (auto refused = check_key(target, call.form)) return *std::move(refused);
        if (!known_model(resource))
            return error_answer(
                call.form, 404,
                fmt::format("{}/{} is not found, or is not supported for {}. Call ListModels to see the list of "
                            "available models and their supported methods.",
                            resource.collection, resource.name, resource.method));
        auto question = read_question(request().body());
        if (!question) return error_answer(call.form, 400, question.error().message);
        call.question = *std::move(question);

        Script script = world_.options.defaults;
        const auto header = view(request()["x-sim-script"]);
        for (std::string_view told : {std::string_view(call.question.script), header}) {
            if (auto done = apply_script(script, told); !done)
                return error_answer(call.form, 400, "sim: " + done.error().message);
        }
        script = script.for_call(call.number);

        const std::string& recorded = script.replay.empty() ? world_.recordings.only() : script.replay;
        const bool fails = script.status || script.html || script.empty;
        Result<Answer> answer = [&]() -> Result<Answer> {
            if (recorded.empty() || fails) return make_answer(call, script);
            return world_.recordings.read(recorded).map(
                [&](std::string bytes) { return replay_answer(call, script, std::move(bytes)); });
        }();
        if (!answer)
            return error_answer(call.form, answer.error().code == GCOALESCE_NOT_FOUND ? 404 : 400,
                                "sim: " + answer.error().message);
        script_ = std::move(script);
        return *std::move(answer);
    }

    std::string api_key(const Target& target) const {
        if (const auto header = view(request()["x-goog-api-key"]); !header.empty()) return std::string(header);
        if (!target.key.empty()) return std::string(target.key);
        const auto bearer = view(request()[http::field::authorization]);
        return std::string(bearer.starts_with("Bearer ") ? bearer.substr(7) : "");
    }

    std::optional<Answer> check_key(const Target& target, Form form = Form::unary) const {
        const ServerOptions& options = world_.options;
        if (!options.require_key && !options.accept_key) return std::nullopt;
        Call call;
        call.form = form;
        call.api_key = api_key(target);
        if (call.api_key.empty())
            return error_answer(
                form, 403,
                "Method doesn't allow unregistered callers (callers without established identity). Please use "
                "API Key or other form of API consumer identity to call this API.");
        if (!options.accept_key || call.api_key == *options.accept_key) return std::nullopt;
        Script script;
        script.status = 400;
        script.reason = "API_KEY_INVALID";
        return *make_answer(call, script);
    }

    // --- sending ---

    awaitable<void> send(Answer answer) {
        due_ = received_;
        co_await wait(script_.latency);
        if (script_.hold_after == 0) co_await hold();
        if (!answer.without_head()) co_await send_head(answer);
        if (head_only_) co_return;
        bool is_first = true;
        for (std::uint64_t i = 0; i < answer.pieces; ++i) {
            if (i > 0 && script_.hold_after == i) co_await hold();
            co_await wait(std::exchange(is_first, false) ? script_.first : script_.gap);
            const bool more_at_once = script_.gap == 0 && (i + 1 < answer.pieces || !answer.last.empty());
            co_await send_body(answer.next(), more_at_once);
        }
        if (script_.hold_after >= std::max<std::uint64_t>(answer.pieces, 1)) co_await hold();
        if (!answer.last.empty()) {
            // The brackets that close an array are no event and do not wait.
            if (answer.last != "]") co_await wait(is_first ? script_.first : script_.gap);
            co_await send_body(std::move(answer.last), false);
        }

        if (answer.ending == Ending::hang) co_await wait_for_ever();
        if (answer.ending == Ending::reset) co_return co_await reset();
        if (answer.ending == Ending::cut) {
            keep_alive_ = false;
            co_return;
        }
        if (http_1_1_) co_await write("0\r\n\r\n");
    }

    awaitable<void> send_head(const Answer& answer) {
        http::response<http::empty_body> response(static_cast<http::status>(answer.status), http_1_1_ ? 11 : 10);
        response.set(http::field::content_type, answer.content_type);
        if (answer.content_type == "text/event-stream") response.set(http::field::content_disposition, "attachment");
        for (const char* field : {"Origin", "X-Origin", "Referer"}) response.insert(http::field::vary, field);
        if (http_1_1_) response.chunked(true);
        response.keep_alive(keep_alive_);
        response.set(http::field::date, date());
        response.set(http::field::server, "scaffolding on HTTPServer2");
        response.set("X-XSS-Protection", "0");
        response.set("X-Frame-Options", "SAMEORIGIN");
        response.set("X-Content-Type-Options", "nosniff");
        const auto took = std::chrono::steady_clock::now() - received_;
        response.set("Server-Timing", fmt::format("gfet4t7; dur={}",
                                                  std::chrono::duration_cast<std::chrono::milliseconds>(took).count()));
        response.set("Alt-Svc", "h3=\":443\"; ma=2592000,h3-29=\":443\"; ma=2592000");
        if (!answer.retry_after.empty()) response.set(http::field::retry_after, answer.retry_after);
        if (answer.status >= 300 && answer.status < 400) response.set(http::field::location, "/sim/calls");

        std::ostringstream head;
        head << response.base();
        const std::string bytes = std::move(head).str();
        co_await write(bytes);
    }

    // The bytes must live until it is done.
    awaitable<void> write(std::string_view bytes) {
        co_await net::async_write(socket_, net::buffer(bytes.data(), bytes.size()), use_awaitable);
    }

    // more: further bytes follow at once, so that an HTTP chunk may span both.
    awaitable<void> send_body(std::string bytes, bool more) {
        if (held_.empty())
            held_ = std::move(bytes);
        else
            held_ += bytes;
        std::string_view rest = held_;
        std::string wire;
        const std::size_t chunk = script_.chunk == 0 ? std::max<std::size_t>(rest.size(), 1) : script_.chunk;
        while (!rest.empty() && !(more && script_.chunk != 0 && rest.size() < chunk)) {
            const std::string_view part = rest.substr(0, chunk);
            rest.remove_prefix(part.size());
            if (http_1_1_) fmt::format_to(std::back_inserter(wire), "{:x}\r\n", part.size());
            wire += part;
            if (http_1_1_) wire += "\r\n";
            if (wire.size() < kWriteSize && !rest.empty()) continue;
            co_await write(wire);
            wire.clear();
        }
        if (!wire.empty()) co_await write(wire);
        held_ = std::string(rest);
    }

    static std::string date() {
        const std::time_t now = std::time(nullptr);
        std::tm utc{};
        ::gmtime_r(&now, &utc);
        std::array<char, 64> text{};
        return {text.data(), std::strftime(text.data(), text.size(), "%a, %d %b %Y %H:%M:%S GMT", &utc)};
    }

    // --- waiting, and noticing that nobody waits any more ---

    // Waits count from the time at which the one before was over, not from when it was noticed: delays do not add up.
    awaitable<void> wait(Nanos duration) {
        due_ += std::chrono::nanoseconds(duration);
        if (duration == 0) co_return;
        co_await wait_until(due_);
    }

    // Until the script's holder lets go.
    awaitable<void> hold() {
        const Held held(world_, timer_);
        while (!world_.released) co_await wait_until(SteadyTime::max());
        due_ = std::chrono::steady_clock::now();
    }

    awaitable<void> wait_for_ever() {
        for (;;) co_await wait_until(SteadyTime::max());
    }

    awaitable<void> wait_until(SteadyTime time) {
        error_code cancelled;
        timer_.expires_at(time);
        if (!gone_) co_await timer_.async_wait(net::redirect_error(use_awaitable, cancelled));
        if (gone_) throw boost::system::system_error(net::error::connection_reset);
    }

    // While an answer is being made, a client that closes ends the waiting.
    void watch() {
        socket_.async_wait(
            tcp::socket::wait_read, [self = shared_from_this(), watch = ++watch_](const error_code& error) {
                if (error || watch != self->watch_) return;
                char byte = 0;
                const ssize_t got = ::recv(self->socket_.native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
                if (got > 0) return; // the next request: it shows that the client lives
                if (got < 0 && errno == EAGAIN) return self->watch();
                self->gone_ = true;
                self->timer_.cancel();
            });
    }

    void unwatch() {
        ++watch_;
        error_code ignored;
        socket_.cancel(ignored);
    }

    // --- ending badly ---

    // A reset throws away what has not been acknowledged: what the script wants sent has to arrive first.
    awaitable<void> reset() {
        keep_alive_ = false;
        int unsent = 0;
        while (::ioctl(socket_.native_handle(), SIOCOUTQ, &unsent) == 0 && unsent > 0)
            co_await wait_until(std::chrono::steady_clock::now() + std::chrono::milliseconds(1));
        socket_.set_option(net::socket_base::linger(true, 0));
        socket_.close();
    }

    // Closing with unread bytes would reset the connection and take the error answer with it: read some of them first.
    awaitable<void> linger() {
        error_code error;
        socket_.shutdown(tcp::socket::shutdown_send, error);
        timer_.expires_after(std::chrono::seconds(2));
        timer_.async_wait([self = shared_from_this()](const error_code& cancelled) {
            error_code ignored;
            if (!cancelled) self->socket_.close(ignored);
        });
        std::array<char, 16384> discarded{};
        while (!error)
            co_await socket_.async_read_some(net::buffer(discarded), net::redirect_error(use_awaitable, error));
        timer_.cancel();
    }

    tcp::socket socket_;
    net::steady_timer timer_;
    World& world_;
    boost::beast::flat_buffer buffer_;
    std::optional<Parser> parser_;
    Script script_; // how the present answer is sent
    bool http_1_1_ = true, keep_alive_ = true, head_only_ = false, gone_ = false;
    SteadyTime received_, due_;
    std::string held_; // of the body, until it fills a chunk
    std::uint64_t watch_ = 0;
};

awaitable<void> accept_all(tcp::acceptor& acceptor, World& world) {
    net::steady_timer pause(acceptor.get_executor());
    for (;;) {
        error_code error;
        tcp::socket socket = co_await acceptor.async_accept(net::redirect_error(use_awaitable, error));
        if (!error) {
            auto connection = std::make_shared<Connection>(std::move(socket), world);
            net::co_spawn(
                acceptor.get_executor(), [connection] { return connection->run(); }, net::detached);
        } else {
            // Out of descriptors, most likely: others will close theirs.
            pause.expires_after(std::chrono::milliseconds(10));
            co_await pause.async_wait(use_awaitable);
        }
    }
}

void allow_many_descriptors() {
    rlimit limit{};
    if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
    limit.rlim_cur = limit.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &limit);
}

} // namespace

Result<void> serve(const ServerOptions& options, const std::function<void(const std::string& url)>& on_listening) {
    allow_many_descriptors();
    error_code error;
    const auto address = net::ip::make_address(options.bind, error);
    if (error)
        return fail(GCOALESCE_BAD_REQUEST, "expected an address such as 127.0.0.1 or ::1, found \"{}\"", options.bind);
    try {
        World world(options);
        net::io_context io(1); // its destructor ends the connections, which refer to the world
        tcp::acceptor acceptor(io, tcp::endpoint(address, options.port), true);
        net::signal_set signals(io, SIGINT, SIGTERM);
        signals.async_wait([&io](const error_code&, int) { io.stop(); });
        net::co_spawn(
            io, [&] { return accept_all(acceptor, world); }, net::detached);
        const std::string host = address.is_v6() ? "[" + address.to_string() + "]" : address.to_string();
        on_listening(fmt::format("http://{}:{}", host, acceptor.local_endpoint().port()));
        io.run();
    } catch (const boost::system::system_error& failure) {
        return fail(GCOALESCE_IO, "cannot listen on {} port {}: {}", options.bind, options.port,
                    failure.code().message());
    } catch (const std::filesystem::filesystem_error& failure) {
        return fail(GCOALESCE_IO, "cannot replay {}: {}", options.replay, failure.code().message());
    }
    return {};
}

} // namespace gcoalesce::sim
