"""Starts every node of a launch folder on this machine, one process each, and waits for all."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hapmoe.errors import HapmoeError

__all__ = ["RunFailed", "run_nodes"]


class RunFailed(HapmoeError):
    """A training that ended with an error or not in time; the text ends with what it said."""

    exit_code = 1


def run_nodes(
    launch: Path, environment: Mapping[str, str], *, timeout_s: float, before: Sequence[Sequence[str]] = ()
) -> None:
    """Run ``run_node.sh`` of ``launch`` once per line of its hosts.tsv, over gloo on this machine.

    ``environment`` comes on top of this process's, and each node's words of ``before`` in front of the command
    (none: for no node). Output goes to ``node<n>.log`` beside the folder. RunFailed
    when a node fails or all are not done in ``timeout_s``; the others are ended then.
    """
    hosts = [line for line in (launch / "hosts.tsv").read_text().splitlines() if line[:1].isdigit()]
    inherited = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), **environment}
    logs = [launch.parent / f"{launch.name}-node{node}.log" for node in range(len(hosts))]
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for node, log in enumerate(logs):
            with log.open("wb") as stream:
                own = {**inherited, **shared, "NODE_RANK": str(node)}
                command = [*(before[node] if before else ()), "bash", str(launch / "run_node.sh")]
                nodes.append(subprocess.Popen(command, env=own, stdout=stream, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + timeout_s
        while any(one.poll() is None for one in nodes) and not any(one.returncode for one in nodes):
            if time.monotonic() > deadline:
                raise RunFailed(f"{launch}: not done after {timeout_s:g} s; see {logs[0]}")
            time.sleep(0.05)
    finally:
        for one in nodes:  # the peers of one that failed would wait for it
            if one.poll() is None:
                one.terminate()
                one.wait()
    failed = next((node for node, one in enumerate(nodes) if (one.returncode or 0) > 0), None)
    if failed is not None:
        text = logs[failed].read_text(errors="replace")[-4000:]
        raise RunFailed(f"{launch}: node {failed} ended with exit code {nodes[failed].returncode}\n{text}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
