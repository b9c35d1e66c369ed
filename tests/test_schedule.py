"""Timelines against an independent simulation, bounds against timelines."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pipeline_simulation as simulation
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hapmoe.schedule import in_flight, interleaved_ends, one_f_one_b_ends, timeline_of
from hapmoe.search.bounds import pipeline_bound

seconds = st.floats(0.01, 3.0)


@st.composite
def pipelines(draw: st.DrawFn, most_vpp: int = 1) -> tuple:
    pp = draw(st.integers(1 if most_vpp == 1 else 2, 6))
    vpp = draw(st.integers(1 if most_vpp == 1 else 2, most_vpp))
    microbatches = draw(st.integers(1, 14)) if vpp == 1 else pp * draw(st.integers(1, 12))
    chunk = st.lists(seconds, min_size=vpp, max_size=vpp)
    forward = draw(st.lists(chunk, min_size=pp, max_size=pp))
    backward = draw(st.lists(chunk, min_size=pp, max_size=pp))
    send = draw(st.lists(st.sampled_from([0.0, 0.01, 0.3, 2.0]), min_size=pp, max_size=pp))
    return forward, backward, send, microbatches


@settings(max_examples=400, deadline=None)
@given(pipelines())
def test_1f1b_equals_simulation(pipeline: tuple) -> None:
    forward, backward, send, microbatches = pipeline
    flat = [row[0] for row in forward], [row[0] for row in backward], send[:-1], microbatches
    assert one_f_one_b_ends(*flat) == pytest.approx(simulation.one_f_one_b(*flat), rel=1e-9)


@settings(max_examples=250, deadline=None)
@given(pipelines(most_vpp=4))
def test_interleaved_equals_simulation(pipeline: tuple) -> None:
    forward, backward, send, microbatches = pipeline
    pp = len(forward)
    ours = interleaved_ends(forward, backward, send, microbatches, pp)
    assert ours == pytest.approx(simulation.interleaved(forward, backward, send, microbatches, pp), rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(pipelines(most_vpp=3), st.integers(20, 60))
def test_long_interleaved_runs_are_not_cut_short(pipeline: tuple, rounds: int) -> None:
    """The shortcut for many microbatches gives what playing every event gives."""
    forward, backward, send, _ = pipeline
    pp = len(forward)
    timeline = timeline_of(forward, backward, send, rounds * pp, pp)  # plays everything
    played = [max(e.end_s for e in timeline.events if e.stage == stage and e.kind == "backward") for stage in range(pp)]
    assert interleaved_ends(forward, backward, send, rounds * pp, pp) == pytest.approx(played, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(pipelines(most_vpp=1), st.integers(20, 300))
def test_long_runs_are_not_cut_short(pipeline: tuple, microbatches: int) -> None:
    """The same without virtual stages, where rounds that repeat are skipped."""
    forward, backward, send, _ = pipeline
    flat = [row[0] for row in forward], [row[0] for row in backward], send[: len(forward) - 1], microbatches
    assert one_f_one_b_ends(*flat) == pytest.approx(simulation.one_f_one_b(*flat), rel=1e-9)


@settings(max_examples=150, deadline=None)
@given(pipelines(most_vpp=3))
def test_events_are_a_schedule(pipeline: tuple) -> None:
    """Every pass once, no stage does two passes at once, and dependencies are kept."""
    forward, backward, send, microbatches = pipeline
    pp, vpp = len(forward), len(forward[0])
    timeline = timeline_of(forward, backward, send, microbatches, pp, grad_sync=[0.1] * pp, optimizer_s=0.2)
    passes = [e for e in timeline.events if e.kind in ("forward", "backward")]
    assert len({(e.kind, e.stage, e.chunk, e.microbatch) for e in passes}) == len(passes) == 2 * pp * vpp * microbatches
    for stage in range(pp):
        mine = sorted((e for e in passes if e.stage == stage), key=lambda e: e.start_s)
        assert all(b.start_s >= a.end_s - 1e-9 for a, b in pairwise(mine))
    end = {(e.kind, e.stage, e.chunk, e.microbatch): e.end_s for e in passes}
    for e in passes:
        if e.kind == "forward" and e.stage:
            assert e.start_s >= end["forward", e.stage - 1, e.chunk, e.microbatch] + send[e.stage - 1] - 1e-9
        if e.kind == "backward" and e.stage < pp - 1:
            assert e.start_s >= end["backward", e.stage + 1, e.chunk, e.microbatch] + send[e.stage] - 1e-9
    assert timeline.end_s == pytest.approx(max(e.end_s for e in passes) + 0.1 + 0.2, rel=1e-9)


def test_bounds_never_exceed_the_timeline() -> None:
    """10,000 random heterogeneous pipelines, with and without virtual stages."""
    rng = random.Random(7)
    tightness = []
    for _ in range(10_000):
        vpp = rng.choice([1, 1, 2, 3])
        pp = rng.randint(1 if vpp == 1 else 2, 8)
        microbatches = rng.randint(1, 24) if vpp == 1 else pp * rng.randint(1, 4)
        spread = rng.choice([0.05, 0.5, 1.0])
        forward = [[rng.uniform(1 - spread, 1 + spread) for _ in range(vpp)] for _ in range(pp)]
        backward = [[rng.uniform(2 - spread, 2 + spread) for _ in range(vpp)] for _ in range(pp)]
        send = [rng.choice([0.0, 0.3, 1.5]) * rng.random() for _ in range(pp)]
        times = np.asarray([forward]), np.asarray([backward]), np.asarray(send), microbatches
        group, extra = pp * rng.randint(1, 2), rng.randint(0, 1)
        bound = pipeline_bound(*times, group=group, extra=extra)[0]
        if vpp == 1:
            ends = one_f_one_b_ends([row[0] for row in forward], [row[0] for row in backward], send[:-1], microbatches)
        else:
            ends = interleaved_ends(forward, backward, send, microbatches, group, extra=extra)
        assert bound <= ends[0] * (1 + 1e-12), (pp, vpp, microbatches, send)
        sync = [rng.choice([0.0, 1.0, 10.0]) * rng.random() for _ in range(pp)]
        synced = max(end + wait for end, wait in zip(ends, sync, strict=True))
        assert pipeline_bound(*times, np.asarray([sync]), group, extra)[0] <= synced * (1 + 1e-12), (
            pp,
            vpp,
            microbatches,
            send,
            sync,
        )
        tightness.append(bound / ends[0])
    assert np.median(tightness) > 0.9  # a bound of zero would pass the line above


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 12), st.data())
def test_microbatches_in_flight_equal_the_simulated_peak(pp: int, vpp: int, rounds: int, data: st.DataObject) -> None:
    """Weights per chunk: the peak over all moments of the played schedule, freed when a backward ends."""
    microbatches = rounds * pp if vpp > 1 else rounds
    weights = data.draw(st.lists(st.floats(0.1, 5.0), min_size=vpp, max_size=vpp))
    timeline = timeline_of([[1.0] * vpp] * pp, [[2.0] * vpp] * pp, [0.1] * pp, microbatches, pp)
    for stage in range(pp):
        passes = sorted(
            (e for e in timeline.events if e.stage == stage and e.kind in ("forward", "backward")),
            key=lambda e: e.start_s,
        )
        held = peak = 0.0
        for e in passes:
            if e.kind == "forward":
                held += weights[e.chunk]
                peak = max(peak, held)
            else:
                held -= weights[e.chunk]
        vectors = in_flight(pp, vpp, stage, microbatches, pp)
        assert max(sum(n * w for n, w in zip(v, weights, strict=True)) for v in vectors) == pytest.approx(peak)


def test_balanced_pipelines_take_the_textbook_time() -> None:
    """Free sends: warm-up, M rounds and drain, (M + pp - 1)(f + b) (PipeDream-Flush)."""
    assert one_f_one_b_ends([1.0] * 4, [2.0] * 4, [0.0] * 3, 8)[0] == pytest.approx((8 + 4 - 1) * 3.0)
    # interleaving divides the bubble by vpp (Narayanan et al. 2021, eq. 3)
    ends = interleaved_ends([[0.5, 0.5]] * 4, [[1.0, 1.0]] * 4, [0.0] * 4, 8, 4)
    assert ends[0] == pytest.approx(8 * 3.0 + 3 * 3.0 / 2)
