/* Joining, closing to joiners, reopening, ending, retiring and reusing a slot (README, "Pin, close, retire"): a
 * model for spin.
 *
 * In the model                          In the C++
 * slot[s].generation, state, key        Slot                                       lib/segment/layout.hpp
 * slot[s].stale                         Slot::fresh_until has passed
 * slot[s].stream                        whose bytes the slot's extents hold; 0: they are freed
 * index                                 IndexEntry::reference; both keys have one fingerprint
 * lane[l].pins, joins, changes          PinEntry, LaneHeader
 * pin, unpin, count_join                Lane                                       lib/segment/lane.hpp
 * Joiner: look_up ... count_join        try_join                                   lib/segment/join.hpp
 * read                                  StreamReader                               lib/segment/reader.cpp
 * find, start, close_to_joiners,        Store::find, open, close_to_joiners,       broker/store.cpp
 *   reopen, fold, retire, end             reopen, fold, retire, end
 * seen, subscribers                     LaneState::seen, Store::subscribers_
 * look                                  Store::sweep, Store::reclaim, and cancelling what nobody reads
 *
 * With LANES=2 the two joiners are two processes; with LANES=1 they are two threads of one process, on one lane.
 * Besides the joiners there are others, who start a stream and leave at once, or, with SLOTS=2, purge one.
 *
 * Checked in every interleaving:
 *  - no joiner on a closed slot: nobody joins a slot that is closed for good, and nobody who has joined finds the
 *    stream cancelled because nobody read it;
 *  - no use after free, no wrong answer: while a reader reads, the slot holds the stream that it joined, under the key
 *    that it asked for and the generation that it knows;
 *  - whoever has seen a failure finds the slot closed when it asks again (the check of the state would turn it away as
 *    well, but a little later: two guards for one rule);
 *  - every join is counted for the stream that was joined;
 *  - no leaked pin: the broker stops only when every slot is free. In the end it looks at a slot only when the last
 *    fold says that nobody reads it, and folds a lane only when its changes moved; so a pin that is never taken back,
 *    or whose end it never learns, leaves it stuck: spin's "invalid end state".
 *
 * Memory order. A pair of seq_cst steps, a store and then a load of what the other side stores, keeps its order here;
 * the mutation lets the load come first, which is what a store buffer, or a weaker order on either step, does. Release
 * and acquire are program order here, and their mutation swaps the steps. A stale index entry is the same as a joiner
 * that is slow between look_up and pin.
 *
 * Each macro below takes out or swaps one step. check.sh shows that each makes the model fail, and how.
 */

#ifndef LANES
#define LANES 2
#endif
#ifndef JOINERS
#define JOINERS 2
#endif
#ifndef SLOTS
#define SLOTS 1
#endif
#ifndef REQUESTS
#define REQUESTS 1 /* of joiner 0; the other one has one */
#endif
#define STREAMS (SLOTS + 1) /* started in one run: the last one reuses a slot */
#define NOWHERE SLOTS

/* The second of two; the first once more where there is only one. */
#define LANE2 (LANES - 1)
#define SLOT2 (SLOTS - 1)

mtype = { FREE, IN_FLIGHT, COMPLETE, FAILED, CANCELLED };

typedef Slot {
    byte generation; /* bit 0: closed to joiners; the rest is the identity */
    mtype state;
    bit key;
    bool stale;
    byte stream;
    bool for_good /* for the assertions: the broker has closed it and will not reopen it */
};

typedef Reference {
    byte slot;
    byte generation
};

typedef Lane {
    byte pins[SLOTS];
    bool joins[SLOTS]; /* some that were not folded yet */
    bool changes       /* moved since the last fold */
};

Slot slot[SLOTS];
Reference index;
Lane lane[LANES];

/* The control socket, for one request of each joiner at a time; open.pml has the rest of it. */
mtype = { NOTHING, OPEN, REFUSED, OPENED };
mtype request[JOINERS] = NOTHING;
bit request_key[JOINERS];
mtype answer[JOINERS] = NOTHING;
byte answer_slot[JOINERS];

