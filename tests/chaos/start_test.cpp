// Brokers that start, die and start again, and what others do to their files meanwhile.

#include <array>
#include <catch2/catch.hpp>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fcntl.h>
#include <filesystem>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

#include "broker/exit_codes.hpp"
#include "tests/chaos/client.hpp"
#include "tests/support/broker.hpp"
#include "tests/support/sim.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;

namespace {

enum Artefact : unsigned { socket_file = 1, segment_file = 2, lock_file = 4, all_files = 7 };

std::string path_of(const ScratchInstance& instance, Artefact artefact) {
    switch (artefact) {
    case socket_file: return instance->socket_path();
    case segment_file: return "/dev/shm" + instance.segment_name();
    default: return instance->lock_path();
    }
}

void remove_files(const ScratchInstance& instance, unsigned which) {
    for (const Artefact artefact : {socket_file, segment_file, lock_file})
        if ((which & artefact) != 0) CHECK(::unlink(path_of(instance, artefact).c_str()) == 0);
}

std::string names_of(unsigned which) {
    std::string names;
    for (const auto& [artefact, name] :
         {std::pair(socket_file, "socket "), std::pair(segment_file, "segment "), std::pair(lock_file, "lock ")})
        if ((which & artefact) != 0) names += name;
    return names;
}

// What a file is and when it last changed; nullopt: there is none.
std::optional<std::array<std::int64_t, 6>> traits_of(const std::string& path) {
    struct stat file {};
    if (::lstat(path.c_str(), &file) != 0) return std::nullopt;
    return std::array<std::int64_t, 6>{static_cast<std::int64_t>(file.st_dev),
                                       static_cast<std::int64_t>(file.st_ino),
                                       static_cast<std::int64_t>(file.st_mode),
                                       file.st_size,
                                       file.st_ctim.tv_sec,
                                       file.st_ctim.tv_nsec};
}

unsigned mode_of(const std::string& path) {
    struct stat file {};
    REQUIRE(::stat(path.c_str(), &file) == 0);
    return file.st_mode & 07777;
}

std::string pid_text(pid_t pid) {
    return "(pid " + std::to_string(pid) + ")";
}

// A client that stays attached, and asks when it is told to.
class Attached {
  public:
    explicit Attached(const Instance& instance)
        : child_([&instance](Line& line) {
              const Attachment attachment = attach(instance);
              line.tell();
              for (int number = 0;; ++number) {
                  line.hear();
                  Reader reader(attachment, {"attached " + std::to_string(number)});
                  line.tell(reader.read_to_end().complete());
              }
          }) {
        child_.line().hear();
    }
    bool served() {
        child_.line().tell();
        return child_.line().hear<bool>();
    }

  private:
    Child child_;
};

// Whether a client that attaches now is served.
bool serves(const ScratchInstance& instance) {
    Child child([&](Line& line) { line.tell(Reader(attach(*instance), {"newcomer"}).read_to_end().complete()); });
    return child.line().hear<bool>();
}

// What one try to attach answers.
gcoalesce_code try_to_attach(const ScratchInstance& instance) {
    Child child([&](Line& line) {
        gcoalesce_attach_options options{};
        options.size = sizeof options;
        options.instance = instance->name.c_str();
        options.runtime_dir = instance->runtime_dir.c_str();
        gcoalesce_attachment* attachment = nullptr;
        const gcoalesce_code code = gcoalesce_attach(&options, 0, &attachment);
        if (code != GCOALESCE_OK && std::string(gcoalesce_message()).empty()) throw std::logic_error("no sentence");
        line.tell(code);
        gcoalesce_detach(attachment);
    });
    return child.line().hear<gcoalesce_code>();
}

} // namespace

// GCOALESCE_CHAOS_STARTS asks for more or fewer.
TEST_CASE("case 6: of two brokers that start at one instant exactly one wins, and the other names it") {
    const char* asked = std::getenv("GCOALESCE_CHAOS_STARTS");
    const int rounds = asked != nullptr ? std::atoi(asked) : 50;
    const Sim sim;
    const ScratchInstance instance;
    for (int round = 0; round < rounds; ++round) {
        CAPTURE(round);
        std::array<std::unique_ptr<Process>, 2> brokers;
        for (auto& broker : brokers)
            broker = std::make_unique<Process>(
                broker_command(*instance, sim.url(), {"--memory", "4MiB", "--streams", "256"}));
        REQUIRE(eventually([&] { return has_ended(brokers[0]->pid()) || has_ended(brokers[1]->pid()); }));
        const std::size_t loser = has_ended(brokers[0]->pid()) ? 0 : 1;
        Process &lost = *brokers[loser], &won = *brokers[1 - loser];
        CHECK(lost.wait() == exit_already_running);
        CHECK_THAT(lost.err(), Catch::Contains("another broker " + pid_text(won.pid())));
        REQUIRE(eventually([&] {
            const Result<OpenSegment> segment = open_segment(*instance);
            return segment && segment->view.header().broker_pid == won.pid();
        }));
        if (round % 10 == 0) CHECK(serves(instance));
        // One in three dies without a word, so that the next two find its traces.
        const bool dies = round % 3 == 0;
        won.signal(dies ? SIGKILL : SIGTERM);
        CHECK(won.wait() == (dies ? 128 + SIGKILL : exit_ok));
    }
}

