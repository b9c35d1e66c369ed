"""Megatron's argument names, as far as the lab's training program knows them; anything else is refused by name."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Sequence

__all__ = ["parse"]

_NUMBERS = {
    "num-layers": None,
    "hidden-size": None,
    "num-attention-heads": None,
    "ffn-hidden-size": None,
    "kv-channels": None,
    "num-query-groups": None,
    "seq-length": None,
    "max-position-embeddings": None,
    "vocab-size": None,
    "padded-vocab-size": None,
    "make-vocab-size-divisible-by": 128,
    "mtp-num-layers": None,
    "q-lora-rank": None,
    "kv-lora-rank": 32,
    "qk-head-dim": 128,
    "qk-pos-emb-head-dim": 64,
    "v-head-dim": 128,
    "num-experts": None,
    "moe-router-topk": 2,
    "moe-ffn-hidden-size": None,
    "moe-shared-expert-intermediate-size": None,
    "micro-batch-size": None,
    "global-batch-size": None,
    "train-iters": 5,
    "seed": 1234,
    "save-interval": None,
    "exit-interval": None,
    "tensor-model-parallel-size": 1,
    "pipeline-model-parallel-size": 1,
    "context-parallel-size": 1,
    "expert-model-parallel-size": 1,
    "expert-tensor-parallel-size": None,
    "num-layers-per-virtual-pipeline-stage": None,
    "num-virtual-stages-per-pipeline-rank": None,
    "decoder-first-pipeline-num-layers": None,
    "decoder-last-pipeline-num-layers": None,
    "microbatch-group-size-per-virtual-pipeline-stage": None,
    "recompute-num-layers": None,
    "rotary-base": 10000,
}
_FRACTIONS = {
    "attention-dropout": 0.1,
    "hidden-dropout": 0.1,
    "init-method-std": 0.02,
    "norm-epsilon": 1e-5,
    "lr": 1e-3,
    "clip-grad": 1.0,
    "weight-decay": 0.01,
    "moe-aux-loss-coeff": 0.0,
    "moe-z-loss-coeff": None,
    "moe-expert-capacity-factor": None,
}
_WORDS = {
    "pipeline-model-parallel-layout": None,
    "recompute-granularity": None,
    "recompute-method": None,
    "normalization": "LayerNorm",
    "position-embedding-type": "learned_absolute",
    "moe-layer-freq": "1",
    "moe-router-load-balancing-type": "aux_loss",
    "moe-router-dtype": None,
    "moe-token-dispatcher-type": "allgather",
    "save": None,
    "load": None,
    "optimizer": "adam",
}
_SWITCHES = (
    *("group-query-attention", "swiglu", "untie-embeddings-and-output-weights", "disable-bias-linear"),
    *("add-qkv-bias", "qk-layernorm", "multi-latent-attention", "moe-pad-expert-input-to-capacity"),
    *("moe-shared-expert-overlap", "sequence-parallel", "use-distributed-optimizer", "overlap-grad-reduce"),
    *("overlap-param-gather", "no-overlap-p2p-communication", "dist-ckpt-optim-fully-reshardable", "bf16"),
    *("finetune", "no-load-optim", "no-save-optim"),
    *("recompute-activations", "calculate-per-token-loss", "ckpt-fully-parallel-load"),
    *("attention-softmax-in-fp32", "fake-process-group", "moe-router-force-load-balancing"),
)
_IGNORED = {
    # Flag: number of values. None of them changes what is computed here.
    "mock-data": 0,
    "no-load-rng": 0,
    "no-save-rng": 0,
    "log-throughput": 0,
    "use-cpu-initialization": 0,
    "no-masked-softmax-fusion": 0,
    "no-bias-gelu-fusion": 0,
    "no-bias-swiglu-fusion": 0,
    "no-bias-dropout-fusion": 0,
    "no-rope-fusion": 0,
    "no-gradient-accumulation-fusion": 0,
    "no-persist-layer-norm": 0,
    "override-opt-param-scheduler": 0,
    "tokenizer-type": 1,
    "transformer-impl": 1,
    "attention-backend": 1,
    "distributed-backend": 1,
    "lr-decay-style": 1,
    "split": 1,
    "data-path": 1,
    "log-interval": 1,
    "eval-iters": 1,
    "eval-interval": 1,
    "ckpt-format": 1,
    "cp-comm-type": 1,
}
_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size")


def parse(argv: Sequence[str], world_size: int) -> argparse.Namespace:
    """The arguments with Megatron's defaults filled in as megatron/training/arguments.py fills them.

    Stops with the name of the first argument that this program does not know: what it cannot do must
    not look as if it were done.
    """
    parser = argparse.ArgumentParser(prog="hapmoe.lab.train", allow_abbrev=False)
    for name, number in _NUMBERS.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    for name, fraction in _FRACTIONS.items():
        parser.add_argument(f"--{name}", type=float, default=fraction)
    for name, word in _WORDS.items():
        parser.add_argument(f"--{name}", default=word)
    for name in _SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    for name, values in _IGNORED.items():
        if values:
            parser.add_argument(f"--{name}", nargs=values, help=argparse.SUPPRESS)
        else:
            parser.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--recompute-modules", nargs="*", default=None)
    args = parser.parse_args(argv)
    for name in _REQUIRED:
        if getattr(args, name) is None:
            parser.error(f"--{name.replace('_', '-')} is missing")
    _fill(args, world_size, parser)
    return args


def _fill(args: argparse.Namespace, world_size: int, parser: argparse.ArgumentParser) -> None:
    if args.recompute_activations:
        args.recompute_granularity = "selective"
    if args.ffn_hidden_size is None:
        args.ffn_hidden_size = int(4 * args.hidden_size * 2 / 3 / 64) * 64 if args.swiglu else 4 * args.hidden_size
    if not args.group_query_attention or args.num_query_groups is None:
        args.num_query_groups = None
    args.max_position_embeddings = args.max_position_embeddings or args.seq_length
    if args.padded_vocab_size is None:
        if args.vocab_size is None:
            parser.error("--vocab-size or --padded-vocab-size is missing")
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple
    args.vocab_size = args.vocab_size or args.padded_vocab_size
    pattern = ast.literal_eval(args.moe_layer_freq) if args.moe_layer_freq[0] != "(" else None
    if pattern is None:  # "([0]*1+[1]*3)*1", as Megatron's scripts write it
        pattern = _product(args.moe_layer_freq)
    args.moe_layer_freq = pattern
    replica = args.tensor_model_parallel_size * args.context_parallel_size * args.pipeline_model_parallel_size
    if world_size % replica:
        parser.error(f"{world_size} ranks are not a multiple of tp * cp * pp = {replica}")
    args.data_parallel_size = world_size // replica
    per_step = args.micro_batch_size * args.data_parallel_size
    args.global_batch_size = args.global_batch_size or per_step
    if args.global_batch_size % per_step:
        parser.error(f"--global-batch-size {args.global_batch_size} is not a multiple of {per_step}")
    args.num_microbatches = args.global_batch_size // per_step
    args.virtual_stages = _virtual_stages(args)


def _product(text: str) -> list[int]:
    """Lists of numbers added and repeated, without evaluating anything else."""
    allowed = (ast.Expression, ast.BinOp, ast.Add, ast.Mult, ast.List, ast.Constant, ast.Load)
    tree = ast.parse(text, mode="eval")
    if not all(isinstance(node, allowed) for node in ast.walk(tree)):
        raise SystemExit(f"--moe-layer-freq {text!r}: lists, + and * only")
    return list(eval(compile(tree, "--moe-layer-freq", "eval"), {"__builtins__": {}}))


def _virtual_stages(args: argparse.Namespace) -> int | None:
    """Model chunks per rank, None for one (arguments.py:941-1000)."""
    stages = args.pipeline_model_parallel_size
    if args.pipeline_model_parallel_layout:
        from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

        count = PipelineParallelLayerLayout.get_num_stages_from_str(args.pipeline_model_parallel_layout)
        return count // stages if count > stages else None
    if args.num_virtual_stages_per_pipeline_rank:
        return int(args.num_virtual_stages_per_pipeline_rank)
    if args.num_layers_per_virtual_pipeline_stage:
        return int(args.num_layers // stages // args.num_layers_per_virtual_pipeline_stage)
    return None
