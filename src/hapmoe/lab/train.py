"""Trains a GPT on megatron.core alone: ``torchrun ... -m hapmoe.lab.train`` with Megatron's argument names.

It stands in for Megatron-LM's pretrain_gpt.py, which is on no package index: the same arguments, the
same schedule and optimizer, data that depend on the number of the sample only. With ``HAPMOE_LAB=1``
it runs on CPU with gloo.

    HAPMOE_LAB_OUT       folder for ``rank<r>.jsonl``: a line "start", a line per iteration, a line "end" (what crossed
                         boundaries of unequal stages)
    HAPMOE_LAB_PARAMETERS=1 write ``rank<r>.pt`` too: the parameters after the last iteration
    HAPMOE_LAB_SLOW=N    every pass takes N times its CPU time (hapmoe.lab.slow)
    HAPMOE_LAB_CGROUP=F  train, but do not start, in this control group (the same)
    HAPMOE_LAB_PACE=1    tell with every iteration how fast the processor is just now (hapmoe.lab.pace)
    HAPMOE_LAB_MEASURE=1 count the collectives of the second iteration and the bytes kept in it ("volumes")
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from hapmoe.lab import checkpoint, requested, shim, vendors
from hapmoe.lab.arguments import parse
from hapmoe.lab.measure import Kept, rows
from hapmoe.lab.pace import Pace, asked
from hapmoe.lab.slow import join_group, slowed
from hapmoe.probe.collectives import Collectives
from hapmoe.probe.patches import Patches

__all__ = ["main"]

MEASURED_ITERATION = 2
"""The first one makes buffers and optimizer states."""


def main(argv: list[str] | None = None) -> None:
    """Train; every rank of the job runs this."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    collectives = Collectives()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is missing here is known (see patches)
        if requested():
            shim.install()
        if _measuring():
            collectives.install(Patches())
        import torch

        if requested():
            torch.set_num_threads(1)
        # stages of unequal size: what a job of this rank's stages alone would have
        equal = int(os.environ.get("HAPMOE_EQUAL_WORLD_SIZE", world_size))
        args = parse(sys.argv[1:] if argv is None else argv, equal)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29511")
        backend: dict[str, Any] = {"backend": _library(rank) if requested() else "nccl"}
        if args.fake_process_group:  # as megatron/training/initialize.py
            from torch.testing._internal.distributed.fake_pg import FakeStore

            backend = {"backend": "fake", "store": FakeStore()}
        torch.distributed.init_process_group(**backend, rank=rank, world_size=world_size)
        try:
            _spoil()
            _train(args, collectives)
            torch.distributed.barrier()
        finally:
            torch.distributed.destroy_process_group()


def _library(rank: int) -> str:
    """gloo, or what plays this rank's library where stages have those of several vendors."""
    runtime = sys.modules.get("hapmoe_runtime")
    if runtime is None or not runtime.attached.layout.mixed:
        return "gloo"
    layout = runtime.attached.layout
    return vendors.register(
        [layout.libraries[index] for index in range(layout.stages) for _ in layout.ranks(index)], rank
    )


def _spoil() -> None:
    """A negative control: gradients between unequal stages are not scaled (hapmoe.runtime)."""
    if os.environ.get("HAPMOE_LAB_UNSCALED") == "1":
        sys.modules["hapmoe_runtime"].attached.boundaries.scaled = False


def _crossed() -> dict[str, Any]:
    """Messages and bytes that this rank sent to stages of other degrees (hapmoe.runtime), by direction."""
    runtime = sys.modules.get("hapmoe_runtime")
    return {"crossed": dict(runtime.attached.boundaries.sent)} if runtime is not None else {}


def _measuring() -> bool:
    return os.environ.get("HAPMOE_LAB_MEASURE") == "1"


