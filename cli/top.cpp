// gcoalesce top: a live view of rates, savings and the hottest keys.
#include <CLI/App.hpp>
#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <fmt/format.h>
#include <memory>
#define NCURSES_NOMACROS 1 // its macros are named like everything else
#include <ncurses.h>
#include <nlohmann/json.hpp>
#include <poll.h>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include "base/units.hpp"
#include "cli/commands.hpp"
#include "cli/inspect.hpp"
#include "cli/option_values.hpp"
#include "cli/render.hpp"
#include "cli/report.hpp"
#include "cli/view/escape.hpp"
#include "cli/view/terminal.hpp"
#include "cli/view/top_view.hpp"
#include "cli/view/utf8.hpp"

namespace gcoalesce::cli {
namespace {

constexpr const char* kFooter = R"(
Rates are those of the last --every; "calls avoided" are requests that cost no call.
Templates: the one whose upstream is slowest to the first event comes first; P50 and P99
since the broker's start. Keys: the one with most joins just now comes first.

On a terminal it goes on until q: f or / filters the keys, h or ? helps. Elsewhere, and
with --once, it prints one view. It reads the segment alone: no running broker is
needed, and none is disturbed; one that comes back is found again.)";

constexpr const char* kHelp[] = {
    "f, /    show only keys whose key, stream, template, state or model has what you type",
    "Enter   ends the typing, Escape drops the filter",
    "space   look now",
    "h, ?    this help",
    "q       ends it, as Ctrl-C does",
    "",
    "REQ/S    requests; CALLS/S: HTTP requests upstream, retries included",
    "AVOIDED  requests that cost no call; COALESCED: their share",
    "P50 P99  from an upstream call's start to its first event",
    "FIRST    the same of this stream",
};

struct Arguments {
    std::string every = "1s", filter;
    bool once = false, json = false;
};

constexpr std::array kEndings{SIGINT, SIGTERM, SIGHUP};
volatile std::sig_atomic_t ended_by = 0; // one of them

// The terminal, from newterm to endwin. Not copyable: there is one.
class Screen {
  public:
    Screen() {
        // Before ncurses looks: it leaves a handler that is not the default one alone.
        struct sigaction action {};
        action.sa_handler = [](int number) { ended_by = number; };
        for (std::size_t i = 0; i < kEndings.size(); ++i) ::sigaction(kEndings[i], &action, &old_[i]);
        screen_ = ::newterm(nullptr, stdout, stdin);
        if (screen_ == nullptr) return;
        ::cbreak();
        ::noecho();
        ::nodelay(stdscr, TRUE);
        ::keypad(stdscr, TRUE);
        ::set_escdelay(25);
        ::curs_set(0);
    }
    ~Screen() {
        if (screen_ != nullptr) {
            ::endwin();
            ::delscreen(screen_);
        }
        for (std::size_t i = 0; i < kEndings.size(); ++i) ::sigaction(kEndings[i], &old_[i], nullptr);
    }
    Screen(const Screen&) = delete;
    Screen& operator=(const Screen&) = delete;

    explicit operator bool() const { return screen_ != nullptr; }
    std::size_t columns() const { return static_cast<std::size_t>(COLS); }
    std::size_t lines() const { return static_cast<std::size_t>(LINES); }

    void paint(const std::vector<TopLine>& lines) {
        ::erase();
        for (std::size_t y = 0; y < lines.size() && y < this->lines(); ++y) {
            if (lines[y].heading) ::attron(A_BOLD);
            ::mvaddstr(static_cast<int>(y), 0, lines[y].text.c_str());
            if (lines[y].heading) ::attroff(A_BOLD);
        }
        ::refresh();
    }

    // The next key, waiting so long for it; ERR: none came.
    int key(Nanos wait) {
        pollfd input{STDIN_FILENO, POLLIN, 0};
        if (::poll(&input, 1, static_cast<int>(to_ms(std::max<Nanos>(wait, 0)))) > 0 && (input.revents & POLLIN) == 0)
            return 'q'; // the terminal is gone
        return ::getch();
    }

  private:
    SCREEN* screen_ = nullptr;
    std::array<struct sigaction, kEndings.size()> old_{};
};

class Top {
  public:
    Top(Context& context, Nanos every, std::string filter)
        : context_(context), every_(every), filter_(std::move(filter)) {}

    // Until somebody ends it. False: the terminal cannot do it.
    bool run() {
        if (!paint()) return false;
        if (ended_by == SIGINT) context_.exit = ExitCode::interrupted;
        if (ended_by == SIGTERM || ended_by == SIGHUP) std::raise(ended_by); // the terminal is as it was
        return true;
    }

