#include "broker/snapshots.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <iterator>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "base/log.hpp"
#include "broker/snapshot_file.hpp"

namespace gcoalesce {
namespace {

// At most, so that loads need not wait for long and the write-ahead log stays short. At most a quarter of the queue,
// too: what is being written cannot be dropped in favour of what is newer.
constexpr std::uint64_t kTransactionBytes = 4 << 20;
constexpr std::size_t kUnreadPurges = 64;
constexpr const char* kBeingRead = "the file is still being read";

using Steady = std::chrono::steady_clock;

} // namespace

// The thread, and what it shares with the event loop. Reports travel as functions that the event loop runs in the order
// in which the thread made them.
class Snapshots::Disk {
  public:
    struct Load {
        StreamId id = 0;
        std::function<void(Result<Snapshot>)> done;
    };

    Disk(const SnapshotOptions& options, Post post, Snapshots& owner)
        : path_(options.directory + "/gcoalesce-" + options.instance + ".db"),
          options_(options),
          delay_(options.retry_first),
          mailbox_(std::make_shared<Mailbox>()) {
        mailbox_->post = std::move(post);
        mailbox_->owner = &owner;
    }

    ~Disk() {
        {
            const std::lock_guard lock(mutex_);
            stop_.store(true);
        }
        changed_.notify_all();
        if (thread_.joinable()) thread_.join();
        mailbox_->owner = nullptr; // functions that were posted and did not run yet find nobody
    }

    // ---- event loop ----

    void start(Nanos wait) { // throws std::system_error
        thread_ = std::thread([this] { run(); });
        std::unique_lock lock(mutex_);
        changed_.wait_for(lock, std::chrono::nanoseconds(wait), [&] { return tries_ > 0; });
    }

    // Changes what is to be written. The caller holds no other lock.
    template <class Change>
    auto change(Change&& how) {
        const Wake wake{*this};
        const std::lock_guard lock(mutex_);
        return how(pending_, queue_);
    }

    void load(Load load) {
        const Wake wake{*this};
        const std::lock_guard lock(mutex_);
        loads_.push_back(std::move(load));
    }

    bool flush(Nanos within) {
        std::unique_lock lock(mutex_);
        hurry_ = true;
        const std::uint64_t failures = failures_;
        changed_.notify_all();
        changed_.wait_for(lock, std::chrono::nanoseconds(within),
                          [&] { return (pending_.empty() && !writing_) || failures_ != failures; });
        hurry_ = false;
        return pending_.empty() && !writing_;
    }

    struct Queue { // what waits or is being written
        std::uint64_t saves = 0, bytes = 0;
        void add(const SnapshotBatch::Save& save) {
            ++saves;
            bytes += save.cost;
        }
        void remove(const SnapshotBatch::Save& save) {
            --saves;
            bytes -= save.cost;
        }
    };
    Queue queue() const {
        const std::lock_guard lock(mutex_);
        return queue_;
    }

    void take_reports() {
        const auto mailbox = mailbox_; // a callback may destroy this
        mailbox->take();
    }
    void tell(std::function<void(Snapshots&)> report) { mailbox_->put(mailbox_, std::move(report)); } // any thread

  private:
    struct Mailbox {
        std::mutex mutex;
        std::vector<std::function<void(Snapshots&)>> reports;
        Post post;
        Snapshots* owner = nullptr; // the event loop's

        void put(const std::shared_ptr<Mailbox>& self, std::function<void(Snapshots&)> report) {
            {
                const std::lock_guard lock(mutex);
                reports.push_back(std::move(report));
                if (reports.size() > 1) return; // a function that takes them is on its way
            }
            post([self] { self->take(); });
        }
        void take() {
            std::vector<std::function<void(Snapshots&)>> taken;
            {
                const std::lock_guard lock(mutex);
                taken.swap(reports);
            }
            for (const auto& report : taken)
                if (owner != nullptr) report(*owner); // a callback may destroy the owner
        }
    };
    struct Wake { // after the lock is given back
        Disk& disk;
        ~Wake() { disk.changed_.notify_all(); }
    };

