"""Predicted against measured volumes of real Megatron-Core on CPU: ``python -m bench.volumes [--json] [--only TEXT]``.

For every case: parameters per rank, layers per stage, calls and bytes of every collective per group,
bytes that autograd keeps for the backward pass. None of it depends on the machine's load. What the
CPU's unfused kernels keep beyond those that the model describes is added by name, with the reason
(``extras``). A rest of at most 1% of a layer is tolerated: the model counts a router's scores of all
experts, of which an auxiliary loss keeps more and plain top-k less.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import msgspec
import numpy as np

from bench.lab import Case, Run, run
from bench.volumes_cases import CASES
from hapmoe import memory
from hapmoe.counting import embedding_params, head_params, last_class, layer_params, mtp_params, padded_vocab_K
from hapmoe.job import JobSpec
from hapmoe.options import LayerClass, Options
from hapmoe.plan import Plan, Recompute
from hapmoe.stagecost import layer_classes
from hapmoe.volumes import step_traffic
from hapmoe.workload import Shapes

__all__ = ["Row", "compare", "parameters_per_rank"]

TOLERANCE = 0.01


@dataclass(frozen=True)
class Row:
    """One quantity of one stage of a case."""

    case: str
    stage: int
    quantity: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        if self.predicted == self.measured:
            return 0.0
        return abs(self.predicted - self.measured) / max(abs(self.measured), 1e-12)


def compare(found: Run) -> tuple[Row, ...]:
    """Every predicted quantity of the run beside the measured one, stage by stage."""
    # whatever the script says, there is no Transformer Engine on CPU
    local = msgspec.structs.replace(found.job.training, transformer_engine=False, flash_attention=False)
    found = replace(found, job=msgspec.structs.replace(found.job, training=local))
    rows: list[Row] = []
    for index in range(found.plan.pp):
        for quantity, predicted, measured in (
            *_layers(found, index),
            *_parameters(found, index),
            *_collectives(found, index),
            *_kept(found, index),
        ):
            rows.append(Row(found.case.name, index, quantity, predicted, measured))
    return tuple(rows)


Found = Iterator[tuple[str, float, float]]


def _ranks(found: Run, index: int) -> range:
    stage = found.plan.stages[index]
    return range(stage.first_rank, stage.first_rank + stage.num_devices)


def _options(plan: Plan, index: int) -> Options:
    stage = plan.stages[index]
    values = (stage.tp, stage.cp, stage.ep, stage.etp, stage.dp, plan.micro_batch_size)
    tp_K, cp_K, ep_K, etp_K, dp_K, mbs_K = (np.asarray([value]) for value in values)
    return Options(tp_K=tp_K, cp_K=cp_K, ep_K=ep_K, etp_K=etp_K, dp_K=dp_K, mbs_K=mbs_K)


def _layers(found: Run, index: int) -> Found:
    """1 where a rank holds exactly the planned layers in the planned chunks."""
    planned = [list(range(start, start + count)) for start, count in found.plan.stages[index].virtual_layers]
    starts = found.rows("start")
    same = [starts[rank][0]["layers"] == planned and starts[rank][0]["stage"] == index for rank in _ranks(found, index)]
    yield "layers as planned", 1.0, float(all(same))


def parameters_per_rank(job: JobSpec, plan: Plan) -> tuple[tuple[float, float], ...]:
    """(dense, expert) parameters of the ranks of every stage, as hapmoe.counting has them."""
    classes, of_layer = layer_classes(job)
    counts = []
    for index, stage in enumerate(plan.stages):
        options, dense, expert = _options(plan, index), 0.0, 0.0
        for start, count in stage.virtual_layers:
            for layer in range(start, start + count):
                dense_K, expert_K = layer_params(job, options, classes[of_layer[layer]])
                dense, expert = dense + float(dense_K[0]), expert + float(expert_K[0])
        first, last = index == 0, index == plan.pp - 1
        if first:
            dense += float(embedding_params(job, options)[0])
        if last:
            dense += float(head_params(job, options, with_embedding=first)[0])
        if last and job.model.mtp_layers:
            dense_K, expert_K = mtp_params(job, options, last_class(job.model))
            dense += job.model.mtp_layers * float(dense_K[0])
            expert += job.model.mtp_layers * float(expert_K[0])
            # MTP embeds tokens on the last stage with a copy of the embedding
            dense += 0.0 if first or job.model.tied_embeddings else float(embedding_params(job, options)[0])
        counts.append((dense, expert))
    return tuple(counts)


def _parameters(found: Run, index: int) -> Found:
    """Of the stage's first rank, and of every rank that differs."""
    dense, expert = parameters_per_rank(found.job, found.plan)[index]
    for rank in _ranks(found, index):
        measured = found.rows("start")[rank][0]["parameters"]
        if (measured["dense"], measured["expert"]) != (dense, expert) or rank == _ranks(found, index)[0]:
            yield "parameters: dense", dense, measured["dense"]
            yield "parameters: expert", expert, measured["expert"]


