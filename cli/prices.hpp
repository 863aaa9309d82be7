// A price table: what the tokens of a model cost. A small JSON file of the user's, since prices change.
#pragma once

#include <map>
#include <string>

#include "base/error.hpp"
#include "cli/usage.hpp"

namespace gcoalesce::cli {

struct TokenPrices { // of a million tokens each
    double prompt = 0, cached = 0, thoughts = 0, answer = 0;

    double of(const Tokens& tokens) const;
};

struct PriceTable {
    std::string currency;
    std::map<std::string, TokenPrices, std::less<>> models;
    std::string default_model; // of requests that name no template; "": none is known
};

//   {"currency": "JPY", "default_model": "gemini-2.5-flash",
//    "models": {"gemini-2.5-flash": {"prompt": 45, "cached": 11.25, "thoughts": 375, "answer": 375}}}
// "currency" and "models" are required; of a model "prompt" and "answer" are, "cached" is else as "prompt" and
// "thoughts" as "answer". GCOALESCE_BAD_REQUEST: the message names the file, the member and the nearest known name.
Result<PriceTable> load_prices(const std::string& path);

// The prices of the model; GCOALESCE_NOT_FOUND names the nearest.
Result<TokenPrices> prices_of(const PriceTable& table, const std::string& model);

} // namespace gcoalesce::cli
