// The demo's processes and directory; all of it goes with the object.
#pragma once

#include <stdexcept>
#include <string>
#include <sys/types.h>
#include <vector>

#include "base/clock.hpp"
#include "base/fd.hpp"
#include "segment/mapping.hpp"

namespace gcoalesce::cli::demo {

// SIGINT, SIGTERM or SIGHUP came. Until it is thrown they are held back.
struct Interrupted {
    int signal;
};

struct Client {
    pid_t pid = -1;
    UniqueFd out;        // what it writes
    std::string pending; // of that, not handed out yet
};

// Throws std::runtime_error where something cannot be started, ends before its time, or passes the watchdog, and
// Interrupted. One at a time in a process that has no thread but its main one.
class Stage {
  public:
    explicit Stage(Nanos watchdog);
    ~Stage();
    Stage(const Stage&) = delete;
    Stage& operator=(const Stage&) = delete;

    std::string start_sim(); // its URL
    void start_broker(const std::string& upstream, const std::string& ca_file);
    Client start_client(unsigned requests);
    void go(); // the clients ask
    std::string read_line(Client& client);

  private:
    Client start(std::vector<std::string> command);
    void stop_all();

    Instance instance_{"demo", ""}; // in a directory of ours
    Nanos deadline_;
    UniqueFd signals_, go_read_, go_write_;
    std::vector<pid_t> children_; // in the order of their starting
    pid_t broker_ = -1;
};

} // namespace gcoalesce::cli::demo