def _train(args: argparse.Namespace, collectives: Collectives) -> None:
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from hapmoe.lab.model import build, configure, layers_of, parameters_of, pieces

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_stages,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        create_gloo_process_groups=not args.fake_process_group,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    init_num_microbatches_calculator(
        torch.distributed.get_rank(), None, args.global_batch_size, args.micro_batch_size, args.data_parallel_size
    )
    config = configure(args)
    chunks = build(args, config)
    gathers = args.overlap_param_gather and args.use_distributed_optimizer
    known = {"overlap_param_gather": gathers} if hasattr(OptimizerConfig, "overlap_param_gather") else {}  # since 0.14
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer=args.optimizer,
            lr=args.lr,
            weight_decay=args.weight_decay,
            clip_grad=args.clip_grad,
            bf16=args.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=args.use_distributed_optimizer,
            **known,
        ),
        chunks,
        use_gloo_process_groups=not args.fake_process_group,
    )
    _connect(args, config, chunks, optimizer, finalize_model_grads)
    done = checkpoint.load(args, chunks, optimizer) if args.load else 0
    out = _Writer()
    out.write(
        event="start",
        rank=torch.distributed.get_rank(),
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        layers=layers_of(chunks),
        parameters=parameters_of(chunks),
        recompute=[
            args.recompute_granularity,
            args.recompute_method,
            args.recompute_num_layers,
            args.recompute_modules,
        ],
        device=torch.cuda.get_device_name(0),
    )
    torch.autograd.backward = slowed(torch.autograd.backward)
    kept = Kept(chunks) if _measuring() else None
    pace = Pace() if asked() else None
    join_group()
    for iteration in range(done + 1, args.train_iters + 1):
        watched = kept if iteration == MEASURED_ITERATION else None
        collectives.counting = watched is not None
        row = _step(args, chunks, optimizer, iteration, watched)
        if watched is not None:
            collectives.counting = False
            out.write(event="volumes", collectives=rows(collectives), kept=watched.rows)
        row |= _reduced(row) | _auxiliary(args) | ({"pace_s": pace()} if pace else {})
        out.write(event="iteration", **row)
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            print(
                f"iteration {iteration:4d}/{args.train_iters} | lm loss: {row['loss']:.9E} | "
                f"grad norm: {row['grad_norm']:.6f} | elapsed time per iteration (ms): {row['wall_s'] * 1e3:.1f}",
                flush=True,
            )
        last = iteration == args.train_iters or (args.exit_interval and iteration % args.exit_interval == 0)
        if args.save and (last or (args.save_interval and iteration % args.save_interval == 0)):
            checkpoint.save(args, chunks, optimizer, iteration)
        if last:
            break
    out.write(event="end", **_crossed())
    if os.environ.get("HAPMOE_LAB_PARAMETERS") == "1":
        out.save(pieces(chunks))


def _connect(args: argparse.Namespace, config: Any, chunks: list[Any], optimizer: Any, finalize: Any) -> None:
    """What megatron/training/training.py hands to the schedule."""
    config.finalize_model_grads_func = finalize
    config.grad_scale_func = optimizer.scale_loss
    config.timers = None
    if args.overlap_grad_reduce:
        config.no_sync_func = [chunk.no_sync for chunk in chunks]
        if len(chunks) == 1:
            config.no_sync_func = config.no_sync_func[0]
    for chunk in chunks:
        chunk.broadcast_params()


def _step(
    args: argparse.Namespace, chunks: list[Any], optimizer: Any, iteration: int, watched: Kept | None
) -> dict[str, Any]:
    """One iteration: forward and backward of all microbatches, then the optimizer."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    began, cpu_began = time.perf_counter(), time.process_time()
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    batches: list[Iterator[Any]] = [_batches(args, iteration) for _ in chunks]
    losses = get_forward_backward_func()(
        forward_step_func=partial(slowed(_forward), args, watched, {id(chunk) for chunk in chunks}),
        data_iterator=batches if args.virtual_stages else batches[0],
        model=chunks if args.virtual_stages else chunks[0],
        num_microbatches=args.num_microbatches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        decoder_seq_length=args.seq_length,
        forward_only=False,
    )
    cpu_backward = time.process_time()
    _, grad_norm, _ = optimizer.step()
    return {
        "iteration": iteration,
        "losses": [[float(value) for value in one["lm loss"]] for one in losses],
        "grad_norm": float(grad_norm),
        "wall_s": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu_began,
        "optimizer_cpu_s": time.process_time() - cpu_backward,
    }


def _batches(args: argparse.Namespace, iteration: int) -> Iterator[Any]:
    """The microbatches of this rank in the order of Megatron's sampler (legacy/data/data_samplers.py).

    A sample is a function of its number alone: whatever the plan, an iteration sees the same ones.
    """
    import torch
    from megatron.core import parallel_state

    rank, per_step = parallel_state.get_data_parallel_rank(), args.micro_batch_size * args.data_parallel_size
    first = (iteration - 1) * args.global_batch_size
    for microbatch in range(args.num_microbatches):
        begin = first + microbatch * per_step + rank * args.micro_batch_size
        samples = []
        for number in range(begin, begin + args.micro_batch_size):
            generator = torch.Generator().manual_seed(args.seed * 1_000_003 + number)
            start, step = torch.randint(1, args.vocab_size, (2,), generator=generator).tolist()
            # mostly a progression, which can be learned, and a tenth of noise, which cannot
            row = (start + (step % 7 + 1) * torch.arange(args.seq_length + 1)) % args.vocab_size
            noise = torch.rand(args.seq_length + 1, generator=generator) < 0.1
            random = torch.randint(0, args.vocab_size, (args.seq_length + 1,), generator=generator)
            samples.append(torch.where(noise, random, row))
        yield torch.stack(samples)


def _forward(
    args: argparse.Namespace, watched: Kept | None, fresh: set[int], batches: Iterator[Any], chunk: Any
) -> tuple[Any, Any]:
    """One microbatch through one chunk. The first one of a watched iteration is recorded."""
    import contextlib

    import torch
    from megatron.core import parallel_state

    rows = next(batches)
    tokens, labels = rows[:, :-1].clone(), rows[:, 1:].clone()
    positions = torch.arange(args.seq_length).unsqueeze(0).expand(args.micro_batch_size, -1)
    if args.context_parallel_size > 1:
        ranks, rank = args.context_parallel_size, parallel_state.get_context_parallel_rank()
        pieces = torch.arange(args.seq_length).view(2 * ranks, -1)
        mine = torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]])
        tokens, labels, positions = tokens[:, mine], labels[:, mine], positions[:, mine]
    # Megatron's local attention wants the causal mask itself
    mask = torch.triu(torch.ones(1, 1, args.seq_length, args.seq_length, dtype=torch.bool), 1)
    recording = contextlib.nullcontext() if watched is None or id(chunk) not in fresh else watched.watch()
    fresh.discard(id(chunk))
    with recording:
        output = chunk(tokens, positions, mask, labels=labels)
    return output, partial(_loss, args)


def _loss(args: argparse.Namespace, output: Any) -> tuple[Any, ...]:
    """The mean over this rank's tokens, or their sum with the number of them (per-token loss)."""
    import torch

    total, count = output.float().sum(), output.numel()
    report = {"lm loss": torch.stack([total.detach(), torch.tensor(float(count))])}
    if args.calculate_per_token_loss:
        return total, torch.tensor(count, dtype=torch.int), report
    # every rank of a context-parallel group holds an equal part of the sequence
    return total / count / args.context_parallel_size, report


