"""``hapmoe discover``: a cluster.yaml from what is here, and an honest word on what could not be learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hapmoe.catalog import load_catalog, reported_as
from hapmoe.cluster import Device
from hapmoe.discovery.sources import SOURCES, Answer, Seen

__all__ = ["SOURCES", "Discovered", "FoundPool", "discover"]

_CLOSE = 0.1
"""Reported and catalogued memory of one kind differ by what driver and firmware keep: at most this share."""


@dataclass(frozen=True, slots=True)
class FoundPool:
    """Nodes with equally many devices that are of one kind of the catalogue."""

    name: str
    device: Device
    reported: str
    devices_per_node: int
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Discovered:
    """What the first source with devices said, and what the others did."""

    answer: Answer
    pools: tuple[FoundPool, ...]
    unknown: tuple[str, ...]
    """Devices that are no pool, each with the reason."""
    silent: tuple[str, ...]
    """Sources before it that named no device, and why."""

    def yaml(self) -> str:
        """A cluster.yaml; what is not known stands in comments."""
        lines = [f"# From {self.answer.source}, by hapmoe discover. Look through it: what it could not learn is said."]
        lines += [f"# {remark}" for remark in self.answer.remarks]
        lines += [f"# NOT HERE: {said}" for said in self.unknown]
        lines.append("pools:")
        for pool in self.pools:
            lines += [
                f"  - name: {pool.name}",
                f"    device: {pool.device.name}  # reported as {pool.reported!r}",
                f"    devices_per_node: {pool.devices_per_node}",
                f"    hosts: [{', '.join(pool.hosts)}]",
            ]
            if self.answer.network:
                lines.append(f"    network: {self.answer.network}  # active ports of this node; latency is not known")
            else:
                lines.append("    # network: not known from here; without it the usual node of this kind is ASSUMED")
        vendors = {pool.device.vendor for pool in self.pools}
        if len(self.pools) > 1:
            first, second = self.pools[0].name, self.pools[1].name
            lines.append(
                "# links: what lies between pools is not known from here. Without an entry, pools of one vendor"
            )
            lines.append("#   meet at the slower NIC (ASSUMED)" + _strangers(vendors) + ". One would be:")
            transport = self.pools[0].device.ccl if len(vendors) == 1 else "gloo"
            lines.append(
                f"#   - {{between: [{first}, {second}], bandwidth: 100 Gb/s, latency: 20 us, transport: {transport}}}"
            )
        return "\n".join(lines) + "\n"

    def document(self) -> dict[str, object]:
        """The same for ``--json``."""
        return {
            "source": self.answer.source,
            "pools": [
                {
                    "name": pool.name,
                    "device": pool.device.name,
                    "reported": pool.reported,
                    "devices_per_node": pool.devices_per_node,
                    "hosts": list(pool.hosts),
                }
                for pool in self.pools
            ],
            "network": self.answer.network,
            "unknown": list(self.unknown),
            "remarks": [*self.answer.remarks, *self.silent],
        }


def discover(sources: Sequence[str] = tuple(SOURCES)) -> Discovered:
    """Ask the sources in order; the first that names a device is taken."""
    silent: list[str] = []
    answer = Answer("nothing")
    for name in sources:
        answer = SOURCES[name]()
        if answer.seen:
            break
        silent += [f"{answer.source}: {remark}" for remark in answer.remarks]
    return _group(answer, tuple(silent))


def _strangers(vendors: set[str]) -> str:
    return ", those of different vendors may not be neighbours" if len(vendors) > 1 else ""


def _group(answer: Answer, silent: tuple[str, ...]) -> Discovered:
    """Pools of nodes that are alike as a whole: nodes with two kinds never share a pool with others."""
    by_host: dict[str, list[Seen]] = {}
    for seen in answer.seen:
        by_host.setdefault(seen.host, []).append(seen)
    alike: dict[tuple[object, ...], list[str]] = {}
    for host, all_seen in by_host.items():
        whole = tuple(sorted((seen.reported, seen.count, seen.memory_mib or 0.0) for seen in all_seen))
        for seen in all_seen:
            alike.setdefault((seen.reported, seen.count, seen.memory_mib, whole), []).append(host)
    pools: list[FoundPool] = []
    unknown: list[str] = []
    for (reported, count, memory, _), hosts in alike.items():
        assert isinstance(reported, str) and isinstance(count, int)
        kind, why = _kind(reported, memory if isinstance(memory, float) else None)
        if kind is None:
            unknown.append(f"{count} devices on each of {', '.join(hosts)}: {why}")
            continue
        base = kind.name.partition("-")[0] if not kind.name.startswith("ascend") else kind.name
        same = sum(pool.name == base or pool.name.startswith(f"{base}-n") for pool in pools)
        name = f"{base}-n{same}" if same else base
        pools.append(FoundPool(name, kind, reported, count, tuple(hosts)))
    return Discovered(answer, tuple(pools), tuple(unknown), silent)


def _kind(reported: str, memory_mib: float | None) -> tuple[Device | None, str]:
    """The kind of the catalogue that a name means, or why there is none."""
    if not reported:
        return None, "nobody says what they are"
    found: tuple[Device, ...] = ()
    for text in _spellings(reported):
        if found := reported_as(text):
            break
    if not found:
        words = reported.lower().replace(",", " ").replace(":", " ").split()
        names = dict.fromkeys(name for word in words for name in _by_name(word))
        found = tuple(load_catalog()[name] for name in names if name != "cpu")
    if memory_mib and len(found) > 1:
        close = [kind for kind in found if abs(kind.memory_bytes / 2**20 / memory_mib - 1) < _CLOSE]
        found = tuple(close) or found
    if len(found) == 1:
        return found[0], ""
    if found:
        return None, f"{reported!r} may be {' or '.join(kind.name for kind in found)}"
    return None, f"{reported!r} is no kind of the catalogue: define it in the file (docs/cluster-file.md)"


def _spellings(reported: str) -> tuple[str, ...]:
    """Labels and gres cannot hold blanks; Ascend's chip names come with and without one, or bare ("910B3")."""
    plain = reported.replace("_", " ")
    return (reported, plain, plain.replace("-", " "), plain.replace(" ", ""), f"Ascend{plain}")


def _by_name(word: str) -> tuple[str, ...]:
    """Kinds whose names begin with these whole parts, as in a cluster file."""
    parts = word.replace("_", "-").split("-")
    return tuple(name for name in load_catalog() if name.split("-")[: len(parts)] == parts)
