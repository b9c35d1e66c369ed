"""Collective libraries of several vendors, played by gloo: none of them reaches another's ranks.

Each has the name ``lab_<library>``. A group of one vendor's ranks works; over one that also holds
others nothing can be sent, as with real libraries, which would hang or stop there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["register"]


def register(libraries: Sequence[str], rank: int) -> str:
    """Name of the backend of ``rank``; ``libraries``: of every rank of the job. All are registered."""
    import torch.distributed as dist

    def make(options: Any, _: Any) -> Any:
        members = list(options.global_ranks_in_group) or range(len(libraries))
        if len({libraries[one] for one in members}) == 1:
            return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)

        class Apart(dist.ProcessGroup):  # every collective of the base class raises
            def getBackendName(self) -> str:
                return "apart"

        return Apart(options.group_rank, options.group_size)  # type: ignore[call-arg]

    for library in sorted(set(libraries)):
        dist.Backend.register_backend(f"lab_{library}", make, extended_api=True, devices=["cpu"])
    return f"lab_{libraries[rank]}"
