#!/usr/bin/env bash
# What a container does: entry.sh ROLE [ARGS]. Each role is one process, except gpu-host and demo, which are several.
set -euo pipefail
cd "$(dirname "$0")/.."

role="${1:-}"
shift || true

# Engines must be reachable from the router's container: the address of this one, unless it was given.
own_address() {
    hostname -i 2>/dev/null | tr ' ' '\n' | grep -v -e '^127\.' -e ':' | head -n 1 || true
}

# Engines live in this container and would be cut off with it. So end them first: they leave the routes, finish what they
# can within the limit, and are started again when the container is.
end_gpu_host() {
    echo "entry    | Ending the engines of this host."
    python manage.py stop_engines --all --limit "${SARDEENZ_STOP_LIMIT_S:-30}" || true
    kill -TERM "$launcher" 2>/dev/null || true
}

case "$role" in
web | router | control | beat | host | sampler)
    exec python -m sardeenz_site.run --only "$role"
    ;;
gpu-host)
    if [ -z "${SARDEENZ_HOST_ADDRESS:-}" ]; then
        SARDEENZ_HOST_ADDRESS="$(own_address)"
        export SARDEENZ_HOST_ADDRESS="${SARDEENZ_HOST_ADDRESS:-127.0.0.1}"
    fi
    python -m sardeenz_site.run --role host &
    launcher=$!
    trap end_gpu_host TERM INT
    # The first wait returns when the trap has run; the second waits for the launcher's own end.
    wait "$launcher" || code=$?
    trap '' TERM INT
    if kill -0 "$launcher" 2>/dev/null; then
        code=0
        wait "$launcher" || code=$?
    fi
    exit "${code:-0}"
    ;;
demo)
    exec python -m sardeenz_site.run
    ;;
prepare)
    exec python manage.py prepare "$@"
    ;;
manage)
    exec python manage.py "$@"
    ;;
*)
    echo "entry.sh: '$role' is none of web, router, control, beat, host, sampler, gpu-host, demo, prepare, manage." >&2
    exit 64
    ;;
esac
