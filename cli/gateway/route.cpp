#include "cli/gateway/route.hpp"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <set>
#include <utility>

#include "cli/gateway/text.hpp"
#include "protocol/query.hpp"

namespace gcoalesce::gateway {
namespace {

std::string_view trimmed(std::string_view text) {
    while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
    while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
    return text;
}

} // namespace

Target::Target(std::string_view text)
    : path_(text.substr(0, text.find('?'))),
      query_(text.find('?') == std::string_view::npos ? "" : text.substr(text.find('?') + 1)) {}

std::optional<std::string> Target::query(std::string_view name) const {
    for (const QueryParameter& parameter : query_parameters(query_)) {
        if (parameter.name == name) return query_decoded(parameter.value);
    }
    return std::nullopt;
}

std::optional<std::string> Target::query_but(std::initializer_list<std::string_view> names) const {
    for (const QueryParameter& parameter : query_parameters(query_)) {
        if (!parameter.is_credential() && std::ranges::find(names, parameter.name) == names.end())
            return parameter.name;
    }
    return std::nullopt;
}

bool Target::query_twice() const {
    std::set<std::string> names;
    for (QueryParameter& parameter : query_parameters(query_)) {
        if (!names.insert(std::move(parameter.name)).second) return true;
    }
    return false;
}

std::string Target::query_without_key() const {
    std::string kept;
    for (const QueryParameter& parameter : query_parameters(query_)) {
        if (parameter.is_credential()) continue;
        kept += kept.empty() ? '?' : '&';
        kept += parameter.text;
    }
    return kept;
}

Route route_of(const Target& target) {
    std::string_view path = target.path();
    Route route;
    const auto found = [&](Service service, std::string_view allow) {
        route.service = service;
        route.allow = allow;
        return route;
    };
    if (path == "/healthz") return found(Service::health, "GET, HEAD");
    if (path == "/readyz") return found(Service::ready, "GET, HEAD");
    if (path == "/metrics") return found(Service::metrics, "GET, HEAD");
    if (path == "/v1/notify") return found(Service::notify, "POST");
    if (path == "/v1/streams") return found(Service::create_stream, "POST");
    constexpr std::string_view streams = "/v1/streams/";
    if (path.starts_with(streams)) {
        route.stream = path.substr(streams.size());
        return found(Service::read_stream, "GET, HEAD");
    }
    std::string_view version = "/v1beta/", rest = path.substr(std::min<std::size_t>(path.size(), 1));
    bool ours = false; // it has a version, or is what clients ask for without one
    for (const std::string_view known : {"/v1beta/", "/v1alpha/", "/v1/"}) {
        if (!path.starts_with(known)) continue;
        version = known;
        rest = path.substr(known.size());
        ours = true;
        break;
    }
    for (const std::string_view known : {"models", "tunedModels", "cachedContents", "files", "openai"})
        ours = ours || rest == known || rest.starts_with(std::string(known) + "/");
    if (!ours) return route;
    if (rest == "openai/chat/completions") return found(Service::chat, "POST");
    const std::size_t colon = std::min(rest.rfind(':'), rest.size());
    const std::string_view method = rest.substr(std::min(colon + 1, rest.size()));
    if (rest.starts_with("models/") || rest.starts_with("tunedModels/")) {
        route.model = rest.substr(0, colon);
        if (method == "generateContent") return found(Service::unary, "POST");
        if (method == "streamGenerateContent") return found(Service::stream, "POST");
    }
    route.path = std::string(version) + std::string(rest) + target.query_without_key();
    return found(Service::pass, "GET, HEAD, POST, PUT, PATCH, DELETE");
}

std::string public_name(std::string_view host) {
    if (host.starts_with('[')) return {}; // IPv6
    std::string name(host.substr(0, host.find(':')));
    std::ranges::transform(name, name.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    while (name.ends_with('.')) name.pop_back();
    const std::size_t dot = name.rfind('.');
    if (dot == std::string::npos) return {};
    const std::string_view last = std::string_view(name).substr(dot + 1);
    const bool ipv4 =
        last.front() >= '0' && last.front() <= '9'; // no top-level domain begins so (URL, "ends in a number")
    return ipv4 || last == "localhost" ? std::string() : name;
}

Freshness freshness_of(std::string_view cache_control) {
    Freshness freshness;
    while (!cache_control.empty()) {
        const std::string_view item = cache_control.substr(0, cache_control.find(','));
        cache_control.remove_prefix(std::min(item.size() + 1, cache_control.size()));
        const std::string_view name = trimmed(item.substr(0, item.find('=')));
        if (same_word(name, "no-store")) freshness.no_store = true;
        if (same_word(name, "no-cache")) freshness.max_age_ms = -1;
        if (!same_word(name, "max-age") || freshness.max_age_ms < 0 || item.find('=') == std::string_view::npos)
            continue;
        const std::string_view text = trimmed(item.substr(item.find('=') + 1));
        std::int64_t seconds = 0;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
        if (error == std::errc::result_out_of_range) continue; // any age will do
        if (error != std::errc() || end != text.data() + text.size() || seconds < 0) continue;
        constexpr std::int64_t year = 365LL * 24 * 3600;
        freshness.max_age_ms = seconds == 0 ? -1 : std::min(seconds, year) * 1000;
    }
    return freshness;
}

} // namespace gcoalesce::gateway
