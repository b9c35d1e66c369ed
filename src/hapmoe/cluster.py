"""What exists: device kinds, pools of equal nodes, and the links between pools.

Rates are per second, per device or per NIC, in one direction; sizes are bytes.
"""

from __future__ import annotations

import msgspec

from hapmoe.measured import Measurements

__all__ = ["NETWORK_KINDS", "Cluster", "Device", "Link", "Network", "Pool"]

NETWORK_KINDS = ("efa", "omni-path")
"""Networks that collectives fill less than InfiniBand and RoCE: ``network_kinds`` in data/fabrics.yaml."""


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device kind: an accelerator model as installed. A rank is one logical device."""

    name: str
    vendor: str
    """nvidia, amd, huawei, cpu …: kinds of one vendor share one collective library."""
    memory_bytes: int
    memory_bytes_per_s: float
    peak_flop_per_s: dict[str, float]
    """Dense peak by precision: fp32, fp16, bf16, fp8, fp4."""
    devices_per_node: int
    """The usual node."""
    scale_up_bytes_per_s: float
    """Inside the node (NVLink, xGMI, HCCS, PCIe), per device, one direction."""
    scale_up_latency_s: float
    scale_up_domain: int
    """Devices that share that fabric; above ``devices_per_node`` for rack-scale systems."""
    nics_per_node: int
    nic_bytes_per_s: float
    """One NIC, one direction, of the usual node."""
    nic_latency_s: float
    ccl: str
    """nccl, rccl, hccl or gloo."""
    runtime_names: tuple[str, ...] = ()
    """Substrings of the name that the driver reports (torch.cuda.get_device_name), lower case."""
    efficiency: str = ""
    """Row of the efficiency curves; may be another kind's, which ``efficiency_note`` says."""
    efficiency_note: str = ""
    power_w: float | None = None
    sources: dict[str, str] = {}
    """Per field: where the number comes from."""
    notes: str = ""


class Network(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The scale-out network of one node."""

    nics_per_node: int
    nic_bytes_per_s: float
    latency_s: float
    kind: str = ""
    """One of NETWORK_KINDS; "": InfiniBand or RoCE."""
    source: str = ""
    """Where the figures come from: the cluster file, or the catalogue's usual node (ASSUMED)."""

    @property
    def node_bytes_per_s(self) -> float:
        return self.nics_per_node * self.nic_bytes_per_s


class Pool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes of one kind with the same wiring."""

    name: str
    device: Device
    nodes: int
    devices_per_node: int
    network: Network
    hosts: tuple[str, ...] = ()
    """Host names in rank order; empty: not known yet."""
    memory_reserve_bytes: int | None = None
    """Kept free on each device; None: the default of the memory calibration."""
    price_per_device_hour: float | None = None
    power_w: float | None = None
    tables: Measurements | None = None
    """Figures that take the place of the model's (``tables.attach``)."""

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Between two pools: per node, one direction, shared by all its ranks that send at once."""

    between: tuple[str, str]
    bytes_per_s: float
    latency_s: float
    transport: str
    """nccl, rccl, hccl, flagcx or gloo (through host memory)."""
    source: str = "cluster file"
    """ASSUMED where nobody stated it."""
    tables: Measurements | None = None
    """Measured sends between the two pools."""


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All pools and the links between them."""

    pools: tuple[Pool, ...]
    links: tuple[Link, ...] = ()
    readings: tuple[str, ...] = ()
    """How ambiguous input was read ("'h200' read as h200-141g-sxm"), for the summary."""
    sha256: str = ""
    tables_sha256: str = ""
    """Over all measurements that were given; empty: none."""

    def pool(self, name: str) -> Pool:
        """The pool called ``name``; KeyError if there is none."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise KeyError(name)

    @property
    def num_devices(self) -> int:
        return sum(pool.num_devices for pool in self.pools)

    def link(self, a: str, b: str) -> Link | None:
        """The link between pools ``a`` and ``b``; None where they may not be neighbours.

        Stated links win. Without one, pools of one vendor meet over the slower of their two node
        networks (ASSUMED); pools of different vendors do not meet.
        """
        for link in self.links:
            if set(link.between) == {a, b}:
                return link
        first, second = self.pool(a), self.pool(b)
        if first.device.vendor != second.device.vendor:
            return None
        slower = min((first.network, second.network), key=lambda network: network.node_bytes_per_s)
        return Link(
            between=(a, b),
            bytes_per_s=slower.node_bytes_per_s,
            latency_s=max(first.network.latency_s, second.network.latency_s),
            transport=first.device.ccl,
            source="ASSUMED: the slower node network of the two pools",
        )
