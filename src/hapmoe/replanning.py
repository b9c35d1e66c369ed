"""Going on with a run under another plan: what Megatron's distributed checkpoints allow, and with which flags.

Model tensors are stored by global layer index and reshard freely (transformer_block.py:826-846); the
optimizer's state only in the format that was chosen when it was saved (checkpointing.py:551-559,
2596-2660). Each rule below says whether it was seen in a run or read in the source.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from hapmoe.backends import version_tuple
from hapmoe.backends.megatron import has_flag
from hapmoe.cluster import Cluster
from hapmoe.job import Argument, JobSpec
from hapmoe.plan import Plan
from hapmoe.resolve import resolve
from hapmoe.units import format_seconds

__all__ = ["Payback", "Switch", "payback", "resume_job", "switch"]

HETERO = "megatron-hetero"
RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"


@dataclass(frozen=True, slots=True)
class Switch:
    """What stands between a checkpoint of one plan and a start of another."""

    obstacles: tuple[str, ...]
    """Why the resume would fail; empty: it works."""
    before: tuple[str, ...]
    """What to do with the run as it is, first."""
    flags: tuple[str, ...]
    """Arguments that the resumed job needs beyond the script's and the plan's."""
    notes: tuple[str, ...]
    """What changes in silence."""
    same: bool = False
    """Nothing that a checkpoint depends on has changed."""

    @property
    def possible(self) -> bool:
        return not self.obstacles


@dataclass(frozen=True, slots=True)
class Payback:
    """Does a switch pay?"""

    pays: bool
    after_steps: int | None
    """Steps after which its cost is back; None: never."""
    said: str


def payback(old_s: float | None, new_s: float, cost_s: float, horizon: int | None = None) -> Payback:
    """A switch that costs ``cost_s`` seconds once, from steps of ``old_s`` (None: cannot run) to steps of ``new_s``.

    A gain below 1% of the step is within what no estimate tells: it does not pay.

    >>> payback(10.0, 9.0, 600.0, 500).said
    'The switch costs 600 s and saves 1 s a step: it does not pay back within 500 steps, after 600 it would.'
    """
    if old_s is None:
        return Payback(True, 0, "The old plan cannot go on here: the switch is needed.")
    gain_s = old_s - new_s
    if gain_s < 0.01 * old_s:
        return Payback(False, None, "The switch does not pay.")
    steps = math.ceil(cost_s / gain_s)
    both = f"The switch costs {format_seconds(cost_s)} and saves {format_seconds(gain_s)} a step"
    if horizon is not None and steps > horizon:
        return Payback(False, steps, f"{both}: it does not pay back within {horizon} steps, after {steps} it would.")
    return Payback(True, steps, f"{both}: it pays back after {steps} steps.")


def switch(job: JobSpec, old_cluster: Cluster | None, old: Plan, cluster: Cluster, new: Plan) -> Switch:
    """Can the checkpoint of ``old`` be loaded under ``new``? Both legal plans of the same job."""
    old = resolve(job, old_cluster or cluster, old)
    new = resolve(job, cluster, new)
    obstacles: list[str] = []
    before: list[str] = []
    notes: list[str] = []
    flags: list[str] = []
    same, only_dp = _split(old) == _split(new) and _dp(old) == _dp(new), _split(old) == _split(new)
    if not same:
        obstacles += _formats(job, old, new)
        obstacles += _keys(job, old, new)
        obstacles += _experts(job, old, new)
        if not only_dp:
            needed, first = _optimizer(job)
            obstacles += needed
            before += first
        wanted, changed = _vocabulary(job, old, new)
        flags += wanted
        notes += changed
        if HETERO in (old.backend, new.backend) and not has_flag(job.argv, "--no-load-rng"):
            flags.append("--no-load-rng")
            notes.append("random states are kept per stage, so they are not loaded under another plan")
        if (old.stages[0].tp, old.pp) != (new.stages[0].tp, new.pp):
            notes.append("TP or PP changes: the random state is dropped, dropout masks differ (checkpointing.py:2573)")
    if has_flag(job.argv, "--use-checkpoint-args"):
        obstacles.append("--use-checkpoint-args would bring back the old degrees: remove it from the script")
    flags += _loading(job, obstacles)
    return Switch(tuple(obstacles), tuple(before), tuple(flags), tuple(notes), same)


def resume_job(job: JobSpec, found: Switch) -> JobSpec:
    """The job with the arguments that its resume needs."""
    more = tuple(Argument(text=word, where="replan") for word in found.flags)
    return msgspec.structs.replace(job, argv=(*job.argv, *more))


def _split(plan: Plan) -> tuple[object, ...]:
    """What decides which rank holds which parameter."""
    stages = tuple((s.tp, s.ep, s.etp, s.virtual_layers, s.mtp_layers) for s in plan.stages)
    return (plan.vpp, *stages)


def _dp(plan: Plan) -> tuple[object, ...]:
    return tuple((stage.dp, stage.cp) for stage in plan.stages)


def _formats(job: JobSpec, old: Plan, new: Plan) -> list[str]:
    for plan in (old, new):
        if plan.backend.startswith("flagscale"):
            return [
                "FlagScale's process meshes save files per rank (--ckpt-format torch): they are converted offline, "
                "with tools/checkpoint of FlagScale (loader_mcore.py)"
            ]
    format_ = _value(job, "--ckpt-format") or _value(job, "--dist-ckpt-format")
    if format_ not in (None, "torch_dist"):
        return [f"--ckpt-format {format_} does not reshard: save with torch_dist"]
    return []


def _keys(job: JobSpec, old: Plan, new: Plan) -> list[str]:
    """Unequal stages need a key per layer (hapmoe.runtime); upstream stacks equal layers into one tensor,
    except where --moe-layer-freq is a list (transformer_block.py:827-850)."""
    pattern = _value(job, "--moe-layer-freq")
    if (old.backend == HETERO) == (new.backend == HETERO) or (pattern is not None and not pattern.isdecimal()):
        return []
    return [
        f"back end {old.backend} saves {'a key per layer' if old.backend == HETERO else 'all layers under one key'}, "
        f"{new.backend} reads the other form (KeyError). Plan with --backend {old.backend}; runs that begin with "
        f'--moe-layer-freq "([1]*{job.model.num_layers})" or with back end {HETERO} may go either way'
    ]


def _experts(job: JobSpec, old: Plan, new: Plan) -> list[str]:
    if job.model.moe is None or _no_optimizer(job):
        return []
    # unequal stages: where any has EP > 1, all ranks keep a second optimizer (optimizer/__init__.py, _get_param_groups)
    before, after = (max(stage.ep for stage in plan.stages) for plan in (old, new))
    was, now = before > 1, after > 1
    if was == now:
        return []
    return [
        f"EP {before} -> {after}: with EP = 1 expert parameters are part of the dense optimizer, "
        "and loading stops with KeyError 'optimizer' (seen in runs; optimizer.py:1605-1616). "
        + ("Plan with --set ep=2.." if was else "Plan with --set ep=1")
        + ", or add --no-load-optim and lose the optimizer's state"
    ]


def _optimizer(job: JobSpec) -> tuple[list[str], list[str]]:
    """Obstacles and what to do first, by the format that the optimizer's state was saved in."""
    if not job.training.distributed_optimizer or _no_optimizer(job) or has_flag(job.argv, RESHARDABLE):
        return [], []
    version = job.training.megatron_version
    if version is not None and version_tuple(version) < (0, 15, 0):
        if has_flag(job.argv, "--ckpt-fully-parallel-save") or not has_flag(job.argv, "--no-ckpt-fully-parallel-save"):
            return [], []  # fully_sharded_model_space, the default with fully parallel saving up to 0.14
        return [f"Megatron-Core {version} without fully parallel saving keeps the optimizer by data-parallel rank"], []
    return [], [
        f"The script does not give {RESHARDABLE}, so its checkpoints keep the optimizer in the format dp_reshardable, "
        'which loads under the same split only (seen in a run: "Global shape mismatch"). First go on with the old '
        f"plan and {RESHARDABLE} until the next save; then start this one"
    ]


