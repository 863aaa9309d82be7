// The C++ header in a C++17 program, against the shared library. Exits with 0 if all is as told.
#include <cstdio>
#include <type_traits>
#include <vector>

#include "gcoalesce/gcoalesce.hpp"

namespace gc = gcoalesce::client;

static_assert(!std::is_copy_constructible_v<gc::Attachment> && std::is_nothrow_move_constructible_v<gc::Attachment>);
static_assert(!std::is_copy_constructible_v<gc::Subscription> &&
              std::is_nothrow_move_constructible_v<gc::Subscription>);

int main() {
    gc::Attachment attachment;
    if (attachment.attach({"no-such-instance", "/nonexistent", "test"}, gc::milliseconds(0)) != GCOALESCE_ABSENT) {
        std::printf("FAILED: expected \"absent\": %s\n", gc::message());
        return 1;
    }
    std::vector<gc::Subscription> subscriptions(2);
    if (attachment.open({"gemini-2.5-flash", "{}"}, subscriptions[0]) != GCOALESCE_BAD_REQUEST || subscriptions[0] ||
        subscriptions[0].ending()) {
        std::printf("FAILED: an empty attachment opens nothing\n");
        return 1;
    }
    gc::Attachment moved(std::move(attachment));
    gc::Event event;
    return subscriptions[1].next(gc::milliseconds(0), event) == GCOALESCE_BAD_REQUEST && moved.fd() == -1 ? 0 : 1;
}
