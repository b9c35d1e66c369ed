"""Volumes that the model predicts against those of real Megatron-Core runs; ``python -m bench.volumes`` has all."""

from __future__ import annotations

import pytest
from bench.lab import run
from bench.volumes import TOLERANCE, compare
from bench.volumes_cases import CASES

CHOSEN = (
    "MLA, shared expert, dense first",
    "tp2 ep2 allgather",
    "pp2 vpp2 ep2 dp2, full block 1",
)


@pytest.mark.parametrize("name", CHOSEN)
def test_predicted_volumes_are_measured(name: str) -> None:
    (case,) = (case for case in CASES if case.name == name)
    rows = compare(run(case, measure=True))
    quantities = {row.quantity.partition(":")[0] for row in rows}
    assert {"layers as planned", "parameters", "kept"} <= quantities
    wrong = [row for row in rows if row.error > TOLERANCE]
    assert not wrong, wrong
    # calls, parameters and layers are whole numbers: equal, not near
    exact = [row for row in rows if not row.quantity.endswith("bytes") and not row.quantity.startswith("kept")]
    assert all(row.error == 0 for row in exact)


def test_every_degree_and_dispatcher_is_covered() -> None:
    assert len(CASES) >= 25
    for degree in ("tp", "cp", "ep", "etp", "dp", "vpp", "mbs"):
        assert any(getattr(case, degree) > 1 for case in CASES), degree
    assert {len(case.layers) for case in CASES} >= {1, 2, 4}
    assert {case.flags.get("--moe-token-dispatcher-type", "alltoall") for case in CASES} >= {"alltoall", "allgather"}
    kinds = {(again.granularity, again.method, again.modules) for case in CASES for again in case.recompute}
    assert len(kinds) >= 6
