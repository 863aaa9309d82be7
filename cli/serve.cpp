// gcoalesce serve: the HTTP and SSE gateway.
#include <CLI/App.hpp>
#include <CLI/Validators.hpp>
#include <cstdio>
#include <fmt/format.h>
#include <memory>
#include <string>
#include <systemd/sd-daemon.h>

#include "base/arguments.hpp"
#include "base/log.hpp"
#include "base/units.hpp"
#include "cli/commands.hpp"
#include "cli/gateway/route.hpp"
#include "cli/gateway/server.hpp"
#include "cli/option_values.hpp"
#include "cli/report.hpp"
#include "cli/view/terminal.hpp"

namespace gcoalesce::cli {
namespace {

constexpr const char* kFooter = R"(
Point a Gemini client at it: its base URL is what is printed. Requests that say the
same share one call, as with every other client of the broker. The API key is the
broker's: a key that a client sends tells whose request it is, and goes no further,
but with --pass-key.

POST /v1beta/models/M:generateContent, :streamGenerateContent   as the API has them
POST /v1/streams, GET /v1/streams/ID                            for EventSource
POST /v1/notify                                                 opens the window
GET /healthz, /readyz, /metrics                                 for supervisors and Prometheus)";

struct Arguments {
    gateway::Options options;
    std::string max_body, idle, request, stall, heartbeat, drain, log_level = "info";
};

void take_duration(const char* option, const std::string& text, Nanos& to) {
    if (text.empty()) return;
    to = duration_of(option, text);
    if (to == 0) throw CLI::ValidationError(option, "expected more than no time at all");
}

// As browsers send it (RFC 6454, section 6.1): anything else would let nobody in, and nobody would know why.
void check_origin(const std::string& origin) {
    const std::size_t scheme = origin.find("://");
    const bool good = scheme != std::string::npos && scheme > 0 && scheme + 3 < origin.size() &&
                      origin.find_first_of("/ ?#", scheme + 3) == std::string::npos;
    if (origin != "*" && !good)
        throw CLI::ValidationError(
            "--cors-origin", fmt::format("expected * or an origin such as https://app.example, found \"{}\"", origin));
}

void run_serve(Arguments& arguments, Context& context) {
    gateway::Options& options = arguments.options;
    if (!arguments.max_body.empty()) {
        const Result<std::uint64_t> size = parse_size(arguments.max_body);
        if (!size) throw CLI::ValidationError("--max-body", size.error().message);
        options.max_body = *size;
    }
    for (std::string& host : options.hosts) {
        const std::string name = gateway::public_name(host);
        const bool good = name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-_.") == std::string::npos &&
                          !name.empty() && !name.starts_with('.') && name.find("..") == std::string::npos;
        if (!good || host.find(':') != std::string::npos)
            throw CLI::ValidationError(
                "--allow-host",
                fmt::format("expected a name such as llm.example.org, found \"{}\"; addresses and names without dots "
                            "are allowed as it is",
                            host));
        host = name;
    }
    for (const std::string& origin : options.cors_origins) check_origin(origin);
    take_duration("--idle-timeout", arguments.idle, options.idle);
    take_duration("--request-timeout", arguments.request, options.request);
    take_duration("--stall-timeout", arguments.stall, options.stall);
    take_duration("--heartbeat", arguments.heartbeat, options.heartbeat);
    take_duration("--drain-timeout", arguments.drain, options.drain);
    const Result<LogLevel> level = parse_log_level(arguments.log_level);
    if (!level) throw CLI::ValidationError("--log-level", level.error().message);
    set_log_level(*level);
    const auto text = [](const std::string& given) { return given.empty() ? nullptr : given.c_str(); };
    Result<Instance> instance = resolve_instance(text(context.instance), text(context.runtime_dir));
    if (!instance) return report(context, instance.error(), false);
    options.instance = std::move(*instance);
    const Result<void> served = gateway::serve(options, [](const std::string& url) {
        write_out(fmt::format("listening on {}\n", url));
        ::sd_notify(0, "READY=1"); // to systemd, where that started it
    });
    if (!served) report(context, served.error(), false);
}

} // namespace

void add_serve(CLI::App& app, Context& context) {
    CLI::App* command = app.add_subcommand("serve", "an HTTP gateway: Gemini clients and browsers read shared answers");
    auto arguments = std::make_shared<Arguments>();
    gateway::Options& options = arguments->options;
    command->add_option("--listen", options.listen, "where: ADDRESS:PORT, or unix:PATH (default 127.0.0.1:8790)")
        ->envname("GCOALESCE_LISTEN")
        ->type_name("WHERE");
    CLI::Option* tokens =
        command
            ->add_option("--token-file", options.token_file,
                         "lines name:hash or name:hash:admin, the SHA-256 of a token; without one everybody who can "
                         "connect may ask, so that only this machine may")
            ->envname("GCOALESCE_TOKEN_FILE")
            ->check(complaint_of_nothing)
            ->type_name("FILE");
    command
        ->add_flag("--pass-key", options.pass_key,
                   "calls that a request causes are made with the API key that it brings, if it brings one; only "
                   "requests with the same key share them")
        ->excludes(tokens);
    command
        ->add_option("--allow-host", options.hosts,
                     "a name with dots that callers without tokens may use for this gateway (repeatable)")
        ->type_name("NAME");
    command->add_option("--cors-origin", options.cors_origins, "whose pages may ask; * for everybody's (repeatable)")
        ->type_name("ORIGIN");
    command->add_option("--max-body", arguments->max_body, "the largest body of a request (default 32MiB)")
        ->type_name("SIZE");
    command
        ->add_option("--max-connections", options.max_connections,
                     "how many at once (default 16384, or what the system lets it have)")
        ->check(complaint_of_number)
        ->check(CLI::Range(1u, 1'000'000u))
        ->type_name("N");
    command->add_option("--request-timeout", arguments->request, "for a request to come in whole (default 30s)")
        ->type_name("DURATION");
    command->add_option("--idle-timeout", arguments->idle, "for a connection without a request (default 75s)")
        ->type_name("DURATION");
    command->add_option("--stall-timeout", arguments->stall, "for a client that takes nothing (default 60s)")
        ->type_name("DURATION");
    command
        ->add_option("--heartbeat", arguments->heartbeat,
                     "a comment after so long a silence, where events have ids (default 15s)")
        ->type_name("DURATION");
    command->add_option("--drain-timeout", arguments->drain, "for answers under way at the end (default 10s)")
        ->type_name("DURATION");
    command->add_option("--log-level", arguments->log_level, "error, warning, info (each request) or debug")
        ->type_name("LEVEL");
    command->footer(kFooter);
    command->callback([arguments, &context] { run_serve(*arguments, context); });
}

} // namespace gcoalesce::cli
