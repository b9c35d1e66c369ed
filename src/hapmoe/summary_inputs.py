"""What went in, on a terminal: the catalogue of devices (``hapmoe devices``) and a job (``hapmoe extract``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from hapmoe.cluster import Device
from hapmoe.job import JobSpec
from hapmoe.terminal import cell, item, make_table, say
from hapmoe.units import format_bytes, format_count
from hapmoe.wording import describe_recompute

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["render_devices", "render_job"]


def render_devices(rows: Iterable[Device], *, detail: bool = False) -> RenderableType:
    """The catalogue of device kinds; with ``detail`` each figure with its source."""
    from rich.console import Group

    devices = list(rows)
    if detail:
        return Group(*(part for device in devices for part in _show_device(device)))
    table = make_table("device", "memory", "HBM TB/s", "bf16", "fp8", "node", "fabric", "NICs Gb/s")
    for column in table.columns[1:]:
        column.justify = "right"
    for device in devices:
        peak = device.peak_flop_per_s
        table.add_row(
            cell(device.name + ("*" if device.efficiency_note else "")),
            f"{device.memory_bytes / 2**30:.0f} GiB",
            f"{device.memory_bytes_per_s / 1e12:.2f}",
            _tflops(peak.get("bf16", peak.get("fp16"))),
            _tflops(peak.get("fp8")),
            f"{device.devices_per_node} x",
            f"{device.scale_up_bytes_per_s / 1e9:.0f}",
            f"{device.nics_per_node} x {device.nic_bytes_per_s * 8 / 1e9:.0f}",
        )
    legend = "bf16 and fp8: dense TFLOP/s; fabric: GB/s inside the node, per device, one direction"
    parts: list[RenderableType] = [table, say(legend, style="dim")]
    if any(device.efficiency_note for device in devices):
        parts.append(say("* efficiency taken over from another device kind, wholly or in part", style="dim"))
    return Group(*parts)


def render_job(job: JobSpec) -> RenderableType:
    """The summary of ``hapmoe extract``: what the script asks for, and where each value stands."""
    from rich.console import Group

    parts: list[RenderableType] = [say(f"{job.name}: {job.script or 'script'} starts {job.entry}", style="bold")]
    for title, rows in _list_job(job):
        parts += ["", _show_job_rows(title, rows, job.origin)]
    ours = sum(argument.owner == "plan" for argument in job.argv)
    unknown = [argument for argument in job.argv if argument.text is None]
    parts += [
        "",
        say(f"{len(job.argv)} arguments: {ours} that a plan decides, {len(job.argv) - ours} passed on unchanged."),
    ]
    parts += [item(f"not known before the run: {a.source or '?'}: {a.why} ({a.where})") for a in unknown]
    parts += [item(note) for note in job.notes]
    return Group(*parts)


def _tflops(rate: float | None) -> str:
    return f"{rate / 1e12:,.0f}" if rate else "-"


def _show_device(device: Device) -> list[RenderableType]:
    from rich.console import Group

    peak = device.peak_flop_per_s
    figures = {
        "memory_bytes": format_bytes(device.memory_bytes),
        "memory_bytes_per_s": f"{device.memory_bytes_per_s / 1e12:.2f} TB/s",
        **{f"peak_flop_per_s.{name}": f"{_tflops(rate)} TFLOP/s dense" for name, rate in peak.items()},
        "devices_per_node": str(device.devices_per_node),
        "scale_up_bytes_per_s": f"{device.scale_up_bytes_per_s / 1e9:.0f} GB/s per device, one direction",
        "scale_up_domain": f"{device.scale_up_domain} devices",
        "nic_bytes_per_s": f"{device.nics_per_node} x {device.nic_bytes_per_s * 8 / 1e9:.0f} Gb/s per node",
        "ccl": device.ccl,
    }
    sources = list(dict.fromkeys(device.sources[field] for field in figures if field in device.sources))
    table = make_table(device.name, "value", "source")
    for field, value in figures.items():
        source = device.sources.get(field)
        table.add_row(field, cell(value), f"({sources.index(source) + 1})" if source else "")
    lines = [f"({number}) {source}" for number, source in enumerate(sources, start=1)]
    lines += [note for note in dict.fromkeys((device.efficiency_note, device.notes)) if note]
    return [Group(table, *(item(line) for line in lines), "")]


def _list_job(job: JobSpec) -> list[tuple[str, list[tuple[str, str]]]]:
    """(title, [(field, value)]) of what planning needs; fields that a model does not use are left out."""
    model, training, present = job.model, job.training, job.present
    rows: list[tuple[str, object]] = [
        ("model.num_layers", model.num_layers),
        ("model.hidden", model.hidden),
        ("model.num_heads", model.num_heads),
        ("model.num_kv_heads", None if model.mla else model.num_kv_heads),
        ("model.mla", "multi-latent attention" if model.mla else None),
        ("model.ffn_hidden", model.ffn_hidden),
        ("model.vocab_size", model.vocab_size or "not known: give --vocab-size"),
        ("model.mtp_layers", model.mtp_layers or None),
    ]
    if moe := model.moe:
        rows += [
            ("model.moe.num_experts", moe.num_experts),
            ("model.moe.top_k", moe.top_k),
            ("model.moe.ffn_hidden", moe.ffn_hidden),
            ("model.moe.shared_ffn_hidden", moe.shared_ffn_hidden or None),
            ("model.moe.pattern", f"{sum(moe.pattern)} of {model.num_layers} layers hold experts"),
        ]
    trained: list[tuple[str, object]] = [
        ("training.seq_len", training.seq_len),
        ("training.global_batch_size", training.global_batch_size or "not known"),
        ("training.precision", training.precision + (f", fp8 {training.fp8_recipe}" if training.fp8_recipe else "")),
        ("training.optimizer", training.optimizer),
        ("training.distributed_optimizer", "yes" if training.distributed_optimizer else "no"),
        ("training.dispatcher", training.dispatcher if model.moe else None),
    ]
    now: list[tuple[str, object]] = [
        *((f"present.{axis}", getattr(present, axis)) for axis in ("tp", "cp", "ep", "etp", "pp", "vpp")),
        ("present.micro_batch_size", present.micro_batch_size),
        ("present.recompute", describe_recompute(present.recompute)),
        ("present.world_size", present.world_size),
    ]
    titled = (("Model", rows), ("Training", trained), ("Present configuration (a plan replaces it)", now))
    return [(title, [(f, _number(v)) for f, v in group if v is not None]) for title, group in titled]


def _number(value: object) -> str:
    if isinstance(value, int) and value >= 1_000_000:
        return f"{value:,} ({format_count(value)})"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _show_job_rows(title: str, rows: Sequence[tuple[str, str]], origin: dict[str, str]) -> RenderableType:
    table = make_table(title, "value", "from")
    table.columns[0].min_width = 24
    for field, value in rows:
        table.add_row(field.split(".", 1)[1], cell(value), cell(origin.get(field, ""), style="dim"))
    return table
