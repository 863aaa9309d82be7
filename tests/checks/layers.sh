#!/bin/sh
# Who may include whom: cli -> lib <- broker; within lib: base <- protocol <- templates, base <- segment; client
# knows all of them but templates.
set -eu
cd "$(dirname "$0")/../.."
broken=0

# may_include DIR PART...: quoted includes of files in DIR name these parts and no others.
may_include() {
    dir=$1
    shift
    parts=$(echo "$@" | tr ' ' '|')
    if grep -rnE --include='*.[ch]pp' --include='*.h' '^ *# *include +("|<gcoalesce/)' "$dir" |
        grep -vE "include +[\"<]($parts)/"; then
        echo "$dir may include $* only" >&2
        broken=1
    fi
}

# must_not_include DIR PATTERN WHY
must_not_include() {
    if grep -rnE --include='*.[ch]pp' --include='*.h' "^ *# *include +[\"<]($2)" "$1"; then
        echo "$1: $3" >&2
        broken=1
    fi
}

may_include lib/include gcoalesce
may_include lib/base base gcoalesce
may_include lib/protocol protocol base gcoalesce
may_include lib/templates templates protocol base gcoalesce
may_include lib/segment segment base gcoalesce
may_include lib/client client segment protocol base gcoalesce
may_include broker broker templates segment protocol base gcoalesce
may_include cli cli client templates segment protocol base gcoalesce
must_not_include lib/segment 'nlohmann/|curl/|boost/(asio|beast)' 'the segment knows neither JSON nor HTTP'
must_not_include lib 'curl/|boost/(asio|beast)' 'HTTP is the business of the broker and of the tools'
exit $broken
