#include <catch2/catch.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <unistd.h>
#include <vector>

#include "broker/config.hpp"
#include "broker/exit_codes.hpp"

using namespace gcoalesce;

namespace {

// A variable of the environment while the object lives.
class Variable {
  public:
    Variable(std::string name, const std::string& value) : name_(std::move(name)) {
        ::setenv(name_.c_str(), value.c_str(), 1);
    }
    ~Variable() { ::unsetenv(name_.c_str()); }
    Variable(const Variable&) = delete;
    Variable& operator=(const Variable&) = delete;

  private:
    std::string name_;
};

// A configuration file while the object lives.
class File {
  public:
    explicit File(const std::string& text) {
        const int fd = ::mkstemp(path_.data());
        REQUIRE(fd >= 0);
        ::close(fd);
        std::ofstream(path_) << text;
    }
    ~File() { ::unlink(path_.c_str()); }
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    const std::string& path() const { return path_; }

  private:
    std::string path_ = (std::filesystem::temp_directory_path() / "gcoalesce-config-XXXXXX").string();
};

Parsed parse(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {"gcoalesced", "--runtime-dir", "/nowhere"});
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    return parse_command_line(static_cast<int>(arguments.size()), argv.data());
}

} // namespace

TEST_CASE("an option is its flag's, else the environment's, else the file's, else its default") {
    struct Row { // the first three values come from the flag, the environment, the file
        std::string flag, variable, key;
        std::string values[4];
        std::function<std::string(const Config&)> of;
    };
    const std::vector<Row> rows{
        {"--upstream",
         "GCOALESCE_UPSTREAM",
         "upstream",
         {"http://a", "http://b", "http://c", "https://generativelanguage.googleapis.com"},
         [](const Config& config) { return config.upstream; }},
        {"--instance",
         "GCOALESCE_INSTANCE",
         "instance",
         {"one", "two", "three", "default"},
         [](const Config& config) { return config.instance.name; }},
        {"--streams",
         "GCOALESCE_STREAMS",
         "streams",
         {"16", "32", "64", "4096"},
         [](const Config& config) { return std::to_string(config.store.slots); }},
        {"--ttl-idle",
         "GCOALESCE_TTL_IDLE",
         "ttl-idle",
         {"1000ms", "2000ms", "3000ms", "200ms"},
         [](const Config& config) { return std::to_string(to_ms(config.settings.ttl_idle)) + "ms"; }},
        {"--memory",
         "GCOALESCE_MEMORY",
         "memory",
         {"16MiB", "32MiB", "64MiB", "48MiB"},
         [](const Config& config) { return std::to_string(config.memory >> 20) + "MiB"; }},
    };
    for (const Row& row : rows) {
        CAPTURE(row.flag);
        ::unsetenv(row.variable.c_str()); // that of whoever runs this
        for (int best = 0; best < 4; ++best) {
            CAPTURE(best);
            const File file(best <= 2 ? row.key + " = \"" + row.values[2] + "\"\n" : "");
            std::vector<std::string> arguments{"--config", file.path()};
            if (best == 0) arguments.insert(arguments.end(), {row.flag, row.values[0]});
            std::optional<Variable> variable;
            if (best <= 1) variable.emplace(row.variable, row.values[1]);
            const Parsed parsed = parse(arguments);
            REQUIRE(parsed.config);
            CHECK(row.of(*parsed.config) == row.values[best]);
        }
    }
}

TEST_CASE("an empty variable of the environment overrules no line of the file") {
    const File file("ttl-idle = \"3s\"\n");
    const Variable variable("GCOALESCE_TTL_IDLE", "");
    const Parsed parsed = parse({"--config", file.path()});
    REQUIRE(parsed.config);
    CHECK(parsed.config->settings.ttl_idle == 3 * kSecond);
}

TEST_CASE("what is wrong is refused wherever it stands") {
    CHECK(parse({"--ttl-idle", "soon"}).exit_code == exit_usage);
    CHECK(parse({"--config", File("ttl-idle = \"soon\"\n").path()}).exit_code == exit_usage);
    CHECK(parse({"--config", File("no-such-option = 1\n").path()}).exit_code == exit_usage);
    CHECK(parse({"--config", File("[section]\nttl-idle = \"3s\"\n").path()}).exit_code == exit_usage);
    CHECK(parse({"--config", "/nowhere/gcoalesced.toml"}).exit_code == exit_usage);
    // What the parser of command lines would make a number of: octal, hexadecimal, a date.
    for (const char* number : {"0100", "0x10", "-010"}) CHECK(parse({"--streams", number}).exit_code == exit_usage);
    CHECK(parse({"--config", File("streams = \"0100\"\n").path()}).exit_code == exit_usage);
    for (const char* date : {"1979-05-27", "07:32:00", "1979-05-27T07:32:00Z"}) {
        CHECK(parse({"--config", File(std::string("retries = ") + date + "\n").path()}).exit_code == exit_usage);
        CHECK(parse({"--config", File(std::string("state-dir = ") + date + "\n").path()}).exit_code == exit_usage);
    }
    const Variable variable("GCOALESCE_TTL_IDLE", "soon");
    CHECK(parse({}).exit_code == exit_usage);
}

TEST_CASE("an empty value is empty, and not the next argument") {
    const Parsed parsed = parse({"--state-dir=", "--log-level=debug", "--proxy=", "--retries", "0"});
    REQUIRE(parsed.config);
    CHECK(parsed.config->state_dir.empty());
    CHECK(parsed.config->proxy.empty());
    CHECK(parsed.config->log_level == LogLevel::debug);
    CHECK(parsed.config->producer.retries == 0);
    CHECK(parse({"--streams="}).exit_code == exit_usage);
}