def _vocabulary(job: JobSpec, old: Plan, new: Plan) -> tuple[list[str], list[str]]:
    """Padding follows TP (training/vocab_utils.py:58): keep the rows that were saved."""
    if job.model.padded_vocab_size is not None or not job.model.vocab_size:
        return [], []
    was, now = (job.model.padded_vocab(plan.stages[0].tp) for plan in (old, new))
    if was == now:
        return [], []
    tp = new.stages[0].tp
    said = f"the padded vocabulary would go from {was} to {now} rows with TP = {tp}"
    if was % tp:
        return [], [f"{said}: embedding rows of the padding are cut or made anew"]
    return ["--make-vocab-size-divisible-by", str(was // tp)], [f"{said}: padded to {was} as before"]


def _loading(job: JobSpec, obstacles: list[str]) -> list[str]:
    flags = []
    if not has_flag(job.argv, "--load"):
        saved = next(
            (after for flag, after in zip(job.argv, job.argv[1:], strict=False) if flag.text == "--save"), None
        )
        if saved is None:
            obstacles.append("the script has no --save: there is no checkpoint to go on from")
        elif saved.text is None:
            obstacles.append(
                f"--save is only known in a run ({saved.source.strip()}): give the checkpoint's folder as --load"
            )
        else:
            flags += ["--load", saved.text]
    # Without it a missing checkpoint starts training from nothing, in silence.
    flags += ["--exit-on-missing-checkpoint"] if not has_flag(job.argv, "--exit-on-missing-checkpoint") else []
    version = job.training.megatron_version
    reshardable = version is None or version_tuple(version) >= (0, 15, 0)
    if job.training.distributed_optimizer and reshardable and not has_flag(job.argv, RESHARDABLE):
        flags.append(RESHARDABLE)
    if not has_flag(job.argv, "--ckpt-fully-parallel-load"):
        flags.append("--ckpt-fully-parallel-load")
    return flags


def _no_optimizer(job: JobSpec) -> bool:
    return has_flag(job.argv, "--no-load-optim")


def _value(job: JobSpec, name: str) -> str | None:
    found = None
    for argument, following in zip(job.argv, (*job.argv[1:], None), strict=True):
        text = argument.text or ""
        if text == name and following is not None:
            found = following.text
        elif text.startswith(f"{name}="):
            found = text.partition("=")[2]
    return found