def _collectives(found: Run, index: int) -> Found:
    calls: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    sizes: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for traffic in step_traffic(found.job, found.plan)[index]:
        key = f"{traffic.axis} {traffic.collective}"
        calls[key][0] += traffic.calls
        sizes[key][0] += traffic.bytes
    ranks = _ranks(found, index)
    for rank in ranks:
        for row in found.rows("volumes")[rank][0]["collectives"]:
            key = f"{row['axis']} {row['collective']}"
            calls[key][1] += row["calls"] / len(ranks)
            sizes[key][1] += row["calls"] * row["call_bytes"] / len(ranks)
    for key in sorted(calls):
        if key.startswith("cp "):
            continue  # inside attention, which is the lab's own (hapmoe.lab.patches)
        yield f"{key}: calls", *calls[key]
        yield f"{key}: bytes", *sizes[key]


def _kept(found: Run, index: int) -> Found:
    """Bytes kept by one microbatch, the mean over the stage's ranks, by part of the model."""
    ranks, job, stage = _ranks(found, index), found.job, found.plan.stages[index]
    measured: Counter[str] = Counter()
    for rank in ranks:
        for row in found.rows("volumes")[rank][0]["kept"]:
            if tuple(row["shape"][:2]) == (1, 1) and row["dtype"] == "bool":
                continue  # the causal mask: the lab makes it once, for all layers
            if row["part"] == "block" and row["shape"][1:3] == [1, 1]:
                continue  # rotary angles, once for all layers
            measured[row["part"]] += row["bytes"] / len(ranks)
    shapes = Shapes.of(job, _options(found.plan, index))
    classes, of_layer = layer_classes(job)
    inputs = 0.0
    for start, count in stage.virtual_layers:
        for place in range(count):
            layer, again = start + place, stage.recompute
            kind = classes[of_layer[layer]]
            if again.granularity == "full" and (again.method == "uniform" or place < again.num_layers):
                first = again.method == "block" or place % again.num_layers == 0
                tensors = memory.layer_tensors(shapes, kind)
                inputs += first * float(memory.activation_bytes(tensors, (again,))[0, 0])
                yield f"kept: layer {layer}", 0.0, measured[f"layer {layer}"]
                continue
            again = Recompute() if again.granularity == "full" else again
            tensors = (*memory.layer_tensors(shapes, kind), *extras(shapes, kind))
            predicted = float(memory.activation_bytes(tensors, (again,))[0, 0])
            yield f"kept: layer {layer}", predicted, measured[f"layer {layer}"]
    if inputs:
        yield "kept: inputs of recomputed layers", inputs, measured["block"]
    if index == found.plan.pp - 1 and not job.model.mtp_layers:
        # the softmax takes the place of the fp32 logits; the copy in another type is gone by then
        logits = float(memory.head_bytes(shapes)[0])
        if job.training.precision != "fp32":
            logits -= float((shapes.tokens_K * padded_vocab_K(job.model, shapes.options) / shapes.tp_K)[0]) * 2.0
        statistics = float(shapes.shard_K[0]) * _norm_extra(shapes, job.model.hidden)
        targets = float(shapes.tokens_K[0]) * 9.0
        yield "kept: head", logits + statistics + targets, measured["head"]


