// gcoalesce_bench [NAME...]: runs the benchmarks named, or all, and prints a table in Markdown.

#include <cstdio>
#include <cstring>
#include <fmt/format.h>
#include <fstream>
#include <map>
#include <stdexcept>
#include <stdlib.h>

#include "gcoalesce/gcoalesce.h"
#include "tests/bench/bench.hpp"

namespace gcoalesce::bench {

void report(const std::string& name, const std::string& figures, const std::string& verdict) {
    fmt::print("| {} | {} | {} |\n", name, figures, verdict);
    std::fflush(stdout);
}

Setup::Setup(const std::vector<std::string>& broker_arguments, const std::string& template_file) {
    char directory[] = "/tmp/gcoalesce-bench-XXXXXX";
    if (::mkdtemp(directory) == nullptr) throw std::runtime_error("no temporary directory");
    runtime_dir = directory;
    std::vector<std::string> argv{GCOALESCED, "--runtime-dir", runtime_dir, "--upstream",
                                  sim.url(),  "--log-level",   "error"};
    argv.insert(argv.end(), broker_arguments.begin(), broker_arguments.end());
    if (!template_file.empty()) {
        const std::filesystem::path templates = std::filesystem::path(runtime_dir) / "templates";
        std::filesystem::create_directory(templates);
        std::ofstream(templates / "bench.json") << template_file;
        argv.insert(argv.end(), {"--templates", templates.string()});
    }
    broker = std::make_unique<test::Process>(argv);
    gcoalesce_attach_options options{sizeof options, nullptr, runtime_dir.c_str(), "bench"};
    gcoalesce_attachment* attachment = nullptr;
    if (gcoalesce_attach(&options, 10'000, &attachment) != GCOALESCE_OK) throw std::runtime_error(gcoalesce_message());
    gcoalesce_detach(attachment);
}

Setup::~Setup() {
    broker->signal(15);
    broker->wait();
    std::filesystem::remove_all(runtime_dir);
}

} // namespace gcoalesce::bench

int main(int argc, char** argv) {
    using namespace gcoalesce::bench;
    const std::map<std::string, void (*)()> all{{"1-join", join},
                                                {"2-wake", wake},
                                                {"3-first-event", first_event},
                                                {"4-fan-out", fan_out},
                                                {"5-event-cost", event_cost},
                                                {"6-herd-100.", [] { herd(100, 1.05); }},
                                                {"6-herd-1000.", [] { herd(1000, 1.1); }},
                                                {"6-herd-4000.", [] { herd(4000, 1.25); }},
                                                {"6-herd-10000.", [] { herd(10'000, 1.5); }},
                                                {"7-fresh", fresh}};
    fmt::print("| benchmark | seen | ratio and target |\n| --- | --- | --- |\n");
    try {
        for (const auto& [name, run] : all) {
            bool wanted = argc == 1;
            for (int i = 1; i < argc; ++i) wanted = wanted || name.find(argv[i]) != std::string::npos;
            if (wanted) run();
        }
    } catch (const std::exception& error) {
        fmt::print(stderr, "gcoalesce_bench: {}\n", error.what());
        return 1;
    }
    return 0;
}
