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
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from typing import Any

from bench.lab import BLOCK, CORE, MOE, Case, Run, block, run
from hapmoe.plan import Recompute

__all__ = ["CASES", "CONTROL", "Outcome", "Unequal", "compare", "fuzz", "train"]

LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 1e-5
"""Relative."""
PARAMETER_TOLERANCE = 1e-4
"""Four steps of Adam at 1e-3: a gradient near zero may move a parameter by much more than it differs."""

Flags = dict[str, str | bool | None]
_BASE: Flags = {"--train-iters": "4", "--lr": "1e-3", "--global-batch-size": "16"}
DISTRIBUTED: Flags = {"--use-distributed-optimizer": None}
OVERLAP: Flags = {**DISTRIBUTED, "--overlap-grad-reduce": None, "--overlap-param-gather": None}
CONTEXT: Flags = {"--transformer-impl": "transformer_engine"}  # what the rules ask for; the lab has its own
DENSE: Flags = dict.fromkeys(
    ("--num-experts", "--moe-ffn-hidden-size", "--moe-router-topk", "--moe-router-load-balancing-type"), False
) | {"--moe-token-dispatcher-type": False}
SEQUENCE_LOSS: Flags = {"--moe-router-load-balancing-type": "seq_aux_loss", "--moe-aux-loss-coeff": "0.1"}
AUX_LOSS: Flags = {**SEQUENCE_LOSS, "--moe-router-load-balancing-type": "aux_loss"}
Z_LOSS: Flags = {"--moe-z-loss-coeff": "0.01"}
TOKENS: Flags = {"--calculate-per-token-loss": None}
_SIX: Flags = {"--num-layers": "6", "--global-batch-size": "24"}
_SHARED: Flags = {
    "--moe-layer-freq": "[0,1,1,1]",
    "--moe-shared-expert-intermediate-size": "64",
    "--qk-layernorm": None,
}
HOST = {"HAPMOE_HETERO_TRANSPORT": "gloo"}


