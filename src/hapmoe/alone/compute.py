"""Kernels by shape: each set up once, timed several times, and given back as a row of a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from hapmoe.alone.machine import Machine, timings
from hapmoe.alone.spread import spread
from hapmoe.measured import Compute

__all__ = ["measure"]

_TYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def measure(machine: Machine, key: Compute, run: str, *, share_s: float) -> Compute | str:
    """The row of one kernel, or why it cannot be measured here (out of memory, no such kernel)."""
    try:
        act = _SETUPS[key.op](machine, key)
        timed = timings(machine, act, share_s=share_s)
    except (RuntimeError, NotImplementedError, AttributeError, ValueError) as error:
        return str(error).strip().split("\n")[0][:160] or type(error).__name__
    finally:
        if machine.devices is not None:
            machine.devices.empty_cache()
    return msgspec.structs.replace(key, run=run, **spread(timed))


def _random(machine: Machine, precision: str, *shape: int) -> Any:
    torch = machine.torch
    type_ = getattr(torch, _TYPES.get(precision, "bfloat16"))
    # small values: power, and with it the clock, depends on the bits that flip
    return torch.randn(shape, device=machine.type, dtype=torch.float32).mul_(0.1).to(type_)


def _gemm(machine: Machine, key: Compute) -> Callable[[], object]:
    torch = machine.torch
    if key.precision == "fp8":
        a, b = (_random(machine, "bf16", rows, key.k).to(torch.float8_e4m3fn) for rows in (key.m, key.n))
        one = torch.ones((), device=machine.type)
        return lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    a, b = _random(machine, key.precision, key.m, key.k), _random(machine, key.precision, key.n, key.k)
    return lambda: torch.nn.functional.linear(a, b)  # weights lie as Megatron's do: [out, in]


def _grouped(machine: Machine, key: Compute) -> Callable[[], object]:
    torch = machine.torch
    a = _random(machine, key.precision, key.groups, key.m, key.k)
    b = _random(machine, key.precision, key.groups, key.k, key.n)
    grouped = getattr(torch.nn.functional, "grouped_mm", None)
    if grouped is None or key.precision != "bf16" or machine.type == "cpu":
        return lambda: torch.bmm(a, b)  # groups of equal size are a batch
    rows = a.reshape(-1, key.k)
    ends = torch.arange(1, key.groups + 1, device=machine.type, dtype=torch.int32) * key.m
    return lambda: grouped(rows, b, offs=ends)


def _attention(machine: Machine, key: Compute) -> Callable[[], object]:
    def heads(length: int, width: int) -> Any:
        made = _random(machine, key.precision, 1, key.groups, length, width)
        return made.requires_grad_(key.direction == "backward")

    query, keys, values = heads(key.m, key.k), heads(key.n, key.k), heads(key.n, key.v or key.k)
    attend = machine.torch.nn.functional.scaled_dot_product_attention

    def forward() -> Any:
        return attend(query, keys, values, is_causal=key.m == key.n)

    return forward if key.direction == "forward" else _backward(forward)


def _backward(forward: Callable[[], Any]) -> Callable[[], object]:
    out = forward()
    grad = out.detach().clone()
    return lambda: out.backward(grad, retain_graph=True)


def _norm(machine: Machine, key: Compute) -> Callable[[], object]:
    x, weight = _random(machine, key.precision, key.m, key.n), _random(machine, key.precision, key.n)
    return lambda: machine.torch.nn.functional.rms_norm(x, (key.n,), weight)


def _permute(machine: Machine, key: Compute) -> Callable[[], object]:
    x = _random(machine, key.precision, key.m, key.n)
    order = machine.torch.randperm(key.m, device=machine.type)
    return lambda: x.index_select(0, order)


def _copy(machine: Machine, key: Compute) -> Callable[[], object]:
    source = machine.torch.empty(max(key.m, 1), dtype=machine.torch.uint8, device=machine.type)
    target = machine.torch.empty_like(source)
    return lambda: target.copy_(source)


def _adam(machine: Machine, key: Compute) -> Callable[[], object]:
    weight = machine.torch.nn.Parameter(_random(machine, "fp32", key.m))
    weight.grad = machine.torch.ones_like(weight)
    return machine.torch.optim.AdamW([weight], lr=1e-6, fused=machine.type != "npu").step  # type: ignore[no-any-return]


_SETUPS: dict[str, Callable[[Machine, Compute], Callable[[], object]]] = {
    "gemm": _gemm,
    "grouped_gemm": _grouped,
    "attention": _attention,
    "norm": _norm,
    "permute": _permute,
    "copy": _copy,
    "adam": _adam,
}
