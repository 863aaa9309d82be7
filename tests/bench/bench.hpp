// What every benchmark here does: run ours and a peer in turn, in one run, and print medians and their ratio.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "tests/support/process.hpp"
#include "tests/support/sim.hpp"

namespace gcoalesce::bench {

inline double now_us() {
    return static_cast<double>(system_clock().monotonic()) / 1000;
}

class Samples {
  public:
    void add(double value) { values_.push_back(value); }
    double percentile(double p) {
        std::sort(values_.begin(), values_.end());
        return values_[static_cast<std::size_t>(p / 100 * static_cast<double>(values_.size() - 1))];
    }
    bool empty() const { return values_.empty(); }
    double median() { return percentile(50); }

  private:
    std::vector<double> values_;
};

// One line of the table. figures: what was seen; verdict: the ratio beside its target.
void report(const std::string& name, const std::string& figures, const std::string& verdict);

// A private broker before a private sim. template_file: the text of a template with the id "bench"; empty: none.
class Setup {
  public:
    explicit Setup(const std::vector<std::string>& broker_arguments = {}, const std::string& template_file = "");
    ~Setup();
    test::Sim sim;
    std::string runtime_dir;
    std::unique_ptr<test::Process> broker;
};

void join();
void wake();
void first_event();
void fan_out();
void event_cost();
void herd(std::size_t clients, double target);
void fresh();

} // namespace gcoalesce::bench
