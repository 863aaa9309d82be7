// gcoalesce dump: one stream's buffer.
#include <CLI/App.hpp>
#include <CLI/Validators.hpp>
#include <fmt/format.h>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/arguments.hpp"
#include "cli/commands.hpp"
#include "cli/find_stream.hpp"
#include "cli/inspect.hpp"
#include "cli/redact.hpp"
#include "cli/render.hpp"
#include "cli/report.hpp"
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
  raw   the bytes of each event as they came, a line feed behind each
  json  one object a line: number and data of each event, at last the ending

Each event is copied and then proved to be this stream's. The stream stays what it
was: looking is no joining, and may come too late. On a terminal, control characters
are escaped (--raw: they are not). --redact leaves the protocol's words and numbers,
and of what people and the model said only how long it is.

Exit codes: 1 no such stream, or its events are gone; 3 its broker is dead (what is
there is shown); 8 events were shown, then the rest was lost.)";

struct Arguments {
    std::string name;
    std::string format = "text";
    std::uint64_t from = 1;
    bool follow = false, raw = false, redact = false;
};

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
    void show(const std::string& bytes) {
        if (reader_.events_read() < arguments_.from) return;
        const std::string event = arguments_.redact ? redact(bytes) : bytes;
        std::string out;
        if (arguments_.format == "json") {
            out = nlohmann::json::accept(event)
                      ? fmt::format("{{\"number\":{},\"data\":{}}}\n", reader_.events_read(), one_line(event))
                      : json_line({{"number", reader_.events_read()}, {"text", event}});
        } else if (arguments_.format == "raw") {
            out = event + "\n";
        } else {
            out = render(arguments_.format == "sse" ? Form::sse : Form::text, event);
        }
        if (out.empty()) return;
        write_out(escape_ ? for_terminal(arguments_.format == "text" ? Form::text : Form::lines, out) : out);
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
    const std::optional<Inspection> inspected = inspect(context, false);
    if (!inspected) return;
    const std::optional<StreamFacts> stream = find_stream(context, inspected->segment.view, arguments.name);
    if (!stream) return;
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
        ->check(complaint_of_number)
        ->check(CLI::Validator(
            [](std::string& text) { return text != "0" ? std::string() : "events are numbered from 1, found \"0\""; },
            "", "from"))
        ->type_name("N");
    command->add_flag("--follow", arguments->follow, "wait for the stream's end");
    command->add_flag("--redact", arguments->redact, "without what the answer says");
    command->add_flag("--raw", arguments->raw, "control characters as they are, on a terminal too");
    command->footer(kFooter);
    command->callback([arguments, &context] { run_dump(*arguments, context); });
}

} // namespace gcoalesce::cli
