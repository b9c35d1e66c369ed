"""What a Transformer is: shapes only. Counting parameters and FLOPs is ``workload``'s work.

Words: ``layer`` is one decoder layer, dense or MoE; embedding, head and multi-token-prediction
(MTP) layers are counted apart. ``hidden`` is the model width, ``ffn_hidden`` the width of the MLP.
"""

from __future__ import annotations

import msgspec

__all__ = ["Mla", "ModelSpec", "Moe"]


class Mla(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Multi-latent attention (DeepSeek-V2, arXiv 2405.04434): low-rank q and kv."""

    q_lora: int | None
    """Rank of the query projection; None: full-rank queries."""
    kv_lora: int
    qk_nope: int
    """Width per head of the part of q and k without rotary embedding."""
    qk_rope: int
    v: int
    """Width per head of v."""


class Moe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Experts of the MoE layers."""

    num_experts: int
    top_k: int
    ffn_hidden: int
    """Width of one expert."""
    shared_ffn_hidden: int = 0
    """Width of the shared expert; 0: none."""
    router_groups: int = 0
    """Groups of experts of which the router first chooses ``group_top_k``; 0: it chooses among all experts."""
    group_top_k: int = 0
    pattern: tuple[bool, ...] = ()
    """Per decoder layer: does it hold experts? Length ``num_layers``."""
    capacity_factor: float | None = None
    pad_to_capacity: bool = False
    latent_hidden: int | None = None
    """Width of the tokens that experts see when it is not ``hidden`` (latent MoE)."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One decoder-only model."""

    num_layers: int
    """Decoder layers, without MTP layers."""
    hidden: int
    num_heads: int
    num_kv_heads: int
    """Key/value heads (``num_heads`` without grouped queries); unused with MLA."""
    head_dim: int
    ffn_hidden: int
    """Width of the dense MLP."""
    gated: bool = True
    """SwiGLU and relatives: two input projections."""
    vocab_size: int = 0
    """Tokens before padding; 0: not known (the script does not say)."""
    padded_vocab_size: int | None = None
    """Fixed padded size (``--padded-vocab-size``); None: padded to ``vocab_divisor * tp``."""
    vocab_divisor: int = 128
    tied_embeddings: bool = False
    learned_positions: int = 0
    """Rows of a learned position embedding; 0: rotary or none."""
    linear_bias: bool = False
    qkv_bias: bool = False
    qk_layernorm: bool = False
    layernorm_bias: bool = False
    """LayerNorm (weight and bias) rather than RMSNorm (weight)."""
    attention_window: int | None = None
    """Sliding-window width in tokens; None: full causal attention."""
    window_pattern: tuple[bool, ...] = ()
    """Per decoder layer: does it use ``attention_window``? Empty: all do if there is one."""
    mla: Mla | None = None
    moe: Moe | None = None
    mtp_layers: int = 0

    @property
    def moe_pattern(self) -> tuple[bool, ...]:
        """Per decoder layer: is it an MoE layer?"""
        return self.moe.pattern if self.moe else (False,) * self.num_layers

    def padded_vocab(self, tp: int) -> int:
        """Rows of the embedding at ``tp``, as Megatron pads it (training/vocab_utils.py:58)."""
        if self.padded_vocab_size is not None:
            return self.padded_vocab_size
        multiple = self.vocab_divisor * tp
        return -(-self.vocab_size // multiple) * multiple
