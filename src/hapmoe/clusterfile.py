"""cluster.yaml -> ``Cluster``: checked on load; defaults from the catalogue are marked ASSUMED, readings are kept.

    pools:
      - {name: h800, device: h800-80g-sxm, nodes: 2}
      - name: mine
        device: {like: h100-80g-pcie, memory: 94 GB}
        hosts: [n0, n1]
        devices_per_node: 4
        network: {nics_per_node: 4, bandwidth: 400 Gb/s, latency: 4 us}
        memory_reserve: 4 GiB
        price_per_device_hour: 2.5
        power: 700 W
    links:
      - {between: [h800, mine], bandwidth: 100 Gb/s, latency: 20 us, transport: gloo}

Bandwidths are one direction: per NIC in ``network``, per node in ``links``. Every mistake is one ``InputError`` with
the field's path.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from hapmoe.catalog import CCLS, build_device, find_device, load_catalog
from hapmoe.cluster import NETWORK_KINDS, Cluster, Device, Link, Network, Pool
from hapmoe.errors import InputError
from hapmoe.fields import (
    as_count,
    as_list,
    as_mapping,
    as_text,
    closest,
    nic_bandwidth,
    nic_latency,
    one_of,
    power,
    reader,
    short,
    show_bandwidth,
    show_bytes,
)
from hapmoe.units import parse_bandwidth, parse_bytes
from hapmoe.yamlfile import read_yaml

__all__ = ["cluster_to_dict", "load_cluster"]

_POOL_KEYS: Final = (
    "name", "device", "nodes", "devices_per_node", "hosts", "memory_reserve", "network", "price_per_device_hour",
    "power",
)  # fmt: skip
_LINK_KEYS: Final = ("between", "bandwidth", "latency", "transport")
_NETWORK_KEYS: Final = ("nics_per_node", "bandwidth", "latency", "kind")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_LETTERS: Final = "63 letters, digits, - _ and . at most"
_HOST: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,252}")
"""Host names and addresses go into launcher scripts, so nothing else may be in them."""
_EXAMPLE: Final = "{name: a, device: h100-80g-sxm, nodes: 2}"
_ASSUMED_LINK_S: Final = 20e-6
"""Latency of a link that states none: through host memory and gloo. No public figure exists; ASSUMED."""

_link_bandwidth = reader(parse_bandwidth, 1e8 / 8, 25.6e12 / 8, show_bandwidth, "100 Gb/s")
_reserve = reader(parse_bytes, 0, 2**42, show_bytes, "4 GiB")


def load_cluster(source: str | os.PathLike[str] | Mapping[str, Any]) -> Cluster:
    """The cluster of a file, or of a mapping with its content. Raises nothing but ``InputError`` on bad input."""
    if isinstance(source, Mapping):
        content, origin = source, "cluster"
    else:
        content, origin = read_yaml(source), os.fspath(source)
    if not isinstance(content, Mapping):
        what = f"{short(content)} at the top, not a mapping"
        raise InputError(what, where=origin, hint=f"start with `pools:`, then one `- {_EXAMPLE}` each")
    top = as_mapping(dict(content), origin, ("pools", "links"))
    readings: list[str] = []
    entries = as_list(top.get("pools", []), f"{origin}: pools")
    if not entries:
        raise InputError("no pools", where=f"{origin}: pools", hint=f"give at least one {_EXAMPLE}")
    pools = tuple(_pool(entry, f"{origin}: pools[{i}]", readings) for i, entry in enumerate(entries))
    _check_pools(pools, origin)
    links = tuple(
        _link(entry, f"{origin}: links[{i}]", pools, readings)
        for i, entry in enumerate(as_list(top.get("links") or [], f"{origin}: links"))
    )
    _check_links(links, origin)
    cluster = Cluster(pools=pools, links=links, readings=tuple(readings))
    return msgspec.structs.replace(cluster, sha256=_digest(cluster))


# ---- pools -----------------------------------------------------------------------------------------------------------


def _pool(entry: object, where: str, readings: list[str]) -> Pool:
    fields = as_mapping(entry, where, _POOL_KEYS)
    name = _name(fields, where)
    hosts = _hosts(fields.get("hosts"), f"{where}.hosts")
    nodes = _nodes(fields, hosts, where)
    device = _device(fields, name, where, readings)
    count = device.devices_per_node
    if "devices_per_node" in fields:
        count = as_count(fields["devices_per_node"], f"{where}.devices_per_node", 1, 128)
        if count % device.devices_per_node and device.devices_per_node % count:
            usual = f"the usual node of {device.name} has {device.devices_per_node}"
            readings.append(f"{_field(where)}.devices_per_node {count}: {usual}")
    reserve = _reserve(fields["memory_reserve"], f"{where}.memory_reserve") if "memory_reserve" in fields else None
    if reserve is not None and reserve >= device.memory_bytes:
        what = f"{fields['memory_reserve']} leaves nothing of {show_bytes(device.memory_bytes)} ({device.name})"
        raise InputError(what, where=f"{where}.memory_reserve")
    return Pool(
        name=name,
        device=device,
        nodes=nodes,
        devices_per_node=count,
        network=_network(fields.get("network", {}), device, count, f"{where}.network", readings),
        hosts=hosts,
        memory_reserve_bytes=None if reserve is None else round(reserve),
        price_per_device_hour=_price(fields, where),
        power_w=power(fields["power"], f"{where}.power") if "power" in fields else None,
    )


def _name(fields: Mapping[str, Any], where: str) -> str:
    if "name" not in fields:
        raise InputError("has no name", where=where, hint="add name: a short word for this pool")
    name = as_text(fields["name"], f"{where}.name")
    if not _NAME.fullmatch(name):
        raise InputError(f"{short(name)} cannot name a pool", where=f"{where}.name", hint=_LETTERS)
    return name


def _hosts(value: object, where: str) -> tuple[str, ...]:
    if value is None:
        return ()
    hosts = tuple(as_text(host, f"{where}[{i}]") for i, host in enumerate(as_list(value, where)))
    for i, host in enumerate(hosts):
        if not _HOST.fullmatch(host):
            raise InputError(f"{short(host)} is not a host name", where=f"{where}[{i}]")
        if host in hosts[:i]:
            raise InputError(f"{host} is listed twice", where=f"{where}[{i}]", hint="one entry per node")
    return hosts


def _nodes(fields: Mapping[str, Any], hosts: tuple[str, ...], where: str) -> int:
    """The count of nodes; hosts alone are enough, both must agree."""
    if "nodes" not in fields:
        if not hosts:
            raise InputError("has neither nodes nor hosts", where=where, hint="add nodes: the count of machines")
        return len(hosts)
    nodes = as_count(fields["nodes"], f"{where}.nodes", 1, 100_000)
    if hosts and len(hosts) != nodes:
        raise InputError(f"{len(hosts)} hosts for {nodes} nodes", where=f"{where}.hosts", hint="name each node once")
    return nodes


def _device(fields: Mapping[str, Any], pool: str, where: str, readings: list[str]) -> Device:
    """A kind by name, or one defined in place: ``like`` a kind with changes, or in full."""
    place = f"{where}.device"
    value = fields.get("device")
    if value is None:
        raise InputError("has no device", where=where, hint="a name of `hapmoe devices`, or a mapping that defines one")
    if not isinstance(value, dict):
        device, reading = find_device(value, place)
        if reading:
            readings.append(reading)
        return device
    spec, like = dict(value), None
    if "like" in spec:
        like, reading = find_device(spec.pop("like"), f"{place}.like")
        if reading:
            readings.append(reading)
    name = as_text(spec.pop("name", f"{like.name}-custom" if like else f"{pool}-device"), f"{place}.name")
    if not _NAME.fullmatch(name):
        raise InputError(f"{short(name)} cannot name a device", where=f"{place}.name", hint=_LETTERS)
    if like is None and "network" not in spec and isinstance(fields.get("network"), dict):
        # the pool says it; the device has no usual node of its own
        spec["network"] = {key: value for key, value in fields["network"].items() if key != "kind"}
    device = build_device(name, spec, place, like=like)
    rows = tuple(dict.fromkeys(kind.efficiency for kind in load_catalog().values()))
    if device.efficiency not in rows:
        what, hint = f"no curves called {short(device.efficiency)}", closest(device.efficiency, rows)
        raise InputError(what, where=f"{place}.efficiency", hint=hint)
    if name in load_catalog():
        raise InputError(f"{name} is a kind of the catalogue", where=f"{place}.name", hint="give yours another name")
    if device.efficiency_note.startswith("ASSUMED"):
        readings.append(f"{name} takes the efficiency curves of {device.efficiency} (ASSUMED)")
    return device


def _network(value: object, device: Device, devices_per_node: int, where: str, readings: list[str]) -> Network:
    """The stated network; what is missing is the usual node's, with NICs in proportion to the devices."""
    fields = as_mapping(value, where, _NETWORK_KEYS)
    scaled = max(1, round(device.nics_per_node * devices_per_node / device.devices_per_node))
    usual: dict[str, Any] = {
        "nics_per_node": scaled,
        "bandwidth": device.nic_bytes_per_s,
        "latency": device.nic_latency_s,
    }
    read: dict[str, Callable[[object, str], Any]] = {
        "nics_per_node": lambda raw, place: as_count(raw, place, 1, 64),
        "bandwidth": nic_bandwidth,
        "latency": nic_latency,
        "kind": lambda raw, place: one_of(raw, NETWORK_KINDS, place),
    }
    stated = {key: read[key](raw, f"{where}.{key}") for key, raw in fields.items()}
    if "bandwidth" in fields:
        _note_bytes(fields["bandwidth"], stated["bandwidth"], "NIC", f"{where}.bandwidth", readings)
    missing = [key for key in usual if key not in stated]
    chosen = {**usual, **stated}
    assumed = f"ASSUMED: {', '.join(missing)} of the usual node of {device.name}"
    if len(missing) == len(usual):
        assumed = f"ASSUMED: the usual node of {device.name}"
    return Network(
        nics_per_node=int(chosen["nics_per_node"]),
        nic_bytes_per_s=chosen["bandwidth"],
        latency_s=chosen["latency"],
        kind=chosen.get("kind", ""),
        source="; ".join((["cluster file"] if stated else []) + ([assumed] if missing else [])),
    )


