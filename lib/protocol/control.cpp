#include "protocol/control.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <type_traits>

namespace gcoalesce {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxMembers = 32;
constexpr std::size_t kMaxMessageText = 1024;
constexpr std::uint64_t kAny = ~std::uint64_t{0};
constexpr std::uint64_t kAnySigned = INT64_MAX;

struct Member {
    enum class Kind { none, number, text, bytes, truth } kind = Kind::none;
    std::uint64_t number = 0; // of a negative integer: its two's complement, `negative` set
    bool negative = false;
    std::string text;
};

// Takes one flat map and refuses everything else before it can cost anything: an array or a second map ends the
// parse at its first byte, so nesting never recurses.
class FlatMap final : public nlohmann::json_sax<json> {
  public:
    std::map<std::string, Member, std::less<>> members;
    std::string error;

    bool null() override { return put({}); }
    bool boolean(bool value) override { return put({Member::Kind::truth, value ? 1u : 0u, false, {}}); }
    bool number_integer(number_integer_t value) override {
        return put({Member::Kind::number, static_cast<std::uint64_t>(value), value < 0, {}});
    }
    bool number_unsigned(number_unsigned_t value) override { return put({Member::Kind::number, value, false, {}}); }
    bool number_float(number_float_t, const string_t&) override { return refuse("a fraction"); }
    bool string(string_t& value) override { return put({Member::Kind::text, 0, false, std::move(value)}); }
    bool binary(binary_t& value) override {
        return put({Member::Kind::bytes, 0, false, std::string(value.begin(), value.end())});
    }
    bool start_object(std::size_t) override {
        if (inside_) return refuse("a map within the map");
        inside_ = true;
        return true;
    }
    bool key(string_t& name) override {
        name_ = std::move(name);
        if (members.size() == kMaxMembers) return refuse("too many members");
        if (members.contains(name_)) return refuse("a member twice");
        return true;
    }
    bool end_object() override { return true; }
    bool start_array(std::size_t) override { return refuse("an array"); }
    bool end_array() override { return true; }
    bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
        if (error.empty()) error = fmt::format("no valid CBOR at byte {}", position);
        return false;
    }

  private:
    bool put(Member member) {
        if (!inside_) return refuse("a value that is no map");
        members.emplace(std::move(name_), std::move(member));
        return true;
    }
    bool refuse(const char* what) {
        error = what;
        return false;
    }
    bool inside_ = false;
    std::string name_;
};

// Reads members by name and remembers the first complaint.
class Fields {
  public:
    explicit Fields(const FlatMap& map) : map_(map) {}

    template <class T>
    void number(const char* name, T& out, std::uint64_t most) {
        const Member* member = find(name, Member::Kind::number);
        if (member == nullptr) return;
        if (member->negative || member->number > most) return complain(name, "is out of range");
        out = static_cast<T>(member->number);
    }
    void signed_number(const char* name, std::int64_t& out) {
        const Member* member = find(name, Member::Kind::number);
        if (member == nullptr) return;
        if (!member->negative && member->number > kAnySigned) return complain(name, "is out of range");
        out = static_cast<std::int64_t>(member->number);
    }
    void text(const char* name, std::string& out, std::size_t most) {
        const Member* member = find(name, Member::Kind::text);
        if (member == nullptr) return;
        if (member->text.size() > most) return complain(name, "is too long");
        out = member->text;
    }
    void text_if_any(const char* name, std::string& out, std::size_t most) {
        if (map_.members.contains(std::string_view(name))) text(name, out, most);
    }
    void bytes(const char* name, Key& out) {
        const Member* member = find(name, Member::Kind::bytes);
        if (member == nullptr) return;
        if (member->text.size() != out.size()) return complain(name, "has the wrong length");
        std::copy(member->text.begin(), member->text.end(), out.begin());
    }
    const std::string& complaint() const { return complaint_; }

  private:
    const Member* find(const char* name, Member::Kind kind) {
        const auto found = map_.members.find(std::string_view(name));
        if (found == map_.members.end()) return complain(name, "is missing"), nullptr;
        if (found->second.kind != kind) return complain(name, "has the wrong type"), nullptr;
        return &found->second;
    }
    void complain(const char* name, const char* what) {
        if (complaint_.empty()) complaint_ = fmt::format("member \"{}\" {}", name, what);
    }
    const FlatMap& map_;
    std::string complaint_;
};

