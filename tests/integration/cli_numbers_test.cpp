// stats, estimate and advise: what requests cost and spared, and whether that is worth it.
#include <catch2/catch.hpp>
#include <csignal>
#include <cstdio>
#include <fcntl.h>
#include <regex>
#include <sstream>
#include <sys/mman.h>
#include <sys/stat.h>

#include "tests/integration/cli_support.hpp"
#include "tests/support/exposition.hpp"
#include "tests/support/terminal.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;

namespace {

constexpr const char* kWeather = R"({"model": "gemini-2.5-flash", "prompt": "The weather in {{city}}.",
    "variables": {"city": {}}})";

// A broker in this process that has counted what the test wants.
struct Counted {
    ScratchInstance directory;
    FakeBroker broker{*directory};

    // 20 requests within 5 s of a push, 10 later.
    void fill() {
        broker.with_store([](Store& store) {
            const Nanos now = system_clock().monotonic();
            store.set_window(0, now + 3600 * kSecond, now);
            store.count_request(0, GCOALESCE_STARTED, false, 2);
            store.count_request(0, GCOALESCE_JOINED, true, 15);
            store.count_request(0, GCOALESCE_FRESH, true, 3);
            store.set_window(0, 0, now - 12 * kSecond);
            store.count_request(0, GCOALESCE_STARTED, false, 1);
            store.count_request(0, GCOALESCE_SNAPSHOT, true, 2);
            store.count_request(0, GCOALESCE_INDIVIDUAL, true, 1);
            store.count_request(0, GCOALESCE_BYPASS, false, 6);
            store.count_request(0, GCOALESCE_RESUMED, false, 10);
            store.count_request(0, GCOALESCE_OPENING, false, 5);
            store.count(0, TemplateCounter::upstream_calls, 10);
            store.count(0, TemplateCounter::prompt_tokens_paid, 1000);
            store.count(0, TemplateCounter::cached_tokens_paid, 400);
            store.count(0, TemplateCounter::thought_tokens_paid, 30);
            store.count(0, TemplateCounter::answer_tokens_paid, 200);
            store.count(0, TemplateCounter::prompt_tokens_avoided, 9000);
            store.count(0, TemplateCounter::cached_tokens_avoided, 3600);
            store.count(0, TemplateCounter::thought_tokens_avoided, 270);
            store.count(0, TemplateCounter::answer_tokens_avoided, 1800);
            for (int i = 0; i < 100; ++i) store.count_join_time(0, i < 98 ? 100'000 : 3'000'000);
        });
    }
    Ran run(std::vector<std::string> arguments, SpawnOptions options = {}) const {
        return test::run(command(*directory, std::move(arguments)), std::move(options));
    }
};

// The first paragraphs, as they stand.
std::string paragraphs(const std::string& text, int count) {
    std::size_t end = 0;
    for (int i = 0; i < count && end != std::string::npos; ++i) end = text.find("\n\n", end + 1);
    return text.substr(0, end + 1);
}

Ran offline(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), gcoalesce_program());
    return run(std::move(arguments));
}

const std::vector<std::string> kPlan{"estimate", "--notifications", "14", "--requests", "800", "--rate",
                                     "0.71",     "--cost",          "4.2"};

std::vector<std::string> with(std::vector<std::string> arguments, std::vector<std::string> more) {
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
}

} // namespace

// ---- stats ---------------------------------------------------------------------------------------------------------

