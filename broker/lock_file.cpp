#include "broker/lock_file.hpp"

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include "segment/mapping.hpp"

namespace gcoalesce {
namespace {

// Its pid is in the file a moment after it took the lock; until then that of a dead one may be.
std::string holder_of(int lock) {
    std::string holder;
    for (int tries = 0; tries < 50; ++tries) {
        char text[24] = {};
        holder = ::pread(lock, text, sizeof text - 1, 0) > 0 ? std::string(text, std::strcspn(text, "\n")) : "";
        const int pid = std::atoi(holder.c_str());
        if (pid > 0 && (::kill(pid, 0) == 0 || errno == EPERM)) break;
        ::poll(nullptr, 0, 10);
    }
    return holder.empty() ? "?" : holder; // one that cannot be seen lives in another pid namespace
}

} // namespace

Result<LockFile> take_lock_file(const std::string& path, unsigned mode) {
    UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, mode));
    if (!fd) return fail_errno(GCOALESCE_IO, "cannot open " + path);
    if (!take_broker_lock(fd.get())) return LockFile{UniqueFd(), holder_of(fd.get())};
    const std::string pid = fmt::format("{}\n", ::getpid());
    if (::ftruncate(fd.get(), 0) != 0 || ::pwrite(fd.get(), pid.data(), pid.size(), 0) < 0)
        return fail_errno(GCOALESCE_IO, "cannot write " + path);
    return LockFile{std::move(fd), {}};
}

} // namespace gcoalesce
