// Finished streams on disk, so that readers who come back late still get theirs, also from the next broker.
//
// One SQLite file, <directory>/gcoalesce-<instance>.db, mode 0600, of one broker: who holds <file>.lock. One thread
// owns the connection and does whatever may block; the event loop keeps an index in memory and never waits for the
// disk. Where the disk refuses, requests do not notice: state() says `degraded` and why, the thread tries again with a
// growing delay, and what was saved meanwhile waits in a bounded queue, of which the oldest are dropped first.
//
// Deleted content is overwritten with zeros in the file (secure_delete), and purging also empties the write-ahead log.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/ids.hpp"
#include "broker/timers.hpp"
#include "protocol/gemini.hpp"
#include "segment/layout.hpp"

namespace gcoalesce {

struct FileContents;
struct LoadedSnapshot;

// What the index in memory knows of a snapshot. Boot times are by this boot's clock, also for what an earlier boot
// left: its age is then taken from the wall clock once, when the file is read (so they may lie below 0).
struct SnapshotFacts {
    Key key{};
    StreamId stream_id = 0;
    std::uint64_t realm = 0; // 0: everyone
    std::string template_id;
    Nanos ended_boottime_ns = 0;
    Nanos fresh_until_boottime_ns = 0; // 0: must not be reused as fresh; so too for what an earlier boot left
    // Filled in by save():
    std::uint64_t events = 0, event_bytes = 0;
    gcoalesce_ending_kind kind = GCOALESCE_IN_FLIGHT;
    bool reusable = false;
    std::int64_t ended_wall_ns = 0, expires_wall_ns = 0;
    Nanos expires_boottime_ns = 0;

    bool operator==(const SnapshotFacts&) const = default;
};

struct Snapshot {
    SnapshotFacts facts;
    Method method = Method::stream;
    std::string model;
    std::uint64_t template_revision = 0;
    Nanos opened_ns = 0, first_event_ns = 0; // monotonic; first_event_ns 0: there was none
    std::int64_t opened_wall_ns = 0;
    std::int32_t upstream_status = 0;
    std::uint32_t retries = 0;
    SlotEnding ending{};
    std::string request_head; // the body's first bytes, for people
    std::uint64_t request_bytes = 0;
    Key request_digest{};
    std::vector<std::string> events; // each as it came
};

struct SnapshotOptions {
    std::string directory; // made with mode 0700 where it is absent
    std::string instance;
    std::uint64_t max_bytes = 256 << 20;  // of the file, the oldest give way; the write-ahead log may be as long
    std::uint64_t queue_bytes = 16 << 20; // of what is not written yet
    Nanos open_within = 5 * kSecond;      // how long open() waits for the file to be read
    Nanos retry_first = 250 * kMillisecond, retry_most = 10 * kSecond;
    std::string boot_id; // empty: the kernel's
};

struct SnapshotState {
    bool degraded = false;
    std::string reason;                                  // in words, where degraded
    std::uint64_t count = 0, bytes = 0;                  // kept at present, those not written yet included
    std::uint64_t queued = 0, queued_bytes = 0;          // of these not written yet
    std::uint64_t saved = 0;                             // written to the file
    std::uint64_t dropped = 0, expired = 0, evicted = 0; // before they were written; by time; by size
    std::uint64_t purged = 0, lost = 0;                  // by an operator; with a damaged or vanished file
};

// Single-threaded: the event loop's, its own thread aside. Callbacks run on the event loop, never within the call.
class Snapshots {
  public:
    // Hands a function to the event loop, from any thread. Must work until the destructor has returned; what is run
    // after that does nothing.
    using Post = std::function<void(std::function<void()>)>;

    // Makes or opens the file, and waits for that, options.open_within at most. A file or directory that cannot be used
    // is no error but a degraded state. A damaged file is set aside as <file>.damaged-<UTC>, with its -wal and -shm,
    // and a fresh one is made. A file of a newer schema, or of another program, is left as it is. GCOALESCE_IO: no
    // thread.
    static Result<std::unique_ptr<Snapshots>> open(SnapshotOptions options, Timers& timers, Post post);
    // Waits for the write under way. What is still queued is lost; callbacks that did not run yet never will.
    ~Snapshots();
    Snapshots(const Snapshots&) = delete;
    Snapshots& operator=(const Snapshots&) = delete;

