// `ask --lines`: many prompts, several at a time.
#pragma once

#include "cli/exchange.hpp"

namespace gcoalesce::cli {

struct LinesOptions {
    Question question; // all but the body
    std::string system;
    unsigned at_once = 4;
    bool json = false, status = false;
};

// Each line of standard input is a prompt; blank ones are passed over. One line of output for each, in their order.
ExitCode ask_lines(gcoalesce_attachment& attachment, const LinesOptions& options);

} // namespace gcoalesce::cli
