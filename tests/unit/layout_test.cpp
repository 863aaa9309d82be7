#include <algorithm>
#include <catch2/catch.hpp>
#include <fmt/format.h>
#include <set>
#include <sstream>

#include "segment/counters.hpp"
#include "segment/layout.hpp"
#include "tests/support/fixtures.hpp"

using namespace gcoalesce;

namespace {

// "Slot.wake 12 4", for each field of the shared structs; "Slot 768" for each struct.
std::set<std::string> layout_of_the_code() {
    std::set<std::string> lines;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
#define GCOALESCE_STRUCT(S) lines.insert(fmt::format("{} {}", #S, sizeof(S)))
#define GCOALESCE_FIELD(S, field)                                                                                      \
    lines.insert(fmt::format("{}.{} {} {}", #S, #field, offsetof(S, field), sizeof(static_cast<S*>(nullptr)->field)))
    GCOALESCE_STRUCT(Prefix);
    GCOALESCE_FIELD(Prefix, magic);
    GCOALESCE_FIELD(Prefix, layout_major);
    GCOALESCE_FIELD(Prefix, layout_minor);
    GCOALESCE_FIELD(Prefix, total_bytes);
    GCOALESCE_FIELD(Prefix, fingerprint);
    GCOALESCE_FIELD(Prefix, ready);
    GCOALESCE_FIELD(Prefix, header_bytes);
    GCOALESCE_STRUCT(Header);
    GCOALESCE_FIELD(Header, prefix);
    GCOALESCE_FIELD(Header, counters);
    GCOALESCE_FIELD(Header, templates);
    GCOALESCE_FIELD(Header, index);
    GCOALESCE_FIELD(Header, slots);
    GCOALESCE_FIELD(Header, log);
    GCOALESCE_FIELD(Header, errors);
    GCOALESCE_FIELD(Header, extents);
    GCOALESCE_FIELD(Header, epoch);
    GCOALESCE_FIELD(Header, broker_pid);
    GCOALESCE_FIELD(Header, broker_start_ticks);
    GCOALESCE_FIELD(Header, created_wall_ns);
    GCOALESCE_FIELD(Header, created_boottime_ns);
    GCOALESCE_FIELD(Header, boot_id);
    GCOALESCE_FIELD(Header, instance);
    GCOALESCE_FIELD(Header, version);
    GCOALESCE_FIELD(Header, state);
    GCOALESCE_FIELD(Header, heartbeat_ns);
    GCOALESCE_FIELD(Header, heartbeat_wall_ns);
    GCOALESCE_FIELD(Header, log_next);
    GCOALESCE_FIELD(Header, extents_free);
    GCOALESCE_STRUCT(CounterEntry);
    GCOALESCE_FIELD(CounterEntry, text);
    GCOALESCE_FIELD(CounterEntry, value);
    GCOALESCE_STRUCT(CounterText);
    GCOALESCE_FIELD(CounterText, name);
    GCOALESCE_FIELD(CounterText, unit);
    GCOALESCE_FIELD(CounterText, help);
    GCOALESCE_FIELD(CounterText, kind);
    GCOALESCE_STRUCT(TemplateEntry);
    GCOALESCE_FIELD(TemplateEntry, sequence);
    GCOALESCE_FIELD(TemplateEntry, policy);
    GCOALESCE_FIELD(TemplateEntry, window_until);
    GCOALESCE_FIELD(TemplateEntry, pushed);
    GCOALESCE_FIELD(TemplateEntry, counts);
    GCOALESCE_FIELD(TemplateEntry, first_event);
    GCOALESCE_FIELD(TemplateEntry, join);
    GCOALESCE_STRUCT(TemplatePolicy);
    GCOALESCE_FIELD(TemplatePolicy, id);
    GCOALESCE_FIELD(TemplatePolicy, revision);
    GCOALESCE_FIELD(TemplatePolicy, flags);
    GCOALESCE_FIELD(TemplatePolicy, max_individual);
    GCOALESCE_FIELD(TemplatePolicy, ttl_idle);
    GCOALESCE_FIELD(TemplatePolicy, ttl_window);
    GCOALESCE_FIELD(TemplatePolicy, window);
    GCOALESCE_FIELD(TemplatePolicy, linger);
    GCOALESCE_FIELD(TemplatePolicy, snapshot_ttl);
    GCOALESCE_FIELD(TemplatePolicy, kv_after);
    GCOALESCE_FIELD(TemplatePolicy, kv_ttl);
    GCOALESCE_FIELD(TemplatePolicy, cancel_after);
    GCOALESCE_FIELD(TemplatePolicy, in_flight);
    GCOALESCE_FIELD(TemplatePolicy, calls_a_minute);
    GCOALESCE_FIELD(TemplatePolicy, subscribers);
    GCOALESCE_FIELD(TemplatePolicy, stream_bytes);
    GCOALESCE_FIELD(TemplatePolicy, pool_bytes);
    GCOALESCE_FIELD(TemplatePolicy, source_offset);
    GCOALESCE_FIELD(TemplatePolicy, source_bytes);
    GCOALESCE_STRUCT(Histogram);
    GCOALESCE_FIELD(Histogram, count);
    GCOALESCE_FIELD(Histogram, sum_us);
    GCOALESCE_FIELD(Histogram, buckets);
    GCOALESCE_STRUCT(IndexEntry);
    GCOALESCE_FIELD(IndexEntry, fingerprint);
    GCOALESCE_FIELD(IndexEntry, reference);
    GCOALESCE_STRUCT(Slot);
    GCOALESCE_FIELD(Slot, generation);
    GCOALESCE_FIELD(Slot, state);
    GCOALESCE_FIELD(Slot, wake);
    GCOALESCE_FIELD(Slot, committed);
    GCOALESCE_FIELD(Slot, committed_bytes);
    GCOALESCE_FIELD(Slot, first_extent);
    GCOALESCE_FIELD(Slot, fresh_until);
    GCOALESCE_FIELD(Slot, evicted);
    GCOALESCE_FIELD(Slot, retries);
    GCOALESCE_FIELD(Slot, first_event_ns);
    GCOALESCE_FIELD(Slot, subscribers);
    GCOALESCE_FIELD(Slot, upstream_status);
    GCOALESCE_FIELD(Slot, joins);
    GCOALESCE_FIELD(Slot, key);
    GCOALESCE_FIELD(Slot, opening);
    GCOALESCE_FIELD(Slot, ending);
    GCOALESCE_FIELD(Slot, ephemeral);
    GCOALESCE_STRUCT(SlotOpening);
    GCOALESCE_FIELD(SlotOpening, stream_id);
    GCOALESCE_FIELD(SlotOpening, template_index);
    GCOALESCE_FIELD(SlotOpening, method);
    GCOALESCE_FIELD(SlotOpening, sharing);
    GCOALESCE_FIELD(SlotOpening, status);
    GCOALESCE_FIELD(SlotOpening, checking);
    GCOALESCE_FIELD(SlotOpening, template_revision);
    GCOALESCE_FIELD(SlotOpening, realm);
    GCOALESCE_FIELD(SlotOpening, individual_of);
    GCOALESCE_FIELD(SlotOpening, opened_ns);
    GCOALESCE_FIELD(SlotOpening, opened_wall_ns);
    GCOALESCE_FIELD(SlotOpening, request_digest);
    GCOALESCE_FIELD(SlotOpening, request_bytes);
    GCOALESCE_FIELD(SlotOpening, request_offset);
    GCOALESCE_FIELD(SlotOpening, request_kept);
    GCOALESCE_FIELD(SlotOpening, model);
    GCOALESCE_STRUCT(SlotEnding);
    GCOALESCE_FIELD(SlotEnding, kind);
    GCOALESCE_FIELD(SlotEnding, code);
    GCOALESCE_FIELD(SlotEnding, upstream_status);
    GCOALESCE_FIELD(SlotEnding, reusable);
    GCOALESCE_FIELD(SlotEnding, retry_ms);
    GCOALESCE_FIELD(SlotEnding, prompt_tokens);
    GCOALESCE_FIELD(SlotEnding, cached_tokens);
    GCOALESCE_FIELD(SlotEnding, thought_tokens);
    GCOALESCE_FIELD(SlotEnding, answer_tokens);
    GCOALESCE_FIELD(SlotEnding, total_tokens);
    GCOALESCE_FIELD(SlotEnding, ended_ns);
    GCOALESCE_FIELD(SlotEnding, ended_wall_ns);
    GCOALESCE_FIELD(SlotEnding, finish_reason);
    GCOALESCE_FIELD(SlotEnding, model_version);
    GCOALESCE_FIELD(SlotEnding, message);
    GCOALESCE_FIELD(SlotEnding, document_offset);
    GCOALESCE_FIELD(SlotEnding, document_bytes);
    GCOALESCE_STRUCT(Extent);
    GCOALESCE_FIELD(Extent, next);
    GCOALESCE_FIELD(Extent, capacity);
    GCOALESCE_STRUCT(LogRecord);
    GCOALESCE_FIELD(LogRecord, sequence);
    GCOALESCE_FIELD(LogRecord, facts);
    GCOALESCE_STRUCT(LogFacts);
    GCOALESCE_FIELD(LogFacts, when_ns);
    GCOALESCE_FIELD(LogFacts, when_wall_ns);
    GCOALESCE_FIELD(LogFacts, kind);
    GCOALESCE_FIELD(LogFacts, code);
    GCOALESCE_FIELD(LogFacts, stream_id);
    GCOALESCE_FIELD(LogFacts, key_prefix);
    GCOALESCE_FIELD(LogFacts, number);
    GCOALESCE_FIELD(LogFacts, template_index);
    GCOALESCE_FIELD(LogFacts, upstream_status);
    GCOALESCE_FIELD(LogFacts, text);
    GCOALESCE_STRUCT(ErrorEntry);
    GCOALESCE_FIELD(ErrorEntry, sequence);
    GCOALESCE_FIELD(ErrorEntry, count);
    GCOALESCE_FIELD(ErrorEntry, facts);
    GCOALESCE_STRUCT(ErrorFacts);
    GCOALESCE_FIELD(ErrorFacts, code);
    GCOALESCE_FIELD(ErrorFacts, upstream_status);
    GCOALESCE_FIELD(ErrorFacts, first_wall_ns);
    GCOALESCE_FIELD(ErrorFacts, last_wall_ns);
    GCOALESCE_FIELD(ErrorFacts, message);
    GCOALESCE_STRUCT(LaneHeader);
    GCOALESCE_FIELD(LaneHeader, magic);
    GCOALESCE_FIELD(LaneHeader, epoch);
    GCOALESCE_FIELD(LaneHeader, attachment);
    GCOALESCE_FIELD(LaneHeader, slots);
    GCOALESCE_FIELD(LaneHeader, asked);
    GCOALESCE_FIELD(LaneHeader, changes);
    GCOALESCE_FIELD(LaneHeader, revoked);
    GCOALESCE_STRUCT(PinEntry);
    GCOALESCE_FIELD(PinEntry, pins);
    GCOALESCE_FIELD(PinEntry, joined);
    GCOALESCE_FIELD(PinEntry, fresh);
    GCOALESCE_FIELD(PinEntry, moves);
#undef GCOALESCE_FIELD
#undef GCOALESCE_STRUCT
#pragma GCC diagnostic pop
    return lines;
}

// The same from the manual page's source: "## Slot, 768 bytes", then tables of field, offset, bytes, meaning.
std::set<std::string> layout_of_the_manual() {
    std::set<std::string> lines;
    std::istringstream page(test::read_file(test::source_dir() / "man/gcoalesce-segment.5.scd"));
    std::string line, name, field, offset;
    while (std::getline(page, line)) {
        line.erase(std::remove(line.begin(), line.end(), '\\'), line.end());
        if (line.rfind("## ", 0) == 0) {
            name = line.substr(3, line.find(',') - 3);
            std::istringstream rest(line.substr(line.find(',') + 1));
            std::string bytes;
            rest >> bytes;
            lines.insert(name + " " + bytes);
        } else if (line.rfind("|[ ", 0) == 0) {
            field = line.substr(3);
            offset.clear();
        } else if (line.rfind(":] ", 0) == 0 && !field.empty()) {
            if (offset.empty()) {
                offset = line.substr(3);
            } else {
                lines.insert(fmt::format("{}.{} {} {}", name, field, offset, line.substr(3)));
                field.clear();
            }
        }
    }
    return lines;
}

std::vector<std::string> missing(const std::set<std::string>& from, const std::set<std::string>& in) {
    std::vector<std::string> lines;
    std::set_difference(in.begin(), in.end(), from.begin(), from.end(), std::back_inserter(lines));
    return lines;
}

} // namespace

TEST_CASE("gcoalesce-segment(5) tells the layout that the code has") {
    const std::set<std::string> code = layout_of_the_code();
    const std::set<std::string> manual = layout_of_the_manual();
    CHECK(missing(manual, code) == std::vector<std::string>{});
    CHECK(missing(code, manual) == std::vector<std::string>{});
}

TEST_CASE("every counter's texts fit their fields, and no name comes twice") {
    std::set<std::string> names;
    for (const CounterDeclaration& counter : kCounters) {
        CAPTURE(counter.name);
        CHECK(names.insert(counter.name).second);
        CounterText text{};
        text.name.assign(counter.name);
        text.unit.assign(counter.unit);
        text.help.assign(counter.help);
        CHECK(text.name.view() == counter.name);
        CHECK(text.unit.view() == counter.unit);
        CHECK(text.help.view() == counter.help);
    }
}

TEST_CASE("a text that does not fit is cut at a UTF-8 boundary") {
    Text<8> text{};
    text.assign("abcde\u00e9\u00e9");
    CHECK(text.view() == "abcde\u00e9");
    text.assign("abcdef\u00e9");
    CHECK(text.view() == "abcdef");
    text.assign({});
    CHECK(text.view().empty());
}

TEST_CASE("copying through shared memory keeps every byte at every length") {
    alignas(8) std::byte shared[128];
    for (std::size_t length = 0; length <= 100; ++length) {
        std::string from(length, ' ');
        for (std::size_t i = 0; i < length; ++i) from[i] = static_cast<char>(i * 31 + length);
        copy_in(shared, from.data(), length);
        std::string to(length, '?');
        copy_out(to.data(), shared, length);
        CHECK(to == from);
    }
}
