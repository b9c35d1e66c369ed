"""The report in a real browser: offline, no errors, its charts there, its figures the plan's.

Needs Chromium (Debian: ``apt-get install -y chromium``); without it these tests fail rather than
skip, since nothing else looks at the page.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sample_results import make_cluster, make_job, make_result, make_stages, make_timeline

from hapmoe.plan import SearchResult
from hapmoe.report import render
from hapmoe.report.charts import lay_out_timeline, stack_rows
from hapmoe.report.meshes import describe_meshes, list_groups
from hapmoe.summary import Comparison

COMPARISONS = (
    Comparison("best uniform plan", 4.4, "tp 2 ep 8 pp 4"),
    Comparison("the script's own degrees", None, "does not fit"),
)
EVIL = '<script>window.pwned = 1</script><img src=x onerror="window.pwned = 1">'


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.fail("no Chromium here: install it (Debian: apt-get install -y chromium); the report is tested in it")
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=quiet)
        yield chromium
        chromium.close()


def open_page(browser: Any, folder: Path, html: str, **options: Any) -> tuple[Any, list[str]]:
    """The page, and everything that went wrong or was asked of the network."""
    file = folder / "report.html"
    file.write_text(html, encoding="utf-8")
    page = browser.new_page(**options)
    trouble: list[str] = []
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("request", lambda request: None if request.url == file.as_uri() else trouble.append(request.url))
    page.goto(file.as_uri())
    return page, trouble


def make_page(**changes: Any) -> str:
    settings: dict[str, Any] = {"comparisons": COMPARISONS, "commands": ("hapmoe plan train.sh",)} | changes
    return render(
        settings.pop("result", make_result()), settings.pop("job", make_job()), make_cluster(),
        settings.pop("timeline", make_timeline()), settings.pop("comparisons"), **settings,
    )  # fmt: skip


def read_field(page: Any, selector: str) -> float:
    return float(page.locator(selector).get_attribute("data-value"))


def test_page_shows_the_plan_s_numbers_without_errors_or_network(browser: Any, tmp_path: Path) -> None:
    result = make_result()
    assert result.plan is not None and result.estimate is not None
    page, trouble = open_page(browser, tmp_path, make_page(result=result))
    assert trouble == []
    for field in ("step_s", "tokens_per_s", "tflop_per_s_per_device", "mfu", "bubble_fraction"):
        assert read_field(page, f"#headline [data-field={field}]") == getattr(result.estimate, field)
    for index, (stage, cost) in enumerate(zip(result.plan.stages, result.estimate.stages, strict=True)):
        row = f"#stages tr[data-stage='{index}'] "
        for axis in ("tp", "cp", "ep", "etp", "dp", "num_layers"):
            assert read_field(page, f"{row}[data-field={axis}]") == getattr(stage, axis)
        for field in ("forward_s", "backward_s", "exposed_comm_s", "memory_bytes"):
            assert read_field(page, f"{row}[data-field={field}]") == getattr(cost, field)
    charts = page.locator("[data-chart]").evaluate_all("all => all.map(chart => chart.dataset.chart)")
    assert charts == ["timeline", "step-chart", "operations-chart", "memory-chart", "sources"]
    assert page.locator("[data-chart] svg").count() > 0
    visible = page.locator("[data-chart=timeline] rect.forward").first.bounding_box()
    assert visible["width"] > 5 and visible["height"] > 10
    text = page.inner_text("body").replace("\u00d7", "x")
    for phrase in (
        "8 devices = tp 2 x cp 1 x dp 4 = etp 1 x ep 4 x edp 2",
        "1.37 x faster",
        "ep 8 instead of 4",
        "114,000",
        "97 % roofline, 3 % assumed",
        "link h800-ascend: gloo through host memory",
        "4f4f4f4f",
        "hapmoe plan train.sh",
        "Not launchable as it stands",
    ):
        assert phrase in text, phrase
    page.close()


def test_bars_are_as_long_as_the_figures_say(browser: Any, tmp_path: Path) -> None:
    result = make_result()
    assert result.estimate is not None
    page, _ = open_page(browser, tmp_path, make_page(result=result))
    rows = page.locator("#memory-chart svg.bars")
    for index, cost in enumerate(result.estimate.stages):
        row = rows.nth(index)
        parts = row.locator("rect:not(.track)").evaluate_all("all => all.map(r => r.getBoundingClientRect().width)")
        edges = row.locator("line.limit").evaluate("e => e.getBoundingClientRect().x") - row.bounding_box()["x"]
        assert sum(parts) / edges == pytest.approx(cost.memory.total / cost.memory_limit_bytes, rel=0.01)
    page.close()


def test_names_from_scripts_are_text(browser: Any, tmp_path: Path) -> None:
    result = make_result()
    assert result.plan is not None
    plan = msgspec.structs.replace(result.plan, notes=(EVIL,), launch_reason=EVIL)
    job = msgspec.structs.replace(make_job(name=EVIL), notes=(EVIL,))
    html = make_page(
        result=msgspec.structs.replace(result, plan=plan), job=job, comparisons=(Comparison(EVIL, 1.0, EVIL),),
        commands=(EVIL,),
    )  # fmt: skip
    assert EVIL not in html
    page, trouble = open_page(browser, tmp_path, html)
    assert trouble == []
    assert page.evaluate("window.pwned") is None
    assert page.inner_text("h1") == EVIL
    assert page.locator("img").count() == 0
    page.close()


def test_it_works_without_javascript_and_fits_narrow_screens_and_paper(browser: Any, tmp_path: Path) -> None:
    html = make_page()
    page, trouble = open_page(
        browser, tmp_path, html, java_script_enabled=False, viewport={"width": 400, "height": 800}
    )
    assert trouble == []
    assert page.locator("[data-chart=timeline] rect.forward").first.is_visible()
    assert not page.locator(".zoom").is_visible()
    page.close()
    for width, media in ((400, "screen"), (718, "print")):
        page, _ = open_page(browser, tmp_path, html, viewport={"width": width, "height": 800}, color_scheme="dark")
        page.emulate_media(media=media)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 30)"
        assert dark == (media == "screen")
        page.close()


def test_tables_sort_and_the_timeline_zooms(browser: Any, tmp_path: Path) -> None:
    page, trouble = open_page(browser, tmp_path, make_page())
    heading = page.locator("#breakdown th", has_text="share")
    heading.click()
    assert page.locator("#breakdown tbody tr td").first.inner_text() == "recompute"
    heading.click()
    assert page.locator("#breakdown tbody tr td").first.inner_text() == "experts"
    before = page.locator("svg.time").bounding_box()["width"]
    page.locator("[data-zoom='2']").click()
    assert page.locator("svg.time").bounding_box()["width"] == pytest.approx(2 * before, rel=0.01)
    assert trouble == []
    page.close()


@pytest.mark.parametrize("vpp", [1, 4])
def test_a_long_pipeline_stays_small_and_says_what_it_leaves_out(vpp: int) -> None:
    html = render(make_result(16, 256, 64), make_job(layers=64), make_cluster(8), make_timeline(16, vpp, 256))
    assert len(html.encode()) < 1_000_000
    assert re.search(r"[\d.]+ s with \d+ microbatches left out: they only repeat", html)


def test_timeline_geometry_keeps_the_times() -> None:
    timeline = make_timeline(4, 1, 8)
    gantt = lay_out_timeline(timeline)
    assert gantt.omitted == "" and len(gantt.windows) == 1
    events = [e for e in timeline.events if e.stage == 2 and e.kind not in ("send", "recv")]
    for bar, event in zip(gantt.rows[2], events, strict=True):
        assert bar.x / gantt.units == pytest.approx(event.start_s / timeline.end_s, abs=2e-5)
        assert bar.width / gantt.units == pytest.approx((event.end_s - event.start_s) / timeline.end_s, abs=2e-5)
    long = lay_out_timeline(make_timeline(4, 1, 256))
    assert len(long.windows) == 2
    assert long.windows[1].x + long.windows[1].width == pytest.approx(1)
    assert sum(map(len, long.rows)) < 200


def test_stacks_sum_what_they_do_not_name() -> None:
    stack = stack_rows([{"a": 3.0, "b": 2.0, "c": 1.0, "d": 0.5}, {"a": 1.0}], keep=3)
    assert stack.names == ("a", "b", "other")
    assert [part.value for part in stack.rows[0]] == [3.0, 2.0, 1.5]
    assert stack.totals == (6.5, 1.0)


def test_groups_are_two_factorings_of_the_same_ranks() -> None:
    stage = msgspec.structs.replace(make_stages()[1], tp=2, cp=2, dp=4, ep=8, etp=1, num_devices=16, nodes=(0, 1))
    assert stage.edp == 2
    for axes in (("tp", "cp", "dp"), ("etp", "ep", "edp")):
        for axis in axes:
            groups = list_groups(stage, axis)
            assert sorted(rank for group in groups for rank in group) == list(range(8, 24))
            assert {len(group) for group in groups} == {getattr(stage, axis)}
    assert list_groups(stage, "cp")[:2] == ((8, 10), (9, 11))
    assert list_groups(stage, "dp")[0] == (8, 12, 16, 20)
    plan = make_result().plan
    assert plan is not None
    meshes = describe_meshes(msgspec.structs.replace(plan, stages=(stage,)), {"h800": 8}, moe=True)
    assert [group.spans_nodes for group in meshes[0].dense.groups] == [1, 1, 2]
    assert meshes[0].expert is not None
    assert [group.spans_nodes for group in meshes[0].expert.groups] == [1, 1, 2]


def test_a_plan_from_a_file_and_an_infeasible_result() -> None:
    plan = make_result().plan
    assert plan is not None
    html = render(plan, make_job(), make_cluster())
    assert "Optimal under the cost model" in html and 'data-chart="timeline"' not in html
    with pytest.raises(ValueError, match="evaluate it first"):
        render(msgspec.structs.replace(plan, estimate=None), make_job(), make_cluster())
    with pytest.raises(ValueError, match="infeasible"):
        render(SearchResult(status="infeasible", plan=None, estimate=None), make_job(), make_cluster())