TEST_CASE(
    "T100: stats shows requests by status, calls and tokens paid and avoided, and shares by time since the push") {
    Counted counted;
    counted.fill();
    const Ran ran = counted.run({"stats"});
    CHECK(ran.code == 0);
    CHECK(ran.err.empty());
    CHECK(paragraphs(ran.out, 4) ==
          R"(TEMPLATE  STARTED  JOINED  FRESH  SNAPSHOT  RESUMED  INDIVIDUAL  BYPASS  REFUSED  RESUMED SHARE
default         3      15      3         2       10           1       6        5          25.0%

TEMPLATE  CALLS PAID  AVOIDED  COALESCED  0-5 S SINCE PUSH  5-10 S      10-30 S  30+ S
default           10       21      70.0%       90.0% of 20       -  30.0% of 10      -

TEMPLATE  TOKENS   PROMPT  CACHED  THOUGHTS  ANSWER
default   paid       1000     400        30     200
default   avoided    9000    3600       270    1800

TEMPLATE  LATENCY      COUNT   MEAN   P50    P90    P99
default   first event      0      -     -      -      -
default   join           100  158us  97us  123us  3.1ms
)");
    Terminal terminal(command(*counted.directory, {"stats"}), 40, 24); // no number is left out
    CHECK(terminal.wait() == 0);
    const std::string tall = std::regex_replace(terminal.written(), std::regex("\r\n"), "\n");
    CHECK(paragraphs(tall, 1) == R"(TEMPLATE       default
STARTED              3
JOINED              15
FRESH                3
SNAPSHOT             2
RESUMED             10
INDIVIDUAL           1
BYPASS               6
REFUSED              5
RESUMED SHARE    25.0%
)");
    CHECK(tall.find("0-5 S SINCE PUSH  90.0% of 20\n") != std::string::npos);
    std::istringstream lines(tall);
    for (std::string line; std::getline(lines, line);)
        CHECK(std::ranges::count_if(line, [](char c) { return (c & 0xC0) != 0x80; }) <= 40);
}

TEST_CASE("T100: stats --json tells the same for each template and for all of them") {
    Counted counted;
    counted.fill();
    const auto json = counted.run({"stats", "--json"}).json();
    for (const auto& usage : {json.at("total"), json.at("templates").at(0)}) {
        CHECK(usage.at("requests") == nlohmann::json::parse(R"({"started": 3, "joined": 15, "fresh": 3, "snapshot": 2,
            "resumed": 10, "individual": 1, "bypass": 6, "refused": 5})"));
        CHECK(usage.at("served") == 40);
        CHECK(usage.at("resumed_ratio") == 0.25);
        CHECK(usage.at("calls_paid") == 10);
        CHECK(usage.at("calls_avoided") == 21);
        CHECK(usage.at("coalesced_ratio") == 0.7);
        CHECK(usage.at("tokens_paid") ==
              nlohmann::json::parse(R"({"prompt": 1000, "cached": 400, "thoughts": 30, "answer": 200})"));
        CHECK(usage.at("tokens_avoided") ==
              nlohmann::json::parse(R"({"prompt": 9000, "cached": 3600, "thoughts": 270, "answer": 1800})"));
        CHECK(usage.at("since_push") == nlohmann::json::parse(R"([
            {"seconds": "0-5", "requests": 20, "coalesced": 18, "coalesced_ratio": 0.9},
            {"seconds": "5-10", "requests": 0, "coalesced": 0, "coalesced_ratio": null},
            {"seconds": "10-30", "requests": 10, "coalesced": 3, "coalesced_ratio": 0.3},
            {"seconds": "30+", "requests": 0, "coalesced": 0, "coalesced_ratio": null}])"));
    }
    CHECK(json.at("templates").at(0).at("join").at("p90_us") <= 128);
    CHECK(json.at("snapshots") ==
          nlohmann::json::parse(R"({"kept": 0, "kept_bytes": 0, "degraded": false, "reason": null})"));
}

