// A snapshot store on a directory of its own, with an event loop that the test turns by hand.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "broker/snapshots.hpp"
#include "tests/support/fake_timers.hpp"

namespace gcoalesce::test {

// What Asio's loop would be.
class HandLoop {
  public:
    Snapshots::Post post();
    // Runs what was posted until `done` holds; throws after a minute, which is a watchdog.
    void until(const std::function<bool()>& done);

  private:
    std::mutex mutex_;
    std::condition_variable posted_;
    std::deque<std::function<void()>> functions_;
};

struct TempDirectory {
    TempDirectory();
    ~TempDirectory();
    TempDirectory(const TempDirectory&) = delete;
    TempDirectory& operator=(const TempDirectory&) = delete;
    std::filesystem::path path;
};

// Everything in it follows from the number, and differs from that of any other.
Snapshot make_snapshot(std::uint64_t number, const Clock& clock);
StreamId stream_number(std::uint64_t number);
Key key_number(std::uint64_t number);
// All but what save() fills in and what loading adapts.
bool same_content(const Snapshot& one, const Snapshot& other);

// A broker's life with the store. Several may follow one another on one directory.
struct StoreLife {
    explicit StoreLife(const std::filesystem::path& directory, const SnapshotOptions& options = defaults(),
                       std::string boot_id = "boot-1");

    static SnapshotOptions defaults(); // retries at once

    void save(std::uint64_t number, Nanos ttl = 600 * kSecond);
    Result<Snapshot> load(StreamId id);
    Result<Snapshot> load_number(std::uint64_t number) { return load(stream_number(number)); }
    void settle(); // until nothing is queued and nothing is degraded
    bool here(std::uint64_t number) const { return store->known(stream_number(number)) == Snapshots::Known::here; }
    bool gone(std::uint64_t number) const { return store->known(stream_number(number)) == Snapshots::Known::gone; }
    bool whole(std::uint64_t number); // here, and loads as it was saved

    std::filesystem::path file;
    FakeClock clock;
    FakeTimers timers{clock};
    HandLoop loop;
    std::unique_ptr<Snapshots> store;
};

} // namespace gcoalesce::test
