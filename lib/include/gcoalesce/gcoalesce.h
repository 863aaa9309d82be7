/* libgcoalesce: read one Gemini answer from many processes. The C ABI, and the contract. */
#ifndef GCOALESCE_GCOALESCE_H
#define GCOALESCE_GCOALESCE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GCOALESCE_API __attribute__((visibility("default")))

/* Every way in which a call can end, and every reason for which a stream can fail. Values never change. */
typedef enum gcoalesce_code {
    GCOALESCE_OK = 0,

    /* Attaching. */
    GCOALESCE_ABSENT = 1,        /* neither socket nor segment of that instance exists */
    GCOALESCE_STARTING = 2,      /* a broker is starting and not ready yet */
    GCOALESCE_WRONG_VERSION = 3, /* segment layout or control protocol of another version */
    GCOALESCE_TOO_SHORT = 4,     /* the segment is shorter than its header claims */
    GCOALESCE_CLOSED = 5,        /* the broker has shut down in order */
    GCOALESCE_BROKER_DEAD = 6,   /* the broker died; proved by its kernel-held lock */
    GCOALESCE_UNRESPONSIVE = 7,  /* the broker lives, but does not answer */
    GCOALESCE_NO_PERMISSION = 8, /* the kernel refuses access to the socket or the segment; or the broker refuses
                                    this user a template, or an operator's command */
    GCOALESCE_FOREIGN = 9,       /* the segment's owner, mode, type or contents are not a broker's */
    GCOALESCE_ATTACHED_BEFORE_FORK = 10, /* the handle belongs to the parent process: attach again */

    /* Asking. */
    GCOALESCE_BAD_REQUEST = 20, /* the request itself is wrong; asking again will not help */
    GCOALESCE_NOT_FOUND = 21,   /* no such stream, key or template, as far as anybody remembers */
    GCOALESCE_GONE = 22,        /* a stream that was there and has been dropped */
    GCOALESCE_BUSY = 23,        /* a limit is reached; ask again after the retry delay */
    GCOALESCE_DRAINING = 24,    /* the broker is shutting down */
    GCOALESCE_TIMED_OUT = 25,   /* the caller's own deadline passed */

    /* Reading. */
    GCOALESCE_END = 30,     /* no more events: see gcoalesce_ending_of */
    GCOALESCE_EVICTED = 31, /* the reader did not move for too long and lost the stream */

    /* Why a stream failed or was cut short. */
    GCOALESCE_KEY_MISSING = 40,         /* the broker has no API key */
    GCOALESCE_KEY_REFUSED = 41,         /* upstream refuses the API key (401, 403, API_KEY_INVALID) */
    GCOALESCE_RATE_LIMITED = 42,        /* upstream answered 429 */
    GCOALESCE_UPSTREAM_ERROR = 43,      /* upstream answered with another error */
    GCOALESCE_CONNECT_FAILED = 44,      /* no connection, or it broke before an answer */
    GCOALESCE_BAD_ANSWER = 45,          /* the answer is empty, or not what the protocol allows */
    GCOALESCE_FIRST_EVENT_TIMEOUT = 46, /* nothing came within the limit for the first event */
    GCOALESCE_EVENT_GAP_TIMEOUT = 47,   /* nothing came within the limit between two events */
    GCOALESCE_CALL_TIMEOUT = 48,        /* the whole call passed its limit */
    GCOALESCE_TOO_LARGE = 49,           /* the answer passed the limit of bytes a stream */
    GCOALESCE_NO_MEMORY = 50,           /* the segment had no room for the answer */
    GCOALESCE_CUT_SHORT = 51,           /* the answer ended without a finish reason */
    GCOALESCE_SCHEMA_BROKEN = 52,       /* the answer is whole, but not what its schema demands */
    GCOALESCE_CALL_CANCELLED = 53,      /* an operator ended the call, or nobody was left to read it */

    GCOALESCE_IO = 60,      /* a system call failed where it should not */
    GCOALESCE_INTERNAL = 61 /* a bug in gcoalesce */
} gcoalesce_code;

/* How a stream ended. Values never change. */
typedef enum gcoalesce_ending_kind {
    GCOALESCE_IN_FLIGHT = 0,  /* it has not ended */
    GCOALESCE_COMPLETE = 1,   /* all of it came, with a finish or block reason */
    GCOALESCE_FAILED = 2,     /* an error, or a limit that passed before any event */
    GCOALESCE_TRUNCATED = 3,  /* it stopped, or a limit passed, after some events and without a reason */
    GCOALESCE_INVALID = 4,    /* all of it came, but it is not what its schema demands */
    GCOALESCE_CANCELLED = 5,  /* an operator ended it, or nobody was left to read it */
    GCOALESCE_INTERRUPTED = 6 /* the broker died or shut down in its midst */
} gcoalesce_ending_kind;

