// gcoalesce doctor: is everything well, and if not, what to do.
#include "cli/doctor.hpp"

#include <CLI/App.hpp>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fmt/format.h>
#include <fstream>
#include <grp.h>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <pwd.h>
#include <string>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <vector>

#include "base/units.hpp"
#include "cli/attach.hpp"
#include "cli/commands.hpp"
#include "cli/exchange.hpp"
#include "cli/inspect.hpp"
#include "cli/render.hpp"
#include "cli/report.hpp"
#include "cli/view/escape.hpp"
#include "cli/view/terminal.hpp"
#include "cli/view/utf8.hpp"

namespace gcoalesce::cli {
namespace {

using enum Finding::Result;

constexpr Nanos kOnlinePatience = 30 * kSecond;
constexpr Nanos kClocksApart = 2 * kSecond;
constexpr double kLittleRoom = 0.1; // of the extents
constexpr std::size_t kIndent = 20; // of what was found

constexpr const char* kFooter = R"(
Looks at the runtime directory, this user's groups, the socket, the segment, the broker,
its memory, API key, upstream errors and snapshots, the clocks and the unit, and says of
each what it found and, where something is not well, what to do.

--online has the broker make one small call (about 30 tokens, shared with nobody), which
proves that upstream takes the API key.

Exit codes: 0 nothing is wrong, though there may be warnings; else that of the first
failure: 1, 3 no broker, 4 the API key is missing or refused, 9 another version.)";

const char* word(Finding::Result result) {
    switch (result) {
    case ok: return "ok";
    case note: return "note";
    case warning: return "warning";
    case failure: return "failure";
    }
    return "?";
}

std::string name_of_group(gid_t gid) {
    const group* found = ::getgrgid(gid);
    return found != nullptr ? found->gr_name : fmt::to_string(gid);
}

Membership membership_in(const struct stat& file) {
    Membership membership;
    membership.user = ::geteuid();
    membership.owner = file.st_uid;
    membership.group_name = name_of_group(file.st_gid);
    std::vector<gid_t> own(static_cast<std::size_t>(std::max(::getgroups(0, nullptr), 0)));
    own.resize(static_cast<std::size_t>(std::max(::getgroups(static_cast<int>(own.size()), own.data()), 0)));
    own.push_back(::getegid());
    membership.in_process = std::ranges::find(own, file.st_gid) != own.end();
    const passwd* user = ::getpwuid(membership.user);
    membership.user_name = user != nullptr ? user->pw_name : fmt::to_string(membership.user);
    if (user == nullptr) return membership;
    std::vector<gid_t> listed(256);
    int count = static_cast<int>(listed.size());
    if (::getgrouplist(user->pw_name, user->pw_gid, listed.data(), &count) < 0 && count > 0) {
        listed.resize(static_cast<std::size_t>(count));
        ::getgrouplist(user->pw_name, user->pw_gid, listed.data(), &count);
    }
    listed.resize(static_cast<std::size_t>(std::clamp(count, 0, static_cast<int>(listed.size()))));
    membership.in_database = std::ranges::find(listed, file.st_gid) != listed.end();
    return membership;
}

class Doctor {
  public:
    Doctor(Context& context, bool online, std::string model)
        : context_(context), online_(online), model_(std::move(model)) {}

    std::vector<Finding> run() {
        Result<Instance> instance = resolve_instance(context_.instance.c_str(), context_.runtime_dir.c_str());
        if (!instance) {
            add(failure, "directory", instance.error().message, "name it with --runtime-dir or GCOALESCE_RUNTIME_DIR",
                ExitCode::usage);
            return std::move(findings_);
        }
        instance_ = std::move(*instance);
        look_at_directory();
        look_at_segment();
        look_at_socket();
        look_at_unit();
        if (online_) ask();
        return std::move(findings_);
    }

  private:
    void add(Finding::Result result, std::string check, std::string found, std::string advice = {},
             ExitCode exit = ExitCode::failed) {
        findings_.push_back({result, std::move(check), std::move(found), std::move(advice), exit});
    }

    void look_at_directory() {
        struct stat directory {};
        if (::stat(instance_.runtime_dir.c_str(), &directory) != 0)
            return add(failure, "directory", fmt::format("{}: {}", instance_.runtime_dir, std::strerror(errno)),
                       "start gcoalesced with this --runtime-dir, which it makes", ExitCode::no_broker);
        add(ok, "directory",
            fmt::format("{}, mode {:o}, group {}", instance_.runtime_dir, directory.st_mode & 07777u,
                        name_of_group(directory.st_gid)));
        struct stat socket {};
        const bool seen = ::stat(instance_.socket_path().c_str(), &socket) == 0;
        findings_.push_back(judge(membership_in(seen ? socket : directory)));
    }

