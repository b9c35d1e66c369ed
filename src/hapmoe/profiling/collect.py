"""What the probe measured as rows of tables.

Times of passes are medians over all steady steps, ranks and microbatches of a run; on CPU they are the
process's CPU time, which waiting for other ranks is not in, unless wall time is asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hapmoe.catalog import reported_as
from hapmoe.cluster import Cluster, Pool
from hapmoe.counting import embedding_params, head_params, last_class, layer_params, mtp_params
from hapmoe.job import JobSpec
from hapmoe.measured import Collective, Memory, Piece, Routing, Row, Run, Table
from hapmoe.options import LayerClass, Options
from hapmoe.profiling.folder import PoolProfile, state
from hapmoe.profiling.probed import MeasuredRank, Sent, Span, load_ranks
from hapmoe.profiling.runs import MICROBATCHES, ProfileRun, plan_of
from hapmoe.stagecost import layer_classes

__all__ = ["collect", "routing_rows", "run_rows"]

_NAMES = {"p2p": "send_recv"}
_KNOWN = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")


def collect(
    job: JobSpec, cluster: Cluster, pool: Pool, folder: Path, profile: PoolProfile, *, by_wall: bool = False
) -> tuple[Table, ...]:
    """Tables of every complete run of a folder, but for collectives alone (``sends``).

    The same results give the same tables, run for run.

    ``by_wall``: by wall time on CPUs too. A process that a quota limits does not show it in CPU time.
    """
    rows: dict[str, list[Row]] = {"pieces": [], "collectives": [], "memory": []}
    runs: list[Run] = []
    first: MeasuredRank | None = None
    for run in profile.runs:
        if state(folder, run) != "done":
            continue
        ranks = load_ranks(folder / "results" / run.name, run.started)
        first = ranks[0]
        occasion = Run(date=first.start.date, command=profile.command, note=f"run {run.name}")
        runs.append(occasion)
        for kind, row in run_rows(job, cluster, pool, profile, run, ranks, occasion.id, by_wall=by_wall):
            rows[kind].append(row)
    if first is None:
        return ()
    host = first.start.clock == "host"
    device = "cpu" if host else first.start.device
    named = {device, *(kind.name for kind in reported_as(device))}
    software = {name: version for name, version in first.start.versions.items() if version and name != "python"}
    return tuple(
        Table(
            kind=kind,
            device=device,
            device_kind="" if pool.device.name in named else pool.device.name,
            software=software,
            runs=tuple(runs),
            rows=tuple(found),
        )
        for kind, found in rows.items()
        if found
    )


def run_rows(
    job: JobSpec,
    cluster: Cluster,
    pool: Pool,
    profile: PoolProfile,
    run: ProfileRun,
    ranks: Sequence[MeasuredRank],
    occasion: str,
    *,
    by_wall: bool = False,
) -> Iterator[tuple[str, Row]]:
    """(kind of table, row) of everything that one run has measured; ``by_wall``: as ``collect``."""
    short, _ = plan_of(job, cluster, pool, run)
    where: dict[str, Any] = {
        "run": occasion,
        "model": profile.model,
        "precision": profile.precision,
        "seq_len": profile.seq_len,
        "micro_batch_size": run.micro_batch_size,
        **{name: getattr(run, name) for name in ("tp", "cp", "ep", "etp", "dp")},
        "dense_layers": run.layers.dense,
        "moe_layers": run.layers.moe,
        "mtp_layers": run.layers.mtp,
    }
    whole: dict[str, Any] = {"embedding": int(_is_first(run)), "head": int(_is_last(run))}
    host = ranks[0].start.clock == "host"
    by_cpu = host and not by_wall
    clock = "device" if not host else "wall" if by_wall else "cpu"
    for phase in ("forward", "backward", "optimizer"):
        times = [one for rank in ranks for step in rank.steady for one in _seconds(getattr(step, phase), by_cpu)]
        if not times:
            continue  # inside of a CUDA graph
        comm = [
            sum(row.wall_s for row in step.collectives if row.phase == phase) / max(len(getattr(step, phase)), 1)
            for rank in ranks
            for step in rank.steady
        ]
        extra = _params(short, run) if phase == "optimizer" else whole
        # CPU time does not contain the wait for others
        comm_s = 0.0 if by_cpu else min(float(np.median(comm)), 0.99 * float(np.median(times)))
        yield "pieces", Piece(**where, **extra, phase=phase, clock=clock, comm_s=comm_s, **_spread(times))
    if run.single:  # nothing was sent: neither messages nor a whole step are what they will be
        yield from _memory(run, ranks, where | whole, host)
        return
    steps = [_seconds((Span(wall_s=step.wall_s, cpu_s=step.cpu_s),), by_cpu) for rank in ranks for step in rank.steady]
    times = [one for found in steps for one in found]
    if times:
        yield (
            "pieces",
            Piece(**where, **whole, phase="step", num_microbatches=MICROBATCHES, clock=clock, **_spread(times)),
        )
    for row in _collectives(ranks, occasion):
        yield "collectives", row
    yield from _memory(run, ranks, where | whole, host)


def _memory(
    run: ProfileRun, ranks: Sequence[MeasuredRank], where: dict[str, Any], host: bool
) -> Iterator[tuple[str, Row]]:
    """The fullest rank's at each mark; of a CPU's process they say nothing of tensors."""
    if host:
        return
    for mark, name in (("allocated", "peak_bytes"), ("reserved", "reserved_bytes"), ("device", "device_bytes")):
        if run.single and mark == "device":
            continue  # without the buffers of messages
        most = max(getattr(one, name) for rank in ranks for step in rank.steps for one in step.memory)
        if most:
            held = run.pp - run.stage  # microbatches, by 1F1B
            at: dict[str, Any] = {"stage": run.stage, "pp": run.pp, "in_flight": held}
            yield "memory", Memory(**where, **at, mark=mark, bytes=most, samples=len(ranks))


def _seconds(spans: Iterable[Span], by_cpu: bool) -> list[float]:
    found = [one.cpu_s if by_cpu else one.wall_s for one in spans]
    return [one for one in found if one]


def _spread(times: Sequence[float]) -> dict[str, Any]:
    """Median, 10th and 90th percentile; times above five medians (a page fault, another process) are left out."""
    kept = np.asarray([one for one in times if one <= 5.0 * float(np.median(times))])
    p10, median, p90 = (float(one) for one in np.percentile(kept, (10, 50, 90)))
    return {"median_s": median, "p10_s": p10, "p90_s": p90, "samples": len(kept)}


def _collectives(ranks: Sequence[MeasuredRank], occasion: str) -> Iterator[Collective]:
    """Those that the caller waited for, as a step saw them: the mean of a step's equal calls is a sample."""
    times: defaultdict[tuple[str, str, int, int], list[float]] = defaultdict(list)
    calls: defaultdict[tuple[str, str, int, int], float] = defaultdict(float)
    count = sum(len(rank.steady) for rank in ranks)
    for rank in ranks:
        for step in rank.steady:
            for row in step.collectives:
                key = (_NAMES.get(row.collective, row.collective), row.axis, row.ranks, row.call_bytes)
                calls[key] += row.calls / count
                if row.timed_calls and row.wall_s > 0:
                    times[key].append(_mean(row))
    for key, found in sorted(times.items()):
        collective, axis, size, call_bytes = key
        if collective in _KNOWN:
            yield Collective(
                run=occasion,
                collective=collective,
                link="node",
                ranks=size,
                ranks_per_node=size,
                bytes=call_bytes,
                setting="training",
                axis=axis,
                calls_per_step=calls[key],
                **_spread(found),
            )


