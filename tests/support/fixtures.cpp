#include "tests/support/fixtures.hpp"

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace gcoalesce::test {

std::filesystem::path source_dir() {
    return GCOALESCE_SOURCE_DIR;
}

std::optional<std::filesystem::path> fixtures() {
    const char* given = std::getenv("GCOALESCE_FIXTURES");
    const std::filesystem::path path = given != nullptr ? given : source_dir() / "../shared/fixtures";
    std::error_code ignored;
    if (!std::filesystem::is_directory(path / "gemini", ignored)) return std::nullopt;
    return path;
}

std::string read_file(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    std::ostringstream text;
    text << file.rdbuf();
    if (!file) throw std::runtime_error("cannot read " + path.string());
    return std::move(text).str();
}

} // namespace gcoalesce::test