TEST_CASE("stats --prometheus is a page that Prometheus takes, with the same numbers and the segment's help") {
    Counted counted;
    counted.fill();
    const Ran ran = counted.run({"stats", "--prometheus"});
    CHECK(ran.code == 0);
    CHECK(ran.err.empty());
    const Exposition page = read_exposition(ran.out);
    CHECK(page.faults == std::vector<std::string>{});
    const auto at = [&](const std::string& name) { return page.samples.count(name) ? page.samples.at(name) : -1; };
    CHECK(at("gcoalesce_up") == 1);
    CHECK(at("gcoalesce_requests_joined_total") == 15);
    CHECK(at("gcoalesce_clients_attached") == 0);
    CHECK(at(R"(gcoalesce_template_requests_total{template="default",status="joined"})") == 15);
    CHECK(at(R"(gcoalesce_template_requests_total{template="default",status="refused"})") == 5);
    CHECK(at(R"(gcoalesce_template_calls_paid_total{template="default"})") == 10);
    CHECK(at(R"(gcoalesce_template_calls_avoided_total{template="default"})") == 21);
    CHECK(at(R"(gcoalesce_template_tokens_avoided_total{template="default",kind="cached"})") == 3600);
    CHECK(at(R"(gcoalesce_template_push_requests_total{template="default",seconds="10-30"})") == 10);
    CHECK(at(R"(gcoalesce_template_push_coalesced_total{template="default",seconds="10-30"})") == 3);
    CHECK(at(R"(gcoalesce_template_join_seconds_bucket{template="default",le="0.000128"})") == 98);
    CHECK(at(R"(gcoalesce_template_join_seconds_bucket{template="default",le="+Inf"})") == 100);
    CHECK(at(R"(gcoalesce_template_join_seconds_count{template="default"})") == 100);
    CHECK(at(R"(gcoalesce_template_join_seconds_sum{template="default"})") == Approx(0.0158));
    CHECK(ran.out.find("# HELP gcoalesce_requests_joined_total requests that joined a running stream\n"
                       "# TYPE gcoalesce_requests_joined_total counter\n") != std::string::npos);
    CHECK(counted.run({"stats", "--prometheus", "--json"}).code == 2);

    counted.broker.die();
    const Ran dead = counted.run({"stats", "--prometheus"});
    CHECK(dead.code == 3);
    CHECK(read_exposition(dead.out).samples.at("gcoalesce_up") == 0);
}

TEST_CASE("the page that stats --prometheus prints is read by Prometheus's own client library") {
    if (run({"sh", "-c", "/usr/bin/python3 -c 'import prometheus_client'"}).code != 0) {
        std::puts("SKIPPED: python3-prometheus-client is not installed");
        return;
    }
    Counted counted;
    counted.fill();
    SpawnOptions page;
    page.input = counted.run({"stats", "--prometheus"}).out;
    const Ran read = run({"/usr/bin/python3", "-c", R"(
import sys
from prometheus_client.parser import text_string_to_metric_families
for family in text_string_to_metric_families(sys.stdin.read()):
    assert family.documentation and family.type in ("counter", "gauge", "histogram") and family.samples, family
    print(family.name)
)"},
                         page);
    CHECK(read.err == "");
    CHECK(read.code == 0);
    CHECK(read.lines().size() > 50);
}

