"""Seconds of one activation (or its gradient) across a stage boundary. Array suffix: K option."""

from __future__ import annotations

import numpy as np

from hapmoe.cluster import Cluster, Pool
from hapmoe.comm import send_s
from hapmoe.job import JobSpec
from hapmoe.options import FloatArray, Options
from hapmoe.units import DTYPE_BYTES
from hapmoe.workload import uses_sequence_parallel

__all__ = ["boundary_bytes", "boundary_s", "near", "same_node"]


def boundary_bytes(job: JobSpec, options: Options) -> FloatArray:
    """Bytes that one rank sends to the next stage per microbatch: T*H, over tp with sequence
    parallelism (Megatron schedules.py ``get_tensor_shapes``)."""
    tokens_K = options.mbs_K * job.training.seq_len / options.cp_K
    shared_K = options.tp_K if uses_sequence_parallel(job) else np.ones_like(options.tp_K)
    width = job.model.hidden * DTYPE_BYTES[job.training.precision]
    return np.asarray(tokens_K * width / shared_K)


def boundary_s(
    job: JobSpec, cluster: Cluster, sender: Pool, receiver: Pool, options: Options, inside: bool
) -> FloatArray:
    """Seconds of one transfer between neighbouring stages.

    ``inside``: both stages live on one scale-up fabric. Pools that no link joins never meet: infinite.
    """
    bytes_K = boundary_bytes(job, options)
    senders_K = np.minimum(options.devices_K, min(sender.devices_per_node, receiver.devices_per_node)).astype(
        np.float64
    )
    if sender.name == receiver.name:
        return send_s(bytes_K, senders_K, pool=sender, same_node_K=np.full(len(options), inside))
    link = cluster.link(sender.name, receiver.name)
    if link is None:
        return np.full(len(options), np.inf)
    return send_s(bytes_K, senders_K, pool=sender, to=receiver, link=link)


def same_node(pool: Pool, size: int, place: int) -> bool:
    """Do the stages at ``place`` and ``place + 1`` within the pool, ``size`` devices each, share a fabric?"""
    last = (place + 2) * size - 1
    return near(pool, place * size // pool.devices_per_node, last // pool.devices_per_node)


def near(pool: Pool, first_node: int, last_node: int) -> bool:
    """Are the nodes from the first to the last within one scale-up domain (a node, or a rack of nodes)?"""
    domain = max(pool.device.scale_up_domain // pool.devices_per_node, 1)
    return first_node // domain == last_node // domain
