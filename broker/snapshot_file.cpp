#include "broker/snapshot_file.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <filesystem>
#include <sqlite3.h>
#include <sys/stat.h>
#include <system_error>
#include <utility>

#include "base/fd.hpp"
#include "base/sha256.hpp"
#include "broker/lock_file.hpp"

namespace gcoalesce {
namespace {

constexpr std::int64_t kApplicationId = 0x67636f61; // "gcoa"
constexpr std::int64_t kSchema = 1;
constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kRowOverhead = 512; // of the columns with a fixed size, the indexes' entries, the headers

// `number` grows, so that the oldest share pages and free them together. What the index in memory needs stands first:
// reading it touches no overflow page.
constexpr const char* kCreate = R"(
    CREATE TABLE snapshot (
        number INTEGER PRIMARY KEY, stream_id INTEGER NOT NULL UNIQUE, key BLOB NOT NULL, realm INTEGER NOT NULL,
        template TEXT NOT NULL, kind INTEGER NOT NULL, reusable INTEGER NOT NULL, events INTEGER NOT NULL,
        event_bytes INTEGER NOT NULL, boot_id TEXT NOT NULL, ended_boottime_ns INTEGER NOT NULL,
        fresh_until_boottime_ns INTEGER NOT NULL, expires_boottime_ns INTEGER NOT NULL, ended_wall_ns INTEGER NOT NULL,
        expires_wall_ns INTEGER NOT NULL, ttl_ns INTEGER NOT NULL, cost INTEGER NOT NULL,
        method INTEGER NOT NULL, template_revision INTEGER NOT NULL, opened_ns INTEGER NOT NULL,
        first_event_ns INTEGER NOT NULL, opened_wall_ns INTEGER NOT NULL, upstream_status INTEGER NOT NULL,
        retries INTEGER NOT NULL, code INTEGER NOT NULL, ending_status INTEGER NOT NULL, retry_ms INTEGER NOT NULL,
        prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, thought_tokens INTEGER NOT NULL,
        answer_tokens INTEGER NOT NULL, total_tokens INTEGER NOT NULL, ended_ns INTEGER NOT NULL,
        request_bytes INTEGER NOT NULL, request_digest BLOB NOT NULL, digest BLOB NOT NULL, model TEXT NOT NULL,
        finish_reason TEXT NOT NULL, model_version TEXT NOT NULL, message TEXT NOT NULL, request_head BLOB NOT NULL,
        lengths BLOB NOT NULL, content BLOB NOT NULL);
    CREATE TABLE gone (number INTEGER PRIMARY KEY, stream_id INTEGER NOT NULL);
    CREATE TABLE fact (name TEXT PRIMARY KEY, value TEXT NOT NULL);
    PRAGMA application_id = 1734569825;
    PRAGMA user_version = 1;)";

constexpr const char* kInsert = R"(INSERT OR REPLACE INTO snapshot VALUES (
    NULL,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?))";

struct CloseDb {
    void operator()(sqlite3* db) const { sqlite3_close_v2(db); }
};
struct FinalizeStatement {
    void operator()(sqlite3_stmt* statement) const { sqlite3_finalize(statement); }
};
using Db = std::unique_ptr<sqlite3, CloseDb>;
using Statement = std::unique_ptr<sqlite3_stmt, FinalizeStatement>;

// One use of a prepared statement. Parameters and columns go by in order; what is bound must outlive it.
class Query {
  public:
    explicit Query(const Statement& statement) : statement_(statement.get()) {}
    ~Query() {
        sqlite3_reset(statement_);
        sqlite3_clear_bindings(statement_);
    }
    Query(const Query&) = delete;
    Query& operator=(const Query&) = delete;

    Query& number(std::int64_t value) { return note(sqlite3_bind_int64(statement_, ++bound_, value)); }
    Query& number(std::uint64_t value) { return number(static_cast<std::int64_t>(value)); }
    Query& text(std::string_view value) {
        return note(sqlite3_bind_text64(statement_, ++bound_, value.empty() ? "" : value.data(), value.size(),
                                        SQLITE_STATIC, SQLITE_UTF8));
    }
    Query& blob(std::string_view value) {
        return note(
            sqlite3_bind_blob64(statement_, ++bound_, value.empty() ? "" : value.data(), value.size(), SQLITE_STATIC));
    }
    Query& blob(const Key& key) { return blob({reinterpret_cast<const char*>(key.data()), key.size()}); }

