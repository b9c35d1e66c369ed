"""How a published run was set up where its row does not say: rules by framework, release and device, never by row.

They are not blind: which habits to assume (CUDA graphs on Grace-Blackwell, flex dispatch from release
25.11, bf16 gradient reduction, rho of learned routers) was settled while looking at the errors of the
collected rows. Errors on those rows are therefore optimistic; judge by rows kept apart.
"""

from __future__ import annotations

import re
from typing import Any

from hapmoe.job import Training
from hapmoe.model import ModelSpec
from hapmoe.plan import Recompute

__all__ = ["imbalance_of", "modern", "recompute_of", "release_of", "sequence_parallel", "training_of"]

RELEASES = (
    # framework -> date as a fraction of a year; NeMo and Megatron-Bridge containers carry it in their name
    (r"v?(\d\d)\.(\d\d)(?:\.\d+)?", None),
    (r"MLPerf Training v4\.0", 2024.4),
    (r"MLPerf Training v4\.1", 2024.8),
    (r"MLPerf Training v5\.0", 2025.4),
    (r"MLPerf Training v5\.1", 2025.8),
    (r"MindSpeed-LLM v1\.0\.RC1", 2024.2),
    (r"MindSpeed-LLM v1\.0\.RC2", 2024.5),
    (r"MindSpeed-LLM v1\.0\.RC3", 2024.8),
)


def release_of(row: dict[str, Any]) -> float | None:
    """Date of the software, as a fraction of a year, where the row's framework names a release."""
    framework = str(row.get("framework"))
    for pattern, date in RELEASES:
        found = re.search(pattern, framework)
        if found and date:
            return date
        if found and re.search(r"nemo|bridge|dgxc", framework, re.I):
            return 2000 + int(found[1]) + (int(found[2]) - 1) / 12
    return None


def modern(row: dict[str, Any]) -> bool:
    """Flash attention and Transformer Engine, as Megatron has had them since 2023."""
    text = f"{row.get('framework', '')} {row['source']}"
    return not re.search(r"20(21|22)|v2\.2|v1\.1\.5|sailor|bigscience|SmartMoE|calculon", text, re.I)


def sequence_parallel(row: dict[str, Any]) -> bool:
    """Recipes since 2023 turn it on with tp; Megatron-LM's functional tests state every flag that they use."""
    return modern(row) and "NVIDIA/Megatron-LM@" not in row["source"]


TRACE = {1: 1.0, 2: 1.4, 4: 2.06, 8: 3.42, 16: 6.15, 32: 11.6}
"""Fullest over mean rank by EP degree of a router trained without effective balancing, 32 experts top 2
(SmartMoE-AE moe_trace, mean over layers and 5,000 iterations; EP 2 extended from 4)."""


def imbalance_of(row: dict[str, Any]) -> float | None:
    """What is known of routing: forced balance is 1, a learned router without balance loss is skewed.

    1.7: fullest over mean rank, 32 ranks with static experts, Mixtral on wikitext without auxiliary
    loss (LAER-MoE artefact: 1.66 with 8 experts, 1.73 with 16). FastMoE trains from scratch and does not
    balance: the SmartMoE trace, cut by the gate's capacity factor where it has one.
    """
    text = f"{row.get('routing') or ''} {row.get('dispatcher') or ''}"
    if "FastMoE" in text:
        capacity = re.search(r"capacity factor ([\d.]+)", text)
        skew = TRACE.get(int(row["par"].get("ep") or 1), 1.0)
        return min(skew, max(float(capacity[1]), 1.0)) if capacity else skew
    if re.search(r"auxiliary loss 0\.0(?!\d*[1-9])|auxiliary loss 0\.0001", text):
        return 1.7
    return None


def graphs_of(row: dict[str, Any]) -> str:
    """What CUDA graphs capture. Recipes for Grace-Blackwell use partial ones, from 26.06 on whole ones."""
    extra, framework = row.get("extra") or {}, row.get("framework", "")
    grace = str(row["hw"].get("gpu")).startswith(("GB200", "GB300"))
    habit = "none"
    if grace and re.search("Bridge|ModelZoo", framework):
        habit = "full" if _whole_graphs(row) else "layers"
    impl, scope = extra.get("cuda_graph_impl"), str(extra.get("cuda_graph_scope"))
    if impl is None:
        return habit
    if impl == "full_iteration" or "full_iteration" in scope:
        return "full"
    return "none" if impl == "none" else "layers"


def _whole_graphs(row: dict[str, Any]) -> bool:
    """Recipes of 26.06 and later for MoE on Grace-Blackwell: full-iteration graphs and EP overlap together."""
    release = release_of(row)
    grace = str(row["hw"].get("gpu")).startswith(("GB200", "GB300"))
    return bool(grace and row["arch"].get("experts") and release and release > 2026.4)