// Each message's members, declared once for both directions.
struct Writer {
    json out;
    template <class T>
    void number(const char* name, const T& value, std::uint64_t) {
        out[name] = static_cast<std::uint64_t>(value);
    }
    void signed_number(const char* name, std::int64_t value) { out[name] = value; }
    void text(const char* name, const std::string& value, std::size_t most) { out[name] = value.substr(0, most); }
    void text_if_any(const char* name, const std::string& value, std::size_t most) {
        if (!value.empty()) text(name, value, most);
    }
    void bytes(const char* name, const Key& value) {
        out[name] = json::binary(std::vector<std::uint8_t>(value.begin(), value.end()));
    }
};

template <class V, class M>
void members(V& v, M& m) {
    using T = std::remove_const_t<M>;
    using namespace message;
    if constexpr (std::is_same_v<T, Hello>) {
        v.number("protocol", m.protocol, UINT32_MAX);
        v.text("name", m.name, 256);
    } else if constexpr (std::is_same_v<T, Welcome>) {
        v.number("protocol", m.protocol, UINT32_MAX);
        v.number("epoch", m.epoch, kAny);
        v.number("attachment", m.attachment, kAny);
    } else if constexpr (std::is_same_v<T, Open>) {
        v.number("id", m.id, kAny);
        v.text("template", m.template_id, kMaxTemplateId);
        v.text("model", m.model, 256);
        v.number("method", m.method, static_cast<std::uint64_t>(Method::pass));
        v.number("sharing", m.sharing, GCOALESCE_SHARE_REFRESH);
        v.text("realm", m.realm, kMaxRealm);
        v.text("explicit_key", m.explicit_key, kMaxExplicitKey);
        v.signed_number("max_age_ms", m.max_age_ms);
        v.number("no_store", m.no_store, 1);
        v.number("individual_of", m.individual_of, kAny);
        v.number("resume", m.resume, kAny);
        v.number("resume_after", m.resume_after, kAny);
        v.text("verb", m.verb, kMaxVerb);
        v.text("path", m.path, kMaxPath);
        v.text_if_any("api_key", m.api_key, kMaxApiKey);
        v.number("body_bytes", m.body_bytes, kAny);
    } else if constexpr (std::is_same_v<T, Opened>) {
        v.number("id", m.id, kAny);
        v.number("slot", m.slot, UINT32_MAX);
        v.number("identity", m.identity, kAny);
        v.number("stream_id", m.stream_id, kAny);
        v.bytes("key", m.key);
        v.number("status", m.status, GCOALESCE_BYPASS);
    } else if constexpr (std::is_same_v<T, Refused>) {
        v.number("id", m.id, kAny);
        v.number("code", m.code, UINT16_MAX);
        v.text("message", m.message, kMaxMessageText);
        v.number("retry_ms", m.retry_ms, kAnySigned);
    } else if constexpr (std::is_same_v<T, Notify>) {
        v.number("id", m.id, kAny);
        v.number("action", m.action, GCOALESCE_NOTIFY_OFF);
        v.text("templates", m.templates, kMaxTemplateList);
        v.number("for_ms", m.for_ms, kAnySigned);
    } else if constexpr (std::is_same_v<T, Window>) {
        v.number("id", m.id, kAny);
        v.number("remaining_ms", m.remaining_ms, kAnySigned);
    } else if constexpr (std::is_same_v<T, Cancel>) {
        v.number("id", m.id, kAny);
        v.text("target", m.target, kMaxTarget);
    } else if constexpr (std::is_same_v<T, Purge>) {
        v.number("id", m.id, kAny);
        v.number("scope", m.scope, GCOALESCE_PURGE_ALL);
        v.text("target", m.target, kMaxTarget);
    } else if constexpr (std::is_same_v<T, Clients>) {
        v.number("id", m.id, kAny);
        v.number("after", m.after, kAny);
    } else if constexpr (std::is_same_v<T, Client>) {
        v.number("id", m.id, kAny);
        v.number("attachment", m.attachment, kAny);
        v.text("name", m.name, 256);
        v.number("pid", m.pid, UINT32_MAX);
        v.number("uid", m.uid, UINT32_MAX);
        v.number("attached_ms", m.attached_ms, kAnySigned);
        v.number("connected", m.connected, 1);
        v.number("revoked", m.revoked, 1);
        v.number("waiting", m.waiting, kAny);
        v.number("readers", m.readers, kAny);
        v.number("pinned_streams", m.pinned_streams, kAny);
        v.number("pinned_bytes", m.pinned_bytes, kAny);
        v.text("pinned", m.pinned, kMaxPins);
    } else if constexpr (std::is_same_v<T, Done>) {
        v.number("id", m.id, kAny);
        v.number("streams", m.streams, kAny);
    } else if constexpr (std::is_same_v<T, Goodbye>) {
        v.number("code", m.code, UINT16_MAX);
        v.text("message", m.message, kMaxMessageText);
    } else if constexpr (std::is_same_v<T, Withdraw> || std::is_same_v<T, Withdrawn> || std::is_same_v<T, Reload>) {
        v.number("id", m.id, kAny);
    }
}

