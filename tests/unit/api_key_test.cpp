#include "broker/api_key.hpp"

#include <catch2/catch.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <unistd.h>

using namespace gcoalesce;

namespace {

// A folder of credentials, an environment without keys; both as before when it goes.
struct Place {
    Place() {
        std::string name = (std::filesystem::temp_directory_path() / "gcoalesce-key-XXXXXX").string();
        if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary directory");
        folder = name;
        ::unsetenv("GEMINI_API_KEY");
        ::unsetenv("CREDENTIALS_DIRECTORY");
    }
    ~Place() {
        ::unsetenv("GEMINI_API_KEY");
        ::unsetenv("CREDENTIALS_DIRECTORY");
        std::filesystem::remove_all(folder);
    }
    std::string write(const std::string& name, const std::string& text) const {
        std::ofstream(folder / name, std::ios::binary) << text;
        return (folder / name).string();
    }
    std::filesystem::path folder;
};

std::string loaded(const std::string& file) {
    const auto key = ApiKey::load(file);
    if (!key) return "error: " + key.error().message;
    return *key ? std::string((*key)->text()) : "none";
}

} // namespace

TEST_CASE("The credential comes before the file, the file before the environment, and nothing is no error") {
    const Place place;
    CHECK(loaded("") == "none");
    ::setenv("GEMINI_API_KEY", "from-environment", 1);
    CHECK(loaded("") == "from-environment");
    const std::string file = place.write("key", "from-file\n");
    ::setenv("GEMINI_API_KEY", "from-environment", 1);
    CHECK(loaded(file) == "from-file");
    ::setenv("CREDENTIALS_DIRECTORY", place.folder.c_str(), 1);
    CHECK(loaded(file) == "from-file"); // no such credential
    place.write("gemini-api-key", "from-credential");
    CHECK(loaded(file) == "from-credential");
}

TEST_CASE("The environment's key is wiped and gone once it was read, also where another one is used") {
    const Place place;
    const bool with_file = GENERATE(false, true);
    const std::string file = with_file ? place.write("key", "from-file") : "";
    ::setenv("GEMINI_API_KEY", "from-environment", 1);
    const char* const memory = std::getenv("GEMINI_API_KEY"); // glibc frees no variable's memory
    CHECK(loaded(file) == (with_file ? "from-file" : "from-environment"));
    CHECK(std::getenv("GEMINI_API_KEY") == nullptr);
    CHECK(std::string(memory).empty());
}

TEST_CASE("White space around a key is dropped") {
    const Place place;
    CHECK(loaded(place.write("key", " \t\r\n AIza-x_1 \r\n\n")) == "AIza-x_1");
    CHECK(loaded(place.write("key", std::string(4096, 'k') + "\n")) == std::string(4096, 'k'));
}

TEST_CASE("What is no key is refused, and the refusal names its source but nothing of it") {
    const Place place;
    const std::string secret = "AIzaSecret";
    for (const std::string& text :
         {std::string(), std::string(" \n"), secret + "\n" + secret, secret + " " + secret,
          secret + std::string(1, '\0'), secret + "\x1b[0m", secret + "\u00e9", secret + std::string(4096, 'k'),
          secret + std::string(20000, 'k'), secret + std::string(20000, ' ') + secret}) {
        const std::string file = place.write("key", text);
        const auto key = ApiKey::load(file);
        INFO(text.size());
        REQUIRE_FALSE(key);
        CHECK(key.error().code == GCOALESCE_BAD_REQUEST);
        CHECK_THAT(key.error().message, Catch::Contains(file) && !Catch::Contains("AIza"));
    }
    ::setenv("GEMINI_API_KEY", "two words", 1);
    CHECK_THAT(loaded(""),
               Catch::StartsWith("error: ") && Catch::Contains("GEMINI_API_KEY") && !Catch::Contains("words"));
}

TEST_CASE("A key's file that was named must be there and readable") {
    const Place place;
    CHECK_THAT(loaded((place.folder / "absent").string()), Catch::Contains("absent") && Catch::Contains("not exist"));
    CHECK_THAT(loaded(place.folder.string()), Catch::StartsWith("error: cannot read"));
    ::setenv("CREDENTIALS_DIRECTORY", place.folder.c_str(), 1);
    std::filesystem::create_directory(place.folder / "gemini-api-key");
    CHECK_THAT(loaded(""), Catch::StartsWith("error: cannot read")); // no falling back to something else
}

TEST_CASE("A key that is moved leaves nothing where it was") {
    ApiKey key("short"); // within the string object itself
    const char* const memory = key.text().data();
    ApiKey other(std::move(key));
    CHECK(other.text() == "short");
    CHECK(key.text().empty());
    CHECK(std::string_view(memory, 5) == std::string_view("\0\0\0\0\0", 5));
    ApiKey third("another");
    third = std::move(other);
    CHECK(third.text() == "short");
}
