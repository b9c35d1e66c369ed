"""What crosses a stage boundary per microbatch: bytes, messages, seconds. Array suffix: K option.

Between equal meshes every rank sends what it holds to its partner. Between unequal ones every rank
sends each peer the part that both hold: cut along the batch (dp), the sequence (cp: two chunks of a
zigzag; with sequence parallelism tp as well). The gradient goes back the same way, cut from the other side.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import lcm

import numpy as np

from hapmoe.cluster import Cluster, Pool
from hapmoe.comm import network_of, send_s
from hapmoe.job import JobSpec
from hapmoe.options import FloatArray, Options
from hapmoe.units import DTYPE_BYTES
from hapmoe.workload import uses_sequence_parallel

__all__ = ["Crossing", "boundary_bytes", "boundary_s", "crossing", "near", "same_node"]


@dataclass(frozen=True, slots=True)
class Crossing:
    """One activation from a stage to the next, of the rank that sends or receives most."""

    sent_bytes_K: FloatArray
    received_bytes_K: FloatArray
    sends_K: FloatArray
    """Messages that one rank sends."""
    receives_K: FloatArray


def boundary_bytes(job: JobSpec, options: Options) -> FloatArray:
    """Bytes that one rank sends to the next stage per microbatch: T*H, over tp with sequence
    parallelism (Megatron schedules.py ``get_tensor_shapes``) or where each rank sends its part."""
    tokens_K = options.mbs_K * job.training.seq_len / options.cp_K
    shared = uses_sequence_parallel(job) or job.training.scatter_gather
    shared_K = options.tp_K if shared else np.ones_like(options.tp_K)
    width = job.model.hidden * DTYPE_BYTES[job.training.precision]
    return np.asarray(tokens_K * width / shared_K)


def crossing(job: JobSpec, sender: Options, receiver: Options) -> Crossing:
    """What crosses from stages run as ``sender`` to stages run as ``receiver``, option by option.

    Both take the same sequences per microbatch (mbs * dp). Without sequence parallelism tp ranks hold
    copies: each receiver gets one, from the sender with its tp rank modulo the sender's tp.
    """
    if sender is receiver:  # equal meshes throughout
        once_K = np.ones(len(sender))
        each_K = boundary_bytes(job, sender)
        return Crossing(each_K, each_K, once_K, once_K)
    shared = uses_sequence_parallel(job)
    columns = (sender.tp_K, sender.cp_K, sender.dp_K, receiver.tp_K, receiver.cp_K, receiver.dp_K)
    kinds, kind_K = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    messages = np.asarray([_messages(*kind, shared) for kind in kinds.tolist()], np.float64).reshape(-1, 2)
    messages = messages[kind_K.ravel()]
    copies_K = np.ones(len(sender)) if shared else np.ceil(receiver.tp_K / sender.tp_K)
    return Crossing(
        boundary_bytes(job, sender) * copies_K, boundary_bytes(job, receiver), messages[:, 0], messages[:, 1]
    )


@lru_cache(maxsize=65536)
def _messages(tp: int, cp: int, dp: int, to_tp: int, to_cp: int, to_dp: int, shared: bool) -> tuple[int, int]:
    """The most messages that one sender, and that one receiver, has per activation."""
    if (tp, cp, dp) == (to_tp, to_cp, to_dp):
        return 1, 1
    there, back = _overlaps(dp, to_dp), _overlaps(to_dp, dp)
    if not shared:
        there, back = there * -(-to_tp // tp), back  # one sender per receiver
        tp = to_tp = 1
    units = lcm(2 * cp * tp, 2 * to_cp * to_tp)
    mine, theirs = _held(cp, tp, units), _held(to_cp, to_tp, units)
    meets = [[bool(a & b) for b in theirs] for a in mine]
    return there * max(map(sum, meets)), back * max(map(sum, zip(*meets, strict=True)))


def _overlaps(parts: int, others: int) -> int:
    """How many of ``others`` equal parts of a batch one of ``parts`` equal parts meets, at most.

    >>> _overlaps(3, 2), _overlaps(2, 3), _overlaps(1, 4)
    (2, 2, 4)
    """
    return max(-(-(i + 1) * others // parts) - i * others // parts for i in range(parts))


@lru_cache(maxsize=4096)
def _held(cp: int, tp: int, units: int) -> tuple[int, ...]:
    """The units of the sequence that each rank of a context and tensor group holds, as bits.

    Context parallel rank c holds chunks c and 2 cp - 1 - c (megatron/core/utils.py
    ``get_batch_on_this_cp_rank``), and each tp rank an equal part of the two.
    """
    chunk = units // (2 * cp)
    held = []
    for c in range(cp):
        both = [*range(c * chunk, (c + 1) * chunk), *range((2 * cp - 1 - c) * chunk, (2 * cp - c) * chunk)]
        part = len(both) // tp
        held += [sum(1 << unit for unit in both[t * part : (t + 1) * part]) for t in range(tp)]
    return tuple(held)


def boundary_s(
    job: JobSpec,
    cluster: Cluster,
    sender: Pool,
    receiver: Pool,
    options: Options,
    inside: bool,
    to: Options | None = None,
) -> FloatArray:
    """Seconds of one transfer between neighbouring stages, the slower of its two directions.

    ``inside``: both stages live on one scale-up fabric. ``to``: how the receiver's stages run; None: as
    the sender's. Pools that no link joins never meet: infinite.
    """
    if sender.name != receiver.name and cluster.link(sender.name, receiver.name) is None:
        return np.full(len(options), np.inf)
    to = to or options
    forward = _one_way_s(job, cluster, sender, receiver, options, to, inside)
    return np.maximum(forward, _one_way_s(job, cluster, receiver, sender, to, options, inside))


def _one_way_s(
    job: JobSpec, cluster: Cluster, sender: Pool, receiver: Pool, options: Options, to: Options, inside: bool
) -> FloatArray:
    """The slower of what a sending and what a receiving node has to do, messages after the first one's
    start, and the copies that cut and assemble the parts (each byte read and written)."""
    across = crossing(job, options, to)
    ends = (
        (across.sent_bytes_K, np.minimum(options.devices_K, sender.devices_per_node)),
        (across.received_bytes_K, np.minimum(to.devices_K, receiver.devices_per_node)),
    )
    if sender.name == receiver.name:
        same = np.full(len(options), inside)
        times = [send_s(size_K, many_K.astype(np.float64), pool=sender, same_node_K=same) for size_K, many_K in ends]
    else:
        link = cluster.link(sender.name, receiver.name)
        times = [
            send_s(size_K, many_K.astype(np.float64), pool=sender, to=receiver, link=link) for size_K, many_K in ends
        ]
    most_K = np.maximum(across.sends_K, across.receives_K)
    start_s = float(network_of(sender.network.kind)["send_recv"]["alpha_s"])
    copied_K = 2.0 * across.sent_bytes_K / sender.device.memory_bytes_per_s
    copied_K = copied_K + 2.0 * across.received_bytes_K / receiver.device.memory_bytes_per_s
    return np.maximum(*times) + (most_K - 1.0) * start_s + np.where(most_K > 1.0, copied_K, 0.0)


def same_node(pool: Pool, size: int, place: int) -> bool:
    """Do the stages at ``place`` and ``place + 1`` within the pool, ``size`` devices each, share a fabric?"""
    last = (place + 2) * size - 1
    return near(pool, place * size // pool.devices_per_node, last // pool.devices_per_node)


def near(pool: Pool, first_node: int, last_node: int) -> bool:
    """Are the nodes from the first to the last within one scale-up domain (a node, or a rack of nodes)?"""
    domain = max(pool.device.scale_up_domain // pool.devices_per_node, 1)
    return first_node // domain == last_node // domain
