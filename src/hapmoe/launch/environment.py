"""env/<kind>.env: what nodes with one kind of device need, with the network variables of its libraries."""

from __future__ import annotations

import re
import shlex

from hapmoe import backends
from hapmoe.cluster import Cluster, Device, Pool
from hapmoe.job import JobSpec
from hapmoe.launch.options import LaunchOptions
from hapmoe.plan import Plan
from hapmoe.rules.base import Context
from hapmoe.rules.flags import needs_one_connection

__all__ = ["device_exports", "file_name"]

_INTERFACES: dict[str, tuple[str, ...]] = {
    # NCCL user guide, "Environment Variables"; RCCL reads the same names.
    "nccl": ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX"),
    "rccl": ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX"),
    # CANN, "HCCL environment variables".
    "hccl": ("HCCL_SOCKET_IFNAME", "HCCL_IF_BASE_PORT", "HCCL_CONNECT_TIMEOUT"),
    # FlagCX README, "Environment variables".
    "flagcx": ("FLAGCX_SOCKET_IFNAME", "FLAGCX_IB_HCA"),
    # Megatron makes Gloo groups beside the others unless --disable-gloo-process-groups.
    "gloo": ("GLOO_SOCKET_IFNAME",),
}


def file_name(device: Device) -> str:
    """The device's name as part of a file name (entry.py does the same)."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", device.name)


def device_exports(job: JobSpec, cluster: Cluster, plan: Plan, options: LaunchOptions) -> dict[str, str]:
    """Text of env/<kind>.env for every kind of device in the plan."""
    single = needs_one_connection(Context(job, cluster, plan, backends.capabilities(plan.backend)))
    transports = _transports(cluster, plan)
    pools = {stage.pool: cluster.pool(stage.pool) for stage in plan.stages}
    nvidia = {pool.device.name for pool in pools.values() if pool.device.vendor == "nvidia"}
    texts: dict[str, str] = {}
    for pool in pools.values():
        device = pool.device
        lines = [f"# For nodes with {device.name}."]
        if device.runtime_names:
            lines += [
                "# Parts of the name that the driver reports; entry.py stops on a device without one of them.",
                f"HAPMOE_DEVICE_NAMES={shlex.quote(','.join(name.lower() for name in device.runtime_names))}",
            ]
        lines += ["# Its collective library; check_hosts.py compares versions by it.", f"HAPMOE_CCL={device.ccl}"]
        if device.name in single and "CUDA_DEVICE_MAX_CONNECTIONS" not in job.env:
            lines += [
                "# Megatron demands it for tensor or context parallelism (arguments.py:1477).",
                "CUDA_DEVICE_MAX_CONNECTIONS=1",
            ]
        given = _given(options, pool)
        if "flagcx" in transports and "FLAGCX_ENABLE_TOPO_DETECT" not in {*job.env, *given}:
            lines += [
                "# FlagCX joins different vendors by the topology that it finds.",
                "FLAGCX_ENABLE_TOPO_DETECT=TRUE",
            ]
        if given:
            lines += ["# From the launch options."]
            lines += [f"{name}={shlex.quote(value)}" for name, value in given.items()]
        libraries = dict.fromkeys((device.ccl, *sorted(transports), "gloo"))
        wanted = [name for library in libraries for name in _INTERFACES.get(library, ())]
        wanted = [name for name in dict.fromkeys(wanted) if name not in job.env and name not in given]
        if wanted:
            lines += ["# Network interfaces, where the library does not find them by itself:"]
            lines += [f"# {name}=" for name in wanted]
        if device.name in nvidia and len(nvidia) > 1:
            lines += [
                "# Several NVIDIA generations in one communicator want the same NCCL everywhere; where it hangs or",
                "# gives wrong numbers, NCCL_PROTO=SIMPLE on all nodes is the test (NCCL issues 794, 1184).",
            ]
        texts[file_name(device)] = "\n".join(lines) + "\n"
    return texts


def _given(options: LaunchOptions, pool: Pool) -> dict[str, str]:
    return options.kind(pool).env


def _transports(cluster: Cluster, plan: Plan) -> frozenset[str]:
    """What joins the pools of the plan beyond each vendor's own library."""
    found = set()
    for before, after in zip(plan.stages, plan.stages[1:], strict=False):
        link = cluster.link(before.pool, after.pool) if before.pool != after.pool else None
        if link is not None and cluster.pool(before.pool).device.vendor != cluster.pool(after.pool).device.vendor:
            found.add(link.transport)
    return frozenset(found)
