// What stands behind gcoalesce_attachment: the present session with a broker, and the control connection that all
// subscriptions of this process share.
//
// There is no thread of our own. Whoever waits drives the control connection: the first waiter polls it, the others
// sleep until their answer has come or the first one leaves and one of them takes its place.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "client/request.hpp"
#include "client/session.hpp"

namespace gcoalesce {

// A question to the broker, from asking to its one answer. A lost connection does not end it: it is asked again.
struct Pending {
    bool opening = false;                   // a stream is asked for; else `command` is what is asked
    std::shared_ptr<const Request> request; // null: a stream to resume, which its wishes name
    Wishes wishes;
    Message command;

    // The attachment's, under its mutex.
    std::uint64_t id = 0;
    int losses = 0;         // connections that ended before the answer came
    Nanos give_up = 0;      // when to stop looking for a broker; 0: never
    bool withdrawn = false; // nobody waits for the answer any more
    std::condition_variable changed;

    std::atomic<bool> settled{false}; // stored last, with release: the answer stands below
    Error refusal{GCOALESCE_OK, {}, 0};
    message::Opened opened;           // of a stream
    std::shared_ptr<Session> session; // whose lane has the pin of `opened`
    std::uint64_t number = 0;         // of a command: the milliseconds, or streams, that its answer tells
};

class Attachment {
  public:
    // gcoalesce_attach()'s contract.
    static Result<std::shared_ptr<Attachment>> attach(Instance instance, std::string client_name, Nanos timeout);
    ~Attachment();
    Attachment(const Attachment&) = delete;
    Attachment& operator=(const Attachment&) = delete;

    // Whether this process is a child of the one that attached. Every call from outside asks this first, and then
    // touches nothing: the mutexes below may have been held by threads that the child does not have.
    bool in_child() const { return *in_parent_ == 0; }

    // ---- asking ----

    // What the fast path needs: the session to join in, and what is remembered of the request.
    struct Recalled {
        std::shared_ptr<Session> session; // null: not attached just now, or it has no such template
        TemplatePolicy policy{};          // the template's, of that session
        std::optional<KeyMemo::Found> found;
    };
    Recalled recall(const Asked& asked);
    void remember(std::shared_ptr<const Request> request, std::uint64_t revision, const Key& key);

    // Asks the broker to open a stream; never waits. again: after a broker was lost, so until the caller's deadline; a
    // new request is refused when no broker was found for a second.
    std::shared_ptr<Pending> ask(std::shared_ptr<const Request> request, const Wishes& wishes, bool again);
    std::shared_ptr<Pending> ask(Message command); // notify, cancel, purge, reload

    // Waits until it is settled. False: the deadline passed.
    bool wait(Pending& pending, Nanos deadline);
    // Nobody waits for it any more. A pin that comes with a later answer is taken back. True: it had been settled
    // before, and what came with the answer is still the caller's.
    bool withdraw(Pending& pending);
    // Lets the control connection make progress, if nobody else sees to that; does not wait. For those
    // who wait elsewhere; called too often, it does nothing.
    void glance();
    // Why there is no connection; "" when there is one.
    std::string trouble();
    bool has_output() const { return has_output_.load(std::memory_order_relaxed); }

    // ---- event loops ----

    int fd();
    void dispatch();
    // Makes fd() readable, where it is in use: something may have changed that no broker will tell of.
    void kick();

    // ---- ending ----

    void detach();
    // Plays a crash: closes what the kernel would close, takes no pin back and says nothing. For tests.
    void abandon();
    bool abandoned() const { return abandoned_.load(std::memory_order_relaxed); }

    std::atomic<std::int64_t> subscriptions{0}; // open ones

  private:
    Attachment(Instance instance, std::string client_name);
    Result<void> prepare();

    // All below: under mutex_.
    void turn(Nanos now);
    void exchange(Nanos now);
    void take(const Message& message, Nanos now);
    void send(const Pending& pending);
    void settle(Pending& pending);
    void refuse(Pending& pending, Error error);
    void refuse_all(const Error& error);
    void lose_link(Nanos now);
    void try_attach(Nanos now);
    void install(AttachTry::Attached attached);
    void back_off(Nanos now);
    std::shared_ptr<Pending> ask(std::shared_ptr<Pending> pending, bool again);
    Nanos next_step(Nanos now) const;
    void watch(int fd, bool output);
    void hand_over();
    void set_timer(Nanos due);
    void drain_wake();
    void make_readable();
    void close_link();
    void let_go();
    void unwatch_wake();

    const Instance instance_;
    const std::string client_name_;
    const unsigned char* in_parent_ = nullptr; // 1 in a page that the kernel wipes in a forked child

    UniqueFd control_poll_; // epoll: the control socket, whichever it is just now
    UniqueFd loop_poll_;    // epoll, fd(): control_poll_, the wake socket, the timer
    UniqueFd timer_;

    std::mutex mutex_;
    std::shared_ptr<Session> session_; // the latest one; null: none, or let go
    std::optional<Link> link_;         // its control connection, while it lasts
    std::optional<AttachTry> attempt_;
    Error trouble_{GCOALESCE_OK, {}, 0}; // why the last try failed
    Nanos attach_deadline_ = 0;          // of the first attach; 0: none
    bool first_ = true;                  // attach() wants a session even with nothing pending
    Nanos next_try_ = 0;
    unsigned failures_ = 0;   // of connections in a row, none of which brought an answer
    unsigned unanswered_ = 0; // tries in a row that found a broker unresponsive
    std::unordered_map<std::uint64_t, std::shared_ptr<Pending>> pending_;
    std::uint64_t last_id_ = 0;
    bool polling_ = false;           // a waiter polls control_poll_
    std::vector<Pending*> sleepers_; // the other waiters
    int watched_ = -1;               // in control_poll_
    bool watched_output_ = false;
    int watched_wake_ = -1; // in loop_poll_
    bool kicked_ = false;
    Nanos timer_due_ = 0; // 0: not running
    bool detached_ = false;
    std::atomic<bool> loop_used_{false};
    std::atomic<bool> has_output_{false};
    std::atomic<Nanos> glanced_{0};
    std::atomic<bool> abandoned_{false};

    // Apart, so that joining never waits for somebody's exchange with the broker.
    std::mutex fast_mutex_;
    std::shared_ptr<Session> current_; // session_ while its lane counts for the broker, else null
    KeyMemo memo_;
};

} // namespace gcoalesce
