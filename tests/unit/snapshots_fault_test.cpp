// What the snapshot store does when the disk, the file or the process does not.
#include <algorithm>
#include <array>
#include <atomic>
#include <catch2/catch.hpp>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <regex>
#include <sqlite3.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/fd.hpp"
#include "broker/snapshots.hpp"
#include "tests/support/fixtures.hpp"
#include "tests/support/snapshots.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;

namespace {

constexpr Nanos kHour = 3600 * kSecond;

// Another process's view of a database.
class Sql {
  public:
    explicit Sql(const std::filesystem::path& file) { REQUIRE(sqlite3_open(file.c_str(), &db_) == SQLITE_OK); }
    ~Sql() { sqlite3_close(db_); }
    Sql(const Sql&) = delete;
    Sql& operator=(const Sql&) = delete;
    void run(const char* sql) {
        INFO(sql);
        INFO(sqlite3_errmsg(db_));
        REQUIRE(sqlite3_exec(db_, sql, nullptr, nullptr, nullptr) == SQLITE_OK);
    }

  private:
    sqlite3* db_ = nullptr;
};

void write_file(const std::filesystem::path& path, std::string_view bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
}

// What is kept; neither what SQLite makes anew nor the lock, which says whose it is.
std::map<std::string, std::string> files_of(const std::filesystem::path& directory) {
    std::map<std::string, std::string> files;
    for (const auto& entry : std::filesystem::directory_iterator(directory))
        if (const std::string name = entry.path(); !name.ends_with("-shm") && !name.ends_with(".lock"))
            files[entry.path().filename()] = read_file(entry.path());
    return files;
}

// The names of what was set aside, by what follows the stamp.
std::map<std::string, std::string> set_aside(const std::filesystem::path& directory) {
    static const std::regex form(R"(gcoalesce-default\.db\.damaged-\d{8}T\d{6}Z(-wal|-shm)?)");
    std::map<std::string, std::string> names;
    for (const auto& [name, content] : files_of(directory))
        if (std::smatch parts; std::regex_match(name, parts, form)) names[parts[1]] = name;
    return names;
}

void degrade(StoreLife& life, const std::string& word) {
    life.loop.until([&] {
        const SnapshotState state = life.store->state();
        return state.degraded && state.reason.find(word) != std::string::npos;
    });
}

// A file system that a test can fill and make read-only.
struct Mount {
    Mount(const std::filesystem::path& where, const char* options) : path(where) {
        std::filesystem::create_directories(path);
        there = ::mount("none", path.c_str(), "tmpfs", 0, options) == 0;
    }
    ~Mount() {
        if (there) ::umount2(path.c_str(), MNT_DETACH);
    }
    Mount(const Mount&) = delete;
    Mount& operator=(const Mount&) = delete;
    std::filesystem::path path;
    bool there = false;
};

#define REQUIRE_MOUNT(mount)                                                                                           \
    if (!(mount).there) {                                                                                              \
        std::puts("SKIPPED: this process may not mount a file system");                                                \
        return;                                                                                                        \
    }

// SQLite's own way to the system, on which operations can be made to fail. One at a time, for the whole process.
class FaultyDisk {
  public:
    enum Operation : unsigned { read = 1, write = 2, sync = 4, truncate = 8, lock = 16, map = 32, open = 64 };

    FaultyDisk() {
        real_ = sqlite3_vfs_find(nullptr);
        vfs_ = *real_;
        vfs_.zName = "faulty";
        vfs_.xOpen = [](sqlite3_vfs*, const char* name, sqlite3_file* file, int flags, int* out) {
            if (const int code = hit(open)) {
                file->pMethods = nullptr;
                return code;
            }
            const int code = real_->xOpen(real_, name, file, flags, out);
            if (file->pMethods != nullptr) file->pMethods = patched(file->pMethods);
            return code;
        };
        sqlite3_vfs_register(&vfs_, 1);
    }
    ~FaultyDisk() {
        heal();
        sqlite3_vfs_unregister(&vfs_);
    }
    FaultyDisk(const FaultyDisk&) = delete;
    FaultyDisk& operator=(const FaultyDisk&) = delete;