TEST_CASE("texts of a segment that would break the page do not") {
    Counted counted;
    const UniqueFd fd(::shm_open(counted.directory.segment_name().c_str(), O_RDWR | O_CLOEXEC, 0));
    struct stat file {};
    REQUIRE(::fstat(fd.get(), &file) == 0);
    const Mapping mapping = Mapping::of(fd.get(), static_cast<std::size_t>(file.st_size), true).value();
    auto& header = *reinterpret_cast<Header*>(mapping.data());
    auto* counters = reinterpret_cast<CounterEntry*>(mapping.data() + header.counters.offset);
    counters[0].text.name.assign("two words-and é");
    counters[0].text.help.assign("a \\ and\na line");
    counters[1].text.name.assign("requests_fresh"); // there is one already
    header.version.assign("1\"\n\\");
    const Ran ran = counted.run({"stats", "--prometheus"});
    CHECK(read_exposition(ran.out).faults == std::vector<std::string>{});
    CHECK(ran.out.find("# HELP gcoalesce_two_words_and____total a \\\\ and\\na line\n") != std::string::npos);
    CHECK(ran.out.find(R"(version="1\"\n\\")") != std::string::npos);
}

TEST_CASE("a snapshot store that fails is what stats begins with, and why") {
    const TemporaryFile no_directory("a file where a directory should be");
    const World world({"--state-dir", no_directory.path()});
    CHECK(world.run({"ask", "hello"}).code == 0); // requests go on
    REQUIRE(eventually([&] { return world.run({"stats", "--json"}).json().at("snapshots").at("degraded") == true; }));
    const Ran ran = world.run({"stats"});
    CHECK(ran.code == 0);
    REQUIRE(!ran.lines().empty());
    CHECK(ran.lines()[0].starts_with("SNAPSHOTS DEGRADED: "));
    CHECK(ran.lines()[0].find(no_directory.path()) != std::string::npos);
    const auto json = world.run({"stats", "--json"}).json();
    CHECK(json.at("snapshots").at("reason").get<std::string>() == ran.lines()[0].substr(20));
    CHECK(read_exposition(world.run({"stats", "--prometheus"}).out).samples.at("gcoalesce_snapshots_degraded") == 1);
}

TEST_CASE("T100: the ledger goes on in the next broker, whether the last one stopped or was killed") {
    const TemplateDirectory templates, state;
    templates.write("weather.json", kWeather);
    const Sim sim;
    const ScratchInstance instance;
    const std::vector<std::string> options{"--state-dir", state.path(), "--templates", templates.path(),
                                           "--ttl-idle",  "10min",      "--kv-ttl",    "0s"};
    const auto ask = [&](const std::string& city) {
        CHECK(run(command(*instance, {"ask", "-t", "weather", "--var", "city=" + city})).code == 0);
    };
    const auto usage = [&] {
        const auto json = run(command(*instance, {"stats", "--json"})).json();
        for (const auto& one : json.at("templates")) {
            if (one.at("id") == "weather") return one;
        }
        return nlohmann::json();
    };
    nlohmann::json before;
    {
        Broker broker(*instance, sim.url(), options);
        for (const char* city : {"Tokyo", "Tokyo", "Tokyo", "Rome"}) ask(city);
        REQUIRE(eventually([&] { return usage().at("served") == 4; })); // fast joins are counted at the next sweep
        before = usage();
        CHECK(before.at("calls_paid") == 2);
        CHECK(before.at("calls_avoided") == 2);
        CHECK(before.at("tokens_paid").at("answer") > 0);
        CHECK(broker.stop() == 0);
    }
    {
        Broker broker(*instance, sim.url(), options);
        REQUIRE(eventually([&] { return usage().at("served") == 4; }));
        CHECK(usage().at("tokens_avoided") == before.at("tokens_avoided"));
        ask("Oslo");
        REQUIRE(eventually([&] { return usage().at("served") == 5; }));
        broker.process().signal(SIGKILL);
        CHECK(broker.process().wait() == 128 + SIGKILL);
    }
    const Broker broker(*instance, sim.url(), options);
    REQUIRE(eventually([&] { return usage().at("served") == 5; }));
    CHECK(usage().at("calls_paid") == 3);
    CHECK(usage().at("tokens_paid").at("answer") > before.at("tokens_paid").at("answer"));
}

TEST_CASE("show says of an answer from disk that it is older than its stream here, and how long it took it does not") {
    const TemplateDirectory state;
    const Sim sim;
    const ScratchInstance instance;
    const std::vector<std::string> options{"--state-dir", state.path(), "--ttl-idle", "10min"};
    {
        Broker broker(*instance, sim.url(), options);
        CHECK(run(command(*instance, {"ask", "keep me"})).code == 0);
        CHECK(broker.stop() == 0);
    }
    const Broker broker(*instance, sim.url(), options);
    const Ran asked = run(command(*instance, {"ask", "--status", "keep me"}));
    CHECK(asked.says("snapshot"));
    const auto keys = run(command(*instance, {"keys", "--json"})).json().at("keys");
    REQUIRE(keys.size() == 1);
    CHECK(keys[0].at("duration_ms").is_null());
    const Ran shown = run(command(*instance, {"show", keys[0].at("key").get<std::string>()}));
    CHECK(shown.code == 0);
    CHECK(shown.out.find("before it was read from disk") != std::string::npos);
    const Ran log = run(command(*instance, {"log", "--filter", "kind=started,restored"}));
    CHECK(log.lines().size() == 1);
    CHECK(log.out.find("  restored ") != std::string::npos);
    CHECK(log.out.ends_with("from disk\n"));
    CHECK(shown.out.find("none yet") == std::string::npos);
}

TEST_CASE("T101: leader, follower, hit, resumer and bypass are each told how they were served, and counted so") {
    World world({}, {"--hold-after", "1", "--events", "4"});
    const auto status = [&](const Process& process) { return process.err().substr(0, process.err().find(',')); };
    const auto ask = [&](std::vector<std::string> more) {
        std::vector<std::string> arguments{"ask", "--status", "--events"};
        arguments.insert(arguments.end(), more.begin(), more.end());
        return world.command(arguments);
    };
    Process leader(ask({"hello"}));
    leader.read_line(); // the first event is there, and the rest is held back
    Process follower(ask({"hello"}));
    follower.read_line();
    const std::string id = world.run({"keys", "--json"}).json().at("keys").at(0).at("stream_id");
    Process resumer(ask({"--resume", id + ".1"}));
    REQUIRE(eventually([&] { return world.broker().counted(Counter::resumed_running) == 1; }));
    world.sim().release();
    Process hit(ask({"hello"}));
    Process unary(world.command({"ask", "--status", "--no-stream", "hello"})); // another method, another answer
    Process bypass(ask({"--bypass", "hello"}));
    for (Process* process : {&leader, &follower, &resumer, &hit, &unary, &bypass}) CHECK(process->wait() == 0);
    CHECK(status(leader) == "gcoalesce: started");
    CHECK(status(follower) == "gcoalesce: joined");
    CHECK(status(resumer) == "gcoalesce: resumed");
    CHECK((status(hit) == "gcoalesce: fresh" || status(hit) == "gcoalesce: joined")); // as the rest of it came
    CHECK(status(unary) == "gcoalesce: started");
    CHECK(status(bypass) == "gcoalesce: bypass");
    const auto requests = [&] { return world.run({"stats", "--json"}).json().at("total").at("requests"); };
    REQUIRE(eventually([&] { // those that joined by themselves are counted at the next sweep
        const auto all = requests();
        return all.at("joined").get<int>() + all.at("fresh").get<int>() == 2;
    }));
    CHECK(requests().at("started") == 2);
    CHECK(requests().at("resumed") == 1);
    CHECK(requests().at("bypass") == 1);
    CHECK(world.run({"stats", "--json"}).json().at("total").at("calls_paid") == 3);
    CHECK(world.calls() == 3);
}

// ---- estimate ------------------------------------------------------------------------------------------------------

TEST_CASE("estimate tells what coalescing saves, in the figures of the formula") {
    const Ran ran = offline(with(kPlan, {"--overhead", "0.00015"}));
    CHECK(ran.code == 0);
    CHECK(ran.err.empty());
    CHECK(ran.out == R"(ESTIMATE        JPY
naive      47040.00
coalesced  13643.28
savings    33396.72
ratio        0.2900

14 notifications of 800 requests each, 71.0 % of them coalesced, 4.20 a call
worth shipping: the predicted reduction is 70 % or more
)");
    const auto json = offline(with(kPlan, {"--overhead", "0.00015", "--json"})).json();
    CHECK(json.at("naive").dump() == "47040.0");
    CHECK(json.at("coalesced").dump() == "13643.28");
    CHECK(json.at("savings").dump() == "33396.72");
    CHECK(json.at("ratio").dump() == "0.29");
    CHECK(json.at("currency") == "JPY");
    CHECK(json.at("worth_shipping") == true);

    const auto free = offline(with(kPlan, {"--json", "--currency", "EUR"})).json();
    CHECK(free.at("coalesced").dump() == "13641.6");
    CHECK(free.at("savings").dump() == "33398.4");
    CHECK(free.at("ratio").dump() == "0.29");
    CHECK(free.at("currency") == "EUR");
}

TEST_CASE("estimate of nothing has the ratio 1, and 70 % is the least reduction that is worth shipping") {
    const auto estimate = [](const std::string& requests, const std::string& rate) {
        return offline({"estimate", "--notifications", "1", "--requests", requests, "--rate", rate, "--cost", "1",
                        "--json"})
            .json();
    };
    CHECK(estimate("0", "0.71").at("ratio") == 1);
    CHECK(estimate("0", "0.71").at("worth_shipping") == false);
    CHECK(estimate("100", "0.7").at("worth_shipping") == true);
    CHECK(estimate("100", "0.6999").at("worth_shipping") == false);
    const Ran ran =
        offline({"estimate", "--notifications", "1", "--requests", "10", "--rate", "0.5", "--cost", "0.0001"});
    CHECK(ran.out == R"(ESTIMATE        JPY
naive      0.001000
coalesced  0.000500
savings    0.000500
ratio        0.5000

1 notification of 10 requests each, 50.0 % of them coalesced, 0.000100 a call
not worth shipping as it is: the predicted reduction is below 70 %. Raise the rate first (split prompts into a template and its variables, open the window at each push, lengthen ttl_window), or use a plain cache with in-process dedup
)");
}

TEST_CASE("estimate --measured takes rate and tokens from the segment, and prices from a table") {
    Counted counted;
    counted.fill();
    const TemporaryFile prices(R"({"currency": "USD", "default_model": "flash",
        "models": {"flash": {"prompt": 100, "cached": 10, "thoughts": 200, "answer": 1000}}})");
    const Ran ran = counted.run({"estimate", "--measured", "--prices", prices.path()});
    CHECK(ran.code == 0);
    CHECK(ran.err.empty());
    // Paid: (1000 x 100 + 400 x 10 + 30 x 200 + 200 x 1000) / 1,000,000 = 0.31; avoided: nine times that.
    CHECK(ran.out == R"(ESTIMATE      USD
naive        3.10
coalesced    0.93
savings      2.17
ratio      0.3000

1 notification of 30 requests each, 70.0 % of them coalesced, 0.10 a call
counted: 30 requests, 10 calls paid; 0.31 spent, 2.79 spared
worth shipping: the predicted reduction is 70 % or more
)");
    const auto json = counted
                          .run({"estimate", "--measured", "--prices", prices.path(), "--notifications", "10",
                                "--requests", "300", "--json"})
                          .json();
    CHECK(json.at("naive").get<double>() == Approx(310));
    CHECK(json.at("rate") == 0.7);
    CHECK(json.at("measured").at("paid") == 0.31);
    CHECK(json.at("measured").at("avoided") == 2.79);
    CHECK(json.at("measured").at("calls_avoided") == 21);
}

