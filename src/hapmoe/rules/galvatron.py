"""What Galvatron's strategy file cannot say, and its models cannot be. Silent for other back ends.

Source: PKU-DAIR/Hetu-Galvatron cea12ff; ``GH`` galvatron/core/runtime/hybrid_parallel_config.py, ``GA``
galvatron/core/runtime/args_schema.py, ``GC`` galvatron/core/runtime/comm_groups.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from hapmoe.rules.base import Broken, Context, Rule

__all__ = ["RULES"]

Found = Iterator[Broken]


def _applies(c: Context) -> bool:
    return c.backend.module.endswith(".galvatron") and bool(c.plan.stages)


def _devices(c: Context) -> Found:
    counts = [stage.num_devices for stage in c.plan.stages]
    if _applies(c) and len(set(counts)) > 1:
        yield Broken(
            f"stages have {', '.join(map(str, counts))} devices; Galvatron gives each world/PP",
            "use as many devices on every stage",
        )


def _batch(c: Context) -> Found:
    if not _applies(c):
        return
    first = c.plan.stages[0]
    total = first.dp * first.micro_batch_size
    for index, stage in enumerate(c.plan.stages):
        if stage.dp * stage.micro_batch_size != total:
            yield Broken(
                f"DP·MBS is {stage.dp}·{stage.micro_batch_size}, on the first stage {total}",
                "a chunk holds the same sequences on all stages",
                index,
            )


def _recompute(c: Context) -> Found:
    if not _applies(c):
        return
    for index, stage in enumerate(c.plan.stages):
        r = stage.recompute
        if r.granularity == "selective":
            yield Broken("selective recomputation; Galvatron computes whole layers again", "full or none", index)
        elif r.granularity == "full" and r.method == "uniform" and r.num_layers > 1:
            yield Broken(f"units of {r.num_layers} layers; Galvatron takes them one by one", "method block", index)


def _vocabulary(c: Context) -> Found:
    if not _applies(c):
        return
    first, last = c.plan.stages[0], c.plan.stages[-1]
    for name in ("tp", "cp"):
        ends = getattr(first, name), getattr(last, name)
        if ends[0] != ends[1]:
            yield Broken(
                f"{name} is {ends[0]} on the first stage and {ends[1]} on the last; embedding and head share one",
                f"give both the same {name}",
            )


def _model(c: Context) -> Found:
    if not _applies(c):
        return
    model, training = c.job.model, c.job.training
    said = {
        "MTP layers": bool(model.mtp_layers),
        "multi-latent attention": model.mla is not None,
        "dense and MoE layers in one model": len(set(model.moe_pattern)) > 1,
        "sliding-window attention": model.attention_window is not None,
        "experts of another width than the model's (latent MoE)": bool(model.moe and model.moe.latent_hidden),
        "FP8 or FP4": training.fp8_recipe is not None or training.fp4,
        f"optimizer {training.optimizer}": training.optimizer != "adam",
    }
    for what, there in said.items():
        if there:
            yield Broken(f"{what}, which Galvatron's models do not have", "another back end")
    for index, stage in enumerate(c.plan.stages):
        if stage.num_layers == 0:
            yield Broken("a stage without layers", stage=index)


RULES = (
    Rule("galvatron-devices", "every stage is world/PP ranks", "GC:302", _devices),
    Rule("galvatron-batch", "a chunk is one share of the global batch on every stage", "GH:98-100", _batch),
    Rule("galvatron-recompute", "a layer is checkpointed or not", "GH:49-53; GH:216", _recompute),
    Rule("galvatron-vocabulary", "one vtp and one vcp for embedding and head", "GH:262-280", _vocabulary),
    Rule("galvatron-model", "models are built from its own arguments", "GA:55-165", _model),
)
