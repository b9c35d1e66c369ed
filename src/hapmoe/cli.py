"""The commands. Bodies import what they need when they run: ``hapmoe --help`` is instant."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from hapmoe import (
    __version__,
    cli_alone,
    cli_calibrate,
    cli_demo,
    cli_launch,
    cli_look,
    cli_profile,
    cli_runtime,
    cli_tables,
)
from hapmoe.cli_options import (
    SCRIPT,
    as_json,
    environment,
    for_version,
    read_cluster,
    read_job,
    reads_script,
    show,
    takes_cluster,
    takes_routing,
    takes_tables,
    together,
)

if TYPE_CHECKING:
    from hapmoe.cluster import Cluster
    from hapmoe.job import JobSpec
    from hapmoe.plan import Plan, Violation
    from hapmoe.planning import Planned
    from hapmoe.search import Progress

__all__ = ["cli"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="hapmoe")
def cli() -> None:
    """Plans Mixture-of-Experts training on mixed accelerators.

    A Megatron-LM script and a cluster file in; the best parallel plan, a launcher that runs it and a
    report that shows why out.
    """


@cli.command(context_settings=SCRIPT)
@reads_script
@takes_cluster
@takes_tables
@takes_routing
@click.option("--out", default="hapmoe-plan", metavar="DIR", help="Where the launcher goes.", show_default=True)
@click.option("--force", is_flag=True, help="Replace an earlier plan in DIR.")
@click.option("--planner", default="exact", metavar="NAME", help="exact, uniform, hs-dp, alpa …", show_default=True)
@click.option("--backend", default="megatron", metavar="B", help="What runs the plan.", show_default=True)
@click.option("--target", default="torchrun", metavar="T", help="What starts it.", show_default=True)
@click.option("--set", "settings", multiple=True, metavar="K=V", help="Pin or bound: ep=8, tp=..4, mbs=1,2, order=a,b.")
@click.option("--top", default=3, type=click.IntRange(min=1), metavar="N", help="Plans to show.", show_default=True)
@click.option("--uniform-layers", is_flag=True, help="As many layers on every stage.")
@click.option("--uniform-degrees", is_flag=True, help="The same degrees on every stage.")
@click.option("--no-recompute-per-stage", is_flag=True, help="The same recomputation on every stage.")
@click.option("--objective", default="step", metavar="O", help="step, cost or energy (per token).", show_default=True)
@click.option("--pareto", is_flag=True, help="Also what fewer devices or less memory would take.")
@click.option("--time-limit", type=click.FloatRange(min=0.0), metavar="S", help="Stop the search after S seconds.")
@for_version
@as_json
def plan(
    script: str,
    args: tuple[str, ...],
    cluster_file: str,
    table_folders: tuple[str, ...],
    out: str,
    force: bool,
    planner: str,
    backend: str,
    target: str,
    settings: tuple[str, ...],
    top: int,
    uniform_layers: bool,
    uniform_degrees: bool,
    no_recompute_per_stage: bool,
    objective: str,
    pareto: bool,
    time_limit: float | None,
    megatron_version: str | None,
    as_json: bool,
    **reading: Any,
) -> int:
    """Find the fastest plan for SCRIPT on a cluster and write its launcher.

    ARGS are the script's own. `hapmoe plan train.sh --cluster cluster.yaml`
    """
    import time

    from hapmoe import launch
    from hapmoe.launch.write import write_files
    from hapmoe.planning import artefacts, plan_job
    from hapmoe.search import Restrictions

    began = time.perf_counter()
    launch.target(target, "" if backend == "any" else backend)
    cluster = read_cluster(cluster_file, table_folders)
    job = read_job(script, args, megatron_version, **reading)
    with _progress() as progress:
        planned = plan_job(
            job,
            cluster,
            planner=planner,
            backend=backend,
            settings=settings,
            top=top,
            time_limit_s=time_limit,
            progress=progress,
            restrictions=Restrictions(uniform_layers, no_recompute_per_stage, uniform_degrees),
            objective=objective,
            pareto=pareto,
        )
    if planned.result.plan is None:
        return _no_plan(planned, as_json)
    command = ("hapmoe", *sys.argv[1:])
    folder = write_files(out, artefacts(job, cluster, planned, target=target, command=command), force=force)
    if as_json:
        from hapmoe.planfile import dump_plan

        click.echo(dump_plan(planned.result.plan), nl=False)
        return 0
    from hapmoe.summary import render_plan

    runs = planned.result.plan.launchable
    show(
        render_plan(
            planned.result,
            job,
            cluster,
            planned.comparisons,
            time.perf_counter() - began,
            written=[
                (f"{folder}/", "plan.json, arguments, entry, launcher"),
                (f"{folder}/report.html", "the same with charts, for a browser"),
            ],
            next_command=_start(str(folder), target) if runs else "",
        )
    )
    return 0


@cli.command(context_settings=SCRIPT)
@together(
    click.argument("script", required=False),
    click.argument("args", nargs=-1, type=click.UNPROCESSED),
    *(click.option("--env", "-e", "env", multiple=True, metavar="K=V", help="Environment variable for the script."),),
    click.option(
        "--vocab-size", type=click.IntRange(min=1), metavar="N", help="Vocabulary, where the script has none."
    ),
    click.option("--global-batch-size", type=click.IntRange(min=1), metavar="N", help="Sequences per step, likewise."),
    click.option(
        "--imbalance", type=click.FloatRange(min=1.0), metavar="X", help="Hottest rank's share over the mean."
    ),
)
@takes_cluster
@takes_tables
@takes_routing
@click.option("--plan", "plan_file", metavar="FILE", help="A plan.json instead of the script's own degrees.")
@click.option("--explain", "explains", is_flag=True, help="Where the step goes, down to each operation.")
@for_version
@as_json
def predict(
    script: str | None,
    args: tuple[str, ...],
    cluster_file: str,
    table_folders: tuple[str, ...],
    plan_file: str | None,
    explains: bool,
    megatron_version: str | None,
    as_json: bool,
    **reading: Any,
) -> int:
    """Estimate SCRIPT as it stands (or another plan for it) on a cluster.

    Says which of Megatron's rules it breaks and whether it fits; exit code 1 then.
    """
    import json

    import msgspec

    from hapmoe.cost import evaluate
    from hapmoe.errors import InputError
    from hapmoe.planfile import dump_plan

    if script is None:
        raise InputError("no script", where="predict", hint="hapmoe predict SCRIPT --cluster FILE [--plan plan.json]")
    cluster = read_cluster(cluster_file, table_folders)
    job = read_job(script, args, megatron_version, **reading)
    chosen, violations, note = _configuration(job, cluster, plan_file)
    estimate = None
    if chosen is not None:
        try:
            estimate = evaluate(job, cluster, chosen)
        except InputError:
            if not violations:  # else the violations say what is wrong with it, and better
                raise
    good = not violations and estimate is not None and estimate.fits
    if as_json:
        document: dict[str, Any] = {"legal": not violations, "fits": bool(estimate and estimate.fits), "note": note}
        document["violations"] = msgspec.to_builtins(violations)
        if chosen is not None:
            document |= json.loads(dump_plan(msgspec.structs.replace(chosen, estimate=estimate)))
        click.echo(json.dumps(document, indent=1))
        return 0 if good else 1
    if chosen is None or estimate is None:
        lines = [f"{broken.message}; {broken.hint}" if broken.hint else broken.message for broken in violations]
        click.echo("\n".join(dict.fromkeys(lines)))
        if note:
            click.echo(note)
        return 1
    from hapmoe.resolve import resolve
    from hapmoe.summary import render_estimate

    show(render_estimate(chosen, estimate, job, cluster, violations))
    if explains:
        from hapmoe.summary_explain import render_explanation

        click.echo()
        show(render_explanation(resolve(job, cluster, chosen), estimate, job, cluster))
    if note:
        click.echo(f"\n{note}")
    return 0 if good else 1


@cli.command(context_settings=SCRIPT)
@reads_script
@takes_cluster
@takes_tables
@takes_routing
@click.option("--planners", default="", metavar="A,B", help="Which, besides exact; all unless given.")
@click.option("--backend", default="megatron", metavar="B", help="What runs the plans.", show_default=True)
@click.option("--set", "settings", multiple=True, metavar="K=V", help="Pin or bound: ep=8, tp=..4, mbs=1,2, order=a,b.")
@click.option("--time-limit", type=click.FloatRange(min=0.0), metavar="S", help="Stop each search after S seconds.")
@for_version
@as_json
def compare(
    script: str,
    args: tuple[str, ...],
    cluster_file: str,
    table_folders: tuple[str, ...],
    planners: str,
    backend: str,
    settings: tuple[str, ...],
    time_limit: float | None,
    megatron_version: str | None,
    as_json: bool,
    **reading: Any,
) -> int:
    """Plan SCRIPT with several planners and show what each restriction costs.

    Every plan is scored by the same model on the same cluster.
    """
    from hapmoe.compare import compare_planners, note_on_terminal, to_document

    cluster = read_cluster(cluster_file, table_folders)
    job = read_job(script, args, megatron_version, **reading)
    wanted = [name.strip() for name in planners.split(",") if name.strip()]
    with note_on_terminal() as note:
        compared = compare_planners(
            job, cluster, wanted, backend=backend, settings=settings, time_limit_s=time_limit, note=note
        )
    if as_json:
        import json

        click.echo(json.dumps(to_document(compared), indent=1))
    else:
        from hapmoe.summary_compare import render_comparison

        show(render_comparison(compared, job, cluster))
    return 0 if compared.best_s is not None else 1


@cli.command(context_settings=SCRIPT)
@reads_script
@click.option("--out", metavar="FILE", help="Write job.yaml there.")
@click.option("--execute", is_flag=True, help="Also run SCRIPT in a sandbox with stand-in launchers, and compare.")
@as_json
def extract(script: str, args: tuple[str, ...], out: str | None, execute: bool, as_json: bool, **reading: Any) -> int:
    """Show the job behind SCRIPT, and where each value came from.

    SCRIPT is a launch script with its ARGS, a configuration (config.json, FlagScale, MODEL_ARGS) with further flags,
    or after -- the training command itself. Nothing is executed unless --execute asks for it.
    """
    from hapmoe.extract import extract_document, job_yaml, second_opinion

    reading["env"] = environment(reading["env"])
    opinion = second_opinion(script, args, reading["env"]) if execute else None
    if as_json:
        import json

        _, document = extract_document(script, args, **reading)
        if opinion is not None:
            document["executed"] = opinion
        click.echo(json.dumps(document, indent=1))
        return 2 if document["refused"] else 1 if opinion and not opinion["agrees"] else 0
    if opinion is not None:
        click.echo(f"executed: {opinion['difference'] or 'the same training, word for word'}")
    job = read_job(script, args, None, **(reading | {"env": [f"{k}={v}" for k, v in reading["env"].items()]}))
    if out:
        from hapmoe.wholefile import write_whole

        write_whole(out, job_yaml(job), replace=False)
    from hapmoe.summary import render_job

    show(render_job(job))
    return 0 if opinion is None or opinion["agrees"] else 1


@cli.command()
@click.argument("names", nargs=-1)
@as_json
def devices(names: tuple[str, ...], as_json: bool) -> int:
    """List the device kinds of the catalogue; with NAMES, every figure and its source."""
    from hapmoe import catalog

    if as_json:
        import json

        click.echo(json.dumps(catalog.render_devices(names or None), indent=1))
        return 0
    from hapmoe.summary import render_devices

    chosen = [catalog.find_device(name, "devices")[0] for name in names] or list(catalog.load_catalog().values())
    show(render_devices(chosen, detail=bool(names)))
    return 0


def _configuration(
    job: JobSpec, cluster: Cluster, plan_file: str | None
) -> tuple[Plan | None, tuple[Violation, ...], str]:
    """The plan that is asked about, the rules it breaks, and what was read into it."""
    from hapmoe.planfile import load_plan
    from hapmoe.present import present_plan
    from hapmoe.rules import check

    if plan_file:
        given = load_plan(plan_file)
        return given, check(job, cluster, given), ""
    present = present_plan(job, cluster)
    return present.plan, present.violations, present.note


def _start(folder: str, target: str) -> str:
    from hapmoe import launch

    if target == "torchrun":
        return f"edit {folder}/hosts.tsv, then {folder}/launch.sh"
    return f"{folder}/README.txt, then {launch.STARTS[target]}"


def _no_plan(planned: Planned, as_json: bool) -> int:
    if as_json:
        import json

        import msgspec

        document = {"schema": 1, "stages": [], "search": msgspec.to_builtins(planned.result.report)}
        click.echo(json.dumps(document, indent=1))
        return 1
    from hapmoe.summary import render_infeasible

    show(render_infeasible(planned.result))
    return 1


class _progress:
    """Search progress on stderr once it takes longer than a second: one line that is rewritten on a
    terminal, else (a log) a new line now and then."""

    def __enter__(self) -> Progress:
        import time

        self.live = sys.stderr.isatty()
        self.every_s = 0.2 if self.live else 10.0
        self.next_s = time.perf_counter() + (1.0 if self.live else self.every_s)
        self.shown = False
        return self.show

    def show(self, settled: int, total: int, best_s: float, bound_s: float) -> None:
        import time

        from hapmoe.units import format_seconds

        now = time.perf_counter()
        if now < self.next_s:
            return
        self.next_s, self.shown = now + self.every_s, True
        best = f"best step {format_seconds(best_s)}" if best_s < float("inf") else "no plan yet"
        text = f"{settled:,}/{total:,} options, {best}, bound {format_seconds(bound_s)}"
        click.echo(f"\r{text:<78}" if self.live else text, err=True, nl=not self.live)

    def __exit__(self, *_: object) -> None:
        if self.shown and self.live:
            click.echo("\r" + " " * 78 + "\r", err=True, nl=False)


for measure in (cli_alone.compute, cli_alone.collectives):
    cli_profile.profile.add_command(measure)
for command in (
    *(cli_launch.check, cli_launch.render, cli_launch.replan),
    *(cli_look.discover, cli_look.report, cli_look.trace),
    *(cli_calibrate.calibrate, cli_demo.demo, cli_profile.profile, cli_runtime.runtime, cli_tables.tables),
):
    cli.add_command(command)
