// ask and notify, before a real broker and a stand-in for Gemini.
#include <array>
#include <catch2/catch.hpp>
#include <csignal>
#include <poll.h>
#include <set>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "base/ids.hpp"
#include "segment/mapping.hpp"
#include "tests/integration/cli_support.hpp"
#include "tests/support/http.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;

namespace {

// The text of the events in an SSE body or in lines of JSON.
std::string text_of(const std::vector<std::string>& lines) {
    std::string text;
    for (const std::string& line : lines) {
        const auto event = nlohmann::json::parse(line);
        for (const auto& part : event["candidates"][0]["content"]["parts"])
            if (!part.value("thought", false)) text += part["text"];
    }
    return text;
}

std::string key_of(const Ran& ran) {
    return ran.json()["key"];
}

SpawnOptions with_input(const std::string& input, std::vector<std::string> env = {}) {
    SpawnOptions options;
    options.input = input;
    options.env = std::move(env);
    return options;
}

// Runs on a terminal, and returns what that shows. Its line ends are CRLF.
std::string on_terminal(const std::string& line) {
    return run({"script", "-qec", line, "/dev/null"}).out;
}

} // namespace

TEST_CASE("ask prints the text and nothing else, and the text is what Gemini said") {
    World world;
    const Ran text = world.run({"ask", "Why", "is the sky", "blue? [sim events=7 thoughts=2]"});
    CHECK(text.code == 0);
    CHECK(text.err.empty());
    CHECK(text.out.find('\n') == std::string::npos);
    const Ran events = world.run({"ask", "--events", "Why is the sky blue? [sim events=7 thoughts=2]"});
    CHECK(events.code == 0);
    REQUIRE(events.lines().size() == 7);
    CHECK_FALSE(text.out.empty());
    CHECK(text.out == text_of(events.lines()));
    CHECK(world.calls() == 1); // words of a prompt are joined by blanks, so these are one request
}

TEST_CASE("ask --sse is Gemini's own byte stream, and --events its payloads untouched") {
    World world;
    const std::string prompt = "Bytes, please. [sim events=5 candidates=2]";
    const Ran sse = world.run({"ask", "--sse", prompt});
    CHECK(sse.code == 0);
    world.sim().reset(); // the number of a call is part of its responseId
    const HttpResponse direct =
        http(world.sim().url() + "/v1beta/models/gemini-2.5-flash:streamGenerateContent?alt=sse", prompt_body(prompt),
             {"content-type: application/json"});
    CHECK(sse.out == direct.body);

    std::string framed;
    for (const std::string& event : world.run({"ask", "--events", prompt}).lines())
        framed += "data: " + event + "\r\n\r\n";
    CHECK(framed == direct.body);
}

TEST_CASE("ask gives each event at once, and Ctrl-C ends it with 130") {
    World world;
    Process process(world.command({"ask", "--events", "Slowly. [sim events=5 hang-after=2]"}));
    process.read_line();
    process.read_line(); // the third will never come
    process.signal(SIGINT);
    CHECK(process.wait() == 130);
}

TEST_CASE("ask --no-stream asks for the whole answer at once") {
    World world;
    const std::string prompt = "All at once. [sim events=5]";
    const Ran unary = world.run({"ask", "--no-stream", "--events", prompt});
    CHECK(unary.code == 0);
    REQUIRE(unary.lines().size() == 1); // pretty-printed by Gemini, compacted by us
    CHECK(unary.out.find("\": ") == std::string::npos);
    const Ran text = world.run({"ask", "--no-stream", prompt});
    CHECK(text.out == text_of(unary.lines()));
    CHECK(text.out == world.run({"ask", prompt}).out);
    CHECK(world.calls() == 2); // a stream and a whole answer are not one request
}