def _price(fields: Mapping[str, Any], where: str) -> float | None:
    """A plain number: the currency is the user's own."""
    if "price_per_device_hour" not in fields:
        return None
    value, place = fields["price_per_device_hour"], f"{where}.price_per_device_hour"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{short(value)} is not a number", where=place, hint="a plain number, in any currency")
    if not (0 <= value <= 100_000) or math.isnan(value):
        raise InputError(f"{short(value)} is outside 0 to 100,000", where=place)
    return float(value)


def _check_pools(pools: tuple[Pool, ...], origin: str) -> None:
    """Names once; equal device names mean equal devices; shared hosts mean the same hosts."""
    for i, pool in enumerate(pools):
        for other in pools[:i]:
            if pool.name == other.name:
                what = f"two pools are called {pool.name}"
                raise InputError(what, where=f"{origin}: pools[{i}].name", hint="rename one")
            if pool.device.name == other.device.name and pool.device != other.device:
                what = f"pools {other.name} and {pool.name} define {pool.device.name} differently"
                raise InputError(what, where=f"{origin}: pools[{i}].device", hint="give one of them a name of its own")
            if set(pool.hosts) & set(other.hosts) and pool.hosts != other.hosts:
                what = f"pools {other.name} and {pool.name} share some hosts but not all, or in another order"
                hint = "pools inside the same nodes name the same hosts in the same order"
                raise InputError(what, where=f"{origin}: pools[{i}].hosts", hint=hint)


