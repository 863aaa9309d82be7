#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <clocale>
#include <cstdio>
#include <exception>
#include <fmt/format.h>
#include <iostream>
#include <string>
#include <unistd.h>
#include <utility>
#include <vector>

#include "base/arguments.hpp"
#include "base/nearest.hpp"
#include "cli/commands.hpp"
#include "cli/inspect.hpp"
#include "cli/request_options.hpp"
#include "cli/view/terminal.hpp"
#include "protocol/control.hpp"

namespace {

using gcoalesce::cli::Context;
using gcoalesce::cli::ExitCode;

int usage_error(const std::string& command, std::string message) {
    std::replace(message.begin(), message.end(), '\n', ' ');
    fmt::print(stderr, "{}: {}\ntry '{} --help'\n", command, message, command);
    return static_cast<int>(ExitCode::usage);
}

int unknown_option(const std::string& command, const CLI::App& at, std::string option) {
    option.erase(std::min(option.find('='), option.size()));
    std::vector<std::string> known;
    for (const CLI::App* app = &at; app != nullptr; app = app->get_parent()) {
        for (const CLI::Option* one : app->get_options()) {
            for (const std::string& name : one->get_lnames()) known.push_back("--" + name);
        }
    }
    return usage_error(command, fmt::format("unknown option \"{}\"{}", option, gcoalesce::did_you_mean(option, known)));
}

int parse_error(const CLI::App& app, const CLI::ParseError& error) {
    if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success)) return app.exit(error); // --help, --version
    const CLI::App* at = &app; // how far the command is known
    std::string name = "gcoalesce";
    while (!at->get_subcommands().empty()) {
        at = at->get_subcommands().front();
        name += " " + at->get_name();
    }
    std::vector<std::string> names;
    for (const CLI::App* command : at->get_subcommands([](const CLI::App*) { return true; }))
        names.push_back(command->get_name());
    const std::vector<std::string> extras = app.remaining();
    if (!extras.empty() && extras.front().starts_with("--")) return unknown_option(name, *at, extras.front());
    if (names.empty() || extras.empty() || extras.front().starts_with("-")) return usage_error(name, error.what());
    return usage_error(
        name, fmt::format("unknown command \"{}\"{}", extras.front(), gcoalesce::did_you_mean(extras.front(), names)));
}

// The command line as CLI11 reads it as meant. "--name=" has an empty value. Among the words of a prompt, of which
// there may be any number, "[a, b]" would be a list and "++" the end of the command: kWordEnd, which RequestOptions
// takes off again, keeps them words. Of "-v5" the 5 would become a word.
std::vector<std::string> as_meant(const CLI::App& app, const std::vector<std::string>& given) {
    const CLI::App* command = nullptr;
    const auto find = [&](const std::string& name) {
        const CLI::Option* option = nullptr;
        for (const CLI::App* at = command != nullptr ? command : app.get_subcommand("ask"); at != nullptr && !option;
             at = at->get_parent())
            option = at->get_option_no_throw(name);
        return option;
    };
    const auto takes_value = [&](const std::string& name) {
        const CLI::Option* option = find(name);
        return option != nullptr && option->get_items_expected_max() > 0;
    };
    std::vector<std::string> put;
    bool is_value = false, options = true;
    for (const std::string& argument : given) {
        put.push_back(argument);
        const bool word = !options || argument.size() < 2 || argument[0] != '-' ||
                          (argument[1] >= '0' && argument[1] <= '9'); // -5 is a number
        if (std::exchange(is_value, false)) continue;
        if (!word && argument == "--") {
            options = false;
        } else if (!word && argument[1] == '-') {
            is_value = argument.find('=') == std::string::npos && takes_value(argument);
        } else if (!word) {
            for (std::size_t at = 1; at < argument.size(); ++at) {
                const std::string flag{'-', argument[at]};
                if (at > 1 && find(flag) == nullptr)
                    throw CLI::ParseError(fmt::format("unknown option \"{}\"", argument), CLI::ExitCodes::ExtrasError);
                if (!takes_value(flag)) continue;
                is_value = at + 1 == argument.size(); // else the value is what follows
                break;
            }
        } else if (const auto named = (command != nullptr ? command : &app)->get_subcommands([&](const CLI::App* one) {
                       return one->get_name() == argument;
                   });
                   options && !named.empty()) {
            command = named.front();
        } else if (command != nullptr && command->get_option_no_throw("PROMPT") != nullptr &&
                   (argument == "++" || (argument.starts_with('[') && argument.ends_with(']')))) {
            put.back() += gcoalesce::cli::kWordEnd;
        }
    }
    return gcoalesce::with_empty_values(put, takes_value);
}

// With text on standard input and no command it is `ask`, whose options may then stand alone.
bool may_be_ask(const CLI::App& app) {
    return app.get_subcommands().empty() && app.remaining().front().starts_with("-") &&
           !gcoalesce::cli::is_terminal(STDIN_FILENO);
}

