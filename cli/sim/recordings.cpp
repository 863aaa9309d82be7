#include "cli/sim/recordings.hpp"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <system_error>
#include <utility>

namespace gcoalesce::sim {

namespace fs = std::filesystem;

Recordings::Recordings(const std::string& path) {
    if (path.empty()) return;
    root_ = fs::canonical(path);
    if (fs::is_directory(root_)) return;
    only_ = root_.filename();
    root_ = root_.parent_path();
}

Result<std::string> Recordings::read(const std::string& name) const {
    if (root_.empty()) return fail(GCOALESCE_BAD_REQUEST, "nothing to replay: sim was started without --replay");
    std::error_code error;
    const fs::path path = fs::canonical(root_ / name, error);
    // A name with "..", an absolute one, or a link may lead elsewhere.
    if (error || std::mismatch(root_.begin(), root_.end(), path.begin(), path.end()).first != root_.end() ||
        !fs::is_regular_file(path))
        return fail(GCOALESCE_NOT_FOUND, "no such recorded file below the folder of --replay");
    std::ifstream file(path, std::ios::binary);
    std::ostringstream bytes;
    bytes << file.rdbuf();
    if (!file) return fail(GCOALESCE_NOT_FOUND, "the recorded file cannot be read");
    return std::move(bytes).str();
}

} // namespace gcoalesce::sim
