// What a broker that died left in its segment, and the next one takes over: its answers go to the snapshot store, its
// memory to the new segment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <sys/stat.h>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "broker/snapshots.hpp"
#include "segment/mapping.hpp"

namespace gcoalesce {

// A stream as its slot tells it: all but the boot times and the template's id of its facts. nullopt: the slot holds
// another stream by now, or words that do not fit together. Believes no number that it finds there.
std::optional<Snapshot> copy_stream(const SegmentView& segment, std::uint32_t slot, std::uint64_t identity);

struct Rescued {
    std::uint64_t ended = 0;       // streams that had ended, and were not on disk yet
    std::uint64_t interrupted = 0; // that ran when the broker died, with an event at least
    std::uint64_t left_out = 0;    // of which not every word fits
};

// Saves each stream of a dead broker's segment that the store does not know yet, the oldest first, and waits for the
// disk, `within` at most in all. What has no event or must not be kept is remembered as gone. `boot_id`: this boot's;
// of another boot's segment nothing is fresh.
Rescued rescue(const SegmentView& dead, Snapshots& to, const Clock& clock, std::string_view boot_id, Nanos within);

// The file of a dead broker under the segment's name. Belongs to the one who holds the instance's lock.
class DeadSegment {
  public:
    // Nothing: there is no such file. GCOALESCE_BUSY: its broker lives, though its lock file was deleted;
    // GCOALESCE_FOREIGN: somebody else's file, which stays.
    static Result<std::optional<DeadSegment>> find(const Instance& instance, const std::string& name);

    // Saves what can be saved, and logs it in one line. snapshots: null: there is no disk to save it to. Whatever goes
    // wrong in here costs answers, never the start.
    void rescue(Snapshots* snapshots, const Clock& clock);

    // Puts a new segment in its place. Where /dev/shm has no room for both, takes the dead one's memory back, for up to
    // 10 s. Errors: create_segment()'s.
    Result<CreatedSegment> replace(std::size_t bytes, const Clock& clock);

  private:
    DeadSegment(std::string name, UniqueFd fd) : name_(std::move(name)), fd_(std::move(fd)) {}
    Result<SegmentView> map();
    bool had_clients() const;
    void close_all_slots();
    void punch();
    void let_go();

    std::string name_; // for shm_open
    UniqueFd fd_;      // read-only
    Mapping mapping_;
    std::optional<SegmentView> view_; // nothing: not of this layout, or never ready
};

// Removes our file, and not one of that name that another broker made after ours had been deleted.
void unlink_own(const std::string& path, const struct stat& ours);

} // namespace gcoalesce
