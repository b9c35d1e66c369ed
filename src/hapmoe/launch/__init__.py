"""A plan as files that start it. A target is one pure function: ``files(job, cluster, plan, plan_json, options)``.

No target reads a clock, the environment or a disk; ``write`` puts what they return on disk.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol, cast

from hapmoe.backends import capabilities
from hapmoe.cluster import Cluster
from hapmoe.errors import InputError
from hapmoe.job import JobSpec
from hapmoe.plan import Plan

if TYPE_CHECKING:
    from hapmoe.launch.options import LaunchOptions

__all__ = ["STARTS", "TARGETS", "Target", "target"]


class Target(Protocol):
    """Relative path -> text of everything that a launch needs."""

    def __call__(
        self, job: JobSpec, cluster: Cluster, plan: Plan, plan_json: str, options: LaunchOptions | None = None
    ) -> dict[str, str]: ...


TARGETS = {
    "torchrun": "hapmoe.launch.torchrun",
    "slurm": "hapmoe.launch.slurm",
    "kubernetes": "hapmoe.launch.kubernetes",
    "nemorun": "hapmoe.launch.nemorun",
    "flagscale": "hapmoe.launch.flagscale",
    "galvatron": "hapmoe.launch.galvatron",
}
"""Module of each target (loaded when asked for), by the name that ``--target`` takes."""

STARTS = {
    "torchrun": "./launch.sh",
    "slurm": "sbatch launch.sbatch",
    "kubernetes": "./launch.sh",
    "nemorun": "python launch_nemo.py",
    "flagscale": "./launch.sh",
    "galvatron": "Galvatron's own launcher, as README.txt says",
}
"""The command that starts what a target wrote, in its folder."""


def target(name: str, backend: str = "") -> Target:
    """The target called ``name``; InputError if there is none, or it does not start plans of ``backend``."""
    if name not in TARGETS:
        raise InputError(f"no target {name!r}", where="target", hint=f"one of {', '.join(TARGETS)}")
    own = capabilities(backend).own_target if backend else ""
    if backend and name != own and (own or name == "galvatron"):
        hint = f"--target {own}" if own else "--backend galvatron"
        raise InputError(f"target {name} does not write plans of back end {backend}", where="target", hint=hint)
    return cast(Target, importlib.import_module(TARGETS[name]).files)
