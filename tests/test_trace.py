"""The Chrome trace holds the timeline's events, in microseconds, one process per stage."""

from __future__ import annotations

import json
from itertools import pairwise

import msgspec
from sample_results import make_result, make_timeline

from hapmoe.trace import chrome_trace


def test_events_are_the_timeline_s() -> None:
    timeline, plan = make_timeline(4, 1, 16), make_result(4).plan
    assert plan is not None
    document = json.loads(chrome_trace(timeline, plan))
    drawn = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert len(drawn) == len(timeline.events)
    for event, source in zip(drawn, timeline.events, strict=True):
        assert (event["pid"], event["cat"]) == (source.stage, source.kind)
        assert abs(event["ts"] - source.start_s * 1e6) < 1e-3
        assert abs(event["ts"] + event["dur"] - source.end_s * 1e6) < 2e-3
    assert document["otherData"]["step_s"] == timeline.end_s


def test_one_named_process_per_stage_and_computation_never_overlaps() -> None:
    timeline, plan = make_timeline(4, 2, 16), make_result(4).plan
    assert plan is not None
    events = json.loads(chrome_trace(timeline, plan))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names) == [0, 1, 2, 3]
    assert names[2] == "stage 2: ascend ascend-910b, ranks 16-23, layers 18-24"
    for stage in range(4):
        work = sorted(
            (e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == stage and e["tid"] == 0
        )
        assert work
        assert all(end <= start + 2e-3 for (_, end), (start, _) in pairwise(work))


def test_names_from_files_are_kept_harmless() -> None:
    plan = make_result(4).plan
    assert plan is not None
    stages = (msgspec.structs.replace(plan.stages[0], pool='a"\x1b[31m</script>'), *plan.stages[1:])
    text = chrome_trace(make_timeline(4, 1, 4), msgspec.structs.replace(plan, stages=stages))
    assert "\x1b" not in text
    assert json.loads(text)["traceEvents"][0]["args"]["name"].startswith('stage 0: a"?[31m</script>')
