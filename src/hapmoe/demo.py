"""The whole loop on this machine's CPU: profile, plan, launch, compare with the measurement.

Real Megatron-Core trains a tiny MoE model over gloo (``hapmoe.lab``). The two kinds of "device" are this
machine's processor and the same one slowed down; the planner is not told, it learns it from the profile.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hapmoe import tables
from hapmoe.cluster import Cluster, Pool
from hapmoe.clusterfile import load_cluster
from hapmoe.cost import evaluate
from hapmoe.errors import InputError
from hapmoe.extract import extract
from hapmoe.job import JobSpec
from hapmoe.lab.local import RunFailed, run_nodes
from hapmoe.launch import target
from hapmoe.launch.options import KindOptions, LaunchOptions
from hapmoe.launch.write import write_files
from hapmoe.measured import Table
from hapmoe.plan import Estimate, Plan, Stage
from hapmoe.planfile import dump_plan
from hapmoe.planning import Planned, artefacts, plan_job
from hapmoe.profiling.collect import collect
from hapmoe.profiling.folder import pool_files, write_profile
from hapmoe.profiling.probed import MeasuredRank, load_ranks
from hapmoe.profiling.runs import STEPS, Chosen, runs_at
from hapmoe.resolve import resolve

__all__ = ["LAYERS", "SETTINGS", "SLOW", "Trained", "demo", "learned", "script", "slowed", "split_plan", "trained"]

SLOW = 3
"""How many times slower the second kind is."""
LAYERS = 8
SCRIPT = """#!/bin/bash
# A tiny MoE model; hapmoe.lab.train takes the arguments of Megatron-LM's pretrain_gpt.py.
torchrun --nproc-per-node 1 -m hapmoe.lab.train \\
    --num-layers {layers} --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4 --seq-length 128 \\
    --max-position-embeddings 128 --vocab-size 512 --position-embedding-type rope --normalization RMSNorm --swiglu \\
    --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 \\
    --transformer-impl local --num-experts 4 --moe-ffn-hidden-size 192 --moe-router-topk 2 \\
    --moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall \\
    --micro-batch-size 1 --global-batch-size 8 --train-iters {iterations} --lr 3e-3
"""
CLUSTER = """\
pools:
  - {name: fast, device: {like: cpu, name: cpu-fast}, nodes: 1, devices_per_node: 1, hosts: [localhost]}
  - {name: slow, device: {like: cpu, name: cpu-slow}, nodes: 1, devices_per_node: 1, hosts: [localhost]}
links:
  - {between: [fast, slow], bandwidth: 10 Gb/s, latency: 50 us, transport: gloo}
"""
SETTINGS = ("mbs=1", "pp=2")
"""The plan keeps the micro-batch size that is profiled, and uses both kinds: alone, the fast one is not far behind."""
TIMEOUT_S = 900
"""Of one training, which takes some ten seconds on two free cores: the machine may be busy."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A plan that ran, with what was expected of it and what came out."""

    name: str
    plan: Plan
    estimate: Estimate
    step_s: float
    """Wall time of a step of the slowest rank, median of the steady ones."""
    busy_s: tuple[float, ...]
    """CPU time of passes and optimizer in a step, per stage."""

    @property
    def expected_s(self) -> tuple[float, ...]:
        """The same as the estimate has it: without the wait for other ranks."""
        return tuple(
            self.plan.num_microbatches * (one.forward_s + one.backward_s - one.exposed_comm_s) + one.optimizer_s
            for one in self.estimate.stages
        )


