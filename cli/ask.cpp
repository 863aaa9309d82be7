// gcoalesce ask: one request, its answer as it comes.
#include <CLI/App.hpp>
#include <CLI/Validators.hpp>
#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <fcntl.h>
#include <fmt/format.h>
#include <memory>
#include <nlohmann/json.hpp>
#include <poll.h>
#include <system_error>
#include <unistd.h>

#include "base/fd.hpp"
#include "base/ids.hpp"
#include "base/units.hpp"
#include "cli/ask_lines.hpp"
#include "cli/commands.hpp"
#include "cli/exchange.hpp"
#include "cli/render.hpp"
#include "cli/report.hpp"
#include "cli/view/escape.hpp"
#include "cli/view/terminal.hpp"

namespace gcoalesce::cli {
namespace {

constexpr Nanos kSlice = kSecond;
constexpr int kHintAfterMs = 3000;

constexpr const char* kFooter = R"(
The prompt is what stands on the command line; standard input, unless that is a
terminal, comes before it, a blank line between. `-` or -f FILE says it explicitly.

Standard output is the answer and nothing else. In text form thoughts are left out,
and on a terminal control characters are escaped (--raw: they are not). With --lines
each line of standard input is a prompt, blank ones aside, and each line of output an
answer, in the same order: text with \n, \t, \r and \\ for what would break the line
(an empty line where there is none), or with --json an object.

Exit codes: 0 all of it came; 1 upstream or something here failed; 2 the command line
or the request is wrong; 3 no broker; 4 the API key is missing or refused; 5 rate
limit, or the broker is busy or shutting down; 6 blocked or no text; 7 --timeout
passed; 8 something came, then it failed; 9 a broker of another version.)";

struct Arguments {
    std::vector<std::string> prompt;
    std::string prompt_file, request_file, system;
    std::string model;
    std::string template_id, resume, realm, explicit_key;
    std::vector<std::string> variables; // NAME=VALUE
    std::string timeout = "10min", max_age, subscribe_delay;
    bool no_store = false;
    bool events = false, sse = false, json = false, raw = false;
    bool no_stream = false, bypass = false, refresh = false;
    bool status = false, lines = false;
    unsigned at_once = 4;
};

std::string default_model() {
    const char* given = std::getenv("GCOALESCE_MODEL");
    return given != nullptr && *given != '\0' ? given : "gemini-2.5-flash";
}

std::string read_all(int fd, const std::string& name) {
    std::string text;
    std::array<char, 65536> buffer{};
    for (;;) {
        const ssize_t got = ::read(fd, buffer.data(), buffer.size());
        if (got == 0) return text;
        if (got > 0)
            text.append(buffer.data(), static_cast<std::size_t>(got));
        else if (errno != EINTR)
            throw std::system_error(errno, std::generic_category(), "cannot read " + name);
    }
}

std::string read_file(const std::string& option, const std::string& path) {
    if (path == "-") return read_all(STDIN_FILENO, "standard input");
    const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!file) throw CLI::ValidationError(option, path + ": " + std::generic_category().message(errno));
    return read_all(file.get(), path);
}

// Standard input beside a prompt on the command line: someone may have left it open without knowing.
std::string read_unasked() {
    pollfd input{STDIN_FILENO, POLLIN, 0};
    if (::poll(&input, 1, kHintAfterMs) == 0)
        complain("waiting for standard input to end, since it is no terminal; without it: < /dev/null");
    return read_all(STDIN_FILENO, "standard input");
}

std::string prompt_of(const Arguments& arguments) {
    std::vector<std::string> words = arguments.prompt;
    const bool explicitly = std::erase(words, "-") > 0;
    std::string given;
    if (!arguments.prompt_file.empty())
        given = read_file("-f", arguments.prompt_file);
    else if (explicitly)
        given = read_all(STDIN_FILENO, "standard input");
    else if (!is_terminal(STDIN_FILENO))
        given = words.empty() ? read_all(STDIN_FILENO, "standard input") : read_unasked();
    given.erase(given.find_last_not_of(" \t\r\n") + 1);

    std::string prompt = fmt::format("{}", fmt::join(words, " "));
    if (prompt.find_first_not_of(" \t\r\n") == std::string::npos)
        prompt = given;
    else if (!given.empty())
        prompt = given + "\n\n" + prompt;
    if (prompt.empty())
        throw CLI::ValidationError("PROMPT", "expected a prompt, as arguments, on standard input, or with -f FILE");
    return prompt;
}

Nanos duration_of(const std::string& option, const std::string& text) {
    const Result<Nanos> duration = parse_duration(text);
    if (!duration) throw CLI::ValidationError(option, duration.error().message);
    return *duration;
}

