"""Measured figures as values: rows of a table, and where they come from.

Seconds, bytes and token counts as they were measured on a device; nothing here is computed or
assumed. How tables are kept in files and folders: ``hapmoe.tables``. Every row names its ``run``, the
occasion on which it was measured; the same row from two runs stands twice, and who looks it up takes
the later one.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, ClassVar

import msgspec

__all__ = [
    "KINDS",
    "Borrowed",
    "Calibration",
    "Collective",
    "Compute",
    "Measurements",
    "Memory",
    "Piece",
    "Routing",
    "Row",
    "Run",
    "Table",
]


Seconds = Annotated[float, msgspec.Meta(gt=0.0, le=1e6)]
"""Of a measured event: above nothing, below eleven days."""
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, order=True):
    """What all rows have. ``VALUES`` of a kind are measured; every other field says what of."""

    VALUES: ClassVar[frozenset[str]] = frozenset()

    run: str
    """Identifier of a ``Run`` of the same table (``Run.id``)."""

    @property
    def key(self) -> tuple[object, ...]:
        """What was measured, without when and how much came out."""
        skipped = self.VALUES | {"run"}
        return tuple(getattr(self, name) for name in self.__struct_fields__ if name not in skipped)


_TIMED = frozenset({"median_s", "p10_s", "p90_s", "samples"})


class Compute(Row, frozen=True, kw_only=True, forbid_unknown_fields=True, order=True):
    """One kernel alone on an otherwise idle device: its time by shape.

    gemm: ``[m, k] x [k, n]``. grouped_gemm: ``groups`` (experts) of them, ``m`` rows each.
    attention: causal, ``groups`` heads times sequences, ``m`` queries and ``n`` keys of width ``k``.
    norm: ``m`` rows of ``n``. copy: ``m`` bytes read and ``m`` written (element-wise work in general).
    permute: ``m`` rows of ``n`` gathered by index. adam: one optimizer step of ``m`` parameters.
    """

    VALUES: ClassVar[frozenset[str]] = _TIMED

    op: str
    """gemm, grouped_gemm, attention, norm, copy, permute or adam."""
    direction: str = "forward"
    """forward; backward where one call does it all (attention, norm). The two GEMMs of a backward
    pass are rows of their own shape."""
    precision: str = "bf16"
    m: Count = 0
    n: Count = 0
    k: Count = 0
    v: Count = 0
    """attention: width of the values where it is not ``k``; 0: it is."""
    groups: Positive = 1
    median_s: Seconds
    p10_s: Seconds
    p90_s: Seconds
    samples: Positive
    """Timings behind the three figures, outliers left out."""


class Collective(Row, frozen=True, kw_only=True, forbid_unknown_fields=True, order=True):
    """One collective, by the bytes that a rank holds (``hapmoe.comm``'s convention).

    All-reduce and all-to-all: the rank's whole buffer; all-gather: the result; reduce-scatter: the
    input; send_recv: the message. nccl-tests' "size" column means the same except for all-gather and
    reduce-scatter, where it agrees too (the larger buffer).
    """

    VALUES: ClassVar[frozenset[str]] = _TIMED

    collective: str
    """all_reduce, all_gather, reduce_scatter, all_to_all or send_recv."""
    link: str
    """What the group crosses: ``node`` (the scale-up link), ``network`` (nodes of one pool) or the
    names of two pools, ``a--b``, in alphabetical order."""
    ranks: Positive
    ranks_per_node: Positive
    """Members on one node; ``ranks`` where the group lives on one node."""
    bytes: Count
    setting: str = "alone"
    """``alone``: nothing else runs (the table that predictions use). ``training``: as a training step
    waited for it, peers' delays included (shown beside the prediction by ``calibrate``)."""
    axis: str = ""
    """Training only: tp, cp, ep, etp, tp_ep, dp, edp or pp, where the group is known."""
    calls_per_step: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    """Training only: calls of this size in one step of one rank; 0: not counted."""
    median_s: Seconds
    p10_s: Seconds
    p90_s: Seconds
    samples: Positive


class _InTraining(Row, frozen=True, kw_only=True, forbid_unknown_fields=True, order=True):
    """Where in which training run something was measured."""

    model: str
    """``tables.shape_key(job)``: the layer shapes, without the number of layers."""
    precision: str
    seq_len: Positive
    micro_batch_size: Positive
    tp: Positive = 1
    cp: Positive = 1
    ep: Positive = 1
    etp: Positive = 1
    dp: Positive = 1
    """Replicas of this stage (tp * cp * dp ranks hold it)."""
    recompute: str = "none"
    """none, ``full:block:4``, ``full:uniform:1`` or ``selective:core_attn+moe_act``."""
    dense_layers: Count = 0
    moe_layers: Count = 0
    embedding: Count = 0
    head: Count = 0
    """Final norm, logits and loss."""
    mtp_layers: Count = 0


class Piece(_InTraining, frozen=True, kw_only=True, forbid_unknown_fields=True, order=True):
    """Part of a training step on one rank: a layer, a stage, an optimizer step.

    ``dense_layers``, ``moe_layers``, ``embedding``, ``head`` and ``mtp_layers`` count what ran in the
    time: a single MoE layer has ``moe_layers=1``; the forward pass of a whole first stage with three
    of them ``moe_layers=3, embedding=1``. Either way the lookup finds what one of each takes.
    """

    VALUES: ClassVar[frozenset[str]] = _TIMED | {"comm_s"}

    phase: str
    """forward or backward (of one microbatch), optimizer (one step, ``params`` say of how many
    parameters), or step (all of it)."""
    params: Count = 0
    """optimizer: parameters that the rank holds."""
    expert_params: Count = 0
    """optimizer: those of them that belong to experts."""
    num_microbatches: Positive = 1
    """step: microbatches in it; 1 otherwise."""
    clock: str = "device"
    """``device`` (events, or wall time with the device synchronised), ``wall``, or ``cpu`` (process
    time: what a rank of the CPU lab computes, waiting left out)."""
    comm_s: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)] = 0.0
    """Seconds of ``median_s`` that were collectives; the rest is compute."""
    median_s: Seconds
    p10_s: Seconds
    p90_s: Seconds
    samples: Positive


