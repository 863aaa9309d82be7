// A program on a terminal of the test's own, and what stands on its screen.
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <sys/types.h>
#include <vector>

#include "base/fd.hpp"

namespace gcoalesce::test {

// The program's standard input, output and error are one pseudo-terminal, of the vt100 kind. It is killed and reaped by
// the destructor. Every deadline is a watchdog: passing it throws. Not thread-safe.
class Terminal {
  public:
    using Seconds = std::chrono::seconds;

    // argv[0]: a path. env: "NAME=value".
    Terminal(std::vector<std::string> argv, unsigned short columns, unsigned short lines,
             const std::vector<std::string>& env = {});
    ~Terminal();
    Terminal(const Terminal&) = delete;
    Terminal& operator=(const Terminal&) = delete;

    void type(std::string_view keys) const;
    void resize(unsigned short columns, unsigned short lines);

    // Waits until these words stand on the screen, or no longer do. Throws where the program ends before.
    void wait_for(std::string_view words, bool there = true, Seconds deadline = Seconds(30));

    // Its lines from the top, without blanks at their ends.
    std::vector<std::string> screen() const;
    const std::string& written() const { return written_; } // every byte so far

    // Waits for its end. Its exit code, or 128 + the number of the signal that killed it.
    int wait(Seconds deadline = Seconds(60));

  private:
    bool pump(std::chrono::steady_clock::time_point deadline);
    void put(char byte);
    void obey(char command);
    void print();
    void reverse_index();
    void scroll(std::size_t gone, std::size_t come);
    std::string text() const;

    UniqueFd master_;
    pid_t pid_ = -1;
    int code_ = -1; // -1: runs
    std::string written_;

    // Of the emulation: what ncurses and our own commands send to a vt100.
    std::vector<std::vector<std::string>> cells_; // lines of columns; the right half of a wide character is ""
    std::size_t columns_, lines_, x_ = 0, y_ = 0;
    std::size_t top_ = 0, bottom_; // the lines between which it scrolls
    std::string sequence_;         // of an escape sequence under way
    std::string character_;        // of a UTF-8 character under way
};

} // namespace gcoalesce::test
