// A broker within the test's process: a real Store on a real segment, and a control server on a thread that answers by
// itself or leaves the answers to the test.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/fd.hpp"
#include "broker/store.hpp"
#include "protocol/control.hpp"
#include "segment/mapping.hpp"
#include "tests/support/instance.hpp"

namespace gcoalesce::test {

struct FakeBrokerOptions {
    std::uint32_t slots = 64;
    std::size_t extent_bytes = 8 << 20;
    TemplateSettings settings = {};
    Nanos stall_timeout = 60 * kSecond;
    std::uint64_t mute_connections = 0;        // the first so many are read and never answered
    Nanos welcome_after = 0;                   // how long each hello waits for its answer
    std::uint32_t protocol = kProtocolVersion; // in its welcome
    std::size_t lane_missing_bytes = 0;        // the lane is so much too short
    bool lane_sealed = true;
    std::size_t welcome_descriptors = kWelcomeDescriptors; // fewer or more than there should be
    std::optional<message::Goodbye> goodbye_for_hello;     // instead of a welcome
};

// Fails the test's process where something the test counts on does not happen within 30 seconds.
class FakeBroker {
  public:
    explicit FakeBroker(const Instance& instance, FakeBrokerOptions options = {});
    ~FakeBroker(); // as stop(), if it is neither stopped nor dead
    FakeBroker(const FakeBroker&) = delete;
    FakeBroker& operator=(const FakeBroker&) = delete;

    // Runs on the store while the server stands still. Not after die().
    template <class Call>
    auto with_store(Call call) {
        const std::lock_guard lock(mutex_);
        return call(*store_);
    }

    // ---- opens ----

    struct Call { // an `open` with its body
        std::uint64_t connection = 0;
        message::Open open;
        std::string body;
        Key key{};
    };
    // From now on calls are kept for the test to answer, until serve().
    void hold();
    void serve(); // answers by itself: joins what is joinable, starts a stream otherwise. Not what is held already
    std::deque<Call> wait_for_held(std::size_t count); // takes them
    StreamRef answer(const Call& call);                // as serve() would
    void refuse(const Call& call, Code code, const std::string& message, std::int64_t retry_ms = 0);
    void answer_withdrawn(const Call& call);

    std::size_t opens() const;
    std::size_t withdraws() const;
    std::size_t connections() const;                               // alive
    std::size_t attaches() const;                                  // ever
    void wait_until(const std::function<bool()>& condition) const; // looked at after each step of the server

    // The streams started so far, in order.
    StreamRef stream(std::size_t number) const;
    std::size_t streams() const;

    // ---- ends ----

    void stop_heartbeat();
    void say_goodbye(Code code, const std::string& message); // to all, and closes their connections
    void drop_connections();                                 // without a word; lanes and pins stay
    void revoke_lanes();
    void stop(); // in order: state "closed", name unlinked
    void die();  // what the kernel does for a killed process, and nothing else

  private:
    struct Connection;
    void run();
    void readable(Connection& connection);
    bool holds_pins(const Connection& connection) const;
    void take(Connection& connection, std::string_view frame);
    void welcome(Connection& connection);
    void send(std::uint64_t connection, const Message& message);
    StreamRef answer_locked(const Call& call);
    void end_thread();

    const Instance instance_;
    const FakeBrokerOptions options_;
    UniqueFd lock_file_, segment_fd_, listener_, stopper_;
    std::unique_ptr<Store> store_;

    mutable std::mutex mutex_;
    mutable std::condition_variable stepped_;
    std::map<std::uint64_t, std::unique_ptr<Connection>> connections_;
    std::vector<UniqueFd> left_; // wake sockets of connections that are gone and whose lanes are not
    std::uint64_t last_connection_ = 0;
    std::deque<Call> held_;
    std::vector<StreamRef> streams_;
    std::size_t opens_ = 0, withdraws_ = 0, attaches_ = 0;
    bool holding_ = false, beating_ = true, stopping_ = false, over_ = false;
    std::thread thread_;
};

} // namespace gcoalesce::test
