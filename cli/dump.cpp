// gcoalesce dump: one stream's buffer.
#include <CLI/App.hpp>
#include <CLI/Validators.hpp>
#include <algorithm>
#include <cctype>
#include <fmt/format.h>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.hpp"
#include "cli/inspect.hpp"
#include "cli/render.hpp"
#include "cli/report.hpp"
#include "cli/view/escape.hpp"
#include "cli/view/terminal.hpp"
#include "segment/reader.hpp"

namespace gcoalesce::cli {
namespace {

constexpr Nanos kSlice = 250 * kMillisecond;

constexpr const char* kFooter = R"(
NAME is a key or a stream id as `keys` shows them, or the first four digits or more
of one. Where a key has several streams, its newest is meant. A name that fits
several keys or streams: they are listed, and the exit code is 1.

  text  the answer's text, without thoughts (default)
  sse   each event framed as Gemini frames it
  raw   each event's JSON as it came, one a line
  json  one object a line: number and data of each event, at last the ending

Each event is copied and then proved to be this stream's. The stream stays what it
was: looking is no joining, and may come too late. On a terminal, control characters
are escaped (--raw: they are not).

Exit codes: 1 no such stream, or its events are gone; 3 its broker is dead (what is
there is shown); 8 events were shown, then the rest was lost.)";

struct Arguments {
    std::string name;
    std::string format = "text";
    std::uint64_t from = 1;
    bool follow = false, raw = false;
};

std::string describe(const StreamFacts& stream) {
    return fmt::format("key {}, stream {}, {}, {}", to_hex(stream.key), to_hex(stream.opening.stream_id),
                       stream.state(), counted(stream.events, "event"));
}

// The stream that the name means; nothing: it has said why not.
std::optional<StreamFacts> find_stream(const SegmentView& segment, std::string name) {
    std::ranges::transform(name, name.begin(), [](unsigned char c) { return std::tolower(c); });
    std::vector<StreamFacts> found; // one for each key, the newest; and one for each stream id
    for (const StreamFacts& stream : all_streams(segment)) {
        if (to_hex(stream.opening.stream_id).starts_with(name)) {
            found.push_back(stream);
        } else if (to_hex(stream.key).starts_with(name) &&
                   std::ranges::none_of(found, [&](const StreamFacts& other) { return other.key == stream.key; })) {
            found.push_back(stream);
        }
    }
    if (found.size() == 1) return found.front();
    if (found.empty()) {
        complain(fmt::format("no stream's key or id begins with \"{}\": `gcoalesce keys` lists them", name));
        return std::nullopt;
    }
    complain(fmt::format("\"{}\" fits {} streams, tell more digits:", name, found.size()));
    for (const StreamFacts& stream : found) complain(describe(stream));
    return std::nullopt;
}

class Dump {
  public:
    Dump(const Arguments& arguments, const Inspection& inspected, const StreamFacts& stream)
        : arguments_(arguments),
          inspected_(inspected),
          reader_(inspected.segment.view, stream.slot, stream.identity),
          escape_(is_terminal(1) && !arguments.raw) {}

    ExitCode run() {
        std::string event;
        bool last_look = false;
        for (;;) {
            const std::uint32_t word = reader_.wake_word();
            switch (reader_.next(event)) {
            case ReadStatus::event: show(event); break;
            case ReadStatus::end: return end(reader_.ending());
            case ReadStatus::lost:
                return incomplete("the stream's events have left the segment: it was evicted or retired");
            case ReadStatus::nothing:
                if (!arguments_.follow) return so_far();
                if (last_look) return incomplete("the broker died: the rest of the stream will not come");
                reader_.wait(word, kSlice);
                const Liveness broker = inspected_.segment.liveness(system_clock().monotonic());
                last_look = broker == Liveness::dead || broker == Liveness::closed;
            }
        }
    }