    void look_at_segment() {
        const Result<OpenSegment> opened = open_segment(instance_);
        if (!opened) {
            const std::string advice = opened.error().code == GCOALESCE_WRONG_VERSION
                                           ? "install gcoalesce and gcoalesced of one version, and restart the broker"
                                           : start_advice();
            return add(failure, "segment", opened.error().message, advice, exit_code_of(opened.error().code));
        }
        const SegmentView& segment = opened->view;
        const Header& header = segment.header();
        struct stat file {};
        ::fstat(opened->fd.get(), &file);
        add(ok, "segment",
            fmt::format("/dev/shm{}, {}, layout {}.{}, mode {:o}, group {}", instance_.segment_name(file.st_uid),
                        format_size(header.prefix.total_bytes), header.prefix.layout_major, header.prefix.layout_minor,
                        file.st_mode & 07777u, name_of_group(file.st_gid)));
        pid_ = header.broker_pid;
        look_at_broker(*opened);
        look_at_memory(segment);
        look_at_key(segment);
        look_at_errors(segment);
        look_at_snapshots(segment);
        look_at_clock(header);
    }

    void look_at_broker(const OpenSegment& opened) {
        const Header& header = opened.view.header();
        const std::string who = fmt::format("gcoalesced {} (pid {})", header.version.view(), header.broker_pid);
        const std::string since = format_wall(header.heartbeat_wall_ns.load(std::memory_order_acquire));
        switch (opened.liveness(system_clock().monotonic())) {
        case Liveness::alive:
            if (header.state.load(std::memory_order_acquire) == static_cast<std::uint32_t>(BrokerState::draining))
                return add(warning, "broker", who + " is shutting down: it takes no new requests",
                           "wait for it, or start it again");
            return add(ok, "broker", who + " is serving");
        case Liveness::unresponsive:
            return add(
                failure, "broker", fmt::format("{} lives, but its heart stands still since {}", who, since),
                "is it stopped (SIGSTOP), traced, or starved of CPU? SIGKILL ends it; what has ended stays where "
                "--state-dir keeps it",
                ExitCode::no_broker);
        case Liveness::dead:
            return add(failure, "broker", fmt::format("{} died about {}", who, since),
                       start_advice() + "; `gcoalesce log --once` shows what it did last", ExitCode::no_broker);
        case Liveness::closed:
            return add(failure, "broker", fmt::format("{} was shut down {}", who, since), start_advice(),
                       ExitCode::no_broker);
        case Liveness::unknown:
            return add(warning, "broker", who + ": the kernel does not say whether it lives",
                       "is /dev/shm on a file system without locks?");
        }
    }

    void look_at_memory(const SegmentView& segment) {
        const std::uint64_t all = segment.header().extents.count;
        const std::uint64_t free = segment.header().extents_free.load(std::memory_order_relaxed);
        const std::uint64_t streams = counted(segment, Counter::slots_in_use);
        const std::string found = fmt::format("{} of {} free for answers, {} of {} streams in use", format_size(free),
                                              format_size(all), streams, segment.slot_count());
        std::uint64_t refused = 0;
        for (const DistinctError& error : distinct_errors(segment))
            refused += error.facts.code == GCOALESCE_NO_MEMORY ? 1 : 0;
        if (refused > 0)
            return add(warning, "memory", found + "; answers have failed for want of memory",
                       "raise --memory or a template's pool_share, or shorten --linger");
        if (static_cast<double>(free) < kLittleRoom * static_cast<double>(all) || streams == segment.slot_count())
            return add(warning, "memory", found,
                       "`gcoalesce keys --sort bytes` shows who holds it; raise --memory or --streams");
        add(ok, "memory", found);
    }

    void look_at_key(const SegmentView& segment) {
        if (counted(segment, Counter::api_key_missing) != 0)
            return add(failure, "key", "the broker has no API key",
                       "put it into the file of --api-key-file or the credential gemini-api-key; then "
                       "`gcoalesce templates reload` or a restart",
                       ExitCode::key);
        std::int64_t refused = 0;
        for (const auto& [error, count] : distinct_errors(segment)) {
            if (error.code == GCOALESCE_KEY_REFUSED) refused = std::max(refused, error.last_wall_ns);
        }
        if (refused != 0)
            return add(warning, "key",
                       fmt::format("there is one; upstream refused it, last at {}", format_wall(refused)),
                       "check it with --online; put a valid one into its place, then restart the broker (a key file or "
                       "credential: `gcoalesce templates reload`)");
        add(ok, "key", "there is one, or upstream needs none; --online proves that it is taken");
    }

