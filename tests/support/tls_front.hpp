// nginx before a server of plain HTTP: TLS with a certificate authority of our own, and HTTP/2.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/process.hpp"

namespace gcoalesce::test {

class TlsFront {
  public:
    // Whether the programs for it are installed.
    static bool available();

    // Runs until the object goes; takes connections when the constructor returns. behind: "http://127.0.0.1:PORT".
    explicit TlsFront(const std::string& behind);
    ~TlsFront();

    const std::string& url() const { return url_; } // "https://127.0.0.1:PORT"
    std::string ca_file() const { return (directory_ / "ca.pem").string(); }

    // The requests that have ended so far, in the order of their ends.
    struct Request {
        std::string protocol;   // "HTTP/2.0"
        std::string connection; // its number
    };
    std::vector<Request> requests() const;

  private:
    std::filesystem::path directory_;
    std::string url_;
    std::unique_ptr<Process> nginx_;
};

// A test that needs it starts with this: without the programs it says SKIPPED, which ctest shows as skipped.
#define GCOALESCE_REQUIRE_TLS_FRONT()                                                                                  \
    if (!gcoalesce::test::TlsFront::available()) {                                                                     \
        std::puts("SKIPPED: no nginx or no openssl program");                                                          \
        return;                                                                                                        \
    }

} // namespace gcoalesce::test