def _reduced(row: dict[str, Any]) -> dict[str, float]:
    """The iteration's loss over all tokens of the global batch, the same on every rank."""
    import torch
    from megatron.core import parallel_state

    mine = torch.zeros(2, dtype=torch.float64)
    if (
        parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0
    ):
        for total, count in row["losses"]:
            mine += torch.tensor([total, count], dtype=torch.float64)
    torch.distributed.all_reduce(mine)
    return {"loss": float(mine[0] / mine[1])}


def _auxiliary(args: argparse.Namespace) -> dict[str, Any]:
    """Auxiliary losses by kind and layer as Megatron logs them (training.py, training_log, and track_moe_metrics
    in moe_utils.py): those that are on, also on ranks without a MoE layer."""
    if not args.num_experts or (not args.moe_aux_loss_coeff and args.moe_z_loss_coeff is None):
        return {}
    import torch
    from megatron.core import package_info, parallel_state
    from megatron.core.transformer.moe import moe_utils

    kinds = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}
    if (package_info.MAJOR, package_info.MINOR) < (0, 14):  # one name for both
        kinds["seq_aux_loss"] = "load_balancing_loss"
    on = [kinds[args.moe_router_load_balancing_type]] if args.moe_aux_loss_coeff else []
    on += ["z_loss"] if args.moe_z_loss_coeff is not None else []
    # core 0.12 keeps the tracker in parallel_state
    holder: Any = moe_utils if hasattr(moe_utils, "get_moe_layer_wise_logging_tracker") else parallel_state
    tracker = holder.get_moe_layer_wise_logging_tracker()
    for name in on:
        nobody = {"reduce_group": None, "avg_group": None, "reduce_group_has_dp": False}
        tracker.setdefault(name, {"values": torch.zeros(args.num_layers), **nobody})
    moe_utils.reduce_aux_losses_tracker_across_ranks(on)
    found = {name: [float(value) / args.num_microbatches for value in tracker[name]["values"]] for name in tracker}
    moe_utils.clear_aux_losses_tracker()
    return {"auxiliary": found}


class _Writer:
    """JSON lines of this rank, where the environment asks for them."""

    def __init__(self) -> None:
        import torch

        folder = os.environ.get("HAPMOE_LAB_OUT", "")
        self.path = Path(folder) / f"rank{torch.distributed.get_rank()}.jsonl" if folder else None
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def save(self, values: Any) -> None:
        import torch

        if self.path is not None:
            torch.save(values, self.path.with_suffix(".pt"))

    def write(self, **row: Any) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
