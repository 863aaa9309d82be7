// A program under test, as a child process.
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <sys/types.h>
#include <vector>

#include "base/fd.hpp"

namespace gcoalesce::test {

struct SpawnOptions {
    std::vector<std::string> env; // "NAME=value", on top of this process's environment
    std::string input;            // its standard input, whole
};

// Starts in the constructor, is killed and reaped in the destructor, and dies with the thread that started it. Its
// outputs are read while one of the waiting calls runs; a child that fills its standard output meanwhile waits for
// that, one that logs to its standard error never does. Every deadline is a watchdog: passing it throws. Not
// thread-safe.
class Process {
  public:
    using Seconds = std::chrono::seconds;

    // argv[0]: a path, or a name to be looked up in PATH. Throws where it cannot be started.
    explicit Process(std::vector<std::string> argv, SpawnOptions options = {});
    ~Process();
    Process(const Process&) = delete;
    Process& operator=(const Process&) = delete;

    pid_t pid() const { return pid_; } // also after its end
    void signal(int number) const;

    // The next line of its standard output, without the LF. Throws where the output ends before one is whole.
    std::string read_line(Seconds deadline = Seconds(30));

    // Waits until its standard error has these words. Throws where it ends before.
    void wait_for_err(std::string_view words, Seconds deadline = Seconds(30));

    // Waits for its end, however much it writes. Its exit code, or 128 + the number of the signal that killed it.
    int wait(Seconds deadline = Seconds(60));

    const std::string& out() const { return out_; } // all of its standard output that has been read, lines included
    const std::string& err() const { return err_; } // the same of standard error

  private:
    bool pump(std::chrono::steady_clock::time_point deadline, std::chrono::milliseconds step = std::chrono::minutes(1));
    std::string describe() const;

    std::string name_, input_, out_, err_;
    std::size_t lines_end_ = 0; // what read_line has handed out of out_
    pid_t pid_ = -1;
    int code_ = -1; // -1: runs
    UniqueFd pidfd_, in_fd_, out_fd_, err_fd_;
};

} // namespace gcoalesce::test
