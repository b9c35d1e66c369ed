"""What a rule is, and what it gets to see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from hapmoe.backends import Capabilities, version_tuple
from hapmoe.cluster import Cluster, Pool
from hapmoe.job import JobSpec
from hapmoe.plan import Plan, Stage
from hapmoe.shapes import uses_sequence_parallel

__all__ = ["Broken", "Context", "Rule", "degrees", "flag_values"]


@dataclass(frozen=True, slots=True)
class Broken:
    """One way in which a plan breaks a rule; ``stage`` is None where all stages do alike."""

    message: str
    hint: str = ""
    stage: int | None = None


@dataclass(frozen=True, slots=True)
class Context:
    """A resolved plan with everything it is judged against."""

    job: JobSpec
    cluster: Cluster
    plan: Plan
    backend: Capabilities

    def meshes(self) -> Iterator[tuple[int | None, Stage]]:
        """The stages that differ in degrees: one entry without a number where all are alike."""
        seen: set[tuple[int, ...]] = set()
        uniform = len({degrees(stage) for stage in self.plan.stages}) == 1
        for index, stage in enumerate(self.plan.stages):
            key = degrees(stage)
            if key not in seen:
                seen.add(key)
                yield (None if uniform else index), stage

    def pools(self) -> Iterator[tuple[int, Stage, Pool]]:
        """Every stage with its pool; stages of an unknown pool are left out."""
        pools = {pool.name: pool for pool in self.cluster.pools}
        for index, stage in enumerate(self.plan.stages):
            if stage.pool in pools:
                yield index, stage, pools[stage.pool]

    def pools_used(self) -> Iterator[tuple[int | None, Pool]]:
        """Every pool that holds a stage, once, with its first stage."""
        seen: set[str] = set()
        for index, _, pool in self.pools():
            if pool.name not in seen:
                seen.add(pool.name)
                yield index, pool

    def sequence_parallel(self, stage: Stage) -> bool:
        """Is sequence parallelism on? The back end sets it wherever the estimate counts on it;
        Megatron drops it at tp = 1 (A:1439)."""
        return stage.tp > 1 and uses_sequence_parallel(self.job)

    def before(self, version: str) -> bool:
        """Is the job's Megatron-Core known to be older than ``version``?"""
        given = self.job.training.megatron_version
        return given is not None and version_tuple(given) < version_tuple(version)

    def has_flag(self, name: str) -> bool:
        return any(_flag(argument.text) == name for argument in self.job.argv)

    def flag_values(self, name: str) -> tuple[str, ...] | None:
        """Words after the last occurrence of ``name`` (up to the next flag); None: not given."""
        return flag_values(self.job, name)

    def flag_int(self, name: str) -> int | None:
        """The last integer value of a flag; None: not given, or not known before the run."""
        words = self.flag_values(name)
        return int(words[0]) if words and words[0].isdecimal() else None


@dataclass(frozen=True, slots=True)
class Rule:
    """One condition on a plan. ``check`` yields what breaks it, and never raises."""

    name: str
    why: str
    """What goes wrong otherwise, in one sentence."""
    source: str
    """File and line that enforces it (Megatron-LM d98e8a64 unless it says otherwise)."""
    check: Callable[[Context], Iterable[Broken]]


def flag_values(job: JobSpec, name: str) -> tuple[str, ...] | None:
    """Words after the last occurrence of a flag among the job's arguments; None: not given."""
    found: tuple[str, ...] | None = None
    for index, argument in enumerate(job.argv):
        if argument.text is None or _flag(argument.text) != name:
            continue
        if "=" in argument.text:
            found = (argument.text.partition("=")[2],)
            continue
        words = []
        for following in job.argv[index + 1 :]:
            if following.text is None or following.text.startswith("--"):
                break
            words.append(following.text)
        found = tuple(words)
    return found


def degrees(stage: Stage) -> tuple[int, ...]:
    """What upstream Megatron takes for all stages together."""
    return (stage.tp, stage.cp, stage.ep, stage.etp, stage.dp, stage.num_devices, stage.micro_batch_size)


def _flag(text: str | None) -> str:
    return text.partition("=")[0] if text and text.startswith("--") else ""
