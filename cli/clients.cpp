// gcoalesce clients: who is attached, and what each of them pins.
#include <CLI/App.hpp>
#include <algorithm>
#include <fmt/format.h>
#include <memory>
#include <nlohmann/json.hpp>
#include <poll.h>
#include <pwd.h>
#include <string>
#include <vector>

#include "base/units.hpp"
#include "cli/commands.hpp"
#include "cli/render.hpp"
#include "cli/report.hpp"
#include "cli/view/table.hpp"
#include "cli/view/terminal.hpp"
#include "client/session.hpp"

namespace gcoalesce::cli {
namespace {

constexpr Nanos kPatience = 10 * kSecond; // for each answer of the broker

constexpr const char* kFooter = R"(
READERS: how many subscriptions it has, STREAMS: of how many streams, whose events take
BYTES; none of them leaves the segment while it has a reader that moves on. WAITING: its
requests that the broker has not answered yet. STATE: attached; gone: its connection has
ended, though its process lives and holds pins; revoked: its pins no longer count. PINS:
which streams, with the readers of each; of very many the first ones ("pins_left_out").

What clients pin stands in their own memory, not in the segment, so this asks the broker.
The connection that asks is left out. Exit codes: 3 no broker; 1 no permission.)";

// A connection that asks one thing after the other.
class Line {
  public:
    static Result<Line> open(const Instance& instance) {
        const std::string name = "gcoalesce";
        const Nanos deadline = system_clock().monotonic() + kPatience;
        AttachTry attempt(instance, name, system_clock().monotonic(), kAttachPatience);
        for (;;) {
            const Nanos now = system_clock().monotonic();
            Result<std::optional<AttachTry::Attached>> attached = attempt.advance(now);
            if (!attached) return tl::unexpected(attached.error());
            if (*attached) return Line(std::move(**attached));
            if (now >= deadline) return fail(GCOALESCE_UNRESPONSIVE, "the broker does not answer");
            wait(attempt.fd(), attempt.next_step(now) - now);
        }
    }

    std::uint64_t attachment() const { return attached_.session->lane().header().attachment; }

    void say(const Message& message) {
        attached_.link.push(message);
        attached_.link.flush();
    }

    Result<Message> hear() {
        const Nanos deadline = system_clock().monotonic() + kPatience;
        for (bool open = true;;) {
            Message message;
            const Result<bool> found = attached_.link.next(message);
            if (!found) return tl::unexpected(found.error());
            if (*found) return message;
            if (!open)
                return fail(GCOALESCE_BROKER_DEAD, "the broker closed the connection in the midst of its answer");
            const Nanos now = system_clock().monotonic();
            if (now >= deadline) return fail(GCOALESCE_UNRESPONSIVE, "the broker does not answer");
            wait(attached_.link.fd(), deadline - now);
            attached_.link.flush();
            open = attached_.link.receive(nullptr);
        }
    }

  private:
    explicit Line(AttachTry::Attached attached) : attached_(std::move(attached)) {}

    static void wait(int fd, Nanos most) {
        pollfd entry{fd, POLLIN, 0};
        ::poll(&entry, fd >= 0 ? 1 : 0, static_cast<int>(std::clamp<Nanos>(to_ms(most) + 1, 0, 1000)));
    }

