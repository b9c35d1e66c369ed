"""Redirects torch.cuda and a few calls of torch.distributed, so that unmodified Megatron-Core trains on CPU with gloo.

Megatron's own code is not touched here (``patches`` does what has to be done there). ``install`` must
run before megatron is imported, because some of its modules bind these functions at import.
"""

from __future__ import annotations

import collections
import functools
import os
import resource
import sys
import time
import types
from collections.abc import Callable
from typing import Any

from hapmoe.lab import patches

__all__ = ["install"]

DEVICE_NAME = "hapmoe-lab-cpu"
_BELIEVERS = frozenset({"megatron", "__main__", "gpt_builders", "model_provider", "hapmoe"})
"""Top-level modules that are told that CUDA is available; torch itself must not believe it."""
_FACTORIES = (
    *("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "randperm", "eye", "linspace"),
    *("as_tensor", "empty_strided", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
    "load",
)
_installed = False


def install() -> None:
    """Redirect everything, once per process."""
    global _installed
    if _installed:
        return
    _installed = True
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # Megatron's jit_fuser is torch.compile
    import torch

    _redirect_cuda(torch)
    _redirect_tensors(torch)
    _redirect_collectives(torch)
    patches.install()


class _Stream:
    """A stream on which everything is always done."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = "cpu"
        self.cuda_stream = 0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event

    def __getattr__(self, name: str) -> Callable[..., bool]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: True


class _Event:
    """A moment of the host's clock."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.moment_s = 0.0

    def record(self, _: Any = None) -> None:
        self.moment_s = time.perf_counter()

    def elapsed_time(self, other: _Event) -> float:
        return (other.moment_s - self.moment_s) * 1e3

    def query(self) -> bool:
        return True

    def wait(self, _: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Context:
    """Stands for torch.cuda.stream and torch.cuda.device."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> _Context:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class _Generators:
    """torch.cuda.default_generators: the one of the CPU, whatever the index."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __getitem__(self, _: int) -> Any:
        return self.generator

    def __len__(self) -> int:
        return 1


def _resident_bytes(*_: Any) -> int:
    with open("/proc/self/statm") as stream:
        return int(stream.read().split()[1]) * resource.getpagesize()


def _peak_bytes(*_: Any) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _cuda_available() -> bool:
    return sys._getframe(1).f_globals.get("__name__", "").split(".")[0] in _BELIEVERS


def _redirect_cuda(torch: Any) -> None:
    cuda, cpu, one = torch.cuda, torch.device("cpu"), _Stream()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    properties = types.SimpleNamespace(
        name=DEVICE_NAME, major=8, minor=0, multi_processor_count=os.cpu_count(), total_memory=total
    )
    values: dict[str, Any] = {
        "is_available": _cuda_available,
        "current_device": lambda: cpu,
        "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "get_device_name": lambda *_: DEVICE_NAME,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (8, 0),
        "current_stream": lambda *_: one,
        "default_stream": lambda *_: one,
        "is_current_stream_capturing": lambda: False,
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "utilization": lambda *_: 0,
        "memory_allocated": _resident_bytes,
        "memory_reserved": _resident_bytes,
        "max_memory_allocated": _peak_bytes,
        "max_memory_reserved": _peak_bytes,
        "mem_get_info": lambda *_: (total - _resident_bytes(), total),
        "memory_stats": lambda *_: collections.defaultdict(int),
        "stream": type("stream", (_Context,), {}),
        "device": type("device", (_Context,), {}),
        "Stream": _Stream,
        "ExternalStream": _Stream,
        "Event": _Event,
        "default_generators": _Generators(torch.default_generator),
        "_lazy_init": _fresh(_nothing),
        "_lazy_call": lambda act, **_: act(),
    }
    for name in ("set_device", "synchronize", "empty_cache", "set_stream", "manual_seed_all", "ipc_collect"):
        values[name] = _fresh(_nothing)
    values["reset_peak_memory_stats"] = _fresh(_nothing)
    for name, value in values.items():
        setattr(cuda, name, value)
    cuda.random.get_rng_state, cuda.random.set_rng_state = cuda.get_rng_state, cuda.set_rng_state
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, _fresh(_nothing))


def _fresh(act: Callable[..., Any]) -> Callable[..., Any]:
    """A function object of its own: torch refuses to know one object by two names."""
    return lambda *args, **kwargs: act(*args, **kwargs)


def _redirect_tensors(torch: Any) -> None:
    """Whatever asks for a CUDA device, by name, number or device object, gets the CPU."""
    cpu, tensor, module = torch.device("cpu"), torch.Tensor, torch.nn.Module

    def is_cuda(value: Any) -> bool:
        if isinstance(value, str):
            return value.startswith("cuda")
        if type(value) is int:
            return True
        return isinstance(value, torch.device) and value.type == "cuda"

    def on_cpu(act: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(act)
        def make(*args: Any, **kwargs: Any) -> Any:
            if is_cuda(kwargs.get("device")):
                kwargs["device"] = cpu
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            return act(*args, **kwargs)

        return make

    def to_cpu(act: Callable[..., Any]) -> Callable[..., Any]:
        def to(self: Any, *args: Any, **kwargs: Any) -> Any:
            moved = tuple(cpu if is_cuda(value) else value for value in args)
            if is_cuda(kwargs.get("device")):
                kwargs["device"] = cpu
            return act(self, *moved, **kwargs)

        return to

    for name in _FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))
    for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"):
        setattr(tensor, name, on_cpu(getattr(tensor, name)))
    tensor.to, module.to = to_cpu(tensor.to), to_cpu(module.to)
    tensor.cuda = lambda self, *_, **__: self
    module.cuda = lambda self, *_, **__: self
    tensor.pin_memory = lambda self, *_: self
    tensor.record_stream = _fresh(_nothing)
    type_of = tensor.type

    def typed(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Megatron's optimizers test for 'torch.cuda.FloatTensor'
        if dtype is None:
            return type_of(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return type_of(self, dtype, *args, **kwargs)

    tensor.type = typed


def _redirect_collectives(torch: Any) -> None:
    """What gloo does not take: device ids, means, sizes given as tensors, lists of uneven tensors."""
    dist = torch.distributed
    barrier, exchange = dist.barrier, dist.all_to_all_single
    gather, scatter, reduce = dist.all_gather, dist.reduce_scatter, dist.all_reduce
    add, mean = dist.ReduceOp.SUM, dist.ReduceOp.AVG

    def all_barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return barrier(group=group, async_op=async_op)

    def all_reduce(tensor: Any, op: Any = add, group: Any = None, async_op: bool = False) -> Any:
        if op != mean or async_op:
            return reduce(tensor, op=op, group=group, async_op=async_op)
        reduce(tensor, group=group)
        tensor.div_(dist.get_world_size(group))
        return None

    def numbers(sizes: Any) -> Any:
        return sizes.tolist() if torch.is_tensor(sizes) else sizes

    def all_to_all_single(
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return exchange(output, input, numbers(output_split_sizes), numbers(input_split_sizes), group, async_op)

    def rows(tensors: Any) -> list[int]:
        return [one.shape[0] if one.dim() else 1 for one in tensors]

    def padded(one: Any, most: int) -> Any:
        result = one.new_zeros((most, *one.shape[1:]))
        result[: one.shape[0]] = one
        return result

    def all_gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        counts = rows(tensor_list)
        if async_op or len(set(counts)) <= 1:
            return gather(tensor_list, tensor, group=group, async_op=async_op)
        whole = padded(tensor, max(counts))
        received = [torch.empty_like(whole) for _ in counts]
        gather(received, whole, group=group)
        for output, source, count in zip(tensor_list, received, counts, strict=True):
            output.copy_(source[:count])
        return None

    def reduce_scatter(output: Any, input_list: Any, op: Any = add, group: Any = None, async_op: bool = False) -> Any:
        counts = rows(input_list)
        if async_op or len(set(counts)) <= 1:
            inputs = [one.contiguous() for one in input_list]
            return scatter(output, inputs, op=op, group=group, async_op=async_op)
        inputs = [padded(one, max(counts)) for one in input_list]
        whole = torch.empty_like(inputs[0])
        scatter(whole, inputs, op=op, group=group)
        output.copy_(whole[: output.shape[0]])
        return None

    dist.barrier, dist.all_to_all_single = all_barrier, all_to_all_single
    dist.all_gather, dist.reduce_scatter, dist.all_reduce = all_gather, reduce_scatter, all_reduce