    // The operations of these kinds fail with `code` after `after` of them went well: `times` of them.
    void fail(unsigned operations, int code, int after, int times) {
        heal();
        code_ = code;
        left_ = times;
        wait_ = after;
        operations_ = operations;
    }
    void heal() { operations_ = 0; }
    static int left() { return left_; }

  private:
    struct Methods {
        sqlite3_io_methods own;
        const sqlite3_io_methods* real;
    };

    static int hit(Operation operation) {
        if ((operations_.load() & operation) == 0) return SQLITE_OK;
        if (wait_.fetch_sub(1) > 0) return SQLITE_OK;
        return left_.fetch_sub(1) > 0 ? code_.load() : SQLITE_OK;
    }
    static const sqlite3_io_methods* real(const sqlite3_file* file) {
        return reinterpret_cast<const Methods*>(file->pMethods)->real;
    }
    static const sqlite3_io_methods* patched(const sqlite3_io_methods* real) {
        static std::mutex mutex;
        static std::map<const sqlite3_io_methods*, std::unique_ptr<Methods>> all;
        const std::lock_guard guard(mutex);
        auto& methods = all[real];
        if (!methods) {
            methods = std::make_unique<Methods>(Methods{*real, real});
            sqlite3_io_methods& own = methods->own;
            own.xRead = [](sqlite3_file* file, void* to, int bytes, sqlite3_int64 at) {
                const int code = hit(read);
                return code != SQLITE_OK ? code : FaultyDisk::real(file)->xRead(file, to, bytes, at);
            };
            own.xWrite = [](sqlite3_file* file, const void* from, int bytes, sqlite3_int64 at) {
                const int code = hit(write);
                return code != SQLITE_OK ? code : FaultyDisk::real(file)->xWrite(file, from, bytes, at);
            };
            own.xSync = [](sqlite3_file*, int) { return hit(sync); }; // no power fails here: the wait is saved
            own.xTruncate = [](sqlite3_file* file, sqlite3_int64 size) {
                const int code = hit(truncate);
                return code != SQLITE_OK ? code : FaultyDisk::real(file)->xTruncate(file, size);
            };
            own.xLock = [](sqlite3_file* file, int level) {
                const int code = hit(lock);
                return code != SQLITE_OK ? code : FaultyDisk::real(file)->xLock(file, level);
            };
            own.xShmMap = [](sqlite3_file* file, int page, int bytes, int extend, void volatile** to) {
                const int code = hit(map);
                return code != SQLITE_OK ? code : FaultyDisk::real(file)->xShmMap(file, page, bytes, extend, to);
            };
        }
        return &methods->own;
    }

    static inline sqlite3_vfs* real_ = nullptr;
    static inline std::atomic<unsigned> operations_{0};
    static inline std::atomic<int> code_{0}, wait_{0}, left_{0};
    sqlite3_vfs vfs_{};
};

} // namespace

TEST_CASE("A full disk degrades the store with that reason, what is there stays readable, and it recovers by itself") {
    const TempDirectory directory;
    const Mount disk(directory.path / "disk", "size=512k");
    REQUIRE_MOUNT(disk);
    StoreLife life(disk.path);
    life.save(1);
    life.settle();
    const std::filesystem::path ballast = disk.path / "ballast";
    {
        std::ofstream filler(ballast, std::ios::binary);
        for (int i = 0; i < 1000; ++i) filler << std::string(1024, 'x') << std::flush;
    }
    Snapshot large = make_snapshot(2, life.clock);
    large.events.assign(20, std::string(5000, 'y')); // beyond what the log has room for
    life.store->save(large, kHour);
    life.save(3);
    degrade(life, "full");
    CHECK(life.whole(1)); // from the file
    CHECK((life.load_number(2)->events == large.events));
    CHECK(life.store->find(stream_number(2)));
    CHECK(!life.store->flush(60 * kSecond));
    CHECK(life.store->state().queued == 2);
    CHECK(life.store->state().queued_bytes > 0);
    std::filesystem::remove(ballast);
    life.settle();
    CHECK(life.store->state().queued == 0);
    CHECK(life.store->state().dropped == 0);
    life.store.reset();
    StoreLife next(disk.path);
    CHECK(next.whole(1));
    CHECK((next.load_number(2)->events == large.events));
    CHECK(next.whole(3));
}

