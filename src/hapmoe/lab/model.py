"""The model of one rank on megatron.core alone, with weights that do not depend on how it is divided."""

from __future__ import annotations

import argparse
import hashlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from typing import Any

__all__ = ["build", "configure", "layers_of", "parameters_of", "pieces", "sharding"]


def configure(args: argparse.Namespace) -> Any:
    """Megatron-Core's configuration for the arguments (megatron/training/argument_utils.py)."""
    import torch
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    dtype = torch.bfloat16 if args.bf16 else torch.float32
    values: dict[str, Any] = {
        "num_layers": args.num_layers,
        "hidden_size": args.hidden_size,
        "num_attention_heads": args.num_attention_heads,
        "num_query_groups": args.num_query_groups,
        "ffn_hidden_size": args.ffn_hidden_size,
        "kv_channels": args.kv_channels,
        "normalization": args.normalization,
        "layernorm_epsilon": args.norm_epsilon,
        "gated_linear_unit": args.swiglu,
        "activation_func": torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        "add_bias_linear": not args.disable_bias_linear,
        "add_qkv_bias": args.add_qkv_bias,
        "qk_layernorm": args.qk_layernorm,
        "hidden_dropout": args.hidden_dropout,
        "attention_dropout": args.attention_dropout,
        "attention_softmax_in_fp32": args.attention_softmax_in_fp32,
        "init_method_std": args.init_method_std,
        "mtp_num_layers": args.mtp_num_layers,
        "bf16": args.bf16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": args.tensor_model_parallel_size,
        "pipeline_model_parallel_size": args.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": args.virtual_stages,
        "context_parallel_size": args.context_parallel_size,
        "expert_model_parallel_size": args.expert_model_parallel_size,
        "expert_tensor_parallel_size": args.expert_tensor_parallel_size,
        "sequence_parallel": args.sequence_parallel and args.tensor_model_parallel_size > 1,
        "pipeline_model_parallel_layout": args.pipeline_model_parallel_layout,
        "num_layers_in_first_pipeline_stage": args.decoder_first_pipeline_num_layers,
        "num_layers_in_last_pipeline_stage": args.decoder_last_pipeline_num_layers,
        "recompute_granularity": args.recompute_granularity,
        "recompute_method": args.recompute_method,
        "recompute_num_layers": args.recompute_num_layers,
        "recompute_modules": args.recompute_modules,
        "calculate_per_token_loss": args.calculate_per_token_loss,
        # what arguments.py does: overlap only when interleaving, and then without batching
        "overlap_p2p_comm": bool(args.virtual_stages) and not args.no_overlap_p2p_communication,
        "batch_p2p_comm": not args.virtual_stages or args.no_overlap_p2p_communication,
        "microbatch_group_size_per_vp_stage": args.microbatch_group_size_per_virtual_pipeline_stage,
        # kernels that exist on accelerators only
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }
    if args.num_experts:
        values |= {
            "num_moe_experts": args.num_experts,
            "moe_router_topk": args.moe_router_topk,
            "moe_ffn_hidden_size": args.moe_ffn_hidden_size or args.ffn_hidden_size,
            "moe_shared_expert_intermediate_size": args.moe_shared_expert_intermediate_size,
            "moe_shared_expert_overlap": args.moe_shared_expert_overlap,
            "moe_layer_freq": args.moe_layer_freq,
            "moe_router_load_balancing_type": args.moe_router_load_balancing_type,
            "moe_aux_loss_coeff": args.moe_aux_loss_coeff,
            "moe_z_loss_coeff": args.moe_z_loss_coeff,
            "moe_router_dtype": args.moe_router_dtype,
            "moe_router_force_load_balancing": args.moe_router_force_load_balancing or None,
            "moe_token_dispatcher_type": args.moe_token_dispatcher_type,
            "moe_expert_capacity_factor": args.moe_expert_capacity_factor,
            "moe_pad_expert_input_to_capacity": args.moe_pad_expert_input_to_capacity,
        }
    if not args.multi_latent_attention:
        return TransformerConfig(**_known(TransformerConfig, values))
    return MLATransformerConfig(
        multi_latent_attention=True,
        q_lora_rank=args.q_lora_rank,
        kv_lora_rank=args.kv_lora_rank,
        qk_head_dim=args.qk_head_dim,
        qk_pos_emb_head_dim=args.qk_pos_emb_head_dim,
        v_head_dim=args.v_head_dim,
        rope_type="rope",
        rotary_base=args.rotary_base,
        **values,
    )