TEST_CASE("ask --json is one object that tells the answer and how it was served") {
    World world;
    const Ran first = world.run({"ask", "--json", "Tell. [sim events=6 thoughts=1]"});
    CHECK(first.code == 0);
    CHECK(first.err.empty());
    REQUIRE(first.lines().size() == 1);
    const auto json = first.json();
    CHECK(json["text"] == world.run({"ask", "Tell. [sim events=6 thoughts=1]"}).out);
    CHECK_FALSE(json["thoughts"].get<std::string>().empty());
    CHECK(json["status"] == "started");
    CHECK(parse_key(json["key"].get<std::string>()));
    CHECK(parse_stream_id(json["stream_id"].get<std::string>()));
    CHECK(json["ending"] == "complete");
    CHECK(json["finish_reason"] == "STOP");
    CHECK(json["events"] == 6);
    CHECK(json["event_bytes"] > 0);
    CHECK(json["first_event_ms"].is_number_integer());
    CHECK(json["total_ms"] >= json["first_event_ms"]);
    CHECK(json["total_tokens"] ==
          json["prompt_tokens"].get<int>() + json["answer_tokens"].get<int>() + json["thought_tokens"].get<int>());

    const auto again = world.run({"ask", "--json", "Tell. [sim events=6 thoughts=1]"}).json();
    CHECK(again["status"] == "fresh");
    CHECK(again["stream_id"] == json["stream_id"]);
    CHECK(again["text"] == json["text"]);
}

TEST_CASE("ask --bypass and --refresh make calls of their own; later requests share the refreshed one") {
    World world;
    const std::string prompt = "Anew.";
    const auto ask = [&](std::vector<std::string> flags) {
        flags.insert(flags.begin(), {"ask", "--json", prompt});
        return world.run(std::move(flags)).json();
    };
    const auto first = ask({});
    const auto own = ask({"--bypass"});
    CHECK(own["status"] == "bypass");
    CHECK(own["stream_id"] != first["stream_id"]);
    CHECK(ask({})["stream_id"] == first["stream_id"]);
    const auto refreshed = ask({"--refresh"});
    CHECK(refreshed["status"] == "started");
    CHECK(refreshed["stream_id"] != first["stream_id"]);
    CHECK(ask({})["stream_id"] == refreshed["stream_id"]);
    CHECK(world.calls() == 3);
}

TEST_CASE("ask --status says on standard error how it was served") {
    World world;
    for (const char* flag : {"--status", "-v"}) {
        const Ran ran = world.run({"ask", flag, std::string("Hello from ") + flag});
        CHECK(ran.code == 0);
        CHECK(ran.err.starts_with("gcoalesce: started, key "));
        CHECK(ran.says("first event after "));
        CHECK(ran.says("complete after "));
        CHECK(ran.says(" in all"));
        CHECK(std::count(ran.err.begin(), ran.err.end(), '\n') == 1);
    }
}

TEST_CASE("a prompt comes from arguments, standard input, both, or a file") {
    World world;
    const std::string both = key_of(world.run({"ask", "--json", "Some text\n\nSummarise it."}));
    CHECK(key_of(world.run({"ask", "--json", "Summarise", "it."}, "Some text\n")) == both);
    CHECK(key_of(world.run({"ask", "--json", "-"}, "Some text\n\nSummarise it.\n")) == both);
    CHECK(key_of(world.run({"ask", "--json"}, "Some text\n\nSummarise it.")) == both);
    const TemporaryFile file("Some text\n\nSummarise it.\n"), text("Some text\n");
    CHECK(key_of(world.run({"ask", "--json", "-f", file.path()})) == both);
    CHECK(key_of(world.run({"ask", "--json", "-f", text.path(), "Summarise it."})) == both);
    CHECK(key_of(world.run({"ask", "--json", "Another."})) != both);

    // Brackets and commas are the prompt's, whatever the parser of command lines makes of lists.
    const std::string list = R"(["sea, sky", []])";
    const std::string bracketed = key_of(world.run({"ask", "--json"}, list));
    CHECK(key_of(world.run({"ask", "--json", list})) == bracketed);
    CHECK(key_of(world.run({"ask", "--no-stream", "--json", list})) ==
          key_of(world.run({"ask", "--no-stream", "--json"}, list)));
    CHECK(key_of(world.run({"ask", "--json", "--system", "[terse]", "[a]", "b", "[]"})) ==
          key_of(world.run({"ask", "--json", "--system", "[terse]"}, "[a] b []")));
    const auto same = [&](const std::vector<std::string>& arguments, const std::string& prompt) {
        std::vector<std::string> all{"ask", "--json"};
        all.insert(all.end(), arguments.begin(), arguments.end());
        CHECK(key_of(world.run(all)) == key_of(world.run({"ask", "--json"}, prompt)));
    };
    same({"C", "++", "[a] ", "[b]"}, "C ++ [a]  [b]");
    same({"++"}, "++");
    same({"--", "-m", "[a, b]", "--var", "[1, 2]"}, "-m [a, b] --var [1, 2]");
    same({"--system=", "Hi", "there"}, "Hi there");
    CHECK(key_of(world.run({"--json", "--system", "[a, b]"}, "Hi")) ==
          key_of(world.run({"ask", "--json", "--system", "[a, b]", "Hi"})));
    CHECK(world.run({"ask", "x", "-v5"}).err == "gcoalesce: unknown option \"-v5\"\ntry 'gcoalesce --help'\n");

    // With text on standard input and no command it is `ask`.
    const Ran bare = world.run({}, "Some text\n\nSummarise it.");
    CHECK(bare.code == 0);
    CHECK(bare.out == world.run({"ask", "Some text\n\nSummarise it."}).out);
    CHECK(key_of(world.run({"--json"}, "Some text\n\nSummarise it.")) == both);
    CHECK(world.calls() == 10);
}

