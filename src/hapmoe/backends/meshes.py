"""A plan as process meshes: neighbouring stages with the same degrees on the same pool."""

from __future__ import annotations

from dataclasses import dataclass

from hapmoe.job import JobSpec
from hapmoe.plan import Plan, Stage

__all__ = ["Mesh", "broken_wiring", "layers_alike", "meshes"]


@dataclass(frozen=True, slots=True)
class Mesh:
    """Stages ``first`` to ``first + pp - 1``; the degrees are those of each of them."""

    first: int
    pp: int
    stage: Stage

    @property
    def words(self) -> tuple[int, ...]:
        """tp cp ep dp pp, as ``--hetero-process-meshes`` takes them."""
        return (self.stage.tp, self.stage.cp, self.stage.ep, self.stage.dp, self.pp)

    def name(self, index: int) -> str:
        """A device type of its own, so that two meshes of one kind are never taken for one (D5)."""
        return f"mesh{index}-{self.stage.device}"


def meshes(job: JobSpec, plan: Plan, *, patched: bool = False) -> tuple[Mesh, ...]:
    """The meshes that FlagScale is given: as few as possible, or, where those are wired wrong and
    layers are alike, one per stage before the last pool."""
    merged = _merge(plan, split=0)
    if patched or len(merged) == 1 or not broken_wiring(job, merged):
        return merged
    split = _merge(plan, split=merged[-1].first)
    return split if not broken_wiring(job, split) else merged


def _merge(plan: Plan, split: int) -> tuple[Mesh, ...]:
    """Stages before ``split`` stand alone."""
    found: list[Mesh] = []
    for index, stage in enumerate(plan.stages):
        last = found[-1] if found else None
        if last is not None and index >= split and last.first >= split and _key(last.stage) == _key(stage):
            found[-1] = Mesh(last.first, last.pp + 1, last.stage)
        else:
            found.append(Mesh(index, 1, stage))
    return tuple(found)


def _key(stage: Stage) -> tuple[object, ...]:
    return (stage.pool, stage.tp, stage.cp, stage.ep, stage.etp, stage.dp)


def layers_alike(job: JobSpec) -> bool:
    """Is a layer's number never asked for? Then a wrong offset of it does no harm."""
    model = job.model
    plain_window = not model.window_pattern or len(set(model.window_pattern)) == 1
    numbered = any(argument.text == "--apply-query-key-layer-scaling" for argument in job.argv)
    return len(set(model.moe_pattern)) == 1 and plain_window and not numbered


def broken_wiring(job: JobSpec, found: tuple[Mesh, ...]) -> tuple[tuple[str, int, str], ...]:
    """(defect, stage, what is wrong) of meshes that FlagScale v0.9.0 would wire wrong; ``()``: none.

    The envelope is conservative: 1,104 accepted shapes of two and three meshes were all wired right.
    Defects of flagscale/train/hetero/parallel_context.py:528-537 (D2: the wrong axis is left out of
    coordinates) and of get_transformer_layer_offset (D3: the offset of a mesh with pp = 1 is 0).
    """
    said: list[tuple[str, int, str]] = []
    if len(found) == 1:
        return ()
    for index, mesh in enumerate(found):
        stage, last = mesh.stage, index == len(found) - 1
        if not last and stage.ep == 1 and mesh.pp > 1 and stage.dp > 1:
            said.append(("pairing", mesh.first, f"a mesh before the last with PP = {mesh.pp} and DP = {stage.dp}"))
        if not last and stage.ep > 1 and mesh.pp > 1:
            said.append(("pairing", mesh.first, f"a mesh before the last with PP = {mesh.pp} and EP = {stage.ep}"))
        most = 2 if index == 0 else 1
        if stage.ep > 1 and stage.edp > most:
            said.append(("experts", mesh.first, f"EP = {stage.ep} with EDP = {stage.edp}, at most {most} in this mesh"))
        if index > 0 and mesh.pp == 1 and not layers_alike(job):
            said.append(("offset", mesh.first, "a later mesh of one stage, and layers that differ by their number"))
    return tuple(said)