TEST_CASE("estimate names what is wrong with its numbers or with the price table") {
    const auto refused = [](const std::vector<std::string>& arguments, const std::string& why) {
        const Ran ran = offline(arguments);
        CHECK(ran.code == 2);
        CHECK(ran.out.empty());
        CHECK(ran.err.find(why) != std::string::npos);
    };
    refused({"estimate"},
            "--notifications, --requests, --rate, --cost: expected all of them, or --measured with --prices");
    refused({"estimate", "--measured"}, "--prices");
    refused(with(kPlan, {"--overhead", "-1"}), "--overhead");
    refused({"estimate", "--notifications", "1", "--requests", "1", "--rate", "71", "--cost", "1"}, "--rate");
    refused(with(kPlan, {"--prices", "prices.json"}), "--measured");
    refused(with(kPlan, {"--curency", "EUR"}), "unknown option \"--curency\"; did you mean \"--currency\"?");

    Counted counted;
    const auto with_prices = [&](const std::string& text) {
        const TemporaryFile file(text);
        Ran ran = counted.run({"estimate", "--measured", "--prices", file.path()});
        CHECK(ran.out.empty());
        const std::size_t at = ran.err.find(file.path());
        return at == std::string::npos ? ran.err : ran.err.substr(at + file.path().size());
    };
    CHECK(with_prices("{") == ": expected JSON in UTF-8\n");
    CHECK(with_prices(R"({"currency": "JPY", "model": {}})") == ": /model: unknown member; did you mean \"models\"?\n");
    CHECK(with_prices(R"({"currency": "JPY", "models": {"a": {"prompt": 1, "answr": 2}}})") ==
          ": /models/a/answr: unknown member; did you mean \"answer\"?\n");
    CHECK(with_prices(R"({"currency": "JPY", "models": {"a": {"prompt": 1}}})") ==
          ": /models/a: expected a member \"answer\"\n");
    CHECK(with_prices(R"({"currency": "JPY", "models": {"a": {"prompt": -1, "answer": 1}}})") ==
          ": /models/a/prompt: expected the price of a million tokens, 0 or more\n");
    const std::string good = R"({"currency": "JPY", "models": {"a": {"prompt": 1, "answer": 1}}})";
    CHECK(with_prices(good) == "gcoalesce: no requests have been counted yet\n");
    counted.fill();
    CHECK(with_prices(good) == "gcoalesce: template \"default\" served requests of a model that is not known: name it "
                               "as \"default_model\" in the price table\n");
}

