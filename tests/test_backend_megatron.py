"""The plan as Megatron's arguments: what is kept, what is replaced, and layouts by its own parser."""

from __future__ import annotations

import builders as b
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron_oracle import config_from, parse

from hapmoe.backends import BACKENDS, capabilities, load, version_tuple
from hapmoe.backends.layout import layout_string, parse_layout
from hapmoe.backends.megatron import launchable, stage_arguments
from hapmoe.errors import InputError, Unsupported
from hapmoe.job import JobSpec
from hapmoe.plan import Plan, Recompute
from hapmoe.resolve import resolve

NODES = b.cluster()


def words(job: JobSpec, plan: Plan) -> list[str | None]:
    common, _ = stage_arguments(job, resolve(job, NODES, plan))
    return [argument.text for argument in common]


def test_users_words_stay_verbatim_and_in_order() -> None:
    job = b.job(
        argv="--num-layers 8 --tensor-model-parallel-size 4 --recompute-modules core_attn mlp --bf16 "
        "--micro-batch-size=2 --lr -1e-4 --tensor-model-parallel-size 8 --sequence-parallel --save $(date) "
        "--recompute-activations --global-batch-size 64 positional --made-up-flag a b",
    )
    common, per_stage = stage_arguments(job, resolve(job, NODES, b.plan(dp=8, ep=4)))
    kept = "--num-layers 8 --bf16 --lr -1e-4 --save $(date) --global-batch-size 64 positional --made-up-flag a b"
    owned = (
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --context-parallel-size 1 "
        "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --micro-batch-size 1"
    )
    assert [argument.text or argument.source for argument in common] == f"{kept} {owned}".split()
    assert per_stage == ((),)


def test_words_that_the_plan_owns_are_dropped_by_their_owner_too() -> None:
    given_words = tuple(
        b.Argument(text=text, owner=owner)
        for text, owner in (("--fork-spelling-of-tp", "plan"), ("4", "plan"), ("--bf16", "user"))
    )
    job = b.job()
    job = b.msgspec.structs.replace(job, argv=given_words)
    assert words(job, b.plan(dp=8, ep=4))[0] == "--bf16"


def test_flags_with_a_value_that_is_not_known_yet() -> None:
    inline = b.Argument(text=None, source='"--micro-batch-size=$(size)"')
    kept = b.Argument(text=None, source="--global-batch-size=$(size)")
    job = b.msgspec.structs.replace(b.job(), argv=(inline, kept))
    common, _ = stage_arguments(job, resolve(job, NODES, b.plan(dp=8)))
    assert common[0] == kept
    assert "--global-batch-size" not in [argument.text for argument in common]


def test_global_batch_of_the_plan_where_the_script_has_none() -> None:
    assert "--global-batch-size" in words(b.job(), b.plan(dp=8))
    assert "--global-batch-size" not in words(b.job(argv="--global-batch-size=64"), b.plan(dp=8))[1:]


@pytest.mark.parametrize(
    ("job", "tp", "expected"),
    [
        (b.job(), 2, True),
        (b.job(sequence_parallel=True), 1, False),
        (b.job(moe=None), 2, True),
        (b.job(moe=None, tp=2), 2, False),
        (b.job(moe=None, sequence_parallel=True), 2, True),
    ],
)
def test_sequence_parallel(job: JobSpec, tp: int, expected: bool) -> None:
    found = words(job, b.plan(tp=tp, dp=4, etp=tp if job.model.moe else 1))
    assert ("--sequence-parallel" in found) == expected
    assert ("--expert-tensor-parallel-size" in found) == (job.model.moe is not None)


def test_recomputation_is_per_stage_and_nothing_else_is() -> None:
    settings_ = (
        Recompute(granularity="full", method="block", num_layers=2),
        Recompute(granularity="selective", modules=("core_attn", "moe_act")),
        Recompute(),
        Recompute(granularity="selective"),
    )
    job = b.job()
    _, per_stage = stage_arguments(job, resolve(job, NODES, b.plan((2, 2, 2, 2), dp=8, recompute=settings_)))
    assert [" ".join(stage) for stage in per_stage] == [
        "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
        "--recompute-granularity selective --recompute-modules core_attn moe_act",
        "",
        "--recompute-granularity selective",
    ]


def test_old_versions_split_evenly_without_a_layout() -> None:
    job = b.with_training(b.job(), megatron_version="0.12.0")
    found = words(job, b.plan((4, 4), dp=8, vpp=2))
    assert found[found.index("--num-layers-per-virtual-pipeline-stage") + 1] == "2"
    assert "--pipeline-model-parallel-layout" not in found


