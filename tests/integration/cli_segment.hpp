// A segment whose every word is known, since the test itself wrote it.
#pragma once

#include <algorithm>
#include <catch2/catch.hpp>
#include <fcntl.h>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <vector>

#include "tests/integration/cli_support.hpp"

namespace gcoalesce::test {

inline Key key_of(std::initializer_list<std::uint8_t> beginning) {
    Key key{};
    std::copy(beginning.begin(), beginning.end(), key.begin());
    return key;
}

inline std::string text_event(const std::string& text) {
    return R"({"candidates":[{"content":{"role":"model","parts":[{"text":")" + text + R"("}]},"index":0}]})";
}

inline SlotEnding complete() {
    SlotEnding ending{};
    ending.kind = GCOALESCE_COMPLETE;
    ending.finish_reason.assign("STOP");
    ending.prompt_tokens = 7;
    ending.answer_tokens = 5;
    ending.total_tokens = 12;
    return ending;
}

// A broker in this process, and streams in it.
struct Segment {
    ScratchInstance directory;
    FakeBroker broker{*directory};

    StreamRef open(const Key& key, StreamId id, const std::vector<std::string>& events = {}, bool indexed = true) {
        return broker.with_store([&](Store& store) {
            StreamOpening opening;
            opening.key = key;
            opening.stream_id = id;
            opening.model = "gemini-2.5-flash";
            opening.request = "{}";
            const StreamRef stream = store.open(opening, indexed).value();
            for (const std::string& event : events) REQUIRE(store.append(stream, event));
            return stream;
        });
    }
    void append(StreamRef stream, const std::string& event) {
        broker.with_store([&](Store& store) { REQUIRE(store.append(stream, event)); });
    }
    void end(StreamRef stream, const SlotEnding& ending, Nanos fresh_for = 0) {
        broker.with_store([&](Store& store) { store.end(stream, ending, fresh_for); });
    }
    std::vector<std::string> command(std::vector<std::string> arguments) const {
        return test::command(*directory, std::move(arguments));
    }
    Ran run(std::vector<std::string> arguments) const { return test::run(command(std::move(arguments))); }
    // Before the broker's next sweep: nobody pins the stream, so that would retire it.
    Ran run_after_evicting(StreamRef stream, std::vector<std::string> arguments) {
        return broker.with_store([&](Store& store) {
            store.evict(stream);
            return run(std::move(arguments));
        });
    }
    // Words of the segment, changed under everyone's eyes.
    Mapping writable() const {
        const UniqueFd fd(::shm_open(directory.segment_name().c_str(), O_RDWR | O_CLOEXEC, 0));
        struct stat file {};
        REQUIRE(::fstat(fd.get(), &file) == 0);
        return Mapping::of(fd.get(), static_cast<std::size_t>(file.st_size), true).value();
    }
};

} // namespace gcoalesce::test
