// Sleeping on a word of shared memory, across processes.
//
// Never FUTEX_PRIVATE_FLAG and never std::atomic::wait: both stay within one process and silently never wake another.
// Waiting works on a read-only mapping.
#pragma once

#include <cerrno>
#include <climits>
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "segment/layout.hpp"

namespace gcoalesce {

// Returns when woken, when the word is not `seen`, on a signal, or after `slice` at most: the caller re-reads the
// world.
inline void futex_wait(const Shared<std::uint32_t>& word, std::uint32_t seen, Nanos slice) {
    const timespec limit{static_cast<std::time_t>(slice / kSecond), static_cast<long>(slice % kSecond)};
    ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

// Returns how many sleepers there were.
inline long futex_wake_all(const Shared<std::uint32_t>& word) {
    return ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

} // namespace gcoalesce
