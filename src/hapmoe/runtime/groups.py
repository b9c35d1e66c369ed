"""Process groups: every stage gets Megatron's own, built by Megatron's own constructor.

All ranks replay ``initialize_model_parallel`` once per stage, as if the world were that stage, and
keep the groups of their own. What Megatron wants across stages cannot exist as a group when stages
differ; a ``StageGroup`` stands there, over which a few reductions have an exact meaning and
everything else is refused.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from .mesh import Layout, Mesh, Refused

__all__ = ["StageGroup", "build", "redirect"]

_SETTINGS = ("pipeline_model_parallel_comm_backend", "hierarchical_context_parallel_sizes")
"""Arguments of initialize_model_parallel that this runtime cannot follow."""
_EXPERTS_WITH_REMAT = "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP"
"""Since core 0.19: tp_ep_pp, and experts' generalized tensor parallelism, which is refused."""
_LIST = "_global_process_group_list"
"""Where parallel_state notes every group that it made."""
_ACROSS = frozenset(
    {
        "_PIPELINE_MODEL_PARALLEL_GROUP",
        "_MODEL_PARALLEL_GROUP",
        "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP",
        _EXPERTS_WITH_REMAT,
        "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
        "_EMBEDDING_GROUP",
        "_POSITION_EMBEDDING_GROUP",
    }
)
"""Groups that ``_across_stages`` replaces. A Megatron with others would sum over one stage what it means for all."""


class StageGroup:
    """Stands for a group across stages: pp, mp (tp and pp) or tp_ep_pp."""

    adds = True

    def __init__(self, name: str, rank: int, size: int, first_replica: bool) -> None:
        self.name = name
        self._rank, self._size = rank, size
        self.first_replica = first_replica
        """Does this rank's share count in a sum? Its replicas over (expert) data parallelism hold the same."""

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Inside, sums over this group leave everything as it is: the caller adds up the stages afterwards."""
        self.adds = False
        try:
            yield
        finally:
            self.adds = True

    def __repr__(self) -> str:
        return f"StageGroup({self.name}, {self._rank} of {self._size})"


def build(original: Callable[..., None], layout: Layout) -> Callable[..., None]:
    """The stand-in for ``initialize_model_parallel``."""

    def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(original).bind(*args, **kwargs).arguments
        _same_mesh(layout, bound)
        if unknown := sorted(_spanning(original, layout.mine, bound) - _ACROSS):
            raise Refused(
                f"this Megatron has groups across stages that the runtime does not know: {', '.join(unknown)}"
            )
        _replay(original, layout, bound)
        _across_stages(layout, bound.get("virtual_pipeline_model_parallel_size"))

    return initialize_model_parallel


def _same_mesh(layout: Layout, given: dict[str, Any]) -> None:
    """The program must ask for what the plan gives this rank: anything else would train something else."""
    mine = layout.mine
    tp = given.get("tensor_model_parallel_size", 1)
    asked = {
        "tp": tp,
        "pp": given.get("pipeline_model_parallel_size", 1),
        "cp": given.get("context_parallel_size", 1),
        "ep": given.get("expert_model_parallel_size", 1),
        "etp": given.get("expert_tensor_parallel_size") or tp,
    }
    planned = {"tp": mine.tp, "pp": layout.stages, "cp": mine.cp, "ep": mine.ep, "etp": mine.etp}
    if asked != planned:
        said = ", ".join(
            f"{name} {asked[name]} (plan: {planned[name]})" for name in asked if asked[name] != planned[name]
        )
        raise Refused(f"stage {mine.index}: the program asks for {said}")
    if given.get("num_distributed_optimizer_instances", 1) != 1:
        raise Refused("--num-distributed-optimizer-instances: only 1; instances would span stages of unequal size")
    for name in ("gtp_remat_size", "expert_gtp_remat_size"):
        if given.get(name, 1) != 1:
            raise Refused(f"{name}={given[name]}: generalized tensor parallelism is not tried")
    for name in _SETTINGS:
        if given.get(name):
            raise Refused(f"{name}={given[name]}: this runtime sends between stages by itself")


def _state() -> dict[str, Any]:
    """What parallel_state keeps, with lists of their own."""
    from megatron.core import parallel_state

    found = {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}
    return {name: type(value)(value) if isinstance(value, list | dict) else value for name, value in found.items()}


def _degrees(mesh: Mesh, stages: int) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": mesh.tp,
        "pipeline_model_parallel_size": stages,
        "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": mesh.cp,
        "expert_model_parallel_size": mesh.ep,
        "expert_tensor_parallel_size": mesh.etp,
    }


def _spanning(original: Callable[..., None], mesh: Mesh, given: dict[str, Any]) -> set[str]:
    """Names of the groups that Megatron makes across stages, from a pipeline of two such stages, on paper."""
    from megatron.core import parallel_state

    empty = _state() | {_LIST: None if (made := getattr(parallel_state, _LIST, None)) is None else list(made)}
    with _as_if(rank=0, size=2 * mesh.size, make=_Members):
        original(**{**given, **_degrees(mesh, 2)})
    found = {name for name, value in _state().items() if isinstance(value, _Members) and max(value.ranks) >= mesh.size}
    vars(parallel_state).update(empty)
    return found


def _replay(original: Callable[..., None], layout: Layout, given: dict[str, Any]) -> None:
    from megatron.core import parallel_state

    empty, mine = _state(), {}
    for mesh in layout.meshes:
        with _as_if_alone(mesh):
            original(**{**given, **_degrees(mesh, 1)})
        if mesh is layout.mine:
            mine = _state()
        vars(parallel_state).update(empty)
    for name, value in mine.items():
        if "RANKS" in name and isinstance(value, list):
            mine[name] = [rank + layout.mine.first for rank in value]
    vars(parallel_state).update(mine)


class _Members:
    """A group on paper."""

    def __init__(self, ranks: Any = None, *_: Any, **__: Any) -> None:
        self.ranks = list(ranks)

    def rank(self) -> int:
        return self.ranks.index(0) if 0 in self.ranks else -1

    def size(self) -> int:
        return len(self.ranks)


@contextlib.contextmanager
def _as_if_alone(mesh: Mesh) -> Iterator[None]:
    """Inside, the world has the ranks of one stage, from 0; groups are made of the ranks that these are in the job.

    A rank of another stage is outside of that world: negative, or past its end. It makes the same
    groups, as torch demands, and is in none.
    """
    import torch.distributed as dist

    make = dist.new_group

    def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        return make([rank + mesh.first for rank in (range(mesh.size) if ranks is None else ranks)], *args, **kwargs)

    with _as_if(rank=dist.get_rank() - mesh.first, size=mesh.size, make=new_group):
        yield


@contextlib.contextmanager
def _as_if(rank: int, size: int, make: Callable[..., Any]) -> Iterator[None]:
    """Inside, the world has so many ranks, this is one of them, and ``make`` makes groups."""
    import torch.distributed as dist

    rank_of, size_of, new_group = dist.get_rank, dist.get_world_size, dist.new_group

    def get_rank(group: Any = None) -> int:
        return rank if group is None else rank_of(group)

    def get_world_size(group: Any = None) -> int:
        return size if group is None else size_of(group)

    dist.get_rank, dist.get_world_size, dist.new_group = get_rank, get_world_size, make
    try:
        yield
    finally:
        dist.get_rank, dist.get_world_size, dist.new_group = rank_of, size_of, new_group


def _across_stages(layout: Layout, virtual: int | None) -> None:
    """What one mesh alone cannot know: where it stands in the pipeline (parallel_state.py:859-1230)."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    state: Any = parallel_state
    meshes, mine = layout.meshes, layout.mine
    before = meshes[: mine.index]
    dense = state.get_data_parallel_group(with_context_parallel=True).rank() == 0
    expert = state._EXPERT_DATA_PARALLEL_GROUP.rank() == 0
    alone = dense and state._MODEL_PARALLEL_GROUP.rank() == 0
    state._PIPELINE_MODEL_PARALLEL_GROUP = StageGroup("pp", mine.index, layout.stages, alone)
    state._MPU_PIPELINE_MODEL_PARALLEL_RANK = mine.index
    state._MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE = layout.stages
    state._PIPELINE_GLOBAL_RANKS = [mesh.first for mesh in meshes]
    state._MODEL_PARALLEL_GROUP = StageGroup(
        "mp",
        sum(mesh.tp for mesh in before) + state._MODEL_PARALLEL_GROUP.rank(),
        sum(mesh.tp for mesh in meshes),
        dense,
    )
    state._EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP = StageGroup(
        "tp_ep_pp",
        sum(mesh.ep * mesh.etp for mesh in before) + state._EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP.rank(),
        sum(mesh.ep * mesh.etp for mesh in meshes),
        expert,
    )
    if hasattr(state, _EXPERTS_WITH_REMAT):
        setattr(state, _EXPERTS_WITH_REMAT, state._EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP)
    # of a distributed optimizer with one instance: all ranks, as upstream
    state._INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP = dist.group.WORLD
    # tied embeddings and MTP are refused: nobody has an embedding of another stage
    state._EMBEDDING_GROUP = state._POSITION_EMBEDDING_GROUP = None
    state._EMBEDDING_GLOBAL_RANKS, state._POSITION_EMBEDDING_GLOBAL_RANKS = [], []
    if virtual is not None:
        state._VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK = 0
        state._VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE = virtual


