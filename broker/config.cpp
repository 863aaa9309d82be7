#include "broker/config.hpp"

#include <CLI/CLI.hpp>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <grp.h>
#include <iostream>
#include <map>

#define TOML_EXCEPTIONS 0
#define TOML_ENABLE_FORMATTERS 0
#include <toml++/toml.h>

#include "base/arguments.hpp"
#include "base/nearest.hpp"
#include "base/units.hpp"
#include "broker/exit_codes.hpp"

namespace gcoalesce {
namespace {

// --ttl-idle is GCOALESCE_TTL_IDLE in the environment.
std::string variable(const std::string& flag) {
    std::string name = "GCOALESCE_";
    for (const char c : flag.substr(2)) name += c == '-' ? '_' : static_cast<char>(std::toupper(c));
    return name;
}

enum class Where { command_line, file };

std::vector<std::string> option_names(const CLI::App& app, Where where) {
    std::vector<std::string> names;
    for (const CLI::Option* option : app.get_options()) {
        if (where == Where::file && !option->get_configurable()) continue;
        for (const std::string& name : option->get_lnames()) names.push_back(name);
    }
    return names;
}

// The file as TOML, each line of which is an option: CLI11's own reader takes nearly anything for one, and knows no
// lines. Left out are lines that the command line or a variable overrules, which CLI11 would let the file overrule.
class ConfigFile : public CLI::Config {
  public:
    explicit ConfigFile(const CLI::App& app) : app_(app) {}

    std::vector<CLI::ConfigItem> from_config(std::istream& input) const override {
        const toml::parse_result parsed = toml::parse(input);
        if (!parsed)
            complain(parsed.error().source().begin.line,
                     fmt::format("expected TOML, such as ttl-idle = \"200ms\" or streams = 4096: {}",
                                 parsed.error().description()));
        std::vector<CLI::ConfigItem> taken;
        for (const auto& [key, value] : parsed.table()) {
            const auto line = key.source().begin.line;
            const std::string name(key.str());
            if (value.is_table() || value.is_array())
                complain(line, fmt::format("\"{}\": expected TOML without tables and arrays, such as ttl-idle = "
                                           "\"200ms\" or streams = 4096",
                                           name));
            if (value.is_date() || value.is_time() || value.is_date_time())
                complain(line,
                         fmt::format("\"{}\": expected a text, a number or true or false, found a date or time", name));
            const CLI::Option* option = app_.get_option_no_throw("--" + name);
            if (option == nullptr || !option->get_configurable())
                complain(line, fmt::format("unknown option \"{}\"{}", name,
                                           did_you_mean(name, option_names(app_, Where::file))));
            const char* variable = std::getenv(option->get_envname().c_str());
            const bool overruled = variable != nullptr && *variable != '\0'; // an empty one is none to CLI11 either
            if (option->count() != 0 || overruled) continue;
            lines_[name] = line;
            taken.emplace_back();
            taken.back().name = name;
            taken.back().inputs = {text_of(value)};
        }
        return taken;
    }

    std::string to_config(const CLI::App*, bool, bool, std::string) const override { return {}; } // nobody asks

    // "FILE:LINE: " where CLI11's complaint is of an option that was taken from the file; else "".
    std::string place_of(std::string_view complaint) const {
        for (const auto& [name, line] : lines_) {
            const std::size_t at = complaint.find("--" + name);
            if (at == std::string_view::npos) continue;
            const std::string_view behind = complaint.substr(at + 2 + name.size());
            if (behind.empty() || behind.front() == ':' || behind.front() == ' ') return place(line);
        }
        return {};
    }

  private:
    static std::string text_of(const toml::node& value) {
        if (const auto text = value.value<std::string>()) return *text;
        if (value.is_integer()) return fmt::to_string(value.ref<std::int64_t>());
        if (value.is_boolean()) return value.ref<bool>() ? "true" : "false";
        return fmt::to_string(value.value_or(0.0)); // a float
    }
    std::string place(toml::source_index line) const {
        return fmt::format("{}:{}: ", app_.get_config_ptr()->results().back(), line);
    }
    [[noreturn]] void complain(toml::source_index line, const std::string& what) const {
        throw CLI::ConfigError(place(line) + what);
    }

