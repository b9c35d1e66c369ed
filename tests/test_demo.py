"""The whole loop with real Megatron-Core: script, probe, tables, plan, launcher, training (``hapmoe demo``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hapmoe import tables
from hapmoe.demo import SLOW, Trained, demo
from hapmoe.errors import InputError
from hapmoe.lab.slow import slowed
from hapmoe.measured import Piece
from hapmoe.planfile import load_plan

LAYERS = 4


def rows(folder: Path, event: str) -> list[list[dict[str, Any]]]:
    """What each rank of a training wrote, in rank order."""
    ranks = [map(json.loads, path.read_text().splitlines()) for path in sorted(folder.glob("rank*.jsonl"))]
    return [[row for row in rank if row["event"] == event] for rank in ranks]


def test_profile_plan_launch_compare(tmp_path: Path) -> None:
    said: list[str] = []
    folder = tmp_path / "demo"
    best, uniform = demo(folder, said.append, layers=LAYERS, steps=3)
    assert [len(line.split(":")) for line in said[-2:]] == [2, 2] and len(said) == 5
    # the profile has seen that one kind is slower: its layers take about SLOW times as long
    pieces = {table.device_kind: table for table in tables.load(folder / "tables") if table.kind == "pieces"}
    assert set(pieces) == {"cpu-fast", "cpu-slow"}
    layer_s = {}
    for kind, table in pieces.items():
        times = {
            row.moe_layers: row.median_s for row in table.rows if isinstance(row, Piece) and row.phase == "backward"
        }
        assert set(times) == {1, 3}
        layer_s[kind] = (times[3] - times[1]) / 2
    assert layer_s["cpu-slow"] > (1 + SLOW) / 2 * layer_s["cpu-fast"]
    # so the plan gives it fewer layers; whatever is computed was measured, alone or as part of a sum
    split = {stage.pool: stage.num_layers for stage in best.plan.stages}
    assert sum(split.values()) == LAYERS and split["slow"] < LAYERS // 2 < split["fast"]
    assert best.estimate.step_s < uniform.estimate.step_s
    share = best.estimate.source_share
    assert share["measured"] > 0 and share["measured"] + share["interpolated"] > 0.95
    written = load_plan(folder / "plan" / "plan.json")
    assert written.stages == best.plan.stages and (folder / "plan" / "report.html").is_file()
    # both train what was planned, and the same model
    losses = []
    for trained in (best, uniform):
        assert isinstance(trained, Trained) and len(trained.busy_s) == 2 and trained.step_s > 0
        place = folder / f"{trained.name}-losses"
        held = [[layer for chunk in rank[0]["layers"] for layer in chunk] for rank in rows(place, "start")]
        assert [len(layers) for layers in held] == [stage.num_layers for stage in trained.plan.stages]
        assert sorted(layer for layers in held for layer in layers) == list(range(LAYERS))
        losses.append([row["loss"] for row in rows(place, "iteration")[0]])
    assert len(losses[0]) == 4 and losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_what_stands_in_the_way_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="exists already"):
        demo(tmp_path, print)
    monkeypatch.setattr("hapmoe.demo._installed", lambda name: name != "torch")
    with pytest.raises(InputError, match=r"torch is not installed; pip install 'hapmoe\[lab\]'"):
        demo(tmp_path / "new", print)
    assert not (tmp_path / "new").exists()


def test_slowness_is_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of its own: work of 2 s, then a look at the clock costs half a second."""
    now = [0.0]

    def clock() -> float:
        now[0] += 0.5
        return now[0]

    def work() -> str:
        now[0] += 2.0
        return "done"

    monkeypatch.setattr("hapmoe.lab.slow.time.process_time", clock)
    assert slowed(work) is work
    monkeypatch.setenv("HAPMOE_LAB_SLOW", "3")
    assert slowed(work)() == "done" and now[0] == 0.5 + 3 * 2.5