    int step() { // SQLITE_ROW, SQLITE_DONE, or what went wrong
        read_ = 0;
        return error_ != SQLITE_OK ? error_ : sqlite3_step(statement_);
    }

    std::int64_t number() { return sqlite3_column_int64(statement_, read_++); }
    std::uint64_t unsigned_number() { return static_cast<std::uint64_t>(number()); }
    template <class T>
    void read(T& value) {
        value = static_cast<T>(number());
    }
    std::string_view bytes() {
        const void* data = sqlite3_column_blob(statement_, read_);
        const auto size = static_cast<std::size_t>(sqlite3_column_bytes(statement_, read_++));
        return data == nullptr ? std::string_view() : std::string_view(static_cast<const char*>(data), size);
    }
    Key key() {
        Key key{};
        const std::string_view stored = bytes();
        std::memcpy(key.data(), stored.data(), std::min(stored.size(), key.size()));
        return key;
    }

  private:
    Query& note(int code) {
        if (error_ == SQLITE_OK) error_ = code;
        return *this;
    }

    sqlite3_stmt* statement_;
    int bound_ = 0, read_ = 0, error_ = SQLITE_OK;
};

int prepare(sqlite3* db, const char* sql, Statement& to) {
    sqlite3_stmt* statement = nullptr;
    const int code = sqlite3_prepare_v3(db, sql, -1, SQLITE_PREPARE_PERSISTENT, &statement, nullptr);
    to.reset(statement);
    return code;
}

int run(sqlite3* db, const char* sql) {
    return sqlite3_exec(db, sql, nullptr, nullptr, nullptr);
}

// The first column of the first row.
int ask(sqlite3* db, const char* sql, std::string& answer) {
    Statement statement;
    if (const int code = prepare(db, sql, statement); code != SQLITE_OK) return code;
    Query query(statement);
    const int code = query.step();
    if (code != SQLITE_ROW) return code == SQLITE_DONE ? SQLITE_OK : code;
    answer = query.bytes();
    return SQLITE_OK;
}

int ask(sqlite3* db, const char* sql, std::int64_t& answer) {
    Statement statement;
    if (const int code = prepare(db, sql, statement); code != SQLITE_OK) return code;
    Query query(statement);
    const int code = query.step();
    if (code != SQLITE_ROW) return code == SQLITE_DONE ? SQLITE_OK : code;
    answer = query.number();
    return SQLITE_OK;
}

// Everything that a snapshot tells, event boundaries included.
Key digest(const Snapshot& snapshot, std::string_view boot_id) {
    const auto number = [](auto value) { return static_cast<std::uint64_t>(value); };
    const SnapshotFacts& facts = snapshot.facts;
    const SlotEnding& ending = snapshot.ending;
    Sha256 hash;
    for (const std::uint64_t value : {facts.stream_id,
                                      facts.realm,
                                      facts.events,
                                      facts.event_bytes,
                                      number(facts.ended_boottime_ns),
                                      number(facts.fresh_until_boottime_ns),
                                      number(facts.expires_boottime_ns),
                                      number(facts.expires_wall_ns),
                                      number(snapshot.method),
                                      snapshot.template_revision,
                                      number(snapshot.opened_ns),
                                      number(snapshot.first_event_ns),
                                      number(snapshot.opened_wall_ns),
                                      number(snapshot.upstream_status),
                                      number(snapshot.retries),
                                      number(ending.kind),
                                      number(ending.code),
                                      number(ending.upstream_status),
                                      number(ending.reusable),
                                      number(ending.retry_ms),
                                      number(ending.prompt_tokens),
                                      number(ending.cached_tokens),
                                      number(ending.thought_tokens),
                                      number(ending.answer_tokens),
                                      number(ending.total_tokens),
                                      number(ending.ended_ns),
                                      number(ending.ended_wall_ns),
                                      snapshot.request_bytes})
        hash.field(value);
    for (const Key* key : {&facts.key, &snapshot.request_digest})
        hash.field({reinterpret_cast<const char*>(key->data()), key->size()});
    for (const std::string_view text :
         {std::string_view(facts.template_id), boot_id, std::string_view(snapshot.model), ending.finish_reason.view(),
          ending.model_version.view(), ending.message.view(), std::string_view(snapshot.request_head)})
        hash.field(text);
    for (const std::string& event : snapshot.events) hash.field(event);
    return hash.finish();
}

