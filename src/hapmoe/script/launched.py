"""What unwrapping a launcher gives, what launchers outside settle, and what Slurm options say."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace

from .options import LAUNCHERS, Parsed, UnknownOption, parse_options
from .values import Text

__all__ = [
    "Around",
    "Entry",
    "Inside",
    "Refused",
    "integer",
    "looks_like_training",
    "product",
    "quotient",
    "sbatch_around",
    "slurm_around",
    "training_score",
]

_TRAINING_FLAGS = frozenset(
    (
        "num-layers",
        "hidden-size",
        "tensor-model-parallel-size",
        "pipeline-model-parallel-size",
        "micro-batch-size",
        "global-batch-size",
        "num-attention-heads",
        "model-parallel-size",
        "seq-length",
        "train-iters",
        "num-experts",
        "expert-model-parallel-size",
        "train-samples",
    )
)
_TRAINING_NAME = re.compile(r"pretrain|train|finetune|sft|posttrain", re.IGNORECASE)


class Refused(Exception):
    """Where the entry begins is not clear; the text says why."""


@dataclass(frozen=True, slots=True)
class Around:
    """What the launchers outside a command settle about its processes."""

    launcher: str = ""
    argv: tuple[Text, ...] = ()
    nodes: int | None = None
    tasks: int | None = None
    tasks_per_node: int | None = None
    devices_per_node: int | None = None
    parallel: bool = False
    """A launcher outside starts one process per task (srun, mpirun)."""
    slurm: bool = False
    groups: tuple[Around, ...] = ()
    """The components of a heterogeneous Slurm job, in order."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A Python process: what runs, its arguments, and how many there are."""

    launcher: str
    launcher_argv: tuple[Text, ...]
    python: tuple[str, ...]
    entry: Text
    argv: tuple[Text, ...]
    world_size: int | None
    nodes: int | None
    devices_per_node: int | None


@dataclass(frozen=True, slots=True)
class Inside:
    """What a wrapper runs: ``words`` (a command), shell ``code`` with ``words`` as arguments, or a ``script``."""

    kind: str
    words: tuple[Text, ...]
    around: Around
    env: tuple[tuple[str, Text], ...] = ()
    code: Text | None = None
    batch: bool = False
    options: frozenset[str] = frozenset()
    """What a shell is started with, as ``set -o`` names it: ``bash -e``."""


def training_score(entry: str, argv: tuple[Text, ...]) -> int:
    """How much a process looks like a training: 2 for its arguments, 1 for its name."""
    names = {word.text.lstrip("-").partition("=")[0].replace("_", "-") for word in argv if word.text.startswith("--")}
    return 2 * bool(names & _TRAINING_FLAGS) + bool(_TRAINING_NAME.search(entry.rpartition("/")[2]))


def looks_like_training(words: list[Text]) -> bool:
    return training_score("", tuple(words)) > 0


def integer(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"\d{1,7}", text, re.ASCII) else None


def product(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a * b


def quotient(a: int | None, b: int | None) -> int | None:
    return a // b if a is not None and b and a % b == 0 else None


def slurm_around(parsed: Parsed, around: Around) -> Around:
    """``around`` with what Slurm options (of srun, sbatch or ``#SBATCH`` lines) say."""
    nodes = parsed.last("nodes", "N")
    if nodes and "-" in nodes:
        low, _, high = nodes.partition("-")
        nodes = low if low == high else None
    gres = parsed.last("gres")
    devices = integer((parsed.last("gpus_per_node") or "").rpartition(":")[2])
    if devices is None and gres:
        match = re.search(r"(?:gpu|npu|dcu|mlu)[\w.-]*(?::[\w.-]+)?:(\d+)", gres)
        devices = int(match.group(1)) if match else None
    given_nodes, given_tasks = integer(nodes), integer(parsed.last("ntasks", "n"))
    per_node = integer(parsed.last("ntasks_per_node", "tasks_per_node"))
    made = replace(
        around,
        nodes=given_nodes if nodes else around.nodes,
        tasks=given_tasks if parsed.last("ntasks", "n") else (None if per_node or nodes else around.tasks),
        tasks_per_node=per_node if per_node else (None if parsed.last("ntasks", "n") else around.tasks_per_node),
        devices_per_node=devices if devices is not None else around.devices_per_node,
    )
    chosen = _group_numbers(parsed.last("het_group") or "0", len(around.groups))
    if around.groups and parsed.last("het_group"):
        made = _together([slurm_around(_without_groups(parsed), around.groups[place]) for place in chosen])
    total = integer((parsed.last("gpus", "G") or "").rpartition(":")[2])
    if made.devices_per_node is None and total is not None:
        made = replace(made, devices_per_node=quotient(total, made.nodes))
    return made


def _without_groups(parsed: Parsed) -> Parsed:
    return replace(parsed, found={name: value for name, value in parsed.found.items() if name != "het_group"})


def _group_numbers(text: str, count: int) -> list[int]:
    """``0,2-3`` as the components it names, those that are there."""
    numbers: list[int] = []
    for piece in text.split(","):
        low, dash, high = piece.partition("-")
        first, last = integer(low), integer(high) if dash else integer(low)
        if first is None or last is None:
            return []
        numbers += [place for place in range(first, min(last, count - 1) + 1) if place not in numbers]
    return numbers


def _together(parts: list[Around]) -> Around:
    """One launch over several components: what they have in common, and the sums."""

    def total(values: list[int | None]) -> int | None:
        return None if None in values or not values else sum(value or 0 for value in values)

    def common(values: set[int | None]) -> int | None:
        return values.pop() if len(values) == 1 else None

    return Around(
        nodes=total([part.nodes for part in parts]),
        tasks=total([part.tasks or product(part.nodes, part.tasks_per_node or 1) for part in parts]),
        tasks_per_node=common({part.tasks_per_node for part in parts}),
        devices_per_node=common({part.devices_per_node for part in parts}),
        slurm=True,
    )


def sbatch_around(text: str) -> Around:
    """What the ``#SBATCH`` lines of a script say; of a heterogeneous job its first component, all in ``groups``."""
    parts: list[list[str]] = [[]]
    for line in text.split("\n"):
        option = line.removeprefix("#SBATCH") if line.startswith("#SBATCH") else None
        if option is None:
            continue
        if option.split() in (["hetjob"], ["packjob"]):
            parts.append([])
        else:
            parts[-1].append(option)
    groups = tuple(slurm_around(_parse_sbatch(part), Around(slurm=True)) for part in parts)
    return replace(groups[0], groups=groups) if len(groups) > 1 else groups[0]


def _parse_sbatch(lines: list[str]) -> Parsed:
    """The options of ``#SBATCH`` lines; unknown ones are passed over, as each stands on a line."""
    parsed = Parsed()
    for line in lines:
        try:
            words = shlex.split(line, comments=True)
            found = parse_options(LAUNCHERS["sbatch"], words, lambda _: False)
        except (ValueError, UnknownOption):
            continue
        for name, values in found.found.items():
            parsed.found.setdefault(name, []).extend(values)
        parsed.flags |= found.flags
    return parsed
