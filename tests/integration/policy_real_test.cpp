// What a request gets, by real brokers, upstreams and clients: templates, the key, resuming, and what an operator does.
#include <algorithm>
#include <catch2/catch.hpp>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <fmt/format.h>
#include <grp.h>
#include <random>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/integration/policy_support.hpp"
#include "tests/support/http.hpp"
#include "tests/support/tls_front.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;

namespace {

constexpr const char* kNews = R"({
  "model": "models/gemini-2.5-flash",
  "system_instruction": "Be {{tone}}.",
  "prompt": "News of {{ topic }}, please.",
  "variables": {
    "topic": {"max_length": 10},
    "tone": {"enum": ["plain", "warm"], "normalize": ["lowercase", "trim"], "default": "plain"}
  },
  "generation_config": {"temperature": 0.5}
})";

const std::string kUrl = "/v1beta/models/gemini-2.5-flash:streamGenerateContent?alt=sse";

std::string replaced(std::string text, const std::string& from, const std::string& to) {
    text.replace(text.find(from), from.size(), to);
    return text;
}

std::string hex(std::uint64_t stream) {
    return fmt::format("{:016x}", stream);
}

// Whether this very body has gone upstream. It is asked once more for that: a new one makes the counts longer.
bool was_asked(const Sim& sim, const std::string& body) {
    const std::string before = json_member(sim.calls(), "by_body");
    http(sim.url() + kUrl, body, {"content-type: application/json"});
    return json_member(sim.calls(), "by_body").size() == before.size();
}

} // namespace

// ---- templates -----------------------------------------------------------------------------------------------------

TEST_CASE("what goes upstream for a template is its rendering, byte for byte") {
    Stage stage;
    stage.templates().write("news.json", kNews);
    stage.start();
    const Answered warm = stage.run({"ask", "-t", "news", "--var", "topic=tea \"1\"", "--var", "tone= WARM", "--json"});
    CHECK(warm.code == 0);
    CHECK(warm.told("status") == "started");
    CHECK(warm.told("text").starts_with("Answer to: News of tea \"1\", please."));
    const Answered same = stage.run({"ask", "-t", "news", "--var", "tone=warm", "--var", "topic=tea \"1\"", "--json"});
    CHECK(same.told("status") == "fresh");
    CHECK(same.told("key") == warm.told("key"));
    CHECK(stage.counted() == 1);
    const std::string rendering = R"({"contents":[{"role":"user","parts":[{"text":"News of tea \"1\", please."}]}],)"
                                  R"("systemInstruction":{"parts":[{"text":"Be warm."}]},)"
                                  R"("generationConfig":{"temperature":0.5}})";
    CHECK(was_asked(stage.sim(), rendering));
    CHECK_FALSE(was_asked(stage.sim(), rendering + " "));
}

TEST_CASE("variables that a template does not allow are refused before anything is sent") {
    Stage stage;
    stage.templates().write("news.json", kNews);
    stage.start();
    struct Row {
        std::vector<std::string> arguments;
        const char* sentence;
    };
    for (const Row& row : {
             Row{{"-t", "news"}, "the variable \"topic\" is missing, which the template \"news\" needs"},
             Row{{"-t", "news", "--var", "topik=tea"},
                 "the variable \"topik\" is unknown to the template \"news\"; did you mean \"topic\"?"},
             Row{{"-t", "news", "--var", "topic=12345678901"},
                 "the variable \"topic\" has 11 characters; at most 10 are allowed"},
             Row{{"-t", "news", "--var", "topic=tea", "--var", "tone=cold"},
                 "the variable \"tone\" is none of the allowed values: \"plain\", \"warm\""},
             Row{{"-t", "news", "--var", "topic=a", "--var", "topic=b"}, "\"topic\" is given twice"},
             Row{{"-t", "news", "--var", "topic"}, "expected NAME=VALUE"},
             Row{{"-t", "news", "-m", "gemini-2.5-pro", "--var", "topic=a"}, "is the whole prompt"},
             Row{{"-t", "news", "--var", "topic=a", "--explicit-key", "k"},
                 "template \"news\" does not let requests bring a key of their own"},
         }) {
        std::vector<std::string> arguments = row.arguments;
        arguments.insert(arguments.begin(), "ask");
        const Answered ran = stage.run(arguments);
        INFO(row.sentence << "\n" << ran.err);
        CHECK(ran.code == 2);
        CHECK(ran.out.empty());
        CHECK(ran.says(row.sentence));
    }
    const Answered absent = stage.run({"ask", "-t", "gnus", "--var", "topic=a"});
    CHECK(absent.code == 1);
    CHECK(absent.says("there is no template \"gnus\""));
    CHECK(stage.counted() == 0);
}

