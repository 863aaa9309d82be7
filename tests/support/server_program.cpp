#include "tests/support/server_program.hpp"

#include <arpa/inet.h>
#include <chrono>
#include <cstdlib>
#include <netinet/in.h>
#include <stdexcept>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>

#include "base/fd.hpp"

namespace gcoalesce::test {
namespace {

sockaddr_in loopback(std::uint16_t port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

bool connects(std::uint16_t port) {
    const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const sockaddr_in address = loopback(port);
    return ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
}

} // namespace

std::string find_program(const std::string& name) {
    const char* path = std::getenv("PATH");
    std::string folders = std::string(path != nullptr ? path : "") + ":/usr/sbin:/usr/local/sbin:";
    for (std::size_t at = 0, end; (end = folders.find(':', at)) != std::string::npos; at = end + 1) {
        const std::string candidate = folders.substr(at, end - at) + "/" + name;
        if (::access(candidate.c_str(), X_OK) == 0) return candidate;
    }
    return "";
}

std::uint16_t free_port() {
    const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address = loopback(0);
    socklen_t size = sizeof address;
    if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
        ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0)
        throw std::runtime_error("no free port");
    return ntohs(address.sin_port);
}

void wait_for_listener(std::uint16_t port, const std::string& name) {
    const auto watchdog = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!connects(port)) {
        if (std::chrono::steady_clock::now() > watchdog) throw std::runtime_error(name + " does not start to listen");
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
}

} // namespace gcoalesce::test
