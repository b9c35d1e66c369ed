"""The few changes inside megatron.core that it needs without Transformer Engine, Apex and triton; in memory only."""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import re
import resource
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from hapmoe.probe.imports import when_imported

__all__ = ["install"]


def install() -> None:
    """Arrange every patch for the moment at which its module is imported."""
    import typing

    if not hasattr(typing, "override"):  # newer Megatron takes it from Python 3.12
        typing.override = lambda method: method  # type: ignore[attr-defined]
    when_imported("megatron.legacy.fused_kernels", _no_kernels)
    when_imported("megatron.core.transformer.moe.moe_utils", _no_te_gemm)
    when_imported("megatron.core.fp8_utils", _no_shards)
    when_imported("megatron.core.transformer.torch_norm", _mark_norms)
    when_imported("megatron.core.transformer.dot_product_attention", _gather_keys)
    when_imported("megatron.core.transformer.multi_latent_attention", _no_te_classes)
    when_imported("megatron.core.dist_checkpointing.strategies.filesystem_async", _own_memory)
    when_imported("megatron.core.optimizer.distrib_optimizer", _keep_step)
    if importlib.util.find_spec("triton") is None and not any(isinstance(f, _Stub) for f in sys.meta_path):
        sys.meta_path.insert(0, _Stub())


def _no_kernels(module: Any) -> None:
    module.load = lambda _: None  # it would look for nvcc


def _no_te_gemm(module: Any) -> None:
    # 0.16.x without Transformer Engine: the router asks for a name that was never imported
    module.__dict__.setdefault("te_general_gemm", None)


def _no_shards(module: Any) -> None:
    # 0.12 without Transformer Engine refuses to quantize, even if there is nothing to quantize
    quantize = getattr(module, "_quantize_param_shard_impl", None)
    if quantize is not None:
        module._quantize_param_shard_impl = lambda params, *rest: quantize(params, *rest) if params else None


def _no_te_classes(module: Any) -> None:
    # asked "is it one of Transformer Engine's?", where the names stand for nothing
    for name in ("TEColumnParallelLinear", "TELinear"):
        if not isinstance(getattr(module, name, None), type):
            setattr(module, name, type(name, (), {}))


def _mark_norms(module: Any) -> None:
    """torch's norms under sequence parallelism lack only the mark by which their gradients are summed over tp."""
    make = module.WrappedTorchNorm.__new__

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = plain.persist_layer_norm = plain.memory_efficient_layer_norm = False
        norm = make(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    module.WrappedTorchNorm.__new__ = new


def _gather_keys(module: Any) -> None:
    """Context parallelism and heads of unequal widths (MLA) for the local attention, which refuses both.

    K and V of the whole sequence are gathered, in Megatron's order: rank r of n holds the r-th and the
    (2n-1-r)-th of 2n pieces (utils.get_batch_on_this_cp_rank).
    """
    attention = module.DotProductAttention
    init, run = attention.__init__, attention.forward

    def init_whole(
        self: Any,
        config: Any,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        init(self, alone, *args, **kwargs)
        self.config = config
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    def forward(self: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        ranks = self.config.context_parallel_size
        if ranks > 1:
            import torch
            from megatron.core import parallel_state
            from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

            group, rank = parallel_state.get_context_parallel_group(), parallel_state.get_context_parallel_rank()
            size = key.size(0) // 2
            pieces = [piece for other in range(ranks) for piece in (other, 2 * ranks - 1 - other)]
            order = torch.cat([torch.arange(piece * size, (piece + 1) * size) for piece in pieces])
            back, mine = torch.argsort(order), order[rank * 2 * size : (rank + 1) * 2 * size]
            key, value = (
                gather_from_sequence_parallel_region(one.contiguous(), True, group=group)[back] for one in (key, value)
            )
            attention_mask = (torch.arange(len(order))[None, :] > mine[:, None])[None, None]
        return run(self, query, key, value, attention_mask, *args, **kwargs)

    attention.__init__, attention.forward = init_whole, forward


def _own_memory(module: Any) -> None:
    # for a log line the writers ask psutil, which is not installed with megatron-core, and die without it
    if not getattr(module, "HAVE_PSUTIL", False):
        module._process_memory = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    # 0.12 calls torch as it was in its time; newer torch wants to know the format too
    write = getattr(module, "_write_item", None)
    if write is not None and "serialization_format" not in inspect.getsource(module):
        wanted = inspect.signature(write).parameters
        if "serialization_format" in wanted:
            from torch.distributed.checkpoint.filesystem import SerializationFormat

            module._write_item = functools.partial(write, serialization_format=SerializationFormat.TORCH_SAVE)


def _keep_step(module: Any) -> None:
    """Loading a fully reshardable checkpoint: torch's Adam has "step" beside the moments, which are all that is saved.

    Megatron has set the step before (load_state_dict); TE's and Apex's Adam have none there.
    """
    optimizer = module.DistributedOptimizer
    copy_in = optimizer._set_main_param_and_optimizer_states

    def copy_with_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        copy_in(self, model_param, {**{name: value for name, value in state.items() if name == "step"}, **tensors})

    optimizer._set_main_param_and_optimizer_states = copy_with_step
    state_of = optimizer.state_dict

    def state_dict(self: Any) -> Any:
        # a rank without experts has an empty optimizer for them; only torch's Adam then lacks a step
        group = self.optimizer.param_groups[0]
        if any(one["params"] for one in self.optimizer.param_groups):
            return state_of(self)
        import torch

        stand_in = torch.nn.Parameter(torch.zeros(1))
        group["params"].append(stand_in)
        self.optimizer.state[stand_in] = {"step": torch.tensor(0.0)}
        try:
            return state_of(self)
        finally:
            group["params"].pop()
            del self.optimizer.state[stand_in]

    optimizer.state_dict = state_dict


class _Stub:
    """Stands in for the modules of megatron.core that import triton unconditionally.

    Their kernels are never launched in training on CPU. Only those modules are replaced, so that
    torch still sees that there is no triton.
    """

    unguarded = re.compile(rb"^(import|from) triton", re.M)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith("megatron.core.") or not path:
            return None
        for folder in path:
            source = Path(folder) / f"{name.rpartition('.')[2]}.py"
            if source.is_file():
                needs = self.unguarded.search(source.read_bytes())
                return ModuleSpec(name, self, origin=str(source)) if needs else None  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def absent(name: str) -> Callable[..., bool]:
            if name.startswith("__"):
                raise AttributeError(name)

            def unavailable(*_: Any, **__: Any) -> bool:
                if name.startswith("is_"):
                    return False
                raise RuntimeError(f"{module.__name__}.{name} needs triton")

            return unavailable

        module.__getattr__ = absent  # type: ignore[method-assign]
