#!/usr/bin/env python3
"""Before training: are all nodes of the plan here, in order, with the same files and versions?

run_node.sh runs this on every node. The nodes tell node 0 about themselves, at the address and port
where the ranks meet later, and all stop (exit code 2) with the same lines when something is wrong.
Python alone; takes a second.

    HAPMOE_CHECK_TIMEOUT=300    seconds to wait for the last node
    HAPMOE_SKIP_DEVICE_CHECK=1  do not compare devices with the plan's
    --again                     only wait for all nodes to be here
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import selectors
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PACKAGES = ("torch", "megatron-core", "transformer-engine", "flagcx", "torch-npu")
LIBRARIES = {"nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13"}
try:
    TIMEOUT = float(os.environ.get("HAPMOE_CHECK_TIMEOUT") or "300")
except ValueError:
    sys.exit(f"check_hosts: HAPMOE_CHECK_TIMEOUT is {os.environ['HAPMOE_CHECK_TIMEOUT']!r}, not seconds")
LIMIT = 1 << 20

Facts = dict[str, Any]


def table() -> list[list[str]]:
    """Lines of hosts.tsv: node rank, host, type, slots, stages."""
    lines = (HERE / "hosts.tsv").read_text(encoding="utf-8").splitlines()
    return [words for line in lines if (words := line.split()) and words[0].isdigit()]


def tool(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def devices() -> list[tuple[str, float | None, str]]:
    """(name, free GiB, what no other device is called) of every device here, by the vendor's tool; empty
    where there is none."""
    found: list[tuple[str, float | None, str]] = []
    for line in tool("nvidia-smi", "--query-gpu=name,memory.free,uuid", "--format=csv,noheader,nounits").splitlines():
        name, free, unique, *_ = [*map(str.strip, line.split(",")), "", ""]
        found.append((name, float(free) / 1024 if free.isdigit() else None, unique))
    asked = ("--showproductname", "--showuniqueid", "--showmeminfo", "vram", "--json")
    if not found and (text := tool("rocm-smi", *asked)):
        for card, row in json.loads(text).items():
            if card.startswith("card"):
                values = {key.lower(): value for key, value in row.items()}
                total, used = values.get("vram total memory (b)"), values.get("vram total used memory (b)")
                free_gib = (int(total) - int(used)) / 2**30 if total and used else None
                name = values.get("card series", values.get("card model", ""))
                found.append((name, free_gib, values.get("unique id", "")))
    if not found:
        for line in tool("npu-smi", "info", "-m").splitlines():
            if match := re.search(r"(Ascend\s*\w+)", line):
                found.append((match[1], None, ""))
    return found


def versions() -> dict[str, str]:
    """Installed packages that ranks must have in common; Megatron from a folder by its content."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in (*PACKAGES, *sorted(LIBRARIES)):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    source = Path("megatron/core/package_info.py")
    if source.is_file():
        found["megatron-core"] = f"source {digest(source.read_bytes())}"
    return found


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def facts(node: int) -> Facts:
    names = ["plan.json", "hosts.tsv", "entry.py", "run_node.sh", "check_hosts.py", "check_ranks.py"]
    names += ["runtime.json"] if (HERE / "runtime.json").is_file() else []
    folders = [folder for folder in ("args", "env", "hapmoe_runtime") if (HERE / folder).is_dir()]
    paths = [path for folder in folders for path in (HERE / folder).iterdir() if path.is_file()]
    names += sorted(str(path.relative_to(HERE)) for path in paths)
    return {
        "node": node,
        "hostname": socket.gethostname(),
        "ccl": os.environ.get("HAPMOE_CCL", ""),
        "wanted": [name for name in os.environ.get("HAPMOE_DEVICE_NAMES", "").split(",") if name],
        "devices": devices() if os.environ.get("HAPMOE_SKIP_DEVICE_CHECK") != "1" else [],
        "versions": versions(),
        "files": {name: digest((HERE / name).read_bytes()) for name in names},
        "values": {name: digest(os.environ[name].encode()) for name in os.environ if name.startswith("HAPMOE_VAR_")},
        "visible": any(name.endswith("_VISIBLE_DEVICES") for name in os.environ),
    }


def matches(wanted: list[str], name: str) -> bool:
    """Names match at word ends, as in entry.py: "nvidia h20" is not in "NVIDIA H200"."""
    said = (name.lower(), name.lower().replace(" ", ""))
    return any(re.search(rf"(?<!\w){re.escape(one)}(?![^\W_])", text) for one in wanted for text in said)


