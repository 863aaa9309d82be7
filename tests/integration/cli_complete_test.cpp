// Completion, as the shells show it: bash, zsh and fish ask the one `gcoalesce __complete`.
#include <catch2/catch.hpp>
#include <cstdio>

#include "tests/integration/cli_support.hpp"
#include "tests/support/fixtures.hpp"

using namespace gcoalesce;
using namespace gcoalesce::test;

namespace {

// A broker in this process with one stream and two templates, named by the environment.
struct Live {
    ScratchInstance directory;
    FakeBroker broker{*directory};

    Live() {
        broker.with_store([](Store& store) {
            std::vector<TemplateSettings> templates(2);
            templates[1].id = "weather";
            REQUIRE(store.set_templates(templates));
            StreamOpening opening;
            opening.key.fill(0xab);
            opening.key[0] = 0x12;
            opening.stream_id = 0x9f3c2a71d04b55e8;
            opening.template_index = 1;
            opening.model = "gemini-2.5-flash";
            REQUIRE(store.open(opening, true));
        });
    }

    SpawnOptions environment() const {
        const std::string program = gcoalesce_program();
        SpawnOptions options;
        options.env = {"GCOALESCE_INSTANCE=" + directory->name, "GCOALESCE_RUNTIME_DIR=" + directory->runtime_dir,
                       "PATH=" + program.substr(0, program.rfind('/')) + ":/usr/bin:/bin"};
        return options;
    }

    // Candidates without their descriptions.
    std::vector<std::string> complete(std::vector<std::string> words) const {
        words.insert(words.begin(), {gcoalesce_program(), "__complete"});
        const Ran ran = run(std::move(words), environment());
        CHECK(ran.code == 0);
        CHECK(ran.err.empty());
        return first_words(ran.lines());
    }

    static std::vector<std::string> first_words(std::vector<std::string> lines) {
        for (std::string& line : lines) line.erase(std::min(line.find('\t'), line.size()));
        return lines;
    }
};

bool has(const std::vector<std::string>& all, const std::string& one) {
    return std::ranges::find(all, one) != all.end();
}

std::string script(const std::string& name) {
    return source_dir().string() + "/packaging/completions/" + name;
}

bool installed(const char* shell) {
    if (run({"sh", "-c", std::string("command -v ") + shell}).code == 0) return true;
    std::printf("SKIPPED: %s is not installed\n", shell);
    return false;
}

} // namespace

TEST_CASE("completion knows commands, options, choices, files, and live keys, streams and templates") {
    const Live live;
    CHECK(has(live.complete({""}), "estimate"));
    CHECK(live.complete({"est"}) == std::vector<std::string>{"estimate"});
    CHECK(live.complete({"nothing-like-it"}).empty());
    CHECK(live.complete({"templates", "sh"}) == std::vector<std::string>{"show"});
    CHECK(live.complete({"estimate", "--no"}) == std::vector<std::string>{"--notifications"});
    CHECK(has(live.complete({"estimate", "--"}), "--instance")); // those of every command, too
    CHECK(live.complete({"notify", "of"}) == std::vector<std::string>{"off"});
    CHECK(live.complete({"dump", "--format", "r"}) == std::vector<std::string>{"raw"});
    CHECK(live.complete({"dump", "--format=r"}) == std::vector<std::string>{"--format=raw"});
    CHECK(live.complete({"dump", "--format", "=", "r"}) == std::vector<std::string>{"raw"}); // bash splits it so
    CHECK(live.complete({"dump", ""}) == std::vector<std::string>{"12ababab"});
    CHECK(live.complete({"cancel", "12ab"}) == std::vector<std::string>{"12ababab"});
    CHECK(live.complete({"cancel", "12abababab"}) == std::vector<std::string>{"12abababab"});
    CHECK(live.complete({"dump", "34"}).empty());
    CHECK(live.complete({"ask", "--resume", ""}) == std::vector<std::string>{"9f3c2a71d04b55e8"});
    CHECK(live.complete({"ask", "-t", ""}) == std::vector<std::string>{"default", "weather"});
    CHECK(live.complete({"keys", "--template", "w"}) == std::vector<std::string>{"weather"});
    CHECK(live.complete({"templates", "show", "w"}) == std::vector<std::string>{"weather"});
    CHECK(live.complete({"ask", "-m", "gem"}) == std::vector<std::string>{"gemini-2.5-flash"});
    CHECK(live.complete({"ask", "--request", "x"}) == std::vector<std::string>{":files"});
    CHECK(live.complete({"templates", "check", ""}) == std::vector<std::string>{":files"});
    CHECK(live.complete({"--runtime-dir", ""}) == std::vector<std::string>{":dirs"});
    CHECK(live.complete({"dump", "--", "--fo"}).empty());

    // The instance that the line itself names: there is no broker, so there are no keys, and no complaint.
    CHECK(live.complete({"--instance", "another", "dump", ""}).empty());
    CHECK(live.complete({"dump", "--instance=another", ""}).empty());
}

