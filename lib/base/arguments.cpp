#include "base/arguments.hpp"

#include <fmt/format.h>

namespace gcoalesce {

std::vector<std::string> with_empty_values(const std::vector<std::string>& arguments,
                                           const std::function<bool(const std::string&)>& takes_value) {
    std::vector<std::string> put;
    bool is_value = false, options = true;
    for (const std::string& argument : arguments) {
        const bool named = options && !is_value && argument.starts_with("--");
        is_value = false;
        if (named && argument == "--") options = false;
        const std::string name = argument.substr(0, argument.find('='));
        if (named && name.size() + 1 == argument.size() && takes_value(name)) {
            put.push_back(name);
            put.emplace_back();
            continue;
        }
        is_value = named && name.size() == argument.size() && takes_value(name);
        put.push_back(argument);
    }
    return put;
}

std::string complaint_of_number(const std::string& text) {
    const std::size_t sign = text.starts_with('-') || text.starts_with('+') ? 1 : 0;
    const auto digit = [&](std::size_t at) { return at < text.size() && text[at] >= '0' && text[at] <= '9'; };
    const bool octal = text.compare(sign, 1, "0") == 0 && digit(sign + 1);
    const bool hexadecimal = text.find_first_of("xX") != std::string::npos;
    return octal || hexadecimal ? fmt::format("expected a decimal number without leading zeros, found \"{}\"", text)
                                : std::string();
}

std::string complaint_of_nothing(const std::string& text) {
    return text.empty() ? "expected a value, found none" : "";
}

} // namespace gcoalesce
