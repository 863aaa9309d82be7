// The main job as `gcoalesce demo` shows it.
#include <catch2/catch.hpp>
#include <csignal>
#include <filesystem>

#include "tests/integration/cli_support.hpp"
#include "tests/support/tls_front.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;

namespace {

// An empty TMPDIR, in which the demo must leave nothing.
class Place {
  public:
    Place() {
        std::string path = (std::filesystem::temp_directory_path() / "gcoalesce-test-XXXXXX").string();
        if (::mkdtemp(path.data()) == nullptr) throw std::runtime_error("mkdtemp");
        path_ = path;
    }
    ~Place() { std::filesystem::remove_all(path_); }
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;

    SpawnOptions options() const {
        SpawnOptions options;
        options.env = {"TMPDIR=" + path_};
        return options;
    }
    bool empty() const { return std::filesystem::is_empty(path_); }
    std::string only_entry() const { return std::filesystem::directory_iterator(path_)->path().string(); }

  private:
    std::string path_;
};

Ran demo(std::vector<std::string> arguments, const Place& place) {
    arguments.insert(arguments.begin(), {gcoalesce_program(), "demo"});
    return run(std::move(arguments), place.options());
}

void check_herd(const nlohmann::json& json, int requests, std::size_t processes) {
    CHECK(json["requests"] == requests);
    CHECK(json["upstream_calls"] == 1);
    CHECK(json["whole"] == requests);
    CHECK(json["different_answers"] == 1);
    CHECK(json["statuses"]["started"] == 1);
    CHECK(json["statuses"].value("joined", 0) + json["statuses"].value("fresh", 0) == requests - 1);
    CHECK_FALSE(json["text"].get<std::string>().empty());
    REQUIRE(json["processes"].size() == processes);
    int sum = 0;
    for (const auto& process : json["processes"]) {
        sum += process["requests"].get<int>();
        CHECK(process["event_bytes"] > 0);
        CHECK(process["first_event_min_ms"] <= process["first_event_median_ms"]);
        CHECK(process["first_event_median_ms"] <= process["first_event_max_ms"]);
    }
    CHECK(sum == requests);
}

} // namespace

TEST_CASE("T01: 100 requests from 8 processes at once are one upstream call and 100 equal answers") {
    const Place place;
    const Ran ran = demo({"--json"}, place);
    INFO(ran.err);
    CHECK(ran.code == 0);
    CHECK(ran.err.empty());
    check_herd(ran.json(), 100, 8);
    CHECK(place.empty());
}

TEST_CASE("demo tells a person the same as a table") {
    const Place place;
    const Ran ran = demo({"--requests", "10", "--processes", "3"}, place);
    CHECK(ran.code == 0);
    const std::vector<std::string> lines = ran.lines();
    REQUIRE(lines.size() >= 10);
    CHECK(lines[0].starts_with("PROCESS  REQUESTS  FIRST EVENT: MIN"));
    CHECK(lines[4].starts_with("all"));
    CHECK(ran.out.find("upstream calls    1\nwhole answers     10 of 10\ndifferent answers 1\n") != std::string::npos);
}

TEST_CASE("demo has no more processes than requests, and one is enough") {
    const Place place;
    check_herd(demo({"--json", "--requests", "1", "--processes", "5"}, place).json(), 1, 1);
}

TEST_CASE("the same through TLS and HTTP/2") {
    GCOALESCE_REQUIRE_TLS_FRONT();
    const Sim sim({"--latency", "200ms", "--events", "24", "--gap", "20ms"});
    const TlsFront front(sim.url());
    const Place place;
    const Ran ran = demo({"--json", "--upstream", front.url(), "--ca-file", front.ca_file()}, place);
    INFO(ran.err);
    CHECK(ran.code == 0);
    check_herd(ran.json(), 100, 8);
    bool http2 = false;
    for (const TlsFront::Request& request : front.requests()) http2 = http2 || request.protocol == "HTTP/2.0";
    CHECK(http2);
}

TEST_CASE("demo fails, and says why, when upstream does or cannot be reached") {
    const Sim sim({"--status", "403"});
    const Place place;
    const Ran refused = demo({"--upstream", sim.url(), "--requests", "4", "--processes", "2"}, place);
    CHECK(refused.code == 1);
    CHECK(refused.out.find("whole answers     0 of 4") != std::string::npos);
    CHECK_FALSE(refused.err.empty());
    const Ran nobody = demo({"--upstream", "http://127.0.0.1:1"}, place);
    CHECK(nobody.code == 1);
    CHECK(nobody.says("is it a `gcoalesce sim`?"));
    CHECK(place.empty());
}

TEST_CASE("demo interrupted in its midst leaves nothing behind") {
    for (const int signal : {SIGINT, SIGTERM}) {
        const Sim sim({"--hang-after", "1"}); // it would wait for ever
        const Place place;
        Process process({gcoalesce_program(), "demo", "--upstream", sim.url()}, place.options());
        REQUIRE(eventually([&] { return nlohmann::json::parse(sim.calls())["calls"] == 1; }));
        const Instance instance{"demo", place.only_entry()};
        const std::string segment = "/dev/shm" + instance.segment_name(::geteuid());
        CHECK(std::filesystem::exists(segment));
        process.signal(signal);
        CHECK(process.wait() == 128 + signal);
        CHECK(place.empty());
        CHECK_FALSE(std::filesystem::exists(segment));
    }
}
