// What `doctor` finds.
#pragma once

#include <string>
#include <sys/types.h>

#include "cli/exit_codes.hpp"

namespace gcoalesce::cli {

struct Finding {
    enum class Result { ok, note, warning, failure } result = Result::ok;
    std::string check;                // "socket"
    std::string found;                // what is the case
    std::string advice;               // what to do; "": nothing
    ExitCode exit = ExitCode::failed; // of a failure
};

// Whether this process may use a broker whose files belong to `owner` and `group`.
struct Membership {
    uid_t user = 0, owner = 0;
    std::string user_name, group_name;
    bool in_process = false;  // the process has the group
    bool in_database = false; // the user is its member, as whoever logs in now would be
};
Finding judge(const Membership& membership);

} // namespace gcoalesce::cli