int parse_as_ask(CLI::App& app, const Context& context, std::vector<std::string> arguments) {
    std::ranges::reverse(arguments); // as CLI11 takes them
    arguments.emplace_back("ask");
    try {
        app.parse(std::move(arguments));
    } catch (const CLI::ExtrasError& error) {
        const std::vector<std::string> extras = app.remaining(true);
        if (!extras.empty() && extras.front().starts_with("--"))
            return unknown_option("gcoalesce", *app.get_subcommand("ask"), extras.front());
        return usage_error("gcoalesce", error.what());
    }
    return static_cast<int>(context.exit);
}

std::string versions(Context context) {
    std::string text = fmt::format("gcoalesce {} (segment layout {}, control protocol {})", GCOALESCE_VERSION,
                                   gcoalesce::kLayoutMajor, gcoalesce::kProtocolVersion);
    if (!context.verbose) return text;
    context.verbose = false;
    if (const auto inspected = gcoalesce::cli::inspect(context, false))
        text += fmt::format("\ngcoalesced {} (segment layout {}), pid {}, {}", inspected->broker.version,
                            inspected->broker.layout, inspected->broker.pid, inspected->broker.state);
    return text;
}

// What people type before they know better.
void add_help(CLI::App& app, const Context& context) {
    auto about = std::make_shared<std::string>();
    CLI::App* help = app.add_subcommand("help", "this text, or with a COMMAND that command's");
    help->add_option("COMMAND", *about, "of which command");
    help->callback([&app, about] {
        if (about->empty()) // not app.help(): that is the chosen command's, which is this one
            return gcoalesce::cli::write_out(
                app.get_formatter()->make_help(&app, app.get_name(), CLI::AppFormatMode::Normal));
        std::vector<std::string> names;
        for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
            names.push_back(command->get_name());
            if (names.back() == *about) return gcoalesce::cli::write_out(command->help("gcoalesce"));
        }
        throw CLI::ValidationError(
            "COMMAND", fmt::format("there is no command \"{}\"{}", *about, gcoalesce::did_you_mean(*about, names)));
    });
    app.add_subcommand("version", "as --version")->callback([&context] {
        gcoalesce::cli::write_out(versions(context) + "\n");
    });
}

int run(int argc, char** argv) {
    CLI::App app("One call to Gemini, one stream, many readers.", "gcoalesce");
    Context context;
    app.add_option("--instance", context.instance, "which broker of this host (default: \"default\")")
        ->envname("GCOALESCE_INSTANCE")
        ->type_name("NAME");
    app.add_option("--runtime-dir", context.runtime_dir, "where brokers have their sockets")
        ->envname("GCOALESCE_RUNTIME_DIR")
        ->type_name("DIR");
    app.add_flag("-v,--verbose", context.verbose, "say more on standard error");
    app.set_version_flag("--version", [&context] { return versions(context); }); // behind -v, which it heeds
    app.fallthrough(); // these may stand behind the command as well
    app.footer("With text on standard input and no command it is `ask`: echo Why is the sky blue? | gcoalesce");
    app.require_subcommand(0, 1); // at most one, so that a command's name among its arguments stays an argument

    using namespace gcoalesce::cli;
    add_ask(app, context);
    add_keys(app, context);
    add_show(app, context);
    add_dump(app, context);
    add_log(app, context);
    add_top(app, context);
    add_clients(app, context);
    add_doctor(app, context);
    add_notify(app, context);
    add_cancel(app, context);
    add_purge(app, context);
    add_key(app, context);
    add_stats(app, context);
    add_estimate(app, context);
    add_advise(app, context);
    add_templates(app, context);
    add_demo(app, context);
    add_sim(app, context);
    add_serve(app, context);
    add_help(app, context);

    if (argc > 1 && std::string_view(argv[1]) == "__complete") {
        complete(app, context, {argv + 2, argv + argc});
        return static_cast<int>(ExitCode::ok);
    }
    try {
        try {
            std::vector<std::string> backwards = as_meant(app, {argv + 1, argv + argc});
            std::ranges::reverse(backwards);
            app.parse(std::move(backwards));
        } catch (const CLI::ExtrasError&) {
            if (!may_be_ask(app)) throw;
        }
        if (app.get_subcommands().empty()) {
            if (is_terminal(STDIN_FILENO)) return usage_error("gcoalesce", "expected a command");
            return parse_as_ask(app, context, as_meant(app, {argv + 1, argv + argc}));
        }
    } catch (const CLI::ParseError& error) {
        return parse_error(app, error);
    }
    return static_cast<int>(context.exit);
}

} // namespace

int main(int argc, char** argv) {
    std::setlocale(LC_CTYPE, "C.UTF-8"); // what we print is UTF-8, whatever the user's locale: tables need its widths
    try {
        const int code = run(argc, argv);
        std::cout.flush();
        if (std::cout && std::fflush(stdout) == 0) return code;
        std::perror("gcoalesce: cannot write to standard output");
    } catch (const std::exception& error) {
        fmt::print(stderr, "gcoalesce: {}\n", error.what());
    }
    return static_cast<int>(ExitCode::failed);
}
