// Brokers that are killed, or told to go, and what their readers get from the next one.

#include <algorithm>
#include <array>
#include <atomic>
#include <catch2/catch.hpp>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "tests/chaos/client.hpp"
#include "tests/chaos/own_shm.hpp"
#include "tests/support/broker.hpp"
#include "tests/support/sim.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;

namespace {

constexpr std::uint64_t kEvents = 12;
constexpr std::int64_t kWatchdogMs = 60'000;

// An instance with a directory for its snapshots.
struct Place {
    ScratchInstance instance;
    std::string state = instance->runtime_dir + "/state";

    std::vector<std::string> options(std::vector<std::string> more = {}) const {
        more.insert(more.end(), {"--state-dir", state});
        return more;
    }
    // Files of ours in /dev/shm, and sockets in the runtime directory.
    std::uint64_t segments() const {
        std::uint64_t count = 0;
        for (const auto& file : std::filesystem::directory_iterator("/dev/shm"))
            count += file.path().filename().string().find(instance.segment_name().substr(1)) != std::string::npos;
        return count;
    }
    std::uint64_t sockets() const {
        std::uint64_t count = 0;
        for (const auto& file : std::filesystem::directory_iterator(instance->runtime_dir)) count += file.is_socket();
        return count;
    }
};

// What one reader got, with what tells streams apart: the responseId that stands in each event.
struct Got {
    gcoalesce_code code = GCOALESCE_OK;
    gcoalesce_ending ending{};
    gcoalesce_status status = GCOALESCE_OPENING;
    StreamId stream_id = 0;
    std::uint64_t events = 0;    // the number of the last one
    std::uint64_t misplaced = 0; // whose number was not the next one
    std::uint64_t spliced = 0;   // of another stream than the one before
    std::array<char, 48> response{};

    bool complete() const { return code == GCOALESCE_END && ending.kind == GCOALESCE_COMPLETE; }
    bool whole(std::uint64_t expected) const {
        return complete() && events == expected && misplaced == 0 && spliced == 0;
    }
};

// One subscription, over the C ABI.
class Subscriber {
  public:
    Subscriber(const Attachment& attachment, const std::string& prompt) {
        const std::string body = prompt_body(prompt);
        gcoalesce_request request{};
        request.model = "gemini-2.5-flash";
        request.body = body.data();
        request.body_bytes = body.size();
        open(attachment, request);
    }
    Subscriber(const Attachment& attachment, StreamId stream, std::uint64_t after) {
        const std::string id = to_hex(stream) + "." + std::to_string(after);
        gcoalesce_request request{};
        request.resume = id.c_str();
        got_.events = after;
        open(attachment, request);
    }
    ~Subscriber() { gcoalesce_close(subscription_); }
    Subscriber(const Subscriber&) = delete;
    Subscriber& operator=(const Subscriber&) = delete;

    // False: it is over, or nothing came within the time.
    bool next(std::int64_t timeout_ms = kWatchdogMs) {
        gcoalesce_event event{};
        got_.code = gcoalesce_next(subscription_, timeout_ms, &event);
        gcoalesce_info info{};
        info.size = sizeof info;
        gcoalesce_info_of(subscription_, &info);
        got_.status = info.status;
        got_.stream_id = info.stream_id;
        if (got_.code == GCOALESCE_OK) {
            if (event.number != ++got_.events) ++got_.misplaced;
            const auto json = nlohmann::json::parse(event.data, event.data + event.bytes);
            const std::string response = json.at("responseId");
            if (got_.response[0] != '\0' && response != got_.response.data()) ++got_.spliced;
            std::strncpy(got_.response.data(), response.c_str(), got_.response.size() - 1);
            return true;
        }
        got_.ending.size = sizeof got_.ending;
        gcoalesce_ending_of(subscription_, &got_.ending);
        return false;
    }
    const Got& read_to_end() {
        while (next()) {
        }
        return got_;
    }
    const Got& got() const { return got_; }