TEST_CASE("without a prompt ask is a usage error, never a silent wait") {
    const World world;
    for (const auto& [arguments, input] : std::vector<std::pair<std::vector<std::string>, std::string>>{
             {{"ask"}, ""}, {{"ask"}, " \n\n"}, {{"ask", " "}, ""}, {{"ask", "-"}, "\n"}, {{}, ""}}) {
        const Ran ran = world.run(arguments, input);
        CHECK(ran.code == 2);
        CHECK(ran.out.empty());
        CHECK(ran.says("expected a prompt"));
    }
    CHECK(on_terminal(quoted(world.command({"ask"}))).find("expected a prompt") != std::string::npos);
    CHECK(on_terminal(quoted(world.command({}))).find("expected a command") != std::string::npos);
}

TEST_CASE("what does not go together is a usage error") {
    const World world;
    const auto refused = [&](std::vector<std::string> arguments, const std::string& words) {
        arguments.insert(arguments.begin(), "ask");
        const Ran ran = world.run(arguments, "text");
        CHECK(ran.code == 2);
        CHECK(ran.out.empty());
        CHECK(ran.says(words));
    };
    refused({"x", "--json", "--events"}, "--events, --sse, --json: expected one of them");
    refused({"x", "--bypass", "--refresh"}, "--bypass, --refresh: expected one of them");
    refused({"x", "--lines"}, "takes its prompts from standard input alone");
    refused({"--lines", "--sse"}, "prints text, or with --json objects");
    refused({"x", "--request", "y"}, "is the whole request");
    refused({"--system", "x", "--request", "y"}, "is the whole request");
    refused({"--lines", "-j", "0"}, "-j");
    refused({"x", "--timeout", "5"}, "--timeout: expected a duration such as");
    refused({"-f", "/nonexistent/file"}, "No such file");
    refused({"--request", "/nonexistent/file"}, "No such file");
    refused({"\xff"}, "not valid UTF-8");
}

TEST_CASE("ask takes the model from -m, then from GCOALESCE_MODEL") {
    World world;
    const auto key = [&](std::vector<std::string> arguments, std::vector<std::string> env = {}) {
        arguments.insert(arguments.begin(), {"ask", "--json", "Hi."});
        return key_of(run(world.command(std::move(arguments)), with_input("", std::move(env))));
    };
    const std::string usual = key({}), pro = key({"-m", "gemini-2.5-pro"});
    CHECK(key({"--model", "models/gemini-2.5-flash"}) == usual);
    CHECK(key({}, {"GCOALESCE_MODEL=gemini-2.5-pro"}) == pro);
    CHECK(key({"-m", "gemini-2.5-flash"}, {"GCOALESCE_MODEL=gemini-2.5-pro"}) == usual);
    CHECK(usual != pro);

    const Ran bad = world.run({"ask", "-m", "no model?", "Hi."});
    CHECK(bad.code == 2);
    CHECK(bad.out.empty());
}

