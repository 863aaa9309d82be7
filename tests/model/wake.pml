/* Publishing and waking (README, "Publish last"): a model for spin.
 *
 * In the model                          In the C++
 * committed, state, ending, wake        Slot                                       lib/segment/layout.hpp
 * bytes[s]                              how many events' bytes stand in the extents
 * pins[s], asked                        PinEntry, LaneHeader                       lib/segment/lane.hpp
 * ask, take_ask                         Lane's
 * asleep, futex_wait, futex_wake_all    the kernel's                               lib/segment/futex.hpp
 * wake_word, locate                     StreamReader's                             lib/segment/reader.cpp
 * append, end, publish                  Store's                                    broker/store.cpp
 * socket                                the wake socket: something to read         broker/control.cpp
 * BlockingReader                        Subscription::next                         lib/client/subscription.cpp
 * EventLoop                             Attachment::dispatch, and its caller       lib/client/attachment.cpp
 *
 * The broker publishes up to EVENTS events in a stream and ends it, or falls silent at any moment. Without EVENT_LOOP
 * there is one stream with two BlockingReaders, who sleep on its futex word. With EVENT_LOOP there are two streams and
 * one client with one pollable descriptor and a reader of each; it joins the second stream at any moment.
 *
 * Checked in every interleaving:
 *  - no lost wake-up: there are no time-outs here (the C++ looks again after 250 ms), so whoever sleeps when nothing
 *    can happen any more sleeps for ever, and must have read everything and not have missed the end;
 *  - what a count covers has its bytes; an ending that the state announces has its fields;
 *  - never a false end: a reader that is told of the end has read every event.
 *
 * Memory order. A pair of seq_cst steps, a store and then a load of what the other side stores, keeps its order here;
 * the mutation lets the load come first, which is what a store buffer, or a weaker order on either step, does. Release
 * and acquire are program order here, and their mutation swaps the steps.
 *
 * Each macro below takes out or swaps one step. check.sh shows that each makes the model fail, and how.
 */

#ifdef EVENT_LOOP
#define STREAMS 2
#else
#define STREAMS 1
#endif
#define EVENTS(s) (2 - s)
#define BLOCKING 2

mtype = { IN_FLIGHT, ENDED };

byte bytes[STREAMS];
byte committed[STREAMS];
mtype state[STREAMS] = IN_FLIGHT;
bool ending[STREAMS];

#ifdef EVENT_LOOP
byte pins[STREAMS];
byte has_read[STREAMS];
bool asked;
bool socket; /* readable; further messages change nothing */
#else
byte wake[STREAMS];
byte has_read[BLOCKING];
bool asleep[BLOCKING];
#endif

/* ---- reading ------------------------------------------------------------------------------------------------- */

/* One step of a reader of stream s that has read `read` events: what = NOTHING, EVENT or END. */
mtype = { NOTHING, EVENT, END };

inline locate(s, read)
{
#ifdef BYTES_LOADED_FIRST
    there = bytes[s];
#endif
#ifdef FIELDS_LOADED_FIRST
    fields = ending[s];
#endif
    /* The state before the count: a count loaded after "ended" is the last one. */
#ifdef COUNT_BEFORE_STATE
    count = committed[s];
    now = state[s];
#else
    now = state[s];
    count = committed[s];
#endif
#ifndef BYTES_LOADED_FIRST
    there = bytes[s];
#endif
#ifndef FIELDS_LOADED_FIRST
    fields = ending[s];
#endif
    d_step {
        if
        :: count > read ->
            what = EVENT;
            assert(there > read);
            read++
        :: count == read && now == ENDED ->
            what = END;
            assert(fields);
            assert(bytes[s] == read)
        :: count == read && now == IN_FLIGHT -> what = NOTHING
        fi;
        count = 0;
        now = IN_FLIGHT;
        there = 0;
        fields = false
    }
}

#ifndef EVENT_LOOP

proctype BlockingReader(byte me)
{
    byte seen, count, there;
    mtype now = IN_FLIGHT, what = NOTHING;
    bool fields;

    do
    ::
#ifdef WAKE_WORD_LOADED_LAST
        locate(0, has_read[me]);
        seen = wake[0];
#else
        seen = wake[0]; /* wake_word */
        locate(0, has_read[me]);
#endif
        if
        :: what == END -> break
        :: what == EVENT
        :: what == NOTHING ->
            /* futex_wait: the kernel compares and puts to sleep in one */
            atomic {
                if
                :: wake[0] == seen -> asleep[me] = true
                :: else
                fi;
                seen = 0
            }
end_asleep:
            !asleep[me]
        fi
    od
}

#else

