"""FlagScale's meshes: inside the envelope every rank is wired right, outside the plan is refused."""

from __future__ import annotations

from collections import Counter

import builders as b
import msgspec
import pytest
from flagscale_oracle import RELEASED, REPAIRED, MeshShape, check_arguments, layer_offsets, right_pairs, wire
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hapmoe.backends.flagscale import launchable, stage_arguments
from hapmoe.backends.meshes import Mesh, broken_wiring, meshes
from hapmoe.job import JobSpec
from hapmoe.launch import target
from hapmoe.launch.verdict import runnable_by, verdict
from hapmoe.plan import Plan, Recompute, Stage
from hapmoe.resolve import resolve
from hapmoe.rules import check

MIXED = b.cluster(b.pool("a100"), b.pool("h800", nodes=3))
VENDORS = b.cluster(b.pool("h800"), b.pool("mi300x"), b.pool("ascend"), links=(("mi300x", "ascend"),))
ARGV = "--num-layers 8 --untie-embeddings-and-output-weights --use-distributed-optimizer --bf16"


def flagscale(plan: Plan, backend: str = "flagscale") -> Plan:
    return msgspec.structs.replace(plan, backend=backend)


def argv_of(job: JobSpec, plan: Plan, cluster: b.Cluster) -> list[list[str]]:
    """Arguments of the first rank of every stage."""
    common, per_stage = stage_arguments(job, plan, cluster)
    return [[argument.text or "" for argument in common] + list(words) for words in per_stage]


SHAPE = st.builds(
    MeshShape,
    tp=st.sampled_from([1, 2, 4]),
    ep=st.sampled_from([1, 1, 2, 4]),
    etp=st.sampled_from([1, 1, 2]),
    dp=st.sampled_from([1, 2, 3, 4]),
    pp=st.sampled_from([1, 1, 2, 3]),
)


def wired_right(shapes: list[MeshShape], axes: tuple[int, int]) -> bool:
    pairs, covered = wire(shapes, axes)
    world = set(range(sum(shape.world for shape in shapes)))
    return pairs == right_pairs(shapes) and all(ranks == world for ranks in covered.values())


def as_meshes(shapes: list[MeshShape]) -> tuple[Mesh, ...]:
    found, first = [], 0
    for s in shapes:
        stage = Stage(pool="a100", num_layers=1, tp=s.tp, ep=s.ep, etp=s.etp, dp=s.dp, num_devices=s.tp * s.dp)
        found.append(Mesh(first, s.pp, stage))
        first += s.pp
    return tuple(found)


def test_shapes_inside_the_envelope_are_wired_right() -> None:
    tried: Counter[str] = Counter()

    @settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
    @given(shapes=st.lists(SHAPE, min_size=2, max_size=3))
    def try_shapes(shapes: list[MeshShape]) -> None:
        assume(all(s.tp * s.dp % (s.ep * s.etp) == 0 and s.world <= 32 for s in shapes))
        assert wired_right(shapes, REPAIRED)
        right = wired_right(shapes, RELEASED)
        inside = not broken_wiring(b.job(), as_meshes(shapes))
        assert right or not inside
        tried[f"{inside=} {right=}"] += 1

    try_shapes()
    assert tried["inside=True right=True"] > 10 and tried["inside=False right=False"] > 10, tried


def test_the_documented_example_is_inside_and_its_neighbour_is_not() -> None:
    """One node A100 with 5 layers, three of H800: EP 8 is wired right, EP 4 loses groups (both were run)."""
    job = b.with_model(b.job(moe=8, argv="--num-layers 8"), num_layers=8)
    stages = ({"tp": 2, "dp": 4, "ep": 8},) * 4
    plan = flagscale(b.plan((2, 2, 2, 2), pools=("a100", "h800", "h800", "h800"), stages=stages))
    assert check(job, MIXED, plan) == ()
    plan = resolve(job, MIXED, plan)
    args = check_arguments(argv_of(job, plan, MIXED)[0] + ["--untie-embeddings-and-output-weights"])
    assert args.hetero_process_meshes == [2, 1, 8, 4, 1, 2, 1, 8, 4, 3]
    assert args.hetero_device_types == ["mesh0-a100", "mesh1-h800"]
    assert layer_offsets(args) == [0, 2, 4, 6]
    four = ({"tp": 2, "dp": 4, "ep": 4},) * 4
    outside = flagscale(b.plan((2, 2, 2, 2), pools=("a100", "h800", "h800", "h800"), stages=four))
    assert [v.rule for v in check(job, MIXED, outside)] == ["hetero-experts"]
    assert not verdict(job, MIXED, outside)[0]


DEGREES = st.fixed_dictionaries(
    {"tp": st.sampled_from([1, 2]), "dp": st.sampled_from([1, 2, 4, 8]), "ep": st.sampled_from([1, 2, 4, 8])}
)


