"""Stages of unequal degrees against one rank: ``python -m bench.hetero [--json] [--only TEXT] [--fuzz N --seed S]``.

Every configuration goes through script, plan, launcher and ``entry.py``, which attaches
``hapmoe.runtime`` to real Megatron-Core (hapmoe.lab, CPU, gloo). Held against one rank with the same
samples and weights: losses and gradient norms of four steps and every parameter after them. Where
Megatron's own result depends on dp (``aux_loss``, bf16 sums), the reference is its uniform run of
that dp. The control turns the scaling of boundary gradients off, and must differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from math import inf
from typing import Any

from bench.hetero_cases import (
    CASES,
    CONTROL,
    HALF,
    HANDFUL,
    HANDFUL_RESUMED,
    RESUMES,
    UPSTREAM,
    UPSTREAM_HALF,
    Unequal,
    fuzz,
)
from bench.lab import Case, Run, run
from hapmoe.volumes import step_traffic

__all__ = ["Outcome", "compare", "reference", "resume", "train"]

LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-5
"""Relative."""
PARAMETER_TOLERANCE = 1e-4
"""Four steps of Adam at 1e-3: a gradient near zero may move a parameter by much more than it differs."""


@dataclass(frozen=True)
class Outcome:
    """How a run of unequal stages differs from its reference."""

    name: str
    ranks: int
    loss_error: float
    norm_error: float
    """Relative, of the rank where it is largest: each clips by what it believes."""
    parameter_error: float
    complete: bool
    """Every parameter of the reference was found, whole."""
    auxiliary_error: float = 0.0
    """Of auxiliary losses as logged, relative."""
    boundary_error: float = 0.0
    """Of messages and bytes across boundaries, of each stage's busiest rank: counted against predicted, relative."""

    @property
    def good(self) -> bool:
        exact = self.loss_error < LOSS_TOLERANCE and self.norm_error < NORM_TOLERANCE
        exact = exact and self.parameter_error < PARAMETER_TOLERANCE and self.auxiliary_error < 1e-5
        return exact and self.complete and self.boundary_error == 0.0


def train(case: Case, **variables: str) -> Run:
    """One run, with its parameters."""
    return run(case, by_rank=True, timeout_s=600, variables={"HAPMOE_LAB_PARAMETERS": "1", **variables})


_references: dict[str, Run] = {}


def reference(one: Unequal) -> Run:
    """The run that ``one`` is held against; equal ones run once."""
    flags = one.case.reference.flags
    single = Case("one rank", (sum(one.case.layers),), mbs=one.samples, flags=dict(sorted(flags.items())))
    case = one.reference or single
    if repr(case) not in _references:
        _references[repr(case)] = train(case)
    return _references[repr(case)]


def _go_on(before: Case, after: Sequence[Case]) -> list[Run]:
    """Two steps under one plan, two more from its checkpoint under each of the others."""
    with tempfile.TemporaryDirectory(prefix="hapmoe-ckpt-") as folder:
        train(replace(before, flags={**before.flags, "--train-iters": "2", "--save": folder}))
        return [
            train(replace(one, name=f"{before.name} -> {one.name}", flags={**one.flags, "--load": folder}))
            for one in after
        ]


@cache
def upstream_resumed() -> Run:
    """Upstream's own save and resume of the model that all resumed plans train."""
    (found,) = _go_on(UPSTREAM, (UPSTREAM,))
    return found


def resume(before: Case, after: Sequence[Case]) -> list[Outcome]:
    """Two steps under one plan and two more under others, against upstream's own save and resume."""
    runs = _go_on(before, after)
    assert all(sorted(found.losses) == [3, 4] for found in runs)
    return [compare(found, upstream_resumed()) for found in runs]


def half_precision() -> tuple[list[tuple[Outcome, bool]], Outcome]:
    """(unequal plans in bf16 against the nearest of upstream's own runs, and are they near enough; the largest
    distance between two of upstream's own)."""
    upstream = [train(one) for one in UPSTREAM_HALF]
    apart = [compare(one, other) for one, other in combinations(upstream, 2)]
    widest = max(apart, key=lambda one: one.loss_error)
    norm = max(one.norm_error for one in apart)
    told = []
    for found in map(train, HALF):
        nearest = min((compare(found, one) for one in upstream), key=lambda one: one.loss_error + one.norm_error)
        start = min(compare(_first_step(found), one).norm_error for one in upstream)
        near = nearest.loss_error <= widest.loss_error and nearest.norm_error <= norm
        told.append((nearest, near and nearest.complete and start < NORM_TOLERANCE))
    return told, replace(widest, norm_error=norm)


def _first_step(found: Run) -> Run:
    rows = tuple(
        tuple(row for row in rank if row["event"] != "iteration" or row["iteration"] == 1) for rank in found.ranks
    )
    return replace(found, ranks=rows)


def _outcome(one: Unequal) -> Outcome:
    """Of one configuration; one that does not run to its end says so and stops none of the others."""
    try:
        return compare(train(one.case, **one.variables), reference(one))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return Outcome(one.case.name, one.case.ranks, inf, inf, inf, complete=False)


def compare(found: Run, expected: Run) -> Outcome:
    """Losses, norms and parameters of two runs of the same model and samples, over the steps of the first."""
    steps = [(step, expected.losses[step], expected.grad_norms[step]) for step in sorted(found.losses)]
    error, complete = _parameter_error(found, expected)
    return Outcome(
        name=found.case.name,
        ranks=found.case.ranks,
        loss_error=max(abs(found.losses[step] - loss) for step, loss, _ in steps),
        norm_error=max(abs(row[step] / norm - 1) for row in _norms(found) for step, _, norm in steps),
        parameter_error=error,
        complete=complete,
        auxiliary_error=max(
            map(_relative, _auxiliary(found), _auxiliary(expected)[-len(_auxiliary(found)) :]), default=0.0
        ),
        boundary_error=max((_relative(*pair) for pair in crossings(found)), default=0.0),
    )


