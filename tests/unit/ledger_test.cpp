// What is counted of random traffic, against a count of its own.
#include "broker/ledger.hpp"

#include <array>
#include <catch2/catch.hpp>
#include <map>
#include <random>
#include <set>

#include "broker/coalescer.hpp"
#include "broker/rescue.hpp"
#include "segment/join.hpp"
#include "tests/support/fake_timers.hpp"
#include "tests/support/fake_upstream.hpp"
#include "tests/support/memory_segment.hpp"
#include "tests/support/snapshots.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;

namespace {

constexpr std::uint32_t kSlots = 256;
constexpr Nanos kLongAgo = 3600 * kSecond;

std::vector<TemplateSettings> templates() {
    std::vector<TemplateSettings> all(4);
    all[1].id = "checked";
    all[1].max_individual = 2;
    all[2].id = "checked_live";
    all[2].live = true;
    all[2].strict_individual = true;
    all[3].id = "abandoned";
    all[3].cancel_after = 300 * kMillisecond;
    all[3].subscribers = 3;
    all[3].snapshots = false;
    for (TemplateSettings& settings : all) settings.in_flight = 5;
    return all;
}

std::size_t number_of(const std::string& template_id) {
    const std::vector<TemplateSettings> all = templates();
    return static_cast<std::size_t>(
        std::ranges::find(all, template_id, [](const TemplateSettings& settings) { return settings.id; }) -
        all.begin());
}

std::string event(std::string_view text, const Usage& usage, bool last) {
    return fmt::format(
        R"({{"candidates":[{{"content":{{"parts":[{{"text":"{}"}}],"role":"model"}}{}}}],"usageMetadata":)"
        R"({{"promptTokenCount":{},"cachedContentTokenCount":{},"toolUsePromptTokenCount":{},"thoughtsTokenCount":{},)"
        R"("candidatesTokenCount":{}}}}})",
        text, last ? R"(,"finishReason":"STOP")" : "", usage.prompt, usage.cached, usage.tool_use, usage.thoughts,
        usage.answer);
}

// Clients, an upstream and an operator, each of whom does what chance says; and what they have seen.
class Traffic {
  public:
    explicit Traffic(unsigned seed) : random_(seed) {
        open_snapshots();
        begin();
    }

    void step() {
        const std::uint64_t dice = pick(24);
        if (dice < 6) return ask();
        if (dice < 9) return join();
        if (dice < 14) return answer();
        if (dice < 16) return leave();
        if (dice < 17) return resume();
        if (dice < 18) return cancel();
        if (dice < 19) return purge();
        if (dice < 20) return push();
        if (dice < 21) return ask_alone();
        pass(dice > 21 ? 200 * kMillisecond : pick(20) == 0 ? 31 * kSecond : 4 * kSecond);
    }

    // In order, or as a crash leaves it: what was not kept yet stands in the dead segment alone.
    void restart(bool in_order) {
        finish();
        if (in_order) coalescer_->keep_ledger();
        coalescer_.reset();
        if (!in_order) rescue(segment_->store().view(), *snapshots_, clock_, boot_id(), 60 * kSecond);
        REQUIRE(snapshots_->flush(60 * kSecond));
        snapshots_.reset();
        open_snapshots();
        begin();
    }

    // Runs everything to its end, and compares.
    void check() {
        finish();
        coalescer_->keep_ledger();
        for (std::size_t of = 0; of < templates().size(); ++of) {
            const LedgerCounts told = segment_->store().counted(static_cast<std::uint32_t>(of));
            const LedgerCounts seen = seen_counts(of);
            for (std::size_t i = 0; i < std::size(kTemplateCounterNames); ++i) {
                INFO(templates()[of].id << ": " << kTemplateCounterNames[i]);
                CHECK(told[i] == seen[i]);
                reached_[i] = reached_[i] || seen[i] != 0;
            }
        }
    }

    bool reached(TemplateCounter counter) const { return reached_[static_cast<std::size_t>(counter)]; }
    bool retried() const { return retried_; }

  private:
    struct Answer { // one stream and what it cost, over all its tries
        std::size_t of = 0;
        Usage usage;
        bool counted = false;      // usage: by one of its events
        std::uint64_t readers = 0; // that cost nothing
    };
    struct Reader {
        StreamId stream;
        std::uint32_t slot;
        std::size_t of;
        char key;
    };

    std::uint64_t pick(std::uint64_t below) { return random_() % below; }
    Nanos now() const { return clock_.monotonic(); }

    void open_snapshots() {
        SnapshotOptions options = StoreLife::defaults();
        options.directory = directory_.path.string();
        options.instance = "test";
        snapshots_ = *Snapshots::open(options, timers_, loop_.post());
        loop_.until([&] { return snapshots_->ready(); });
    }