def training_of(row: dict[str, Any], model: ModelSpec, tp: int) -> Training:
    """Precision, overlap, dispatcher: stated, or the habit of the row's framework."""
    par, extra = row["par"], row.get("extra") or {}
    framework = row.get("framework", "")
    text = str(row.get("precision") or "BF16").lower()
    nemo = bool(re.search(r"nemo|megatron-bridge|mlperf", framework, re.I))
    recent = modern(row)
    recipe = None
    if "fp8" in text or "nvfp4" in text:
        recipe = (
            "mxfp8" if "mx" in text else "blockwise" if "block" in text else "tensorwise" if "cs" in text else "delayed"
        )
    dispatcher = str(row.get("dispatcher") or "").lower()
    if "flex" in dispatcher or "deepep" in dispatcher or "hybridep" in dispatcher:
        kind = "flex"
    elif "allgather" in dispatcher:
        kind = "allgather"
    elif re.search("all-?to-?all", dispatcher):
        kind = "alltoall"
    elif re.search(r"Megatron-Bridge( 26|/NeMo (25\.11|26)|$)", framework):
        kind = "flex"  # the recipes' choice from 25.11 on (HybridEP or DeepEP)
    elif "H100" in str(row["hw"].get("gpu")) and int(par.get("ep") or 1) > 8 and (release_of(row) or 0) > 2025.6:
        kind = "flex"  # DeepEP wherever experts spread over several Hopper nodes, from 25.09 on
    else:
        kind = "alltoall"
    # the recipes' flex backend: HybridEP on Grace-Blackwell, elsewhere from 26.03 on
    grace = str(row["hw"].get("gpu")).startswith(("GB200", "GB300"))
    hybrid = "hybridep" in dispatcher or ("deepep" not in dispatcher and (grace or (release_of(row) or 0) > 2026.1))
    backend = "hybridep" if hybrid else "deepep"
    overlap_moe = bool(extra["moe_a2a_overlap"]) if "moe_a2a_overlap" in extra else _whole_graphs(row)
    # NeMo's performance recipes reduce gradients in bf16 (grad_reduce_in_fp32=False)
    unfused = extra.get("attention_backend") == "unfused" or extra.get("transformer_impl") == "local"
    half = "16-bit gradient" in text or (nemo and not text.startswith("fp32"))
    # DeepSpeed's BF16 optimizer accumulates in fp32 beside the bf16 gradients (runtime/bf16_optimizer.py)
    deepspeed = bool(re.search("DeepSpeed|bigscience", f"{framework} {row['source']}")) and text.startswith("bf16")
    distributed = extra.get("dist_optimizer", bool(par.get("zero", recent)))
    distributed = distributed or par.get("optimizer") == "dist-optimizer"
    if par.get("optimizer") == "replicated":
        distributed = False
    # InternEvo reduces and gathers beside the passes (its configurations: reduce and broadcast overlap)
    overlap = nemo or "InternEvo" in framework or bool(extra.get("overlap_grad_param"))
    return Training(
        seq_len=int(row["seq"]),
        global_batch_size=int(row["gbs"]),
        precision="fp16" if text.startswith("fp16") or text == "amp" else "fp32" if text == "fp32" else "bf16",
        fp8_recipe=recipe,
        fp4="nvfp4" in text,
        fp8_param_gather=nemo and recipe == "mxfp8",
        distributed_optimizer=bool(distributed),
        grad_bytes=2 if half else 6 if deepspeed else 4,
        grad_reduce_bytes=2 if half else 4,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and bool(distributed),
        tp_comm_overlap=nemo and tp > 1 and model.moe is None,
        # scatter-gather of what pipelines send: arXiv:2104.04473, section 4.1
        scatter_gather=bool(re.search(r"^Megatron-LM( 20\d\d| v2|$)|Sailor", framework)),
        flash_attention=recent and not unfused,
        softmax_fusion="sailor" not in row["source"],
        transformer_engine=recent and extra.get("transformer_impl") != "local",
        cp_comm_type=str(extra.get("cp_comm") or "p2p"),
        dispatcher=kind,
        flex_backend=backend,
        grouped_gemm="grouped GEMM off" not in str(row.get("notes")),
        permute_fusion=nemo,
        router_dtype="fp32" if nemo else None,
        overlap_moe_comm=overlap_moe or "1F1B" in str(row.get("overlap") or ""),
        cuda_graphs=graphs_of(row),
        software_date=release_of(row),
        cross_entropy_fusion=nemo or bool(extra.get("fused_ce")),
        imbalance=imbalance_of(row),
    )


def recompute_of(stated: object, extra: dict[str, Any]) -> Recompute:
    """What a row says of recomputation; nothing said: none."""
    if isinstance(stated, dict):
        modules = stated.get("modules") or []
        if isinstance(modules, str):
            modules = re.findall(r"[a-z_]+", modules)
        if stated.get("granularity") == "full":
            return Recompute(
                granularity="full",
                method=stated.get("method") or "uniform",
                num_layers=int(stated.get("num_layers") or 1),
            )
        return Recompute(granularity="selective", modules=tuple(modules)) if modules else Recompute()
    text = str(stated or "").lower()
    block = re.search(r"full \(block (\d+)\)", text)
    if block:
        return Recompute(granularity="full", method="block", num_layers=int(block[1]))
    if text.startswith("full"):
        return Recompute(granularity="full", method="uniform", num_layers=1)
    if "selective" in text:
        return Recompute(granularity="selective", modules=("core_attn",))
    return Recompute()
