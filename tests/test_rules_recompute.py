"""Uniform recomputation: our verdict on its units is what Megatron-Core's own loop does with them."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import builders as b
import pytest

from hapmoe.plan import Recompute
from hapmoe.pricing import recompute_menu
from hapmoe.rules import check

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import tensor_parallel
    from megatron.core.transformer.transformer_block import TransformerBlock


def run(layers: int, unit: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Layers that ``_checkpointed_forward`` calls, in order, in a block of ``layers``."""
    called: list[int] = []

    def layer(index: int) -> object:
        def forward(hidden_states: object, context: object, **_: object) -> tuple[object, object]:
            called.append(index)
            return hidden_states, context

        return forward

    made = [layer(index) for index in range(layers)]
    config = SimpleNamespace(
        recompute_method="uniform",
        recompute_num_layers=unit,
        fp8=None,
        fp4=None,
        distribute_saved_activations=False,
    )
    block = SimpleNamespace(config=config, num_layers_per_pipeline_rank=layers, _get_layer=made.__getitem__)
    monkeypatch.setattr(tensor_parallel, "checkpoint", lambda function, _, *values: function(*values))
    TransformerBlock._checkpointed_forward(block, 0, None, None, None, None, None, None, False)
    return called


@pytest.mark.parametrize("layers", range(5))
@pytest.mark.parametrize("unit", [1, 2, 3])
def test_units_that_do_not_divide_run_past_the_last_layer(
    layers: int, unit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Recompute(granularity="full", method="uniform", num_layers=unit)
    job = b.with_training(b.job(), megatron_version="0.16.1")
    virtual = ((0, 4 - layers), (4, layers)), ((4 - layers, layers), (4 + layers, 4 - layers))
    split = {"virtual_layers": virtual[0]}, {"virtual_layers": virtual[1], "first_layer": 4 - layers}
    plan = b.plan((4, 4), dp=8, ep=4, vpp=2, recompute=(full, Recompute()), stages=split)
    refused = {violation.rule for violation in check(job, b.cluster(), plan)}
    assert refused <= {"recompute-units"}
    broken = False
    for count in (layers, 4 - layers):
        try:
            assert run(count, unit, monkeypatch) == list(range(count))
        except IndexError:
            broken = True
    assert broken == bool(refused)


def test_the_search_proposes_no_units() -> None:
    assert {entry.method for entry in recompute_menu(b.job())} == {None, "block"}