byte finished; /* joiners that have made all their requests */

#define closed(s) (slot[s].generation & 1)
#define joinable(s) (slot[s].state == IN_FLIGHT || (slot[s].state == COMPLETE && !slot[s].stale))

/* ---- the client ---------------------------------------------------------------------------------------------- */

#define MINE lane[me % LANES]

inline pin()
{
    MINE.pins[s]++ /* seq_cst */
}

inline load_generation() /* seq_cst; to pass is to join: what stands there at this moment is noted */
{
    d_step {
#if defined(NO_GENERATION_CHECK)
        joined = true;
#elif defined(NO_CLOSED_CHECK)
        joined = slot[s].generation >> 1 == g >> 1;
#elif defined(NO_IDENTITY_CHECK)
        joined = !closed(s);
#else
        joined = slot[s].generation == g;
#endif
        if
        :: joined ->
            assert(!slot[s].for_good);
            assert(!(s == failed_slot && slot[s].generation == failed_generation));
            stream = slot[s].stream;
            dead = !joinable(s)
        :: else
        fi
    }
}

inline unpin()
{
#ifdef CHANGE_BEFORE_UNPIN
    MINE.changes = true;
    MINE.pins[s]--
#else
    MINE.pins[s]--;
    MINE.changes = true
#endif
}

inline read()
{
    d_step {
        assert(slot[s].stream == stream);
        assert(slot[s].key == k);
        assert(slot[s].generation >> 1 == g >> 1);
        assert(slot[s].state != CANCELLED)
    }
}

proctype Joiner(byte me)
{
    byte requests, s, g, stream, failed_slot = NOWHERE, failed_generation;
    bit k;
    bool joined, dead;

next_request:
    atomic {
        s = 0;
        g = 0;
        stream = 0;
        k = 0;
        joined = false;
        dead = false;
        if
        :: requests == (me == 0 -> REQUESTS : 1) -> goto finish
        :: else -> requests++
        fi;
#if LANES == 2
        if
        :: k = 0
        :: k = 1
        fi;
#endif
        if
        :: me == 0 -> goto ask /* an entry can be missed */
        :: true
        fi;
        /* look_up */
        s = index.slot;
        g = index.generation;
        if
        :: s == NOWHERE -> goto ask
        :: else
        fi
    }

#ifdef NO_PIN_FENCE
    load_generation();
    pin();
#else
    pin();
    load_generation();
#endif
    if
    :: !joined -> goto undo
    :: else
    fi;
#ifndef NO_KEY_CHECK
    if
    :: slot[s].key != k -> goto undo
    :: else
    fi;
#endif
#ifndef NO_JOINABLE_CHECK
    if
    :: !joinable(s) -> goto undo
    :: else
    fi;
#endif
    assert(!dead);
    MINE.joins[s] = true; /* count_join */
    goto reading;

undo:
#ifdef NO_CHANGE_ON_UNDO
    MINE.pins[s]--;
#else
    unpin();
#endif
ask:
    atomic {
        s = 0;
        g = 0;
        stream = 0;
        joined = false;
        dead = false;
        request_key[me] = k;
        request[me] = OPEN
    }
    if
    :: d_step { answer[me] == REFUSED -> answer[me] = NOTHING }; goto next_request
    :: d_step {
           answer[me] == OPENED ->
           answer[me] = NOTHING;
           s = answer_slot[me];
           answer_slot[me] = 0;
           g = slot[s].generation & 254;
           stream = slot[s].stream
       }
    fi;

reading:
    do
    :: read()
    :: slot[s].state == COMPLETE -> break
    :: slot[s].state == FAILED -> d_step { failed_slot = s; failed_generation = g }; break
    :: break /* the reader leaves */
    od;
    unpin();
#ifdef RELAXED_UNPIN
    read();
#endif
    goto next_request;

finish:
    atomic {
        failed_slot = 0;
        failed_generation = 0;
        finished++
    }
}

/* ---- the broker ---------------------------------------------------------------------------------------------- */

