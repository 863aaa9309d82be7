#include "tests/support/snapshots.hpp"

#include <chrono>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "base/log.hpp"

namespace gcoalesce::test {

Snapshots::Post HandLoop::post() {
    return [this](std::function<void()> function) {
        {
            const std::lock_guard lock(mutex_);
            functions_.push_back(std::move(function));
        }
        posted_.notify_one();
    };
}

void HandLoop::until(const std::function<bool()>& done) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    while (!done()) {
        std::unique_lock lock(mutex_);
        if (!posted_.wait_until(lock, deadline, [&] { return !functions_.empty(); }))
            throw std::runtime_error("nothing was posted that makes it so");
        const auto function = std::move(functions_.front());
        functions_.pop_front();
        lock.unlock();
        function();
    }
}

TempDirectory::TempDirectory() {
    // In memory where that is possible: no test waits for a disk.
    const bool memory = std::filesystem::is_directory("/dev/shm");
    const std::filesystem::path where = memory ? "/dev/shm" : std::filesystem::temp_directory_path();
    std::string name = (where / "snapshots-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp: " + name);
    path = name;
}
TempDirectory::~TempDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
}

StreamId stream_number(std::uint64_t number) {
    return (number + 1) * 0x9e3779b97f4a7c15; // odd: no two alike
}

Key key_number(std::uint64_t number) {
    std::mt19937_64 random(number);
    Key key{};
    for (std::uint8_t& byte : key) byte = static_cast<std::uint8_t>(random());
    return key;
}

Snapshot make_snapshot(std::uint64_t number, const Clock& clock) {
    std::mt19937_64 random(number);
    const auto any = [&](std::uint64_t below) { return static_cast<std::int64_t>(random() % below); };
    const auto bytes = [&](std::uint64_t most) {
        std::string text(random() % (most + 1), '\0');
        for (char& byte : text) byte = static_cast<char>(random());
        return text;
    };
    Snapshot snapshot;
    snapshot.facts.key = key_number(number);
    snapshot.facts.stream_id = stream_number(number);
    snapshot.facts.realm = random();
    snapshot.facts.template_id = "template-" + std::to_string(number % 3);
    snapshot.facts.ended_boottime_ns = clock.boottime();
    snapshot.facts.fresh_until_boottime_ns = clock.boottime() + 5 * kSecond;
    snapshot.method = number % 2 == 0 ? Method::stream : Method::unary;
    snapshot.model = "gemini-" + std::to_string(number);
    snapshot.template_revision = random();
    snapshot.opened_ns = clock.monotonic() - 3 * kSecond;
    snapshot.first_event_ns = clock.monotonic() - 2 * kSecond;
    snapshot.opened_wall_ns = clock.wall() - 3 * kSecond;
    snapshot.upstream_status = 200;
    snapshot.retries = static_cast<std::uint32_t>(number % 3);
    SlotEnding& ending = snapshot.ending;
    ending.kind = GCOALESCE_COMPLETE;
    ending.reusable = 1;
    ending.upstream_status = 200;
    ending.retry_ms = any(1000);
    ending.prompt_tokens = any(1000);
    ending.cached_tokens = any(1000);
    ending.thought_tokens = any(1000);
    ending.answer_tokens = any(1000);
    ending.total_tokens = any(1000);
    ending.ended_ns = clock.monotonic();
    ending.ended_wall_ns = clock.wall();
    ending.finish_reason.assign("STOP");
    ending.model_version.assign("version-" + std::to_string(number));
    ending.message.assign("message " + std::to_string(number));
    snapshot.request_head = bytes(300);
    snapshot.request_bytes = random();
    snapshot.request_digest = key_number(number + 1);
    for (std::int64_t count = any(8); count >= 0; --count) snapshot.events.push_back(bytes(1500)); // some are empty
    return snapshot;
}

bool same_content(const Snapshot& one, const Snapshot& other) {
    const auto ending = [](const SlotEnding& of) {
        return std::tuple(of.kind, of.code, of.upstream_status, of.reusable, of.retry_ms, of.prompt_tokens,
                          of.cached_tokens, of.thought_tokens, of.answer_tokens, of.total_tokens,
                          of.finish_reason.view(), of.model_version.view(), of.message.view());
    };
    const auto rest = [](const Snapshot& of) {
        return std::tuple(of.facts.key, of.facts.stream_id, of.facts.realm, of.facts.template_id, of.method, of.model,
                          of.template_revision, of.upstream_status, of.retries, of.request_head, of.request_bytes,
                          of.request_digest, of.events);
    };
    return ending(one.ending) == ending(other.ending) && rest(one) == rest(other);
}

SnapshotOptions StoreLife::defaults() {
    SnapshotOptions options;
    options.retry_first = kMillisecond;
    options.retry_most = 10 * kMillisecond;
    options.open_within = 60 * kSecond;
    return options;
}

StoreLife::StoreLife(const std::filesystem::path& directory, const SnapshotOptions& options, std::string boot_id)
    : file(directory / "gcoalesce-default.db") {
    set_log_level(LogLevel::error); // what is degraded on purpose need not be told
    SnapshotOptions own = options;
    own.directory = directory.string();
    own.instance = "default";
    own.boot_id = std::move(boot_id);
    auto opened = Snapshots::open(own, timers, loop.post());
    if (!opened) throw std::runtime_error(opened.error().message);
    store = std::move(*opened);
}

void StoreLife::save(std::uint64_t number, Nanos ttl) {
    store->save(make_snapshot(number, clock), ttl);
}

Result<Snapshot> StoreLife::load(StreamId id) {
    std::optional<Result<Snapshot>> answer;
    store->load(id, [&](Result<Snapshot> loaded) { answer = std::move(loaded); });
    if (answer) throw std::runtime_error("a callback ran within the call that asks");
    loop.until([&] { return answer.has_value(); });
    return std::move(*answer);
}

void StoreLife::settle() {
    for (;;) {
        loop.until([&] { return store->ready() && !store->state().degraded; });
        if (store->flush(60 * kSecond) && !store->state().degraded) return;
    }
}

bool StoreLife::whole(std::uint64_t number) {
    const auto loaded = load_number(number);
    return loaded && same_content(*loaded, make_snapshot(number, clock));
}

} // namespace gcoalesce::test
