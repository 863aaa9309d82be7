// Programs of the distribution that serve on a port of 127.0.0.1.
#pragma once

#include <cstdint>
#include <string>

namespace gcoalesce::test {

// The program's path; also where distributions put what stands in no ordinary user's PATH. "": it is not installed.
std::string find_program(const std::string& name);

// A port of 127.0.0.1 that nobody had when asked: for programs that cannot choose one themselves.
std::uint16_t free_port();

// Until somebody listens there. Throws when nobody does within half a minute.
void wait_for_listener(std::uint16_t port, const std::string& name);

} // namespace gcoalesce::test
