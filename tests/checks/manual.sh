#!/bin/bash
# The manual says what the programs and the header say, its pages are well-formed, and its examples work.
# usage: manual.sh BUILD_DIRECTORY
set -euo pipefail
build=$(cd "$1" && pwd)
cd "$(dirname "$0")/../.."
command -v scdoc >/dev/null && command -v mandoc >/dev/null || exit 77
dir=$(mktemp -d)
export GCOALESCE_RUNTIME_DIR=$dir/run GCOALESCE_INSTANCE=manual-$$
trap 'rm -rf "$dir" "/dev/shm/gcoalesce-$(id -u)-$GCOALESCE_INSTANCE-"*' EXIT
broken=0
complain() {
    echo "$1" >&2
    broken=1
}

# ---- well-formed ----

for source in man/*.scd; do
    page=$dir/$(basename "$source" .scd)
    scdoc <"$source" | awk -f man/tidy.awk >"$page"
    mandoc -Tlint -W warning "$page" || complain "$source: see above"
done

# ---- options: name, default and variable of each, and none besides ----

"$build/broker/gcoalesced" --help >"$dir/help"
# "  --memory SIZE=48.0MiB (Env:GCOALESCE_MEMORY)" becomes "memory 48.0MiB GCOALESCE_MEMORY"
sed -nE 's/^  --([a-z-]+) [A-Z]+(:[^=(]*)?(=([^ ]+))? \(Env:([A-Z_]+)\).*/\1 \4 \5/p' "$dir/help" |
    awk 'NF == 2 { print $1, "none", $2; next } { print }' | sort >"$dir/options"
awk '/^\*[a-z-]+\* \(.*default .*\)$/ { split($1, name, "*"); sub(/.*default /, ""); sub(/\)$/, ""); value = $0
        getline; match($0, /GCOALESCE_[A-Z_]+/); print name[2], value, substr($0, RSTART, RLENGTH) }' \
    man/gcoalesced.conf.5.scd | sort >"$dir/told"
[ "$(wc -l <"$dir/options")" -ge 30 ] || complain 'gcoalesced --help: its options are not understood'
diff "$dir/options" "$dir/told" >&2 || complain 'gcoalesced.conf(5) (>) and gcoalesced --help (<) differ'
while read -r name _; do
    grep -q -- "--$name " "$dir/help" || complain "$name has no flag"
done <"$dir/told"

# ---- exit codes, functions ----

while read -r code; do
    grep -qE "^(\[\[|\|\[) \*$code\*\$" man/gcoalesced.8.scd || complain "gcoalesced(8) does not tell exit code $code"
done < <(sed -nE 's/^ +exit_[a-z_]+ = ([0-9]+).*/\1/p' broker/exit_codes.hpp)
while read -r function; do
    grep -qE "\*$function\*\(" man/libgcoalesce.3.scd || complain "libgcoalesce(3) does not tell of $function"
done < <(grep -oE '\bgcoalesce_[a-z_]+\(' lib/include/gcoalesce/gcoalesce.h | tr -d '(' | sort -u)

# ---- memory: what the tables take, and 256 KiB besides, is what the broker wants at least ----

for streams in 1 100 4096 65535; do
    needed=$({ "$build/broker/gcoalesced" --streams $streams --memory 10 2>&1 || true; } |
        sed -nE 's/.*at least ([0-9]+) bytes.*/\1/p')
    index=1
    while [ $index -lt $((4 * streams)) ]; do index=$((2 * index)); done
    told=$((832 * streams + 16 * index))
    others=$((${needed:-0} - 256 * 1024 - told))
    if [ $others -le 0 ] || [ $others -ge $((620 * 1024)) ]; then
        complain "the formula of gcoalesced(8) does not hold for $streams streams: the others take $others bytes"
    fi
done

# ---- examples ----

# example PAGE: the code block of its section EXAMPLE or EXAMPLES.
example() {
    awk '!inside && /^# / { here = /^# EXAMPLES?$/ } here && /^```$/ { inside = !inside; next } here && inside' "$1"
}

# The file is read whole before the memory turns out to be too small.
example man/gcoalesced.conf.5.scd >"$dir/gcoalesced.conf"
mkdir "$dir/templates"
status=0
"$build/broker/gcoalesced" --config "$dir/gcoalesced.conf" --templates "$dir/templates" --memory 10 2>"$dir/err" || status=$?
if [ $status -ne 2 ] || ! grep -q ' 8192 streams need a memory of at least ' "$dir/err"; then
    complain "the example of gcoalesced.conf(5) is not read: $(cat "$dir/err")"
fi

