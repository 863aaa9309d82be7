// Templates: named prompts with variables and a policy, one JSON file each. gcoalesce-template(5) is the contract for
// the files; what is said here is for those who load and fill them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.hpp"
#include "base/error.hpp"
#include "templates/schema.hpp"
#include "templates/variable.hpp"

namespace gcoalesce {

// A prompt in pieces: a literal text, or one of the template's variables.
struct TemplatePiece {
    std::string literal;
    std::optional<std::size_t> variable; // index in Template::variables; set: `literal` is empty
};

struct TemplateLimits { // counts: 0 is no limit of the template's own; the broker's hold all the same
    std::uint32_t in_flight = 0, subscribers = 0, calls_a_minute = 0;
    std::optional<std::uint64_t> stream_bytes; // absent: the broker's
    std::optional<std::uint32_t> pool_share;   // percent of the extents, 1 .. 100; absent: the broker's
};

struct TemplateAllow { // any of these; at least one is named
    std::vector<std::uint32_t> uids, gids;
    std::vector<std::string> groups; // names, as they were written: who asks looks them up
};

enum class TemplateDelivery { validated, live };
enum class TemplateRealm { everyone, token };

// A checked template. Never changes after parse_template(); any number of threads may read it at once.
struct Template {
    std::string id, description;
    std::string source; // the file's text, for people
    // Equal for files that give equal answers under equal keys, whatever else they say: the first 8 bytes of a SHA-256
    // over the canonical form of the members that shape either. The same in every process.
    std::uint64_t revision = 0;

    // What goes upstream; all empty for "default", whose requests are whole bodies.
    std::string model; // resolve_model()'s form
    std::vector<TemplatePiece> system_instruction, prompt;
    std::vector<TemplateVariable> variables; // by name, ascending
    std::string request;                     // the other members of the request body, as a JSON object; else ""
    std::optional<Schema> schema;

    // The policy. Absent: the broker's own option gives it.
    std::optional<Nanos> ttl_idle, ttl_window, window, linger, snapshot_ttl, kv_after, kv_ttl;
    bool snapshots = true;
    std::optional<Nanos> cancel_after; // once nobody reads, "on_abandon": "cancel:…"; absent: it finishes
    TemplateLimits limits;
    std::optional<TemplateAllow> allow; // absent: everyone
    TemplateDelivery delivery = TemplateDelivery::validated;
    std::uint32_t max_individual = 8; // 1 .. 1000
    bool strict_individual = false;
    TemplateRealm realm = TemplateRealm::everyone;
    bool explicit_keys = false;
};

// Letters, digits, "-" and "_", 1 .. 63 bytes.
bool is_template_id(std::string_view id);

// One template from its file's text. GCOALESCE_BAD_REQUEST: the message begins with the JSON pointer of the member that
// is wrong ("/limits/in_flite: unknown member …; did you mean …?"), or with line and column where it is no JSON.
Result<Template> parse_template(std::string_view id, std::string_view json_text);

// The same from "<id>.json", a plain file (or a link to one) of at most 1 MiB. Every message begins with the path;
// GCOALESCE_IO: it cannot be read.
Result<Template> load_template(const std::string& path);

// Every "*.json" of the directory, by id, ascending; names that begin with "." are left out. All or nothing: the first
// that is wrong is the error. At most 255.
Result<std::vector<Template>> load_templates(const std::string& directory);

// The names of all members that files may have, such as "model", "limits.in_flight" and "variables.NAME.enum".
std::vector<std::string> template_members();

// Values that a template's rules let pass.
struct TemplateValues {
    std::vector<std::string> values; // normalised, in the order of Template::variables, defaults filled in
    // The same as one JSON object, sorted and without space: what goes into the key.
    std::string canonical;
};

// Checks the variables of a request, a JSON object of texts, numbers and booleans ("": an empty one); the last two
// count as the text that they are in JSON. GCOALESCE_BAD_REQUEST names the variable and what its rule expects, and
// never quotes the value, which may be private.
Result<TemplateValues> read_variables(const Template& with, std::string_view json);

// The request body for upstream. Values are put in once and never looked at for "{{"; JSON's escaping is the library's.
// Not for "default". The values must be read_variables()'s for this same template.
std::string render(const Template& with, const TemplateValues& values);

} // namespace gcoalesce