def demo(
    folder: Path, tell: Callable[[str], None], *, layers: int = LAYERS, steps: int = STEPS
) -> tuple[Trained, Trained]:
    """The plan and a uniform one, both trained, in a new ``folder``; ``tell`` hears what is going on.

    ``layers`` of the model: an even number; ``steps``: measured of each training.

    InputError where the folder exists or the lab is not installed, RunFailed where a training does not end well.
    """
    options = slowed(SLOW)
    job, cluster = learned(folder, tell, options, script(layers, steps + 1))
    folder = folder.resolve()
    tell("Plan for both kinds")
    planned = plan_job(job, cluster, settings=SETTINGS)
    best = planned.result.plan
    assert best is not None  # one layer fits anywhere
    _write_plan(folder / "plan", job, cluster, planned, options)
    uniform = split_plan(job, cluster, ("fast", "slow"), (layers // 2, layers // 2))
    write_files(folder / "uniform", target("torchrun")(job, cluster, uniform, dump_plan(uniform), options))
    results = []
    for name, plan in (("plan", best), ("uniform", uniform)):
        tell(f"Training with {name}: layers {'/'.join(str(stage.num_layers) for stage in plan.stages)}")
        results.append(trained(name, job, cluster, plan, folder, steps=steps))
    return results[0], results[1]


def slowed(times: int) -> LaunchOptions:
    """What makes the second kind so many times slower than the first."""
    return LaunchOptions(kinds={"cpu-slow": KindOptions(env={"HAPMOE_LAB_SLOW": str(times)})})


def script(layers: int, iterations: int) -> str:
    """A training script of the demo's model with so many layers."""
    return SCRIPT.format(layers=layers, iterations=iterations)


def learned(
    folder: Path, tell: Callable[[str], None], options: LaunchOptions, training: str, *, by_wall: bool = False
) -> tuple[JobSpec, Cluster]:
    """The job of a training script and its cluster in a new ``folder``, with what a profile of both kinds says.

    ``by_wall``: as ``collect``.
    """
    missing = [name for name in ("torch", "megatron.core") if not _installed(name)]
    if missing:
        raise InputError(f"{missing[0]} is not installed", where="demo", hint="pip install 'hapmoe[lab]'")
    if folder.exists():
        raise InputError("exists already", where=str(folder), hint="choose another --out")
    folder = folder.resolve()
    folder.mkdir(parents=True)
    (folder / "train.sh").write_text(training)
    (folder / "cluster.yaml").write_text(CLUSTER)
    job, cluster = extract(folder / "train.sh"), load_cluster(folder / "cluster.yaml")
    for pool in cluster.pools:
        tell(f"Profile of {pool.name}: two short trainings")
        tables.save(folder / "tables", *_profiled(job, cluster, pool, folder, options, by_wall))
    return job, tables.attach(cluster, tables.load(folder / "tables"))


def split_plan(job: JobSpec, cluster: Cluster, pools: Sequence[str], layers: Sequence[int]) -> Plan:
    """One rank of each of these pools in this order, with so many layers."""
    stages = tuple(Stage(pool=pool, num_layers=count) for pool, count in zip(pools, layers, strict=True))
    return resolve(job, cluster, Plan(stages=stages, micro_batch_size=1))


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _environment(probe: Path) -> dict[str, str]:
    """What a training needs here: the lab, one thread, this package, torchrun with the probe."""
    torchrun = Path(sys.executable).parent / "torchrun"
    source = str(Path(__file__).parents[1])
    return {
        "HAPMOE_LAB": "1",
        "HAPMOE_TORCHRUN": str(probe / "with_probe.sh"),
        "HAPMOE_PROFILE_TORCHRUN": str(torchrun),
        "HAPMOE_CHECK": "off",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]).strip(os.pathsep),
        "PYTHONWARNINGS": "ignore",
    }


def _profiled(
    job: JobSpec, cluster: Cluster, pool: Pool, folder: Path, options: LaunchOptions, by_wall: bool
) -> tuple[Table, ...]:
    runs = runs_at(job, cluster, pool, (1, 1, 1, 1, 1))
    profile, files = pool_files(job, cluster, pool, Chosen(runs=runs), timeout_s=TIMEOUT_S, options=options)
    place = write_profile(folder / "profile" / pool.name, files)
    env = {**os.environ, **_environment(place), "HAPMOE_WORKDIR": str(folder)}
    env["HAPMOE_TORCHRUN"] = env["HAPMOE_PROFILE_TORCHRUN"]
    code = subprocess.run(["bash", str(place / "profile.sh")], env=env, stdout=sys.stderr, check=False).returncode
    if code == 130:
        raise KeyboardInterrupt
    if code:
        raise RunFailed(f"{place}: a run failed (see above)")
    return collect(job, cluster, pool, place, profile, by_wall=by_wall)


def _write_plan(folder: Path, job: JobSpec, cluster: Cluster, planned: Planned, options: LaunchOptions) -> None:
    """As `hapmoe plan` writes it, with what slows the second kind down."""
    plan = planned.result.plan
    assert plan is not None
    files = artefacts(job, cluster, planned)
    files |= target("torchrun")(job, cluster, plan, dump_plan(plan), options)
    write_files(folder, files)


def trained(
    name: str,
    job: JobSpec,
    cluster: Cluster,
    plan: Plan,
    folder: Path,
    *,
    steps: int = STEPS,
    variables: Mapping[str, str] | None = None,
    before: Sequence[Sequence[str]] = (),
) -> Trained:
    """Start the launch files in ``folder / name`` on this machine, and measure so many steps.

    ``variables``: more of the environment; ``before``: as ``run_nodes``.
    """
    measured = folder / f"{name}-measured"
    environment = _environment(folder / "profile" / cluster.pools[0].name)
    environment |= {"HAPMOE_PROBE": str(measured), "HAPMOE_PROBE_STEPS": str(steps), "HAPMOE_WORKDIR": str(folder)}
    environment["HAPMOE_LAB_OUT"] = str(folder / f"{name}-losses")
    run_nodes(folder / name, environment | dict(variables or {}), timeout_s=TIMEOUT_S, before=before)
    ranks = load_ranks(measured)
    return Trained(
        name,
        plan,
        evaluate(job, cluster, plan),
        max(statistics.median(step.wall_s or 0.0 for step in rank.steady) for rank in ranks),
        tuple(statistics.median(_busy(ranks[stage.first_rank])) for stage in plan.stages),
    )


def _busy(rank: MeasuredRank) -> Iterator[float]:
    for step in rank.steady:
        yield sum(one.cpu_s or 0.0 for spans in (step.forward, step.backward, step.optimizer) for one in spans)
