"""Which checkpoints can be gone on from under which plan: what was seen in runs of Megatron-Core, as rules."""

from __future__ import annotations

import builders as b
import msgspec
import pytest

from hapmoe.job import Argument, JobSpec
from hapmoe.plan import Plan, Recompute
from hapmoe.replanning import RESHARDABLE, Switch, resume_job, switch

NODES = b.cluster(b.pool("a100", nodes=8))
SAVES = "--save ckpt --load ckpt --use-distributed-optimizer"


def job(argv: str = f"{SAVES} {RESHARDABLE}", **training: object) -> JobSpec:
    return b.with_training(b.job(argv=argv), **training)


def between(old: Plan, new: Plan, given: JobSpec | None = None) -> Switch:
    return switch(given or job(), NODES, old, NODES, new)


OLD = b.plan((4, 4), dp=4, ep=2)


@pytest.mark.parametrize(
    "new",
    [
        OLD,
        b.plan((5, 3), dp=4, ep=2),
        b.plan((2, 2, 2, 2), dp=4, ep=2),
        b.plan((4, 4), dp=4, ep=2, vpp=2),
        b.plan((4, 4), tp=2, dp=2, ep=2),
        b.plan((4, 4), tp=2, dp=2, ep=4),
        b.plan((4, 4), dp=8, ep=2, recompute=(Recompute(granularity="full", method="uniform", num_layers=1),) * 2),
    ],
)
def test_what_resumed_exactly_in_runs(new: Plan) -> None:
    """megatron-core main, MoE with the distributed optimizer: losses equal to the uninterrupted run."""
    found = between(OLD, new)
    assert found.possible and not found.before
    assert found.flags == ("--exit-on-missing-checkpoint", "--ckpt-fully-parallel-load")


@pytest.mark.parametrize("new", [b.plan((4, 4), dp=4), b.plan((4, 4), tp=2, etp=2, dp=2)])
def test_experts_that_become_dense_do_not_load(new: Plan) -> None:
    for old, other in ((OLD, new), (new, OLD)):
        found = between(old, other)
        assert not found.possible and "KeyError 'optimizer'" in found.obstacles[0]
        assert "--no-load-optim" in found.obstacles[0]
    assert between(OLD, new, job(f"{SAVES} {RESHARDABLE} --no-load-optim")).possible
    assert between(OLD, new, b.job(moe=None, argv=f"{SAVES} {RESHARDABLE}")).possible


def test_the_default_format_allows_another_dp_only() -> None:
    given = job(SAVES)
    more_replicas = between(OLD, b.plan((4, 4), dp=8, ep=2), given)
    assert more_replicas.possible and not more_replicas.before
    assert RESHARDABLE in more_replicas.flags  # so that the next change is free
    split = between(OLD, b.plan((5, 3), dp=4, ep=2), given)
    assert split.possible and "Global shape mismatch" in split.before[0] and "until the next save" in split.before[0]
    old_core = between(OLD, b.plan((5, 3), dp=4, ep=2), job(SAVES, megatron_version="0.14.0"))
    assert old_core.possible and not old_core.before and RESHARDABLE not in old_core.flags
    alone = job(f"{SAVES} --no-ckpt-fully-parallel-save", megatron_version="0.14.0")
    assert not between(OLD, b.plan((5, 3), dp=4, ep=2), alone).possible


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--save ckpt --ckpt-format torch", "--ckpt-format torch does not reshard"),
        ("--save ckpt --use-checkpoint-args", "would bring back the old degrees"),
        ("--bf16", "no --save: there is no checkpoint"),
        ("--save $(date)", "only known in a run ($(date))"),
    ],
)
def test_what_stands_in_the_way(argv: str, said: str) -> None:
    found = between(OLD, b.plan((5, 3), dp=4, ep=2), job(argv))
    assert not found.possible and any(said in line for line in found.obstacles), found.obstacles


def test_unequal_stages_read_a_key_per_layer() -> None:
    """Seen in runs: KeyError where one side stacks layers (transformer_block.py:827-850)."""
    stages = ({"dp": 4, "ep": 2}, {"tp": 2, "dp": 2, "ep": 2, "micro_batch_size": 2})
    unequal = msgspec.structs.replace(b.plan((4, 4), stages=stages), backend="megatron-hetero")
    found = between(OLD, unequal)
    assert not found.possible and "a key per layer" not in found.obstacles[0].partition("reads")[0]
    found = between(OLD, unequal, job(f"{SAVES} {RESHARDABLE} --moe-layer-freq ([1]*8)"))
    assert found.possible and "--no-load-rng" in found.flags
    uniform = msgspec.structs.replace(OLD, backend="megatron-hetero")
    assert between(unequal, uniform).possible and between(uniform, unequal).possible


def test_process_meshes_are_converted_offline() -> None:
    new = msgspec.structs.replace(b.plan((5, 3), dp=4, ep=2), backend="flagscale")
    assert "converted offline" in between(OLD, new).obstacles[0]


def test_padding_of_the_vocabulary_is_kept() -> None:
    given = b.with_model(job(), vocab_size=32001)
    found = between(OLD, b.plan((4, 4), tp=2, dp=2, ep=2), given)
    assert b.with_model(job(), vocab_size=32001).model.padded_vocab(1) == 32128
    assert found.flags[:2] == ("--make-vocab-size-divisible-by", "16064")
    assert "from 32128 to 32256" in found.notes[0] and "random state is dropped" in found.notes[1]
    resumed = resume_job(given, found)
    assert [word.text for word in resumed.argv][-len(found.flags) :] == list(found.flags)
    assert resumed.argv[: len(given.argv)] == given.argv


def test_a_folder_to_load_from_is_added() -> None:
    found = between(OLD, OLD, job(f"--save out/run {RESHARDABLE}"))
    assert found.flags[:2] == ("--load", "out/run") and found.same
    spaced = msgspec.structs.replace(job(), argv=(Argument(text="--save"), Argument(text="out of here")))
    assert "out of here" in between(OLD, OLD, spaced).flags
