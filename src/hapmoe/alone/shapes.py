"""Which kernels to measure: those that a job's layers need at the degrees a plan may choose, or a grid."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import numpy as np

from hapmoe.cluster import Device
from hapmoe.efficiency import attention_seconds, efficiency_of, gemm_seconds
from hapmoe.job import JobSpec
from hapmoe.measured import Compute
from hapmoe.options import Options
from hapmoe.units import DTYPE_BYTES
from hapmoe.workload import Shapes, embedding_ops, head_ops, layer_classes, layer_ops

__all__ = ["expected_s", "grid", "of_job"]

_UNMEASURED = {"run": "", "median_s": 1.0, "p10_s": 1.0, "p90_s": 1.0, "samples": 1}


def _key(op: str, precision: str, **shape: int | str) -> Compute:
    return Compute(op=op, precision=precision, **_UNMEASURED, **shape)  # type: ignore[arg-type]


def grid(precision: str) -> tuple[Compute, ...]:
    """Shapes of today's models in factors of four: what other shapes are interpolated between."""
    rows = [_key("gemm", precision, m=m, n=n, k=k) for m, n, k in product((1024, 4096, 16384), repeat=3)]
    rows += [
        _key("grouped_gemm", precision, m=m, n=n, k=k, groups=groups)
        for groups, m, (n, k) in product((2, 8, 32), (128, 1024), ((4096, 2048), (2048, 4096), (14336, 4096)))
    ]
    rows += [
        _key("attention", precision, m=seq, n=seq, k=128, groups=heads, direction=direction)
        for seq, heads, direction in product((2048, 4096, 16384), (4, 32), ("forward", "backward"))
    ]
    rows += [_key("norm", precision, m=m, n=n) for m, n in product((1024, 4096, 16384), (1024, 4096))]
    rows += [_key("permute", precision, m=m, n=n) for m, n in product((1024, 4096, 16384), (1024, 4096))]
    rows += [_key("copy", precision, m=4**power) for power in range(8, 15)]
    rows += [_key("adam", "fp32", m=m) for m in (2**22, 2**26)]
    return tuple(rows)


def of_job(job: JobSpec, *, most_devices: int = 8) -> tuple[Compute, ...]:
    """Every GEMM, attention and size of element-wise work of the job's layers, all three passes.

    Degrees are powers of two: tp, ep and etp up to ``most_devices``, one and two sequences a microbatch.
    """
    powers = [2**power for power in range(most_devices.bit_length())]
    experts = job.model.moe.num_experts if job.model.moe else 1
    degrees = [
        (tp, 1, ep, etp, max(ep * etp // tp, 1), mbs)
        for tp, ep, etp, mbs in product(powers, powers, powers, (1, 2))
        if ep * etp <= most_devices and experts % ep == 0 and etp <= tp
    ]
    columns = (np.array(column, dtype=np.int64) for column in zip(*degrees, strict=True))
    shapes = Shapes.of(job, Options(*columns))
    ops = [op for kind in layer_classes(job) for op in layer_ops(shapes, kind)]
    ops += [*embedding_ops(shapes), *head_ops(shapes)]
    precision = job.training.precision
    low = "fp8" if job.training.fp8_recipe else precision
    count = len(degrees)
    found: set[Compute] = set()
    for op in ops:
        m, n, k, groups = (np.broadcast_to(value, count) for value in (op.m_K, op.n_K, op.k_K, op.groups_K))
        if op.kind in ("gemm", "grouped_gemm"):
            for a, b, c in ((m, n, k), (m, k, n), (n, k, m)):
                whole = (np.rint(value).astype(int).tolist() for value in (a, b, c, groups))
                for m_, n_, k_, groups_ in set(zip(*whole, strict=True)):
                    if min(m_, n_, k_, groups_) > 0:
                        kind = low if op.kind == "grouped_gemm" or not op.precision else precision
                        found.add(_key(op.kind, kind, m=m_, n=n_, k=k_, groups=groups_))
        elif op.kind == "attention":
            v = np.broadcast_to(op.flops_K / (2.0 * m * n * groups) - k, count)
            for row in range(count):
                queries, width, heads = int(m[row]), int(k[row]), max(int(groups[row]), 1)
                values = {"v": round(float(v[row]))} if round(float(v[row])) != width else {}
                for way in ("forward", "backward"):
                    shape_ = {"m": queries, "n": round(2 * n[row]), "k": width, "groups": heads, **values}
                    found.add(_key("attention", precision, direction=way, **shape_))
    sizes = [value for op in ops if op.kind == "elementwise" for value in np.ravel(op.bytes_K).tolist() if value]
    lowest, highest = min(sizes) / 2, max(sizes) / 2
    steps = max(int(np.log(highest / lowest) / np.log(4)) + 2, 2)
    found |= {_key("copy", precision, m=int(size)) for size in np.geomspace(lowest, highest, steps)}
    tokens = {int(value) for value in shapes.shard_K.tolist()}
    found |= {_key(op, precision, m=m, n=job.model.hidden) for op in ("norm", "permute") for m in tokens}
    found |= {_key("adam", "fp32", m=m) for m in (2**22, 2**26)}
    return tuple(sorted(found, key=lambda row: row.key))


def expected_s(device: Device, rows: Iterable[Compute]) -> dict[Compute, float]:
    """About how long one call of each takes, by the model: what the time before starting is reckoned from."""
    efficiency = efficiency_of(device)
    result = {}
    for row in rows:
        precision = row.precision if row.precision in efficiency.peak else next(iter(efficiency.peak))
        m, n, k, groups = (np.array([float(value)]) for value in (row.m, row.n, row.k, row.groups))
        if row.op in ("gemm", "grouped_gemm"):
            seconds = float(gemm_seconds(efficiency, m, n, k, groups_K=groups, precision=precision)[0][0])
        elif row.op == "attention":
            flops = 2.0 * m * n * k * groups * (2.5 if row.direction == "backward" else 1.0)
            seconds = float(attention_seconds(efficiency, flops, m, groups, precision=precision)[0])
        else:
            moved = {"copy": 2.0 * row.m, "adam": 28.0 * row.m}  # Adam in fp32 reads 4 tensors and writes 3
            traffic = moved.get(row.op, 2.0 * DTYPE_BYTES[precision] * row.m * row.n)
            seconds = traffic / efficiency.memory_bytes_per_s
        result[row] = seconds + efficiency.launch_s
    return result