TEST_CASE("SIGHUP puts a changed prompt in force, and keeps the keys of a template whose times alone changed") {
    Stage stage({"--log-level", "info"});
    stage.templates().write("news.json", kNews);
    stage.start();
    const std::vector<std::string> question = {"ask", "-t", "news", "--var", "topic=tea", "--json"};
    const Answered first = stage.run(question);
    CHECK(first.told("status") == "started");

    stage.templates().write("news.json", replaced(kNews, "{", R"({"linger": "40s", "ttl_window": "7s",)"));
    stage.broker().process().signal(SIGHUP);
    stage.broker().process().wait_for_err("reloaded: 2 templates");
    const Answered timed = stage.run(question);
    CHECK(timed.told("status") == "fresh");
    CHECK(timed.told("key") == first.told("key"));

    const std::string broken = stage.templates().write("news.json", replaced(kNews, "max_length", "max_lenght"));
    stage.broker().process().signal(SIGHUP);
    stage.broker().process().wait_for_err("keeping the templates that are in use: " + broken +
                                          ": /variables/topic/max_lenght: unknown member; did you mean "
                                          "\"max_length\"?");
    CHECK(stage.run(question).told("status") == "fresh");
    CHECK(stage.counted() == 1);

    stage.templates().write("news.json", replaced(kNews, "please.", "now."));
    stage.templates().write("more.json", kNews);
    stage.broker().process().signal(SIGHUP);
    stage.broker().process().wait_for_err("reloaded: 3 templates");
    const Answered changed = stage.run(question);
    CHECK(changed.told("status") == "started");
    CHECK(changed.told("key") != first.told("key"));
    CHECK(changed.told("text").starts_with("Answer to: News of tea, now."));
    CHECK(stage.counted() == 2);
}