TEST_CASE("A read-only file system degrades the store at its start, and it recovers when that ends") {
    const TempDirectory directory;
    const Mount disk(directory.path / "disk", "size=4m");
    REQUIRE_MOUNT(disk);
    const bool with_file = GENERATE(false, true);
    if (with_file) {
        StoreLife life(disk.path);
        life.save(1);
        life.settle();
    }
    const auto remount = [&](unsigned long flags) {
        return ::mount("none", disk.path.c_str(), nullptr, MS_REMOUNT | flags, nullptr) == 0;
    };
    REQUIRE(remount(MS_RDONLY));
    StoreLife life(disk.path);
    degrade(life, "ead-only");
    CHECK(!life.store->ready());
    life.save(2);
    CHECK(life.whole(2));
    REQUIRE(remount(0));
    life.settle();
    CHECK(life.whole(2));
    CHECK(life.here(1) == with_file);
    life.store.reset();
    StoreLife next(disk.path);
    CHECK(next.whole(2));
    CHECK(next.here(1) == with_file);
}

TEST_CASE(
    "A directory that is a file degrades the store; what was saved, purged and put meanwhile counts once it can be "
    "opened") {
    const TempDirectory directory;
    const std::filesystem::path state = directory.path / "state";
    {
        StoreLife life(state);
        for (std::uint64_t number = 0; number < 9; ++number) life.save(number);
        life.store->put("old", "1");
        life.store->put("both", "1");
        life.settle();
    }
    std::filesystem::rename(state, directory.path / "elsewhere");
    write_file(state, "not a directory");
    StoreLife life(state);
    degrade(life, "Not a directory");
    CHECK(!life.store->ready());
    CHECK(!life.here(1)); // nobody knows
    CHECK(!life.store->get("old"));
    life.store->put("both", "2");
    life.save(10);
    life.save(11);
    CHECK(life.store->purge(key_number(10)) == 1);
    CHECK(life.store->purge(key_number(4)) == 0); // not known to be there
    CHECK(life.store->purge_template("template-2") == 1);
    life.save(20); // template-2, after the purge
    CHECK(life.gone(10));
    CHECK(life.whole(20));
    std::filesystem::remove(state);
    std::filesystem::rename(directory.path / "elsewhere", state);
    life.settle();
    for (std::uint64_t number = 0; number < 9; ++number) CHECK(life.here(number) == (number != 4 && number % 3 != 2));
    CHECK(life.gone(4));
    CHECK(life.store->get("old") == "1");
    CHECK(life.store->get("both") == "2");
    CHECK(life.store->state().purged == 6);
    life.settle();
    life.store.reset();
    StoreLife next(state);
    for (std::uint64_t number = 0; number < 9; ++number) CHECK(next.here(number) == (number != 4 && number % 3 != 2));
    CHECK(next.gone(10));
    CHECK(next.gone(11));
    CHECK(next.whole(20));
    CHECK(next.store->get("both") == "2");
}

TEST_CASE("A file that another process keeps locked, from the start or from later on, is waited for") {
    const TempDirectory directory;
    const bool from_start = GENERATE(true, false);
    {
        StoreLife life(directory.path);
        life.save(1);
        life.settle();
    }
    auto other = std::make_unique<Sql>(directory.path / "gcoalesce-default.db");
    const auto lock = [&] {
        if (from_start) other->run("PRAGMA locking_mode = EXCLUSIVE");
        other->run("BEGIN IMMEDIATE");
        other->run("INSERT INTO fact VALUES ('other', 'x')");
    };
    if (from_start) lock();
    StoreLife life(directory.path);
    if (!from_start) lock();
    life.save(2);
    degrade(life, "locked");
    CHECK(life.store->ready() == !from_start);
    CHECK(life.whole(2));
    if (!from_start) CHECK(life.whole(1)); // reading goes on
    other->run("COMMIT");
    other.reset();
    life.settle();
    CHECK(life.whole(1));
    CHECK(life.whole(2));
}

