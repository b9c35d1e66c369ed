"""Small jobs over all degrees, dispatchers, recomputations and layouts, for ``bench.volumes``."""

from __future__ import annotations

from bench.lab import BLOCK, CORE, MOE, Case
from hapmoe.plan import Recompute

__all__ = ["CASES"]

Flags = dict[str, str | bool | None]

# Megatron's default, which the model assumes: without a flash kernel the dropped scores are kept too.
_DROPOUT: Flags = {"--attention-dropout": "0.1"}
_ALLGATHER: Flags = {"--moe-token-dispatcher-type": "allgather"}
_DISTRIBUTED: Flags = {"--use-distributed-optimizer": None}
_OVERLAPPED: Flags = {**_DISTRIBUTED, "--overlap-grad-reduce": None, "--overlap-param-gather": None}
_DENSE: Flags = {
    "--num-experts": False,
    "--moe-ffn-hidden-size": False,
    "--moe-router-topk": False,
    "--moe-router-load-balancing-type": False,
    "--moe-token-dispatcher-type": False,
}
_GQA: Flags = {"--group-query-attention": None, "--num-query-groups": "2"}
_GPT2: Flags = {
    **_DENSE,
    "--normalization": "LayerNorm",
    "--swiglu": False,
    "--disable-bias-linear": False,
    "--position-embedding-type": "learned_absolute",
    "--untie-embeddings-and-output-weights": False,
}
_TIED: Flags = {"--untie-embeddings-and-output-weights": False}
_MLA: Flags = {
    "--multi-latent-attention": None,
    "--q-lora-rank": "32",
    "--kv-lora-rank": "16",
    "--qk-head-dim": "16",
    "--qk-pos-emb-head-dim": "8",
    "--v-head-dim": "16",
    "--qk-layernorm": None,
}
_SHARED: Flags = {"--moe-shared-expert-intermediate-size": "64"}
_MIXED: Flags = {"--moe-layer-freq": "[0,1,1,1]"}
_AUX: Flags = {"--moe-router-load-balancing-type": "aux_loss", "--moe-aux-loss-coeff": "0.01"}
# Megatron's local attention refuses context parallelism, and rules stop such a launcher: these scripts ask for
# Transformer Engine, and the lab's own attention stands in for it.
_CP: Flags = {"--transformer-impl": "transformer_engine", "--cp-comm-type": "all_gather"}
_PADDED: Flags = {"--moe-expert-capacity-factor": "1.0", "--moe-pad-expert-input-to-capacity": None}
_BF16: Flags = {"--bf16": None, "--moe-router-dtype": "fp32"}
_MLP = Recompute(granularity="selective", modules=("mlp",))
_UNIFORM = Recompute(granularity="full", method="uniform", num_layers=2)
_SHARED_AGAIN = Recompute(granularity="selective", modules=("shared_experts", "core_attn"))


def _case(name: str, *flags: Flags, **plan: object) -> Case:
    merged: Flags = {}
    for one in (_DROPOUT, *flags):
        merged |= one
    return Case(name, flags=merged, **plan)  # type: ignore[arg-type]


CASES: tuple[Case, ...] = (
    _case("moe", layers=(4,)),
    _case("dense, grouped queries", _DENSE, _GQA),
    _case("GPT-2: LayerNorm, biases, learned positions, tied", _GPT2),
    _case("MLA, shared expert, dense first", _MLA, _SHARED, _MIXED),
    _case("full block 2", recompute=(Recompute(granularity="full", method="block", num_layers=2),)),
    _case("tp2 dense", _DENSE, tp=2),
    _case("tp2 dense without sequence parallelism", _DENSE, {"--tensor-model-parallel-size": "2"}, tp=2),
    _case("tp4 dense", _DENSE, tp=4),
    _case("tp2 GPT-2", _GPT2, tp=2),
    _case("tp2 etp2 alltoall", tp=2, etp=2),
    _case("tp2 ep2 alltoall", tp=2, ep=2),
    _case("tp2 ep2 allgather", _ALLGATHER, tp=2, ep=2),
    _case("tp2 dp2 ep2 etp2 alltoall", tp=2, dp=2, ep=2, etp=2),
    _case("tp2 dp2 ep2 etp2 allgather", _ALLGATHER, tp=2, dp=2, ep=2, etp=2),
    _case("tp2 dp2 ep4 allgather", _ALLGATHER, tp=2, dp=2, ep=4),
    _case("ep2 dp2 alltoall", ep=2, dp=2),
    _case("ep4 dp4 alltoall, distributed optimizer", _DISTRIBUTED, ep=4, dp=4),
    _case("ep2 dp4 alltoall, distributed, overlapped", _OVERLAPPED, ep=2, dp=4),
    _case("dp2 dense, distributed", _DENSE, _DISTRIBUTED, dp=2),
    _case("ep2 dp2 mbs2 allgather", _ALLGATHER, ep=2, dp=2, mbs=2),
    _case("pp2 3/1", layers=(3, 1)),
    _case("pp4", layers=(1, 1, 1, 1)),
    _case("pp2 vpp2", layers=(2, 2), vpp=2),
    _case("pp2 vpp2 ep2 dp2, full block 1", layers=(2, 2), vpp=2, ep=2, dp=2, recompute=(BLOCK,)),
    _case("pp2 ep2 dp2, moe / full block 1", layers=(2, 2), ep=2, dp=2, recompute=(MOE, BLOCK)),
    _case("pp2 tp2 etp2, core_attn", layers=(1, 3), tp=2, etp=2, recompute=(CORE,)),
    _case("pp2 tp2 ep2 allgather, moe / none", _ALLGATHER, layers=(1, 3), tp=2, ep=2, recompute=(MOE, Recompute())),
    _case("pp2, full uniform 2", layers=(2, 2), recompute=(_UNIFORM,)),
    _case("pp2 dense first, mlp", _MIXED, layers=(2, 2), recompute=(_MLP,)),
    _case("cp2 ep2 alltoall", _CP, cp=2, ep=2),
    _case("cp2 tp2 dense", _CP, _DENSE, cp=2, tp=2),
    _case("pp2 cp2 ep2, distributed", _CP, _DISTRIBUTED, layers=(2, 2), cp=2, ep=2),
    _case("tp2 ep2, auxiliary loss", _AUX, tp=2, ep=2),
    _case("tp2 ep2, shared expert", _SHARED, tp=2, ep=2),
    _case("pp2 tp2 ep2, shared expert again", _SHARED, layers=(2, 2), tp=2, ep=2, recompute=(_SHARED_AGAIN,)),
    _case("ep2 dp2, MLA", _MLA, ep=2, dp=2),
    _case("pp2 tied", _TIED, layers=(2, 2)),
    _case("ep2 dp2, padded to capacity", _PADDED, ep=2, dp=2),
    _case("pp2 ep2 dp2, loss per token", {"--calculate-per-token-loss": None}, layers=(2, 2), ep=2, dp=2),
    _case("ep2 dp2, bf16, fp32 router, allgather", _BF16, _ALLGATHER, _DISTRIBUTED, ep=2, dp=2),
    _case("tp2 ep2 pp2, bf16, fp32 router", _BF16, layers=(2, 2), tp=2, ep=2),
    _case("pp2 MTP", {"--mtp-num-layers": "1"}, layers=(3, 1)),
)
