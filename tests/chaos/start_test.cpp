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
        Reader reader(attachment, {"[sim latency=2s events=36] has seen nothing"});
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
        CHECK((code == GCOALESCE_ABSENT || code == GCOALESCE_BROKER_DEAD || code == GCOALESCE_TOO_SHORT));
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
