// The control protocol between a client and the broker, over a Unix stream socket.
//
// Frames: a 4-byte little-endian length, then that many bytes: one message, a flat CBOR map (RFC 8949) whose member "t"
// names its kind. A client's `open` is followed by its body in frames of plain bytes, `body_bytes` in all.
//
//   client                         broker
//   hello                 ->
//                         <-       welcome  + descriptors: segment (read-only), lane (memfd), wake socket
//   ready                 ->                  (stamped with the sender's pid by the kernel: SCM_CREDENTIALS)
//   open, body...         ->
//                         <-       opened | refused            exactly one of them, or
//   withdraw              ->
//                         <-       withdrawn                   where neither had been sent
//   notify                ->
//                         <-       window | refused
//                         <-       goodbye                     the last thing before the broker closes
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>

#include "base/error.hpp"
#include "base/ids.hpp"
#include "protocol/gemini.hpp"

namespace gcoalesce {

constexpr std::uint32_t kProtocolVersion = 1;
constexpr std::size_t kMaxFrame = 64 * 1024;       // bytes after the length
constexpr std::size_t kMaxMessage = 2 * 1024;      // bytes of a message, whose texts are short
constexpr std::size_t kMaxBody = 32 * 1024 * 1024; // bytes of a request body
constexpr std::uint32_t kWelcomeDescriptors = 3;   // segment, lane, wake socket, in this order

namespace message {

struct Hello {
    std::uint32_t protocol = kProtocolVersion;
    std::string name; // the client's, for people; at most 63 bytes are kept
};
struct Welcome {
    std::uint32_t protocol = kProtocolVersion;
    std::uint64_t epoch = 0;      // the segment's
    std::uint64_t attachment = 0; // id of this connection
};
struct Ready {};
struct Open {
    std::uint64_t id = 0; // the client's, unique among those under way on its connection
    std::string model;
    Method method = Method::stream;
    gcoalesce_sharing sharing = GCOALESCE_SHARE;
    std::uint64_t body_bytes = 0; // that follow; 1 .. kMaxBody
};
struct Opened { // the broker has pinned the slot in the client's lane: the client unpins it
    std::uint64_t id = 0;
    std::uint32_t slot = 0;
    std::uint64_t identity = 0; // generation >> 1
    StreamId stream_id = 0;
    Key key{};
    gcoalesce_status status = GCOALESCE_STARTED;
};
struct Refused {
    std::uint64_t id = 0;
    Code code = GCOALESCE_INTERNAL;
    std::string message;
    std::int64_t retry_ms = 0;
};
struct Withdraw {
    std::uint64_t id = 0;
};
struct Withdrawn {
    std::uint64_t id = 0;
};
struct Notify {
    std::uint64_t id = 0;
    gcoalesce_notify_action action = GCOALESCE_NOTIFY_STATUS;
    std::int64_t for_ms = 0; // 0: the template's `window`
};
struct Window {
    std::uint64_t id = 0;
    std::int64_t remaining_ms = 0; // 0: closed
};
struct Goodbye {
    Code code = GCOALESCE_BAD_REQUEST;
    std::string message;
};

} // namespace message

using Message =
    std::variant<message::Hello, message::Welcome, message::Ready, message::Open, message::Opened, message::Refused,
                 message::Withdraw, message::Withdrawn, message::Notify, message::Window, message::Goodbye>;

// The whole frame. Texts are cut where a frame would grow too long (messages only; a model is short).
std::string encode(const Message& message);

// One frame's bytes, without the length. GCOALESCE_BAD_REQUEST: over kMaxMessage, no flat map, over 32 members, a
// member of the wrong type or range, an unknown kind; unknown members are passed over, so that minor additions do no
// harm. Whatever the bytes, memory and stack stay bounded by kMaxMessage.
Result<Message> decode(std::string_view payload);

// Appends a body in frames of plain bytes.
void append_body_frames(std::string& out, std::string_view body);

// Cuts a byte stream into frames. Not thread-safe.
class FrameSplitter {
  public:
    void feed(std::string_view bytes) { pending_.append(bytes); }

    // True: `frame` is the next frame's bytes, valid until the next call. GCOALESCE_BAD_REQUEST: a length of 0 or over
    // kMaxFrame; nothing after it can be trusted.
    Result<bool> next(std::string_view& frame);

    std::size_t pending() const { return pending_.size() - taken_; }

  private:
    std::string pending_;
    std::size_t taken_ = 0;
};

} // namespace gcoalesce