// Cuts `content` into events of these lengths. False: they do not fit it.
bool cut(std::string_view lengths, std::string_view content, std::vector<std::string>& events) {
    if (lengths.size() % 8 != 0) return false;
    events.reserve(lengths.size() / 8);
    for (; !lengths.empty(); lengths.remove_prefix(8)) {
        std::uint64_t length = 0;
        std::memcpy(&length, lengths.data(), 8);
        if (length > content.size()) return false;
        events.emplace_back(content.substr(0, length));
        content.remove_prefix(length);
    }
    return content.empty();
}

std::string system_words(int error) {
    return error == 0 ? std::string() : ": " + std::generic_category().message(error);
}

} // namespace

struct SnapshotFile::Connection {
    Db db; // first: its statements go before it
    Statement begin, commit, insert, remove, load, read, read_gone, read_facts, add_gone, trim_gone, put;
};

SnapshotFile::SnapshotFile() = default;
SnapshotFile::~SnapshotFile() = default;

SnapshotFile::Failure SnapshotFile::failure(int code) const {
    const int error = connection_ && connection_->db ? sqlite3_system_errno(connection_->db.get()) : 0;
    switch (code & 0xff) {
    case SQLITE_FULL: return {"the disk that holds " + path_ + " is full", false, false};
    case SQLITE_BUSY:
    case SQLITE_LOCKED: return {path_ + " is locked by another process", false, false};
    case SQLITE_NOMEM: return {"no memory to work with " + path_, false, false};
    case SQLITE_READONLY:
    case SQLITE_PERM: return {path_ + " or its directory is read-only", false, true};
    case SQLITE_CANTOPEN: return {path_ + " cannot be opened" + system_words(error), false, true};
    case SQLITE_CORRUPT: return {path_ + " is damaged", true, true};
    case SQLITE_NOTADB: return {path_ + " is not an SQLite database", true, true};
    case SQLITE_IOERR: return {"reading or writing " + path_ + " failed" + system_words(error), false, true};
    default: return {"SQLite fails on " + path_ + ": " + sqlite3_errstr(code), false, true};
    }
}

