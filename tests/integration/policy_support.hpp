// What the tests of policies share: a broker that can be started again, an upstream with recorded answers, templates,
// and clients by the C ABI and by the command line.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tests/chaos/client.hpp"
#include "tests/support/broker.hpp"
#include "tests/support/instance.hpp"
#include "tests/support/process.hpp"
#include "tests/support/sim.hpp"

namespace gcoalesce::test {

// A directory, until the object goes.
class Folder {
  public:
    Folder();
    ~Folder();
    Folder(const Folder&) = delete;
    Folder& operator=(const Folder&) = delete;

    std::string path() const { return path_.string(); }
    std::string write(const std::string& name, std::string_view text) const; // the file's path

  private:
    std::filesystem::path path_;
};

// What gcoalesce said, when it has ended.
struct Answered {
    int code = 0;
    std::string out, err;

    bool says(std::string_view words) const { return err.find(words) != std::string::npos; }
    std::string told(const std::string& member) const; // of the object on standard output; numbers as they are spelled
};

// A member of a JSON object, as text. Throws where there is none.
std::string json_member(const std::string& json, const std::string& member);

// A request of the C ABI with texts of its own.
struct Wish {
    std::string body, model, template_id, realm, resume, explicit_key;
    bool stream = true;
    gcoalesce_sharing sharing = GCOALESCE_SHARE;
    std::int64_t max_age_ms = 0;
    bool no_store = false;
    std::uint64_t after = 0; // the number that `resume` names
};
Wish prompt(const std::string& text); // which has no character that JSON escapes
Wish by_template(const std::string& id, const std::string& variables);
Wish resuming(std::uint64_t stream, std::uint64_t number, const std::string& realm = {});

Reader ask(const Attachment& attachment, const Wish& wish);
Seen answer_to(const Attachment& attachment, const Wish& wish); // read to its end

// What readers of one event with this JSON see as their digest.
Key digest_of(std::string_view event);

// An upstream with a folder of recorded answers, a folder of templates, and a broker before and behind them.
class Stage {
  public:
    explicit Stage(std::vector<std::string> broker_options = {}) : options_(std::move(broker_options)) {}

    // Starts the broker, with a template directory and what the constructor was given. Again, after stop().
    void start();
    // SIGTERM; what it said.
    std::string stop();

    Folder& templates() { return templates_; }
    Folder& recordings() { return recordings_; }
    Sim& sim() { return sim_; }
    Broker& broker() { return *broker_; }
    const Instance& instance() const { return *instance_; }
    const ScratchInstance& scratch() const { return instance_; }
    Attachment attach() const { return test::attach(*instance_); }

    std::int64_t counted(const std::string& name = "calls") const; // by the upstream
    Answered run(std::vector<std::string> arguments, std::string input = {}) const;
    std::unique_ptr<Process> begin(std::vector<std::string> arguments) const;

  private:
    std::vector<std::string> command(std::vector<std::string> arguments) const;

    std::vector<std::string> options_;
    ScratchInstance instance_;
    Folder templates_, recordings_;
    Sim sim_{{"--replay", recordings_.path()}};
    std::unique_ptr<Broker> broker_;
};

} // namespace gcoalesce::test