TEST_CASE("ask --system and --request say what the body would") {
    World world;
    const std::string body =
        R"({"systemInstruction":{"parts":[{"text":"Be brief."}]},"contents":[{"parts":[{"text":"Hi."}]}]})";
    const TemporaryFile file(body);
    const std::string key = key_of(world.run({"ask", "--json", "--request", file.path()}));
    CHECK(key_of(world.run({"ask", "--json", "--request", "-"}, body)) == key);
    CHECK(key_of(world.run({"ask", "--json", "--system", "Be brief.", "Hi."})) == key);
    CHECK(key_of(world.run({"ask", "--json", "Hi."})) != key);

    const Ran bad = world.run({"ask", "--request", "-"}, "{\"contents\":");
    CHECK(bad.code == 2);
    CHECK(bad.err.starts_with("gcoalesce: "));
    CHECK(std::count(bad.err.begin(), bad.err.end(), '\n') == 1);
}

TEST_CASE("an answer that failed before it began has the exit code of its reason") {
    const World world;
    int number = 0;
    const auto check = [&](const std::string& script, int exit_code, const std::string& code) {
        // A model each: a refusal with a delay holds for the model.
        const std::string model = "gemini-test-" + std::to_string(++number), prompt = "Hi. [sim " + script + "]";
        const Ran ran = world.run({"ask", "--json", "-m", model, prompt});
        INFO(script << ": " << ran.err);
        CHECK(ran.code == exit_code);
        CHECK(nlohmann::json::parse(ran.err)["error"]["code"] == code);

        const Ran text = world.run({"ask", "-m", model, prompt});
        CHECK(text.code == exit_code);
        CHECK(text.out.empty());
        CHECK(text.err.starts_with("gcoalesce: "));
        CHECK(std::count(text.err.begin(), text.err.end(), '\n') == 1);
    };
    check("status=401", 4, "key_refused");
    check("status=403", 4, "key_refused");
    check("status=400 reason=API_KEY_INVALID", 4, "key_refused");
    check("status=429 retry=36s", 5, "rate_limited");
    check("status=404", 1, "upstream_error");
    check("status=500", 1, "upstream_error");
    check("status=503", 1, "upstream_error");
    check("empty", 1, "bad_answer");
    check("reset-after=0", 1, "connect_failed");
    check("block=SAFETY", 6, "bad_answer");
    CHECK(world.run({"ask", "Hi. [sim block=SAFETY]"}).says("its reason is SAFETY"));
    CHECK(world.run({"ask", "Hi. [sim status=429 retry=36s]"}).says("(try again in 36.0s)"));
}

TEST_CASE("an answer that broke off has been printed so far, and the exit code is 8") {
    World world;
    const std::vector<std::pair<std::string, std::string>> endings{{"truncate-after=2", "truncated, cut_short"},
                                                                   {"cut-after=2", "truncated, "},
                                                                   {"error-after=2", "failed, upstream_error"},
                                                                   {"bare-error-after=2", "failed, upstream_error"}};
    for (const auto& [script, ending] : endings) {
        const Ran ran = world.run({"ask", "Hi. [sim events=4 " + script + "]"});
        INFO(script << ": " << ran.err);
        CHECK(ran.code == 8);
        CHECK_FALSE(ran.out.empty());
        CHECK(ran.err.starts_with("gcoalesce: the answer broke off (" + ending));
        CHECK(ran.says(") after 2 events: "));
    }
    const Ran json = world.run({"ask", "--json", "Hi. [sim events=4 truncate-after=2]"});
    CHECK(json.code == 8);
    CHECK(json.json()["ending"] == "truncated");
    CHECK_FALSE(json.json()["text"].get<std::string>().empty());
    CHECK(nlohmann::json::parse(json.err)["error"]["code"] == "cut_short");
}

TEST_CASE("ask --timeout ends the wait: 7 before the first event, 8 behind it") {
    const World world;
    const Ran nothing = world.run({"ask", "--timeout", "200ms", "Hi. [sim hang-after=0]"});
    CHECK(nothing.code == 7);
    CHECK(nothing.says("no whole answer within 200ms"));
    const Ran some = world.run({"ask", "--timeout", "3s", "Hi. [sim events=4 hang-after=2]"});
    CHECK(some.code == 8);
    CHECK_FALSE(some.out.empty());
    const Ran variable =
        run(world.command({"ask", "Hello. [sim hang-after=0]"}), with_input("", {"GCOALESCE_TIMEOUT=200ms"}));
    CHECK(variable.code == 7);
}