/* How a request was served. Values never change. */
typedef enum gcoalesce_status {
    GCOALESCE_OPENING = 0,    /* not known yet */
    GCOALESCE_STARTED = 1,    /* this request caused the upstream call */
    GCOALESCE_JOINED = 2,     /* it reads a call that was under way */
    GCOALESCE_FRESH = 3,      /* it reads a finished answer that is still fresh */
    GCOALESCE_SNAPSHOT = 4,   /* it reads a finished answer that was kept on disk */
    GCOALESCE_RESUMED = 5,    /* it goes on where an earlier reader stopped */
    GCOALESCE_INDIVIDUAL = 6, /* the shared answer was invalid: it was asked again alone */
    GCOALESCE_BYPASS = 7      /* a call of its own, at the caller's wish */
} gcoalesce_status;

/* Who may share the answer. */
typedef enum gcoalesce_sharing {
    GCOALESCE_SHARE = 0,
    GCOALESCE_SHARE_NOT = 1,    /* bypass: a call of its own that nobody joins */
    GCOALESCE_SHARE_REFRESH = 2 /* a new call that later requests join instead of the present one */
} gcoalesce_sharing;

/* What a request speaks. */
typedef enum gcoalesce_dialect {
    GCOALESCE_GEMINI = 0, /* generateContent and streamGenerateContent */
    GCOALESCE_OPENAI = 1, /* chat/completions of the API's OpenAI form; an event stream's [DONE] is no event */
    GCOALESCE_PASS = 2    /* any other call, `verb` and `path`: passed on as it is and shared with nobody. Its first
                             event is {"status":…,"content_type":…} of the response, each further one a piece of its
                             body; a response other than 2xx is a failure as everywhere */
} gcoalesce_dialect;

/* One connection of this process to a broker, with the segment mapped read-only. All calls on it are thread-safe,
 * but for gcoalesce_detach. */
typedef struct gcoalesce_attachment gcoalesce_attachment;

/* One reader of one stream. Used by one thread at a time. It keeps its attachment's mapping alive. */
typedef struct gcoalesce_subscription gcoalesce_subscription;

typedef struct gcoalesce_attach_options {
    size_t size;             /* sizeof(gcoalesce_attach_options) */
    const char* instance;    /* NULL: $GCOALESCE_INSTANCE, else "default" */
    const char* runtime_dir; /* NULL: $GCOALESCE_RUNTIME_DIR, else /run/gcoalesce if it exists, else
                                $XDG_RUNTIME_DIR/gcoalesce */
    const char* client_name; /* shown to people who look at the broker; NULL: the program's name */
} gcoalesce_attach_options;

typedef struct gcoalesce_request {
    size_t size;       /* sizeof(gcoalesce_request) */
    const char* model; /* "gemini-2.5-flash"; a leading "models/" is dropped. NULL with template_id or resume */
    const char* body;  /* a whole request body of the Gemini API (JSON), or with template_id a JSON object of the
                          template's variables; copied before gcoalesce_open returns. NULL with resume */
    size_t body_bytes; /* at most 32 MiB */
    int stream; /* not 0: streamGenerateContent, one event each; 0: generateContent, the whole answer is one event */
    gcoalesce_sharing sharing;

    const char* template_id;  /* NULL: "default", the template of whole request bodies */
    const char* realm;        /* where the template lets each realm share for itself: whose request this is, at most 128
                                 bytes. NULL: nobody's in particular */
    const char* explicit_key; /* where the template allows it: what stands for the request in its key, at most 256
                                 bytes. Two requests with the same one get the same answer, whatever they ask */
    int64_t max_age_ms;       /* of a finished answer: 0: what the template calls fresh; > 0: and no older than this;
                                 < 0: none, only a running one */
    int no_store; /* not 0: if this request causes a call, its answer is kept neither for later ones nor on disk */
    const char* resume; /* "<stream id>.<number>", the id of the last event that was read ("<stream id>" or ".0": none):
                           go on after it. Never causes a call. NULL: no */
    gcoalesce_dialect dialect;
    const char* verb; /* with GCOALESCE_PASS: GET, POST, PUT, PATCH or DELETE; else NULL */
    const char* path; /* with GCOALESCE_PASS: what stands behind the host, query included, "/v1beta/models?pageSize=9";
                         at most 1 KiB; `model` is NULL, and `body` may be. Else NULL */
    const char* api_key; /* NULL: calls are made with the broker's key. Else a call that this request causes is made
                            with this one, and the answer is shared with those alone who bring the same: it stands for
                            the realm, whatever the template says. At most 256 bytes of printable ASCII. The broker
                            keeps it for the call's time, in its memory only */
} gcoalesce_request;

