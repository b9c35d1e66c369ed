"""A plan as arguments of unmodified Megatron-LM.

The plan owns the parallel degrees, the micro-batch size, the layer layout, sequence parallelism and
recomputation; all other words of the user's stay, verbatim and in order. Stages differ only in
recomputation: Megatron compares arguments across ranks nowhere, and recomputation is local to the
ranks of a stage. Device kinds differ through rank order: stage i is ranks
``i*W/PP ... (i+1)*W/PP - 1`` of the dense and of the expert mesh (parallel_state.py:617,859,887).
"""

from __future__ import annotations

from collections.abc import Mapping

from hapmoe.backends import version_tuple
from hapmoe.backends.layout import layout_string
from hapmoe.cluster import Cluster
from hapmoe.hybrid import pattern_of, read_hybrid
from hapmoe.job import Argument, JobSpec
from hapmoe.plan import Plan, Recompute, Stage
from hapmoe.shapes import uses_sequence_parallel

__all__ = [
    "OWNED",
    "has_flag",
    "keep_users",
    "launchable",
    "layout_string",
    "program",
    "recompute_arguments",
    "split_arguments",
    "stage_arguments",
]

OWNED: dict[str, int | None] = {
    # Flag: number of values (None: all words up to the next flag). Old names are here too, so that
    # a script that still carries one does not contradict the plan.
    "--tensor-model-parallel-size": 1,
    "--model-parallel-size": 1,
    "--pipeline-model-parallel-size": 1,
    "--context-parallel-size": 1,
    "--expert-model-parallel-size": 1,
    "--expert-tensor-parallel-size": 1,
    "--moe-extended-tp": 0,
    "--micro-batch-size": 1,
    "--batch-size": 1,
    "--sequence-parallel": 0,
    "--pipeline-model-parallel-layout": 1,
    "--hybrid-layer-pattern": 1,
    "--hybrid-override-pattern": 1,
    "--num-layers-per-virtual-pipeline-stage": 1,
    "--num-virtual-stages-per-pipeline-rank": 1,
    "--decoder-first-pipeline-num-layers": 1,
    "--decoder-last-pipeline-num-layers": 1,
    "--account-for-embedding-in-pipeline-split": 0,
    "--account-for-loss-in-pipeline-split": 0,
    "--standalone-embedding-stage": 0,
    "--recompute-activations": 0,
    "--checkpoint-activations": 0,
    "--recompute-granularity": 1,
    "--recompute-method": 1,
    "--recompute-num-layers": 1,
    "--recompute-modules": None,
    "--moe-layer-recompute": 0,
    # A variant of full recomputation (it excludes sequence parallelism) that no plan asks for.
    "--distribute-saved-activations": 0,
}
"""Arguments that the plan decides: every occurrence goes, the plan's come at the end."""


def stage_arguments(
    job: JobSpec, plan: Plan, cluster: Cluster | None = None
) -> tuple[tuple[Argument, ...], tuple[tuple[str, ...], ...]]:
    """The arguments of all ranks, and per stage those that only its ranks take (recomputation).

    ``plan`` is resolved and legal. Common arguments are the user's words without what the plan
    owns, then the plan's in a fixed order. Words that are not known before the run keep
    ``text=None`` and their shell source.
    """
    kept = keep_users(job.argv)
    words = plan_arguments(job, plan, has_global_batch=has_flag(kept, "--global-batch-size"))
    common = (*kept, *(Argument(text=word, owner="plan", source="", where="plan") for word in words))
    each = 1 if pattern_of(job) is None else 2
    return common, tuple(recompute_arguments(stage.recompute, each) for stage in plan.stages)


def program(job: JobSpec) -> str:
    """The training program as args/common.args names it: the script's own."""
    return f"module:{job.entry}" if job.entry_is_module else job.entry


def keep_users(argv: tuple[Argument, ...], owned: Mapping[str, int | None] = OWNED) -> tuple[Argument, ...]:
    """The user's words in order, without every occurrence of the flags in ``owned``."""
    kept: list[Argument] = []
    drop: int | None = 0  # values of an owned flag still to be dropped
    for argument in argv:
        name, inline = _flag(argument)
        if name in owned:
            drop = 0 if inline else owned[name]
        elif drop is None and name:
            drop = 0
            kept.append(argument)
        elif drop is None:
            continue
        elif drop > 0:
            drop -= 1
        else:
            kept.append(argument)
    return tuple(argument for argument in kept if argument.owner != "plan")