  private:
    void open(const Attachment& attachment, gcoalesce_request& request) {
        request.size = sizeof request;
        request.stream = 1;
        if (gcoalesce_open(attachment.get(), &request, &subscription_) != GCOALESCE_OK)
            throw std::runtime_error(gcoalesce_message());
    }
    gcoalesce_subscription* subscription_ = nullptr;
    Got got_;
};

std::uint64_t upstream_calls(const Sim& sim) {
    return nlohmann::json::parse(sim.calls()).at("calls").get<std::uint64_t>();
}

void pause_up_to(std::mt19937_64& random, long nanoseconds) {
    const timespec pause{0, static_cast<long>(random() % static_cast<std::uint64_t>(nanoseconds))};
    ::nanosleep(&pause, nullptr); // the instant is what is random
}

void kill(Process& process) {
    process.signal(SIGKILL);
    process.wait();
}

// ---- asking all the time -------------------------------------------------------------------------------------------

// A key a moment, the same in every process.
std::int64_t key_of_the_moment() {
    timespec now{};
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 5 + now.tv_nsec / 200'000'000;
}

std::string prompt_of(std::int64_t key) {
    return "[sim gap=4ms events=12] key " + std::to_string(key);
}

struct Answer {
    std::int64_t key = 0;
    StreamId stream_id = 0;
    std::array<char, 48> response{};
};

// There was none for a second, or the third one died over this request.
bool no_broker(const Got& got) {
    constexpr std::array codes = {GCOALESCE_ABSENT, GCOALESCE_STARTING, GCOALESCE_BROKER_DEAD, GCOALESCE_UNRESPONSIVE};
    return std::find(codes.begin(), codes.end(), got.code) != codes.end();
}

struct Tally {
    std::uint64_t asked = 0, whole = 0, interrupted = 0, refused = 0;
    std::uint64_t hung = 0, wrong = 0;          // no ending in a minute; an ending without a name, a splice, a gap
    std::uint64_t resumed = 0, not_resumed = 0; // complete answers, later
    std::uint64_t reread = 0, not_fresh = 0;    //
    std::array<char, 256> trouble{};            // the last one that must not be
    std::array<char, 256> refusal{};            // the last one
    void note(std::array<char, 256>& where, const char* what, const Got& got) {
        std::snprintf(where.data(), where.size(), "%s: %s, kind %d, %llu events, misplaced %llu, spliced %llu: %.120s",
                      what, gcoalesce_code_name(got.code), got.ending.kind, static_cast<unsigned long long>(got.events),
                      static_cast<unsigned long long>(got.misplaced), static_cast<unsigned long long>(got.spliced),
                      got.ending.message);
    }
    void take(const Got& got) {
        ++asked;
        const bool named = got.ending.message[0] != '\0';
        if (got.code == GCOALESCE_TIMED_OUT)
            ++hung;
        else if (got.whole(kEvents))
            return ++whole, void();
        else if (got.misplaced != 0 || got.spliced != 0 || got.complete() || !named)
            ++wrong;
        else if (got.code == GCOALESCE_END && got.ending.kind == GCOALESCE_INTERRUPTED)
            return ++interrupted, void();
        else if (got.code == GCOALESCE_END)
            ++wrong;
        else if (no_broker(got))
            return ++refused, note(refusal, "asked", got);
        else
            ++wrong;
        note(trouble, "asked", got);
    }
};

bool same(const Got& got, const Answer& answer) {
    return std::strcmp(got.response.data(), answer.response.data()) == 0;
}

void check_resume(const Attachment& attachment, const Answer& answer, std::uint64_t after, Tally& tally) {
    Subscriber again(attachment, answer.stream_id, after);
    const Got& got = again.read_to_end();
    if (got.whole(kEvents) && (after == kEvents || same(got, answer))) {
        ++tally.resumed;
    } else if (!no_broker(got)) {
        ++tally.not_resumed;
        tally.note(tally.trouble, "resumed", got);
    }
}

// Asks, reads and resumes until it is told to stop; then tells how that went, and what it has.
void load(const Instance& instance, std::uint64_t seed, Line& line) {
    std::mt19937_64 random(seed);
    const Attachment attachment = attach(instance);
    Tally tally;
    std::vector<Answer> answers;
    while (!line.has_news()) {
        const std::int64_t key = key_of_the_moment() - static_cast<std::int64_t>(random() % 3);
        Subscriber one(attachment, prompt_of(key));
        const Got& got = one.read_to_end();
        tally.take(got);
        if (got.whole(kEvents)) answers.push_back({key, got.stream_id, got.response});
        if (!answers.empty() && random() % 4 == 0)
            check_resume(attachment, answers[random() % answers.size()], random() % (kEvents + 1), tally);
    }
    line.hear();
    // With a broker that stays.
    std::shuffle(answers.begin(), answers.end(), random);
    for (std::size_t i = 0; i < std::min<std::size_t>(answers.size(), 50); ++i) {
        const Answer& answer = answers[i];
        check_resume(attachment, answer, random() % (kEvents + 1), tally);
        Subscriber again(attachment, prompt_of(answer.key));
        const Got& got = again.read_to_end();
        if (got.whole(kEvents) && same(got, answer) && got.status != GCOALESCE_STARTED)
            ++tally.reread;
        else
            ++tally.not_fresh, tally.note(tally.trouble, "asked again", got);
    }
    line.tell(tally);
    line.tell(answers.size());
    for (const Answer& answer : answers) line.tell(answer);
}

int rounds_asked(int otherwise) {
    const char* asked = std::getenv("GCOALESCE_RESTART_ROUNDS");
    return asked != nullptr ? std::atoi(asked) : otherwise;
}

} // namespace

