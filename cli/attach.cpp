#include "cli/attach.hpp"

namespace gcoalesce::cli {
namespace {

constexpr std::int64_t kStartingMs = 1000;

const char* or_null(const std::string& text) {
    return text.empty() ? nullptr : text.c_str();
}

} // namespace

Error last_error(Code code) {
    return {code, gcoalesce_message(), 0};
}

Result<AttachmentPtr> attach(const Context& context) {
    gcoalesce_attach_options options{};
    options.size = sizeof options;
    options.instance = or_null(context.instance);
    options.runtime_dir = or_null(context.runtime_dir);
    options.client_name = "gcoalesce";
    gcoalesce_attachment* attachment = nullptr;
    gcoalesce_code code = gcoalesce_attach(&options, 0, &attachment);
    if (code == GCOALESCE_STARTING) code = gcoalesce_attach(&options, kStartingMs, &attachment);
    if (code != GCOALESCE_OK) return tl::unexpected(last_error(code));
    return AttachmentPtr(attachment);
}

} // namespace gcoalesce::cli
