"""Arguments of the user's that stay as they are and forbid some plans.

Most are one row of a table: the flag, when it cannot be kept, and where Megatron says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

from hapmoe.hybrid import pattern_of, read_hybrid
from hapmoe.rules.base import Broken, Context, Rule
from hapmoe.rules.placement import is_blackwell

__all__ = ["RULES", "needs_one_connection"]

Found = Iterator[Broken]

_FSDP = ("--use-torch-fsdp2", "--use-megatron-fsdp", "--use-custom-fsdp")

_TABLE: tuple[tuple[str, Callable[[Context], str | None], str], ...] = (
    (
        "--use-tp-pp-dp-mapping",
        lambda c: f"puts pipeline ranks inside data parallelism; PP is {c.plan.pp}" if c.plan.pp > 1 else None,
        "training/initialize.py:395; PS:898",
    ),
    (
        "--use-torch-fsdp2",
        lambda c: "needs PP = 1 and EP = 1" if c.plan.pp > 1 or _ep(c) > 1 else None,
        "A:1032",
    ),
    (
        "--cpu-offloading-num-layers",
        lambda c: f"needs PP = 1, and it is {c.plan.pp}" if c.plan.pp > 1 else None,
        "TC:1892",
    ),
    (
        "--hybrid-context-parallel",
        lambda c: (
            f"needs PP = 1 and an even DP·CP, and they are {c.plan.pp} and {_replicas(c)}"
            if c.plan.pp > 1 or _replicas(c) % 2
            else None
        ),
        "A:1445; PS:1043",
    ),
    (
        "--batch-invariant-mode",
        lambda c: "needs CP = 1" if any(stage.cp > 1 for stage in c.plan.stages) else None,
        "TC:3230",
    ),
    (
        "--enable-mhc-connections",
        lambda c: f"needs PP = 1, and it is {c.plan.pp}" if c.plan.pp > 1 else None,
        "TC:2091",
    ),
    (
        "--mla-down-proj-fusion",
        lambda c: _down_projection(c),
        "multi_latent_attention.py:1363; multi_latent_attention.py:1367",
    ),
    (
        "--overlap-param-gather-with-optimizer-step",
        lambda c: "needs virtual stages (vpp > 1)" if c.plan.vpp == 1 else None,
        "A:1067",
    ),
    ("--defer-embedding-wgrad-compute", lambda c: "needs PP > 1" if c.plan.pp == 1 else None, "MPC:546"),
    (
        "--overlap-p2p-communication-warmup-flush",
        lambda c: "needs virtual stages (vpp > 1)" if c.plan.vpp == 1 else None,
        "MPC:572",
    ),
    (
        "--tensor-parallel-num-weight-shards",
        lambda c: None if _shards_are_tp(c) else "changes the data-parallel size, which plans do not model",
        "A:447; MPC:32",
    ),
)


def _ep(c: Context) -> int:
    return max(stage.ep for stage in c.plan.stages)


def _replicas(c: Context) -> int:
    return c.plan.stages[0].dp * c.plan.stages[0].cp if c.plan.stages else 1


def _down_projection(c: Context) -> str | None:
    mla = c.job.model.mla
    if mla is None:
        return None
    for _, stage in c.meshes():
        for width in (mla.q_lora or 0, mla.kv_lora + mla.qk_rope):
            if width % stage.tp:
                return f"cuts a projection of width {width}, which does not divide by TP = {stage.tp}"
    return None


def _shards_are_tp(c: Context) -> bool:
    """One shard per tensor-parallel rank is no further sharding."""
    return {stage.tp for stage in c.plan.stages} == {c.flag_int("--tensor-parallel-num-weight-shards")}


def _row(flag: str, problem: Callable[[Context], str | None], source: str) -> Rule:
    def check(c: Context) -> Found:
        if c.has_flag(flag) and (said := problem(c)) is not None:
            yield Broken(f"{flag} {said}", f"remove {flag} from the script")

    return Rule(flag.removeprefix("--"), "an argument of the script that this plan contradicts", source, check)


def _optimizer_instances(c: Context) -> Found:
    instances = c.flag_int("--num-distributed-optimizer-instances") or 1
    for index, stage in c.meshes():
        for name, replicas in (("DP·CP", stage.dp * stage.cp), ("EDP", stage.edp)):
            if replicas % instances:
                yield Broken(
                    f"--num-distributed-optimizer-instances {instances} does not divide {name} = {replicas}",
                    "change dp, or --num-distributed-optimizer-instances",
                    index,
                )


def _hierarchical(c: Context) -> Found:
    words = c.flag_values("--hierarchical-context-parallel-sizes")
    if not words or not all(word.isdecimal() for word in words):
        return
    sizes = prod(int(word) for word in words)
    for index, stage in c.meshes():
        if stage.cp != sizes:
            yield Broken(
                f"--hierarchical-context-parallel-sizes {' '.join(words)} multiply to {sizes}, CP is {stage.cp}",
                f"set cp to {sizes}, or remove the flag",
                index,
            )


def needs_one_connection(c: Context) -> frozenset[str]:
    """Device kinds on which Megatron insists on CUDA_DEVICE_MAX_CONNECTIONS=1.

    Source: A:1477 (TP or CP above 1 before Blackwell; FSDP and expert overlap want the opposite).
    """
    wants_more = c.job.training.overlap_moe_comm or any(c.has_flag(flag) for flag in _FSDP)
    if wants_more:
        return frozenset()
    return frozenset(
        pool.device.name
        for _, stage, pool in c.pools()
        if (stage.tp > 1 or stage.cp > 1) and not is_blackwell(pool.device)
    )


def _connections(c: Context) -> Found:
    given = c.job.env.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if given is not None and given.text not in (None, "1") and needs_one_connection(c):
        yield Broken(
            f"CUDA_DEVICE_MAX_CONNECTIONS is {given.text}; TP or CP above 1 needs 1",
            "export CUDA_DEVICE_MAX_CONNECTIONS=1 in the script",
        )


def _hybrid(c: Context) -> Found:
    pattern = pattern_of(c.job)
    if pattern is None:
        return
    if c.backend.name not in ("megatron", "any"):
        yield Broken(f"a HybridModel; back end {c.backend.name} trains GPTModel", "--backend megatron")
    hybrid = read_hybrid(pattern)
    if hybrid is None and c.plan.pp > 1:
        yield Broken(f"pattern {pattern!r} is no Transformer's, and plans split no other", "set pp to 1")
    if hybrid is not None and hybrid.attention == "+" and c.before("0.19.0"):
        yield Broken("multi-latent attention (+) in a pattern needs Megatron-Core 0.19", "use 0.19 or newer")
    counts = {count for stage in c.plan.stages for _, count in stage.virtual_layers}
    if c.before("0.17.0") and (len(counts) > 1 or c.plan.vpp > 1):
        yield Broken(
            f"Megatron-Core {c.job.training.megatron_version} splits a HybridModel evenly and does not interleave it",
            "use 0.17 or newer, or an even split with vpp 1",
        )


def _bf16_ends(c: Context) -> Found:
    """Layers in BF16 at the ends of an FP8 model lie on the first and the last stage of an even split."""
    if c.job.training.fp8_recipe is None or not c.has_flag("--first-last-layers-bf16"):
        return
    most = c.job.model.num_layers // max(c.plan.pp, 1)
    for end in ("start", "end"):
        flag = f"--num-layers-at-{end}-in-bf16"
        count = c.flag_int(flag)
        count = 1 if count is None else count
        if count > most:
            yield Broken(f"{flag} {count} is above the layers per pipeline stage, {most}", "lower pp, or the count")


def _torch_dcp(c: Context) -> Found:
    words = c.flag_values("--ckpt-format")
    if words and words[0] == "torch_dcp" and (c.plan.pp > 1 or any(stage.tp > 1 for stage in c.plan.stages)):
        yield Broken("--ckpt-format torch_dcp needs TP = 1 and PP = 1", "--ckpt-format torch_dist")


def _version(c: Context) -> Found:
    if c.before(c.backend.min_version):
        yield Broken(
            f"Megatron-Core {c.job.training.megatron_version}; arguments are known from {c.backend.min_version}",
            f"train with {c.backend.min_version} or newer",
        )


RULES = (
    Rule("version", "arguments have other names or meanings", "release branches core_r0.12.0 to 0.19.0", _version),
    *(_row(*row) for row in _TABLE),
    Rule(
        "hybrid",
        "a HybridModel is split by bars in its pattern",
        "A:787-863; hybrid_layer_allocation.py:460; hybrid_block.py:360; core_r0.16.0 mamba_block.py",
        _hybrid,
    ),
    Rule("optimizer-instances", "instances share the replicas equally", "PS:922; PS:1447", _optimizer_instances),
    Rule("hierarchical-context", "the levels multiply to CP", "A:582", _hierarchical),
    Rule("bf16-ends", "layers kept in BF16 are counted per stage", "TC:1543; TC:1552", _bf16_ends),
    Rule("torch-dcp", "a format for data parallelism alone", "A:1668", _torch_dcp),
    Rule("connections", "overlapped collectives rely on launch order", "A:1477", _connections),
)
