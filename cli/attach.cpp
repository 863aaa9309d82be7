#include "cli/attach.hpp"

#include "base/clock.hpp"
#include "segment/mapping.hpp"

namespace gcoalesce::cli {
namespace {

constexpr std::int64_t kStartingMs = 1000;
constexpr std::int64_t kActivationMs = 10'000;
constexpr std::int64_t kAnswerMs = 10'000; // it may read many files, or drop them

const char* or_null(const std::string& text) {
    return text.empty() ? nullptr : text.c_str();
}

// Where somebody listens and no broker lives it is the service manager, and starts one because we connected.
bool is_being_activated(const Context& context) {
    const Result<Instance> instance = resolve_instance(context.instance.c_str(), context.runtime_dir.c_str());
    if (!instance) return false;
    const Result<OpenSegment> segment = open_segment(*instance);
    if (!segment) return segment.error().code == GCOALESCE_ABSENT || segment.error().code == GCOALESCE_BROKER_DEAD;
    const Liveness broker = segment->liveness(system_clock().monotonic());
    return broker == Liveness::dead || broker == Liveness::closed;
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
    if (code == GCOALESCE_UNRESPONSIVE && is_being_activated(context))
        code = gcoalesce_attach(&options, kActivationMs, &attachment);
    if (code != GCOALESCE_OK) return tl::unexpected(last_error(code));
    return AttachmentPtr(attachment);
}

Result<void> tell_broker(const Context& context,
                         const std::function<Code(gcoalesce_attachment*, std::int64_t timeout_ms)>& say) {
    const Result<AttachmentPtr> attachment = attach(context);
    if (!attachment) return tl::unexpected(attachment.error());
    const Code code = say(attachment->get(), kAnswerMs);
    if (code == GCOALESCE_OK) return {};
    Error error = last_error(code);
    if (code == GCOALESCE_TIMED_OUT) error.code = GCOALESCE_UNRESPONSIVE; // the patience was ours, not the user's
    return tl::unexpected(std::move(error));
}

} // namespace gcoalesce::cli
