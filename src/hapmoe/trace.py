"""The pipeline timeline for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

Format: "Trace Event Format", JSON object form; complete events (``ph: X``) in microseconds. One
process per stage, two threads each: computation, and communication, which may overlap it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from hapmoe.plan import Plan
from hapmoe.wording import clean, describe_layers, describe_ranks

if TYPE_CHECKING:
    from hapmoe.schedule import Event, Timeline

__all__ = ["chrome_trace"]

_COMPUTE, _COMMUNICATION = 0, 1
_THREADS = {_COMPUTE: "computation", _COMMUNICATION: "communication"}
_COLORS = {
    "forward": "thread_state_running",
    "backward": "thread_state_iowait",
    "send": "grey",
    "recv": "grey",
    "grad_sync": "thread_state_unknown",
    "optimizer": "good",
}
"""Named colours of the legacy viewer; Perfetto picks its own by name."""


def chrome_trace(timeline: Timeline, plan: Plan) -> str:
    """JSON text of the trace; load it in Perfetto with "Open trace file"."""
    events: list[dict[str, object]] = []
    for index in range(timeline.pp):
        events += _name_stage(plan, index)
    events += [_draw(event, timeline.vpp) for event in timeline.events]
    document = {
        "displayTimeUnit": "ms",
        "otherData": {
            "planner": plan.planner,
            "backend": plan.backend,
            "stages": timeline.pp,
            "virtual_stages": timeline.vpp,
            "microbatches": timeline.num_microbatches,
            "step_s": timeline.end_s,
        },
        "traceEvents": events,
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n"


def _name_stage(plan: Plan, index: int) -> list[dict[str, object]]:
    stage = plan.stages[index]
    place = f"{clean(stage.pool)} {clean(stage.device)}".strip()
    name = f"stage {index}: {place}, ranks {describe_ranks(stage)}, layers {describe_layers(plan, index)}"
    process: list[dict[str, object]] = [
        {"ph": "M", "pid": index, "tid": 0, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": index, "tid": 0, "name": "process_sort_index", "args": {"sort_index": index}},
    ]
    threads: list[dict[str, object]] = [
        {"ph": "M", "pid": index, "tid": thread, "name": "thread_name", "args": {"name": thread_name}}
        for thread, thread_name in _THREADS.items()
    ]
    return process + threads


def _draw(event: Event, vpp: int) -> dict[str, object]:
    whole_step = event.kind in ("grad_sync", "optimizer")
    chunk = f" chunk {event.chunk}" if vpp > 1 and not whole_step else ""
    return {
        "ph": "X",
        "pid": event.stage,
        "tid": _COMMUNICATION if event.kind in ("send", "recv", "grad_sync") else _COMPUTE,
        "name": event.kind.replace("_", " ") if whole_step else f"{event.kind} {event.microbatch}{chunk}",
        "cat": event.kind,
        "cname": _COLORS[event.kind],
        "ts": round(event.start_s * 1e6, 3),
        "dur": round((event.end_s - event.start_s) * 1e6, 3),
        "args": {} if whole_step else {"microbatch": event.microbatch, "chunk": event.chunk},
    }
