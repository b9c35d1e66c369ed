#!/usr/bin/env bash
# Starts the ranks of one node. Needs, from whoever starts it:
#   NODE_RANK    line of hosts.tsv that is this node (0, 1, ...)
#   MASTER_ADDR  host of node 0
#   MASTER_PORT  a free port there
# and optionally
#   HAPMOE_WORKDIR  the folder in which the training program runs
#   HAPMOE_DRY_RUN  1: print what each rank would be given, and stop
#   HAPMOE_CHECK    before training: hosts (default; are all nodes here, in order, with equal versions),
#                   full (also a collective in every group), only (full, without training), off
set -euo pipefail

stop() {
    echo "run_node.sh: $1" >&2
    exit 2
}

: "${NODE_RANK:?is not set: line of hosts.tsv that is this node}"
: "${MASTER_ADDR:?is not set: host of node 0}"
: "${MASTER_PORT:?is not set: a free port on node 0}"

# One line of hosts.tsv: node_rank, host, type, slots, stages. Its number of lines is the node count.
place() {
    here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
    nodes=$(tr -d '\r' <"$here/hosts.tsv" | awk '$1 ~ /^[0-9]+$/')
    nnodes=$(wc -l <<<"$nodes")
    read -r _ host type slots stages < <(awk -v n="$NODE_RANK" '$1 == n' <<<"$nodes")
}
place || stop "no node $NODE_RANK in hosts.tsv, which has $nnodes nodes"
[ -f "$here/env/$type.env" ] || stop "node $NODE_RANK of hosts.tsv is of type $type, and there is no env/$type.env"

# Exports of the script, then what this kind of device needs. The script may export names like ours: place again.
load() {
    set -a +u
    # shellcheck source=/dev/null
    . "$1"
    set +a -u
    place
}
load "$here/env/common.env"
load "$here/env/$type.env"

echo "run_node.sh: node $NODE_RANK ($host, $type): $slots ranks of stage $stages" >&2
cd "${HAPMOE_WORKDIR:-.}"

torchrun=$(command -v "${HAPMOE_TORCHRUN:-torchrun}") ||
    stop "no ${HAPMOE_TORCHRUN:-torchrun} on $host: give its full path as HAPMOE_TORCHRUN"
check=${HAPMOE_CHECK:-hosts}
if [ "${HAPMOE_DRY_RUN:-0}" = 1 ]; then check=off; fi
case $check in off | hosts | full | only) ;; *) stop "HAPMOE_CHECK is $check: off, hosts, full or only" ;; esac
if [ "$check" != off ]; then
    # With the Python of torchrun: its packages are those that the ranks see.
    python=$(dirname "$torchrun")/python3
    if [ ! -x "$python" ]; then python=python3; fi
    "$python" "$here/check_hosts.py" || exit $?
fi

# Static rendezvous: rank = ranks of the nodes before + local rank. The c10d rendezvous sorts nodes
# by host name and would put stages on the wrong devices.
start=("$torchrun"
    --rdzv-backend static
    --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT"
    --nnodes "$nnodes"
    --node-rank "$NODE_RANK"
    --nproc-per-node "$slots")
if [ "$check" = full ] || [ "$check" = only ]; then
    "${start[@]}" "$here/check_ranks.py" || exit $?
    if [ "$check" = only ]; then exit 0; fi
    "$python" "$here/check_hosts.py" --again || exit $? # all have left, before anybody meets there again
fi
exec "${start[@]}" "$here/entry.py"
