"""Uniform recomputation: our verdict on its units is what Megatron-Core's own loop does with them."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import builders as b
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron_oracle import config_refuses

from hapmoe.plan import Recompute
from hapmoe.pricing import recompute_menu
from hapmoe.rules import check
from hapmoe.rules.recompute import cannot_recompute
from hapmoe.search import pose_for

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import tensor_parallel
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator
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


MENU = (
    Recompute(),
    Recompute(granularity="full", method="block", num_layers=1),
    *(Recompute(granularity="selective", modules=(name,)) for name in ("core_attn", "mlp", "moe", "moe_act")),
)


@pytest.mark.parametrize("recompute", MENU, ids=lambda r: " ".join((r.granularity, *r.modules)))
@pytest.mark.parametrize(
    ("argv", "values"),
    [
        ("--cpu-offloading-num-layers 2", {"cpu_offloading": True, "cpu_offloading_num_layers": 2}),
        ("--cuda-graph-impl local", {"cuda_graph_impl": "local", "cuda_graph_scope": "full"}),
        ("--cuda-graph-impl local --cuda-graph-scope attn", {"cuda_graph_impl": "local", "cuda_graph_scope": "attn"}),
        (
            "--cuda-graph-impl local --cuda-graph-scope full_iteration",
            {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"},
        ),
        (
            "--cuda-graph-impl transformer_engine --cuda-graph-scope attn moe_router",
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn,moe_router"},
        ),
        (
            "--fine-grained-activation-offloading --offload-modules moe_act",
            {"fine_grained_activation_offloading": True, "offload_modules": ["moe_act"]},
        ),
    ],
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_arguments_that_exclude_recomputation(
    argv: str, values: dict[str, object], dropout: float, recompute: Recompute
) -> None:
    """As TransformerConfig of Megatron-Core 0.16.1 judges them."""
    job = b.job(argv=f"{argv} --attention-dropout {dropout} --hidden-dropout {dropout}")
    graphs = "full" if "full_iteration" in argv else "layers" if "graph" in argv else "none"
    ours = cannot_recompute(b.with_training(job, cuda_graphs=graphs), recompute)
    granularity = None if recompute.granularity == "none" else recompute.granularity
    theirs = config_refuses(
        num_layers=8,
        hidden_size=256,
        num_attention_heads=16,
        num_moe_experts=8,
        moe_ffn_hidden_size=512,
        moe_grouped_gemm=True,
        add_bias_linear=False,
        attention_dropout=dropout,
        hidden_dropout=dropout,
        recompute_granularity=granularity,
        recompute_method=recompute.method,
        recompute_num_layers=recompute.num_layers or None,
        recompute_modules=list(recompute.modules) or None,
        **values,
    )
    later = "offload" in argv and recompute.modules == ("moe",) and "fine" in argv  # refused from 0.18 on
    assert bool(ours) == bool(theirs) or (later and ours and not theirs), (ours, theirs)


def test_what_arguments_exclude_is_not_searched() -> None:
    job = b.with_training(b.job(), cuda_graphs="layers", global_batch_size=16)
    problem = pose_for(job, b.cluster(b.pool()), "megatron", ())
    for entry, allowed in zip(problem.tables[0].menu, problem.allowed, strict=True):
        assert allowed == (not cannot_recompute(job, entry))
    assert problem.allowed[0] and not problem.allowed[-1]


@settings(max_examples=150, deadline=None)
@given(
    start=st.integers(1, 12),
    step=st.integers(1, 6),
    total=st.integers(1, 12),
    mbs=st.integers(1, 3),
    dp=st.sampled_from([1, 2, 4]),
)
def test_ramps_as_megatrons_calculator_judges_them(start: int, step: int, total: int, mbs: int, dp: int) -> None:
    start, step, total = 4 * start, 2 * step, 4 * (start + total)
    job = b.job(moe=None, argv=f"--rampup-batch-size {start} {step} 1000")
    plan = b.plan(dp=dp, micro_batch_size=mbs)
    ours = {v.rule for v in check(b.with_training(job, global_batch_size=total), b.cluster(), plan)}
    assume((total - start) % step == 0)  # refused when the calculator is made
    refused = False
    try:
        ramp = RampupBatchsizeNumMicroBatchesCalculator(total, mbs, dp, False, 1, start, step, 1000)
        for consumed in range(0, 1200, 10):
            ramp.update(consumed, True)
    except AssertionError:
        refused = True
    assert bool(ours & {"batch-ramp", "global-batch"}) == refused


def test_the_search_proposes_no_units() -> None:
    assert {entry.method for entry in recompute_menu(b.job())} == {None, "block"}
