#include "tests/support/terminal.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cwchar>
#include <poll.h>
#include <pty.h>
#include <stdexcept>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <system_error>
#include <unistd.h>

namespace gcoalesce::test {
namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void throw_errno(const char* what) {
    throw std::system_error(errno, std::generic_category(), what);
}

bool among_wide(const std::string& character) { // East Asian Wide, as far as tests use it
    return character.size() == 3 && static_cast<unsigned char>(character[0]) >= 0xE3;
}

} // namespace

Terminal::Terminal(std::vector<std::string> argv, unsigned short columns, unsigned short lines,
                   const std::vector<std::string>& env)
    : columns_(columns), lines_(lines), bottom_(lines_ - 1) {
    cells_.assign(lines_, std::vector<std::string>(columns_, " "));
    std::vector<std::string> variables = env; // of two settings of one name, the first counts
    variables.emplace_back("TERM=vt100");
    for (char** item = environ; *item != nullptr; ++item) {
        const std::string_view one(*item);
        if (!one.starts_with("TERM=") && !one.starts_with("COLUMNS=") && !one.starts_with("LINES="))
            variables.emplace_back(one);
    }
    const auto pointers = [](std::vector<std::string>& texts) {
        std::vector<char*> list;
        for (std::string& text : texts) list.push_back(text.data());
        list.push_back(nullptr);
        return list;
    };
    const std::vector<char*> arguments = pointers(argv), environment = pointers(variables);
    winsize size{lines, columns, 0, 0};
    int master = -1;
    pid_ = ::forkpty(&master, nullptr, nullptr, &size);
    if (pid_ < 0) throw_errno("forkpty");
    if (pid_ == 0) {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        ::execvpe(arguments[0], arguments.data(), environment.data());
        ::_exit(127);
    }
    master_ = UniqueFd(master);
}

Terminal::~Terminal() {
    if (code_ >= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
}

void Terminal::type(std::string_view keys) const {
    if (::write(master_.get(), keys.data(), keys.size()) != static_cast<ssize_t>(keys.size())) throw_errno("write");
}

void Terminal::resize(unsigned short columns, unsigned short lines) {
    columns_ = columns;
    lines_ = lines;
    for (auto& line : cells_) line.resize(columns, " ");
    cells_.resize(lines, std::vector<std::string>(columns, " "));
    x_ = std::min(x_, columns_ - 1);
    y_ = std::min(y_, lines_ - 1);
    top_ = 0;
    bottom_ = lines_ - 1;
    const winsize size{lines, columns, 0, 0};
    if (::ioctl(master_.get(), TIOCSWINSZ, &size) != 0) throw_errno("TIOCSWINSZ");
}

// One step; false once the program has closed the terminal.
bool Terminal::pump(Clock::time_point deadline) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) throw std::runtime_error("the terminal's program took too long; its screen:\n" + text());
    pollfd entry{master_.get(), POLLIN, 0};
    if (::poll(&entry, 1, static_cast<int>(left)) <= 0) return true;
    std::array<char, 65536> buffer{};
    const ssize_t got = ::read(master_.get(), buffer.data(), buffer.size());
    if (got <= 0) return got < 0 && errno == EINTR; // EIO: nobody has the other end open
    for (ssize_t i = 0; i < got; ++i) put(buffer[static_cast<std::size_t>(i)]);
    written_.append(buffer.data(), static_cast<std::size_t>(got));
    return true;
}

void Terminal::wait_for(std::string_view words, bool there, Seconds deadline) {
    const Clock::time_point until = Clock::now() + deadline;
    while ((text().find(words) != std::string::npos) != there) {
        if (!pump(until))
            throw std::runtime_error("the terminal's program ended before \"" + std::string(words) + "\":\n" + text());
    }
}

int Terminal::wait(Seconds deadline) {
    const Clock::time_point until = Clock::now() + deadline;
    while (pump(until)) {
    }
    int status = 0;
    if (::waitpid(pid_, &status, 0) != pid_) throw_errno("waitpid");
    code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return code_;
}