    // ---- the thread ----

    void run() {
        std::unique_lock lock(mutex_);
        auto retry_at = Steady::now();
        while (!stop_.load()) {
            if (!loads_.empty()) {
                const Load load = std::move(loads_.front());
                loads_.pop_front();
                lock.unlock();
                serve(load);
                lock.lock();
                continue;
            }
            const bool work = !file_ || !reason_.empty() || !pending_.empty();
            if (work && (hurry_ || Steady::now() >= retry_at)) {
                SnapshotBatch batch = take_batch();
                writing_ = true;
                lock.unlock();
                const bool good = attempt(batch);
                lock.lock();
                writing_ = false;
                ++tries_;
                if (good) {
                    delay_ = options_.retry_first;
                    retry_at = Steady::now();
                } else {
                    give_back(std::move(batch));
                    ++failures_;
                    hurry_ = false; // one failed try answers a flush
                    retry_at = Steady::now() + std::chrono::nanoseconds(delay_);
                    delay_ = std::min(delay_ * 2, options_.retry_most);
                }
                changed_.notify_all();
                continue;
            }
            if (work)
                changed_.wait_until(lock, retry_at);
            else
                changed_.wait(lock);
        }
        lock.unlock();
        file_.reset();
    }

    SnapshotBatch take_batch() {
        SnapshotBatch batch;
        batch.deletes.swap(pending_.deletes);
        batch.gone.swap(pending_.gone);
        batch.facts.swap(pending_.facts);
        batch.scrub = std::exchange(pending_.scrub, false);
        const std::uint64_t most = std::min(kTransactionBytes, options_.queue_bytes / 4);
        std::uint64_t bytes = 0;
        while (!pending_.saves.empty() && (bytes == 0 || bytes + pending_.saves.front().cost <= most)) {
            bytes += pending_.saves.front().cost;
            batch.saves.push_back(std::move(pending_.saves.front()));
            pending_.saves.pop_front();
        }
        return batch;
    }

    // In front of what was asked for meanwhile, which wins.
    void give_back(SnapshotBatch batch) {
        std::unordered_set<StreamId> changed(pending_.deletes.begin(), pending_.deletes.end());
        for (const auto& save : pending_.saves) changed.insert(save.snapshot->facts.stream_id);
        std::erase_if(batch.saves, [&](const SnapshotBatch::Save& save) {
            if (!changed.contains(save.snapshot->facts.stream_id)) return false;
            queue_.remove(save);
            return true;
        });
        pending_.saves.insert(pending_.saves.begin(), std::make_move_iterator(batch.saves.begin()),
                              std::make_move_iterator(batch.saves.end()));
        pending_.deletes.insert(pending_.deletes.begin(), batch.deletes.begin(), batch.deletes.end());
        pending_.gone.insert(pending_.gone.begin(), batch.gone.begin(), batch.gone.end());
        while (pending_.gone.size() > kGoneIds) pending_.gone.pop_front();
        pending_.facts.merge(batch.facts); // keeps the newer ones
        pending_.scrub = pending_.scrub || batch.scrub;
    }

