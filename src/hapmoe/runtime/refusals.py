"""What would train something else in silence, each with its reason; checked before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .mesh import Layout

__all__ = ["Facts", "argument_refusals", "refusals", "warnings"]


@dataclass(frozen=True)
class Facts:
    """What one rank trains, as far as it concerns other stages. The same on all ranks of a stage."""

    common: dict[str, Any]
    """Must be equal on all stages."""
    sequence_parallel: bool
    tied: bool
    distributed_data_parallel: bool
    """Every chunk is wrapped by Megatron's DistributedDataParallel, and by nothing that shards parameters."""
    config: dict[str, Any]
    """Settings that refusals look at; absent ones (other versions) are None."""

    @classmethod
    def of(cls, layout: Layout, model: list[Any], step: dict[str, Any]) -> Facts:
        """From the model chunks of this rank and the arguments of the schedule."""
        from megatron.core.distributed import DistributedDataParallel
        from megatron.core.utils import get_attr_wrapped_model, get_model_config

        config = get_model_config(model[0])
        mine = layout.mine
        reductions = [getattr(chunk, "ddp_config", None) for chunk in model]
        return cls(
            common={
                "the number of layers": config.num_layers,
                "the hidden size": config.hidden_size,
                "the type of activations": str(config.pipeline_dtype),
                "per-token loss": bool(config.calculate_per_token_loss),
                "microbatches": step["num_microbatches"],
                "samples per microbatch": step["micro_batch_size"] * mine.dp,
                "the sequence length": step["seq_length"],
                "virtual stages": len(model),
                "experts": getattr(config, "num_moe_experts", None),
            },
            sequence_parallel=bool(config.sequence_parallel) and mine.tp > 1,
            tied=any(_tied(get_attr_wrapped_model, chunk) for chunk in model),
            distributed_data_parallel=all(isinstance(chunk, DistributedDataParallel) for chunk in model)
            and not any(getattr(one, name, False) for one in reductions for name in _SHARDING),
            config={name: getattr(config, name, None) for name in _LOOKED_AT},
        )


_SHARDING = ("use_megatron_fsdp", "use_custom_fsdp")
_LOOKED_AT = (
    *("mtp_num_layers", "mtp_standalone", "variable_seq_lengths", "use_ring_exchange_p2p", "enable_cuda_graph"),
    *("overlap_moe_expert_parallel_comm", "moe_router_load_balancing_type", "moe_aux_loss_coeff"),
    *("calculate_per_token_loss", "num_moe_experts", "has_cond_embedder", "hierarchical_context_parallel_sizes"),
    *("hybrid_context_parallel", "cuda_graph_impl", "cuda_graph_scope"),
)

_NEVER = {
    "mtp_num_layers": "MTP: its layers share the embedding, whose gradients would have to be added across stages",
    "mtp_standalone": "MTP on a stage of its own: shapes are then exchanged over a group that does not exist here",
    "variable_seq_lengths": "--variable-seq-lengths: shapes are exchanged over a group that does not exist here",
    "use_ring_exchange_p2p": "--use-ring-exchange-p2p: the ring has one rank per stage only if all meshes are equal",
    "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm: its schedule sends by itself, not tried",
    "has_cond_embedder": "conditional embedders: their gradients are added over the pipeline group",
    "hierarchical_context_parallel_sizes": "hierarchical context parallelism: another cut of the sequence, not tried",
    "hybrid_context_parallel": "hybrid context parallelism: another cut of the sequence, not tried",
}
"""Setting of the configuration: why no plan with unequal stages trains with it."""


def _tied(find: Any, chunk: Any) -> bool:
    return bool(find(chunk, "share_embeddings_and_output_weights", allow_none=False))


