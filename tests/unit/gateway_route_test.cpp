// What a request of the gateway asks for, by its line and fields.
#include <catch2/catch.hpp>

#include "cli/gateway/members.hpp"
#include "cli/gateway/problem.hpp"
#include "cli/gateway/route.hpp"

using namespace gcoalesce;
using namespace gcoalesce::gateway;

namespace {

Route at(const char* target) {
    const Target parsed(target);
    Route route = route_of(parsed);
    route.stream = {}; // it points into the target
    return route;
}

} // namespace

TEST_CASE("paths lead to their services") {
    for (const char* version : {"/v1beta/", "/v1alpha/", "/v1/", "/"}) {
        const std::string model = std::string(version) + "models/gemini-2.5-flash";
        CHECK(at((model + ":generateContent").c_str()).service == Service::unary);
        CHECK(at((model + ":streamGenerateContent?alt=sse").c_str()).service == Service::stream);
        CHECK(at((model + ":streamGenerateContent").c_str()).model == "models/gemini-2.5-flash");
        CHECK(at((model + ":countTokens").c_str()).service == Service::pass);
    }
    CHECK(at("/v1beta/tunedModels/mine:generateContent").model == "tunedModels/mine");
    CHECK(at("/v1beta/openai/chat/completions").service == Service::chat);
    CHECK(at("/v1beta/openai/embeddings").path == "/v1beta/openai/embeddings");
    CHECK(at("/models?pageSize=9&key=k&pageToken=t").path == "/v1beta/models?pageSize=9&pageToken=t");
    CHECK(at("/v1alpha/files").path == "/v1alpha/files");
    CHECK(at("/v1/streams").service == Service::create_stream);
    CHECK(at("/v1/streams/0123456789abcdef").service == Service::read_stream);
    CHECK(at("/v1/notify").service == Service::notify);
    CHECK(at("/healthz").service == Service::health);
    CHECK(at("/readyz").service == Service::ready);
    CHECK(at("/metrics").service == Service::metrics);
    for (const char* nothing : {"", "/", "/favicon.ico", "*", "models", "/modelsx", "/metric"})
        CHECK(at(nothing).service == Service::unknown);
}

TEST_CASE("a target's query is read decoded, the first of a name") {
    const Target target("/p?a=1%202&b&a=3&c=%C3%A9+x&=&&d=");
    CHECK(target.path() == "/p");
    CHECK(target.query("a") == "1 2");
    CHECK(target.query("b") == "");
    CHECK(target.query("c") == "\xC3\xA9 x");
    CHECK(target.query("d") == "");
    CHECK_FALSE(target.query("e"));
    CHECK(Target("/p?k%65y=k+1").query("key") == "k 1");
    CHECK_FALSE(target.query_but({"a", "b", "c", "", "d"}));
    CHECK(target.query_but({"a", "b", "c", "d"}) == "");
    CHECK(target.query_but({"a", "b", "d", ""}) == "c");
    CHECK_FALSE(Target("/p?k%65y=k").query_but({}));
    CHECK(Target("/p?a=%4&b=%zz&c=%").query("b") == "%zz");
}

TEST_CASE("an object's members keep their spelling, above all their numbers") {
    const auto members =
        members_of(R"( {"a" : 1.10, "b":[1e2, {"c":-0.0,"d":[]},null ,true] ,"a":12345678901234567890123,
        "s": "\u00e9\n\"", "e":{}, "n":18446744073709551615} )");
    REQUIRE(members);
    CHECK(*members == Members{{"a", "1.10"},
                              {"b", R"([1e2,{"c":-0.0,"d":[]},null,true])"},
                              {"a", "12345678901234567890123"},
                              {"s", "\"\xC3\xA9\\n\\\"\""},
                              {"e", "{}"},
                              {"n", "18446744073709551615"}});
    CHECK(members_of("{}") == Members{});
    for (const std::string& none :
         {std::string(), std::string("[]"), std::string("1"), std::string("{\"a\":1}x"), std::string("{\"a\":1,}"),
          std::string("\xEF\xBB\xBF{}"), std::string("{}\0x", 4)}) {
        CHECK_FALSE(members_of(none));
        CHECK(is_json(none) == (none == "[]" || none == "1"));
    }
}