SnapshotFile::Outcome<std::unique_ptr<SnapshotFile>> SnapshotFile::open(const std::string& path,
                                                                        std::uint64_t max_log_bytes,
                                                                        const std::string& boot_id,
                                                                        const std::atomic<bool>& stop) {
    const auto refuse = [](std::string reason) { return tl::unexpected(Failure{std::move(reason), false, true}); };
    const std::filesystem::path directory = std::filesystem::path(path).parent_path();
    std::error_code error;
    if (!std::filesystem::is_directory(directory, error)) {
        if (directory.has_parent_path()) std::filesystem::create_directories(directory.parent_path(), error);
        if (::mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST)
            return refuse("the directory " + directory.string() + " cannot be made" + system_words(errno));
    }
    // SQLite's own locks let two processes share a file; neither would know what the other one adds and deletes.
    Result<LockFile> lock = take_lock_file(path + ".lock", 0600);
    if (!lock) return refuse(lock.error().message);
    if (!lock->fd) return refuse(fmt::format("{} is in use by another broker (pid {})", path, lock->holder));
    // SQLite gives -wal and -shm the file's mode.
    const UniqueFd made(::open(path.c_str(), O_CREAT | O_EXCL | O_RDWR | O_NOFOLLOW | O_CLOEXEC, 0600));
    if (!made && errno != EEXIST) return refuse(path + " cannot be made" + system_words(errno));
    // An existing file is not opened here: closing it would give up every lock that this process has on it.
    struct stat info {};
    if (::lstat(path.c_str(), &info) != 0) return refuse(path + " cannot be looked at" + system_words(errno));
    if (!S_ISREG(info.st_mode)) return refuse(path + " is not a regular file; move it away");
    // SQLite would open what it may only read, and tell no clear reason later.
    for (const std::string& name : {path, directory.string()})
        if (::access(name.c_str(), R_OK | W_OK) != 0) return refuse(name + " cannot be written" + system_words(errno));
    if ((info.st_mode & 077) != 0 && ::chmod(path.c_str(), 0600) != 0)
        return refuse(path + " is open to others, and its mode cannot be changed to 0600" + system_words(errno));

    std::unique_ptr<SnapshotFile> file(new SnapshotFile);
    file->lock_ = std::move(lock->fd);
    file->path_ = path;
    file->boot_id_ = boot_id;
    file->max_log_bytes_ = max_log_bytes;
    file->device_ = info.st_dev;
    file->inode_ = info.st_ino;
    file->connection_ = std::make_unique<Connection>();
    if (const auto started = file->start(stop); !started) return tl::unexpected(started.error());
    if (const auto prepared = file->prepare(); !prepared) return tl::unexpected(prepared.error());
    return file;
}

SnapshotFile::Outcome<void> SnapshotFile::start(const std::atomic<bool>& stop) {
    sqlite3* db = nullptr;
    const int opened = sqlite3_open_v2(path_.c_str(), &db, SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX, nullptr);
    connection_->db.reset(db);
    if (opened != SQLITE_OK) return tl::unexpected(failure(opened));
    sqlite3_extended_result_codes(db, 1);
    sqlite3_busy_timeout(db, 250);

    // Whose file it is comes first: another's is left untouched, its write-ahead log included.
    sqlite3_db_config(db, SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1, nullptr);
    std::int64_t tables = 0, application = 0, schema = 0;
    int code = ask(db, "SELECT count(*) FROM sqlite_master", tables);
    if (code == SQLITE_OK) code = ask(db, "PRAGMA application_id", application);
    if (code == SQLITE_OK) code = ask(db, "PRAGMA user_version", schema);
    if (code != SQLITE_OK) return tl::unexpected(failure(code));
    const bool fresh = tables == 0 && application == 0 && schema == 0;
    if (!fresh && application != kApplicationId)
        return tl::unexpected(Failure{path_ + " is the database of another program; move it away", false, true});
    if (!fresh && schema != kSchema)
        return tl::unexpected(Failure{
            fmt::format("{} has schema version {}, this broker knows version {}: upgrade the broker, or move it away",
                        path_, schema, kSchema),
            false, true});
    sqlite3_db_config(db, SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0, nullptr);

    if (!fresh) {
        // The handler's argument is not const in C; it is only read.
        sqlite3_progress_handler(
            db, 10000, [](void* flag) { return static_cast<const std::atomic<bool>*>(flag)->load() ? 1 : 0; },
            const_cast<std::atomic<bool>*>(&stop));
        // It reports a page that could not be read as damage too: what is found twice counts.
        std::string verdict;
        for (int round = 0; code == SQLITE_OK && verdict != "ok" && round < 2; ++round)
            code = ask(db, "PRAGMA quick_check(1)", verdict);
        sqlite3_progress_handler(db, 0, nullptr, nullptr);
        if (code != SQLITE_OK) return tl::unexpected(failure(code));
        if (verdict != "ok") return tl::unexpected(failure(SQLITE_CORRUPT));
    }
    std::string mode;
    // auto_vacuum counts only before anything else was written.
    if (fresh) code = run(db, "PRAGMA auto_vacuum = INCREMENTAL");
    if (code == SQLITE_OK) code = ask(db, "PRAGMA journal_mode = WAL", mode);
    if (code != SQLITE_OK) return tl::unexpected(failure(code));
    if (mode != "wal") return tl::unexpected(failure(SQLITE_READONLY));
    code = run(db, "PRAGMA synchronous = NORMAL; PRAGMA secure_delete = ON; PRAGMA journal_size_limit = 4194304;"
                   "PRAGMA temp_store = MEMORY");
    if (code == SQLITE_OK && fresh) {
        code = run(db, "BEGIN IMMEDIATE");
        if (code == SQLITE_OK) code = run(db, kCreate);
        if (code == SQLITE_OK) code = run(db, "COMMIT");
    }
    if (code != SQLITE_OK) return tl::unexpected(failure(code));
    if (sqlite3_db_readonly(db, "main") != 0) return tl::unexpected(failure(SQLITE_READONLY));
    return {};
}

