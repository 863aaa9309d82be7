// Reading one stream out of the segment.
#pragma once

#include <string>
#include <string_view>

#include "segment/mapping.hpp"

namespace gcoalesce {

enum class ReadStatus {
    event,   // one more
    nothing, // not yet
    end,     // all events were read and the stream has ended
    lost     // evicted, or the slot holds another stream by now: what was just read must not be used
};

// A private cursor over a stream's events, from the first or from any number on. It reads a slot whose generation has
// the given identity, and never trusts an offset it finds there: pinned readers and inspectors (who pin nothing and so
// may be overtaken by a recycling) use the same code. Not thread-safe.
class StreamReader {
  public:
    StreamReader() = default;
    StreamReader(const SegmentView& segment, std::uint32_t slot, std::uint64_t identity)
        : segment_(segment), slot_(&segment.slot(slot)), identity_(identity) {}

    // Copies the next event. After `nothing`, wait on the word that was loaded by wake_word() *before* this call.
    ReadStatus next(std::string& event);

    // The same without copying; the bytes may be used if valid() still says so afterwards.
    ReadStatus next_span(std::string_view& event);

    // Whether the slot still holds this stream's events.
    bool valid() const;
    // Whether the slot still is this stream's, though perhaps without its events: its ending can be told.
    bool same_stream() const;

    // The futex word: load it first, then read, then wait on what was loaded (no wake-up can be lost between).
    std::uint32_t wake_word() const { return slot_->wake.load(std::memory_order_seq_cst); }
    void wait(std::uint32_t seen, Nanos slice) const;

    std::uint64_t events_read() const { return read_; }
    const Slot& slot() const { return *slot_; }
    std::uint64_t identity() const { return identity_; }

    // Meaningful once next() said `end`.
    SlotEnding ending() const { return slot_->ending.load(); }
    // Upstream's error, as it told it; "": there is none. To be used if same_stream() still says so afterwards.
    std::string document(const SlotEnding& ending) const;

  private:
    // Finds the next event's bytes: sets at_ and length_ behind a check of every bound.
    ReadStatus locate();

    SegmentView segment_;
    const Slot* slot_ = nullptr;
    std::uint64_t identity_ = 0;
    std::uint64_t read_ = 0;   // events
    std::uint64_t extent_ = 0; // offset of the present one; 0: none yet
    std::uint64_t within_ = 0; // bytes of it that were read
    const std::byte* at_ = nullptr;
    std::uint64_t length_ = 0;
};

} // namespace gcoalesce
