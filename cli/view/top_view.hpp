// What `top` shows: figures of two moments, and the text that they make.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "cli/inspect.hpp"
#include "cli/template_facts.hpp"
#include "cli/usage.hpp"

namespace gcoalesce::cli {

// The segment's figures at one moment.
struct TopSample {
    struct OfTemplate {
        TemplateFacts facts;
        Usage usage;
        Buckets first_event; // of its histogram
    };

    Nanos when = 0; // monotonic
    std::int64_t wall_ns = 0;
    std::uint64_t epoch = 0; // another one: another broker, whose figures began anew
    BrokerFacts broker;
    std::map<std::string, std::uint64_t> counters;
    Usage usage;                       // of all templates, also of those that were removed
    std::vector<OfTemplate> templates; // those in force
    std::vector<StreamFacts> streams;
    std::vector<std::string> stream_templates;              // the ids of theirs
    std::uint64_t slots = 0, extents = 0, extents_free = 0; // the last two: bytes

    std::uint64_t count(const std::string& counter) const;
};
TopSample take_sample(const Inspection& inspected);

struct TopLine {
    std::string text; // fit for a terminal
    bool heading = false;
};

// before: an older sample, from which rates come. filter: what key, stream, template, state or model of the streams
// shown has; "": any. columns, lines: what it must fit into; 0: anything does.
std::vector<TopLine> top_lines(const TopSample& now, const TopSample& before, const std::string& filter,
                               std::size_t columns, std::size_t lines);

nlohmann::ordered_json top_json(const TopSample& now, const TopSample& before, const std::string& filter);

} // namespace gcoalesce::cli