std::vector<std::string> Terminal::screen() const {
    std::vector<std::string> lines;
    for (const auto& cells : cells_) {
        std::string line;
        for (const std::string& cell : cells) line += cell;
        line.erase(line.find_last_not_of(' ') + 1);
        lines.push_back(std::move(line));
    }
    return lines;
}

std::string Terminal::text() const {
    std::string all;
    for (const std::string& line : screen()) all += line + "\n";
    return all;
}

void Terminal::put(char byte) {
    const auto code = static_cast<unsigned char>(byte);
    if (!sequence_.empty()) {
        sequence_ += byte;
        if (sequence_.size() == 2) {
            if (byte == '[' || byte == '(' || byte == ')') return;
            if (byte == 'M') reverse_index();
            sequence_.clear(); // ESC > and the like
        } else if (sequence_[1] != '[') {
            sequence_.clear(); // a character set
        } else if (code >= 0x40) {
            obey(byte);
            sequence_.clear();
        }
        return;
    }
    if (byte == '\x1b') {
        sequence_ = byte;
    } else if (byte == '\r') {
        x_ = 0;
    } else if (byte == '\b') {
        if (x_ > 0) --x_;
    } else if (byte == '\t') {
        x_ = std::min((x_ / 8 + 1) * 8, columns_ - 1);
    } else if (byte == '\n') {
        if (y_ == bottom_)
            scroll(top_, bottom_);
        else if (y_ + 1 < lines_)
            ++y_;
    } else if (code >= 0x20) {
        character_ += byte;
        const auto lead = static_cast<unsigned char>(character_[0]);
        const std::size_t whole = lead < 0x80 ? 1 : lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
        if (character_.size() == whole) print();
    }
}

void Terminal::reverse_index() {
    if (y_ == top_)
        scroll(bottom_, top_);
    else if (y_ > 0)
        --y_;
}

// One line goes, and an empty one comes.
void Terminal::scroll(std::size_t gone, std::size_t come) {
    cells_.erase(cells_.begin() + static_cast<std::ptrdiff_t>(gone));
    cells_.insert(cells_.begin() + static_cast<std::ptrdiff_t>(come), std::vector<std::string>(columns_, " "));
}

void Terminal::print() {
    const std::size_t width = among_wide(character_) ? 2 : 1;
    if (x_ + width > columns_) {
        put('\r');
        put('\n');
    }
    cells_[y_][x_] = character_;
    if (width == 2 && x_ + 1 < columns_) cells_[y_][x_ + 1] = "";
    x_ += width;
    character_.clear();
}

void Terminal::obey(char command) {
    std::array<std::size_t, 2> numbers{0, 0};
    std::size_t at = 0;
    for (const char c : sequence_.substr(2)) {
        if (c >= '0' && c <= '9')
            numbers[at] = numbers[at] * 10 + static_cast<std::size_t>(c - '0');
        else if (c == ';' && at == 0)
            ++at;
    }
    const std::size_t count = std::max<std::size_t>(numbers[0], 1);
    switch (command) {
    case 'H':
        y_ = std::min(count, lines_) - 1;
        x_ = std::min(std::max<std::size_t>(numbers[1], 1), columns_) - 1;
        break;
    case 'r': // margins
        top_ = std::min(count, lines_) - 1;
        bottom_ = (numbers[1] == 0 ? lines_ : std::min(numbers[1], lines_)) - 1;
        x_ = y_ = 0;
        break;
    case 'A': y_ -= std::min(y_, count); break;
    case 'B': y_ = std::min(y_ + count, lines_ - 1); break;
    case 'C': x_ = std::min(x_ + count, columns_ - 1); break;
    case 'D': x_ -= std::min(x_, count); break;
    case 'J':
        if (numbers[0] == 2) {
            cells_.assign(lines_, std::vector<std::string>(columns_, " "));
            break;
        }
        for (std::size_t y = y_ + 1; y < lines_; ++y) cells_[y].assign(columns_, " ");
        [[fallthrough]];
    case 'K': // to the line's end, or (1) from its beginning
        for (std::size_t x = numbers[0] == 1 ? 0 : x_; x < (numbers[0] == 1 ? x_ + 1 : columns_) && x < columns_; ++x)
            cells_[y_][x] = " ";
        break;
    default: break; // colours, modes
    }
}

} // namespace gcoalesce::test
