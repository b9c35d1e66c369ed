"""Runs a plan for real on CPU: script -> job -> plan -> launcher -> torchrun -> Megatron-Core (hapmoe.lab).

Nothing is imitated but the devices: the emitted ``run_node.sh`` starts the real torchrun, every rank
runs ``entry.py`` and the lab's training program, the ranks talk over gloo.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

import hapmoe
from bench import nursery
from hapmoe.cluster import Cluster
from hapmoe.job import JobSpec
from hapmoe.launch import target
from hapmoe.launch.write import write_files
from hapmoe.plan import Plan, Recompute, Stage
from hapmoe.planfile import dump_plan
from hapmoe.profiling.carry import probe_files
from hapmoe.resolve import resolve

__all__ = ["BLOCK", "CORE", "MOE", "Case", "Run", "block", "free_port", "prepare", "run", "write_tree"]

SOURCE = Path(__file__).parents[1] / "src"
CORE = Recompute(granularity="selective", modules=("core_attn",))
MOE = Recompute(granularity="selective", modules=("moe",))
BLOCK = Recompute(granularity="full", method="block", num_layers=1)

_FLAGS: dict[str, str | None] = {
    # A MoE model as small as Megatron takes it at tp 2, with everything that changes losses turned off.
    "--num-layers": "4",
    "--hidden-size": "64",
    "--ffn-hidden-size": "128",
    "--num-attention-heads": "4",
    "--seq-length": "64",
    "--max-position-embeddings": "64",
    "--vocab-size": "512",
    "--position-embedding-type": "rope",
    "--normalization": "RMSNorm",
    "--swiglu": None,
    "--disable-bias-linear": None,
    "--untie-embeddings-and-output-weights": None,
    "--attention-dropout": "0.0",
    "--hidden-dropout": "0.0",
    "--transformer-impl": "local",
    "--num-experts": "4",
    "--moe-ffn-hidden-size": "96",
    "--moe-router-topk": "2",
    "--moe-router-load-balancing-type": "none",
    "--moe-token-dispatcher-type": "alltoall",
    "--micro-batch-size": "1",
    "--global-batch-size": "8",
    "--train-iters": "3",
    "--lr": "3e-3",
}

_Process = subprocess.Popen[bytes] | nursery.Child

_OF_MANY_RANKS = frozenset(
    {
        "--moe-token-dispatcher-type",
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        "--dist-ckpt-optim-fully-reshardable",
        "--load",
        "--save",
    }
)
"""Flags that change how ranks work together, not what they compute."""


def block(layers: int) -> Recompute:
    return Recompute(granularity="full", method="block", num_layers=layers)


@dataclass(frozen=True)
class Case:
    """One plan for one small model. A flag of ``flags`` with value False is taken out of the script."""

    name: str
    layers: tuple[int, ...] = (4,)
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    vpp: int = 1
    mbs: int = 1
    recompute: tuple[Recompute, ...] = ()
    """Per stage; one: all stages."""
    flags: dict[str, str | bool | None] = field(default_factory=dict)
    pools: tuple[str, ...] = ()
    """Pool of each stage; none: all on one."""
    meshes: tuple[dict[str, int], ...] = ()
    """Degrees of each stage where they differ (back end megatron-hetero); ``mbs`` is then the samples of
    a microbatch on all replicas of a stage together."""
    libraries: tuple[str, ...] = ()
    """Collective library of each stage's devices (hapmoe.lab.vendors); none: gloo."""

    def mesh(self, stage: int) -> dict[str, int]:
        same = {"tp": self.tp, "cp": self.cp, "ep": self.ep, "etp": self.etp, "dp": self.dp}
        if not self.meshes:
            return same
        own = {**dict.fromkeys(same, 1), **self.meshes[stage]}
        if own["ep"] == 1:
            own["etp"] = own["tp"]
        return own | {"micro_batch_size": self.mbs // own["dp"]}

    def size(self, stage: int) -> int:
        mesh = self.mesh(stage)
        return mesh["tp"] * mesh["cp"] * mesh["dp"]

    @property
    def ranks(self) -> int:
        return sum(map(self.size, range(len(self.layers))))

    @property
    def reference(self) -> Case:
        """The same model and batch on one rank."""
        kept = {name: value for name, value in self.flags.items() if name not in _OF_MANY_RANKS}
        return Case(f"{self.name} on one rank", layers=(sum(self.layers),), flags=kept)


@dataclass(frozen=True)
class Run:
    """What the ranks of a case wrote, in rank order."""

    case: Case
    job: JobSpec
    plan: Plan
    ranks: tuple[tuple[dict[str, Any], ...], ...]
    parameters: tuple[list[tuple[str, tuple[int, ...], Any]], ...] = ()
    """Name, offset in the whole tensor and values of every piece of each rank, where asked for
    (HAPMOE_LAB_PARAMETERS=1)."""

    def rows(self, event: str) -> list[list[dict[str, Any]]]:
        return [[row for row in rows if row["event"] == event] for rows in self.ranks]

    @property
    def losses(self) -> dict[int, float]:
        """By iteration."""
        return {row["iteration"]: row["loss"] for row in self.rows("iteration")[0]}

    @property
    def grad_norms(self) -> dict[int, float]:
        return {row["iteration"]: row["grad_norm"] for row in self.rows("iteration")[0]}


def prepare(case: Case, folder: Path) -> tuple[JobSpec, Cluster, Plan]:
    """The case as a job read from a script, a cluster read from a file, and a complete, legal plan."""
    flags = {name: value for name, value in {**_FLAGS, **case.flags}.items() if value is not False}
    words = [word for name, value in flags.items() for word in (name, value) if word is not None]
    lines = " \\\n    ".join(shlex.quote(str(word)) for word in words)
    script = folder / "train.sh"
    script.write_text(f"#!/bin/bash\ntorchrun --nproc-per-node 1 -m hapmoe.lab.train \\\n    {lines}\n")
    homes = case.pools or tuple(f"stage{index}" if case.meshes else "cpu" for index in range(len(case.layers)))
    names = tuple(dict.fromkeys(homes))
    pools = []
    for name in names:
        count = sum(case.size(stage) for stage, home in enumerate(homes) if home == name)
        pools.append(
            {
                "name": name,
                "device": _device(case, homes.index(name)),
                "nodes": 1,
                "devices_per_node": count,
                "hosts": [f"host-{name}"],
            }
        )
    joins = [
        {"between": [one, other], "bandwidth": "10 Gb/s", "latency": "50 us", "transport": "gloo"}
        for index, one in enumerate(names)
        for other in names[index + 1 :]
    ]
    (folder / "cluster.yaml").write_text(json.dumps({"pools": pools, **({"links": joins} if joins else {})}))
    job, cluster = _of_installed(hapmoe.extract(script)), hapmoe.load_cluster(folder / "cluster.yaml")
    settings = case.recompute * len(case.layers) if len(case.recompute) == 1 else case.recompute
    stages = tuple(
        Stage(
            pool=homes[index],
            num_layers=count,
            **case.mesh(index),
            recompute=settings[index] if settings else Recompute(),
        )
        for index, count in enumerate(case.layers)
    )
    plan = Plan(
        stages=stages,
        micro_batch_size=stages[0].micro_batch_size or case.mbs,
        vpp=case.vpp,
        backend="megatron-hetero" if case.meshes else "megatron",
    )
    plan = resolve(job, cluster, plan)
    broken = hapmoe.check(job, cluster, plan)
    assert not broken, f"{case.name}: {[one.message for one in broken]}"
    return job, cluster, plan


def _of_installed(job: JobSpec) -> JobSpec:
    """The job, to be trained by the megatron-core that this Python finds (PYTHONPATH first)."""
    found = importlib.util.find_spec("megatron.core")
    assert found is not None and found.origin is not None
    text = Path(found.origin).with_name("package_info.py").read_text(encoding="utf-8")
    version = ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.M))
    training = msgspec.structs.replace(job.training, megatron_version=version)
    return msgspec.structs.replace(job, training=training)