  private:
    void show(const std::string& event) {
        if (reader_.events_read() < arguments_.from) return;
        std::string out;
        if (arguments_.format == "json") {
            out = nlohmann::json::accept(event)
                      ? fmt::format("{{\"number\":{},\"data\":{}}}\n", reader_.events_read(), one_line(event))
                      : json_line({{"number", reader_.events_read()}, {"text", event}});
        } else {
            const Form form = arguments_.format == "sse"   ? Form::sse
                              : arguments_.format == "raw" ? Form::lines
                                                           : Form::text;
            out = render(form, event);
        }
        if (out.empty()) return;
        write_out(escape_ ? escape_controls(out) : out);
        last_ = out.back();
        shown_ = true;
    }

    ExitCode end(const SlotEnding& ending) {
        const char* kind = gcoalesce_ending_name(static_cast<gcoalesce_ending_kind>(ending.kind));
        if (arguments_.format == "json") {
            const nlohmann::ordered_json json{{"ending",
                                               {{"kind", kind},
                                                {"code", code_name(static_cast<Code>(ending.code))},
                                                {"finish_reason", ending.finish_reason.view()},
                                                {"message", ending.message.view()},
                                                {"upstream_status", ending.upstream_status},
                                                {"events", reader_.events_read()}}}};
            write_out(json_line(json));
        } else {
            finish_line();
        }
        if (ending.kind != GCOALESCE_COMPLETE)
            complain(fmt::format("the stream ended {} ({}) after {}: {}", kind,
                                 code_name(static_cast<Code>(ending.code)), counted(reader_.events_read(), "event"),
                                 ending.message.view()));
        return ExitCode::ok;
    }

    ExitCode so_far() {
        finish_line();
        complain(
            fmt::format("in flight, {} so far; --follow waits for the rest", counted(reader_.events_read(), "event")));
        return ExitCode::ok;
    }

    ExitCode incomplete(const char* why) {
        finish_line();
        complain(why);
        return shown_ ? ExitCode::partial : ExitCode::failed;
    }

    // On a terminal the prompt of the shell begins a line of its own.
    void finish_line() {
        if (shown_ && last_ != '\n' && is_terminal(1)) write_out("\n");
    }

    const Arguments& arguments_;
    const Inspection& inspected_;
    StreamReader reader_;
    bool escape_;
    bool shown_ = false;
    char last_ = '\n';
};

void run_dump(const Arguments& arguments, Context& context) {
    const bool hex = std::ranges::all_of(arguments.name, [](unsigned char c) { return std::isxdigit(c) != 0; });
    if (!hex || arguments.name.size() < 4 || arguments.name.size() > 64)
        throw CLI::ValidationError("NAME",
                                   fmt::format("expected 4 to 64 hexadecimal digits, found \"{}\"", arguments.name));
    const std::optional<Inspection> inspected = inspect(context, false);
    if (!inspected) return;
    const std::optional<StreamFacts> stream = find_stream(inspected->segment.view, arguments.name);
    if (!stream) {
        context.exit = ExitCode::failed;
        return;
    }
    const ExitCode code = Dump(arguments, *inspected, *stream).run();
    if (code != ExitCode::ok) context.exit = code;
}

} // namespace

void add_dump(CLI::App& app, Context& context) {
    CLI::App* command = app.add_subcommand("dump", "the events of one stream");
    auto arguments = std::make_shared<Arguments>();
    command->add_option("NAME", arguments->name, "the stream's key or id, or how it begins")->required();
    command->add_option("--format", arguments->format, "text, sse, json or raw")
        ->check(CLI::IsMember({"text", "sse", "json", "raw"}))
        ->type_name("FORMAT");
    command->add_option("--from", arguments->from, "number of the first event shown (default 1)")
        ->check(CLI::PositiveNumber)
        ->type_name("N");
    command->add_flag("--follow", arguments->follow, "wait for the stream's end");
    command->add_flag("--raw", arguments->raw, "control characters as they are, on a terminal too");
    command->footer(kFooter);
    command->callback([arguments, &context] { run_dump(*arguments, context); });
}

} // namespace gcoalesce::cli
