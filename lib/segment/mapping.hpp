// Finding, checking and mapping the segment.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.hpp"
#include "base/fd.hpp"
#include "segment/layout.hpp"

namespace gcoalesce {

// Where an instance lives. Every path of it comes from here.
struct Instance {
    std::string name;        // "default"
    std::string runtime_dir; // absolute or as given; no trailing slash

    std::string socket_path() const { return runtime_dir + "/" + name + ".sock"; }
    std::string lock_path() const { return runtime_dir + "/" + name + ".lock"; }
    // "/gcoalesce-<uid>-<instance>-<8 hex of the runtime dir>", a name for shm_open: users, instances and test runs
    // never meet. uid: the broker's.
    std::string segment_name(unsigned uid) const;
};

// Null or empty arguments are taken from the environment, then from the defaults that gcoalesce_attach_options names.
// GCOALESCE_BAD_REQUEST: a name with other than letters, digits, "-", "_" or over 40 of them; no runtime directory.
Result<Instance> resolve_instance(const char* name, const char* runtime_dir);

// A mapped piece of shared memory with one owner.
class Mapping {
  public:
    Mapping() = default;
    // Maps a whole descriptor, whose size is `bytes`. The descriptor may be closed afterwards.
    static Result<Mapping> of(int fd, std::size_t bytes, bool writable);

    std::byte* data() const { return data_; }
    std::size_t bytes() const { return bytes_; }

  private:
    std::shared_ptr<void> region_; // boost's mapped_region, out of this header
    std::byte* data_ = nullptr;
    std::size_t bytes_ = 0;
};

// The tables of a segment, located and bounds-checked once. Read-only; copies are cheap; the mapping must outlive them.
class SegmentView {
  public:
    SegmentView() = default;
    // Checks, in this order: magic, major version, length, fingerprint, ready word, tables within bounds.
    // Errors: GCOALESCE_TOO_SHORT, _FOREIGN, _WRONG_VERSION (both versions told), _STARTING.
    static Result<SegmentView> check(const std::byte* base, std::size_t bytes);

    const Header& header() const { return *header_; }
    const Slot& slot(std::uint32_t i) const { return slots_[i]; }
    std::uint32_t slot_count() const { return static_cast<std::uint32_t>(header_->slots.count); }
    const TemplateEntry& template_entry(std::uint32_t i) const { return templates_[i]; }
    std::uint32_t template_count() const { return static_cast<std::uint32_t>(header_->templates.count); }
    // What stands in that entry; nullopt: nothing, or it is changing at this moment.
    std::optional<TemplatePolicy> policy(std::uint32_t i) const;
    const CounterEntry& counter(std::uint32_t i) const { return counters_[i]; }
    std::uint32_t counter_count() const { return static_cast<std::uint32_t>(header_->counters.count); }
    const LogRecord& log_record(std::uint64_t number) const { return log_[number % header_->log.count]; }
    const ErrorEntry& error(std::uint32_t i) const { return errors_[i]; }
    std::uint32_t error_count() const { return static_cast<std::uint32_t>(header_->errors.count); }

    // Slot and generation that the index names for the key; nullopt is a miss, which only means asking the broker.
    struct Found {
        std::uint32_t slot;
        std::uint64_t identity; // generation >> 1
    };
    std::optional<Found> look_up(const Key& key) const;

    // `bytes` bytes at `offset`, if that lies within the extents, 8-byte aligned; else null. Offsets read from a slot
    // that is being recycled may be anything.
    const std::byte* extent_bytes(std::uint64_t offset, std::uint64_t bytes) const;

  private:
    const Header* header_ = nullptr;
    const CounterEntry* counters_ = nullptr;
    const TemplateEntry* templates_ = nullptr;
    const IndexEntry* index_ = nullptr;
    const Slot* slots_ = nullptr;
    const LogRecord* log_ = nullptr;
    const ErrorEntry* errors_ = nullptr;
};

// What is known of the broker behind a segment. "Dead" is proved by its kernel-held lock; "unresponsive" says only
// that its heartbeat is old.
enum class Liveness { alive, unresponsive, dead, closed, unknown };
constexpr Nanos kHeartbeatEvery = 100 * kMillisecond;
constexpr Nanos kHeartbeatOld = 2 * kSecond;

// An open segment file with its checked view.
struct OpenSegment {
    UniqueFd fd; // read-only
    Mapping mapping;
    SegmentView view;
    Liveness liveness(Nanos now_monotonic) const;
};

// Opens the instance's segment read-only, by name, needing no broker. Refused before anything of it is mapped: not a
// plain file, more than one link, another owner than the runtime directory's, another mode than 0640
// (GCOALESCE_FOREIGN). Errors besides: GCOALESCE_ABSENT, _NO_PERMISSION, _STARTING, _BROKER_DEAD (died before it was
// ready), and those of SegmentView::check.
Result<OpenSegment> open_segment(const Instance& instance);

// The same checks on a descriptor that the broker handed out. Takes the descriptor.
Result<OpenSegment> adopt_segment(UniqueFd fd, unsigned expected_uid);

// Whether some process holds the write lock that a broker keeps on this file. Works on read-only descriptors, in any
// pid namespace. nullopt: the kernel did not say.
std::optional<bool> broker_lock_held(int fd);

// ---- the broker's side ---------------------------------------------------------------------------------------------

constexpr unsigned kSegmentMode = 0640;

// Creates the segment's file exclusively, `bytes` long, every page reserved (GCOALESCE_NO_MEMORY tells needed and
// available, and the hint for containers), locked, mapped read-write, all zero. Unlinking it is the caller's business.
struct CreatedSegment {
    UniqueFd fd;
    Mapping mapping;
};
Result<CreatedSegment> create_segment(const std::string& segment_name, std::size_t bytes);

// Takes the write lock a broker keeps while it lives (an OFD lock: not lost by closing another descriptor, not
// inherited through exec). False: another holds it.
bool take_broker_lock(int fd);

} // namespace gcoalesce
