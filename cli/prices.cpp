#include "cli/prices.hpp"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/nearest.hpp"

namespace gcoalesce::cli {
namespace {

using Json = nlohmann::ordered_json;

// The members of `json`, all of them known. where: its JSON pointer.
Result<void> check_members(const Json& json, const std::string& where, std::initializer_list<const char*> names) {
    if (!json.is_object())
        return fail(GCOALESCE_BAD_REQUEST, "{}expected an object", where.empty() ? "" : where + ": ");
    const std::vector<std::string> known(names.begin(), names.end());
    for (const auto& [name, value] : json.items()) {
        if (std::ranges::find(known, name) == known.end())
            return fail(GCOALESCE_BAD_REQUEST, "{}/{}: unknown member{}", where, name, did_you_mean(name, known));
    }
    return {};
}

Result<double> price(const Json& model, const std::string& where, const char* name, const char* or_else = nullptr) {
    const auto found = model.find(name);
    if (found == model.end() && or_else != nullptr) return price(model, where, or_else);
    if (found == model.end()) return fail(GCOALESCE_BAD_REQUEST, "{}: expected a member \"{}\"", where, name);
    const double value = found->is_number() ? found->get<double>() : -1;
    if (value < 0 || !std::isfinite(value))
        return fail(GCOALESCE_BAD_REQUEST, "{}/{}: expected the price of a million tokens, 0 or more", where, name);
    return value;
}

Result<std::string> text(const Json& json, const char* name) {
    const auto found = json.find(name);
    if (found == json.end() || !found->is_string() || found->get_ref<const std::string&>().empty())
        return fail(GCOALESCE_BAD_REQUEST, "/{}: expected a text", name);
    return found->get<std::string>();
}

Result<PriceTable> parse(const Json& json) {
    if (Result<void> known = check_members(json, "", {"currency", "default_model", "models"}); !known)
        return tl::unexpected(known.error());
    PriceTable table;
    Result<std::string> currency = text(json, "currency");
    if (!currency) return tl::unexpected(currency.error());
    table.currency = std::move(*currency);
    const auto models = json.find("models");
    if (models == json.end() || !models->is_object() || models->empty())
        return fail(GCOALESCE_BAD_REQUEST, "/models: expected an object with a member for each model");
    for (const auto& [name, model] : models->items()) {
        const std::string where = "/models/" + name;
        if (Result<void> known = check_members(model, where, {"prompt", "cached", "thoughts", "answer"}); !known)
            return tl::unexpected(known.error());
        const Result<double> prompt = price(model, where, "prompt");
        const Result<double> cached = price(model, where, "cached", "prompt");
        const Result<double> answer = price(model, where, "answer");
        const Result<double> thoughts = price(model, where, "thoughts", "answer");
        for (const Result<double>* one : {&prompt, &cached, &answer, &thoughts}) {
            if (!*one) return tl::unexpected(one->error());
        }
        table.models.emplace(name, TokenPrices{*prompt, *cached, *thoughts, *answer});
    }
    if (json.contains("default_model")) {
        Result<std::string> model = text(json, "default_model");
        if (!model) return tl::unexpected(model.error());
        if (const Result<TokenPrices> known = prices_of(table, *model); !known)
            return fail(GCOALESCE_BAD_REQUEST, "/default_model: {}", known.error().message);
        table.default_model = std::move(*model);
    }
    return table;
}

} // namespace

double TokenPrices::of(const Tokens& tokens) const {
    return (static_cast<double>(tokens.prompt) * prompt + static_cast<double>(tokens.cached) * cached +
            static_cast<double>(tokens.thoughts) * thoughts + static_cast<double>(tokens.answer) * answer) /
           1e6;
}

Result<PriceTable> load_prices(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    const std::string contents{std::istreambuf_iterator<char>(file), {}};
    if (!file) return fail(GCOALESCE_BAD_REQUEST, "{}: {}", path, std::strerror(errno));
    const Json json = Json::parse(contents, nullptr, false);
    if (json.is_discarded()) return fail(GCOALESCE_BAD_REQUEST, "{}: expected JSON in UTF-8", path);
    Result<PriceTable> table = parse(json);
    if (!table) return fail(GCOALESCE_BAD_REQUEST, "{}: {}", path, table.error().message);
    return table;
}

Result<TokenPrices> prices_of(const PriceTable& table, const std::string& model) {
    const auto found = table.models.find(model);
    if (found != table.models.end()) return found->second;
    std::vector<std::string> known;
    for (const auto& [name, prices] : table.models) known.push_back(name);
    return fail(GCOALESCE_NOT_FOUND, "there is no price of model \"{}\"{}", model, did_you_mean(model, known));
}

} // namespace gcoalesce::cli
