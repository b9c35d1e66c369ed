"""Names under which figures of training runs are found again: what makes two layers the same layer."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from hapmoe.job import JobSpec
from hapmoe.plan import Recompute

__all__ = ["recompute_word", "shape_key"]

_COUNTS = ("num_layers", "mtp_layers", "window_pattern")
_RUNTIME = (
    *("precision", "fp8_recipe", "fp4", "flash_attention", "transformer_engine", "cp_comm_type", "dispatcher"),
    *("flex_backend", "grouped_gemm", "router_dtype", "permute_fusion", "shared_expert_overlap"),
    *("overlap_moe_comm", "tp_comm_overlap", "cross_entropy_fusion"),
)
"""Fields of ``job.Training`` that change what a layer does."""


def shape_key(job: JobSpec) -> str:
    """``h4096-f14336-e8k2-1a2b3c4d``: the shapes and kernels of a job's layers.

    The number of layers, the batch and the degrees are not in it: pieces measured on a shortened
    model are those of the whole.
    """
    model: dict[str, Any] = {k: v for k, v in msgspec.to_builtins(job.model).items() if k not in _COUNTS}
    moe = job.model.moe
    if moe is not None:
        model["moe"] = {k: v for k, v in model["moe"].items() if k != "pattern"}
    runtime = {name: getattr(job.training, name) for name in _RUNTIME}
    digest = hashlib.sha256(msgspec.json.encode([model, runtime], order="sorted")).hexdigest()[:8]
    width = moe.ffn_hidden if moe else job.model.ffn_hidden
    experts = [f"e{moe.num_experts}k{moe.top_k}"] if moe else []
    return "-".join([f"h{job.model.hidden}", f"f{width}", *experts, digest])


def recompute_word(recompute: Recompute) -> str:
    """``none``, ``full:block:4``, ``selective:core_attn+moe_act``: one cell of a table."""
    if recompute.granularity == "full":
        return f"full:{recompute.method}:{recompute.num_layers}"
    if recompute.granularity == "selective":
        return f"selective:{'+'.join(recompute.modules)}"
    return "none"
