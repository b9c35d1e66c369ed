"""Seconds of collectives and sends, by where the members of a group sit.

Ranks of a stage are contiguous. Dense mesh: tp has stride 1, cp stride tp, the gradient group dp*cp
stride tp. Expert mesh: etp stride 1, ep stride etp, its gradient group edp stride etp*ep (Megatron
parallel_state.py:859-907). A group of n ranks of stride s on nodes of d devices has
q = clamp(d // s, 1, n) members per node.

Every function takes the bytes a rank holds (an all-gather's result, a reduce-scatter's input, what
an all-to-all sends) and applies (n-1)/n itself. Array suffix: K option.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeAlias

import numpy as np

from hapmoe.cluster import Device, Link, Pool
from hapmoe.efficiency import load_yaml
from hapmoe.measured import Collective, Measurements
from hapmoe.options import FloatArray, IntArray, Options
from hapmoe.tables.lookup import SOURCES, ratio_along, weights_among

__all__ = [
    "Fabric",
    "Group",
    "collective_s",
    "collective_with_source",
    "fabric_of",
    "group_of",
    "network_of",
    "send_s",
]


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


Distinct: TypeAlias = Callable[[FloatArray], FloatArray]
"""Of so many places, how many a token goes to."""


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


@lru_cache(maxsize=16)
def network_of(kind: str) -> dict[str, dict[str, Any]]:
    """Entries ring, all_to_all, send_recv and flex of a kind of network ("": InfiniBand or RoCE)."""
    tables = _tables()
    usual = {**tables["network"], "flex": tables["flex"]}
    other = tables["network_kinds"][kind] if kind else {}
    return {name: {**row, **other.get(name, {})} for name, row in usual.items()}


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


def collective_s(
    pool: Pool, group: Group, collective: str, bytes_K: FloatArray, *, distinct: Distinct = np.ones_like
) -> FloatArray:
    """Seconds of one collective, measured where the pool has tables; 0 where the group has one member."""
    return collective_with_source(pool, group, collective, bytes_K, distinct=distinct)[0]


def collective_with_source(
    pool: Pool, group: Group, collective: str, bytes_K: FloatArray, *, distinct: Distinct = np.ones_like
) -> tuple[FloatArray, IntArray]:
    """Seconds of one collective, and where they come from (positions in ``tables.lookup.SOURCES``).

    Groups of a size that was not measured are the model's, scaled as the nearest measured sizes of
    the same link class are: tables of 4 nodes say how 16 nodes do (the paper's Appendix D).
    """
    seconds_K = _modelled_s(pool, group, collective, bytes_K, distinct)
    source_K = np.full(len(seconds_K), SOURCES.index("roofline"))
    if pool.tables is None:
        return seconds_K, source_K
    shapes = _measured_shapes(pool.tables, collective)
    for link, far in (("node", False), ("network", True)):
        here_K = (group.size_K > 1) & ((group.nodes_K > 1) == far)
        rows = {key: series for key, series in shapes.items() if key[0] == link}
        if rows and here_K.any():
            asked_XD = np.stack([group.size_K[here_K], group.inside_K[here_K]], axis=1)
            ratio_X, source_X = _group_ratio(pool, collective, rows, asked_XD, bytes_K[here_K], seconds_K[here_K])
            seconds_K[here_K] = seconds_K[here_K] * ratio_X
            source_K[here_K] = source_X
    return seconds_K, source_K


_Series = dict[tuple[str, int, int], tuple[FloatArray, FloatArray]]
"""Bytes and seconds by link class, ranks and ranks per node."""


@lru_cache(maxsize=256)
def _measured_shapes(tables: Measurements, collective: str) -> _Series:
    rows: dict[tuple[str, int, int], list[Collective]] = {}
    for row in tables.collectives:
        if row.collective == collective and row.setting == "alone" and row.bytes > 0:
            rows.setdefault((row.link, row.ranks, row.ranks_per_node), []).append(row)
    return {
        key: (np.array([float(row.bytes) for row in series]), np.array([row.median_s for row in series]))
        for key, series in rows.items()
    }


def _group_ratio(
    pool: Pool, collective: str, rows: _Series, asked_XD: FloatArray, bytes_X: FloatArray, model_X: FloatArray
) -> tuple[FloatArray, IntArray]:
    """Measured over modelled for groups of (ranks, ranks per node), by bytes."""
    points_RD = np.array([[float(ranks), float(per_node)] for _, ranks, per_node in rows])
    bytes_X = np.maximum(bytes_X, 1.0)
    ratio_XR, source_XR = np.empty((len(bytes_X), len(rows))), np.empty((len(bytes_X), len(rows)), np.int64)
    for index, ((_, ranks, per_node), (sizes, seconds)) in enumerate(rows.items()):

        def model(sizes: FloatArray, ranks: float = ranks, per_node: float = per_node) -> FloatArray:
            whole = np.ones(len(sizes))
            shape = Group(ranks * whole, per_node * whole, np.ceil(ranks / per_node) * whole)
            return _modelled_s(pool, shape, collective, sizes, np.ones_like)

        same_X = (asked_XD == points_RD[index]).all(axis=1)
        at_X = np.where(same_X, model_X, model(bytes_X))
        ratio_XR[:, index], source_XR[:, index] = ratio_along(sizes, seconds, model(sizes), bytes_X, at_X)
    weight_XR, group_source_X = weights_among(points_RD, asked_XD)
    nearest_X = weight_XR.argmax(axis=1)
    source_X = np.maximum(group_source_X, source_XR[np.arange(len(bytes_X)), nearest_X])
    return np.exp2((weight_XR * np.log2(ratio_XR)).sum(axis=1)), source_X


def _modelled_s(pool: Pool, group: Group, collective: str, bytes_K: FloatArray, distinct: Distinct) -> FloatArray:
    """Seconds of one collective by the fabric's curves; 0 where the group has one member or nothing to send.

    Ring collectives go round all members: inside a node over the scale-up link, between nodes over
    the NICs of the group's members there (q of them: the other devices' groups use the others). An
    all-to-all pays both shares at once: the slower of the two plus latencies is the time. NICs are
    shared by all devices of a node, because all groups communicate at the same time.
    ``distinct`` (flex): of so many nodes or ranks, how many a token goes to; it crosses to each of them once.

    Source: data/fabrics.yaml.
    """
    fabric = fabric_of(pool.device)
    n_K, q_K, nodes_K = group.size_K, group.inside_K, group.nodes_K
    sends_K = (n_K > 1) & (bytes_K > 0)
    if not bool(np.any(sends_K)):
        return np.zeros(len(n_K))
    device = pool.device
    link, domain = device.scale_up_bytes_per_s, float(min(device.devices_per_node, pool.devices_per_node))
    nic = pool.network.node_bytes_per_s / pool.devices_per_node
    network = network_of(pool.network.kind)
    spread = bool(np.any(nodes_K > 1))
    if collective in ("all_to_all", "flex_dispatch", "flex_combine"):
        if collective == "all_to_all":
            curve = fabric.inside["all_to_all"]
            inside_wire_K = bytes_K * ((q_K - 1.0) / n_K)
            outside_wire_K = bytes_K * ((n_K - q_K) / n_K)
            row = network["all_to_all"]
            reach_K = row["e_max"] / (1.0 + row["per_node_loss"] * np.maximum(nodes_K - 2.0, 0.0))
        else:
            flex = network["flex"]
            old = fabric.inside["all_to_all"]
            curve = Curve(float(flex["alpha_s"]), old.per_peer_s, float(flex["intra_e_max"]), old.half_ranks, old.ramp)
            inside_wire_K = bytes_K * distinct(n_K) * ((q_K - 1.0) / q_K)
            outside_wire_K = bytes_K * distinct(nodes_K) * ((nodes_K - 1.0) / nodes_K)
            row = network["all_to_all"] | {"per_node_s": flex["per_node_s"]}
            reach_K = np.full(len(n_K), float(flex["inter_e_max"]))
        seconds_K = _inside_s(fabric, curve, link, domain, np.maximum(q_K, 1.0), inside_wire_K)
        if spread:
            outside_K = row["alpha_s"] + row["per_node_s"] * (nodes_K - 1.0) + outside_wire_K / (nic * reach_K)
            outside_K = outside_K + (row["ramp"] * 1e-9) * np.sqrt(outside_wire_K)
            seconds_K = np.where(nodes_K > 1, np.maximum(seconds_K, outside_K), seconds_K)
        return np.where(sends_K, seconds_K, 0.0)
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
        return np.where(sends_K, (n_K - 1.0) * seconds_K, 0.0)
    curve = fabric.inside[collective]
    wire_K = bytes_K * ((n_K - 1.0) / n_K) * (2.0 if collective == "all_reduce" else 1.0)
    seconds_K = _inside_s(fabric, curve, link, domain, np.maximum(q_K, 1.0), wire_K)
    if spread:
        row = network["ring"]
        outside_K = row["alpha_s"] + row["per_node_s"] * (nodes_K - 1.0) + wire_K / (nic * q_K * row["e_max"])
        outside_K = outside_K + (row["ramp"] * 1e-9) * np.sqrt(wire_K)
        # one member per node: the scale-up link has no part in it
        seconds_K = np.where(nodes_K > 1, np.where(q_K > 1, np.maximum(seconds_K, outside_K), outside_K), seconds_K)
    return np.asarray(np.where(sends_K, seconds_K, 0.0), dtype=np.float64)


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
    host memory on both sides. Where sends were measured the model is scaled to them: by size, one
    sender alone.
    """
    if link is not None:
        across = "--".join(sorted(link.between))
        return _sent_s(link.tables, across, bytes_K, senders_K, partial(_across_s, pool, link))
    far_K = _sent_s(pool.tables, "network", bytes_K, senders_K, partial(_far_s, pool, to))
    if same_node_K is None:
        return far_K
    near_K = _sent_s(pool.tables, "node", bytes_K, senders_K, partial(_near_s, pool))
    return np.asarray(np.where(same_node_K, near_K, far_K), dtype=np.float64)


