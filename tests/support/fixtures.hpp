// The recorded answers and public test suites, which stand outside this repository.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace gcoalesce::test {

// $GCOALESCE_FIXTURES, else ../shared/fixtures beside the checkout; nullopt where it is absent.
std::optional<std::filesystem::path> fixtures();

// The checkout that this program was built from.
std::filesystem::path source_dir();

// The whole file, byte for byte; throws where it cannot be read.
std::string read_file(const std::filesystem::path& path);

// A test that needs the fixtures starts with this: without them it says SKIPPED, which ctest shows as skipped.
#define GCOALESCE_REQUIRE_FIXTURES(name)                                                                               \
    const auto name##_found = gcoalesce::test::fixtures();                                                             \
    if (!name##_found) {                                                                                               \
        std::puts("SKIPPED: no fixtures; set GCOALESCE_FIXTURES to their folder");                                     \
        return;                                                                                                        \
    }                                                                                                                  \
    const std::filesystem::path& name = *name##_found

} // namespace gcoalesce::test
