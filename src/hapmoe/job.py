"""What is asked: the model, how it is trained, and every argument that is not ours to change."""

from __future__ import annotations

import msgspec

from hapmoe.model import ModelSpec
from hapmoe.plan import Recompute

__all__ = ["Argument", "JobSpec", "Present", "Training"]


class Training(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the model is trained: what the script fixes and a plan does not touch."""

    seq_len: int
    global_batch_size: int
    """Sequences per step; 0: the script does not say and the plan would change it."""
    precision: str = "bf16"
    """bf16, fp16 or fp32: parameters and activations."""
    fp8_recipe: str | None = None
    """None, delayed, tensorwise, blockwise or mxfp8."""
    fp4: bool = False
    fp8_param_gather: bool = False
    optimizer: str = "adam"
    """adam, sgd, muon …"""
    distributed_optimizer: bool = False
    precision_aware_optimizer: bool = False
    main_params_bytes: float = 4
    main_grads_bytes: float = 4
    exp_avg_bytes: float = 4
    exp_avg_sq_bytes: float = 4
    """Bytes per parameter of the optimizer's tensors (all four fields above)."""
    optimizer_offload_fraction: float = 0.0
    """Share of the optimizer states kept in host memory."""
    grad_bytes: float = 4
    """Bytes per parameter of the gradient buffer: 4 (fp32 accumulation) or 2."""
    grad_reduce_bytes: float = 4
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    tp_comm_overlap: bool = False
    overlap_p2p: bool = True
    """p2p overlap when interleaving (Megatron drops it without vpp)."""
    scatter_gather: bool = False
    """Without sequence parallelism: tp ranks send a part each and gather it (Megatron before its core)."""
    flash_attention: bool = True
    """A fused attention kernel that keeps no S x S matrix."""
    softmax_fusion: bool = True
    """Without a flash kernel: mask, scale and softmax in one kernel (``--no-masked-softmax-fusion`` is False)."""
    transformer_engine: bool = True
    cp_comm_type: str = "p2p"
    dispatcher: str = "allgather"
    """MoE token dispatcher: allgather, alltoall or flex."""
    flex_backend: str = "deepep"
    grouped_gemm: bool = False
    router_dtype: str | None = None
    permute_fusion: bool = False
    shared_expert_overlap: bool = False
    overlap_moe_comm: bool = False
    """EP all-to-all overlapped with compute (``--overlap-moe-expert-parallel-comm``)."""
    delay_wgrad: bool = False
    cuda_graphs: str = "none"
    """What CUDA graphs capture: none, layers (the static part of each), or full (a whole iteration)."""
    cross_entropy_fusion: bool = False
    per_token_loss: bool = False
    microbatch_group_size: int | None = None
    imbalance: float | None = None
    """rho, the hottest rank's share over the mean (``--imbalance``); None: balanced is ASSUMED."""
    imbalance_by_ep: tuple[tuple[int, float], ...] = ()
    """(ep, rho) of a routing profile (``--routing``); it goes before ``imbalance``."""
    megatron_version: str | None = None
    software_date: float | None = None
    """Release of Megatron and Transformer Engine as a fraction of a year (2025.9); None: today's."""


class Present(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parallel configuration as it stands in the script; a plan replaces it."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    """None: not given, Megatron takes tp."""
    pp: int = 1
    vpp: int = 1
    layers_per_virtual_stage: int | None = None
    micro_batch_size: int | None = None
    sequence_parallel: bool = False
    layout: str | None = None
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    account_for_embedding: bool = False
    account_for_loss: bool = False
    recompute: Recompute = Recompute()
    world_size: int | None = None
    nodes: int | None = None
    devices_per_node: int | None = None


class Argument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One word of the training entry's argument vector."""

    text: str | None
    """None: not known before the run (a date, a port) or secret."""
    why: str = ""
    source: str = ""
    """The shell text that makes it, for re-emission."""
    where: str = ""
    owner: str = "user"
    """``user``: kept verbatim; ``plan``: the plan decides it, dropped and emitted anew."""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that planning needs to know of a training job."""

    name: str
    model: ModelSpec
    training: Training
    present: Present
    entry: str
    """The training program (``pretrain_gpt.py``)."""
    entry_is_module: bool = False
    argv: tuple[Argument, ...] = ()
    """The entry's whole argument vector, in order."""
    env: dict[str, Argument] = {}
    """Variables that the script exports, in order."""
    launcher: str = ""
    script: str = ""
    origin: dict[str, str] = {}
    """Per field (``model.hidden``): ``train.sh:12``, ``default``, ``option --vocab-size`` …"""
    notes: tuple[str, ...] = ()
    """What the user should know: missing vocabulary, ignored flags."""
    sha256: str = ""