def _sent_s(
    tables: Measurements | None,
    link: str,
    bytes_K: FloatArray,
    senders_K: FloatArray,
    model: Callable[[FloatArray, FloatArray], FloatArray],
) -> FloatArray:
    """The model's seconds, scaled as a single sender's were measured."""
    seconds_K = np.asarray(model(bytes_K, senders_K), dtype=np.float64)
    series = _measured_shapes(tables, "send_recv") if tables is not None else {}
    found = [rows for (name, _, _), rows in series.items() if name == link]
    if not found:
        return seconds_K
    sizes_R, seconds_R = (np.concatenate(part) for part in zip(*found, strict=True))
    bytes_K = np.maximum(bytes_K, 1.0)
    alone_R, alone_K = model(sizes_R, np.ones(len(sizes_R))), model(bytes_K, np.ones(len(bytes_K)))
    return seconds_K * ratio_along(sizes_R, seconds_R, alone_R, bytes_K, alone_K)[0]


def _across_s(pool: Pool, link: Link, bytes_K: FloatArray, senders_K: FloatArray) -> FloatArray:
    table = fabric_of(pool.device).table
    seconds_K = link.latency_s + bytes_K * senders_K / (
        link.bytes_per_s * float(network_of(pool.network.kind)["send_recv"]["e_max"])
    )
    if link.transport == "gloo":
        seconds_K = seconds_K + 2.0 * bytes_K / float(table["host_copy"]["bytes_per_s"])
    return seconds_K


def _far_s(pool: Pool, to: Pool | None, bytes_K: FloatArray, senders_K: FloatArray) -> FloatArray:
    network = network_of(pool.network.kind)["send_recv"]
    rate = pool.network.node_bytes_per_s
    latency = pool.network.latency_s
    if to is not None:
        rate, latency = min(rate, to.network.node_bytes_per_s), max(latency, to.network.latency_s)
    far_K = network["alpha_s"] + latency + bytes_K * senders_K / (rate * network["e_max"])
    # a rank reaches one NIC of its own, or the share it has of fewer NICs
    own = pool.network.nic_bytes_per_s * max(1.0, pool.network.nics_per_node / pool.devices_per_node)
    return np.asarray(np.maximum(far_K, network["alpha_s"] + latency + bytes_K / (own * network["e_max"])))


def _near_s(pool: Pool, bytes_K: FloatArray, _: FloatArray) -> FloatArray:
    fabric, device = fabric_of(pool.device), pool.device
    p2p = fabric.table["send_recv"]
    rate = device.scale_up_bytes_per_s / (max(device.devices_per_node - 1, 1) if fabric.mesh else 1)
    return np.asarray(p2p["alpha_s"] + device.scale_up_latency_s + bytes_K / (rate * p2p["e_max"]))
