// From publishing an event to a sleeping reader of another process having it, beside a bare futex wake.

#include <csignal>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "segment/futex.hpp"
#include "segment/join.hpp"
#include "tests/bench/bench.hpp"
#include "tests/support/memory_segment.hpp"

namespace gcoalesce::bench {
namespace {

struct Bare { // the peer's shared memory, and where both readers leave what they saw
    Shared<std::uint32_t> word;
    Shared<std::int64_t> sent;
    Shared<std::uint32_t> bare_seen, ours_seen;
    Shared<std::int64_t> bare_at, ours_at;
};

pid_t fork_reader(const std::function<void()>& body) {
    const pid_t pid = ::fork();
    if (pid != 0) return pid;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    body();
    ::_exit(0);
}

// Until the reader sleeps in the kernel: /proc/<pid>/stat says S, and stays so for a moment.
void until_asleep(pid_t pid) {
    for (int calm = 0; calm < 3;) {
        char line[256] = {};
        std::FILE* file = std::fopen(fmt::format("/proc/{}/stat", pid).c_str(), "r");
        if (file == nullptr || std::fgets(line, sizeof line, file) == nullptr)
            throw std::runtime_error("a reader died");
        std::fclose(file);
        const char* name_end = std::strrchr(line, ')');
        calm = name_end != nullptr && name_end[2] == 'S' ? calm + 1 : 0;
    }
}

} // namespace

void wake() {
    constexpr int kRounds = 4000;
    const Mapping shared = test::anonymous_memory(4096);
    Bare& bare = *reinterpret_cast<Bare*>(shared.data());
    test::MemorySegment segment(system_clock());
    Store& store = segment.store();
    StreamOpening opening;
    opening.stream_id = 1;
    const StreamRef stream = store.open(opening, true).value();
    const Mapping lane_memory = test::anonymous_memory(lane_bytes(16));
    LanePort port;
    port.mapping = lane_memory;
    port.send_wake = [] { return true; };
    store.add_lane(1, std::move(port));
    if (!store.pin(1, stream)) throw std::runtime_error("no pin");

    const pid_t peer = fork_reader([&] {
        for (std::uint32_t seen = 0; seen < kRounds; ++seen) {
            while (bare.word.load() == seen) futex_wait(bare.word, seen, 10 * kSecond);
            bare.bare_at.store(system_clock().monotonic());
            bare.bare_seen.store(seen + 1);
        }
    });
    const pid_t ours = fork_reader([&] {
        StreamReader reader(store.view(), stream.slot, stream.identity);
        std::string event;
        for (std::uint32_t seen = 0; seen < kRounds;) {
            const std::uint32_t word = reader.wake_word();
            if (reader.next(event) == ReadStatus::event) {
                bare.ours_at.store(system_clock().monotonic());
                bare.ours_seen.store(++seen);
            } else {
                reader.wait(word, 10 * kSecond);
            }
        }
    });
    const std::string event(400, 'e');
    Samples ours_us, peer_us;
    const auto wake_peer = [&](std::uint32_t round) {
        until_asleep(peer);
        const std::int64_t start = system_clock().monotonic();
        bare.word.store(round);
        futex_wake_all(bare.word);
        while (bare.bare_seen.load() != round) {
        }
        peer_us.add(static_cast<double>(bare.bare_at.load() - start) / 1000);
    };
    const auto wake_ours = [&](std::uint32_t round) {
        until_asleep(ours);
        const std::int64_t start = system_clock().monotonic();
        if (!store.append(stream, event)) throw std::runtime_error("no room");
        while (bare.ours_seen.load() != round) {
        }
        ours_us.add(static_cast<double>(bare.ours_at.load() - start) / 1000);
    };
    for (std::uint32_t round = 1; round <= kRounds; ++round) {
        // Whoever comes second finds the other core awake: each is that every other time.
        if (round % 2 == 0) wake_peer(round);
        wake_ours(round);
        if (round % 2 != 0) wake_peer(round);
    }
    ::waitpid(peer, nullptr, 0);
    ::waitpid(ours, nullptr, 0);
    report("publish to a sleeping reader / bare futex wake",
           fmt::format("{:.1f} us / {:.1f} us (p99 {:.1f} / {:.1f})", ours_us.median(), peer_us.median(),
                       ours_us.percentile(99), peer_us.percentile(99)),
           fmt::format("{:.2f}, target at most 1.50", ours_us.median() / peer_us.median()));
}

} // namespace gcoalesce::bench