  private:
    bool paint() {
        Screen screen;
        if (!screen) return false;
        Nanos due = 0;
        for (bool over = false; !over && ended_by == 0;) {
            if (const Nanos now = system_clock().monotonic(); now >= due) {
                look_again();
                due = now + every_;
            }
            screen.paint(lines(screen.columns(), screen.lines()));
            over = !take(screen.key(due - system_clock().monotonic()), due);
        }
        return true;
    }

    void look_again() {
        const Result<Inspection> inspected = look(context_);
        if (!inspected) {
            trouble_ = inspected.error().message;
            return;
        }
        trouble_ = inspected->broker.reachable ? "" : broker_line(inspected->broker);
        before_ = std::exchange(now_, take_sample(*inspected));
    }

    std::vector<TopLine> lines(std::size_t columns, std::size_t most) const {
        std::vector<TopLine> lines;
        const auto add = [&](const std::string& text) { lines.push_back({shortened(escape_line(text), columns)}); };
        if (typing_) add("filter: " + filter_ + "_");
        if (!trouble_.empty()) add(trouble_);
        if (help_) {
            for (const char* line : kHelp) add(line);
            return lines;
        }
        if (now_.epoch == 0) return lines;
        for (TopLine& line : top_lines(now_, before_, filter_, columns, most)) lines.push_back(std::move(line));
        return lines;
    }

    // False: that was the end of it.
    bool take(int key, Nanos& due) {
        if (typing_) {
            type(key);
            return true;
        }
        switch (key) {
        case 'q':
        case 'Q': return false;
        case 'f':
        case '/': typing_ = true; break;
        case 'h':
        case '?': help_ = !help_; break;
        case kEscape: filter_.clear(); break;
        case ' ': due = 0; break;
        default: break; // KEY_RESIZE among them: the next painting fits
        }
        return true;
    }

    void type(int key) {
        switch (key) {
        case ERR:
        case KEY_RESIZE: return;
        case '\n':
        case '\r':
        case KEY_ENTER: typing_ = false; return;
        case kEscape:
            typing_ = false;
            filter_.clear();
            return;
        case KEY_BACKSPACE:
        case '\b':
        case 0x7F:
            while (!filter_.empty() && (static_cast<unsigned char>(filter_.back()) & 0xC0) == 0x80) filter_.pop_back();
            if (!filter_.empty()) filter_.pop_back();
            return;
        default:
            if (key >= 0x20 && key < 0x100) filter_ += static_cast<char>(key); // bytes of UTF-8 come one by one
        }
    }

    static constexpr int kEscape = 0x1B;

    Context& context_;
    const Nanos every_;
    std::string filter_, trouble_;
    TopSample now_, before_;
    bool typing_ = false, help_ = false;
};

void print_once(Context& context, const Arguments& arguments, Nanos every) {
    const std::optional<Inspection> first = inspect(context, arguments.json);
    if (!first) return;
    const TopSample before = take_sample(*first);
    if (first->broker.reachable) std::this_thread::sleep_for(std::chrono::nanoseconds(every));
    const TopSample now = take_sample(*first);
    if (arguments.json) return write_out(json_line(top_json(now, before, arguments.filter)));
    std::string text;
    for (const TopLine& line : top_lines(now, before, arguments.filter, output_columns(), 0)) text += line.text + "\n";
    write_out(text);
}

void run_top(Context& context, const Arguments& arguments) {
    const Nanos every = duration_of("--every", arguments.every);
    if (every < 10 * kMillisecond || every > 3600 * kSecond)
        throw CLI::ValidationError("--every", "expected 10ms to 1h, found " + arguments.every);
    const bool live = !arguments.once && !arguments.json && is_terminal(0) && is_terminal(1);
    if (!live) return print_once(context, arguments, every);
    if (Top(context, every, arguments.filter).run()) return;
    const char* terminal = std::getenv("TERM");
    report(context,
           Error{GCOALESCE_IO,
                 fmt::format("cannot paint on a terminal of type \"{}\": set TERM, or use --once",
                             terminal != nullptr ? terminal : ""),
                 0},
           false);
}

} // namespace

void add_top(CLI::App& app, Context& context) {
    CLI::App* command = app.add_subcommand("top", "a live view of rates, savings and the hottest keys");
    auto arguments = std::make_shared<Arguments>();
    command->add_option("--every", arguments->every, "how often it looks (default 1s)")->type_name("DURATION");
    command->add_option("--filter", arguments->filter, "only keys whose key, stream, template, state or model has this")
        ->type_name("TEXT");
    command->add_flag("-1,--once", arguments->once, "one view, on a terminal too");
    command->add_flag("--json", arguments->json, "one JSON object");
    command->footer(kFooter);
    command->callback([arguments, &context] { run_top(context, *arguments); });
}

} // namespace gcoalesce::cli
