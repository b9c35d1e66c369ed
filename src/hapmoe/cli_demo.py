"""The command that shows everything at once: demo."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hapmoe.cli_options import as_json, show

if TYPE_CHECKING:
    from hapmoe.demo import Trained

__all__ = ["demo"]


@click.command()
@click.option("--out", default="hapmoe-demo", metavar="DIR", help="Where everything goes.", show_default=True)
@as_json
def demo(out: str, as_json: bool) -> int:
    """Profile, plan, launch and compare on this machine's CPU, with real Megatron-Core (`pip install hapmoe[lab]`).

    Two unequal "device kinds" are made of one processor; a few minutes on two cores.
    """
    import time

    from hapmoe.demo import demo as run

    began = time.monotonic()
    best, uniform = run(Path(out), lambda text: click.echo(f"[{time.monotonic() - began:4.0f} s] {text}", err=as_json))
    if as_json:
        import json

        click.echo(json.dumps({one.name: _told(one) for one in (best, uniform)}, indent=1))
        return 0
    show(_render(best, uniform))
    gains = (
        uniform.estimate.step_s / best.estimate.step_s,
        max(uniform.busy_s) / max(best.busy_s),
        uniform.step_s / best.step_s,
    )
    click.echo(
        "\nThe plan is {:.2f} times as fast as the uniform one by the estimate, {:.2f} times by CPU time of the "
        "busiest rank, {:.2f} times by wall time (which holds only where two cores are free).".format(*gains)
    )
    click.echo(f"Report: {out}/plan/report.html")
    return 0


def _told(one: Trained) -> dict[str, Any]:
    return {
        "pools": [stage.pool for stage in one.plan.stages],
        "layers": [stage.num_layers for stage in one.plan.stages],
        "busy_s": {"predicted": list(one.expected_s), "measured": list(one.busy_s)},
        "step_s": {"predicted": one.estimate.step_s, "measured": one.step_s},
    }


def _render(*trained: Trained) -> Any:
    from hapmoe.terminal import make_table
    from hapmoe.units import format_seconds

    table = make_table("", "stage", "layers", "CPU of a step: predicted", "measured", "step: predicted", "measured")
    for one in trained:
        rows = zip(one.plan.stages, one.expected_s, one.busy_s, strict=True)
        for number, (stage, expected_s, busy_s) in enumerate(rows):
            first = number == 0
            table.add_row(
                one.name if first else "",
                stage.pool,
                str(stage.num_layers),
                format_seconds(expected_s),
                format_seconds(busy_s),
                format_seconds(one.estimate.step_s) if first else "",
                format_seconds(one.step_s) if first else "",
            )
    return table
