// A /dev/shm with little room, for one process and its children.
#pragma once

#include <cerrno>
#include <sched.h>
#include <sys/mount.h>
#include <system_error>

namespace gcoalesce::test {

// True: this process has a /dev/shm of its own, so large. False: it is not allowed to.
inline bool own_shm(const char* size) {
    if (::unshare(CLONE_NEWNS) != 0) return false;
    if (::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("tmpfs", "/dev/shm", "tmpfs", 0, size) != 0)
        throw std::system_error(errno, std::generic_category(), "mount");
    return true;
}

} // namespace gcoalesce::test
