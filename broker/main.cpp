// gcoalesced: puts the parts together, in the order in which they depend on each other.

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/signal_set.hpp>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <curl/curl.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#include "base/log.hpp"
#include "base/units.hpp"
#include "broker/api_key.hpp"
#include "broker/asio_timers.hpp"
#include "broker/coalescer.hpp"
#include "broker/config.hpp"
#include "broker/control.hpp"
#include "broker/curl_upstream.hpp"
#include "broker/exit_codes.hpp"
#include "broker/journal.hpp"
#include "broker/lock_file.hpp"
#include "broker/rescue.hpp"
#include "broker/snapshots.hpp"
#include "broker/status.hpp"
#include "broker/store.hpp"

namespace gcoalesce {
namespace {

int stop_because(const Error& error) {
    log(LogLevel::error, "{}", error.message);
    switch (error.code) {
    case GCOALESCE_BUSY: return exit_already_running;
    case GCOALESCE_NO_MEMORY: return exit_no_memory;
    default: return exit_failure;
    }
}

// Before anything was touched.
int refuse_options(const Error& error) {
    log(LogLevel::error, "{}", error.message);
    return exit_usage;
}

// Who holds the lock of the instance's lock file is the broker.
Result<UniqueFd> take_instance(const Instance& instance) {
    if (::mkdir(instance.runtime_dir.c_str(), 0750) != 0 && errno != EEXIST)
        return fail_errno(GCOALESCE_IO, "cannot make the runtime directory " + instance.runtime_dir);
    Result<LockFile> lock = take_lock_file(instance.lock_path(), 0640);
    if (!lock) return tl::unexpected(lock.error());
    if (!lock->fd)
        return fail(GCOALESCE_BUSY, "another broker (pid {}) serves instance \"{}\" in {}", lock->holder, instance.name,
                    instance.runtime_dir);
    return std::move(lock->fd);
}

Result<UniqueFd> listener(const Instance& instance) {
    if (::sd_listen_fds(1) >= 1) {
        UniqueFd inherited(SD_LISTEN_FDS_START);
        ::fcntl(inherited.get(), F_SETFL, O_NONBLOCK);
        ::fcntl(inherited.get(), F_SETFD, FD_CLOEXEC);
        // Once more, so that SO_PEERCRED shows clients this process and not the one that made the socket (unix(7)).
        if (::listen(inherited.get(), SOMAXCONN) != 0)
            return fail_errno(GCOALESCE_IO, "cannot listen on the inherited socket");
        return inherited;
    }
    return listen_at(instance.socket_path());
}

// As many as the system allows; returns how many of them clients may use: the rest is for upstream connections and
// for what the program itself needs.
std::size_t raise_descriptor_limit() {
    constexpr std::size_t kOwn = 600;
    rlimit limit{};
    if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return kOwn;
    limit.rlim_cur = limit.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &limit);
    return std::clamp<std::size_t>(limit.rlim_max, 2 * kOwn, 1 << 20) - kOwn;
}

constexpr Nanos kFlushWithin = 5 * kSecond;

class Broker {
  public:
    Broker(const Config& config, boost::asio::io_context& loop)
        : config_(config), loop_(loop), timers_(loop), signals_(loop) {}

    int run() {
        const Result<std::optional<ApiKey>> key = ApiKey::load(config_.api_key_file);
        if (!key) return refuse_options(key.error());
        const Result<std::vector<TemplateSettings>> templates = load_settings(config_.templates_dir, config_.settings);
        if (!templates) return refuse_options({templates.error().code, "--templates: " + templates.error().message, 0});
        if (const Result<void> fits = Store::check_size(config_.memory, config_.store.slots, templates->size()); !fits)
            return refuse_options(fits.error());
        Result<std::unique_ptr<CurlUpstream>> upstream = open_upstream();
        if (!upstream) return refuse_options(upstream.error());
        upstream_ = upstream->get();

        Result<UniqueFd> lock = take_instance(config_.instance);
        if (!lock) return stop_because(lock.error());
        const std::string name = config_.instance.segment_name(::geteuid());
        Result<std::optional<DeadSegment>> dead = DeadSegment::find(config_.instance, name);
        if (!dead) return stop_because(dead.error());
        if (const Result<void> opened = open_snapshots(); !opened) return stop_because(opened.error());
        // Once nothing can be wrong any more but the room in /dev/shm: until then it is there to be looked at.
        if (*dead) (*dead)->rescue(snapshots_.get(), timers_.clock());
        Result<CreatedSegment> segment =
            *dead ? (*dead)->replace(config_.memory, timers_.clock()) : create_segment(name, config_.memory);
        if (!segment) return stop_because(segment.error());
        dead->reset();
        struct stat ours {};
        ::fstat(segment->fd.get(), &ours);
        const int code = serve(name, *segment, *key, *templates);
        unlink_own("/dev/shm" + name, ours);
        return code;
    }

