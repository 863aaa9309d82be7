// gcoalesce estimate: what coalescing saves, by a formula or by what was counted.
#include <CLI/App.hpp>
#include <cmath>
#include <fmt/format.h>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/arguments.hpp"
#include "cli/commands.hpp"
#include "cli/inspect.hpp"
#include "cli/prices.hpp"
#include "cli/render.hpp"
#include "cli/report.hpp"
#include "cli/template_facts.hpp"
#include "cli/view/escape.hpp"
#include "cli/view/table.hpp"
#include "cli/view/terminal.hpp"
#include "cli/view/utf8.hpp"
#include "templates/template.hpp"

namespace gcoalesce::cli {
namespace {

constexpr double kWorthShipping = 0.70; // predicted reduction

constexpr const char* kFooter = R"(
  naive     = notifications x requests x cost
  coalesced = naive x (1 - rate) + notifications x requests x overhead
  savings   = naive - coalesced
  ratio     = coalesced / naive, 1 where naive is 0

From a reduction (1 - ratio) of 70 % on it is worth shipping.

--measured takes rate and cost from the segment's counters: the rate is the share of
requests that cost no call; the cost of a request that of all tokens, paid and avoided,
divided by the requests. Without --notifications and --requests it tells of the
requests that were counted. The price table is JSON, prices for a million tokens:

  {"currency": "JPY", "default_model": "gemini-2.5-flash",
   "models": {"gemini-2.5-flash":
     {"prompt": 45, "cached": 11.25, "thoughts": 375, "answer": 375}}}

"cached" is else as "prompt", "thoughts" as "answer"; "default_model" is the model of
requests that name no template.)";

constexpr const char* kWorth = "worth shipping: the predicted reduction is 70 % or more";
constexpr const char* kInstead =
    "not worth shipping as it is: the predicted reduction is below 70 %. Raise the rate first (split prompts into a "
    "template and its variables, open the window at each push, lengthen ttl_window), or use a plain cache with "
    "in-process dedup";

struct Arguments {
    std::optional<std::uint64_t> notifications, requests;
    std::optional<double> rate, cost;
    double overhead = 0;
    std::string currency; // "": the price table's, or JPY
    bool measured = false;
    std::string prices, template_id;
    bool json = false;
};

struct Measured {
    Usage usage;
    double paid = 0, avoided = 0; // money
    std::string currency;
};

struct Estimate {
    std::uint64_t notifications, requests;
    double rate, cost, overhead;
    double all() const { return static_cast<double>(notifications) * static_cast<double>(requests); }
    double naive() const { return all() * cost; }
    double coalesced() const { return naive() * (1 - rate) + all() * overhead; }
    double savings() const { return naive() - coalesced(); }
    double ratio() const { return naive() == 0 ? 1 : coalesced() / naive(); }
    bool worth_shipping() const { return 1 - ratio() >= kWorthShipping - 1e-9; } // 1 - 0.7 is no number of binary
};

double rounded(double value, double places) {
    return std::round(value * places) / places;
}

// Money as people write it, but a price below a hundredth with the digits that it has.
std::string money(double value) {
    if (value == 0 || std::abs(value) >= 0.01) return fmt::format("{:.2f}", value);
    return fmt::format("{:.6f}", value);
}

std::string model_of(const SegmentView& segment, const TemplateUsage& one, const PriceTable& table) {
    if (one.id == "default") return table.default_model;
    const std::optional<TemplateFacts> facts = template_facts(segment, one.index);
    const Result<Template> file =
        facts ? parse_template(one.id, facts->source) : fail(GCOALESCE_NOT_FOUND, "it changes at this moment");
    return file ? file->model : table.default_model;
}

Result<Measured> measure(const SegmentView& segment, const PriceTable& table, const std::string& only) {
    if (!only.empty()) {
        if (const Result<TemplateFacts> known = find_template(segment, only); !known)
            return tl::unexpected(known.error());
    }
    Measured measured;
    measured.currency = table.currency;
    for (const TemplateUsage& one : all_usage(segment)) {
        if ((!only.empty() && one.id != only) || one.usage.whole().requests == 0) continue;
        const std::string model = model_of(segment, one, table);
        if (model.empty())
            return fail(GCOALESCE_BAD_REQUEST,
                        "template \"{}\" served requests of a model that is not known: name it as \"default_model\" in "
                        "the price table",
                        one.id);
        const Result<TokenPrices> prices = prices_of(table, model);
        if (!prices)
            return fail(GCOALESCE_BAD_REQUEST, "template \"{}\": {} in the price table", one.id,
                        prices.error().message);
        measured.usage += one.usage;
        measured.paid += prices->of(one.usage.paid);
        measured.avoided += prices->of(one.usage.avoided);
    }
    if (measured.usage.whole().requests == 0)
        return fail(GCOALESCE_NOT_FOUND, "no requests have been counted yet{}",
                    only.empty() ? "" : fmt::format(" for template \"{}\"", only));
    return measured;
}

void show(const Arguments& arguments, const Estimate& estimate, const std::optional<Measured>& measured) {
    const std::string currency = !arguments.currency.empty() ? arguments.currency
                                 : measured                  ? measured->currency
                                                             : "JPY";
    const char* advice = estimate.worth_shipping() ? kWorth : kInstead;
    if (arguments.json) {
        constexpr double kMoney = 1e6;
        nlohmann::ordered_json json{{"version", 1},
                                    {"currency", currency},
                                    {"notifications", estimate.notifications},
                                    {"requests", estimate.requests},
                                    {"rate", rounded(estimate.rate, 1e6)},
                                    {"cost", rounded(estimate.cost, 1e9)},
                                    {"overhead", estimate.overhead},
                                    {"naive", rounded(estimate.naive(), kMoney)},
                                    {"coalesced", rounded(estimate.coalesced(), kMoney)},
                                    {"savings", rounded(estimate.savings(), kMoney)},
                                    {"ratio", rounded(estimate.ratio(), 1e4)},
                                    {"worth_shipping", estimate.worth_shipping()},
                                    {"advice", advice}};
        if (measured) {
            json["measured"] = to_json(measured->usage);
            json["measured"]["paid"] = rounded(measured->paid, kMoney);
            json["measured"]["avoided"] = rounded(measured->avoided, kMoney);
        }
        return write_out(json_line(json));
    }
    Table table({{"ESTIMATE"}, {escape_line(currency), Align::right}});
    table.add({"naive", money(estimate.naive())});
    table.add({"coalesced", money(estimate.coalesced())});
    table.add({"savings", money(estimate.savings())});
    table.add({"ratio", fmt::format("{:.4f}", estimate.ratio())});
    const std::size_t width = output_columns();
    std::string text = table.render(width) + "\n";
    const auto add = [&](std::string_view sentence) { text += hanging("", sentence, 0, width); };
    add(fmt::format("{} of {} each, {:.1f} % of them coalesced, {} a call",
                    counted(estimate.notifications, "notification"), counted(estimate.requests, "request"),
                    estimate.rate * 100, money(estimate.cost)));
    if (measured)
        add(fmt::format("counted: {} requests, {} calls paid; {} spent, {} spared", measured->usage.whole().requests,
                        measured->usage.calls_paid, money(measured->paid), money(measured->avoided)));
    add(advice);
    write_out(text);
}

void run_estimate(Context& context, const Arguments& arguments) {
    std::optional<Measured> measured;
    Estimate estimate{arguments.notifications.value_or(0), arguments.requests.value_or(0), arguments.rate.value_or(0),
                      arguments.cost.value_or(0), arguments.overhead};
    if (arguments.measured) {
        const Result<PriceTable> prices = load_prices(arguments.prices);
        if (!prices) return report(context, prices.error(), arguments.json);
        const std::optional<Inspection> inspected = inspect(context, arguments.json);
        if (!inspected) return;
        Result<Measured> found = measure(inspected->segment.view, *prices, arguments.template_id);
        if (!found) return report(context, found.error(), arguments.json);
        measured = std::move(*found);
        const Usage::Share whole = measured->usage.whole();
        const auto all = static_cast<double>(whole.requests);
        estimate.rate = static_cast<double>(whole.coalesced) / all;
        estimate.cost = (measured->paid + measured->avoided) / all;
        if (!arguments.notifications) {
            estimate.notifications = 1;
            estimate.requests = whole.requests;
        }
    }
    show(arguments, estimate, measured);
}

} // namespace

