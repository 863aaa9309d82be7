// A file whose kernel-held lock says which of several brokers something belongs to.
#pragma once

#include <string>

#include "base/error.hpp"
#include "base/fd.hpp"

namespace gcoalesce {

struct LockFile {
    UniqueFd fd;        // ours as long as it is open; empty: another process has it
    std::string holder; // the pid of that process, "?" where it cannot be known
};

// Makes the file with this mode where it is absent, takes its lock and writes our pid into it. Waits half a second at
// most for the pid of a holder that has just taken it. It is never unlinked, so that two processes cannot hold locks on
// two files of one name. GCOALESCE_IO: the file cannot be opened or written.
Result<LockFile> take_lock_file(const std::string& path, unsigned mode);

} // namespace gcoalesce