    const CLI::App& app_;
    mutable std::map<std::string, toml::source_index> lines_; // of what was taken
};

// A group's name or number.
Result<std::uint32_t> parse_group(const std::string& text) {
    std::uint32_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error == std::errc() && end == text.data() + text.size()) return number;
    if (const group* found = ::getgrnam(text.c_str()); found != nullptr) return found->gr_gid;
    return fail(GCOALESCE_BAD_REQUEST, "there is no group \"{}\" here", text);
}

class Options {
  public:
    explicit Options(CLI::App& app) : app_(app) {}

    void text(const std::string& flag, std::string& target, const std::string& help) {
        app_.add_option(flag, target, help)->envname(variable(flag))->capture_default_str();
    }
    template <class T>
    void number(const std::string& flag, T& target, T least, T most, const std::string& help) {
        app_.add_option(flag, target, help)
            ->envname(variable(flag))
            ->capture_default_str()
            ->check(complaint_of_number)
            ->check(CLI::Range(least, most));
    }
    void duration(const std::string& flag, Nanos& target, const std::string& help) {
        parsed(flag, "DURATION", help, format_duration(target), [&target](const std::string& text) {
            const Result<Nanos> value = parse_duration(text);
            if (value) target = *value;
            return value ? std::string() : value.error().message;
        });
    }
    void size(const std::string& flag, std::uint64_t& target, const std::string& help) {
        parsed(flag, "SIZE", help, format_size(target), [&target](const std::string& text) {
            const Result<std::uint64_t> value = parse_size(text);
            if (value) target = *value;
            return value ? std::string() : value.error().message;
        });
    }
    template <class F>
    void parsed(const std::string& flag, const std::string& type, const std::string& help, const std::string& shown,
                F&& parse) {
        app_.add_option_function<std::string>(
                flag,
                [parse, flag](const std::string& text) {
                    if (const std::string complaint = parse(text); !complaint.empty())
                        throw CLI::ValidationError(flag, complaint);
                },
                help)
            ->envname(variable(flag))
            ->type_name(type)
            ->default_str(shown);
    }

  private:
    CLI::App& app_;
};

} // namespace

