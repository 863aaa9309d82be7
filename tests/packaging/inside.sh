#!/bin/bash
# What is true of an installed gcoalesce, in the order in which an operator meets it. Runs as root in a container that
# systemd has booted, twice: the second time after a reboot. run.sh starts it; its exit status is the container's.
# Every command of README's section on the service is run by `readme`, verbatim; one that is not fails the test.
set -euo pipefail
cd /srv/gcoalesce # with build/deb, the repository that packaging/build-deb.sh has made, and README's commands
export LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive HOME=/root

# A host may let systemd boot in a container, and yet not let it wall services off as the units want it.
systemd-run -q --wait -p ProtectSystem=strict -p PrivateTmp=yes -p PrivateDevices=yes -p ProtectProc=invisible \
    -p ProtectKernelTunables=yes -p RestrictNamespaces=yes true || {
    echo "SKIPPED: systemd cannot wall services off in a container here"
    exit 0
}

unit=gcoalesced.service
# A section begins. systemd allows ten starts a minute (StartLimitBurst=), which this test would use up.
say() {
    printf '%s\n' "-- $*"
    systemctl reset-failed gcoalesced.service gcoalesced.socket 2>/dev/null || true
}
fail() {
    printf 'FAILED: %s\n' "$*"
    systemctl status --no-pager -l gcoalesced.service gcoalesced.socket gcoalesce-gateway.service || true
    journalctl --no-pager -n 40 -u gcoalesce-gateway || true
    journalctl --no-pager -n 60 || true
    exit 1
}
# holds COMMAND...: within the time of a watchdog.
holds() {
    for _ in $(seq 600); do
        if "$@" >/dev/null 2>&1; then return 0; fi
        sleep 0.1
    done
    fail "never came true: $*"
}
# has WORDS TEXT
has() { [[ $2 == *"$1"* ]] || fail "expected \"$1\" in: $2"; }
# code EXPECTED COMMAND...: its exit status; its output is in $out.
code() {
    local expected=$1 got=0
    shift
    out=$("$@" 2>&1 </dev/null) || got=$?
    [ "$got" -eq "$expected" ] || fail "expected exit status $expected, found $got: $*: $out"
}
readme() {
    grep -Fxq -- "$1" readme-commands || fail "README does not say: $1"
    printf '%s\n' "$1" >>readme-ran
    eval "$1"
}
as() { runuser -u "$1" -- "${@:2}"; }
ask_once() { as alice timeout 90 gcoalesce ask --timeout 60s "$@" </dev/null; }
# Again while no broker answers: it may be starting, and machines are slow.
ask() {
    local got tries
    for tries in $(seq 20); do
        got=0
        ask_once "$@" || got=$?
        [ $got -eq 3 ] && [ "$tries" -lt 20 ] || return $got
    done
}
property() { systemctl show -P "$1" "${2:-$unit}"; }
status_says() { [[ $(property StatusText "${2:-$unit}") == *"$1"* ]]; }
main_pid() { property MainPID; }
another_pid() { [ "$(main_pid)" != "$1" ] && [ "$(main_pid)" != 0 ] && [ "$(property ActiveState)" = active ]; }
segment_there() { compgen -G "/dev/shm/gcoalesce-$(id -u _gcoalesce)-default-*"; }

# A finished stream that must be there after whatever happens.
remember() {
    kept_text=$(ask "to be kept: $1")
    [ -n "$kept_text" ] || fail "no answer to keep"
    for kept_id in $(gcoalesce keys --json | grep -o '"stream_id":"[0-9a-f]*"' | cut -d '"' -f 4); do
        [ "$(ask --resume "$kept_id.0" 2>/dev/null)" != "$kept_text" ] || return 0
    done
    fail "the answer is no stream of $(gcoalesce keys --json)"
}
is_kept() {
    local text
    text=$(ask --resume "$kept_id.0") || fail "the stream $kept_id is lost"
    [ "$text" = "$kept_text" ] || fail "the stream $kept_id was \"$kept_text\", is \"$text\""
}
# Ten users who go on asking until `calm`. Each must get all of it or be told that it broke off: nobody hangs.
storm() {
    rm -f /tmp/calm /tmp/storm.* /tmp/trouble.*
    storms=()
    for user in $(seq 10); do
        (
            number=0
            until [ -e /tmp/calm ]; do
                got=0
                number=$((number + 1))
                ask_once "storm $user $number [sim gap=20ms events=15]" >/dev/null 2>>"/tmp/trouble.$user" || got=$?
                echo "$got" >>"/tmp/storm.$user"
            done
        ) &
        storms+=($!)
    done
    holds test -s /tmp/storm.10
}
calm() {
    touch /tmp/calm
    wait "${storms[@]}"
    # 3: no broker answered within a second; 5: it was shutting down; 8: what had begun broke off.
    if grep -hvxE '0|3|5|8' /tmp/storm.*; then fail "during $1: $(sort -u /tmp/trouble.* | head -n 5)"; fi
    say "during $1: $(cat /tmp/storm.* | sort | uniq -c | awk '{printf "%s times exit %s; ", $1, $2}')"
}

