#!/bin/sh
# Installs the Debian packages that gcoalesce needs. No other file names them.
# usage: packaging/deps.sh [runtime|build|test|sdk|lint|bench|deb|container]...   (default: build)
#        packaging/deps.sh -n SET   says which they are, and installs nothing
# Quick when everything is there; else it needs root, and asks sudo for it.
set -eu

packages() {
    case $1 in
    runtime) echo ca-certificates libcurl4 libfmt9 libncursesw6 libre2-9 libsqlite3-0 libssl3 libsystemd0 libutf8proc2 ;;
    build)
        echo ca-certificates ccache cmake g++ ninja-build pkg-config scdoc \
            libboost1.74-dev libcli11-dev libcurl4-openssl-dev libexpected-dev libfmt-dev libncurses-dev libre2-dev \
            libsqlite3-dev libssl-dev libsystemd-dev libtomlplusplus-dev libutf8proc-dev nlohmann-json3-dev
        ;;
    test) # what the tests link, what they run, and what the checks among them run
        echo catch2 curl gcc nginx-light openssl spin clang-format shellcheck bash zsh fish mandoc \
            python3-prometheus-client ;;
    sdk) # real clients of the gateway; their tests are skipped without them
        echo chromium nodejs npm ;;
    lint) echo clang-tidy ;;
    bench) echo libhiredis-dev redis-server nginx-light varnish varnish-modules wrk ;;
    deb) echo build-essential debhelper dpkg-dev lintian ;;
    container) echo mmdebstrap systemd-container ;;
    *)
        echo "deps.sh: unknown set \"$1\", expected runtime, build, test, sdk, lint, bench, deb or container" >&2
        return 2
        ;;
    esac
}

if [ "${1-}" = -n ]; then
    packages "$2"
    exit
fi
wanted=
for set in "${@:-build}"; do
    wanted="$wanted $(packages "$set")"
done
# shellcheck disable=SC2086 # names, one a word
there=" $(dpkg-query -W -f '${Package} ${db:Status-Status}\n' $wanted 2>/dev/null | sed -n 's/ installed$//p' |
    tr '\n' ' ') "
missing=
for package in $wanted; do
    case $there in *" $package "*) ;; *) missing="$missing $package" ;; esac
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || {
        echo "deps.sh: as root: apt-get install --no-install-recommends$missing" >&2
        exit 1
    }
    exec sudo "$0" "$@"
fi

log=$(mktemp)
policy=/usr/sbin/policy-rc.d
made=
trap 'rm -f "$log" $made' EXIT
trap 'exit 1' HUP INT TERM
# Tests and benchmarks run nginx and redis-server themselves: installing them must start nothing on this machine.
if [ ! -e $policy ]; then
    made=$policy
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod 755 $policy
fi

export DEBIAN_FRONTEND=noninteractive
apt() { apt-get -qq -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300 "$@" </dev/null >"$log" 2>&1; }
echo "installing:$missing" >&2
apt update || echo "deps.sh: going on with the package lists that are here" >&2
# shellcheck disable=SC2086
apt install -y --no-install-recommends $missing || {
    cat "$log" >&2
    exit 1
}
