/* Attaching, opening over the control socket, withdrawing, hanging up and dying: a model for spin of who takes
 * back which pin.
 *
 * In the model                          In the C++
 * lane[a].pins                          PinEntry::pins of attachment a             lib/segment/lane.hpp
 * lane[a].known                         the lane is one of Store's                 broker/store.cpp
 * lane[a].revoked                       LaneHeader::revoked                        lib/segment/layout.hpp
 * to_broker, to_client                  the control socket                         lib/protocol/control.hpp
 * parsing                               Connection::parsing: with the worker       broker/control.cpp
 * welcome, decide, take_withdraw        Connection's
 * lost_connection, deadline, process    Connection's; process: the pidfd
 * remove_lane, retire, end              Store's                                    broker/store.cpp
 * ask, give_up, take_answer, hang_up    Attachment::ask, withdraw, take, lose_link lib/client/attachment.cpp
 * leave                                 ~Subscription                              lib/client/subscription.cpp
 *
 * One client process, and one slot. Its first attachment (0) has two requests, which may be under way at once. The
 * client may lose that connection (whoever closes it) and live on, or be killed; then there is a second attachment (1)
 * with one request, of the same process or of the next one. What pin.pml checks in detail, joining past the broker and
 * closing to joiners, is one step each here.
 *
 * Checked in every interleaving:
 *  - every request has exactly one answer: a missing one leaves the client waiting for ever (spin's "invalid end
 *    state"), one too many finds no request;
 *  - no leaked pin: with no request under way and no reader left, an attached client's lane holds no pin; and the
 *    broker stops only when the slot is free again, which a pin that is left behind by a death or a lost connection
 *    would prevent (invalid end state);
 *  - no pin taken back twice;
 *  - no use after free: a reader's stream is in its slot as long as its lane was not revoked. (One whose lane was
 *    revoked learns that after its copy: evict.pml.)
 *
 * Each macro below takes out or swaps one step. check.sh shows that each makes the model fail, and how.
 */

#define ATTACHMENTS 2
#define REQUESTS 3
#define STREAMS 2
#define attachment_of(r) (r / 2)

mtype = { FREE, IN_FLIGHT, ENDED };
mtype = { IDLE, ASKED, GIVEN_UP, READING, DONE };
mtype = { OPEN, WITHDRAW, END_OF_FILE, OPENED, REFUSED, WITHDRAWN };

typedef Lane {
    byte pins;
    bool known;
    bool revoked
};

Lane lane[ATTACHMENTS];
mtype state = FREE; /* of the slot */
byte stream;        /* whose bytes its extents hold; 0: freed */

chan to_broker[ATTACHMENTS] = [5] of { mtype, byte };
chan to_client[ATTACHMENTS] = [3] of { mtype, byte };

bool wants_attachment[ATTACHMENTS], welcomed[ATTACHMENTS], hung_up[ATTACHMENTS], process_dead[ATTACHMENTS];
bool client_finished;

/* ---- the client ---------------------------------------------------------------------------------------------- */

inline unpin(a)
{
    d_step {
        assert(lane[a].pins > 0);
        lane[a].pins--
    }
}

#define connected(a) (welcomed[a] && !hung_up[a])
#define over(x) (request[x] == IDLE || request[x] == DONE)
#define quiet(a) ((a == 0 && over(0) && over(1)) || (a == 1 && over(2)))

#define MOVES(x)                                                                                                       \
    :: request[x] == IDLE && connected(attachment_of(x)) -> r = x; goto ask                                            \
    :: request[x] == IDLE && connected(attachment_of(x)) && state == IN_FLIGHT -> r = x; goto join                     \
    :: request[x] == ASKED && connected(attachment_of(x)) -> r = x; goto give_up                                       \
    :: request[x] == READING -> r = x; goto read                                                                       \
    :: request[x] == READING -> r = x; goto leave

