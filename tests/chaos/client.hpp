// Client processes of the tests in here: made by fork, as the workers of an app server are, and using the C ABI.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <sys/types.h>
#include <type_traits>

#include "base/fd.hpp"
#include "base/ids.hpp"
#include "base/sha256.hpp"
#include "gcoalesce/gcoalesce.h"
#include "segment/mapping.hpp"

namespace gcoalesce::test {

// One end of a line between a test and a child of it: whole values, in order. Throws where the other end has gone, and
// where it says nothing for two minutes, which is a watchdog.
class Line {
  public:
    explicit Line(UniqueFd socket);

    template <class T>
    void tell(const T& value) {
        static_assert(std::is_trivially_copyable_v<T>);
        send(&value, sizeof value);
    }
    template <class T>
    T hear() {
        static_assert(std::is_trivially_copyable_v<T>);
        T value;
        receive(&value, sizeof value);
        return value;
    }
    // Nothing but the moment.
    void tell() { tell('!'); }
    void hear() { hear<char>(); }
    bool has_news() const; // without waiting

  private:
    void send(const void* bytes, std::size_t count);
    void receive(void* bytes, std::size_t count);
    UniqueFd socket_;
};

// A forked child. It is killed and reaped in the destructor, and dies with the process that made it. Its exit code is
// 0 when `work` returned and 1 when it threw, which it tells on standard error. To be made while there is one thread.
class Child {
  public:
    explicit Child(const std::function<void(Line&)>& work);
    ~Child();
    Child(const Child&) = delete;
    Child& operator=(const Child&) = delete;

    pid_t pid() const { return pid_; }
    Line& line() { return *line_; }
    void signal(int number) const;
    void stop() const; // SIGSTOP; returns when it stands
    int wait();        // for its end: the exit code, or 128 + the number of the signal that killed it

  private:
    pid_t pid_ = -1;
    int code_ = -1; // -1: not reaped
    UniqueFd pidfd_;
    std::unique_ptr<Line> line_;
};

// ---- in the child --------------------------------------------------------------------------------------------------

struct Detach {
    void operator()(gcoalesce_attachment* attachment) const { gcoalesce_detach(attachment); }
};
using Attachment = std::unique_ptr<gcoalesce_attachment, Detach>;

// Throws what the library says where it cannot be had.
Attachment attach(const Instance& instance, std::int64_t timeout_ms = 60'000);

struct Ask {
    std::string prompt; // without characters that JSON escapes; "[sim …]" in it scripts the answer
    std::string model = "gemini-2.5-flash";
    bool stream = true;
    gcoalesce_sharing sharing = GCOALESCE_SHARE;
};

// What one reader saw, from the first event on.
struct Seen {
    gcoalesce_code code;     // what the last gcoalesce_next answered
    gcoalesce_info info;     // of that moment
    gcoalesce_ending ending; // once it has ended, or was refused
    std::uint64_t events;    // read
    std::uint64_t bytes;     // of those
    std::uint64_t misplaced; // events whose number was not the next one
    Key digest;              // of those events; only once it has ended
    bool complete() const { return code == GCOALESCE_END && ending.kind == GCOALESCE_COMPLETE; }
};

// One subscription.
class Reader {
  public:
    Reader(const Attachment& attachment, const Ask& ask);
    // after: the number of the event behind which it resumes.
    Reader(const Attachment& attachment, const gcoalesce_request& request, std::uint64_t after = 0);

    // gcoalesce_next, its event taken into account.
    gcoalesce_code next(std::int64_t timeout_ms);
    // Until so many events were read in all. Throws where the stream ends before.
    void read(std::uint64_t events);
    const Seen& read_to_end();
    // Until it is known how the request is served; reads no event. Throws where it is refused.
    gcoalesce_info served();

    const Seen& seen() const { return seen_; }
    bool over() const { return seen_.code != GCOALESCE_OK && seen_.code != GCOALESCE_TIMED_OUT; }

  private:
    void open(const Attachment& attachment, const gcoalesce_request& request);
    struct Close {
        void operator()(gcoalesce_subscription* subscription) const { gcoalesce_close(subscription); }
    };
    std::unique_ptr<gcoalesce_subscription, Close> subscription_;
    std::unique_ptr<Sha256> digest_;
    std::uint64_t number_ = 0; // of the last event
    Seen seen_{};
};

// Reads as an event loop does: one descriptor for all. `step` is called after each round of reading, and may add
// readers; the loop ends when all are over.
void read_all(const Attachment& attachment, std::deque<Reader>& readers, const std::function<void()>& step = {});

} // namespace gcoalesce::test
