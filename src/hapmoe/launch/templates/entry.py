#!/usr/bin/env python3
"""Starts one rank of a HAPMoE plan: picks the flags of its pipeline stage, then runs the trainer.

Reads plan.json, args/ and env/ beside this file; needs nothing but Python. Any launcher will do that
sets a rank and a world size (torchrun, srun, mpirun). Stops (exit code 2) with one line when this
rank is not where the plan wants it.

    HAPMOE_WORKDIR           folder in which the training program runs (default: where we are)
    HAPMOE_DRY_RUN=1         print this rank's arguments as JSON and stop
    HAPMOE_SKIP_DEVICE_CHECK=1  do not compare the device's name with the plan's
"""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any, NoReturn

DRY_RUN = os.environ.get("HAPMOE_DRY_RUN") == "1"
HERE = Path(__file__).resolve().parent
RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
WORLD_SIZE = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


def stop(message: str) -> NoReturn:
    sys.stderr.write(f"hapmoe entry: {message}\n")
    raise SystemExit(2)


def read_json(name: str) -> dict[str, Any]:
    """A file beside this one, whole and as it was written."""
    try:
        found = json.loads((HERE / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        stop(f"{name} cannot be read ({error}): copy the folder again")
    if not isinstance(found, dict):
        stop(f"{name} is not what was written: copy the folder again")
    return found


def number(names: tuple[str, ...], default: int | None = None) -> int:
    """The first of these variables that is set; what torchrun sets comes first."""
    for name in names:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    if default is None:
        stop(f"none of {', '.join(names)} is set: start me with torchrun, srun or mpirun")
    return default


def stage_of(plan: dict[str, Any], rank: int, world_size: int) -> tuple[int, dict[str, Any]]:
    """(index, stage) of this rank. Stages are consecutive ranks in the plan's order."""
    first = 0
    found = None
    for index, stage in enumerate(plan["stages"]):
        count = stage.get("num_devices") or stage["tp"] * stage["cp"] * stage["dp"]
        if first <= rank < first + count:
            found = index, stage
        first += count
    if world_size != first:
        stop(f"world size is {world_size}, the plan has {first} ranks: start as many as hosts.tsv lists")
    if found is None:
        stop(f"rank {rank} is outside the plan's {first} ranks")
    return found


def known(word: str) -> str:
    """A word of args/ or env/; ``${HAPMOE_VAR_0}`` stands for what the launcher evaluated once.

    A dry run shows the name instead: the value may be a secret.
    """
    match = re.fullmatch(r"\$\{(HAPMOE_VAR_\d+)\}", word)
    if not match or DRY_RUN:
        return word
    if match[1] not in os.environ:
        stop(f"{match[1]} is not set: launch.sh sets it, the same on all nodes")
    return os.environ[match[1]]


def read_words(path: Path) -> list[str]:
    return [known(word) for word in shlex.split(path.read_text(encoding="utf-8"), comments=True)]


def set_environment(stage: dict[str, Any]) -> list[str]:
    """The script's exports, then what this kind of device needs; returns the device's names."""
    kind = re.sub(r"[^A-Za-z0-9._-]", "-", stage["device"])
    for path in (HERE / "env" / "common.env", HERE / "env" / f"{kind}.env"):
        for word in shlex.split(path.read_text(encoding="utf-8"), comments=True):
            name, _, value = word.partition("=")
            os.environ[name] = known(value)
    return [name for name in os.environ.get("HAPMOE_DEVICE_NAMES", "").split(",") if name]


def check_device(rank: int, index: int, stage: dict[str, Any], names: list[str], local_rank: int) -> None:
    """A node in the wrong place would train, slowly or with another layer split: stop instead.

    Names match at word ends: "nvidia h20" is not in "NVIDIA H200".
    """
    if not names or os.environ.get("HAPMOE_SKIP_DEVICE_CHECK") == "1":
        return
    torch = importlib.import_module("torch")
    devices = torch.npu if hasattr(torch, "npu") else torch.cuda
    found = devices.get_device_name(min(local_rank, devices.device_count() - 1))
    if not any(re.search(rf"(?<!\w){re.escape(name)}(?![^\W_])", found.lower()) for name in names):
        stop(
            f"rank {rank} (stage {index}) runs on {found!r}, the plan wants {stage['device']} "
            f"({' or '.join(names)}): check the order of hosts.tsv, or set HAPMOE_SKIP_DEVICE_CHECK=1"
        )


def attach_runtime(plan: dict[str, Any], rank: int) -> None:
    """hapmoe_runtime, where the launcher put it, joins stages that have degrees of their own."""
    if not (HERE / "runtime.json").is_file():
        return
    told = read_json("runtime.json")
    sys.path.insert(0, str(HERE))
    runtime = importlib.import_module("hapmoe_runtime")
    try:
        runtime.attach(plan, rank, told["transports"], told["libraries"], joins=told["joins"])
    except runtime.Refused as error:
        stop(str(error))
    finally:
        sys.path.remove(str(HERE))


def main() -> None:
    plan = read_json("plan.json")
    rank, world_size = number(RANK), number(WORLD_SIZE)
    local_rank = number(LOCAL_RANK, default=0)
    index, stage = stage_of(plan, rank, world_size)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(local_rank))
    names = set_environment(stage)
    program, *common = read_words(HERE / "args" / "common.args")
    arguments = common + read_words(HERE / "args" / f"stage_{index}.args")
    if DRY_RUN:
        told = json.dumps({"rank": rank, "stage": index, "program": program, "argv": arguments})
        os.write(1, f"{told}\n".encode())  # one write: ranks share this output
        return
    check_device(rank, index, stage, names, local_rank)
    attach_runtime(plan, rank)
    os.chdir(os.environ.get("HAPMOE_WORKDIR") or ".")
    module = program.removeprefix("module:")
    sys.path[0] = os.getcwd() if module != program else os.path.dirname(os.path.abspath(program))
    sys.argv = [program, *arguments]
    if module != program:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    elif os.path.isfile(program):
        runpy.run_path(program, run_name="__main__")
    else:
        stop(f"no file {program!r} in {os.getcwd()}: set HAPMOE_WORKDIR to the folder that the script runs in")


if __name__ == "__main__":
    main()