// ---- advise --------------------------------------------------------------------------------------------------------

TEST_CASE("advise says coalesce where all four steps hold, and a plain cache where one does not") {
    const std::vector<std::string> yes{"advise",      "--identical", "50",      "--templates", "yes",
                                       "--streaming", "yes",         "--spend", "10001"};
    const Ran ran = offline(yes);
    CHECK(ran.code == 0);
    CHECK(ran.out == R"(STEP  HOLDS  QUESTION                                             FOUND
   1  yes    50 or more identical requests within 10 s of a push  50
   2  yes    prompts are split into a template and variables      yes
   3  yes    answers are streamed                                 yes
   4  yes    the monthly spend is above the threshold             10001.00 JPY a month

coalesce: all four steps hold
)");
    CHECK(offline(with(yes, {"--json"})).json().at("advice") == "coalesce");
    const std::pair<std::size_t, std::string> worse[] = {{2, "49"}, {4, "no"}, {6, "no"}, {8, "10000"}};
    for (const auto& [which, value] : worse) {
        std::vector<std::string> arguments = with(yes, {"--json"});
        arguments[which] = value;
        const auto json = offline(arguments).json();
        CHECK(json.at("advice") == "cache");
        CHECK(json.at("steps").at(which / 2 - 1).at("holds") == false);
    }
    CHECK(offline(with(yes, {"--threshold", "20000"}))
              .out.ends_with("do not coalesce: use a plain cache with in-process dedup\n"));
    CHECK(offline(with(yes, {"--threshold", "5", "--currency", "USD"})).out.find("10001.00 USD a month") !=
          std::string::npos);
}

