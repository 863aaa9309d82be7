#include "segment/reader.hpp"

#include "segment/futex.hpp"

namespace gcoalesce {

bool StreamReader::valid() const {
    // Acquire-loads behind the acquire-loads of the copy: copy_in() tells why this order decides.
    return slot_->evicted.load(std::memory_order_acquire) == 0 && same_stream();
}

bool StreamReader::same_stream() const {
    return slot_->generation.load(std::memory_order_acquire) >> 1 == identity_;
}

ReadStatus StreamReader::locate() {
    // The state before the count: all events of an ended stream were committed before the state said so, so a count
    // loaded after "ended" is the last one. Both seq_cst: a client that waits on its wake socket has stored `asked`
    // just before (lane.hpp).
    const auto state = static_cast<SlotState>(slot_->state.load(std::memory_order_seq_cst));
    const std::uint64_t committed = slot_->committed.load(std::memory_order_seq_cst);
    if (committed <= read_) {
        // Whoever has read all of it learns the ending also when the events have been evicted since.
        if (!same_stream()) return ReadStatus::lost;
        return state == SlotState::ended ? ReadStatus::end : ReadStatus::nothing;
    }
    // Before any of it is touched, and again after the copy: a new broker may have taken the memory back.
    if (!valid()) return ReadStatus::lost;
    for (bool moved = false;; moved = true) {
        if (extent_ == 0) {
            extent_ = slot_->first_extent.load(std::memory_order_acquire);
            within_ = 0;
        }
        const auto* extent = reinterpret_cast<const Extent*>(segment_.extent_bytes(extent_, sizeof(Extent)));
        if (extent == nullptr) return ReadStatus::lost;
        const std::uint64_t capacity = extent->capacity.load(std::memory_order_acquire);
        const std::byte* bytes = segment_.extent_bytes(extent_ + sizeof(Extent), capacity);
        if (bytes == nullptr || within_ > capacity) return ReadStatus::lost;
        if (capacity - within_ >= 8) {
            std::uint64_t length = 0;
            copy_out(&length, bytes + within_, sizeof length);
            if (length != kContinued) {
                if (length > capacity || record_bytes(length) > capacity - within_) return ReadStatus::lost;
                at_ = bytes + within_ + 8;
                length_ = length;
                return ReadStatus::event;
            }
        }
        const std::uint64_t next = extent->next.load(std::memory_order_acquire);
        // Every extent has an event; a chain of empty ones is a recycled one, and may be a circle.
        if (next == 0 || moved) return ReadStatus::lost;
        extent_ = next;
        within_ = 0;
    }
}

std::string StreamReader::document(const SlotEnding& ending) const {
    if (ending.document_offset == 0 || ending.document_bytes > kMostDocument) return {};
    const std::byte* bytes = segment_.extent_bytes(ending.document_offset, ending.document_bytes);
    if (bytes == nullptr) return {};
    std::string text(ending.document_bytes, '\0');
    copy_out(text.data(), bytes, text.size());
    return text;
}

ReadStatus StreamReader::next(std::string& event) {
    const ReadStatus status = locate();
    if (status != ReadStatus::event) return status;
    event.resize(length_);
    copy_out(event.data(), at_, length_);
    if (!valid()) return ReadStatus::lost;
    within_ += record_bytes(length_);
    ++read_;
    return ReadStatus::event;
}

ReadStatus StreamReader::next_span(std::string_view& event) {
    const ReadStatus status = locate();
    if (status != ReadStatus::event) return status;
    event = {reinterpret_cast<const char*>(at_), length_};
    if (!valid()) return ReadStatus::lost;
    within_ += record_bytes(length_);
    ++read_;
    return ReadStatus::event;
}

void StreamReader::wait(std::uint32_t seen, Nanos slice) const {
    futex_wait(slot_->wake, seen, slice);
}

} // namespace gcoalesce