def wrong_devices(rows: list[list[str]], told: dict[int, Facts]) -> list[str]:
    wrong: dict[int, str] = {}
    problems = []
    for node, one in sorted(told.items()):
        label, names = f"node {node} ({rows[node][1]})", [name for name, *_ in one["devices"]]
        if not names:
            continue
        # Other devices beside the plan's do no harm: a host may hold two kinds.
        fitting = [name for name in names if matches(one["wanted"], name)] if one["wanted"] else names
        if not fitting:
            wrong[node] = names[0]
        elif len(fitting) < int(rows[node][3]) and not one["visible"]:
            problems.append(
                f"{label} has {len(fitting)} devices of type {rows[node][2]}, hosts.tsv says {rows[node][3]}"
            )
    swapped = {
        frozenset((a, b))
        for a in wrong
        for b in wrong
        if a < b and matches(told[a]["wanted"], wrong[b]) and matches(told[b]["wanted"], wrong[a])
    }
    hint = {node: pair for pair in swapped for node in pair}
    for node, name in wrong.items():
        said = f"node {node} ({rows[node][1]}) has {name!r}, the plan wants {rows[node][2]}"
        if node in hint:
            other = next(iter(hint[node] - {node}))
            said += f": swap it with node {other} ({rows[other][1]}) in hosts.tsv"
        problems.append(said)
    return problems


def shared_devices(rows: list[list[str]], told: dict[int, Facts]) -> list[str]:
    """Two lines of hosts.tsv that are one machine under two names, with equal devices for both."""
    problems = []
    holder: dict[tuple[str, str], int] = {}
    for node, one in sorted(told.items()):
        keys = [(rows[node][2], unique) for *_, unique in one["devices"] if unique and not one["visible"]]
        if both := [key for key in keys if key in holder]:
            other = holder[both[0]]
            problems.append(
                f"node {node} ({rows[node][1]}) and node {other} ({rows[other][1]}) have the same devices "
                f"({both[0][1]}): one host stands on two lines of hosts.tsv"
            )
        holder.update(dict.fromkeys(keys, node))
    return problems


def differing(rows: list[list[str]], told: dict[int, Facts]) -> list[str]:
    """What must be equal and is not, each once, against node 0."""
    problems = []
    first = told[0]
    for node, one in sorted(told.items()):
        label = f"node {node} ({rows[node][1]})"
        for name in sorted(set(first["files"]) | set(one["files"])):
            if one["files"].get(name) != first["files"].get(name):
                problems.append(f"{name} on {label} differs from node 0's: copy the folder again")
                break
        if one["values"] != first["values"]:
            problems.append(f"a HAPMOE_VAR value on {label} differs from node 0's: evaluate it once, for all nodes")
        for name in sorted(set(first["versions"]) | set(one["versions"])):
            ours, theirs = first["versions"].get(name), one["versions"].get(name)
            alike = one["ccl"] == first["ccl"]
            if name in LIBRARIES and not alike:
                continue
            if name == "torch" and not alike and ours and theirs:  # other vendor, other build of the same version
                ours, theirs = ours.partition("+")[0], theirs.partition("+")[0]
            if name in ("transformer-engine", "torch-npu", "flagcx") and not (alike and ours and theirs):
                continue
            if ours != theirs:
                problems.append(f"{name} is {theirs or 'missing'} on {label}, {ours or 'missing'} on node 0")
    return problems


def judge(rows: list[list[str]], told: dict[int, Facts]) -> list[str]:
    """What is wrong, one line each; empty: train."""
    missing = [node for node in range(len(rows)) if node not in told]
    problems = [f"node {node} ({rows[node][1]}) did not report within {TIMEOUT:g} s" for node in missing]
    return problems + wrong_devices(rows, told) + shared_devices(rows, told) + differing(rows, told)


def page(rows: list[list[str]], told: dict[int, Facts]) -> str:
    lines = ["node  host                  type                  devices                          free GiB  torch"]
    for node, row in enumerate(rows):
        one = told.get(node)
        if one is None:
            lines.append(f"{node:>4}  {row[1]:<20}  {row[2]:<20}  did not report")
            continue
        names = sorted({name for name, *_ in one["devices"]}) or ["not known here"]
        free = [value for _, value, _ in one["devices"] if value is not None]
        least = f"{min(free):.1f}" if free else "-"
        shown = f"{len(one['devices']) or row[3]} x {', '.join(names)}"
        lines.append(
            f"{node:>4}  {row[1]:<20}  {row[2]:<20}  {shown:<31}  {least:>8}  {one['versions'].get('torch', '-')}"
        )
        if len(lines) > 60:
            lines.append(f"      and {len(rows) - node - 1} more")
            break
    return "\n".join(lines)