TEST_CASE("an answer that stopped early or has no text is remarked on") {
    World world;
    const Ran cut = world.run({"ask", "Hi. [sim finish=MAX_TOKENS]"});
    CHECK(cut.code == 0);
    CHECK_FALSE(cut.out.empty());
    CHECK(cut.err == "gcoalesce: the answer stopped early: MAX_TOKENS\n");
    const Ran thoughts = world.run({"ask", "Hi. [sim events=2 thoughts=2 finish-alone]"});
    CHECK(thoughts.code == 0);
    CHECK(thoughts.out.empty());
    CHECK(thoughts.says("--events shows what it has"));
}

TEST_CASE("the broker's refusals have exit codes of their own") {
    const ScratchInstance directory;
    FakeBroker broker(*directory);
    broker.hold();
    const auto refuse = [&](gcoalesce_code code, int exit_code, std::int64_t retry_ms, const std::string& err) {
        Process process(command(*directory, {"ask", "Hi."}));
        broker.refuse(broker.wait_for_held(1).front(), code, "said so", retry_ms);
        CHECK(process.wait() == exit_code);
        CHECK(process.out().empty());
        CHECK(process.err() == err);
    };
    refuse(GCOALESCE_BUSY, 5, 2000, "gcoalesce: said so (try again in 2.0s)\n");
    refuse(GCOALESCE_DRAINING, 5, 1000, "gcoalesce: said so (try again in 1.0s)\n");
    refuse(GCOALESCE_KEY_MISSING, 4, 0, "gcoalesce: said so\n");
    refuse(GCOALESCE_RATE_LIMITED, 5, 0, "gcoalesce: said so\n");
    refuse(GCOALESCE_NOT_FOUND, 1, 0, "gcoalesce: said so\n");
    refuse(GCOALESCE_GONE, 1, 0, "gcoalesce: said so\n");
    refuse(GCOALESCE_BAD_REQUEST, 2, 0, "gcoalesce: said so\n");

    Process process(command(*directory, {"ask", "--json", "Hi."}));
    broker.refuse(broker.wait_for_held(1).front(), GCOALESCE_BUSY, "said so", 2000);
    CHECK(process.wait() == 5);
    CHECK(nlohmann::json::parse(process.err())["error"] ==
          nlohmann::json({{"code", "busy"}, {"message", "said so"}, {"retry_ms", 2000}}));
}

TEST_CASE(
    "16b: ask, notify, cancel and purge without a broker, without permission and with another version end at once") {
    for (const std::vector<std::string>& arguments :
         {std::vector<std::string>{"ask", "Hi."}, {"notify", "on"}, {"cancel", "abcd"}, {"purge", "abcd"}}) {
        const ScratchInstance nobody;
        const Ran absent = run(command(*nobody, arguments));
        CHECK(absent.code == 3);
        CHECK(absent.out.empty());
        CHECK(absent.err.starts_with("gcoalesce: "));
        CHECK(std::count(absent.err.begin(), absent.err.end(), '\n') == 1);

        const ScratchInstance directory;
        FakeBrokerOptions options;
        options.protocol = 99;
        FakeBroker broker(*directory, options);
        const Ran other = run(command(*directory, arguments));
        CHECK(other.code == 9);
        CHECK(other.says("99"));

        std::vector<std::string> powerless = command(*directory, arguments);
        if (::geteuid() == 0)
            powerless.insert(powerless.begin(), {"setpriv", "--bounding-set", "-dac_override,-dac_read_search"});
        ::chmod(directory->runtime_dir.c_str(), 0);
        const Ran refused = run(powerless);
        ::chmod(directory->runtime_dir.c_str(), 0700);
        CHECK(refused.code == 1);
        CHECK(refused.says("permission"));

        std::set<std::string> sentences{absent.err, other.err, refused.err};
        CHECK(sentences.size() == 3);
    }
}

TEST_CASE("a broker that dies before the first event and does not come back is not waited for in vain") {
    const ScratchInstance directory;
    FakeBroker broker(*directory);
    Process process(command(*directory, {"ask", "Hi."}));
    broker.wait_until([&] { return broker.opens() == 1; });
    broker.die();
    CHECK(process.wait() == 3);
    CHECK(process.out().empty());
}