Parsed parse_command_line(int argc, char** argv) {
    Config config;
    std::string instance;
    std::string runtime_dir;
    std::uint64_t stream_bytes = config.settings.stream_bytes;

    CLI::App app{"gcoalesced: makes one upstream call for identical Gemini requests and lets every requester read the "
                 "same stream out of shared memory. Runs in the foreground and logs to standard error.",
                 "gcoalesced"};
    app.set_version_flag("--version", std::string("gcoalesced " GCOALESCE_VERSION));
    app.set_config("--config", "", "read options from this TOML file (their names without the dashes)");
    const auto file = std::make_shared<ConfigFile>(app);
    app.config_formatter(file);
    app.allow_config_extras(CLI::config_extras_mode::error);
    Options options(app);
    options.text("--instance", instance, "which broker of this runtime directory");
    options.text("--runtime-dir", runtime_dir,
                 "directory of the control socket (default: /run/gcoalesce, else $XDG_RUNTIME_DIR/gcoalesce)");
    options.text("--upstream", config.upstream, "base URL of the Gemini API");
    options.text("--ca-file", config.ca_file, "trust these CA certificates (PEM) instead of the system's");
    options.text("--proxy", config.proxy, "HTTP proxy for upstream calls; none is taken from the environment");
    options.text(
        "--api-key-file", config.api_key_file,
        "file with the API key; before it comes $CREDENTIALS_DIRECTORY/gemini-api-key, after it GEMINI_API_KEY");
    if (const char* given = std::getenv("STATE_DIRECTORY"); given != nullptr) config.state_dir = given; // systemd's
    options.text("--state-dir", config.state_dir,
                 "keep finished answers here, for those who resume and across restarts (default: systemd's "
                 "StateDirectory=, else they are not kept)");
    options.size("--snapshot-limit", config.snapshot_bytes, "most bytes kept there, the oldest give way");
    options.duration("--snapshot-ttl", config.settings.snapshot_ttl, "how long an answer is kept there");
    options.duration("--kv-after", config.settings.kv_after,
                     "this long after a push, kept answers serve new requests, too");
    options.duration(
        "--kv-ttl", config.settings.kv_ttl,
        "how old such an answer may be, of whole requests (0s: they do not serve any); templates have their "
        "own kv_ttl, 10min unless the file says otherwise");
    options.text("--templates", config.templates_dir, "directory of template files; SIGHUP reads them again");
    options.parsed("--admin-group", "GROUP", "who may notify, cancel, purge and reload (default: whoever may attach)",
                   "", [&config](const std::string& text) {
                       config.admin_group.reset();
                       if (text.empty()) return std::string();
                       const Result<std::uint32_t> group = parse_group(text);
                       if (group) config.admin_group = *group;
                       return group ? std::string() : group.error().message;
                   });
    options.size("--memory", config.memory, "size of the shared-memory segment, all of it reserved at start");
    options.number<std::uint32_t>("--streams", config.store.slots, 1, kMaxSlots, "streams that the segment can hold");
    options.duration("--ttl-idle", config.settings.ttl_idle, "how long a complete answer stays fresh");
    options.duration("--ttl-window", config.settings.ttl_window,
                     "the same for a stream during whose flight the notification window was open");
    options.duration("--window", config.settings.window, "how long `notify on` opens the window if not told otherwise");
    options.duration("--linger", config.settings.linger,
                     "how long a stream stays in the segment after its last subscriber left");
    options.duration("--first-event-timeout", config.producer.first_event,
                     "longest wait for the first event, from the moment the request is sent");
    options.duration("--event-gap-timeout", config.producer.event_gap, "longest wait between two events");
    options.duration("--call-timeout", config.producer.whole_call, "longest upstream call, retries included");
    options.number("--retries", config.producer.retries, 0, 10, "tries after the first, before the first event only");
    options.size("--stream-limit", stream_bytes, "largest answer");
    options.number<std::uint32_t>("--max-in-flight", config.limits.in_flight, 1, kMaxSlots,
                                  "answers being produced at once; above it requests are told that the broker is busy");
    options.number<std::uint32_t>("--max-calls-per-minute", config.limits.calls_a_minute, 0, 1'000'000,
                                  "upstream calls started within a minute; 0: no limit");
    options.number<std::uint64_t>("--max-subscribers", config.settings.subscribers, 0, 1'000'000'000,
                                  "readers of one stream; 0: no limit");
    options.duration("--stall-timeout", config.store.stall_timeout,
                     "under memory pressure, readers that did not move for this long lose their stream");
    options.duration("--drain-timeout", config.drain_timeout, "how long running streams may go on after SIGTERM");
    options.parsed("--log-level", "LEVEL", "error, warning, info or debug", "info", [&config](const std::string& text) {
        const Result<LogLevel> level = parse_log_level(text);
        if (level) config.log_level = *level;
        return level ? std::string() : level.error().message;
    });

    const auto usage = [](const std::string& complaint) {
        fmt::print(stderr, "gcoalesced: {}\ntry 'gcoalesced --help'\n", complaint);
        return Parsed{std::nullopt, exit_usage};
    };
    try {
        std::vector<std::string> backwards = with_empty_values({argv + 1, argv + argc}, [&](const std::string& name) {
            const CLI::Option* option = app.get_option_no_throw(name);
            return option != nullptr && option->get_items_expected_max() > 0;
        });
        std::ranges::reverse(backwards); // as CLI11 takes them
        app.parse(std::move(backwards));
    } catch (const CLI::Success& success) { // help, version
        const int code = app.exit(success);
        std::cout.flush();
        if (std::cout) return {std::nullopt, code};
        fmt::print(stderr, "gcoalesced: cannot write to standard output: {}\n", std::strerror(errno));
        return {std::nullopt, exit_failure};
    } catch (const CLI::ExtrasError& error) {
        const std::string option = app.remaining().front();
        if (!option.starts_with("--")) return usage(error.what());
        const std::string name = option.substr(2, option.find('=') - 2);
        const std::string meant = nearest(name, option_names(app, Where::command_line));
        return usage(fmt::format("unknown option \"--{}\"{}", name,
                                 meant.empty() ? "" : fmt::format("; did you mean \"--{}\"?", meant)));
    } catch (const CLI::Error& error) {
        return usage(file->place_of(error.what()) + error.what());
    }
    Result<Instance> resolved = resolve_instance(instance.c_str(), runtime_dir.c_str());
    if (!resolved) return usage(resolved.error().message);
    config.instance = std::move(*resolved);
    config.store.instance = config.instance.name;
    config.settings.stream_bytes = stream_bytes;
    return {std::move(config), 0};
}

} // namespace gcoalesce