TEST_CASE("A file that vanishes is made anew, with what is still known; what only it held is gone") {
    const TempDirectory directory;
    const bool with_directory = GENERATE(true, false);
    const std::filesystem::path state = directory.path / "state";
    StoreLife life(state);
    life.save(1);
    life.store->put("fact", "1");
    life.store->remember_gone(stream_number(5));
    life.settle();
    if (with_directory)
        std::filesystem::remove_all(state);
    else
        std::filesystem::remove(life.file);
    life.save(2);
    life.settle();
    life.loop.until([&] { return life.gone(1); });
    CHECK(life.store->state().lost == 1);
    life.settle();
    life.store.reset();
    StoreLife next(state);
    CHECK(next.gone(1));
    CHECK(next.whole(2));
    CHECK(next.gone(5));
    CHECK(next.store->get("fact") == "1");
}

TEST_CASE("While the disk fails the queue holds what it may, the oldest are dropped, and the newest come through") {
    const TempDirectory directory;
    SnapshotOptions options = StoreLife::defaults();
    options.queue_bytes = 200'000;
    const std::filesystem::path state = directory.path / "state";
    write_file(state, "");
    StoreLife life(state, options);
    for (std::uint64_t number = 0; number < 300; ++number) {
        life.save(number);
        REQUIRE(life.store->state().queued_bytes <= options.queue_bytes);
    }
    const SnapshotState before = life.store->state();
    CHECK(before.degraded);
    CHECK(before.dropped > 200);
    CHECK(before.count == 300 - before.dropped);
    CHECK(before.queued == before.count);
    // A try to write holds up to a quarter of the queue, which cannot be dropped meanwhile: what is younger goes then.
    std::vector<std::uint64_t> kept;
    for (std::uint64_t number = 0; number < 300; ++number) {
        if (life.gone(number)) continue;
        REQUIRE(life.whole(number));
        kept.push_back(number);
    }
    REQUIRE(kept.size() == before.count);
    CHECK(kept.back() == 299);
    CHECK(300 - kept[kept.size() / 2] <= before.count);
    std::filesystem::remove(state);
    life.settle();
    CHECK(life.store->state().saved == before.count);
    life.store.reset();
    StoreLife next(state, options);
    CHECK(next.store->state().count == before.count);
    CHECK(next.whole(299));
    for (std::uint64_t number = 0; number < 300; ++number)
        CHECK(next.gone(number) == (std::find(kept.begin(), kept.end(), number) == kept.end()));
}

TEST_CASE("A full queue is a reason of its own, until it is empty") {
    const TempDirectory directory;
    SnapshotOptions options = StoreLife::defaults();
    options.queue_bytes = 100'000;
    StoreLife life(directory.path, options);
    Sql other(life.file);
    other.run("BEGIN IMMEDIATE");
    for (std::uint64_t number = 0; number < 100; ++number) life.save(number);
    CHECK(life.store->state().dropped > 0);
    degrade(life, "locked");
    other.run("COMMIT");
    life.loop.until([&] { return !life.store->state().degraded; });
    CHECK(life.store->state().queued == 0);
    CHECK(life.whole(99));
}