# ---- after the reboot ----------------------------------------------------------------------------------------------

if [ -e before-reboot ]; then
    read -r kept_id kept_text <<<"$(cat before-reboot)"
    systemd-run -q --unit=sim gcoalesce sim --port 8080 --require-key
    say "reboot: the broker comes up by itself, with its answers"
    holds systemctl is-active gcoalesced.service
    holds systemctl is-active gcoalesced@second.service
    holds systemctl is-active gcoalesce-gateway.service
    is_kept
    ask "after the reboot" >/dev/null

    say "removal"
    readme "systemctl disable --now gcoalesced@second"
    kill -KILL "$(main_pid)" # leaves its segment
    systemctl stop gcoalesced.socket gcoalesced.service
    readme "apt-get purge -y gcoalesced gcoalesce"
    if systemctl is-active -q gcoalesce-gateway; then fail "the gateway runs on without its package"; fi
    systemctl daemon-reload
    left=$(find / -xdev \( -path /proc -o -path /sys -o -path /srv/gcoalesce -o -path /usr/share/doc \) -prune -o \
        -iname '*gcoalesce*' -print | grep -vE '^/(root|tmp|var/log/journal|var/cache/apt|var/lib/apt)/' || true)
    left+=$(find /dev/shm /run -name '*gcoalesce*' ! -path '/run/user/*' ! -path '/run/log/*' 2>/dev/null || true)
    [[ $left =~ ^[[:space:]]*(/etc/apt/sources.list.d/gcoalesce.list)?[[:space:]]*$ ]] || fail "left behind: $left"
    getent passwd _gcoalesce >/dev/null || fail "Debian keeps users"
    readme "rm /etc/apt/sources.list.d/gcoalesce.list"

    missing=$(sort readme-commands | comm -23 - <(sort -u readme-ran))
    [ -z "$missing" ] || fail "README has commands that nobody has tried: $missing"
    say "all is well"
    exit 0
fi

# ---- install, and the first prompt ---------------------------------------------------------------------------------

