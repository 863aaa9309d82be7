#!/bin/sh
# Checks the models of this directory with spin, exhaustively: as they stand they must hold, and with any one step taken
# out or swapped they must fail, in the way that is expected of them.
#
#   check.sh [MODEL...]     pin, open, wake, evict; default: all
#
# Prints a line a run. Exit status: 0 when every run went as expected, 1 when not, 77 without spin or a C compiler.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
cc=${CC:-cc}
if ! command -v spin >/dev/null || ! command -v "$cc" >/dev/null; then
    echo "SKIPPED: spin or cc is missing"
    exit 77
fi
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
trap 'exit 1' HUP INT TERM
failed=0

# search MODEL OPTIMISATION HASH_BITS DEFINE...: leaves what the verifier said in $dir/out.
search() {
    model=$1
    optimisation=$2
    bits=$3
    shift 3
    rm -f "$dir"/*
    cp "$here/$model.pml" "$dir/"
    (
        cd "$dir"
        spin "$@" -a "$model.pml" &&
            "$cc" "$optimisation" -w -DSAFETY -DMEMLIM=1800 -o pan pan.c &&
            ./pan -m100000 -w"$bits"
    ) >"$dir/out" 2>&1 || true
}

complain() {
    echo "FAILED: $1"
    sed 's/^/    /' "$dir/out"
    failed=1
}

# holds MODEL DEFINE...: no error, nothing cut short, and no step of the model that was never taken.
holds() {
    what=$*
    model=$1
    shift
    search "$model" -O2 24 "$@"
    if ! grep -q 'errors: 0$' "$dir/out"; then
        complain "$what: an error"
    elif grep -Eq 'not completed|depth too small|reached -DMEMLIM|out of memory' "$dir/out"; then
        complain "$what: not searched to the end"
    elif [ "$(grep -c '^unreached in' "$dir/out")" != "$(grep -c '(0 of [0-9]* states)' "$dir/out")" ]; then
        complain "$what: steps that were never taken"
    else
        echo "$what: holds ($(sed -n 's/^ *\([0-9]*\) states, stored.*/\1/p' "$dir/out") states)"
    fi
}

# breaks MODEL MUTATION ERROR [DEFINE...]: the verifier's first error contains ERROR.
breaks() {
    model=$1
    mutation=$2
    error=$3
    shift 3
    what="$model -D$mutation${*:+ $*}"
    search "$model" -O0 20 "-D$mutation" "$@"
    found=$(sed -n 's/^pan:1: \(.*\) (at depth.*/\1/p' "$dir/out")
    case $found in
    *"$error"*) echo "$what: breaks, as it must ($found)" ;;
    *) complain "$what: expected an error with '$error', found '${found:-none}'" ;;
    esac
    tried="$tried $mutation"
}

# all_tried MODEL PARAMETER...: no mutation in the model was forgotten here.
all_tried() {
    model=$1
    shift
    grep -E '^#(if|elif)' "$here/$model.pml" | grep -Eo '[A-Z][A-Z0-9_]+' | sort -u >"$dir/names"
    while read -r name; do
        case " $* $tried " in
        *" $name "*) ;;
        *)
            echo "FAILED: $model: mutation $name was not tried"
            failed=1
            ;;
        esac
    done <"$dir/names"
}

gone='slot[s].stream==stream'
stuck='invalid end state'

pin() {
    holds pin -DLANES=2
    holds pin -DLANES=1 -DREQUESTS=2
    holds pin -DLANES=1 -DJOINERS=1 -DSLOTS=2

    of_threads() { breaks pin "$@" -DLANES=1 -DREQUESTS=2; }
    of_threads NO_PIN_FENCE "$gone"
    of_threads NO_CLOSE_FENCE '!(dead)'
    of_threads NO_CLOSE '!(dead)'
    of_threads NO_PIN_COUNT_CHECK "$gone"
    of_threads RELAXED_UNPIN "$gone"
    of_threads NO_GENERATION_CHECK '!(slot[s].for_good)'
    of_threads NO_CLOSED_CHECK '!(slot[s].for_good)'
    of_threads NO_IDENTITY_CHECK '(slot[s].generation>>1)==(g>>1)'
    of_threads NO_KEY_CHECK 'slot[s].key==k'
    of_threads NO_JOINABLE_CHECK '!(dead)'
    of_threads FILL_LAST '!(dead)'
    of_threads PUBLISH_BEFORE_CLOSE '==failed_slot'
    breaks pin REOPEN_ALWAYS '!(slot[s].for_good)' -DLANES=1 -DJOINERS=1 -DSLOTS=2
    of_threads PIN_NOT_ATOMIC "$stuck"
    of_threads CHANGE_BEFORE_UNPIN "$stuck"
    of_threads NO_CHANGE_ON_UNDO "$stuck"
    of_threads CHANGES_LOADED_LAST "$stuck"
    of_threads SUBSCRIBERS_RESET_IN_RETIRE "$stuck"
    of_threads FOLD_JOINS_BEFORE_PINS '.joins[s]'
    all_tried pin LANES JOINERS SLOTS REQUESTS
}

