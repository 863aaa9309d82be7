#include "broker/rescue.hpp"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

#include "base/log.hpp"
#include "broker/ledger.hpp"
#include "segment/counters.hpp"
#include "segment/futex.hpp"
#include "segment/reader.hpp"

namespace gcoalesce {
namespace {

constexpr Nanos kRescueWithin = 5 * kSecond;
constexpr std::uint64_t kFlushEvery = 4 << 20; // far below what the store's queue holds
constexpr Nanos kRoomWithin = 10 * kSecond;
constexpr Nanos kCourtesy = 2 * kSecond; // for readers to copy what they hold
constexpr Nanos kCopyAtMost = kSecond;   // what a reader needs for one event between its two looks at `evicted`
constexpr int kTryEveryMs = 100;

// Where the dead broker's clocks stood when its heart beat last, as this broker's clocks tell it.
struct Times {
    Nanos death = 0; // monotonic of the dead broker's boot
    std::int64_t death_wall = 0;
    bool same_boot = false;
    Nanos monotonic = 0, boottime = 0; // now
    std::int64_t wall = 0;

    // How long ago something ended. Never below 0: a wall clock may have been set back.
    Nanos age(const SlotEnding& ending) const {
        return std::max<Nanos>(same_boot ? monotonic - ending.ended_ns : wall - ending.ended_wall_ns, 0);
    }
};

struct Candidate {
    std::uint32_t slot = 0;
    bool running = false;
    Nanos ended = 0; // of the dead broker's monotonic clock
};

SlotEnding interrupted(const Times& times) {
    SlotEnding ending{};
    ending.kind = GCOALESCE_INTERRUPTED;
    ending.code = GCOALESCE_BROKER_DEAD;
    ending.ended_ns = times.death;
    ending.ended_wall_ns = times.death_wall;
    ending.message.assign("the broker died in the midst of the answer");
    return ending;
}

bool plausible(const SlotEnding& ending) {
    return ending.kind > GCOALESCE_IN_FLIGHT && ending.kind <= GCOALESCE_INTERRUPTED;
}

} // namespace

std::optional<Snapshot> copy_stream(const SegmentView& segment, std::uint32_t number, std::uint64_t identity) {
    const Slot& slot = segment.slot(number);
    const SlotOpening opening = slot.opening.load();
    const std::uint64_t events = slot.committed.load(std::memory_order_acquire);
    // An event takes 8 bytes at least: more of them than that cannot be.
    const std::uint64_t room = segment.header().extents.count;
    const auto method = static_cast<Method>(opening.method);
    if (events > room / 8 || method < Method::stream || method >= Method::pass) return std::nullopt;

    Snapshot snapshot;
    snapshot.facts.key = slot.key.load();
    snapshot.facts.stream_id = opening.stream_id;
    snapshot.facts.realm = opening.realm;
    snapshot.method = method;
    snapshot.model = opening.model.view();
    snapshot.template_revision = opening.template_revision;
    snapshot.opened_ns = opening.opened_ns;
    snapshot.first_event_ns = slot.first_event_ns.load(std::memory_order_relaxed);
    snapshot.opened_wall_ns = opening.opened_wall_ns;
    snapshot.upstream_status = static_cast<std::int32_t>(slot.upstream_status.load(std::memory_order_relaxed));
    snapshot.retries = slot.retries.load(std::memory_order_relaxed);
    snapshot.ending = slot.ending.load();
    snapshot.request_bytes = opening.request_bytes;
    snapshot.request_digest = opening.request_digest;
    if (const std::byte* head = segment.extent_bytes(opening.request_offset, opening.request_kept)) {
        snapshot.request_head.resize(opening.request_kept);
        copy_out(snapshot.request_head.data(), head, opening.request_kept);
    }
    StreamReader reader(segment, number, identity);
    std::uint64_t bytes = 0;
    for (std::uint64_t i = 0; i < events; ++i) {
        std::string event;
        if (reader.next(event) != ReadStatus::event) return std::nullopt;
        bytes += record_bytes(event.size());
        if (bytes > room) return std::nullopt; // a chain that is a circle
        snapshot.events.push_back(std::move(event));
    }
    if (!reader.valid()) return std::nullopt;
    return snapshot;
}

Rescued rescue(const SegmentView& dead, Snapshots& to, const Clock& clock, std::string_view boot_id, Nanos within) {
    const Header& header = dead.header();
    Times times;
    times.death = header.heartbeat_ns.load(std::memory_order_acquire);
    times.death_wall = header.heartbeat_wall_ns.load(std::memory_order_acquire);
    times.same_boot = header.boot_id.view() == boot_id;
    times.monotonic = clock.monotonic();
    times.boottime = clock.boottime();
    times.wall = clock.wall();

    std::vector<Candidate> candidates;
    for (std::uint32_t i = 0; i < dead.slot_count(); ++i) {
        const Slot& slot = dead.slot(i);
        const auto state = static_cast<SlotState>(slot.state.load(std::memory_order_acquire));
        if (state != SlotState::in_flight && state != SlotState::ended) continue;
        const bool running = state == SlotState::in_flight;
        candidates.push_back({i, running, running ? times.death : slot.ending.load().ended_ns});
    }
    // If there are more than the store has room for, it is the oldest that it drops.
    std::stable_sort(candidates.begin(), candidates.end(),
                     [](const Candidate& a, const Candidate& b) { return a.ended < b.ended; });

    Rescued rescued;
    std::uint64_t unwritten = 0;
    const Nanos deadline = times.monotonic + within;
    const auto flush = [&] {
        if (const Nanos left = deadline - clock.monotonic(); left > 0) to.flush(left);
        unwritten = 0;
    };
    for (const Candidate& one : candidates) {
        const Slot& slot = dead.slot(one.slot);
        const SlotOpening opening = slot.opening.load();
        // Whatever came from the disk, went there, or was to be forgotten.
        if (opening.status == GCOALESCE_SNAPSHOT || to.known(opening.stream_id) != Snapshots::Known::no) continue;
        if (slot.committed.load(std::memory_order_acquire) == 0 ||
            slot.ephemeral.load(std::memory_order_acquire) != 0) {
            to.remember_gone(opening.stream_id);
            continue;
        }
        const std::optional<TemplatePolicy> policy =
            opening.template_index < dead.template_count() ? dead.policy(opening.template_index) : std::nullopt;
        std::optional<Snapshot> snapshot;
        if (policy) snapshot = copy_stream(dead, one.slot, slot.generation.load(std::memory_order_acquire) >> 1);
        if (snapshot && one.running) snapshot->ending = interrupted(times);
        if (!snapshot || !plausible(snapshot->ending)) {
            ++rescued.left_out;
            to.remember_gone(opening.stream_id);
            continue;
        }
        const Nanos age = times.age(snapshot->ending);
        SnapshotFacts& facts = snapshot->facts;
        facts.template_id = policy->id.view();
        facts.ended_boottime_ns = times.boottime - age;
        const Nanos fresh_until = one.running ? 0 : slot.fresh_until.load(std::memory_order_acquire);
        if (times.same_boot && fresh_until != 0)
            facts.fresh_until_boottime_ns = fresh_until - times.monotonic + times.boottime;
        if (!times.same_boot) { // its monotonic times move to this boot
            const Nanos shift = times.monotonic - age - snapshot->ending.ended_ns;
            snapshot->opened_ns += shift;
            snapshot->ending.ended_ns += shift;
            if (snapshot->first_event_ns != 0) snapshot->first_event_ns += shift;
        }
        for (const std::string& event : snapshot->events) unwritten += record_bytes(event.size());
        to.save(std::move(*snapshot), policy->snapshot_ttl - age);
        ++(one.running ? rescued.interrupted : rescued.ended);
        if (unwritten >= kFlushEvery) flush();
    }
    rescue_ledger(dead, to);
    flush(); // the segment goes next: what is not written by then has no second chance
    return rescued;
}

// ---- the file ------------------------------------------------------------------------------------------------------

void unlink_own(const std::string& path, const struct stat& ours) {
    struct stat found {};
    if (::lstat(path.c_str(), &found) == 0 && found.st_dev == ours.st_dev && found.st_ino == ours.st_ino)
        ::unlink(path.c_str());
}

Result<std::optional<DeadSegment>> DeadSegment::find(const Instance& instance, const std::string& name) {
    const std::string path = "/dev/shm" + name;
    // Not to be kept waiting by a FIFO that somebody has put there.
    UniqueFd old(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    if (!old) {
        if (errno == ENOENT) return std::optional<DeadSegment>();
        return fail_errno(GCOALESCE_FOREIGN, "cannot open the old segment " + path);
    }
    struct stat file {};
    if (::fstat(old.get(), &file) != 0 || file.st_uid != ::geteuid())
        return fail(GCOALESCE_FOREIGN, "{} belongs to uid {}, not to this broker: remove it", path, file.st_uid);
    if (broker_lock_held(old.get()) != false) {
        Header header{};
        const bool known = ::pread(old.get(), static_cast<void*>(&header), sizeof header, 0) == sizeof header &&
                           header.prefix.magic == kMagic && header.prefix.layout_major == kLayoutMajor;
        return fail(GCOALESCE_BUSY, "another broker (pid {}) still serves instance \"{}\" in {}",
                    known ? std::to_string(header.broker_pid) : "?", instance.name, instance.runtime_dir);
    }
    log(LogLevel::warning, "the previous broker of instance \"{}\" died; its segment is replaced", instance.name);
    return std::optional<DeadSegment>(DeadSegment(name, std::move(old)));
}

// The ready word is looked at before anything is mapped: once it is set every page was reserved, so that no access to
// the mapping can fail. It must not be missing, either: what was never ready holds nothing.
Result<SegmentView> DeadSegment::map() {
    struct stat file {};
    if (::fstat(fd_.get(), &file) != 0) return fail_errno(GCOALESCE_IO, "cannot examine it");
    Prefix prefix{};
    if (!S_ISREG(file.st_mode) || ::pread(fd_.get(), static_cast<void*>(&prefix), sizeof prefix, 0) != sizeof prefix)
        return fail(GCOALESCE_TOO_SHORT, "it is no segment");
    if (prefix.magic != kMagic) return fail(GCOALESCE_FOREIGN, "it is no segment");
    if (prefix.ready.load(std::memory_order_relaxed) == 0) return fail(GCOALESCE_STARTING, "it was never ready");
    Result<Mapping> mapping = Mapping::of(fd_.get(), static_cast<std::size_t>(file.st_size), false);
    if (!mapping) return tl::unexpected(mapping.error());
    Result<SegmentView> view = SegmentView::check(mapping->data(), mapping->bytes());
    if (view) mapping_ = std::move(*mapping);
    return view;
}

void DeadSegment::rescue(Snapshots* snapshots, const Clock& clock) {
    try {
        const Result<SegmentView> view = map();
        if (!view) {
            log(LogLevel::warning, "nothing is rescued from the dead broker's segment: {}", view.error().message);
            return;
        }
        view_ = *view;
        if (snapshots == nullptr) {
            log(LogLevel::warning, "the answers of the dead broker (pid {}) are lost: there is no --state-dir",
                view_->header().broker_pid);
            return;
        }
        const Rescued rescued = gcoalesce::rescue(*view_, *snapshots, clock, boot_id(), kRescueWithin);
        log(LogLevel::info,
            "rescued from the dead broker (pid {}): {} answers that had ended and were not on disk, {} interrupted "
            "ones; {} were left out",
            view_->header().broker_pid, rescued.ended, rescued.interrupted, rescued.left_out);
        if (const SnapshotState state = snapshots->state(); state.degraded)
            log(LogLevel::warning, "what was rescued waits in memory: {}", state.reason);
    } catch (const std::exception& error) {
        log(LogLevel::error, "rescuing the dead broker's answers failed: {}", error.what());
    }
}

bool DeadSegment::had_clients() const {
    return view_->counter(static_cast<std::uint32_t>(Counter::clients_attached))
               .value.load(std::memory_order_relaxed) != 0;
}

// Where there is room for one segment only, the dead one's pages must go, and unlinking frees none as long as some
// client has it mapped: an idle one, that never calls the library again, for ever. So, in this order:
//  1. The answers are in the snapshot store; readers of the dead segment can go on from there, by stream id.
//  2. For kCourtesy nothing happens: clients notice the death within a second, read the rest and unmap.
//  3. Every slot is closed to joiners and marked evicted. That makes us a second writer of a segment whose first one is
//     proved dead; nobody else can become one, for we hold the instance's lock. (Not the dead segment's own: whoever
//     asks the kernel about that one shall go on hearing "dead".) Identities stay, so that who has read everything
//     still finds the ending in its slot.
//  4. For kCopyAtMost nothing happens: a reader looks at `evicted` before it touches an extent and again after its
//  copy.
//     One that looked before 3 has finished copying; one that did not will see the mark and throw the copy away.
//  5. The extents' pages are punched out. Header, tables and slots stay readable. Whoever touches a hole all the same
//     (a span held for longer than this) reads zeros from a page that the kernel makes anew, and span_valid says no.
// Without a client that was attached nobody has to be waited for.
Result<CreatedSegment> DeadSegment::replace(std::size_t bytes, const Clock& clock) {
    struct stat file {};
    if (::fstat(fd_.get(), &file) == 0) unlink_own("/dev/shm" + name_, file);
    if (!view_) let_go(); // nobody of this version can be reading it
    const Nanos start = clock.monotonic();
    Nanos closed = 0;
    for (;;) {
        Result<CreatedSegment> created = create_segment(name_, bytes);
        const Nanos now = clock.monotonic();
        if (created || created.error().code != GCOALESCE_NO_MEMORY || now - start >= kRoomWithin) return created;
        const bool wait = view_ && had_clients();
        if (view_ && closed == 0 && (!wait || now - start >= kCourtesy)) {
            close_all_slots();
            closed = now;
        }
        if (closed != 0 && view_ && (!wait || now - closed >= kCopyAtMost)) {
            log(LogLevel::warning, "/dev/shm has no room for two segments: taking the dead one's memory back");
            punch();
            let_go();
            continue;
        }
        ::poll(nullptr, 0, kTryEveryMs);
    }
}

void DeadSegment::close_all_slots() {
    // Through /proc, as the file has no name any more and ours is open for reading only.
    const UniqueFd writable(::open(fmt::format("/proc/self/fd/{}", fd_.get()).c_str(), O_RDWR | O_CLOEXEC));
    const Result<Mapping> mapping = writable ? Mapping::of(writable.get(), mapping_.bytes(), true)
                                             : Result<Mapping>(fail_errno(GCOALESCE_IO, "cannot open it to write"));
    if (!mapping) {
        log(LogLevel::warning, "the dead broker's segment: {}", mapping.error().message);
        let_go();
        return;
    }
    auto* slots = reinterpret_cast<Slot*>(mapping->data() + view_->header().slots.offset);
    for (std::uint32_t i = 0; i < view_->slot_count(); ++i) {
        slots[i].generation.fetch_or(kClosedToJoiners, std::memory_order_seq_cst);
        slots[i].evicted.store(1, std::memory_order_seq_cst);
        slots[i].wake.fetch_add(1, std::memory_order_seq_cst);
        futex_wake_all(slots[i].wake);
    }
}

void DeadSegment::punch() {
    const UniqueFd writable(::open(fmt::format("/proc/self/fd/{}", fd_.get()).c_str(), O_RDWR | O_CLOEXEC));
    const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    const Table extents = view_->header().extents;
    const std::uint64_t begin = (extents.offset + page - 1) / page * page;
    const std::uint64_t end = (extents.offset + extents.count) / page * page;
    if (begin >= end) return;
    if (::fallocate(writable.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(begin),
                    static_cast<off_t>(end - begin)) != 0)
        log(LogLevel::warning, "{}",
            fail_errno(GCOALESCE_IO, "cannot take the dead segment's memory back").value().message);
}

// Our own hold on its pages.
void DeadSegment::let_go() {
    view_.reset();
    mapping_ = Mapping();
    fd_.reset();
}

} // namespace gcoalesce
