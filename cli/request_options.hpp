// What is asked: the options that `ask` and `key` share.
#pragma once

#include <CLI/App.hpp>
#include <string>
#include <vector>

#include "cli/exchange.hpp"

namespace gcoalesce::cli {

// Behind a word of a prompt that the parser of command lines would take for something else (main.cpp). Not among what
// people type.
constexpr char kWordEnd = '\x1f';

struct RequestOptions {
    std::vector<std::string> prompt;
    std::string prompt_file, body_file, system, model;
    std::string template_id, realm, explicit_key;
    std::vector<std::string> variables; // NAME=VALUE
    bool no_stream = false;

    // Something to ask stands on the command line, or is named there.
    bool asks() const;
    bool prompted() const { return !prompt.empty() || !prompt_file.empty(); }
};

// The options must outlive parsing.
void add_request_options(CLI::App& command, RequestOptions& options);

// These throw a CLI::ValidationError where the command line is wrong.
void check_combination(const RequestOptions& options);
// All but the body and what only `ask` knows of.
Question question_of(const RequestOptions& options);
// A template's variables, the file of --request, or a body of the prompt, which may come from standard input.
std::string body_of(const RequestOptions& options);

} // namespace gcoalesce::cli