# ---- links -----------------------------------------------------------------------------------------------------------


def _link(entry: object, where: str, pools: tuple[Pool, ...], readings: list[str]) -> Link:
    fields = as_mapping(entry, where, _LINK_KEYS)
    ends = _ends(fields.get("between"), f"{where}.between", pools)
    if "bandwidth" not in fields:
        raise InputError("has no bandwidth", where=where, hint="per node, one direction, for example 100 Gb/s")
    rate = _link_bandwidth(fields["bandwidth"], f"{where}.bandwidth")
    _note_bytes(fields["bandwidth"], rate, "node", f"{where}.bandwidth", readings)
    libraries = {pool.device.ccl for pool in ends}
    one_vendor = len({pool.device.vendor for pool in ends}) == 1 and len(libraries) == 1
    assumed = [key for key in ("latency", "transport") if key not in fields]
    latency = _ASSUMED_LINK_S
    if "latency" in fields:
        latency = nic_latency(fields["latency"], f"{where}.latency")
    elif one_vendor:
        latency = max(pool.network.latency_s for pool in ends)
    transport = ends[0].device.ccl if one_vendor else "gloo"
    if "transport" in fields:
        transport = one_of(fields["transport"], CCLS, f"{where}.transport")
        if transport not in (libraries if len(libraries) == 1 else set()) | {"flagcx", "gloo"}:
            joined = " and ".join(f"{pool.name} ({pool.device.ccl})" for pool in ends)
            readings.append(f"{_field(where)}.transport {transport} does not join {joined}; flagcx or gloo may")
    return Link(
        between=(ends[0].name, ends[1].name),
        bytes_per_s=rate,
        latency_s=latency,
        transport=transport,
        source="cluster file" + (f"; ASSUMED: {', '.join(assumed)}" if assumed else ""),
    )


def _ends(value: object, where: str, pools: tuple[Pool, ...]) -> tuple[Pool, Pool]:
    names = as_list(value if value is not None else [], where)
    if len(names) != 2:
        raise InputError(f"{len(names)} pools, not two", where=where, hint="for example between: [a, b]")
    known = {pool.name: pool for pool in pools}
    for i, name in enumerate(names):
        if not isinstance(name, str) or name not in known:
            raise InputError(f"no pool {short(name)}", where=f"{where}[{i}]", hint=closest(name, known))
    if names[0] == names[1]:
        raise InputError(f"joins {names[0]} with itself", where=where, hint="inside a pool, `network` says it")
    return known[names[0]], known[names[1]]


