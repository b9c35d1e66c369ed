"""Target ``nemorun``: NeMo-Run submits the same heterogeneous Slurm job.

Thin on purpose: the sbatch file of target ``slurm`` is the truth, and NeMo-Run gives it to Slurm over
its tunnel. (NeMo-Run's own SlurmExecutor with heterogeneous=True writes one command per group,
nemo_run/core/execution/slurm.py:361-430, and would number nodes anew.)
"""

from __future__ import annotations

from hapmoe.cluster import Cluster
from hapmoe.job import JobSpec
from hapmoe.launch import slurm
from hapmoe.launch.options import LaunchOptions
from hapmoe.launch.parts import template
from hapmoe.plan import Plan

__all__ = ["files"]


def files(
    job: JobSpec, cluster: Cluster, plan: Plan, plan_json: str, options: LaunchOptions | None = None
) -> dict[str, str]:
    """Relative path -> text: target ``slurm`` and ``launch_nemo.py``."""
    made = slurm.files(job, cluster, plan, plan_json, options)
    return {**made, "launch_nemo.py": template("launch_nemo.py")}