def _known(kind: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Without settings that this version has not, where they ask for nothing."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in values.items() if name in names or value is not None}


def build(args: argparse.Namespace, config: Any) -> list[Any]:
    """This rank's model chunks, wrapped for data parallelism, with their weights set."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module

    reduction = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=args.use_distributed_optimizer,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather and args.use_distributed_optimizer,
    )
    chunks = []
    for index in range(args.virtual_stages or 1):
        chunk = index if args.virtual_stages else None
        if chunk is not None:  # up to core 0.13 some functions look there
            parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
        spec = _taking(get_gpt_decoder_block_spec, vp_stage=chunk)(config, False, normalization=args.normalization)
        mtp = None
        if args.mtp_num_layers:
            # a chunk without decoder layers has none to copy: MTP layers are like the model's last
            whole = spec if spec.layer_specs else _last_layer(config, args)
            mtp = _taking(get_gpt_mtp_block_spec, vp_stage=chunk)(config, whole, False)
        first, last = (
            _taking(ask, vp_stage=chunk)(ignore_virtual=chunk is None)
            for ask in (parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage)
        )
        model = _taking(GPTModel, vp_stage=chunk)(
            config,
            spec,
            args.padded_vocab_size,
            args.max_position_embeddings,
            pre_process=first,
            post_process=last,
            parallel_output=True,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_base=args.rotary_base,
            mtp_block_spec=mtp,
        )
        _set_weights(model, args)
        model = Float16Module(config, model) if args.bf16 else model
        chunks.append(DistributedDataParallel(config, reduction, model, disable_bucketing=index > 0))
    return chunks


def _taking(call: Callable[..., Any], **named: Any) -> Callable[..., Any]:
    """``call`` with these arguments, without those that this version does not take."""
    taken = inspect.signature(call).parameters
    return partial(call, **{name: value for name, value in named.items() if name in taken})


def _last_layer(config: Any, args: argparse.Namespace) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs

    return get_gpt_decoder_layer_specs(config, False, normalization=args.normalization)[-1]


def _set_weights(model: Any, args: argparse.Namespace) -> None:
    """Weights by name: every rank makes the whole tensor and keeps its slice.

    Megatron's own initialization draws from one stream per rank, so that another split would train
    another model. Its sharded state dict knows name, whole shape and place of each slice.
    """
    import torch

    def fill(tensor: Any) -> None:
        lead = tensor.prepend_axis_num
        if len(tensor.global_shape) - lead < 2:
            return  # norms and biases start at one and zero everywhere
        name = f"{args.seed}/{tensor.key}/{tensor.global_offset[:lead]}"
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
        whole = torch.empty(tensor.global_shape[lead:], dtype=torch.float32)
        whole.normal_(0.0, args.init_method_std, generator=torch.Generator().manual_seed(seed))
        offset = tensor.global_offset[lead:]
        place = tuple(slice(at, at + size) for at, size in zip(offset, tensor.data.shape, strict=True))
        tensor.data.copy_(whole[place])

    with torch.no_grad():
        for tensor in _pieces(model):
            fill(tensor)


def _pieces(model: Any) -> Iterator[Any]:
    """This rank's part of every parameter, with its name and place in the whole tensor."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    for entry in nested_values(model.sharded_state_dict(metadata=sharding())):
        for part in nested_values(entry.build()) if isinstance(entry, ShardedTensorFactory) else (entry,):
            if isinstance(part, ShardedTensor):
                yield part


def pieces(chunks: list[Any]) -> list[tuple[str, tuple[int, ...], Any]]:
    """(name, offset in the whole tensor, values) of this rank's parameters, each of its leading axes one."""
    found = []
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)  # the last step's values are still on their way
        for one in _pieces(chunk.module):
            values = one.data.detach().float().clone()
            found.append((one.key, tuple(one.global_offset), values[(None,) * one.prepend_axis_num]))
    return found


def sharding() -> dict[str, Any]:
    """What sharded state dicts must be told: over which ranks a tensor is replicated (some versions ask),
    and that every layer has a key of its own, as stages of unequal degrees need it (hapmoe.runtime)."""
    from megatron.core import parallel_state

    return {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "non_homogeneous_layers": True,
    }


def layers_of(chunks: list[Any]) -> list[list[int]]:
    """Per chunk, the numbers (from 0) of the decoder layers that this rank holds."""
    from megatron.core.utils import get_attr_wrapped_model

    decoders = [get_attr_wrapped_model(chunk, "decoder") for chunk in chunks]
    return [[layer.layer_number - 1 for layer in decoder.layers] for decoder in decoders]


def parameters_of(chunks: list[Any]) -> dict[str, int]:
    """Parameters on this rank: those of routed experts, and all others."""
    counts = {"dense": 0, "expert": 0}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            counts["expert" if ".experts." in name else "dense"] += parameter.numel()
    return counts
