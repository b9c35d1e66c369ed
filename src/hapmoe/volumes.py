"""What one step sends: calls and bytes of every collective, per stage and group of ranks.

The messages of layers, embedding and head are those that ``workload`` describes and ``pricing``
times. Besides them Megatron sends some small ones (routing tables, maxima, norms), which the
estimate leaves out; they are listed here too, as ``timed=False``, so that nothing that a run sends is
unexplained. ``python -m bench.volumes`` holds all of it against real runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hapmoe.boundary import crossing
from hapmoe.counting import embedding_params, head_params, last_class, layer_params, mtp_params, param_gathers_K
from hapmoe.job import JobSpec
from hapmoe.options import LayerClass, Options
from hapmoe.plan import Plan, Recompute, Stage
from hapmoe.stagecost import layer_classes
from hapmoe.units import DTYPE_BYTES
from hapmoe.workload import Op, Shapes, embedding_ops, head_ops, layer_ops, project_ops

__all__ = ["Traffic", "step_traffic"]

_BUCKET = 40e6
"""Parameters of a bucket, or a million per dp rank if that is more (distributed_data_parallel.py)."""
_BUCKET_PADDING = 128
"""The distributed optimizer pads the end of a buffer to a multiple of lcm(dp, 128) (param_and_grad_buffer.py)."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """One kind of message in one step, per rank (the mean over a stage's ranks where routing is uneven)."""

    name: str
    collective: str
    """all_gather, reduce_scatter, all_reduce, all_to_all, broadcast or p2p."""
    axis: str
    """tp, cp, ep, etp, tp_ep, tp_cp, dp (dp*cp), edp, pp, embedding, mp (tp*pp), etp_ep_pp, world."""
    calls: float
    bytes: float
    """Of all calls together: what a rank holds (an all-gather's result, a reduce-scatter's input)."""
    timed: bool = True


def step_traffic(job: JobSpec, plan: Plan) -> tuple[tuple[Traffic, ...], ...]:
    """Everything that the ranks of each stage of a resolved plan send in one step."""
    return tuple(tuple(_stage_traffic(job, plan, index)) for index in range(plan.pp))


def _stage_traffic(job: JobSpec, plan: Plan, index: int) -> Iterator[Traffic]:
    view, microbatches = _View.of(job, plan, index), plan.num_microbatches
    for traffic in (*_layers(view), *_edges(view), *_balance(view)):
        if view.size(traffic.axis) > 1 and traffic.calls:
            yield Traffic(
                traffic.name,
                traffic.collective,
                traffic.axis,
                traffic.calls * microbatches,
                traffic.bytes * microbatches,
                traffic.timed,
            )
    yield from _sends(view)
    for traffic in _once(view):
        if view.size(traffic.axis) > 1 and traffic.bytes:
            yield traffic


@dataclass(frozen=True, slots=True)
class _View:
    """One stage of a plan, with what all its messages need."""

    job: JobSpec
    plan: Plan
    index: int
    options: Options
    shapes: Shapes
    classes: tuple[LayerClass, ...]
    of_layer: tuple[int, ...]

    @classmethod
    def of(cls, job: JobSpec, plan: Plan, index: int) -> _View:
        options = _options(plan, index)
        classes, of_layer = layer_classes(job)
        return cls(job, plan, index, options, Shapes.of(job, options), classes, of_layer)

    @property
    def stage(self) -> Stage:
        return self.plan.stages[self.index]

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.plan.pp - 1

    def size(self, axis: str) -> int:
        """Ranks in a group of this kind."""
        stage, pp = self.stage, self.plan.pp
        return {
            "tp": stage.tp,
            "cp": stage.cp,
            "ep": stage.ep,
            "etp": stage.etp,
            "tp_ep": stage.etp * stage.ep,
            "tp_cp": stage.tp * stage.cp,
            "dp": stage.dp * stage.cp,
            "edp": stage.edp,
            "pp": pp,
            "embedding": pp if (self.first or self.last) else 1,
            "mp": stage.tp * pp,
            "etp_ep_pp": stage.etp * stage.ep * pp,
            "world": self.plan.num_devices,
        }[axis]

    def chunks(self) -> Iterator[tuple[LayerClass, Recompute]]:
        """Class and recomputation of every layer of the stage; of each chunk the first n with "block"."""
        again = self.stage.recompute
        for start, count in self.stage.virtual_layers:
            for place in range(count):
                block = again.granularity == "full" and again.method == "block" and place >= again.num_layers
                yield self.classes[self.of_layer[start + place]], Recompute() if block else again

    def runs(self, op: Op, recompute: Recompute) -> float:
        """How often a forward operation runs per microbatch."""
        if op.phase == "backward":
            return 1.0
        full = recompute.granularity == "full"
        return 2.0 if full or set(recompute.modules).intersection(op.modules) else 1.0


def _message(op: Op, times: float) -> Traffic:
    size = float(np.ravel(op.bytes_K)[0])
    return Traffic(op.name, op.collective, op.axis, times, times * size)


def _layers(view: _View) -> Iterator[Traffic]:
    """Messages inside decoder and MTP layers, per microbatch."""
    messages = {kind: [op for op in layer_ops(view.shapes, kind) if op.kind == "message"] for kind in set(view.classes)}
    for kind, recompute in view.chunks():
        for op in messages[kind]:
            yield _message(op, view.runs(op, recompute))
        if kind.moe:
            yield from _routing(view, recompute)
    for _ in range(view.job.model.mtp_layers if view.last else 0):
        inner = last_class(view.job.model)
        # MTP layers are recomputed only by "uniform" (multi_token_prediction.py:1621)
        recompute = view.stage.recompute
        plain = Recompute() if recompute.method == "block" else recompute
        for op in (*project_ops(view.shapes), *messages[inner]):
            if op.kind == "message":
                yield _message(op, view.runs(op, plain))
        if inner.moe:
            yield from _routing(view, plain)


def _routing(view: _View, recompute: Recompute) -> Iterator[Traffic]:
    """What a MoE layer sends beside the tokens: their probabilities and the numbers of them.

    Source: megatron/core/transformer/moe/token_dispatcher.py.
    """
    moe, training = view.job.model.moe, view.job.training
    assert moe is not None
    runs = 2.0 if recompute.granularity == "full" or "moe" in recompute.modules else 1.0
    if training.dispatcher != "alltoall":
        return
    routed, rows = float(view.shapes.routed_K[0]), float(view.shapes.expert_tokens_K[0])
    wide = 4.0 if training.router_dtype == "fp32" else float(view.shapes.bytes)
    probabilities = (
        ("dispatch_probabilities", "all_to_all", "all_to_all", "ep", routed),
        ("dispatch_probabilities_etp", "all_gather", "reduce_scatter", "etp", rows),
    )
    for name, forward, backward, axis, count in probabilities:
        yield Traffic(name, forward, axis, runs, runs * count * wide, timed=False)
        yield Traffic(f"{name}_grad", backward, axis, 1.0, count * wide, timed=False)
    if not moe.pad_to_capacity:
        gathered = 8.0 * moe.num_experts * view.size("tp_ep")
        yield Traffic("tokens_per_expert", "all_gather", "tp_ep", runs, runs * gathered, timed=False)


def _edges(view: _View) -> Iterator[Traffic]:
    """Embedding and head, per microbatch."""
    heads = (1 + view.job.model.mtp_layers) if view.last else 0
    if view.first:
        for op in embedding_ops(view.shapes):
            if op.kind == "message":
                yield _message(op, 1.0)
    for op in head_ops(view.shapes):
        if op.kind == "message":
            yield _message(op, float(heads))
    # maximum, target's logit and sum of exponents of every token (tensor_parallel/cross_entropy.py:130-154)
    size = float(view.shapes.tokens_K[0]) * 4.0
    yield Traffic("cross_entropy", "all_reduce", "tp", 3.0 * heads, 3.0 * heads * size, timed=False)


def _balance(view: _View) -> Iterator[Traffic]:
    """Auxiliary loss: tokens per expert over the sequence (moe_utils.py: get_tokens_per_expert_and_token_count)."""
    words = [argument.text or "" for argument in view.job.argv]
    moe = view.job.model.moe
    if moe is None or not _auxiliary_loss(words):
        return
    for kind, recompute in view.chunks():
        if kind.moe:
            runs = 2.0 if recompute.granularity == "full" or "moe" in recompute.modules else 1.0
            size = 8.0 * moe.num_experts
            yield Traffic("auxiliary_loss", "all_reduce", "tp_cp", runs, runs * size, timed=False)


def _auxiliary_loss(words: list[str]) -> bool:
    values = dict(pairwise(words))
    kind = values.get("--moe-router-load-balancing-type", "aux_loss")
    return kind in ("aux_loss", "seq_aux_loss") and float(values.get("--moe-aux-loss-coeff", "0")) > 0


def _sends(view: _View) -> Iterator[Traffic]:
    """Activations to the next stage and gradients to the one before, of every chunk and microbatch."""
    if view.plan.pp == 1:
        return
    count, pp, vpp = view.plan.num_microbatches, view.plan.pp, view.plan.vpp
    for name, step, ends in (("activations", 1, view.last), ("gradients", -1, view.first)):
        peer = _options(view.plan, (view.index + step) % pp)
        across = crossing(view.job, view.options, peer)
        times = count * (vpp - 1 if ends else vpp)
        calls, size = float(across.sends_K[0]), float(across.sent_bytes_K[0])
        yield Traffic(name, "p2p", "pp", times * calls, times * size)


def _options(plan: Plan, index: int) -> Options:
    stage = plan.stages[index]
    degrees = {"tp": stage.tp, "cp": stage.cp, "ep": stage.ep, "etp": stage.etp, "dp": stage.dp}
    columns = {f"{name}_K": np.asarray([value]) for name, value in degrees.items()}
    return Options(**columns, mbs_K=np.asarray([stage.micro_batch_size or plan.micro_batch_size]))


def _once(view: _View) -> Iterator[Traffic]:
    """What is sent once a step: gradients, updated weights, and what the replicated ones need."""
    job, training = view.job, view.job.training
    distributed = training.distributed_optimizer
    weight = float(DTYPE_BYTES[training.precision])
    for name, axis, parameters, buckets in _buffers(view):
        if not parameters:
            continue
        if distributed:
            multiple = np.lcm(view.size(axis), _BUCKET_PADDING)
            parameters = float(np.ceil(parameters / multiple) * multiple)
        collective = "reduce_scatter" if distributed else "all_reduce"
        yield Traffic(f"{name}_gradients", collective, axis, buckets, parameters * training.grad_reduce_bytes)
        if distributed:
            times = float(param_gathers_K(job, view.options)[0])
            yield Traffic(f"{name}_weights", "all_gather", axis, times * buckets, times * parameters * weight)
    if view.shapes.sequence_parallel:
        size = _replicated_params(view) * training.grad_bytes
        yield Traffic("replicated_gradients", "all_reduce", "tp", 1.0, size, timed=False)
    if job.model.tied_embeddings or job.model.mtp_layers:
        positions = float(job.model.learned_positions * job.model.hidden)
        size = (float(embedding_params(job, view.options)[0]) - positions) * training.grad_bytes
        yield Traffic("shared_embedding", "all_reduce", "embedding", 1.0, size, timed=False)
    if training.per_token_loss:
        yield Traffic("token_count", "broadcast", "pp", 1.0, 4.0, timed=False)
        yield Traffic("token_count", "all_reduce", "dp", 1.0, 4.0, timed=False)
    # one sum of squares for all optimizers where they share the group (optimizer.py: ChainedOptimizer)
    separate = view.stage.ep > 1 and not distributed
    for axis in ("world",) if distributed else ("mp", "etp_ep_pp") if separate else ("mp",):
        yield Traffic("gradient_norm", "all_reduce", axis, 1.0, 4.0, timed=False)


def _buffers(view: _View) -> Iterator[tuple[str, str, float, float]]:
    """(kind, axis, parameters, buckets) of every gradient buffer: one for each chunk and kind.

    Without expert parallelism experts are in the same buffer as everything else. Only the first chunk
    of the first stage is cut into buckets, and only when their reduction is to overlap
    (distributed_data_parallel.py: bucket_size, disable_bucketing).
    """
    job, stage = view.job, view.stage
    for chunk, (start, count) in enumerate(stage.virtual_layers):
        dense = expert = 0.0
        for layer in range(start, start + count):
            dense_K, expert_K = layer_params(job, view.options, view.classes[view.of_layer[layer]])
            dense, expert = dense + float(dense_K[0]), expert + float(expert_K[0])
        begins, ends = view.first and chunk == 0, view.last and chunk == len(stage.virtual_layers) - 1
        if begins:
            dense += float(embedding_params(job, view.options)[0])
        if ends:
            dense += float(head_params(job, view.options, with_embedding=begins)[0])
            if job.model.mtp_layers:
                dense_K, expert_K = mtp_params(job, view.options, last_class(job.model))
                dense += job.model.mtp_layers * float(dense_K[0])
                expert += job.model.mtp_layers * float(expert_K[0])
                if not begins and not job.model.tied_embeddings:
                    dense += float(embedding_params(job, view.options)[0])
        apart = stage.ep > 1
        for name, axis, parameters in (
            ("expert", "edp", expert if apart else 0.0),
            ("dense", "dp", dense if apart else dense + expert),
        ):
            size = max(_BUCKET, 1e6 * view.size("dp"))
            cut = begins and job.training.overlap_grad_reduce
            yield name, axis, parameters, float(np.ceil(parameters / size)) if cut else 1.0


def _replicated_params(view: _View) -> float:
    """Parameters that every tp rank holds whole and of which it saw only its part of the sequence.

    Norms, routers, and biases behind a reduction (finalize_model_grads.py:
    _allreduce_non_tensor_model_parallel_grads).
    """
    model = view.job.model
    norm = 2.0 if model.layernorm_bias else 1.0
    total = norm * model.hidden if view.last else 0.0
    for kind, _ in view.chunks():
        total += 2.0 * norm * model.hidden
        if model.qk_layernorm:
            widths = 2 * model.head_dim if model.mla is None else (model.mla.q_lora or 0) + model.mla.kv_lora
            total += norm * widths
        if model.linear_bias:
            total += model.hidden * (1.0 if kind.moe else 2.0)
        if kind.moe and model.moe is not None:
            total += float(model.hidden * model.moe.num_experts)
    return total
