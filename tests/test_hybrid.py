"""HybridModel patterns: read as decoder layers, and emitted as each version of Megatron takes them."""

from __future__ import annotations

from pathlib import Path

import builders as b
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.ssm.mamba_hybrid_layer_allocation import allocate_layers

import hapmoe
from hapmoe.backends.megatron import stage_arguments
from hapmoe.errors import InputError, Unsupported
from hapmoe.hybrid import read_hybrid
from hapmoe.job import JobSpec
from hapmoe.plan import Plan, Recompute
from hapmoe.planning import plan_job
from hapmoe.resolve import resolve
from hapmoe.rules import check

SCRIPT = """#!/bin/bash
torchrun --nproc-per-node 8 pretrain_hybrid.py --num-layers 99 --hidden-size 1024 --num-attention-heads 16 \\
  --seq-length 4096 --max-position-embeddings 4096 --vocab-size 32000 --bf16 \\
  --micro-batch-size 1 --global-batch-size 64 \\
  --position-embedding-type rope --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm \\
  --moe-token-dispatcher-type alltoall --pipeline-model-parallel-size 2 --disable-bias-linear \\
  """


def job_of(folder: Path, words: str) -> JobSpec:
    (folder / "train.sh").write_text(SCRIPT + words + "\n")
    return hapmoe.extract(folder / "train.sh")


def select_pipeline_segment(main_pattern: str, pp_size: int, pp_rank: int, vp_stage: int) -> tuple[str, int]:
    """(layers, offset): the part of Megatron-LM's function of this name (d98e8a64) for patterns with pipes."""
    segments = main_pattern.split("|")
    assert len(segments) % pp_size == 0
    index = vp_stage * pp_size + pp_rank
    assert set(main_pattern) <= set("MGD*+-E|")
    return segments[index], sum(len(segments[i]) for i in range(index))


def test_a_pattern_is_read_as_decoder_layers(tmp_path: Path) -> None:
    job = job_of(tmp_path, "--hybrid-layer-pattern '*-*E*E|*E*-*E*E*E/*E/*E'")
    assert job.model.num_layers == 8 and job.model.mtp_layers == 2
    assert job.model.moe is not None
    assert job.model.moe.pattern == (False, True, True, True, False, True, True, True)
    assert job.present.layout == "Ettt|tttttmmL"
    dense = job_of(tmp_path, "--hybrid-layer-pattern *-*-*-*-").model
    assert dense.moe is None and dense.num_layers == 4


