// One HTTP/1.1 connection of a gateway.
#pragma once

#include <array>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "cli/gateway/answer.hpp"
#include "cli/gateway/options.hpp"
#include "cli/gateway/route.hpp"
#include "cli/gateway/tokens.hpp"

namespace gcoalesce::gateway {

class Connection;

// What connections need of their process. Its event loop's.
class World {
  public:
    explicit World(const Options& given) : options(given) {}
    virtual ~World() = default;

    const Options& options;
    std::optional<Tokens> tokens;
    std::size_t bodies = 0;   // bytes, within options.max_bodies
    bool draining = false;    // no connection takes another request
    std::uint64_t pieces = 0; // that were sent so far, or left to a slow client
    Piece piece;              // of whichever connection is being pumped, and its text: 10,000 of them need one
    std::string text;

    // Asks the broker. The error where there is none.
    virtual Result<client::Subscription> open(const client::Request& request) = 0;
    // The connection has an answer: it is pumped after each dispatch until it says that it has none.
    virtual void add_reader(const std::shared_ptr<Connection>& connection) = 0;
    virtual void remove(const std::shared_ptr<Connection>& connection) = 0;
    Nanos unwell_since = 0; // the broker, as health() found; 0: it is well, or nobody has asked
    // What the segment tells of the broker: its loop turns, and (takes_requests) it takes requests from us.
    virtual Result<void> health(bool takes_requests) = 0;
    // Its numbers, in Prometheus's text format. The error where it has no segment.
    virtual Result<std::string> metrics() = 0;
    // Opens or closes the window; `done` comes on the event loop.
    struct Notify {
        gcoalesce_notify_action action = GCOALESCE_NOTIFY_ON;
        std::string templates;
        std::int64_t for_ms = 0;
    };
    virtual void notify(const Notify& notify, std::function<void(const Result<std::int64_t>& remaining_ms)> done) = 0;
};

class Connection : public std::enable_shared_from_this<Connection> {
  public:
    using Socket = boost::asio::generic::stream_protocol::socket;
    Connection(World& world, Socket socket, std::string peer);

    void start();
    // Sends as much of its answer as broker and client let it. False: it has no answer (any more).
    bool pump();
    // What time alone brings: limits, heartbeats, a delay that is over.
    void tick(Nanos now);
    void close();
    bool idle() const { return state_ == State::idle; }
    bool listed = false; // among the readers

  private:
    using Parser = boost::beast::http::request_parser<boost::beast::http::string_body>;
    enum class State {
        idle,      // between requests
        receiving, // one
        answering,
        lingering, // all was said; what the client still sends is passed over, lest the kernel throws our words away
        closed
    };

    // What is thrown while one connection is served (its memory has run out, say) ends that connection and no other.
    template <class Work>
    void guard(const Work& work) {
        try {
            work();
        } catch (const std::exception& error) {
            break_off(error.what());
        }
    }
    void break_off(const char* why);

    // ---- receiving ----
    void wait_readable();
    void on_readable();
    void parse();
    bool parse_some();
    void hold_bodies(std::size_t bytes);

    // ---- requests ----
    bool admit();
    void serve();
    void ask(const Target& target, const Route& route);
    void chat();
    void pass(const Route& route);
    void create_stream(const Target& target);
    void read_stream(const Target& target, const Route& route);
    void notify(const Target& target);
    void open(const client::Request& request, Answer::Wish wish);
    std::string field(std::string_view name) const;
    std::string credential(const Target& target) const;
    client::Request callers_own() const;

    // ---- responding ----
    void respond(Response response);
    void refuse(const Problem& problem); // and takes no further request
    void deliver(Piece& piece, Step step);
    std::string head_text(const Head& head) const;
    void send_on();
    using Parts = std::array<std::string_view, 3>; // our text, a span of the segment's memory, our text
    static std::size_t size_of(const Parts& parts);
    bool send(Parts& parts);
    void wait_writable();
    void flush();
    void delivered();
    void look_at_clock(Nanos present);
    void finish(const char* how);
    void linger();

    World& world_;
    Socket socket_;
    const std::string peer_;
    State state_ = State::idle;
    Nanos since_ = 0; // when the state began

    boost::beast::flat_buffer in_;
    std::optional<Parser> parser_;
    bool waiting_ = false; // for the socket to be readable
    bool parsing_ = false;
    bool admitted_ = false;  // its head has been looked at
    std::size_t bodies_ = 0; // our share of the world's

    // Of the present request.
    bool http_1_1_ = true, keep_alive_ = true, head_only_ = false;
    std::string line_; // method and path, for the log
    std::string origin_;
    Caller caller_;
    std::uint64_t number_ = 0; // of the request, on this connection
    std::unique_ptr<Answer> answer_;
    std::shared_ptr<void> delay_; // a timer

    // Of the present response.
    unsigned status_ = 0;
    bool chunked_ = false;
    Step step_ = Step::nothing; // what follows once all is sent
    bool spanned_ = false;      // the piece has a span
    struct Unsent {
        std::string first;
        std::string_view span;
        std::string last;
        std::size_t sent = 0; // of all three
    };
    std::optional<Unsent> unsent_; // what the client did not take at once
    Nanos progress_ = 0;           // when the client took something last
    std::uint64_t sent_ = 0;
};

} // namespace gcoalesce::gateway
