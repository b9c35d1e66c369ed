"""The probe in Megatron-LM itself: ``python -m bench.training FOLDER [--json]``.

FOLDER is a tree of Megatron-LM with the C++ helpers of its data sets built (``make -C megatron/core/datasets``); its
``pretrain_gpt.py`` runs on CPU by the shim of ``hapmoe.lab``, on two ranks that share experts, on two stages and, if
it has ``--fake-process-group``, as one rank of four and as each stage of three by itself. Asked is: are the losses
those of a run without the probe, are calls and bytes of every group those of the cost model, are a microbatch's
tokens all routed, and is the log of the run without the probe (with all timers) read as ``hapmoe calibrate`` does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.lab import SOURCE, Case, free_port, prepare, write_tree
from hapmoe.logs.megatron import read_log
from hapmoe.profiling.carry import probe_files
from hapmoe.profiling.probed import MeasuredRank, load_ranks
from hapmoe.profiling.runs import STAGES
from hapmoe.volumes import step_traffic

__all__ = ["main"]

SHIM = """\
import os
if "RANK" in os.environ:
    from hapmoe.lab import shim
    from hapmoe.probe.imports import before_import
    before_import("megatron.core", lambda _: shim.install())
"""
FLAGS = {"--num-layers": "2", "--vocab-size": "4224"}
"""Mock data of core 0.12 hold the numbers up to 4096."""
CASES = (
    Case("ep 2", (2,), ep=2, dp=2, flags={**FLAGS}),
    Case("pp 2", (1, 1), flags={**FLAGS}),
)
ALONE = (
    (Case("one rank of four", (2,), ep=4, dp=4, flags={**FLAGS}), 0),
    *(
        (Case(f"{name} stage of three", (1, 1, 1), flags=FLAGS | {"--num-layers": "3"}), stage)
        for stage, name in enumerate(STAGES)
    ),
)
"""With the stage whose first rank runs by itself."""
ONLY_LOCAL = (
    *("--distributed-backend", "gloo", "--use-cpu-initialization", "--no-masked-softmax-fusion"),
    *("--no-bias-gelu-fusion", "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion", "--no-rope-fusion"),
    *("--no-gradient-accumulation-fusion", "--no-persist-layer-norm", "--mock-data"),
    *(
        "--tokenizer-type",
        "NullTokenizer",
        "--eval-iters",
        "1",
        "--eval-interval",
        "99",
        "--log-interval",
        "1",
        "--split",
        "99,1,0",
    ),
)
RERUN = {("world", "all_reduce"): (1.0, 4.0)}
"""Every step asks all ranks whether it must be run again (megatron/core/rerun_state_machine.py:262)."""
TIMERS = ("--timing-log-level", "2", "--timing-log-option", "all", "--log-throughput")
STEPS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.training", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    root = options.folder.resolve()
    has_single = "fake-process-group" in (root / "megatron" / "training" / "arguments.py").read_text()
    rows = []
    every: list[tuple[Case, int | None]] = [(case, None) for case in CASES]
    for case, stage in (*every, *ALONE) if has_single else every:
        rows.append(_row(case, root, stage))
        if not options.json:
            print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    if options.json:
        print(json.dumps(rows, indent=1))
    return 0 if all(row["losses equal"] is not False and not row["differences"] for row in rows) else 1


def _row(case: Case, root: Path, alone: int | None) -> dict[str, Any]:
    """One case; ``alone``: the first rank of this stage by itself."""
    with tempfile.TemporaryDirectory(prefix="hapmoe-training-") as name:
        folder = Path(name)
        write_tree(folder / "probe", probe_files())
        write_tree(folder / "shim", {"sitecustomize.py": SHIM})
        job, _, plan = prepare(case, folder)
        words = [argument.text or "" for argument in job.argv] + [*ONLY_LOCAL]
        words += ["--pipeline-model-parallel-size", str(plan.pp), "--expert-model-parallel-size", str(case.ep)]
        words += ["--train-iters", str(STEPS + 2)]
        words += [
            "--vocab-size",
            str(job.model.vocab_size - 1),
        ]  # NullTokenizer has one more, for the end of a document
        first = None if alone is None else plan.stages[alone].first_rank
        probed = _losses(_run(root, folder, words, case.ranks, folder / "out", first))
        plain = None
        if first is None:
            log = _run(root, folder, [*words, *TIMERS], case.ranks, None)
            plain = _losses(log)
        ranks = load_ranks(folder / "out", None if first is None else (first,))
        differences = []
        for index, traffic in enumerate(step_traffic(job, plan)):
            if alone not in (None, index):
                continue
            planned = dict(RERUN)
            for one in traffic:
                calls, size = planned.get((one.axis, one.collective), (0.0, 0.0))
                planned[one.axis, one.collective] = (calls + one.calls, size + one.bytes)
            stage = plan.stages[index]
            mine = range(stage.first_rank, stage.first_rank + stage.num_devices)
            sent = _sent([rank for rank in ranks if rank.start.rank in mine])
            for key in sorted({*planned, *sent}):
                # by itself a rank gets back what it has sent, not what others would have sent it
                if planned.get(key) != sent.get(key) and not (alone is not None and key[1] == "all_to_all"):
                    differences.append(
                        f"stage {index} {' '.join(key)}: {planned.get(key)} planned, {sent.get(key)} sent"
                    )
        if first is None:
            differences += _unread(log, case.ranks)
        tokens = {sum(map(sum, layer.microbatches)) for step in ranks[0].steps for layer in step.tokens}
        if tokens != {plan.num_microbatches * job.training.seq_len * 2}:
            differences.append(f"tokens {tokens}")
        return {
            "case": case.name,
            "core": ranks[0].start.versions["megatron_core"],
            "losses equal": None if plain is None else probed == plain and len(plain) == STEPS + 2,
            "groups": len({key for key in _sent(ranks)}),
            "differences": differences,
        }


def _sent(ranks: Sequence[MeasuredRank]) -> dict[tuple[str, str], tuple[float, float]]:
    """(calls, bytes) of the second step by (axis, collective), the mean of these ranks."""
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for rank in ranks:
        for row in rank.steps[1].collectives:
            calls, size = found.get((row.axis, row.collective), (0.0, 0.0))
            more = row.calls / len(ranks), row.calls * row.call_bytes / len(ranks)
            found[row.axis, row.collective] = (calls + more[0], size + more[1])
    return found


def _losses(log: str) -> list[str]:
    return re.findall(r"lm loss: ([0-9.E+-]+)", log)[: STEPS + 2]


def _unread(log: str, ranks: int) -> list[str]:
    """What is missing in a log as it was read."""
    found = read_log(log)
    missing = [] if len(found.iterations) == STEPS + 2 else [f"{len(found.iterations)} iterations read"]
    for name in ("forward-compute", "backward-compute", "forward-backward", "optimizer"):
        times = found.by_rank.get(name, {})
        if sorted(times) != list(range(ranks)):
            missing.append(f"timer {name} read of ranks {sorted(times)}")
    return missing


def _run(root: Path, folder: Path, words: list[str], ranks: int, out: Path | None, alone: int | None = None) -> str:
    """What the training printed."""
    path = [str(folder / "shim"), str(SOURCE), str(root), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "HAPMOE_LAB": "1", "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    env |= {"PYTHONWARNINGS": "ignore", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if out is not None:
        path.insert(0, str(folder / "probe"))
        env |= {
            "HAPMOE_PROBE": str(out),
            "HAPMOE_PROBE_STEPS": str(STEPS),
            "HAPMOE_PROBE_STOP": str(int(alone is not None)),
        }
    command = [sys.executable, "pretrain_gpt.py", *words]
    if alone is not None:
        env |= {"RANK": str(alone), "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": "1"}
        command += ["--fake-process-group", "--moe-router-force-load-balancing"]
    else:
        start = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", env["MASTER_PORT"]]
        command[1:1] = start
    env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