SnapshotFile::Outcome<void> SnapshotFile::prepare() {
    Connection& to = *connection_;
    for (const auto& [statement, sql] : std::initializer_list<std::pair<Statement*, const char*>>{
             {&to.begin, "BEGIN IMMEDIATE"},
             {&to.commit, "COMMIT"},
             {&to.insert, kInsert},
             {&to.remove, "DELETE FROM snapshot WHERE stream_id = ?"},
             {&to.load, "SELECT * FROM snapshot WHERE stream_id = ?"},
             {&to.read, "SELECT * FROM snapshot ORDER BY number"},
             {&to.read_gone, "SELECT stream_id FROM gone ORDER BY number"},
             {&to.read_facts, "SELECT name, value FROM fact"},
             {&to.add_gone, "INSERT INTO gone(stream_id) VALUES (?)"},
             {&to.trim_gone, "DELETE FROM gone WHERE number <= (SELECT max(number) FROM gone) - ?"},
             {&to.put, "INSERT OR REPLACE INTO fact VALUES (?, ?)"},
         })
        if (const int code = gcoalesce::prepare(to.db.get(), sql, *statement); code != SQLITE_OK)
            return tl::unexpected(failure(code));
    return {};
}

namespace {

// The columns from stream_id to cost.
void read_row(Query& query, FileContents::Row& row) {
    SnapshotFacts& facts = row.facts;
    query.number(); // the row's own
    query.read(facts.stream_id);
    facts.key = query.key();
    query.read(facts.realm);
    facts.template_id = query.bytes();
    const std::int64_t kind = query.number(); // one that is none has another digest, and is never loaded
    if (kind >= GCOALESCE_COMPLETE && kind <= GCOALESCE_INTERRUPTED)
        facts.kind = static_cast<gcoalesce_ending_kind>(kind);
    facts.reusable = query.number() != 0;
    query.read(facts.events);
    query.read(facts.event_bytes);
    row.boot_id = query.bytes();
    query.read(facts.ended_boottime_ns);
    query.read(facts.fresh_until_boottime_ns);
    query.read(facts.expires_boottime_ns);
    query.read(facts.ended_wall_ns);
    query.read(facts.expires_wall_ns);
    query.read(row.ttl);
    query.read(row.cost);
}

} // namespace

SnapshotFile::Outcome<FileContents> SnapshotFile::read() {
    FileContents contents;
    int code = SQLITE_ROW;
    {
        Query query(connection_->read);
        while ((code = query.step()) == SQLITE_ROW) read_row(query, contents.rows.emplace_back());
        if (code != SQLITE_DONE) return tl::unexpected(failure(code));
    }
    {
        Query query(connection_->read_gone);
        while ((code = query.step()) == SQLITE_ROW) contents.gone.push_back(query.unsigned_number());
        if (code != SQLITE_DONE) return tl::unexpected(failure(code));
    }
    Query query(connection_->read_facts);
    while ((code = query.step()) == SQLITE_ROW) {
        const std::string name(query.bytes());
        contents.facts[name] = query.bytes();
    }
    if (code != SQLITE_DONE) return tl::unexpected(failure(code));
    return contents;
}