// {"city":"Tokyo"} of city=Tokyo.
std::string variables_of(const std::vector<std::string>& given) {
    nlohmann::ordered_json variables = nlohmann::ordered_json::object();
    for (const std::string& one : given) {
        const std::size_t equals = one.find('=');
        if (equals == std::string::npos || equals == 0)
            throw CLI::ValidationError("--var", "expected NAME=VALUE, such as city=Tokyo");
        const std::string name = one.substr(0, equals);
        if (variables.contains(name)) throw CLI::ValidationError("--var", "\"" + name + "\" is given twice");
        variables[name] = one.substr(equals + 1);
    }
    try {
        return variables.dump();
    } catch (const nlohmann::json::type_error&) {
        throw CLI::ValidationError("--var", "the text is not valid UTF-8");
    }
}

void check_combination(const Arguments& arguments) {
    const bool prompted = !arguments.prompt.empty() || !arguments.prompt_file.empty();
    if (!arguments.template_id.empty() && (prompted || !arguments.request_file.empty() || !arguments.system.empty() ||
                                           !arguments.model.empty() || arguments.lines))
        throw CLI::ValidationError(
            "--template", "is the whole prompt: expected no PROMPT, -f, --request, --system, --model or --lines");
    if (arguments.template_id.empty() && !arguments.variables.empty())
        throw CLI::ValidationError("--var", "goes with --template");
    if (!arguments.resume.empty() && (prompted || !arguments.request_file.empty() || !arguments.system.empty() ||
                                      !arguments.template_id.empty() || arguments.lines))
        throw CLI::ValidationError("--resume", "names the stream: expected nothing to ask beside it");
    if (arguments.lines && !arguments.explicit_key.empty())
        throw CLI::ValidationError("--explicit-key", "would give all lines the same answer");
    if (arguments.events + arguments.sse + arguments.json > 1)
        throw CLI::ValidationError("--events, --sse, --json", "expected one of them");
    if (arguments.bypass && arguments.refresh)
        throw CLI::ValidationError("--bypass, --refresh", "expected one of them");
    if (arguments.lines && (prompted || !arguments.request_file.empty()))
        throw CLI::ValidationError("--lines", "takes its prompts from standard input alone");
    if (arguments.lines && (arguments.events || arguments.sse))
        throw CLI::ValidationError("--lines", "prints text, or with --json objects");
    if (arguments.lines && is_terminal(STDIN_FILENO))
        throw CLI::ValidationError("--lines", "expected standard input to be a file or a pipe");
    if (!arguments.request_file.empty() && (prompted || !arguments.system.empty()))
        throw CLI::ValidationError("--request", "is the whole request: expected neither PROMPT, -f nor --system");
}

// Prints what comes, then what is to say of it.
ExitCode print_answer(Exchange& exchange, const Arguments& arguments, bool status) {
    const bool terminal = is_terminal(STDOUT_FILENO);
    const Form form = arguments.events ? Form::lines : arguments.sse ? Form::sse : Form::text;
    char last = '\n';
    std::size_t printed = 0; // of the text
    for (;;) {
        std::string_view event;
        const Exchange::Step step = exchange.next(system_clock().monotonic() + kSlice, event);
        if (step == Exchange::Step::over) break;
        if (step == Exchange::Step::nothing || arguments.json) continue;
        std::string out = form == Form::text ? exchange.text().substr(printed) : render(form, event);
        printed = exchange.text().size();
        if (terminal && !arguments.raw) out = escape_controls(out);
        if (out.empty()) continue;
        write_out(out);
        last = out.back();
    }
    if (arguments.json && (!exchange.failure() || exchange.events() > 0)) write_out(json_line(exchange.to_json()));
    if (last != '\n' && terminal) write_out("\n");

    if (exchange.failure()) {
        report(*exchange.failure(), arguments.json);
    } else if (const std::string remark = exchange.remark(); form == Form::text && !arguments.json && !remark.empty()) {
        complain(remark);
    }
    if (status) complain(exchange.status_line());
    return exchange.exit_code();
}

// Without reading, but for what the library has to do meanwhile: a large request is sent piece by piece.
void wait_for(gcoalesce_attachment& attachment, Nanos delay) {
    const Nanos until = system_clock().monotonic() + delay;
    for (Nanos left = delay; left > 0; left = until - system_clock().monotonic()) {
        pollfd news{gcoalesce_fd(&attachment), POLLIN, 0};
        ::poll(&news, 1, static_cast<int>(std::min<std::int64_t>(to_ms(left) + 1, INT_MAX)));
        gcoalesce_dispatch(&attachment);
    }
}

