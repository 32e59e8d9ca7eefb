#!/usr/bin/env bash
# Installs what the integration tests talk to, where it is missing: mosquitto and its clients, and MQTT.js.
# What cannot be installed is named and left out; its tests then skip (or fail, with CI set: tests/integration/tools.py).
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PATH:/usr/local/sbin:/usr/sbin"
log=build/test-tools.log
mkdir -p build

has() { command -v "$1" >/dev/null 2>&1; }
missing() { echo "test-tools: $*" >&2; }

apt_install() { # package...
    has apt-get && [ "$(id -u)" = 0 ] || return 1
    export DEBIAN_FRONTEND=noninteractive
    # A policy that refuses service starts keeps the packages' own daemons off the machine's ports. One that exists is kept.
    local policy=/usr/sbin/policy-rc.d made_policy=no status=0
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod +x "$policy"
        made_policy=yes
    fi
    { apt-get update && apt-get install -y --no-install-recommends "$@"; } </dev/null >>"$log" 2>&1 || status=1
    [ "$made_policy" = no ] || rm -f "$policy"
    return $status
}

: >"$log"

if ! has mosquitto || ! has mosquitto_pub || ! has mosquitto_sub; then
    apt_install mosquitto mosquitto-clients ||
        missing "mosquitto is missing and could not be installed: install the packages mosquitto and mosquitto-clients"
fi

if ! has node || ! has npm; then
    apt_install nodejs npm || missing "Node.js is missing and could not be installed: install nodejs and npm"
fi

js=tests/integration/js
# npm writes this file last, so it dates the last complete installation.
if has node && has npm && [ ! "$js/node_modules/.package-lock.json" -nt "$js/package-lock.json" ]; then
    (cd "$js" && npm ci --no-audit --no-fund) </dev/null >>"$log" 2>&1 ||
        missing "MQTT.js could not be installed (see $log): run 'npm ci' in $js"
fi