class Memory(_InTraining, frozen=True, kw_only=True, forbid_unknown_fields=True, order=True):
    """Bytes of one rank's device at a mark of a training run."""

    VALUES: ClassVar[frozenset[str]] = frozenset({"bytes", "samples"})

    mark: str
    """model (weights and gradients are there), optimizer (its state too), allocated (peak of a step
    by the framework's count), reserved (peak with the allocator's slack), device (all of the
    device's memory in use, the driver's count)."""
    stage: Count = 0
    pp: Positive = 1
    in_flight: Positive = 1
    """Microbatches whose activations the stage holds at its fullest (chunks with vpp)."""
    bytes: Count
    samples: Positive = 1


class Routing(Row, frozen=True, kw_only=True, forbid_unknown_fields=True, order=True):
    """Tokens that each expert of one layer got from one microbatch (of all ranks that share experts)."""

    VALUES: ClassVar[frozenset[str]] = frozenset({"tokens"})

    layer: Count
    """Decoder layer, from 0, counted over the whole model."""
    step: Count = 0
    microbatch: Count = 0
    replica: Count = 0
    """Which expert-parallel group (0 .. edp - 1); the sum over them is a step's load."""
    tokens: tuple[Count, ...]
    """One count per expert, in the order of the experts; routed copies, before anything is dropped."""


class Calibration(Row, frozen=True, kw_only=True, forbid_unknown_fields=True, order=True):
    """What whole training steps say of one term of the cost model on a device kind (``hapmoe calibrate``)."""

    VALUES: ClassVar[frozenset[str]] = frozenset({"value", "samples", "error_before", "error_after"})

    term: str
    """compute, communication or optimizer (``value`` is measured over modelled seconds), or workspace
    (``value`` is bytes on top of the model's)."""
    model: str
    """``tables.shape_key(job)`` of the job that was trained."""
    value: float
    samples: Positive
    """Runs that it was fitted on."""
    error_before: float = 0.0
    """Median error of the step time, as a fraction, on runs left out of the fit; 0: there was one run only."""
    error_after: float = 0.0


KINDS: dict[str, type[Row]] = {
    "compute": Compute,
    "collectives": Collective,
    "pieces": Piece,
    "memory": Memory,
    "routing": Routing,
    "calibration": Calibration,
}
"""What a table may hold, by the name of its kind."""


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, order=True):
    """One occasion on which rows were measured."""

    date: str
    """When it began, ISO 8601 in UTC: ``2026-11-30T10:48:00Z``."""
    command: str = ""
    """What was typed; for imported files what was read."""
    clocks: str = ""
    """Clocks and power limits as the driver tells them ("graphics 1980 MHz, memory 2619 MHz, 700 W")."""
    hosts: int = 1
    """Machines that took part. Their names are not kept."""
    note: str = ""
    """What else is worth knowing: thread limits, quotas, "imported"."""
    partial: bool = False
    """Not all that was asked for is there: the run stopped early."""

    @property
    def id(self) -> str:
        """Eight hexadecimal digits that follow from the run's own fields."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:8]


class Borrowed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, order=True):
    """A table that stands in for a device it was not measured on."""

    device: str
    """The catalogue name of the kind that borrows."""
    reason: str
    by: str = ""
    """Who said so."""


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows of one kind, from one device with one set of software.

    Two tables belong into one file when ``identity`` agrees; shapes are the rows' business.
    """

    kind: str
    """compute, collectives, pieces, memory or routing."""
    device: str
    """As the driver names it: ``NVIDIA H100 80GB HBM3``; empty for routing, which no device shapes."""
    device_kind: str = ""
    """The name that cluster files give it, where the driver's does not say it (catalogue or own)."""
    software: dict[str, str] = {}
    """Versions by name: driver, cuda, torch, nccl, megatron-core … those that matter to the rows."""
    borrowed: tuple[Borrowed, ...] = ()
    runs: tuple[Run, ...] = ()
    rows: tuple[Row, ...] = ()

    @property
    def identity(self) -> tuple[object, ...]:
        """Kind, device and software."""
        return self.kind, self.device, self.device_kind, tuple(sorted(self.software.items()))


class Measurements(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known by measurement of one pool: the latest row for each key, of all tables that concern it."""

    sha256: str
    """Over everything below."""
    compute: tuple[Compute, ...] = ()
    collectives: tuple[Collective, ...] = ()
    """Of one pool, or of the link between two."""
    pieces: tuple[Piece, ...] = ()
    memory: tuple[Memory, ...] = ()
    calibration: tuple[Calibration, ...] = ()
    notes: tuple[str, ...] = ()
    """What was borrowed, from which device, and why."""

    def __hash__(self) -> int:
        return hash(self.sha256)
