"""Measured tables: files of figures with their provenance, kept in a folder, used in place of the model.

What a figure is, is a row of ``hapmoe.measured`` (``Compute``, ``Collective``, ``Piece``, ``Memory``,
``Routing``); a ``Table`` holds rows of one kind from one device and one set of software, with the
``Run`` that each was measured in. To put results into a folder::

    from hapmoe import tables
    from hapmoe.measured import Piece, Run, Table

    run = Run(date="2026-11-30T10:48:00Z", command="hapmoe profile train.sh", clocks="1980 MHz")
    rows = (
        # one microbatch forward through a first stage of three MoE layers, on one rank
        Piece(run=run.id, model=tables.shape_key(job), precision="bf16", seq_len=4096, micro_batch_size=1,
              tp=2, ep=4, etp=1, dp=4, moe_layers=3, embedding=1, phase="forward", clock="device",
              median_s=0.0123, p10_s=0.0122, p90_s=0.0127, samples=48, comm_s=0.0021),
    )
    table = Table(kind="pieces", device="NVIDIA H100 80GB HBM3", software={"torch": "2.13.0"}, runs=(run,), rows=rows)
    tables.save("hapmoe-tables", table)       # whole or not at all; adds to what is there; locked

``device`` is what the driver says (``torch.cuda.get_device_name()``, ``cpu`` on a machine without
accelerators); ``device_kind`` is needed only where that does not name a kind of the cluster file, such
as two "kinds" made of one CPU by quotas. Save after each finished run rather than once at the end: a
second ``save`` with the same ``Run`` adds to it, and ``missing`` says what is still to be measured.

Numbers are as measured, outliers left out (``samples`` counts what stayed): seconds of the median,
10th and 90th percentile; bytes. A collective inside a training step has ``setting="training"``,
``axis`` and ``calls_per_step``; routing is one row per layer, step, microbatch and replica.
"""

from hapmoe.tables.attach import attach
from hapmoe.tables.files import decode, encode, file_name
from hapmoe.tables.keys import recompute_word, shape_key
from hapmoe.tables.store import load, merge, missing, newest, read, save

__all__ = [
    "attach",
    "decode",
    "encode",
    "file_name",
    "load",
    "merge",
    "missing",
    "newest",
    "read",
    "recompute_word",
    "save",
    "shape_key",
]