proctype Client()
{
    mtype request[REQUESTS] = IDLE;
    byte joined[REQUESTS]; /* the stream */
    byte a, r;
    bool may_be_killed = true;
    mtype said;

attach:
    wants_attachment[a] = true;
    welcomed[a];
next:
    if
        MOVES(0)
        MOVES(1)
        MOVES(2)
    :: to_client[a]?said, r -> goto take_answer
    :: connected(a) && quiet(a) -> assert(lane[a].pins == 0); goto finish
    :: connected(a) && a == 0 -> goto hang_up
    :: may_be_killed -> goto be_killed
    fi;

ask:
    atomic {
        request[r] = ASKED;
        to_broker[a]!OPEN, r
    }
    goto next;

join: /* past the broker: pin.pml */
    atomic {
        if
        :: state == IN_FLIGHT ->
            lane[a].pins++;
            joined[r] = stream;
            request[r] = READING
        :: else
        fi
    }
    goto next;

give_up:
    atomic {
        request[r] = GIVEN_UP;
        to_broker[a]!WITHDRAW, r
    }
    goto next;

take_answer:
    assert(request[r] == ASKED || request[r] == GIVEN_UP);
    if
    :: said == OPENED && request[r] == ASKED ->
        d_step {
            request[r] = READING;
            joined[r] = stream;
            assert(lane[a].revoked || (stream != 0 && lane[a].pins > 0))
        }
    :: said == OPENED && request[r] == GIVEN_UP ->
        /* It crossed the `withdraw`: the pin is ours to take back. */
#ifndef LEAK_ON_WITHDRAW
        unpin(a);
#endif
        request[r] = DONE
    :: said == REFUSED -> request[r] = DONE
    :: said == WITHDRAWN ->
        assert(request[r] == GIVEN_UP);
        request[r] = DONE
    fi;
    goto next;

read:
    assert(lane[attachment_of(r)].revoked || stream == joined[r]);
    goto next;

leave:
    unpin(attachment_of(r));
    d_step {
        request[r] = DONE;
        joined[r] = 0
    }
    goto next;

hang_up: /* requests under way have failed; readers may read on */
    atomic {
        hung_up[a] = true;
        to_broker[a]!END_OF_FILE, 0;
        do
        :: to_client[a]?_, _
        :: empty(to_client[a]) -> break
        od;
        r = 0;
        do
        :: r < 2 && request[r] != READING -> request[r] = DONE; r++
        :: r < 2 && request[r] == READING -> r++
        :: r == 2 -> break
        od;
        r = 0;
        a++
    }
    goto attach;

be_killed:
    atomic {
        may_be_killed = false;
        r = 0;
        do
        :: r < ATTACHMENTS ->
            if
            :: connected(r) -> hung_up[r] = true; to_broker[r]!END_OF_FILE, 0
            :: connected(r) -> hung_up[r] = true /* a forked child keeps the socket open */
            :: else
            fi;
            process_dead[r] = welcomed[r];
            do
            :: to_client[r]?_, _
            :: empty(to_client[r]) -> break
            od;
            r++
        :: r == ATTACHMENTS -> break
        od;
        r = 0;
        do
        :: r < REQUESTS && attachment_of(r) <= a -> request[r] = DONE; joined[r] = 0; r++
        :: r < REQUESTS && attachment_of(r) > a -> r++
        :: r == REQUESTS -> break
        od;
        r = 0;
        if
        :: a == 0 -> a++; goto attach
        :: else -> client_finished = true; goto gone
        fi
    }

finish:
    /* Readers of the connection that was lost leave. */
    do
    :: request[0] == READING -> unpin(0); request[0] = DONE
    :: request[1] == READING -> unpin(0); request[1] = DONE
    :: request[0] != READING && request[1] != READING -> break
    od;
    atomic {
        hung_up[a] = true;
        to_broker[a]!END_OF_FILE, 0;
        client_finished = true
    }
gone:
    skip
}

/* ---- the broker ---------------------------------------------------------------------------------------------- */

#define counted(a) (lane[a].known && lane[a].pins > 0)

inline send(said)
{
    atomic {
        if
        :: !hung_up[a] -> to_client[a]!said, r
        :: else /* nobody will read it */
        fi
    }
}

inline pin_for_client()
{
    lane[a].pins++
}

inline remove_lane()
{
    d_step {
        lane[a].revoked = true;
        lane[a].known = false
    }
}

#define IS_PARSING(a, r) (parsing[r] && attachment_of(r) == a)

#ifdef LANE_OUTLIVES_CONNECTION
#define deadline_passes(a) false
#else
#define deadline_passes(a) (welcomed[a] && !attached[a])
#endif

