#include "cli/sim/script.hpp"

#include <algorithm>
#include <charconv>
#include <vector>

#include "base/nearest.hpp"
#include "base/units.hpp"

namespace gcoalesce::sim {
namespace {

template <class T>
Result<T> parse_number(std::string_view text, T least, T most) {
    T number{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc() || end != text.data() + text.size() || number < least || number > most)
        return fail(GCOALESCE_BAD_REQUEST, "expected a number from {} to {}, found \"{}\"", least, most, text);
    return number;
}

template <class Member, class T>
Result<void> store(Member& member, Result<T> value) {
    if (!value) return tl::make_unexpected(std::move(value).error());
    member = *std::move(value);
    return {};
}

template <auto Member>
Result<void> duration(Script& script, std::string_view text) {
    return store(script.*Member, parse_duration(text));
}

template <auto Member, std::uint64_t most>
Result<void> size(Script& script, std::string_view text) {
    return store(script.*Member, parse_size(text).and_then([](std::uint64_t bytes) -> Result<std::uint64_t> {
        if (bytes <= most) return bytes;
        return fail(GCOALESCE_BAD_REQUEST, "expected at most {}, found {}", format_size(most), format_size(bytes));
    }));
}

template <auto Member, std::uint64_t least, std::uint64_t most>
Result<void> number(Script& script, std::string_view text) {
    return store(script.*Member, parse_number(text, least, most));
}

template <auto Member>
Result<void> after(Script& script, std::string_view text) {
    if (text == "events") return store(script.*Member, Result<std::uint64_t>(kAllEvents));
    return store(script.*Member, parse_number<std::uint64_t>(text, 0, kAllEvents));
}

template <auto Member, int least>
Result<void> http_status(Script& script, std::string_view text) {
    return store(script.*Member, parse_number(text, least, 599));
}

template <auto Member>
Result<void> word(Script& script, std::string_view text) {
    if (text.empty()) return fail(GCOALESCE_BAD_REQUEST, "expected a word, found nothing");
    script.*Member = text;
    return {};
}

template <auto Member>
Result<void> flag(Script& script, std::string_view text) {
    if (!text.empty()) return fail(GCOALESCE_BAD_REQUEST, "takes no value, found \"{}\"", text);
    script.*Member = true;
    return {};
}

constexpr std::uint64_t kMiB = 1 << 20;

const std::vector<ScriptKey>& table() {
    using S = Script;
    static const std::vector<ScriptKey> keys{
        {"latency", "TIME", duration<&S::latency>, "wait before the response's head"},
        {"first", "TIME", duration<&S::first>, "wait between the head and the first event"},
        {"gap", "TIME", duration<&S::gap>, "wait between two events"},
        {"events", "N", number<&S::events, 1, 1'000'000>,
         "events of a stream (default 4); a call without streaming sends its body in so many pieces"},
        {"size", "SIZE", size<&S::size, 64 * kMiB>, "bytes of text in each event (default: a few words)"},
        {"chunk", "SIZE", size<&S::chunk, 64 * kMiB>, "cut the body into HTTP chunks of so many bytes"},
        {"candidates", "N", number<&S::candidates, 1, 8>, "candidates in each event (default 1)"},
        {"thoughts", "N", number<&S::thoughts, 0, 1'000'000>, "the first N events are thoughts"},
        {"finish", "REASON", word<&S::finish>, "finish reason of the last event (default STOP)"},
        {"stop-every", "", flag<&S::stop_every>, "every event has the finish reason"},
        {"finish-alone", "", flag<&S::finish_alone>, "the last event has a finish reason, but no content"},
        {"no-final-blank", "", flag<&S::no_final_blank>, "the last event's blank line is missing"},
        {"replay", "NAME", word<&S::replay>, "answer with this recorded file, byte for byte"},
        {"status", "CODE", http_status<&S::status, 200>, "answer with this HTTP error"},
        {"retry", "TIME", duration<&S::retry>, "the error's RetryInfo"},
        {"retry-header", "", flag<&S::retry_header>, "the same as a Retry-After header too"},
        {"reason", "WORD", word<&S::reason>, "the error's ErrorInfo, e.g. API_KEY_INVALID"},
        {"array-error", "", flag<&S::array_error>, "wrap error documents in an array"},
        {"html", "", flag<&S::html>, "answer with an HTML page (status 404 unless told)"},
        {"empty", "", flag<&S::empty>, "answer with status 200 and no body"},
        {"block", "REASON", word<&S::block>, "block the prompt: one event, no candidates"},
        {"error-after", "N", after<&S::error_after>, "after N events an error, framed as an event"},
        {"bare-error-after", "N", after<&S::bare_error_after>, "after N events an error, bare JSON"},
        {"error-status", "CODE", http_status<&S::error_status, 400>, "the code of those two (default 503)"},
        {"invalid-json-after", "N", after<&S::invalid_json_after>, "after N events one that is no JSON, then the end"},
        {"truncate-after", "N", after<&S::truncate_after>, "clean end after N events, no finish reason"},
        {"cut-after", "N", after<&S::cut_after>, "close after N events without the last chunk"},
        {"reset-after", "N", after<&S::reset_after>, "reset the connection after N events; 0: before the head"},
        {"hang-after", "N", after<&S::hang_after>, "send nothing more after N events; 0: never answer"},
        {"hold-after", "N", after<&S::hold_after>, "after N events wait for POST /sim/release; 0: before the head"},
        {"fail-first", "N", number<&S::fail_first, 0, kAllEvents>,
         "only the first N calls of each body go wrong (status 503 unless told how)"},
        {"fail-replay", "NAME", word<&S::fail_replay>, "those calls are answered with this recorded file"},
    };
    return keys;
}

constexpr std::string_view kSeparators = " ,\t\r\n";

} // namespace

std::span<const ScriptKey> script_keys() {
    return table();
}

Result<void> apply_script(Script& script, std::string_view text) {
    for (;;) {
        text.remove_prefix(std::min(text.find_first_not_of(kSeparators), text.size()));
        if (text.empty()) return {};
        const std::string_view item = text.substr(0, text.find_first_of(kSeparators));
        text.remove_prefix(item.size());

        const std::string_view name = item.substr(0, item.find('='));
        const auto key = std::ranges::find(table(), name, &ScriptKey::name);
        if (key == table().end()) {
            std::vector<std::string> names;
            for (const ScriptKey& known : table()) names.push_back(known.name);
            return fail(GCOALESCE_BAD_REQUEST, "unknown script key \"{}\"{}", name, did_you_mean(name, names));
        }
        const std::string_view value = name.size() < item.size() ? item.substr(name.size() + 1) : std::string_view();
        if (auto done = key->set(script, value); !done)
            return fail(GCOALESCE_BAD_REQUEST, "script key {}: {}", name, done.error().message);
    }
}

Script Script::for_call(std::uint64_t number) const {
    if (fail_first == 0) return *this;
    Script script = *this;
    const bool told = status || html || empty || !block.empty() || finish != "STOP" || error_after ||
                      bare_error_after || invalid_json_after || truncate_after || cut_after || reset_after ||
                      hang_after;
    if (number <= fail_first) {
        if (!fail_replay.empty())
            script.replay = fail_replay;
        else if (!told)
            script.status = 503;
        return script;
    }
    script.status.reset();
    script.html = script.empty = false;
    script.block.clear();
    script.finish = "STOP";
    for (auto stop : {&Script::error_after, &Script::bare_error_after, &Script::invalid_json_after,
                      &Script::truncate_after, &Script::cut_after, &Script::reset_after, &Script::hang_after})
        (script.*stop).reset();
    return script;
}

} // namespace gcoalesce::sim