TEST_CASE("case 4: a broker that finds another one at its place names it, and touches nothing") {
    const Sim sim;
    const ScratchInstance instance;
    Broker first(*instance, sim.url());
    Attached client(*instance);
    std::vector<std::string> paths{instance->runtime_dir};
    for (const Artefact artefact : {socket_file, segment_file, lock_file}) paths.push_back(path_of(instance, artefact));
    std::vector<std::optional<std::array<std::int64_t, 6>>> before;
    for (const std::string& path : paths) before.push_back(traits_of(path));

    Process second(broker_command(*instance, sim.url()));
    CHECK(second.wait() == exit_already_running);
    CHECK_THAT(second.err(), Catch::Contains("another broker " + pid_text(first.process().pid())));
    for (std::size_t i = 0; i < paths.size(); ++i) CHECK(traits_of(paths[i]) == before[i]);
    CHECK(client.served());
    CHECK(serves(instance));
}

TEST_CASE("case 4: what stands under the segment's name and has no living owner is replaced, else left alone") {
    const Sim sim;
    const ScratchInstance instance;
    const std::string path = path_of(instance, segment_file);
    std::mt19937_64 random(4);
    const auto occupy = [&](std::size_t bytes) {
        UniqueFd file(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0640));
        REQUIRE(file);
        std::string content(bytes, '\0');
        for (char& byte : content) byte = static_cast<char>(random());
        REQUIRE(::write(file.get(), content.data(), content.size()) == static_cast<ssize_t>(bytes));
        return file;
    };
    SECTION("of nobody alive") {
        for (const std::size_t bytes : {0u, 10u, 40u, 100'000u}) {
            CAPTURE(bytes);
            occupy(bytes);
            Broker broker(*instance, sim.url());
            CHECK(serves(instance));
            CHECK(broker.stop() == exit_ok);
        }
    }
    SECTION("locked by a living process") {
        for (const std::size_t bytes : {0u, 100'000u}) {
            const UniqueFd held = occupy(bytes);
            REQUIRE(take_broker_lock(held.get()));
            Process broker(broker_command(*instance, sim.url()));
            CHECK(broker.wait() == exit_already_running);
            CHECK_THAT(broker.err(), Catch::Contains("another broker (pid ?)")); // what it says of itself is no pid
            CHECK(::unlink(path.c_str()) == 0);
        }
    }
    SECTION("of another user") {
        if (::geteuid() != 0) {
            std::puts("SKIPPED: only root can give files away");
            return;
        }
        const UniqueFd foreign = occupy(10);
        REQUIRE(::fchown(foreign.get(), 12345, 12345) == 0);
        Process broker(broker_command(*instance, sim.url()));
        CHECK(broker.wait() == exit_failure);
        CHECK_THAT(broker.err(), Catch::Contains("belongs to uid 12345"));
        CHECK(::unlink(path.c_str()) == 0);
    }
    SECTION("a link") {
        const std::string elsewhere = instance->runtime_dir + "/elsewhere";
        REQUIRE(::symlink(elsewhere.c_str(), path.c_str()) == 0);
        Process broker(broker_command(*instance, sim.url()));
        CHECK(broker.wait() == exit_failure);
        CHECK_THAT(broker.err(), Catch::Contains(instance.segment_name()));
        CHECK(!std::filesystem::exists(elsewhere));
        CHECK(::unlink(path.c_str()) == 0);
    }
}

TEST_CASE("case 1, T81: after the broker was killed its readers learn it, and the next broker says so and serves") {
    const Sim sim;
    const ScratchInstance instance;
    auto broker = std::make_unique<Broker>(*instance, sim.url());
    Child midway([&](Line& line) {
        const Attachment attachment = attach(*instance);
        Reader reader(attachment, {"[sim gap=50ms events=2000] cut"});
        reader.read(3);
        line.tell();
        line.tell(reader.read_to_end());
    });
    Child waiting([&](Line& line) {
        const Attachment attachment = attach(*instance);
        Reader reader(attachment, {"[sim hold-after=0 events=36] has seen nothing"});
        reader.served();
        line.tell();
        line.tell(reader.read_to_end());
    });
    midway.line().hear();
    waiting.line().hear();
    broker->process().signal(SIGKILL);
    CHECK(broker->process().wait() == 128 + SIGKILL);
    const auto cut = midway.line().hear<Seen>();
    CHECK(cut.code == GCOALESCE_END);
    CHECK(cut.ending.kind == GCOALESCE_INTERRUPTED);
    CHECK(cut.ending.code == GCOALESCE_BROKER_DEAD);
    CHECK(cut.ending.events == cut.events);
    CHECK(try_to_attach(instance) == GCOALESCE_BROKER_DEAD);

    sim.release();
    Broker next(*instance, sim.url());
    const auto seen = waiting.line().hear<Seen>(); // asked again by the library, and noticed nothing
    CHECK(seen.complete());
    CHECK(seen.events == 36);
    CHECK(serves(instance));
    CHECK(next.stop() == exit_ok);
    CHECK_THAT(next.process().err(), Catch::Contains("the previous broker of instance \"scratch\" died"));
}

TEST_CASE("case 3: whatever a dead broker left or somebody deleted of it, the next one starts and serves") {
    const Sim sim;
    const ScratchInstance instance;
    for (unsigned removed = 0; removed <= all_files; ++removed) {
        CAPTURE(names_of(removed));
        {
            Broker dead(*instance, sim.url());
            dead.process().signal(SIGKILL);
            dead.process().wait();
        }
        remove_files(instance, removed);
        const gcoalesce_code code = try_to_attach(instance);
        CAPTURE(gcoalesce_code_name(code));
        CHECK((code == GCOALESCE_BROKER_DEAD || code == GCOALESCE_ABSENT));
        CHECK((code == GCOALESCE_BROKER_DEAD) == ((removed & (segment_file | lock_file)) == 0));
        Broker next(*instance, sim.url());
        CHECK(serves(instance));
        CHECK(next.stop() == exit_ok);
    }
}

TEST_CASE("case 3, 19: whatever somebody deletes of a living broker, its clients go on and no second one takes over") {
    const Sim sim;
    const ScratchInstance instance;
    for (unsigned removed = 1; removed < all_files; ++removed) {
        CAPTURE(names_of(removed));
        Broker broker(*instance, sim.url());
        Attached client(*instance);
        remove_files(instance, removed);
        CHECK(client.served());
        if ((removed & socket_file) == 0) {
            CHECK(serves(instance)); // what is needed comes over the socket
        } else {
            const gcoalesce_code code = try_to_attach(instance);
            CAPTURE(gcoalesce_code_name(code));
            CHECK((code == GCOALESCE_UNRESPONSIVE || code == GCOALESCE_ABSENT));
        }
        Process second(broker_command(*instance, sim.url()));
        CHECK(second.wait() == exit_already_running);
        CHECK_THAT(second.err(), Catch::Contains(pid_text(broker.process().pid())));
        CHECK(client.served());
        CHECK(broker.stop() == exit_ok);
    }
}

TEST_CASE("case 3: a broker of which nothing is left to see takes nothing from its successor when it stops") {
    const Sim sim;
    const ScratchInstance instance;
    Broker old(*instance, sim.url());
    Attached client(*instance);
    remove_files(instance, all_files);
    CHECK(try_to_attach(instance) == GCOALESCE_ABSENT);
    Broker successor(*instance, sim.url());
    CHECK(serves(instance));
    CHECK(client.served()); // by the old one
    CHECK(old.stop() == exit_ok);
    CHECK(serves(instance));
    for (const Artefact artefact : {socket_file, segment_file, lock_file})
        CHECK(traits_of(path_of(instance, artefact)).has_value());
    CHECK(client.served()); // by the new one
    CHECK(successor.stop() == exit_ok);
}

TEST_CASE("case 8: a broker killed at any instant of its start is told from one that starts, and is replaced") {
    const Sim sim;
    const ScratchInstance instance;
    std::mt19937_64 random(8);
    for (int round = 0; round < 30; ++round) {
        CAPTURE(round);
        {
            Process broker(broker_command(*instance, sim.url(), {"--memory", "32MiB"}));
            const timespec pause{0, static_cast<long>(random() % 60'000'000)}; // the instant is what is random
            ::nanosleep(&pause, nullptr);
            broker.signal(SIGKILL);
            broker.wait();
        }
        const gcoalesce_code code = try_to_attach(instance);
        CAPTURE(gcoalesce_code_name(code));
        CHECK((code == GCOALESCE_ABSENT || code == GCOALESCE_BROKER_DEAD));
    }
    const Broker broker(*instance, sim.url());
    CHECK(serves(instance));
}

TEST_CASE("case 18: whatever the umask, segment and socket have exactly their modes") {
    const mode_t mask = GENERATE(077u, 0u);
    CAPTURE(mask);
    const Sim sim;
    const ScratchInstance instance;
    const mode_t before = ::umask(mask);
    const Broker broker(*instance, sim.url());
    ::umask(before);
    CHECK(mode_of(path_of(instance, segment_file)) == 0640);
    CHECK(mode_of(path_of(instance, socket_file)) == 0660);
    CHECK(mode_of(path_of(instance, lock_file)) == 0640);
}