@dataclass(frozen=True)
class Unequal:
    """One configuration and what it is held against."""

    case: Case
    reference: Case | None = None
    """None: one rank."""
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Of a microbatch."""
        return self.case.mbs * (1 if self.case.meshes else self.case.dp)


def _mesh(text: str) -> dict[str, int]:
    """``tp2 dp2 ep4 etp1`` as degrees."""
    names = ("etp", "tp", "cp", "dp", "ep")
    found = {}
    for word in text.split():
        name = next(name for name in names if word.startswith(name))
        found[name] = int(word.removeprefix(name))
    return found


def unequal(
    plan: str,
    layers: tuple[int, ...],
    *flags: Flags,
    samples: int = 4,
    vpp: int = 1,
    recompute: tuple[Recompute, ...] = (),
    like: Case | None = None,
    variables: dict[str, str] | None = None,
) -> Unequal:
    """A configuration from its meshes, ``"dp1 / tp2 ep2"``, layers per stage and more flags of the script."""
    given = dict(_BASE)
    for more in flags:
        given |= more
    meshes = tuple(_mesh(part) for part in plan.split("/"))
    name = _name(plan, layers, given, vpp, recompute, variables or {})
    case = Case(name, layers, mbs=samples, vpp=vpp, recompute=recompute, flags=given, meshes=meshes)
    return Unequal(case, like, variables or {})


def _name(
    plan: str,
    layers: tuple[int, ...],
    flags: Flags,
    vpp: int,
    recompute: tuple[Recompute, ...],
    variables: dict[str, str],
) -> str:
    more = [f"vpp{vpp}"] if vpp > 1 else []
    if any(one != Recompute() for one in recompute):
        said = (one.method or ",".join(one.modules) or "none" for one in recompute)
        more.append(f"recompute={'/'.join(said)}")
    for name, value in flags.items():
        if name not in _BASE and value is not False:
            more.append(f"{name.removeprefix('--')}{'' if value is None else f'={value}'}")
    more += ["no-moe"] if flags.get("--num-experts") is False else []
    more += [value for name, value in variables.items() if name in HOST]
    return " ".join([plan, "layers", "+".join(map(str, layers)), *more])


def uniform(*flags: Flags, dp: int) -> Case:
    """Upstream's own run with this dp, as a reference."""
    given = dict(_BASE)
    for more in flags:
        given |= more
    return Case(f"uniform dp{dp}", (4,), dp=dp, mbs=4 // dp, flags=given)


CASES: tuple[Unequal, ...] = (
    # dp up and down, 3 against 2
    unequal("dp1 / dp2", (2, 2)),
    unequal("dp2 / dp1", (2, 2)),
    unequal("dp4 / dp1", (2, 2)),
    unequal("dp3 / dp2", (3, 3), _SIX, samples=6),
    unequal("dp2 / dp3", (3, 3), _SIX, DISTRIBUTED, samples=6),
    # tp against dp; sequence parallelism is on for MoE and off for dense models
    unequal("tp2 / dp1", (2, 2)),
    unequal("dp1 / tp2", (2, 2)),
    unequal("tp2 / dp2", (2, 2)),
    unequal("dp2 / tp2", (2, 2), DISTRIBUTED),
    unequal("tp4 / dp2", (2, 2)),
    unequal("tp2 dp2 / tp2", (2, 2)),
    unequal("tp2 / dp1", (2, 2), DENSE),
    unequal("dp2 / tp2", (2, 2), DENSE),
    unequal("tp4 / tp2", (2, 2), DENSE),
    unequal("tp2 / tp4", (2, 2), DENSE, DISTRIBUTED),
    # context parallelism
    unequal("cp2 / dp1", (2, 2), CONTEXT),
    unequal("dp1 / cp2", (2, 2), CONTEXT),
    unequal("cp2 / dp2", (2, 2), CONTEXT, DISTRIBUTED),
    unequal("cp2 tp2 / dp2", (2, 2), CONTEXT),
    unequal("tp2 / cp2", (2, 2), CONTEXT, DENSE),
    # expert parallelism
    unequal("dp2 ep2 / dp1", (2, 2)),
    unequal("dp1 / dp2 ep2", (2, 2), DISTRIBUTED),
    unequal("tp2 ep2 etp1 / dp2 ep2", (2, 2)),
    unequal("dp4 ep4 / dp2 ep2", (2, 2), DISTRIBUTED),
    unequal("tp2 dp2 ep2 etp2 / dp2 ep2", (2, 2)),
    unequal("dp4 ep2 / tp2 ep2 etp1", (2, 2), DISTRIBUTED),
    unequal("dp2 ep2 / dp1", (2, 2), {"--moe-token-dispatcher-type": "allgather"}),
    unequal("tp2 ep2 etp1 / dp2", (2, 2), _SHARED),
    # three and four stages, uneven layers
    unequal("tp2 / dp2 ep2 / dp1", (1, 2, 1)),
    unequal("dp1 / tp2 / dp1", (0, 4, 0)),
    unequal("dp2 ep2 / dp1", (3, 1)),
    unequal("dp1 / dp2 / tp2 / dp1", (1, 1, 1, 1), DISTRIBUTED),
    # interleaved, with overlapped and with plain sends
    unequal("dp2 ep2 / dp1", (2, 2), vpp=2),
    unequal("dp2 / dp1 / dp1", (2, 2, 2), _SIX, {"--no-overlap-p2p-communication": None}, samples=4, vpp=2),
    unequal("tp2 / dp2 ep2 / dp1", (2, 2, 2), _SIX, DISTRIBUTED, samples=4, vpp=2),
    # overlap, recomputation
    unequal("dp1 / dp2", (2, 2), OVERLAP),
    unequal("tp2 ep2 etp1 / dp2 ep2 / dp1", (1, 2, 1), OVERLAP),
    unequal("dp2 ep2 / dp1", (2, 2), OVERLAP, recompute=(block(2), MOE)),
    unequal("tp2 / dp2", (2, 2), recompute=(CORE, BLOCK)),
    # auxiliary losses, per-token loss
    unequal("tp2 ep2 etp1 / dp2 ep2 / dp1", (1, 2, 1), SEQUENCE_LOSS),
    unequal("dp1 / dp2 ep2", (2, 2), SEQUENCE_LOSS, Z_LOSS, DISTRIBUTED),
    unequal("tp2 ep2 etp1 / dp2 ep2 / dp1", (1, 2, 1), TOKENS),
    unequal("dp1 / dp2 ep2", (2, 2), TOKENS, DISTRIBUTED),
    unequal("dp2 / dp2 ep2", (2, 2), AUX_LOSS, like=uniform(AUX_LOSS, dp=2)),
    # a boundary through host memory
    unequal("dp2 ep2 / dp1", (2, 2), DISTRIBUTED, variables=HOST),
)

_RESUMABLE: Flags = {**DISTRIBUTED, "--dist-ckpt-optim-fully-reshardable": None}
SAVED = unequal("dp2 ep2 / tp2 ep2 etp1", (1, 3), _RESUMABLE)
RESUMED: tuple[Case, ...] = (
    unequal("dp2 ep2 / tp2 ep2 etp1", (1, 3), _RESUMABLE).case,
    unequal("tp2 ep2 etp1 / dp2 ep2", (3, 1), _RESUMABLE).case,
    unequal("tp2 dp2 ep4 etp1 / dp2 ep2", (2, 2), _RESUMABLE).case,
    Case("uniform dp2 ep2", (4,), dp=2, ep=2, mbs=2, flags={**_BASE, **_RESUMABLE}),
)
"""Plans that go on from the second step of ``SAVED``; the last one is upstream's own, without the runtime. EP = 1
and EP > 1 do not load each other's optimizer state (Megatron's KeyError 'optimizer')."""
FIRST = Case("uniform dp2 ep2", (4,), dp=2, ep=2, mbs=2, flags={**_BASE, **_RESUMABLE})
"""An upstream run that an unequal plan goes on from."""

HALF: Flags = {**_BASE, **DISTRIBUTED, "--bf16": None}
LOW_PRECISION: tuple[Case, Case, Case] = (
    unequal("dp2 ep2 / dp1", (2, 2), HALF).case,
    Case("uniform dp2, bf16", (4,), dp=2, mbs=2, flags=HALF),
    Case("one rank, bf16", (4,), mbs=4, flags=HALF),
)
"""In bf16 sums in another order differ visibly: unequal stages may differ from one rank by as much as twice
what upstream's own dp 2 does."""

CONTROL = unequal("tp2 / dp2 / dp1", (1, 2, 1), variables={"HAPMOE_HETERO_TRIAL": "off", "HAPMOE_LAB_UNSCALED": "1"})
"""Must fail the comparison: gradients cross boundaries unscaled, and the trial that would refuse it is off."""


@dataclass(frozen=True)
class Outcome:
    """How a run of unequal stages differs from its reference."""

    name: str
    ranks: int
    loss_error: float
    norm_error: float
    """Relative."""
    parameter_error: float
    complete: bool
    """Every parameter of the reference was found, whole."""
    auxiliary_error: float = 0.0
    """Of auxiliary losses as logged, relative."""

    @property
    def good(self) -> bool:
        exact = self.loss_error < LOSS_TOLERANCE and self.norm_error < NORM_TOLERANCE
        return exact and self.parameter_error < PARAMETER_TOLERANCE and self.complete and self.auxiliary_error < 1e-5


def train(case: Case, **variables: str) -> Run:
    """One run, with its parameters."""
    return run(case, by_rank=True, timeout_s=240, variables={"HAPMOE_LAB_PARAMETERS": "1", **variables})


@cache
def _one_rank(flags: tuple[tuple[str, str | bool | None], ...], layers: int, samples: int) -> Run:
    return train(Case("one rank", (layers,), mbs=samples, flags=dict(flags)))


def reference(one: Unequal) -> Run:
    """The run that ``one`` is held against; equal ones run once."""
    if one.reference is not None:
        return train(one.reference)
    flags = one.case.reference.flags
    return _one_rank(tuple(sorted(flags.items(), key=str)), sum(one.case.layers), one.samples)


def resume(before: Case, after: Sequence[Case]) -> list[Outcome]:
    """Two steps under one plan, two more from its checkpoint under others, against one rank's four steps."""
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="hapmoe-ckpt-") as folder:
        train(replace(before, flags={**before.flags, "--train-iters": "2", "--save": folder}))
        for one in after:
            found = train(replace(one, name=f"{before.name} -> {one.name}", flags={**one.flags, "--load": folder}))
            assert sorted(found.losses) == [3, 4]
            outcomes.append(compare(found, reference(Unequal(one))))
    return outcomes


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
        norm_error=max(abs(found.grad_norms[step] / norm - 1) for step, _, norm in steps),
        parameter_error=error,
        complete=complete,
        auxiliary_error=max(
            map(_relative, _auxiliary(found), _auxiliary(expected)[-len(_auxiliary(found)) :]), default=0.0
        ),
    )


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