    void begin() {
        segment_ =
            std::make_unique<MemorySegment>(clock_, MemorySegmentOptions{.slots = kSlots, .templates = templates()});
        lane_memory_ = anonymous_memory(lane_bytes(kSlots));
        lane_ = Lane(lane_memory_.data(), kSlots);
        LanePort port;
        port.mapping = lane_memory_;
        port.send_wake = [] { return true; };
        segment_->store().add_lane(1, std::move(port));
        ProducerLimits limits;
        limits.retries = 1;
        coalescer_ = std::make_unique<Coalescer>(segment_->store(), upstream_, timers_, snapshots_.get(), templates(),
                                                 limits, CoalescerLimits{});
    }

    static Key key_of(std::size_t of, char name) {
        Key key{};
        key.fill(static_cast<std::uint8_t>(name));
        key[0] = static_cast<std::uint8_t>(of);
        return key;
    }

    // ---- clients ----

    void ask() {
        const std::size_t of = pick(templates().size());
        const auto chance = pick(10);
        ask(of, static_cast<char>('a' + pick(3)),
            chance == 0   ? GCOALESCE_SHARE_NOT
            : chance == 1 ? GCOALESCE_SHARE_REFRESH
                          : GCOALESCE_SHARE,
            0);
    }

    void ask(std::size_t of, char key, gcoalesce_sharing sharing, StreamId individual_of) {
        OpenRequest request;
        request.lane = 1;
        request.settings = coalescer_->settings(templates()[of].id);
        request.model = templates()[of].id; // so that the upstream knows whose call it is
        request.body = std::make_shared<const std::string>(std::to_string(++asked_)); // and whose request
        request.key = key_of(of, key);
        request.sharing = sharing;
        request.individual_of = individual_of;
        if (of == 1 || of == 2)
            request.schema =
                Schema::compile(R"({"type": "object", "required": ["a"]})", Schema::Form::json_schema).value();
        bool told = false;
        coalescer_->open(std::move(request), [this, of, key, body = asked_, alone = individual_of != 0,
                                              &told](const Result<OpenAnswer>& answer) {
            if (!alone) told = true; // who asks alone may wait for his turn
            if (!answer) return count(of, TemplateCounter::requests_refused);
            took(of, key, body, *answer);
        });
        if (individual_of == 0) loop_.until([&] { return told; }); // the disk
    }

    // What its own body went upstream for is paid; whatever else it reads costs nothing.
    void took(std::size_t of, char key, std::uint64_t body, const OpenAnswer& answer) {
        const bool paid = !answers_.contains(answer.stream_id);
        if (paid) {
            CHECK((answer.status == GCOALESCE_STARTED || answer.status == GCOALESCE_BYPASS ||
                   answer.status == GCOALESCE_INDIVIDUAL));
            answers_[answer.stream_id].of = of;
            stream_of_[std::to_string(body)] = answer.stream_id;
        }
        served(of, answer.status, !paid, answer.stream_id);
        readers_.push_back({answer.stream_id, answer.stream.slot, of, key});
    }

    void served(std::size_t of, gcoalesce_status status, bool free, StreamId stream) {
        count(of, static_cast<TemplateCounter>(status));
        if (free) ++answers_.at(stream).readers;
        const Nanos since = pushed_ == 0 ? kLongAgo : now() - pushed_;
        const std::size_t nth = since < 5 * kSecond ? 0 : since < 10 * kSecond ? 1 : since < 30 * kSecond ? 2 : 3;
        count(of, TemplateCounter::requests_0s, nth);
        if (free) count(of, TemplateCounter::coalesced_0s, nth);
    }

    // Without the broker, which counts it when it next looks.
    void join() {
        const std::size_t of = pick(3); // the last one has a limit of subscribers: its clients ask
        const char key = static_cast<char>('a' + pick(3));
        const auto joined = try_join(segment_->store().view(), lane_, key_of(of, key), now());
        if (!joined) return;
        const StreamId stream = segment_->slot({joined->slot, joined->identity}).opening.load().stream_id;
        served(of, joined->fresh ? GCOALESCE_FRESH : GCOALESCE_JOINED, true, stream);
        readers_.push_back({stream, joined->slot, of, key});
    }

    // One whose answer turned out invalid asks for another.
    void ask_alone() {
        for (std::size_t i = 0; i < readers_.size(); ++i) {
            const Reader reader = readers_[i];
            const auto kind = segment_->store().slot(reader.slot).ending.load().kind;
            const bool shared = segment_->store().slot(reader.slot).opening.load().individual_of == 0;
            if (kind != GCOALESCE_INVALID || !shared) continue;
            leave(i);
            return ask(reader.of, reader.key, GCOALESCE_SHARE, reader.stream);
        }
    }