TEST_CASE("completion tells every command and every long option that --help tells") {
    const Live live;
    std::vector<std::string> paths{""};
    std::size_t commands = 0;
    while (!paths.empty()) {
        const std::string path = paths.back();
        paths.pop_back();
        ++commands;
        std::vector<std::string> words;
        for (std::istringstream text(path); text >> std::ws && !text.eof();) text >> words.emplace_back();
        std::vector<std::string> help{gcoalesce_program()}, dashes = words, nothing = words;
        help.insert(help.end(), words.begin(), words.end());
        help.emplace_back("--help");
        dashes.emplace_back("--");
        nothing.emplace_back();
        const std::vector<std::string> options = live.complete(dashes), names = live.complete(nothing);
        bool subcommands = false;
        for (const std::string& line : run(help).lines()) {
            CAPTURE(path, line);
            subcommands = (subcommands && line.starts_with("  ")) || line == "Subcommands:";
            if (const std::size_t at = line.find("--"); line.starts_with("  -") && at < 10) {
                const std::size_t end = line.find_first_of(" ,", at);
                CHECK(has(options, line.substr(at, end - at)));
            } else if (subcommands && line.starts_with("  ") && line[2] != ' ') {
                const std::string name = line.substr(2, line.find(' ', 2) - 2);
                CHECK(has(names, name));
                paths.push_back(path + " " + name);
            }
        }
    }
    CHECK(commands > 12);
}

TEST_CASE("completion works in bash") {
    if (!installed("bash")) return;
    const Live live;
    const auto complete = [&](const std::string& words) {
        const Ran ran = run({"bash", "--norc", "-c",
                             "source '" + script("gcoalesce.bash") + "'; COMP_WORDS=(" + words +
                                 "); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); "
                                 "_gcoalesce gcoalesce; printf '%s\\n' \"${COMPREPLY[@]}\""},
                            live.environment());
        CHECK(ran.err.empty());
        return ran.lines();
    };
    CHECK(complete("gcoalesce est") == std::vector<std::string>{"estimate"});
    CHECK(complete("gcoalesce dump ''") == std::vector<std::string>{"12ababab"});
    CHECK(complete("gcoalesce ask -t w") == std::vector<std::string>{"weather"});
    CHECK(complete("gcoalesce dump --format = t") == std::vector<std::string>{"text"});
    CHECK(has(complete("gcoalesce estimate --prices '" + script("gcoalesce.f") + "'"), script("gcoalesce.fish")));
    const Ran registered =
        run({"bash", "--norc", "-c", "source '" + script("gcoalesce.bash") + "'; complete -p gcoalesce"});
    CHECK(registered.out == "complete -F _gcoalesce gcoalesce\n");
}

TEST_CASE("completion works in fish") {
    if (!installed("fish")) return;
    const Live live;
    const auto complete = [&](const std::string& line) {
        SpawnOptions options = live.environment();
        options.env.push_back("XDG_CONFIG_HOME=" + live.directory->runtime_dir);
        options.env.push_back("XDG_DATA_HOME=" + live.directory->runtime_dir);
        const Ran ran =
            run({"fish", "--no-config", "-c", "source '" + script("gcoalesce.fish") + "'; complete -C '" + line + "'"},
                options);
        CHECK(ran.err.empty());
        return Live::first_words(ran.lines());
    };
    CHECK(complete("gcoalesce est") == std::vector<std::string>{"estimate"});
    CHECK(complete("gcoalesce dump ") == std::vector<std::string>{"12ababab"});
    CHECK(complete("gcoalesce ask -t w") == std::vector<std::string>{"weather"});
    CHECK(complete("gcoalesce dump --format=t") == std::vector<std::string>{"--format=text"});
    CHECK(has(complete("gcoalesce estimate --prices " + script("gcoalesce.f")), script("gcoalesce.fish")));
}

TEST_CASE("completion works in zsh") {
    if (!installed("zsh")) return;
    const Live live;
    std::ofstream(live.directory->runtime_dir + "/.zshrc") << R"zsh(PS1='ready> '
fpath=($COMPLETIONS $fpath)
autoload -Uz compinit
compinit -u -D
show-line() { print -r -- "<$BUFFER>"; BUFFER= }
zle -N show-line
bindkey '^X' show-line
bindkey '^I' complete-word
unset zle_bracketed_paste
)zsh";
    // A zsh at its prompt, on a terminal of its own, in which somebody types the line and a tab.
    const auto complete = [&](const std::string& line) {
        SpawnOptions options = live.environment();
        options.env.push_back("ZDOTDIR=" + live.directory->runtime_dir);
        options.env.push_back("COMPLETIONS=" + source_dir().string() + "/packaging/completions");
        options.env.push_back("TERM=dumb");
        Process zsh({"zsh", "-f", "-c", R"zsh(
zmodload zsh/zpty
zpty shell "zsh -d -i"
zpty -r shell got '*ready> *'
zpty -w -n shell "$1"$'\t'$'\x18'
zpty -r shell got '*<gcoalesce*>*'
print -r -- ${${got##*<}%%>*}
)zsh",
                     "zsh", line},
                    options);
        const std::string became = zsh.read_line(Process::Seconds(120));
        return became.substr(0, became.find_last_not_of(' ') + 1);
    };
    CHECK(complete("gcoalesce est") == "gcoalesce estimate");
    CHECK(complete("gcoalesce dump ") == "gcoalesce dump 12ababab");
    CHECK(complete("gcoalesce ask -t w") == "gcoalesce ask -t weather");
    CHECK(complete("gcoalesce dump --format=t") == "gcoalesce dump --format=text");
    CHECK(complete("gcoalesce estimate --prices " + script("gcoalesce.f")) ==
          "gcoalesce estimate --prices " + script("gcoalesce.fish"));
}