  private:
    Result<std::unique_ptr<CurlUpstream>> open_upstream() {
        CurlUpstreamOptions options;
        options.url = config_.upstream;
        options.ca_file = config_.ca_file;
        options.proxy = config_.proxy;
        options.connected = [this](std::size_t count) { store_->count(Counter::upstream_connections, count); };
        return CurlUpstream::create(loop_, options);
    }

    Result<void> open_snapshots() {
        if (config_.state_dir.empty()) return {};
        SnapshotOptions kept;
        kept.directory = config_.state_dir;
        kept.instance = config_.instance.name;
        kept.max_bytes = config_.snapshot_bytes;
        Result<std::unique_ptr<Snapshots>> opened = Snapshots::open(
            kept, timers_, [this](std::function<void()> run) { boost::asio::post(loop_, std::move(run)); });
        if (!opened) return tl::unexpected(opened.error());
        snapshots_ = std::move(*opened);
        return {};
    }

    int serve(const std::string& name, const CreatedSegment& segment, const std::optional<ApiKey>& key,
              const std::vector<TemplateSettings>& templates) {
        Result<std::unique_ptr<Store>> store =
            Store::create(segment.mapping, config_.store, templates, timers_.clock());
        if (!store) return stop_because(store.error());
        store_ = std::move(*store);
        // Opened by itself: the lock belongs to the writing description and must not be handed out with it.
        UniqueFd readable(::shm_open(name.c_str(), O_RDONLY | O_CLOEXEC, 0));
        if (!readable) return stop_because(fail_errno(GCOALESCE_IO, "cannot open /dev/shm" + name).value());
        const bool inherited = ::sd_listen_fds(0) > 0; // then its file is systemd's, and stays
        Result<UniqueFd> listening = listener(config_.instance);
        if (!listening) return stop_because(listening.error());
        if (!inherited) ::lstat(config_.instance.socket_path().c_str(), &socket_);

        if (key) upstream_->set_key(*key);
        const bool key_missing = upstream_->needs_key();
        Coalescer coalescer(*store_, *upstream_, timers_, snapshots_.get(), templates, config_.producer,
                            config_.limits);
        coalescer.set_key_missing(key_missing);
        coalescer_ = &coalescer;
        ControlLimits limits;
        limits.descriptors = raise_descriptor_limit();
        ControlServer control(loop_, std::move(*listening), std::move(readable), *store_, coalescer,
                              {config_.admin_group, config_.store.stall_timeout, [this] { return reload(); }}, limits);
        control_ = &control;

        for (const int number : {SIGTERM, SIGINT, SIGHUP}) signals_.add(number);
        wait_for_signal();
        beat();
        store_->set_ready();
        log(key_missing ? LogLevel::warning : LogLevel::info,
            "serving instance \"{}\" in {}: {} of shared memory for {} streams, upstream {}{}", config_.instance.name,
            config_.instance.runtime_dir, format_size(config_.memory), config_.store.slots, config_.upstream,
            key_missing ? ", NO API KEY: requests will be refused" : "");
        tell_systemd("READY=1");
        loop_.run();
        store_->log(LogKind::closed);
        control.goodbye_all(GCOALESCE_CLOSED, "the broker has shut down");
        coalescer.keep_ledger();
        if (snapshots_ && !snapshots_->flush(kFlushWithin))
            log(LogLevel::warning, "the last answers were not written to {}: {}", config_.state_dir,
                snapshots_->state().reason);
        snapshots_.reset();
        log(LogLevel::info, "closed");
        return exit_ok;
    }

