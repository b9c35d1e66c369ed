"""How a step's sequences become microbatches."""

from __future__ import annotations

from collections.abc import Iterator

from hapmoe.rules.base import Broken, Context, Rule

__all__ = ["RULES"]

Found = Iterator[Broken]


def _divides(c: Context) -> Found:
    total = c.plan.global_batch_size
    if total < 1:
        yield Broken("the global batch size is not known", "give --global-batch-size in the script or in the plan")
        return
    for index, stage in c.meshes():
        if total % (stage.micro_batch_size * stage.dp):
            yield Broken(
                f"global batch {total} does not divide by MBS·DP = "
                f"{stage.micro_batch_size}·{stage.dp} = {stage.micro_batch_size * stage.dp}",
                "change the micro-batch size or dp; the global batch is the script's",
                index,
            )


def _count(c: Context) -> Found:
    plan = c.plan
    if plan.micro_batch_size < 1 or not plan.num_microbatches:
        return  # said by _divides
    for index, stage in c.meshes():
        per_step = plan.num_microbatches * stage.micro_batch_size * stage.dp
        if plan.global_batch_size % (stage.micro_batch_size * stage.dp) == 0 and per_step != plan.global_batch_size:
            yield Broken(
                f"{plan.num_microbatches} microbatches · MBS {stage.micro_batch_size} · DP {stage.dp} = {per_step}, "
                f"but the global batch is {plan.global_batch_size}",
                f"num_microbatches is {plan.global_batch_size // (stage.micro_batch_size * stage.dp)}",
                index,
            )


def _sizes(c: Context) -> tuple[int, ...]:
    """Every global batch size that the script trains with on its way to the last one."""
    total = c.plan.global_batch_size
    ramp = c.flag_values("--rampup-batch-size")
    if ramp and len(ramp) == 3 and all(word.isdecimal() for word in ramp) and int(ramp[1]) > 0:
        return tuple(range(int(ramp[0]), total, int(ramp[1])))
    schedule = c.flag_values("--step-batch-size-schedule")
    steps = [step.rpartition(":")[2] for word in schedule or () for step in word.replace(",", " ").split()]
    return tuple(int(size) for size in steps if size.isdecimal())


def _ramp(c: Context) -> Found:
    if c.has_flag("--decrease-batch-size-if-needed"):  # Megatron rounds down then
        return
    for index, stage in c.meshes():
        share = stage.micro_batch_size * stage.dp
        if share < 1:
            continue
        for size in _sizes(c):
            if size % share:
                yield Broken(
                    f"the ramp or schedule passes a global batch of {size}, which MBS·DP = {share} does not divide",
                    "change the micro-batch size or dp, or the ramp",
                    index,
                )
                break
            group = c.job.training.microbatch_group_size or c.plan.pp
            count = size // share
            if c.plan.vpp > 1 and (count < group or (count % group and count % group < c.plan.pp)):
                yield Broken(
                    f"interleaving (vpp = {c.plan.vpp}): the global batch of {size} on the way is {count} microbatches "
                    f"in groups of {group}",
                    "set vpp to 1, or change the ramp",
                    index,
                )
                break


def _evaluation(c: Context) -> Found:
    total, micro = c.flag_int("--eval-global-batch-size"), c.flag_int("--eval-micro-batch-size")
    if total is None and micro is None:
        return
    for index, stage in c.meshes():
        share = (micro or stage.micro_batch_size) * stage.dp
        if share > 0 and (total or c.plan.global_batch_size) % share:
            yield Broken(
                f"the evaluation batch {total or c.plan.global_batch_size} does not divide by its MBS·DP = {share}",
                "change dp, --eval-global-batch-size or --eval-micro-batch-size",
                index,
            )


def _job(c: Context) -> Found:
    asked = c.job.training.global_batch_size
    if asked and c.plan.global_batch_size != asked:
        yield Broken(
            f"the plan's global batch is {c.plan.global_batch_size}, the script's {asked}",
            "a plan does not change the global batch",
        )


def _micro(c: Context) -> Found:
    if c.plan.micro_batch_size < 1:
        yield Broken(f"micro-batch size is {c.plan.micro_batch_size}", "set it to 1 or more")
        return
    if c.backend.per_stage_degrees:
        return
    for index, stage in enumerate(c.plan.stages):
        if stage.micro_batch_size != c.plan.micro_batch_size:
            yield Broken(
                f"the stage's micro-batch size is {stage.micro_batch_size}, the plan's {c.plan.micro_batch_size}",
                stage=index,
            )


def _interleaved(c: Context) -> Found:
    if c.plan.vpp == 1:
        return
    stages, count = c.plan.pp, c.plan.num_microbatches
    given = c.job.training.microbatch_group_size
    group = given or stages
    name = f"--microbatch-group-size-per-virtual-pipeline-stage {given}" if given else f"PP = {stages}"
    if group < stages:
        yield Broken(f"{name} is below PP = {stages}", f"set it to {stages} or more")
    elif count < group:
        yield Broken(
            f"interleaving (vpp = {c.plan.vpp}) needs at least {name} microbatches, and there are {count}",
            "set vpp to 1, or lower the micro-batch size or dp",
        )
    elif count % group and count % group < stages:
        yield Broken(
            f"interleaving (vpp = {c.plan.vpp}): {count} microbatches in groups of {group} "
            f"leave {count % group}, fewer than PP = {stages}",
            f"a multiple of {group} microbatches",
        )


RULES = (
    Rule("micro-batch", "one micro-batch size along a pipeline", "A:693", _micro),
    Rule("global-batch", "every replica runs the same number of microbatches", "A:715; NM:381; NM:389", _divides),
    Rule("microbatches", "GBS = MBS · DP · microbatches, on every stage", "NM:381", _count),
    Rule("batch-ramp", "every batch size of a ramp or schedule is split like the last", "NM:581; SCH:1168", _ramp),
    Rule("evaluation-batch", "evaluation runs on the same replicas", "A:715", _evaluation),
    Rule("global-batch-kept", "the optimisation problem is the user's", "script", _job),
    Rule(
        "interleaved-batch",
        "the interleaved schedule works in groups of microbatches",
        "SCH:1168; SCH:1180",
        _interleaved,
    ),
)
