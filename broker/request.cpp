#include "broker/request.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/canonical_json.hpp"
#include "base/sha256.hpp"
#include "protocol/key.hpp"
#include "protocol/query.hpp"
#include "templates/template.hpp"

namespace gcoalesce {
namespace {

// The schema in a request's own generation config. One with keywords that only Gemini understands is Gemini's to judge.
void take_schema(const std::string& body, OpenRequest& request) {
    if (body.find("chema") == std::string::npos) return; // spares nearly every request the parse
    const nlohmann::json parsed = nlohmann::json::parse(body, nullptr, false);
    for (const char* config : {"generationConfig", "generation_config"}) {
        const auto found = parsed.find(config);
        if (found == parsed.end() || !found->is_object()) continue;
        for (const auto& [name, form] : {std::pair{"responseSchema", Schema::Form::response_schema},
                                         {"response_schema", Schema::Form::response_schema},
                                         {"responseJsonSchema", Schema::Form::json_schema},
                                         {"response_json_schema", Schema::Form::json_schema}}) {
            const auto schema = found->find(name);
            if (schema == found->end() || schema->is_null()) continue;
            Result<Schema> compiled = Schema::compile(schema->dump(), form);
            request.unchecked = !compiled;
            if (compiled) request.schema = std::move(*compiled);
            return;
        }
    }
}

// A call that is passed on: anything of the API, and nothing that would leave it or bring a key of its own.
Result<void> check_pass(const message::Open& open) {
    constexpr std::array<std::string_view, 5> verbs{"GET", "POST", "PUT", "PATCH", "DELETE"};
    if (std::find(verbs.begin(), verbs.end(), open.verb) == verbs.end())
        return fail(GCOALESCE_BAD_REQUEST, "expected one of GET, POST, PUT, PATCH and DELETE to be passed on");
    const std::string_view path = std::string_view(open.path).substr(0, open.path.find('?'));
    const bool version = path.starts_with("/v1beta/") || path.starts_with("/v1/") || path.starts_with("/v1alpha/");
    const bool plain = std::all_of(open.path.begin(), open.path.end(),
                                   [](char c) { return c > ' ' && c < 0x7F && c != '#' && c != '\\' && c != '"'; });
    if (!version || !plain || path.find("/.") != std::string_view::npos || path.find("%2") != std::string_view::npos ||
        path.find("//") != std::string_view::npos)
        return fail(GCOALESCE_BAD_REQUEST, "expected a path of the API such as /v1beta/models to be passed on");
    const std::vector<QueryParameter> query =
        query_parameters(std::string_view(open.path).substr(std::min(path.size() + 1, open.path.size())));
    if (std::ranges::any_of(query, &QueryParameter::is_credential))
        return fail(GCOALESCE_BAD_REQUEST, "expected no API key in a path that is passed on");
    return {};
}

} // namespace

std::uint64_t realm_number(std::string_view realm) {
    if (realm.empty()) return 0;
    Sha256 hash;
    hash.field(realm);
    const Key digest = hash.finish();
    std::uint64_t number = 0;
    std::memcpy(&number, digest.data(), sizeof number);
    return std::max<std::uint64_t>(number, 1);
}

Result<OpenRequest> prepare(const message::Open& open, std::shared_ptr<const std::string> body,
                            std::shared_ptr<const TemplateSettings> settings) {
    OpenRequest request;
    request.method = open.method;
    request.sharing = open.sharing;
    constexpr std::int64_t longest = 365LL * 24 * 3600 * 1000; // beyond which nothing is fresh anyway
    if (open.max_age_ms != 0) request.max_age = open.max_age_ms < 0 ? -1 : from_ms(std::min(open.max_age_ms, longest));
    request.no_store = open.no_store;
    request.individual_of = open.individual_of;
    request.settings = settings;
    // What one key paid for, and may see that others may not, is for those who have the key.
    if (!open.api_key.empty()) {
        if (!is_api_key(open.api_key))
            return fail(GCOALESCE_BAD_REQUEST, "expected an API key of printable ASCII characters, found another one");
        request.api_key = std::make_shared<const ApiKey>(open.api_key);
    }
    const std::string realm = request.api_key    ? realm_of_api_key(open.api_key)
                              : settings->realms ? open.realm
                                                 : std::string();
    request.realm = realm_number(realm);

    KeyParts parts;
    parts.realm = realm;
    parts.template_id = settings->id;
    parts.template_revision = settings->revision;
    parts.method = open.method;
    std::string asked;
    if (open.method == Method::pass) {
        if (const Result<void> good = check_pass(open); !good) return tl::unexpected(good.error());
        request.sharing = GCOALESCE_SHARE_NOT;
        request.no_store = true;
        request.verb = open.verb;
        request.path = open.path;
        request.model = open.path.substr(1, open.path.find('?') - 1).substr(0, 127); // what inspectors show
        asked = open.verb + " " + open.path + "\n" + *body;
        request.body = std::move(body);
    } else if (settings->file && settings->id != kDefaultTemplate) {
        if (!open.model.empty())
            return fail(GCOALESCE_BAD_REQUEST, "expected no model: template \"{}\" names it", settings->id);
        const Result<TemplateValues> values = read_variables(*settings->file, *body);
        if (!values) return tl::unexpected(values.error());
        request.model = settings->file->model;
        request.body = std::make_shared<const std::string>(render(*settings->file, *values));
        request.schema = settings->file->schema;
        asked = values->canonical;
    } else {
        Result<std::string> model = resolve_model(open.model);
        if (!model) return tl::unexpected(model.error());
        request.model = std::move(*model);
        Result<std::string> canonical = canonical_request(*body);
        if (!canonical) return tl::unexpected(canonical.error());
        asked = std::move(*canonical);
        if (open.method == Method::stream || open.method == Method::unary) take_schema(*body, request);
        request.body = std::move(body);
    }
    if (!open.explicit_key.empty()) {
        if (!settings->explicit_keys)
            return fail(GCOALESCE_BAD_REQUEST, "template \"{}\" does not let requests bring a key of their own",
                        settings->id);
        asked = open.explicit_key;
        parts.explicit_key = true;
    }
    Sha256 digest;
    digest.field(*request.body);
    request.digest = digest.finish();
    parts.model = request.model;
    parts.asked = asked;
    request.key = compute_key(parts);
    return request;
}

} // namespace gcoalesce
