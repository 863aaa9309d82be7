// The C ABI, for benchmarks: what fails, throws.
#pragma once

#include <stdexcept>
#include <string>

#include "gcoalesce/gcoalesce.h"

namespace gcoalesce::bench {

inline void check(gcoalesce_code code) {
    if (code != GCOALESCE_OK) throw std::runtime_error(gcoalesce_message());
}

class Client {
  public:
    explicit Client(const std::string& runtime_dir) {
        gcoalesce_attach_options options{sizeof options, nullptr, runtime_dir.c_str(), "bench"};
        check(gcoalesce_attach(&options, 10'000, &attachment_));
    }
    ~Client() { gcoalesce_detach(attachment_); }
    Client(const Client&) = delete;
    Client& operator=(const Client&) = delete;

    gcoalesce_attachment* attachment() const { return attachment_; }
    gcoalesce_subscription* open(const std::string& body) const {
        gcoalesce_request request{};
        request.model = "gemini-2.5-flash";
        return open(request, body);
    }
    // A template's answer for these variables, a JSON object.
    gcoalesce_subscription* open(const char* template_id, const std::string& variables) const {
        gcoalesce_request request{};
        request.template_id = template_id;
        return open(request, variables);
    }

  private:
    gcoalesce_subscription* open(gcoalesce_request request, const std::string& body) const {
        request.size = sizeof request;
        request.body = body.data();
        request.body_bytes = body.size();
        request.stream = 1;
        request.sharing = GCOALESCE_SHARE;
        gcoalesce_subscription* subscription = nullptr;
        check(gcoalesce_open(attachment_, &request, &subscription));
        return subscription;
    }

    gcoalesce_attachment* attachment_ = nullptr;
};

} // namespace gcoalesce::bench