def test_documented_layouts() -> None:
    def layout(layers: tuple[int, ...], vpp: int = 1, mtp: int = 0) -> str:
        job = b.with_model(b.job(), num_layers=sum(layers), mtp_layers=mtp)
        return layout_string(resolve(job, NODES, b.plan(layers, vpp=vpp)), mtp)

    assert layout((5, 9, 9, 9)) == "Et*5|t*9|t*9|t*9L"
    assert layout((5, 9, 9, 9), vpp=2) == "Et*2|t*4|t*4|t*4|t*3|t*5|t*5|t*5L"
    assert layout((13, 18, 18, 12), mtp=1) == "Et*13|t*18|t*18|t*12mL"
    assert layout((1, 0, 2)) == "Et||t*2L"


@settings(max_examples=400, deadline=None)
@given(data=st.data(), stages=st.integers(1, 8), vpp=st.integers(1, 4), mtp=st.integers(0, 2))
def test_layouts_by_megatrons_parser(data: st.DataObject, stages: int, vpp: int, mtp: int) -> None:
    sizes = [data.draw(st.lists(st.integers(0, 11), min_size=vpp, max_size=vpp)) for _ in range(stages)]
    first, rows = 0, [[(0, 0)] * vpp for _ in range(stages)]
    for chunk in range(vpp):
        for stage in range(stages):
            rows[stage][chunk] = (first, sizes[stage][chunk])
            first += sizes[stage][chunk]
    plan = b.plan(
        tuple(map(sum, sizes)), vpp=vpp, stages=tuple({"virtual_layers": tuple(map(tuple, row))} for row in rows)
    )
    text = layout_string(plan, mtp)
    parsed = PipelineParallelLayerLayout(text, stages)
    assert [[chunk.count(LayerType.decoder) for chunk in row] for row in parsed.layout] == sizes
    parsed.validate_layer_layout(first, mtp or None)
    offsets = [0]
    for letters in parse_layout(text):
        offsets.append(offsets[-1] + letters.count("t"))
    assert [[row[chunk][0] for row in rows] for chunk in range(vpp)] == [
        offsets[chunk * stages : (chunk + 1) * stages] for chunk in range(vpp)
    ]


@pytest.mark.parametrize("text", ["Et*2|(tt|)*3,m|L", "E|t*16|t*16|L", "Et(t|t)*2tL"])
def test_our_parser_reads_what_megatron_reads(text: str) -> None:
    letters = {LayerType.embedding: "E", LayerType.decoder: "t", LayerType.mtp: "m", LayerType.loss: "L"}
    theirs = PipelineParallelLayerLayout.parse_str_to_list(text)
    assert list(parse_layout(text)) == ["".join(letters[layer] for layer in stage) for stage in theirs]


def test_a_quoted_layout_is_refused() -> None:
    with pytest.raises(InputError, match="quotes and spaces"):
        parse_layout("'EttL'")


def test_emitted_arguments_make_a_configuration() -> None:
    recompute = (Recompute(granularity="full", method="uniform", num_layers=1), Recompute())
    job = b.with_model(b.job(), mtp_layers=1)
    plan = resolve(job, NODES, b.plan((3, 5), tp=2, dp=4, ep=4, vpp=2, recompute=recompute))
    common, per_stage = stage_arguments(job, plan)
    for index, stage in enumerate(per_stage):
        args = parse([argument.text or "" for argument in common] + list(stage))
        config = config_from(
            args, num_layers=8, hidden_size=256, num_attention_heads=16, num_moe_experts=8, mtp_num_layers=1
        )
        assert config.virtual_pipeline_model_parallel_size == 2
        layout = config.pipeline_model_parallel_layout.layout[index]
        assert tuple(chunk.count(LayerType.decoder) for chunk in layout) == tuple(
            n for _, n in plan.stages[index].virtual_layers
        )
        assert config.recompute_granularity == ("full" if index == 0 else None)


def test_launchable() -> None:
    pools = b.cluster(b.pool("a100"), b.pool("h800"), b.pool("ascend"), links=(("h800", "ascend"),))
    one_vendor = b.plan((4, 4), pools=("a100", "h800"), dp=8)
    assert launchable(b.job(), pools, one_vendor) == (True, "")
    possible, reason = launchable(b.job(), pools, b.plan((4, 4), pools=("h800", "ascend"), dp=8))
    assert not possible
    assert reason == "Megatron-LM upstream cannot join nccl and hccl in one job: nccl (h800), hccl (ascend)"
    possible, reason = launchable(b.job(), pools, b.plan((4, 4), pools=("a100", "h800"), stages=({"dp": 8}, {"dp": 4})))
    assert not possible and "one set of parallel degrees" in reason


def test_back_ends_by_name() -> None:
    assert all(capabilities(name).name == name for name in BACKENDS)
    assert load("megatron").launchable is launchable
    with pytest.raises(Unsupported):
        load("any")
    with pytest.raises(InputError, match=r"one of megatron, .*galvatron, any"):
        capabilities("deepspeed")


@pytest.mark.parametrize(("older", "newer"), [("0.9", "0.12.0"), ("core_r0.16.1", "v0.20.0.dev1"), ("0.16", "0.16.1")])
def test_versions_compare_by_number(older: str, newer: str) -> None:
    assert version_tuple(older) < version_tuple(newer)