#define can_start (started < STREAMS && (slot[0].state == FREE || slot[SLOT2].state == FREE))
#define found(s) (!closed(s) && slot[s].key == k && joinable(s))
#ifdef SUBSCRIBERS_RESET_IN_RETIRE
#define unread(s) (subscribers[s] == 0)
#else
#define unread(s) (seen[s] == 0 && seen[LANE2 * SLOTS + s] == 0)
#endif

#define short_of_memory (finished < JOINERS) /* it may be; in the end it is not */

inline find() /* a stream to join or to read fresh, if there is one */
{
    s = (found(0) -> 0 : (found(SLOT2) -> SLOT2 : NOWHERE))
}

inline put_in_index()
{
    d_step {
        index.slot = s;
        index.generation = slot[s].generation & 254
    }
}

inline close_to_joiners(good)
{
    if
    :: index.slot == s -> d_step { index.slot = NOWHERE; index.generation = 0 }
    :: else
    fi;
    d_step {
        slot[s].generation = slot[s].generation | 1; /* seq_cst */
        slot[s].for_good = slot[s].for_good || good
    }
}

inline load_pins() /* of every lane, seq_cst; no sum that a client could make overflow */
{
    pinned = lane[0].pins[s] > 0;
    pinned = pinned || lane[LANE2].pins[s] > 0
}

inline reopen()
{
    slot[s].generation = slot[s].generation & 254;
    put_in_index()
}

inline fill()
{
    d_step {
        started++;
        slot[s].key = k;
        slot[s].stream = started;
        slot[s].stale = false;
        slot[s].state = IN_FLIGHT
    }
}

inline start() /* filled while closed, then opened, indexed last */
{
    s = (slot[0].state == FREE -> 0 : SLOT2);
#ifndef FILL_LAST
    fill();
#endif
    d_step {
        slot[s].for_good = false;
        slot[s].generation = slot[s].generation & 254
    }
    put_in_index();
#ifdef FILL_LAST
    fill();
#endif
}

inline fold_pins(s)
{
#ifdef SUBSCRIBERS_RESET_IN_RETIRE
    d_step {
        subscribers[s] = subscribers[s] + lane[t].pins[s] - seen[t * SLOTS + s];
        seen[t * SLOTS + s] = lane[t].pins[s]
    }
#else
    seen[t * SLOTS + s] = lane[t].pins[s]
#endif
}

inline fold_all_pins()
{
    fold_pins(0);
#if SLOTS == 2
    fold_pins(1);
#endif
}

inline fold_joins()
{
    d_step {
        lane[0].joins[s] = false;
        lane[LANE2].joins[s] = false
    }
}

inline retire()
{
#ifndef FOLD_JOINS_BEFORE_PINS
    fold_joins();
#endif
    d_step {
        assert(!lane[0].joins[s] && !lane[LANE2].joins[s]);
        assert(slot[s].stream != 0);
#ifdef SUBSCRIBERS_RESET_IN_RETIRE
        subscribers[s] = 0;
#endif
        slot[s].generation = slot[s].generation + 2;
        slot[s].stream = 0;
        slot[s].key = 0;
        slot[s].stale = false;
        slot[s].state = FREE
    }
}

