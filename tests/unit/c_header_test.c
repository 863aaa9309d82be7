/* The public header in a C99 program, against the shared library. Exits with 0 if all is as told. */
#include <stdio.h>
#include <string.h>

#include "gcoalesce/gcoalesce.h"

static int failures = 0;

static void check(int good, const char* what) {
    if (good) return;
    printf("FAILED: %s\n", what);
    ++failures;
}

int main(void) {
    gcoalesce_attach_options options;
    gcoalesce_attachment* attachment = NULL;
    memset(&options, 0, sizeof options);
    check(gcoalesce_attach(&options, 0, &attachment) == GCOALESCE_BAD_REQUEST, "a size that is not set is refused");
    check(strstr(gcoalesce_message(), "size") != NULL, "and the sentence says so");
    options.size = sizeof options;
    options.instance = "no-such-instance";
    options.runtime_dir = "/nonexistent";
    check(gcoalesce_attach(&options, 0, &attachment) == GCOALESCE_ABSENT, "there is no such broker");
    check(gcoalesce_attach(NULL, 0, &attachment) == GCOALESCE_BAD_REQUEST, "no options");
    options.instance = "../other";
    check(gcoalesce_attach(&options, 0, &attachment) == GCOALESCE_BAD_REQUEST, "a name that is a path is refused");
    check(attachment == NULL, "nothing was attached");
    check(gcoalesce_open(NULL, NULL, NULL) == GCOALESCE_BAD_REQUEST, "open nothing");
    check(gcoalesce_next(NULL, 0, NULL) == GCOALESCE_BAD_REQUEST, "next of nothing");
    check(gcoalesce_dispatch(NULL) == GCOALESCE_BAD_REQUEST, "dispatch nothing");
    check(gcoalesce_ending_of(NULL, NULL) == GCOALESCE_BAD_REQUEST, "the ending of nothing");
    check(gcoalesce_info_of(NULL, NULL) == GCOALESCE_BAD_REQUEST, "the info of nothing");
    check(gcoalesce_fd(NULL) == -1, "the descriptor of nothing");
    check(gcoalesce_span_valid(NULL) == 0, "the span of nothing");
    gcoalesce_close(NULL);
    gcoalesce_detach(NULL);
    check(strcmp(gcoalesce_code_name(GCOALESCE_BUSY), "busy") == 0, "a code's word");
    check(strcmp(gcoalesce_ending_name(GCOALESCE_TRUNCATED), "truncated") == 0, "an ending's word");
    check(strcmp(gcoalesce_status_name(GCOALESCE_FRESH), "fresh") == 0, "a status's word");
    return failures == 0 ? 0 : 1;
}
