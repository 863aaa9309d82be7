/* Eviction, and readers whose pins no longer count (README, "Pin, close, retire"): a model for spin of
 * the check after the copy.
 *
 * In the model                          In the C++
 * generation, state, evicted, ending    Slot                                       lib/segment/layout.hpp
 * extents                               what stands in the slot's extents: the stream whose bytes they are, or
 *                                       FOREIGN once they are freed and others write there
 * lane[l].pins, moves                   PinEntry                                   lib/segment/lane.hpp
 * lane[l].counts                        the lane is known and not revoked          broker/store.cpp
 * read_event, valid                     StreamReader::next, valid                  lib/segment/reader.cpp
 * Reader                                Subscription::next, conclude               lib/client/subscription.cpp
 * Newcomer                              try_join                                   lib/segment/join.hpp
 * close_to_joiners, stalled_only,       Store's                                    broker/store.cpp
 *   evict, reopen, revoke_lane, retire
 *
 * A reader stands still on a stream. Under memory pressure the broker takes the stream's extents away (evict), or its
 * lane's pins no longer count (revoke_lane: the connection is lost, or it holds too much), though its process lives. A
 * newcomer who reads and moves on may turn up: with LANES=2 in another process, with LANES=1 in the reader's own. An
 * inspector, who pins nothing, is a reader whose lane was revoked.
 *
 * Checked in every interleaving:
 *  - a copy, or an ending, that passes the check is the reader's own stream's;
 *  - extents are freed once;
 *  - nobody who moves is evicted: the decision rests on who reads, so closing to joiners comes first, and joining
 *    counts as a move;
 *  - the slot is free in the end (else the broker is stuck: invalid end state).
 *
 * The steps of copy_in() and copy_out() are release-stores and acquire-loads, so they keep their order here. Each macro
 * below takes out or swaps one step. check.sh shows that each makes the model fail, and how.
 */

#ifndef LANES
#define LANES 2
#endif
#define LANE2 (LANES - 1) /* the newcomer's */
#define FOREIGN 9

mtype = { FREE, IN_FLIGHT, ENDED };

typedef Lane {
    byte pins;
    byte moves;
    bool counts
};

byte generation; /* bit 0: closed to joiners */
mtype state = IN_FLIGHT;
bool evicted;
byte ending;      /* whose ending stands there */
byte extents = 1; /* the first stream's */
bool fresh = true;
Lane lane[LANES];
byte gone; /* clients */

/* ---- the clients --------------------------------------------------------------------------------------------- */

inline load_evicted()
{
#ifdef NO_EVICTED_CHECK
    skip
#else
    lost = lost || evicted
#endif
}

inline load_generation()
{
#ifdef NO_IDENTITY_CHECK
    skip
#else
    lost = lost || generation >> 1 != g >> 1
#endif
}

/* `evicted` is cleared when the slot is reused, the generation advances before: so `evicted` is loaded first. */
inline valid()
{
#ifdef GENERATION_LOADED_FIRST
    load_generation();
    load_evicted()
#else
    load_evicted();
    load_generation()
#endif
}

inline read_event()
{
    lost = false;
#ifdef CHECK_BEFORE_COPY
    valid();
    copy = extents;
#else
    copy = extents;
    valid();
#endif
    assert(lost || copy == stream)
}

proctype Reader()
{
    byte copy, stream = 1, g = 0;
    bool lost;
    mtype seen;

    do
    :: read_event();
        if
        :: lost -> break
        :: else -> lane[0].moves++ /* moved */
        fi;
        break
    :: seen = state;
        lost = false;
        valid();
        if
        :: lost -> break
        :: !lost && seen == ENDED -> /* all events were read */
            copy = ending;
#ifndef NO_CHECK_AFTER_ENDING
            valid();
#endif
            assert(lost || copy == stream);
            break
        :: !lost && seen != ENDED
        fi
    :: break
    od;
    lane[0].pins--;
    gone++
}

proctype Newcomer()
{
    byte copy, stream, g;
    bool lost;

    g = generation & 254; /* by the index */
#ifndef NO_MOVE_ON_JOIN
    lane[LANE2].moves++; /* before the pin: who sees the pin sees that it is not the old reader's */
#endif
    lane[LANE2].pins++;
    if
    :: d_step { generation == g && (state == IN_FLIGHT || (state == ENDED && fresh)) -> stream = extents };
        read_event();
        assert(!lost || !lane[LANE2].counts)
    :: else
    fi;
    lane[LANE2].pins--;
    gone++
}

/* ---- the broker ---------------------------------------------------------------------------------------------- */

inline close_to_joiners()
{
    was_open = !(generation & 1);
    generation = generation | 1
}

inline reopen()
{
    if
    :: was_open && fresh -> generation = generation & 254
    :: else
    fi
}

/* Every lane that pins the slot has stood still since the broker first saw it: that is the reader's, at 0 moves. */
inline stalled_only()
{
    stalled = true;
    if
    :: lane[0].counts && lane[0].pins > 0 -> stalled = lane[0].moves == 0
    :: else
    fi;
#if LANES == 2
    if
    :: lane[1].counts && lane[1].pins > 0 -> stalled = false
    :: else
    fi
#endif
}

inline free_extents()
{
    if
    :: held -> held = false; assert(extents != FOREIGN); extents = FOREIGN
    :: else
    fi
}

inline load_pins()
{
    pinned = lane[0].counts && lane[0].pins > 0;
#if LANES == 2
    pinned = pinned || (lane[1].counts && lane[1].pins > 0)
#endif
}

active proctype Broker()
{
    byte stream = 1;
    bool was_open, stalled, pinned, held = true;

    d_step {
        lane[0].counts = true;
        lane[LANE2].counts = true;
        lane[0].pins = 1
    }
    atomic {
        run Reader();
        run Newcomer()
    }

    do
    :: state == IN_FLIGHT -> /* end: reusable */
        ending = stream;
        state = ENDED
    :: state == ENDED && fresh -> fresh = false
    :: state == ENDED && held ->
        /* evict */
#ifdef EVICT_BEFORE_CLOSE
        stalled_only();
        close_to_joiners();
#else
        close_to_joiners();
        stalled_only();
#endif
        if
        :: stalled ->
#ifdef FREE_BEFORE_EVICTED
            free_extents();
            evicted = true
#else
            evicted = true;
            free_extents()
#endif
        :: else -> reopen()
        fi
    :: lane[0].counts -> lane[0].counts = false /* revoke_lane */
    :: state == ENDED ->
        close_to_joiners();
        load_pins();
        if
        :: !pinned ->
            /* retire */
            state = FREE;
#ifdef EVICTED_CLEARED_IN_RETIRE
            evicted = false;
#endif
#ifdef FREE_BEFORE_GENERATION
            free_extents();
            generation = generation + 2
#else
            generation = generation + 2;
            free_extents()
#endif
        :: else -> reopen()
        fi
    :: state == FREE && stream == 1 ->
        /* open: the slot's next stream */
        d_step {
            stream = 2;
            ending = 0;
            fresh = true
        }
        evicted = false;
        state = IN_FLIGHT;
        d_step {
            held = true;
            extents = stream
        }
        generation = generation & 254
    :: state == FREE && gone == 2 -> break
    od
}
