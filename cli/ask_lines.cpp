#include "cli/ask_lines.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <deque>
#include <nlohmann/json.hpp>
#include <optional>
#include <poll.h>
#include <system_error>
#include <unistd.h>

#include "cli/render.hpp"
#include "cli/report.hpp"
#include "cli/view/escape.hpp"
#include "cli/view/terminal.hpp"

namespace gcoalesce::cli {
namespace {

constexpr Nanos kSlice = 250 * kMillisecond;
constexpr std::size_t kReadAhead = 10'000; // prompts: so that progress has something to measure itself by

// Standard input, cut into lines as it comes.
class Prompts {
  public:
    struct Prompt {
        std::uint64_t line;
        std::string text;
    };

    // Call when standard input is readable.
    void read() {
        std::array<char, 65536> buffer{};
        const ssize_t got = ::read(STDIN_FILENO, buffer.data(), buffer.size());
        if (got < 0) {
            if (errno == EINTR || errno == EAGAIN) return;
            throw std::system_error(errno, std::generic_category(), "cannot read standard input");
        }
        std::string_view bytes(buffer.data(), static_cast<std::size_t>(got));
        for (std::size_t end; (end = bytes.find('\n')) != std::string_view::npos; bytes.remove_prefix(end + 1)) {
            unfinished_ += bytes.substr(0, end);
            end_line();
        }
        unfinished_ += bytes;
        ended_ = got == 0;
        if (ended_) end_line();
    }

    bool ended() const { return ended_; }
    bool enough() const { return waiting_.size() >= kReadAhead; }
    std::size_t waiting() const { return waiting_.size(); }

    Prompt take() {
        Prompt prompt = std::move(waiting_.front());
        waiting_.pop_front();
        return prompt;
    }

  private:
    void end_line() {
        ++line_;
        if (unfinished_.ends_with('\r')) unfinished_.pop_back();
        if (unfinished_.find_first_not_of(" \t") != std::string::npos)
            waiting_.push_back({line_, std::move(unfinished_)});
        unfinished_.clear();
    }

    std::deque<Prompt> waiting_;
    std::string unfinished_;
    bool ended_ = false;
    std::uint64_t line_ = 0;
};

// One line on standard error, if a person sees it there.
class Progress {
  public:
    void show(std::size_t done, std::size_t failed, std::size_t known, bool all_known) {
        if (known == 0 || !is_terminal(STDERR_FILENO)) return;
        constexpr std::size_t width = 30;
        const std::size_t filled = done * width / known;
        std::string bar(filled, '#');
        bar.resize(width, '.');
        write_err(fmt::format("\r\x1b[K[{}] {} of {}{}{}", bar, done, known, all_known ? "" : "+",
                              failed == 0 ? "" : fmt::format(", {} failed", failed)));
        shown_ = true;
    }
    void erase() {
        if (shown_) write_err("\r\x1b[K");
        shown_ = false;
    }

  private:
    bool shown_ = false;
};

struct Running {
    std::uint64_t line;
    std::unique_ptr<Exchange> exchange; // null: it was not even asked
    bool over = false;
    std::optional<Error> refused = {};
};

class Lines {
  public:
    Lines(gcoalesce_attachment& attachment, const LinesOptions& options) : attachment_(attachment), options_(options) {}

    ExitCode run() {
        for (;;) {
            while (running_ < options_.at_once && prompts_.waiting() > 0) start(prompts_.take());
            if (window_.empty() && prompts_.ended()) break;
            if (advance()) continue; // a finished one makes room for the next
            progress_.show(done_, failed_, done_ + window_.size() + prompts_.waiting(), prompts_.ended());
            wait();
        }
        progress_.erase();
        if (failed_ == 0) return ExitCode::ok;
        return failed_ == done_ ? first_failure_ : ExitCode::partial;
    }

  private:
    void start(const Prompts::Prompt& prompt) {
        Running next{prompt.line, nullptr};
        if (Result<std::string> body = prompt_body(prompt.text, options_.system)) {
            Question question = options_.question;
            question.body = *std::move(body);
            next.exchange = std::make_unique<Exchange>(attachment_, question);
            ++running_;
        } else {
            next.refused = std::move(body).error();
            next.over = true;
        }
        window_.push_back(std::move(next));
    }

    // Takes what has come. True: something is over.
    bool advance() {
        bool any = false;
        for (Running& one : window_) {
            if (one.over) continue;
            std::string_view event;
            Exchange::Step step = Exchange::Step::event;
            while (step == Exchange::Step::event) step = one.exchange->next(0, event);
            if (step == Exchange::Step::over) {
                one.over = any = true;
                --running_;
            }
        }
        while (!window_.empty() && window_.front().over) {
            print(window_.front());
            window_.pop_front();
            any = true;
        }
        return any;
    }

    void print(const Running& one) {
        progress_.erase();
        ++done_;
        const std::optional<Error>& failure = one.exchange ? one.exchange->failure() : one.refused;
        if (failure && failed_++ == 0)
            first_failure_ = one.exchange ? one.exchange->exit_code() : exit_code_of(failure->code);
        if (options_.json) {
            nlohmann::ordered_json json{{"line", one.line}};
            if (one.exchange && (!failure || one.exchange->events() > 0)) json.update(one.exchange->to_json());
            if (failure) json["error"] = error_json(*failure);
            write_out(json_line(json));
        } else {
            write_out(one.exchange ? escape_line(one.exchange->text()) + "\n" : "\n");
            if (failure) complain(fmt::format("line {}: {}", one.line, failure->message));
        }
        if (options_.status && one.exchange)
            complain(fmt::format("line {}: {}", one.line, one.exchange->status_line()));
    }

    // Until something comes, from the broker or on standard input.
    void wait() {
        const bool wants_prompts = !prompts_.ended() && !prompts_.enough();
        std::array<pollfd, 2> fds{
            {{gcoalesce_fd(&attachment_), POLLIN, 0}, {wants_prompts ? STDIN_FILENO : -1, POLLIN, 0}}};
        ::poll(fds.data(), fds.size(), static_cast<int>(to_ms(kSlice)));
        if (fds[0].revents != 0) gcoalesce_dispatch(&attachment_);
        if (fds[1].revents != 0) prompts_.read();
    }

    gcoalesce_attachment& attachment_;
    const LinesOptions& options_;
    Prompts prompts_;
    Progress progress_;
    std::deque<Running> window_; // asked and not printed yet, in the order of their lines
    std::size_t running_ = 0, done_ = 0, failed_ = 0;
    ExitCode first_failure_ = ExitCode::ok;
};

} // namespace

ExitCode ask_lines(gcoalesce_attachment& attachment, const LinesOptions& options) {
    return Lines(attachment, options).run();
}

} // namespace gcoalesce::cli
