// What Prometheus demands of a page in its text exposition format 0.0.4.
#pragma once

#include <cmath>
#include <cstdlib>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace gcoalesce::test {

struct Exposition {
    std::vector<std::string> faults;       // none: the page is well-formed
    std::map<std::string, double> samples; // by name and labels as they stand there
};

inline Exposition read_exposition(const std::string& page) {
    static const std::regex meta(R"(# (HELP|TYPE) ([a-zA-Z_:][a-zA-Z0-9_:]*) (.+))");
    static const std::regex sample(
        R"re(([a-zA-Z_:][a-zA-Z0-9_:]*)(\{([a-zA-Z_][a-zA-Z0-9_]*="([^"\\]|\\[\\"n])*"(,|(?=\})))*\})? (\S+))re");
    static const std::regex le(R"re(,le="([^"]*)")re");
    Exposition read;
    std::set<std::string> families; // that have been begun
    std::string family, type;
    bool helped = false;
    double bound = 0, cumulated = 0; // of the histogram's last bucket
    const auto fault = [&](const std::string& what, const std::string& line) {
        read.faults.push_back(what + ": " + line);
    };
    if (!page.ends_with('\n')) fault("no LF at the end", "");
    std::string line;
    for (std::istringstream lines(page); std::getline(lines, line);) {
        std::smatch match;
        if (std::regex_match(line, match, meta)) {
            if (match[1] == "HELP") {
                family = match[2];
                type.clear();
                helped = true;
                if (!families.insert(family).second) fault("a family twice", line);
                static const std::regex escapes(R"(([^\\]|\\[\\n])*)");
                if (!std::regex_match(match[3].str(), escapes)) fault("a bad escape", line);
            } else {
                if (!helped || family != match[2]) fault("TYPE without HELP", line);
                type = match[3];
                if (type != "counter" && type != "gauge" && type != "histogram") fault("no such type", line);
                if (type == "counter" && !family.ends_with("_total")) fault("a counter not named _total", line);
            }
            continue;
        }
        if (!std::regex_match(line, match, sample)) {
            fault("no sample", line);
            continue;
        }
        const std::string name = match[1], labels = match[2];
        char* end = nullptr;
        const std::string text = match[6];
        const double value = std::strtod(text.c_str(), &end);
        if (*end != '\0' || std::isnan(value)) fault("no number", line);
        if (!read.samples.emplace(name + labels, value).second) fault("a sample twice", line);
        if (type.empty()) fault("a sample before its TYPE", line);
        if (type != "gauge" && value < 0) fault("below 0", line);
        if (type != "histogram") {
            if (name != family) fault("a sample of another family", line);
            continue;
        }
        if (name == family + "_bucket") {
            std::smatch bucket;
            if (!std::regex_search(labels, bucket, le)) {
                fault("a bucket without le", line);
                continue;
            }
            const double upper = std::strtod(bucket[1].str().c_str(), nullptr);
            if (upper > bound && value < cumulated) fault("a bucket below the one before", line);
            bound = upper;
            cumulated = value;
        } else if (name == family + "_count") {
            if (!std::isinf(bound) || value != cumulated) fault("a count that is not the +Inf bucket's", line);
            bound = cumulated = 0;
        } else if (name != family + "_sum") {
            fault("a sample of another family", line);
        }
    }
    return read;
}

} // namespace gcoalesce::test
