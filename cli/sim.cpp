#include <CLI/App.hpp>
#include <CLI/Validators.hpp>
#include <cstdio>
#include <fmt/format.h>
#include <fstream>
#include <memory>
#include <string>

#include "base/arguments.hpp"
#include "cli/commands.hpp"
#include "cli/sim/server.hpp"
#include "cli/view/terminal.hpp"

namespace gcoalesce::cli {
namespace {

struct Arguments {
    sim::ServerOptions server;
    std::string accept_key_file;
};

constexpr const char* kFooter = R"(
A script option sets the default for every call. One call can have its own: in a
request header  x-sim-script: key=value,key=value  or, where headers do not get
through, in the text of the last user turn:  [sim events=36 gap=50ms cut-after=3]
(the marker is not part of the answer; the header wins). A key that takes nothing
stands alone: [sim empty]. "events" as an N means after the last event.

Answers depend on the request's body alone, but for responseId, which ends in the
number of the call of that body. Every model named gemini-... exists.

GET /sim/calls counts the calls; POST /sim/reset begins anew. POST /sim/release
lets all go on that hold-after holds, until the next reset.)";

std::string read_key(const std::string& path) {
    std::ifstream file(path);
    std::string key;
    if (!std::getline(file, key) || key.empty())
        throw CLI::ValidationError("--accept-key", "expected a file whose first line is a key: " + path);
    return key;
}

void run_sim(Arguments& arguments, Context& context) {
    if (!arguments.accept_key_file.empty()) arguments.server.accept_key = read_key(arguments.accept_key_file);
    const auto served =
        sim::serve(arguments.server, [](const std::string& url) { write_out(fmt::format("listening on {}\n", url)); });
    if (served) return;
    if (served.error().code == GCOALESCE_BAD_REQUEST) throw CLI::ValidationError("--bind", served.error().message);
    fmt::print(stderr, "gcoalesce sim: {}\n", served.error().message);
    context.exit = ExitCode::failed;
}

} // namespace

void add_sim(CLI::App& app, Context& context) {
    CLI::App* command = app.add_subcommand("sim", "a local stand-in for the Gemini API, for development and tests");
    auto arguments = std::make_shared<Arguments>();
    sim::ServerOptions& server = arguments->server;
    command->add_option("--port", server.port, "TCP port (default 0: any free one; printed)")
        ->check(complaint_of_number)
        ->type_name("N");
    command->add_option("--bind", server.bind, "address to listen on (default 127.0.0.1)")->type_name("ADDRESS");
    command->add_flag("--require-key", server.require_key, "refuse calls without an API key (403)");
    command->add_option("--accept-key", arguments->accept_key_file, "refuse every API key but the one in FILE (400)")
        ->type_name("FILE");
    command
        ->add_option(
            "--replay", server.replay,
            "recorded answers: a folder, in which a call's own replay=NAME names one, or one file for all calls")
        ->type_name("PATH");

    for (const sim::ScriptKey& key : sim::script_keys()) {
        const std::string name = "--" + key.name;
        const auto set = [&key, &server, name](const std::string& value) {
            if (auto done = key.set(server.defaults, value); !done)
                throw CLI::ValidationError(name, done.error().message);
        };
        if (key.name == "replay") continue; // the server's own option has that name
        CLI::Option* option =
            key.value.empty() ? command->add_flag_callback(
                                    name, [set] { set(""); }, key.help)
                              : command->add_option_function<std::string>(name, set, key.help)->type_name(key.value);
        option->group("Script");
    }
    command->footer(kFooter);
    command->callback([arguments, &context] { run_sim(*arguments, context); });
}

} // namespace gcoalesce::cli