    // Heartbeat and sweep; also the watchdog's, so that a loop that hangs is seen by everyone.
    void beat() {
        store_->heartbeat();
        store_->sweep();
        coalescer_->beat();
        if (++beats_ % 10 == 0) tell_systemd("WATCHDOG=1");
        if (draining_ && (coalescer_->in_flight() == 0 || timers_.clock().monotonic() >= drain_deadline_)) {
            coalescer_->interrupt_all();
            store_->set_state(BrokerState::closed);
            loop_.stop();
            return;
        }
        beat_timer_ = timers_.after(kHeartbeatEvery, [this] { beat(); });
    }

    // Together with the line that `systemctl status` shows.
    void tell_systemd(const char* news) {
        const StatusFacts facts{coalescer_->window_remaining({}).value_or(0), upstream_->needs_key(), draining_};
        ::sd_notify(0, fmt::format("{}\nSTATUS={}", news, status_line(store_->view(), facts)).c_str());
    }

    void wait_for_signal() {
        signals_.async_wait([this](const boost::system::error_code& error, int number) {
            if (error) return;
            if (number == SIGHUP) {
                if (const Result<void> done = reload(); !done) log(LogLevel::error, "{}", done.error().message);
            } else {
                drain();
            }
            wait_for_signal();
        });
    }

    // Templates and API key again. What cannot be read leaves what is in force.
    Result<void> reload() {
        const Result<std::optional<ApiKey>> key = ApiKey::load(config_.api_key_file);
        if (!key) return fail(key.error().code, "keeping the API key that is in use: {}", key.error().message);
        const auto kept = [](const Error& error) {
            return fail(error.code, "keeping the templates that are in use: {}", error.message);
        };
        const Result<std::vector<TemplateSettings>> templates = load_settings(config_.templates_dir, config_.settings);
        if (!templates) return kept(templates.error());
        if (const Result<void> set = coalescer_->set_templates(*templates); !set) return kept(set.error());
        if (*key) upstream_->set_key(**key);
        coalescer_->set_key_missing(upstream_->needs_key());
        log(LogLevel::info, "reloaded: {} templates{}", templates->size(),
            *key ? ", and the API key" : "; there is no file to read an API key from");
        return {};
    }

    // The first signal lets running streams finish, the second one does not.
    void drain() {
        if (draining_) {
            drain_deadline_ = 0;
            return;
        }
        log(LogLevel::info, "shutting down: {} running streams have {} to finish", coalescer_->in_flight(),
            format_duration(config_.drain_timeout));
        draining_ = true;
        tell_systemd("STOPPING=1");
        drain_deadline_ = timers_.clock().monotonic() + config_.drain_timeout;
        store_->set_state(BrokerState::draining);
        coalescer_->drain();
        // Before it is closed: as long as it is open, no other file has its number.
        unlink_own(config_.instance.socket_path(), socket_);
        control_->stop_listening();
        beat();
    }

    const Config& config_;
    boost::asio::io_context& loop_;
    AsioTimers timers_;
    boost::asio::signal_set signals_;
    std::unique_ptr<Store> store_;
    std::unique_ptr<Snapshots> snapshots_;
    CurlUpstream* upstream_ = nullptr;
    Coalescer* coalescer_ = nullptr;
    ControlServer* control_ = nullptr;
    struct stat socket_ {}; // our file in the runtime directory; zeros: none is ours
    std::unique_ptr<Timer> beat_timer_;
    std::uint64_t beats_ = 0;
    bool draining_ = false;
    Nanos drain_deadline_ = 0;
};

} // namespace
} // namespace gcoalesce

int main(int argc, char** argv) {
    using namespace gcoalesce;
    const Parsed parsed = parse_command_line(argc, argv);
    if (!parsed.config) return parsed.exit_code;
    set_log_level(parsed.config->log_level);
    log_to_journal(parsed.config->instance.name);
    std::signal(SIGPIPE, SIG_IGN);
    // The modes of what we create are set exactly; between creating and setting nobody else gets in.
    ::umask(0027);
    ::prctl(PR_SET_DUMPABLE, 0); // the API key must not end up in a core dump
    try {
        ::curl_global_init(CURL_GLOBAL_DEFAULT);
        boost::asio::io_context loop(1);
        return Broker(*parsed.config, loop).run();
    } catch (const std::exception& error) {
        log(LogLevel::error, "unexpected: {}", error.what());
        return exit_failure;
    }
}
