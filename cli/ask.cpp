// gcoalesce ask: one request, its answer as it comes.
#include <CLI/App.hpp>
#include <CLI/Validators.hpp>
#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <csignal>
#include <fmt/format.h>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <poll.h>
#include <unistd.h>

#include "base/arguments.hpp"
#include "base/ids.hpp"
#include "base/units.hpp"
#include "cli/ask_lines.hpp"
#include "cli/commands.hpp"
#include "cli/exchange.hpp"
#include "cli/option_values.hpp"
#include "cli/render.hpp"
#include "cli/report.hpp"
#include "cli/request_options.hpp"
#include "cli/view/terminal.hpp"

namespace gcoalesce::cli {
namespace {

constexpr Nanos kSlice = kSecond;
constexpr Nanos kFirstSlice = 100 * kMillisecond; // until it is known which stream it is

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
    RequestOptions request;
    std::string resume;
    std::string timeout = "10min", max_age, subscribe_delay;
    bool no_store = false;
    bool events = false, sse = false, json = false, raw = false;
    bool bypass = false, refresh = false;
    bool status = false, lines = false;
    unsigned at_once = 4;
};

void check_combination(const Arguments& arguments) {
    const RequestOptions& request = arguments.request;
    check_combination(request);
    if (!arguments.resume.empty() && (request.asks() || arguments.lines))
        throw CLI::ValidationError("--resume", "names the stream: expected nothing to ask beside it");
    if (arguments.lines && !request.explicit_key.empty())
        throw CLI::ValidationError("--explicit-key", "would give all lines the same answer");
    if (arguments.events + arguments.sse + arguments.json > 1)
        throw CLI::ValidationError("--events, --sse, --json", "expected one of them");
    if (arguments.bypass && arguments.refresh)
        throw CLI::ValidationError("--bypass, --refresh", "expected one of them");
    if (arguments.lines && (request.prompted() || !request.body_file.empty() || !request.template_id.empty()))
        throw CLI::ValidationError("--lines", "takes its prompts from standard input alone");
    if (arguments.lines && (arguments.events || arguments.sse))
        throw CLI::ValidationError("--lines", "prints text, or with --json objects");
    if (arguments.lines && is_terminal(STDIN_FILENO))
        throw CLI::ValidationError("--lines", "expected standard input to be a file or a pipe");
}

// What Ctrl-C says on standard error before it ends the program: how to go on with the answer. There is one at a time,
// and one thread.
class ResumeHint {
  public:
    explicit ResumeHint(bool wanted) : wanted_(wanted) {
        if (!wanted_) return;
        struct sigaction action {
        }, old{};
        action.sa_handler = say_it;
        ::sigaction(SIGINT, &action, &old);
        if (old.sa_handler == SIG_IGN) ::sigaction(SIGINT, &old, nullptr); // nohup(1) and the like
    }
    ~ResumeHint() {
        current.store(nullptr);
        if (wanted_) std::signal(SIGINT, SIG_DFL);
    }
    ResumeHint(const ResumeHint&) = delete;
    ResumeHint& operator=(const ResumeHint&) = delete;

    void set(const std::string& event_id, bool within_line) {
        if (!wanted_ || event_id.empty()) return;
        // Written while the other one is in force: the signal may come at any moment.
        Words& words = both[current.load() == &both[0] ? 1 : 0];
        const auto end = fmt::format_to_n(words.text.data(), words.text.size(),
                                          "{}gcoalesce: interrupted; `gcoalesce ask --resume {}` goes on with it\n",
                                          within_line ? "\n" : "", event_id);
        words.bytes = std::min(end.size, words.text.size());
        current.store(&words);
    }

  private:
    struct Words {
        std::array<char, 128> text;
        std::size_t bytes;
    };
    static inline std::array<Words, 2> both{};
    static inline std::atomic<const Words*> current{nullptr};
    static_assert(std::atomic<const Words*>::is_always_lock_free);

    static void say_it(int number) {
        if (const Words* words = current.load(); words != nullptr) [[maybe_unused]]
            const ssize_t written = ::write(STDERR_FILENO, words->text.data(), words->bytes);
        std::signal(number, SIG_DFL);
        ::raise(number); // ends us when this handler returns
    }

