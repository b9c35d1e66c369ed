"""The terminal summaries: complete, in words, and whole at 80 columns without colours."""

from __future__ import annotations

import io
import subprocess
import sys

import builders
import msgspec
import pytest
from rich.console import Console, RenderableType
from sample_results import make_cluster, make_device, make_estimate, make_job, make_result, make_stages

from hapmoe.cost import evaluate, operations
from hapmoe.plan import Recompute, SearchReport, SearchResult, Violation
from hapmoe.resolve import resolve
from hapmoe.summary import (
    Comparison,
    render_devices,
    render_estimate,
    render_infeasible,
    render_job,
    render_plan,
)
from hapmoe.summary_explain import parts_of_step, render_explanation
from hapmoe.wording import (
    clean,
    describe_certificate,
    describe_difference,
    describe_layers,
    describe_slowdown,
    describe_sources,
    describe_speedup,
    format_percent,
    format_ranges,
)

COMPARISONS = (
    Comparison("best uniform plan", 4.4, "tp 2 ep 8 pp 4, equal layers"),
    Comparison("the script's own degrees", None, "does not fit: stage 0 needs 91.2 GiB of 75.0 GiB"),
)


def show(renderable: RenderableType, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, no_color=True, force_terminal=False)
    console.print(renderable)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in text
    assert all(len(line) <= width for line in text.splitlines())
    return text


def squeeze(text: str) -> str:
    """Wrapped sentences as one line."""
    return " ".join(text.split())


