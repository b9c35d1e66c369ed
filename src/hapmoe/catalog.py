"""The packaged catalogue of device kinds (``data/devices.yaml``): load it, find a kind by name, show its sources.

A kind in the catalogue and a device defined in a cluster file have the same fields, so one function, ``build_device``,
reads both.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from typing import Any, Final

import msgspec

from hapmoe.cluster import Device
from hapmoe.errors import InputError
from hapmoe.fields import (
    as_list,
    as_mapping,
    as_text,
    check_keys,
    counter,
    join_or,
    nic_bandwidth,
    nic_latency,
    one_of,
    power,
    reader,
    short,
    show_bandwidth,
    show_bytes,
    show_flops,
    show_rate,
    show_seconds,
    show_watts,
)
from hapmoe.units import parse_bandwidth, parse_bytes, parse_flop_rate, parse_seconds

__all__ = [
    "CCLS",
    "build_device",
    "catalog_rows",
    "find_device",
    "load_catalog",
    "render_devices",
    "reported_as",
]

CCLS: Final = ("nccl", "rccl", "hccl", "oneccl", "flagcx", "gloo")
_CCL_OF: Final = {"nvidia": "nccl", "amd": "rccl", "huawei": "hccl", "intel": "oneccl", "cpu": "gloo"}
_ROW_OF: Final = {"nvidia": "h100", "amd": "mi300x", "huawei": "ascend910b", "intel": "max1550", "cpu": "cpu"}
"""Curves that a device defined in a cluster file borrows when it names none."""
_FIELDS: Final = (
    "vendor", "ccl", "runtime_names", "efficiency", "efficiency_note", "memory", "memory_bandwidth", "peak",
    "devices_per_node", "scale_up", "network", "power", "notes",
)  # fmt: skip
_PLACE: Final = {
    "memory": "memory_bytes", "memory_bandwidth": "memory_bytes_per_s", "scale_up.bandwidth": "scale_up_bytes_per_s",
    "scale_up.latency": "scale_up_latency_s", "scale_up.domain": "scale_up_domain",
    "network.nics_per_node": "nics_per_node", "network.bandwidth": "nic_bytes_per_s",
    "network.latency": "nic_latency_s", "power": "power_w",
}  # fmt: skip
"""Field of the file -> field of ``Device``; ``peak.bf16`` becomes ``peak_flop_per_s.bf16``, the rest keeps its name."""
_GROUPS: Final = {
    "peak": ("fp32", "fp16", "bf16", "fp8", "fp4"),
    "scale_up": ("bandwidth", "latency", "domain"),
    "network": ("nics_per_node", "bandwidth", "latency"),
}
_NEEDED: Final = (
    "vendor", "memory", "memory_bandwidth", "peak", "scale_up.bandwidth", "network.nics_per_node", "network.bandwidth",
)  # fmt: skip
_flop_rate: Final = reader(parse_flop_rate, 1e9, 1e17, show_flops, "989.5 TFLOP/s")
_QUANTITIES: Final[dict[str, Callable[[object, str], float]]] = {
    "memory": reader(parse_bytes, 2**28, 2**42, show_bytes, "80 GiB"),
    "memory_bandwidth": reader(parse_bandwidth, 1e9, 1e14, show_rate, "3.35 TB/s"),
    "devices_per_node": counter(128),
    "scale_up.bandwidth": reader(parse_bandwidth, 1e8, 1e13, show_rate, "450 GB/s"),
    "scale_up.latency": reader(parse_seconds, 1e-8, 0.01, show_seconds, "2 us"),
    "scale_up.domain": counter(100_000),
    "network.nics_per_node": counter(64),
    "network.bandwidth": nic_bandwidth,
    "network.latency": nic_latency,
    "power": power,
}


# ---- looking up ------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def load_catalog() -> dict[str, Device]:
    """Every kind by name, in the order of the file. Do not change the result: it is shared."""
    from hapmoe.yamlfile import parse_yaml

    text = resources.files("hapmoe").joinpath("data/devices.yaml").read_text(encoding="utf-8")
    content = parse_yaml(text, "devices.yaml")
    legend: dict[str, str] = content["sources"]
    catalog = {}
    for name, entry in content["devices"].items():
        sources: dict[str, str] = {}
        spec = _split_sources(entry, legend, sources, "")
        catalog[name] = build_device(name, spec, f"devices.yaml: {name}", sources=sources)
    return catalog


def _split_sources(
    entry: Mapping[str, Any], legend: Mapping[str, str], sources: dict[str, str], prefix: str
) -> dict[str, Any]:
    """The entry with bare values; the sources of [value, source, remark] go to ``sources`` by field of Device."""
    spec: dict[str, Any] = {}
    for key, value in entry.items():
        path = prefix + key
        if isinstance(value, dict):
            spec[key] = _split_sources(value, legend, sources, f"{path}.")
        elif isinstance(value, list) and key != "runtime_names":
            spec[key], source, *remark = value
            sources[_place(path)] = "; ".join([legend[source], *remark])
        else:
            spec[key] = value
    return spec


def _place(path: str) -> str:
    if path.startswith("peak"):
        return path.replace("peak", "peak_flop_per_s", 1)
    return _PLACE.get(path, path)


def find_device(name: object, where: str = "") -> tuple[Device, str | None]:
    """The kind called ``name``, and how it was read when that needs saying.

    Upper case, underscores and spaces do not matter. The first whole dash-separated parts of a name are enough where
    they are unique: ``h200`` is h200-141g-sxm, and ``h20`` is h20-96g-sxm, not h200.

    Raises ``InputError`` with the candidates of an ambiguous name, or the closest to an unknown one.
    """
    if not isinstance(name, str) or not name.strip():
        raise InputError(f"{short(name)} is not a device name", where=where, hint="`hapmoe devices` lists all")
    catalog = load_catalog()
    key = re.sub(r"[_\s]+", "-", name.strip().lower())
    if key in catalog:
        return catalog[key], None
    candidates = [known for known in catalog if known.startswith(f"{key}-")]
    if len(candidates) == 1:
        return catalog[candidates[0]], f"{name!r} read as {candidates[0]}"
    if candidates:
        raise InputError(f"{name!r} may be {join_or(candidates)}", where=where, hint="give one of these names")
    near = [known for known in catalog if key in known][:3] or difflib.get_close_matches(key, catalog, 3, 0.5)
    hint = f"did you mean {join_or(near)}? " if near else ""
    raise InputError(f"no device kind {short(name)}", where=where, hint=f"{hint}`hapmoe devices` lists all")


def reported_as(reported: str) -> tuple[Device, ...]:
    """The kinds that a driver's device name may mean (``torch.cuda.get_device_name()``), best first.

    A kind's runtime names must end at word ends; the longest piece that matches decides. Several kinds come back only
    where the driver gives them one name.

    >>> [kind.name for kind in reported_as("NVIDIA H200")]
    ['h200-141g-sxm']
    """
    text, best, found = reported.lower(), 0, []
    for kind in load_catalog().values():
        pieces = [piece for piece in kind.runtime_names if re.search(rf"(?<!\w){re.escape(piece)}(?![^\W_])", text)]
        length = max(map(len, pieces), default=0)
        if length > best:
            best, found = length, [kind]
        elif length and length == best:
            found.append(kind)
    return tuple(found)


# ---- reading one device ----------------------------------------------------------------------------------------------


def build_device(
    name: str,
    spec: Mapping[str, Any],
    where: str,
    *,
    like: Device | None = None,
    sources: Mapping[str, str] | None = None,
) -> Device:
    """A ``Device`` from fields as text with units; what is missing comes from ``like`` or from a stated default.

    ``sources`` gives the origin per field of ``Device``; without it, every given field is from "cluster file".
    Raises ``InputError`` for unknown fields, wrong or implausible values, and what cannot be guessed.
    """
    fields: dict[str, Any] = {} if like is None else {field: getattr(like, field) for field in like.__struct_fields__}
    origin = {} if like is None else dict(like.sources)
    peaks: dict[str, float] = {}
    for path, value in _flatten(spec, where).items():
        place = f"{where}.{path}"
        if path in _QUANTITIES:
            fields[_place(path)] = _QUANTITIES[path](value, place)
            origin[_place(path)] = "cluster file"
        elif path.startswith("peak."):
            peaks[path.removeprefix("peak.")] = _flop_rate(value, place)
            origin[_place(path)] = "cluster file"
        elif path == "ccl":
            fields["ccl"] = one_of(value, CCLS, place)
        elif path == "runtime_names":
            fields["runtime_names"] = tuple(as_text(item, place).lower() for item in as_list(value, place))
        else:
            fields[path] = as_text(value, place).lower() if path == "vendor" else as_text(value, place)
    if peaks:
        fields["peak_flop_per_s"] = {**fields.get("peak_flop_per_s", {}), **peaks}
    if "efficiency" in spec and "efficiency_note" not in spec:
        fields["efficiency_note"] = ""
    _fill(fields, origin, where)
    return Device(**{**fields, "name": name, "sources": origin if sources is None else dict(sources)})


def _flatten(spec: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``{peak: {bf16: x}}`` as ``{"peak.bf16": x}``, keys checked."""
    check_keys(spec, _FIELDS, where)
    flat = {}
    for key, value in spec.items():
        if key in _GROUPS:
            group = as_mapping(value, f"{where}.{key}", _GROUPS[key])
            flat.update({f"{key}.{leaf}": entry for leaf, entry in group.items()})
        else:
            flat[key] = value
    return flat