def plan_arguments(job: JobSpec, plan: Plan, *, has_global_batch: bool) -> tuple[str, ...]:
    """What the plan decides for all ranks, in a fixed order."""
    stage = plan.stages[0]
    words = [
        *("--tensor-model-parallel-size", str(stage.tp)),
        *("--pipeline-model-parallel-size", str(plan.pp)),
        *("--context-parallel-size", str(stage.cp)),
    ]
    if job.model.moe is not None:
        # Always both: without --expert-tensor-parallel-size Megatron takes TP (A:588).
        words += ["--expert-model-parallel-size", str(stage.ep), "--expert-tensor-parallel-size", str(stage.etp)]
    if stage.tp > 1 and uses_sequence_parallel(job):
        words += ["--sequence-parallel"]
    words += split_arguments(job, plan)
    words += ["--micro-batch-size", str(plan.micro_batch_size)]
    if not has_global_batch:
        words += ["--global-batch-size", str(plan.global_batch_size)]
    return tuple(words)


def split_arguments(job: JobSpec, plan: Plan) -> list[str]:
    """The layer split: a layout, a HybridModel's pattern with bars, or, before 0.13 (0.17 for those), the even
    split that needs none (a rule says so)."""
    if (pattern := pattern_of(job)) is not None:
        return _hybrid(job, plan, pattern)
    if plan.pp == 1:
        return []
    version = job.training.megatron_version
    if version is not None and version_tuple(version) < (0, 13, 0):
        per_chunk = plan.stages[0].virtual_layers[0][1]
        return ["--num-layers-per-virtual-pipeline-stage", str(per_chunk)] if plan.vpp > 1 else []
    return ["--pipeline-model-parallel-layout", layout_string(plan, job.model.mtp_layers)]


def _hybrid(job: JobSpec, plan: Plan, pattern: str) -> list[str]:
    hybrid = read_hybrid(pattern)
    version = job.training.megatron_version
    if version is not None and version_tuple(version) < (0, 17, 0):
        return ["--hybrid-override-pattern", pattern.replace("|", "")]
    if hybrid is None or plan.pp == 1:  # other models than Transformers are not split (a rule says so)
        return ["--hybrid-layer-pattern", pattern.replace("|", "")]
    chunks = [stage.virtual_layers[chunk][1] for chunk in range(plan.vpp) for stage in plan.stages]
    return ["--hybrid-layer-pattern", hybrid.text(tuple(chunks))]


def recompute_arguments(recompute: Recompute, layers_each: int = 1) -> tuple[str, ...]:
    """One stage's recomputation (core/recompute.py:157-182; A:1426: selective takes no count).

    ``layers_each``: what Megatron counts per decoder layer (2 in a HybridModel: attention, and MLP or experts).
    """
    if recompute.granularity == "none":
        return ()
    words = ["--recompute-granularity", recompute.granularity]
    if recompute.granularity == "full":
        words += ["--recompute-method", recompute.method or "uniform"]
        words += ["--recompute-num-layers", str(recompute.num_layers * layers_each)]
    elif recompute.modules:
        words += ["--recompute-modules", *recompute.modules]
    return tuple(words)


def launchable(job: JobSpec, cluster: Cluster, plan: Plan) -> tuple[bool, str]:
    """Can this back end start the plan, and if not, why (one line)?

    Every process group of upstream Megatron uses one collective library (parallel_state.py:231);
    those of different vendors do not talk to each other.
    """
    libraries: dict[str, str] = {}
    for stage in plan.stages:
        device = cluster.pool(stage.pool).device
        libraries.setdefault(device.ccl, device.name)
    if len(libraries) > 1:
        names = ", ".join(f"{ccl} ({device})" for ccl, device in libraries.items())
        return False, f"Megatron-LM upstream cannot join {' and '.join(libraries)} in one job: {names}"
    if _differ(plan.stages):
        return False, "Megatron-LM upstream takes one set of parallel degrees for all stages"
    return True, ""


def _differ(stages: tuple[Stage, ...]) -> bool:
    return len({(s.tp, s.cp, s.ep, s.etp, s.dp, s.num_devices, s.micro_batch_size) for s in stages}) > 1


def has_flag(argv: tuple[Argument, ...], name: str) -> bool:
    """Does the flag called ``name`` stand among these words?"""
    return any(_flag(argument)[0] == name for argument in argv)


def _flag(argument: Argument) -> tuple[str, bool]:
    """(flag that this word is, is its value in the same word); ("", False) for a value.

    A word with an unknown value (``--save=$(date)``) is known by its shell source.
    """
    text = argument.text if argument.text is not None else argument.source.lstrip("\"'")
    name, equals, _ = text.partition("=")
    if not name.startswith("--") or (argument.text is None and not equals):
        return "", False
    return name, bool(equals)
