"""Seconds of collectives and sends, by where the members of a group sit.

Ranks of a stage are contiguous. Dense mesh: tp has stride 1, cp stride tp, the gradient group dp*cp
stride tp. Expert mesh: etp stride 1, ep stride etp, its gradient group edp stride etp*ep (Megatron
parallel_state.py:859-907). A group of n ranks of stride s on nodes of d devices has
q = clamp(d // s, 1, n) members per node.

Every function takes the bytes a rank holds (an all-gather's result, a reduce-scatter's input, what
an all-to-all sends) and applies (n-1)/n itself. Array suffix: K option.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from hapmoe.cluster import Device, Link, Pool
from hapmoe.efficiency import load_yaml
from hapmoe.options import FloatArray, Options

__all__ = ["Fabric", "Group", "collective_s", "fabric_of", "group_of", "send_s"]


@dataclass(frozen=True, slots=True)
class Curve:
    """seconds = alpha_s + per_peer_s (q-1) + wire / (link e_max q/(q+half_ranks)) + ramp sqrt(wire) 1e-9."""

    alpha_s: float
    per_peer_s: float
    e_max: float
    half_ranks: float
    ramp: float


@dataclass(frozen=True, slots=True)
class Fabric:
    """What a pool's wiring does to collectives."""

    name: str
    mesh: bool
    """Full mesh of point-to-point links: q members use only q-1 of them."""
    inside: dict[str, Curve]
    table: dict[str, Any]
    """The network, flex, send_recv and host_copy entries of data/fabrics.yaml."""


@dataclass(frozen=True, slots=True)
class Group:
    """Members of a communication group: in all, per node (or scale-up domain), and nodes."""

    size_K: FloatArray
    inside_K: FloatArray
    nodes_K: FloatArray


@lru_cache(maxsize=1)
def _tables() -> dict[str, Any]:
    return load_yaml("fabrics.yaml")


def fabric_of(device: Device) -> Fabric:
    """The row of data/fabrics.yaml for a device, by the parts of its name, else by what joins its node."""
    return _fabric(device.name, device.vendor, device.scale_up_bytes_per_s)


@lru_cache(maxsize=64)
def _fabric(device: str, vendor: str, bytes_per_s: float) -> Fabric:
    tables, parts = _tables(), set(device.lower().split("-"))
    chosen = next((row["fabric"] for row in tables["select"] if parts & set(row["names"])), "")
    if not chosen:
        vendors = {"amd": "xgmi", "huawei": "hccs", "cpu": "host"}
        chosen = vendors.get(vendor, "nvlink4" if bytes_per_s > 100e9 else "pcie")
    row = tables["fabrics"][chosen]
    names = ("alpha_s", "per_peer_s", "e_max", "half_ranks", "ramp")
    inside = {
        op: Curve(*(float(row[op][name]) for name in names))
        for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    }
    return Fabric(name=chosen, mesh=bool(row.get("mesh")), inside=inside, table=tables)


