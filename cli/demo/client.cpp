#include "cli/demo/client.hpp"

#include <nlohmann/json.hpp>
#include <poll.h>
#include <unistd.h>

#include "base/sha256.hpp"
#include "cli/attach.hpp"
#include "cli/exchange.hpp"
#include "cli/render.hpp"
#include "protocol/gemini.hpp"

namespace gcoalesce::cli::demo {
namespace {

constexpr const char* kModel = "gemini-2.5-flash";
constexpr const char* kPrompt = "Tell all of us at once what request coalescing is good for.";
constexpr std::int64_t kAttachMs = 20'000; // the broker is just starting

struct Reader {
    SubscriptionPtr subscription;
    Sha256 digest;
    bool begun = false, over = false;
};

class Client {
  public:
    explicit Client(unsigned requests) : readers_(requests) {
        report_.pid = ::getpid();
        report_.requests = requests;
    }

    void attach(const Instance& instance) {
        gcoalesce_attach_options options{};
        options.size = sizeof options;
        options.instance = instance.name.c_str();
        options.runtime_dir = instance.runtime_dir.c_str();
        options.client_name = "demo";
        gcoalesce_attachment* attachment = nullptr;
        check(gcoalesce_attach(&options, kAttachMs, &attachment));
        attachment_.reset(attachment);
    }

    void ask() {
        if (!attachment_) return;
        const std::string body = *prompt_body(kPrompt, "");
        gcoalesce_request request{};
        request.size = sizeof request;
        request.model = kModel;
        request.body = body.data();
        request.body_bytes = body.size();
        request.stream = 1;
        asked_ = system_clock().monotonic();
        for (Reader& reader : readers_) {
            gcoalesce_subscription* subscription = nullptr;
            reader.over = !check(gcoalesce_open(attachment_.get(), &request, &subscription));
            reader.subscription.reset(subscription);
        }
    }

    Report read_all() {
        if (!attachment_) return report_;
        while (take()) {
            pollfd fd{gcoalesce_fd(attachment_.get()), POLLIN, 0};
            ::poll(&fd, 1, 1000);
            gcoalesce_dispatch(attachment_.get());
        }
        return report_;
    }

  private:
    bool check(gcoalesce_code code) {
        if (code != GCOALESCE_OK && report_.trouble.empty()) report_.trouble = gcoalesce_message();
        return code == GCOALESCE_OK;
    }

    // All that has come, for every reader. False: all are over.
    bool take() {
        bool open = false;
        for (Reader& reader : readers_) {
            gcoalesce_event event{};
            gcoalesce_code code = GCOALESCE_OK;
            while (!reader.over && (code = gcoalesce_next(reader.subscription.get(), 0, &event)) == GCOALESCE_OK)
                take(reader, {event.data, event.bytes});
            if (!reader.over && code != GCOALESCE_TIMED_OUT) end(reader, code);
            open = open || !reader.over;
        }
        return open;
    }

    void take(Reader& reader, std::string_view event) {
        if (!reader.begun) report_.first_event.push_back(system_clock().monotonic() - asked_);
        reader.begun = true;
        reader.digest.field(event);
        report_.bytes += event.size();
        if (&reader == &readers_.front()) report_.text += event_text(event).text;
    }

    void end(Reader& reader, gcoalesce_code code) {
        reader.over = true;
        gcoalesce_info info{};
        info.size = sizeof info;
        gcoalesce_info_of(reader.subscription.get(), &info);
        ++report_.statuses[gcoalesce_status_name(info.status)];
        gcoalesce_ending ending{};
        ending.size = sizeof ending;
        if (code != GCOALESCE_END) {
            check(code);
        } else if (check(gcoalesce_ending_of(reader.subscription.get(), &ending))) {
            if (ending.kind == GCOALESCE_COMPLETE) {
                ++report_.whole;
                ++report_.digests[to_hex(reader.digest.finish())];
            } else if (report_.trouble.empty()) {
                report_.trouble = ending.message;
            }
        }
        reader.subscription.reset();
    }

    AttachmentPtr attachment_; // outlives the readers
    std::vector<Reader> readers_;
    Nanos asked_ = 0;
    Report report_;
};

} // namespace

std::string to_line(const Report& report) {
    return json_line({{"pid", report.pid},
                      {"requests", report.requests},
                      {"whole", report.whole},
                      {"bytes", report.bytes},
                      {"first_event", report.first_event},
                      {"digests", report.digests},
                      {"statuses", report.statuses},
                      {"text", report.text},
                      {"trouble", report.trouble}});
}

Report parse_report(std::string_view line) {
    const auto json = nlohmann::json::parse(line);
    Report report;
    json.at("pid").get_to(report.pid);
    json.at("requests").get_to(report.requests);
    json.at("whole").get_to(report.whole);
    json.at("bytes").get_to(report.bytes);
    json.at("first_event").get_to(report.first_event);
    json.at("digests").get_to(report.digests);
    json.at("statuses").get_to(report.statuses);
    json.at("text").get_to(report.text);
    json.at("trouble").get_to(report.trouble);
    return report;
}

Report run_client(const Instance& instance, unsigned requests, int out, int go) {
    Client client(requests);
    client.attach(instance);
    char byte = '\n';
    if (::write(out, &byte, 1) != 1) return {};
    while (::read(go, &byte, 1) > 0) {
    }
    client.ask();
    return client.read_all();
}

} // namespace gcoalesce::cli::demo