    // Keeps an ended stream for `ttl` (0 or less: it is not kept); one of the same stream id is replaced. It can be
    // found and loaded at once. ttl runs by boot time while the machine does, by wall clock across a reboot.
    void save(Snapshot snapshot, Nanos ttl);

    // The latest complete and reusable one. From memory.
    std::optional<SnapshotFacts> newest(const Key& key) const;
    // Whatever its ending. From memory.
    std::optional<SnapshotFacts> find(StreamId id) const;

    // GCOALESCE_NOT_FOUND: never known; _GONE: known once; _IO: the disk does not give it, and why. Monotonic times of
    // the answer are this boot's, moved there by its age where an earlier boot wrote it.
    void load(StreamId id, std::function<void(Result<Snapshot>)> done);

    // Gone: kept or told to remember_gone() once, and not kept any more. Bounded: the last 65,536 such ids, which the
    // file keeps too.
    enum class Known { no, gone, here };
    Known known(StreamId id) const;
    void remember_gone(StreamId id); // of a stream that was never saved; nothing for one that is here

    // They answer how many were dropped. At once for find() and load(), with the next write for the file.
    std::size_t purge(const Key& key);
    std::size_t purge_template(std::string_view template_id);
    std::size_t purge_all();

    // Small facts kept across restarts. get() also sees what is not written yet. Before ready() only what was put.
    void put(std::string_view name, std::string value);
    std::optional<std::string> get(std::string_view name) const;

    // False as long as the file could not be read since open(): what it holds is not known.
    bool ready() const { return ready_; }
    SnapshotState state() const;

    // For shutdown: blocks until everything queued is written (true), a try has failed, or `within` of real time is
    // over.
    bool flush(Nanos within);

    static constexpr std::size_t kGoneIds = 65536;

  private:
    class Disk; // the thread
    struct Entry {
        SnapshotFacts facts;
        std::int64_t order = 0;                 // in which they were saved
        std::uint64_t cost = 0;                 // bytes of the file, rounded up to pages
        bool stored = false;                    // the file may hold a row of this id
        std::shared_ptr<const Snapshot> queued; // until it is written
    };
    using Index = std::unordered_map<StreamId, Entry>;
    struct KeyHash {
        std::size_t operator()(const Key& key) const { return key_fingerprint(key); }
    };
    struct Purge { // unset: any
        std::optional<Key> key;
        std::optional<std::string> template_id;
        bool matches(const SnapshotFacts& facts) const;
    };

    Snapshots(SnapshotOptions options, Timers& timers);

    bool alive(const SnapshotFacts& facts) const;
    void insert(Entry entry);
    Entry take_out(StreamId id);
    void forget(const std::vector<StreamId>& ids); // out of index, queue and file; known as gone from then on
    void note_gone(StreamId id);
    void make_room();
    std::size_t purge(const Purge& what);
    void arm();
    void expire();
    Result<Snapshot> take_loaded(StreamId id, LoadedSnapshot& loaded);
    // What the thread reports.
    void found(const FileContents& contents);
    void written(const std::vector<std::pair<StreamId, std::int64_t>>& saves);
    void set_disk_reason(const std::string& reason); // empty: it works

    SnapshotOptions options_;
    Timers& timers_;
    Index index_;
    std::map<std::int64_t, StreamId> by_order_;
    std::set<std::pair<Nanos, StreamId>> by_expiry_;
    std::unordered_map<Key, std::vector<StreamId>, KeyHash> by_key_; // reusable ones, latest last
    std::int64_t first_order_ = 0, next_order_ = 0;
    std::unordered_set<StreamId> gone_;
    std::deque<StreamId> gone_order_;
    std::map<std::string, std::string, std::less<>> facts_;
    std::vector<Purge> unread_purges_; // asked for before the file could be read
    bool ready_ = false, queue_full_ = false;
    std::uint64_t bytes_ = 0; // the costs of all entries
    SnapshotState state_;     // its counters; the rest is worked out when asked
    std::string disk_reason_;
    Nanos armed_for_ = 0;
    std::unique_ptr<Timer> timer_;
    std::unique_ptr<Disk> disk_; // last: its thread ends first
};

} // namespace gcoalesce