    AttachTry::Attached attached_;
};

Result<std::vector<message::Client>> ask(const Context& context) {
    const Result<Instance> instance = resolve_instance(context.instance.c_str(), context.runtime_dir.c_str());
    if (!instance) return tl::unexpected(instance.error());
    Result<Line> line = Line::open(*instance);
    if (!line) return tl::unexpected(line.error());
    std::vector<message::Client> clients;
    for (std::uint64_t id = 1, after = 0;; ++id) {
        line->say(message::Clients{id, after});
        for (;;) {
            Result<Message> answer = line->hear();
            if (!answer) return tl::unexpected(answer.error());
            if (const auto* goodbye = std::get_if<message::Goodbye>(&*answer))
                return fail(goodbye->code, "the broker ends the connection: {}", goodbye->message);
            if (const auto* done = std::get_if<message::Done>(&*answer)) {
                if (done->streams == 0) return clients;
                break;
            }
            if (auto* client = std::get_if<message::Client>(&*answer)) {
                after = client->attachment;
                if (after != line->attachment()) clients.push_back(std::move(*client));
            }
        }
    }
}

std::string user_name(std::uint32_t uid) {
    const passwd* user = ::getpwuid(uid);
    return user != nullptr ? user->pw_name : fmt::to_string(uid);
}

// Its list has room for the first ones.
std::uint64_t pins_left_out(const message::Client& client) {
    const auto listed = static_cast<std::uint64_t>(std::ranges::count(client.pinned, ','));
    return client.pinned_streams - std::min(client.pinned_streams, client.pinned.empty() ? 0 : listed + 1);
}

std::string pins_of(const message::Client& client) {
    if (client.pinned_streams == 0) return "-";
    std::string pins;
    for (const char c : client.pinned) pins += c == ',' ? ", " : std::string(1, c);
    const std::uint64_t more = pins_left_out(client);
    return more == 0 ? pins : fmt::format("{} and {} more", pins, more);
}

const char* state_of(const message::Client& client) {
    return client.revoked ? "revoked" : client.connected ? "attached" : "gone";
}

nlohmann::ordered_json to_json(const message::Client& client) {
    nlohmann::ordered_json json{{"attachment", client.attachment},
                                {"name", client.name},
                                {"pid", client.pid},
                                {"uid", client.uid},
                                {"state", state_of(client)},
                                {"attached_for_ms", client.attached_ms},
                                {"waiting", client.waiting},
                                {"readers", client.readers},
                                {"pinned_streams", client.pinned_streams},
                                {"pinned_bytes", client.pinned_bytes},
                                {"pins", nlohmann::ordered_json::array()},
                                {"pins_left_out", pins_left_out(client)}};
    for (std::string_view left = client.pinned; !left.empty();) {
        const std::string_view one = left.substr(0, left.find(','));
        left.remove_prefix(std::min(left.size(), one.size() + 1));
        const std::size_t colon = std::min(one.find(':'), one.size());
        json["pins"].push_back(
            {{"stream_id", one.substr(0, colon)},
             {"readers", std::atoi(std::string(one.substr(std::min(colon + 1, one.size()))).c_str())}});
    }
    return json;
}

void run_clients(Context& context, bool as_json) {
    const Result<std::vector<message::Client>> clients = ask(context);
    if (!clients) return report(context, clients.error(), as_json);
    if (as_json) {
        nlohmann::ordered_json json{{"version", 1}, {"clients", nlohmann::ordered_json::array()}};
        for (const message::Client& client : *clients) json["clients"].push_back(to_json(client));
        return write_out(json_line(json));
    }
    Table table({{"CLIENT"},
                 {"PID", Align::right},
                 {"USER"},
                 {"STATE"},
                 {"FOR", Align::right},
                 {"WAITING", Align::right},
                 {"READERS", Align::right},
                 {"STREAMS", Align::right},
                 {"BYTES", Align::right},
                 {"PINS", Align::wrapped}});
    for (const message::Client& client : *clients)
        table.add({client.name, client.pid != 0 ? fmt::to_string(client.pid) : "-", user_name(client.uid),
                   state_of(client), format_duration(from_ms(client.attached_ms)), fmt::to_string(client.waiting),
                   fmt::to_string(client.readers), fmt::to_string(client.pinned_streams),
                   format_size(client.pinned_bytes), pins_of(client)});
    write_out(table.render(output_columns()));
}

} // namespace

void add_clients(CLI::App& app, Context& context) {
    CLI::App* command = app.add_subcommand("clients", "who is attached, and what each of them pins");
    auto json = std::make_shared<bool>(false);
    command->add_flag("--json", *json, "one JSON object");
    command->footer(kFooter);
    command->callback([json, &context] { run_clients(context, *json); });
}

} // namespace gcoalesce::cli
