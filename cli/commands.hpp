// One file a command; main.cpp lists them.
#pragma once

#include <CLI/App.hpp>
#include <string>
#include <vector>

#include "cli/exit_codes.hpp"

namespace gcoalesce::cli {

// What every command gets from main, and gives back to it.
struct Context {
    std::string instance;    // --instance or GCOALESCE_INSTANCE; "": not told
    std::string runtime_dir; // --runtime-dir or GCOALESCE_RUNTIME_DIR; "": not told
    bool verbose = false;    // -v
    ExitCode exit = ExitCode::ok;
};

// Each adds one subcommand to `app`, whose callback does the work and sets context.exit. A callback that finds the
// command line wrong throws a CLI::ValidationError; main turns it into a usage error. Both arguments must outlive
// parsing.
void add_ask(CLI::App& app, Context& context);
void add_keys(CLI::App& app, Context& context);
void add_show(CLI::App& app, Context& context);
void add_dump(CLI::App& app, Context& context);
void add_log(CLI::App& app, Context& context);
void add_top(CLI::App& app, Context& context);
void add_clients(CLI::App& app, Context& context);
void add_doctor(CLI::App& app, Context& context);
void add_notify(CLI::App& app, Context& context);
void add_cancel(CLI::App& app, Context& context);
void add_purge(CLI::App& app, Context& context);
void add_key(CLI::App& app, Context& context);
void add_stats(CLI::App& app, Context& context);
void add_estimate(CLI::App& app, Context& context);
void add_advise(CLI::App& app, Context& context);
void add_templates(CLI::App& app, Context& context);
void add_demo(CLI::App& app, Context& context);
void add_sim(CLI::App& app, Context& context);
void add_serve(CLI::App& app, Context& context);

// What the shells ask: prints what may stand in place of the last word, one candidate a line, a description behind a
// tab; ":files" and ":dirs" stand for names of files and directories. words: of the command line, without the program's
// name.
void complete(const CLI::App& app, const Context& context, const std::vector<std::string>& words);

} // namespace gcoalesce::cli
