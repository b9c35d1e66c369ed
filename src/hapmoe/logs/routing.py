"""Counts of tokens per expert as a table of routing.

Megatron (0.18, ``--save-tokens-per-expert-interval``) writes ``tokens_per_expert/rank<r>.jsonl`` under
the folder of ``--save``: one object per step and layer with the counts of the rank's own experts for each
microbatch (megatron/training/activation_logging.py:save_tpe). The layer's number is the stage's own.
Any other trace: JSON lines ``{"layer": 0, "tokens": [12, 3, …], "step": 0, "microbatch": 0}``, one count for
every expert.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hapmoe.errors import InputError
from hapmoe.measured import Routing, Run, Table
from hapmoe.plan import Plan

__all__ = ["routing_table", "trace_table"]


def trace_table(path: Path, run: Run) -> Table:
    """A file of JSON lines with the counts of all experts."""
    rows, number = [], 0
    for number, line in _lines(path):
        try:
            tokens = tuple(int(count) for count in line["tokens"])
            place = {name: int(line.get(name, 0)) for name in ("step", "microbatch", "replica")}
            rows.append(Routing(run=run.id, layer=int(line["layer"]), tokens=tokens, **place))
        except (KeyError, TypeError, ValueError):
            hint = '{"layer": 0, "tokens": [12, 3]}'
            raise InputError("no layer with its tokens", where=f"{path}:{number}", hint=hint) from None
    if len({len(row.tokens) for row in rows}) != 1:
        raise InputError("layers with different numbers of experts, or none", where=str(path))
    return Table(kind="routing", device="", runs=(run,), rows=tuple(rows))


def routing_table(folder: Path, run: Run, num_experts: int, plan: Plan | None = None) -> Table:
    """Megatron's folder of ``rank<r>.jsonl`` files, put together over the ranks that share experts.

    Without a plan all ranks are one stage without expert tensor parallelism. InputError where a
    rank's file is missing, or the counts do not fit ``num_experts``.
    """
    files = {
        int(path.stem.removeprefix("rank")): path for path in folder.glob("rank*.jsonl") if path.stem[4:].isdigit()
    }
    if not files:
        raise InputError(
            "holds no rank<r>.jsonl", where=str(folder), hint="--save DIR of the training, tokens_per_expert in it"
        )
    if plan is not None and plan.vpp > 1:
        raise InputError("layers of interleaved stages cannot be told apart in it", where=str(folder))
    total = plan.num_devices if plan is not None else max(files) + 1
    stages = [(0, total, 0, 1)]
    if plan is not None:
        stages = [(s.first_rank, s.num_devices, s.first_layer, s.etp) for s in plan.stages]
    rows: list[Routing] = []
    for first_rank, count, first_layer, etp in stages:
        counted: dict[tuple[int, int, int], dict[int, tuple[int, ...]]] = defaultdict(dict)
        for place in range(count):
            path = files.get(first_rank + place)
            if path is None:
                raise InputError(
                    f"rank{first_rank + place}.jsonl is missing", where=str(folder), hint="copy all ranks' files"
                )
            for number, line in _lines(path):
                if line.get("block") != "decoder":
                    continue
                for microbatch, tokens in enumerate(line["tpe"]):
                    key = int(line["iter"]), first_layer + int(line["layer"]), microbatch
                    counted[key][place] = tuple(map(int, tokens))
                    if num_experts % len(tokens):
                        what = f"{len(tokens)} experts on a rank do not divide {num_experts}"
                        raise InputError(what, where=f"{path}:{number}", hint="--experts N")
        rows += _together(counted, count, etp, num_experts, run, folder)
    return Table(kind="routing", device="", runs=(run,), rows=tuple(rows))


def _together(
    counted: dict[tuple[int, int, int], dict[int, tuple[int, ...]]],
    count: int,
    etp: int,
    num_experts: int,
    run: Run,
    folder: Path,
) -> Iterator[Routing]:
    """One row per expert-parallel group: rank e of it holds experts e E/ep to (e + 1) E/ep - 1.

    Ranks that share an expert by tensor parallelism see the same tokens; the first one counts.
    """
    for (step, layer, microbatch), by_place in sorted(counted.items()):
        ep = num_experts // len(next(iter(by_place.values())))
        group = ep * etp
        for replica in range(count // group):
            members = range(replica * group, (replica + 1) * group, etp)
            missing = [place for place in members if place not in by_place]
            if missing:
                what = f"step {step}, layer {layer}: no counts of {len(missing)} of {ep} ranks that share its experts"
                raise InputError(what, where=str(folder))
            tokens = tuple(value for place in members for value in by_place[place])
            yield Routing(run=run.id, layer=layer, step=step, microbatch=microbatch, replica=replica, tokens=tokens)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {error}", where=str(path)) from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except ValueError:
            raise InputError("no JSON object", where=f"{path}:{number}") from None
        if not isinstance(found, dict):
            raise InputError("no JSON object", where=f"{path}:{number}")
        yield number, found
