"""What this machine lets a process have: a share of a core by the scheduler's quota, a slow link by a packet filter.

Both need root and a Linux with the parts for it (``cannot_limit``, ``cannot_slow_links`` say what is missing). All
that is made is taken away again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Ends", "cannot_limit", "cannot_slow_links", "limited", "slow_link"]

_V1, _V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
PERIOD_US = 10_000
"""Of a quota: short beside a microbatch, long beside the scheduler's ticks (4 ms at 250 Hz)."""
WEIGHT = 10
"""Times the weight of others' processes: whoever has a quota gets it on a busy machine too."""
Ends = tuple[list[str], list[str]]
"""Words in front of a command that put it at one end of a link, or the other."""
ADDRESSES = ("10.77.31.1", "10.77.31.2")
INTERFACE = "hapmoe0"
"""The same name at both ends."""


def cannot_limit() -> str:
    """Why quotas are not possible here; empty: they are."""
    try:
        with limited(0.5):
            return ""
    except OSError as error:
        return f"no CPU quotas: {error.strerror or error}"


@contextlib.contextmanager
def limited(share: float) -> Iterator[Path]:
    """A control group whose processes get this share of one core together; what joins writes its id to the file."""
    quota = str(max(round(share * PERIOD_US), 1000))  # the kernel takes no less than 1 ms
    name = f"hapmoe-bench-{os.getpid()}-{quota}"
    if (_V1 / "cpu.cfs_quota_us").exists():
        group = _V1 / name
        words = {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": quota, "cpu.shares": str(1024 * WEIGHT)}
    else:
        group = _V2 / name
        words = {"cpu.max": f"{quota} {PERIOD_US}", "cpu.weight": str(100 * WEIGHT)}
    group.mkdir()
    try:
        for file, text in words.items():
            (group / file).write_text(text)
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


def cannot_slow_links() -> str:
    """Why a slow link is not possible here; empty: it is."""
    if missing := [name for name in ("ip", "tc", "nsenter") if not shutil.which(name)]:
        return f"no slow links: no {missing[0]}"
    try:
        with slow_link(1e6):
            return ""
    except subprocess.CalledProcessError as error:
        return f"no slow links: {error.stderr.strip()}"


@contextlib.contextmanager
def slow_link(bits_per_s: float) -> Iterator[Ends]:
    """Two network namespaces joined by one link that lets so much through each way (a token bucket, tc-tbf)."""
    spaces = [f"hapmoe-bench-{os.getpid()}-{end}" for end in "ab"]
    ends = [["nsenter", f"--net=/run/netns/{space}"] for space in spaces]  # ip netns exec would hide control groups
    try:
        for space in spaces:
            _do("ip", "netns", "add", space)
        _do("ip", "link", "add", INTERFACE, "netns", spaces[0], "type", "veth",
            "peer", "name", INTERFACE, "netns", spaces[1])  # fmt: skip
        for end, address in zip(ends, ADDRESSES, strict=True):
            _do(*end, "ip", "address", "add", f"{address}/24", "dev", INTERFACE)
            for device in ("lo", INTERFACE):
                _do(*end, "ip", "link", "set", device, "up")
            # a bucket of 16 KB, a few packets; what does not fit waits up to a second before it is dropped
            _do(*end, "tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf",
                "rate", f"{bits_per_s:.0f}bit", "burst", "16kb", "latency", "1s")  # fmt: skip
        yield ends[0], ends[1]
    finally:
        for space in spaces:  # with the link in it
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)


def _do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
