"""Puts the probe into a training process, and takes it out after the steps that were asked for."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from types import ModuleType
from typing import Any

from . import received
from .imports import before_import, when_imported
from .patches import Patches
from .steps import Steps
from .writer import Writer

__all__ = ["install"]

STEPS = 5
"""Measured unless HAPMOE_PROBE_STEPS says otherwise: the first makes buffers and optimizer states, four remain."""
_PASSES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
)
_OPTIMIZERS = ("optimizer", "distrib_optimizer", "layer_wise_optimizer")
"""Modules of megatron.core.optimizer whose classes may have a ``step`` of their own."""
_DEGREES = {
    # Degree: the function of parallel_state that knows it.
    "tp": "get_tensor_model_parallel_world_size",
    "cp": "get_context_parallel_world_size",
    "pp": "get_pipeline_model_parallel_world_size",
    "dp": "get_data_parallel_world_size",
    "ep": "get_expert_model_parallel_world_size",
    "etp": "get_expert_tensor_parallel_world_size",
    "edp": "get_expert_data_parallel_world_size",
    "vpp": "get_virtual_pipeline_model_parallel_world_size",
    "stage": "get_pipeline_model_parallel_rank",
}
_installed = False


def install() -> None:
    """Arrange everything for the moment at which Megatron is imported, once per process."""
    global _installed
    if not _installed:
        _installed = True
        before_import("megatron.core", lambda _: _Probe().arrange())


class _Probe:
    """The hooks of one process. What goes wrong in writing must not end the training."""

    def __init__(self) -> None:
        import torch

        self.limit = int(os.environ.get("HAPMOE_PROBE_STEPS") or STEPS)
        self.patches = Patches()
        self.steps = Steps(torch, self.write)
        self.writer: Writer | None = None

    def arrange(self) -> None:
        self.steps.collectives.install(self.patches)
        received.install(self.patches)
        when_imported("megatron.training.training", received.training(self.patches))
        when_imported("megatron.core.pipeline_parallel.schedules", self._schedules)
        when_imported("megatron.core.transformer.moe.router", self._router)
        for name in _OPTIMIZERS:
            when_imported(f"megatron.core.optimizer.{name}", self._optimizer)

    def _schedules(self, module: ModuleType) -> None:
        for name in _PASSES:
            self.patches.wrap(module, name, self.steps.passes)
        self.patches.wrap(module, "forward_step", self.steps.timed("forward"))
        self.patches.wrap(module, "backward_step", self.steps.timed("backward"))

    def _router(self, module: Any) -> None:
        self.patches.wrap(module.TopKRouter, "forward", self.steps.router)

    def _optimizer(self, module: ModuleType) -> None:
        for value in list(vars(module).values()):
            if isinstance(value, type) and value.__module__ == module.__name__ and value.__name__.endswith("Optimizer"):
                self.patches.wrap(value, "step", self.steps.optimizer)

    def write(self, row: dict[str, Any]) -> None:
        """A step is over: its line, and behind the last one the end."""
        last = row["step"] >= self.limit
        try:
            if self.writer is None:
                self.writer = Writer(os.environ["HAPMOE_PROBE"], _rank())
                self.writer.write(self._start())
            self.writer.write(row)
            if last:
                self.writer.write({"event": "end", "steps": row["step"]})
                self.writer.complete()
        except Exception as error:
            sys.stderr.write(f"hapmoe probe: rank {_rank()}: {error}; measures nothing more\n")
            if self.writer is not None:
                self.writer.give_up()
            last = True
        if last:
            self.remove()
            if os.environ.get("HAPMOE_PROBE_STOP") == "1":
                _stop()

    def remove(self) -> None:
        """Every function is itself again; a wrapper that somebody kept only passes on."""
        self.steps.active = False
        self.patches.remove()

    def _start(self) -> dict[str, Any]:
        import megatron.core
        import torch
        from megatron.core import parallel_state

        known = {name: getattr(parallel_state, get)() for name, get in _DEGREES.items() if hasattr(parallel_state, get)}
        versions = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "megatron_core": megatron.core.__version__,
            "runtime": torch.version.cuda or getattr(torch.version, "hip", None) or "",
            "collectives": self.steps.clock.library,
        }
        return {
            "event": "start",
            "schema": 1,
            "rank": _rank(),
            "world_size": torch.distributed.get_world_size(),
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "host": socket.gethostname(),
            "device": self.steps.clock.device,
            "clock": self.steps.clock.name,
            "versions": versions,
            # without virtual stages Megatron has none, not one
            "degrees": {name: 1 if value is None else int(value) for name, value in known.items()},
        }


def _rank() -> int:
    import torch

    return int(torch.distributed.get_rank())


def _stop() -> None:
    """End the training without what it does at its end (saving, logging): only steps were wanted."""
    import torch

    # a rank that leaves takes what it has not sent yet with it
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
