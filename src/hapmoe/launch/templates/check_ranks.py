#!/usr/bin/env python3
"""Before training, when asked for (HAPMOE_CHECK=full or only): every rank of the plan, through torch.

Started by torchrun as the training is. Each rank checks the memory that its stage will need, and a
tiny collective runs in every group that training will make: tensor, context, data, expert and
pipeline parallel. A group that does not answer is named, with its ranks.

    HAPMOE_CHECK_TIMEOUT=300  seconds for one collective
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
TIMEOUT = timedelta(seconds=float(os.environ.get("HAPMOE_CHECK_TIMEOUT", "300")))

NPU: Any = getattr(torch, "npu", None)
"""torch_npu's devices, where it is installed."""

Stage = dict[str, Any]


def in_stage(stage: Stage, first: int) -> Iterator[tuple[str, list[int]]]:
    """Groups inside one stage: rank = tp + TP·(cp + CP·dp), and etp + ETP·(ep + EP·edp) for experts
    (parallel_state.py:859,887)."""
    tp, cp, dp, ep, etp = (stage[name] for name in ("tp", "cp", "dp", "ep", "etp"))
    count = tp * cp * dp
    edp = count // (ep * etp)
    meshes = (
        (("tensor", tp, 1), ("context", cp, tp), ("data", dp, tp * cp)),
        (("expert tensor", etp, 1), ("expert", ep, etp), ("expert data", edp, etp * ep)),
    )
    for mesh in meshes:
        for name, size, stride in mesh:
            if size > 1:
                for rank in range(count):
                    if rank // stride % size == 0:
                        yield name, [first + rank + stride * step for step in range(size)]


def groups(stages: list[Stage]) -> list[tuple[str, list[int]]]:
    """All groups, in one order on all ranks. Stages of equal size make pipelines; others meet in pairs."""
    found: list[tuple[str, list[int]]] = []
    firsts, first = [], 0
    for stage in stages:
        firsts.append(first)
        found += in_stage(stage, first)
        first += stage["num_devices"]
    sizes = [stage["num_devices"] for stage in stages]
    if len(stages) > 1 and len(set(sizes)) == 1:
        found += [("pipeline", [begin + rank for begin in firsts]) for rank in range(sizes[0])]
    else:
        for index in range(len(stages) - 1):
            found.append(("pipeline", [firsts[index], firsts[index + 1]]))
    return found


def device() -> tuple[str, str, torch.device]:
    """(collective library, device name, where tensors live) of this rank."""
    local = int(os.environ["LOCAL_RANK"])
    if NPU is not None:
        NPU.set_device(local)
        return "hccl", str(NPU.get_device_name(local)), torch.device("npu", local)
    if torch.cuda.is_available():
        torch.cuda.set_device(local)
        return "nccl", torch.cuda.get_device_name(local), torch.device("cuda", local)
    return "gloo", "cpu", torch.device("cpu")


def memory_short(plan: dict[str, Any], index: int, where: torch.device) -> str:
    """Why the stage will not fit; empty: it will, or nobody knows."""
    estimates = (plan.get("estimate") or {}).get("stages") or []
    if where.type == "cpu" or index >= len(estimates):
        return ""
    free, total = (NPU if where.type == "npu" else torch.cuda).mem_get_info()
    needs = estimates[index]["memory_bytes"]
    if free >= needs:
        return ""
    return f"{free / 2**30:.1f} GiB free of {total / 2**30:.1f}, stage {index} needs {needs / 2**30:.1f}"


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def fail(said: str) -> NoReturn:
    sys.stderr.write(f"check_ranks: {said}\n")
    sys.stderr.flush()
    os._exit(2)  # a broken group cannot be taken down in order


def main() -> None:
    plan = json.loads((HERE / "plan.json").read_text(encoding="utf-8"))
    stages = plan["stages"]
    for stage in stages:
        stage["num_devices"] = stage.get("num_devices") or stage["tp"] * stage["cp"] * stage["dp"]
    rank = int(os.environ["RANK"])
    first, index = 0, 0
    while rank >= first + stages[index]["num_devices"]:
        first += stages[index]["num_devices"]
        index += 1
    library, name, where = device()
    try:
        dist.init_process_group("gloo", timeout=TIMEOUT)
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, (library, name, memory_short(plan, index, where)))
    except (RuntimeError, ValueError) as error:
        fail(f"rank {rank} of stage {index} does not meet the others: {first_line(error)}")
    problems = [f"rank {other} ({said[1]}): {said[2]}" for other, said in enumerate(told) if said[2]]
    slowest: dict[str, float] = {}
    counts: dict[str, int] = {}
    if not problems:
        for kind, ranks in groups(stages):
            one_library = len({told[other][0] for other in ranks}) == 1
            counts[kind] = counts.get(kind, 0) + 1
            began = time.perf_counter()
            try:
                group = dist.new_group(ranks, timeout=TIMEOUT, backend=library if one_library else "gloo")
                if rank not in ranks:
                    continue
                value = torch.ones(1, device=where if one_library else "cpu")
                dist.all_reduce(value, group=group, async_op=True).wait(TIMEOUT)
                total = int(value.item())
            except (RuntimeError, ValueError) as error:
                fail(f"{kind} group of ranks {ranks}, seen from rank {rank}: {first_line(error)}")
            if total != len(ranks):
                problems.append(f"{kind} group of ranks {ranks}: sum {total} instead of {len(ranks)}")
            slowest[kind] = max(slowest.get(kind, 0.0), time.perf_counter() - began)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (slowest, problems))
        slowest = {kind: max(seen.get(kind, 0.0) for seen, _ in everyone) for kind in counts}
        problems = [line for _, lines in everyone for line in lines]
    if rank == 0:
        for kind, count in counts.items():
            sys.stderr.write(f"  {kind + ' parallel':<24} {count:>5} groups  slowest {slowest[kind] * 1e3:8.1f} ms\n")
        for problem in problems:
            sys.stderr.write(f"check_ranks: {problem}\n")
        if not problems:
            sys.stderr.write(f"check_ranks: {dist.get_world_size()} ranks, every group answers\n")
    dist.barrier()
    dist.destroy_process_group()
    raise SystemExit(2 if problems else 0)


if __name__ == "__main__":
    main()