    // Empties the batch once it is written.
    bool attempt(SnapshotBatch& batch) {
        if (file_ && file_->moved()) file_.reset();
        if (!file_) {
            auto opened = SnapshotFile::open(path_, options_.max_bytes, options_.boot_id, stop_);
            if (!opened && opened.error().damaged) {
                set_aside(opened.error().reason);
                opened = SnapshotFile::open(path_, options_.max_bytes, options_.boot_id, stop_);
            }
            if (!opened) return failed(opened.error());
            file_ = std::move(*opened);
            auto contents = file_->read();
            if (!contents) return failed(contents.error());
            tell([read = std::make_shared<const FileContents>(std::move(*contents))](Snapshots& to) {
                to.found(*read);
            });
        }
        if (!batch.empty()) {
            if (const auto written = file_->write(batch); !written) return failed(written.error());
            std::vector<std::pair<StreamId, std::int64_t>> saves;
            {
                const std::lock_guard lock(mutex_);
                for (const auto& save : batch.saves) {
                    saves.emplace_back(save.snapshot->facts.stream_id, save.order);
                    queue_.remove(save);
                }
            }
            if (!saves.empty()) tell([saves](Snapshots& to) { to.written(saves); });
            shrink_ = shrink_ || !batch.deletes.empty();
            scrub_ = scrub_ || batch.scrub;
            batch = {};
        }
        if (shrink_) {
            if (const auto shrunk = file_->shrink(); !shrunk) return failed(shrunk.error());
            shrink_ = false;
        }
        if (scrub_) {
            if (const auto emptied = file_->empty_log(); !emptied) return failed(emptied.error());
            scrub_ = false;
        }
        if (!reason_.empty()) {
            reason_.clear();
            tell([](Snapshots& to) { to.set_disk_reason({}); });
        }
        return true;
    }

    bool failed(const SnapshotFile::Failure& why) {
        if (why.reopen) file_.reset();
        if (why.damaged) set_aside(why.reason);
        if (why.reason != reason_) {
            reason_ = why.reason;
            tell([reason = reason_](Snapshots& to) { to.set_disk_reason(reason); });
        }
        return false;
    }

    void set_aside(const std::string& why) {
        const std::string name = SnapshotFile::set_aside(path_);
        log(LogLevel::warning, "snapshots: {}; set aside as {}, going on with an empty one", why, name);
    }

    void serve(const Load& load) {
        const auto refuse = [&](std::string message) {
            tell([done = load.done, message = std::move(message)](Snapshots&) {
                done(fail(GCOALESCE_IO, "snapshots are degraded: {}", message));
            });
        };
        if (!file_) return refuse(reason_);
        auto loaded = file_->load(load.id);
        if (!loaded) {
            failed(loaded.error());
            return refuse(loaded.error().reason);
        }
        auto found = std::make_shared<LoadedSnapshot>();
        if (*loaded) *found = std::move(**loaded);
        tell([id = load.id, done = load.done, found, there = loaded->has_value()](Snapshots& to) {
            if (there)
                done(to.take_loaded(id, *found));
            else
                done(fail(GCOALESCE_GONE, "the answer of stream {} is not kept any more", to_hex(id)));
        });
    }

    const std::string path_;
    const SnapshotOptions options_;

    mutable std::mutex mutex_; // what stands here
    std::condition_variable changed_;
    SnapshotBatch pending_;
    std::deque<Load> loads_;
    Queue queue_;
    bool writing_ = false, hurry_ = false;
    std::uint64_t tries_ = 0, failures_ = 0;
    std::atomic<bool> stop_{false};

    std::unique_ptr<SnapshotFile> file_; // from here on the thread's
    std::string reason_ = "not opened yet";
    bool shrink_ = false, scrub_ = false; // still to be done
    Nanos delay_;