def redirect() -> None:
    """Let torch.distributed answer for StageGroups.

    Minimum and maximum over a group across stages are those of the world, because what Megatron
    reduces so (overflow flags, largest gradient) is wanted everywhere. A sum over mp or tp_ep_pp
    counts each parameter once: one (expert) data-parallel replica of every stage contributes. All
    ranks of the job take part, as they do in upstream.
    """
    import torch.distributed as dist

    all_reduce, rank_of, size_of = dist.all_reduce, dist.get_rank, dist.get_world_size
    ranks_of = dist.get_process_group_ranks
    operations = dist.ReduceOp

    def reduce(tensor: Any, op: Any = operations.SUM, group: Any = None, async_op: bool = False) -> Any:
        if not isinstance(group, StageGroup):
            return all_reduce(tensor, op=op, group=group, async_op=async_op)
        if op == operations.SUM and not group.adds:
            return None
        if op == operations.SUM and group.name != "pp":
            if not group.first_replica:
                tensor.zero_()
        elif op not in (operations.MIN, operations.MAX):
            raise Refused(f"all_reduce with {op} over {group}: stages of unequal size have no such group")
        return all_reduce(tensor, op=op, async_op=async_op)

    def get_rank(group: Any = None) -> int:
        return group.rank() if isinstance(group, StageGroup) else rank_of(group)

    def get_world_size(group: Any = None) -> int:
        return group.size() if isinstance(group, StageGroup) else size_of(group)

    def get_process_group_ranks(group: Any) -> list[Any]:
        if not isinstance(group, StageGroup):
            return list(ranks_of(group))
        if group.name == "pp":
            raise Refused(f"ranks of {group}: stages of unequal size have no such group")
        return [group.name]  # Megatron compares mp with tp_ep_pp, and adds before it reduces if they are one

    dist.all_reduce, dist.get_rank, dist.get_world_size = reduce, get_rank, get_world_size
    dist.get_process_group_ranks = get_process_group_ranks
