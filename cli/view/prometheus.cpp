#include "cli/view/prometheus.hpp"

#include <fmt/format.h>
#include <initializer_list>
#include <iterator>
#include <set>
#include <utility>

#include "base/clock.hpp"
#include "cli/usage.hpp"
#include "segment/counters.hpp"

namespace gcoalesce::cli {
namespace {

// Names and texts of the segment may be a newer broker's, or a broken one's: the page stays well-formed.
std::string metric_name(std::string_view name) {
    std::string clean = "gcoalesce_";
    for (const char c : name) {
        const bool fits = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
        clean += fits ? c : '_';
    }
    return clean;
}

std::string escaped(std::string_view text, bool label) {
    std::string out;
    for (const char c : text) {
        if (c == '\\') {
            out += "\\\\";
        } else if (c == '\n') {
            out += "\\n";
        } else if (label && c == '"') {
            out += "\\\"";
        } else {
            out += c;
        }
    }
    return out;
}

using Labels = std::initializer_list<std::pair<std::string_view, std::string_view>>;

class Page {
  public:
    // Samples follow their family, and every family comes once.
    void family(std::string_view name, std::string_view type, std::string_view help) {
        name_ = name;
        fmt::format_to(std::back_inserter(text_), "# HELP {} {}\n# TYPE {} {}\n", name, escaped(help, false), name,
                       type);
    }
    template <class Value>
    void sample(Labels labels, Value value, std::string_view suffix = "") {
        text_ += name_;
        text_ += suffix;
        char before = '{';
        for (const auto& [label, text] : labels) {
            fmt::format_to(std::back_inserter(text_), "{}{}=\"{}\"", before, label, escaped(text, true));
            before = ',';
        }
        fmt::format_to(std::back_inserter(text_), "{} {}\n", before == ',' ? "}" : "", value);
    }
    template <class Value>
    void single(std::string_view name, std::string_view type, std::string_view help, Value value) {
        family(name, type, help);
        sample({}, value);
    }
    std::string take() { return std::move(text_); }

