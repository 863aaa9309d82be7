// What requests cost and spared, out of the segment's counters.
#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "gcoalesce/gcoalesce.h"
#include "segment/mapping.hpp"

namespace gcoalesce::cli {

struct Tokens {
    std::uint64_t prompt = 0, cached = 0, thoughts = 0, answer = 0; // prompt: without those that were cached

    Tokens& operator+=(const Tokens& more);
};

constexpr std::size_t kStatuses = GCOALESCE_BYPASS + 1;
constexpr std::array<const char*, 4> kSincePush{"0-5", "5-10", "10-30", "30+"}; // seconds

struct Usage {
    std::array<std::uint64_t, kStatuses> requests{}; // by gcoalesce_status; those of GCOALESCE_OPENING were refused
    std::uint64_t calls_paid = 0;                    // HTTP requests sent upstream, retries and failed ones included
    Tokens paid, avoided;
    struct Share {
        std::uint64_t requests = 0, coalesced = 0; // coalesced: at no cost
    };
    std::array<Share, kSincePush.size()> since_push; // refused and resumed requests aside

    Usage& operator+=(const Usage& more);
    std::uint64_t served() const; // all but those that were refused
    Share whole() const;          // of since_push; `coalesced` is the calls avoided
};

// Where part of a whole is told: 0 .. 1; nullopt of nothing.
std::optional<double> ratio(std::uint64_t part, std::uint64_t whole);

Usage usage_of(const TemplateEntry& entry);

struct TemplateUsage {
    std::uint32_t index; // in the segment
    std::string id;
    Usage usage;
};

// Those in force, and those that were removed while this broker ran: they cost what they cost. By id.
std::vector<TemplateUsage> all_usage(const SegmentView& segment);
Usage sum(const std::vector<TemplateUsage>& all);

using Buckets = std::array<std::uint64_t, kHistogramBuckets>; // of a Histogram
// The broker goes on counting: their sum, not the histogram's `count`, belongs to them.
Buckets buckets_of(const Histogram& histogram);
// In microseconds, as if a bucket's values lay evenly in it; nullopt: it is empty. q: 0 .. 1.
std::optional<double> quantile_us(const Buckets& buckets, double q);

nlohmann::ordered_json to_json(const Tokens& tokens);
nlohmann::ordered_json to_json(const Usage& usage);

} // namespace gcoalesce::cli
