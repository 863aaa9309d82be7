#include "protocol/key.hpp"

#include <catch2/catch.hpp>
#include <set>
#include <thread>

namespace {

using gcoalesce::compute_key;
using gcoalesce::KeyParts;
using gcoalesce::Method;
using gcoalesce::resolve_model;

KeyParts sample() {
    KeyParts parts;
    parts.model = "gemini-2.5-flash";
    parts.asked = R"({"contents":[{"parts":[{"text":"hi"}],"role":"user"}]})";
    return parts;
}

TEST_CASE("The key of a given request never changes") {
    // Snapshots and other hosts know requests by it: a change needs a new encoding name in key.cpp.
    CHECK(gcoalesce::to_hex(compute_key(sample())) ==
          "0bab434eb1964cc850a2c3984cafb443a48968af26ac195b1fd1b73a1fa44abc");
}

TEST_CASE("T21: each part of a request changes its key") {
    std::vector<KeyParts> all(9, sample());
    all[1].realm = "team-a";
    all[2].template_id = "headline";
    all[3].template_revision = 2;
    all[4].model = "gemini-2.5-pro";
    all[5].method = Method::unary;
    all[6].asked = R"({"contents":[{"parts":[{"text":"hi!"}],"role":"user"}]})";
    all[7].asked = "";
    all[8].realm = "default"; // the same words in another part
    all[8].template_id = "";
    std::set<gcoalesce::Key> keys;
    for (const KeyParts& parts : all) keys.insert(compute_key(parts));
    CHECK(keys.size() == all.size());
}

TEST_CASE("Bytes cannot wander from one part of the key to the next") {
    KeyParts left = sample();
    KeyParts right = sample();
    left.realm = "ab";
    left.template_id = "c";
    right.realm = "a";
    right.template_id = "bc";
    CHECK(compute_key(left) != compute_key(right));
}

TEST_CASE("T20: the key is the same on every thread and every time") {
    const gcoalesce::Key first = compute_key(sample());
    for (int i = 0; i < 100; ++i) REQUIRE(compute_key(sample()) == first);
    gcoalesce::Key other{};
    std::thread([&] { other = compute_key(sample()); }).join();
    CHECK(other == first);
}

TEST_CASE("A model is one with and without its prefix") {
    CHECK(resolve_model("gemini-2.5-flash") == std::string("gemini-2.5-flash"));
    CHECK(resolve_model("models/gemini-2.5-flash") == std::string("gemini-2.5-flash"));
    CHECK(resolve_model("tunedModels/my_model.1") == std::string("tunedModels/my_model.1"));
    CHECK(resolve_model(std::string(128, 'm')) == std::string(128, 'm'));
}

TEST_CASE("A model that would change the upstream's URL is refused") {
    const std::string refused[] = {"",
                                   "models/",
                                   std::string(129, 'm'),
                                   "a b",
                                   "a?alt=json",
                                   "a#b",
                                   "a:generate",
                                   "a%2e",
                                   "..",
                                   "a/../b",
                                   "./a",
                                   "a//b",
                                   "/a",
                                   "a/",
                                   "a\\b",
                                   "a\r\nb",
                                   "g\xC3\xA4",
                                   "models//a",
                                   std::string("a\0b", 3)};
    for (const std::string& model : refused) {
        INFO(model);
        const auto resolved = resolve_model(model);
        REQUIRE_FALSE(resolved.has_value());
        CHECK(resolved.error().code == GCOALESCE_BAD_REQUEST);
        CHECK(resolved.error().message.find('\n') == std::string::npos);
    }
}

} // namespace
