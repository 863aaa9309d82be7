// What each recorded answer must come to. Read gemini_test.cpp first.
#pragma once

#include <cstddef>
#include <span>

#include "protocol/gemini.hpp"

namespace gcoalesce::test {

// How a file is fed: as the body of a stream, of a unary call, of an HTTP error (and within a good answer), as JSON
// documents that must be framed first, or as the array that Gemini streams without alt=sse.
enum class Shape { stream, unary, error, chunks, array };

struct Expected {
    gcoalesce_ending_kind kind;
    Code code;
    const char* reason = "";
    int http_status = 200;
    std::int64_t retry_ms = 0;
};

struct Row {
    const char* file;
    Shape shape;
    Expected expected;
    std::size_t events = 0;
    Usage usage = {}; // prompt, cached, thoughts, answer, tool_use, total
};

struct Rows {
    const char* folder;
    std::span<const Row> rows;
};

constexpr Expected complete(const char* reason) {
    return {GCOALESCE_COMPLETE, GCOALESCE_OK, reason};
}
constexpr Expected cut_short() {
    return {GCOALESCE_TRUNCATED, GCOALESCE_CUT_SHORT};
}
constexpr Expected bad_answer() {
    return {GCOALESCE_FAILED, GCOALESCE_BAD_ANSWER};
}
constexpr Expected upstream_error(int status) {
    return {GCOALESCE_FAILED, GCOALESCE_UPSTREAM_ERROR, "", status};
}
constexpr Expected key_refused(int status) {
    return {GCOALESCE_FAILED, GCOALESCE_KEY_REFUSED, "", status};
}
constexpr Expected rate_limited(std::int64_t retry_ms) {
    return {GCOALESCE_FAILED, GCOALESCE_RATE_LIMITED, "", 429, retry_ms};
}

namespace rows {

using enum Shape;

// Some "success" files have no finish reason (old models, or shortened by hand): by the rule that only a reason tells
// a whole answer from a cut one, they are cut short.
// clang-format off
inline constexpr Row kFirebase[] = {
    {"googleai/streaming-failure-image-rejected.txt", error, upstream_error(400)},
    {"googleai/streaming-failure-prompt-blocked-safety.txt", stream, complete("SAFETY"), 1},
    {"googleai/streaming-failure-recitation-no-content.txt", stream, complete("RECITATION"), 9, {9, 0, 0, 261, 0, 270}},
    {"googleai/streaming-success-basic-reply-long.txt", stream, complete("STOP"), 36, {10, 0, 0, 1996, 0, 2006}},
    {"googleai/streaming-success-basic-reply-short.txt", stream, complete("STOP"), 3, {7, 0, 0, 10, 0, 17}},
    {"googleai/streaming-success-citations.txt", stream, complete("STOP"), 26, {15, 0, 0, 1381, 0, 1396}},
    {"googleai/streaming-success-code-execution.txt", stream, complete("STOP"), 6, {21, 0, 95, 126, 243, 485}},
    {"googleai/streaming-success-empty-parts.txt", stream, complete("STOP"), 7, {16, 0, 0, 1307, 0, 1323}},
    {"googleai/streaming-success-finish-message.txt", stream, complete("STOP"), 2},
    {"googleai/streaming-success-no-content-parts.txt", stream, complete("STOP"), 5, {34, 0, 0, 1370, 0, 1404}},
    {"googleai/streaming-success-thinking-function-call-thought-summary-signature.txt", stream, complete("STOP"), 3, {38, 0, 168, 6, 0, 212}},
    {"googleai/streaming-success-thinking-reply-thought-summary.txt", stream, complete("STOP"), 5, {10, 0, 540, 48, 0, 598}},
    {"googleai/streaming-success-url-context.txt", stream, complete("STOP"), 4, {438, 0, 39, 81, 619, 1177}},
    {"googleai/unary-failure-api-key.json", error, key_refused(400)},
    {"googleai/unary-failure-api-key.txt", error, key_refused(400)},
    {"googleai/unary-failure-finish-reason-safety.json", unary, complete("SAFETY"), 1, {7, 0, 0, 20, 0, 27}},
    {"googleai/unary-failure-finish-reason-safety.txt", unary, complete("SAFETY"), 1, {7, 0, 0, 20, 0, 27}},
    {"googleai/unary-failure-generativelanguage-api-not-enabled.json", error, key_refused(403)},
    {"googleai/unary-failure-only-prompt-feedback.json", unary, cut_short(), 1},
    {"googleai/unary-failure-unknown-model.json", error, upstream_error(404)},
    {"googleai/unary-failure-unknown-model.txt", error, upstream_error(404)},
    {"googleai/unary-failure-with-message-no-content.json", unary, complete("OTHER"), 1},
    {"googleai/unary-success-basic-reply-long.json", unary, complete("STOP"), 1, {9, 0, 0, 1612, 0, 1621}},
    {"googleai/unary-success-basic-reply-long.txt", unary, complete("STOP"), 1, {9, 0, 0, 1612, 0, 1621}},
    {"googleai/unary-success-basic-reply-short.json", unary, complete("STOP"), 1, {7, 0, 0, 22, 0, 29}},
    {"googleai/unary-success-basic-reply-short.txt", unary, complete("STOP"), 1, {7, 0, 0, 22, 0, 29}},
    {"googleai/unary-success-citations.json", unary, complete("STOP"), 1, {15, 0, 0, 1667, 0, 1682}},
    {"googleai/unary-success-citations.txt", unary, complete("STOP"), 1, {15, 0, 0, 1667, 0, 1682}},
    {"googleai/unary-success-code-execution.json", unary, complete("STOP"), 1, {21, 0, 86, 96, 160, 363}},
    {"googleai/unary-success-google-maps-grounding.json", unary, complete("STOP"), 1, {9, 0, 87, 288, 59, 443}},
    {"googleai/unary-success-google-search-grounding-empty-grounding-chunks.json", unary, complete("STOP"), 1, {8, 0, 0, 59, 0, 67}},
    {"googleai/unary-success-google-search-grounding.json", unary, complete("STOP"), 1, {8, 0, 0, 60, 0, 68}},
    {"googleai/unary-success-thinking-function-call-thought-summary-signature.json", unary, complete("STOP"), 1, {38, 0, 501, 8, 0, 547}},
    {"googleai/unary-success-thinking-reply-thought-summary.json", unary, complete("STOP"), 1, {14, 0, 24, 2, 0, 40}},
    {"googleai/unary-success-url-context-mixed-validity.json", unary, complete("STOP"), 1, {118, 0, 46, 312, 1961, 2437}},
    {"googleai/unary-success-url-context.json", unary, complete("STOP"), 1, {15, 0, 142, 102, 424, 683}},
    {"schema/json-schema.json", unary, bad_answer()},
    {"schema/open-api-schema.json", unary, bad_answer()},
    {"vertexai/streaming-failure-api-key.txt", error, key_refused(400)},
    {"vertexai/streaming-failure-empty-content.txt", stream, cut_short(), 1},
    {"vertexai/streaming-failure-error-mid-stream.txt", stream, upstream_error(499), 2},
    {"vertexai/streaming-failure-finish-reason-safety.txt", stream, complete("SAFETY"), 1, {10, 0, 0, 66, 0, 76}},
    {"vertexai/streaming-failure-http-error.txt", error, upstream_error(400)},
    {"vertexai/streaming-failure-image-rejected.txt", error, upstream_error(400)},
    {"vertexai/streaming-failure-invalid-json.txt", stream, cut_short(), 1},
    {"vertexai/streaming-failure-malformed-content.txt", stream, cut_short(), 1},
    {"vertexai/streaming-failure-prompt-blocked-safety-with-message.txt", stream, complete("SAFETY"), 1},
    {"vertexai/streaming-failure-prompt-blocked-safety.txt", stream, complete("SAFETY"), 1},
    {"vertexai/streaming-failure-recitation-no-content.txt", stream, complete("RECITATION"), 3},
    {"vertexai/streaming-failure-unknown-finish-enum.txt", stream, complete("FAKE_ENUM"), 6},
    {"vertexai/streaming-failure-unknown-model.txt", error, upstream_error(404)},
    {"vertexai/streaming-success-basic-reply-long.txt", stream, complete("STOP"), 4, {12, 0, 0, 1706, 0, 1718}},
    {"vertexai/streaming-success-basic-reply-parts.txt", stream, complete("STOP"), 8, {6, 0, 0, 326, 0, 332}},
    {"vertexai/streaming-success-basic-reply-short.txt", stream, complete("STOP"), 1, {6, 0, 0, 4, 0, 10}},
    {"vertexai/streaming-success-citations.txt", stream, complete("STOP"), 6},
    {"vertexai/streaming-success-code-execution.txt", stream, complete("STOP"), 7, {210, 0, 192, 192, 371, 965}},
    {"vertexai/streaming-success-empty-text-part.txt", stream, complete("STOP"), 2, {8, 0, 0, 1, 0, 9}},
    {"vertexai/streaming-success-function-call-short.txt", stream, complete("STOP"), 1},
    {"vertexai/streaming-success-image-invalid-safety-ratings.txt", stream, complete("STOP"), 2, {15, 0, 0, 258, 0, 273}},
    {"vertexai/streaming-success-quotes-escaped.txt", stream, cut_short(), 4},
    {"vertexai/streaming-success-thinking-reply-thought-summary.txt", stream, complete("STOP"), 8, {9, 0, 1067, 134, 0, 1210}},
    {"vertexai/streaming-success-unknown-safety-enum.txt", stream, complete("STOP"), 6},
    {"vertexai/streaming-success-url-context.txt", stream, complete("STOP"), 4, {57, 0, 0, 48, 0, 105}},
    {"vertexai/streaming-success-utf8.txt", stream, complete("STOP"), 4},
    {"vertexai/unary-failure-api-key.json", error, key_refused(400)},
    {"vertexai/unary-failure-context-cache-model-doesnt-match.json", error, upstream_error(400)},
    {"vertexai/unary-failure-context-cache-not-found.json", error, upstream_error(404)},
    {"vertexai/unary-failure-empty-content.json", unary, cut_short(), 1},
    {"vertexai/unary-failure-finish-reason-safety-no-content.json", unary, complete("SAFETY"), 1, {8, 0, 0, 0, 0, 8}},
    {"vertexai/unary-failure-finish-reason-safety.json", unary, complete("SAFETY"), 1, {8, 0, 0, 0, 0, 8}},
    {"vertexai/unary-failure-firebaseml-api-not-enabled.json", error, key_refused(403)},
    {"vertexai/unary-failure-firebasevertexai-api-not-enabled.json", error, key_refused(403)},
    {"vertexai/unary-failure-generate-images-all-filtered.json", unary, bad_answer()},
    {"vertexai/unary-failure-generate-images-base64-some-filtered.json", unary, bad_answer()},
    {"vertexai/unary-failure-generate-images-gcs-some-filtered.json", unary, bad_answer()},
    {"vertexai/unary-failure-generate-images-prompt-blocked.json", error, upstream_error(400)},
    {"vertexai/unary-failure-http-error.json", error, upstream_error(400)},
    {"vertexai/unary-failure-iam-permission-denied.json", error, key_refused(403)},
    {"vertexai/unary-failure-image-rejected.json", error, upstream_error(400)},
    {"vertexai/unary-failure-invalid-context-cache-id.json", error, upstream_error(400)},
    {"vertexai/unary-failure-invalid-location-url-not-found.html", error, upstream_error(404)},
    {"vertexai/unary-failure-invalid-response.json", unary, bad_answer()},
    {"vertexai/unary-failure-malformed-content.json", unary, cut_short(), 1},
    {"vertexai/unary-failure-model-not-found.json", error, upstream_error(404)},
    {"vertexai/unary-failure-prompt-blocked-safety-with-message.json", unary, complete("SAFETY"), 1},
    {"vertexai/unary-failure-prompt-blocked-safety.json", unary, complete("SAFETY"), 1},
    {"vertexai/unary-failure-quota-exceeded.json", error, rate_limited(0)},
    {"vertexai/unary-failure-unknown-enum-finish-reason.json", unary, complete("FAKE_NEW_FINISH_REASON"), 1},
    {"vertexai/unary-failure-unknown-enum-prompt-blocked.json", unary, complete("FAKE_NEW_BLOCK_REASON"), 1},
    {"vertexai/unary-failure-unknown-model.json", error, upstream_error(404)},
    {"vertexai/unary-failure-unsupported-user-location.json", error, upstream_error(400)},
    {"vertexai/unary-success-basic-reply-long.json", unary, complete("STOP"), 1, {6, 0, 0, 303, 0, 309}},
    {"vertexai/unary-success-basic-reply-short.json", unary, complete("STOP"), 1, {6, 0, 0, 7, 0, 13}},
    {"vertexai/unary-success-basic-response-long-usage-metadata.json", unary, complete("STOP"), 1, {1837, 0, 0, 76, 0, 1913}},
    {"vertexai/unary-success-citations-nolicense.json", unary, complete("STOP"), 1, {11, 0, 0, 135, 0, 146}},
    {"vertexai/unary-success-citations.json", unary, complete("STOP"), 1, {15, 0, 0, 253, 0, 268}},
    {"vertexai/unary-success-code-execution.json", unary, complete("STOP"), 1, {20, 0, 192, 192, 371, 775}},
    {"vertexai/unary-success-constraint-decoding-json.json", unary, complete("STOP"), 1},
    {"vertexai/unary-success-detailed-token-response.json", unary, bad_answer()},
    {"vertexai/unary-success-empty-part.json", unary, complete("STOP"), 1, {33, 0, 0, 299, 0, 332}},
    {"vertexai/unary-success-empty-text-part.json", unary, complete("STOP"), 1, {8, 0, 0, 0, 0, 8}},
    {"vertexai/unary-success-function-call-complex-json-literal.json", unary, complete("STOP"), 1, {774, 0, 0, 4176, 0, 4950}},
    {"vertexai/unary-success-function-call-different-parallel-calls.json", unary, complete("STOP"), 1},
    {"vertexai/unary-success-function-call-empty-arguments.json", unary, complete("STOP"), 1},
    {"vertexai/unary-success-function-call-json-literal.json", unary, complete("STOP"), 1, {774, 0, 0, 4176, 0, 4950}},
    {"vertexai/unary-success-function-call-mixed-content.json", unary, complete("STOP"), 1},
    {"vertexai/unary-success-function-call-no-arguments.json", unary, complete("STOP"), 1},
    {"vertexai/unary-success-function-call-null.json", unary, complete("STOP"), 1, {774, 0, 0, 4176, 0, 4950}},
    {"vertexai/unary-success-function-call-parallel-calls.json", unary, complete("STOP"), 1},
    {"vertexai/unary-success-function-call-with-arguments.json", unary, complete("STOP"), 1},
    {"vertexai/unary-success-generate-images-base64.json", unary, bad_answer()},
    {"vertexai/unary-success-generate-images-gcs.json", unary, bad_answer()},
    {"vertexai/unary-success-generate-images-safety_info.json", unary, bad_answer()},
    {"vertexai/unary-success-google-maps-grounding.json", unary, complete("STOP"), 1, {8, 0, 0, 1054, 0, 1062}},
    {"vertexai/unary-success-google-search-grounding.json", unary, complete("STOP"), 1, {8, 0, 0, 60, 0, 68}},
    {"vertexai/unary-success-image-invalid-safety-ratings.json", unary, complete("STOP"), 1, {15, 0, 0, 258, 0, 273}},
    {"vertexai/unary-success-implicit-caching.json", unary, complete("STOP"), 1, {12013, 11243, 73, 15, 0, 12101}},
    {"vertexai/unary-success-including-severity.json", unary, complete("STOP"), 1, {11, 0, 0, 592, 0, 603}},
    {"vertexai/unary-success-missing-safety-ratings.json", unary, cut_short(), 1},
    {"vertexai/unary-success-no-billable-characters.json", unary, bad_answer()},
    {"vertexai/unary-success-partial-usage-metadata.json", unary, complete("STOP"), 1, {6, 0, 0, 0, 0, 0}},
    {"vertexai/unary-success-quote-reply.json", unary, complete("STOP"), 1},
    {"vertexai/unary-success-thinking-reply-thought-summary.json", unary, complete("STOP"), 1, {13, 0, 39, 2, 0, 54}},
    {"vertexai/unary-success-total-tokens.json", unary, bad_answer()},
    {"vertexai/unary-success-unknown-enum-safety-ratings.json", unary, complete("STOP"), 1},
    {"vertexai/unary-success-url-context-missing-retrievedurl.json", unary, complete("STOP"), 1, {175, 0, 236, 93, 60, 564}},
    {"vertexai/unary-success-url-context-mixed-validity.json", unary, complete("STOP"), 1, {116, 0, 179, 446, 177, 918}},
    {"vertexai/unary-success-url-context.json", unary, complete("STOP"), 1, {13, 0, 36, 98, 34, 181}},
    {"vertexai/unary-success-usage-metadata.json", unary, complete("STOP"), 1, {6, 0, 0, 357, 0, 363}},
};

inline constexpr Row kJs[] = {
    {"streaming-failure-empty-content.txt", stream, cut_short(), 1},
    {"streaming-failure-finish-reason-safety.txt", stream, complete("SAFETY"), 1},
    {"streaming-failure-prompt-blocked-safety.txt", stream, complete("SAFETY"), 1},
    {"streaming-failure-recitation-no-content.txt", stream, complete("RECITATION"), 3},
    {"streaming-success-basic-reply-long.txt", stream, complete("STOP"), 6},
    {"streaming-success-basic-reply-short.txt", stream, complete("STOP"), 1},
    {"streaming-success-citations.txt", stream, complete("STOP"), 6},
    {"streaming-success-function-call-short.txt", stream, complete("STOP"), 1},
    {"streaming-success-search-grounding.txt", stream, complete("STOP"), 7, {8, 0, 0, 106, 0, 114}},
    {"streaming-success-utf8.txt", stream, complete("STOP"), 4},
    {"streaming-unknown-enum.txt", stream, complete("FAKE_ENUM"), 6},
    {"unary-failure-citations.json", unary, complete("RECITATION"), 1, {18, 0, 0, 0, 0, 18}},
    {"unary-failure-empty-content.json", unary, cut_short(), 1},
    {"unary-failure-finish-reason-safety.json", unary, complete("SAFETY"), 1},
    {"unary-failure-image-rejected.json", error, upstream_error(400)},
    {"unary-failure-prompt-blocked-safety.json", unary, complete("SAFETY"), 1},
    {"unary-success-basic-reply-long.json", unary, cut_short(), 1},
    {"unary-success-basic-reply-short.json", unary, cut_short(), 1},
    {"unary-success-citations.json", unary, complete("STOP"), 1},
    {"unary-success-logprobs.json", unary, complete("STOP"), 1},
    {"unary-success-search-grounding.json", unary, complete("STOP"), 1, {8, 0, 0, 70, 0, 78}},
    {"unary-unknown-enum.json", unary, cut_short(), 1},
};

inline constexpr Row kVercel[] = {
    {"google-vertex/src/__fixtures__/google-vertex-embedding.json", unary, bad_answer()},
    {"google/src/__fixtures__/google-429-retry-info.json", error, rate_limited(34400)},
    {"google/src/__fixtures__/google-reasoning-gemini3.chunks.txt", chunks, complete("STOP"), 3, {9, 0, 302, 23, 0, 334}},
    {"google/src/__fixtures__/google-reasoning-gemini3.json", unary, complete("STOP"), 1, {9, 0, 258, 29, 0, 296}},
    {"google/src/__fixtures__/google-reasoning.chunks.txt", chunks, complete("STOP"), 3, {9, 0, 256, 29, 0, 294}},
    {"google/src/__fixtures__/google-reasoning.json", unary, complete("STOP"), 1, {9, 0, 282, 29, 0, 320}},
    {"google/src/__fixtures__/google-stream-no-args-tool-call.chunks.txt", chunks, complete("STOP"), 15, {249, 0, 183, 58, 0, 490}},
    {"google/src/__fixtures__/google-stream-tool-call-arguments.chunks.txt", chunks, complete("STOP"), 8, {26, 0, 132, 23, 0, 181}},
    {"google/src/__fixtures__/google-stream-tool-call-array-arguments-missing-terminal-function-call.chunks.txt", chunks, complete("STOP"), 16, {54, 0, 121, 74, 0, 249}},
    {"google/src/__fixtures__/google-text.chunks.txt", chunks, complete("STOP"), 3, {9, 0, 185, 23, 0, 217}},
    {"google/src/__fixtures__/google-text.json", unary, complete("STOP"), 1, {9, 0, 244, 28, 0, 281}},
    {"google/src/__fixtures__/google-tool-call-gemini3.chunks.txt", chunks, complete("STOP"), 2, {29, 0, 804, 15, 0, 848}},
    {"google/src/__fixtures__/google-tool-call-gemini3.json", unary, complete("STOP"), 1, {29, 0, 1801, 15, 0, 1845}},
    {"google/src/__fixtures__/google-tool-call.chunks.txt", chunks, complete("STOP"), 2, {29, 0, 45, 15, 0, 89}},
    {"google/src/__fixtures__/google-tool-call.json", unary, complete("STOP"), 1, {29, 0, 893, 15, 0, 937}},
    {"google/src/__fixtures__/google-vertex-stream-tool-call-arguments-nested.1.chunks.txt", chunks, complete("STOP"), 76, {31, 0, 1026, 684, 0, 1741}},
};

inline constexpr Row kJsonArray[] = {
    {"llm-gemini-cassettes__test_prompt__0.json", array, bad_answer()},
    {"llm-gemini-cassettes__test_tools__0.json", array, bad_answer()},
};

// clang-format on

} // namespace rows

inline constexpr Rows kFixtureRows[] = {
    {"firebase-vertexai-sdk-test-data/mock-responses", rows::kFirebase},
    {"generative-ai-js/test-utils/mock-responses", rows::kJs},
    {"vercel-ai-google/packages", rows::kVercel},
    {"json-array", rows::kJsonArray},
};

} // namespace gcoalesce::test
