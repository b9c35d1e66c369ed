"""Which library can join which kinds of devices, and where that is written.

``ccl`` is a device kind's own collective library; ``transport`` is what a link between two pools
says that it uses.
"""

from __future__ import annotations

__all__ = ["OWN", "TRANSPORTS", "cannot_join"]

OWN = ("nccl", "rccl", "hccl")
"""Libraries of one vendor: no communicator of theirs holds another vendor's device."""

TRANSPORTS: dict[str, tuple[frozenset[str], str]] = {
    # Transport: (own libraries that it joins, source).
    "flagcx": (
        frozenset({"nccl", "rccl"}),
        "FlagCX README at 0c721293 (2026-08-22): heterogeneous operations with HCCL unsupported, all 12",
    ),
    "gloo": (
        frozenset({"nccl", "rccl", "hccl", "gloo"}),
        "through host memory; FlagScale hetero_use_cpu_communication",
    ),
}


def cannot_join(first: str, second: str, transport: str) -> str:
    """Why ``transport`` does not join devices with these own libraries; empty: it does.

    >>> cannot_join("nccl", "rccl", "flagcx")
    ''
    >>> cannot_join("nccl", "hccl", "flagcx")
    'flagcx joins nccl and rccl, not hccl; gloo does, through host memory'
    """
    if transport in TRANSPORTS:
        joined, _ = TRANSPORTS[transport]
        outside = sorted({first, second} - joined)
        if not outside:
            return ""
        hint = "; gloo does, through host memory" if transport != "gloo" else ""
        return f"{transport} joins {' and '.join(sorted(joined))}, not {' or '.join(outside)}{hint}"
    if first == second == transport:
        return ""
    other = sorted({first, second} - {transport})
    return f"{transport} is one vendor's library and holds no {' or '.join(other)} device: gloo, or flagcx without hccl"
