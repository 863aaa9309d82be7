// What a connection does with its requests: whom it lets in, what they ask for, and of whom.
#include <utility> // Asio 1.18 uses std::exchange without saying so

#include <algorithm>
#include <boost/asio/steady_timer.hpp>
#include <nlohmann/json.hpp>
#include <sys/socket.h>

#include "base/ids.hpp"
#include "base/units.hpp"
#include "cli/gateway/connection.hpp"
#include "cli/gateway/members.hpp"
#include "cli/gateway/text.hpp"
#include "cli/view/prometheus.hpp"
#include "protocol/key.hpp"

namespace gcoalesce::gateway {
namespace {

namespace net = boost::asio;
namespace http = boost::beast::http;
using boost::system::error_code;

constexpr Nanos kLongestDelay = 60 * kSecond;

Nanos now() {
    return system_clock().monotonic();
}

Response json_response(const nlohmann::ordered_json& json) {
    Response response;
    response.body = json.dump() + "\n";
    response.head.content_type = "application/json; charset=UTF-8";
    response.head.length = response.body.size();
    return response;
}

} // namespace

// ---- who asks ------------------------------------------------------------------------------------------------------

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
    if (request.count(http::field::host) > 1 || (http_1_1_ && request.count(http::field::host) == 0))
        return refuse(bad_request("expected one Host field")), false; // RFC 9112, section 3.2
    if (const std::string origin = field("Origin"); !origin.empty()) {
        const auto& allowed = world_.options.cors_origins;
        const bool all = std::ranges::find(allowed, "*") != allowed.end();
        if (!all && std::ranges::find(allowed, origin) == allowed.end())
            return refuse(with_status(403, GCOALESCE_NO_PERMISSION,
                                      "pages of this origin may not ask: gcoalesce serve --cors-origin lets them")),
                   false;
        origin_ = all ? "*" : origin;
    }
    // For an image or a link of some other page browsers tell no origin, but this (Fetch Metadata, W3C).
    if (origin_.empty() && same_word(field("Sec-Fetch-Site"), "cross-site"))
        return refuse(
                   with_status(403, GCOALESCE_NO_PERMISSION,
                               "pages of other sites may not ask: gcoalesce serve --cors-origin lets their scripts")),
               false;
    if (const std::string name = public_name(field("Host")); !name.empty() && !world_.tokens && peer_ != "unix") {
        const auto& allowed = world_.options.hosts;
        if (std::ranges::find(allowed, name) == allowed.end())
            return refuse(
                       with_status(403, GCOALESCE_NO_PERMISSION,
                                   fmt::format("expected localhost or an address in Host, found \"{}\", which may be "
                                               "some page's way to get here: gcoalesce serve --allow-host {} lets it",
                                               name, name))),
                   false;
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
    const bool chunked =
        http_1_1_ && request.count(http::field::transfer_encoding) == 1 && same_word(transfer, "chunked");
    if (request.count(http::field::transfer_encoding) > 0 && !chunked)
        return refuse(with_status(501, GCOALESCE_BAD_REQUEST, "expected no transfer encoding but chunked")), false;
    const std::string encoding = field("Content-Encoding");
    if (!encoding.empty() && !same_word(encoding, "identity"))
        return refuse(with_status(415, GCOALESCE_BAD_REQUEST, "expected a body without a content encoding")), false;
    if (http_1_1_ && !parser_->is_done() && same_word(field("Expect"), "100-continue")) {
        constexpr std::string_view go_on = "HTTP/1.1 100 Continue\r\n\r\n";
        ::send(socket_.native_handle(), go_on.data(), go_on.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    return true;
}

// A field that comes again goes on with a list (RFC 9110, section 5.3); where no list can be, it fits nothing.
std::string Connection::field(std::string_view name) const {
    std::string value;
    const auto [first, last] = parser_->get().equal_range(view(name));
    for (auto one = first; one != last; ++one) {
        if (one != first) value += ", ";
        value += view(one->value());
    }
    return value;
}

// The key or token that the request brings, wherever the API's clients put it.
std::string Connection::credential(const Target& target) const {
    if (std::string key = field("x-goog-api-key"); !key.empty()) return key;
    const std::string authorization = field("Authorization");
    constexpr std::string_view bearer = "bearer ";
    if (authorization.size() > bearer.size() &&
        same_word(std::string_view(authorization).substr(0, bearer.size()), bearer))
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
    if (!field("X-Coalesce-Template").empty())
        return respond(response_of(bad_request("expected no X-Coalesce-Template: templates are of Gemini's own form")));
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
    const std::string& body = parser_->get().body();
    if (!body.empty() && !is_json(body)) // it would go on as what it is not
        return respond(response_of(with_status(415, GCOALESCE_BAD_REQUEST,
                                               "expected a body of JSON: uploads are not passed on; send them to "
                                               "Gemini itself")));
    client::Request request = callers_own();
    request.dialect = GCOALESCE_PASS;
    request.verb = head_only_ ? "GET" : std::string(view(parser_->get().method_string()));
    request.path = route.path;
    request.body = body;
    open(request, {Form::passed, 0, {}, false});
}

// A template and its variables as JSON; or, with a model in the query, a whole request of the API, which goes upstream
// as it is.
void Connection::create_stream(const Target& target) {
    if (const auto other = target.query_but({"model"}))
        return respond(response_of(bad_request(fmt::format("expected no parameter but model, found \"{}\"", *other))));
    client::Request request = callers_own();
    std::string variables;
    if (const std::optional<std::string> model = target.query("model")) {
        request.model = *model;
        request.body = parser_->get().body();
    } else {
        std::string id; // as JSON
        const auto members = members_of(parser_->get().body());
        bool good = members.has_value();
        for (const auto& [name, text] : members.value_or(Members())) {
            std::string& taken = name == "template" ? id : variables;
            good = good && taken.empty() && (name == "template" || name == "variables"); // each of them once
            taken = text;
        }
        if (!good || !id.starts_with('"'))
            return respond(
                response_of(bad_request("expected {\"template\": ID, \"variables\": {...}} and nothing else, or "
                                        "a whole request of the API and its model in the query: "
                                        "?model=gemini-2.5-flash")));
        request.template_id = nlohmann::json::parse(id).get<std::string>();
        if (variables.empty()) variables = "{}";
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
    // Nothing may open the window, or that of more templates than meant: not a misspelt "off", nor what is told twice.
    if (const auto other = target.query_but({"action", "for", "template"}))
        return respond(response_of(
            bad_request(fmt::format("expected the parameters action, for and template, found \"{}\"", *other))));
    std::optional<std::string> action = target.query("action"), duration = target.query("for"),
                               templates = target.query("template");
    bool good = !target.query_twice();
    if (const std::string& body = parser_->get().body(); !body.empty()) {
        const std::optional<Members> members = members_of(body);
        good = good && members.has_value();
        for (const auto& [name, text] : members.value_or(Members())) {
            std::optional<std::string>* taken = name == "action"      ? &action
                                                : name == "for"       ? &duration
                                                : name == "templates" ? &templates
                                                                      : nullptr;
            const nlohmann::json value = nlohmann::json::parse(text);
            good = good && taken != nullptr && !taken->has_value() && value.is_array() == (taken == &templates);
            if (!good) break;
            *taken = "";
            for (const auto& one : value.is_array() ? value : nlohmann::json::array({value})) {
                good = good && one.is_string() && one != "";
                if (good) **taken += (taken->value().empty() ? "" : ",") + one.get<std::string>();
            }
        }
    }
    good = good && action != "" && duration != "" && templates != ""; // none is not all
    if (!good)
        return respond(response_of(bad_request(
            "expected {\"action\": \"on\" or \"off\", \"templates\": [ID...], \"for\": \"6s\"}, each of them optional; "
            "or the parameters action, template and for; nothing twice and nothing empty")));
    World::Notify wanted;
    wanted.templates = templates.value_or("");
    if (action && action != "on" && action != "off")
        return respond(response_of(bad_request("expected the action on or off")));
    if (action == "off") wanted.action = GCOALESCE_NOTIFY_OFF;
    if (duration) {
        const Result<Nanos> parsed = parse_duration(*duration);
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

} // namespace gcoalesce::gateway