TEST_CASE("A file of a newer schema or of another program is refused by name and left untouched") {
    const TempDirectory directory;
    const bool newer = GENERATE(true, false);
    const std::filesystem::path file = directory.path / "gcoalesce-default.db";
    if (newer) {
        StoreLife life(directory.path);
        life.save(1);
        life.settle();
    }
    const pid_t child = ::fork(); // a process that dies before it has emptied its log
    REQUIRE(child >= 0);
    if (child == 0) {
        sqlite3* db = nullptr;
        sqlite3_open(file.c_str(), &db);
        sqlite3_exec(db, "PRAGMA journal_mode = WAL; CREATE TABLE more (x); PRAGMA user_version = 7", nullptr, nullptr,
                     nullptr);
        ::_exit(0);
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    const auto before = files_of(directory.path);
    REQUIRE(before.contains("gcoalesce-default.db-wal"));
    {
        StoreLife life(directory.path);
        degrade(life, newer ? "has schema version 7, this broker knows version 1" : "another program");
        life.save(2);
        CHECK(life.whole(2));
        CHECK(!life.store->flush(60 * kSecond));
    }
    CHECK(files_of(directory.path) == before);

    StoreLife life(directory.path); // moved away while the broker runs, it is no obstacle any more
    life.save(3);
    for (const auto& [name, content] : before)
        std::filesystem::rename(directory.path / name, directory.path / ("away-" + name));
    life.settle();
    CHECK(life.whole(3));
}

TEST_CASE("A damaged file is set aside under a dated name, log and all, and a fresh one is used") {
    const TempDirectory directory;
    const std::filesystem::path file = directory.path / "gcoalesce-default.db";
    {
        StoreLife life(directory.path);
        for (std::uint64_t number = 0; number < 200; ++number) life.save(number);
        life.settle();
    }
    std::string bytes = read_file(file);
    std::string_view log;
    SECTION("not a database at all") {
        bytes.assign(10000, 'x');
    }
    SECTION("a log beside it") {
        bytes.assign(10000, 'x');
        log = "not a log";
    }
    SECTION("pages overwritten in its midst") {
        for (std::size_t at = 4096; at + 4096 <= bytes.size(); at += 5 * 4096) bytes.replace(at, 4096, 4096, '\x55');
    }
    SECTION("cut short") {
        bytes.resize(bytes.size() / 8192 * 4096);
    }
    SECTION("the schema's page zeroed") {
        bytes.replace(100, 3996, 3996, '\0');
    }
    write_file(file, bytes);
    if (!log.empty()) write_file(file.string() + "-wal", log);
    {
        StoreLife life(directory.path);
        CHECK(!life.store->state().degraded);
        CHECK(life.store->state().count == 0);
        life.save(500);
        life.settle();
        CHECK(life.whole(500));
    }
    const auto names = set_aside(directory.path);
    REQUIRE(names.contains(""));
    CHECK(read_file(directory.path / names.at("")) == bytes);
    if (!log.empty()) CHECK(read_file(directory.path / names.at("-wal")) == log);
    StoreLife next(directory.path);
    CHECK(next.whole(500));
    CHECK(next.store->state().count == 1);
    CHECK(set_aside(directory.path) == names);
}

TEST_CASE("A file that is damaged while it is used is set aside too, and the store goes on") {
    const TempDirectory directory;
    StoreLife life(directory.path);
    for (std::uint64_t number = 0; number < 1500; ++number) life.save(number); // more than SQLite keeps in memory
    life.store->purge(key_number(0)); // empties the log: the file holds everything
    life.settle();
    const std::size_t size = std::filesystem::file_size(life.file);
    {
        std::fstream file(life.file, std::ios::in | std::ios::out | std::ios::binary);
        for (std::size_t at = 4096; at < size; at += 4096) {
            file.seekp(static_cast<std::streamoff>(at));
            file << std::string(4096, '\x55');
        }
    }
    // Pages that the thread still has in its memory are good: ask until one is not.
    for (std::uint64_t number = 1; number < 1500 && set_aside(directory.path).empty(); ++number)
        life.load_number(number);
    life.loop.until([&] { return life.store->state().lost > 0; });
    CHECK(!set_aside(directory.path).empty());
    life.save(5000);
    life.settle();
    CHECK(life.whole(5000));
    CHECK(life.gone(1));
}

TEST_CASE("An answer whose bytes changed on the disk is never handed out") {
    const TempDirectory directory;
    {
        StoreLife life(directory.path);
        Snapshot snapshot = make_snapshot(1, life.clock);
        snapshot.events.assign(100, "an answer that stands in the file ");
        life.store->save(snapshot, kHour);
        life.save(2);
        life.settle();
    }
    const std::filesystem::path file = directory.path / "gcoalesce-default.db";
    std::string bytes = read_file(file);
    const std::size_t at = bytes.find("answer that stands");
    REQUIRE(at != std::string::npos);
    bytes[at] = 'A';
    write_file(file, bytes);
    StoreLife life(directory.path);
    CHECK(life.here(1)); // a changed byte is not a damaged database
    const auto loaded = life.load_number(1);
    REQUIRE(!loaded);
    CHECK(loaded.error().code == GCOALESCE_GONE);
    CHECK(loaded.error().message.find("nswer that stands") == std::string::npos);
    CHECK(life.gone(1));
    CHECK(life.store->state().lost == 1);
    CHECK(life.whole(2));
}

TEST_CASE("Something else than a file under its name, or one open to others, is dealt with by name") {
    const TempDirectory directory;
    const std::filesystem::path file = directory.path / "gcoalesce-default.db";
    SECTION("a link is not followed") {
        std::filesystem::create_symlink(directory.path / "target", file);
        StoreLife life(directory.path);
        degrade(life, "is not a regular file");
        CHECK(!std::filesystem::exists(directory.path / "target"));
    }
    SECTION("a directory") {
        std::filesystem::create_directory(file);
        StoreLife life(directory.path);
        degrade(life, "is not a regular file");
    }
    SECTION("a file that others may read is closed to them") {
        write_file(file, "");
        std::filesystem::permissions(file, std::filesystem::perms(0644));
        StoreLife life(directory.path);
        CHECK(!life.store->state().degraded);
        CHECK(std::filesystem::status(file).permissions() == std::filesystem::perms(0600));
    }
}

TEST_CASE(
    "A process that keeps reading the file cannot make the log grow without limit, nor purged words stay unnoticed") {
    const TempDirectory directory;
    SnapshotOptions options = StoreLife::defaults();
    options.max_bytes = 1 << 20;
    StoreLife life(directory.path, options);
    life.save(0);
    life.settle();
    Sql reader(life.file);
    reader.run("BEGIN");
    reader.run("SELECT count(*) FROM snapshot");
    for (std::uint64_t number = 1; !life.store->state().degraded; ++number) {
        life.save(number);
        if (number % 16 == 0) life.store->flush(60 * kSecond);
        REQUIRE(number < 5000);
    }
    degrade(life, "locked");
    CHECK(std::filesystem::file_size(life.file.string() + "-wal") < 8 * options.max_bytes); // one transaction above
    life.store->purge_all();
    CHECK(!life.store->flush(60 * kSecond));
    reader.run("COMMIT");
    life.settle();
    CHECK(std::filesystem::file_size(life.file.string() + "-wal") == 0);
    life.save(1);
    life.settle();
    CHECK(life.whole(1));
}

TEST_CASE(
    "An operation that fails, whichever it is, loses nothing that was saved and revives nothing that was purged") {
    struct Fault {
        unsigned operations;
        int code;
        int times;
    };
    const Fault fault =
        GENERATE(Fault{FaultyDisk::write, SQLITE_FULL, 1}, Fault{FaultyDisk::write | FaultyDisk::sync, SQLITE_FULL, 5},
                 Fault{FaultyDisk::write, SQLITE_IOERR_WRITE, 3}, Fault{FaultyDisk::sync, SQLITE_IOERR_FSYNC, 1},
                 Fault{FaultyDisk::read, SQLITE_IOERR_READ, 1}, Fault{FaultyDisk::truncate, SQLITE_IOERR_TRUNCATE, 1},
                 Fault{FaultyDisk::lock, SQLITE_BUSY, 1}, Fault{FaultyDisk::lock, SQLITE_IOERR_LOCK, 2},
                 Fault{FaultyDisk::map, SQLITE_IOERR_SHMMAP, 1}, Fault{FaultyDisk::open, SQLITE_CANTOPEN, 1},
                 Fault{FaultyDisk::write | FaultyDisk::sync | FaultyDisk::open, SQLITE_IOERR, 5});
    INFO("code " << fault.code << ", " << fault.times << " times");
    FaultyDisk disk;
    std::string made;
    {
        const TempDirectory directory;
        StoreLife life(directory.path);
        for (std::uint64_t number = 0; number < 10; ++number) life.save(number);
        life.store->put("fact", "0");
        life.settle();
        life.store.reset();
        made = read_file(life.file);
    }
    int after = 0;
    for (bool hit = true; hit && after < 2000; after += 1 + after / 20) {
        INFO("after " << after);
        const bool fresh = after % 2 == 1;
        const TempDirectory directory;
        const std::filesystem::path file = directory.path / "gcoalesce-default.db";
        if (!fresh) write_file(file, made);
        disk.fail(fault.operations, fault.code, after, fault.times);
        {
            StoreLife life(directory.path);
            for (std::uint64_t number = 10; number < 30; ++number) life.save(number);
            life.store->flush(60 * kSecond);
            life.store->purge(key_number(3));
            life.store->purge(key_number(13));
            life.store->put("fact", "1");
            life.load_number(5);
            life.load_number(15);
            life.settle();
            hit = FaultyDisk::left() < fault.times;
            disk.heal();
            life.settle();
            for (std::uint64_t number = 10; number < 30; ++number) REQUIRE(life.here(number) == (number != 13));
        }
        REQUIRE(set_aside(directory.path).empty()); // what could not be read is not damaged
        StoreLife next(directory.path);
        REQUIRE(!next.store->state().degraded);
        REQUIRE(next.store->state().count == (fresh ? 19 : 28));
        for (std::uint64_t number = fresh ? 10 : 0; number < 30; ++number)
            if (number != 3 && number != 13) REQUIRE(next.whole(number));
        REQUIRE(next.gone(13));
        REQUIRE(next.store->get("fact") == "1");
    }
    CHECK(after > 2); // some did fail
    CHECK(after < 2000);
}

// ---- a real process, killed ----------------------------------------------------------------------------------------

namespace {

constexpr std::uint64_t kRoundNumbers = 100'000; // each round's own

// Saves, and tells through the pipe how many are written, until it is killed.
[[noreturn]] void writer(const std::filesystem::path& directory, std::uint64_t first, const UniqueFd& pipe) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    StoreLife life(directory);
    std::uint64_t saved = 0, told = 0;
    for (;;) {
        for (std::uint64_t more = 1 + saved % 7; more > 0; --more) life.save(first + saved++);
        life.store->put("saved", std::to_string(saved));
        if (saved % 11 == 0) life.store->purge(key_number(first + saved - 1)); // queued, or being written
        life.loop.until([&] { return life.store->state().saved > told || life.store->state().queued == 0; });
        for (const std::uint64_t written = life.store->state().saved; told < written; ++told)
            if (::write(pipe.get(), "w", 1) != 1) ::_exit(1);
    }
}

} // namespace