def _check_links(links: tuple[Link, ...], origin: str) -> None:
    seen: set[frozenset[str]] = set()
    for i, link in enumerate(links):
        if frozenset(link.between) in seen:
            what = f"{' and '.join(link.between)} are joined twice"
            raise InputError(what, where=f"{origin}: links[{i}].between", hint="keep one link")
        seen.add(frozenset(link.between))


# ---- small things ----------------------------------------------------------------------------------------------------


def _note_bytes(text: object, rate: float, per: str, where: str, readings: list[str]) -> None:
    """Networks are quoted in bits; bytes are accepted, and said."""
    if isinstance(text, str) and re.search(r"B(/s|ps)\s*\Z", text):
        readings.append(f"{_field(where)} {text} read as bytes ({show_bandwidth(rate)} per {per})")


def _field(where: str) -> str:
    """``pools[0].network`` of ``cluster.yaml: pools[0].network``."""
    return where.rpartition(": ")[2]


def _digest(cluster: Cluster) -> str:
    """sha256 of what the cluster is: the same for another wording, order of keys, comments or sources."""
    words = {"sources", "source", "notes", "efficiency_note", "readings", "sha256"}
    content = _without(msgspec.to_builtins(cluster), words)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _without(value: Any, keys: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(entry, keys) for key, entry in value.items() if key not in keys}
    if isinstance(value, list | tuple):
        return [_without(entry, keys) for entry in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def cluster_to_dict(cluster: Cluster) -> dict[str, Any]:
    """The content of a cluster.yaml that loads as ``cluster``: inverse to ``load_cluster``, exact in every number."""
    pools = []
    for pool in cluster.pools:
        network = pool.network
        entry: dict[str, Any] = {"name": pool.name, "device": _device_entry(pool.device), "nodes": pool.nodes}
        entry["devices_per_node"] = pool.devices_per_node
        if pool.hosts:
            entry["hosts"] = list(pool.hosts)
        if pool.memory_reserve_bytes is not None:
            entry["memory_reserve"] = f"{pool.memory_reserve_bytes} B"
        entry["network"] = {
            "nics_per_node": network.nics_per_node,
            "bandwidth": _bits(network.nic_bytes_per_s),
            "latency": _seconds(network.latency_s),
            **({"kind": network.kind} if network.kind else {}),
        }
        if pool.price_per_device_hour is not None:
            entry["price_per_device_hour"] = pool.price_per_device_hour
        if pool.power_w is not None:
            entry["power"] = f"{pool.power_w} W"
        pools.append(entry)
    links = [
        {
            "between": list(link.between),
            "bandwidth": _bits(link.bytes_per_s),
            "latency": _seconds(link.latency_s),
            "transport": link.transport,
        }
        for link in cluster.links
    ]
    return {"pools": pools, **({"links": links} if links else {})}


def _device_entry(device: Device) -> Any:
    if load_catalog().get(device.name) == device:
        return device.name
    return {
        "name": device.name,
        "vendor": device.vendor,
        "ccl": device.ccl,
        "memory": f"{device.memory_bytes} B",
        "memory_bandwidth": f"{device.memory_bytes_per_s!r} B/s",
        "peak": {key: f"{rate!r} FLOP/s" for key, rate in device.peak_flop_per_s.items()},
        "devices_per_node": device.devices_per_node,
        "scale_up": {
            "bandwidth": f"{device.scale_up_bytes_per_s!r} B/s",
            "latency": _seconds(device.scale_up_latency_s),
            "domain": device.scale_up_domain,
        },
        "network": {
            "nics_per_node": device.nics_per_node,
            "bandwidth": _bits(device.nic_bytes_per_s),
            "latency": _seconds(device.nic_latency_s),
        },
        "runtime_names": list(device.runtime_names),
        "efficiency": device.efficiency,
        **({"efficiency_note": device.efficiency_note} if device.efficiency_note else {}),
        **({"power": f"{device.power_w} W"} if device.power_w is not None else {}),
        **({"notes": device.notes} if device.notes else {}),
    }


def _bits(bytes_per_s: float) -> str:
    """As people write it where that is exact."""
    whole = bytes_per_s * 8 / 1e9
    return f"{whole:g} Gb/s" if float(f"{whole:g}") * 1e9 / 8 == bytes_per_s else f"{bytes_per_s * 8!r} b/s"


def _seconds(seconds: float) -> str:
    micro = f"{seconds * 1e6:g}"
    return f"{micro} us" if float(micro) * 1e-6 == seconds else f"{seconds!r} s"
