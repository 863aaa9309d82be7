// A client's own small shared memory: what it pins, and whether it wants to be woken.
//
// Pinning is one half of a Dekker handshake with Store::close_to_joiners(): the joiner stores its pin and then loads
// the generation, the broker stores the closed bit and then loads the pins. All four accesses are seq_cst, so at least
// one side sees the other: either the joiner sees "closed" and takes its pin back, or the broker sees the pin and lets
// the slot be. tests/model/pin.pml checks this, and that it fails with any of the four weakened.
//
// Asking to be woken is another one with Store::append() and Store::end(): asked is stored before the counts are
// loaded again, and the counts are stored before asked is loaded, all seq_cst (tests/model/wake.pml).
#pragma once

#include "segment/layout.hpp"

namespace gcoalesce {

constexpr std::uint64_t lane_bytes(std::uint64_t slots) {
    return sizeof(LaneHeader) + slots * sizeof(PinEntry);
}

// A view of a mapped lane; the mapping's owner keeps it alive. Thread-safe: every word is atomic.
class Lane {
  public:
    Lane() = default;
    Lane(std::byte* base, std::uint32_t slots)
        : header_(reinterpret_cast<LaneHeader*>(base)),
          pins_(reinterpret_cast<PinEntry*>(base + sizeof(LaneHeader))),
          slots_(slots) {}

    explicit operator bool() const { return header_ != nullptr; }
    std::uint32_t slots() const { return slots_; }
    LaneHeader& header() const { return *header_; }
    PinEntry& entry(std::uint32_t slot) const { return pins_[slot]; }

    // Joiner's half of the handshake: call before loading the slot's generation.
    void pin(std::uint32_t slot) const {
        pins_[slot].pins.fetch_add(1, std::memory_order_seq_cst);
        changed();
    }
    // After it the slot may be recycled at once: everything read from it must have been read before (release).
    void unpin(std::uint32_t slot) const {
        pins_[slot].pins.fetch_sub(1, std::memory_order_release);
        changed();
    }
    void count_join(std::uint32_t slot, bool fresh) const {
        (fresh ? pins_[slot].fresh : pins_[slot].joined).fetch_add(1, std::memory_order_relaxed);
        changed();
    }
    // A reader of the slot went on, or is about to join: it is not one of those that may be evicted.
    void moved(std::uint32_t slot) const { pins_[slot].moves.fetch_add(1, std::memory_order_relaxed); }
    std::uint32_t pins(std::uint32_t slot) const { return pins_[slot].pins.load(std::memory_order_seq_cst); }

    // Client: "wake me". Call after draining the wake socket and before looking at the counts again.
    void ask() const { header_->asked.store(1, std::memory_order_seq_cst); }
    // Broker, after a publication: whether to send on the wake socket. One send answers one ask.
    bool take_ask() const {
        return header_->asked.load(std::memory_order_seq_cst) != 0 &&
               header_->asked.exchange(0, std::memory_order_seq_cst) != 0;
    }

    bool revoked() const { return header_->revoked.load(std::memory_order_acquire) != 0; }

  private:
    void changed() const { header_->changes.fetch_add(1, std::memory_order_release); }

    LaneHeader* header_ = nullptr;
    PinEntry* pins_ = nullptr;
    std::uint32_t slots_ = 0;
};

} // namespace gcoalesce
