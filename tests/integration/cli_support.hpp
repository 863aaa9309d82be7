// gcoalesce and gcoalesced as their users start them.
#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/broker.hpp"
#include "tests/support/fake_broker.hpp"
#include "tests/support/process.hpp"
#include "tests/support/sim.hpp"

namespace gcoalesce::test {

// What a program said, when it has ended.
struct Ran {
    int code = 0;
    std::string out, err;

    nlohmann::json json() const { return nlohmann::json::parse(out); }
    std::vector<std::string> lines() const {
        std::vector<std::string> all;
        std::string line;
        for (std::istringstream text(out); std::getline(text, line);) all.push_back(line);
        return all;
    }
    bool says(const std::string& words) const { return err.find(words) != std::string::npos; }
};

inline Ran run(std::vector<std::string> command, SpawnOptions options = {}) {
    Process process(std::move(command), std::move(options));
    const int code = process.wait();
    return {code, process.out(), process.err()};
}

// gcoalesce, told which instance.
inline std::vector<std::string> command(const Instance& instance, std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(),
                     {gcoalesce_program(), "--instance", instance.name, "--runtime-dir", instance.runtime_dir});
    return arguments;
}

// As a line of the shell, for tests that need a redirection or a terminal.
inline std::string quoted(const std::vector<std::string>& command) {
    std::string line;
    for (const std::string& word : command) line += "'" + word + "' ";
    return line;
}

// gcoalesced before a stand-in for Gemini. Its answers stay fresh, and it asks once only, unless told otherwise.
class World {
  public:
    explicit World(std::vector<std::string> broker_options = {}, std::vector<std::string> sim_options = {})
        : sim_(std::move(sim_options)), broker_(*instance_, sim_.url(), options(std::move(broker_options))) {}

    Sim& sim() { return sim_; }
    Broker& broker() { return broker_; }

    std::vector<std::string> command(std::vector<std::string> arguments) const {
        return test::command(*instance_, std::move(arguments));
    }
    Ran run(std::vector<std::string> arguments, std::string input = {}) const {
        SpawnOptions options;
        options.input = std::move(input);
        return test::run(command(std::move(arguments)), std::move(options));
    }
    std::int64_t calls() const { return nlohmann::json::parse(sim_.calls()).at("calls"); }

  private:
    static std::vector<std::string> options(std::vector<std::string> given) {
        given.insert(given.end(), {"--retries", "0"});
        if (std::ranges::find(given, "--ttl-idle") == given.end()) given.insert(given.end(), {"--ttl-idle", "10min"});
        return given;
    }

    ScratchInstance instance_;
    Sim sim_;
    Broker broker_;
};

// A file with these contents, until the object goes.
class TemporaryFile {
  public:
    explicit TemporaryFile(const std::string& contents) {
        std::string path = (std::filesystem::temp_directory_path() / "gcoalesce-test-XXXXXX").string();
        const UniqueFd fd(::mkstemp(path.data()));
        path_ = path;
        std::ofstream(path) << contents;
    }
    ~TemporaryFile() { std::filesystem::remove(path_); }
    TemporaryFile(const TemporaryFile&) = delete;
    TemporaryFile& operator=(const TemporaryFile&) = delete;

    const std::string& path() const { return path_; }

  private:
    std::string path_;
};

// Of template files, until the object goes.
class TemplateDirectory {
  public:
    TemplateDirectory() {
        std::string path = (std::filesystem::temp_directory_path() / "gcoalesce-test-XXXXXX").string();
        if (::mkdtemp(path.data()) == nullptr) throw std::runtime_error("mkdtemp");
        path_ = path;
    }
    ~TemplateDirectory() { std::filesystem::remove_all(path_); }
    TemplateDirectory(const TemplateDirectory&) = delete;
    TemplateDirectory& operator=(const TemplateDirectory&) = delete;

    std::string write(const std::string& name, const std::string& text) const {
        std::ofstream(path_ / name) << text;
        return (path_ / name).string();
    }
    std::string path() const { return path_.string(); }

  private:
    std::filesystem::path path_;
};

} // namespace gcoalesce::test
