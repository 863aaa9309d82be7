// /dev/shm with little room, each test in a mount namespace with one of its own.

#include <algorithm>
#include <array>
#include <catch2/catch.hpp>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <functional>
#include <system_error>
#include <unistd.h>

#include "broker/exit_codes.hpp"
#include "tests/chaos/client.hpp"
#include "tests/chaos/own_shm.hpp"
#include "tests/support/broker.hpp"
#include "tests/support/sim.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;

namespace {

// Fills /dev/shm to the last page.
void fill_shm() {
    const UniqueFd file(::open("/dev/shm/filler", O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    const std::array<char, 4096> page{};
    while (::write(file.get(), page.data(), page.size()) > 0) {
    }
    if (errno != ENOSPC) throw std::system_error(errno, std::generic_category(), "filling /dev/shm");
}

struct Report {
    int code;
    std::array<char, 1024> err; // the broker's, its beginning
    std::uint64_t left_behind;  // files in /dev/shm
};

Report ended(Process& broker) {
    Report report{};
    report.code = broker.wait();
    std::strncpy(report.err.data(), broker.err().c_str(), report.err.size() - 1);
    const std::filesystem::directory_iterator files("/dev/shm");
    report.left_behind = static_cast<std::uint64_t>(std::distance(begin(files), end(files)));
    return report;
}

// Skips the test visibly where there can be no namespace.
#define REQUIRE_OWN_SHM(child)                                                                                         \
    if (!child.line().hear<bool>()) {                                                                                  \
        std::puts("SKIPPED: no mount namespace of its own is allowed here");                                           \
        return;                                                                                                        \
    }                                                                                                                  \
    static_assert(true)

} // namespace

TEST_CASE("case 13: with 1 MiB of /dev/shm the broker says what it needs, what there is, and what to do") {
    const Sim sim;
    const ScratchInstance instance;
    Child child([&](Line& line) {
        const bool own = own_shm("size=1m");
        line.tell(own);
        if (!own) return;
        Process broker({gcoalesced_program(), "--instance", instance->name, "--runtime-dir", instance->runtime_dir,
                        "--upstream", sim.url()});
        line.tell(ended(broker));
    });
    REQUIRE_OWN_SHM(child);
    const auto report = child.line().hear<Report>();
    CHECK(report.code == exit_no_memory); // and no signal
    const std::string err(report.err.data());
    CHECK_THAT(err, Catch::Contains("needed 48.0MiB"));
    CHECK_THAT(err, Catch::Contains("available"));
    CHECK_THAT(err, Catch::Contains("--shm-size="));
    CHECK(report.left_behind == 0);
    CHECK(!std::filesystem::exists(instance->socket_path()));
}

TEST_CASE("case 13: the default memory fits the 64 MiB of /dev/shm that containers have") {
    const Sim sim;
    const ScratchInstance instance;
    Child child([&](Line& line) {
        const bool own = own_shm("size=64m");
        line.tell(own);
        if (!own) return;
        Process broker({gcoalesced_program(), "--instance", instance->name, "--runtime-dir", instance->runtime_dir,
                        "--upstream", sim.url()});
        {
            const Attachment attachment = attach(*instance);
            line.tell(Reader(attachment, {"[sim size=10KiB,events=36] default"}).read_to_end());
        }
        broker.signal(SIGTERM);
        line.tell(ended(broker));
    });
    REQUIRE_OWN_SHM(child);
    CHECK(child.line().hear<Seen>().complete());
    const auto report = child.line().hear<Report>();
    CHECK(report.code == exit_ok);
    CHECK(report.left_behind == 0);
}

TEST_CASE("case 14: a /dev/shm that fills up after the start does not hurt a running broker") {
    const Sim sim;
    const ScratchInstance instance;
    Child child([&](Line& line) {
        const bool own = own_shm("size=16m");
        line.tell(own);
        if (!own) return;
        Broker broker(*instance, sim.url(), {"--memory", "8MiB"});
        fill_shm();
        for (int i = 0; i < 4; ++i) { // more than the segment holds at once: each of its pages is written to
            const Attachment attachment = attach(*instance);
            line.tell(Reader(attachment, {"[sim size=100KiB,events=20] full " + std::to_string(i)}).read_to_end());
        }
        broker.process().signal(SIGTERM);
        line.tell(ended(broker.process()));
    });
    REQUIRE_OWN_SHM(child);
    for (int i = 0; i < 4; ++i) {
        const auto seen = child.line().hear<Seen>();
        INFO(seen.ending.message);
        CHECK(seen.complete());
        CHECK(seen.events == 20);
    }
    const auto report = child.line().hear<Report>();
    CHECK(report.code == exit_ok);
    CHECK(report.left_behind == 1); // the filler
}