// GCOALESCE_RESTART_ROUNDS asks for more or fewer.
TEST_CASE("T57, T81: brokers killed at any instant lose no complete answer, splice none and leave no reader waiting") {
    const int rounds = rounds_asked(200);
    const Sim sim;
    const Place place;
    const auto arguments = place.options({"--ttl-idle", "10min"});
    auto broker = std::make_unique<Broker>(*place.instance, sim.url(), arguments);
    std::vector<std::unique_ptr<Child>> children;
    for (std::uint64_t seed = 0; seed < 4; ++seed)
        children.push_back(
            std::make_unique<Child>([&, seed](Line& line) { load(*place.instance, 5700 + seed, line); }));
    std::mt19937_64 random(57);
    for (int round = 0; round < rounds; ++round) {
        pause_up_to(random, 150'000'000);
        kill(broker->process());
        REQUIRE(place.segments() == 1);
        if (round % 4 == 0) { // one that does not come far: it starts, or rescues
            Process early(broker_command(*place.instance, sim.url(), arguments));
            pause_up_to(random, 60'000'000);
            kill(early);
            REQUIRE(place.segments() <= 1);
        }
        broker = std::make_unique<Broker>(*place.instance, sim.url(), arguments);
        REQUIRE(place.segments() == 1);
        REQUIRE(place.sockets() == 1);
    }
    for (const auto& child : children) child->line().tell();
    Tally sum;
    std::map<std::int64_t, std::string> by_key;
    std::uint64_t two_answers = 0;
    for (const auto& child : children) {
        const auto tally = child->line().hear<Tally>();
        INFO(tally.trouble.data());
        CHECK(tally.whole > 0);
        CHECK(tally.hung == 0);
        CHECK(tally.wrong == 0);
        CHECK(tally.not_resumed == 0);
        CHECK(tally.not_fresh == 0);
        sum.asked += tally.asked;
        sum.whole += tally.whole;
        sum.interrupted += tally.interrupted;
        sum.refused += tally.refused;
        sum.resumed += tally.resumed;
        sum.reread += tally.reread;
        if (tally.refused != 0) WARN(tally.refused << " refused, the last one: " << tally.refusal.data());
        for (auto left = child->line().hear<std::size_t>(); left > 0; --left) {
            const auto answer = child->line().hear<Answer>();
            const auto [known, first] = by_key.emplace(answer.key, answer.response.data());
            if (!first && known->second != answer.response.data()) ++two_answers;
        }
        CHECK(child->wait() == 0);
    }
    // They stay fresh for ten minutes, so whatever was complete once is what everyone else gets for that key.
    CHECK(two_answers == 0);
    CHECK(broker->stop() == 0);
    CHECK(place.segments() == 0);
    CHECK(place.sockets() == 0);
    WARN(rounds << " brokers were killed: " << sum.asked << " requests, " << sum.whole << " whole, " << sum.interrupted
                << " interrupted, " << sum.refused << " refused; " << sum.resumed << " resumed, " << sum.reread
                << " read again; " << by_key.size() << " keys");
}

