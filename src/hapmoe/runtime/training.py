"""What megatron.training divides by a uniform world: data-parallel size, throughput, random states, memory report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import checkpoints
from .mesh import Layout, Refused
from .patches import Patch
from .refusals import argument_refusals

__all__ = ["patches"]


def patches(layout: Layout) -> tuple[Patch, ...]:
    """Applied where a program imports megatron.training; it is no part of megatron.core."""
    return (
        Patch(
            "megatron.training.arguments",
            "validate_args",
            ("args",),
            "data-parallel size of the stage",
            lambda original: _validate(original, layout),
            optional=True,
        ),
        Patch(
            "megatron.training.yaml_arguments",
            "validate_yaml",
            ("args",),
            "data-parallel size of the stage",
            lambda _: _no_yaml,
            optional=True,
        ),
        Patch(
            "megatron.training.checkpointing",
            "get_rng_state",
            (),
            "checkpoints",
            lambda original: checkpoints.by_stage(original, layout),
            optional=True,
        ),
        Patch(
            "megatron.training.theoretical_memory_usage",
            "report_theoretical_memory",
            (),
            "a report that divides the world by uniform degrees",
            lambda original: _nothing,
            optional=True,
        ),
    )


def _validate(original: Callable[..., Any], layout: Layout) -> Callable[..., Any]:
    """The stand-in for ``validate_args``.

    It divides args.world_size by tp * cp * pp (arguments.py:385). Afterwards the real number is put
    back: throughput per device, tensorboard's rank and the log's world size come from it.
    """

    def validate_args(args: Any, *more: Any, **named: Any) -> Any:
        args.world_size = layout.equal_world_size
        result = original(args, *more, **named)
        args.world_size = layout.world_size
        for reason in argument_refusals(layout, args):
            raise Refused(reason)
        return result

    return validate_args


def _no_yaml(*_: Any, **__: Any) -> None:
    raise Refused("--yaml-cfg: its data-parallel size divides the world by one set of degrees; give arguments instead")


def _nothing(*_: Any, **__: Any) -> None:
    pass