    bool wanted_;
};

// Prints what comes, then what is to say of it.
ExitCode print_answer(Exchange& exchange, const Arguments& arguments, bool status) {
    const bool terminal = is_terminal(STDOUT_FILENO);
    const Form form = arguments.events ? Form::lines : arguments.sse ? Form::sse : Form::text;
    char last = '\n';
    std::size_t printed = 0; // of the text
    std::optional<ResumeHint> hint(std::in_place, status || is_terminal(STDERR_FILENO));
    for (std::string id;; id = exchange.last_event_id()) {
        hint->set(id, terminal && last != '\n');
        std::string_view event;
        const Nanos slice = id.empty() ? kFirstSlice : kSlice;
        const Exchange::Step step = exchange.next(system_clock().monotonic() + slice, event);
        if (step == Exchange::Step::over) break;
        if (step == Exchange::Step::nothing || arguments.json) continue;
        std::string out = form == Form::text ? exchange.text().substr(printed) : render(form, event);
        printed = exchange.text().size();
        if (terminal && !arguments.raw) out = for_terminal(form, out);
        if (out.empty()) continue;
        write_out(out);
        last = out.back();
    }
    hint.reset(); // nothing is left to go on with
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
    Question question = question_of(arguments.request);
    question.resume = arguments.resume;
    question.no_store = arguments.no_store;
    if (!arguments.max_age.empty()) {
        const Nanos age = duration_of("--max-age", arguments.max_age);
        question.max_age_ms = age == 0 ? -1 : std::max<std::int64_t>(to_ms(age), 1);
    }
    question.sharing = arguments.bypass    ? GCOALESCE_SHARE_NOT
                       : arguments.refresh ? GCOALESCE_SHARE_REFRESH
                                           : GCOALESCE_SHARE;
    question.timeout = duration_of("--timeout", arguments.timeout);
    const Nanos delay =
        arguments.subscribe_delay.empty() ? 0 : duration_of("--subscribe-delay", arguments.subscribe_delay);
    if (!arguments.resume.empty()) {
        question.model.clear();
        if (!parse_event_id(arguments.resume))
            throw CLI::ValidationError("--resume", "expected an event's id such as 9f3c2a71d04b55e8.17");
    } else if (!arguments.lines) {
        question.body = body_of(arguments.request);
    }

    const Result<AttachmentPtr> attachment = attach(context);
    if (!attachment) {
        report(context, attachment.error(), arguments.json);
        return;
    }
    const bool status = arguments.status || context.verbose;
    if (arguments.lines) {
        context.exit = ask_lines(
            **attachment, {std::move(question), arguments.request.system, arguments.at_once, arguments.json, status});
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
    add_request_options(*command, arguments->request);
    command->add_option("--resume", arguments->resume, "go on with a stream behind this event; never causes a call")
        ->check(complaint_of_nothing)
        ->type_name("STREAM.NUMBER");
    command->add_option("--timeout", arguments->timeout, "longest wait for the whole answer (default 10min)")
        ->envname("GCOALESCE_TIMEOUT")
        ->type_name("DURATION");
    command->add_flag("--bypass", arguments->bypass, "a call of its own, shared with nobody");
    command->add_flag("--refresh", arguments->refresh,
                      "a new call, which later requests share in place of the present one");
    command->add_option("--max-age", arguments->max_age, "of a finished answer; 0s: only one that still runs")
        ->check(complaint_of_nothing)
        ->type_name("DURATION");
    command->add_flag("--no-store", arguments->no_store,
                      "if it causes a call, keep the answer neither for later requests nor on disk");
    command
        ->add_option("--subscribe-delay", arguments->subscribe_delay,
                     "ask at once, but begin to read only after this long")
        ->check(complaint_of_nothing)
        ->type_name("DURATION");
    command->add_flag("--status", arguments->status, "say on standard error how it was served, when, and what it cost");
    command->add_flag("--events", arguments->events, "each event's JSON, untouched, one a line")->group("Output");
    command->add_flag("--sse", arguments->sse, "each event framed as Gemini frames it")->group("Output");
    command->add_flag("--json", arguments->json, "one object at the end; errors are objects too")->group("Output");
    command->add_flag("--raw", arguments->raw, "control characters as they are, on a terminal too")->group("Output");
    command->add_flag("--lines", arguments->lines, "each line of standard input is a prompt")->group("Many prompts");
    command->add_option("-j,--jobs", arguments->at_once, "with --lines: so many at a time (default 4)")
        ->check(complaint_of_number)
        ->check(CLI::Range(1u, 1000u))
        ->type_name("N")
        ->group("Many prompts");
    command->footer(kFooter);
    command->callback([arguments, &context] { run_ask(*arguments, context); });
}

} // namespace gcoalesce::cli
