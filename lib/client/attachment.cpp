#include "client/attachment.hpp"

#include <algorithm>
#include <cerrno>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/timerfd.h>

namespace gcoalesce {
namespace {

constexpr Nanos kFirstBackOff = 10 * kMillisecond;
constexpr Nanos kGlanceEvery = kMillisecond / 2;
constexpr Nanos kLongestBackOff = 250 * kMillisecond;
// With the slice in which it is noticed: a clear error within a second.
constexpr Nanos kGrace = kSecond - kSlice;
// A request that was under way each time a broker went may be what kills them.
constexpr int kMostLosses = 3;

// Whether another try may find it better.
bool may_pass(Code code) {
    switch (code) {
    case GCOALESCE_ABSENT:
    case GCOALESCE_STARTING:
    case GCOALESCE_CLOSED:
    case GCOALESCE_BROKER_DEAD:
    case GCOALESCE_UNRESPONSIVE:
    case GCOALESCE_DRAINING:
    case GCOALESCE_BUSY:
    case GCOALESCE_TIMED_OUT: return true;
    default: return false;
    }
}

Nanos now() {
    return system_clock().monotonic();
}

// Milliseconds for poll(), rounded up, so that waiting for an instant does not spin in the last one.
int poll_ms(Nanos time) {
    return static_cast<int>(to_ms(std::clamp<Nanos>(time, 0, kSlice) + kMillisecond - 1));
}

} // namespace

// ---- making it -----------------------------------------------------------------------------------------------------

Attachment::Attachment(Instance instance, std::string client_name)
    : instance_(std::move(instance)), client_name_(std::move(client_name)) {}

Attachment::~Attachment() {
    if (in_parent_ != nullptr) ::munmap(const_cast<unsigned char*>(in_parent_), 1);
}

Result<void> Attachment::prepare() {
    void* page = ::mmap(nullptr, 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return fail_errno(GCOALESCE_NO_MEMORY, "no page for the attachment");
    auto* mark = static_cast<unsigned char*>(page);
    in_parent_ = mark;
    if (::madvise(page, 1, MADV_WIPEONFORK) != 0)
        return fail_errno(GCOALESCE_IO, "this kernel cannot tell a forked child (Linux 4.14 can)");
    *mark = 1;
    control_poll_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
    loop_poll_ = UniqueFd(::epoll_create1(EPOLL_CLOEXEC));
    timer_ = UniqueFd(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
    if (!control_poll_ || !loop_poll_ || !timer_) return fail_errno(GCOALESCE_IO, "no descriptors for the attachment");
    epoll_event event{};
    event.events = EPOLLIN;
    if (::epoll_ctl(loop_poll_.get(), EPOLL_CTL_ADD, control_poll_.get(), &event) != 0 ||
        ::epoll_ctl(loop_poll_.get(), EPOLL_CTL_ADD, timer_.get(), &event) != 0)
        return fail_errno(GCOALESCE_IO, "cannot set up the pollable descriptor");
    return {};
}

Result<std::shared_ptr<Attachment>> Attachment::attach(Instance instance, std::string client_name, Nanos timeout) {
    std::shared_ptr<Attachment> attachment(new Attachment(std::move(instance), std::move(client_name)));
    if (const Result<void> prepared = attachment->prepare(); !prepared) return tl::unexpected(prepared.error());
    Attachment& self = *attachment;
    const std::lock_guard lock(self.mutex_); // nobody else has it yet: held throughout
    if (timeout > 0) self.attach_deadline_ = now() + timeout;
    for (;;) {
        const Nanos present = now();
        self.turn(present);
        if (self.link_) break;
        const Code code = self.trouble_.code;
        const bool last = self.attach_deadline_ == 0 || !may_pass(code) || present >= self.attach_deadline_;
        if (code != GCOALESCE_OK && !self.attempt_ && last) return tl::unexpected(self.trouble_);
        Nanos until = self.next_step(present);
        if (self.attach_deadline_ != 0) until = std::min(until, std::max(self.attach_deadline_, present));
        pollfd poll{self.control_poll_.get(), POLLIN, 0};
        ::poll(&poll, 1, poll_ms(until - present));
    }
    self.first_ = false;
    self.attach_deadline_ = 0;
    return attachment;
}

// ---- the control connection ----------------------------------------------------------------------------------------

// Makes `fd` the one socket in control_poll_; -1: none.
void Attachment::watch(int fd, bool output) {
    has_output_.store(output, std::memory_order_relaxed);
    if (fd == watched_ && output == watched_output_) return;
    epoll_event event{};
    event.events = output ? EPOLLIN | EPOLLOUT : EPOLLIN;
    if (fd != watched_) {
        // Not left to close(): a forked child may hold the same open file, and its events would come for ever.
        if (watched_ >= 0) ::epoll_ctl(control_poll_.get(), EPOLL_CTL_DEL, watched_, nullptr);
        if (fd >= 0) ::epoll_ctl(control_poll_.get(), EPOLL_CTL_ADD, fd, &event);
    } else if (fd >= 0) {
        ::epoll_ctl(control_poll_.get(), EPOLL_CTL_MOD, fd, &event);
    }
    watched_ = fd;
    watched_output_ = output;
}

// One step of everything that can go on without waiting.
void Attachment::turn(Nanos now) {
    if (detached_) return;
    if (link_) exchange(now);
    // Pins no longer count: the next request attaches anew. After reading, for a goodbye may say more.
    if (link_ && session_->lane().revoked()) lose_link(now);
    if (!link_ && session_) let_go();
    if (!link_ && (first_ || !pending_.empty())) try_attach(now);
    if (link_ || trouble_.code == GCOALESCE_OK) return;
    std::vector<std::shared_ptr<Pending>> given_up;
    for (const auto& [id, pending] : pending_) {
        if (pending->give_up != 0 && now >= pending->give_up) given_up.push_back(pending);
    }
    for (const auto& pending : given_up) refuse(*pending, trouble_);
}

void Attachment::exchange(Nanos now) {
    link_->flush();
    const bool open = link_->receive(nullptr);
    while (link_) {
        Message message;
        const Result<bool> found = link_->next(message);
        if (!found) return lose_link(now);
        if (!*found) break;
        take(message, now);
    }
    if (!link_) return;
    if (!open) return lose_link(now);
    watch(link_->fd(), link_->has_output());
}

void Attachment::take(const Message& message, Nanos now) {
    const auto of = [&](std::uint64_t id) -> std::shared_ptr<Pending> {
        const auto found = pending_.find(id);
        return found == pending_.end() ? nullptr : found->second;
    };
    if (!std::holds_alternative<message::Goodbye>(message)) failures_ = 0;
    if (const auto* opened = std::get_if<message::Opened>(&message)) {
        const std::shared_ptr<Pending> pending = of(opened->id);
        if (!pending || !pending->opening || opened->slot >= session_->view().slot_count()) return lose_link(now);
        if (pending->withdrawn) {
            session_->lane().unpin(opened->slot);
        } else {
            pending->opened = *opened;
            pending->session = session_;
        }
        return settle(*pending);
    }
    if (const auto* refused = std::get_if<message::Refused>(&message)) {
        const std::shared_ptr<Pending> pending = of(refused->id);
        if (!pending) return lose_link(now);
        // Our lane was revoked a moment ago: not this request's fault.
        if (refused->code == GCOALESCE_EVICTED) return lose_link(now);
        return refuse(*pending, Error{refused->code, refused->message, refused->retry_ms});
    }
    if (const auto* withdrawn = std::get_if<message::Withdrawn>(&message)) {
        const std::shared_ptr<Pending> pending = of(withdrawn->id);
        if (!pending || !pending->withdrawn) return lose_link(now);
        return settle(*pending);
    }
    if (const auto* window = std::get_if<message::Window>(&message)) {
        const std::shared_ptr<Pending> pending = of(window->id);
        if (!pending || pending->opening) return lose_link(now);
        pending->number = static_cast<std::uint64_t>(window->remaining_ms);
        return settle(*pending);
    }
    if (const auto* done = std::get_if<message::Done>(&message)) {
        const std::shared_ptr<Pending> pending = of(done->id);
        if (!pending || pending->opening) return lose_link(now);
        pending->number = done->streams;
        return settle(*pending);
    }
    if (const auto* goodbye = std::get_if<message::Goodbye>(&message)) {
        if (!may_pass(goodbye->code) && goodbye->code != GCOALESCE_EVICTED)
            refuse_all(Error{goodbye->code, "the broker ended the connection: " + goodbye->message, 0});
        return lose_link(now);
    }
    lose_link(now); // a message that has no place here
}

void Attachment::send(const Pending& pending) {
    if (!pending.opening) {
        Message command = pending.command;
        std::visit(
            [&](auto& message) {
                if constexpr (requires { message.id; }) message.id = pending.id;
            },
            command);
        link_->push(command);
        return;
    }
    message::Open open;
    open.id = pending.id;
    open.sharing = pending.wishes.sharing;
    open.max_age_ms = pending.wishes.max_age_ms;
    open.no_store = pending.wishes.no_store;
    open.individual_of = pending.wishes.individual_of;
    open.resume = pending.wishes.resume;
    open.resume_after = pending.wishes.resume_after;
    const Asked asked = pending.request ? pending.request->asked() : Asked{};
    open.template_id = asked.template_id;
    open.model = asked.model;
    open.method = asked.method;
    open.realm = open.resume != 0 ? std::string_view(pending.wishes.realm) : asked.realm;
    open.explicit_key = asked.explicit_key;
    open.verb = asked.verb;
    open.path = asked.path;
    open.api_key = pending.wishes.api_key;
    open.body_bytes = open.resume != 0 ? 0 : asked.body.size();
    link_->push(open);
    if (open.body_bytes != 0) link_->push_body(asked.body);
}

void Attachment::settle(Pending& pending) {
    pending.settled.store(true, std::memory_order_release);
    pending.changed.notify_all();
    pending_.erase(pending.id); // the caller holds another reference
    // Whoever polls fd() may not be the one who has just read this answer off the socket.
    make_readable();
}

void Attachment::refuse(Pending& pending, Error error) {
    pending.refusal = std::move(error);
    settle(pending);
}

void Attachment::refuse_all(const Error& error) {
    const auto all = pending_; // settling takes them out of it
    for (const auto& [id, pending] : all) refuse(*pending, error);
}

void Attachment::close_link() {
    watch(-1, false);
    link_.reset();
    const std::lock_guard lock(fast_mutex_);
    current_.reset();
}

// Without a connection the session is kept for what subscriptions still read in it, as long as its broker lives: the
// next broker may need the memory.
void Attachment::let_go() {
    if (subscriptions.load(std::memory_order_relaxed) > 0 && session_->look() == Session::Fate::alive) return;
    unwatch_wake();
    session_.reset();
}

void Attachment::unwatch_wake() {
    if (watched_wake_ >= 0) ::epoll_ctl(loop_poll_.get(), EPOLL_CTL_DEL, watched_wake_, nullptr);
    watched_wake_ = -1;
}

// The connection is over; what was asked over it is asked again over the next one.
void Attachment::lose_link(Nanos now) {
    close_link();
    session_->suspect();
    back_off(now);
    const auto all = pending_;
    for (const auto& [id, pending] : all) {
        if (pending->withdrawn)
            settle(*pending);
        else if (++pending->losses >= kMostLosses)
            refuse(*pending, Error{GCOALESCE_BROKER_DEAD,
                                   fmt::format("the broker went away {} times before it answered this request: see its "
                                               "log",
                                               pending->losses),
                                   0});
    }
    make_readable();
}

// ---- attaching -----------------------------------------------------------------------------------------------------

void Attachment::back_off(Nanos now) {
    const Nanos longest = std::min(kFirstBackOff << std::min(failures_++, 5u), kLongestBackOff);
    // Half of it by chance: the clients of a broker that comes back do not come all at once.
    next_try_ = now + longest / 2 + static_cast<Nanos>(random_u64() % static_cast<std::uint64_t>(longest / 2));
}

void Attachment::try_attach(Nanos now) {
    if (!attempt_) {
        if (now < next_try_) return;
        // Twice as long each time: a starved broker answers late, and each try goes to the end of its queue.
        Nanos patience = kAttachPatience << std::min(unanswered_, 5u);
        if (attach_deadline_ != 0) patience = std::clamp<Nanos>(attach_deadline_ - now, kMillisecond, patience);
        attempt_.emplace(instance_, client_name_, now, patience);
    }
    Result<std::optional<AttachTry::Attached>> step = attempt_->advance(now);
    if (!step) {
        watch(-1, false);
        attempt_.reset();
        trouble_ = step.error();
        unanswered_ = trouble_.code == GCOALESCE_UNRESPONSIVE ? unanswered_ + 1 : 0;
        back_off(now);
        if (!may_pass(trouble_.code)) refuse_all(trouble_);
    } else if (*step) {
        install(std::move(**step));
    } else {
        watch(attempt_->fd(), false);
    }
}

void Attachment::install(AttachTry::Attached attached) {
    attempt_.reset();
    unanswered_ = 0;
    trouble_.code = GCOALESCE_OK;
    unwatch_wake();
    session_ = std::move(attached.session);
    link_.emplace(std::move(attached.link));
    watched_wake_ = session_->wake_fd();
    epoll_event event{};
    event.events = EPOLLIN;
    ::epoll_ctl(loop_poll_.get(), EPOLL_CTL_ADD, watched_wake_, &event);
    if (loop_used_.load(std::memory_order_relaxed)) session_->lane().ask();
    {
        const std::lock_guard lock(fast_mutex_);
        current_ = session_;
    }
    for (const auto& [id, pending] : pending_) send(*pending);
    link_->flush();
    watch(link_->fd(), link_->has_output());
}

Nanos Attachment::next_step(Nanos now) const {
    Nanos step = now + kSlice;
    if (!link_) step = std::min(step, attempt_ ? attempt_->next_step(now) : std::max(next_try_, now));
    return step;
}

// ---- asking --------------------------------------------------------------------------------------------------------

Attachment::Recalled Attachment::recall(const Asked& asked) {
    const std::lock_guard lock(fast_mutex_);
    Recalled recalled;
    if (current_) {
        if (const std::optional<TemplatePolicy> policy = current_->policy(asked.template_id)) {
            recalled.session = current_;
            recalled.policy = *policy;
        }
    }
    recalled.found = memo_.find(asked, recalled.policy.revision);
    return recalled;
}

void Attachment::remember(std::shared_ptr<const Request> request, std::uint64_t revision, const Key& key) {
    const std::lock_guard lock(fast_mutex_);
    memo_.remember(std::move(request), revision, key);
}

std::shared_ptr<Pending> Attachment::ask(std::shared_ptr<Pending> pending, bool again) {
    const std::lock_guard lock(mutex_);
    if (link_) exchange(now()); // a broker that has said goodbye meanwhile is asked nothing more
    pending->id = ++last_id_;
    pending_.emplace(pending->id, pending);
    if (link_) {
        send(*pending);
        link_->flush();
        watch(link_->fd(), link_->has_output());
    } else if (!again) {
        pending->give_up = now() + kGrace;
    }
    make_readable();
    return pending;
}

std::shared_ptr<Pending> Attachment::ask(std::shared_ptr<const Request> request, const Wishes& wishes, bool again) {
    auto pending = std::make_shared<Pending>();
    pending->opening = true;
    pending->request = std::move(request);
    pending->wishes = wishes;
    return ask(std::move(pending), again);
}

std::shared_ptr<Pending> Attachment::ask(Message command) {
    auto pending = std::make_shared<Pending>();
    pending->command = std::move(command);
    return ask(std::move(pending), false);
}

bool Attachment::wait(Pending& pending, Nanos deadline) {
    std::unique_lock lock(mutex_);
    for (;;) {
        const Nanos present = now();
        if (!polling_) turn(present);
        const bool settled = pending.settled.load(std::memory_order_relaxed);
        if (settled || present >= deadline) {
            hand_over();
            return settled;
        }
        Nanos until = std::min(next_step(present), deadline);
        if (pending.give_up != 0) until = std::min(until, std::max(pending.give_up, present + kMillisecond));
        if (!polling_) {
            polling_ = true;
            lock.unlock();
            pollfd poll{control_poll_.get(), POLLIN, 0};
            ::poll(&poll, 1, poll_ms(until - present));
            lock.lock();
            polling_ = false;
        } else {
            sleepers_.push_back(&pending);
            pending.changed.wait_for(lock, std::chrono::nanoseconds(until - present));
            sleepers_.erase(std::find(sleepers_.begin(), sleepers_.end(), &pending));
        }
    }
}

// A waiter leaves: where nobody polls, one of the sleepers shall.
void Attachment::hand_over() {
    if (!polling_ && !sleepers_.empty()) sleepers_.front()->changed.notify_all();
}

bool Attachment::withdraw(Pending& pending) {
    const std::lock_guard lock(mutex_);
    if (pending.settled.load(std::memory_order_relaxed)) return true;
    pending.withdrawn = true;
    if (!link_) {
        pending_.erase(pending.id);
    } else if (pending.opening) {
        link_->push(message::Withdraw{pending.id});
        link_->flush();
        watch(link_->fd(), link_->has_output());
    }
    return false;
}

void Attachment::glance() {
    const Nanos present = now();
    if (present - glanced_.load(std::memory_order_relaxed) < kGlanceEvery) return;
    glanced_.store(present, std::memory_order_relaxed);
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (lock && !polling_) turn(present);
}

std::string Attachment::trouble() {
    const std::lock_guard lock(mutex_);
    return link_ ? std::string() : trouble_.message;
}

// ---- event loops ---------------------------------------------------------------------------------------------------
//
// No wake-up is lost: dispatch() drains the wake socket and then stores `asked` (seq_cst); its caller looks at the
// counts after that (StreamReader, seq_cst). The broker stores a count and then loads `asked` (both seq_cst). So a
// publication that finds "not asked" had stored its count before dispatch() asked, and the caller sees it; every other
// one sends on the wake socket, which nobody drains before the next dispatch().
//
// What no broker tells of makes fd() readable through the timer, at once: a stream that was joined with events in it
// already, an answer that another thread took off the control socket, a connection that was lost.

// Lets the timer make fd() readable at `due`; 0: never. Under mutex_.
void Attachment::set_timer(Nanos due) {
    itimerspec time{};
    time.it_value.tv_sec = static_cast<std::time_t>(due / kSecond);
    time.it_value.tv_nsec = static_cast<long>(due % kSecond);
    ::timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &time, nullptr); // what had expired is no longer readable
    timer_due_ = due;
}

void Attachment::make_readable() {
    if (!loop_used_.load(std::memory_order_relaxed) || kicked_) return;
    kicked_ = true;
    set_timer(1); // long past
}

void Attachment::kick() {
    if (!loop_used_.load(std::memory_order_relaxed)) return;
    const std::lock_guard lock(mutex_);
    make_readable();
}

int Attachment::fd() {
    const std::lock_guard lock(mutex_);
    if (!loop_used_.exchange(true))
        make_readable(); // whoever polls it first starts with a dispatch(), and asks with it
    return loop_poll_.get();
}

void Attachment::dispatch() {
    const std::lock_guard lock(mutex_);
    if (detached_) return;
    loop_used_.store(true, std::memory_order_relaxed);
    const Nanos present = now();
    drain_wake();
    turn(present);
    if (session_) {
        session_->look();
        session_->lane().ask();
    }
    const bool busy = subscriptions.load(std::memory_order_relaxed) > 0 || !pending_.empty();
    const Nanos due = pending_.empty() ? present + kSlice : std::max(next_step(present), present + kMillisecond);
    // A system call only where the timer has expired or would come too late: not with every event.
    if (!busy && timer_due_ != 0) set_timer(0);
    if (busy && (timer_due_ <= present || timer_due_ > due)) set_timer(due);
    kicked_ = false;
}

// One send answers one ask, so there is one message as a rule; another one keeps fd() readable.
void Attachment::drain_wake() {
    if (watched_wake_ < 0) return;
    char bytes[16];
    const ssize_t got = ::recv(watched_wake_, bytes, sizeof bytes, MSG_DONTWAIT);
    if (got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR))) return;
    unwatch_wake(); // the broker's end is gone, which would be readable for ever
}

// ---- ending --------------------------------------------------------------------------------------------------------

void Attachment::detach() {
    const std::lock_guard lock(mutex_);
    if (link_) exchange(now()); // pins that came with answers to what was withdrawn
    if (link_) close_link();
    watch(-1, false);
    attempt_.reset();
    detached_ = true;
}

void Attachment::abandon() {
    const std::lock_guard lock(mutex_);
    abandoned_.store(true);
    close_link();
    attempt_.reset();
    detached_ = true;
}

} // namespace gcoalesce