say "install"
rm -f /etc/apt/sources.list /etc/apt/sources.list.d/* # there is no network
# shellcheck disable=SC2016 # README's reader expands it
readme 'echo "deb [trusted=yes] file:$PWD/build/deb ./" >/etc/apt/sources.list.d/gcoalesce.list'
readme "apt-get update && apt-get install -y gcoalesced"
dpkg --audit
systemctl is-active $unit gcoalesced.socket >/dev/null || fail "it was not started"

say "units: well-formed, and exposed to little"
for each in gcoalesced.service gcoalesced@.service gcoalesced.socket gcoalesce-gateway.service; do
    systemd-analyze verify --man=no "/lib/systemd/system/$each" || fail "systemd-analyze verify $each"
done
for each in gcoalesced.service gcoalesced@.service gcoalesce-gateway.service; do
    systemd-analyze security --no-pager --offline=true --threshold=15 "/lib/systemd/system/$each" | tail -n 1 ||
        fail "systemd-analyze security $each: above 1.5"
done

say "no API key: serves, says so, refuses requests with its own exit status"
readme "systemctl status --no-pager gcoalesced"
status_says "NO API KEY" || fail "StatusText: $(property StatusText)"
useradd -m alice
useradd -m bob
useradd -r app
readme "usermod -a -G gcoalesce alice"
code 4 ask "without a key"
has "API key" "$out"

say "the key as a credential"
systemd-run -q --unit=sim gcoalesce sim --port 8080 --require-key
holds bash -c 'exec 3<>/dev/tcp/127.0.0.1/8080'
echo a-key-for-the-sim >gemini.key
echo 'upstream = "http://127.0.0.1:8080"' >>/etc/gcoalesce/gcoalesced.conf
readme "install -D -m 600 gemini.key /etc/credstore/gemini-api-key"
readme "systemctl restart gcoalesced"
holds status_says "window closed"
status_says "NO API KEY" && fail "StatusText: $(property StatusText)"

say "a user of the group pipes prompts"
as alice bash -c "cd; $(grep -Fx 'echo "Why is the sky blue?" | gcoalesce ask' readme-commands)" >/tmp/answer
echo 'echo "Why is the sky blue?" | gcoalesce ask' >>readme-ran
[ -s /tmp/answer ] || fail "no answer"
printf 'one\ntwo\nthree\n' | as alice gcoalesce ask --lines >/tmp/answers
[ "$(wc -l </tmp/answers)" -eq 3 ] || fail "three prompts, not three answers"

say "a user outside is told what is missing"
code 1 as bob gcoalesce ask "from outside"
has "be a member of the broker's group (usually gcoalesce) and log in again" "$out"

say "an app's unit with the group"
cat >/etc/systemd/system/app.service <<'UNIT'
[Service]
Type=oneshot
User=app
SupplementaryGroups=gcoalesce
ExecStart=/usr/bin/gcoalesce ask from-an-app
UNIT
systemctl daemon-reload
systemctl start app.service || fail "the app is not served"
readme "usermod -a -G gcoalesce app"

say "status line, and the journal's fields"
readme "gcoalesce notify on --for 60s"
ask_once "held [sim events=3 hold-after=1]" >/dev/null &
held=$!
holds status_says "1 in flight; "
holds status_says "window open for "
all='1 in flight; [0-9]+ calls for [0-9]+ requests, [0-9.]+ % coalesced; window open for [0-9]+ s'
property StatusText | grep -qxE "$all" || fail "StatusText: $(property StatusText)"
curl -fsS -X POST http://127.0.0.1:8080/sim/release >/dev/null
wait "$held" || fail "the held answer did not come whole"
gcoalesce notify off
code 1 ask "to be refused [sim status=400]"
has "NO API KEY" "$(readme "journalctl --no-pager -u gcoalesced -p warning")"
has "notify on for all templates" "$(readme "journalctl --no-pager -u gcoalesced GCOALESCE_COMMAND=notify")"
# logged FIELD=VALUE...: a record has them all.
logged() { [ -n "$(journalctl -q --no-pager -u gcoalesced "$@" 2>/dev/null)" ] || fail "none in the journal: $*"; }
logged GCOALESCE_COMMAND=notify GCOALESCE_UID=0 GCOALESCE_INSTANCE=default PRIORITY=6
logged GCOALESCE_CODE=upstream_error GCOALESCE_TEMPLATE=default GCOALESCE_HTTP_STATUS=400 PRIORITY=4

say "templates, and reload"
readme "cp /etc/gcoalesce/templates.d/weather.json.example /etc/gcoalesce/templates.d/weather.json"
readme "gcoalesce templates check /etc/gcoalesce/templates.d"
readme "systemctl reload gcoalesced"
ask -t weather --var city=Tokyo >/dev/null
pid=$(main_pid)
echo '{"model": 7' >/etc/gcoalesce/templates.d/broken.json
systemctl reload gcoalesced 2>/dev/null && fail "a reload that was refused succeeded"
ask -t weather --var city=Oslo >/dev/null || fail "a refused reload took the templates away"
rm /etc/gcoalesce/templates.d/broken.json
systemctl reload gcoalesced
[ "$(main_pid)" = "$pid" ] || fail "a reload started another broker"

say "the key file, and reload"
cp /etc/gcoalesce/gcoalesced.conf /tmp/before-key-file
mv /etc/credstore/gemini-api-key /tmp/credential
echo a-new-key >/tmp/accepted
systemd-run -q --unit=choosy gcoalesce sim --port 8081 --accept-key /tmp/accepted
holds bash -c 'exec 3<>/dev/tcp/127.0.0.1/8081'
install -m 400 -o _gcoalesce <(echo an-old-key) /etc/gcoalesce/gemini.key
sed -i 's|^upstream = .*|upstream = "http://127.0.0.1:8081"\napi-key-file = "/etc/gcoalesce/gemini.key"|' \
    /etc/gcoalesce/gcoalesced.conf
systemctl restart gcoalesced
code 4 ask "with an old key"
pid=$(main_pid)
install -m 400 -o _gcoalesce /tmp/accepted /etc/gcoalesce/gemini.key
systemctl reload gcoalesced
ask "with a new key" >/dev/null
[ "$(main_pid)" = "$pid" ] || fail "a reload started another broker"
systemctl stop choosy
mv /tmp/credential /etc/credstore/gemini-api-key
cp /tmp/before-key-file /etc/gcoalesce/gcoalesced.conf
systemctl restart gcoalesced

say "socket activation"
systemctl stop gcoalesced.service 2>/dev/null
[ "$(property ActiveState)" = inactive ] || fail "it was not stopped"
ask "wakes it" >/dev/null
systemctl is-active $unit >/dev/null || fail "the socket started nothing"
systemctl stop gcoalesced.socket gcoalesced
code 3 ask_once "of nobody"
systemctl start gcoalesced.socket # as after a boot: no broker has ever listened at this one
ask "wakes it, too" >/dev/null

say "the HTTP gateway"
gateway_pid() { property MainPID gcoalesce-gateway.service; }
through_gateway() {
    holds curl -fsS http://127.0.0.1:8790/readyz
    has '"text"' "$(readme "$(grep ^curl readme-commands)")"
}
systemctl is-enabled -q gcoalesce-gateway && fail "installing turned the gateway on"
systemctl is-active -q gcoalesce-gateway && fail "installing started the gateway"
readme "systemctl enable --now gcoalesce-gateway"
through_gateway
pid=$(main_pid) gateway=$(gateway_pid)
remember "when a gateway looks on"
kill -KILL "$pid"
holds another_pid "$pid"
through_gateway
is_kept
systemctl restart gcoalesced
through_gateway
[ "$(gateway_pid)" = "$gateway" ] || fail "a broker's end took the gateway with it"
systemctl stop gcoalesce-gateway
segment_there >/dev/null || fail "the gateway's end took the segment away"
is_kept
# Its options: where it listens, tokens as a credential, flags.
printf %s%s "alice:" "$(printf %s secret | sha256sum | cut -d ' ' -f 1)" >/etc/credstore/gcoalesce-gateway-tokens
cp /etc/gcoalesce/gateway /tmp/before-options
sed -i -e 's/^#GCOALESCE_LISTEN=.*/GCOALESCE_LISTEN=0.0.0.0:8791/' -e 's/^#\(GCOALESCE_TOKEN_FILE=\)/\1/' \
    -e 's/^#\(GCOALESCE_SERVE_OPTIONS=\)/\1/' /etc/gcoalesce/gateway
