// The folder of recorded answers.
#pragma once

#include <filesystem>
#include <string>

#include "base/error.hpp"

namespace gcoalesce::sim {

class Recordings {
  public:
    // A folder, one file, or "" for none. Throws std::filesystem::filesystem_error where it does not exist.
    explicit Recordings(const std::string& path);

    // The one file for every call; "" where a call has to name one.
    const std::string& only() const { return only_; }

    // A file below the folder, whole. Errors: GCOALESCE_NOT_FOUND, also for a name that leads out of the folder;
    // GCOALESCE_BAD_REQUEST where there is no folder.
    Result<std::string> read(const std::string& name) const;

  private:
    std::filesystem::path root_;
    std::string only_;
};

} // namespace gcoalesce::sim