open() {
    holds open

    breaks open LEAK_ON_WITHDRAW 'lane[a].pins==0'
    breaks open BROKER_UNPINS_TOO 'lane[a].pins'
    breaks open WITHDRAW_ALWAYS_ANSWERED 'request[r]=='
    breaks open WITHDRAW_NOT_ANSWERED "$stuck"
    breaks open WORKER_FORGETS_WITHDRAW 'lane[a].pins==0'
    breaks open ANSWER_BEFORE_PIN 'lane[a].pins>0'
    breaks open LANE_COUNTS_FROM_READY 'stream==joined[r]'
    breaks open LANE_OUTLIVES_CONNECTION "$stuck"
    breaks open LANE_OUTLIVES_PROCESS "$stuck"
    all_tried open
}

wake() {
    holds wake
    holds wake -DEVENT_LOOP

    breaks wake WAKE_WORD_LOADED_LAST 'asleep['
    breaks wake WAKE_STORED_BEFORE_COMMIT 'asleep['
    breaks wake FUTEX_WAKE_BEFORE_STORE 'asleep['
    breaks wake NO_WAKE_STORE 'asleep['
    breaks wake NO_WAKE_AT_END 'asleep['
    breaks wake WAKE_ONE 'asleep['
    breaks wake COMMIT_BEFORE_BYTES 'there>'
    breaks wake BYTES_LOADED_FIRST 'there>'
    breaks wake STATE_BEFORE_FIELDS 'fields'
    breaks wake FIELDS_LOADED_FIRST 'fields'
    breaks wake COUNT_BEFORE_STATE 'bytes[0]=='
    breaks wake ASK_AFTER_CHECK 'pins[' -DEVENT_LOOP
    breaks wake NO_PUBLISH_FENCE 'pins[' -DEVENT_LOOP
    breaks wake PINS_LOADED_FIRST 'pins[' -DEVENT_LOOP
    breaks wake DRAIN_AFTER_CHECK 'pins[' -DEVENT_LOOP
    breaks wake ONE_STREAM_CHECKED 'pins[' -DEVENT_LOOP
    breaks wake ASKED_CLEARED_AFTER_SEND 'pins[' -DEVENT_LOOP
    all_tried wake EVENT_LOOP
}

evict() {
    holds evict -DLANES=2
    holds evict -DLANES=1

    foreign='copy==stream'
    breaks evict NO_EVICTED_CHECK "$foreign"
    breaks evict NO_IDENTITY_CHECK "$foreign"
    breaks evict GENERATION_LOADED_FIRST "$foreign"
    breaks evict CHECK_BEFORE_COPY "$foreign"
    breaks evict NO_CHECK_AFTER_ENDING "$foreign"
    breaks evict FREE_BEFORE_EVICTED "$foreign"
    breaks evict FREE_BEFORE_GENERATION "$foreign"
    breaks evict EVICTED_CLEARED_IN_RETIRE "$foreign"
    breaks evict EVICT_BEFORE_CLOSE '!(lost)'
    breaks evict NO_MOVE_ON_JOIN '!(lost)' -DLANES=1
    all_tried evict LANES
}

[ $# -gt 0 ] || set -- pin open wake evict
for model in "$@"; do
    tried=''
    case $model in
    pin) pin ;;
    open) open ;;
    wake) wake ;;
    evict) evict ;;
    *)
        echo "check.sh: no model $model: pin, open, wake or evict" >&2
        exit 1
        ;;
    esac
done
exit "$failed"