TEST_CASE("advise wants an answer to each step") {
    const Ran none = offline({"advise", "--identical", "50"});
    CHECK(none.code == 2);
    CHECK(none.err.find("--templates: expected an answer to this step, or --measured") != std::string::npos);
    CHECK(offline({"advise", "--templates", "maybe"}).code == 2);
}

TEST_CASE("advise --measured answers by the segment what it can") {
    Counted counted;
    const std::vector<std::string> measured{"advise", "--measured", "--spend", "20000"};
    const Ran idle = counted.run(measured);
    CHECK(idle.code == 2);
    CHECK(idle.says("--identical: expected an answer to this step: no stream of the last push is there any more"));
    counted.fill();
    counted.broker.with_store([](Store& store) {
        const Nanos now = system_clock().monotonic();
        store.set_window(0, now + 3600 * kSecond, now - kSecond);
        StreamOpening opening;
        opening.stream_id = 5;
        opening.model = "gemini-2.5-flash";
        const StreamRef stream = store.open(opening, true).value();
        const_cast<Slot&>(store.slot(stream.slot)).joins = 60;
    });
    const Ran ran = counted.run(measured);
    CHECK(ran.code == 0);
    CHECK(ran.out == R"(STEP  HOLDS  QUESTION                                             FOUND
   1  yes    50 or more identical requests within 10 s of a push  61
   2  no     prompts are split into a template and variables      0.0 % of 40 requests name a template
   3  yes    answers are streamed                                 1 of 1 answers are streamed
   4  yes    the monthly spend is above the threshold             20000.00 JPY a month

do not coalesce: use a plain cache with in-process dedup
)");
}
