#include "segment/mapping.hpp"

#include <boost/interprocess/mapped_region.hpp>
#include <boost/interprocess/shared_memory_object.hpp>
#include <cerrno>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <system_error>

#include "base/sha256.hpp"
#include "base/units.hpp"

namespace gcoalesce {
namespace bip = boost::interprocess;
namespace {

constexpr std::size_t kMaxInstanceName = 40;

// What mapped_region asks of a memory-mappable object (Boost.Interprocess, "MemoryMappable" in its manual).
struct Mappable {
    bip::mapping_handle_t handle;
    bip::mapping_handle_t get_mapping_handle() const { return handle; }
};

tl::unexpected<Error> translate(int native, const std::string& what) {
    Code code = GCOALESCE_IO;
    if (native == ENOENT) code = GCOALESCE_ABSENT;
    if (native == EACCES || native == EPERM) code = GCOALESCE_NO_PERMISSION;
    if (native == ELOOP) code = GCOALESCE_FOREIGN;
    return fail(code, "{}: {}", what, std::generic_category().message(native));
}

tl::unexpected<Error> translate(const bip::interprocess_exception& error, const std::string& what) {
    return translate(error.get_native_error(), what);
}

// shared_memory_object owns its descriptor; ours lives on by itself, on the same open file description.
UniqueFd descriptor_of(const bip::shared_memory_object& object) {
    return UniqueFd(::fcntl(object.get_mapping_handle().handle, F_DUPFD_CLOEXEC, 0));
}

Result<std::size_t> check_file(int fd, unsigned owner, const std::string& what) {
    struct stat file {};
    if (::fstat(fd, &file) != 0) return fail_errno(GCOALESCE_IO, "cannot examine " + what);
    if (!S_ISREG(file.st_mode))
        return fail(GCOALESCE_FOREIGN, "{} is no plain file: no broker made it; remove it", what);
    if (file.st_uid != owner)
        return fail(GCOALESCE_FOREIGN, "{} belongs to uid {}, expected uid {}: no broker of this instance made it",
                    what, file.st_uid, owner);
    if (file.st_nlink > 1) return fail(GCOALESCE_FOREIGN, "{} has {} links, expected one", what, file.st_nlink);
    if ((file.st_mode & 07777) != kSegmentMode)
        return fail(GCOALESCE_FOREIGN, "{} has mode {:o}, expected {:o}: remove it and restart the broker", what,
                    file.st_mode & 07777u, kSegmentMode);
    return static_cast<std::size_t>(file.st_size);
}

Result<OpenSegment> map_checked(UniqueFd fd, unsigned owner, const std::string& what) {
    const Result<std::size_t> size = check_file(fd.get(), owner, what);
    if (!size) return tl::unexpected(size.error());
    const auto died_early = [&] {
        return fail(GCOALESCE_BROKER_DEAD, "{}: the broker died before it was ready; start it again", what);
    };
    if (*size < sizeof(Prefix)) {
        // A broker creates the file empty, locks it, and then gives it its size.
        if (broker_lock_held(fd.get()).value_or(false))
            return fail(GCOALESCE_STARTING, "the broker of {} is starting", what);
        if (*size == 0) return died_early();
        return fail(GCOALESCE_TOO_SHORT, "{} has {} bytes, expected at least {}: no running broker owns it", what,
                    *size, sizeof(Prefix));
    }
    Result<Mapping> mapping = Mapping::of(fd.get(), *size, false);
    if (!mapping) return tl::unexpected(mapping.error());
    Result<SegmentView> view = SegmentView::check(mapping->data(), mapping->bytes());
    if (!view) {
        Error error = view.error();
        if (error.code == GCOALESCE_STARTING && broker_lock_held(fd.get()) == false) return died_early();
        error.message = what + ": " + error.message;
        return tl::unexpected(std::move(error));
    }
    return OpenSegment{std::move(fd), std::move(*mapping), *view};
}

} // namespace

// ---- names ---------------------------------------------------------------------------------------------------------

std::string Instance::segment_name(unsigned uid) const {
    std::error_code ignored;
    const std::filesystem::path whole = std::filesystem::weakly_canonical(runtime_dir, ignored);
    Sha256 hash;
    hash.field(whole.empty() ? runtime_dir : whole.string());
    const Key digest = hash.finish();
    return fmt::format("/gcoalesce-{}-{}-{}", uid, name, to_hex(std::span(digest).first(4)));
}

Result<Instance> resolve_instance(const char* name, const char* runtime_dir) {
    const auto given = [](const char* argument, const char* variable) -> std::string {
        if (argument != nullptr && *argument != '\0') return argument;
        const char* value = std::getenv(variable);
        return value != nullptr ? value : "";
    };
    Instance instance{given(name, "GCOALESCE_INSTANCE"), given(runtime_dir, "GCOALESCE_RUNTIME_DIR")};
    if (instance.name.empty()) instance.name = "default";
    const bool plain = instance.name.find_first_not_of(
                           "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_") == std::string::npos;
    if (!plain || instance.name.size() > kMaxInstanceName)
        return fail(GCOALESCE_BAD_REQUEST,
                    "expected an instance name of at most {} letters, digits, \"-\" and \"_\", found \"{}\"",
                    kMaxInstanceName, instance.name);
    if (instance.runtime_dir.empty()) {
        struct stat found {};
        const char* own = std::getenv("XDG_RUNTIME_DIR");
        if (::stat("/run/gcoalesce", &found) == 0 && S_ISDIR(found.st_mode)) {
            instance.runtime_dir = "/run/gcoalesce";
        } else if (own != nullptr && *own != '\0') {
            instance.runtime_dir = std::string(own) + "/gcoalesce";
        } else {
            return fail(GCOALESCE_BAD_REQUEST, "no runtime directory: neither --runtime-dir, GCOALESCE_RUNTIME_DIR nor "
                                               "XDG_RUNTIME_DIR is set, and /run/gcoalesce does not exist");
        }
    }
    while (instance.runtime_dir.size() > 1 && instance.runtime_dir.back() == '/') instance.runtime_dir.pop_back();
    return instance;
}

// ---- mapping -------------------------------------------------------------------------------------------------------

Result<Mapping> Mapping::of(int fd, std::size_t bytes, bool writable) {
    try {
        Mappable file{};
        file.handle.handle = fd;
        file.handle.is_xsi = false;
        auto region = std::make_shared<bip::mapped_region>(file, writable ? bip::read_write : bip::read_only, 0, bytes);
        Mapping mapping;
        mapping.data_ = static_cast<std::byte*>(region->get_address());
        mapping.bytes_ = bytes;
        mapping.region_ = std::move(region);
        return mapping;
    } catch (const bip::interprocess_exception& error) {
        return translate(error, fmt::format("cannot map {} bytes of shared memory", bytes));
    }
}

Result<SegmentView> SegmentView::check(const std::byte* base, std::size_t bytes) {
    if (bytes < sizeof(Prefix))
        return fail(GCOALESCE_TOO_SHORT, "{} bytes, expected at least {}", bytes, sizeof(Prefix));
    const auto& prefix = *reinterpret_cast<const Prefix*>(base);
    const bool ready = prefix.ready.load(std::memory_order_acquire) != 0;
    if (prefix.magic != kMagic) {
        if (!ready && prefix.magic == 0) return fail(GCOALESCE_STARTING, "the broker is starting");
        return fail(GCOALESCE_FOREIGN, "this is no segment of gcoalesce (magic {:016x})", prefix.magic);
    }
    if (prefix.layout_major != kLayoutMajor)
        return fail(GCOALESCE_WRONG_VERSION,
                    "the segment has layout {}.{}, this program reads layout {}.x: use the broker's version",
                    prefix.layout_major, prefix.layout_minor, kLayoutMajor);
    if (!ready) return fail(GCOALESCE_STARTING, "the broker is starting");
    if (bytes < prefix.total_bytes || bytes < sizeof(Header))
        return fail(GCOALESCE_TOO_SHORT, "{} bytes, its header claims {}: it was cut; restart the broker", bytes,
                    prefix.total_bytes);
    if (prefix.fingerprint != kFingerprint)
        return fail(GCOALESCE_WRONG_VERSION,
                    "the segment's structs have fingerprint {:016x}, this program's {:016x} (both layout {}): "
                    "broker and program were built apart; install both from one version",
                    prefix.fingerprint, kFingerprint, kLayoutMajor);

    SegmentView view;
    view.header_ = reinterpret_cast<const Header*>(base);
    const Header& header = *view.header_;
    bool sound = true;
    const auto place = [&](const Table& table, std::uint64_t stride, std::uint64_t most) -> const std::byte* {
        const std::uint64_t total = prefix.total_bytes;
        if (table.offset % 64 != 0 || table.offset > total || table.count == 0 || table.count > most ||
            table.count > (total - table.offset) / stride)
            sound = false;
        return base + table.offset;
    };
    view.counters_ = reinterpret_cast<const CounterEntry*>(place(header.counters, sizeof(CounterEntry), 4096));
    view.templates_ = reinterpret_cast<const TemplateEntry*>(place(header.templates, sizeof(TemplateEntry), 65536));
    view.index_ = reinterpret_cast<const IndexEntry*>(place(header.index, sizeof(IndexEntry), 1u << 20));
    view.slots_ = reinterpret_cast<const Slot*>(place(header.slots, sizeof(Slot), kMaxSlots));
    view.log_ = reinterpret_cast<const LogRecord*>(place(header.log, sizeof(LogRecord), 1u << 24));
    view.errors_ = reinterpret_cast<const ErrorEntry*>(place(header.errors, sizeof(ErrorEntry), 65536));
    place(header.extents, 1, prefix.total_bytes);
    if ((header.index.count & (header.index.count - 1)) != 0) sound = false; // look_up() masks with count - 1
    if (!sound)
        return fail(GCOALESCE_FOREIGN, "the segment's tables do not fit into it: it is damaged; restart the broker");
    return view;
}

std::optional<TemplatePolicy> SegmentView::policy(std::uint32_t i) const {
    const TemplateEntry& entry = templates_[i];
    const std::uint64_t sequence = entry.sequence.load(std::memory_order_acquire);
    if (sequence == 0 || sequence % 2 != 0) return std::nullopt;
    const TemplatePolicy policy = entry.policy.load();
    // Acquire-loads before it: a change of any word that was copied shows here (copy_in()).
    if (entry.sequence.load(std::memory_order_acquire) != sequence) return std::nullopt;
    return policy;
}

std::optional<SegmentView::Found> SegmentView::look_up(const Key& key) const {
    const std::uint64_t fingerprint = key_fingerprint(key);
    const std::uint64_t mask = header_->index.count - 1;
    for (std::uint64_t probe = 0; probe < kIndexProbes; ++probe) {
        const IndexEntry& entry = index_[(fingerprint + probe) & mask];
        if (entry.fingerprint.load(std::memory_order_acquire) != fingerprint) continue;
        const std::uint64_t reference = entry.reference.load(std::memory_order_acquire);
        const auto slot = static_cast<std::uint32_t>(reference & 0xFFFF);
        if (slot == 0 || slot > slot_count()) continue;
        return Found{slot - 1, reference >> 16};
    }
    return std::nullopt;
}

const std::byte* SegmentView::extent_bytes(std::uint64_t offset, std::uint64_t bytes) const {
    const Table& extents = header_->extents;
    if (offset % 8 != 0 || offset < extents.offset || offset - extents.offset > extents.count ||
        bytes > extents.count - (offset - extents.offset))
        return nullptr;
    return reinterpret_cast<const std::byte*>(header_) + offset;
}

// ---- opening -------------------------------------------------------------------------------------------------------

Result<OpenSegment> open_segment(const Instance& instance) {
    // The broker's uid is part of the name. Its lock file tells it, and stays when the broker is gone.
    struct stat owner {};
    if (::stat(instance.lock_path().c_str(), &owner) != 0) {
        if (errno == EACCES)
            return fail(
                GCOALESCE_NO_PERMISSION,
                "no permission to enter {}: be a member of the broker's group (usually gcoalesce) and log in again",
                instance.runtime_dir);
        return fail(GCOALESCE_ABSENT,
                    "no broker of instance \"{}\" has run in {}: is gcoalesced started, with this "
                    "--instance and --runtime-dir?",
                    instance.name, instance.runtime_dir);
    }
    const std::string name = instance.segment_name(owner.st_uid);
    const std::string what = "/dev/shm" + name;
    // Not by shm_open, which a FIFO that somebody has put there would keep waiting.
    UniqueFd fd(::open(what.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    if (fd) return map_checked(std::move(fd), owner.st_uid, what);
    tl::unexpected<Error> failure = translate(errno, "cannot open " + what);
    if (failure.value().code == GCOALESCE_ABSENT)
        failure.value().message = fmt::format("no broker of instance \"{}\" runs in {} ({} does not exist): start "
                                              "gcoalesced",
                                              instance.name, instance.runtime_dir, what);
    if (failure.value().code == GCOALESCE_NO_PERMISSION)
        failure.value().message += ": be a member of the broker's group (usually gcoalesce) and log in again";
    return failure;
}

Result<OpenSegment> adopt_segment(UniqueFd fd, unsigned expected_uid) {
    return map_checked(std::move(fd), expected_uid, "the broker's segment");
}

std::optional<bool> broker_lock_held(int fd) {
    struct flock query {};
    query.l_type = F_WRLCK;
    query.l_whence = SEEK_SET;
    while (::fcntl(fd, F_OFD_GETLK, &query) != 0) {
        if (errno != EINTR) return std::nullopt;
    }
    return query.l_type != F_UNLCK;
}

Liveness OpenSegment::liveness(Nanos now_monotonic) const {
    const Header& header = view.header();
    if (header.state.load(std::memory_order_acquire) == static_cast<std::uint32_t>(BrokerState::closed))
        return Liveness::closed;
    const std::optional<bool> held = broker_lock_held(fd.get());
    if (!held) return Liveness::unknown;
    if (!*held) return Liveness::dead;
    return now_monotonic - header.heartbeat_ns.load(std::memory_order_acquire) > kHeartbeatOld ? Liveness::unresponsive
                                                                                               : Liveness::alive;
}

// ---- the broker's side ---------------------------------------------------------------------------------------------

bool take_broker_lock(int fd) {
    struct flock lock {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    while (::fcntl(fd, F_OFD_SETLK, &lock) != 0) {
        if (errno != EINTR) return false;
    }
    return true;
}

Result<CreatedSegment> create_segment(const std::string& segment_name, std::size_t bytes) {
    const std::string what = "/dev/shm" + segment_name;
    try {
        const bip::shared_memory_object object(bip::create_only, segment_name.c_str(), bip::read_write,
                                               bip::permissions(kSegmentMode));
        CreatedSegment created{descriptor_of(object), {}};
        const auto undo = [&](tl::unexpected<Error> failure) {
            bip::shared_memory_object::remove(segment_name.c_str());
            return failure;
        };
        if (!take_broker_lock(created.fd.get())) return undo(fail_errno(GCOALESCE_IO, "cannot lock " + what));
        // Exactly this mode, whatever the umask.
        if (::fchmod(created.fd.get(), kSegmentMode) != 0)
            return undo(fail_errno(GCOALESCE_IO, "cannot set the mode of " + what));
        // ftruncate alone would succeed on a full /dev/shm and kill with SIGBUS at the first touch.
        int error = 0;
        do {
            error = ::posix_fallocate(created.fd.get(), 0, static_cast<off_t>(bytes));
        } while (error == EINTR);
        if (error == ENOSPC || error == ENOMEM) {
            bip::shared_memory_object::remove(segment_name.c_str());
            created.fd.reset();
            struct statvfs room {};
            const std::uint64_t available = ::statvfs("/dev/shm", &room) == 0 ? room.f_bavail * room.f_frsize : 0;
            return fail(GCOALESCE_NO_MEMORY,
                        "/dev/shm has too little room: needed {} ({} bytes), available {} ({} bytes); free some, lower "
                        "--memory, or give the container more (docker run --shm-size={}m)",
                        format_size(bytes), bytes, format_size(available), available, bytes / 1048576 + 16);
        }
        if (error != 0) {
            errno = error;
            return undo(fail_errno(GCOALESCE_IO, "cannot reserve the pages of " + what));
        }
        Result<Mapping> mapping = Mapping::of(created.fd.get(), bytes, true);
        if (!mapping) return undo(tl::unexpected(mapping.error()));
        created.mapping = std::move(*mapping);
        return created;
    } catch (const bip::interprocess_exception& error) {
        return translate(error, "cannot create " + what);
    }
}

} // namespace gcoalesce
