"""Who is where: the meshes of all stages, from plan.json, and what one rank holds of an activation.

Pure arithmetic, without torch. Ranks stand stage after stage, inside of a stage in Megatron's order:
tp fastest, then cp, then dp (parallel_state.py, order "tp-cp-ep-dp-pp").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Layout", "Mesh", "Refused", "read_layout"]

HOST = "gloo"
"""The transport that goes through host memory."""


class Refused(RuntimeError):
    """What this runtime will not train, with the reason."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """One pipeline stage: ``tp * cp * dp`` ranks, which are also ``etp * ep * edp``."""

    index: int
    first: int
    """Rank in the job of the stage's rank 0."""
    tp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    micro_batch_size: int = 1

    @property
    def size(self) -> int:
        return self.tp * self.cp * self.dp

    @property
    def replicas(self) -> int:
        """Ranks over which Megatron averages dense gradients."""
        return self.cp * self.dp

    def place(self, rank: int) -> tuple[int, int, int]:
        """(tp, cp, dp) of a rank of this stage."""
        return rank % self.tp, rank // self.tp % self.cp, rank // (self.tp * self.cp)

    def said(self) -> str:
        return f"tp {self.tp}, cp {self.cp}, dp {self.dp}, ep {self.ep}, etp {self.etp}"


@dataclass(frozen=True, slots=True)
class Layout:
    """All stages, and which of their ranks this process is."""

    meshes: tuple[Mesh, ...]
    rank: int
    """In the job."""
    transports: tuple[str, ...]
    """Of the boundary behind each stage (the last one: back to stage 0, which interleaving uses)."""
    libraries: tuple[str, ...] = ()
    """Collective library of each stage's devices; none: the same."""

    @property
    def mine(self) -> Mesh:
        return next(mesh for mesh in self.meshes if mesh.first <= self.rank < mesh.first + mesh.size)

    @property
    def local(self) -> int:
        """This rank within its stage."""
        return self.rank - self.mine.first

    @property
    def stages(self) -> int:
        return len(self.meshes)

    @property
    def mixed(self) -> bool:
        """Is there no library that holds all devices?"""
        return len(set(self.libraries)) > 1

    def carrier(self, front: int) -> str:
        """What carries the boundary behind a stage: a transport, or the stages' own library (empty: everybody's)."""
        return self.transports[front] or (self.libraries[front] if self.mixed else "")

    def carried(self, carrier: str) -> list[int]:
        """The ranks of all stages at the boundaries that ``carrier`` carries; all of them if it holds all devices."""
        if not self.mixed or carrier == HOST:
            return list(range(self.world_size))
        ends = {
            end % self.stages for one in range(self.stages) if self.carrier(one) == carrier for end in (one, one + 1)
        }
        return [rank for end in sorted(ends) for rank in self.ranks(end)]

    def ranks(self, stage: int) -> range:
        return range(self.meshes[stage].first, self.meshes[stage].first + self.meshes[stage].size)

    @property
    def world_size(self) -> int:
        return sum(mesh.size for mesh in self.meshes)

    @property
    def equal_world_size(self) -> int:
        """Ranks of a job in which all stages are like this rank's: what Megatron divides by
        tp * cp * pp, so that it finds this stage's dp."""
        return self.mine.size * self.stages


def read_layout(
    plan: Mapping[str, Any], rank: int, transports: Sequence[str] = (), libraries: Sequence[str] = ()
) -> Layout:
    """The layout of a plan.json, seen by ``rank``; Refused where its meshes are none.

    ``transports``: of the boundary behind each stage; none: the library that all stages have.
    ``libraries``: of each stage's devices, where they differ.
    """
    meshes: list[Mesh] = []
    first = 0
    for index, stage in enumerate(plan["stages"]):
        tp, ep = int(stage.get("tp", 1)), int(stage.get("ep", 1))
        mesh = Mesh(
            index,
            first,
            tp=tp,
            cp=int(stage.get("cp", 1)),
            dp=int(stage.get("dp", 1)),
            ep=ep,
            etp=int(stage.get("etp", 1)),
            micro_batch_size=int(stage.get("micro_batch_size") or plan["micro_batch_size"]),
        )
        if mesh.size % (mesh.ep * mesh.etp):
            raise Refused(f"stage {index}: {mesh.size} ranks are not a multiple of ep * etp = {mesh.ep * mesh.etp}")
        meshes.append(mesh)
        first += mesh.size
    samples = {mesh.micro_batch_size * mesh.dp for mesh in meshes}
    if len(samples) > 1:
        raise Refused(f"samples per microbatch (micro-batch size * dp) differ between stages: {sorted(samples)}")
    if not 0 <= rank < first:
        raise Refused(f"rank {rank} is outside the plan's {first} ranks")
    return Layout(tuple(meshes), rank, _transports(transports or ("",) * len(meshes), libraries), tuple(libraries))


def _transports(given: Sequence[str], libraries: Sequence[str]) -> tuple[str, ...]:
    """Between two libraries something must carry each boundary; the way back to the first stage may be unlinked."""
    found = list(given)
    if len(set(libraries)) > 1:
        for index, (front, back) in enumerate(zip(libraries, (*libraries[1:], libraries[0]), strict=True)):
            if front != back and not found[index]:
                if index + 1 < len(libraries):
                    raise Refused(f"nothing carries the boundary between {front} of stage {index} and {back}")
                found[index] = HOST
    return tuple(found)
