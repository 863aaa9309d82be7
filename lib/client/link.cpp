#include "client/link.hpp"

#include <array>
#include <cerrno>
#include <cstring>
#include <sys/socket.h>

namespace gcoalesce {
namespace {

constexpr std::size_t kReadAtOnce = 64 * 1024;
constexpr std::size_t kKeep = 1024 * 1024; // bytes of a buffer that are not worth giving back

} // namespace

void Link::flush() {
    while (sent_ < out_.size()) {
        const ssize_t sent =
            ::send(socket_.get(), out_.data() + sent_, out_.size() - sent_, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent > 0) {
            sent_ += static_cast<std::size_t>(sent);
        } else if (sent < 0 && errno == EAGAIN) {
            if (sent_ >= kKeep && sent_ >= out_.size() / 2) { // by halves: the cost stays linear
                out_.erase(0, sent_);
                sent_ = 0;
            }
            return;
        } else if (sent < 0 && errno != EINTR) {
            ::shutdown(socket_.get(), SHUT_RDWR); // whatever it was, receive() tells it as the end
            break;
        }
    }
    if (out_.capacity() > kKeep) out_ = std::string(); // a large body went out
    out_.clear();
    sent_ = 0;
}

bool Link::receive(std::vector<UniqueFd>* descriptors) {
    std::array<char, kReadAtOnce> bytes;
    // Room for one more than a welcome carries: the kernel closes what does not fit, and we see that it is too many.
    alignas(cmsghdr) std::array<char, CMSG_SPACE((kWelcomeDescriptors + 1) * sizeof(int))> control;
    iovec vector{bytes.data(), bytes.size()};
    msghdr header{};
    header.msg_iov = &vector;
    header.msg_iovlen = 1;
    if (descriptors != nullptr) { // without room the kernel closes whatever comes
        header.msg_control = control.data();
        header.msg_controllen = control.size();
    }
    ssize_t got = 0;
    do {
        got = ::recvmsg(socket_.get(), &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    } while (got < 0 && errno == EINTR);
    if (got < 0) return errno == EAGAIN;
    if (descriptors != nullptr) {
        for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr; part = CMSG_NXTHDR(&header, part)) {
            if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
            const std::size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            for (std::size_t i = 0; i < count; ++i) {
                int fd = -1;
                std::memcpy(&fd, CMSG_DATA(part) + i * sizeof fd, sizeof fd);
                descriptors->emplace_back(fd);
            }
        }
    }
    if (got == 0) return false;
    in_.feed({bytes.data(), static_cast<std::size_t>(got)});
    return true;
}

Result<bool> Link::next(Message& message) {
    std::string_view frame;
    const Result<bool> found = in_.next(frame);
    if (!found || !*found) return found;
    Result<Message> decoded = decode(frame);
    if (!decoded) return tl::unexpected(decoded.error());
    message = std::move(*decoded);
    return true;
}

} // namespace gcoalesce
