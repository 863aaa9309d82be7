// The SQLite file behind broker/snapshots.hpp: what blocks, and nothing else. One thread at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <sys/types.h>
#include <tl/expected.hpp>
#include <vector>

#include "base/fd.hpp"
#include "broker/snapshots.hpp"

namespace gcoalesce {

// What is written in one transaction: first the deletes, then the saves.
struct SnapshotBatch {
    struct Save {
        std::int64_t order = 0;
        std::uint64_t cost = 0;
        Nanos ttl = 0;
        std::shared_ptr<const Snapshot> snapshot;
    };
    std::vector<StreamId> deletes;
    std::deque<Save> saves;
    std::deque<StreamId> gone;
    std::map<std::string, std::string, std::less<>> facts;
    bool scrub = false; // deleted content must leave the write-ahead log too

    bool empty() const { return deletes.empty() && saves.empty() && gone.empty() && facts.empty() && !scrub; }
};

struct FileContents {
    struct Row {
        SnapshotFacts facts; // boot times are those of boot_id
        std::string boot_id;
        Nanos ttl = 0;
        std::uint64_t cost = 0;
    };
    std::vector<Row> rows; // the oldest first
    std::vector<StreamId> gone;
    std::map<std::string, std::string, std::less<>> facts;
};

struct LoadedSnapshot {
    Snapshot snapshot; // times as they were stored
    std::string boot_id;
    bool whole = false; // it has the digest that it was stored with
};

class SnapshotFile {
  public:
    struct Failure {
        std::string reason;   // in words: the file's name and what is wrong with it, nothing of its content
        bool damaged = false; // what it holds cannot be trusted
        bool reopen = true;   // this connection will not recover
    };
    template <class T>
    using Outcome = tl::expected<T, Failure>;

    // Makes the file where it is absent, checks it where it is not. `stop` ends a check that takes long. As long as the
    // object lives, <path>.lock is locked: of another broker on the same file the reason names the pid.
    static Outcome<std::unique_ptr<SnapshotFile>> open(const std::string& path, std::uint64_t max_log_bytes,
                                                       const std::string& boot_id, const std::atomic<bool>& stop);
    ~SnapshotFile();

    Outcome<FileContents> read();
    Outcome<void> write(const SnapshotBatch& batch); // all or nothing
    Outcome<std::optional<LoadedSnapshot>> load(StreamId id);
    Outcome<void> shrink(); // gives free pages back where they are more than a quarter of the file
    Outcome<void> empty_log();
    bool moved() const; // the path names another file by now, or none

    // Renames the file, its -wal and -shm; returns the new name.
    static std::string set_aside(const std::string& path);
    // What a snapshot takes of the file.
    static std::uint64_t cost(const Snapshot& snapshot);

  private:
    struct Connection;
    SnapshotFile();

    Outcome<void> start(const std::atomic<bool>& stop);
    Outcome<void> prepare();
    int write_rows(const SnapshotBatch& batch);
    Failure failure(int code) const;

    UniqueFd lock_; // first: held until the connection has been closed
    std::string path_, boot_id_;
    std::uint64_t max_log_bytes_ = 0;
    ::dev_t device_ = 0;
    ::ino_t inode_ = 0;
    std::unique_ptr<Connection> connection_;
};

} // namespace gcoalesce
