// The library's handles, with owners.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "cli/commands.hpp"

namespace gcoalesce::cli {

struct Detach {
    void operator()(gcoalesce_attachment* attachment) const { gcoalesce_detach(attachment); }
};
using AttachmentPtr = std::unique_ptr<gcoalesce_attachment, Detach>;

struct Close {
    void operator()(gcoalesce_subscription* subscription) const { gcoalesce_close(subscription); }
};
using SubscriptionPtr = std::unique_ptr<gcoalesce_subscription, Close>;

// What the library said last on this thread.
Error last_error(Code code);

// Attaches to the broker that the command line means. One that is starting gets a second to be ready.
Result<AttachmentPtr> attach(const Context& context);

// Attaches and says something to the broker, which `say` does with the library's call, waiting so long at most for the
// answer. A broker that does not answer in this time is unresponsive.
Result<void> tell_broker(const Context& context,
                         const std::function<Code(gcoalesce_attachment*, std::int64_t timeout_ms)>& say);

} // namespace gcoalesce::cli