TEST_CASE("a reload by command says what is wrong, and all or nothing of it is taken") {
    Stage stage;
    stage.templates().write("a.json", kNews);
    stage.start();
    const Attachment client = stage.attach();
    stage.templates().write("a.json", replaced(kNews, "please.", "now.")); // good, beside one that is not
    const std::string bad = stage.templates().write("b.json", R"({"model": "m"})");
    CHECK(gcoalesce_reload(client.get(), 60'000) == GCOALESCE_BAD_REQUEST);
    CHECK(std::string(gcoalesce_message()).find(bad) != std::string::npos);
    CHECK(stage.run({"ask", "-t", "a", "--var", "topic=tea"}).out.starts_with("Answer to: News of tea, please."));
    stage.templates().write("b.json", kNews);
    CHECK(gcoalesce_reload(client.get(), 60'000) == GCOALESCE_OK);
    CHECK(stage.run({"ask", "-t", "a", "--var", "topic=tea"}).out.starts_with("Answer to: News of tea, now."));
}

// ---- who may -------------------------------------------------------------------------------------------------------

namespace {

constexpr gid_t kReaders = 47001, kChosen = 47002;
constexpr uid_t kSomebody = 47011, kOther = 47012;

// A client process of another user, who may attach.
class Other {
  public:
    Other(const Instance& instance, uid_t uid, std::vector<gid_t> groups,
          const std::function<void(const Attachment&, Line&)>& work)
        : child_([&instance, uid, groups, work](Line& line) {
              if (::setgroups(groups.size(), groups.data()) != 0 || ::setresgid(kReaders, kReaders, kReaders) != 0 ||
                  ::setresuid(uid, uid, uid) != 0)
                  throw std::runtime_error("cannot become another user");
              work(attach(instance), line);
          }) {}
    Child& operator*() { return child_; }

  private:
    Child child_;
};

void admit_readers(const Stage& stage) {
    const std::string directory = stage.instance().runtime_dir;
    REQUIRE(::chmod(directory.c_str(), 0755) == 0);
    REQUIRE(::chown(stage.instance().socket_path().c_str(), 0, kReaders) == 0);
    REQUIRE(::chown(("/dev/shm" + stage.scratch().segment_name()).c_str(), 0, kReaders) == 0);
}

#define REQUIRE_ROOT()                                                                                                 \
    if (::geteuid() != 0) {                                                                                            \
        std::puts("SKIPPED: only root can become other users");                                                        \
        return;                                                                                                        \
    }

} // namespace

TEST_CASE("a template is for the users and groups that it names, and for nobody else") {
    REQUIRE_ROOT();
    Stage stage;
    stage.templates().write("uid.json", replaced(kNews, "{", R"({"allow": {"uids": [47011]},)"));
    stage.templates().write("group.json", replaced(kNews, "{", R"({"allow": {"groups": [47002]},)"));
    stage.templates().write("open.json", kNews);
    stage.start();
    admit_readers(stage);
    const auto codes = [&](uid_t uid, std::vector<gid_t> groups) {
        struct Codes {
            gcoalesce_code uid, group, open;
            bool same_again; // what others asked before, and is still fresh, is refused, too
        };
        Other other(stage.instance(), uid, std::move(groups), [](const Attachment& client, Line& line) {
            const auto code = [&](const char* id) {
                return answer_to(client, by_template(id, R"({"topic":"tea"})")).code;
            };
            Codes told{code("uid"), code("group"), code("open"), false};
            told.same_again = code("uid") == told.uid && code("group") == told.group;
            line.tell(told);
        });
        const Codes told = (*other).line().hear<Codes>();
        CHECK((*other).wait() == 0);
        CHECK(told.same_again);
        return std::vector<gcoalesce_code>{told.uid, told.group, told.open};
    };
    using Codes = std::vector<gcoalesce_code>;
    CHECK(codes(kOther, {}) == Codes{GCOALESCE_NO_PERMISSION, GCOALESCE_NO_PERMISSION, GCOALESCE_END});
    CHECK(stage.counted() == 1);
    CHECK(codes(kSomebody, {}) == Codes{GCOALESCE_END, GCOALESCE_NO_PERMISSION, GCOALESCE_END});
    CHECK(codes(kOther, {kChosen}) == Codes{GCOALESCE_NO_PERMISSION, GCOALESCE_END, GCOALESCE_END});
    CHECK(codes(0, {}) == Codes{GCOALESCE_END, GCOALESCE_END, GCOALESCE_END}); // root is its own master
    CHECK(codes(kOther, {}) == Codes{GCOALESCE_NO_PERMISSION, GCOALESCE_NO_PERMISSION, GCOALESCE_END});
    CHECK(stage.counted() == 3);
}

TEST_CASE("commands are for the admin group, and it is logged who gave them") {
    REQUIRE_ROOT();
    Stage stage({"--admin-group", std::to_string(kChosen)});
    stage.start();
    admit_readers(stage);
    struct Codes {
        gcoalesce_code status, on, off, cancel, purge, reload;
    };
    const auto codes = [&](std::vector<gid_t> groups) {
        Other other(stage.instance(), kSomebody, std::move(groups), [](const Attachment& client, Line& line) {
            std::int64_t remaining = 0;
            std::uint64_t streams = 0;
            const auto notify = [&](gcoalesce_notify_action action) {
                return gcoalesce_notify(client.get(), action, nullptr, 1000, 60'000, &remaining);
            };
            line.tell(Codes{notify(GCOALESCE_NOTIFY_STATUS), notify(GCOALESCE_NOTIFY_ON), notify(GCOALESCE_NOTIFY_OFF),
                            gcoalesce_cancel(client.get(), "0123", 60'000, &streams),
                            gcoalesce_purge(client.get(), GCOALESCE_PURGE_ALL, nullptr, 60'000, &streams),
                            gcoalesce_reload(client.get(), 60'000)});
        });
        const Codes told = (*other).line().hear<Codes>();
        CHECK((*other).wait() == 0);
        return told;
    };
    const Codes stranger = codes({});
    CHECK(stranger.status == GCOALESCE_OK);
    for (const gcoalesce_code code : {stranger.on, stranger.off, stranger.cancel, stranger.purge, stranger.reload})
        CHECK(code == GCOALESCE_NO_PERMISSION);
    const Codes admin = codes({kChosen});
    for (const gcoalesce_code code : {admin.status, admin.on, admin.off, admin.purge, admin.reload})
        CHECK(code == GCOALESCE_OK);
    CHECK(admin.cancel == GCOALESCE_NOT_FOUND);
    const std::string said = stage.stop();
    for (const char* what : {"notify", "cancel", "purge", "reload"})
        CHECK(said.find(fmt::format("refusing {} by uid {}", what, kSomebody)) != std::string::npos);
    for (const char* what : {"notify on for all templates", "notify off for all templates", "purge of all", "reload"})
        CHECK(said.find(fmt::format("{} by uid {}", what, kSomebody)) != std::string::npos);
}

// ---- the key -------------------------------------------------------------------------------------------------------

TEST_CASE("T20: one request in any spelling, from any process, before and behind a restart, is one call") {
    const Folder state;
    Stage stage({"--state-dir", state.path()});
    stage.start();
    std::mt19937 random(20);
    const auto spelled = [&] {
        const auto space = [&] { return std::string(random() % 3, " \n\t"[random() % 3]); };
        const auto object = [&](std::vector<std::string> members) {
            std::shuffle(members.begin(), members.end(), random);
            std::string out;
            for (const std::string& member : members) out += (out.empty() ? "" : ",") + space() + member + space();
            return "{" + out + "}";
        };
        const auto one = [&](std::vector<const char*> of) { return std::string(of[random() % of.size()]); };
        const std::string config = object({"\"temperature\":" + space() + one({"0.5", "5e-1", "0.50", "50E-2"}),
                                           "\"topK\":" + one({"40", "40.0", "4e1"}),
                                           "\"seed\":" + one({"9007199254740993", "9007199254740993.0"})});
        const std::string turn =
            object({R"("role":"user")", R"("parts" : [{"text":")" + one({"hi", "\\u0068i"}) + "\"}]"});
        std::vector<std::string> members = {"\"contents\":" + space() + "[" + turn + "]",
                                            "\"generationConfig\":" + config};
        if (random() % 2 == 0) members.push_back(R"("tools":[])");
        if (random() % 2 == 0) members.push_back(R"("safetySettings": [ ])");
        return object(members);
    };
    std::string key;
    for (int i = 0; i < 24; ++i) {
        if (i == 12) {
            stage.stop();
            stage.start();
        }
        const std::string body = spelled();
        const Answered ran = stage.run({"ask", "--request", "-", "--json"}, body);
        INFO(body << "\n" << ran.err);
        REQUIRE(ran.code == 0);
        if (key.empty()) key = ran.told("key");
        CHECK(ran.told("key") == key);
    }
    CHECK(stage.counted() == 1);
}

TEST_CASE("the bodies that real SDKs send for one prompt are one request") {
    Stage stage;
    stage.start();
    std::vector<std::string> keys;
    for (const char* body :
         {R"({"contents":[{"parts":[{"text":"hi"}],"role":"user"}]})",
          R"({"generationConfig":{},"safetySettings":[],"contents":[{"role":"user","parts":[{"text":"hi"}]}]})",
          R"({"generationConfig":{},"contents":[{"role":"user","parts":[{"text":"hi"}]}]})"})
        keys.push_back(stage.run({"ask", "--request", "-", "--json"}, body).told("key"));
    keys.push_back(stage.run({"ask", "hi", "--json"}).told("key"));
    keys.push_back(stage.run({"ask", "-m", "models/gemini-2.5-flash", "hi", "--json"}).told("key"));
    CHECK(std::count(keys.begin(), keys.end(), keys[0]) == 5);
    CHECK(stage.counted() == 1);
}

TEST_CASE("T26: a prompt that differs in one character is never a hit") {
    Stage stage;
    stage.start();
    for (const char* text : {"Tell me of tea", "Tell me of Tea", "Tell me of tea.", "Tell me  of tea", "Tell me of te"})
        CHECK(stage.run({"ask", text, "--json"}).told("status") == "started");
    CHECK(stage.counted() == 5);
}

TEST_CASE("T23: a streaming and a whole answer to one prompt are two, each in its own form, whichever comes first") {
    Stage stage;
    stage.start();
    for (const bool stream_first : {true, false}) {
        const std::string text = stream_first ? "first a stream" : "first a whole";
        const auto asked = [&](bool stream) {
            std::vector<std::string> arguments = {"ask", text, "--json"};
            if (!stream) arguments.emplace_back("--no-stream");
            return stage.run(arguments);
        };
        const Answered first = asked(stream_first), second = asked(!stream_first);
        CHECK(first.told("status") == "started");
        CHECK(second.told("status") == "started");
        CHECK(first.told("key") != second.told("key"));
        CHECK(first.told("text") == second.told("text"));
        CHECK(first.told("events") == (stream_first ? "4" : "1"));
        CHECK(second.told("events") == (stream_first ? "1" : "4"));
        CHECK(asked(true).told("events") == "4");
        CHECK(asked(false).told("events") == "1");
    }
    CHECK(stage.counted() == 4);
}

TEST_CASE(
    "T22: where a template keeps realms apart, they neither share nor resume, and default.json can do it for all") {
    Stage stage;
    stage.templates().write("default.json", R"({"realm": "token"})");
    stage.start();
    const Attachment client = stage.attach();
    const auto of = [](const std::string& realm) {
        Wish wish = prompt("whose is it?");
        wish.realm = realm;
        return wish;
    };
    const Seen one = answer_to(client, of("one"));
    CHECK(one.info.status == GCOALESCE_STARTED);
    const Seen two = answer_to(client, of("two"));
    CHECK(two.info.status == GCOALESCE_STARTED);
    CHECK(answer_to(client, of("")).info.status == GCOALESCE_STARTED);
    CHECK(answer_to(client, of("one")).info.status == GCOALESCE_FRESH);
    CHECK(answer_to(client, of("two")).info.stream_id == two.info.stream_id);
    CHECK(stage.counted() == 3);
    CHECK(answer_to(client, resuming(one.info.stream_id, 1, "one")).complete());
    CHECK(answer_to(client, resuming(one.info.stream_id, 1, "two")).code == GCOALESCE_NOT_FOUND);
    CHECK(answer_to(client, resuming(one.info.stream_id, 1)).code == GCOALESCE_NOT_FOUND);

    // Without the template's word a realm changes nothing.
    stage.templates().write("default.json", "{}");
    REQUIRE(gcoalesce_reload(client.get(), 60'000) == GCOALESCE_OK);
    CHECK(answer_to(client, of("three")).info.status == GCOALESCE_STARTED);
    CHECK(answer_to(client, of("four")).info.status == GCOALESCE_FRESH);
    CHECK(stage.counted() == 4);
}

// ---- what one request may wish
// ---------------------------------------------------------------------------------------

TEST_CASE("T94: --bypass, --refresh, --no-store and --max-age do what they say") {
    Stage stage;
    stage.start();
    const auto status = [&](std::vector<std::string> options, const std::string& text = "the same") {
        options.insert(options.begin(), {"ask", text, "--json"});
        const Answered ran = stage.run(options);
        return ran.told("status") + " " + ran.told("stream_id");
    };
    const std::string first = status({});
    CHECK(first.starts_with("started"));
    CHECK(status({"--bypass"}).starts_with("bypass"));
    CHECK(status({}) == "fresh " + first.substr(8)); // what was asked apart is given to nobody
    const std::string second = status({"--refresh"});
    CHECK(second.starts_with("started"));
    CHECK(status({}) == "fresh " + second.substr(8));
    CHECK(status({"--max-age", "1h"}) == "fresh " + second.substr(8));
    CHECK(status({"--max-age", "0s"}).starts_with("started"));
    CHECK(status({"--no-store"}).starts_with("fresh")); // it may read what is there
    CHECK(stage.counted() == 4);

    CHECK(status({"--no-store"}, "not kept").starts_with("started"));
    CHECK(status({}, "not kept").starts_with("started"));
    CHECK(stage.counted() == 6);

    // While it runs it is joined by those who do not mind, also by who wants nothing finished.
    const Attachment client = stage.attach();
    Reader running = ask(client, prompt("runs [sim hold-after=1]"));
    running.read(1);
    Wish apart = prompt("runs [sim hold-after=1]");
    apart.sharing = GCOALESCE_SHARE_NOT;
    Reader own = ask(client, apart);
    own.read(1);
    Wish nothing_finished = prompt("runs [sim hold-after=1]");
    nothing_finished.max_age_ms = -1;
    Reader joiner = ask(client, nothing_finished);
    CHECK(joiner.served().status == GCOALESCE_JOINED);
    CHECK(stage.counted() == 8);
    stage.sim().release();
    CHECK(running.read_to_end().complete());
    CHECK(own.read_to_end().complete());
    CHECK(own.seen().info.status == GCOALESCE_BYPASS);
    CHECK(joiner.read_to_end().digest == running.seen().digest);
}

TEST_CASE("an explicit key stands for the request where the template allows it") {
    Stage stage;
    stage.templates().write("default.json", R"({"explicit_keys": true})");
    stage.start();
    const Answered one = stage.run({"ask", "How is the weather today?", "--explicit-key", "weather", "--json"});
    const Answered two = stage.run({"ask", "What is the weather now?", "--explicit-key", "weather", "--json"});
    CHECK(one.told("status") == "started");
    CHECK(two.told("status") == "fresh");
    CHECK(two.told("text") == one.told("text"));
    CHECK(stage.run({"ask", "weather", "--json"}).told("status") == "started");
    CHECK(stage.counted() == 2);
}

TEST_CASE("a subscribe delay delays the reading, and not the call, however large the request is") {
    Stage stage;
    stage.start();
    const Folder folder;
    std::string body = prompt_body("ahead ");
    body.insert(body.find("ahead"), std::string(8 << 20, 'x'));
    for (const std::string& request : {folder.write("small", prompt_body("ahead")), folder.write("large", body)}) {
        stage.sim().reset();
        const auto late = stage.begin({"ask", "--subscribe-delay", "1h", "--request", request});
        CHECK(eventually([&] { return stage.counted() == 1 && stage.counted("in_flight") == 0; }));
        CHECK_FALSE(has_ended(late->pid())); // it does not even read yet
        CHECK(stage.run({"ask", "--request", request, "--json"}).told("status") == "fresh");
        CHECK(stage.counted() == 1);
        CHECK_FALSE(has_ended(late->pid()));
        CHECK(late->out().empty());
    }
}

// ---- resuming ------------------------------------------------------------------------------------------------------

TEST_CASE(
    "T54, T55, T58: a running stream is resumed behind any of its events, by several readers, and each gets all") {
    Stage stage;
    stage.start();
    const Attachment client = stage.attach();
    Reader first = ask(client, prompt("long [sim events=6 hold-after=3]"));
    first.read(3);
    const std::uint64_t stream = first.served().stream_id;
    Reader from_start = ask(client, resuming(stream, 0)), from_two = ask(client, resuming(stream, 2));
    Reader from_three = ask(client, resuming(stream, 3));
    from_start.read(3);
    from_two.read(1);
    CHECK(from_three.served().status == GCOALESCE_RESUMED);
    CHECK(from_three.next(0) == GCOALESCE_TIMED_OUT);
    Reader future = ask(client, resuming(stream, 4));
    CHECK(future.read_to_end().code == GCOALESCE_BAD_REQUEST);
    CHECK(std::string(future.seen().ending.message).find("at most 3, found 4: the stream has no more") !=
          std::string::npos);
    const auto process = stage.begin({"ask", "--resume", hex(stream) + ".1", "--events"});
    stage.sim().release();
    CHECK(first.read_to_end().complete());
    CHECK(from_start.read_to_end().digest == first.seen().digest);
    CHECK(from_start.seen().events == 6);
    CHECK(from_two.read_to_end().events == 4);
    CHECK(from_three.read_to_end().events == 3);
    for (const Reader* reader : {&from_start, &from_two, &from_three}) {
        CHECK(reader->seen().complete());
        CHECK(reader->seen().misplaced == 0);
        CHECK(reader->seen().info.stream_id == stream);
    }
    CHECK(process->wait() == 0);
    CHECK(std::count(process->out().begin(), process->out().end(), '\n') == 5);
    CHECK(stage.counted() == 1);
}

TEST_CASE(
    "T54 to T57: ask --resume of what is kept, on disk, gone, unknown, malformed or to come, and behind a restart") {
    const Folder state;
    Stage stage({"--state-dir", state.path(), "--linger", "1ms", "--ttl-idle", "1ms"});
    stage.start();
    const auto resume = [&](const std::string& id, std::vector<std::string> more = {}) {
        more.insert(more.begin(), {"ask", "--resume", id, "--events"});
        return stage.run(more);
    };
    const auto lines = [](const Answered& ran) { return std::count(ran.out.begin(), ran.out.end(), '\n'); };
    const std::vector<std::string> question = {"ask", "keep this", "--json"};
    const std::string id = stage.run(question).told("stream_id");
    const Answered whole = resume(id);
    CHECK(whole.code == 0);
    CHECK(lines(whole) == 4);
    const auto all_ways = [&] {
        CHECK(resume(id + ".0").out == whole.out);
        CHECK(resume(id + ".1").out == whole.out.substr(whole.out.find('\n') + 1));
        const Answered at_end = resume(id + ".4", {"--status"});
        CHECK(at_end.code == 0);
        CHECK(at_end.out.empty());
        CHECK(at_end.says("gcoalesce: resumed, "));
        const Answered future = resume(id + ".5");
        CHECK(future.code == 2);
        CHECK(future.says("at most 4, found 5: the stream ended with no more"));
        const Answered unknown = resume("0123456789abcdef.1");
        CHECK(unknown.code == 1);
        CHECK(unknown.says("no such stream"));
        for (const char* malformed : {"x", "", "0123456789abcdef.", "0123456789abcdef.-1", "0123456789abcdef.1x",
                                      "0123456789abcdef.18446744073709551616", "12.1", "0000000000000000.1", ".1"}) {
            INFO(malformed);
            CHECK(stage.run({"ask", "--resume", malformed}, "\n").code == 2);
        }
    };
    all_ways();
    // Out of the segment: it is read from the disk.
    CHECK(eventually([&] { return stage.broker().counted(Counter::slots_in_use) == 0; }));
    const std::uint64_t loaded = stage.broker().counted(Counter::resumed_snapshot);
    all_ways();
    CHECK(stage.broker().counted(Counter::resumed_snapshot) > loaded);

    stage.stop();
    stage.start();
    all_ways();
    CHECK(stage.broker().counted(Counter::resumed_snapshot) > 0);
    // The same question is answered by a new stream, which is never mixed up with the old one.
    const std::string other = stage.run(question).told("stream_id");
    CHECK(other != id);
    CHECK(resume(id + ".2").code == 0);
    CHECK(resume(other + ".2").code == 0);
    CHECK(stage.counted() == 2);

    const Attachment client = stage.attach();
    std::uint64_t streams = 0;
    REQUIRE(gcoalesce_purge(client.get(), GCOALESCE_PURGE_ALL, nullptr, 60'000, &streams) == GCOALESCE_OK);
    CHECK(streams == 2);
    const auto gone = [&] {
        const Answered ran = resume(id + ".2");
        CHECK(ran.code == 1);
        CHECK(ran.says("the stream is no longer kept: ask anew"));
    };
    gone();
    stage.stop();
    stage.start();
    gone();
    CHECK(stage.counted() == 2); // resuming never causes a call
}

TEST_CASE("without a disk a stream can be resumed for its linger, then it is gone, and unknown to the next broker") {
    Stage stage({"--linger", "1ms", "--ttl-idle", "1ms"});
    stage.start();
    const std::string id = stage.run({"ask", "nothing kept", "--json"}).told("stream_id");
    CHECK(eventually([&] { return stage.broker().counted(Counter::streams_retired) == 1; }));
    const Answered gone = stage.run({"ask", "--resume", id + ".1"});
    CHECK(gone.code == 1);
    CHECK(gone.says("the stream is no longer kept: ask anew"));
    stage.stop();
    stage.start();
    CHECK(stage.run({"ask", "--resume", id + ".1"}).says("no such stream"));
}

// ---- what operators do
// -----------------------------------------------------------------------------------------------

TEST_CASE(
    "T72: a cancelled call ends for all its readers with what came, upstream too, and the next request starts anew") {
    Stage stage;
    stage.start();
    const Attachment client = stage.attach();
    const Wish wish = prompt("cancel me [sim hold-after=2]");
    Reader first = ask(client, wish), second = ask(client, wish);
    first.read(2);
    const auto process = stage.begin({"ask", "cancel me [sim hold-after=2]", "--status"});
    CHECK(eventually([&] { return stage.broker().counted(Counter::requests_joined) == 2; }));
    const std::string stream = hex(first.served().stream_id);
    std::uint64_t streams = 9;
    REQUIRE(gcoalesce_cancel(client.get(), stream.c_str(), 60'000, &streams) == GCOALESCE_OK);
    CHECK(streams == 1);
    for (Reader* reader : {&first, &second}) {
        const Seen& seen = reader->read_to_end();
        CHECK(seen.code == GCOALESCE_END);
        CHECK(seen.ending.kind == GCOALESCE_CANCELLED);
        CHECK(seen.ending.code == GCOALESCE_CALL_CANCELLED);
        CHECK(seen.events == 2);
    }
    CHECK(process->wait() == 8);
    CHECK(process->out().starts_with("Answer to: cancel me"));
    CHECK(process->err().find("an operator cancelled the call") != std::string::npos);
    CHECK(eventually([&] { return stage.counted("in_flight") == 0; }));
    CHECK(stage.counted("aborted") == 1);
    REQUIRE(gcoalesce_cancel(client.get(), stream.c_str(), 60'000, &streams) == GCOALESCE_OK);
    CHECK(streams == 0);

    Reader next = ask(client, wish);
    next.read(2);
    CHECK(next.served().status == GCOALESCE_STARTED);
    stage.sim().release();
    CHECK(next.read_to_end().complete());
    CHECK(stage.counted() == 2);
}

TEST_CASE("a purge drops what is kept, and running streams for whoever comes later, while their readers finish") {
    const Folder state;
    Stage stage({"--state-dir", state.path()});
    stage.start();
    const Attachment client = stage.attach();
    std::uint64_t streams = 0;
    const Seen kept = answer_to(client, prompt("kept"));
    CHECK(answer_to(client, prompt("kept")).info.status == GCOALESCE_FRESH);
    REQUIRE(gcoalesce_purge(client.get(), GCOALESCE_PURGE_STREAM, hex(kept.info.stream_id).c_str(), 60'000, &streams) ==
            GCOALESCE_OK);
    CHECK(streams == 1);
    CHECK(answer_to(client, resuming(kept.info.stream_id, 1)).code == GCOALESCE_GONE);
    CHECK(answer_to(client, prompt("kept")).info.status == GCOALESCE_STARTED);

    Reader running = ask(client, prompt("running [sim hold-after=1]"));
    running.read(1);
    REQUIRE(gcoalesce_purge(client.get(), GCOALESCE_PURGE_TEMPLATE, "default", 60'000, &streams) == GCOALESCE_OK);
    CHECK(streams == 2);
    Reader later = ask(client, prompt("running [sim hold-after=1]"));
    CHECK(later.served().status == GCOALESCE_STARTED);
    stage.sim().release();
    CHECK(running.read_to_end().complete());
    CHECK(running.seen().events == 4);
    CHECK(later.read_to_end().complete());
    CHECK(answer_to(client, prompt("running [sim hold-after=1]")).info.stream_id == later.seen().info.stream_id);
    CHECK(stage.counted() == 4);
}

// ---- care for the upstream
// -------------------------------------------------------------------------------------------

TEST_CASE("the first request of a push opens no connection where `notify on` came before, and else it does") {
    GCOALESCE_REQUIRE_TLS_FRONT();
    Sim sim;
    const TlsFront front(sim.url());
    for (const bool notified : {false, true}) {
        INFO("notified: " << notified);
        const ScratchInstance instance;
        const Folder folder;
        Broker broker(*instance, front.url(),
                      {"--ca-file", front.ca_file(), "--api-key-file", folder.write("key", "any")});
        const Attachment client = attach(*instance);
        std::int64_t remaining = 0;
        if (notified) {
            REQUIRE(gcoalesce_notify(client.get(), GCOALESCE_NOTIFY_ON, nullptr, 60'000, 60'000, &remaining) ==
                    GCOALESCE_OK);
            REQUIRE(eventually([&] { return broker.counted(Counter::upstream_connections) == 1; }));
        }
        CHECK(broker.counted(Counter::upstream_connections) == (notified ? 1 : 0));
        CHECK(broker.counted(Counter::upstream_calls) == 0);
        for (int i = 0; i < 3; ++i) CHECK(answer_to(client, prompt(fmt::format("push {} {}", notified, i))).complete());
        CHECK(broker.counted(Counter::upstream_connections) == 1);
        CHECK(broker.counted(Counter::upstream_calls) == 3);
    }
    CHECK(std::stoi(json_member(sim.calls(), "calls")) == 6);
}

TEST_CASE("T37: a delay that upstream names is one error for all who wait, and no call goes before it is over") {
    const bool by_header = GENERATE(false, true);
    Stage stage;
    stage.start();
    const Attachment client = stage.attach();
    const std::string script =
        std::string("hold-after=0 fail-first=1 status=429 retry=2s") + (by_header ? " retry-header" : "");
    const Wish wish = prompt("limited [sim " + script + "]");
    std::vector<Reader> readers;
    for (int i = 0; i < 50; ++i) readers.push_back(ask(client, wish));
    for (Reader& reader : readers) reader.served();
    const auto before = std::chrono::steady_clock::now();
    stage.sim().release();
    for (Reader& reader : readers) {
        const Seen& seen = reader.read_to_end();
        CHECK(seen.code == GCOALESCE_END);
        CHECK(seen.ending.code == GCOALESCE_RATE_LIMITED);
        CHECK(seen.ending.upstream_status == 429);
        CHECK(seen.ending.retry_ms == 2000);
        CHECK(std::string(seen.ending.message) == readers[0].seen().ending.message);
    }
    CHECK(stage.counted() == 1);
    // Whoever asks before it is over is refused with the rest of it, whatever he asks of that model.
    int refused = 0;
    for (;;) {
        const Seen seen = answer_to(client, wish);
        if (seen.complete()) break;
        ++refused;
        REQUIRE(seen.ending.code == GCOALESCE_RATE_LIMITED);
        CHECK(seen.ending.retry_ms >= 1);
        CHECK(seen.ending.retry_ms <= 2000);
        Wish unlike = prompt("something else");
        const Seen other = answer_to(client, unlike);
        if (other.complete()) break;
        REQUIRE(other.ending.code == GCOALESCE_RATE_LIMITED);
        CHECK(stage.counted() == 1);
    }
    CHECK(refused > 0);
    CHECK(std::chrono::steady_clock::now() - before >= std::chrono::seconds(2));
    CHECK(stage.counted() == 2);
}

TEST_CASE("T37: a delay holds for its own model alone") {
    Stage stage;
    stage.start();
    CHECK(stage.run({"ask", "limited [sim status=429 retry=60s]"}).code == 5);
    CHECK(stage.run({"ask", "anything"}).code == 5);
    CHECK(stage.run({"ask", "-m", "gemini-2.5-pro", "anything"}).code == 0);
    CHECK(stage.counted() == 2);
}
