// gcoalesce serve as its clients see it.
#pragma once

#include <arpa/inet.h>
#include <array>
#include <fstream>
#include <poll.h>
#include <stdexcept>
#include <string>
#include <sys/inotify.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <thread>
#include <vector>

#include "base/fd.hpp"
#include "tests/integration/cli_support.hpp"
#include "tests/support/http.hpp"

namespace gcoalesce::test {

const std::string kModelPath = "/v1beta/models/gemini-2.5-flash";
const std::string kSse = kModelPath + ":streamGenerateContent?alt=sse";
const std::string kArray = kModelPath + ":streamGenerateContent";
const std::string kUnary = kModelPath + ":generateContent";
const std::string kChat = "/v1beta/openai/chat/completions";
const std::string kCreate = "/v1/streams?model=gemini-2.5-flash";

// A request body of the OpenAI form whose only message is the user's.
inline std::string chat_body(const std::string& prompt, bool stream = false) {
    return nlohmann::json{{"model", "gemini-2.5-flash"},
                          {"messages", nlohmann::json::array({{{"role", "user"}, {"content", prompt}}})},
                          {"stream", stream}}
        .dump();
}

// Counts how often a file is opened, from now on.
class Opens {
  public:
    explicit Opens(const std::string& path) : fd_(::inotify_init1(IN_CLOEXEC | IN_NONBLOCK)) {
        if (::inotify_add_watch(fd_.get(), path.c_str(), IN_OPEN) < 0) throw std::runtime_error("cannot watch " + path);
    }
    std::int64_t count() {
        // Equal events that nobody has read yet become one: whoever wants the number asks often.
        alignas(inotify_event) std::array<char, 16384> bytes;
        for (ssize_t got; (got = ::read(fd_.get(), bytes.data(), bytes.size())) > 0;)
            seen_ += got / static_cast<ssize_t>(sizeof(inotify_event));
        return seen_;
    }

  private:
    UniqueFd fd_;
    std::int64_t seen_ = 0;
};

// `gcoalesce serve` as a child process, on a free port of 127.0.0.1 unless told otherwise.
class Gateway {
  public:
    explicit Gateway(std::vector<std::string> command) : process_(with_port(std::move(command))) {
        constexpr std::string_view words = "listening on ";
        const std::string line = process_.read_line();
        if (!line.starts_with(words)) throw std::runtime_error("the gateway does not listen: " + line);
        url_ = line.substr(words.size());
    }
    explicit Gateway(const World& world, std::vector<std::string> arguments = {})
        : Gateway(world.command(with_serve(std::move(arguments)))) {}

    const std::string& url() const { return url_; }
    std::uint16_t port() const { return static_cast<std::uint16_t>(std::stoi(url_.substr(url_.rfind(':') + 1))); }
    Process& process() { return process_; }

    HttpResponse post(const std::string& path, const std::string& body,
                      const std::vector<std::string>& headers = {}) const {
        return http(url_ + path, body, headers);
    }
    HttpResponse get(const std::string& path, const std::vector<std::string>& headers = {}) const {
        return http(url_ + path, {}, headers);
    }
    // Until the gateway is attached.
    void wait_until_ready() const {
        if (!eventually([&] { return get("/readyz").status == 200; })) throw std::runtime_error("it is never ready");
    }

  private:
    static std::vector<std::string> with_serve(std::vector<std::string> arguments) {
        arguments.insert(arguments.begin(), "serve");
        return arguments;
    }
    static std::vector<std::string> with_port(std::vector<std::string> command) {
        if (std::ranges::find(command, "--listen") == command.end())
            command.insert(command.end(), {"--listen", "127.0.0.1:0"});
        return command;
    }

    Process process_;
    std::string url_;
};

// The value of a response's field; "": it has none.
inline std::string field(const HttpResponse& response, std::string name) {
    const auto lower = [](std::string text) {
        std::ranges::transform(text, text.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
        return text;
    };
    name = "\r\n" + lower(std::move(name)) + ": ";
    const std::string head = lower(response.head);
    const std::size_t at = head.find(name);
    if (at == std::string::npos) return {};
    const std::size_t begin = at + name.size();
    return response.head.substr(begin, response.head.find("\r\n", begin) - begin);
}

// A process's own memory that is in RAM, without what it shares.
inline std::uint64_t private_bytes(pid_t pid) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/smaps_rollup");
    std::uint64_t kib = 0;
    for (std::string line; std::getline(file, line);) {
        if (line.starts_with("Private_")) kib += std::stoull(line.substr(line.find(':') + 1));
    }
    return kib * 1024;
}

// A connection whose bytes a test sends and reads itself.
class Wire {
  public:
    explicit Wire(std::uint16_t port, int receive_buffer = 0) : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
        if (receive_buffer > 0) ::setsockopt(fd_.get(), SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof receive_buffer);
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_port = htons(port);
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        if (::connect(fd_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
            throw std::runtime_error("cannot connect to the gateway");
    }

    void send(std::string_view text) const {
        while (!text.empty()) {
            const ssize_t sent = ::send(fd_.get(), text.data(), text.size(), MSG_NOSIGNAL);
            if (sent <= 0) throw std::runtime_error("the gateway takes nothing more");
            text.remove_prefix(static_cast<std::size_t>(sent));
        }
    }
    void post(const std::string& path, const std::string& body, const std::string& fields = {}) const {
        send("POST " + path + " HTTP/1.1\r\nHost: x\r\n" + fields + "Content-Length: " + std::to_string(body.size()) +
             "\r\n\r\n" + body);
    }

    // Reads on until the text is there, and hands out everything up to its end.
    std::string read_until(std::string_view text) {
        std::size_t at = 0;
        while ((at = got_.find(text)) == std::string::npos) {
            if (!read_some())
                throw std::runtime_error("the connection ended before \"" + std::string(text) + "\": " + got_);
        }
        std::string found = got_.substr(0, at + text.size());
        got_.erase(0, found.size());
        return found;
    }
    std::string read_bytes(std::size_t size) {
        while (got_.size() < size) {
            if (!read_some()) throw std::runtime_error("the connection ended too early: " + got_);
        }
        std::string found = got_.substr(0, size);
        got_.erase(0, size);
        return found;
    }
    std::string read_to_end() {
        while (read_some()) {
        }
        return std::exchange(got_, {});
    }
    void close() { fd_.reset(); }
    void end_sending() const { ::shutdown(fd_.get(), SHUT_WR); }
    void reset() {
        const linger at_once{1, 0};
        ::setsockopt(fd_.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
        fd_.reset();
    }
    // Sends the text whole. False: for a second nobody has taken more of it, and only a part may have gone.
    bool try_send(std::string_view text) const {
        while (!text.empty()) {
            pollfd ready{fd_.get(), POLLOUT, 0};
            if (::poll(&ready, 1, 1000) != 1) return false;
            const ssize_t sent = ::send(fd_.get(), text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
            if (sent <= 0) return false;
            text.remove_prefix(static_cast<std::size_t>(sent));
        }
        return true;
    }

  private:
    bool read_some() {
        pollfd ready{fd_.get(), POLLIN, 0};
        if (::poll(&ready, 1, 60'000) != 1) throw std::runtime_error("nothing comes from the gateway: " + got_);
        std::array<char, 16384> bytes;
        const ssize_t size = ::recv(fd_.get(), bytes.data(), bytes.size(), 0);
        if (size <= 0) return false;
        got_.append(bytes.data(), static_cast<std::size_t>(size));
        return true;
    }

    UniqueFd fd_;
    std::string got_;
};

} // namespace gcoalesce::test