typedef struct gcoalesce_event {
    uint64_t number;  /* from 1 */
    const char* data; /* one JSON document, untouched; not terminated by NUL */
    size_t bytes;
} gcoalesce_event;

typedef struct gcoalesce_ending {
    size_t size; /* set by the caller: sizeof(gcoalesce_ending) */
    gcoalesce_ending_kind kind;
    gcoalesce_code code;     /* GCOALESCE_OK when complete */
    int32_t upstream_status; /* HTTP status, 0 when there was none */
    int32_t reusable;        /* 1: later requests may have read this answer */
    int64_t retry_ms;        /* when asking again may help; 0: not known */
    uint64_t events;         /* how much came, of all readers' view */
    uint64_t event_bytes;
    /* 0 when upstream did not say. The prompt's: with those that were cached, and those of tool use. */
    int64_t prompt_tokens, cached_tokens, thought_tokens, answer_tokens, total_tokens;
    char finish_reason[40]; /* upstream's word, e.g. "STOP" or, for a blocked prompt, the block reason; "" when none */
    char message[256];      /* what happened, for people; "" when complete */
} gcoalesce_ending;

typedef struct gcoalesce_info {
    size_t size; /* set by the caller: sizeof(gcoalesce_info) */
    gcoalesce_status status;
    uint64_t stream_id; /* 0 while opening */
    uint8_t key[32];    /* zeros while opening */
    int64_t age_ms;     /* since the answer ended; 0 while it is coming */
} gcoalesce_info;

/* Attaches to the broker of an instance.
 * timeout_ms: how long to go on trying while the broker is absent, starting or unresponsive; 0: one try, which may take
 * a second where somebody listens and does not answer.
 * Errors: the attach group of gcoalesce_code, GCOALESCE_IO. *out is set only on GCOALESCE_OK and is the caller's,
 * who ends it with gcoalesce_detach. */
GCOALESCE_API gcoalesce_code gcoalesce_attach(const gcoalesce_attach_options* options, int64_t timeout_ms,
                                              gcoalesce_attachment** out);

/* Ends the attachment. Its subscriptions stay valid for gcoalesce_close alone. NULL is allowed; in a forked child it
 * frees nothing and touches nothing of the parent's. */
GCOALESCE_API void gcoalesce_detach(gcoalesce_attachment* attachment);

/* Asks for an answer; never waits. The answer, or the broker's refusal, comes with gcoalesce_next.
 * Resuming is refused with GCOALESCE_GONE (the stream was dropped), GCOALESCE_NOT_FOUND (never heard of, or another
 * realm's) or GCOALESCE_BAD_REQUEST (an event that the stream does not have).
 * Errors: GCOALESCE_BAD_REQUEST, GCOALESCE_ATTACHED_BEFORE_FORK. *out is set only on GCOALESCE_OK and is the
 * caller's, who ends it with gcoalesce_close. */
GCOALESCE_API gcoalesce_code gcoalesce_open(gcoalesce_attachment* attachment, const gcoalesce_request* request,
                                            gcoalesce_subscription** out);

/* Copies the next event out; event->data stays valid until the next call with this subscription.
 * timeout_ms: the longest wait; 0: only what is there.
 * GCOALESCE_OK: *event is set. GCOALESCE_END: see gcoalesce_ending_of. GCOALESCE_TIMED_OUT: ask again, nothing is lost.
 * GCOALESCE_EVICTED, or an opening that was refused (GCOALESCE_BUSY, GCOALESCE_RATE_LIMITED, ...): the end of this
 * subscription, and every further call answers the same.
 * When the broker dies before the first event was read, the call attaches and asks again within its timeout. A request
 * that was made while there was no broker is refused after a second, with the reason why attaching failed. */
GCOALESCE_API gcoalesce_code gcoalesce_next(gcoalesce_subscription* subscription, int64_t timeout_ms,
                                            gcoalesce_event* event);

/* The same without the copy: event->data points into the segment. After its use, ask gcoalesce_span_valid: 1 says
 * that what was read is what was published, 0 that the stream was evicted meanwhile and the bytes must not be used. */
GCOALESCE_API gcoalesce_code gcoalesce_next_span(gcoalesce_subscription* subscription, int64_t timeout_ms,
                                                 gcoalesce_event* event);
GCOALESCE_API int gcoalesce_span_valid(const gcoalesce_subscription* subscription);

/* How the stream ended. Filled up to ending->size bytes, which stays as it was set. GCOALESCE_TIMED_OUT: no call has
 * answered GCOALESCE_END yet. An opening that was refused: its code, and kind, code, retry_ms and message are filled.
 */
