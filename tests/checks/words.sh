#!/bin/sh
# Words that must not stand in the code, comments apart, and why.
set -eu
cd "$(dirname "$0")/../.."
export LC_ALL=C
broken=0
code=$(find lib broker cli \( -name '*.[ch]pp' -o -name '*.h' \) -exec \
    awk '{ gsub(/\/\/.*|\/\*.*\*\//, ""); print FILENAME ":" FNR ":" $0 }' {} +)

# ban DIRS PATTERN WHY
ban() {
    if printf "%s\n" "$code" | grep -aE "^($1)/" | grep -aE ":[0-9]+:.*($2)"; then
        echo "$3" >&2
        broken=1
    fi
}

ban 'lib|broker|cli' 'FUTEX_PRIVATE_FLAG|FUTEX_[A-Z_]+_PRIVATE' 'a private futex never wakes another process'
ban 'lib/segment' '\.notify_(one|all)\(' 'std::atomic::wait and notify work within one process only'
ban 'lib|broker|cli' 'atomic_(thread|signal)_fence' 'order stands on the accesses, where ThreadSanitizer sees it'
ban 'lib|broker|cli' 'interprocess/sync/interprocess_|managed_shared_memory|PTHREAD_PROCESS_SHARED' \
    'no lock in shared memory'
ban 'lib/(client|protocol|segment|templates)' '\<(printf|puts|abort|_?exit|quick_exit|terminate)\(|std::(cout|cerr|clog)' \
    'a library never prints and never ends its process'
exit $broken