def refusals(layout: Layout, stages: Sequence[Facts]) -> Iterator[str]:
    """Why this job must not start; nothing: it may. ``stages``: one rank's facts of each."""
    if any(one.tied for one in stages) and layout.stages > 1:
        yield "tied embeddings: their gradients are added between the first and the last stage (untie them)"
    if not all(one.distributed_data_parallel for one in stages):
        yield "FSDP: parameters are sharded over groups that span stages; use Megatron's DistributedDataParallel"
    for mesh, one in zip(layout.meshes, stages, strict=True):
        config = one.config
        for name, reason in _NEVER.items():
            if config[name]:
                yield reason
        if config["enable_cuda_graph"] == "full_iteration" or "full_iteration" in str(config["cuda_graph_scope"]):
            yield "CUDA graphs of a whole iteration: boundaries are put together outside of the graph"
        experts = config["num_moe_experts"]
        if experts and experts % mesh.ep:
            yield f"stage {mesh.index}: {experts} experts do not divide by ep {mesh.ep}"
        if experts and mesh.ep == 1 and mesh.etp != mesh.tp:
            yield (
                f"stage {mesh.index}: ep 1 with etp {mesh.etp}, tp {mesh.tp}: Megatron reduces expert gradients "
                "over the wrong ranks (tensor_parallel/layers.py:829)"
            )
        if "seq_aux_loss" in _losses(config) and config["calculate_per_token_loss"]:
            yield (
                "seq_aux_loss with per-token loss: Megatron counts the tokens of one sequence only (router.py, "
                "_apply_seq_aux_loss), so that its weight would differ between stages with other micro-batch sizes"
            )


def argument_refusals(layout: Layout, args: Any) -> Iterator[str]:
    """The same for arguments of megatron.training that reach no configuration of megatron.core."""
    first, last = layout.meshes[0], layout.meshes[-1]
    order = getattr(args, "dataloader_type", None)
    if order in ("cyclic", "external") and first.dp != last.dp:
        yield (
            f"--dataloader-type {order}: its samples depend on dp, so the first stage (dp {first.dp}) would read "
            f"other tokens than the last one (dp {last.dp}) has labels for"
        )
    if getattr(args, "rampup_batch_size", None):
        yield "--rampup-batch-size: its steps are cut by one data-parallel size, not tried"
    formats = getattr(args, "ckpt_format", "torch_dist"), getattr(args, "non_persistent_ckpt_type", None)
    if (getattr(args, "save", None) or getattr(args, "load", None)) and formats[0] != "torch_dist":
        yield f"--ckpt-format {formats[0]}: names files by the ranks of a uniform job; torch_dist does not"
    if formats[1] == "local":
        yield "--non-persistent-ckpt-type local: copies go to ranks of a uniform job"
    if getattr(args, "use_torch_fsdp2", False):
        yield "--use-torch-fsdp2: parameters are sharded over groups that span stages"
    own = getattr(args, "eval_micro_batch_size", None)
    if own not in (None, getattr(args, "micro_batch_size", own)) and len({mesh.dp for mesh in layout.meshes}) > 1:
        yield "--eval-micro-batch-size: times unequal dp it gives stages other samples per microbatch"
    if getattr(args, "perform_rl_step", False):
        yield "--perform-rl-step: counts microbatches by one data-parallel size, not tried"
    if (optimizer := getattr(args, "optimizer", "adam")) not in ("adam", "sgd"):
        yield f"--optimizer {optimizer}: it may cut parameters and sum norms in its own way, not tried"
    if getattr(args, "encoder_pipeline_model_parallel_size", 0):
        yield "pipeline stages of an encoder: not tried"


def warnings(layout: Layout, stages: Sequence[Facts]) -> Iterator[str]:
    """What is trained as Megatron means it, but not as with another plan."""
    meant = {"aux_loss", "global_aux_loss"} & set(_losses(stages[0].config))
    if meant and len({(mesh.dp, mesh.cp) for mesh in layout.meshes}) > 1:
        yield (
            f"{', '.join(sorted(meant))} depends on the tokens of one data-parallel rank (in Megatron too), so its "
            "strength differs between stages of unequal dp; seq_aux_loss does not"
        )


def _losses(config: dict[str, Any]) -> list[str]:
    """Kinds of auxiliary losses that are on."""
    kinds, weights = config["moe_router_load_balancing_type"], config["moe_aux_loss_coeff"]
    if not config["num_moe_experts"] or kinds is None:
        return []
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    weights = list(weights) if isinstance(weights, list | tuple) else [weights] * len(kinds)
    return [kind for kind, weight in zip(kinds, weights, strict=False) if weight]
