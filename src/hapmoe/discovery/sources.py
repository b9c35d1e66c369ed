"""What vendor tools, Slurm and Kubernetes say of the devices that there are. Reading only; nothing is started.

Formats, as read here:
    nvidia-smi --query-gpu=... --format=csv,noheader,nounits (nvidia-smi manual)
    amd-smi static --json (ROCm 6: a list, ROCm 7: {"gpu_data": [...]}); rocm-smi --json before it
    npu-smi info -m (Ascend "npu-smi": NPU ID, Chip ID, Chip Logic ID, Chip Name)
    sinfo --Node with %N %G %f %T (Slurm manual; gres "gpu:TYPE:COUNT(S:SOCKETS)")
    kubectl get nodes -o json with the labels of NVIDIA's GPU feature discovery, AMD's node labeller and
    Ascend's device plugin
    /sys/class/infiniband/*/ports/*/{state,rate} (Linux, Documentation/ABI/stable/sysfs-class-infiniband)
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["SOURCES", "Answer", "Seen", "here", "kubernetes", "read_network", "slurm"]

INFINIBAND = Path("/sys/class/infiniband")

_RESOURCES = {
    # Extended resource of a node: labels that name the device, in order of preference.
    "nvidia.com/gpu": ("nvidia.com/gpu.product",),
    "amd.com/gpu": ("amd.com/gpu.product-name", "beta.amd.com/gpu.product-name"),
    "huawei.com/Ascend910": ("node.kubernetes.io/npu.chip.name", "accelerator"),
    "huawei.com/Ascend910B": ("node.kubernetes.io/npu.chip.name", "accelerator"),
}
_MEMORY_LABEL = "nvidia.com/gpu.memory"
"""MiB of one GPU."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Devices of one kind on one node."""

    host: str
    reported: str
    """Name as driver, gres or label has it; empty: nobody says."""
    count: int
    memory_mib: float | None = None
    """Of one device, where it is said."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one source says."""

    source: str
    seen: tuple[Seen, ...] = ()
    remarks: tuple[str, ...] = ()
    """What it said that is not in ``seen``: nodes that are down, tools that are absent."""
    network: str = ""
    """YAML of the network of a node; empty: not known."""


def here() -> Answer:
    """This node, by the vendors' tools."""
    host = socket.gethostname().partition(".")[0]
    devices = [*_nvidia(), *(list(_amd()) or list(_rocm())), *_ascend()]
    seen = tuple(Seen(host, name, count, memory) for (name, memory), count in Counter(devices).items())
    absent = () if seen else ("none of nvidia-smi, amd-smi, rocm-smi and npu-smi names a device here",)
    return Answer("this node", seen, absent, read_network(INFINIBAND) if seen else "")


def slurm() -> Answer:
    """The nodes of a Slurm cluster, by sinfo."""
    text = _run("sinfo", "--noheader", "--Node", "--format=%N|%G|%f|%T")
    if text is None:
        return Answer("Slurm", remarks=("no sinfo here, or no answer from it",))
    seen: list[Seen] = []
    out: list[str] = []
    known: set[str] = set()
    for line in text.splitlines():
        host, gres, features, state = [part.strip() for part in (*line.split("|"), "", "", "")[:4]]
        if not host or host in known:  # a node stands once per partition
            continue
        known.add(host)
        if re.match(r"(down|drain|fail|future|inval|maint|power|reboot|unknown)", state.lower()):
            out.append(f"{host} ({state})")
            continue
        for name, count in _gres(gres):
            named = name or (features if features != "(null)" else "")
            seen.append(Seen(host, named, count))
    remarks = [f"left out: {', '.join(out)}"] if out else []
    if not seen:
        remarks.append("sinfo names no node with a gres of gpu or npu")
    return Answer("Slurm (sinfo)", tuple(seen), tuple(remarks))