TEST_CASE("T81: a subscriber that had seen nothing gets its answer from the next broker; one that had, the truth") {
    const Sim sim;
    const Place place;
    auto broker = std::make_unique<Broker>(*place.instance, sim.url(), place.options());
    Child fresh([&](Line& line) {
        const Attachment attachment = attach(*place.instance);
        Subscriber one(attachment, "[sim hold-after=0 events=12] has seen nothing");
        one.next(300);
        line.tell(one.got());
        line.tell(one.read_to_end());
    });
    Child midway([&](Line& line) {
        const Attachment attachment = attach(*place.instance);
        Subscriber one(attachment, "[sim hold-after=3 events=12] has seen some");
        for (int i = 0; i < 3; ++i) one.next();
        line.tell();
        line.tell(one.read_to_end());
        line.hear(); // the next broker serves
        Subscriber all(attachment, one.got().stream_id, 0), rest(attachment, one.got().stream_id, 2),
            none(attachment, one.got().stream_id, 3), unknown(attachment, one.got().stream_id ^ 1, 0);
        for (Subscriber* reader : {&all, &rest, &none, &unknown}) line.tell(reader->read_to_end());
    });
    CHECK(fresh.line().hear<Got>().code == GCOALESCE_TIMED_OUT);
    midway.line().hear();
    kill(broker->process());
    const auto cut = midway.line().hear<Got>();
    CHECK(cut.ending.kind == GCOALESCE_INTERRUPTED);
    CHECK(cut.ending.code == GCOALESCE_BROKER_DEAD);
    CHECK(cut.events == 3);
    broker = std::make_unique<Broker>(*place.instance, sim.url(), place.options());
    sim.release();
    CHECK(fresh.line().hear<Got>().whole(12));
    midway.line().tell();
    for (int i = 0; i < 3; ++i) {
        const auto again = midway.line().hear<Got>();
        CHECK(again.status == GCOALESCE_RESUMED);
        CHECK(again.code == GCOALESCE_END);
        CHECK(again.ending.kind == GCOALESCE_INTERRUPTED);
        CHECK(again.ending.code == GCOALESCE_BROKER_DEAD);
        CHECK(again.events == 3);
        CHECK(again.spliced + again.misplaced == 0);
    }
    CHECK(midway.line().hear<Got>().code == GCOALESCE_NOT_FOUND);
    CHECK(broker->stop() == 0);
    CHECK_THAT(broker->process().err(), Catch::Contains("1 interrupted"));
}

TEST_CASE("a rescue without a state directory, and one of another layout, say so, and the broker starts") {
    const Sim sim;
    const ScratchInstance instance;
    auto broker = std::make_unique<Broker>(*instance, sim.url());
    std::string words;
    SECTION("nowhere to put them") {
        words = "are lost: there is no --state-dir";
    }
    SECTION("another layout") {
        const UniqueFd fd(::open(("/dev/shm" + instance.segment_name()).c_str(), O_RDWR | O_CLOEXEC));
        const std::uint32_t other = 99;
        REQUIRE(::pwrite(fd.get(), &other, sizeof other, offsetof(Prefix, layout_major)) == sizeof other);
        words = "has layout 99.0";
    }
    SECTION("another build") {
        const UniqueFd fd(::open(("/dev/shm" + instance.segment_name()).c_str(), O_RDWR | O_CLOEXEC));
        const std::uint64_t other = 99;
        REQUIRE(::pwrite(fd.get(), &other, sizeof other, offsetof(Prefix, fingerprint)) == sizeof other);
        words = "fingerprint 0000000000000063";
    }
    kill(broker->process());
    broker = std::make_unique<Broker>(*instance, sim.url());
    CHECK(broker->stop() == 0);
    CHECK_THAT(broker->process().err(), Catch::Contains(words));
}

