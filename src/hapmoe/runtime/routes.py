"""Which part of a boundary activation goes from which rank to which.

An activation is ``[sequence, batch, hidden]``. A rank holds the batch rows of its data-parallel
index and, of the sequence, what context parallelism gives it (pieces c and 2*cp-1-c of 2*cp,
Megatron's get_batch_on_this_cp_rank) and of that, with sequence parallelism, the tp-th slice. A
message is what two ranks both hold. Pure arithmetic, without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from .mesh import Mesh, Refused

__all__ = ["Route", "receives", "sends"]


@dataclass(frozen=True, slots=True)
class Route:
    """One message, as the rank sees it that sends or receives it."""

    peer: int
    """Rank in the job."""
    rows: tuple[int, ...]
    """Positions along this rank's sequence dimension."""
    batch: tuple[int, int]
    """First row of this rank's batch dimension, and the one behind the last."""

    @property
    def contiguous(self) -> bool:
        """Are the rows a run without holes?"""
        return self.rows[-1] - self.rows[0] + 1 == len(self.rows)


@cache
def positions(mesh: Mesh, rank: int, sequence: int, split: bool) -> tuple[int, ...]:
    """The positions of the whole sequence that a rank of a stage holds, in its order."""
    tp, cp, _ = mesh.place(rank)
    held = list(range(sequence))
    if mesh.cp > 1:
        size = sequence // (2 * mesh.cp)
        pieces = (cp, 2 * mesh.cp - 1 - cp)
        held = [piece * size + at for piece in pieces for at in range(size)]
    if split and mesh.tp > 1:
        size = len(held) // mesh.tp
        held = held[tp * size : (tp + 1) * size]
    return tuple(held)


def sends(
    sender: Mesh, receiver: Mesh, rank: int, sequence: int, batch: int, split: tuple[bool, bool]
) -> tuple[Route, ...]:
    """The messages that ``rank`` of ``sender`` sends to stage ``receiver``.

    ``sequence`` and ``batch`` are those of the whole microbatch; ``split``: are sequences of sender
    and receiver split over tp? Where they are not, all tp ranks of a stage hold the same, and the
    receiver of index t takes it from the sender of index t modulo the sender's tp.
    """
    return _routes(sender, receiver, rank, sequence, batch, split[0], split[1], True)


def receives(
    sender: Mesh, receiver: Mesh, rank: int, sequence: int, batch: int, split: tuple[bool, bool]
) -> tuple[Route, ...]:
    """The messages that ``rank`` of ``receiver`` gets from stage ``sender``; see ``sends``."""
    return _routes(sender, receiver, rank, sequence, batch, split[0], split[1], False)


@cache
def _routes(
    sender: Mesh,
    receiver: Mesh,
    rank: int,
    sequence: int,
    batch: int,
    sender_split: bool,
    receiver_split: bool,
    sending: bool,
) -> tuple[Route, ...]:
    for mesh, split in ((sender, sender_split), (receiver, receiver_split)):
        chunks, slices = 2 * mesh.cp if mesh.cp > 1 else 1, mesh.tp if split else 1
        if sequence % chunks or sequence // mesh.cp % slices or batch % mesh.dp:
            raise Refused(f"stage {mesh.index} cannot divide {batch} sequences of {sequence} over {mesh.said()}")
    mine, other = (sender, receiver) if sending else (receiver, sender)
    mine_split, other_split = (sender_split, receiver_split) if sending else (receiver_split, sender_split)
    tp, _, dp = mine.place(rank)
    held = positions(mine, rank, sequence, mine_split)
    size, other_size = batch // mine.dp, batch // other.dp
    found = []
    for peer in range(other.size):
        peer_tp, _, peer_dp = other.place(peer)
        sender_tp, receiver_tp = (tp, peer_tp) if sending else (peer_tp, tp)
        if not sender_split and sender_tp != receiver_tp % sender.tp:
            continue  # another replica sends it
        low = max(dp * size, peer_dp * other_size)
        high = min((dp + 1) * size, (peer_dp + 1) * other_size)
        common = set(positions(other, peer, sequence, other_split)) if low < high else set()
        # what a rank holds ascends, so both sides list common positions in the same order
        rows = tuple(at for at, position in enumerate(held) if position in common)
        if rows:
            found.append(Route(other.first + peer, rows, (low - dp * size, high - dp * size)))
    return tuple(found)