void add_estimate(CLI::App& app, Context& context) {
    CLI::App* command = app.add_subcommand("estimate", "what coalescing saves");
    auto arguments = std::make_shared<Arguments>();
    const CLI::Range not_negative(0.0, 1e15);
    const CLI::Range count(std::uint64_t{0}, std::uint64_t{1'000'000'000'000});
    CLI::Option* notifications = command->add_option("--notifications", arguments->notifications, "how many pushes")
                                     ->check(complaint_of_number)
                                     ->check(count);
    CLI::Option* requests =
        command->add_option("--requests", arguments->requests, "how many requests each of them causes")
            ->check(complaint_of_number)
            ->check(count);
    CLI::Option* rate = command->add_option("--rate", arguments->rate, "which share of them costs no call, 0 to 1")
                            ->check(complaint_of_number)
                            ->check(CLI::Range(0.0, 1.0));
    CLI::Option* cost = command->add_option("--cost", arguments->cost, "what one upstream call costs")
                            ->check(complaint_of_number)
                            ->check(not_negative);
    command->add_option("--overhead", arguments->overhead, "what a request costs besides (default 0)")
        ->check(complaint_of_number)
        ->check(not_negative);
    command->add_option("--currency", arguments->currency, "its name (default: the price table's, or JPY)");
    CLI::Option* measured =
        command->add_flag("--measured", arguments->measured, "take rate and cost from what the broker has counted");
    CLI::Option* prices =
        command->add_option("--prices", arguments->prices, "what tokens cost, for --measured")->needs(measured);
    command->add_option("--template", arguments->template_id, "of this template only, for --measured")
        ->type_name("ID")
        ->needs(measured);
    command->add_flag("--json", arguments->json, "one JSON object");
    for (CLI::Option* number : {notifications, requests, rate, cost, command->get_option("--overhead")})
        number->type_name("N");
    command->get_option("--currency")->type_name("NAME");
    prices->type_name("FILE");
    measured->needs(prices)->excludes(rate)->excludes(cost);
    notifications->needs(requests);
    requests->needs(notifications);
    command->footer(kFooter);
    command->callback([arguments, &context] {
        const bool whole = arguments->notifications && arguments->rate && arguments->cost;
        if (!arguments->measured && !whole)
            throw CLI::ValidationError("--notifications, --requests, --rate, --cost",
                                       "expected all of them, or --measured with --prices");
        run_estimate(context, *arguments);
    });
}

} // namespace gcoalesce::cli