def kubernetes() -> Answer:
    """The nodes of a Kubernetes cluster, by kubectl in its current context."""
    text = _run("kubectl", "get", "nodes", "--output=json", "--request-timeout=10s")
    try:
        items: list[dict[str, Any]] = json.loads(text)["items"] if text else []
    except (ValueError, KeyError, TypeError):
        text = None
    if text is None:
        return Answer("Kubernetes", remarks=("no kubectl here, or no answer from its cluster",))
    seen: list[Seen] = []
    out: list[str] = []
    for item in items:
        host, labels = item["metadata"]["name"], item["metadata"].get("labels", {})
        status = item.get("status", {})
        conditions = {entry.get("type"): entry.get("status") for entry in status.get("conditions", ())}
        resources = status.get("allocatable") or status.get("capacity") or {}
        counts = {name: int(count) for name, count in resources.items() if name in _RESOURCES and str(count).isdigit()}
        if any(counts.values()) and (item.get("spec", {}).get("unschedulable") or conditions.get("Ready") == "False"):
            out.append(host)
            continue
        memory = labels.get(_MEMORY_LABEL, "")
        for resource, count in counts.items():
            if count:
                named = next((labels[label] for label in _RESOURCES[resource] if label in labels), "")
                per_device = float(memory) if resource.startswith("nvidia") and memory.isdigit() else None
                seen.append(Seen(host, named, count, per_device))
    remarks = [f"left out (not ready, or not to be scheduled on): {', '.join(out)}"] if out else []
    if not seen:
        remarks.append("no node offers " + ", ".join(_RESOURCES))
    return Answer("Kubernetes (kubectl get nodes)", tuple(seen), tuple(remarks))


SOURCES = {"slurm": slurm, "kubernetes": kubernetes, "here": here}
"""By the name that ``--from`` takes, in the order in which they are asked."""


def read_network(root: Path) -> str:
    """The node's active InfiniBand or RoCE ports as a ``network`` mapping, if all have one rate; else empty."""
    rates: list[str] = []
    for port in sorted(root.glob("*/ports/*")):
        try:
            if "ACTIVE" in (port / "state").read_text():
                rates.append((port / "rate").read_text())
        except OSError:
            continue
    found = {match[1] for rate in rates if (match := re.match(r"\s*([\d.]+) Gb/sec", rate))}
    if len(found) != 1:
        return ""
    return f"{{nics_per_node: {len(rates)}, bandwidth: {found.pop()} Gb/s}}"


def _nvidia() -> Iterator[tuple[str, float | None]]:
    text = _run("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
    for line in (text or "").splitlines():
        name, _, memory = line.rpartition(",")
        if name:
            yield name.strip(), float(memory) if memory.strip().isdigit() else None


def _amd() -> Iterator[tuple[str, float | None]]:
    try:
        data = json.loads(_run("amd-smi", "static", "--json") or "[]")
        rows = data["gpu_data"] if isinstance(data, dict) else data
        for row in rows:
            size = row.get("vram", {}).get("size")
            memory = size.get("value") if isinstance(size, dict) else size
            yield row["asic"]["market_name"], float(memory) if isinstance(memory, int | float) else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return


def _rocm() -> Iterator[tuple[str, float | None]]:
    try:
        cards = json.loads(_run("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--json") or "{}")
        for card, row in cards.items():
            if card.startswith("card"):
                values = {key.lower(): value for key, value in row.items()}
                total = str(values.get("vram total memory (b)", ""))
                name = values.get("card series") or values.get("card model") or ""
                yield name, int(total) / 2**20 if total.isdigit() else None
    except (ValueError, AttributeError):
        return


def _ascend() -> Iterator[tuple[str, float | None]]:
    for line in (_run("npu-smi", "info", "-m") or "").splitlines():
        if match := re.search(r"(Ascend\s*\w+)\s*$", line):
            yield match[1], None


def _gres(text: str) -> Iterator[tuple[str, int]]:
    """(type, count) of the accelerators among a node's generic resources."""
    for entry in re.split(r",(?![^(]*\))", text):
        name, *rest = re.sub(r"\(.*", "", entry).split(":")
        if name.strip() in ("gpu", "npu") and rest and rest[-1].isdigit() and int(rest[-1]):
            yield ":".join(rest[:-1]), int(rest[-1])


def _run(*command: str) -> str | None:
    """Standard output; None where there is no such program, or it fails or does not answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, errors="replace")
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
