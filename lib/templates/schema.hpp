// Does an answer fit the schema that was sent along with its request?
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/error.hpp"

namespace gcoalesce {

// What is wrong with an answer.
struct Violation {
    std::string path;    // JSON pointer into the answer, "": the whole; "*" for a member that no schema names
    std::string message; // the keyword, what it expects, and what was found by type and size: never the answer's text
};

// A compiled schema: the keywords that Gemini documents, and a few that change nothing or that it ignores:
//   json_schema      $id $schema $comment $anchor $defs $ref type format title description default example examples
//   enum
//                    const nullable items prefixItems minItems maxItems minimum maximum exclusiveMinimum
//                    exclusiveMaximum multipleOf minLength maxLength pattern properties required additionalProperties
//                    minProperties maxProperties propertyOrdering anyOf oneOf; all mean what JSON Schema 2020-12 says
//   response_schema  type format title description default example enum nullable items minItems maxItems minimum
//   maximum
//                    minLength maxLength pattern properties required minProperties maxProperties propertyOrdering
//                    anyOf, and Vertex's additionalProperties, defs, ref; spelled as proto3 JSON may: any_of, "3" for
//                    3, null for a field that is not set, an empty list likewise
// Where there was a choice:
// - nullable: true lets null pass whatever the other keywords say.
// - oneOf means exactly one, though Gemini generates as for anyOf: what it does not keep to is what a check is for.
// - format asserts date-time, date and time (RFC 3339) of strings, int32, int64 and float as ranges of numbers; all
// else
//   is an annotation, as for Gemini.
// - pattern is RE2's, searched for anywhere. Unlike ECMA-262's, \s is ASCII only; what RE2 cannot do is refused.
// - $ref stays within the document: "#", "#/pointer", "#anchor", each also behind the $id of a schema of the document.
//   An $id is compared as it is written, and not resolved against another.
// - Numbers compare by value, exactly within 64 bits and double; 1.0 is an integer. Lengths count code points.
// - enum of an integer or a number in a response_schema lists the values as strings, as Vertex has it.
// - A member given twice makes the answer invalid: readers differ on which of the two counts.
//
// Immutable, cheap to copy, thread-safe. Without exceptions but for std::bad_alloc.
class Schema {
  public:
    // Gemini's generationConfig.responseSchema (a subset of OpenAPI's) and generationConfig.responseJsonSchema.
    enum class Form { response_schema, json_schema };

    // Errors: GCOALESCE_BAD_REQUEST for an unknown keyword (with the nearest known one), a bad value of a keyword, a
    // reference to nothing, to another document or in a circle, a text over 1 MiB, more than 128 levels, more than 100
    // patterns. The message begins with the JSON pointer of the place, so that a caller can put its own place in front.
    static Result<Schema> compile(std::string_view json, Form form);

    // The first violation, nullopt if there is none; of several alternatives of which none fits, that of the one which
    // got deepest. A text that is no JSON is a violation, and so are one of more than 128 levels and one that takes
    // more than 1,000,000 steps plus 16 for each of its bytes.
    std::optional<Violation> check(std::string_view json_text) const;

  private:
    struct Compiled;
    friend class SchemaCompiler;
    friend class SchemaChecker;
    explicit Schema(std::shared_ptr<const Compiled> compiled) : compiled_(std::move(compiled)) {}

    std::shared_ptr<const Compiled> compiled_;
};

} // namespace gcoalesce
