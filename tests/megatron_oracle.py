"""Megatron-Core's own verdicts, on CPU: process groups on a fake backend, and its configuration class."""

from __future__ import annotations

import argparse
import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

__all__ = ["TransformerConfig", "config_from", "config_refuses", "groups", "groups_refuse", "parallel_state", "parse"]


@contextlib.contextmanager
def groups(world: int, rank: int = 0, **sizes: Any) -> Iterator[None]:
    """``initialize_model_parallel`` on one rank of a world that exists in name only."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **sizes)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def groups_refuse(world: int, **sizes: Any) -> str:
    """Why Megatron builds no groups; empty: it does."""
    try:
        with groups(world, **sizes):
            return ""
    except (RuntimeError, AssertionError, ZeroDivisionError) as error:
        return str(error) or type(error).__name__


def config_refuses(**values: Any) -> str:
    """Why there is no TransformerConfig; empty: there is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            TransformerConfig(**values)
        except (ValueError, AssertionError, ZeroDivisionError) as error:
            return str(error) or type(error).__name__
    return ""


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments that a plan decides, by Megatron's names and defaults; the others are left."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("tensor-model", "pipeline-model", "context", "expert-model"):
        parser.add_argument(f"--{name}-parallel-size", type=int, default=1)
    parser.add_argument("--expert-tensor-parallel-size", type=int, default=None)
    parser.add_argument("--pipeline-model-parallel-layout", default=None)
    parser.add_argument("--micro-batch-size", type=int, default=None)
    parser.add_argument("--global-batch-size", type=int, default=None)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--recompute-granularity", choices=["full", "selective"])
    parser.add_argument("--recompute-method", choices=["uniform", "block"])
    parser.add_argument("--recompute-num-layers", type=int)
    parser.add_argument("--recompute-modules", nargs="*")
    return parser.parse_known_args(argv)[0]


def config_from(args: argparse.Namespace, **model: Any) -> TransformerConfig:
    """What Megatron's ``core_transformer_config_from_args`` would build."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = MLATransformerConfig if model.get("multi_latent_attention") else TransformerConfig
        return kind(
            tensor_model_parallel_size=args.tensor_model_parallel_size,
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            pipeline_model_parallel_layout=args.pipeline_model_parallel_layout,
            sequence_parallel=args.sequence_parallel,
            recompute_granularity=args.recompute_granularity,
            recompute_method=args.recompute_method,
            recompute_num_layers=args.recompute_num_layers,
            recompute_modules=args.recompute_modules,
            pipeline_dtype=torch.float32,
            **model,
        )
