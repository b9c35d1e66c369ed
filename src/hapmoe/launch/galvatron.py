"""Target ``galvatron``: the strategy file that Hetu-Galvatron trains by, and how it is given to it.

No launcher: Galvatron has a model configuration and data of its own. What the file cannot carry is refused.
"""

from __future__ import annotations

import json

from hapmoe.backends.galvatron import program, strategy
from hapmoe.cluster import Cluster
from hapmoe.errors import Unsupported
from hapmoe.job import JobSpec
from hapmoe.launch.options import LaunchOptions
from hapmoe.launch.parts import render
from hapmoe.launch.verdict import verdict
from hapmoe.plan import Plan
from hapmoe.resolve import resolve

__all__ = ["files"]


def files(
    job: JobSpec, cluster: Cluster, plan: Plan, plan_json: str, options: LaunchOptions | None = None
) -> dict[str, str]:
    """Relative path -> text: plan.json, the strategy and README.txt. Unsupported, with the reason, for a plan
    that Galvatron cannot run."""
    plan = resolve(job, cluster, plan)
    possible, reason = verdict(job, cluster, plan)
    if not possible:
        raise Unsupported(f"not a plan for Galvatron: {reason}")
    values = {
        "job": job,
        "plan": plan,
        "first": plan.stages[0],
        "program": program(job),
        "nodes": len({(stage.pool, node) for stage in plan.stages for node in stage.nodes}),
        "strided": any(stage.ep > 1 and stage.edp > 1 and len(stage.nodes) > 1 for stage in plan.stages),
        "port": (options or LaunchOptions()).job.port,
    }
    return {
        "plan.json": plan_json,
        "galvatron/strategy.json": json.dumps(strategy(job, plan), indent=4) + "\n",
        "README.txt": render("README_galvatron.txt.j2", values),
    }
