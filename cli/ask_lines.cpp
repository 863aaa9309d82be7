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

// Standard input, cut into lines as it comes.
class Prompts {
  public:
    struct Prompt {
        std::uint64_t line;
        std::string text;
    };
    std::optional<Prompt> take() {
        while (!ended_ || !pending_.empty()) {
            const std::size_t end = pending_.find('\n', searched_);
            searched_ = pending_.size();
            if (end == std::string::npos && !ended_) return std::nullopt;
            Prompt prompt{++line_, pending_.substr(0, end)};
            pending_.erase(0, end == std::string::npos ? end : end + 1);
            searched_ = 0;
            if (prompt.text.ends_with('\r')) prompt.text.pop_back();
            if (prompt.text.find_first_not_of(" \t") != std::string::npos) return prompt;
        }
        return std::nullopt;
    }
    void read() {
        std::array<char, 65536> buffer{};
        const ssize_t got = ::read(STDIN_FILENO, buffer.data(), buffer.size());
        if (got > 0)
            pending_.append(buffer.data(), static_cast<std::size_t>(got));
        else if (got == 0)
            ended_ = true;
        else if (errno != EINTR && errno != EAGAIN)
            throw std::system_error(errno, std::generic_category(), "cannot read standard input");
    }
    bool ended() const { return ended_; }

  private:
    std::string pending_;
    std::size_t searched_ = 0;
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
    std::unique_ptr<Exchange> exchange;
    bool over = false;
};

class Lines {
  public:
    Lines(gcoalesce_attachment& attachment, const LinesOptions& options) : attachment_(attachment), options_(options) {}

    ExitCode run() {
        while (start(), !window_.empty() || !prompts_.ended()) {
            if (advance()) continue; // a finished one makes room for the next
            progress_.show(done_, failed_, done_ + window_.size(), prompts_.ended());
            wait();
        }
        progress_.erase();
        if (failed_ == 0) return ExitCode::ok;
        return failed_ == done_ ? first_failure_ : ExitCode::partial;
    }

  private:
    void start() {
        while (running_ < options_.at_once) {
            const std::optional<Prompts::Prompt> prompt = prompts_.take();
            if (!prompt) return;
            Running next{prompt->line, nullptr, false};
            if (Result<std::string> body = prompt_body(prompt->text, options_.system)) {
                Question question = options_.question;
                question.body = *std::move(body);
                next.exchange = std::make_unique<Exchange>(attachment_, question);
                ++running_;
            } else {
                next.over = true;
            }
            window_.push_back(std::move(next));
        }
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
        static const Error no_text{GCOALESCE_BAD_REQUEST, "the prompt is not valid UTF-8", 0};
        const Error* failure = one.exchange ? one.exchange->failure() ? &*one.exchange->failure() : nullptr : &no_text;
        if (failure != nullptr && failed_++ == 0)
            first_failure_ = one.exchange ? one.exchange->exit_code() : ExitCode::usage;
        if (options_.status && one.exchange)
            complain(fmt::format("line {}: {}", one.line, one.exchange->status_line()));
        if (options_.json) {
            nlohmann::ordered_json json{{"line", one.line}};
            if (one.exchange && (failure == nullptr || one.exchange->events() > 0))
                json.update(one.exchange->to_json());
            if (failure != nullptr) json["error"] = error_json(*failure);
            write_out(json_line(json));
        } else {
            write_out(one.exchange ? escape_line(one.exchange->text()) + "\n" : "\n");
            if (failure != nullptr) complain(fmt::format("line {}: {}", one.line, failure->message));
        }
    }

    // Until something comes from the broker, or, where there is room for it, a further prompt.
    void wait() {
        const bool wants_prompts = running_ < options_.at_once && !prompts_.ended();
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