TEST_CASE("a thousand clients that reconnect at one instant are all served, by one call") {
    const Sim sim;
    const Place place;
    auto broker = std::make_unique<Broker>(*place.instance, sim.url(), place.options());
    std::vector<std::unique_ptr<Child>> children;
    for (int i = 0; i < 20; ++i) {
        children.push_back(std::make_unique<Child>([&](Line& line) {
            std::atomic<std::uint64_t> asked = 0, whole = 0;
            std::vector<std::thread> clients;
            for (int k = 0; k < 50; ++k) {
                clients.emplace_back([&] {
                    const Attachment attachment = attach(*place.instance);
                    Subscriber reader(attachment, "[sim hold-after=0 events=12] herd");
                    reader.next(1);
                    if (++asked == 50) line.tell();
                    if (reader.read_to_end().whole(12)) ++whole;
                });
            }
            for (std::thread& client : clients) client.join();
            line.tell(whole.load());
        }));
    }
    for (const auto& child : children) child->line().hear();
    kill(broker->process());
    broker = std::make_unique<Broker>(*place.instance, sim.url(), place.options());
    REQUIRE(eventually([&] {
        return broker->counted(Counter::requests_started) + broker->counted(Counter::requests_joined) == 1000;
    }));
    sim.release();
    std::uint64_t whole = 0;
    for (const auto& child : children) whole += child->line().hear<std::uint64_t>();
    CHECK(whole == 1000);
    CHECK(upstream_calls(sim) == 2); // the dead broker's and this one's
    CHECK(broker->counted(Counter::requests_started) == 1);
}

// ---- where there is room for one segment only ----------------------------------------------------------------------

TEST_CASE("a broker restarts in 64 MiB of /dev/shm though clients map the dead one's segment, and they read on") {
    const bool on_disk = GENERATE(true, false);
    CAPTURE(on_disk);
    const Sim sim;
    const Place place;
    struct Report {
        Got whole, ended, running, idle;
    };
    Child all([&](Line& line) {
        const bool own = own_shm("size=64m");
        line.tell(own);
        if (!own) return;
        const auto start = [&] {
            auto options = on_disk ? place.options({"--ttl-idle", "10min"}) : std::vector<std::string>();
            options.insert(options.end(), {"--memory", "48MiB"}); // the default
            return std::make_unique<Broker>(*place.instance, sim.url(), options);
        };
        const int rounds = on_disk ? 3 : 1;
        Child never([&](Line& to) { // attached to the first one, and never heard of again
            const Attachment attachment = attach(*place.instance);
            Subscriber one(attachment, "[sim size=10KiB,events=12] never");
            one.next();
            to.tell();
            to.hear();
        });
        auto broker = start();
        never.line().hear();
        for (int round = 0; round < rounds; ++round) {
            Child reading([&](Line& to) {
                const Attachment attachment = attach(*place.instance);
                const std::string number = std::to_string(round);
                Subscriber whole(attachment, "[sim size=10KiB,events=12] ended " + number),
                    running(attachment, "[sim hold-after=3 events=12] running " + number);
                Report report;
                report.whole = whole.read_to_end();
                Subscriber ended(attachment, "[sim size=10KiB,events=12] ended " + number),
                    idle(attachment, report.whole.stream_id, 0);
                for (int i = 0; i < 3; ++i) ended.next(), running.next(), idle.next();
                to.tell();
                report.running = running.read_to_end(); // while the broker is killed
                to.hear();                              // the next one serves: what was mapped is gone
                report.ended = ended.read_to_end();
                report.idle = idle.read_to_end();
                to.tell(report);
            });
            reading.line().hear();
            kill(broker->process());
            broker = start();
            reading.line().tell();
            line.tell(reading.line().hear<Report>());
            line.tell(place.segments());
            reading.wait();
        }
        line.tell(broker->stop());
        never.line().tell();
        never.wait();
    });
    if (!all.line().hear<bool>()) {
        std::puts("SKIPPED: no mount namespace of its own is allowed here");
        return;
    }
    for (int round = 0; round < (on_disk ? 3 : 1); ++round) {
        const auto report = all.line().hear<Report>();
        CHECK(report.whole.whole(12));
        CHECK(report.running.ending.kind == GCOALESCE_INTERRUPTED);
        CHECK(report.running.events == 3);
        for (const Got& got : {report.ended, report.idle}) {
            INFO(gcoalesce_code_name(got.code) << " " << got.ending.message);
            CHECK(got.misplaced + got.spliced == 0);
            CHECK(got.stream_id == report.whole.stream_id);
            if (on_disk) {
                CHECK(got.whole(12));
            } else {
                CHECK(got.code == GCOALESCE_END);
                CHECK(got.ending.kind == GCOALESCE_INTERRUPTED);
                CHECK_THAT(got.ending.message, Catch::Contains("the rest of the answer cannot be had"));
                CHECK(got.events == 3);
            }
        }
        CHECK(all.line().hear<std::uint64_t>() == 1);
    }
    CHECK(all.line().hear<int>() == 0);
}