// By the variant's order.
constexpr std::array<const char*, std::variant_size_v<Message>> kKinds{
    "hello",  "welcome", "ready", "open",   "opened",  "refused", "withdraw", "withdrawn", "notify",
    "window", "cancel",  "purge", "reload", "clients", "client",  "done",     "goodbye"};

template <std::size_t I = 0>
Result<Message> read_kind(const std::string& kind, Fields& fields) {
    if constexpr (I == kKinds.size()) {
        const bool plain = std::all_of(kind.begin(), kind.end(), [](unsigned char c) { return c > ' ' && c < 0x7F; });
        return fail(GCOALESCE_BAD_REQUEST, "unknown message \"{}\"", plain ? kind.substr(0, 32) : "?");
    } else {
        if (kind != kKinds[I]) return read_kind<I + 1>(kind, fields);
        std::variant_alternative_t<I, Message> value;
        members(fields, value);
        if (!fields.complaint().empty())
            return fail(GCOALESCE_BAD_REQUEST, "message \"{}\": {}", kind, fields.complaint());
        return Message(std::move(value));
    }
}

void append_length(std::string& out, std::size_t length) {
    for (int shift = 0; shift < 32; shift += 8) out.push_back(static_cast<char>(length >> shift & 0xFF));
}

} // namespace

std::string encode(const Message& message) {
    Writer writer;
    writer.out = json::object();
    writer.out["t"] = kKinds[message.index()];
    std::visit([&](const auto& value) { members(writer, value); }, message);
    std::string frame(4, '\0');
    json::to_cbor(writer.out, nlohmann::detail::output_adapter<char>(frame));
    std::string length;
    append_length(length, frame.size() - 4);
    frame.replace(0, 4, length);
    return frame;
}

Result<Message> decode(std::string_view payload) {
    // Before the parser sees it: nlohmann's recurses for each indefinite-length string within another.
    if (payload.size() > kMaxMessage)
        return fail(GCOALESCE_BAD_REQUEST, "expected a message of at most {} bytes, found one of {}", kMaxMessage,
                    payload.size());
    FlatMap map;
    if (!json::sax_parse(payload.begin(), payload.end(), &map, json::input_format_t::cbor))
        return fail(GCOALESCE_BAD_REQUEST, "expected one flat CBOR map, found {}",
                    map.error.empty() ? "something else" : map.error);
    const auto kind = map.members.find(std::string_view("t"));
    if (kind == map.members.end() || kind->second.kind != Member::Kind::text)
        return fail(GCOALESCE_BAD_REQUEST, "expected a text member \"t\" that names the message");
    Fields fields(map);
    return read_kind(kind->second.text, fields);
}

void append_body_frames(std::string& out, std::string_view body) {
    while (!body.empty()) {
        const std::string_view piece = body.substr(0, kMaxFrame);
        append_length(out, piece.size());
        out.append(piece);
        body.remove_prefix(piece.size());
    }
}

Result<bool> FrameSplitter::next(std::string_view& frame) {
    if (taken_ > 0 && (taken_ == pending_.size() || taken_ >= kMaxFrame)) {
        pending_.erase(0, taken_); // rarely enough that the cost stays linear
        taken_ = 0;
    }
    if (pending() < 4) return false;
    std::size_t length = 0;
    for (std::size_t i = 4; i-- > 0;) length = length << 8 | static_cast<unsigned char>(pending_[taken_ + i]);
    if (length == 0 || length > kMaxFrame)
        return fail(GCOALESCE_BAD_REQUEST, "expected a frame of 1 to {} bytes, found one of {}", kMaxFrame, length);
    if (pending() < 4 + length) return false;
    frame = std::string_view(pending_).substr(taken_ + 4, length);
    taken_ += 4 + length;
    return true;
}

} // namespace gcoalesce