def _fill(fields: dict[str, Any], origin: dict[str, str], where: str) -> None:
    """Defaults of a full definition, each marked ASSUMED; refuses what cannot be guessed."""
    missing = [name for name in _NEEDED if _place(name) not in fields]
    if missing:
        hint = "or start from a known kind, {like: h100-80g-sxm, ...}"
        raise InputError(f"lacks {', '.join(missing)}", where=where, hint=hint)
    for field, value in {"devices_per_node": 8, "scale_up_latency_s": 5e-6, "nic_latency_s": 5e-6}.items():
        if field not in fields:
            fields[field], origin[field] = value, "ASSUMED"
    if "scale_up_domain" not in fields:
        fields["scale_up_domain"], origin["scale_up_domain"] = fields["devices_per_node"], "ASSUMED: one node"
    if "ccl" not in fields:
        if fields["vendor"] not in _CCL_OF:
            hint = f"the collective library of this vendor, one of {', '.join(CCLS)}"
            raise InputError("lacks ccl", where=where, hint=hint)
        fields["ccl"] = _CCL_OF[fields["vendor"]]
    if not fields.get("efficiency"):
        row = _ROW_OF.get(fields["vendor"], "h100")
        fields.update(efficiency=row, efficiency_note=f"ASSUMED: no row given; curves of {row}")