#define EVENTS(x)                                                                                                      \
    :: wants_attachment[x] && !welcomed[x] -> a = x; goto welcome                                                      \
    :: to_broker[x]?heard, r -> a = x; goto take                                                                       \
    :: lane[x].known && deadline_passes(x) -> a = x; goto deadline                                                     \
    :: lane[x].known && process_dead[x] -> a = x; goto process

#ifdef LANE_COUNTS_FROM_READY
#define READY(x)                                                                                                       \
    :: attached[x] && !lane[x].known -> lane[x].known = true; goto next
#else
#define READY(x)
#endif

#define WORKER(x)                                                                                                      \
    :: parsing[x] -> r = x; a = attachment_of(x); goto parsed

active proctype Broker()
{
    byte a, r, started;
    mtype heard;
    bool attached[ATTACHMENTS]; /* and connected, as far as the broker knows */
    bool parsing[REQUESTS], withdrawn[REQUESTS];

    run Client();

next:
    atomic {
        a = 0;
        r = 0;
        heard = OPEN
    }
    if
        EVENTS(0)
        EVENTS(1)
        READY(0)
        READY(1)
        WORKER(0)
        WORKER(1)
        WORKER(2)
    :: state == IN_FLIGHT -> state = ENDED; goto next
    :: state == ENDED && !counted(0) && !counted(1) -> goto retire
    :: client_finished && state == FREE && !lane[0].known && !lane[1].known && !parsing[0] && !parsing[1] &&
           !parsing[2] && empty(to_broker[0]) && empty(to_broker[1]) && (welcomed[1] || !wants_attachment[1]) ->
        goto stop
    fi;

welcome: /* known before the client can pin */
#ifndef LANE_COUNTS_FROM_READY
    lane[a].known = true;
#endif
    attached[a] = true;
    welcomed[a] = true;
    goto next;

take:
    if
    :: heard == OPEN ->
        if
        :: goto decide
        :: parsing[r] = true /* a large body: the worker parses it */
        fi
    :: heard == WITHDRAW -> /* take_withdraw: where the answer has been sent, the client takes the pin back */
#ifdef BROKER_UNPINS_TOO
        if
        :: parsing[r] -> skip
        :: !parsing[r] && lane[a].pins > 0 -> lane[a].pins--
        :: else
        fi;
#endif
#ifdef WITHDRAW_ALWAYS_ANSWERED
        withdrawn[r] = true;
        send(WITHDRAWN)
#else
        if
        :: parsing[r] ->
            withdrawn[r] = true;
#ifndef WITHDRAW_NOT_ANSWERED
            send(WITHDRAWN)
#endif
        :: !parsing[r]
        fi
#endif
    :: heard == END_OF_FILE -> /* lost_connection */
        attached[a] = false;
        if
        :: lane[a].known && lane[a].pins == 0 -> remove_lane()
        :: else /* its readers have until the deadline */
        fi
    fi;
    goto next;

parsed:
    atomic {
        parsing[r] = false;
#ifdef WORKER_FORGETS_WITHDRAW
        withdrawn[r] = false;
#endif
        heard = (withdrawn[r] || !attached[a] -> WITHDRAW : OPEN);
        withdrawn[r] = false
    }
    if
    :: heard == WITHDRAW -> goto next
    :: else
    fi;

decide:
    if
    :: state == FREE && started < STREAMS ->
        d_step {
            started++;
            stream = started;
            state = IN_FLIGHT
        }
    :: state == IN_FLIGHT
    :: state == ENDED || (state == FREE && started == STREAMS) -> send(REFUSED); goto next
    fi;
#ifdef ANSWER_BEFORE_PIN
    send(OPENED);
    pin_for_client();
#else
    pin_for_client();
    send(OPENED);
#endif
    goto next;

deadline: /* after stall_timeout, the process may live on */
    remove_lane();
    goto next;

process: /* its death is proved */
#ifdef LANE_OUTLIVES_PROCESS
    process_dead[a] = false; /* the event is lost */
#else
    attached[a] = false;
    atomic {
        do
        :: to_broker[a]?_, _
        :: empty(to_broker[a]) -> break
        od
    }
    remove_lane();
#endif
    goto next;

retire:
    atomic {
        assert(stream != 0);
        stream = 0;
        state = FREE
    }
    goto next;

stop:
    skip
}