def fuzz(count: int, seed: int, most_ranks: int = 6) -> Iterator[Unequal]:
    """Random plans: two to four stages, any degrees that Megatron allows, uneven and empty stages, options."""
    draw = random.Random(seed)
    known: set[str] = set()
    while len(known) < count:
        stages = draw.choice((2, 2, 3, 4))
        meshes = [_random_mesh(draw) for _ in range(stages)]
        size = sum(one.get("tp", 1) * one.get("cp", 1) * one.get("dp", 1) for one in meshes)
        if size > most_ranks or size == stages:
            continue
        vpp = 2 if stages == 2 and draw.random() < 0.25 else 1
        layers = (2, 2) if vpp > 1 else _random_layers(draw, stages)
        losses = draw.choice(({}, {}, SEQUENCE_LOSS, {**SEQUENCE_LOSS, **Z_LOSS}, TOKENS))
        flags = [draw.choice(({}, DISTRIBUTED, OVERLAP)), losses]
        flags += [CONTEXT] if any("cp" in one for one in meshes) else []
        plan = " / ".join(" ".join(f"{name}{value}" for name, value in one.items()) or "dp1" for one in meshes)
        kept = [draw.choice((Recompute(), Recompute(), CORE, MOE, BLOCK)) if each else Recompute() for each in layers]
        variables = HOST if draw.random() < 0.1 else {}
        one = unequal(plan, layers, *flags, vpp=vpp, recompute=tuple(kept), variables=variables)
        if one.case.name not in known:
            known.add(one.case.name)
            yield one


