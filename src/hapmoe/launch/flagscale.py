"""Target ``flagscale``: configuration and hostfile for FlagScale's runner, beside the ssh launcher.

The runner starts ``entry.py``, which takes its arguments from ``args/``: the runner itself cannot give
one kind of device other values than another (flagscale/runner/utils.py:361-397, v0.9.0). It needs
``rdzv_backend: static`` (default c10d, runner_train.py:177, sorts nodes by name), and visible devices in
``envs`` (run_node leaves num_visible_devices unset otherwise).
"""

from __future__ import annotations

from typing import Any

import yaml

from hapmoe.cluster import Cluster
from hapmoe.errors import Unsupported
from hapmoe.job import JobSpec
from hapmoe.launch.options import LaunchOptions
from hapmoe.launch.parts import Parts, parts, render
from hapmoe.plan import Plan

__all__ = ["files"]

_VISIBLE = {"huawei": "ASCEND_RT_VISIBLE_DEVICES"}


def files(
    job: JobSpec, cluster: Cluster, plan: Plan, plan_json: str, options: LaunchOptions | None = None
) -> dict[str, str]:
    """Relative path -> text: the parts of every launch, ``launch.sh`` and ``flagscale/``."""
    made = parts(job, cluster, plan, plan_json, start="start_flagscale.j2", options=options)
    hosts = [host.host for host in made.hosts]
    if twice := next((host for host in hosts if hosts.count(host) > 1), None):
        raise Unsupported(f"FlagScale's hostfile takes a host once, and {twice} holds two pools: use target torchrun")
    return {
        **made.files,
        "launch.sh": render("launch.sh.j2", made.values),
        "flagscale/hostfile": _hostfile(made),
        "flagscale/config.yaml": _HEADER.format(reason=f"# NOT LAUNCHABLE: {made.blocked}\n" if made.blocked else "")
        + yaml.safe_dump(_config(job, made, options or LaunchOptions()), sort_keys=False),
        "flagscale/train/plan.yaml": _TRAIN,
    }


_HEADER = """# For FlagScale's runner, in its folder:
#   HAPMOE_PLAN=<this plan's folder> python run.py --config-path $HAPMOE_PLAN/flagscale --config-name config
{reason}"""

_TRAIN = """# Arguments are in args/ and are given by entry.py; the runner insists on these sections.
system: {checkpoint: {}, logging: {}}
model: {}
data: {}
"""


def _hostfile(made: Parts) -> str:
    """Lines in rank order; a type per mesh would be sorted, so all stand under their kind and order decides."""
    rows = [f"{host.host} slots={host.slots} type={host.kind}" for host in made.hosts]
    return "\n".join(["# In rank order: the order of lines is the order of nodes.", *rows]) + "\n"


def _config(job: JobSpec, made: Parts, options: LaunchOptions) -> dict[str, Any]:
    per_kind: dict[str, dict[str, str]] = {}
    for host in made.hosts:
        name = _VISIBLE.get(host.pool.device.vendor, "CUDA_VISIBLE_DEVICES")
        per_kind[host.kind] = {name: ",".join(map(str, range(host.slots))), **options.kind(host.pool).env}
    return {
        "defaults": ["_self_", {"train": "plan"}],
        "experiment": {
            "exp_name": options.job.name or job.name,
            "exp_dir": "${oc.env:HAPMOE_PLAN}/outputs",
            "task": {"type": "train", "backend": "megatron", "entrypoint": "${oc.env:HAPMOE_PLAN}/entry.py"},
            "runner": {
                "backend": "torchrun",
                "rdzv_backend": "static",
                "hostfile": "${oc.env:HAPMOE_PLAN}/flagscale/hostfile",
                "master_port": options.job.port,
            },
            "envs": {"HAPMOE_WORKDIR": "${oc.env:PWD}", "device_type_specific": per_kind},
        },
        "action": "run",
        "hydra": {"run": {"dir": "${experiment.exp_dir}/hydra"}},
    }