@settings(max_examples=300, deadline=None)
@given(
    first=DEGREES,
    second=DEGREES,
    layers=st.sampled_from([(8,), (3, 5), (2, 3, 3), (1, 2, 2, 3)]),
    cut=st.integers(0, 3),
    mbs=st.sampled_from([1, 2, 4]),
    moe=st.booleans(),
    tied=st.booleans(),
)
def test_what_the_rules_let_through_flagscale_takes(
    first: dict[str, int],
    second: dict[str, int],
    layers: tuple[int, ...],
    cut: int,
    mbs: int,
    moe: bool,
    tied: bool,
) -> None:
    """Its argument rules, its groups and its layer numbers, on the words that are emitted."""
    cut = min(cut, len(layers))
    words = ARGV.replace("--untie-embeddings-and-output-weights", "") if tied else ARGV
    job = b.with_model(b.job(moe=8 if moe else None, argv=words), tied_embeddings=tied)
    total = mbs * (first if cut else second)["dp"]
    chosen = [first] * cut + [second] * (len(layers) - cut)
    stages = tuple({**degrees, "micro_batch_size": max(total // degrees["dp"], 1)} for degrees in chosen)
    stages = tuple({**degrees, "ep": degrees["ep"] if moe else 1} for degrees in stages)
    pools = ("a100",) * cut + ("h800",) * (len(layers) - cut)
    nodes = b.cluster(b.pool("a100", nodes=4), b.pool("h800", nodes=4))
    plan = flagscale(b.plan(layers, pools=pools, stages=stages, micro_batch_size=mbs))
    if any(v.rule != "offset" for v in check(job, nodes, plan)):
        return
    plan = resolve(job, nodes, plan)
    found = meshes(job, plan)
    for argv in argv_of(job, plan, nodes):
        args = check_arguments(argv)
    shapes = [MeshShape(m.stage.tp, m.stage.ep, m.stage.etp, m.stage.dp, m.pp) for m in found]
    assert sum(shape.world for shape in shapes) == plan.num_devices
    assert wired_right(shapes, RELEASED)
    offsets = [sum(layers[:index]) for index in range(len(layers))]
    same = len(set(job.model.moe_pattern)) == 1
    assert layer_offsets(args) == offsets or same
    assert layer_offsets(args, repaired=True) == offsets


def test_a_kind_that_comes_back_has_a_type_of_its_own() -> None:
    """FlagScale sorts ranks by their type's first place in the list: A, B, A would become A, A, B."""
    nodes = b.cluster(b.pool("a100", nodes=2), b.pool("h800"))
    stages = tuple({"dp": 8, "ep": 8} for _ in range(3))
    plan = resolve(b.job(), nodes, flagscale(b.plan((2, 3, 3), pools=("a100", "h800", "a100"), stages=stages)))
    argv = argv_of(b.job(), plan, nodes)
    types = [words[words.index("--hetero-current-device-type") + 1] for words in argv]
    assert types == ["mesh0-a100", "mesh1-h800", "mesh2-a100"]


def test_recomputation_is_given_per_rank() -> None:
    full = Recompute(granularity="full", method="block", num_layers=2)
    stages = ({"dp": 8, "ep": 8}, {"dp": 8, "ep": 8})
    plan = b.plan((3, 5), pools=("a100", "h800"), stages=stages, recompute=(full, Recompute()))
    job = b.job(argv="--recompute-granularity full --hetero-process-meshes 1 1 1 8 2 --distributed-backend gloo")
    first, second = argv_of(job, resolve(job, MIXED, flagscale(plan)), MIXED)
    assert " ".join(first).endswith("--recompute-granularity full --recompute-method block --recompute-num-layers 2")
    assert "--recompute-granularity" not in second and "per-stage-micro-batch" not in " ".join(first + second)
    assert first.count("--hetero-process-meshes") == 1 and "gloo" not in first


@pytest.mark.parametrize(
    ("pools", "transport", "words", "reason"),
    [
        (("a100", "h800"), "nccl", ["--distributed-backend", "nccl"], ""),
        (("h800", "mi300x"), "flagcx", ["--distributed-backend", "flagcx"], ""),
        (("h800", "mi300x"), "gloo", ["--distributed-backend", "nccl", "--hetero-use-cpu-communication"], ""),
        (("h800", "ascend"), "gloo", ["--distributed-backend", "nccl", "--hetero-use-cpu-communication"], ""),
        (("h800", "ascend"), "flagcx", None, "flagcx joins nccl and rccl, not hccl; gloo does, through host memory"),
        (("h800", "mi300x"), "nccl", None, "nccl is one vendor's library and holds no rccl device"),
    ],
)
def test_which_transport_joins_which_kinds(
    pools: tuple[str, str], transport: str, words: list[str] | None, reason: str
) -> None:
    nodes = b.cluster(*(b.pool(name) for name in pools), links=(pools,), transport=transport)
    plan = flagscale(b.plan((4, 4), pools=pools, dp=8, ep=8))
    possible, said = launchable(b.job(), nodes, plan)
    assert possible == (not reason) and reason in said
    assert bool(check(b.job(), nodes, plan)) == bool(reason)
    upstream = runnable_by(b.job(), nodes, plan)["megatron"]
    assert bool(upstream) == (pools != ("a100", "h800"))
    if words:
        argv = argv_of(b.job(), resolve(b.job(), nodes, plan), nodes)[0]
        assert argv[argv.index("--distributed-backend") :][: len(words)] == words


def test_the_patch_comes_only_when_asked_for() -> None:
    stages = ({"tp": 2, "dp": 4, "ep": 4},) * 4
    plan = flagscale(b.plan((2, 2, 2, 2), pools=("a100", "h800", "h800", "h800"), stages=stages))
    files = target("flagscale")(b.job(), MIXED, plan, "{}")
    assert "NOT LAUNCHABLE: rule hetero-experts" in files["README.txt"] and not any(".patch" in name for name in files)
    patched = flagscale(plan, "flagscale-patched")
    assert check(b.job(), MIXED, patched) == () and verdict(b.job(), MIXED, patched) == (True, "")
    files = target("flagscale")(b.job(), MIXED, patched, "{}")
    assert files["flagscale/hapmoe-hetero.patch"].count("\n+ ") == 3
    assert "hapmoe-hetero.patch" in files["README.txt"]