    void look_at_errors(const SegmentView& segment) {
        const std::vector<DistinctError> all = distinct_errors(segment);
        if (all.empty()) return add(ok, "errors", "none since the broker started");
        const ErrorFacts& last = std::ranges::max_element(all, {}, [](const DistinctError& error) {
                                     return error.facts.last_wall_ns;
                                 })->facts;
        add(note, "errors",
            fmt::format("{}; the last at {}: {}: {}", counted(all.size(), "distinct error"),
                        format_wall(last.last_wall_ns), code_name(static_cast<Code>(last.code)), last.message.view()),
            "`gcoalesce stats` lists them");
    }

    void look_at_snapshots(const SegmentView& segment) {
        const SnapshotFacts facts = snapshot_facts(segment);
        if (facts.off)
            return add(note, "snapshots", "off: answers do not outlive the segment", "--state-dir DIR turns them on");
        const std::string found = fmt::format("{} kept, {}", counted(facts.kept, "answer"), format_size(facts.bytes));
        if (!facts.degraded) return add(ok, "snapshots", found);
        const std::string why = facts.reason.empty() ? "the broker's log says why" : facts.reason;
        add(warning, "snapshots", fmt::format("degraded: {}; {}", found, why),
            "look at the disk and the permissions of the broker's --state-dir; requests go on meanwhile");
    }

    void look_at_clock(const Header& header) {
        if (const std::string here = boot_id(); !here.empty() && header.boot_id.view() != here)
            return add(failure, "clock", "the broker runs on another boot of the machine than this process sees",
                       "is /dev/shm kept over a reboot, or shared by two machines? Restart the broker");
        const Nanos apart = header.heartbeat_wall_ns.load(std::memory_order_acquire) - system_clock().wall() -
                            (header.heartbeat_ns.load(std::memory_order_acquire) - system_clock().monotonic());
        if (apart > kClocksApart || apart < -kClocksApart)
            return add(
                warning, "clock",
                fmt::format("the broker's clocks and this process's are {} apart",
                            format_duration(apart < 0 ? -apart : apart)),
                "was the wall clock set just now? Else one of them is in a time namespace of its own: windows and "
                "freshness are wrong there");
        add(ok, "clock", "one boot, one time");
    }

    void look_at_socket() {
        const std::string path = instance_.socket_path();
        struct stat file {};
        if (::stat(path.c_str(), &file) != 0) {
            const bool barred = errno == EACCES;
            return add(failure, "socket", fmt::format("{}: {}", path, std::strerror(errno)),
                       barred ? "see `group`" : start_advice(), barred ? ExitCode::failed : ExitCode::no_broker);
        }
        const std::string found =
            fmt::format("{}, mode {:o}, group {}", path, file.st_mode & 07777u, name_of_group(file.st_gid));
        if (!S_ISSOCK(file.st_mode))
            return add(failure, "socket", found + ": it is no socket", "remove it and restart the broker");
        const Result<AttachmentPtr> attached = attach(context_);
        if (!attached)
            return add(failure, "socket", fmt::format("{}: {}", found, attached.error().message), "",
                       exit_code_of(attached.error().code));
        if ((file.st_mode & 0007) != 0)
            return add(warning, "socket", found + ": everybody on this machine may ask",
                       "SocketMode=0660, or restart the broker, which sets it so");
        add(ok, "socket", found + ": the broker answers");
    }

    std::string start_advice() const {
        const bool unit = ::access("/lib/systemd/system/gcoalesced.service", F_OK) == 0 ||
                          ::access("/etc/systemd/system/gcoalesced.service", F_OK) == 0;
        return unit ? "systemctl start gcoalesced; journalctl -u gcoalesced says how it went"
                    : "start gcoalesced, with this --instance and --runtime-dir";
    }

    // What the kernel says of the broker's control group (systemd names it after the unit).
    void look_at_unit() {
        if (pid_ <= 0) return;
        std::ifstream groups(fmt::format("/proc/{}/cgroup", pid_));
        std::string unit;
        for (std::string line; std::getline(groups, line);) {
            const std::string last = line.substr(line.rfind('/') + 1);
            if (last.ends_with(".service")) unit = last;
        }
        if (!unit.empty()) return add(ok, "unit", fmt::format("the broker runs as {}", unit));
        add(note, "unit", "no systemd unit of the broker to be seen: nobody starts it again when it dies",
            "enable gcoalesced.socket, or let another supervisor start it");
    }

