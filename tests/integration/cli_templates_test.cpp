// gcoalesce templates check, as those who write templates use it.
#include <catch2/catch.hpp>

#include "tests/integration/cli_support.hpp"

using namespace gcoalesce::test;

namespace {

class TemplateDirectory {
  public:
    TemplateDirectory() {
        std::string path = (std::filesystem::temp_directory_path() / "gcoalesce-test-XXXXXX").string();
        if (::mkdtemp(path.data()) == nullptr) throw std::runtime_error("mkdtemp");
        path_ = path;
    }
    ~TemplateDirectory() { std::filesystem::remove_all(path_); }
    TemplateDirectory(const TemplateDirectory&) = delete;
    TemplateDirectory& operator=(const TemplateDirectory&) = delete;

    std::string write(const std::string& name, const std::string& text) const {
        std::ofstream(path_ / name) << text;
        return (path_ / name).string();
    }
    std::string path() const { return path_.string(); }

  private:
    std::filesystem::path path_;
};

Ran check(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {gcoalesce_program(), "templates", "check"});
    return run(std::move(arguments));
}

constexpr const char* kGood = R"({"model": "models/gemini-2.5-flash", "prompt": "On {{topic}} in {{tone}}",
    "variables": {"topic": {}, "tone": {"default": "prose"}}})";

} // namespace

TEST_CASE("templates check lists what a directory has, and exits with 0") {
    const TemplateDirectory directory;
    directory.write("news.json", kGood);
    directory.write("default.json", R"({"ttl_idle": "1s"})");
    directory.write("notes.txt", "not one of them");
    const Ran table = check({directory.path()});
    CHECK(table.code == 0);
    CHECK(table.err.empty());
    REQUIRE(table.lines().size() == 3);
    CHECK(table.lines()[1].starts_with("default "));
    CHECK(table.lines()[2].starts_with("news "));
    CHECK(table.lines()[2].ends_with("  gemini-2.5-flash  tone? topic"));

    const Ran json = check({directory.path(), "--json"});
    CHECK(json.code == 0);
    CHECK(json.json().at("version") == 1);
    CHECK(json.json().at("ok") == true);
    const auto templates = json.json().at("templates");
    REQUIRE(templates.size() == 2);
    CHECK(templates[0].at("id") == "default");
    CHECK(templates[0].at("model").is_null());
    CHECK(templates[1].at("model") == "gemini-2.5-flash");
    CHECK(templates[1].at("revision").get<std::string>().size() == 16);
    CHECK(templates[1].at("variables") ==
          nlohmann::json::parse(R"([{"name":"tone","required":false},{"name":"topic","required":true}])"));
}

TEST_CASE("templates check takes one file, and needs no broker for it") {
    const TemplateDirectory directory;
    const std::string path = directory.write("news.json", kGood);
    directory.write("broken.json", "{");
    const Ran one = check({path});
    CHECK(one.code == 0);
    CHECK(one.lines().size() == 2);
}

TEST_CASE("templates check names the file, the member and the nearest known name, and exits with 2") {
    const TemplateDirectory directory;
    directory.write("news.json", kGood);
    const std::string bad =
        directory.write("sports.json", R"({"model": "m", "prompt": "p", "limits": {"in_flite": 1}})");
    const std::string message = bad + ": /limits/in_flite: unknown member; did you mean \"in_flight\"?";
    for (const std::string& path : {bad, directory.path()}) {
        const Ran ran = check({path});
        CHECK(ran.code == 2);
        CHECK(ran.out.empty());
        CHECK(ran.err == "gcoalesce: " + message + "\n");

        const Ran json = check({path, "--json"});
        CHECK(json.code == 2);
        CHECK(json.err.empty());
        CHECK(json.json() == nlohmann::json{{"version", 1},
                                            {"ok", false},
                                            {"error", {{"code", "bad_request"}, {"message", message}}}});
    }
    const Ran absent = check({directory.path() + "/absent.json"});
    CHECK(absent.code == 2);
    CHECK(absent.err == "gcoalesce: " + directory.path() + "/absent.json: No such file or directory\n");
}

TEST_CASE("templates suggests the command that was meant") {
    const Ran ran = run({gcoalesce_program(), "templates", "chek"});
    CHECK(ran.code == 2);
    CHECK(ran.err == "gcoalesce templates: unknown command \"chek\"; did you mean \"check\"?\n"
                     "try 'gcoalesce templates --help'\n");
    CHECK(run({gcoalesce_program(), "templates"}).code == 2);
    CHECK(run({gcoalesce_program(), "templates", "check"}).err ==
          "gcoalesce templates check: PATH is required\ntry 'gcoalesce templates check --help'\n");
}