def _device(case: Case, stage: int) -> str | dict[str, str]:
    if not case.libraries:
        return "cpu"
    library = case.libraries[stage]
    return {"like": "cpu", "name": f"cpu-{library}", "vendor": library, "ccl": library}


def run(
    case: Case,
    *,
    measure: bool = False,
    timeout_s: float = 300,
    by_rank: bool = False,
    probe: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> Run:
    """Train the case through its emitted launcher; every node of the plan is a process here.

    ``by_rank``: every rank is one that runs ``entry.py``, as under srun, and comes out of the nursery, which
    saves the start of torchrun and the import of torch; the probe needs an interpreter's start.
    ``probe``: where the probe, carried beside the plan, writes; ``variables``: more of the environment.
    """
    with tempfile.TemporaryDirectory(prefix="hapmoe-lab-") as name:
        folder = Path(name)
        job, cluster, plan = prepare(case, folder)
        files = target("torchrun")(job, cluster, plan, dump_plan(plan))
        launch = write_files(folder / "plan", files)
        environment = {
            **{key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
            "HAPMOE_LAB": "1",
            "HAPMOE_LAB_OUT": str(folder / "out"),
            "HAPMOE_LAB_MEASURE": "1" if measure else "0",
            "HAPMOE_TORCHRUN": str(Path(sys.executable).parent / "torchrun"),
            "HAPMOE_WORKDIR": str(folder),
            "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            **(variables or {}),
        }
        if probe is not None:
            write_tree(folder / "probe", probe_files())
            environment["HAPMOE_PROBE"] = str(probe)
            environment["PYTHONPATH"] = os.pathsep.join([str(folder / "probe"), environment["PYTHONPATH"]])
        hosts = [line for line in files["hosts.tsv"].splitlines() if line[:1].isdigit()]
        owns = [{"NODE_RANK": str(node)} for node in range(len(hosts))]
        if by_rank:
            every = {"WORLD_SIZE": str(case.ranks), "LOCAL_WORLD_SIZE": str(case.ranks)}
            owns = [{**every, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(case.ranks)]
        logs = [folder / f"process{index}.log" for index in range(len(owns))]
        processes: list[_Process] = []
        for own, log in zip(owns, logs, strict=True):
            if by_rank:
                processes.append(nursery.start([str(launch / "entry.py")], {**environment, **own}, log))
                continue
            with log.open("w") as stream:
                command = ["bash", str(launch / "run_node.sh")]
                processes.append(
                    subprocess.Popen(command, env={**environment, **own}, stdout=stream, stderr=subprocess.STDOUT)
                )
        codes = _wait(processes, timeout_s)
        if any(code != 0 for code in codes):
            told = zip(codes, logs, strict=True)
            text = "".join(log.read_text()[-6000:] for code, log in told if code or not any(codes))
            raise RuntimeError(f"{case.name}: exit codes {codes}\n{text}")
        ranks = [
            tuple(map(json.loads, (folder / "out" / f"rank{rank}.jsonl").read_text().splitlines()))
            for rank in range(case.ranks)
        ]
        return Run(case, job, plan, tuple(ranks), _parameters(folder / "out", case.ranks))


def _parameters(folder: Path, ranks: int) -> tuple[Any, ...]:
    paths = [folder / f"rank{rank}.pt" for rank in range(ranks)]
    if not all(path.exists() for path in paths):
        return ()
    import torch

    return tuple(torch.load(path) for path in paths)


def _wait(processes: Sequence[_Process], timeout_s: float) -> list[int | None]:
    """Exit codes; when one fails or time is up the others are told to stop, and have none."""
    ends = time.monotonic() + timeout_s
    try:
        while any(one.poll() is None for one in processes) and not any(one.poll() for one in processes):
            if time.monotonic() > ends:
                break
            time.sleep(0.05)
        return [one.poll() for one in processes]
    finally:
        for one in processes:
            if one.poll() is None:
                one.terminate()
                one.wait()


def write_tree(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def free_port() -> int:
    """Below the range from which the system takes ports for connections: nobody else gets it meanwhile."""
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", random.SystemRandom().randrange(20000, 32000)))
            except OSError:
                continue
            return int(probe.getsockname()[1])