TEST_CASE("Killed at any instant, the store holds whole snapshots only, and all that it called written") {
    constexpr int kRounds = 100;
    const TempDirectory directory;
    std::random_device seed;
    const auto seeded = seed();
    INFO("seed " << seeded);
    std::mt19937_64 random(seeded);
    std::uint64_t found = 0, in_log = 0;
    for (std::uint64_t round = 0; round < kRounds; ++round) {
        const std::uint64_t first = round * kRoundNumbers;
        std::array<int, 2> ends{};
        REQUIRE(::pipe(ends.data()) == 0);
        UniqueFd from(ends[0]), to(ends[1]);
        const pid_t child = ::fork();
        REQUIRE(child >= 0);
        if (child == 0) {
            from.reset();
            try {
                writer(directory.path, first, to);
            } catch (...) {
            }
            ::_exit(1);
        }
        to.reset();
        std::uint64_t written = 0;
        const auto read_one = [&] {
            char byte = 0;
            const bool got = ::read(from.get(), &byte, 1) == 1;
            if (got) ++written;
            return got;
        };
        for (std::uint64_t wanted = random() % 30; wanted > 0; --wanted) REQUIRE(read_one());
        REQUIRE(::kill(child, SIGKILL) == 0);
        int status = 0;
        REQUIRE(::waitpid(child, &status, 0) == child);
        REQUIRE((WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)); // and not by itself
        while (read_one()) continue;
        if (std::filesystem::exists(directory.path / "gcoalesce-default.db-wal")) ++in_log;

        StoreLife life(directory.path);
        REQUIRE(!life.store->state().degraded);
        REQUIRE(set_aside(directory.path).empty());
        std::uint64_t here = 0, known = 0;
        for (std::uint64_t number = first; number < first + written + 1000; ++number) {
            if (life.here(number)) {
                REQUIRE(life.whole(number));
                ++here;
            }
            if (life.here(number) || life.gone(number)) ++known;
        }
        REQUIRE(known >= written);
        found += here;
        life.store->purge_all();
        life.settle();
    }
    CHECK(found > 0);
    CHECK(in_log > kRounds / 2);
}