    void leave() {
        if (!readers_.empty()) leave(pick(readers_.size()));
    }
    void leave(std::size_t which) {
        lane_.unpin(readers_[which].slot);
        readers_.erase(readers_.begin() + static_cast<std::ptrdiff_t>(which));
    }

    void resume() {
        if (answers_.empty()) return;
        const auto which = std::next(answers_.begin(), static_cast<std::ptrdiff_t>(pick(answers_.size())));
        OpenRequest request;
        request.lane = 1;
        request.resume = which->first;
        std::optional<Result<OpenAnswer>> told;
        coalescer_->open(std::move(request), [&](const Result<OpenAnswer>& answer) { told = answer; });
        loop_.until([&] { return told.has_value(); });
        // A stream that nobody finds is no template's.
        if (!*told) return count(0, TemplateCounter::requests_refused);
        count(which->second.of, TemplateCounter::requests_resumed);
        readers_.push_back({which->first, (*told)->stream.slot, which->second.of, '?'});
    }

    // ---- upstream ----

    void answer() {
        std::vector<FakeUpstream::Started*> running;
        for (FakeUpstream::Started& call : upstream_.calls) {
            if (!call.over()) running.push_back(&call);
        }
        if (!running.empty()) answer(*running[pick(running.size())]);
    }

    void answer(FakeUpstream::Started& call) {
        Answer& of = answers_.at(stream_of_.at(*call.call.body));
        if (!std::exchange(headed_[&call], true)) {
            call.sent();
            if (pick(6) == 0) {
                const int status = pick(2) == 0 ? 500 : 400; // worth a retry, and not
                call.head(status);
                call.bytes(error_json(status, "INTERNAL"));
                return call.done();
            }
            call.head(200);
        }
        const auto chance = pick(8);
        if (chance == 0) return call.broken();
        of.usage.prompt = 40;
        of.usage.cached = 30;
        of.usage.tool_use += static_cast<std::int64_t>(pick(3));
        of.usage.thoughts += static_cast<std::int64_t>(pick(3));
        of.usage.answer += static_cast<std::int64_t>(1 + pick(5));
        const bool last = chance < 4;
        call.bytes(sse(event(!last ? "" : pick(3) == 0 ? R"({\"b\": 1})" : R"({\"a\": 1})", of.usage, last)));
        if (last) call.done();
    }

    // ---- the operator, and time ----

    void cancel() { // or not: it may have ended, or have been purged
        if (!readers_.empty()) (void)coalescer_->cancel(to_hex(readers_[pick(readers_.size())].stream));
    }

    void purge() {
        if (pick(8) == 0) CHECK(coalescer_->purge(GCOALESCE_PURGE_ALL, ""));
    }

    void push() {
        segment_->store().sweep(); // what was joined was joined before
        REQUIRE(coalescer_->notify_on({}, 0));
        pushed_ = now();
    }

    void pass(Nanos time) {
        for (Nanos gone = 0; gone < time; gone += 100 * kMillisecond) {
            segment_->store().sweep();
            timers_.advance(100 * kMillisecond);
            segment_->store().sweep();
            coalescer_->beat();
        }
    }

    void finish() {
        segment_->store().sweep();
        while (coalescer_->in_flight() != 0) {
            answer();
            if (pick(8) == 0) coalescer_->interrupt_all();
            pass(100 * kMillisecond);
        }
        while (!readers_.empty()) leave(0);
        segment_->store().sweep();
    }

    // ---- the count ----

    void count(std::size_t of, TemplateCounter counter, std::size_t nth = 0) {
        ++seen_[of][static_cast<std::size_t>(counter) + nth];
    }

    LedgerCounts seen_counts(std::size_t of) {
        LedgerCounts counts = seen_[of];
        const auto at = [&](TemplateCounter counter) -> std::uint64_t& {
            return counts[static_cast<std::size_t>(counter)];
        };
        std::set<std::string> bodies;
        for (const FakeUpstream::Started& call : upstream_.calls) {
            if (number_of(call.call.model) != of) continue;
            ++at(TemplateCounter::upstream_calls);
            retried_ = retried_ || !bodies.insert(*call.call.body).second;
        }
        for (const auto& [id, answer] : answers_) {
            if (answer.of != of) continue;
            const auto fresh =
                static_cast<std::uint64_t>(answer.usage.prompt + answer.usage.tool_use - answer.usage.cached);
            const auto cached = static_cast<std::uint64_t>(answer.usage.cached);
            const auto thoughts = static_cast<std::uint64_t>(answer.usage.thoughts);
            const auto text = static_cast<std::uint64_t>(answer.usage.answer);
            at(TemplateCounter::prompt_tokens_paid) += fresh;
            at(TemplateCounter::cached_tokens_paid) += cached;
            at(TemplateCounter::thought_tokens_paid) += thoughts;
            at(TemplateCounter::answer_tokens_paid) += text;
            at(TemplateCounter::prompt_tokens_avoided) += fresh * answer.readers;
            at(TemplateCounter::cached_tokens_avoided) += cached * answer.readers;
            at(TemplateCounter::thought_tokens_avoided) += thoughts * answer.readers;
            at(TemplateCounter::answer_tokens_avoided) += text * answer.readers;
        }
        return counts;
    }