def _mean(row: Sent) -> float:
    return row.wall_s / row.timed_calls


def _is_first(run: ProfileRun) -> bool:
    return run.stage == 0


def _is_last(run: ProfileRun) -> bool:
    return run.stage == run.pp - 1


def _params(short: JobSpec, run: ProfileRun) -> dict[str, Any]:
    """Parameters that a rank of the run (of its stage) holds, and those of them that belong to experts."""
    columns = (run.tp, run.cp, run.ep, run.etp, run.dp, run.micro_batch_size)
    options = Options(*(np.asarray([value], dtype=np.int64) for value in columns))
    classes, of_layer = layer_classes(short)
    dense = float(embedding_params(short, options)[0]) if _is_first(run) else 0.0
    dense += float(head_params(short, options, with_embedding=_is_first(run))[0]) if _is_last(run) else 0.0
    expert, first = 0.0, run.stage * run.layers.decoder
    layers: list[LayerClass] = [classes[index] for index in of_layer[first : first + run.layers.decoder]]
    for layer in layers:
        dense_K, expert_K = layer_params(short, options, layer)
        dense, expert = dense + float(dense_K[0]), expert + float(expert_K[0])
    if run.layers.mtp:
        dense_K, expert_K = mtp_params(short, options, last_class(short.model))
        dense, expert = dense + float(dense_K[0]), expert + float(expert_K[0])
    return {"params": round(dense + expert), "expert_params": round(expert)}


def routing_rows(ranks: Sequence[MeasuredRank], occasion: str) -> tuple[Routing, ...]:
    """Tokens per expert, layer, step, microbatch and expert-parallel group of a whole training's ranks.

    Ranks of one stage that share experts follow each other (Megatron's order tp-cp-ep-dp-pp); the copies that
    context and tensor parallel ranks route are parts of the sequence.
    """
    totals: defaultdict[tuple[int, int, int, int], np.ndarray] = defaultdict(lambda: np.zeros(0, dtype=np.int64))
    for rank in ranks:
        degrees = rank.start.degrees
        share, per_stage = degrees["ep"] * degrees["etp"], rank.start.world_size // degrees["pp"]
        replica = rank.start.rank % per_stage // share
        for step in rank.steps:
            for layer in step.tokens:
                for number, counts in enumerate(layer.microbatches):
                    key = (layer.layer, step.step, number, replica)
                    mine = np.asarray(counts, dtype=np.int64)
                    totals[key] = mine if key not in totals else totals[key] + mine
    return tuple(
        Routing(
            run=occasion,
            layer=layer,
            step=step,
            microbatch=microbatch,
            replica=replica,
            tokens=tuple(int(one) for one in counts),
        )
        for (layer, step, microbatch, replica), counts in sorted(totals.items())
    )
