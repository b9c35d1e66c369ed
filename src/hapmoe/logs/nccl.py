"""Output of nccl-tests and rccl-tests as a table of collectives.

Formats: nccl-tests 2.0 to 2.18 and rccl-tests print one line per size with out-of-place and in-place
columns under a header of comment lines; the position of "time" in that header tells them apart. The
out-of-place time is taken; it is a mean over the iterations, so the row has no spread. Sizes are the
bytes of the larger buffer of a rank, as ours are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from hapmoe.errors import InputError
from hapmoe.measured import Collective, Run, Table

__all__ = ["is_nccl_tests", "nccl_table"]

_NAMES = {
    "all_reduce_perf": "all_reduce",
    "all_gather_perf": "all_gather",
    "reduce_scatter_perf": "reduce_scatter",
    "alltoall_perf": "all_to_all",
    "sendrecv_perf": "send_recv",
}
_TEST = re.compile(r"\b(\w+_perf)\b")
_RANK = re.compile(r"^#\s+Rank\s+(\d+).*?\bon\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s+(.+?)\s*$")
_ITERS = re.compile(r"\biters:?\s+(\d+)")
_VERSION = re.compile(r"\b(NCCL|RCCL) version[ :]+(\d[\w.]*)|nccl-library=(\d+)", re.I)


@dataclass
class _State:
    """What the lines so far say of the test that is being read."""

    collective: str = ""
    ranks: dict[int, str] = field(default_factory=dict)
    device: str = ""
    iters: int = 1
    column: int = 0
    version: tuple[str, str] = ("", "")


def is_nccl_tests(text: str) -> bool:
    """Does this look like such output?"""
    return "algbw" in text and "busbw" in text


def nccl_table(
    text: str, run: Run, where: str, *, device: str = "", ranks: int | None = None, nodes: int | None = None
) -> Table:
    """The table of one file, which may hold several tests.

    ``device``, ``ranks`` and ``nodes`` are for output that does not list its ranks, or not all of
    them. InputError where it is not known which collective ran, on what, or on how many ranks.
    """
    state, rows = _State(), []
    named = device
    for number, line in enumerate(text.splitlines(), 1):
        _header(state, line)
        size_s = _figures(state, line)
        if size_s is None:
            continue
        size, seconds = size_s
        if not state.collective:
            hint = 'the line "# Collective test starting: all_reduce_perf", or the command that was run'
            raise InputError(
                "figures of an unknown collective", where=f"{where}:{number}", hint=f"put before it {hint}"
            )
        named = named or state.device
        many, per_node = _shape(state, where, ranks, nodes)
        if many > 1 and size > 0:
            rows.append(
                Collective(
                    run=run.id,
                    collective=state.collective,
                    link="node" if many == per_node else "network",
                    ranks=many,
                    ranks_per_node=per_node,
                    bytes=size,
                    median_s=seconds,
                    p10_s=seconds,
                    p90_s=seconds,
                    samples=state.iters,
                )
            )
    if not rows:
        raise InputError("no figures of collectives in it", where=where, hint="the output of nccl-tests or rccl-tests")
    if not named:
        raise InputError("does not say which device it ran on", where=where, hint='--device "NVIDIA H100 80GB HBM3"')
    library, version = state.version
    return Table(
        kind="collectives",
        device=named,
        software={library: version} if version else {},
        runs=(run,),
        rows=tuple(rows),
    )


def _header(state: _State, line: str) -> None:
    if found := _VERSION.search(line):
        state.version = (found[1] or "nccl").lower(), found[2] or _decimal(found[3])
    if (found := _TEST.search(line)) and found[1] in _NAMES:
        state.collective = _NAMES[found[1]]
    if found := _RANK.match(line):
        if found[1] == "0":
            state.ranks = {}
        state.ranks[int(found[1])] = found[2]
        state.device = found[3]
    if line.startswith("#"):
        if "nThread" in line and (found := _ITERS.search(line.partition("warmup")[2].partition(":")[2])):
            state.iters = int(found[1])
        words = line.lstrip("# ").split()
        if "size" in words and "time" in words:
            state.column = words.index("time")


def _decimal(code: str) -> str:
    """``22304`` is 2.23.4 (nccl.h: NCCL_VERSION)."""
    number = int(code)
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


def _figures(state: _State, line: str) -> tuple[int, float] | None:
    """(bytes, seconds) of a line of figures."""
    words = line.split()
    if not state.column or len(words) <= state.column or not words[0].isdigit() or not words[1].isdigit():
        return None
    try:
        micro = float(words[state.column])
    except ValueError:
        return None
    return (int(words[0]), micro * 1e-6) if micro > 0 else None


def _shape(state: _State, where: str, ranks: int | None, nodes: int | None) -> tuple[int, int]:
    many = ranks or (max(state.ranks) + 1 if state.ranks else 0)
    if not many:
        raise InputError("does not list its ranks", where=where, hint="--ranks N --nodes N")
    hosts = nodes or len(set(state.ranks.values())) or 1
    if many % hosts:
        raise InputError(
            f"{many} ranks on {hosts} hosts: not all of them are listed", where=where, hint="--ranks N --nodes N"
        )
    return many, many // hosts