systemctl start gcoalesce-gateway
holds curl -fsS http://127.0.0.1:8791/readyz
http() { curl -s -o /dev/null -w '%{http_code}' "$@" http://127.0.0.1:8791/v1beta/models/gemini-2.5-flash; }
[ "$(http)" = 401 ] || fail "without a token: $(http)"
[ "$(http -H 'Authorization: Bearer secret')" = 200 ] || fail "with a token: $(http -H 'Authorization: Bearer secret')"
head=$(curl -s -D - -o /dev/null -X OPTIONS -H 'Origin: https://app.example' \
    -H 'Access-Control-Request-Method: POST' http://127.0.0.1:8791/v1/streams)
has "access-control-allow-origin: https://app.example" "${head,,}"
rm /etc/credstore/gcoalesce-gateway-tokens
mv /tmp/before-options /etc/gcoalesce/gateway
systemctl restart gcoalesce-gateway
through_gateway

# ---- what happens to brokers ---------------------------------------------------------------------------------------

say "SIGKILL"
remember "when it is killed"
storm
pid=$(main_pid)
kill -KILL "$pid"
holds another_pid "$pid"
calm SIGKILL
is_kept
through_gateway

say "a broker that hangs"
remember "when it hangs"
storm
pid=$(main_pid)
kill -STOP "$pid"
holds another_pid "$pid"
calm "the watchdog"
is_kept
through_gateway

say "restart"
remember "when it is restarted"
storm
systemctl restart gcoalesced
calm restart
is_kept
through_gateway

say "upgrade"
rm -r build/deb && mv build/deb.next build/deb
pid=$(main_pid) gateway=$(gateway_pid)
storm
readme "apt-get update && apt-get install -y gcoalesced gcoalesce"
another_pid "$pid" || fail "an upgrade left the old broker running"
[ "$(gateway_pid)" != "$gateway" ] || fail "an upgrade left the old gateway running"
calm upgrade
is_kept
through_gateway
has "-2" "$(dpkg-query -W gcoalesced)"

say "logout of a user"
as alice touch /dev/shm/of-alice
systemd-run -q --wait -p User=alice -p PAMName=login gcoalesce ask "in a session" || fail "no session"
holds test ! -e /dev/shm/of-alice # by logind, RemoveIPC= in logind.conf(5), some seconds after the last session
segment_there >/dev/null || fail "a logout took the segment away"
is_kept

say "a second instance"
readme "cp /etc/gcoalesce/gcoalesced.conf /etc/gcoalesce/second.conf"
readme "systemctl enable --now gcoalesced@second"
as alice gcoalesce --instance second ask "of the second" >/dev/null
readme "gcoalesce --instance second stats" >/dev/null
systemctl is-active $unit >/dev/null || fail "the first one is gone"
systemctl restart gcoalesced
holds systemctl is-active gcoalesced@second.service

say "a proxy"
cp /etc/gcoalesce/gcoalesced.conf /tmp/before-proxy
readme "echo 'proxy = \"http://proxy.example:3128\"' >>/etc/gcoalesce/gcoalesced.conf"
systemctl restart gcoalesced
code 1 ask "by way of a proxy that is not there"
has "proxy" "${out,,}"
cp /tmp/before-proxy /etc/gcoalesce/gcoalesced.conf
systemctl restart gcoalesced

remember "over a reboot"
echo "$kept_id $kept_text" >before-reboot
say "going down"
