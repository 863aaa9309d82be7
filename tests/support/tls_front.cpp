#include "tests/support/tls_front.hpp"

#include <cstdlib>
#include <fmt/format.h>
#include <fstream>
#include <stdexcept>

#include "tests/support/server_program.hpp"

namespace gcoalesce::test {
namespace {

void run(std::vector<std::string> argv) {
    const std::string name = argv[0];
    Process process(std::move(argv));
    if (process.wait() != 0) throw std::runtime_error(name + ": " + process.err());
}

constexpr const char* kConfiguration = R"(
daemon off;
master_process off;
pid {0}/nginx.pid;
error_log {0}/error.log;
events {{ worker_connections 4096; }}
http {{
  log_format plain "$server_protocol $connection";
  access_log {0}/access.log plain;
  client_body_temp_path {0}/body;
  proxy_temp_path {0}/proxy;
  fastcgi_temp_path {0}/fastcgi;
  uwsgi_temp_path {0}/uwsgi;
  scgi_temp_path {0}/scgi;
  server {{
    listen 127.0.0.1:{1} ssl http2;
    ssl_certificate {0}/cert.pem;
    ssl_certificate_key {0}/key.pem;
    client_max_body_size 0;
    location / {{
      proxy_pass {2};
      proxy_http_version 1.1;
      proxy_buffering off;
      proxy_request_buffering off;
      proxy_read_timeout 1h;
    }}
  }}
}}
)";

} // namespace

bool TlsFront::available() {
    return !find_program("nginx").empty() && !find_program("openssl").empty();
}

TlsFront::TlsFront(const std::string& behind) {
    std::string name = (std::filesystem::temp_directory_path() / "gcoalesce-tls-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary directory");
    directory_ = name;
    const auto file = [&](const char* base) { return (directory_ / base).string(); };
    const std::vector<std::string> make = {
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"};
    const auto make_with = [&](const std::vector<std::string>& more) {
        std::vector<std::string> argv = make;
        argv.insert(argv.end(), more.begin(), more.end());
        run(std::move(argv));
    };
    make_with({"-keyout", file("ca.key"), "-out", file("ca.pem"), "-subj", "/CN=gcoalesce test CA"});
    make_with({"-CA", file("ca.pem"), "-CAkey", file("ca.key"), "-keyout", file("key.pem"), "-out", file("cert.pem"),
               "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-addext",
               "basicConstraints=critical,CA:FALSE"});

    const std::uint16_t port = free_port();
    url_ = fmt::format("https://127.0.0.1:{}", port);
    std::ofstream(file("nginx.conf")) << fmt::format(kConfiguration, directory_.string(), port, behind);
    nginx_ = std::make_unique<Process>(std::vector<std::string>{find_program("nginx"), "-p", directory_.string(), "-c",
                                                                file("nginx.conf"), "-e", file("error.log")});
    wait_for_listener(port, "nginx");
}

TlsFront::~TlsFront() {
    nginx_.reset();
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
}

std::vector<TlsFront::Request> TlsFront::requests() const {
    std::vector<Request> all;
    std::ifstream log(directory_ / "access.log");
    for (Request request; log >> request.protocol >> request.connection;) all.push_back(request);
    return all;
}

} // namespace gcoalesce::test