void run_ask(const Arguments& arguments, Context& context) {
    check_combination(arguments);
    Question question;
    const bool whole = arguments.template_id.empty() && arguments.resume.empty();
    if (whole) question.model = arguments.model.empty() ? default_model() : arguments.model;
    question.template_id = arguments.template_id;
    question.resume = arguments.resume;
    question.realm = arguments.realm;
    question.explicit_key = arguments.explicit_key;
    question.no_store = arguments.no_store;
    if (!arguments.max_age.empty()) {
        const Nanos age = duration_of("--max-age", arguments.max_age);
        question.max_age_ms = age == 0 ? -1 : std::max<std::int64_t>(to_ms(age), 1);
    }
    question.stream = !arguments.no_stream;
    question.sharing = arguments.bypass    ? GCOALESCE_SHARE_NOT
                       : arguments.refresh ? GCOALESCE_SHARE_REFRESH
                                           : GCOALESCE_SHARE;
    question.timeout = duration_of("--timeout", arguments.timeout);
    const Nanos delay =
        arguments.subscribe_delay.empty() ? 0 : duration_of("--subscribe-delay", arguments.subscribe_delay);
    if (!arguments.template_id.empty()) {
        question.body = variables_of(arguments.variables);
    } else if (!arguments.resume.empty()) {
        if (!parse_event_id(arguments.resume))
            throw CLI::ValidationError("--resume", "expected an event's id such as 9f3c2a71d04b55e8.17");
    } else if (!arguments.request_file.empty()) {
        question.body = read_file("--request", arguments.request_file);
    } else if (!arguments.lines) {
        Result<std::string> body = prompt_body(prompt_of(arguments), arguments.system);
        if (!body) throw CLI::ValidationError("PROMPT", body.error().message);
        question.body = *std::move(body);
    }

    const Result<AttachmentPtr> attachment = attach(context);
    if (!attachment) {
        report(attachment.error(), arguments.json);
        context.exit = exit_code_of(attachment.error().code);
        return;
    }
    const bool status = arguments.status || context.verbose;
    if (arguments.lines) {
        context.exit =
            ask_lines(**attachment, {std::move(question), arguments.system, arguments.at_once, arguments.json, status});
    } else {
        Exchange exchange(**attachment, question);
        if (delay > 0) wait_for(**attachment, delay);
        context.exit = print_answer(exchange, arguments, status);
    }
}

} // namespace

void add_ask(CLI::App& app, Context& context) {
    CLI::App* command = app.add_subcommand("ask", "one request; streams the answer to standard output");
    auto arguments = std::make_shared<Arguments>();
    command->add_option("PROMPT", arguments->prompt, "what to ask; `-`: standard input");
    command->add_option("-f,--file", arguments->prompt_file, "what to ask, from a file")->type_name("FILE");
    command
        ->add_option("--request", arguments->request_file,
                     "a whole request body of the Gemini API; `-`: standard input")
        ->type_name("FILE");
    command->add_option("--system", arguments->system, "system instruction")->type_name("TEXT");
    command->add_option("-m,--model", arguments->model, "which model (default $GCOALESCE_MODEL, else gemini-2.5-flash)")
        ->type_name("MODEL");
    command->add_option("-t,--template", arguments->template_id, "ask by this template")->type_name("ID");
    command->add_option("--var", arguments->variables, "a variable of the template (may be given again)")
        ->type_name("NAME=VALUE")
        ->allow_extra_args(false);
    command->add_option("--resume", arguments->resume, "go on with a stream behind this event; never causes a call")
        ->type_name("STREAM.NUMBER");
    command->add_option("--timeout", arguments->timeout, "longest wait for the whole answer (default 10min)")
        ->envname("GCOALESCE_TIMEOUT")
        ->type_name("DURATION");
    command->add_flag("--no-stream", arguments->no_stream, "ask for the whole answer at once");
    command->add_flag("--bypass", arguments->bypass, "a call of its own, shared with nobody");
    command->add_flag("--refresh", arguments->refresh,
                      "a new call, which later requests share in place of the present one");
    command->add_option("--max-age", arguments->max_age, "of a finished answer; 0s: only one that still runs")
        ->type_name("DURATION");
    command->add_flag("--no-store", arguments->no_store,
                      "if it causes a call, keep the answer neither for later requests nor on disk");
    command
        ->add_option("--subscribe-delay", arguments->subscribe_delay,
                     "ask at once, but begin to read only after this long")
        ->type_name("DURATION");
    command
        ->add_option("--explicit-key", arguments->explicit_key,
                     "what stands for the request in its key, where the template allows it")
        ->type_name("TEXT");
    command->add_option("--realm", arguments->realm, "whom to share with, where the template keeps realms apart")
        ->type_name("NAME");
    command->add_flag("--status", arguments->status, "say on standard error how it was served, when, and what it cost");
    command->add_flag("--events", arguments->events, "each event's JSON, untouched, one a line")->group("Output");
    command->add_flag("--sse", arguments->sse, "each event framed as Gemini frames it")->group("Output");
    command->add_flag("--json", arguments->json, "one object at the end; errors are objects too")->group("Output");
    command->add_flag("--raw", arguments->raw, "control characters as they are, on a terminal too")->group("Output");
    command->add_flag("--lines", arguments->lines, "each line of standard input is a prompt")->group("Many prompts");
    command->add_option("-j,--jobs", arguments->at_once, "with --lines: so many at a time (default 4)")
        ->check(CLI::Range(1u, 1000u))
        ->type_name("N")
        ->group("Many prompts");
    command->footer(kFooter);
    command->callback([arguments, &context] { run_ask(*arguments, context); });
}

} // namespace gcoalesce::cli
