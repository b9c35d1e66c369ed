"""Output of nccl-tests and rccl-tests as a table of collectives.

Formats: nccl-tests 2.0 to 2.19 and rccl-tests print one line per size with out-of-place and in-place
columns under a header of comment lines; the position of "time" in that header tells them apart. Up to
2.13 an operation without a reduction left that column blank. With ``-J FILE.json`` (since 2.17.3) the same
is written as JSON. The out-of-place time is taken; it is a mean over the iterations, so the row has no
spread. Sizes are the bytes of the larger buffer of a rank, as ours are. What mpirun and srun put before a
line (``[1,0]<stdout>:``, ``0:``) stays out of the way.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

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
_TEST = re.compile(r"\b(\w+_perf)(?:_mpi)?\b")
_PREFIX = re.compile(r"^\s*(?:>\s?)?(?:(?:\[[^\]\s]+\])?<std(?:out|err)>:|\[[^\]\s]+\]:|\d+:)?\s*")
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
    columns: tuple[str, ...] = ()
    version: tuple[str, str] = ("", "")


def is_nccl_tests(text: str) -> bool:
    """Does this look like such output?"""
    return ("algbw" in text and "busbw" in text) or ('"out_of_place"' in text and '"alg_bw"' in text)


def nccl_table(
    text: str, run: Run, where: str, *, device: str = "", ranks: int | None = None, nodes: int | None = None
) -> Table:
    """The table of one file, which may hold several tests.

    ``device``, ``ranks`` and ``nodes`` are for output that does not list its ranks, or not all of
    them. InputError where it is not known which collective ran, on what, or on how many ranks.
    """
    state, rows = _State(), []
    named = device
    is_json = text.lstrip().startswith("{")
    figures = _json(state, text, where) if is_json else _printed(state, text)
    for number, size, seconds in figures:
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


def _printed(state: _State, text: str) -> Iterator[tuple[int, int, float]]:
    """(number of the line, bytes, seconds) of each line of figures; what stood before it is in ``state``."""
    for number, raw in enumerate(text.splitlines(), 1):
        line = _PREFIX.sub("", raw, count=1)
        _header(state, line)
        if size_s := _figures(state, line):
            yield number, *size_s


def _json(state: _State, text: str, where: str) -> Iterator[tuple[int, int, float]]:
    """The same of a file of ``-J`` (nccl-tests, src/util.cu); the line is not known."""
    try:
        found: dict[str, Any] = json.loads(text)
        test = PurePath(found["args"][0]).name.removesuffix("_mpi")
        state.collective = _NAMES.get(test, "")
        state.version = "nccl", _decimal(str(found["nccl_version"]))
        for one in found["config"]["devices"]:
            state.ranks[int(one["rank"])], state.device = str(one["hostname"]), str(one["device_info"]).strip()
        results = [
            (int(row["size"]), float((row["out_of_place"] or {}).get("time", 0.0)), int(row["actual_iterations"]))
            for row in found["results"]
        ]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise InputError("not what nccl-tests -J writes", where=where) from None
    for size, micro, state.iters in results:
        if micro > 0:
            yield 1, size, micro * 1e-6


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
            state.columns = tuple(words)


def _decimal(code: str) -> str:
    """``22304`` is 2.23.4 (nccl.h: NCCL_VERSION)."""
    number = int(code)
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


def _figures(state: _State, line: str) -> tuple[int, float] | None:
    """(bytes, seconds) of a line of figures."""
    words, columns = line.split(), state.columns
    if not columns or len(words) < len(columns) - 2 or not all(word.isdigit() for word in words[:2]):
        return None
    # a blank column stands before the time: what is left of it lines up from the right
    at = columns.index("time") - max(len(columns) - len(words), 0)
    try:
        micro = float(words[at])
    except ValueError:
        return None
    return (int(words[0]), micro * 1e-6) if micro > 0 else None


def _shape(state: _State, where: str, ranks: int | None, nodes: int | None) -> tuple[int, int]:
    many = ranks or (max(state.ranks) + 1 if state.ranks else 0)
    if not many:
        raise InputError("does not list its ranks", where=where, hint="--ranks N --nodes N")
    on_host = Counter(state.ranks.values())
    hosts = nodes or len(on_host) or 1
    partly = nodes is None and state.ranks and (len(state.ranks) != many or len(set(on_host.values())) > 1)
    if many % hosts or partly:
        what = f"{many} ranks on {hosts} hosts: not all of them are listed, or not as many on each"
        raise InputError(what, where=where, hint="--ranks N --nodes N")
    return many, many // hosts