int SnapshotFile::write_rows(const SnapshotBatch& batch) {
    Connection& to = *connection_;
    int code = SQLITE_DONE;
    for (const StreamId id : batch.deletes)
        if ((code = Query(to.remove).number(id).step()) != SQLITE_DONE) return code;
    for (const auto& save : batch.saves) {
        const Snapshot& snapshot = *save.snapshot;
        const SnapshotFacts& facts = snapshot.facts;
        const SlotEnding& ending = snapshot.ending;
        std::string lengths, content;
        lengths.reserve(snapshot.events.size() * 8);
        content.reserve(facts.event_bytes);
        for (const std::string& event : snapshot.events) {
            const std::uint64_t length = event.size();
            lengths.append(reinterpret_cast<const char*>(&length), sizeof length);
            content += event;
        }
        const Key whole = digest(snapshot, boot_id_);
        const auto number = [](auto value) { return static_cast<std::int64_t>(value); };
        Query query(to.insert);
        query.number(facts.stream_id)
            .blob(facts.key)
            .number(facts.realm)
            .text(facts.template_id)
            .number(number(facts.kind))
            .number(number(facts.reusable))
            .number(facts.events)
            .number(facts.event_bytes)
            .text(boot_id_)
            .number(facts.ended_boottime_ns)
            .number(facts.fresh_until_boottime_ns)
            .number(facts.expires_boottime_ns)
            .number(facts.ended_wall_ns)
            .number(facts.expires_wall_ns)
            .number(save.ttl)
            .number(save.cost)
            .number(number(snapshot.method))
            .number(snapshot.template_revision)
            .number(snapshot.opened_ns)
            .number(snapshot.first_event_ns)
            .number(snapshot.opened_wall_ns)
            .number(number(snapshot.upstream_status))
            .number(number(snapshot.retries))
            .number(number(ending.code))
            .number(number(ending.upstream_status))
            .number(ending.retry_ms)
            .number(ending.prompt_tokens)
            .number(ending.cached_tokens)
            .number(ending.thought_tokens)
            .number(ending.answer_tokens)
            .number(ending.total_tokens)
            .number(ending.ended_ns)
            .number(snapshot.request_bytes)
            .blob(snapshot.request_digest)
            .blob(whole)
            .text(snapshot.model)
            .text(ending.finish_reason.view())
            .text(ending.model_version.view())
            .text(ending.message.view())
            .blob(snapshot.request_head)
            .blob(lengths)
            .blob(content);
        if ((code = query.step()) != SQLITE_DONE) return code;
    }
    for (const StreamId id : batch.gone)
        if ((code = Query(to.add_gone).number(id).step()) != SQLITE_DONE) return code;
    if (!batch.gone.empty()) {
        const std::uint64_t kept = Snapshots::kGoneIds;
        if ((code = Query(to.trim_gone).number(kept).step()) != SQLITE_DONE) return code;
    }
    for (const auto& [name, value] : batch.facts)
        if ((code = Query(to.put).text(name).text(value).step()) != SQLITE_DONE) return code;
    return code;
}

SnapshotFile::Outcome<void> SnapshotFile::write(const SnapshotBatch& batch) {
    struct stat log {};
    // A process that keeps reading keeps the log from starting over: it must not fill the disk.
    if (::stat((path_ + "-wal").c_str(), &log) == 0 && static_cast<std::uint64_t>(log.st_size) > max_log_bytes_)
        if (const auto emptied = empty_log(); !emptied) return emptied;

    int code = Query(connection_->begin).step();
    if (code == SQLITE_DONE) code = write_rows(batch);
    if (code == SQLITE_DONE) code = Query(connection_->commit).step();
    if (code != SQLITE_DONE) {
        const Failure why = failure(code);
        if (sqlite3_get_autocommit(connection_->db.get()) == 0) run(connection_->db.get(), "ROLLBACK");
        return tl::unexpected(why);
    }
    return {};
}

SnapshotFile::Outcome<void> SnapshotFile::shrink() {
    sqlite3* db = connection_->db.get();
    for (;;) {
        std::int64_t pages = 0, free = 0;
        int code = ask(db, "PRAGMA page_count", pages);
        if (code == SQLITE_OK) code = ask(db, "PRAGMA freelist_count", free);
        if (code == SQLITE_OK && (free < 64 || free < pages / 4)) return {};
        if (code == SQLITE_OK) code = run(db, "PRAGMA incremental_vacuum(1024)");
        if (code != SQLITE_OK) return tl::unexpected(failure(code));
    }
}

