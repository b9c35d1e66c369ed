"""``--set KEY=VALUE``: pins and bounds on the plan.

    ep=8        exactly 8              tp=..4     at most 4
    tp=2..8     2 to 8                 tp=1,2     one of these
    order=h800,ascend                  pools in this order
    recompute=none,full                only these granularities (or selective)
    h800.devices=0                     leave a pool out; h800.nodes=..1 at most one node of it

Repeated keys must all hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hapmoe.errors import InputError
from hapmoe.options import Options
from hapmoe.plan import Recompute

__all__ = ["Pins", "parse_pins"]

Test = Callable[[int], bool]
DEGREES = ("tp", "cp", "ep", "etp", "dp", "mbs", "pp", "vpp")
GRANULARITIES = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class Pins:
    """What ``--set`` asks for; empty: anything goes."""

    degrees: tuple[tuple[str, Test], ...] = ()
    order: tuple[str, ...] = ()
    recompute: tuple[frozenset[str], ...] = ()
    nodes: tuple[tuple[str, Test], ...] = ()

    def allow(self, key: str, value: int) -> bool:
        return all(test(value) for name, test in self.degrees if name == key)

    def allow_options(self, options: Options) -> NDArray[np.bool_]:
        """[K] which options keep every pin on tp, cp, ep, etp, dp and mbs."""
        columns = {
            "tp": options.tp_K,
            "cp": options.cp_K,
            "ep": options.ep_K,
            "etp": options.etp_K,
            "dp": options.dp_K,
            "mbs": options.mbs_K,
        }
        keep = np.ones(len(options), bool)
        for name, test in self.degrees:
            if name in columns:
                values, inverse = np.unique(columns[name], return_inverse=True)
                keep &= np.asarray([test(int(value)) for value in values], bool)[inverse]
        return keep

    def allow_order(self, names: tuple[str, ...]) -> bool:
        """Does an order of pools agree with the pinned one (pools left out do not matter)?"""
        return not self.order or names == tuple(name for name in self.order if name in names)

    def allow_nodes(self, pool: str, nodes: int) -> bool:
        """May the pool use so many nodes?"""
        return all(test(nodes) for name, test in self.nodes if name == pool)

    def allow_recompute(self, entry: Recompute) -> bool:
        return all(entry.granularity in wanted for wanted in self.recompute)


def parse_pins(settings: Iterable[str], pools: Iterable[str]) -> Pins:
    """Pins from ``--set`` values; InputError names the one that does not read."""
    degrees: list[tuple[str, Test]] = []
    nodes: list[tuple[str, Test]] = []
    order: tuple[str, ...] = ()
    recompute: list[frozenset[str]] = []
    known = tuple(pools)
    for setting in settings:
        where = f"--set {setting}"
        key, equals, value = setting.partition("=")
        pool, dot, rest = key.rpartition(".")
        if not equals or not value:
            raise InputError("not KEY=VALUE", where=where, hint="for example --set tp=1,2")
        if dot:
            if pool not in known or rest != "nodes":
                raise InputError(f"no key {key!r}", where=where, hint=f"POOL.nodes with a pool of {', '.join(known)}")
            nodes.append((pool, _test(value, where, least=0)))
        elif key in DEGREES:
            degrees.append((key, _test(value, where, least=1)))
        elif key == "order":
            order = tuple(value.split(","))
            if unknown := sorted(set(order) - set(known)):
                raise InputError(f"no pool {unknown[0]!r}", where=where, hint=f"pools: {', '.join(known)}")
        elif key == "recompute":
            recompute.append(frozenset(value.split(",")))
            if unknown := sorted(recompute[-1] - set(GRANULARITIES)):
                raise InputError(f"no granularity {unknown[0]!r}", where=where, hint=f"of {', '.join(GRANULARITIES)}")
        else:
            names = ", ".join((*DEGREES, "order", "recompute", "POOL.nodes"))
            raise InputError(f"no key {key!r}", where=where, hint=f"one of {names}")
    return Pins(tuple(degrees), order, tuple(recompute), tuple(nodes))


def _test(value: str, where: str, least: int) -> Test:
    low, dots, high = value.partition("..")
    try:
        if not dots:
            wanted = frozenset(int(part) for part in value.split(","))
            if min(wanted) < least:
                raise InputError(f"below {least}", where=where)
            return lambda number: number in wanted
        bottom, top = int(low or least), int(high) if high else 2**62
    except ValueError:
        raise InputError("not a number, a list or a range", where=where, hint="8, 1,2, 2..8 or ..4") from None
    if bottom > top or top < least:
        raise InputError("an empty range", where=where)
    return lambda number: bottom <= number <= top
