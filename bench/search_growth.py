"""How search times grow with the problem, beside the paper's own search; and what other planners take.

Each row is one process: the exact search, then ``hs-dp`` (HAPMoE's Algorithm 1) on the same priced
problem, cut at the 60 s that the paper states as its limit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

SCRIPT = Path(__file__).parents[1] / "examples" / "mixtral-8x7b.sh"
KINDS = ("h100-80g-sxm", "h200-141g-sxm", "h20-96g-sxm", "a100-80g-sxm")
BASE = {"devices": 64, "layers": 32, "kinds": 2, "experts": 8}
GROWN = {
    "devices": (16, 32, 64, 128, 256, 512),
    "layers": (16, 32, 64, 128),
    "kinds": (1, 2, 3, 4),
    "experts": (8, 32, 128),
}
"""One is varied, the others stay as in ``BASE``."""
LIMIT_S = 60.0
"""The paper's claim for its search (arXiv:2609.39350); here hs-dp is cut there."""

PEERS = (
    ("Metis", "16 devices, 2 kinds, 10 layers, dense", 7.4),
    ("Metis", "32 devices, 2 kinds, 34 layers, dense", 160.4),
    ("Galvatron-2", "8 devices, 1 kind, 32 layers, dense", 186.8),
    ("Sailor", "512 devices, 2 kinds, OPT-350M, even layers; and 6.5 s of set-up", 4.6),
    ("HexiScale (FlashFlex)", "512 devices, 2 kinds, OPT-350M", 88.1),
    ("AMP", "512 devices, 2 kinds, OPT-350M", 10.7),
    ("SimuMax 1.2", "64 devices, 1 kind, Mixtral 8x7B, tp fixed to 1", 9.7),
    ("SimuMax 1.2", "1,024 devices, 1 kind, DeepSeek-V3, tp fixed to 1", 32.2),
    ("HARP", "3 devices, 2 kinds, 0.76 B parameters: stage construction, from its README", 164.0),
)
"""Wall seconds of search. Measured once on two cores without a GPU, from each project's public code with
the profiles it ships (Sailor, HexiScale and AMP in Sailor's harness), unless said otherwise: compare
orders of magnitude, the problems differ."""


def cluster_text(devices: int, kinds: int) -> str:
    """A cluster file: nodes of 8, split evenly among the kinds, every two linked."""
    nodes = devices // 8
    share = [nodes // kinds + (kind < nodes % kinds) for kind in range(kinds)]
    lines = ["pools:"]
    lines += [f"  - {{name: p{i}, device: {KINDS[i]}, nodes: {share[i]}}}" for i in range(kinds)]
    if kinds > 1:
        lines += ["links:"]
        lines += [
            f"  - {{between: [p{i}, p{j}], bandwidth: 1600 Gb/s, latency: 5 us, transport: nccl}}"
            for i in range(kinds)
            for j in range(i + 1, kinds)
        ]
    return "\n".join(lines) + "\n"


def run_case(devices: int, layers: int, kinds: int, experts: int) -> dict[str, Any]:
    """In a child: exact and hs-dp on one problem."""
    import tempfile

    import msgspec

    import hapmoe
    from hapmoe.search import pose_for, search

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.yaml"
        file.write_text(cluster_text(devices, kinds))
        cluster = hapmoe.load_cluster(file)
    job = hapmoe.extract(SCRIPT)
    moe = job.model.moe
    assert moe is not None
    # as many active parameters and about as many in all: narrower experts where there are more
    width = moe.ffn_hidden * moe.num_experts // experts
    moe = msgspec.structs.replace(moe, num_experts=experts, ffn_hidden=width, pattern=(True,) * layers)
    model = msgspec.structs.replace(job.model, num_layers=layers, moe=moe)
    training = msgspec.structs.replace(job.training, global_batch_size=512)
    job = msgspec.structs.replace(job, model=model, training=training)
    began = time.process_time()
    problem = pose_for(job, cluster)
    row: dict[str, Any] = {"devices": devices, "layers": layers, "kinds": kinds, "experts": experts}
    row["pricing_cpu_s"] = time.process_time() - began
    for name, planner in (("exact", "exact"), ("hsdp", "hs-dp")):
        began = time.process_time()
        result = search(job, cluster, planner=planner, problem=problem, time_limit_s=LIMIT_S, top=1)
        row[f"{name}_cpu_s"] = time.process_time() - began
        row[f"{name}_step_s"] = result.estimate.step_s if result.estimate else None
        row[f"{name}_gap"] = result.gap
    return row


HEADER = (
    f"{'devices':>8} {'layers':>7} {'kinds':>6} {'experts':>8}  {'exact':>8} {'gap':>6} {'step':>8}  "
    f"{'hs-dp':>8} {'step':>8}  {'time':>7} {'step':>6}"
)
UNITS = f"{'':32}  {'CPU s':>8} {'':6} {'s':>8}  {'CPU s':>8} {'s':>8}  {'ratio':>7} {'ratio':>6}"


def growth(told: IO[str]) -> list[dict[str, Any]]:
    """The table; ratios are hs-dp over exact, of search times and of steps found."""
    print(f"\ngrowth around {BASE}, Mixtral shape, batch 512\n{HEADER}\n{UNITS}", file=told, flush=True)
    rows = []
    for name, values in GROWN.items():
        for value in values:
            case = BASE | {name: value}
            command = [sys.executable, "-m", "bench.search_growth", *(str(number) for number in case.values())]
            row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            rows.append(row | {"varied": name})
            print(_line(row), file=told, flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    def number(value: float | None, width: int) -> str:
        return f"{'-':>{width}}" if value is None else f"{value:{width}.2f}"

    both = row["exact_step_s"] and row["hsdp_step_s"]
    return (
        f"{row['devices']:8} {row['layers']:7} {row['kinds']:6} {row['experts']:8}  "
        f"{row['exact_cpu_s']:8.2f} {row['exact_gap'] * 100:5.1f}% {number(row['exact_step_s'], 8)}  "
        f"{row['hsdp_cpu_s']:8.2f} {number(row['hsdp_step_s'], 8)}  "
        f"{row['hsdp_cpu_s'] / max(row['exact_cpu_s'], 1e-9):7.1f} "
        f"{number(row['hsdp_step_s'] / row['exact_step_s'] if both else None, 6)}"
    )


def peers(told: IO[str]) -> list[dict[str, Any]]:
    """Search times of other planners, with the size of their problem."""
    print("\nother planners, wall seconds of search (measured once, see PEERS in bench/search_growth.py)", file=told)
    for name, size, seconds in PEERS:
        print(f"{name:22} {seconds:7.1f}  {size}", file=told, flush=True)
    return [{"planner": name, "problem": size, "wall_s": seconds} for name, size, seconds in PEERS]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.search_growth", description=__doc__.splitlines()[0])
    for name in BASE:
        parser.add_argument(name, type=int)
    print(json.dumps(run_case(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