proctype EventLoop()
{
    byte count, there;
    mtype now = IN_FLIGHT, what = NOTHING;
    bool fields, more, ended[STREAMS];

    bool joins_late = true;

    pins[0]++;
    if
    :: joins_late = false; ended[1] = true /* never joins the second stream */
    :: true
    fi;
    do
    ::
        if
        :: joins_late -> joins_late = false; pins[1]++
        :: true
        fi;
        more = false;
#ifndef DRAIN_AFTER_CHECK
        socket = false;
#endif
#ifndef ASK_AFTER_CHECK
        asked = true; /* ask: seq_cst, then the loads in locate */
#endif
        if
        :: pins[0] > 0 ->
            locate(0, has_read[0]);
            if
            :: what == EVENT -> more = true
            :: what == END -> ended[0] = true; pins[0]--
            :: what == NOTHING
            fi
        :: else
        fi;
#ifdef ONE_STREAM_CHECKED
        if
        :: !ended[0]
        :: else ->
#endif
        if
        :: pins[1] > 0 ->
            locate(1, has_read[1]);
            if
            :: what == EVENT -> more = true
            :: what == END -> ended[1] = true; pins[1]--
            :: what == NOTHING
            fi
        :: else
        fi;
#ifdef ONE_STREAM_CHECKED
        fi;
#endif
        what = NOTHING;
#ifdef ASK_AFTER_CHECK
        asked = true;
#endif
#ifdef DRAIN_AFTER_CHECK
        socket = false;
#endif
        if
        :: more
        :: !more && ended[0] && ended[1] -> break
        :: !more && !(ended[0] && ended[1]) ->
end_asleep:
            if
            :: socket
            :: joins_late -> joins_late = false; pins[1]++ /* whatever else woke the application */
            fi
        fi
    od
}

#endif

/* ---- the broker ---------------------------------------------------------------------------------------------- */

#ifndef EVENT_LOOP

inline futex_wake_all()
{
    d_step {
        asleep[0] = false;
#ifndef WAKE_ONE
        asleep[1] = false
#endif
    }
}

inline publish()
{
#ifdef FUTEX_WAKE_BEFORE_STORE
    futex_wake_all();
    wake[s]++
#else
#if !defined(NO_WAKE_STORE) && !defined(WAKE_STORED_BEFORE_COMMIT)
    wake[s]++;
#endif
    futex_wake_all()
#endif
}

inline load_early()
{
    skip
}

#else

inline load_pins()
{
    reads = pins[s] > 0
}

inline load_asked()
{
    wanted = asked
}

inline publish()
{
#ifndef PINS_LOADED_FIRST
    load_pins();
#endif
#ifndef NO_PUBLISH_FENCE
    load_asked();
#endif
    /* take_ask, and the socket */
    if
    :: reads && wanted ->
#ifdef ASKED_CLEARED_AFTER_SEND
        socket = true;
        asked = false
#else
        asked = false;
        socket = true
#endif
    :: else
    fi;
    d_step {
        reads = false;
        wanted = false
    }
}

inline load_early() /* what a weaker order lets the broker load before its store is seen */
{
#ifdef PINS_LOADED_FIRST
    load_pins();
#endif
#ifdef NO_PUBLISH_FENCE
    load_asked();
#endif
    skip
}

#endif

active proctype Broker()
{
    byte s;
    bool reads, wanted;

    atomic {
#ifdef EVENT_LOOP
        run EventLoop()
#else
        run BlockingReader(0);
        run BlockingReader(1)
#endif
    }

next:
    if
    :: goto stop /* upstream says no more */
    :: state[0] == IN_FLIGHT && bytes[0] < EVENTS(0) -> s = 0; goto append
    :: state[0] == IN_FLIGHT -> s = 0; goto end
#ifdef EVENT_LOOP
    :: state[1] == IN_FLIGHT && bytes[1] < EVENTS(1) -> s = 1; goto append
    :: state[1] == IN_FLIGHT -> s = 1; goto end
#endif
    fi;

append:
    load_early();
#ifdef WAKE_STORED_BEFORE_COMMIT
    wake[s]++;
#endif
#ifdef COMMIT_BEFORE_BYTES
    committed[s]++;
    bytes[s]++;
#else
    bytes[s]++;
    committed[s]++; /* seq_cst */
#endif
    publish();
    goto next;

end:
    load_early();
#ifdef STATE_BEFORE_FIELDS
    state[s] = ENDED;
    ending[s] = true;
#else
    ending[s] = true;
    state[s] = ENDED; /* seq_cst */
#endif
#ifndef NO_WAKE_AT_END
    publish();
#endif
    goto next;

stop:
    timeout; /* nothing can happen any more */
#ifdef EVENT_LOOP
#define SERVED(s) (pins[s] == 0 || (has_read[s] == committed[s] && state[s] == IN_FLIGHT))
#else
#define SERVED(reader) (!asleep[reader] || (has_read[reader] == committed[0] && state[0] == IN_FLIGHT))
#endif
    assert(SERVED(0));
    assert(SERVED(1))
}
