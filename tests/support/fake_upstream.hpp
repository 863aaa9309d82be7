// An upstream whose answers tests give by hand.
#pragma once

#include <deque>
#include <initializer_list>
#include <new>
#include <string>
#include <string_view>
#include <utility>

#include "broker/upstream.hpp"

namespace gcoalesce::test {

// One event of an answer, as Gemini writes it; reason "": not the last one.
inline std::string answer_json(std::string_view text, std::string_view reason = "") {
    return fmt::format(
        R"({{"candidates": [{{"content": {{"parts": [{{"text": "{}"}}],"role": "model"}}{},"index": 0}}],)"
        R"("usageMetadata": {{"promptTokenCount": 7,"candidatesTokenCount": 5,"totalTokenCount": 12}},)"
        R"("modelVersion": "gemini-2.5-flash","responseId": "r1"}})",
        text, reason.empty() ? "" : fmt::format(R"(,"finishReason": "{}")", reason));
}

// An error document; retry "": without RetryInfo.
inline std::string error_json(int code, std::string_view status, std::string_view retry = "") {
    return fmt::format(R"({{"error": {{"code": {}, "message": "told by the test", "status": "{}"{}}}}})", code, status,
                       retry.empty()
                           ? ""
                           : fmt::format(R"(, "details": [{{"@type": "type.googleapis.com/google.rpc.RetryInfo",)"
                                         R"( "retryDelay": "{}"}}])",
                                         retry));
}

inline std::string sse(std::string_view json) {
    return fmt::format("data: {}\r\n\r\n", json);
}

class FakeUpstream final : public Upstream {
  public:
    // A call that was started. Its methods do what a real connection would; they do nothing once it is over.
    class Started {
      public:
        UpstreamCall call;
        bool cancelled = false; // destroyed before it was done

        bool over() const { return events_ == nullptr; }

        void sent() {
            if (events_ != nullptr) events_->on_sent();
        }
        void head(int http_status, std::int64_t retry_after_ms = 0) {
            if (events_ != nullptr) events_->on_head(http_status, retry_after_ms);
        }
        void bytes(std::string_view bytes) {
            if (events_ != nullptr) events_->on_bytes(bytes);
        }
        void done() { end(true, {}); }
        void broken(std::string message = "the test broke the connection") {
            end(false, {GCOALESCE_CONNECT_FAILED, std::move(message), 0});
        }

        // A whole response that ends cleanly.
        void respond(int http_status, std::string_view body, std::int64_t retry_after_ms = 0) {
            sent();
            head(http_status, retry_after_ms);
            if (!body.empty()) bytes(body);
            done();
        }
        // A whole answer of these events; the last one has the reason STOP.
        void answer(std::initializer_list<std::string_view> texts) {
            std::string body;
            std::size_t left = texts.size();
            for (const std::string_view text : texts) body += sse(answer_json(text, --left == 0 ? "STOP" : ""));
            respond(200, body);
        }

      private:
        friend class FakeUpstream;

        void end(bool clean, const Error& error) {
            if (UpstreamEvents* events = std::exchange(events_, nullptr)) events->on_done(clean, error);
        }

        UpstreamEvents* events_ = nullptr;
    };

    std::unique_ptr<RunningCall> start(const UpstreamCall& call, UpstreamEvents& events) override {
        if (std::exchange(fail_next, false)) throw std::bad_alloc();
        Started& started = calls.emplace_back();
        started.call = call;
        started.events_ = &events;
        return std::make_unique<Running>(started);
    }

    void warm_up() override { ++warm_ups; }
    std::string without_key(const UpstreamCall&, std::string text) const override {
        if (const std::size_t at = text.find(key); !key.empty() && at != std::string::npos)
            text.replace(at, key.size(), "[redacted]");
        return text;
    }

    int warm_ups = 0;
    std::string key;           // that its calls go with
    bool fail_next = false;    // the next call cannot be started
    std::deque<Started> calls; // in the order of their starts; references stay good

  private:
    class Running final : public RunningCall {
      public:
        explicit Running(Started& started) : started_(started) {}
        ~Running() override {
            if (started_.events_ != nullptr) started_.cancelled = true;
            started_.events_ = nullptr;
        }

      private:
        Started& started_;
    };
};

} // namespace gcoalesce::test