SnapshotFile::Outcome<void> SnapshotFile::empty_log() {
    const int code =
        sqlite3_wal_checkpoint_v2(connection_->db.get(), "main", SQLITE_CHECKPOINT_TRUNCATE, nullptr, nullptr);
    if (code == SQLITE_OK) return {};
    return tl::unexpected(failure(code));
}

SnapshotFile::Outcome<std::optional<LoadedSnapshot>> SnapshotFile::load(StreamId id) {
    Query query(connection_->load);
    const int code = query.number(id).step();
    if (code == SQLITE_DONE) return std::optional<LoadedSnapshot>();
    if (code != SQLITE_ROW) return tl::unexpected(failure(code));
    LoadedSnapshot loaded;
    FileContents::Row row;
    read_row(query, row);
    loaded.boot_id = row.boot_id;
    Snapshot& snapshot = loaded.snapshot;
    SlotEnding& ending = snapshot.ending;
    snapshot.facts = std::move(row.facts);
    ending.kind = snapshot.facts.kind;
    ending.reusable = snapshot.facts.reusable ? 1 : 0;
    ending.ended_wall_ns = snapshot.facts.ended_wall_ns;
    const std::int64_t method = query.number();
    snapshot.method =
        method > 0 && method < static_cast<std::int64_t>(Method::pass) ? static_cast<Method>(method) : Method::stream;
    query.read(snapshot.template_revision);
    query.read(snapshot.opened_ns);
    query.read(snapshot.first_event_ns);
    query.read(snapshot.opened_wall_ns);
    query.read(snapshot.upstream_status);
    query.read(snapshot.retries);
    query.read(ending.code);
    query.read(ending.upstream_status);
    query.read(ending.retry_ms);
    query.read(ending.prompt_tokens);
    query.read(ending.cached_tokens);
    query.read(ending.thought_tokens);
    query.read(ending.answer_tokens);
    query.read(ending.total_tokens);
    query.read(ending.ended_ns);
    query.read(snapshot.request_bytes);
    snapshot.request_digest = query.key();
    const Key stored = query.key();
    snapshot.model = query.bytes();
    ending.finish_reason.assign(query.bytes());
    ending.model_version.assign(query.bytes());
    ending.message.assign(query.bytes());
    snapshot.request_head = query.bytes();
    const std::string_view lengths = query.bytes();
    const std::string_view content = query.bytes();
    loaded.whole = cut(lengths, content, snapshot.events) && digest(snapshot, loaded.boot_id) == stored;
    return loaded;
}

bool SnapshotFile::moved() const {
    struct stat info {};
    return ::lstat(path_.c_str(), &info) != 0 || info.st_dev != device_ || info.st_ino != inode_;
}

std::string SnapshotFile::set_aside(const std::string& path) {
    for (std::time_t now = std::time(nullptr);; ++now) { // a second that is taken already: the next one
        std::tm utc{};
        ::gmtime_r(&now, &utc);
        std::array<char, 32> stamp{};
        std::strftime(stamp.data(), stamp.size(), ".damaged-%Y%m%dT%H%M%SZ", &utc);
        const std::string name = path + stamp.data();
        struct stat info {};
        if (::lstat(name.c_str(), &info) == 0) continue;
        for (const char* suffix : {"-wal", "-shm", ""}) ::rename((path + suffix).c_str(), (name + suffix).c_str());
        return name;
    }
}

std::uint64_t SnapshotFile::cost(const Snapshot& snapshot) {
    std::uint64_t bytes = kRowOverhead + snapshot.facts.template_id.size() + snapshot.model.size() +
                          snapshot.ending.finish_reason.view().size() + snapshot.ending.model_version.view().size() +
                          snapshot.ending.message.view().size() + snapshot.request_head.size();
    for (const std::string& event : snapshot.events) bytes += 8 + event.size();
    return (bytes + kPage - 1) / kPage * kPage;
}

} // namespace gcoalesce
