// A store on anonymous memory, and a look at what it shows to readers.
#pragma once

#include <stdexcept>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

#include "broker/store.hpp"
#include "segment/reader.hpp"

namespace gcoalesce::test {

struct MemorySegmentOptions {
    std::uint32_t slots = 16;
    std::size_t extent_bytes = 16 << 20;
    std::vector<TemplateSettings> templates = {TemplateSettings{}};
};

// Zeroed memory as a client would get it from the kernel.
inline Mapping anonymous_memory(std::size_t bytes) {
    const UniqueFd fd(::memfd_create("gcoalesce-test", MFD_CLOEXEC));
    if (!fd || ::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0)
        throw std::runtime_error("no memory for the test");
    Result<Mapping> mapping = Mapping::of(fd.get(), bytes, true);
    if (!mapping) throw std::runtime_error(mapping.error().message);
    return *std::move(mapping);
}

class MemorySegment {
  public:
    explicit MemorySegment(const Clock& clock, const MemorySegmentOptions& options = {}) {
        StoreOptions store_options;
        store_options.slots = options.slots;
        store_options.instance = "test";
        Result<std::unique_ptr<Store>> made =
            Store::create(anonymous_memory(Store::table_bytes(options.slots) + options.extent_bytes), store_options,
                          options.templates, clock);
        if (!made) throw std::runtime_error(made.error().message);
        store_ = *std::move(made);
        store_->set_ready();
    }

    Store& store() { return *store_; }

    const Slot& slot(StreamRef stream) const { return store_->view().slot(stream.slot); }

    // What a reader that starts now can read.
    std::vector<std::string> events(StreamRef stream) const {
        StreamReader reader(store_->view(), stream.slot, stream.identity);
        std::vector<std::string> all;
        for (std::string event; reader.next(event) == ReadStatus::event;) all.push_back(event);
        return all;
    }

  private:
    std::unique_ptr<Store> store_;
};

} // namespace gcoalesce::test
