#include "tests/support/sim.hpp"

#include <stdexcept>

#include "tests/support/http.hpp"

namespace gcoalesce::test {
namespace {

std::vector<std::string> command(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {gcoalesce_program(), "sim", "--port", "0"});
    return arguments;
}

} // namespace

std::string gcoalesce_program() {
    return GCOALESCE_CLI;
}

Sim::Sim(std::vector<std::string> arguments) : process_(command(std::move(arguments))) {
    const std::string line = process_.read_line(), promise = "listening on ";
    if (!line.starts_with(promise)) throw std::runtime_error("unexpected first line of sim: " + line);
    url_ = line.substr(promise.size());
}

std::uint16_t Sim::port() const {
    return static_cast<std::uint16_t>(std::stoi(url_.substr(url_.rfind(':') + 1)));
}

std::string Sim::calls() const {
    return http(url_ + "/sim/calls").body;
}

void Sim::release() const {
    http(url_ + "/sim/release", " ");
}

void Sim::reset() const {
    http(url_ + "/sim/reset", " ");
}

std::string prompt_body(const std::string& prompt) {
    return R"({"contents":[{"role":"user","parts":[{"text":")" + prompt + R"("}]}]})";
}

} // namespace gcoalesce::test