GCOALESCE_API gcoalesce_code gcoalesce_ending_of(const gcoalesce_subscription* subscription, gcoalesce_ending* ending);

/* Where upstream failed with an error of its own: that, as JSON text such as {"error": {"code": 429, ...}}, without
 * what might show an API key. "": there is none, or the stream has not ended. Valid until gcoalesce_close.
 * (https://ai.google.dev/gemini-api/docs/troubleshooting, google.rpc.Status) */
GCOALESCE_API const char* gcoalesce_error_document(const gcoalesce_subscription* subscription);

/* How the request was served, and what it reads. Filled up to info->size bytes. */
GCOALESCE_API gcoalesce_code gcoalesce_info_of(const gcoalesce_subscription* subscription, gcoalesce_info* info);

/* Ends the subscription, at any time; an opening under way is withdrawn. NULL is allowed. */
GCOALESCE_API void gcoalesce_close(gcoalesce_subscription* subscription);

/* A descriptor for poll and epoll (the attachment's own: do not close it): readable when a subscription of this
 * attachment may have something new. Then call gcoalesce_dispatch. -1: attached before fork. */
GCOALESCE_API int gcoalesce_fd(gcoalesce_attachment* attachment);

/* Takes notice of what came, and makes gcoalesce_fd() quiet until something newer comes. For which subscription it came
 * is not told: after each call, every subscription of interest must be asked by gcoalesce_next with timeout 0 until it
 * answers GCOALESCE_TIMED_OUT or has ended. What is left unread does not make the descriptor readable again.
 * Errors: GCOALESCE_BAD_REQUEST, GCOALESCE_ATTACHED_BEFORE_FORK. */
GCOALESCE_API gcoalesce_code gcoalesce_dispatch(gcoalesce_attachment* attachment);

/* What only members of the broker's admin group may say (GCOALESCE_NO_PERMISSION); the broker logs who said it. Each
 * waits up to timeout_ms for the answer. */

/* The notification window: answers that are given while it is open stay fresh longer. */
typedef enum gcoalesce_notify_action {
    GCOALESCE_NOTIFY_STATUS = 0, /* anybody may ask */
    GCOALESCE_NOTIFY_ON = 1,     /* open until now + for_ms, or until the present deadline if that is later */
    GCOALESCE_NOTIFY_OFF = 2
} gcoalesce_notify_action;

/* template_ids: separated by commas, at most 1 KiB; NULL: all. for_ms: 0 takes each template's `window`; at most one
 * day. *remaining_ms: how long the window stays open, the longest of them; 0 when all are closed. */
GCOALESCE_API gcoalesce_code gcoalesce_notify(gcoalesce_attachment* attachment, gcoalesce_notify_action action,
                                              const char* template_ids, int64_t for_ms, int64_t timeout_ms,
                                              int64_t* remaining_ms);

/* Ends a running stream for all its readers, who keep what came and learn GCOALESCE_CALL_CANCELLED. target: the first
 * four or more digits of its key or stream id. *streams: how many were ended; 0: it had ended already. */
GCOALESCE_API gcoalesce_code gcoalesce_cancel(gcoalesce_attachment* attachment, const char* target, int64_t timeout_ms,
                                              uint64_t* streams);

/* Drops what is kept for later requests, on disk too; readers of running streams finish, and later requests start anew.
 * target: as above, or a template's id, or NULL for GCOALESCE_PURGE_ALL. *streams: how many were dropped. */
typedef enum gcoalesce_purge_scope {
    GCOALESCE_PURGE_STREAM = 0,
    GCOALESCE_PURGE_TEMPLATE = 1,
    GCOALESCE_PURGE_ALL = 2
} gcoalesce_purge_scope;
GCOALESCE_API gcoalesce_code gcoalesce_purge(gcoalesce_attachment* attachment, gcoalesce_purge_scope scope,
                                             const char* target, int64_t timeout_ms, uint64_t* streams);

/* Makes the broker read its templates and its API key again: all, or with GCOALESCE_BAD_REQUEST and a sentence none. */
GCOALESCE_API gcoalesce_code gcoalesce_reload(gcoalesce_attachment* attachment, int64_t timeout_ms);

/* The sentence that belongs to the last code other than GCOALESCE_OK that a call returned on this thread. Never NULL;
 * valid until the thread's next call of this library. */
GCOALESCE_API const char* gcoalesce_message(void);

/* The code's word: "busy". Never NULL, static. */
GCOALESCE_API const char* gcoalesce_code_name(gcoalesce_code code);
GCOALESCE_API const char* gcoalesce_ending_name(gcoalesce_ending_kind kind);
GCOALESCE_API const char* gcoalesce_status_name(gcoalesce_status status);

#ifdef __cplusplus
}
#endif
#endif