// ---- told to stop --------------------------------------------------------------------------------------------------

TEST_CASE("a broker that is told to stop writes what it has, and the next one resumes all of it by id") {
    const Sim sim;
    const Place place;
    auto broker = std::make_unique<Broker>(*place.instance, sim.url(), place.options({"--drain-timeout", "300ms"}));
    struct Report {
        Got ended, running;
    };
    Child client([&](Line& line) {
        const Attachment attachment = attach(*place.instance);
        Subscriber ended(attachment, "[sim events=12] ended"), running(attachment, "[sim hold-after=3 events=12] runs");
        for (int i = 0; i < 3; ++i) running.next();
        Report first;
        first.ended = ended.read_to_end();
        line.tell();
        first.running = running.read_to_end();
        line.tell(first);
        line.hear(); // the next broker serves
        Subscriber again(attachment, first.ended.stream_id, 5), rest(attachment, first.running.stream_id, 1),
            nothing(attachment, first.running.stream_id, 3);
        line.tell(Report{again.read_to_end(), rest.read_to_end()});
        line.tell(nothing.read_to_end());
    });
    client.line().hear();
    CHECK(broker->stop() == 0);
    const auto first = client.line().hear<Report>();
    CHECK(first.ended.whole(12));
    CHECK(first.running.ending.kind == GCOALESCE_INTERRUPTED);
    CHECK(first.running.ending.code == GCOALESCE_CLOSED);
    CHECK(first.running.events == 3);
    CHECK(place.segments() == 0);
    broker = std::make_unique<Broker>(*place.instance, sim.url(), place.options());
    client.line().tell();
    const auto second = client.line().hear<Report>();
    CHECK(second.ended.whole(12));
    CHECK(second.running.ending.kind == GCOALESCE_INTERRUPTED);
    CHECK(second.running.ending.code == GCOALESCE_CLOSED);
    CHECK(second.running.events == 3);
    const auto nothing = client.line().hear<Got>();
    CHECK(nothing.ending.kind == GCOALESCE_INTERRUPTED);
    CHECK(nothing.events == 3);
}

// ---- looking at what is left ---------------------------------------------------------------------------------------

namespace {

struct Ran {
    int code;
    std::string out, err;
};

Ran run(const ScratchInstance& instance, std::vector<std::string> arguments, std::vector<std::string> before = {}) {
    before.insert(before.end(),
                  {gcoalesce_program(), "--instance", instance->name, "--runtime-dir", instance->runtime_dir});
    before.insert(before.end(), arguments.begin(), arguments.end());
    Process process(before);
    const int code = process.wait();
    return {code, process.out(), process.err()};
}

} // namespace

