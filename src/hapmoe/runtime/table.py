"""Everything that is replaced in Megatron, in one table, and the state behind it.

Names and arguments are those of Megatron-Core 0.12.0 to 0.19.1 and main (d98e8a64).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from . import checkpoints, groups, optimizers, sums, training, worldwide
from .boundary import Boundaries
from .checks import agree, replicas, try_boundaries
from .mesh import Layout, Refused
from .patches import Patch, arrange, version_of

__all__ = ["Attached", "table"]

TRIED = ((0, 12), (0, 21))
"""From the first, before the second: 0.12.3, 0.13.1, 0.14.0, 0.16.1 and main (0.20, d98e8a64) trained as one rank does
(bench.hetero_versions --train); names and arguments of all between were looked up."""


KEYS, OPTIMIZERS = "checkpoints with a key per layer", "optimizers with and without a part for experts"


class Attached:
    """The runtime of one process."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.boundaries = Boundaries(layout)
        self.trial = os.environ.get("HAPMOE_HETERO_TRIAL", "on") != "off"
        self.every = int(os.environ.get("HAPMOE_HETERO_REPLICAS_EVERY", "0"))
        self.steps = 0

    def arrange(self, *, joins: bool) -> None:
        """Wait for megatron's modules and patch them as they come; without ``joins`` only what checkpoints need."""
        self.patches = tuple(patch for patch in table(self) if joins or patch.why in (KEYS, OPTIMIZERS))
        arrange(self.patches)

    def parallel(self, original: Callable[..., None]) -> Callable[..., None]:
        """Stand-in for ``initialize_model_parallel``: versions and names are checked, groups made."""
        build = groups.build(original, self.layout)

        def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:
            import torch.distributed as dist

            if dist.get_world_size() != self.layout.world_size:
                raise Refused(f"{dist.get_world_size()} ranks, the plan has {self.layout.world_size}")
            if dist.get_rank() != self.layout.rank:
                raise Refused(f"rank {dist.get_rank()} was attached as rank {self.layout.rank}")
            check_version(self.patches)
            if self.layout.rank == 0:
                said = "; ".join(f"stage {mesh.index}: {mesh.said()}" for mesh in self.layout.meshes)
                say(f"EXPERIMENTAL, verified on CPU only (docs/hetero.md). {said}")
                if self.layout.mixed:
                    libraries = ", ".join(sorted(set(self.layout.libraries)))
                    say(f"{libraries}: what all ranks share goes through host memory")
            if self.layout.mixed:
                worldwide.redirect()
            groups.redirect()
            build(*args, **kwargs)
            self.boundaries.open()

        return initialize_model_parallel

    def schedule(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Stand-in for a pipeline schedule: checks around the first steps, nothing inside."""

        def forward_backward(**kwargs: Any) -> Any:
            model = kwargs["model"] if isinstance(kwargs["model"], list) else [kwargs["model"]]
            if not self.boundaries.split:
                self._before(model, kwargs)
            result = original(**kwargs)
            if not kwargs.get("forward_only"):
                self.steps += 1
                # the parameters of the step before: with overlapped gathers this pass has completed them
                if self.steps == 2 or (self.every and self.steps > 1 and (self.steps - 1) % self.every == 0):
                    replicas(self.layout, model)
            return result

        return forward_backward

    def _before(self, model: list[Any], step: dict[str, Any]) -> None:
        from megatron.core.utils import get_model_config

        split, warnings = agree(self.layout, model, step)
        self.boundaries.split = split
        if self.layout.rank == 0:
            for warning in warnings:
                say(f"warning: {warning}")
        if self.trial:
            try_boundaries(self.boundaries, get_model_config(model[0]), step, ring=len(model) > 1)
            self.boundaries.sent.clear()

    def communicator(self, original: Callable[..., None]) -> Callable[..., None]:
        """Stand-in for ``P2PCommunicator.__init__``, which asks for ranks of the pipeline group."""

        def __init__(communicator: Any, pp_group: Any, config: Any) -> None:
            communicator.pp_group, communicator.config = pp_group, config
            communicator.next_rank = communicator.prev_rank = None
            communicator.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size

        return __init__

    def method(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Stand-in for ``P2PCommunicator._communicate``."""

        def _communicate(communicator: Any, **kwargs: Any) -> Any:
            return self.boundaries.communicate(config=communicator.config, **kwargs)

        return _communicate

    def function(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Stand-in for the module's ``_communicate`` of core 0.12 and 0.13."""
        return self.boundaries.communicate


def check_version(patches: tuple[Patch, ...]) -> None:
    """Refused where this megatron.core was not tried, or lacks what is replaced."""
    core = importlib.import_module("megatron.core")
    version = version_of(core)
    if not TRIED[0] <= version < TRIED[1] and os.environ.get("HAPMOE_HETERO_UNTRIED") != "1":
        raise Refused(
            f"Megatron-Core {core.__version__} was not tried with this runtime (tried: 0.12 to 0.20); "
            "HAPMOE_HETERO_UNTRIED=1 goes on"
        )
    for patch in patches:
        if patch.optional or not patch.concerns(version):
            continue
        try:
            importlib.import_module(patch.module)  # applies the patch, or refuses
        except ModuleNotFoundError as error:
            raise Refused(f"Megatron-Core {core.__version__} has no {patch.module} ({patch.why})") from error


def say(text: str) -> None:
    """One line, in one write: ranks share the stream."""
    os.write(2, f"hapmoe runtime: {text}\n".encode())


def table(attached: Attached) -> tuple[Patch, ...]:
    """The patches, with stand-ins for this process."""
    core, layout = "megatron.core", attached.layout
    sent = ("tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next", "tensor_shape", "wait_on_reqs")
    step = ("model", "num_microbatches", "seq_length", "micro_batch_size", "forward_only")
    degrees = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size")
    return (
        Patch(
            f"{core}.parallel_state",
            "initialize_model_parallel",
            (*degrees, "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
            "groups per stage",
            attached.parallel,
        ),
        *(
            Patch(
                f"{core}.pipeline_parallel.schedules",
                f"forward_backward_pipelining_{name}_interleaving",
                step,
                "checks before the first step",
                attached.schedule,
            )
            for name in ("with", "without")
        ),
        Patch(
            f"{core}.pipeline_parallel.p2p_communication",
            "_communicate",
            (*sent, "config"),
            "boundaries",
            attached.function,
            before=(0, 14),
        ),
        Patch(
            f"{core}.pipeline_parallel.p2p_communication",
            "P2PCommunicator.__init__",
            ("pp_group", "config"),
            "boundaries",
            attached.communicator,
            since=(0, 14),
        ),
        Patch(
            f"{core}.pipeline_parallel.p2p_communication",
            "P2PCommunicator._communicate",
            sent,
            "boundaries",
            attached.method,
            since=(0, 14),
        ),
        Patch(
            f"{core}.distributed.finalize_model_grads",
            "finalize_model_grads",
            ("model", "num_tokens"),
            "tokens of per-token loss",
            lambda original: sums.finalize(original, layout),
        ),
        Patch(
            f"{core}.transformer.moe.moe_utils",
            "reduce_aux_losses_tracker_across_ranks",
            ("track_names",),
            "log of auxiliary losses",
            lambda original: sums.reduce_tracker(original, layout),
            before=(0, 18),
        ),
        Patch(
            f"{core}.transformer.moe.moe_logging",
            "MoEMetricsTracker._sync_metrics",
            ("metric_names",),
            "log of auxiliary losses",
            lambda original: sums.sync_metrics(original, layout),
            since=(0, 18),
        ),
        Patch(
            f"{core}.transformer.transformer_block",
            "TransformerBlock.sharded_state_dict",
            ("prefix", "sharded_offsets", "metadata"),
            KEYS,
            checkpoints.by_layer,
        ),
        Patch(
            f"{core}.optimizer",
            "get_megatron_optimizer",
            ("config", "model_chunks"),
            "optimizers of stages without experts of their own",
            optimizers.everywhere,
            before=(0, 14),
        ),
        Patch(
            f"{core}.optimizer.optimizer",
            "ChainedOptimizer.sharded_state_dict",
            ("model_sharded_state_dict", "is_loading"),
            KEYS,
            checkpoints.by_kind,
            before=(0, 14),
        ),
        Patch(
            f"{core}.optimizer.optimizer",
            "ChainedOptimizer.load_state_dict",
            ("state_dict",),
            OPTIMIZERS,
            checkpoints.regrouped,
        ),
        *training.patches(layout),
    )