def parse(data: bytes, own: Facts, nodes: int) -> Facts | None:
    """What another node says of itself; None for anything that is not of the kind of our own."""
    try:
        one = json.loads(data)
    except ValueError:
        return None
    alike = isinstance(one, dict) and one.keys() == own.keys()
    alike = alike and all(isinstance(one[name], type(value)) for name, value in own.items())
    return one if alike and 0 <= one["node"] < nodes else None


def listen(port: int, backlog: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=backlog, dualstack_ipv6=both)


def hear(server: socket.socket, own: Facts, nodes: int) -> tuple[dict[int, Facts], list[socket.socket], list[str]]:
    """(facts by node, who waits for the verdict, nodes that are there twice). Whoever else connects to the
    port, or says nothing, holds nobody up."""
    told: dict[int, Facts] = {own["node"]: own}
    speakers: list[socket.socket] = []
    heard: dict[socket.socket, bytes] = {}
    deadline = time.monotonic() + TIMEOUT
    with selectors.DefaultSelector() as waiting:
        waiting.register(server, selectors.EVENT_READ)
        while len(told) < nodes and (left := deadline - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                if key.fileobj is server:
                    connection, _ = server.accept()
                    heard[connection] = b""
                    waiting.register(connection, selectors.EVENT_READ)
                    continue
                connection = key.fileobj  # type: ignore[assignment]
                try:
                    part = connection.recv(1 << 16)
                except OSError:
                    part = b""
                heard[connection] += part
                complete = heard[connection].endswith(b"\n")
                if part and not complete and len(heard[connection]) < LIMIT:
                    continue
                waiting.unregister(connection)
                one = parse(heard.pop(connection), own, nodes) if complete else None
                if one is None:
                    connection.close()
                    continue
                speakers.append(connection)
                if one["node"] in told:
                    first, second = told[one["node"]]["hostname"], one["hostname"]
                    return told, speakers, [f"{second} says that it is node {one['node']}, and so does {first}"]
                told[one["node"]] = one
    for connection in heard:
        connection.close()
    return told, speakers, []


def gather(port: int, rows: list[list[str]], own: Facts, *, quiet: bool) -> list[str]:
    """Node 0: hear all others, judge, tell them."""
    try:
        server = listen(port, len(rows))
    except OSError as error:
        said = os.strerror(error.errno or 0)
        return [f"cannot listen on port {port} of node 0: {said}; another MASTER_PORT may be free"]
    with server:
        told, speakers, twice = hear(server, own, len(rows))
    problems = twice or judge(rows, told)
    if not quiet:
        print(page(rows, told), file=sys.stderr)
    for connection in speakers:
        try:
            connection.settimeout(10)
            connection.sendall(json.dumps(problems).encode() + b"\n")
            connection.close()
        except OSError:
            continue
    return problems


def read_line(connection: socket.socket, deadline: float) -> bytes:
    data = b""
    while not data.endswith(b"\n") and len(data) < LIMIT:
        connection.settimeout(max(deadline - time.monotonic(), 0.01))
        part = connection.recv(1 << 16)
        if not part:
            break
        data += part
    return data


def report(address: str, port: int, own: Facts) -> list[str]:
    """Another node: tell node 0, hear the verdict."""
    deadline = time.monotonic() + TIMEOUT
    said = ""
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((address, port), timeout=5) as connection:
                connection.sendall(json.dumps(own).encode() + b"\n")
                answer = read_line(connection, deadline + 10)
                if answer.endswith(b"\n"):
                    return [str(line) for line in json.loads(answer)]
                said = "it hung up"
        except (OSError, ValueError, TypeError) as error:
            said = getattr(error, "strerror", None) or str(error)
        time.sleep(0.2)
    return [f"node {own['node']} cannot reach node 0 at {address}:{port} within {TIMEOUT:g} s: {said}"]


def main() -> None:
    node, rows = int(os.environ["NODE_RANK"]), table()
    if any(name.startswith("CHANGE-ME") for _, name, *_ in rows):
        print("check_hosts: hosts.tsv still says CHANGE-ME: write the host names there", file=sys.stderr)
        raise SystemExit(2)
    own = facts(node)
    quiet = "--again" in sys.argv
    if node == 0:
        port = int(os.environ["MASTER_PORT"])
        problems = gather(port, rows, own, quiet=quiet) if len(rows) > 1 else judge(rows, {0: own})
    else:
        problems = report(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), own)
    for problem in problems:
        print(f"check_hosts: {problem}", file=sys.stderr)
    raise SystemExit(2 if problems else 0)


if __name__ == "__main__":
    main()
