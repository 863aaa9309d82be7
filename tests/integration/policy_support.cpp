#include "tests/integration/policy_support.hpp"

#include <algorithm>
#include <cstdlib>
#include <fmt/format.h>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace gcoalesce::test {

Folder::Folder() {
    std::string path = (std::filesystem::temp_directory_path() / "gcoalesce-test-XXXXXX").string();
    if (::mkdtemp(path.data()) == nullptr) throw std::runtime_error("mkdtemp");
    path_ = path;
}

Folder::~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
}

std::string Folder::write(const std::string& name, std::string_view text) const {
    std::ofstream(path_ / name, std::ios::binary) << text;
    return (path_ / name).string();
}

std::string json_member(const std::string& json, const std::string& member) {
    const nlohmann::json value = nlohmann::json::parse(json).at(member);
    return value.is_string() ? value.get<std::string>() : value.dump();
}

std::string Answered::told(const std::string& member) const {
    return json_member(out, member);
}

Wish prompt(const std::string& text) {
    Wish wish;
    wish.model = "gemini-2.5-flash";
    wish.body = prompt_body(text);
    return wish;
}

Wish by_template(const std::string& id, const std::string& variables) {
    Wish wish;
    wish.template_id = id;
    wish.body = variables;
    return wish;
}

Wish resuming(std::uint64_t stream, std::uint64_t number, const std::string& realm) {
    Wish wish;
    wish.resume = fmt::format("{:016x}.{}", stream, number);
    wish.realm = realm;
    wish.after = number;
    return wish;
}

Reader ask(const Attachment& attachment, const Wish& wish) {
    const auto text = [](const std::string& given) { return given.empty() ? nullptr : given.c_str(); };
    gcoalesce_request request{};
    request.size = sizeof request;
    request.model = text(wish.model);
    request.body = text(wish.body);
    request.body_bytes = wish.body.size();
    request.stream = wish.stream ? 1 : 0;
    request.sharing = wish.sharing;
    request.template_id = text(wish.template_id);
    request.realm = text(wish.realm);
    request.explicit_key = text(wish.explicit_key);
    request.max_age_ms = wish.max_age_ms;
    request.no_store = wish.no_store ? 1 : 0;
    request.resume = text(wish.resume);
    return {attachment, request, wish.after};
}

Seen answer_to(const Attachment& attachment, const Wish& wish) {
    Reader reader = ask(attachment, wish);
    return reader.read_to_end();
}

Key digest_of(std::string_view event) {
    Sha256 digest;
    digest.field(event);
    return digest.finish();
}

void Stage::start() {
    std::vector<std::string> options = options_;
    options.insert(options.end(), {"--templates", templates_.path()});
    const auto unless_told = [&](const char* option, const char* value) {
        if (std::find(options.begin(), options.end(), option) == options.end())
            options.insert(options.end(), {option, value});
    };
    unless_told("--ttl-idle", "10min");
    unless_told("--retries", "0");
    broker_ = std::make_unique<Broker>(*instance_, sim_.url(), std::move(options));
}

std::string Stage::stop() {
    const int code = broker_->stop();
    std::string said = broker_->process().err();
    broker_.reset();
    if (code != 0) throw std::runtime_error("the broker ended with " + std::to_string(code) + ":\n" + said);
    return said;
}

std::int64_t Stage::counted(const std::string& name) const {
    return std::stoll(json_member(sim_.calls(), name));
}

std::vector<std::string> Stage::command(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(),
                     {gcoalesce_program(), "--instance", instance_->name, "--runtime-dir", instance_->runtime_dir});
    return arguments;
}

Answered Stage::run(std::vector<std::string> arguments, std::string input) const {
    SpawnOptions options;
    options.input = std::move(input);
    Process process(command(std::move(arguments)), std::move(options));
    const int code = process.wait();
    return {code, process.out(), process.err()};
}

std::unique_ptr<Process> Stage::begin(std::vector<std::string> arguments) const {
    return std::make_unique<Process>(command(std::move(arguments)));
}

} // namespace gcoalesce::test