@pytest.mark.parametrize("pattern", ["M*ME", "*E*", "E*E*", "*EE", "*E/*", "*E/*E*E", "*E+E", "G-*-", "", "|", "x"])
def test_other_models_are_refused(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(Unsupported, match=r"hybrid .Mamba. models are not modelled"):
        job_of(tmp_path, f"--hybrid-layer-pattern '{pattern}'")


def test_what_contradicts_itself(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="does not train a decoder-only"):
        job_of(tmp_path, "--is-hybrid-model")
    with pytest.raises(Unsupported, match="does not train a decoder-only"):
        job_of(tmp_path, "")
    with pytest.raises(InputError, match=r"layers with experts .E., and --num-experts is absent"):
        (tmp_path / "train.sh").write_text(SCRIPT.replace("--num-experts 8", "") + "--hybrid-layer-pattern '*E*E'\n")
        hapmoe.extract(tmp_path / "train.sh")


def words(job: JobSpec, plan: Plan) -> tuple[list[str], list[str]]:
    common, per_stage = stage_arguments(job, resolve(job, b.cluster(), plan))
    return [argument.text or "" for argument in common], [" ".join(stage) for stage in per_stage]


@settings(max_examples=200, deadline=None)
@given(data=st.data(), stages=st.integers(2, 5), vpp=st.integers(1, 3), mtp=st.booleans())
def test_every_stage_builds_its_layers(data: st.DataObject, stages: int, vpp: int, mtp: bool) -> None:
    """From 0.17 on bars split the pattern, chunk by chunk; the tail stays."""
    sizes = [data.draw(st.lists(st.integers(0, 4), min_size=vpp, max_size=vpp)) for _ in range(stages)]
    total = sum(map(sum, sizes))
    letters = "".join("*" + data.draw(st.sampled_from("E-")) for _ in range(total)) or "*E"
    first, rows = 0, [[(0, 0)] * vpp for _ in range(stages)]
    for chunk in range(vpp):
        for stage in range(stages):
            rows[stage][chunk] = (first, sizes[stage][chunk])
            first += sizes[stage][chunk]
    plan = b.plan(
        tuple(map(sum, sizes)), vpp=vpp, stages=tuple({"virtual_layers": tuple(map(tuple, row))} for row in rows)
    )
    job = b.job(argv=f"--num-layers 9 --hybrid-override-pattern {letters}{'/*E' if mtp else ''}")
    common, _ = words(job, plan)
    assert "--hybrid-override-pattern" not in common and "--pipeline-model-parallel-layout" not in common
    main, *rest = common[common.index("--hybrid-layer-pattern") + 1].split("/")
    assert rest == (["*E"] if mtp else [])
    for stage in range(stages):
        for chunk in range(vpp):
            begin, count = rows[stage][chunk]
            built, offset = select_pipeline_segment(main, stages, stage, chunk)
            assert (built, offset) == (letters[2 * begin : 2 * (begin + count)], 2 * begin)


def test_old_versions_get_what_they_read() -> None:
    """Until 0.16: the old flag, one even split; whole layers are recomputed from 0.18 on."""
    pattern = "*E*E*-*E*E*E*E*E"
    full = Recompute(granularity="full", method="block", num_layers=3)
    for version, layers, vpp, recompute, legal in (
        ("0.16.1", (4, 4), 1, Recompute(), True),
        ("0.12.0", (4, 4), 1, Recompute(), True),
        ("0.16.1", (5, 3), 1, Recompute(), False),
        ("0.16.1", (4, 4), 2, Recompute(), False),
        ("0.16.1", (4, 4), 1, full, False),
        ("0.17.0", (5, 3), 1, Recompute(), True),
        ("0.17.0", (5, 3), 1, full, False),
        ("0.18.0", (5, 3), 2, full, True),
    ):
        job = b.with_training(b.job(argv=f"--num-layers 16 --hybrid-layer-pattern {pattern}"), megatron_version=version)
        plan = b.plan(layers, vpp=vpp, dp=8, recompute=(recompute, Recompute()))
        assert ({v.rule for v in check(job, b.cluster(), plan)} <= set()) == legal, (version, layers, vpp)
        common, per_stage = words(job, plan)
        if version < "0.17":
            assert common[common.index("--hybrid-override-pattern") + 1] == pattern and "|" not in " ".join(common)
            assert allocate_layers(16, 0.0, 0.0, pattern) == list(pattern)  # Megatron-Core 0.16.1's own reader
        else:
            assert "|" in common[common.index("--hybrid-layer-pattern") + 1]
        if recompute.granularity == "full":  # attention and MLP count apart
            assert per_stage[0].endswith("--recompute-method block --recompute-num-layers 6")


def test_other_back_ends_train_gpt_models() -> None:
    job = b.job(argv="--hybrid-layer-pattern *E*E*E*E*E*E*E*E")
    for name in ("megatron-hetero", "flagscale", "galvatron"):
        plan = b.msgspec.structs.replace(b.plan(dp=8, ep=4), backend=name)
        assert "hybrid" in {violation.rule for violation in check(job, b.cluster(), plan)}
    assert read_hybrid("+E+-") is not None


def test_the_planner_finds_what_old_versions_split(tmp_path: Path) -> None:
    job = job_of(tmp_path, f"--hybrid-layer-pattern '{'*E' * 8}'")
    cluster = b.cluster(b.pool("a100", devices_per_node=4), b.pool("h800", devices_per_node=4))
    for version in ("0.16.1", "0.17.0"):
        planned = plan_job(b.with_training(job, megatron_version=version), cluster, settings=("pp=2",), compare=False)
        plan = planned.result.plan
        assert plan is not None and plan.launchable, plan and plan.launch_reason
        if version == "0.16.1":
            assert plan.vpp == 1 and [stage.num_layers for stage in plan.stages] == [4, 4]