TEST_CASE("where nobody but a service manager listens, a question waits for the broker that it makes start") {
    const ScratchInstance instance;
    Sim sim;
    const UniqueFd listener(::socket(AF_UNIX, SOCK_STREAM, 0)); // for the broker to inherit
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    REQUIRE(instance->socket_path().copy(address.sun_path, sizeof address.sun_path - 1) ==
            instance->socket_path().size());
    REQUIRE(::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
    REQUIRE(::listen(listener.get(), SOMAXCONN) == 0);

    const auto answered = [&] {
        Process ask(command(*instance, {"ask", "--bypass", "Is anybody there?"}));
        // A broker that takes longer to start than a client waits for an answer: nobody serves its first connection.
        const UniqueFd first(::accept(listener.get(), nullptr, nullptr));
        std::array<char, 256> hello{};
        while (::read(first.get(), hello.data(), hello.size()) > 0) {
        }
        pollfd second{listener.get(), POLLIN, 0};
        REQUIRE(eventually([&] { return ::poll(&second, 1, 0) == 1 || has_ended(ask.pid()); }));
        std::vector<std::string> start{"bash", "-c", R"(exec 3<&"$0"; LISTEN_FDS=1 LISTEN_PID=$$ exec "$@")",
                                       std::to_string(listener.get())};
        for (const std::string& word : broker_command(*instance, sim.url())) start.push_back(word);
        Process broker(start);
        const int code = ask.wait();
        INFO(ask.err());
        CHECK(code == 0);
        CHECK(!ask.out().empty());
        broker.signal(SIGKILL);
        broker.wait();
    };
    answered(); // after a boot
    answered(); // where a dead broker has left its segment
}

TEST_CASE("ask says that standard output cannot be written, and dies quietly of a reader that left") {
    const World world;
    const std::string prompt = "Much. [sim events=40 size=32KiB]";
    const Ran full = run({"sh", "-c", quoted(world.command({"ask", prompt})) + "> /dev/full"});
    CHECK(full.code == 1);
    CHECK(full.err == "gcoalesce: cannot write to standard output: No space left on device\n");

    // More than a pipe holds, so that it must notice.
    const Ran pipe = run({"bash", "-c", quoted(world.command({"ask", prompt})) + "| true; exit ${PIPESTATUS[0]}"});
    CHECK(pipe.code == 141);
    CHECK(pipe.err.empty());
}

TEST_CASE("on a terminal control characters are escaped and the last line ends; --raw and pipes get the bytes") {
    const TemporaryFile recorded(
        "data: {\"candidates\": [{\"content\": {\"parts\": [{\"text\": \"a\\u001b[31mb\\u009bc\"}],"
        "\"role\": \"model\"},\"finishReason\": \"STOP\",\"index\": 0}]}\r\n\r\n");
    const World world({}, {"--replay", recorded.path()});
    CHECK(world.run({"ask", "Hi."}).out == "a\x1b[31mb\xc2\x9b"
                                           "c");
    const std::string line = quoted(world.command({"ask", "Hi."}));
    CHECK(on_terminal(line) == "a\\x1b[31mb\\xc2\\x9bc\r\n");
    CHECK(on_terminal(line + " --raw") == "a\x1b[31mb\xc2\x9b"
                                          "c\r\n");
}

TEST_CASE("ask --lines answers each line in its place, whichever came first") {
    World world;
    const std::string input = "first [sim first=300ms]\nsecond\n\nfourth [sim first=100ms]\r\nfifth";
    const Ran text = world.run({"ask", "--lines", "-j", "4"}, input);
    CHECK(text.code == 0);
    CHECK(text.err.empty());
    std::vector<std::string> alone;
    for (const char* prompt : {"first [sim first=300ms]", "second", "fourth [sim first=100ms]", "fifth"})
        alone.push_back(world.run({"ask", prompt}).out);
    CHECK(text.lines() == alone);
    CHECK(world.calls() == 4);

    const Ran json = world.run({"ask", "--lines", "--json", "-j", "1"}, input);
    CHECK(json.code == 0);
    REQUIRE(json.lines().size() == 4);
    const std::vector<int> numbers{1, 2, 4, 5};
    for (std::size_t i = 0; i < 4; ++i) {
        const auto object = nlohmann::json::parse(json.lines()[i]);
        CHECK(object["line"] == numbers[i]);
        CHECK(object["text"] == alone[i]);
        CHECK(object["status"] == "fresh");
    }
}

TEST_CASE("ask --lines keeps the place of a line that failed, and succeeds only if all did") {
    const World world;
    const Ran some = world.run({"ask", "--lines"}, "good\nbad [sim status=404]\ngood too\n");
    CHECK(some.code == 8);
    REQUIRE(some.lines().size() == 3);
    CHECK_FALSE(some.lines()[0].empty());
    CHECK(some.lines()[1].empty());
    CHECK_FALSE(some.lines()[2].empty());
    CHECK(some.err.starts_with("gcoalesce: line 2: "));
    const Ran all = world.run({"ask", "--lines", "--json"}, "a [sim status=403]\nb [sim status=403]\n");
    CHECK(all.code == 4);
    REQUIRE(all.lines().size() == 2);
    const auto object = nlohmann::json::parse(all.lines()[1]);
    CHECK(object["line"] == 2);
    CHECK(object["error"]["code"] == "key_refused");
    CHECK(world.run({"ask", "--lines"}, "").code == 0);
    CHECK(world.run({"ask", "--lines"}, "\xff\n").code == 2);
}

TEST_CASE("ask --lines asks while it still reads, and shows progress to a terminal only") {
    const World world;
    const std::string ask = quoted(world.command({"ask", "--lines", "--json"}));
    // The second prompt is only sent when the first answer is there.
    const Ran live = run({"bash", "-c",
                          "coproc A { " + ask +
                              "; }; echo one >&\"${A[1]}\"; read -r -u \"${A[0]}\" x; "
                              "echo \"$x\"; echo two >&\"${A[1]}\"; read -r -u \"${A[0]}\" x; echo \"$x\""});
    REQUIRE(live.lines().size() == 2);
    CHECK(nlohmann::json::parse(live.lines()[1])["line"] == 2);

    const std::string seen = on_terminal("printf 'a [sim first=500ms]\\nb [sim first=500ms]\\n' | " +
                                         quoted(world.command({"ask", "--lines"})) + " > /dev/null");
    CHECK(seen.find("\r\x1b[K[..............................] 0 of 2") != std::string::npos);
    CHECK(seen.ends_with("\r\x1b[K"));
}

TEST_CASE("notify opens, closes and tells the window, as often as one likes") {
    const World world({"--window", "1h"});
    const auto remaining = [&](std::vector<std::string> arguments) -> std::int64_t {
        arguments.insert(arguments.begin(), "notify");
        arguments.push_back("--json");
        const Ran ran = world.run(arguments);
        CHECK(ran.code == 0);
        CHECK(ran.json()["version"] == 1);
        CHECK(ran.json()["window"] == (ran.json()["remaining_ms"] > 0 ? "open" : "closed"));
        return ran.json()["remaining_ms"];
    };
    CHECK(remaining({"status", "--template", "default"}) == 0);
    CHECK(world.run({"notify", "status", "--template", "default"}).out == "closed\n");
    const std::int64_t usual = remaining({"on"});
    CHECK(usual > 3'500'000);
    CHECK(usual <= 3'600'000);
    CHECK(remaining({"on", "--for", "1min"}) > 3'400'000); // the later of both
    CHECK(remaining({"on", "--for", "2h"}) > 7'000'000);
    CHECK(remaining({"status", "--template", "default"}) > 7'000'000);
    CHECK(world.run({"notify", "on"}).out.starts_with("open for "));
    CHECK(remaining({"off"}) == 0);
    CHECK(remaining({"off"}) == 0);

    CHECK(world.run({"notify"}).code == 2);
    CHECK(world.run({"notify", "maybe"}).code == 2);
    CHECK(world.run({"notify", "on", "--for", "0ms"}).code == 2);
    CHECK(world.run({"notify", "on", "--for", "2d"}).code == 2);
    CHECK(world.run({"notify", "off", "--for", "6s"}).code == 2);
}

TEST_CASE("an answer during whose flight the window was open shows the longer freshness in keys") {
    const World world({"--ttl-idle", "1s", "--ttl-window", "1h"});
    CHECK(world.run({"notify", "on", "--for", "10min"}).code == 0);
    CHECK(world.run({"ask", "Push!"}).code == 0);
    const Ran keys = world.run({"keys", "--json"});
    REQUIRE(keys.json()["keys"].size() == 1);
    CHECK(keys.json()["keys"][0]["fresh_for_ms"] > 3'000'000);
    CHECK(world.run({"dump", keys.json()["keys"][0]["key"]}).out == world.run({"ask", "Push!"}).out);
}