def _norm_extra(shapes: Shapes, width: float) -> float:
    """Bytes a token that a norm keeps beyond its input (see ``extras``)."""
    return 8.0 if shapes.job.model.layernorm_bias else (8.0 - shapes.bytes) * width + 4.0


def extras(shapes: Shapes, kind: LayerClass) -> tuple[memory.Tensor, ...]:
    """What Megatron without fused kernels keeps on CPU beyond the model's tensors, which are a GPU's.

    * torch's RMSNorm is made of single operations in fp32: it keeps its input in fp32, the normalized
      input, and a statistic per token (LayerNorm two);
    * dropout of the scores keeps its mask in their type, not as bytes;
    * the tables of cosines and sines, for queries and keys;
    * an activation that is not fused keeps its gate's output and the other half (which it copies);
      experts also the product before it is scaled with the probabilities, and those.
    """
    model, size = shapes.job.model, shapes.bytes
    modules = ("moe",) if kind.moe else ("mlp",)
    found: list[memory.Tensor] = []

    def keep(name: str, bytes_K: object, *freed_by: str) -> None:
        found.append(memory.Tensor(name, np.asarray(bytes_K, dtype=np.float64) + 0.0 * shapes.tokens_K, freed_by))

    def norm(tokens_K: object, width: float, *freed_by: str) -> None:
        keep("norm", np.asarray(tokens_K) * _norm_extra(shapes, width), *freed_by)

    norm(shapes.shard_K, model.hidden)
    norm(shapes.shard_K, model.hidden)
    seq = float(shapes.job.training.seq_len)
    heads_K = model.num_heads / shapes.tp_K
    keep("dropout_mask", (size - 1) * heads_K * shapes.tokens_K * seq, "core_attn")
    if model.mla is not None:
        norm(shapes.shard_K, (model.mla.q_lora or 0) + model.mla.kv_lora)
        keep("second_latent_statistic", shapes.shard_K * 4.0)
    if not model.learned_positions:
        width = model.head_dim if model.mla is None else model.mla.qk_rope
        keep("rotary_tables", 4 * (seq / shapes.cp_K) * width * size)
    if kind.moe and model.moe is not None:
        rows_K, width_K = shapes.expert_tokens_K, model.moe.ffn_hidden / shapes.etp_K
        keep("expert_activation", rows_K * width_K * (3.0 if model.gated else 1.0) * size, *modules)
    elif model.gated:
        keep("activation", shapes.tokens_K * (model.ffn_hidden / shapes.tp_K) * 2.0 * size, *modules)
    if kind.moe and model.moe is not None and model.moe.shared_ffn_hidden and model.gated:
        width_K = model.moe.shared_ffn_hidden / shapes.tp_K
        keep("shared_activation", shapes.tokens_K * width_K * 2.0 * size, "moe", "shared_experts")
    return tuple(found)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.volumes", description=__doc__)
    parser.add_argument("--json", action="store_true", help="every quantity of every case as JSON")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    options = parser.parse_args(arguments)
    chosen = [case for case in CASES if options.only in case.name]
    rows: list[Row] = []
    for case in chosen:
        rows += (found := compare(run(case, measure=True)))
        print(_line(case, found), file=sys.stderr if options.json else sys.stdout, flush=True)
    wrong = [row for row in rows if row.error > TOLERANCE]
    if options.json:
        print(json.dumps([{**asdict(row), "error": row.error} for row in rows], indent=1))
    else:
        exact = sum(row.error == 0 for row in rows)
        print(f"{len(chosen)} cases, {len(rows)} quantities: {exact} equal, {len(wrong)} off by more than 1%")
        for row in wrong:
            print(f"  {row.case}, stage {row.stage}: {row.quantity}: {row.predicted:.0f} for {row.measured:.0f}")
    return 1 if wrong else 0


def _line(case: Case, rows: Sequence[Row]) -> str:
    worst = max(rows, key=lambda row: row.error)
    tail = f", worst {worst.error:.2%}: {worst.quantity}" if worst.error else ""
    return (
        f"{case.name:55} {case.ranks} ranks, {len(rows):3} quantities, {sum(r.error == 0 for r in rows):3} equal{tail}"
    )


if __name__ == "__main__":
    sys.exit(main())
