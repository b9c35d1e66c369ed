"""A plan as files that start it. A target is one pure function: ``files(job, cluster, plan, plan_json)``.

No target reads a clock, the environment or a disk; ``write`` puts what they return on disk.
"""

from __future__ import annotations

import importlib
from typing import Protocol, cast

from hapmoe.cluster import Cluster
from hapmoe.errors import InputError
from hapmoe.job import JobSpec
from hapmoe.plan import Plan

__all__ = ["TARGETS", "Target", "target"]


class Target(Protocol):
    """Relative path -> text of everything that a launch needs."""

    def __call__(self, job: JobSpec, cluster: Cluster, plan: Plan, plan_json: str) -> dict[str, str]: ...


TARGETS = {"torchrun": "hapmoe.launch.torchrun"}
"""Module of each target (loaded when asked for), by the name that ``--target`` takes."""


def target(name: str) -> Target:
    """The target called ``name``; InputError if there is none."""
    if name not in TARGETS:
        raise InputError(f"no target {name!r}", where="target", hint=f"one of {', '.join(TARGETS)}")
    return cast(Target, importlib.import_module(TARGETS[name]).files)