    std::shared_ptr<Mailbox> mailbox_;
    std::thread thread_;
};

// ---- the event loop's side -----------------------------------------------------------------------------------------

Result<std::unique_ptr<Snapshots>> Snapshots::open(SnapshotOptions options, Timers& timers, Post post) {
    if (options.boot_id.empty()) options.boot_id = boot_id();
    std::unique_ptr<Snapshots> snapshots(new Snapshots(std::move(options), timers));
    const Nanos wait = snapshots->options_.open_within;
    snapshots->disk_ = std::make_unique<Disk>(snapshots->options_, std::move(post), *snapshots);
    try {
        snapshots->disk_->start(wait);
    } catch (const std::system_error& error) {
        return fail(GCOALESCE_IO, "cannot start the thread that writes snapshots: {}", error.what());
    }
    snapshots->disk_->take_reports();
    return snapshots;
}

Snapshots::Snapshots(SnapshotOptions options, Timers& timers) : options_(std::move(options)), timers_(timers) {
    disk_reason_ = kBeingRead;
}
Snapshots::~Snapshots() = default;

bool Snapshots::Purge::matches(const SnapshotFacts& facts) const {
    return (!key || *key == facts.key) && (!template_id || *template_id == facts.template_id);
}

bool Snapshots::alive(const SnapshotFacts& facts) const {
    return timers_.clock().boottime() < facts.expires_boottime_ns;
}

void Snapshots::insert(Entry entry) {
    const SnapshotFacts& facts = entry.facts;
    by_order_.emplace(entry.order, facts.stream_id);
    by_expiry_.emplace(facts.expires_boottime_ns, facts.stream_id);
    bytes_ += entry.cost;
    if (facts.kind == GCOALESCE_COMPLETE && facts.reusable) {
        std::vector<StreamId>& ids = by_key_[facts.key];
        // Nearly always at the end.
        auto at = ids.end();
        while (at != ids.begin() && index_.at(*(at - 1)).facts.ended_boottime_ns > facts.ended_boottime_ns) --at;
        ids.insert(at, facts.stream_id);
    }
    index_.emplace(facts.stream_id, std::move(entry));
}

Snapshots::Entry Snapshots::take_out(StreamId id) {
    auto node = index_.extract(id);
    Entry& entry = node.mapped();
    by_order_.erase(entry.order);
    by_expiry_.erase({entry.facts.expires_boottime_ns, id});
    bytes_ -= entry.cost;
    if (const auto found = by_key_.find(entry.facts.key); found != by_key_.end()) {
        std::erase(found->second, id);
        if (found->second.empty()) by_key_.erase(found);
    }
    return std::move(entry);
}

void Snapshots::forget(const std::vector<StreamId>& ids) {
    if (ids.empty()) return;
    std::unordered_map<StreamId, bool> stored; // the file may hold it
    for (const StreamId id : ids) {
        stored[id] = take_out(id).stored;
        note_gone(id);
    }
    disk_->change([&](SnapshotBatch& pending, Disk::Queue& queue) {
        std::unordered_set<StreamId> unwritten;
        std::erase_if(pending.saves, [&](const SnapshotBatch::Save& save) {
            const StreamId id = save.snapshot->facts.stream_id;
            if (!stored.contains(id)) return false;
            unwritten.insert(id);
            queue.remove(save);
            return true;
        });
        // What does not wait is in the file or on its way there.
        for (const auto& [id, in_file] : stored)
            if (in_file || !unwritten.contains(id)) pending.deletes.push_back(id);
    });
}

void Snapshots::note_gone(StreamId id) {
    if (!gone_.insert(id).second) return;
    gone_order_.push_back(id);
    if (gone_order_.size() > kGoneIds) {
        gone_.erase(gone_order_.front());
        gone_order_.pop_front();
    }
    disk_->change([&](SnapshotBatch& pending, auto&) {
        pending.gone.push_back(id);
        if (pending.gone.size() > kGoneIds) pending.gone.pop_front();
    });
}

void Snapshots::make_room() {
    std::vector<StreamId> oldest;
    std::uint64_t bytes = bytes_;
    for (auto at = by_order_.begin(); at != by_order_.end() && bytes > options_.max_bytes; ++at) {
        oldest.push_back(at->second);
        bytes -= index_.at(at->second).cost;
    }
    state_.evicted += oldest.size();
    forget(oldest);
}

void Snapshots::save(Snapshot snapshot, Nanos ttl) {
    SnapshotFacts& facts = snapshot.facts;
    const StreamId id = facts.stream_id;
    if (ttl <= 0) return remember_gone(id);
    facts.events = snapshot.events.size();
    facts.event_bytes = 0;
    for (const std::string& event : snapshot.events) facts.event_bytes += event.size();
    facts.kind = static_cast<gcoalesce_ending_kind>(snapshot.ending.kind);
    facts.reusable = snapshot.ending.reusable != 0;
    facts.ended_wall_ns = snapshot.ending.ended_wall_ns;
    facts.expires_wall_ns = timers_.clock().wall() + ttl;
    facts.expires_boottime_ns = timers_.clock().boottime() + ttl;

    Entry entry;
    entry.facts = facts;
    entry.cost = SnapshotFile::cost(snapshot);
    entry.queued = std::make_shared<const Snapshot>(std::move(snapshot));
    const bool known = index_.contains(id);
    if (entry.cost > options_.max_bytes || entry.cost > options_.queue_bytes) {
        ++state_.dropped;
        if (known) forget({id});
        return note_gone(id);
    }
    if (known) {
        take_out(id);
        entry.stored = true;
    }
    if (gone_.erase(id) != 0) std::erase(gone_order_, id);

    entry.order = next_order_++;
    const SnapshotBatch::Save save{entry.order, entry.cost, ttl, entry.queued};
    insert(std::move(entry));
    std::vector<StreamId> dropped;
    disk_->change([&](SnapshotBatch& pending, Disk::Queue& queue) {
        if (known)
            std::erase_if(pending.saves, [&](const SnapshotBatch::Save& older) {
                if (older.snapshot->facts.stream_id != id) return false;
                queue.remove(older);
                return true;
            });
        pending.saves.push_back(save);
        queue.add(save);
        // Out of the thread's reach at once: it could take them meanwhile.
        while (queue.bytes > options_.queue_bytes && !pending.saves.empty()) {
            queue.remove(pending.saves.front());
            dropped.push_back(pending.saves.front().snapshot->facts.stream_id);
            pending.saves.pop_front();
        }
    });
    if (!dropped.empty()) {
        if (!queue_full_)
            log(LogLevel::warning, "snapshots: more is waiting to be written than {} bytes; the oldest are dropped",
                options_.queue_bytes);
        queue_full_ = true;
        state_.dropped += dropped.size();
        std::vector<StreamId> in_file; // an older one of the same id may be
        for (const StreamId gone : dropped) {
            if (take_out(gone).stored) in_file.push_back(gone);
            note_gone(gone);
        }
        if (!in_file.empty())
            disk_->change([&](SnapshotBatch& pending, Disk::Queue&) {
                pending.deletes.insert(pending.deletes.end(), in_file.begin(), in_file.end());
            });
    }
    make_room();
    arm();
}

std::optional<SnapshotFacts> Snapshots::newest(const Key& key) const {
    const auto found = by_key_.find(key);
    if (found == by_key_.end()) return std::nullopt;
    for (auto id = found->second.rbegin(); id != found->second.rend(); ++id)
        if (const SnapshotFacts& facts = index_.at(*id).facts; alive(facts)) return facts;
    return std::nullopt;
}

std::optional<SnapshotFacts> Snapshots::find(StreamId id) const {
    const auto found = index_.find(id);
    if (found == index_.end() || !alive(found->second.facts)) return std::nullopt;
    return found->second.facts;
}

Snapshots::Known Snapshots::known(StreamId id) const {
    if (const auto found = index_.find(id); found != index_.end())
        return alive(found->second.facts) ? Known::here : Known::gone;
    return gone_.contains(id) ? Known::gone : Known::no;
}

void Snapshots::remember_gone(StreamId id) {
    if (!index_.contains(id)) note_gone(id);
}

void Snapshots::load(StreamId id, std::function<void(Result<Snapshot>)> done) {
    switch (known(id)) {
    case Known::no:
        return disk_->tell([id, done = std::move(done)](Snapshots&) {
            done(fail(GCOALESCE_NOT_FOUND, "no stream {} is known", to_hex(id)));
        });
    case Known::gone:
        return disk_->tell([id, done = std::move(done)](Snapshots&) {
            done(fail(GCOALESCE_GONE, "the answer of stream {} is not kept any more", to_hex(id)));
        });
    case Known::here: break;
    }
    if (const auto& queued = index_.at(id).queued)
        return disk_->tell([queued, done = std::move(done)](Snapshots&) { done(*queued); });
    disk_->load({id, std::move(done)});
}

Result<Snapshot> Snapshots::take_loaded(StreamId id, LoadedSnapshot& loaded) {
    const auto found = index_.find(id);
    if (found == index_.end()) return fail(GCOALESCE_GONE, "the answer of stream {} is not kept any more", to_hex(id));
    if (!loaded.whole) {
        log(LogLevel::warning, "snapshots: what is stored of stream {} is damaged; it was dropped", to_hex(id));
        ++state_.lost;
        forget({id});
        return fail(GCOALESCE_GONE, "what was stored of stream {} is damaged; it was dropped", to_hex(id));
    }
    Snapshot& snapshot = loaded.snapshot;
    snapshot.facts = found->second.facts;
    if (loaded.boot_id != options_.boot_id) {
        const Clock& clock = timers_.clock();
        const Nanos ended = clock.monotonic() - (clock.boottime() - snapshot.facts.ended_boottime_ns);
        const Nanos shift = ended - snapshot.ending.ended_ns;
        snapshot.opened_ns += shift;
        snapshot.ending.ended_ns += shift;
        if (snapshot.first_event_ns != 0) snapshot.first_event_ns += shift;
    }
    return std::move(snapshot);
}

std::size_t Snapshots::purge(const Purge& what) {
    if (!ready_) {
        // A script that goes on purging must not fill the memory: dropping more than was asked for costs a few answers.
        if (unread_purges_.size() >= kUnreadPurges) unread_purges_.assign(1, Purge{});
        unread_purges_.push_back(what);
    }
    std::vector<StreamId> ids;
    for (const auto& [id, entry] : index_)
        if (what.matches(entry.facts)) ids.push_back(id);
    forget(ids);
    disk_->change([](SnapshotBatch& pending, auto&) { pending.scrub = true; });
    state_.purged += ids.size();
    arm();
    return ids.size();
}
std::size_t Snapshots::purge(const Key& key) {
    return purge(Purge{key, std::nullopt});
}
std::size_t Snapshots::purge_template(std::string_view template_id) {
    return purge(Purge{std::nullopt, std::string(template_id)});
}
std::size_t Snapshots::purge_all() {
    return purge(Purge{});
}

void Snapshots::put(std::string_view name, std::string value) {
    std::string key(name);
    if (const auto found = facts_.find(name); found != facts_.end() && found->second == value) return;
    facts_.insert_or_assign(key, value);
    disk_->change(
        [&](SnapshotBatch& pending, auto&) { pending.facts.insert_or_assign(std::move(key), std::move(value)); });
}

std::optional<std::string> Snapshots::get(std::string_view name) const {
    const auto found = facts_.find(name);
    return found == facts_.end() ? std::nullopt : std::optional(found->second);
}

SnapshotState Snapshots::state() const {
    SnapshotState state = state_;
    state.reason = !disk_reason_.empty() ? disk_reason_
                   : queue_full_         ? "the queue is full, the oldest are dropped"
                                         : "";
    state.degraded = !state.reason.empty();
    state.count = index_.size();
    state.bytes = bytes_;
    const Disk::Queue queue = disk_->queue();
    state.queued = queue.saves;
    state.queued_bytes = queue.bytes;
    return state;
}

bool Snapshots::flush(Nanos within) {
    const bool all = disk_->flush(within);
    disk_->take_reports();
    return all;
}

// One timer, for the next to expire.
void Snapshots::arm() {
    if (by_expiry_.empty()) {
        timer_.reset();
        return;
    }
    const Nanos first = by_expiry_.begin()->first;
    if (timer_ && first == armed_for_) return;
    armed_for_ = first;
    // Not one by one where many expire within a second: nothing expired is handed out meanwhile.
    timer_ = timers_.after(std::max(first - timers_.clock().boottime(), kSecond), [this] { expire(); });
}

void Snapshots::expire() {
    timer_.reset();
    std::vector<StreamId> ids;
    for (const auto& [when, id] : by_expiry_) {
        if (when > timers_.clock().boottime()) break;
        ids.push_back(id);
    }
    state_.expired += ids.size();
    forget(ids);
    arm();
}

void Snapshots::found(const FileContents& contents) {
    const Nanos boottime = timers_.clock().boottime();
    const std::int64_t wall = timers_.clock().wall();
    std::unordered_set<StreamId> there;
    std::vector<StreamId> unwanted;
    first_order_ -= static_cast<std::int64_t>(contents.rows.size());
    std::int64_t order = first_order_;
    for (const FileContents::Row& row : contents.rows) {
        Entry entry;
        entry.facts = row.facts;
        entry.order = order++;
        entry.cost = row.cost;
        entry.stored = true;
        SnapshotFacts& facts = entry.facts;
        there.insert(facts.stream_id);
        if (const auto known = index_.find(facts.stream_id); known != index_.end()) {
            known->second.stored = true;
            continue;
        }
        if (row.boot_id != options_.boot_id) {
            // The wall clock may have been set meanwhile: no age is below 0, and nothing lives longer than its ttl.
            facts.ended_boottime_ns = boottime - std::max<Nanos>(wall - facts.ended_wall_ns, 0);
            facts.expires_boottime_ns = boottime + std::min(facts.expires_wall_ns - wall, row.ttl);
            facts.fresh_until_boottime_ns = 0;
        }
        const bool purged = std::any_of(unread_purges_.begin(), unread_purges_.end(),
                                        [&](const Purge& purge) { return purge.matches(facts); });
        const bool dead = !alive(facts);
        if (purged || dead || gone_.contains(facts.stream_id)) {
            unwanted.push_back(facts.stream_id);
            ++(purged ? state_.purged : state_.expired);
            continue;
        }
        insert(std::move(entry));
    }
    // A file that is not the one of before: what only that one held is lost.
    std::vector<StreamId> lost;
    for (const auto& [id, entry] : index_)
        if (!entry.queued && !there.contains(id)) lost.push_back(id);
    state_.lost += lost.size();
    forget(lost);

    // What was known before goes into this file too, and what it knows is older.
    const std::unordered_set<StreamId> gone_there(contents.gone.begin(), contents.gone.end());
    disk_->change([&](SnapshotBatch& pending, auto&) {
        pending.deletes.insert(pending.deletes.end(), unwanted.begin(), unwanted.end());
        pending.scrub = pending.scrub || !unread_purges_.empty();
        pending.gone.clear();
        std::copy_if(gone_order_.begin(), gone_order_.end(), std::back_inserter(pending.gone),
                     [&](StreamId id) { return !gone_there.contains(id); });
        for (const auto& [name, value] : facts_)
            if (const auto stored = contents.facts.find(name);
                stored == contents.facts.end() || stored->second != value)
                pending.facts.insert_or_assign(name, value);
    });
    std::deque<StreamId> older;
    for (const StreamId id : contents.gone)
        if (!index_.contains(id) && gone_.insert(id).second) older.push_back(id);
    gone_order_.insert(gone_order_.begin(), older.begin(), older.end());
    while (gone_order_.size() > kGoneIds) {
        gone_.erase(gone_order_.front());
        gone_order_.pop_front();
    }
    for (const StreamId id : unwanted) note_gone(id);
    for (const auto& [name, value] : contents.facts) facts_.emplace(name, value);
    unread_purges_.clear();
    ready_ = true;
    make_room();
    arm();
}

void Snapshots::written(const std::vector<std::pair<StreamId, std::int64_t>>& saves) {
    for (const auto& [id, order] : saves) {
        const auto found = index_.find(id);
        if (found == index_.end() || found->second.order != order) continue; // dropped or replaced meanwhile
        found->second.queued.reset();
        found->second.stored = true;
    }
    state_.saved += saves.size();
    if (queue_full_ && disk_->queue().saves == 0) queue_full_ = false;
}

void Snapshots::set_disk_reason(const std::string& reason) {
    if (!reason.empty())
        log(LogLevel::warning, "snapshots: degraded: {}", reason);
    else if (disk_reason_ != kBeingRead)
        log(LogLevel::info, "snapshots: no longer degraded");
    disk_reason_ = reason;
}

} // namespace gcoalesce
