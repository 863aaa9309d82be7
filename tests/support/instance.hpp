// Where a test's brokers serve.
#pragma once

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <sys/mman.h>
#include <system_error>
#include <unistd.h>

#include "segment/mapping.hpp"

namespace gcoalesce::test {

// An instance whose directory, and whatever brokers leave under its name in /dev/shm, go with this object.
class ScratchInstance {
  public:
    ScratchInstance() {
        std::string path = (std::filesystem::temp_directory_path() / "gcoalesce-scratch-XXXXXX").string();
        if (::mkdtemp(path.data()) == nullptr) throw std::system_error(errno, std::generic_category(), "mkdtemp");
        instance_ = {"scratch", path};
    }
    ~ScratchInstance() {
        ::shm_unlink(segment_name().c_str());
        std::error_code ignored;
        std::filesystem::remove_all(instance_.runtime_dir, ignored);
    }
    ScratchInstance(const ScratchInstance&) = delete;
    ScratchInstance& operator=(const ScratchInstance&) = delete;

    const Instance& operator*() const { return instance_; }
    const Instance* operator->() const { return &instance_; }
    std::string segment_name() const { return instance_.segment_name(::geteuid()); } // for shm_open

  private:
    Instance instance_;
};

} // namespace gcoalesce::test