def group_of(pool: Pool, options: Options, axis: str) -> Group:
    """Where the members of ``axis`` sit: tp, cp, ep, etp, tp_ep (etp x ep), dp (dp*cp) or edp."""
    one_K = np.ones(len(options))
    size_K, stride_K = {
        "tp": (options.tp_K, one_K),
        "cp": (options.cp_K, options.tp_K),
        "dp": (options.cp_K * options.dp_K, options.tp_K),
        "etp": (options.etp_K, one_K),
        "ep": (options.ep_K, options.etp_K),
        "tp_ep": (options.etp_K * options.ep_K, one_K),
        "edp": (options.edp_K, options.etp_K * options.ep_K),
    }[axis]
    domain = max(
        pool.devices_per_node,
        pool.device.scale_up_domain if pool.device.scale_up_domain > pool.device.devices_per_node else 0,
    )
    n_K = size_K.astype(np.float64)
    most_K = np.clip(domain // stride_K, 1.0, n_K)
    nodes_K = np.ceil(n_K / most_K)
    return Group(size_K=n_K, inside_K=n_K / nodes_K, nodes_K=nodes_K)


def _inside_s(
    fabric: Fabric, curve: Curve, link: float, domain: float, q_K: FloatArray, wire_K: FloatArray
) -> FloatArray:
    share_K = curve.e_max * q_K / (q_K + curve.half_ranks)
    if fabric.mesh:
        share_K = share_K * np.minimum((q_K - 1.0) / max(domain - 1.0, 1.0), 1.0)
    rate_K = link * np.maximum(share_K, 1e-9)
    return curve.alpha_s + curve.per_peer_s * (q_K - 1.0) + wire_K / rate_K + (curve.ramp * 1e-9) * np.sqrt(wire_K)


def collective_s(pool: Pool, group: Group, collective: str, bytes_K: FloatArray, *, copies: float = 1.0) -> FloatArray:
    """Seconds of one collective; 0 where the group has one member.

    Ring collectives go round all members: inside a node over the scale-up link, between nodes over
    the NICs of the group's members there (q of them: the other devices' groups use the others). An
    all-to-all pays both shares at once: the slower of the two plus latencies is the time. NICs are
    shared by all devices of a node, because all groups communicate at the same time.
    ``copies`` (flex): experts per token; a token crosses to a node, and to a rank, only once.

    Source: data/fabrics.yaml.
    """
    fabric = fabric_of(pool.device)
    n_K, q_K, nodes_K = group.size_K, group.inside_K, group.nodes_K
    if not bool(np.any(n_K > 1)):
        return np.zeros(len(n_K))
    device = pool.device
    link, domain = device.scale_up_bytes_per_s, float(min(device.devices_per_node, pool.devices_per_node))
    nic = pool.network.node_bytes_per_s / pool.devices_per_node
    network = fabric.table["network"]
    spread = bool(np.any(nodes_K > 1))
    if collective in ("all_to_all", "flex_dispatch", "flex_combine"):
        if collective == "all_to_all":
            curve = fabric.inside["all_to_all"]
            inside_wire_K = bytes_K * ((q_K - 1.0) / n_K)
            outside_wire_K = bytes_K * ((n_K - q_K) / n_K)
            row = network["all_to_all"]
            reach_K = row["e_max"] / (1.0 + row["per_node_loss"] * np.maximum(nodes_K - 2.0, 0.0))
        else:
            flex = fabric.table["flex"]
            old = fabric.inside["all_to_all"]
            curve = Curve(float(flex["alpha_s"]), old.per_peer_s, float(flex["intra_e_max"]), old.half_ranks, old.ramp)
            ranks_K = n_K * (1.0 - (1.0 - 1.0 / n_K) ** copies)
            distinct_K = nodes_K * (1.0 - (1.0 - 1.0 / nodes_K) ** copies)
            inside_wire_K = bytes_K * ranks_K * ((q_K - 1.0) / q_K)
            outside_wire_K = bytes_K * distinct_K * ((nodes_K - 1.0) / nodes_K)
            row = network["all_to_all"]
            reach_K = np.full(len(n_K), float(flex["inter_e_max"]))
        seconds_K = _inside_s(fabric, curve, link, domain, np.maximum(q_K, 1.0), inside_wire_K)
        if spread:
            outside_K = row["alpha_s"] + row["per_node_s"] * (nodes_K - 1.0) + outside_wire_K / (nic * reach_K)
            outside_K = outside_K + (row["ramp"] * 1e-9) * np.sqrt(outside_wire_K)
            seconds_K = np.where(nodes_K > 1, np.maximum(seconds_K, outside_K), seconds_K)
        return np.where(n_K > 1, seconds_K, 0.0)
    if collective == "ring":
        # n-1 steps of K and V from neighbour to neighbour: bytes_K is what all n ranks hold together
        step_K = bytes_K / n_K
        p2p = fabric.table["send_recv"]
        seconds_K = p2p["alpha_s"] + step_K / (link * p2p["e_max"])
        if spread:
            far = network["send_recv"]
            seconds_K = np.where(
                nodes_K > 1, np.maximum(seconds_K, far["alpha_s"] + step_K / (nic * q_K * far["e_max"])), seconds_K
            )
        return np.asarray((n_K - 1.0) * seconds_K)
    curve = fabric.inside[collective]
    wire_K = bytes_K * ((n_K - 1.0) / n_K) * (2.0 if collective == "all_reduce" else 1.0)
    seconds_K = _inside_s(fabric, curve, link, domain, np.maximum(q_K, 1.0), wire_K)
    if spread:
        row = network["ring"]
        outside_K = row["alpha_s"] + row["per_node_s"] * (nodes_K - 1.0) + wire_K / (nic * q_K * row["e_max"])
        outside_K = outside_K + (row["ramp"] * 1e-9) * np.sqrt(wire_K)
        # one member per node: the scale-up link has no part in it
        seconds_K = np.where(nodes_K > 1, np.where(q_K > 1, np.maximum(seconds_K, outside_K), outside_K), seconds_K)
    return np.asarray(np.where(n_K > 1, seconds_K, 0.0), dtype=np.float64)


def send_s(
    bytes_K: FloatArray,
    senders_K: FloatArray,
    *,
    pool: Pool,
    to: Pool | None = None,
    link: Link | None = None,
    same_node_K: FloatArray | None = None,
) -> FloatArray:
    """Seconds to send ``bytes_K`` from every rank of a stage to its partner in the next stage.

    ``senders_K``: ranks of one node that send at once (the smaller of the stage and the node).
    ``same_node_K``: true where both stages live on one node (scale-up link). Across nodes the node's
    NICs are shared by its senders; across pools the link of the cluster file is. Gloo goes through
    host memory on both sides.
    """
    fabric = fabric_of(pool.device)
    p2p, network = fabric.table["send_recv"], fabric.table["network"]["send_recv"]
    if link is not None:
        seconds_K = link.latency_s + bytes_K * senders_K / (link.bytes_per_s * float(network["e_max"]))
        if link.transport == "gloo":
            seconds_K = seconds_K + 2.0 * bytes_K / float(fabric.table["host_copy"]["bytes_per_s"])
        return np.asarray(seconds_K, dtype=np.float64)
    rate = pool.network.node_bytes_per_s
    latency = pool.network.latency_s
    if to is not None:
        rate, latency = min(rate, to.network.node_bytes_per_s), max(latency, to.network.latency_s)
    far_K = network["alpha_s"] + latency + bytes_K * senders_K / (rate * network["e_max"])
    # a rank reaches one NIC of its own, or the share it has of fewer NICs
    own = pool.network.nic_bytes_per_s * max(1.0, pool.network.nics_per_node / pool.devices_per_node)
    far_K = np.maximum(far_K, network["alpha_s"] + latency + bytes_K / (own * network["e_max"]))
    if same_node_K is None:
        return np.asarray(far_K)
    device = pool.device
    rate_near = device.scale_up_bytes_per_s / (max(device.devices_per_node - 1, 1) if fabric.mesh else 1)
    near_K = p2p["alpha_s"] + device.scale_up_latency_s + bytes_K / (rate_near * p2p["e_max"])
    return np.asarray(np.where(same_node_K, near_K, far_K), dtype=np.float64)
