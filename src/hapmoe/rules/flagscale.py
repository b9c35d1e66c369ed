"""What FlagScale's heterogeneous mode does right. Silent for other back ends.

Sources: FlagScale v0.9.0; ``FSA`` flagscale/train/arguments.py, ``FSC``
flagscale/train/hetero/parallel_context.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from hapmoe.backends.meshes import Mesh, broken_wiring, meshes
from hapmoe.backends.transports import cannot_join
from hapmoe.rules.base import Broken, Context, Rule

__all__ = ["RULES"]

Found = Iterator[Broken]


def _applies(c: Context) -> bool:
    return c.backend.module.endswith(".flagscale")


def _meshes(c: Context) -> tuple[Mesh, ...]:
    return meshes(c.job, c.plan, patched=not c.backend.envelope)


def _version(c: Context) -> Found:
    newest = c.backend.before_version
    version = c.job.training.megatron_version
    if newest and version is not None and not c.before(newest):
        yield Broken(
            f"Megatron-Core {version} comes with a fork that ignores --hetero-pipeline-layer-split",
            f"{c.backend.note}",
        )


def _batch(c: Context) -> Found:
    if not _applies(c) or not c.plan.stages:
        return
    total = c.plan.stages[0].dp * c.plan.micro_batch_size
    for index, stage in c.meshes():
        if total % stage.dp or stage.micro_batch_size * stage.dp != total:
            yield Broken(
                f"DP·MBS of the first mesh is {c.plan.stages[0].dp}·{c.plan.micro_batch_size} = {total}; "
                f"this stage has DP = {stage.dp}, MBS = {stage.micro_batch_size}",
                "the micro-batch of a mesh is that product over its DP, a whole number",
                index,
            )


def _sequence(c: Context) -> Found:
    if _applies(c) and len({stage.tp for stage in c.plan.stages}) > 1:
        from hapmoe.backends.flagscale import sequence_parallel

        if not sequence_parallel(c.job, c.plan):
            tps = ", ".join(str(mesh.stage.tp) for mesh in _meshes(c))
            yield Broken(f"TP differs between meshes ({tps}) without sequence parallelism", "add --sequence-parallel")


def _wiring(defect: str, hint: str) -> Rule:
    whys = {
        "pairing": ("ranks of neighbouring meshes are paired by the wrong axis", "FSC:532"),
        "experts": ("tensor-expert-pipeline groups are missing on part of the ranks", "FSC:537"),
        "offset": (
            "a later mesh of one stage counts its layers from 0",
            "transformer_layer.py.patch of FlagScale v0.9.0, get_transformer_layer_offset",
        ),
    }

    def check(c: Context) -> Found:
        if _applies(c) and c.backend.envelope:
            for kind, stage, said in broken_wiring(c.job, _meshes(c)):
                if kind == defect:
                    yield Broken(f"FlagScale wires {said} wrong", f"{hint}, or --backend flagscale-patched", stage)

    return Rule(f"hetero-{defect}", *whys[defect], check)


def _ends(c: Context) -> Found:
    if not _applies(c) or len(_meshes(c)) == 1:
        return
    first, last = c.plan.stages[0], c.plan.stages[-1]
    if c.job.model.mtp_layers:
        yield Broken("MTP layers across process meshes are not verified", "train without MTP layers")
    if c.job.model.tied_embeddings and first.tp != last.tp:
        yield Broken(f"tied embeddings with TP = {first.tp} on the first stage and {last.tp} on the last")
    if (
        c.job.model.tied_embeddings
        and c.job.training.distributed_optimizer
        and max(first.dp, last.dp) % min(first.dp, last.dp)
    ):
        yield Broken(f"tied embeddings with DP = {first.dp} on the first stage and {last.dp} on the last")
    for index, stage in enumerate(c.plan.stages):
        if stage.num_layers == 0:
            yield Broken("a stage without layers across process meshes is not verified", stage=index)


def _instances(c: Context) -> Found:
    if _applies(c) and (c.flag_int("--num-distributed-optimizer-instances") or 1) > 1:
        yield Broken(
            "--num-distributed-optimizer-instances with process meshes", "remove --num-distributed-optimizer-instances"
        )


def _checkpoint(c: Context) -> Found:
    words = c.flag_values("--ckpt-format")
    if _applies(c) and len(_meshes(c)) > 1 and words and words[0] != "torch":
        yield Broken(f"--ckpt-format {words[0]} across process meshes is not verified", "--ckpt-format torch")


def _transport(c: Context) -> Found:
    """For every back end: what a link says that it uses must hold both kinds."""
    names = {pool.name for pool in c.cluster.pools}
    for index, (before, after) in enumerate(zip(c.plan.stages, c.plan.stages[1:], strict=False)):
        if before.pool == after.pool or not {before.pool, after.pool} <= names:
            continue
        first, second = (c.cluster.pool(stage.pool).device for stage in (before, after))
        link = c.cluster.link(before.pool, after.pool)
        if link is None or first.vendor == second.vendor:
            continue
        if reason := cannot_join(first.ccl, second.ccl, link.transport):
            yield Broken(f"pools {before.pool} and {after.pool}: {reason}", "change the link's transport", index + 1)


RULES = (
    Rule("hetero-version", "later forks train another layer split", "Megatron-LM-FL ecb5dfade", _version),
    Rule("hetero-batch", "every mesh takes the same sequences per microbatch", "FSA:105-108", _batch),
    Rule("hetero-sequence", "tensors between meshes are cut along the sequence", "FSC:839-907", _sequence),
    _wiring("pairing", "put DP = 1, or one stage, in every mesh before the last"),
    _wiring("experts", "raise EP so that EDP is 1"),
    _wiring("offset", "give the later mesh two stages or more"),
    Rule("hetero-ends", "the first and the last stage share the embedding", "FSA:133-149", _ends),
    Rule("hetero-instances", "one optimizer instance", "FSC:551", _instances),
    Rule("hetero-checkpoint", "files per rank, no resharding", "examples of FlagScale v0.9.0", _checkpoint),
    Rule("transport", "a library must hold both kinds of devices", "FlagCX README at 0c721293; rccl#1220", _transport),
)
