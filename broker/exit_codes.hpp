// gcoalesced's exit status (gcoalesced(8), EXIT STATUS).
#pragma once

namespace gcoalesce {

enum BrokerExit : int {
    exit_ok = 0,
    exit_failure = 1,
    exit_usage = 2,
    exit_already_running = 10, // another broker serves this instance; nothing was touched
    exit_no_memory = 11        // /dev/shm has too little room
};

} // namespace gcoalesce