    void ask() {
        const Result<AttachmentPtr> attached = attach(context_);
        if (!attached)
            return add(failure, "online", "no broker to ask: " + attached.error().message, "",
                       exit_code_of(attached.error().code));
        Question question;
        question.model = model_;
        question.body = R"({"contents":[{"role":"user","parts":[{"text":"Reply with the word OK."}]}],)"
                        R"("generationConfig":{"maxOutputTokens":16}})";
        question.sharing = GCOALESCE_SHARE_NOT;
        question.no_store = true;
        question.timeout = kOnlinePatience;
        Exchange exchange(**attached, question);
        std::string_view event;
        while (exchange.next(system_clock().monotonic() + kSecond, event) != Exchange::Step::over) {
        }
        const ExitCode code = exchange.exit_code();
        if (code == ExitCode::ok || code == ExitCode::blocked) // what it said does not matter
            return add(ok, "online", fmt::format("upstream took the key and answered as {}", model_));
        const std::string advice = code == ExitCode::key            ? "put a valid key in its place, then "
                                                                      "`gcoalesce templates reload`"
                                   : code == ExitCode::rate_limited ? "wait, or raise the quota"
                                   : code == ExitCode::timed_out    ? "look at the network between here and upstream"
                                                                    : "look at --upstream, --proxy, --ca-file, and -m";
        add(failure, "online", exchange.failure()->message, advice, code);
    }

    Context& context_;
    const bool online_;
    const std::string model_;
    Instance instance_;
    std::int32_t pid_ = 0;
    std::vector<Finding> findings_;
};

void run_doctor(Context& context, bool online, const std::string& model, bool as_json) {
    const std::vector<Finding> findings = Doctor(context, online, model).run();
    const auto failed = std::ranges::find(findings, failure, &Finding::result);
    context.exit = failed == findings.end() ? ExitCode::ok : failed->exit;
    if (as_json) {
        nlohmann::ordered_json json{
            {"version", 1}, {"ok", failed == findings.end()}, {"findings", nlohmann::ordered_json::array()}};
        for (const Finding& finding : findings)
            json["findings"].push_back({{"check", finding.check},
                                        {"result", word(finding.result)},
                                        {"found", finding.found},
                                        {"advice", finding.advice}});
        return write_out(json_line(json));
    }
    std::string out;
    const std::size_t width = output_columns();
    for (const Finding& finding : findings) {
        out += hanging(fmt::format("{:<9}{}", word(finding.result), finding.check), escape_line(finding.found), kIndent,
                       width);
        if (!finding.advice.empty()) out += hanging("", "-> " + escape_line(finding.advice), kIndent, width);
    }
    write_out(out);
}

} // namespace

Finding judge(const Membership& membership) {
    Finding finding{ok, "group", "", "", ExitCode::failed};
    const std::string& group = membership.group_name;
    if (membership.user == 0) {
        finding.found = "root may use it, whatever the group";
    } else if (membership.user == membership.owner) {
        finding.found = fmt::format("{} is the broker's own user", membership.user_name);
    } else if (membership.in_process) {
        finding.found = fmt::format("{} is in the broker's group {}", membership.user_name, group);
    } else if (membership.in_database) {
        finding.result = failure;
        finding.found = fmt::format("{} has become a member of group {} since this session was started, which does not "
                                    "have it yet",
                                    membership.user_name, group);
        finding.advice = fmt::format("log out and in again (or for this shell: newgrp {}); restart services that need "
                                     "it",
                                     group);
    } else {
        finding.result = failure;
        finding.found = fmt::format("{} is not in the broker's group {}", membership.user_name, group);
        finding.advice = fmt::format("as root: adduser {} {}, then log out and in again", membership.user_name, group);
    }
    return finding;
}

void add_doctor(CLI::App& app, Context& context) {
    CLI::App* command = app.add_subcommand("doctor", "is everything well, and if not, what to do");
    auto online = std::make_shared<bool>(false);
    auto json = std::make_shared<bool>(false);
    auto model = std::make_shared<std::string>("gemini-2.5-flash");
    command->add_flag("--online", *online, "have the broker make one small call");
    command->add_option("-m,--model", *model, "whom --online asks (default gemini-2.5-flash)")
        ->envname("GCOALESCE_MODEL")
        ->type_name("MODEL");
    command->add_flag("--json", *json, "one JSON object");
    command->footer(kFooter);
    command->callback([online, model, json, &context] { run_doctor(context, *online, *model, *json); });
}

} // namespace gcoalesce::cli
