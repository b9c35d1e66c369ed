"""Calibration: hidden errors of the model come out of training logs, and predictions of other runs get better."""

from __future__ import annotations

import json
import random
from pathlib import Path

import builders
import msgspec
import pytest

from hapmoe import tables
from hapmoe.calibration import Observed, calibrate, compare, observe, observe_probe, with_factors
from hapmoe.cost import evaluate
from hapmoe.errors import InputError
from hapmoe.job import JobSpec
from hapmoe.logs.megatron import read_log
from hapmoe.plan import Plan
from hapmoe.profiling.probed import load_ranks

JOB: JobSpec = builders.with_training(
    builders.with_model(
        builders.job(moe=8),
        hidden=2048,
        ffn_hidden=8192,
        head_dim=128,
        moe=msgspec.structs.replace(builders.job(moe=8).model.moe, ffn_hidden=4096),  # type: ignore[type-var]
    ),
    dispatcher="alltoall",
)
CLUSTER = builders.cluster(builders.pool(nodes=2))
PLANS = {
    "ep8": builders.plan(ep=8, dp=16),
    "ep2": builders.plan(ep=2, dp=16),
    "tp4": builders.plan(tp=4, ep=4, etp=1, dp=4),
    "pp2": builders.plan((4, 4), ep=4, dp=8),
    "mbs2": builders.plan(ep=4, dp=16, micro_batch_size=2),
}


