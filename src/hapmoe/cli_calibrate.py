"""``hapmoe calibrate``: predictions against measured runs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from hapmoe.cli_options import as_json, for_version, read_job, show, takes_cluster

if TYPE_CHECKING:
    from hapmoe.calibration import Calibrated, Observed

__all__ = ["calibrate"]


@click.command()
@click.argument("plan_file", metavar="PLAN")
@click.argument("logs", metavar="LOG...", nargs=-1, required=True)
@click.option("--script", required=True, metavar="TEXT", help="The training script, in quotes with its arguments.")
@takes_cluster
@click.option("--run", "more", multiple=True, nargs=2, metavar="PLAN LOG", help="Another run of the script.")
@click.option("--tables", "folder", metavar="DIR", help="Tables in use; the calibration is added to them.")
@click.option("--env", "-e", "env", multiple=True, metavar="K=V", help="Environment variable for the script.")
@click.option("--vocab-size", type=click.IntRange(min=1), metavar="N", help="Vocabulary, where the script has none.")
@click.option("--global-batch-size", type=click.IntRange(min=1), metavar="N", help="Sequences per step, likewise.")
@click.option("--routing", metavar="FILE", help="Tokens per expert as they were: the experts' load.")
@for_version
@as_json
def calibrate(
    plan_file: str,
    logs: tuple[str, ...],
    script: str,
    cluster_file: str,
    more: tuple[tuple[str, str], ...],
    folder: str | None,
    megatron_version: str | None,
    as_json: bool,
    **reading: Any,
) -> int:
    """Hold PLAN's prediction against the logs of its run (Megatron's, or the probe's folder), and learn from it.

    Shows which terms are off and the factors that mend them; with --tables DIR the next prediction uses
    them. Give several runs (--run): only what is left out of a fit says whether it helps.
    """
    import datetime
    import shlex
    from pathlib import Path

    from hapmoe import tables
    from hapmoe.calibration import calibrate as fit
    from hapmoe.calibration import observe, observe_probe, tables_of
    from hapmoe.clusterfile import load_cluster
    from hapmoe.errors import InputError
    from hapmoe.logs.megatron import read_log
    from hapmoe.planfile import load_plan
    from hapmoe.profiling.probed import load_ranks

    words = shlex.split(script)
    if not words:
        raise InputError("is empty", where="--script", hint='--script "train.sh 8 64"')
    job = read_job(words[0], tuple(words[1:]), megatron_version, imbalance=None, **reading)
    cluster = load_cluster(cluster_file)
    if folder and Path(folder).is_dir():
        cluster = tables.attach(cluster, tables.load(folder))

    def text(path: str) -> str:
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise InputError(error.strerror or str(error), where=path) from None

    runs = []
    for plan, of_plan in ((plan_file, logs), *((plan, (log,)) for plan, log in more)):
        if Path(of_plan[0]).is_dir():
            runs.append(observe_probe(job, cluster, load_plan(plan), load_ranks(Path(of_plan[0])), of_plan[0]))
            continue
        read = [read_log(text(log), log) for log in of_plan]
        runs.append(observe(job, cluster, load_plan(plan), read, of_plan[0]))
    found = fit(job, cluster, runs)
    if folder:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        command = f"hapmoe {' '.join(sys.argv[1:2])} {plan_file}"
        tables.save(folder, *tables_of(job, found, len(runs), now, command))
    if as_json:
        import json

        click.echo(json.dumps(_document(found), indent=1))
    else:
        show(_render(found, runs))
        if folder:
            click.echo(f"Added to {folder}/: `hapmoe plan … --tables {folder}` uses it.")
    return 0


def _document(found: Calibrated) -> dict[str, Any]:
    return {
        "compared": [
            {"run": a.run, "term": a.term, "predicted": b.predicted, "calibrated": a.predicted, "measured": a.measured}
            for b, a in zip(found.before, found.after, strict=True)
        ],
        "terms": [
            {"device": t.device, "term": t.term, "factor": t.value, "sigma": t.sigma, "off": t.off} for t in found.terms
        ],
        "workspace_bytes": found.workspace,
        "held_out": None if found.held_out is None else {"before": found.held_out[0], "after": found.held_out[1]},
    }


def _render(found: Calibrated, runs: list[Observed]) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from hapmoe.units import format_bytes, format_seconds

    grid = Table(box=None, pad_edge=False)
    for name in ("run", "term", "measured", "predicted", "error", "calibrated", "error"):
        grid.add_column(name, justify="left" if name in ("run", "term") else "right")
    for before, after in zip(found.before, found.after, strict=True):
        show_one = format_bytes if before.term.startswith("memory") else format_seconds
        values = (show_one(before.measured), show_one(before.predicted), f"{before.error:+.1%}")
        grid.add_row(before.run, before.term, *values, show_one(after.predicted), f"{after.error:+.1%}")
    lines = []
    for term in found.terms:
        verdict = "off" if term.off else "not told by these runs" if term.sigma > 0.15 else "right"
        lines.append(f"{term.device}: {term.term} takes {term.value:.2f} of the predicted time: {verdict}")
    for device, size in found.workspace.items():
        lines.append(f"{device}: memory {format_bytes(abs(size))} {'above' if size > 0 else 'below'} the prediction")
    if found.held_out is None:
        lines.append("One run only: whether this helps elsewhere is not known. Give more with --run PLAN LOG.")
    else:
        before_e, after_e = found.held_out
        many = len(found.left_out)
        lines.append(
            f"Left out in turn, {many} of {len(runs)} runs: median error of the step {before_e:.1%}, calibrated on the "
            f"others {after_e:.1%}."
        )
    return Group(grid, Text(""), Text("\n".join(lines)))