TEST_CASE("only names that public DNS may have are public") {
    for (const char* own :
         {"", "localhost", "LOCALHOST:8790", "gateway", "gateway:80", "a.localhost", "127.0.0.1", "127.0.0.1:8790",
          "10.1.2.3", "[::1]", "[::1]:8790", "[::ffff:1.2.3.4]:80", ".", "gateway."})
        CHECK(public_name(own).empty());
    CHECK(public_name("evil.example") == "evil.example");
    CHECK(public_name("Evil.Example.:8790") == "evil.example");
    CHECK(public_name("127.0.0.1.evil.example:8790") == "127.0.0.1.evil.example");
    CHECK(public_name("localhost.evil.example") == "localhost.evil.example");
}

TEST_CASE("no key or token stays in a query that is passed on, however its name is written") {
    const auto passed = [](const char* query) { return Target(std::string("/p?") + query).query_without_key(); };
    for (const char* secret : {"key=k", "key=", "key", "k%65y=k", "%6b%65%79=k", "%6B%65%79", "KEY=k", "Key=k",
                               "key=a&key=b", "key=a&k%65y=b&", "$key=k", "%24key=k", "access_token=t",
                               "%24access_token=t", "oauth_token=t", "Access%5fToken=t"}) {
        CAPTURE(secret);
        CHECK(passed(secret).empty());
        CHECK(passed((std::string("pageSize=9&") + secret + "&%24alt=json").c_str()) == "?pageSize=9&%24alt=json");
    }
    for (const char* kept : {"keys=1", "key%3D=1", "x=key=k", "x=%26key=k", "k%2565y=k", "monkey=1", "$keys=1", "=key"})
        CHECK(passed(kept) == std::string("?") + kept);
}

TEST_CASE("Cache-Control's words are read as HTTP has them") {
    CHECK(freshness_of("").max_age_ms == 0);
    CHECK(freshness_of("no-cache").max_age_ms == -1);
    CHECK(freshness_of("max-age=0").max_age_ms == -1);
    CHECK(freshness_of("MAX-AGE = 7").max_age_ms == 7000);
    CHECK(freshness_of("no-cache, max-age=7").max_age_ms == -1);
    CHECK(freshness_of("max-age=7 , no-store").no_store);
    CHECK(freshness_of("max-age=99999999999999999999").max_age_ms == 0);
    for (const char* nonsense : {"max-age", "max-age=", "max-age=x", "max-age=-1", "x-no-cache", ",,="}) {
        CHECK(freshness_of(nonsense).max_age_ms == 0);
        CHECK_FALSE(freshness_of(nonsense).no_store);
    }
}

TEST_CASE("an error's status is upstream's where it told one, else that of its code") {
    CHECK(problem_of({GCOALESCE_RATE_LIMITED, "", 0}, 429).status == 429);
    CHECK(problem_of({GCOALESCE_KEY_REFUSED, "", 0}, 400).status == 400);
    CHECK(problem_of({GCOALESCE_CUT_SHORT, "", 0}, 200).status == 502);
    CHECK(problem_of({GCOALESCE_BUSY, "", 0}).status == 429);
    CHECK(problem_of({GCOALESCE_GONE, "", 0}).status == 410);
    CHECK(problem_of({GCOALESCE_BROKER_DEAD, "", 0}).status == 503);
    CHECK(retry_after({GCOALESCE_BUSY, "", 1}) == "1");
    CHECK(retry_after({GCOALESCE_BUSY, "", 34'400}) == "35");
    CHECK(retry_after({GCOALESCE_BUSY, "", 0}).empty());
    CHECK(line_of({503, {GCOALESCE_BUSY, "a \xFF\n b", 0}}).find('\n') == std::string::npos);
}
