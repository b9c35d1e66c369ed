"""The CPU lab: real Megatron-Core training without an accelerator, for tests, benchmarks and the demonstration.

Nothing here is used when planning. It needs the ``lab`` extra (torch, megatron-core) and does nothing
unless the environment asks for it: ``HAPMOE_LAB=1``.
"""

from __future__ import annotations

import os

__all__ = ["requested"]


def requested() -> bool:
    """Does the environment ask for CPU tensors instead of an accelerator?"""
    return os.environ.get("HAPMOE_LAB") == "1"
