"""A job made short enough to measure: a few layers, a few microbatches, nothing saved."""

from __future__ import annotations

from itertools import pairwise

import msgspec

from hapmoe.backends.megatron import has_flag, keep_users
from hapmoe.errors import Unsupported
from hapmoe.job import Argument, JobSpec

__all__ = ["Layers", "depths", "shortened"]

_DROPPED: dict[str, int | None] = {
    # Flag: number of values. What this run decides itself,
    "--num-layers": 1,
    "--moe-layer-freq": 1,
    "--mtp-num-layers": 1,
    "--fake-process-group": 0,
    "--global-batch-size": 1,
    "--rampup-batch-size": 3,
    # and what would read or write beside it: checkpoints, trackers.
    "--save": 1,
    "--load": 1,
    "--pretrained-checkpoint": 1,
    "--save-interval": 1,
    "--non-persistent-save-interval": 1,
    "--non-persistent-ckpt-type": 1,
    "--async-save": 0,
    "--tensorboard-dir": 1,
    "--wandb-project": 1,
    "--wandb-exp-name": 1,
    "--wandb-save-dir": 1,
    "--wandb-entity": 1,
}
_PATTERNS = ("--hybrid-override-pattern", "--hybrid-layer-pattern")
"""Layers given one by one, with kinds of their own."""


class Layers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, order=True):
    """How many layers of each kind a run has, in this order."""

    dense: int = 0
    moe: int = 0
    mtp: int = 0

    @property
    def decoder(self) -> int:
        return self.dense + self.moe


def depths(job: JobSpec) -> tuple[Layers, ...]:
    """The runs that tell one layer of each kind from the rest: times are sums, so differences of runs are layers.

    Embedding and head are in all of them.
    """
    pattern, mtp = job.model.moe_pattern, job.model.mtp_layers > 0
    if not any(pattern):
        found = [Layers(dense=1), Layers(dense=3)]
    elif all(pattern):
        found = [Layers(moe=1), Layers(moe=3)]
    else:
        found = [Layers(dense=1, moe=1), Layers(dense=3, moe=1), Layers(dense=1, moe=3)]
    if mtp:
        found.append(msgspec.structs.replace(found[0], mtp=1))
    return tuple(found)


def shortened(
    job: JobSpec, layers: Layers, global_batch_size: int, at_least_steps: int, *, stages: int = 1, single: bool = False
) -> JobSpec:
    """The same job with these layers and this batch; nothing else that a layer computes changes.

    The training's length stays (learning rates and data sets are made for it) unless it is shorter than
    ``at_least_steps``. ``stages`` of these layers each; ``single``: its ranks send nothing.
    Unsupported for a script that lists its layers one by one.
    """
    listed = next((flag for flag in _PATTERNS if has_flag(job.argv, flag)), None)
    if listed is not None:
        raise Unsupported(f"{job.script or job.name}: {listed} cannot be shortened; measure the whole run (docs)")
    model, count = job.model, stages * layers.decoder
    words = ["--num-layers", str(count), "--global-batch-size", str(global_batch_size)]
    if model.moe is not None:
        pattern = ((False,) * layers.dense + (True,) * layers.moe) * stages
        model = msgspec.structs.replace(model, moe=msgspec.structs.replace(model.moe, pattern=pattern))
        words += ["--moe-layer-freq", str([int(one) for one in pattern]).replace(" ", "")]
    if layers.mtp:
        words += ["--mtp-num-layers", str(layers.mtp)]
    if single:
        words.append("--fake-process-group")
        if model.moe is not None:  # gradients that nobody sent would teach the router to leave this rank out
            words.append("--moe-router-force-load-balancing")
    if too_few := _too_few(job, at_least_steps):
        words += ["--train-iters", str(at_least_steps)]
    dropped = _DROPPED | too_few
    argv = (*keep_users(job.argv, dropped), *(Argument(text=word, where="profile") for word in words))
    return msgspec.structs.replace(
        job,
        model=msgspec.structs.replace(
            model, num_layers=count, mtp_layers=layers.mtp, window_pattern=_cut(model.window_pattern, count)
        ),
        training=msgspec.structs.replace(job.training, global_batch_size=global_batch_size),
        argv=argv,
    )


def _too_few(job: JobSpec, least: int) -> dict[str, int | None]:
    """The flag of a training that ends too early, as ``keep_users`` wants it."""
    words = [argument.text for argument in job.argv]
    given = [value for flag, value in pairwise(words) if flag == "--train-iters"]
    given += [word.partition("=")[2] for word in words if word and word.startswith("--train-iters=")]
    return {"--train-iters": 1} if any(value and value.isdigit() and int(value) < least for value in given) else {}


def _cut(pattern: tuple[bool, ...], count: int) -> tuple[bool, ...]:
    """As Megatron repeats it for fewer or more layers."""
    return tuple(pattern[index % len(pattern)] for index in range(count)) if pattern else ()