TEST_CASE(
    "10: keys, dump and stats of a killed broker say first that it is dead, then show what it left; exit code 3") {
    const Sim sim;
    const ScratchInstance instance;
    Broker broker(*instance, sim.url());
    Child client([&](Line& line) {
        const Attachment attachment = attach(*instance);
        Subscriber ended(attachment, "[sim events=12] left behind"), running(attachment, "[sim hold-after=2] half");
        const Got whole = ended.read_to_end();
        running.next();
        Subscriber reading(attachment, whole.stream_id, 0);
        reading.next();
        line.tell(whole);
        line.hear(); // the broker is dead
        line.tell(reading.read_to_end());
    });
    const auto whole = client.line().hear<Got>();
    const std::string id = to_hex(whole.stream_id);
    const std::string live = run(instance, {"dump", id}).out;
    CHECK(!live.empty());

    broker.process().signal(SIGSTOP);
    REQUIRE(eventually([&] { return run(instance, {"keys"}).err.find("is unresponsive") != std::string::npos; }));
    CHECK(run(instance, {"keys"}).code == 3);
    CHECK(run(instance, {"dump", id}).out == live);
    CHECK(run(instance, {"dump", id}).code == 3);
    CHECK(run(instance, {"stats"}).code == 3);

    kill(broker.process());
    for (const auto& arguments : std::vector<std::vector<std::string>>{{"keys"}, {"dump", id}, {"stats"}}) {
        CAPTURE(arguments[0]);
        const Ran ran = run(instance, arguments);
        CHECK(ran.code == 3);
        CHECK(ran.err.find("is dead since") < ran.err.find('\n'));
        CHECK(!ran.out.empty());
    }
    CHECK(run(instance, {"dump", id}).out == live);
    CHECK_THAT(run(instance, {"keys"}).out, Catch::Contains("in_flight") && Catch::Contains("complete"));
    client.line().tell();
    CHECK(client.line().hear<Got>().whole(12)); // while no broker runs
}

TEST_CASE("20: from another pid namespace a living broker is told from a dead one") {
    const Sim sim;
    const ScratchInstance instance;
    if (Process probe({"unshare", "--pid", "--fork", "true"}); probe.wait() != 0) {
        std::puts("SKIPPED: no pid namespace of its own is allowed here");
        return;
    }
    Broker broker(*instance, sim.url());
    const std::vector<std::string> elsewhere{"unshare", "--pid", "--fork"};
    const Ran alive = run(instance, {"keys"}, elsewhere);
    CHECK(alive.code == 0);
    CHECK_THAT(alive.err, Catch::Contains("is serving"));
    kill(broker.process());
    const Ran dead = run(instance, {"keys"}, elsewhere);
    CHECK(dead.code == 3);
    CHECK_THAT(dead.err, Catch::Contains("is dead since"));
}

TEST_CASE("a file that somebody else planted under the segment's name is refused by name, by clients and broker") {
    if (::geteuid() != 0) {
        std::puts("SKIPPED: only root can give files away");
        return;
    }
    const Sim sim;
    const ScratchInstance instance;
    const std::string path = "/dev/shm" + instance.segment_name();
    {
        Broker broker(*instance, sim.url());
        CHECK(broker.stop() == 0); // its lock file says who ran it
    }
    SECTION("a segment") {
        std::ofstream(path) << std::string(100'000, 'x');
    }
    SECTION("a FIFO, which would keep whoever opens it waiting") {
        REQUIRE(::mkfifo(path.c_str(), 0640) == 0);
    }
    REQUIRE(::chmod(path.c_str(), 0640) == 0);
    REQUIRE(::chown(path.c_str(), 12345, 12345) == 0);
    const Ran keys = run(instance, {"keys"});
    CHECK(keys.code == 1);
    CHECK_THAT(keys.err, Catch::Contains(path));
    Process broker(broker_command(*instance, sim.url()));
    CHECK(broker.wait() == 1);
    CHECK_THAT(broker.err(), Catch::Contains(path) && Catch::Contains("12345"));
    CHECK(::unlink(path.c_str()) == 0);
}
