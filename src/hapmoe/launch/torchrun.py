"""Target ``torchrun``: one folder that starts a plan on hosts reached by ssh, or node by node.

torchrun's static rendezvous numbers ranks by the order of nodes (elastic/agent/server/api.py:585);
its default one, c10d, sorts nodes by host name and would put stages on the wrong devices.
"""

from __future__ import annotations

from hapmoe.cluster import Cluster
from hapmoe.job import JobSpec
from hapmoe.launch.options import LaunchOptions
from hapmoe.launch.parts import parts, render
from hapmoe.plan import Plan

__all__ = ["files"]


def files(
    job: JobSpec, cluster: Cluster, plan: Plan, plan_json: str, options: LaunchOptions | None = None
) -> dict[str, str]:
    """Relative path -> text of every file of the launch. Pure."""
    made = parts(job, cluster, plan, plan_json, start="start_ssh.j2", options=options)
    return {**made.files, "launch.sh": render("launch.sh.j2", made.values)}
