#!/usr/bin/env bash
# Applies the JobSet with kubectl, in the current context.
#
#   ./launch.sh             start
#   ./launch.sh --delete    stop, and take everything away
#
#   HAPMOE_KUBECTL  how to call kubectl (default: kubectl)
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

stop() {
    echo "launch.sh: $1" >&2
    exit 2
}

read -r -a kubectl <<<"${HAPMOE_KUBECTL:-kubectl}"
kubectl+=(--namespace training)
if [ "${1:-}" = --delete ]; then
    "${kubectl[@]}" delete --ignore-not-found -f "$here/jobset.yaml"
    exit 0
elif [ $# -gt 0 ]; then
    stop "unknown argument $1"
fi

if placeholder=$(grep -o -m 1 'CHANGE-ME[^[:space:]]*' "$here/jobset.yaml"); then
    stop "jobset.yaml still says $placeholder"
fi

"${kubectl[@]}" apply -f "$here/jobset.yaml"
