// Command lines, put so that their parser (CLI11 2.1) reads them as they are meant.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace gcoalesce {

// "--name=" as "--name" and "", where the option takes a value: left as it is, the value would be the next argument,
// were it another option. What stands behind "--" stays. takes_value is asked for names such as "--name".
std::vector<std::string> with_empty_values(const std::vector<std::string>& arguments,
                                           const std::function<bool(const std::string&)>& takes_value);

// What is wrong with it as a number: 010 would be read as octal, 0x10 as hexadecimal. "": nothing; whether it is one at
// all is the parser's to say.
std::string complaint_of_number(const std::string& text);

// That there is none, where it is empty, as a variable that is not set leaves it. "": there is one.
std::string complaint_of_nothing(const std::string& text);

} // namespace gcoalesce
