// The fast path: joining a stream without a system call and without the broker.
#pragma once

#include <optional>

#include "segment/lane.hpp"
#include "segment/mapping.hpp"

namespace gcoalesce {

struct Joined {
    std::uint32_t slot;
    std::uint64_t identity;
    bool fresh; // a complete answer; else a running stream
};

// On success the slot is pinned in the lane: the caller unpins it. nullopt: ask the broker. Thread-safe.
// max_age: of a finished answer, besides its being fresh; kAnyAge: no further limit.
constexpr Nanos kAnyAge = INT64_MAX;
inline std::optional<Joined> try_join(const SegmentView& segment, const Lane& lane, const Key& key, Nanos now,
                                      Nanos max_age = kAnyAge) {
    const std::optional<SegmentView::Found> found = segment.look_up(key);
    if (!found) return std::nullopt;
    const Slot& slot = segment.slot(found->slot);
    // The joiner's half of the handshake (lane.hpp): the pin first, the generation after.
    lane.moved(found->slot); // before it: whoever sees the pin sees that its process is no sleeper
    lane.pin(found->slot);
    const bool open = slot.generation.load(std::memory_order_seq_cst) == found->identity << 1;
    if (open) {
        // From here on the broker sees the pin before it recycles the slot: what follows cannot change under us, and
        // nothing but the key itself proves that this is the answer asked for (rule 4).
        const auto state = static_cast<SlotState>(slot.state.load(std::memory_order_acquire));
        const bool fresh = state == SlotState::ended && now < slot.fresh_until.load(std::memory_order_acquire) &&
                           (max_age == kAnyAge || now - slot.ending.load().ended_ns <= max_age);
        if (slot.key.load() == key && (state == SlotState::in_flight || fresh)) {
            lane.count_join(found->slot, fresh);
            return Joined{found->slot, found->identity, fresh};
        }
    }
    lane.unpin(found->slot);
    return std::nullopt;
}

} // namespace gcoalesce
