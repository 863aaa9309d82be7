// What every command of gcoalesce has in common: help, version, usage errors, exit codes.
#include <catch2/catch.hpp>
#include <csignal>

#include "tests/support/process.hpp"
#include "tests/support/sim.hpp"

using namespace gcoalesce::test;

namespace {

// Runs gcoalesce to its end and keeps what it said.
struct Ran {
    explicit Ran(std::vector<std::string> arguments) {
        arguments.insert(arguments.begin(), gcoalesce_program());
        Process process(std::move(arguments));
        code = process.wait();
        out = process.out();
        err = process.err();
    }
    int code = 0;
    std::string out, err;
};

} // namespace

TEST_CASE("help and version go to standard output and are no failure") {
    for (const char* flag : {"-h", "--help", "--version"}) {
        const Ran ran({flag});
        CHECK(ran.code == 0);
        CHECK(ran.out.find("gcoalesce") != std::string::npos);
        CHECK(ran.err.empty());
    }
    const Ran sim({"sim", "--help"});
    CHECK(sim.code == 0);
    CHECK(sim.out.find("--bare-error-after N") != std::string::npos);
    CHECK(sim.out.find("[sim events=36 gap=50ms cut-after=3]") != std::string::npos);
}

TEST_CASE("a usage error is one line and a hint on standard error, and exit code 2") {
    const auto check = [](std::vector<std::string> arguments, const std::string& err) {
        const Ran ran(std::move(arguments));
        CHECK(ran.code == 2);
        CHECK(ran.out.empty());
        CHECK(ran.err == err);
    };
    check({"sin"}, "gcoalesce: unknown command \"sin\"; did you mean \"sim\"?\ntry 'gcoalesce --help'\n");
    check({"--instance", "x", "simm"},
          "gcoalesce: unknown command \"simm\"; did you mean \"sim\"?\ntry 'gcoalesce --help'\n");
    check({"frobnicate"}, "gcoalesce: unknown command \"frobnicate\"\ntry 'gcoalesce --help'\n");
    check({"--frobnicate"}, "gcoalesce: unknown option \"--frobnicate\"\ntry 'gcoalesce --help'\n");
    check({"sim", "--prot=1"},
          "gcoalesce sim: unknown option \"--prot\"; did you mean \"--port\"?\ntry 'gcoalesce sim --help'\n");
    check({"sim", "--status", "99"},
          "gcoalesce sim: --status: expected a number from 200 to 599, found \"99\"\ntry 'gcoalesce sim --help'\n");
    check({"sim", "--gap", "5"},
          "gcoalesce sim: --gap: expected a duration such as 200ms, 6s, 10min or 2h, found \"5\"\n"
          "try 'gcoalesce sim --help'\n");
    check({"sim", "--bind", "here"}, "gcoalesce sim: --bind: expected an address such as 127.0.0.1 or ::1, found "
                                     "\"here\"\ntry 'gcoalesce sim --help'\n");
    check({"sim", "sim"}, "gcoalesce sim: The following argument was not expected: sim\ntry 'gcoalesce sim --help'\n");
}

TEST_CASE("the options of every command may stand behind it") {
    CHECK(Ran({"sim", "--instance", "x", "--runtime-dir", "/nowhere", "--help"}).code == 0);
}

TEST_CASE("a standard output that cannot be written is a failure") {
    Process process({"/bin/sh", "-c", "exec \"$0\" --help > /dev/full", gcoalesce_program()});
    CHECK(process.wait() == 1);
    CHECK(process.err() == "gcoalesce: cannot write to standard output: No space left on device\n");
}

TEST_CASE("a reader that leaves ends a command quietly by SIGPIPE") {
    // The writer's end of the pipe has no reader by the time the command starts.
    Process process({"/bin/bash", "-c", "exec 3> >(:); wait $!; exec \"$0\" --help >&3", gcoalesce_program()});
    CHECK(process.wait() == 128 + SIGPIPE);
    CHECK(process.err().empty());
}