PATH=$build/cli:$build/broker:$PATH
runtime_dir=$GCOALESCE_RUNTIME_DIR
{
    echo 'set -eu'
    # A port that is free, and no question before its broker is there.
    example man/gcoalesced.8.scd | sed -e "s|\$(mktemp -d)|$runtime_dir|" -e 's/--port 18080/--port 0 >sim.url/' \
        -e "s|^gcoalesced --upstream [^ ]*|until [ -s sim.url ]; do :; done; gcoalesced --upstream \$(sed 's/.* //' sim.url)|" \
        -e 's/^gcoalesce ask/until gcoalesce notify status >notify 2>\&1; do sleep 0.05; done; gcoalesce ask/'
    echo "trap 'kill \$(jobs -p); wait' EXIT"
    # The page's stream is not there: the one that was just asked for. Each command's output in a file of its own.
    # shellcheck disable=SC2016,SC2028 # the other shell's variables, and sed's \1
    echo 'stream=$(gcoalesce keys --json | sed -E "s/.*\"key\":\"([0-9a-f]{8}).*/\1/"); seq 2 >prompts'
    # shellcheck disable=SC2016
    example man/gcoalesce.1.scd | sed -E -e 's/dump 9f3c/dump $stream/' -e 's/^gcoalesce ([a-z]+).*/& >\1.out/'
    # shellcheck disable=SC2016 # the other shell's variables
    echo 'gcc -std=c11 -Wall -Wextra -Werror ../program.c -I"$HEADERS" -L"$LIBRARY" -lgcoalesce -o program'
    # shellcheck disable=SC2016
    echo 'LD_LIBRARY_PATH=$LIBRARY ./program >answer'
} >"$dir/example.sh"
example man/libgcoalesce.3.scd >"$dir/program.c"
mkdir "$dir/here"
if ! (cd "$dir/here" && HEADERS=$OLDPWD/lib/include LIBRARY=$build/lib timeout 60 bash ../example.sh >out 2>err); then
    complain "the examples do not run: $(cat "$dir/here/err")"
fi
grep -q 'started' "$dir/here/err" || complain 'the question of gcoalesced(8) was not answered'
grep -q 'TEMPLATE .*STARTED' "$dir/here/out" || complain 'the example of gcoalesced(8) shows no stats'
grep -q '"candidates"' "$dir/here/answer" || complain 'the program of libgcoalesce(3) read no answer'
grep -q '^KEY .*SUBSCRIBERS' "$dir/here/keys.out" || complain 'gcoalesce(1): keys lists nothing'
grep -q ' ended  .* complete STOP' "$dir/here/log.out" || complain 'gcoalesce(1): log tells of no ending'
grep -q 'Why is the sky blue?' "$dir/here/dump.out" || complain 'gcoalesce(1): dump shows no answer'
grep -q '^now        would start a call' "$dir/here/key.out" || complain 'gcoalesce(1): key tells nothing'
[ "$(grep -c '"text":"' "$dir/here/ask.out")" = 2 ] || complain 'gcoalesce(1): two prompts have not two answers'
grep -q '^open for' "$dir/here/notify.out" || complain 'gcoalesce(1): the window is not open'
grep -q '^gcoalesce_template_requests_total{.*"started"} 3$' "$dir/here/stats.out" || complain 'gcoalesce(1): stats counts otherwise'

# ---- gcoalesce-template(5): its file and its commands, before an upstream that answers as its schema demands ----

# block N PAGE: the Nth code block of the page.
block() {
    awk -v n="$1" '/^```$/ { inside = !inside; count += inside; next } inside && count == n' "$2"
}
mkdir "$dir/match"
block 1 man/gcoalesce-template.5.scd | sed "s/www-data/$(id -gn)/" >"$dir/match/match-report.json"
printf 'data: {"candidates":[{"content":{"parts":[{"text":"{\\"headline\\":\\"1:0\\",\\"text\\":\\"Goal.\\"}"}]},"finishReason":"STOP"}]}\r\n\r\n' \
    >"$dir/report.sse"
{
    echo 'set -eu'
    echo 'gcoalesce sim --replay ../report.sse >sim.url &'
    echo 'until [ -s sim.url ]; do :; done'
    # shellcheck disable=SC2016
    echo 'gcoalesced --upstream $(sed "s/.* //" sim.url) --memory 16MiB --templates . & until gcoalesce notify on >notify 2>&1; do sleep 0.05; done'
    echo "trap 'kill \$(jobs -p); wait' EXIT"
    block 2 man/gcoalesce-template.5.scd
} >"$dir/match.sh"
if ! (cd "$dir/match" && timeout 60 bash ../match.sh >../match.out 2>../match.err); then
    complain "the example of gcoalesce-template(5) does not run: $(cat "$dir/match.err")"
fi
grep -q '^match-report .* language? match words?$' "$dir/match.out" || complain 'gcoalesce-template(5): the file is not taken'
grep -q '"headline":"1:0"' "$dir/match.out" || complain 'gcoalesce-template(5): no report came'
exit $broken
