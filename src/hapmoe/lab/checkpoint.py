"""Saving and loading in Megatron's torch_dist format, which another plan can load."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hapmoe.lab.model import sharding

__all__ = ["load", "save"]


def _metadata(args: argparse.Namespace) -> dict[str, Any]:
    from megatron.core import package_info

    # as _build_sharded_state_dict_metadata of megatron.training (checkpointing.py:401-434)
    metadata: dict[str, Any] = {"chained_optim_avoid_prefix": True}
    if args.use_distributed_optimizer:  # the default may change dp only
        kinds = ("fully_sharded_model_space", "fully_sharded_bucket_space")
        if (package_info.MAJOR, package_info.MINOR) >= (0, 15):
            kinds = ("fully_reshardable", "dp_reshardable")
        metadata["distrib_optim_sharding_type"] = kinds[0 if args.dist_ckpt_optim_fully_reshardable else 1]
    return metadata


def _sharded(optimizer: Any, state: dict[str, Any], loading: bool, metadata: dict[str, Any]) -> Any:
    """The optimizer's part; core 0.12 takes the sharding's name alone."""
    from megatron.core import package_info

    if (package_info.MAJOR, package_info.MINOR) >= (0, 13):
        return optimizer.sharded_state_dict(state, is_loading=loading, metadata={**sharding(), **metadata})
    kind = metadata.get("distrib_optim_sharding_type")
    return optimizer.sharded_state_dict(state, is_loading=loading, **({"sharding_type": kind} if kind else {}))


def _state(args: argparse.Namespace, chunks: list[Any], optimizer: Any, *, loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for index, chunk in enumerate(chunks):
        state["model" if len(chunks) == 1 else f"model{index}"] = chunk.module.sharded_state_dict(metadata=sharding())
    if args.no_load_optim if loading else args.no_save_optim:
        return state
    state["optimizer"] = _sharded(optimizer, state, loading, _metadata(args))
    return state


def _old_names() -> None:
    """Megatron-Core 0.14 asks numpy for ``product`` (dist_checkpointing/validation.py), which numpy 2 has not."""
    import numpy

    vars(numpy).setdefault("product", numpy.prod)


def save(args: argparse.Namespace, chunks: list[Any], optimizer: Any, iteration: int) -> None:
    """Write ``<--save>/iter_<n>`` and the tracker file, as Megatron's training loop does."""
    import torch
    from megatron.core import dist_checkpointing

    _old_names()
    folder = Path(args.save) / f"iter_{iteration:07d}"
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    state = _state(args, chunks, optimizer, loading=False)
    state["iteration"] = iteration
    told = {"content_metadata": _metadata(args)}  # since core 0.14
    taken = inspect.signature(dist_checkpointing.save).parameters
    dist_checkpointing.save(state, str(folder), **{name: value for name, value in told.items() if name in taken})
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        (Path(args.save) / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def load(args: argparse.Namespace, chunks: list[Any], optimizer: Any) -> int:
    """Iterations that the checkpoint under ``--load`` has done; 0 where there is none, or with ``--finetune``."""
    from megatron.core import dist_checkpointing

    _old_names()
    tracker = Path(args.load) / "latest_checkpointed_iteration.txt"
    if not tracker.exists():
        return 0
    folder = str(Path(args.load) / f"iter_{int(tracker.read_text()):07d}")
    list(_states(optimizer))  # makes them
    saved = dist_checkpointing.load(_state(args, chunks, optimizer, loading=True), folder)
    for index, chunk in enumerate(chunks):
        chunk.module.load_state_dict(saved["model" if len(chunks) == 1 else f"model{index}"])
    if args.no_load_optim:
        optimizer.reload_model_params()
        return 0 if args.finetune else int(saved["iteration"])
    optimizer.load_state_dict(saved["optimizer"])
    for state in _states(optimizer):
        # Megatron hands one tensor to all parameters (load_state_dict), and Adam counts up in place
        state["step"] = state["step"].clone()
    return 0 if args.finetune else int(saved["iteration"])


def _states(optimizer: Any) -> Iterator[Any]:
    """State of every parameter, with moments and step.

    torch's Adam makes them in its first step; Megatron asks for them when a checkpoint is loaded.
    """
    import torch

    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if one.optimizer is None:  # of a stage without experts of its own (hapmoe.runtime.optimizers)
            continue
        for group in one.optimizer.param_groups:
            for parameter in group["params"]:
                state = one.optimizer.state[parameter]
                state.setdefault("step", torch.tensor(0.0))
                state.setdefault("exp_avg", torch.zeros_like(parameter))
                state.setdefault("exp_avg_sq", torch.zeros_like(parameter))
                yield state