def _random_layers(draw: random.Random, stages: int) -> tuple[int, ...]:
    """Four layers, cut anywhere; a tenth of the cuts may leave a stage empty."""
    places = draw.choices(range(5), k=stages - 1) if draw.random() < 0.1 else draw.sample((1, 2, 3), stages - 1)
    cuts = sorted(places)
    return tuple(end - begin for begin, end in zip((0, *cuts), (*cuts, 4), strict=True))


def _random_mesh(draw: random.Random) -> dict[str, int]:
    tp, cp, dp = draw.choice((1, 1, 2)), draw.choice((1, 1, 1, 2)), draw.choice((1, 1, 2, 4))
    size = tp * cp * dp
    experts = [(ep, etp) for ep in (2, 4) for etp in {1, tp} if size % (ep * etp) == 0] or [(1, tp)]
    ep, etp = draw.choice([*experts, (1, tp)])
    mesh = {"tp": tp, "cp": cp, "dp": dp, "ep": ep, "etp": etp if ep > 1 else 1}
    return {name: value for name, value in mesh.items() if value > 1 or (name == "etp" and tp > 1 and ep > 1)}


def _show(one: Outcome, number: int) -> Outcome:
    line = f"{number:3} {one.ranks} ranks  loss {one.loss_error:.1e}  norm {one.norm_error:.1e}  "
    line += f"parameters {one.parameter_error:.1e}{'' if one.complete else ' INCOMPLETE'}  "
    print(f"{line}{'same' if one.good else 'DIFFERENT'}  {one.name}", file=sys.stderr, flush=True)
    return one


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hetero", description=__doc__)
    parser.add_argument("--json", action="store_true", help="the outcomes as JSON")
    parser.add_argument("--only", default="", help="configurations whose name holds this text")
    parser.add_argument("--fuzz", type=int, default=0, help="as many random plans instead")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    chosen = list(fuzz(options.fuzz, options.seed)) if options.fuzz else list(CASES)
    outcomes = [_show(_outcome(one), number) for number, one in enumerate(chosen, 1) if options.only in one.case.name]
    if not options.fuzz and options.only in "resume":
        resumed = [*resume(SAVED.case, RESUMED), *resume(FIRST, RESUMED[1:2])]
        outcomes += [_show(one, number) for number, one in enumerate(resumed, len(outcomes) + 1)]
    good = all(one.good for one in outcomes)
    if not options.fuzz and options.only in "bf16":
        found, upstream, single = map(train, LOW_PRECISION)
        allowed, half = compare(upstream, single), _show(compare(found, single), 0)
        near = half.loss_error <= 2 * allowed.loss_error and half.norm_error <= 2 * allowed.norm_error
        good = good and near and half.complete
        said = f"upstream's own dp 2: loss {allowed.loss_error:.1e}, norm {allowed.norm_error:.1e}"
        print(f"bf16: {'as near to one rank as' if near else 'FARTHER from one rank than'} {said}", file=sys.stderr)
    if not options.fuzz and not options.only:
        control = _show(compare(train(CONTROL.case, **CONTROL.variables), reference(CONTROL)), 0)
        good = good and not control.good
        print(f"control without scaling: {'differs, as it must' if not control.good else 'NOT SEEN'}", file=sys.stderr)
    if options.json:
        print(json.dumps([{**vars(one), "good": one.good} for one in outcomes], indent=1))
    else:
        print(f"{sum(one.good for one in outcomes)} of {len(outcomes)} as the reference")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
