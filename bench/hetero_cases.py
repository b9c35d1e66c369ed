"""The configurations of ``bench.hetero``: pipelines whose stages have degrees of their own, and what each is held
against."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from bench.lab import BLOCK, CORE, MOE, Case, block
from hapmoe.plan import Recompute

__all__ = [
    "CASES",
    "CONTROL",
    "HALF",
    "HANDFUL",
    "HANDFUL_RESUMED",
    "RESUMES",
    "UPSTREAM",
    "UPSTREAM_HALF",
    "Unequal",
    "fuzz",
    "unequal",
]

Flags = dict[str, str | bool | None]
_BASE: Flags = {"--train-iters": "4", "--lr": "1e-3", "--global-batch-size": "16", "--clip-grad": "0.3"}
"""Gradient norms are 0.5 to 0.7: every step clips."""
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
    libraries: tuple[str, ...] = (),
) -> Unequal:
    """A configuration from its meshes, ``"dp1 / tp2 ep2"``, layers per stage and more flags of the script."""
    given = dict(_BASE)
    for more in flags:
        given |= more
    meshes = tuple(_mesh(part) for part in plan.split("/"))
    name = _name(plan, layers, given, vpp, recompute, variables or {})
    name += f" {'+'.join(libraries)}" if libraries else ""
    case = Case(
        name, layers, mbs=samples, vpp=vpp, recompute=recompute, flags=given, meshes=meshes, libraries=libraries
    )
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
    unequal("dp2 / tp2 dp2 ep2 etp1", (3, 1), AUX_LOSS, like=uniform(AUX_LOSS, dp=2)),
    # a boundary through host memory
    unequal("dp2 ep2 / dp1", (2, 2), DISTRIBUTED, variables=HOST),
    # stages whose libraries cannot reach each other
    unequal("dp2 ep2 / dp1", (2, 2), SEQUENCE_LOSS, libraries=("nccl", "hccl")),
    unequal("dp2 / tp2 ep2 etp1 / dp1", (1, 2, 1), OVERLAP, TOKENS, libraries=("nccl", "nccl", "hccl")),
    unequal("tp2 / dp2 ep2 / dp1", (2, 2, 2), _SIX, DISTRIBUTED, samples=4, vpp=2, libraries=("hccl", "nccl", "nccl")),
)

HANDFUL: tuple[Unequal, ...] = (
    unequal("dp2 ep2 / dp1", (2, 2)),
    unequal("dp1 / dp2 ep2", (2, 2), OVERLAP, recompute=(block(2), MOE)),
    unequal("dp2 / tp2", (2, 2), DENSE),
    unequal("tp2 ep2 etp1 / dp2 ep2 / dp1", (2, 2, 2), _SIX, DISTRIBUTED),
    unequal("tp2 dp2 ep2 etp2 / dp2 ep2", (2, 2), DISTRIBUTED),
    unequal("dp3 / dp2", (3, 3), _SIX, samples=6),
    unequal("cp2 / dp1", (2, 2), CONTEXT),
    unequal("dp2 ep2 / dp1", (2, 2), vpp=2),
    unequal("dp1 / dp2 ep2", (2, 2), SEQUENCE_LOSS, Z_LOSS),
    unequal("dp1 / dp2 ep2", (2, 2), TOKENS),
    unequal("dp2 ep2 / dp1", (2, 2), DISTRIBUTED, libraries=("nccl", "hccl")),
)
"""What every version trains, before 0.13 too, which takes no uneven layers."""

_RESUMABLE: Flags = {**DISTRIBUTED, "--dist-ckpt-optim-fully-reshardable": None}
UPSTREAM = Case("uniform dp2 ep2", (4,), dp=2, ep=2, mbs=2, flags={**_BASE, **_RESUMABLE})
"""Trained, saved and resumed without the runtime."""
_SAVED = unequal("dp2 ep2 / tp2 ep2 etp1", (1, 3), _RESUMABLE).case
_TURNED = unequal("tp2 ep2 etp1 / dp2 ep2", (3, 1), _RESUMABLE).case
_ALONE = unequal("dp1 / tp2", (1, 3), _RESUMABLE).case
_PLAIN = unequal("dp2 ep2 / dp1", (2, 2)).case
RESUMES: tuple[tuple[Case, tuple[Case, ...]], ...] = (
    (_SAVED, (_SAVED, _TURNED, unequal("tp2 dp2 ep4 etp1 / dp2 ep2", (2, 2), _RESUMABLE).case, _ALONE, UPSTREAM)),
    (UPSTREAM, (_TURNED, _ALONE)),
    (_ALONE, (_TURNED, Case("uniform dp2", (4,), dp=2, mbs=2, flags={**_BASE, **_RESUMABLE}))),
    (_PLAIN, (_PLAIN, unequal("dp1 / tp2", (1, 3)).case)),
)
"""A plan that trains and saves two steps, and those that go on from there. Some have no rank with ep > 1: their
optimizer has no part for experts. The last two have no distributed optimizer."""

_FIRST = unequal("dp1 / dp2 ep2", (2, 2), _RESUMABLE).case
_SECOND = unequal("tp2 ep2 etp1 / dp2 ep2", (2, 2), _RESUMABLE).case
HANDFUL_RESUMED = ((_FIRST, (_FIRST, _SECOND)), (_SECOND, (UPSTREAM,)))
"""The first rank of the first has no experts of its own, which versions before 0.14 keep in another optimizer."""

_HALF: Flags = {**DISTRIBUTED, "--bf16": None}
HALF: tuple[Case, ...] = (
    unequal("dp2 ep2 / dp1", (2, 2), _HALF).case,
    unequal("dp2 / dp2 ep2", (2, 2), _HALF).case,
    unequal("dp1 / dp4", (1, 3), _HALF).case,
)
"""In bf16. The first step, from the same weights, is as exact as in fp32: gradients are summed in fp32. Afterwards
weights are rounded, and sums in another order differ visibly, between upstream's own runs too."""
UPSTREAM_HALF: tuple[Case, ...] = tuple(
    Case(f"uniform dp{dp} ep{ep} bf16", (4,), dp=dp, ep=ep, mbs=4 // dp, flags={**_BASE, **_HALF})
    for dp, ep in ((1, 1), (2, 1), (2, 2), (4, 1))
)

CONTROL = unequal("tp2 / dp2 / dp1", (1, 2, 1), variables={"HAPMOE_HETERO_TRIAL": "off", "HAPMOE_LAB_UNSCALED": "1"})
"""Must fail the comparison: gradients cross boundaries unscaled, and the trial that would refuse it is off."""


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
