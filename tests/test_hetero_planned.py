"""Unequal devices from the command line to the trained steps: the plan is found, launched, and does what it says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import torch
from bench.hetero import compare, crossings, train
from bench.lab import Case, Run, prepare
from one_host import environment

import hapmoe
from hapmoe.plan import Plan
from hapmoe.planfile import load_plan
from hapmoe.planning import plan_job
from hapmoe.resolve import resolve

CLUSTER = """\
pools:
  - {name: fast, device: {like: cpu, name: cpu-fast, peak: {fp32: 100 GFLOP/s}}, nodes: 1, devices_per_node: 1,
     hosts: [first]}
  - {name: slow, device: {like: cpu, name: cpu-slow}, nodes: 1, devices_per_node: 2, hosts: [second]}
links:
  - {between: [fast, slow], bandwidth: 10 Gb/s, latency: 50 us, transport: gloo}
"""
ALONE = Case("one rank", mbs=4, flags={"--train-iters": "4", "--lr": "1e-3", "--global-batch-size": "16"})


def test_the_chosen_plan_trains_as_one_rank_and_sends_what_was_predicted(tmp_path: Path) -> None:
    prepare(ALONE, tmp_path)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    around = environment(tmp_path) | {"HAPMOE_LAB_OUT": str(tmp_path / "out"), "HAPMOE_LAB_PARAMETERS": "1"}
    words = ["plan", "train.sh", "--cluster", "cluster.yaml", "--backend", "megatron-hetero", "--out", "plan"]
    said = _run([sys.executable, "-m", "hapmoe", *words], tmp_path, around)
    assert re.search(r"the same degrees on all +\d+ ms +1\.\d+ x faster", said), said
    plan = load_plan(tmp_path / "plan" / "plan.json")
    assert {(stage.pool, stage.dp) for stage in plan.stages} == {("fast", 1), ("slow", 2)}

    _run(["bash", "plan/launch.sh"], tmp_path, around)
    found = _trained(tmp_path, plan)
    outcome = compare(found, train(ALONE))
    assert outcome.good, outcome
    # 16 samples of 64 tokens, 64 wide, fp32, in four steps; the first stage sends all of its chunks on
    first = found.rows("end")[0][0]["crossed"]
    assert first["forward_bytes"] == 4 * plan.vpp * 16 * 64 * 64 * 4
    assert crossings(found)[1] == (first["forward_bytes"], first["forward_bytes"])


def test_a_plan_says_what_unequal_degrees_gain_over_equal_ones(tmp_path: Path) -> None:
    """Equal degrees are what the plain back end finds; that one names what it did not search."""
    prepare(ALONE, tmp_path)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    job, cluster = hapmoe.extract(tmp_path / "train.sh"), hapmoe.load_cluster(tmp_path / "cluster.yaml")
    plain, unequal = (plan_job(job, cluster, backend=name) for name in ("megatron", "megatron-hetero"))
    (alike,) = (one.step_s for one in unequal.comparisons if one.name == "the same degrees on all stages")
    assert plain.result.estimate is not None and unequal.result.estimate is not None
    assert alike == plain.result.estimate.step_s > unequal.result.estimate.step_s
    (said,) = (one for one in plain.comparisons if one.missing == "not searched")
    assert said.step_s is None and "--backend megatron-hetero" in said.note


def _run(words: list[str], folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def _trained(folder: Path, plan: Plan) -> Run:
    """What the ranks of the launch wrote."""
    job, cluster = hapmoe.extract(folder / "train.sh"), hapmoe.load_cluster(folder / "cluster.yaml")
    plan = resolve(job, cluster, plan)
    meshes = tuple({name: getattr(stage, name) for name in ("tp", "cp", "ep", "etp", "dp")} for stage in plan.stages)
    samples = plan.stages[0].dp * (plan.stages[0].micro_batch_size or plan.micro_batch_size)
    layers = tuple(stage.num_layers for stage in plan.stages)
    case = Case("planned", layers, vpp=plan.vpp, mbs=samples, meshes=meshes)
    paths = [folder / "out" / f"rank{rank}" for rank in range(case.ranks)]
    rows = tuple(tuple(map(json.loads, one.with_suffix(".jsonl").read_text().splitlines())) for one in paths)
    return Run(case, job, plan, rows, tuple(torch.load(one.with_suffix(".pt")) for one in paths))
