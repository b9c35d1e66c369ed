#!/usr/bin/env bash
# Starts the plan on all hosts of hosts.tsv by ssh, and stops all when one fails or at Ctrl-C.
# This folder and the training program must be at the same paths on every host.
#
#   ./launch.sh             start
#   ./launch.sh --dry-run   print what each rank would be given, on this machine, starting nothing
#   ./launch.sh --check     look at all hosts and let every group say something, without training
#
#   HAPMOE_WORKDIR  folder in which the training program runs (default: where you are now)
#   HAPMOE_MASTER_ADDR, MASTER_PORT
#                   where the ranks meet (default: the first host of hosts.tsv, port 29500)
#   HAPMOE_SSH      how to reach a host (default: ssh -o BatchMode=yes)
#   HAPMOE_TORCHRUN full path of torchrun, where ssh does not find it
#   HAPMOE_CHECK    what is checked before training (run_node.sh says what there is)
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

stop() {
    echo "launch.sh: $1" >&2
    exit 2
}

dry_run=0
if [ "${1:-}" = --dry-run ]; then
    dry_run=1
elif [ "${1:-}" = --check ]; then
    export HAPMOE_CHECK=only
elif [ $# -gt 0 ]; then
    stop "unknown argument $1"
fi

if [ "$dry_run" = 0 ] && placeholder=$(grep -o -m 1 'CHANGE-ME[^[:space:]]*' "$here/hosts.tsv"); then
    stop "hosts.tsv still says $placeholder: write the host names there"
fi

# Lines of hosts.tsv: node_rank, host, type, slots, stages; comments and other systems' line ends do no harm.
nodes() { tr -d '\r' <"$here/hosts.tsv" | awk '$1 ~ /^[0-9]+$/'; }
problem=$(nodes | awk '
    function say(text) { print text; said = 1; exit }
    $1 != NR - 1 { say("hosts.tsv says node " $1 " where node " NR - 1 " belongs: swap hosts, not lines") }
    NF < 4 { say("node " $1 " of hosts.tsv has " NF " fields of node_rank, host, type, slots, stages") }
    $2 ~ /^-/ { say($2 " in hosts.tsv is no host") }
    seen[$2, $3]++ { say("host " $2 " stands on two lines of hosts.tsv: its ranks would share devices") }
    { sum += $4 }
    END { if (!said && sum != 32) print "hosts.tsv has " sum " slots, the plan 32 ranks" }')
if [ -n "$problem" ]; then stop "$problem"; fi
while read -r node _ type _; do
    [ -f "$here/env/$type.env" ] || stop "node $node of hosts.tsv is of type $type, and there is no env/$type.env"
done < <(nodes)

if [ "$dry_run" = 1 ]; then
    rank=0
    while read -r _ host _ slots _; do
        echo "# $host" >&2
        for ((local_rank = 0; local_rank < slots; local_rank++)); do
            HAPMOE_DRY_RUN=1 RANK=$rank LOCAL_RANK=$local_rank WORLD_SIZE=32 python3 "$here/entry.py"
            rank=$((rank + 1))
        done
    done < <(nodes)
    exit 0
fi

mapfile -t hosts < <(nodes | awk '{ print $2 }')
export MASTER_ADDR=${HAPMOE_MASTER_ADDR:-${hosts[0]}}
export MASTER_PORT=${MASTER_PORT:-29500}
export HAPMOE_WORKDIR=${HAPMOE_WORKDIR:-$PWD}
pass=(MASTER_ADDR MASTER_PORT HAPMOE_WORKDIR)
for name in HAPMOE_SKIP_DEVICE_CHECK HAPMOE_TORCHRUN HAPMOE_CHECK HAPMOE_CHECK_TIMEOUT ${!HAPMOE_HETERO_*}; do
    if [ -n "${!name:-}" ]; then pass+=("$name"); fi
done

# What a node runs. It reads this, and its variables, from standard input up to a line "end": a command line
# can be read by others, and not every login shell is bash. The input then stays open as long as this script
# lives: when it closes, the node stops (tried again as long as the process group is not there yet).
# shellcheck disable=SC2016
program='exec 4<&0
setsid bash "$HAPMOE_RUN_NODE" </dev/null 4<&- & ranks=$!
{ read -r _ <&4; until kill -TERM -- "-$ranks" || ! kill -0 "$ranks"; do sleep 0.1; done; } 2>/dev/null & lifeline=$!
wait "$ranks"; code=$?
kill "$lifeline" 2>/dev/null
exit "$code"'
# shellcheck disable=SC2016
remote='eval "$(sed "/^end$/Q")"'

input() {
    local name
    for name in "${pass[@]}"; do
        printf 'export %s=%q\n' "$name" "${!name}"
    done
    printf 'export NODE_RANK=%q HAPMOE_RUN_NODE=%q\n%s\nend\n' "$1" "$here/run_node.sh" "$program"
}

ulimit -S -n "$(ulimit -H -n)" # one open input a host
pipes=$(mktemp -d)
inputs=()
logins=()
finish() {
    local input
    for input in "${inputs[@]}"; do exec {input}>&-; done
    kill "${logins[@]}" 2>/dev/null || true
    rm -rf "$pipes"
    wait
}
trap finish EXIT
trap 'exit 129' HUP
trap 'exit 130' INT TERM QUIT

read -r -a ssh <<<"${HAPMOE_SSH:-ssh -o BatchMode=yes}"
for node in "${!hosts[@]}"; do
    mkfifo "$pipes/$node"
    "${ssh[@]}" "${hosts[$node]}" "bash -c '$remote'" <"$pipes/$node" &
    logins+=($!)
    exec {opened}>"$pipes/$node"
    inputs+=("$opened")
    (input "$node" >&"$opened") || true # a login that failed at once reads nothing
done
rm -rf "$pipes" # all are open

# The first node that fails ends the run; its exit code is ours. (wait -n may overlook what ended before.)
while [ -n "${logins[*]}" ]; do
    for node in "${!logins[@]}"; do
        if kill -0 "${logins[$node]}" 2>/dev/null; then continue; fi
        wait "${logins[$node]}" || exit $?
        unset "logins[$node]"
    done
    sleep 0.5
done
