"""Emitted launchers train real Megatron-Core on CPU: ``python -m bench.real [--json] [--only TEXT]``.

Every plan goes through script, plan, launcher, torchrun and ``entry.py``. Held against one rank with
the same samples: losses and gradient norms of every step, layers and parameters of every rank. The
last rows save under one plan and go on under another: they must continue the uninterrupted run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from bench.lab import BLOCK, CORE, MOE, Case, Run, block, run
from bench.volumes import parameters_per_rank
from hapmoe.plan import Recompute

__all__ = ["CASES", "RESUMES", "Outcome", "compare_with_reference", "resume"]

LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-4
"""Relative. Sums in another order: fp32 has seven digits, a norm adds up 400,000 squares."""

_FULL = Recompute(granularity="full", method="uniform", num_layers=1)
_ALLGATHER: dict[str, str | bool | None] = {"--moe-token-dispatcher-type": "allgather"}
_DISTRIBUTED: dict[str, str | bool | None] = {"--use-distributed-optimizer": None}
_OVERLAPPED = {**_DISTRIBUTED, "--overlap-grad-reduce": None, "--overlap-param-gather": None}
_MIXED: dict[str, str | bool | None] = {
    "--moe-layer-freq": "[0,1,1,1]",
    "--moe-shared-expert-intermediate-size": "64",
    "--qk-layernorm": None,
}

CASES: tuple[Case, ...] = (
    Case("uneven layers on two kinds, full block / moe", (3, 1), recompute=(BLOCK, MOE), pools=("fast", "slow")),
    Case("tp2 etp2, core_attn", tp=2, etp=2, recompute=(CORE,)),
    Case("tp2 ep2 allgather", tp=2, ep=2, flags=_ALLGATHER),
    Case("tp2 ep4 alltoall", tp=2, dp=2, ep=4),
    Case("ep2 dp2, distributed optimizer", dp=2, ep=2, flags=_DISTRIBUTED),
    Case("ep2 dp4, distributed, overlapped", dp=4, ep=2, flags=_OVERLAPPED),
    Case("pp2 ep2, full block 2 / moe", (3, 1), dp=2, ep=2, recompute=(block(2), MOE)),
    Case("pp2 vpp2 1+1/1+1", (2, 2), vpp=2),
    Case("pp2 vpp2 1+2/0+1 with ep2", (3, 1), vpp=2, dp=2, ep=2, recompute=(BLOCK, Recompute())),
    Case("pp4 1/1/1/1", (1, 1, 1, 1), recompute=(BLOCK, Recompute(), CORE, MOE)),
    Case("pp2 tp2 etp2", (1, 3), tp=2, etp=2),
    Case("pp2 tp2 ep2 allgather, uniform / none", (3, 1), tp=2, ep=2, flags=_ALLGATHER, recompute=(_FULL, Recompute())),
    Case("dense first, shared expert, pp2 tp2 ep2", (2, 2), tp=2, ep=2, flags=_MIXED),
    Case("mbs 2, dp2", dp=2, mbs=2),
)

_RESUMABLE = {**_DISTRIBUTED, "--dist-ckpt-optim-fully-reshardable": None}
RESUMES: tuple[tuple[Case, Case], ...] = (
    # saved under, resumed under
    (
        Case("pp2 ep2 1/3", (1, 3), dp=2, ep=2, flags=_RESUMABLE),
        Case("pp2 ep2 3/1", (3, 1), dp=2, ep=2, flags=_RESUMABLE),
    ),
    (
        Case("pp2 ep2 1/3", (1, 3), dp=2, ep=2, flags=_RESUMABLE),
        Case("tp2 ep2 etp2", tp=2, dp=2, ep=2, etp=2, flags=_RESUMABLE),
    ),
    (
        Case("tp2 ep4", tp=2, dp=2, ep=4, flags=_RESUMABLE),
        Case("pp2 vpp2 ep2", (2, 2), vpp=2, dp=2, ep=2, flags=_RESUMABLE),
    ),
)


@dataclass(frozen=True)
class Outcome:
    """How a run compares with the run of one rank."""

    name: str
    ranks: int
    layers_as_planned: bool
    parameters_as_counted: bool
    loss_error: float
    norm_error: float

    @property
    def good(self) -> bool:
        placed = self.layers_as_planned and self.parameters_as_counted
        return placed and self.loss_error <= LOSS_TOLERANCE and self.norm_error <= NORM_TOLERANCE


@cache
def _reference(flags: tuple[tuple[str, str | bool | None], ...]) -> Run:
    return run(Case("one rank", flags=dict(flags)))


def compare_with_reference(found: Run, reference: Run | None = None) -> Outcome:
    """Losses, norms, layers and parameters of a run; the run of one rank is made where none is given."""
    if reference is None:
        reference = _reference(tuple(sorted(found.case.reference.flags.items(), key=str)))
    assert found.losses.keys() <= reference.losses.keys()
    planned = parameters_per_rank(found.job, found.plan)
    starts = [rows[0] for rows in found.rows("start")]
    placed = counted = True
    for index, stage in enumerate(found.plan.stages):
        chunks = [list(range(start, start + count)) for start, count in stage.virtual_layers]
        for start in starts[stage.first_rank : stage.first_rank + stage.num_devices]:
            placed &= start["layers"] == chunks and start["stage"] == index
            counted &= (start["parameters"]["dense"], start["parameters"]["expert"]) == planned[index]
    return Outcome(
        name=found.case.name,
        ranks=found.case.ranks,
        layers_as_planned=placed,
        parameters_as_counted=counted,
        loss_error=_error(found.losses, reference.losses),
        norm_error=_error(found.grad_norms, reference.grad_norms),
    )


def _error(found: dict[int, float], expected: dict[int, float]) -> float:
    return max(abs(value - expected[step]) / abs(expected[step]) for step, value in found.items())


def resume(before: Case, after: Case, *, steps: int = 4) -> Outcome:
    """Half of the steps under one plan, the rest from its checkpoint under another, against one rank's run."""
    with tempfile.TemporaryDirectory(prefix="hapmoe-ckpt-") as folder:
        half = {"--train-iters": str(steps // 2), "--save": folder}
        rest = {"--train-iters": str(steps), "--load": folder}
        run(replace(before, flags={**before.flags, **half}))
        assert any(Path(folder).iterdir())
        found = run(replace(after, flags={**after.flags, **rest}))
    assert sorted(found.losses) == list(range(steps // 2 + 1, steps + 1))
    outcome = compare_with_reference(found)
    return replace(outcome, name=f"{before.name} -> {after.name}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.real", description=__doc__)
    parser.add_argument("--json", action="store_true", help="the outcomes as JSON")
    parser.add_argument("--only", default="", help="plans whose name holds this text")
    options = parser.parse_args(arguments)
    outcomes = []
    for case in CASES:
        if options.only in case.name:
            outcomes.append(_show(compare_with_reference(run(case))))
    for before, after in RESUMES:
        if options.only in f"{before.name} -> {after.name}":
            outcomes.append(_show(resume(before, after)))
    if options.json:
        print(json.dumps([{**vars(one), "good": one.good} for one in outcomes], indent=1))
    else:
        print(f"{sum(one.good for one in outcomes)} of {len(outcomes)} as one rank")
    return 0 if all(one.good for one in outcomes) else 1


def _show(one: Outcome) -> Outcome:
    line = f"{one.name:50} {one.ranks} ranks  layers {'yes' if one.layers_as_planned else 'NO'}  parameters "
    line += f"{'yes' if one.parameters_as_counted else 'NO'}  loss {one.loss_error:.1e}  norm {one.norm_error:.1e}"
    print(line, file=sys.stderr, flush=True)
    return one


if __name__ == "__main__":
    sys.exit(main())
