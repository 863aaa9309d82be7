// One attach to one broker: its segment, this process's lane in it, and how that came about.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "client/link.hpp"
#include "segment/lane.hpp"
#include "segment/mapping.hpp"

namespace gcoalesce {

constexpr Nanos kAttachPatience = kSecond;   // of a first try, for a broker that accepts and then says nothing
constexpr Nanos kSlice = 250 * kMillisecond; // the longest sleep before the world is looked at again

// What an attach left in this process's memory. Subscriptions share it, so that streams stay readable after the broker
// died or the attachment went on to another one. Thread-safe.
class Session {
  public:
    enum class Fate { alive, closed, dead }; // dead is proved, not guessed

    Session(OpenSegment segment, Mapping lane, UniqueFd wake);

    const SegmentView& view() const { return segment_.view; }
    const Lane& lane() const { return lane_; }
    int wake_fd() const { return wake_.get(); } // readable after a publication that somebody asked for (Lane::ask)

    // The policy in force under this id. Not thread-safe: its attachment's lock guards what it remembers.
    std::optional<TemplatePolicy> policy(std::string_view template_id);

    // Looks whether the broker still lives. Costs a few loads as long as its heart beats and nobody suspects it, and a
    // system call every 50 ms at most otherwise. certain: in any case what the kernel says at this moment.
    Fate look(bool certain = false);
    Fate fate() const { return fate_.load(std::memory_order_acquire); }   // what looks have found so far
    void suspect() { suspected_.store(true, std::memory_order_release); } // the control connection has ended

  private:
    OpenSegment segment_;
    Mapping lane_mapping_;
    Lane lane_;
    UniqueFd wake_;
    std::map<std::string, std::uint32_t, std::less<>> templates_; // where in the segment an id was last found
    std::atomic<Fate> fate_{Fate::alive};
    std::atomic<bool> suspected_{false};
    std::atomic<Nanos> asked_kernel_{0};
};

// One try to attach: connects, says hello, checks what the welcome brings, says ready. Never blocks. Not thread-safe.
class AttachTry {
  public:
    // patience: how long the broker may take to answer.
    AttachTry(const Instance& instance, const std::string& client_name, Nanos now, Nanos patience)
        : instance_(instance), client_name_(client_name), deadline_(now + patience) {}

    struct Attached {
        std::shared_ptr<Session> session;
        Link link;
    };
    // The next step. Nothing: call again when fd() is readable, at next_step() at the latest. The attach group of
    // gcoalesce_code tells why a try failed. Not called again after anything but nothing.
    Result<std::optional<Attached>> advance(Nanos now);

    int fd() const { return link_ ? link_->fd() : -1; } // -1: not connected yet
    Nanos next_step(Nanos now) const;

  private:
    Result<bool> connect();
    Result<Attached> accept(const message::Welcome& welcome);

    const Instance& instance_;
    const std::string& client_name_;
    Nanos deadline_;
    std::optional<Link> link_;
    std::vector<UniqueFd> descriptors_;
};

// Why nobody answers at the instance's socket, as the segment tells it. Never GCOALESCE_OK.
Error why_no_answer(const Instance& instance, Nanos now);

} // namespace gcoalesce
