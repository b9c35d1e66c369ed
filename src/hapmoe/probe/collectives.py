"""Calls, bytes and time of everything that is sent through torch.distributed, by group of ranks."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from .patches import Patches

__all__ = ["GROUPS", "Collectives", "axis_of"]

GROUPS = {
    # Attribute of parallel_state: axis, as hapmoe names it. The first that is the group counts.
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "_CONTEXT_PARALLEL_GROUP": "cp",
    "_EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "etp",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp_ep",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "_DATA_PARALLEL_GROUP_WITH_CP": "dp",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "dp",
    "_DATA_PARALLEL_GROUP": "dp",
    "_EXPERT_DATA_PARALLEL_GROUP": "edp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "edp",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "_EMBEDDING_GROUP": "embedding",
    "_POSITION_EMBEDDING_GROUP": "position",
    "_MODEL_PARALLEL_GROUP": "mp",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "etp_ep_pp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "world",
}
_SUFFIXES = ("", "_WITH_GTP_REMAT", "_WITH_EGTP")
"""Since core 0.19 some groups have a sibling across ranks that divide weights among them; one such rank: the same."""
_PAYLOAD = {
    # Function of torch.distributed: (collective, argument whose bytes are those that a rank holds).
    "all_reduce": ("all_reduce", 0, "tensor"),
    "all_gather_into_tensor": ("all_gather", 0, "output_tensor"),
    "_all_gather_base": ("all_gather", 0, "output_tensor"),
    "all_gather": ("all_gather", 0, "tensor_list"),
    "reduce_scatter_tensor": ("reduce_scatter", 1, "input"),
    "_reduce_scatter_base": ("reduce_scatter", 1, "input"),
    "reduce_scatter": ("reduce_scatter", 1, "input_list"),
    "all_to_all_single": ("all_to_all", 1, "input"),
    "all_to_all": ("all_to_all", 1, "input_tensor_list"),
    "broadcast": ("broadcast", 0, "tensor"),
    "isend": ("p2p", 0, "tensor"),
    "send": ("p2p", 0, "tensor"),
}

Key = tuple[str, str, str, int, int]
"""(phase, collective, axis, ranks of the group, bytes of one call)."""


class Sent:
    """The calls of one kind: how many, and the marks around those that the caller waited for."""

    __slots__ = ("calls", "marks")

    def __init__(self) -> None:
        self.calls = 0
        self.marks: list[tuple[Any, Any]] = []


class Collectives:
    """What is sent while ``counting``, outermost calls only; groups of one rank are left out.

    ``install`` must run before megatron.core is imported: some of its modules bind the functions of
    torch.distributed then, and keep what they bound. An asynchronous call has no time: it returns
    before anything is sent.
    """

    def __init__(self, mark: Callable[[], Any] | None = None) -> None:
        self.counting = False
        self.phase = ""
        """Part of the step that is under way."""
        self._mark = mark
        self._sent: defaultdict[Key, Sent] = defaultdict(Sent)
        self._inside = False

    def install(self, patches: Patches) -> None:
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        for name, (collective, position, keyword) in _PAYLOAD.items():
            patches.wrap(dist, name, self.wrapper(collective, position, keyword))
        patches.put(distributed_c10d, "isend", dist.isend)  # P2POp takes no other
        patches.wrap(dist, "batch_isend_irecv", self._batch)

    def take(self) -> dict[Key, Sent]:
        """What was sent since the last time."""
        sent, self._sent = self._sent, defaultdict(Sent)
        return dict(sent)

    def wrapper(self, collective: str, position: int, keyword: str) -> Callable[..., Callable[..., Any]]:
        """Counts calls of a function whose payload is this argument."""

        def make(act: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if not self.counting or self._inside:
                    return act(*args, **kwargs)
                payload = args[position] if len(args) > position else kwargs.get(keyword)
                named = (value for value in args if type(value).__name__ == "ProcessGroup")
                group = kwargs.get("group", next(named, None))
                entry = self._entry(collective, group, _bytes(payload))
                asynchronous = kwargs.get("async_op") or any(value is True for value in args)
                waited = not asynchronous and collective != "p2p" and not _coalescing(group)
                with self._outermost():
                    if entry is None or self._mark is None or not waited:
                        return act(*args, **kwargs)
                    begin = self._mark()
                    result = act(*args, **kwargs)
                    entry.marks.append((begin, self._mark()))
                return result

            return call

        return make

    def _batch(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def batch_isend_irecv(operations: Any) -> Any:
            if not self.counting or self._inside:
                return act(operations)
            for one in operations:
                if "send" in one.op.__name__:
                    self._entry("p2p", one.group, _bytes(one.tensor))
            with self._outermost():
                return act(operations)

        return batch_isend_irecv

    @contextlib.contextmanager
    def _outermost(self) -> Iterator[None]:
        """What torch does inside of a call is that call."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def _entry(self, collective: str, group: Any, size: int) -> Sent | None:
        import torch.distributed as dist

        ranks = dist.get_world_size(group) if group is not None else dist.get_world_size()
        if ranks < 2:
            return None
        # sends between stages may use the world's group for one direction (p2p_communication.py:60)
        axis = "pp" if collective == "p2p" else axis_of(group)
        entry = self._sent[self.phase, collective, axis, ranks, size]
        entry.calls += 1
        return entry


def axis_of(group: Any) -> str:
    """Which ranks Megatron made the group of; ``other`` for somebody else's."""
    from megatron.core import parallel_state

    if group is None:
        return "world"
    for suffix in _SUFFIXES:
        for attribute, axis in GROUPS.items():
            if getattr(parallel_state, attribute + suffix, None) is group:
                return axis
    # groups that are handed around instead of kept in parallel_state carry its names
    return GROUPS.get(f"_{getattr(group, 'group_desc', '')}", "other")


def _bytes(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(_bytes(one) for one in value)
    return int(value.numel() * value.element_size())


def _coalescing(group: Any) -> bool:
    """Inside of a coalescing manager a call only adds to what is sent at its end."""
    from torch.distributed import distributed_c10d as c10d

    state = getattr(c10d._world, "pg_coalesce_state", {})
    return (group or c10d._get_default_group()) in state
