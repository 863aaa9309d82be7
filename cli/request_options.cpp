#include "cli/request_options.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <fcntl.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <poll.h>
#include <system_error>
#include <unistd.h>

#include "base/arguments.hpp"
#include "base/fd.hpp"
#include "cli/report.hpp"
#include "cli/view/terminal.hpp"

namespace gcoalesce::cli {
namespace {

constexpr int kHintAfterMs = 3000;

std::string default_model() {
    const char* given = std::getenv("GCOALESCE_MODEL");
    return given != nullptr && *given != '\0' ? given : "gemini-2.5-flash";
}

std::string read_all(int fd, const std::string& name) {
    std::string text;
    std::array<char, 65536> buffer{};
    for (;;) {
        const ssize_t got = ::read(fd, buffer.data(), buffer.size());
        if (got == 0) return text;
        if (got > 0)
            text.append(buffer.data(), static_cast<std::size_t>(got));
        else if (errno != EINTR)
            throw std::system_error(errno, std::generic_category(), "cannot read " + name);
    }
}

std::string read_file(const std::string& option, const std::string& path) {
    if (path == "-") return read_all(STDIN_FILENO, "standard input");
    const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!file) throw CLI::ValidationError(option, path + ": " + std::generic_category().message(errno));
    return read_all(file.get(), path);
}

// Standard input beside a prompt on the command line: someone may have left it open without knowing.
std::string read_unasked() {
    pollfd input{STDIN_FILENO, POLLIN, 0};
    if (::poll(&input, 1, kHintAfterMs) == 0)
        complain("waiting for standard input to end, since it is no terminal; without it: < /dev/null");
    return read_all(STDIN_FILENO, "standard input");
}

std::string prompt_of(const RequestOptions& options) {
    std::vector<std::string> words = options.prompt;
    for (std::string& word : words) {
        if (word.ends_with(kWordEnd)) word.pop_back();
    }
    const bool explicitly = std::erase(words, "-") > 0;
    std::string given;
    if (!options.prompt_file.empty())
        given = read_file("-f", options.prompt_file);
    else if (explicitly)
        given = read_all(STDIN_FILENO, "standard input");
    else if (!is_terminal(STDIN_FILENO))
        given = words.empty() ? read_all(STDIN_FILENO, "standard input") : read_unasked();
    given.erase(given.find_last_not_of(" \t\r\n") + 1);

    std::string prompt = fmt::format("{}", fmt::join(words, " "));
    if (prompt.find_first_not_of(" \t\r\n") == std::string::npos)
        prompt = given;
    else if (!given.empty())
        prompt = given + "\n\n" + prompt;
    if (prompt.empty())
        throw CLI::ValidationError("PROMPT", "expected a prompt, as arguments, on standard input, or with -f FILE");
    return prompt;
}

// {"city":"Tokyo"} of city=Tokyo.
std::string variables_of(const std::vector<std::string>& given) {
    nlohmann::ordered_json variables = nlohmann::ordered_json::object();
    for (const std::string& one : given) {
        const std::size_t equals = one.find('=');
        if (equals == std::string::npos || equals == 0)
            throw CLI::ValidationError("--var", "expected NAME=VALUE, such as city=Tokyo");
        const std::string name = one.substr(0, equals);
        if (variables.contains(name)) throw CLI::ValidationError("--var", "\"" + name + "\" is given twice");
        variables[name] = one.substr(equals + 1);
    }
    try {
        return variables.dump();
    } catch (const nlohmann::json::type_error&) {
        throw CLI::ValidationError("--var", "the text is not valid UTF-8");
    }
}

} // namespace

bool RequestOptions::asks() const {
    return prompted() || !body_file.empty() || !system.empty() || !template_id.empty();
}

void add_request_options(CLI::App& command, RequestOptions& options) {
    command.add_option("PROMPT", options.prompt, "what to ask; `-`: standard input");
    command.add_option("-f,--file", options.prompt_file, "what to ask, from a file")
        ->check(complaint_of_nothing)
        ->type_name("FILE");
    command.add_option("--request", options.body_file, "a whole request body of the Gemini API; `-`: standard input")
        ->check(complaint_of_nothing)
        ->type_name("FILE");
    command.add_option("--system", options.system, "system instruction")->type_name("TEXT");
    command.add_option("-m,--model", options.model, "which model (default $GCOALESCE_MODEL, else gemini-2.5-flash)")
        ->type_name("MODEL");
    command.add_option("-t,--template", options.template_id, "ask by this template")
        ->check(complaint_of_nothing)
        ->type_name("ID");
    command.add_option("--var", options.variables, "a variable of the template (may be given again)")
        ->type_name("NAME=VALUE")
        ->allow_extra_args(false);
    command.add_flag("--no-stream", options.no_stream, "ask for the whole answer at once");
    command.add_option("--realm", options.realm, "whom to share with, where the template keeps realms apart")
        ->type_name("NAME");
    command
        .add_option("--explicit-key", options.explicit_key,
                    "what stands for the request in its key, where the template allows it")
        ->type_name("TEXT");
}

void check_combination(const RequestOptions& options) {
    if (!options.template_id.empty() &&
        (options.prompted() || !options.body_file.empty() || !options.system.empty() || !options.model.empty()))
        throw CLI::ValidationError("--template",
                                   "is the whole prompt: expected no PROMPT, -f, --request, --system or --model");
    if (options.template_id.empty() && !options.variables.empty())
        throw CLI::ValidationError("--var", "goes with --template");
    if (!options.body_file.empty() && (options.prompted() || !options.system.empty()))
        throw CLI::ValidationError("--request", "is the whole request: expected neither PROMPT, -f nor --system");
}

Question question_of(const RequestOptions& options) {
    Question question;
    question.template_id = options.template_id;
    if (options.template_id.empty()) question.model = options.model.empty() ? default_model() : options.model;
    question.stream = !options.no_stream;
    question.realm = options.realm;
    question.explicit_key = options.explicit_key;
    return question;
}

std::string body_of(const RequestOptions& options) {
    if (!options.template_id.empty()) return variables_of(options.variables);
    if (!options.body_file.empty()) return read_file("--request", options.body_file);
    Result<std::string> body = prompt_body(prompt_of(options), options.system);
    if (!body) throw CLI::ValidationError("PROMPT", body.error().message);
    return *std::move(body);
}

} // namespace gcoalesce::cli
