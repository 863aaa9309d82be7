// The client's end of the control connection: messages out and in, never blocking.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.hpp"
#include "protocol/control.hpp"

namespace gcoalesce {

// Not thread-safe: its owner's lock guards it.
class Link {
  public:
    explicit Link(UniqueFd socket) : socket_(std::move(socket)) {} // a connected, non-blocking Unix stream socket

    int fd() const { return socket_.get(); }

    // Queues; flush() sends.
    void push(const Message& message) { out_ += encode(message); }
    void push_body(std::string_view body) { append_body_frames(out_, body); }

    // Sends what the kernel takes. A connection that is gone shows in receive(), behind what it still holds.
    void flush();
    bool has_output() const { return sent_ < out_.size(); }

    // Takes what has arrived, once. descriptors: where those that came along go; null closes them unseen.
    // False: nothing more will come; what came before may still hold whole messages.
    bool receive(std::vector<UniqueFd>* descriptors);

    // True: `message` is the next whole one.
    Result<bool> next(Message& message);

  private:
    UniqueFd socket_;
    std::string out_;
    std::size_t sent_ = 0; // of out_
    FrameSplitter in_;
};

} // namespace gcoalesce
