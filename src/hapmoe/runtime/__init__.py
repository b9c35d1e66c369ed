"""Pipeline stages with different (tp, cp, dp, ep, etp) on unmodified Megatron-Core.

Stands alone: Python, torch and megatron, nothing else of this package. The launcher puts a copy
beside ``entry.py`` (as ``hapmoe_runtime``), which attaches it. A training loop of its own does it in
two lines, before it imports megatron::

    import hapmoe_runtime
    hapmoe_runtime.attach("hapmoe-plan/plan.json")

Nothing on disk is touched; docs/hetero.md says what is replaced in memory and how it is verified.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .mesh import Layout, Mesh, Refused, read_layout
from .table import Attached

__all__ = ["Attached", "Layout", "Mesh", "Refused", "attach", "attached"]

attached: Attached | None = None
"""What ``attach`` made in this process."""


def attach(
    plan: str | os.PathLike[str] | Mapping[str, Any],
    rank: int | None = None,
    transports: Sequence[str] = (),
    libraries: Sequence[str] = (),
    *,
    joins: bool = True,
) -> Attached:
    """Arrange everything for this process, once, before megatron is imported.

    ``plan``: plan.json or its content. ``rank``: of this process; RANK by default. ``transports``: of
    the boundary behind each stage, ``libraries``: of each stage's devices (runtime.json). Sets
    HAPMOE_EQUAL_WORLD_SIZE: the ranks of a job whose stages all were like this one, for programs that
    find their data-parallel size by dividing. ``joins`` False: stages are alike, and only checkpoints
    get keys that other plans of this back end can read. HAPMOE_HETERO_TRANSPORT carries all boundaries
    by one transport (gloo: through host memory). Raises Refused with the reason.
    """
    global attached
    if attached is not None:
        raise Refused("the runtime is attached already")
    if "megatron.core" in sys.modules:
        raise Refused("megatron is imported already: attach the runtime first")
    content = plan if isinstance(plan, Mapping) else json.loads(Path(plan).read_text(encoding="utf-8"))
    if forced := os.environ.get("HAPMOE_HETERO_TRANSPORT"):
        transports = [forced] * len(content["stages"])
    layout = read_layout(content, int(os.environ["RANK"]) if rank is None else rank, transports, libraries)
    os.environ["HAPMOE_EQUAL_WORLD_SIZE"] = str(layout.equal_world_size)
    attached = Attached(layout)
    attached.arrange(joins=joins)
    return attached
