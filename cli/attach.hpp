// The library's handles, with owners.
#pragma once

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

} // namespace gcoalesce::cli