def show_plan(width: int = 80, pp: int = 4) -> str:
    return show(
        render_plan(
            make_result(pp, layers=8 * pp),
            make_job(layers=8 * pp),
            make_cluster(max(2, pp // 2)),
            COMPARISONS,
            2.31,
            written=(("hapmoe-plan/plan.json", "the plan"),),
            next_command="bash hapmoe-plan/run_node.sh 0",
        ),
        width,
    )


def test_importing_it_loads_neither_rich_nor_jinja2() -> None:
    code = (
        "import sys, hapmoe.summary, hapmoe.report, hapmoe.trace;"
        "print([m for m in ('rich', 'jinja2', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("width", [80, 120])
def test_a_plan_says_what_matters(width: int) -> None:
    text = squeeze(show_plan(width))
    for phrase in (
        "46.7 B parameters",
        "2 x 8 h800-80g-sxm (h800) + 2 x 8 ascend-910b (ascend), 32 devices",
        "3.21 s per step, 326,659 tokens/s, 213 TFLOP/s per device",
        "MFU 31 %, bubble 8.1 %, exposed communication 11 %",
        "4 stages, 64 x microbatch 1",
        "E 0-8 (9)",
        "25-31 H (7)",
        "61.0 / 75.0 GiB 81 %",
        "Optimal under the cost model, proven in 412 ms.",
        "114,000 by bound, 5,012 by memory, 12 by expert mesh",
        "1.37 x faster",
        "not comparable",
        "+2.5 % ep 8 instead of 4",
        "97 % roofline, 3 % assumed: nothing was measured",
        "'h800' read as h800-80g-sxm",
        "Not launchable as it stands: megatron cannot join nvidia and huawei devices in one job",
        "hapmoe-plan/plan.json the plan",
        "Next: bash hapmoe-plan/run_node.sh 0",
    ):
        assert phrase in text, phrase


def test_figures_are_never_broken_over_lines() -> None:
    text = show_plan(80)
    assert "0      h800, node 0    0-7    E 0-8 (9)     2   1   4    1   4  none" in text
    assert "0      ########.. 61.0 / 75.0 GiB 81 %    11 ms     23 ms     4 ms  compute" in text


def test_equal_stages_of_a_long_pipeline_share_a_row() -> None:
    text = show_plan(80, pp=16)
    assert "1-7 h800 8-63 9 each" in squeeze(text)
    assert "of equal stages" in text
    assert len(text.splitlines()) < 60


def test_names_cannot_bring_markup_or_escapes() -> None:
    job = make_job(name="[red]x[/red]\x1b[31m[/]")
    text = show(render_plan(make_result(), job, make_cluster()))
    assert "[red]x[/red]?[31m[/]: 46.7 B" in text
    assert clean("a\u202eb\tc") == "a?b c"


def test_an_estimate_names_broken_rules_and_what_does_not_fit() -> None:
    plan = make_result().plan
    assert plan is not None
    violation = Violation(
        rule="expert-mesh",
        message="tp*cp*dp = 8 is not a multiple of etp*ep = 6",
        source="megatron/core/parallel_state.py:712",
        stage=0,
        hint="use ep 2, 4 or 8",
    )
    text = squeeze(show(render_estimate(plan, make_estimate(used_gib=79), make_job(), make_cluster(), [violation])))
    assert "This configuration breaks 1 rule and does not fit into memory on 4 stages:" in text
    assert "stage 0: tp*cp*dp = 8 is not a multiple of etp*ep = 6; use ep 2, 4 or 8" in text
    assert "stage 0 (h800) needs 79 GiB of 75 GiB: 4 GiB too much, most of it activations" in text
    assert "105 %!" in text
    fine = show(render_estimate(plan, make_estimate(), make_job(), make_cluster()))
    assert "Legal, and it fits." in fine


def test_infeasible_lists_the_nearest_misses() -> None:
    report = SearchReport(status="infeasible", considered=1200, pruned={"memory": 1200}, reasons=("stage 0: 91 GiB",))
    result = SearchResult(status="infeasible", plan=None, estimate=None, report=report)
    for text in (show(render_infeasible(result)), show(render_plan(result, make_job(), make_cluster()))):
        assert "No plan fits." in text
        assert "- stage 0: 91 GiB" in text
        assert "1,200" in text


def test_devices_and_jobs() -> None:
    devices = [make_device("h800-80g-sxm", "nvidia", 80, 989e12), make_device("ascend-910b", "huawei", 64, 320e12)]
    text = show(render_devices(devices))
    assert "h800-80g-sxm  80 GiB      3.35   989  1,978   8 x     200    8 x 400" in text
    assert "ascend-910b*" in text
    assert "example.com" in show(render_devices(devices[:1], detail=True))
    job = squeeze(show(render_job(make_job())))
    assert "num_layers 32 train.sh:12" in job
    assert "5 arguments: 2 that a plan decides, 3 passed on unchanged." in job
    assert "not known before the run: $(date): a date (train.sh:40)" in job


def test_words() -> None:
    assert format_ranges([3, 0, 1, 2, 6, 8, 9]) == "0-3, 6, 8-9"
    assert [format_percent(x) for x in (0, 0.0001, 0.03, 0.0421, 0.314)] == ["0 %", "<0.1 %", "3 %", "4.2 %", "31 %"]
    assert describe_speedup(2, 3) == "1.50 x faster"
    assert describe_speedup(3, 2) == "1.50 x slower"
    assert describe_speedup(2, 2) == "as fast"
    assert describe_slowdown(2, 2.1) == "+5 %"
    assert describe_sources({"measured": 0.6, "roofline": 0.4}) == "60 % measured, 40 % roofline"
    cut = SearchReport(status="feasible", gap=0.042, wall_s=60)
    expected = "best found when the search was stopped after 60 s; gap at most 4.2 %: no plan can be faster than 3.07 s"
    assert describe_certificate(make_estimate(), cut) == expected


def test_differences_are_told_in_words() -> None:
    replace = msgspec.structs.replace
    best = make_result().plan
    assert best is not None
    assert describe_difference(best, best) == "the same configuration"
    full = Recompute(granularity="full", method="block", num_layers=2)
    slow = tuple(s if s.pool == "h800" else replace(s, tp=4, dp=2, recompute=full) for s in best.stages)
    assert describe_difference(best, replace(best, stages=slow)) == (
        "tp 4 instead of 2 on ascend, dp 2 instead of 4 on ascend, "
        "recompute full: 2 layers instead of core_attn, moe_act in stages 2-3"
    )
    only = replace(best, stages=make_stages()[:2], vpp=2)
    assert describe_difference(best, only) == (
        "2 stages instead of 4, without ascend, vpp 2 instead of 1, recompute none instead of none/core_attn, moe_act"
    )


def test_layers_show_embedding_head_and_virtual_stages() -> None:
    plan = make_result().plan
    assert plan is not None
    replace = msgspec.structs.replace
    first = replace(plan.stages[0], virtual_layers=((0, 4), (16, 5)))
    last = replace(plan.stages[3], mtp_layers=1, virtual_layers=((12, 3), (28, 1)))
    chunked = replace(plan, vpp=2, stages=(first, *plan.stages[1:3], last))
    assert describe_layers(chunked, 0) == "E 0-3 | 16-20"
    assert describe_layers(chunked, 3) == "12-14 | 28 MTP H"


def test_explanation_adds_up_to_the_step() -> None:
    """Parts are those of the timeline's busiest stage: with the wait for the others they fill the step."""
    job, cluster = builders.job(), builders.cluster()
    two = builders.plan(
        (3, 5),
        num_devices=16,
        dp=16,
        ep=8,
        recompute=(Recompute(), Recompute(granularity="full", method="uniform", num_layers=1)),
    )
    plan = resolve(job, cluster, two)
    estimate = evaluate(job, cluster, plan)
    lines = operations(job, cluster, plan, 1)
    parts = parts_of_step(plan, estimate, lines, 1)
    assert sum(parts.values()) == pytest.approx(estimate.step_s, rel=1e-9)
    # the operations of a microbatch, recomputation apart, are its forward and backward pass
    stage = estimate.stages[1]
    total = sum(times * (line.forward_s + line.backward_s) for times, line in lines)
    assert total == pytest.approx(stage.forward_s + stage.backward_s - stage.recompute_s, rel=1e-9)
    text = squeeze(show(render_explanation(plan, estimate, job, cluster)))
    assert "waiting for other stages" in text and "moe: expert fc1" in text and "bound by" in text
    assert "recomputation" in text