  private:
    std::string text_, name_;
};

void add_counters(Page& page, const SegmentView& segment) {
    std::set<std::string> seen;
    for (std::uint32_t i = 0; i < segment.counter_count(); ++i) {
        const CounterEntry& counter = segment.counter(i);
        const bool gauge = counter.text.kind == static_cast<std::uint32_t>(CounterKind::gauge);
        const std::string name = metric_name(counter.text.name.view()) + (gauge ? "" : "_total");
        if (!seen.insert(name).second) continue;
        page.single(name, gauge ? "gauge" : "counter", counter.text.help.view(),
                    counter.value.load(std::memory_order_relaxed));
    }
}

void add_tokens(Page& page, const std::vector<TemplateUsage>& all, Tokens Usage::*which) {
    for (const TemplateUsage& one : all) {
        const Tokens& tokens = one.usage.*which;
        page.sample({{"template", one.id}, {"kind", "prompt"}}, tokens.prompt);
        page.sample({{"template", one.id}, {"kind", "cached"}}, tokens.cached);
        page.sample({{"template", one.id}, {"kind", "thoughts"}}, tokens.thoughts);
        page.sample({{"template", one.id}, {"kind", "answer"}}, tokens.answer);
    }
}

void add_usage(Page& page, const std::vector<TemplateUsage>& all) {
    page.family("gcoalesce_template_requests_total", "counter",
                "Requests by how they were served; refused: with an error before any stream.");
    for (const TemplateUsage& one : all) {
        for (std::size_t status = 0; status < kStatuses; ++status)
            page.sample({{"template", one.id},
                         {"status", status == GCOALESCE_OPENING
                                        ? "refused"
                                        : gcoalesce_status_name(static_cast<gcoalesce_status>(status))}},
                        one.usage.requests[status]);
    }
    page.family("gcoalesce_template_calls_paid_total", "counter",
                "HTTP requests sent upstream, retries and failed ones included.");
    for (const TemplateUsage& one : all) page.sample({{"template", one.id}}, one.usage.calls_paid);
    page.family("gcoalesce_template_calls_avoided_total", "counter", "Requests that cost no upstream call.");
    for (const TemplateUsage& one : all) page.sample({{"template", one.id}}, one.usage.whole().coalesced);
    page.family("gcoalesce_template_tokens_paid_total", "counter",
                "Tokens that upstream reported, of failed calls too; prompt: without the cached ones.");
    add_tokens(page, all, &Usage::paid);
    page.family("gcoalesce_template_tokens_avoided_total", "counter", "Tokens that shared answers did not cost again.");
    add_tokens(page, all, &Usage::avoided);
    page.family("gcoalesce_template_push_requests_total", "counter",
                "Requests by seconds since the last push, refused and resumed ones aside.");
    for (const TemplateUsage& one : all) {
        for (std::size_t i = 0; i < kSincePush.size(); ++i)
            page.sample({{"template", one.id}, {"seconds", kSincePush[i]}}, one.usage.since_push[i].requests);
    }
    page.family("gcoalesce_template_push_coalesced_total", "counter",
                "Those of gcoalesce_template_push_requests_total that cost no upstream call.");
    for (const TemplateUsage& one : all) {
        for (std::size_t i = 0; i < kSincePush.size(); ++i)
            page.sample({{"template", one.id}, {"seconds", kSincePush[i]}}, one.usage.since_push[i].coalesced);
    }
}

// Bucket i counts whole microseconds below 2^i, so that 2^i is its upper bound.
void add_histogram(Page& page, std::string_view id, const Histogram& histogram) {
    std::uint64_t cumulated = 0;
    for (std::size_t i = 0; i < kHistogramBuckets; ++i) {
        cumulated += histogram.buckets[i].load(std::memory_order_relaxed);
        const bool last = i + 1 == kHistogramBuckets;
        page.sample({{"template", id},
                     {"le", last ? "+Inf" : fmt::format("{}", static_cast<double>(std::uint64_t{1} << i) / 1e6)}},
                    cumulated, "_bucket");
    }
    page.sample({{"template", id}}, static_cast<double>(histogram.sum_us.load(std::memory_order_relaxed)) / 1e6,
                "_sum");
    page.sample({{"template", id}}, cumulated, "_count"); // of these very buckets: the broker goes on counting
}

} // namespace

std::string prometheus(const SegmentView& segment, bool up) {
    const Header& header = segment.header();
    Page page;
    page.single("gcoalesce_up", "gauge", "1: the broker behind the segment can be reached.", up ? 1 : 0);
    page.family("gcoalesce_build_info", "gauge", "The broker's instance and version.");
    page.sample({{"instance", header.instance.view()}, {"version", header.version.view()}}, 1);
    page.single("gcoalesce_start_time_seconds", "gauge", "When the broker made the segment, since 1970.",
                static_cast<double>(header.created_wall_ns / kMillisecond) / 1e3);
    page.single("gcoalesce_memory_bytes", "gauge", "Size of the segment.", header.prefix.total_bytes);
    page.single("gcoalesce_extents_bytes", "gauge", "The part of it that holds answers.", header.extents.count);
    page.single("gcoalesce_extents_free_bytes", "gauge", "What of that is free.",
                header.extents_free.load(std::memory_order_relaxed));
    add_counters(page, segment);
    const std::vector<TemplateUsage> all = all_usage(segment);
    add_usage(page, all);
    page.family("gcoalesce_template_window_open", "gauge", "1: the notification window is open.");
    const Nanos now = system_clock().monotonic();
    for (const TemplateUsage& one : all) {
        const Nanos until = segment.template_entry(one.index).window_until.load(std::memory_order_acquire);
        page.sample({{"template", one.id}}, until > now ? 1 : 0);
    }
    page.family("gcoalesce_template_first_event_seconds", "histogram", "From a stream's opening to its first event.");
    for (const TemplateUsage& one : all) add_histogram(page, one.id, segment.template_entry(one.index).first_event);
    page.family("gcoalesce_template_join_seconds", "histogram",
                "From a request's arrival at the broker to its stream.");
    for (const TemplateUsage& one : all) add_histogram(page, one.id, segment.template_entry(one.index).join);
    return page.take();
}

} // namespace gcoalesce::cli