def log_of(plan: Plan, factors: dict[str, float], seed: int, *, timers: bool = True) -> str:
    """A log of Megatron-Core 0.16 from a machine on which these terms take another time than ours say.

    1% of noise a step, a slow first one, one disturbed by something else.
    """
    chance = random.Random(seed)
    truth = evaluate(JOB, with_factors(JOB, CLUSTER, {("a100", term): value for term, value in factors.items()}), plan)
    lines = []
    for number in range(1, 13):
        step = truth.step_s * chance.gauss(1.0, 0.01) * (5.0 if number == 1 else 1.6 if number == 8 else 1.0)
        lines.append(
            f" [2026-03-01 10:00:00.1] iteration {number:8d}/     100 | consumed samples: {64 * number:12d} | "
            f"elapsed time per iteration (ms): {step * 1e3:.1f} | learning rate: 1.0E-06 | global batch size:    64 | "
            "number of skipped iterations:   0 | number of nan iterations:   0 |"
        )
        if timers:
            lines.append("(min, max) time across ranks (ms):")
            for name, value in (("forward-backward", step - truth.optimizer_s), ("optimizer", truth.optimizer_s)):
                lines.append(f"    {(name + ' ').ljust(48, '.')}: ({value * 990:.2f}, {value * 1000:.2f})")
    for rank in range(16):
        stage = truth.stages[rank * len(truth.stages) // 16]
        peak = (stage.memory_bytes + 3 * 2**30) / 2**20
        lines.append(
            f"[Rank {rank}] (after 2 iterations) memory (MB) | allocated: 100.00 | max allocated: {peak - 500:.2f} | "
            f"reserved: {peak:.2f} | max reserved: {peak:.2f}"
        )
    return "\n".join(lines) + "\n"


def observed(factors: dict[str, float], *names: str, timers: bool = True) -> list[Observed]:
    logs = {name: log_of(PLANS[name], factors, seed, timers=timers) for seed, name in enumerate(names)}
    return [observe(JOB, CLUSTER, PLANS[name], [read_log(text)], name) for name, text in logs.items()]


def test_hidden_factors_come_out() -> None:
    """Compute a third slower, communication twice as slow, the optimizer 1.5 times: from step times and timers."""
    hidden = {"compute": 1.3, "communication": 2.0, "optimizer": 1.5}
    found = calibrate(JOB, CLUSTER, observed(hidden, *PLANS))
    values = {term.term: term.value for term in found.terms}
    assert values == {term: pytest.approx(value, rel=0.1) for term, value in hidden.items()}
    # the optimizer's time is mostly the gather of parameters: its own part is known less well
    assert {term.term for term in found.terms if term.off} >= {"compute", "communication"}
    assert max(abs(term.error) for term in found.after if term.term == "step") < 0.03
    # every rank used 3 GiB more than was predicted
    assert found.workspace["a100"] == pytest.approx(3 * 2**30, rel=0.01)
    assert all(abs(term.error) < 0.01 for term in found.after if term.term.startswith("memory"))
    assert found.held_out is not None
    before, after = found.held_out
    assert before > 0.15 and after < 0.03


def test_what_is_right_stays_and_what_is_not_told_too() -> None:
    """A machine like the model: factors stay at 1. Without timers of the optimizer little is said of it."""
    found = calibrate(JOB, CLUSTER, observed({}, "ep8", "tp4", timers=False))
    assert not any(term.off for term in found.terms)
    assert {term.term: round(term.value, 1) for term in found.terms} == {
        "compute": 1.0,
        "communication": 1.0,
        "optimizer": 1.0,
    }
    sigma = {term.term: term.sigma for term in found.terms}
    assert sigma["compute"] < sigma["optimizer"]
    assert calibrate(JOB, CLUSTER, observed({}, "ep8")).held_out is None


def test_a_stage_that_is_slow_shows_itself() -> None:
    """Per-rank timers of --timing-log-level 2: the second of two stages computes twice as long as predicted."""
    plan = PLANS["pp2"]
    estimate = evaluate(JOB, CLUSTER, plan)
    text = log_of(plan, {}, 0, timers=False) + "times across ranks (ms):\n"
    microbatches = 64 // 8
    for way in ("forward", "backward"):
        text += f"  {way}-compute:\n"
        for rank in range(16):
            stage = estimate.stages[rank // 8]
            each_s = (1 + rank // 8) * (stage.forward_s if way == "forward" else stage.backward_s)
            text += f"     rank {rank:2d}: {microbatches * each_s * 1e3:.2f}\n"
    terms = {term.term: term for term in compare(JOB, CLUSTER, observe(JOB, CLUSTER, plan, [read_log(text)], "slow"))}
    assert abs(terms["forward of stage 0"].error) < 0.01 and abs(terms["backward of stage 0"].error) < 0.01
    assert terms["forward of stage 1"].error == pytest.approx(-0.5, abs=0.01)
    assert terms["backward of stage 1"].error == pytest.approx(-0.5, abs=0.01)


def test_the_probe_says_the_same(tmp_path: Path) -> None:
    """Two ranks, three steps of 2 microbatches; the first step is left out, the slower rank counts."""
    line = {"event": "step", "since_last_s": None, "tokens": [], "collectives": [], "memory": []}
    for rank in range(2):
        start = {"event": "start", "schema": 1, "rank": rank, "world_size": 2, "date": "2026-11-30T00:00:00Z"}
        start |= {"host": "h", "device": "cpu", "clock": "host", "versions": {}, "degrees": {}}
        steps = [
            line
            | {"step": step, "wall_s": 9.0 if step == 1 else 1.0 + rank, "forward": [{"wall_s": 0.1}] * 2}
            | {"backward": [{"wall_s": 0.2}, {"wall_s": 0.3 + rank}], "optimizer": [{"wall_s": 0.05}]}
            for step in (1, 2, 3)
        ]
        records = [start, *steps, {"event": "end", "steps": 3}]
        (tmp_path / f"rank{rank}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    plan, cluster = builders.plan(dp=2, ep=2), builders.cluster(builders.pool(devices_per_node=2))
    seen = observe_probe(JOB, cluster, plan, load_ranks(tmp_path), "probe")
    assert (seen.step_s, seen.timers, seen.steps) == (2.0, {"optimizer": 0.05}, 2)
    assert seen.passes == {(0, "forward"): pytest.approx(0.2), (0, "backward"): pytest.approx(1.5)}
    with pytest.raises(InputError, match="2 ranks, the plan has 16"):
        observe_probe(JOB, CLUSTER, PLANS["ep8"], load_ranks(tmp_path), "probe")


def test_a_log_of_another_job_is_refused() -> None:
    text = log_of(PLANS["ep8"], {}, 0).replace("global batch size:    64", "global batch size:   128")
    with pytest.raises(InputError, match="global batch of 128, the plan has 64"):
        observe(JOB, CLUSTER, PLANS["ep8"], [read_log(text)], "x.log")


def test_the_command_and_the_next_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from hapmoe.__main__ import cli

    def run(*words: str | Path) -> int:
        with cli.make_context("hapmoe", [str(word) for word in words]) as context:
            return int(cli.invoke(context))

    root = Path(__file__).parents[1]
    script, cluster = root / "examples" / "mixtral-8x7b.sh", root / "examples" / "clusters" / "h100.yaml"
    assert run("predict", script, "--cluster", cluster, "--json") in (0, 1)
    predicted = json.loads(capsys.readouterr().out)
    step, batch = predicted["estimate"]["step_s"], predicted["global_batch_size"]
    plan = {key: value for key, value in predicted.items() if key not in ("legal", "fits", "note", "violations")}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    line = f"/ 50 | elapsed time per iteration (ms): {1.4 * step * 1e3:.1f} | global batch size: {batch} |\n"
    (tmp_path / "train.log").write_text("".join(f" iteration {number}{line}" for number in range(1, 6)))
    words = ["calibrate", tmp_path / "plan.json", tmp_path / "train.log", "--script", str(script), "--cluster", cluster]
    assert run(*words, "--tables", tmp_path / "tables", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["compared"][0]["measured"] == pytest.approx(1.4 * step, rel=1e-3) and said["held_out"] is None
    assert [table.kind for table in tables.load(tmp_path / "tables")] == ["calibration"]
    assert run("predict", script, "--cluster", cluster, "--tables", tmp_path / "tables", "--json") in (0, 1)
    again = json.loads(capsys.readouterr().out)["estimate"]
    assert again["step_s"] == pytest.approx(1.4 * step, rel=0.02)
    assert again["source_share"]["extrapolated"] > 0.5
    assert any("calibrated on 1 runs" in note for note in again["assumptions"])