def _norms(found: Run) -> list[dict[int, float]]:
    """The gradient norm as every rank has it, which clips its gradients: by iteration."""
    return [{row["iteration"]: row["grad_norm"] for row in rows} for rows in found.rows("iteration")]


def crossings(found: Run) -> list[tuple[float, float]]:
    """(counted, predicted) messages and bytes of all steps that the busiest rank of each stage sent to its
    neighbours; none where stages are alike, which need no runtime."""
    if len({repr(found.case.mesh(stage)) for stage in range(found.plan.pp)}) == 1:
        return []
    crossed = [rows[0]["crossed"] for rows in found.rows("end")]
    pairs: list[tuple[float, float]] = []
    for index, (first, traffic) in enumerate(zip(_firsts(found), step_traffic(found.job, found.plan), strict=True)):
        ranks = crossed[first : first + found.case.size(index)]
        sent = {one.name: one for one in traffic if one.axis == "pp"}
        for name, way in (("activations", "forward"), ("gradients", "backward")):
            for counter, predicted in (("messages", sent[name].calls), ("bytes", sent[name].bytes)):
                counted = max(one.get(f"{way}_{counter}", 0) for one in ranks)
                pairs.append((counted, predicted * len(found.losses)))
    return pairs


def _firsts(found: Run) -> list[int]:
    """First rank of each stage."""
    return [sum(map(found.case.size, range(stage))) for stage in range(found.plan.pp)]


def _auxiliary(found: Run) -> list[float]:
    """As logged; z losses are left out, of which Megatron logs one rank's own (router.py:505)."""
    rows = [row.get("auxiliary", {}) for row in found.rows("iteration")[0]]
    return [value for row in rows for name in sorted(row) if name != "z_loss" for value in row[name]]


def _relative(value: float, expected: float) -> float:
    return abs(value - expected) / max(abs(expected), 1e-6)


def _parameter_error(found: Run, expected: Run) -> tuple[float, bool]:
    """(largest difference, is every value of the reference there?)"""
    whole: dict[str, list[tuple[tuple[int, ...], Any]]] = {}
    for name, offset, values in {(n, o): (n, o, v) for rank in expected.parameters for n, o, v in rank}.values():
        whole.setdefault(name, []).append((offset, values))
    seen: dict[tuple[str, tuple[int, ...]], int] = {}
    worst = 0.0
    for rank in found.parameters:
        for name, offset, values in rank:
            part = _part(whole[name], offset, values.shape)
            worst = max(worst, float((values - part).abs().max()))
            seen[name, offset] = values.numel()
    total = sum(values.numel() for pieces in whole.values() for _, values in pieces)
    return worst, sum(seen.values()) == total


def _part(pieces: list[tuple[tuple[int, ...], Any]], offset: tuple[int, ...], shape: Sequence[int]) -> Any:
    """The values of the whole parameter at a place."""
    for start, values in pieces:
        inside = [slice(at - begin, at - begin + size) for at, begin, size in zip(offset, start, shape, strict=True)]
        if all(one.start >= 0 and one.stop <= size for one, size in zip(inside, values.shape, strict=True)):
            return values[tuple(inside)]
    raise AssertionError(f"no piece of the reference holds {offset}")


def _show(one: Outcome, number: int) -> Outcome:
    print(f"{number:3} {_line(one, 'same' if one.good else 'DIFFERENT')}", file=sys.stderr, flush=True)
    return one


def _line(one: Outcome, verdict: str) -> str:
    errors = f"loss {one.loss_error:.1e}  norm {one.norm_error:.1e}  parameters {one.parameter_error:.1e}"
    whole = "" if one.complete else " INCOMPLETE"
    return f"{one.ranks} ranks  {errors}{whole}  {verdict}  {one.name}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hetero", description=__doc__)
    parser.add_argument("--json", action="store_true", help="the outcomes as JSON")
    parser.add_argument("--only", default="", help="configurations whose name holds this text")
    parser.add_argument("--handful", action="store_true", help="those that every version of Megatron-Core trains")
    parser.add_argument("--fuzz", type=int, default=0, help="as many random plans instead")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    chosen = list(fuzz(options.fuzz, options.seed)) if options.fuzz else list(CASES)
    chosen = list(HANDFUL) if options.handful else chosen
    resumes = HANDFUL_RESUMED if options.handful else RESUMES
    outcomes = [_show(_outcome(one), number) for number, one in enumerate(chosen, 1) if options.only in one.case.name]
    if not options.fuzz and options.only in "resume":
        resumed = [one for before, after in resumes for one in resume(before, after)]
        outcomes += [_show(one, number) for number, one in enumerate(resumed, len(outcomes) + 1)]
    good = all(one.good for one in outcomes)
    if not options.fuzz and not options.handful and options.only in "bf16":
        halves, widest = half_precision()
        for one, near in halves:
            good = good and near
            print(_line(one, "near" if near else "FAR"), file=sys.stderr)
        print(_line(widest, "apart, two of upstream's own"), file=sys.stderr)
    if not options.fuzz and not options.handful and not options.only:
        control = compare(train(CONTROL.case, **CONTROL.variables), reference(CONTROL))
        good = good and not control.good
        print(_line(control, "NOT SEEN" if control.good else "differs, as it must"), file=sys.stderr)
    if options.json:
        print(json.dumps([{**vars(one), "good": one.good} for one in outcomes], indent=1))
    else:
        print(f"{sum(one.good for one in outcomes)} of {len(outcomes)} as the reference")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
