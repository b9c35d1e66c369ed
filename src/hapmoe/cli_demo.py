"""The command that shows everything at once: demo."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hapmoe.cli_options import show

if TYPE_CHECKING:
    from hapmoe.demo import Trained

__all__ = ["demo"]


@click.command()
@click.option("--out", default="hapmoe-demo", metavar="DIR", help="Where everything goes.", show_default=True)
def demo(out: str) -> int:
    """Profile, plan, launch and compare on this machine's CPU, with real Megatron-Core (`pip install hapmoe[lab]`).

    Two unequal "device kinds" are made of one processor; a few minutes on two cores.
    """
    import time

    from hapmoe.demo import demo as run

    began = time.monotonic()
    best, uniform = run(Path(out), lambda text: click.echo(f"[{time.monotonic() - began:4.0f} s] {text}"))
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