    std::mt19937 random_;
    FakeClock clock_;
    FakeTimers timers_{clock_};
    FakeUpstream upstream_;
    TempDirectory directory_;
    HandLoop loop_;
    std::unique_ptr<Snapshots> snapshots_;
    std::unique_ptr<MemorySegment> segment_;
    Mapping lane_memory_;
    Lane lane_;
    std::unique_ptr<Coalescer> coalescer_;
    std::uint64_t asked_ = 0;
    Nanos pushed_ = 0;
    std::map<StreamId, Answer> answers_;
    std::map<std::string, StreamId> stream_of_; // by the body of the request that started it
    std::map<const FakeUpstream::Started*, bool> headed_;
    std::vector<Reader> readers_;
    std::array<LedgerCounts, 4> seen_{};
    LedgerCounts reached_{};
    bool retried_ = false;
};

} // namespace

TEST_CASE("T100: requests, calls and tokens of random traffic equal an independent count, across restarts too") {
    LedgerCounts reached{};
    bool retried = false;
    for (unsigned seed = 1; seed <= 12; ++seed) {
        CAPTURE(seed);
        Traffic traffic(seed);
        for (int life = 0; life < 3; ++life) {
            if (life != 0) traffic.restart(life == 1);
            for (int i = 0; i < 400; ++i) traffic.step();
            traffic.check();
        }
        for (std::size_t i = 0; i < reached.size(); ++i)
            reached[i] += traffic.reached(static_cast<TemplateCounter>(i)) ? 1 : 0;
        retried = retried || traffic.retried();
    }
    for (std::size_t i = 0; i < std::size(kTemplateCounterNames); ++i) { // else the comparison says nothing
        CAPTURE(kTemplateCounterNames[i]);
        CHECK(reached[i] > 0);
    }
    CHECK(retried);
}

TEST_CASE("a template that comes with a reload has its ledger from earlier, once, also when it had left meanwhile") {
    FakeClock clock;
    FakeTimers timers{clock};
    FakeUpstream upstream;
    TempDirectory directory;
    HandLoop loop;
    SnapshotOptions options = StoreLife::defaults();
    options.directory = directory.path.string();
    options.instance = "test";
    const std::unique_ptr<Snapshots> snapshots = *Snapshots::open(options, timers, loop.post());
    loop.until([&] { return snapshots->ready(); });
    snapshots->put(ledger_name("news"), "requests_joined 7 ");
    MemorySegment segment(clock);
    Store& store = segment.store();
    Coalescer coalescer(store, upstream, timers, snapshots.get(), {TemplateSettings{}}, {}, {});
    coalescer.keep_ledger();

    TemplateSettings news;
    news.id = "news";
    for (std::uint64_t joined = 7; joined < 10; ++joined) {
        REQUIRE(coalescer.set_templates({TemplateSettings{}, news}));
        coalescer.keep_ledger();
        coalescer.keep_ledger();
        const std::uint32_t index = store.template_index("news").value();
        CHECK(store.counted(index, TemplateCounter::requests_joined) == joined);
        store.count(index, TemplateCounter::requests_joined);
        REQUIRE(coalescer.set_templates({TemplateSettings{}}));
        CHECK(snapshots->get(ledger_name("news")) == fmt::format("requests_joined {} ", joined + 1));
    }
}

TEST_CASE("the ledger's text is read back, and passes over counters that this version does not know") {
    LedgerCounts counts{};
    counts[0] = 7;
    counts[static_cast<std::size_t>(TemplateCounter::coalesced_30s)] = UINT64_MAX;
    CHECK(read_ledger(write_ledger(counts)) == counts);
    CHECK(read_ledger("one_of_tomorrow 5 " + write_ledger(counts)) == counts);
    CHECK(read_ledger("") == LedgerCounts{});
    CHECK(read_ledger("requests_started many") == LedgerCounts{});
}
