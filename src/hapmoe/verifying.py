"""``hapmoe runtime verify``: does a plan of unequal stages train as a uniform plan does, on the user's own cluster?

Three short runs. A uniform plan trains one step and saves its weights; then it and the plan in
question both start from them, on the same samples, with fresh optimizers. Losses and gradient norms
must agree step by step. A wrong scale or a sample in the wrong place changes the gradient norm by
tens of percent; the order of summation by as much as ``TOLERANCES`` allows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import isnan, lcm

import msgspec

from hapmoe.backends.megatron import keep_users
from hapmoe.cluster import Cluster
from hapmoe.errors import InputError
from hapmoe.job import Argument, JobSpec
from hapmoe.plan import Plan

__all__ = ["RUNS", "Verified", "compare_logs", "jobs", "render_verified", "uniform_plan"]

RUNS = ("start", "uniform", "unequal")
"""In this order; the first two are of the uniform plan."""

TOLERANCES = {"fp32": (1e-5, 1e-4)}
_LOW_PRECISION = (1e-3, 1e-2)
"""Relative difference of losses and of gradient norms. In bf16 two of upstream's own uniform runs (dp 1
and 2) of the CPU lab's model differ by 1.8e-4 and 5.4e-3."""

_OWNED: dict[str, int | None] = {
    # Arguments of the script that would write into its folders, stop early or start from elsewhere.
    "--save": 1,
    "--load": 1,
    "--save-interval": 1,
    "--pretrained-checkpoint": 1,
    "--non-persistent-save-interval": 1,
    "--exit-interval": 1,
    "--exit-duration-in-mins": 1,
    "--use-checkpoint-args": 0,
    "--finetune": 0,
    "--log-interval": 1,
    "--eval-iters": 1,
    "--tensorboard-dir": 1,
    "--wandb-project": 1,
    "--wandb-exp-name": 1,
    "--wandb-save-dir": 1,
}
_LINE = re.compile(r"iteration +(\d+)/.*?\blm loss: *([-+.\deEnaif]+) .*?\bgrad norm: *([-+.\deEnaif]+)")
"""Of Megatron's training log (training.py, training_log)."""


@dataclass(frozen=True, slots=True)
class Verified:
    """Two runs side by side."""

    steps: tuple[tuple[int, float, float, float, float], ...]
    """Iteration, loss and gradient norm of the uniform run, and of the other."""
    loss_tolerance: float
    norm_tolerance: float

    @property
    def loss_error(self) -> float:
        """Largest relative difference; NaN if any is."""
        return _worst([abs(loss / expected - 1) for _, expected, _, loss, _ in self.steps])

    @property
    def norm_error(self) -> float:
        return _worst([abs(norm / expected - 1) for _, _, expected, _, norm in self.steps])

    @property
    def good(self) -> bool:
        """Within the tolerances; NaN never is."""
        return self.loss_error <= self.loss_tolerance and self.norm_error <= self.norm_tolerance


def _worst(errors: list[float]) -> float:
    return max(errors, key=lambda error: (isnan(error), error))


def uniform_plan(job: JobSpec, cluster: Cluster) -> Plan:
    """The best plan with one set of degrees, launched by the same back end; InputError if there is none."""
    from hapmoe.planning import plan_job

    found = plan_job(job, cluster, backend="megatron", compare=False).result.plan
    if found is None or not found.launchable:
        reason = (found.launch_reason if found else None) or "none fits"
        raise InputError(f"no uniform plan to compare with: {reason}", where="cluster")
    # the same back end, so that checkpoints have the keys that unequal stages read
    return msgspec.structs.replace(found, backend="megatron-hetero")


def jobs(job: JobSpec, uniform: Plan, plan: Plan, checkpoint: str, steps: int) -> dict[str, JobSpec]:
    """The job of each run, by name."""
    kept = keep_users(job.argv, _OWNED)
    multiple = job.model.vocab_divisor * lcm(*(stage.tp for stage in (*uniform.stages, *plan.stages)))
    begin = ("--no-load-optim", "--no-load-rng", "--finetune", "--load", checkpoint, "--exit-interval", str(steps))
    save = ("--save", checkpoint, "--save-interval", "1", "--no-save-optim", "--no-save-rng", "--exit-interval", "1")
    words = {"start": save, "uniform": begin, "unequal": begin}
    found = {}
    for name in RUNS:
        more = (*words[name], "--log-interval", "1", "--eval-iters", "0", "--ckpt-format", "torch_dist")
        model = job.model
        if model.padded_vocab_size is None:
            # Megatron pads to a multiple that grows with tp; checkpoints must have one size
            divisor = multiple // lcm(*(stage.tp for stage in (plan if name == "unequal" else uniform).stages))
            more += ("--make-vocab-size-divisible-by", str(divisor))
            model = msgspec.structs.replace(model, vocab_divisor=divisor)
        argv = (*kept, *(Argument(text=word, where="runtime verify") for word in more))
        found[name] = msgspec.structs.replace(job, argv=argv, model=model)
    return found


def compare_logs(uniform: str, unequal: str, precision: str) -> Verified:
    """Losses and norms from the output of both runs; InputError where they do not cover the same steps."""
    expected, found = dict(_steps(uniform)), dict(_steps(unequal))
    if not expected or expected.keys() != found.keys():
        raise InputError(
            f"steps {_listed(expected)} of the uniform run, {_listed(found)} of the other",
            where="logs",
            hint='lines with "lm loss" and "grad norm" are what is looked for',
        )
    steps = tuple((step, *expected[step], *found[step]) for step in sorted(expected))
    return Verified(steps, *TOLERANCES.get(precision, _LOW_PRECISION))


def _steps(log: str) -> Iterator[tuple[int, tuple[float, float]]]:
    for match in _LINE.finditer(log):
        yield int(match[1]), (float(match[2]), float(match[3]))


def _listed(steps: dict[int, tuple[float, float]]) -> str:
    return ", ".join(map(str, sorted(steps))) or "none"


def render_verified(found: Verified) -> str:
    """The table and the verdict."""
    lines = ["iteration       lm loss: uniform       unequal    grad norm: uniform   unequal"]
    for step, expected, norm, loss, other in found.steps:
        lines.append(f"{step:>9}  {expected:>20.6f}  {loss:>12.6f}  {norm:>20.4f}  {other:>8.4f}")
    said = f"largest difference: loss {found.loss_error:.1e} (allowed {found.loss_tolerance:.0e}), "
    said += f"gradient norm {found.norm_error:.1e} (allowed {found.norm_tolerance:.0e})"
    return "\n".join([*lines, said, "SAME" if found.good else "DIFFERENT: do not train with this plan"])
