"""Target ``slurm``: a heterogeneous job with one component per kind, and a plain job for one partition.

Components come in rank order, so NODE_RANK is the component's first node plus SLURM_NODEID of its
own step (Slurm "Heterogeneous Jobs": each step of one component counts its nodes from 0). A plain
job's nodes come sorted by name; there the script orders them by their features.
"""

from __future__ import annotations

import shlex

from hapmoe.cluster import Cluster
from hapmoe.job import JobSpec
from hapmoe.launch.options import LaunchOptions
from hapmoe.launch.parts import Component, Parts, parts, render
from hapmoe.plan import Plan

__all__ = ["files"]


def files(
    job: JobSpec, cluster: Cluster, plan: Plan, plan_json: str, options: LaunchOptions | None = None
) -> dict[str, str]:
    """Relative path -> text: the parts of every launch, ``launch.sbatch`` and ``launch-one.sbatch``."""
    options = options or LaunchOptions()
    made = parts(
        job,
        cluster,
        plan,
        plan_json,
        start="start_slurm.j2",
        options=options,
        names="slurm-{component}-{index}",
        given_hosts=False,
    )
    result = {**made.files, "launch.sbatch": render("launch.sbatch.j2", _values(made, options))}
    if len(made.components) > 1:
        result["launch-one.sbatch"] = render("launch-one.sbatch.j2", _values(made, options))
    return result


def _values(made: Parts, options: LaunchOptions) -> dict[str, object]:
    rows = [_component(component, options) for component in made.components]
    told_apart = len({row["pool"] for row in rows}) == 1 or all(row["told"] for row in rows)
    return {
        **made.values,
        "components": rows,
        "features": "&".join(f"{row['feature']}*{row['nodes']}" for row in rows),
        "common": _common(made, options),
        "mount": options.job.mount.rstrip("/"),
        "images": any(row["image"] for row in rows),
        "told_apart": told_apart,
    }


def _common(made: Parts, options: LaunchOptions) -> list[str]:
    """Options that every component repeats: Slurm takes none of them over from the first."""
    name = options.job.name or str(made.values["name"])
    lines = [f"--job-name={shlex.quote(name)}"]
    if options.job.time:
        lines.append(f"--time={options.job.time}")
    if options.job.account:
        lines.append(f"--account={shlex.quote(options.job.account)}")
    return lines


def _component(component: Component, options: LaunchOptions) -> dict[str, object]:
    kind = options.kind(component.pool)
    device = component.pool.device.name
    last = component.first + component.nodes - 1
    gres = "" if kind.gres == "none" else kind.gres or f"gpu:{component.slots}"
    asked = [f"--{name}={value}" for name, value in (("partition", kind.partition), ("constraint", kind.constraint))]
    asked = [line for line in asked if not line.endswith("=")]
    return {
        "pool": component.pool.name,
        "device": device,
        "first": component.first,
        "shown": f"node {component.first}" if component.nodes == 1 else f"nodes {component.first}-{last}",
        "nodes": component.nodes,
        "slots": component.slots,
        "asked": [*asked, *([f"--gres={gres}"] if gres else [])],
        "feature": kind.constraint or device,
        "told": bool(kind.partition or kind.constraint or kind.gres),
        "image": shlex.quote(kind.image) if kind.image else "",
    }
