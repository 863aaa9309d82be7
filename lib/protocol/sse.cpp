#include "protocol/sse.hpp"

#include <algorithm>
#include <charconv>

namespace gcoalesce {
namespace {

constexpr std::string_view kMark = "\xEF\xBB\xBF";
constexpr std::string_view kData = "data:";

struct Sequence {
    std::size_t size; // of the sequence, or of what the Encoding standard replaces by one U+FFFD (4.2, "UTF-8 decoder")
    bool valid;
};

Sequence next_sequence(std::string_view text) {
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
    const unsigned char lead = byte(0);
    if (lead < 0x80) return {1, true};
    std::size_t size = 0;
    if (lead >= 0xC2 && lead <= 0xDF) size = 2;
    if (lead >= 0xE0 && lead <= 0xEF) size = 3;
    if (lead >= 0xF0 && lead <= 0xF4) size = 4;
    for (std::size_t i = 1; i < size; ++i) {
        // Only the second byte's range depends on the first: no overlong forms, surrogates, or more than U+10FFFF.
        const unsigned char low = i == 1 && lead == 0xE0 ? 0xA0 : i == 1 && lead == 0xF0 ? 0x90 : 0x80;
        const unsigned char high = i == 1 && lead == 0xED ? 0x9F : i == 1 && lead == 0xF4 ? 0x8F : 0xBF;
        if (i == text.size() || byte(i) < low || byte(i) > high) return {i, false};
    }
    return size == 0 ? Sequence{1, false} : Sequence{size, true};
}

// True when the text was not UTF-8.
bool repair(std::string& text) {
    const std::string_view view = text;
    std::size_t at = 0;
    while (at < view.size()) {
        const Sequence next = next_sequence(view.substr(at));
        if (!next.valid) break;
        at += next.size;
    }
    if (at == view.size()) return false;
    std::string repaired(view.substr(0, at));
    while (at < view.size()) {
        const Sequence next = next_sequence(view.substr(at));
        repaired += next.valid ? view.substr(at, next.size) : "\xEF\xBF\xBD";
        at += next.size;
    }
    text = std::move(repaired);
    return true;
}

// Gives the next line end at each call, and looks at each byte once for each of CR and LF.
class LineEnds {
  public:
    explicit LineEnds(std::string_view bytes) : bytes_(bytes) {}
    std::size_t after(std::size_t at) {
        if (lf_ < at || !lf_known_) {
            lf_ = std::min(bytes_.find('\n', at), bytes_.size());
            lf_known_ = true;
        }
        if (cr_ < at || !cr_known_) {
            cr_ = std::min(bytes_.find('\r', at), bytes_.size());
            cr_known_ = true;
        }
        return std::min(lf_, cr_);
    }

  private:
    std::string_view bytes_;
    std::size_t lf_ = 0, cr_ = 0;
    bool lf_known_ = false, cr_known_ = false;
};

} // namespace

Result<void> SseParser::feed(std::string_view bytes, const OnEvent& on_event) {
    LineEnds ends(bytes);
    std::size_t at = 0;
    for (; mark_ < kMark.size() && at < bytes.size(); ++at, ++mark_) {
        if (bytes[at] == kMark[mark_]) continue;
        line_ = kMark.substr(0, mark_); // no byte order mark, then: what looked like one begins the first line
        mark_ = kMark.size();
        break;
    }
    while (at < bytes.size()) {
        if (after_cr_ && bytes[at] == '\n') ++at;
        after_cr_ = false;
        const std::size_t end = ends.after(at);
        if (!take(bytes.substr(at, end - at)))
            return fail(GCOALESCE_TOO_LARGE, "an event or a line of the stream has more than {} bytes", limit_);
        if (end == bytes.size()) break;
        end_line(on_event);
        after_cr_ = bytes[end] == '\r';
        at = end + 1;
    }
    return {};
}

// A further part of the line. False: too large.
bool SseParser::take(std::string_view part) {
    if (!in_data_) {
        if (line_.starts_with(':')) return true;
        if (line_.size() < kData.size()) {
            const std::size_t missing = std::min(kData.size() - line_.size(), part.size());
            line_ += part.substr(0, missing);
            part.remove_prefix(missing);
        }
        if (line_ != kData) {
            if (line_.starts_with(':')) {
                line_.resize(1);
                return true;
            }
            line_ += part;
            return line_.size() <= limit_ && data_.size() <= limit_ + 1; // "data" alone is a line of data, too
        }
        line_.clear();
        in_data_ = value_start_ = true;
    }
    if (value_start_ && !part.empty()) {
        if (part.front() == ' ') part.remove_prefix(1);
        value_start_ = false;
    }
    data_ += part;
    return data_.size() <= limit_;
}

void SseParser::end_line(const OnEvent& on_event) {
    if (in_data_) {
        data_ += '\n';
        in_data_ = false;
        return;
    }
    if (line_.empty()) return dispatch(on_event);
    const std::size_t colon = line_.find(':');
    const std::string_view name = std::string_view(line_).substr(0, colon);
    std::string value = colon == std::string::npos ? "" : line_.substr(colon + 1);
    if (value.starts_with(' ')) value.erase(0, 1);
    if (name == "data") {
        data_ += '\n';
    } else if (name == "event") {
        repair(value);
        type_ = std::move(value);
    } else if (name == "id") {
        repair(value);
        if (value.find('\0') == std::string::npos) id_ = std::move(value);
    } else if (name == "retry") {
        // Digits alone; a number that no clock would reach is ignored.
        std::int64_t number = 0;
        const bool digits = !value.empty() && value.find_first_not_of("0123456789") == std::string::npos;
        if (digits && std::from_chars(value.data(), value.data() + value.size(), number).ec == std::errc())
            retry_ms_ = number;
    }
    line_.clear();
}

void SseParser::dispatch(const OnEvent& on_event) {
    last_event_id_ = id_;
    if (!data_.empty()) {
        data_.pop_back();
        const bool repaired = repair(data_);
        on_event({type_.empty() ? std::string_view("message") : type_, data_, last_event_id_, repaired});
        data_.clear();
    }
    type_.clear();
}

std::string SseParser::unfinished_data() const {
    std::string data = data_;
    if (!in_data_ && !data.empty()) data.pop_back();
    return data;
}

bool SseParser::inside_other_line() const {
    return !line_.starts_with(':') && line_.find_first_not_of(" \t") != std::string::npos;
}

std::string frame_sse(std::string_view json) {
    std::string event = "data: ";
    event.reserve(json.size() + 10);
    event += json;
    // A string cannot hold either byte unescaped, so these stand between tokens.
    std::replace_if(
        event.begin(), event.end(), [](char c) { return c == '\r' || c == '\n'; }, ' ');
    event += "\r\n\r\n";
    return event;
}

} // namespace gcoalesce