active proctype Broker()
{
    byte s, t, started;
    bit k;
    bool pinned, was_open;
    byte seen[LANES * SLOTS]; /* the pins at the last fold */
#ifdef SUBSCRIBERS_RESET_IN_RETIRE
    short subscribers[SLOTS]; /* else the sum of what was seen, and so not in need of a word of its own here */
#endif
#ifdef PIN_NOT_ATOMIC
    byte was;
#endif

    d_step {
        slot[0].generation = 1;
        slot[0].state = FREE;
        slot[SLOT2].generation = 1;
        slot[SLOT2].state = FREE;
        index.slot = NOWHERE
    }
    atomic {
        run Joiner(0);
#if JOINERS == 2
        run Joiner(1)
#endif
    }

next:
    atomic {
        s = 0;
        t = 0;
        k = 0;
        pinned = false;
        was_open = false;
        if
        :: request[0] != NOTHING -> t = 0; goto open
        :: can_start -> goto open_for_others
        :: lane[0].changes -> t = 0; goto fold
        :: slot[0].state == IN_FLIGHT -> s = 0; goto end
        :: slot[0].state == COMPLETE && !slot[0].stale -> s = 0; goto age
        :: slot[0].state != FREE && (unread(0) || short_of_memory) -> s = 0; goto look
#if JOINERS == 2
        :: request[1] != NOTHING -> t = 1; goto open
#endif
#if LANES == 2
        :: lane[1].changes -> t = 1; goto fold
#endif
#if SLOTS == 2
        :: !closed(0) -> s = 0; goto purge
        :: !closed(1) -> s = 1; goto purge
        :: slot[1].state == IN_FLIGHT -> s = 1; goto end
        :: slot[1].state == COMPLETE && !slot[1].stale -> s = 1; goto age
        :: slot[1].state != FREE && (unread(1) || short_of_memory) -> s = 1; goto look
#endif
        :: finished == JOINERS && slot[0].state == FREE && slot[SLOT2].state == FREE -> goto stop
        fi
    }

open:
    atomic {
        k = request_key[t];
        request_key[t] = 0;
        find();
        request[t] = NOTHING
    }
    if
    :: s == NOWHERE ->
        if
        :: can_start -> start()
        :: else -> answer[t] = REFUSED; goto next
        fi
    :: else
    fi;
    /* The pin on the client's behalf, in the word that the client's own threads count in. */
#ifdef PIN_NOT_ATOMIC
    was = lane[t % LANES].pins[s];
#endif
    d_step {
#ifdef PIN_NOT_ATOMIC
        lane[t % LANES].pins[s] = was + 1;
        was = 0;
#else
        lane[t % LANES].pins[s]++;
#endif
        lane[t % LANES].changes = true;
        answer_slot[t] = s;
        answer[t] = OPENED
    }
    goto next;

open_for_others:
    if
    :: k = 0
    :: k = 1
    fi;
    find();
    if
    :: s == NOWHERE -> start()
    :: else
    fi;
    goto next;

fold:
#ifdef CHANGES_LOADED_LAST
    fold_all_pins();
    lane[t].changes = false;
#else
    lane[t].changes = false;
    fold_all_pins();
#endif
    goto next;

age:
    slot[s].stale = true;
    goto next;

#if SLOTS == 2
purge: /* a refresh is a purge, and then a start */
    close_to_joiners(true);
    goto next;
#endif

end:
    if
    :: slot[s].state = COMPLETE
    :: true ->
#ifdef PUBLISH_BEFORE_CLOSE
        slot[s].state = FAILED;
        close_to_joiners(true)
#else
        close_to_joiners(true);
        slot[s].state = FAILED
#endif
    fi;
    goto next;

look:
    was_open = !closed(s);
#ifdef FOLD_JOINS_BEFORE_PINS
    fold_joins();
#endif
#if defined(NO_CLOSE)
    load_pins();
#elif defined(NO_CLOSE_FENCE)
    load_pins();
    close_to_joiners(!joinable(s));
#else
    close_to_joiners(!joinable(s));
    load_pins();
#endif
#ifdef NO_PIN_COUNT_CHECK
    pinned = false;
#endif
    if
    :: pinned ->
#ifdef REOPEN_ALWAYS
        was_open = true;
#endif
        if
        :: was_open && joinable(s) -> reopen() /* what this look closed, never what a refresh did */
        :: else
        fi
    :: !pinned && slot[s].state == IN_FLIGHT ->
        d_step {
            slot[s].for_good = true;
            slot[s].state = CANCELLED
        }
    :: !pinned && slot[s].state != IN_FLIGHT -> retire()
    fi;
    goto next;

stop:
    assert(lane[0].pins[0] == 0 && lane[0].pins[SLOT2] == 0 && lane[LANE2].pins[0] == 0 && lane[LANE2].pins[SLOT2] == 0)
}