# ---- showing ---------------------------------------------------------------------------------------------------------

_SHOWN: Final[dict[str, tuple[str, Callable[[float], str]]]] = {
    "memory_bytes": ("memory", show_bytes),
    "memory_bytes_per_s": ("memory bandwidth", show_rate),
    "devices_per_node": ("devices per node", str),
    "scale_up_bytes_per_s": ("scale-up bandwidth, one direction", show_rate),
    "scale_up_latency_s": ("scale-up latency", show_seconds),
    "scale_up_domain": ("scale-up domain, devices", str),
    "nics_per_node": ("NICs per node", str),
    "nic_bytes_per_s": ("NIC bandwidth, one direction", show_bandwidth),
    "nic_latency_s": ("NIC latency", show_seconds),
    "power_w": ("power", show_watts),
}


def render_devices(names: Iterable[str] | None = None) -> list[dict[str, Any]]:
    """Each kind (all, or ``names`` as ``find_device`` reads them): every number, as text too, and its source."""
    kinds = load_catalog().values() if names is None else [find_device(name)[0] for name in names]
    return [_render(kind) for kind in kinds]


def _render(kind: Device) -> dict[str, Any]:
    def row(field: str, label: str, value: float, text: str) -> dict[str, Any]:
        return {"field": field, "label": label, "value": value, "text": text, "source": kind.sources.get(field, "")}

    rows = [
        row(f"peak_flop_per_s.{precision}", f"peak {precision}, dense", rate, show_flops(rate))
        for precision, rate in kind.peak_flop_per_s.items()
    ]
    for field, (label, show) in _SHOWN.items():
        value = getattr(kind, field)
        if value is not None:
            rows.append(row(field, label, value, show(value)))
    keep = {"name", "vendor", "ccl", "efficiency", "efficiency_note", "notes", "runtime_names"}
    facts = {key: value for key, value in msgspec.to_builtins(kind).items() if key in keep}
    facts["runtime_names"] = list(kind.runtime_names)
    return {**facts, "figures": rows}


def catalog_rows() -> list[dict[str, str]]:
    """One line a kind, as text: what the table of ``hapmoe devices`` shows."""
    rows = []
    for kind in load_catalog().values():
        peaks = kind.peak_flop_per_s
        nics = f"{kind.nics_per_node} x {show_bandwidth(kind.nic_bytes_per_s)}"
        rows.append(
            {
                "name": kind.name,
                "vendor": kind.vendor,
                "memory": show_bytes(kind.memory_bytes),
                "memory bandwidth": show_rate(kind.memory_bytes_per_s),
                **{key: show_flops(peaks[key]) if key in peaks else "-" for key in ("bf16", "fp16", "fp8")},
                "scale-up": f"{show_rate(kind.scale_up_bytes_per_s)} x {kind.scale_up_domain}",
                "usual node": f"{kind.devices_per_node} devices, {nics}",
                "curves": kind.efficiency,
            }
        )
    return rows
