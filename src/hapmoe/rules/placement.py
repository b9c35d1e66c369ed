"""Where stages run: nodes, ranks, kinds of devices and what they can compute."""

from __future__ import annotations

from collections.abc import Iterator

from hapmoe.cluster import Device
from hapmoe.rules.base import Broken, Context, Rule

__all__ = ["RULES", "compute_capability_8", "is_blackwell"]

Found = Iterator[Broken]

_PRECISIONS = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16"}


def compute_capability_8(device: Device) -> bool:
    """Ampere or newer. NVIDIA kinds before it (V100, T4) are exactly those without bf16."""
    return device.vendor != "nvidia" or "bf16" in device.peak_flop_per_s


def is_blackwell(device: Device) -> bool:
    """Compute capability 10: the NVIDIA kinds with an fp4 rate."""
    return device.vendor == "nvidia" and "fp4" in device.peak_flop_per_s


def _kind(c: Context) -> Found:
    for index, stage, pool in c.pools():
        if stage.device != pool.device.name:
            yield Broken(f"device {stage.device!r}, but pool {pool.name} has {pool.device.name}", stage=index)


def _nodes(c: Context) -> Found:
    used: dict[tuple[str, int], int] = {}
    for index, stage, pool in c.pools():
        for node in stage.nodes:
            if not 0 <= node < pool.nodes:
                yield Broken(
                    f"node {node} of pool {pool.name}, which has {pool.nodes} nodes of {pool.devices_per_node} devices",
                    f"nodes 0 to {pool.nodes - 1}",
                    index,
                )
                return
        if len(set(stage.nodes)) != len(stage.nodes):
            yield Broken(f"nodes {list(stage.nodes)} repeat", stage=index)
        count, per_node = stage.num_devices, pool.devices_per_node
        whole = count == len(stage.nodes) * per_node
        part = len(stage.nodes) == 1 and per_node % count == 0
        if not whole and not part:
            yield Broken(
                f"{count} devices on {len(stage.nodes)} nodes of {per_node}: neither whole nodes nor "
                "an equal part of one",
                f"a multiple or a divisor of {per_node}",
                index,
            )
            continue
        for node in stage.nodes:
            key = (pool.name, node)
            used[key] = used.get(key, 0) + count // len(stage.nodes)
            if used[key] > per_node:
                yield Broken(
                    f"node {node} of pool {pool.name} is given {used[key]} ranks and has {per_node} devices",
                    stage=index,
                )


def _shared_nodes(c: Context) -> Found:
    last: dict[tuple[str, int], int] = {}
    for index, stage, _ in c.pools():
        for node in stage.nodes:
            key = (stage.pool, node)
            if key in last and index - last[key] > 1:
                yield Broken(
                    f"node {node} of pool {stage.pool} holds stages {last[key]} and {index}, not those between",
                    "stages that share a node are neighbours: ranks are counted node by node",
                    index,
                )
            last[key] = index


def _ranks(c: Context) -> Found:
    expected = 0
    for index, stage in enumerate(c.plan.stages):
        if stage.first_rank != expected:
            yield Broken(f"first rank is {stage.first_rank}, the stages before it hold {expected}", stage=index)
            return
        expected += stage.num_devices


def _neighbours(c: Context) -> Found:
    names = {pool.name for pool in c.cluster.pools}
    pairs = zip(c.plan.stages, c.plan.stages[1:], strict=False)
    for index, (before, after) in enumerate(pairs):
        if before.pool == after.pool or not {before.pool, after.pool} <= names:
            continue
        if c.cluster.link(before.pool, after.pool) is None:
            vendors = [c.cluster.pool(stage.pool).device.vendor for stage in (before, after)]
            yield Broken(
                f"pools {before.pool} ({vendors[0]}) and {after.pool} ({vendors[1]}) are neighbours without a link: "
                "no collective library joins different vendors",
                f"add to links: {{between: [{before.pool}, {after.pool}], bandwidth: …, latency: …, transport: gloo}}",
                index + 1,
            )
    if c.plan.vpp > 1 and c.plan.pp > 1:
        first, last = c.plan.stages[0], c.plan.stages[-1]
        differ = first.pool != last.pool and {first.pool, last.pool} <= names
        if differ and c.cluster.link(first.pool, last.pool) is None:
            yield Broken(
                f"interleaving sends from the last stage ({last.pool}) to the first ({first.pool}), without a link",
                "set vpp to 1, or add the link",
            )


def _precision(c: Context) -> Found:
    training = c.job.training
    for index, pool in c.pools_used():
        rates = pool.device.peak_flop_per_s
        wanted = [_PRECISIONS.get(training.precision, training.precision)]
        if training.fp8_recipe is not None:
            wanted.append("fp8")
        if training.fp4:
            wanted.append("fp4")
        for precision in wanted:
            if precision not in rates:
                yield Broken(
                    f"{pool.device.name} has no {precision}, which the job trains in",
                    f"leave pool {pool.name} out, or train in {' or '.join(sorted(rates))}",
                    index,
                )


def _grouped_gemm(c: Context) -> Found:
    if c.job.model.moe is None or not c.job.training.grouped_gemm:
        return
    for index, pool in c.pools_used():
        if not compute_capability_8(pool.device):
            yield Broken(
                f"--moe-grouped-gemm needs compute capability 8, {pool.device.name} is older",
                f"remove --moe-grouped-gemm, or leave pool {pool.name} out",
                index,
            )


RULES = (
    Rule("device", "the plan was made for these devices", "cluster file", _kind),
    Rule("nodes", "a stage is whole nodes, or an equal part of one", "PS:859", _nodes),
    Rule("shared-nodes", "torchrun numbers ranks node by node", "torch elastic/agent/server/api.py:585", _shared_nodes),
    Rule("ranks", "pipeline parallelism is outermost: stages are consecutive ranks", "PS:617; PS:859", _ranks),
    Rule("neighbours", "stages that are neighbours send to each other", "cluster file", _neighbours),
    Rule("precision", "every device must compute in the job's precision", "device catalogue", _precision),
    Rule("grouped-gemm", "grouped GEMM kernels", "A:1380", _grouped_gemm),
)
