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
//   cancel, purge, reload ->
//                         <-       done | refused
//   clients               ->
//                         <-       client..., done             at most kClientsAtOnce of them; how many are left
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
constexpr std::size_t kMaxTemplateId = 63;         // bytes
constexpr std::size_t kMaxTemplateList = 1024;     // bytes of ids, separated by commas
constexpr std::size_t kMaxTarget = 64;             // digits of a key, or bytes of a template's id
constexpr std::size_t kMaxRealm = 128;             // bytes of a realm's name
constexpr std::size_t kMaxExplicitKey = 256;       // bytes
constexpr std::size_t kMaxApiKey = 256;            // bytes of a caller's own
constexpr std::size_t kMaxPins = 1024;             // bytes of a list of pinned streams
constexpr std::size_t kClientsAtOnce = 64;         // in answer to one `clients`
constexpr std::size_t kMaxVerb = 8;                // bytes of an HTTP method
constexpr std::size_t kMaxPath = 1024;             // bytes of a path that is passed on, query included
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
    std::string template_id = "default";
    std::string model; // of a whole request; "" with a template
    Method method = Method::stream;
    gcoalesce_sharing sharing = GCOALESCE_SHARE;
    std::string realm;           // "": none
    std::string explicit_key;    // "": none
    std::int64_t max_age_ms = 0; // as gcoalesce_request tells it
    bool no_store = false;
    StreamId individual_of = 0;     // the invalid stream that this one is asked in place of
    StreamId resume = 0;            // the stream to go on with; then there is no body
    std::uint64_t resume_after = 0; // events of it that were read
    std::string verb;               // of a call that is passed on, else ""
    std::string path;               // likewise
    std::string api_key;            // the caller's own, for the call that it causes; "": the broker's
    std::uint64_t body_bytes = 0;   // that follow; 1 .. kMaxBody, or 0 with `resume` or `path`
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
    std::int64_t for_ms = 0; // 0: each template's `window`
    std::string templates{}; // ids, separated by commas; "": all
};
struct Window {
    std::uint64_t id = 0;
    std::int64_t remaining_ms = 0; // the longest; 0: closed
};
struct Cancel {
    std::uint64_t id = 0;
    std::string target; // the first digits of a key or a stream id
};
struct Purge {
    std::uint64_t id = 0;
    gcoalesce_purge_scope scope = GCOALESCE_PURGE_STREAM;
    std::string target; // likewise, or a template's id
};
struct Reload {
    std::uint64_t id = 0;
};
struct Clients { // who is attached; anybody who is may ask
    std::uint64_t id = 0;
    std::uint64_t after = 0; // this attachment, in the order of their ids
};
struct Client {
    std::uint64_t id = 0;
    std::uint64_t attachment = 0;
    std::string name;
    std::uint32_t pid = 0; // in the broker's pid namespace; 0: it lives in one that the broker cannot see
    std::uint32_t uid = 0;
    std::int64_t attached_ms = 0;     // ago
    bool connected = true;            // false: its connection is gone, its process lives and holds pins
    bool revoked = false;             // its pins no longer count
    std::uint64_t waiting = 0;        // requests that are not answered yet
    std::uint64_t readers = 0;        // pins, over all streams
    std::uint64_t pinned_streams = 0; // those that it pins
    std::uint64_t pinned_bytes = 0;   // of their events
    std::string pinned;               // "<stream id>:<readers>", separated by commas: as many as fit
};
struct Done {
    std::uint64_t id = 0;
    std::uint64_t streams = 0; // or clients
};
struct Goodbye {
    Code code = GCOALESCE_BAD_REQUEST;
    std::string message;
};

} // namespace message

using Message =
    std::variant<message::Hello, message::Welcome, message::Ready, message::Open, message::Opened, message::Refused,
                 message::Withdraw, message::Withdrawn, message::Notify, message::Window, message::Cancel,
                 message::Purge, message::Reload, message::Clients, message::Client, message::Done, message::Goodbye>;

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
