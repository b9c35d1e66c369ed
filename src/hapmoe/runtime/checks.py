"""What is checked before the first step, on all ranks together, and once more after it.

Before: that the stages agree on what they train, that nothing is asked for which would train
something else (``refusals``), and that a tensor whose every value is known crosses each boundary, both
ways, with the mesh's shapes and over the real transport. After: that replicas hold equal parameters.
"""

from __future__ import annotations

from typing import Any

from .boundary import Boundaries
from .mesh import Layout, Refused
from .refusals import Facts, refusals, warnings

__all__ = ["agree", "replicas", "try_boundaries"]

_PATTERN = 251
"""Values of the trial stay below this prime: every type that activations are sent in holds them exactly."""


def agree(layout: Layout, model: list[Any], step: dict[str, Any]) -> tuple[tuple[bool, ...], tuple[str, ...]]:
    """(per stage: is its sequence split over tp?, warnings); Refused on all ranks alike.

    ``step``: the arguments of the schedule (sequence length, micro-batch size, microbatches). Collective.
    """
    import torch.distributed as dist

    every: list[Facts] = [None] * layout.world_size  # type: ignore[list-item]
    dist.all_gather_object(every, Facts.of(layout, model, step))
    firsts = [every[mesh.first] for mesh in layout.meshes]
    for mesh in layout.meshes:
        for rank in range(mesh.first, mesh.first + mesh.size):
            if every[rank] != firsts[mesh.index]:
                raise Refused(f"rank {rank} trains something else than rank {mesh.first} of its stage")
    for name in firsts[0].common:
        values = [one.common[name] for one in firsts]
        if len(set(map(repr, values))) > 1:
            raise Refused(f"stages do not agree on {name}: {', '.join(map(repr, values))}")
    for reason in refusals(layout, firsts):
        raise Refused(reason)
    return tuple(one.sequence_parallel for one in firsts), tuple(warnings(layout, firsts))


def try_boundaries(boundaries: Boundaries, config: Any, step: dict[str, Any], ring: bool) -> None:
    """Send known values over every boundary, forward and then backward; Refused if one arrives wrong.

    Costs the transfers of one microbatch. ``ring``: interleaving also sends from the last stage to the
    first. Collective.
    """
    import torch
    import torch.distributed as dist

    layout, mine = boundaries.layout, boundaries.layout.mine
    sequence = step["seq_length"] // mine.cp // (mine.tp if boundaries.split[mine.index] else 1)
    shape = (sequence, step["micro_batch_size"], min(config.hidden_size, _PATTERN))
    wanted = _pattern(layout, boundaries.split[mine.index], shape, step["seq_length"]).to(config.pipeline_dtype)
    sent = wanted.to(torch.cuda.current_device())
    last = layout.stages - 1
    problems = []

    def move(take: bool, give: bool, forward: bool) -> Any:
        previous, following, _ = boundaries.communicate(
            tensor_send_next=sent if give and forward else None,
            tensor_send_prev=sent if give and not forward else None,
            recv_prev=take and forward,
            recv_next=take and not forward,
            tensor_shape=shape,
            config=config,
        )
        return previous if forward else following

    for forward in (True, False):
        start, end = (0, last) if forward else (last, 0)
        got = None
        if mine.index != start:
            got = move(True, False, forward)
        if mine.index != end or ring:
            move(False, True, forward)
        if mine.index == start and ring:
            got = move(True, False, forward)
        if got is None:
            continue
        peer = layout.meshes[mine.index - 1] if forward else layout.meshes[(mine.index + 1) % layout.stages]
        expected = wanted.clone()
        if not forward and not config.calculate_per_token_loss:
            expected *= mine.replicas / peer.replicas
        if not torch.equal(got.detach().cpu(), expected):
            what = "an activation" if forward else "a gradient"
            problems.append(f"rank {layout.rank}: {what} from stage {peer.index} arrived wrong in the trial")
    every: list[list[str]] = [[]] * layout.world_size
    dist.all_gather_object(every, problems)
    if found := [one for some in every for one in some]:
        raise Refused(found[0])


def _pattern(layout: Layout, split: bool, shape: tuple[int, ...], sequence: int) -> Any:
    """What this rank holds of a whole tensor whose value at (position, row, column) is known."""
    import torch

    from .routes import positions

    mine = layout.mine
    held = torch.tensor(positions(mine, layout.local, sequence, split))
    rows = torch.arange(shape[1]) + mine.place(layout.local)[2] * shape[1]
    columns = torch.arange(shape[2])
    return (held[:, None, None] * 7 + rows[None, :, None] * 31 + columns[None, None, :] * 3) % _PATTERN


def replicas(layout: Layout, model: list[Any]) -> None:
    """Do all ranks that hold the same parameter hold the same values? Refused by name if not.

    Dense parameters over data and context parallelism (those that sequence parallelism repeats over tp
    too), expert parameters over expert data parallelism. Collective.
    """
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    state: Any = parallel_state
    groups: dict[str, tuple[Any, list[tuple[str, Any]]]] = {
        "dense": (state.get_data_parallel_group(with_context_parallel=True), []),
        "repeated": (state.get_tensor_and_data_parallel_group(with_context_parallel=True), []),
        "expert": (state._EXPERT_DATA_PARALLEL_GROUP, []),
    }
    for index, chunk in enumerate(model):
        for name, parameter in chunk.named_parameters():
            kind = "repeated" if getattr(parameter, "sequence_parallel", False) else "dense"
            if not getattr(parameter, "allreduce", True):
                kind = "expert"
            groups[kind][1].append((f"chunk {index} {name}", parameter))
    problem = ""
    for group, named in groups.values():
        if not named:
            continue
        sums = torch.stack([_checksum(parameter) for _, parameter in named])
        low, high = sums.clone(), sums.clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
        if bool((low != high).any()):
            name = named[int((low != high).nonzero()[0])][0]
            problem = problem or f"stage {layout.mine.index}: replicas of {name} are no longer equal"
    every = [""] * layout.world_size
    dist.all_gather_object(every, problem)
    for said in every:
        if said:
            raise Refused(said)


def _checksum(parameter: Any) -> Any:
    """The sum of the bits, as integers: equal for equal values, whatever the order of summation."""
    import torch

    return parameter.detach().float().view(torch.int32).sum(dtype=torch.int64)
